"""Compile a function, and read the memory that it needs from the compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxckpt import _compat
from jaxckpt._errors import (
    ArgumentError,
    DoesNotFitError,
    InWords,
    TargetError,
    UnknownTargetError,
    UnreadableDumpError,
    check_flags,
    explains,
)
from jaxckpt.core import lift, shown, surgery
from jaxckpt.core.argument_names import named_leaves, of_leaf
from jaxckpt.core.constants import NEARLY_FULL
from jaxckpt.core.shown import Progress, tells
from jaxckpt.core.units import counted, format_bytes
from jaxckpt.memory import assign
from jaxckpt.memory import cache as results
from jaxckpt.memory.buffers import Assignment, Buffer, Lifetime, Space, Timeline
from jaxckpt.memory.collectives import CompiledCollective, total
from jaxckpt.memory.dump import largest_dump, read_dump
from jaxckpt.memory.platforms import PLATFORMS
from jaxckpt.memory.platforms.base import Figures
from jaxckpt.memory.targets import Target, start_backend, target_of
from jaxckpt.memory.targets import compiler_options as options_for

logger = logging.getLogger("jaxckpt")

SMALL_SHARE = 0.2
"""If temporaries are less than this share of the peak, `MemoryReport.advice` says that checkpointing can save
little.
"""


@dataclass(frozen=True)
class MemoryReport:
    """The memory that one device needs to run a compiled program, in bytes. It is printed as a block of text.

    Attributes:
      target: name of the target that it was compiled for.
      peak_bytes: the most memory in use at once on the device: arguments, outputs and temporaries.
        CPU: argument + output + temp - alias, because XLA's figure has no temporaries there.
        CUDA: XLA's figure. With buffers in host memory: argument + output + temp - alias, because XLA's figure then
        counts the host's temporaries instead of the device's if they are more. TPU: XLA's figure. It is arguments and
        outputs, plus the temporaries in HBM or those in the vector memory on the chip, whichever is more: see
        `on_chip_bytes`. Host memory is left out, as on CUDA.
      argument_bytes, output_bytes: bytes of arguments and of results.
      temp_bytes: bytes of temporaries. On TPU: peak - argument - output + alias, because XLA's figure has no on-chip
        memory.
      alias_bytes: bytes of outputs that are written in the place of donated arguments; both figures above count them.
      host_bytes: bytes of buffers in host memory: offloaded values.
      on_chip_bytes: bytes of the peak that are in a TPU's vector memory (VMEM, 128 MiB on v5e) and not in HBM. Not 0
        only for small programs whose temporaries fit there; their need of HBM is `main_memory_bytes`.
      main_memory_bytes: the peak in main memory only. It is `peak_bytes`, unless something is on the chip.
      code_bytes: bytes of the program. On TPU it is in HBM too, in addition to the peak; 0 elsewhere. None if no code
        was generated.
      flops: the compiler's count of FLOPs, with a loop's body counted once. None if the compiler does not count, as for
        a CUDA device that is not in this machine, or if no code was generated.
      compile_seconds: seconds that the compiler took, to the end or until buffers were assigned; without tracing and
        lowering.
      stopped: whether the compiler was stopped once it had assigned buffers: see `measure`.
    """

    target: str
    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    host_bytes: int
    on_chip_bytes: int
    main_memory_bytes: int
    code_bytes: int | None
    flops: float | None
    compile_seconds: float
    _assignment: Assignment | None = field(default=None, repr=False, compare=False)
    stopped: bool = False
    _devices: int = field(default=1, repr=False, compare=False)  # that the program runs on: the figures are of one

    def largest(self, count: int = 10) -> tuple[Buffer, ...]:
        """Returns the largest buffers that are live at the peak, the largest first."""
        return self._read_assignment().largest(count)

    @property
    def collectives(self) -> tuple[CompiledCollective, ...]:
        """What the devices send to one another, the compiler's own collectives included; none on one device."""
        return () if self._assignment is None else self._assignment.collectives

    def timeline(self) -> Timeline:
        """Returns the live bytes at each position of the compiled schedule."""
        return self._read_assignment().timeline

    def lifetimes(self) -> tuple[Lifetime, ...]:
        """Returns every buffer that `timeline` counts, with the positions of the schedule at which it is live.

        >>> import jax.numpy as jnp
        >>> report = measure(lambda x: jnp.sin(x) @ x, jnp.ones((256, 256)), target="cpu")
        >>> at = report.timeline().peak_position
        >>> live = [life for life in report.lifetimes() if life.first <= at <= life.last]
        >>> sum(life.buffer.bytes for life in live) == report.timeline().peak_bytes
        True
        """
        return self.spaces()[0].lifetimes

    def spaces(self) -> tuple[Space, ...]:
        """Returns the buffers of each memory. First those that `timeline` counts; then those of a TPU's other memory,
        and of the host's, if there are any.
        """
        return self._read_assignment().spaces

    def advice(self) -> str | None:
        """Returns a sentence that says how little checkpointing can save, if temporaries are a small share of the peak;
        else None.
        """
        if not self.peak_bytes or self.temp_bytes >= SMALL_SHARE * self.peak_bytes:
            return None
        rest = format_bytes(self.peak_bytes - self.temp_bytes)
        return (
            f"Activations are {self.temp_bytes / self.peak_bytes:.0%} of the peak: checkpointing can save at most "
            f"{format_bytes(self.temp_bytes)} of {format_bytes(self.peak_bytes)}; arguments and outputs take the "
            f"other {rest}."
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as plain values: bytes, FLOPs, seconds."""
        return {name: getattr(self, name) for name in _FIGURES}

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws live bytes over the schedule and the largest buffers at the peak to a file: .png, .svg or .pdf (extra:
        plot).
        """
        shown.save_picture(self, path)

    def to_html(self, path: str | os.PathLike[str], beside: Mapping[str, MemoryReport] | None = None) -> None:
        """Writes one self-contained page: figures, an interactive timeline of every buffer, the largest buffers at the
        peak.

        Args:
          path: the file.
          beside: name -> report of other programs, whose timelines are drawn beside this one on the same scales.

        Raises:
          ArgumentError: the folder does not exist; or `beside` is not a mapping from names to reports, or has the name
            "this program", which is this one's.
          TargetError: the compiler gave no buffer assignment that could be read.
        """
        beside = {} if beside is None else beside
        names = isinstance(beside, Mapping) and all(isinstance(name, str) for name in beside)
        if not names or not all(isinstance(report, MemoryReport) for report in beside.values()):
            raise ArgumentError("beside", "a mapping from a name to a MemoryReport, or None", beside)
        if shown.THIS in beside:
            raise ArgumentError(
                "beside", f"a mapping without the name {shown.THIS!r}, which is this one's", list(beside)
            )
        shown.save_page(self, path, beside)

    def _read_assignment(self) -> Assignment:
        if self._assignment is None:
            raise TargetError(
                f"The compiler for {self.target} gave no buffer assignment that could be read. See the log."
            )
        return self._assignment

    def _rows(self) -> list[tuple[str, str]]:
        optional = {
            "arguments reused for outputs": self.alias_bytes,
            "in host memory": self.host_bytes,
            "of the peak on the chip": self.on_chip_bytes,
            "program": self.code_bytes,
            "sent to other devices": round(total(self.collectives)),
        }
        return [
            ("peak", format_bytes(self.peak_bytes)),
            ("arguments", format_bytes(self.argument_bytes)),
            ("outputs", format_bytes(self.output_bytes)),
            ("temporaries", format_bytes(self.temp_bytes)),
            *((name, format_bytes(size)) for name, size in optional.items() if size),
            *([("FLOPs", f"{self.flops:.3g}")] if self.flops is not None else []),
            ("buffers assigned in" if self.stopped else "compiled in", f"{self.compile_seconds:.1f} s"),
        ]

    def _title(self) -> str:
        if self._devices > 1:
            return f"{self.target}, each of {self._devices} devices"
        several = False
        with contextlib.suppress(UnknownTargetError):  # of a platform that another program had added
            target = Target(self.target)
            several = not target.local and target.count > 1
        return f"{self.target}, {'per' if several else 'one'} device"

    def __str__(self) -> str:
        rows = self._rows()
        wide, deep = (max(len(row[i]) for row in rows) for i in range(2))
        lines = [self._title(), *(f"  {name:<{wide}}  {value:>{deep}}" for name, value in rows)]
        return "\n".join([*lines, *filter(None, [self.advice()])])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in self._rows()
        )
        advice = self.advice()
        caption = html.escape(self._title())
        return f"<table><caption>{caption}</caption>{rows}</table>" + (
            f"<p>{html.escape(advice)}</p>" if advice else ""
        )


