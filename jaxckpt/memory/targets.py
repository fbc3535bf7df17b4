"""What to compile for: this machine, or a GPU or TPU that is not in this machine.

The compilers for NVIDIA GPUs and for TPUs run on any machine. So a laptop can measure the memory that a step needs on
an H100. What differs between platforms is in `jaxckpt.memory.platforms`, and what differs between chips is in
`jaxckpt.memory.chips`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, MissingTargetError, UnknownTargetError, did_you_mean
from jaxckpt._quiet import quiet
from jaxckpt.core.argument_names import items
from jaxckpt.core.units import as_int, format_bytes
from jaxckpt.memory.chips import CHIPS, Chip
from jaxckpt.memory.platforms import PLATFORMS, Place, Platform


@dataclass(frozen=True)
class Target:
    """What to compile for.

    - "cpu", "cuda", "tpu": the devices of this machine (`local`).
    - "cuda:h100", "cuda:h200", "cuda:b200", "cuda:gb200", "cuda:a100": a GPU, also one that you do not have.
      "cuda:h100x8": eight on one host.
    - "tpu:v5e:2x2", "tpu:v5p:4x4x4", "tpu:v6e:2x2", "tpu:v4:2x2x1": a slice of TPUs. "tpu:v5e" means the smallest
      slice, one host.

    Targets with equal names are equal. Making a target uses no device. If its compiler is not installed, `devices`
    raises.

    Attributes:
      name: as above, in lower case.

    Raises:
      UnknownTargetError: there is no target with that name.

    >>> target = Target("cuda:h100x8")
    >>> target.platform, target.count, target.local
    ('cuda', 8, False)
    >>> target.flops["bfloat16"] / target.bandwidth > 250  # FLOPs that an H100 does while it reads one byte
    True
    """

    name: str

    def __post_init__(self) -> None:
        parts = _parse(self.name) if isinstance(self.name, str) else None
        if parts is None:
            raise UnknownTargetError(f"there is no target {self.name!r}. {_nearest(str(self.name).lower())}")
        object.__setattr__(self, "name", parts.name)

    @property
    def platform(self) -> str:
        """Name of the platform: "cpu", "cuda" or "tpu"; see `jaxckpt.memory.platforms`."""
        return self._parts.platform.name

    @property
    def local(self) -> bool:
        """Whether it is a backend of this machine, on which a program can also run."""
        return self._parts.place is None

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Its devices; compile-only devices if the target is not local. They are made at first use, which takes up to a
        second.

        Raises:
          MissingTargetError: the compiler for the target is not installed, or there is no such local device.
          UnknownTargetError: such a slice of TPUs cannot be made.
          TargetError: libtpu does not start.
        """
        return _devices(self.name, self.row_text)

    @property
    def count(self) -> int:
        """Number of devices. Asks the backend only if the target is local."""
        place = self._parts.place
        return len(self.devices) if place is None else place.count

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that one device has for a program; for the CPU, the machine's physical memory."""
        if self.local and (limit := self._parts.platform.local_memory(lambda: self.devices)):
            return int(limit)
        return self._chip.memory_bytes

    @property
    def flops(self) -> Mapping[str, float]:
        """FLOP/s of dense matmuls on one device by name of dtype: "float32", "bfloat16", "float16", "int8",
        "float8_e4m3fn" ...
        """
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
    def host_is_apart(self) -> bool:
        """Whether host memory is another one than the device's: not on a CPU."""
        return PLATFORMS[self.platform].host_is_apart

    @property
    def hidden_transfers(self) -> float:
        """Which part of the transfers between device and host runs beside other work outside of loops: none on a GPU,
        those to the host on a TPU.
        """
        return PLATFORMS[self.platform].hidden_transfers

    @property
    def link_bandwidth(self) -> float:
        """Bandwidth from one device to others along one axis of a mesh in bytes/s, in one direction."""
        return self._chip.link_bandwidth

    @property
    def clock(self) -> float:
        """Hz of the cycles that the compiler's own cost model counts, on a TPU; 0 where a compiler tells none."""
        return self._chip.clock

    def mesh(self, shape: Sequence[int], names: Sequence[str], axis_types: Any = None) -> jax.sharding.Mesh:
        """Returns a mesh of all devices, for the shardings of arguments. Each axis is an axis of a slice of TPUs, or a
        product of some, where that is possible; otherwise axes of the slice are split.

        Args:
          shape: size of each axis; their product is the number of devices.
          names: a name for each axis.
          axis_types: as in `jax.sharding.Mesh`; None for its default.

        Raises:
          ArgumentError: the product of the sizes is not the number of devices, or an axis has no name.
        """
        sizes, called, devices = items(shape), items(names), self.devices
        if sizes is None or not all(as_int(size) is not None for size in sizes):
            raise ArgumentError("shape", "a size for each axis, such as (2, 4)", shape)
        if called is None:
            raise ArgumentError("names", 'a name for each axis, such as ("data", "model")', names)
        shape, names = sizes, called
        if math.prod(shape) != len(devices) or len(names) != len(shape):
            raise ArgumentError(
                "shape",
                f"sizes for {len(names)} axes whose product is the {len(devices)} devices of {self.name}",
                shape,
            )
        return jax.sharding.Mesh(_laid_out(shape, list(devices)), names, axis_types=axis_types)

    @property
    def row_text(self) -> str:
        """All figures of its chip, as text; "" for the devices of this machine, which are as they are."""
        place = self._parts.place
        return "" if place is None else repr(CHIPS[place.chip])

    @property
    def _parts(self) -> _Parts:
        parts = _parse(self.name)
        assert parts is not None, "__post_init__ has made sure"
        return parts

    @property
    def _chip(self) -> Chip:
        if self._parts.place is not None:
            return CHIPS[self._parts.place.chip]
        chip = self._parts.platform.local_chip(lambda: self.devices)
        if chip is None:
            kind = self.devices[0].device_kind
            raise UnknownTargetError(f"jaxckpt has no rates for the local device {kind!r}; its memory can be measured.")
        return chip

    def __str__(self) -> str:
        return self.name


