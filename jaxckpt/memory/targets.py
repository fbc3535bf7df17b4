"""What to compile for: this machine, or a GPU or TPU that is not here.

The compilers for NVIDIA GPUs and for TPUs run anywhere, and so one learns on a laptop what a step will need on an H100. For a GPU the
compiler wants a description of it, which is rendered from the table in `chips`; libtpu knows its chips itself.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, MissingTargetError, TargetError, UnknownTargetError, did_you_mean
from jaxckpt._quiet import quiet, tpu_visible
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.chips import CHIPS, Chip, cpu, target_config

_NAME = re.compile(r"(?:(cpu|cuda|tpu)|cuda:(\w+?)(?:x(\d+))?|tpu:(\w+)(?::(\d+(?:x\d+){1,2}))?)")


@dataclass(frozen=True)
class Target:
    """What to compile for.

    - "cpu", "cuda", "tpu": the devices of this machine (`local`);
    - "cuda:h100", "cuda:h200", "cuda:a100": a GPU that need not be here; eight of them on one host: "cuda:h100x8";
    - "tpu:v5e:2x2", "tpu:v5p:4x4x4", "tpu:v6e:2x2", "tpu:v4:2x2x1": a slice of TPUs; "tpu:v5e" alone means the smallest, one host.

    Equal names are equal targets. Making one touches no device; an error about what is not installed comes from `devices`.

    Attributes:
      name: as above, in lower case.

    Raises:
      UnknownTargetError: no target bears that name.

    >>> target = Target("cuda:h100x8")
    >>> target.platform, target.count, target.local
    ('cuda', 8, False)
    >>> target.flops["bfloat16"] / target.bandwidth > 250  # FLOPs a byte that an H100 can do while it reads that byte
    True
    """

    name: str

    def __post_init__(self) -> None:
        parts = _parse(self.name) if isinstance(self.name, str) else None
        if parts is None:
            raise UnknownTargetError(
                f"there is no target {self.name!r}. {did_you_mean(str(self.name).lower(), known())}"
            )
        object.__setattr__(self, "name", parts.name)

    @property
    def platform(self) -> str:
        """XLA's platform: "cpu", "cuda" or "tpu"."""
        return self._parts.platform

    @property
    def local(self) -> bool:
        """Whether it is this machine's own backend, on which a program can also run."""
        return self._parts.chip is None

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Its devices, compile-only ones where the target is not local. Made at first use, which takes up to a second.

        Raises:
          MissingTargetError: what compiles for it is not installed, or the local device is not there.
          UnknownTargetError: no such slice of TPUs can be made.
          TargetError: libtpu does not start.
        """
        return _devices(self.name)

    @property
    def count(self) -> int:
        """How many devices it has. Asks the backend only where the target is local."""
        return self._parts.count or len(self.devices)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that one device has for a program; of the CPU, the machine's physical memory."""
        if self.local and self.platform != "cpu":
            limit = (self.devices[0].memory_stats() or {}).get("bytes_limit")
            if limit:
                return int(limit)
        return self._chip.memory_bytes

    @property
    def flops(self) -> Mapping[str, float]:
        """FLOP/s of dense matmuls on one device by name of dtype: "float32", "bfloat16", "float16", "int8", "float8_e4m3fn" ..."""
        return self._chip.flops

    @property
    def bandwidth(self) -> float:
        """Bandwidth of one device's main memory in bytes/s."""
        return self._chip.bandwidth

    @property
    def host_bandwidth(self) -> float:
        """Bandwidth between one device and host memory in bytes/s, in one direction."""
        return self._chip.host_bandwidth

    @property
    def link_bandwidth(self) -> float:
        """Bandwidth from one device to others along one axis of a mesh in bytes/s, in one direction."""
        return self._chip.link_bandwidth

    def mesh(self, shape: Sequence[int], names: Sequence[str], axis_types: Any = None) -> jax.sharding.Mesh:
        """Returns a mesh of all its devices, for the shardings of arguments.

        Args:
          shape: size of each axis; their product is the number of devices.
          names: a name for each axis.
          axis_types: as `jax.sharding.Mesh` takes them; None for its default.

        Raises:
          ArgumentError: the sizes do not multiply to the number of devices, or there is not a name for each.
        """
        shape, names, devices = tuple(shape), tuple(names), self.devices
        if math.prod(shape) != len(devices) or len(names) != len(shape):
            raise ArgumentError(
                "shape",
                f"sizes for {len(names)} axes whose product is the {len(devices)} devices of {self.name}",
                shape,
            )
        return jax.sharding.Mesh(_compat.create_device_mesh(shape, list(devices)), names, axis_types=axis_types)

    @property
    def _parts(self) -> _Parts:
        parts = _parse(self.name)
        assert parts is not None, "__post_init__ has made sure"
        return parts

    @property
    def _chip(self) -> Chip:
        if self.name == "cpu":
            return cpu()
        if self._parts.chip:
            return CHIPS[self._parts.chip]
        kind = self.devices[0].device_kind
        for chip in CHIPS.values():
            if chip.platform == self.platform and re.search(chip.kind, kind):
                return chip
        raise UnknownTargetError(f"jaxckpt knows no rates of the local device {kind!r}; its memory can be measured.")

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Parts:
    """What a name says; chip and count are None for this machine's own devices."""

    name: str
    platform: str
    chip: str | None = None
    count: int | None = None


