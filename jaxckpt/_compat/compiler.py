"""The interface to XLA: options, the compile call, memory figures."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pathlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import compilation_cache as cache
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxckpt._compat.needs import VERSION, unsupported
from jaxckpt._errors import UnsupportedJaxError

CPU_WIDENS_BFLOAT16_LOOPS = VERSION < (0, 12)
"""In jax 0.10, XLA for the CPU carries bfloat16 through a while loop as float32, also in arrays that it writes row by
row. In 0.12 it does not.
"""

COPIES_BRANCHES = VERSION < (0, 12)
"""In jax 0.10, XLA for the CPU and for GPUs gives most conditionals results of their own, also where these are written
to donated arguments. In 0.12 it does not.
"""


def checkpoint_options(platform: str) -> dict[str, str]:
    """Returns the compiler options without which the compiler undoes unrolled checkpointing on a platform.

    On the CPU of jax 0.10.2, XLA's pass "cse_barrier_expander" removes the optimization barriers before common
    subexpressions are merged. So the recomputation is merged with the forward pass. jax 0.12.0.1 keeps the barriers. No
    version between them could be tried. With the pass disabled, jax 0.12.0.1 compiles to the same memory, so the
    options do no harm in versions before it.

    The pass "small-while-loop-hoisting" makes one kernel from a loop over less than a KiB. The emitter of that kernel
    does not know barriers, and the compiler fails ("Unhandled opcode for elemental IR emission"). So that pass is
    disabled too.
    """
    if platform == "cpu" and VERSION < (0, 12):
        return {
            "xla_disable_hlo_passes": "cse_barrier_expander,optimization-barrier-expander,small-while-loop-hoisting"
        }
    return {}


def dump_options(folder: str) -> dict[str, str | bool]:
    """Returns the compiler options that make XLA write its scheduled program and its buffer assignment to a folder."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}


def untuned_options() -> dict[str, int]:
    """Returns the compiler options that make XLA for GPUs use its default kernels, instead of looking for a device to
    tune kernels on.
    """
    return {"xla_gpu_autotune_level": 0}


UNTILED = "Couldn't find output tile sizes"
"""What XLA for GPUs of jax 0.10 says where it has chosen a kernel of Triton for a matmul, and finds no tiles for it:
rows of a batch of sequences whose length is no multiple of 16. On a device it would try other kernels.
"""


def triton_free_options() -> dict[str, bool]:
    """Returns the compiler options with which XLA for GPUs takes no kernels of Triton for matmuls."""
    return {"xla_gpu_enable_triton_gemm": False}


def stopping_options(file: pathlib.Path) -> dict[str, str]:
    """Returns the compiler options with which XLA for GPUs fails once it has assigned buffers, without code.

    They name a file of kernels that an earlier compilation made. XLA dumps the buffer assignment, opens that file, and
    gives up because it cannot be read. There is no option to stop there.

    Args:
      file: is written here. No message of protobuf begins with these bytes. XLA's error names the file: see
        `is_stopped`.
    """
    file.write_bytes(b"\xff" * 64)
    return {"xla_gpu_kernel_cache_file": str(file)}


UNKNOWN_CALL = "jaxckpt_stops_here"
"""The name of a custom call that no compiler knows, at the end of a program whose compiler is to stop: XLA for the CPU
and for TPUs looks for a call's implementation when it generates code, once it has assigned buffers. The call has no
operands and no result.
"""


def is_stopped(error: Exception, at: str) -> bool:
    """Returns whether the compiler failed at the file that `stopping_options` wrote, or at the call `UNKNOWN_CALL`."""
    return at in str(error)


def is_out_of_memory(text: str) -> bool:
    """Returns whether a compiler's error says that a program does not fit on the device."""
    return text.startswith("RESOURCE_EXHAUSTED")


@dataclass(frozen=True)
class OptionRefusal:
    """An option that a compiler refuses.

    Attributes:
      name: of the option.
      unknown: whether the compiler has no such option; else it refuses the value.
      said: what the compiler says of the value.
    """

    name: str
    unknown: bool
    said: str


def refused_option(error: Exception) -> OptionRefusal | None:
    """Returns the option that a compiler's error is about; None if it is about something else."""
    found = re.search(r"(No such compile option: '|While setting option )(\w+)(.*)", str(error))
    return None if found is None else OptionRefusal(found[2], found[1].startswith("No such"), found[3].lstrip(", "))


def unknown_option(error: Exception) -> UnsupportedJaxError | None:
    """Returns the error for a compiler that does not know one of jaxckpt's options; None for other errors of the
    compiler.
    """
    ours = {*dump_options(""), *untuned_options(), *triton_free_options(), *checkpoint_options("cpu")}
    refused = refused_option(error)
    if refused is None or not refused.unknown or refused.name not in ours:
        return None
    return unsupported(f"XLA's option {refused.name}", "measure memory", "does not know it")


def lowered_devices(lowered: Any) -> tuple[Any, ...]:
    """Returns the devices that a lowered program would be compiled for. Only the compiled program tells them in
    public.
    """
    found = getattr(getattr(lowered, "_lowering", None), "_device_list", None)
    if found is None:
        raise unsupported("the attribute _lowering._device_list of lowered programs", "know their devices", "has none")
    return tuple(found)