_FIGURES = tuple(f.name for f in dataclasses.fields(MemoryReport) if not f.name.startswith("_"))


@explains
@tells("tracing the function")
def measure(
    fun: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    generate_code: bool = True,
    cache: str | os.PathLike[str] | bool | None = None,
    progress: Progress | bool | None = None,
) -> MemoryReport:
    """Compiles a function for a target, and returns the memory that it needs. It runs nothing. Only a local target
    needs a device.

    Args:
      fun: a function, or a jitted function. The settings of `jax.jit` (donated and static arguments, shardings) are
        used.
      *args: its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`, of which only shapes, dtypes and shardings
        matter; Python scalars. An argument without a sharding is where JAX puts it: on the target's first device, or
        over the mesh of the other arguments. A sharding over a mesh of other devices, or over an abstract mesh, is
        moved to a mesh of the same shape of all the target's devices. Compile-only GPUs have no memory kinds: for a GPU
        that is not in this machine, an argument in host memory counts as on the device, and the log says so.
      target: what to compile for: see `Target`; None for the local backend.
      compiler_options: XLA's options for this program. The default is `compiler_options(target)`, which checkpointing
        needs on that target; `{}` means no options, as for `jax.jit`.
      generate_code: whether the compiler runs to the end. With False, it is stopped once it has assigned buffers. All
        figures of memory are the same; `flops` is then None. For a GPU this takes a half to a fifth of the time, for
        the CPU a third to a tenth. For a TPU it takes seconds instead of minutes, for several TPUs in a separate
        process; `code_bytes` is then None, too. The compiler runs to the end for a GPU that is in this machine; for a
        program that calls back into this process; for several devices of the CPU; and on TPUs for programs whose peak
        is over 80% of the TPU's memory, because their code may not fit, and for small programs of several TPUs.
      cache: the folder in which the compiler's results are stored: a program that is in it is not compiled again. None
        for that of the environment variable `JAXCKPT_CACHE_DIR` ("off" for none), by default the platform's folder for
        caches; False or "off" for none.
      progress: True shows a bar, or lines where there is no terminal; False nothing; None a bar in a terminal, after
        two seconds, and elsewhere a line each half minute. A function is called as `progress(done, total, what)` before
        each piece of work.

    Raises:
      UnknownTargetError, MissingTargetError: see `Target`.
      ArgumentError: `fun` cannot be called, `cache` is invalid, the compiler refuses one of `compiler_options`, or a
        sharding's mesh has another size than the target.
      DoesNotFitError: the compiler (of TPUs) stops because the program does not fit the device.
      UnreadableDumpError: the buffer assignment that the compiler dumped contradicts its figures. Or it cannot be read,
        and figures depend on it: on a TPU, and with buffers in host memory. (Elsewhere the log says so, and there is no
        timeline.)

    >>> import jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    >>> report = measure(lambda x: jnp.sin(x) @ x, x, target="cpu")
    >>> report.argument_bytes, report.output_bytes, report.temp_bytes >= 4 * 1024**2
    (4194304, 4194304, True)
    """
    if not callable(fun):
        raise ArgumentError("fun", "a function", fun)
    lift.refuse_module(fun, "a function of the parameters")
    lift.refuse_traced(fun, args, "measure")
    check_flags(generate_code=generate_code)
    named = compiler_options is None or isinstance(compiler_options, Mapping)
    given = (compiler_options or {}).items() if named else ()
    if not named or not all(isinstance(name, str) and isinstance(of, (str, int, float)) for name, of in given):
        raise ArgumentError(
            "compiler_options", "a mapping from an option of XLA to its value, or None", compiler_options
        )
    resolved = target_of(target)
    options = options_for(resolved) if compiler_options is None else dict(compiler_options)
    traced = traced_for(fun, args, resolved)
    if progress:
        assert not isinstance(progress, bool), "tells"
        progress(0, 1, f"compiling for {resolved.name}")
    return measure_traced(traced, fun, args, resolved, options, generate_code=generate_code, cache=cache)