@functools.cache
def _parse(name: str) -> _Parts | None:
    found = _NAME.fullmatch(name.strip().lower())
    if found is None:
        return None
    local, gpu, count, tpu, dimensions = found.groups()
    if local:
        return _Parts(local, local)
    platform, chip = ("cuda", gpu) if gpu else ("tpu", tpu)
    if chip not in CHIPS or CHIPS[chip].platform != platform:
        return None
    if gpu:
        number = int(count or 1)
        return _Parts(f"cuda:{chip}" + (f"x{number}" if number > 1 else ""), platform, chip, number) if number else None
    dimensions = dimensions or CHIPS[chip].slice
    return _Parts(f"tpu:{chip}:{dimensions}", platform, chip, math.prod(map(int, dimensions.split("x"))))


def resolve(target: Target | str | None = None) -> Target:
    """Returns a target from itself, its name, or None: JAX's default backend of this machine.

    Raises:
      UnknownTargetError: there is none of that name, or JAX's default backend is neither CPU, GPU by NVIDIA nor TPU.
    """
    if isinstance(target, Target):
        return target
    if target is not None:
        return Target(target)
    start_backend()
    platform = jax.default_backend()
    names = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
    if platform not in names:
        raise UnknownTargetError(
            f"JAX's default backend here is {platform!r}; jaxckpt knows {', '.join(dict.fromkeys(names.values()))}."
        )
    return Target(names[platform])


def start_backend() -> None:
    """Has JAX initialise its backends, if it has not, without the complaints of those that find no device."""
    with quiet():
        jax.devices()


def compiler_options(target: Target | str | None = None) -> dict[str, str]:
    """Returns what `jax.jit(..., compiler_options=...)` needs on a target for checkpointing to hold.

    Empty on most. The CPU backend of jax 0.10 merges the recomputation with what it was to replace, where layers are written out one
    after another (not in a scan): there, these options save the memory that checkpointing is for, and time stays the same.

    >>> compiler_options("cuda:h100")
    {}
    """
    return _compat.checkpoint_options(resolve(target).platform)


# ------------------------------------------------------------------------------------------------------ what there is here


@dataclass(frozen=True)
class TargetStatus:
    """Whether a target can be compiled for here.

    Attributes:
      name: of the target, as `Target` takes it.
      available: whether it can be compiled for.
      reason: what is missing, and what to do about it; "" where nothing is.
      memory_bytes: memory of one device; None for a local device that is not there.
    """

    name: str
    available: bool
    reason: str
    memory_bytes: int | None