def own_options(lowered: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the compiler options that a lowered program carries, those of its `jax.jit`: (name, value). JAX adds them
    to what the compile call is given; the program's text has none of them.
    """
    found = getattr(getattr(lowered, "_lowering", None), "_compiler_options_kvs", None)
    if found is None:
        raise unsupported(
            "the attribute _lowering._compiler_options_kvs of lowered programs", "know their options", "has none"
        )
    return tuple(found)


def memory_stats(compiled: Any) -> Any:
    """Returns the compiler's figures of a program's memory, in bytes.

    Raises:
      UnsupportedJaxError: one of the figures that jaxckpt reads is missing.
    """
    stats = compiled.memory_analysis()
    for name in _FIGURES:
        if not hasattr(stats, name):
            raise unsupported(f"jax.stages.Compiled.memory_analysis().{name}", "measure memory", "says nothing of it")
    return stats


_FIGURES = (
    *(f"{kind}_size_in_bytes" for kind in ("argument", "output", "temp", "alias")),
    *(f"host_{kind}_size_in_bytes" for kind in ("argument", "output", "temp", "alias")),
    "peak_memory_in_bytes",
    "generated_code_size_in_bytes",
)


class _NoPersistentCache(contextlib.ContextDecorator):
    """Compiles without JAX's persistent compilation cache, because a program from the cache has no buffer assignment.

    For a compile-only device the cache cannot be read at all, and JAX warns. JAX reads the flag
    `jax_enable_compilation_cache` only once in a process, so setting it here could leave the user's cache off for the
    rest of the process. Two variables have the result of that read. The first thread that enters changes them, and the
    last thread that leaves restores them.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, (False, False)

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                before = cache._cache_checked, cache._cache_used
                cache._cache_checked, cache._cache_used = True, False
                if cache.is_cache_used(None):
                    cache._cache_checked, cache._cache_used = before
                    why = "compile in earnest whatever JAX has cached"
                    raise unsupported("jax._src.compilation_cache._cache_used", why, "uses its cache all the same")
                self._before = before
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                cache._cache_checked, cache._cache_used = self._before


no_persistent_cache = _NoPersistentCache()


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """The program that JAX gives XLA to compile. It can be written to a folder and compiled in another process of the
    same JAX.

    `jax.stages.Lowered` cannot be compiled in another process, and exporting it (jax.export) makes another program.

    Attributes:
      name: name of the program.
      module: the program as MLIR bytecode.
      options: XLA's options, as a serialised message.
      devices: the ids of the program's devices, in order.
    """

    name: str
    module: bytes
    options: bytes
    devices: tuple[int, ...]

    def write(self, folder: pathlib.Path) -> None:
        """Writes it to a folder."""
        (folder / "module").write_bytes(self.module)
        (folder / "options").write_bytes(self.options)
        (folder / "request.json").write_text(json.dumps({"name": self.name, "devices": self.devices}))

    @staticmethod
    def read(folder: pathlib.Path) -> CompileRequest:
        """Reads it from a folder."""
        rest = json.loads((folder / "request.json").read_text())
        module, options = (folder / "module").read_bytes(), (folder / "options").read_bytes()
        return CompileRequest(rest["name"], module, options, tuple(rest["devices"]))

    def compile(self, devices: Sequence[Any], *, stops: bool = False) -> None:
        """Compiles it for those of the `devices` that have its ids.

        Args:
          devices: of one client.
          stops: whether the program gets the call `UNKNOWN_CALL`, at which the compiler fails.

        Raises:
          CompileError: the compiler's.
        """
        known = {device.id: device for device in devices}
        chosen = xla_client.DeviceList(tuple(known[identity] for identity in self.devices))
        options = xla_client.CompileOptions.ParseFromString(self.options)
        with mlir.make_ir_context():
            module = ir.Module.parse(self.module)
            if stops:
                _add_unknown_call(module)
            compiler.backend_compile_and_load(devices[0].client, module, chosen, options, ())


def _add_unknown_call(module: ir.Module) -> None:
    main = next(each for each in module.body.operations if ir.StringAttr(each.attributes["sym_name"]).value == "main")
    *_, last = main.regions[0].blocks[0].operations
    with ir.Location.unknown(), ir.InsertionPoint(last):
        stablehlo.CustomCallOp(
            [], [], call_target_name=ir.StringAttr.get(UNKNOWN_CALL), has_side_effect=ir.BoolAttr.get(True)
        )


CompileError = jax.errors.JaxRuntimeError


class _RequestMade(Exception):
    pass


_making = threading.local()
_making_lock = threading.Lock()
_bypassed: list[UnsupportedJaxError] = []


def compile_request(lowered: Any, options: dict[str, Any]) -> CompileRequest | None:
    """Returns what `lowered.compile(compiler_options=options)` would give to XLA; None if the program calls back into
    this process.

    Raises:
      UnsupportedJaxError: JAX compiles without the function that is replaced here. It has then compiled the program.
        Later calls raise at once.

    JAX makes XLA's options (device assignment, partitioner, layouts) before its call of the compiler. So that call is
    replaced once, for this thread, by a function that stores its arguments.
    """

    def note(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any, *rest: Any, **named: Any) -> Any:
        if not getattr(_making, "now", False):
            return compile_(backend, module, devices, options, callbacks, *rest, **named)
        if not callbacks:
            code = io.BytesIO()
            module.operation.write_bytecode(code)
            name = str(module.operation.attributes["sym_name"]).strip('"')
            identities = tuple(device.id for device in devices)
            made.append(CompileRequest(name, code.getvalue(), options.SerializeAsString(), identities))
        raise _RequestMade

    made: list[CompileRequest] = []
    if _bypassed:
        raise _bypassed[0]
    with _making_lock, no_persistent_cache:
        compile_ = compiler.backend_compile_and_load
        compiler.backend_compile_and_load, _making.now = note, True
        try:
            lowered.compile(compiler_options=options)
            why = "stop the compiler once it has assigned buffers"
            found = "compiles without calling it"
            _bypassed.append(unsupported("jax._src.compiler.backend_compile_and_load", why, found))
            raise _bypassed[0]
        except _RequestMade:
            pass
        finally:
            compiler.backend_compile_and_load, _making.now = compile_, False
    return made[0] if made else None