def measure_traced(
    traced: Any,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    resolved: Target,
    options: dict[str, Any] | None = None,
    *,
    generate_code: bool,
    cache: str | os.PathLike[str] | bool | None = None,
) -> MemoryReport:
    """Returns what `measure` does, of a function that is traced already.

    Args:
      traced: what `traced_for` returned for the function, its arguments and the target.
      fun, args, generate_code, cache: as in `measure`.
      resolved: the target.
      options: the compiler's; None for those that checkpointing needs.
    """
    options = options_for(resolved) if options is None else options
    folder = results.folder_of(cache)
    lowered = lowered_for(traced, resolved)
    entry, devices = None, len(_compat.lowered_devices(lowered))
    if folder is not None:
        where = f"{resolved.name} {resolved.row_text}"
        entry = results.entry(folder, lowered, where, devices_of(lift.leaves(fun, args), resolved), options)
        known = results.load(entry, _FIGURES)
        if known is not None and not (generate_code and known.figures["stopped"]):
            assignment = _read(known.dump, resolved.platform, needed=False)
            return MemoryReport(**known.figures, _assignment=assignment, _devices=devices)
    report, content = (None, None) if generate_code else _assign(lowered, options, resolved)
    if report is None:
        with tempfile.TemporaryDirectory(prefix="jaxckpt-") as dumps:
            compiled, seconds = compiled_for(lowered, options | _compat.dump_options(dumps), resolved)
            content = largest_dump(dumps)
        report = _whole(compiled, content, resolved, seconds)
    if entry is not None:
        results.store(entry, results.Answer(report.to_json(), content))
    return dataclasses.replace(report, _devices=devices)