class TargetTable(tuple[TargetStatus, ...]):
    """All targets; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [
            (s.name, format_bytes(s.memory_bytes) if s.memory_bytes else "", "yes" if s.available else s.reason)
            for s in self
        ]
        rows.insert(0, ("target", "memory", "can be compiled for"))
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{name:<{widths[0]}}  {memory:>{widths[1]}}  {state}" for name, memory, state in rows)


def known() -> tuple[str, ...]:
    """Returns the names of all targets, one GPU or one host of TPUs each."""
    chips = [":".join(filter(None, (chip.platform, name, chip.slice))) for name, chip in CHIPS.items()]
    return (
        "cpu",
        "cuda",
        *(c for c in chips if c.startswith("cuda")),
        "tpu",
        *(c for c in chips if c.startswith("tpu")),
    )


def targets() -> TargetTable:
    """Returns for each target whether it can be compiled for here and, if not, what to install.

    GPUs and TPUs may also be several: "cuda:h100x8", "tpu:v5p:4x4x4".
    """
    table = []
    for name in known():
        target, reason, memory = Target(name), "", None
        try:
            memory = target.memory_bytes
            if not target.local:
                _require(target.platform, name)
        except (MissingTargetError, UnknownTargetError) as error:
            reason = str(error)
        table.append(TargetStatus(name, not reason, reason, memory))
    return TargetTable(table)


def _require(platform: str, name: str) -> None:
    """Raises MissingTargetError where the compiler for a platform is not installed; imports none of it."""
    extra = {"cuda": "aot-cuda", "tpu": "aot-tpu"}[platform]
    if platform == "cuda":
        assembler = shutil.which("ptxas") or any(_installed(f"nvidia.{module}") for module in ("cuda_nvcc", "cu13"))
        missing = (
            "JAX's CUDA plugin" if _compat.cuda_plugin() is None else "" if assembler else "NVIDIA's assembler ptxas"
        )
    else:
        missing = "" if _installed("libtpu") or os.environ.get("TPU_LIBRARY_PATH") else "libtpu"
    if missing:
        raise MissingTargetError(f'to compile for {name}, {missing} is needed: pip install "jaxckpt[{extra}]"')


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package
        return False


# ---------------------------------------------------------------------------------------------------------------- devices


@functools.cache
def _devices(name: str) -> tuple[Any, ...]:
    target = Target(name)
    chip = target._parts.chip
    if chip is None:
        return _local_devices(target.platform)
    _require(target.platform, name)
    with quiet():
        if target.platform == "cuda":
            return _compat.cuda_topology(chip, target_config(CHIPS[chip]), target.count)
        # TPUs come in hosts of four; without being told, libtpu of jax 0.10 makes no slice that is less than a host. A v4 chip is two
        # devices, unless it is told to be one ("megacore"), as it is in practice.
        options: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if target.count == 1 else {}
        if chip == "v4":
            options["chip_config_name"] = "megacore"
        try:
            return _compat.tpu_topology(name.removeprefix("tpu:"), shared=not tpu_visible(), **options)
        except jax.errors.JaxRuntimeError as error:
            kind = UnknownTargetError if str(error).startswith("INVALID_ARGUMENT") else TargetError
            raise kind(f"libtpu makes no slice {name!r}: {_first_line(error)}") from error


def _local_devices(platform: str) -> tuple[Any, ...]:
    try:
        with quiet():
            return tuple(jax.devices(platform))
    except RuntimeError as error:
        message = f"JAX finds no {platform} device in this machine."
        if platform != "cpu":
            extra = {"cuda": "cuda12", "tpu": "aot-tpu"}[platform]
            elsewhere = next(name for name in known() if name.startswith(f"{platform}:"))
            message += f' If there is one: pip install "jaxckpt[{extra}]". To compile for one elsewhere, name it: {elsewhere!r}.'
        raise MissingTargetError(message) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