def _laid_out(shape: tuple[int, ...], devices: list[jax.Device]) -> Any:
    """Returns the devices as an array of a shape."""
    try:
        return _compat.create_device_mesh(shape, devices)
    except NotImplementedError:  # an axis is none of the slice's, and no product of them
        return _compat.create_device_mesh(shape, devices, allow_split_physical_axes=True)


@dataclass(frozen=True)
class _Parts:
    """The parts of a target's name. The place is None for the devices of this machine."""

    name: str
    platform: Platform
    place: Place | None = None


def _parse(name: str) -> _Parts | None:
    head, colon, rest = name.strip().lower().partition(":")
    platform = PLATFORMS.get(head)
    if platform is None:
        return None
    if not colon:
        return _Parts(head, platform)
    place = platform.parse(rest)
    if place is None or place.chip not in CHIPS or CHIPS[place.chip].platform != head:
        return None
    return _Parts(f"{head}:{place.name}", platform, place)


def target_of(target: Target | str | None = None) -> Target:
    """Returns the target for a target, a name, or None, which means JAX's default backend on this machine.

    Raises:
      UnknownTargetError: there is no target of that name, or JAX's default backend is not a CPU, an NVIDIA GPU or a
        TPU.
    """
    if isinstance(target, Target):
        return target
    if target is not None:
        return Target(target)
    start_backend()
    backend = jax.default_backend()
    for platform in PLATFORMS.values():
        if platform.backend == backend:
            return Target(platform.name)
    raise UnknownTargetError(f"JAX's default backend here is {backend!r}; jaxckpt knows {', '.join(PLATFORMS)}.")


def start_backend() -> None:
    """Makes JAX initialise its backends, without the messages of backends that find no device."""
    with quiet():
        jax.devices()