def devices_of(args: Sequence[Any], target: Target) -> list[Any]:
    """Returns what a lowered program does not say about its devices: their kind, and their order in the meshes of the
    arguments.
    """
    first = target.devices[0]
    moved = [_move(getattr(leaf, "sharding", None), target) for leaf in args]
    meshes = {sharding.mesh for sharding in moved if isinstance(sharding, NamedSharding)}
    orders = [[device.id for device in mesh.devices.flat] for mesh in meshes if isinstance(mesh, Mesh)]
    return [first.device_kind, PLATFORMS[target.platform].machine(), sorted(orders)]


def output_shardings(fun: Callable[..., Any], *args: Any, target: Target) -> list[Sharding]:
    """Compiles a function for a target, and returns the compiler's sharding of each leaf of its results.

    Args:
      fun, *args: as in `measure`.
      target: a target of several devices.
    """
    compiled, _ = compiled_for(lowered_for(traced_for(fun, args, target), target), options_for(target), target)
    return list(jax.tree.leaves(compiled.output_shardings))


def traced_for(fun: Callable[..., Any], args: tuple[Any, ...], target: Target) -> Any:
    """Returns a function as JAX traces it to be compiled for a target: a `jax.stages.Traced`.

    Args:
      fun, args: as in `measure`.
    """
    start_backend()
    is_jitted = lift.is_jitted(fun)

    def traced(call: lift.Taken) -> Any:
        args = jax.tree.map(lambda leaf: abstract(leaf, target), call.args)
        if is_jitted:
            args, _ = call.restore((args, {}))
            return fun.trace(*args)  # type: ignore[attr-defined]
        found = jax.jit(call.fun).trace(*args)
        return _wrapped(found, args, lift.parameters_of(call.fun, args)) or found

    # Traced under the local backend, so that values computed while tracing (jax.ensure_compile_time_eval) have a
    # device.
    return lift.attempt(fun, args, {}, traced)


def _wrapped(found: Any, args: tuple[Any, ...], parameters: Sequence[str]) -> Any:
    """Returns the jitted function that a program calls with its arguments, where it does nothing else, as `jax.jit`
    traces it: then calling the one is calling the other, and this is the program that runs, with the donation that it
    has. Wrappers of `jax.jit`, such as that of equinox, look so. None of other programs.

    Args:
      found: the program: a `jax.stages.Traced`.
      args: its arguments, as shapes.
      parameters: what to call them.
    """
    program = found.jaxpr.jaxpr
    called = program.eqns[0] if len(program.eqns) == 1 else None
    if called is None or "donated_invars" not in called.params:
        return None
    leaves = dict(zip(program.invars, named_leaves(args, {}, parameters), strict=True))
    order = dict.fromkeys([*(var for var in called.invars if var in leaves), *leaves])
    names = {var: _InPlace(of_leaf(leaves[var][0]), place) for place, var in enumerate(order)}
    constants = dict(zip(program.constvars, found.jaxpr.consts, strict=True))
    laid_out = [*called.params["in_shardings"], *called.params["out_shardings"]]

    def named(**arguments: Any) -> Any:
        known = constants | {var: arguments[name] for var, name in names.items()}
        operands = [atom.val if isinstance(atom, _compat.Literal) else known[atom] for atom in called.invars]
        if all(map(_compat.is_unspecified, laid_out)):
            inner = called.params["jaxpr"]
            return _compat.eval_jaxpr(_compat.open_jaxpr(inner), _compat.jaxpr_consts(inner), *operands)
        return surgery.run(called, program.debug_info, operands)

    named.__name__ = named.__qualname__ = called.params["name"]
    donated = {names[var] for var, flag in zip(called.invars, called.params["donated_invars"]) if flag and var in names}
    return jax.jit(named, donate_argnames=donated).trace(**{name: leaves[var][1] for var, name in names.items()})


class _InPlace(str):
    """An argument's name that sorts by the argument's place: JAX sorts arguments by name, and what a program's peak is
    depends on their order.
    """

    place: int

    def __new__(cls, name: str, place: int) -> _InPlace:
        made = super().__new__(cls, name)
        made.place = place
        return made

    def __lt__(self, other: str) -> bool:
        return self.place < other.place if isinstance(other, _InPlace) else str(self) < other


def lowered_for(traced: Any, target: Target) -> Any:
    """Returns a function of `traced_for` lowered for the target: a `jax.stages.Lowered`."""
    try:
        with jax.default_device(target.devices[0]):
            lowered = traced.lower(lowering_platforms=(PLATFORMS[target.platform].lowering,))
    except RuntimeError as error:
        if target.local or not str(error).startswith("Unknown backend"):
            raise
        rule = f"without calls back to the host, to be compiled for {target.name}, which is not in this machine"
        hint = (
            "Leave out jax.debug.print, jax.debug.callback, jax.pure_callback and io_callback, or name another target."
        )
        raise ArgumentError("fun", rule, InWords("a function that calls back"), hint) from error
    while hasattr(lowered, "lowered"):  # nnx.jit returns a wrapper around JAX's
        lowered = lowered.lowered
    devices, jaxpr = _compat.lowered_devices(lowered), getattr(traced, "jaxpr", None)
    if len(devices) == 1 and jaxpr is not None and _compat.mapped_devices(jaxpr) > 1:
        raise _unplaced(target)  # some compilers would say nothing
    if not target.local and (elsewhere := set(devices) - set(target.devices)):
        # JAX compiles a program for the devices of its meshes, whatever it was lowered for.
        raise ArgumentError(
            "fun",
            f"a function whose meshes have devices of {target.name}, or none (jax.sharding.AbstractMesh)",
            InWords(", ".join(sorted(map(str, elsewhere)))),
            f"Make its mesh with jaxckpt.Target({target.name!r}).mesh(shape, names).",
        )
    return lowered


def abstract(leaf: Any, target: Target) -> Any:
    """Returns shape, dtype and sharding of a leaf. A leaf that is not a JAX array (a scalar, NumPy array, static
    argument) is returned unchanged.
    """
    if isinstance(leaf, jax.Array):
        # An array without a fixed place goes where the others are.
        sharding = leaf.sharding if getattr(leaf, "committed", False) else None
    elif isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = leaf.sharding
    else:
        return leaf
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_move(sharding, target), weak_type=weak)


def _move(sharding: Sharding | None, target: Target) -> Sharding | None:
    """Returns the sharding over the target's devices."""
    if sharding is None:
        return None
    host = sharding.memory_kind in ("pinned_host", "unpinned_host")
    if host and not PLATFORMS[target.platform].has_host_memory(target.local):
        logger.warning(
            "JAX's compile-only GPUs have no host memory: an argument in %s counts as on the device",
            sharding.memory_kind,
        )
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        if mesh.empty:
            return None
        if isinstance(mesh, AbstractMesh) or not set(mesh.devices.flat) <= set(target.devices):
            if mesh.size != len(target.devices):
                rule = f"sharded over the {counted(len(target.devices), 'device')} of the target {target.name}"
                hint = (
                    "Name a target of so many devices, or make the mesh with jaxckpt.Target(name).mesh(shape, names)."
                )
                raise ArgumentError("args", rule, InWords(f"a mesh of {counted(mesh.size, 'device')}"), hint)
            moved = target.mesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types)
            return NamedSharding(moved, sharding.spec, memory_kind=sharding.memory_kind)
        return sharding
    if sharding.device_set <= set(target.devices):
        return sharding
    if len(sharding.device_set) > 1:
        raise ArgumentError("args", f"sharded over a mesh (NamedSharding), to be compiled for {target.name}", sharding)
    return SingleDeviceSharding(target.devices[0], memory_kind=sharding.memory_kind) if host else None