def compiler_options(target: Target | str | None = None) -> dict[str, str]:
    """Returns the `compiler_options` of `jax.jit` that checkpointing needs on a target.

    For most targets there are none. The CPU backend of jax 0.10 merges the recomputation with the forward pass in
    unrolled layers (not in a scan), and checkpointing then saves nothing. These options prevent that. The time of a
    step does not change.

    >>> compiler_options("cuda:h100")
    {}
    """
    return PLATFORMS[target_of(target).platform].options()


# --------------------------------------------------------------------------------------------------- what there is here


@dataclass(frozen=True)
class TargetStatus:
    """Whether a target can be compiled for on this machine.

    Attributes:
      name: name of the target, as for `Target`.
      available: whether it can be compiled for.
      reason: what is missing, and what to do; "" if nothing is missing.
      memory_bytes: bytes of memory of one device; None if there is no such local device.
    """

    name: str
    available: bool
    reason: str
    memory_bytes: int | None


class TargetTable(tuple[TargetStatus, ...]):
    """All targets, printed as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [
            (s.name, format_bytes(s.memory_bytes) if s.memory_bytes else "", "yes" if s.available else s.reason)
            for s in self
        ]
        rows.insert(0, ("target", "memory", "can be compiled for"))
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{name:<{widths[0]}}  {memory:>{widths[1]}}  {state}" for name, memory, state in rows)


def _nearest(name: str) -> str:
    """Returns a sentence with the targets that a name may mean."""
    if name in ("gpu", "nvidia"):  # JAX's name of the backend
        return "An NVIDIA GPU is 'cuda'; one that need not be here is named with its chip, such as 'cuda:h100'."
    if (several := re.fullmatch(r"(cuda:\w+):(\d+)", name)) and several[1] in known():
        return f"Several GPUs are '{several[1]}x{several[2]}'."
    return did_you_mean(name, known())


def known() -> tuple[str, ...]:
    """Returns the names of all targets; each is one GPU or one host of TPUs."""
    names: list[str] = []
    for name, platform in PLATFORMS.items():
        chips = [chip for chip, row in CHIPS.items() if row.platform == name]
        names += [name, *(f"{name}:{platform.smallest(chip)}" for chip in chips)]
    return tuple(names)


def targets() -> TargetTable:
    """Returns whether each target can be compiled for on this machine and, if not, what to install.

    A target may also have several GPUs or TPUs: "cuda:h100x8", "tpu:v5p:4x4x4".
    """
    table = []
    for name in known():
        target, reason, memory = Target(name), "", None
        try:
            memory = target.memory_bytes
            if not target.local:
                _require(target._parts.platform, name)
        except (MissingTargetError, UnknownTargetError) as error:
            reason = str(error)
        table.append(TargetStatus(name, not reason, reason, memory))
    return TargetTable(table)


def _require(platform: Platform, name: str) -> None:
    """Raises MissingTargetError if the compiler for a platform is not installed. Does not import it."""
    if missing := platform.missing():
        raise MissingTargetError(f'to compile for {name}, {missing} is needed: pip install "jaxckpt[{platform.extra}]"')


# -------------------------------------------------------------------------------------------------------------- devices


@functools.cache
def _devices(name: str, row: str) -> tuple[Any, ...]:
    """Returns a target's devices; `row` as of `Target.row_text`: a program may give a name another row."""
    parts = Target(name)._parts
    if parts.place is None:
        return _local_devices(parts.platform)
    _require(parts.platform, name)
    with quiet():
        return parts.platform.devices(parts.place)


def _local_devices(platform: Platform) -> tuple[Any, ...]:
    try:
        with quiet():
            return platform.local_devices()
    except RuntimeError as error:
        message = f"JAX finds no {platform.name} device in this machine."
        elsewhere = next((name for name in known() if name.startswith(f"{platform.name}:")), None)
        if elsewhere is not None:
            message += (
                f' If there is one: pip install "jaxckpt[{platform.local_extra}]". To compile for one elsewhere, '
                f"name it: "
                f"{elsewhere!r}."
            )
        raise MissingTargetError(message) from error