def compiled_for(lowered: Any, options: dict[str, Any], target: Target) -> tuple[Any, float]:
    """Returns the compiled program, and the seconds that the compiler took."""
    options = PLATFORMS[target.platform].own_options(target.local) | options

    def compiled(options: dict[str, Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        made = lowered.compile(compiler_options=options)
        return made, time.perf_counter() - start

    try:
        with jax.default_device(target.devices[0]), _compat.no_persistent_cache:
            return _remedied(compiled, lowered, options, target)
    except jax.errors.JaxRuntimeError as error:
        refusal = (
            _refusal(str(error), target)
            or (_unplaced(target) if "GlobalToLocalShape" in str(error) else None)
            or _compat.unknown_option(error)
            or _option_error(error, options)
            or _foreign_options(str(error), target)
        )
        if refusal is None:
            raise
        raise refusal from error


_Made = TypeVar("_Made")


def _remedied(
    compiled: Callable[[dict[str, Any]], _Made], lowered: Any, options: dict[str, Any], target: Target
) -> _Made:
    """Returns what a function of the compiler's options returns. Where the compiler fails on what other options avoid,
    it is tried again with these; and so at once for programs of the same arguments from then on: plans are compared.
    """
    platform = PLATFORMS[target.platform]
    program = target.name, hash(str(lowered.args_info))
    while True:
        known = _REMEDIES.get(program, {})
        try:
            return compiled(known | options)
        except (assign.RefusedError, jax.errors.JaxRuntimeError) as error:
            found = platform.remedy(str(error), target.local)
            if not found or found.keys() <= known.keys() | options.keys():
                raise
            logger.info("the compiler for %s fails; it is tried again with the options %s: %s", target, found, error)
            _REMEDIES[program] = known | found


_REMEDIES: dict[tuple[str, int], dict[str, Any]] = {}
"""Target and arguments of a program -> the compiler options without which the compiler failed on such programs."""


def _unplaced(target: Target) -> ArgumentError:
    """Returns what is wrong where a function maps over a mesh, and JAX compiles it for one device."""
    hint = "JAX takes the devices of a program from its arguments; a jax.sharding.AbstractMesh names none."
    rule = f"with the sharding of the function's mesh (jax.sharding.NamedSharding) on at least one, for {target.name}"
    return ArgumentError("args", rule, InWords("arguments that lie nowhere in particular"), hint)


def _foreign_options(text: str, target: Target) -> ArgumentError | None:
    """Returns what is wrong where a step carries the compiler options of a CPU, and is compiled for something else."""
    if "Unsupported instruction opcode: opt-barrier" not in text:
        return None
    hint = "Options that jax.jit is given go to every compiler. Give them to the function that you run, not in `step`."
    return ArgumentError(
        "fun",
        f"without the CPU's compiler options, to be compiled for {target.name}",
        InWords("a jitted function with some"),
        hint,
    )


def _option_error(error: Exception, options: Mapping[str, Any]) -> ArgumentError | None:
    """Returns the error for a compiler's error about one of its options; None if it is about something else."""
    refused = _compat.refused_option(error)
    if refused is None or refused.name not in options:
        return None
    hint = "The compiler has no such option." if refused.unknown else f"The compiler says: {refused.said}"
    came = {refused.name: options[refused.name]}
    return ArgumentError("compiler_options", "options of XLA, with values of their types", came, hint)


def _refusal(text: str, target: Target) -> DoesNotFitError | None:
    """Returns the error for a compiler's error about memory; None if it is about something else."""
    if not _compat.is_out_of_memory(text):
        return None
    needed = PLATFORMS[target.platform].needed_bytes(text)
    return DoesNotFitError(target.name, needed, target.memory_bytes, text.splitlines()[0])


def _assign(lowered: Any, options: dict[str, Any], target: Target) -> tuple[MemoryReport, bytes] | tuple[None, None]:
    """Returns the report of a program whose compiler was stopped, and XLA's dump; (None, None) if it must be compiled
    to the end.
    """
    platform = PLATFORMS[target.platform]
    try:
        assigned = _remedied(
            lambda options: assign.assign(lowered, options, target),
            lowered,
            platform.own_options(target.local) | options,
            target,
        )
    except assign.RefusedError as error:
        if (refusal := _refusal(str(error), target)) is None:
            return None, None  # if it is compiled here, it fails with JAX's error
        raise refusal from error
    if assigned is None:
        return None, None
    assignment = _read(assigned.dump, target.platform, needed=platform.needs_assignment)
    if assignment is None:
        return None, None
    figures = Figures(
        argument=assignment.argument_bytes,
        output=assignment.output_bytes,
        temp=assignment.temp_bytes,
        alias=assignment.alias_bytes,
        peak=assignment.peak_bytes,
        host=assignment.host_bytes,
    )
    if platform.code_in_memory and figures.peak > NEARLY_FULL * target.memory_bytes:
        return None, None
    code = None if platform.code_in_memory else 0
    report = _report(figures, assignment, target, assigned.seconds, code=code, flops=None)
    return dataclasses.replace(report, stopped=True), assigned.dump


def _read(dump: bytes | None, platform: str, *, needed: bool) -> Assignment | None:
    """Returns XLA's dump. If it cannot be read: raises if it is needed; else returns None, and the log says why."""
    try:
        if dump is None:
            raise UnreadableDumpError(f"XLA for {platform} must dump its buffer assignment; it dumped none.")
        return read_dump(dump, platform)
    except (ValueError, LookupError) as error:
        if needed:
            raise
        logger.warning("cannot read the buffer assignment of XLA for %s: no timeline, no buffers: %s", platform, error)
        return None


def _check(assignment: Assignment, figures: Figures, platform: str) -> None:
    """Raises UnreadableDumpError if a buffer assignment contradicts the compiler's figures."""
    for name in ("argument", "output", "alias"):
        read, said = getattr(assignment, f"{name}_bytes"), getattr(figures, name)
        if read != said:
            raise UnreadableDumpError(
                f"The buffer assignment that XLA for {platform} dumped must agree with its figures. {name} bytes "
                f"are {read} in the "
                f"assignment and {said} in the figures. Install versions of jax that jaxckpt is tested with."
            )


def _whole(compiled: Any, dump: bytes | None, target: Target, seconds: float) -> MemoryReport:
    """Returns the report of a program that was compiled to the end."""
    stats = _compat.memory_stats(compiled)
    host = stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes + stats.host_temp_size_in_bytes
    figures = Figures(
        argument=stats.argument_size_in_bytes,
        output=stats.output_size_in_bytes,
        temp=stats.temp_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
        host=host - stats.host_alias_size_in_bytes,
    )
    platform = PLATFORMS[target.platform]
    assignment = _read(dump, platform.name, needed=platform.needs_assignment or figures.host > 0)
    if assignment is not None:
        _check(assignment, figures, target.platform)
    costs = compiled.cost_analysis()
    costs = costs[0] if isinstance(costs, list) and costs else costs
    flops = costs.get("flops") if isinstance(costs, Mapping) else None
    flops = float(flops) if flops is not None and np.isfinite(flops) else None
    code = stats.generated_code_size_in_bytes if platform.code_in_memory else 0
    return _report(figures, assignment, target, seconds, code=code, flops=flops)


def _report(
    figures: Figures,
    assignment: Assignment | None,
    target: Target,
    seconds: float,
    *,
    code: int | None,
    flops: float | None,
) -> MemoryReport:
    platform = PLATFORMS[target.platform]
    peak = platform.peak_bytes(figures, assignment.timeline.peak_bytes if assignment and figures.host else None)
    if peak <= 0 and (assignment is None or assignment.timeline.peak_bytes):
        raise UnreadableDumpError(
            f"XLA for {target.platform} must say what memory a program needs; it says a peak of {peak} bytes, and "
            f"its buffer assignment "
            f"{'cannot be read' if assignment is None else 'more'}. Install versions of jax that jaxckpt is tested "
            f"with."
        )
    on_chip = assignment.on_chip_bytes if assignment else 0
    return MemoryReport(
        target=target.name,
        peak_bytes=peak,
        argument_bytes=figures.argument,
        output_bytes=figures.output,
        temp_bytes=platform.temp_bytes(figures, peak),
        alias_bytes=figures.alias,
        host_bytes=figures.host,
        on_chip_bytes=on_chip,
        main_memory_bytes=assignment.main_peak_bytes if assignment and on_chip else peak,
        code_bytes=code,
        flops=flops,
        compile_seconds=seconds,
        _assignment=assignment,
    )
