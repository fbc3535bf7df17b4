"""The only file that touches JAX's private parts or asks for a version; each entry says why.

Supported: jax 0.10.2 (the newest for Python 3.11) and later; developed against 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.ad_checkpoint  # jax does not import it by itself in every version
from jax._src import core as _core
from jax._src.effects import remat_allowed_effects as _remat_allowed_effects
from jax._src.util import cache as _cache  # JAX's flags are part of the key, which functools cannot do
from jax._src.util import weakref_lru_cache as weakref_lru_cache  # the same, held as long as its first argument lives
from jax.extend import core as _extend_core

cache_in_context = _cache()
"""Remembers a function's results, for each configuration of JAX by itself; arguments are hashable."""

JAX_VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version_info__)

CPU_WIDENS_BFLOAT16_LOOPS = JAX_VERSION < (0, 12)
"""XLA for the CPU in jax 0.10 carries bfloat16 through a while loop in float32, arrays that it writes row by row too; in 0.12 it does not."""

# ---------------------------------------------------------------------------------------------------------------- jaxprs
# A jaxpr and its constants were two classes up to jax 0.10 (Jaxpr, ClosedJaxpr); 0.12 has one, which still answers to
# both interfaces. `jax.extend.core` has no function that takes an equation apart or puts one together.

Var = _extend_core.Var
Literal = _extend_core.Literal
DropVar = _core.DropVar


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the jaxpr without its constants."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def jaxpr_consts(jaxpr: Any) -> list[Any]:
    """Returns the constants of a closed jaxpr, and none of an open one."""
    return list(getattr(jaxpr, "consts", ()))


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, closed or open."""
    return isinstance(value, (_core.Jaxpr, _extend_core.ClosedJaxpr))


def close_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Returns the jaxpr with constants for its constvars."""
    return _extend_core.ClosedJaxpr(jaxpr, list(consts))


def like(original: Any, jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Returns `jaxpr` as what `original` was: closed over `consts`, or open."""
    if isinstance(original, _extend_core.ClosedJaxpr):
        return close_jaxpr(jaxpr, consts)
    return jaxpr


def build_jaxpr(
    constvars: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any], debug_info: Any
) -> Any:
    """Returns an open jaxpr; argument and result names are dropped, since a cut-out piece has none."""
    effects: frozenset[Any] = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    return _extend_core.Jaxpr(
        constvars=list(constvars),
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(eqns),
        effects=effects,
        debug_info=debug_info.with_unknown_names(),
        is_high=any(_is_high(eqn) for eqn in eqns),
    )


def _is_high(eqn: Any) -> bool:
    # jax_remat3 makes names and checkpoints "hi primitives"; a jaxpr that holds one says so, or it is not lowered.
    return bool(eqn.primitive.is_high(*(v.aval for v in eqn.invars), **eqn.params))


def fresh_var(aval: Any) -> Any:
    """Returns a new variable."""
    return Var(aval)


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluates an open jaxpr; source lines and name stacks of its equations are kept (jaxpr_as_fun keeps them too)."""
    return list(_extend_core.jaxpr_as_fun(close_jaxpr(jaxpr, consts))(*args))


def with_equations(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """Returns an open jaxpr with other equations and results: they compute the same from the same inputs, with the same effects."""
    return jaxpr.replace(eqns=list(eqns), outvars=list(outvars))


def jaxpr_title(jaxpr: Any) -> str:
    """Returns the name of the function that a jaxpr was traced from."""
    return str(open_jaxpr(jaxpr).debug_info.func_src_info).split(" ")[0]


def jvp_jaxpr(closed: Any, moving: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Differentiates a closed jaxpr forward: (inputs, tangents of those that move) -> (results, tangents of those that move), and which do.

    `jax.jvp` makes zeros of what does not move. jax 0.12 has one class for open and closed jaxprs.
    """
    from jax._src.interpreters import ad

    both, out_moving = ad.jvp_jaxpr(closed, list(moving), False)
    return both, list(out_moving)


def allowed_in_custom_rules(jaxpr: Any) -> bool:
    """Whether JAX lets a function with a derivative of its own (jax.custom_jvp) have the effects of a jaxpr: the list of them is private."""
    from jax._src.effects import custom_derivatives_allowed_effects

    return not custom_derivatives_allowed_effects.filter_not_in(jaxpr.effects)


def num_scan_consts_carry(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a scan are constants and how many are carries.

    jax 0.12 replaced `num_consts` and `num_carry` by flat trees (consts, carry, xs).
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    tree = params["ft_in"]
    if hasattr(tree, "elts"):
        consts, carry, _ = tree.elts
        return len(consts), len(carry)
    consts, carry, _ = tree.tree.children()  # of a scan that is another one's transposition
    return consts.num_leaves, carry.num_leaves


def remat_disallowed_effects(jaxpr: Any) -> list[Any]:
    """Returns the effects of a jaxpr that JAX does not let a checkpointed function have when it is differentiated."""
    return list(_remat_allowed_effects.filter_not_in(jaxpr.effects))


# ------------------------------------------------------------------------------------------- names and nested checkpoints
# With jax_remat3 a name is no longer the primitive `name` but a "hi primitive" held in the parameter `_prim` of
# `call_hi_primitive`, and so is a nested checkpoint.


def working_checkpoints() -> Any:
    """A context to trace and emit checkpoints in: the old jax.checkpoint where the new one (flag jax_remat3) is not finished.

    In jax 0.10 its names cannot be batched ("for vmap support, subclass CheckpointName must implement `batch`"), and values that are to be
    moved to the host are recomputed without a word; in 0.11 what is named inside a nested checkpoint is not kept; in 0.12.0.1 names inside a
    function with a derivative of its own are not seen, so that no derivative could read what is kept (see `core/reads.py`). The flag itself
    stays what it is outside.
    """
    if getattr(jax.config, "jax_remat3", False):
        from jax._src import config

        return config.remat3(False)
    return contextlib.nullcontext()


def equation_name(eqn: Any) -> str | None:
    """Returns the name that an equation gives to its operand, or None where it is no naming equation."""
    if eqn.primitive.name == "name":
        return str(eqn.params["name"])
    prim = eqn.params.get("_prim")
    if type(prim).__name__ in ("CheckpointName", "CheckpointNameFwd"):
        return str(prim.name)
    return None


def name_equation(operand: Any, result: Any, name: str, maker: Any) -> Any:
    """Returns an equation `result = name[name] operand`, in the form that this JAX and its flags use, at the source line of `maker`."""
    template = _name_template(operand.aval)
    prim = template.params.get("_prim")
    params = {"name": name} if prim is None else {**template.params, "_prim": type(prim)(name, operand.aval)}
    return template.replace(invars=[operand], outvars=[result], params=params, source_info=maker.source_info)


def kept_equations(operand: Any, result: Any, name: str, maker: Any) -> list[Any]:
    """Returns equations that name a value for a policy that keeps it: `result = name[name] operand`, or so for both parts of a complex one.

    jax.checkpoint rounds what it keeps to its own type with `reduce_precision`, which takes no complex types: up to jax 0.12.0.1 a complex
    value that a policy keeps is a TypeError.
    """
    if not jax.dtypes.issubdtype(operand.aval.dtype, jax.numpy.complexfloating):
        return [name_equation(operand, result, name, maker)]
    real, imaginary, join = _complex_templates(operand.aval)
    equations, kept = [], []
    for template in (real, imaginary):
        part, named = (fresh_var(template.outvars[0].aval) for _ in range(2))
        equations.append(template.replace(invars=[operand], outvars=[part], source_info=maker.source_info))
        equations.append(name_equation(part, named, name, maker))
        kept.append(named)
    return [*equations, join.replace(invars=kept, outvars=[result], source_info=maker.source_info)]


@cache_in_context
def _complex_templates(aval: Any) -> list[Any]:
    made = jax.make_jaxpr(lambda x: jax.lax.complex(jax.lax.real(x), jax.lax.imag(x)))(aval)
    return list(open_jaxpr(made).eqns)


@cache_in_context
def _name_template(aval: Any) -> Any:
    return open_jaxpr(jax.make_jaxpr(lambda x: jax.ad_checkpoint.checkpoint_name(x, "name"))(aval)).eqns[-1]


def primitive_name(eqn: Any) -> str:
    """Returns the name of an equation's primitive; that of the hi primitive where it is one."""
    prim = eqn.params.get("_prim")
    return str(eqn.primitive.name) if prim is None else _HI_NAMES.get(type(prim).__name__, type(prim).__name__)


_HI_NAMES = {"RematTraced": "checkpoint", "CheckpointName": "name", "CheckpointNameFwd": "name"}


def equation_params(eqn: Any) -> dict[str, Any]:
    """Returns the parameters of an equation; those of the hi primitive where it is one."""
    prim = eqn.params.get("_prim")
    return dict(eqn.params) if prim is None else dict(prim.params)


def replace_params(eqn: Any, **changes: Any) -> Any:
    """Returns the equation with some of `equation_params` changed."""
    prim = eqn.params.get("_prim")
    if prim is None:
        return eqn.replace(params={**eqn.params, **changes})
    return eqn.replace(params={**eqn.params, "_prim": type(prim)(**{**prim.params, **changes})})


def is_unspecified(sharding: Any) -> bool:
    """Whether a sharding of a jit equation says nothing (the class that says so is private)."""
    return sharding is None or type(sharding).__name__ in ("UnspecifiedValue", "AUTO")


def source_line(eqn: Any) -> str:
    """Returns "file.py:12 (function)" of the user's code that made the equation, or "".

    JAX's own frames are left out, and jaxckpt's, and, unless there are no others, those of libraries that users build models with.
    """
    from jax._src import source_info_util

    first = None
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        if frame.file_name.startswith(_PACKAGE):
            continue
        first = first or frame
        if not any(library in frame.file_name for library in _LIBRARIES):
            first = frame
            break
    return "" if first is None else f"{first.file_name}:{first.start_line} ({first.function_name})"


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = tuple(f"site-packages/{name}/" for name in ("flax", "optax", "haiku", "equinox", "chex", "einops"))


def name_stack(eqn: Any) -> str:
    """Returns the scopes that an equation was traced in (flax modules, jax.named_scope), joined by "/"."""
    return str(eqn.source_info.name_stack)


def prepend_name_stack(outer: Any, inner: Any) -> Any:
    """Returns `inner` as it is when the call `outer` is written out: scopes of both, in that order."""
    info = inner.source_info
    return inner.replace(source_info=info.replace(name_stack=outer.source_info.name_stack + info.name_stack))


def is_tracer(value: Any) -> bool:
    """Whether a value is being traced."""
    return isinstance(value, jax.core.Tracer)


def is_linearized(value: Any) -> bool:
    """Whether a value is being differentiated in reverse (the tracer's class is private)."""
    return type(value).__name__ == "LinearizeTracer"


def clean_trace() -> Any:
    """A context in which nothing is being traced, whatever is outside: what is computed in it is computed now, what is traced is traced alone.

    `jax.ensure_compile_time_eval` is the public way out of a trace, and not the same: it also computes, within traces that begin in it, whatever
    depends on no argument, so that a mask becomes a constant. `jax.core.eval_context` is not exported by every version.
    """
    return _core.eval_context()


def manual_axes(aval: Any) -> dict[str, Any]:
    """Returns what `jax.ShapeDtypeStruct` is told besides shape and dtype of a value within jax.shard_map: over which axes it varies.

    The argument is not documented; what it takes is not public.
    """
    kind = getattr(aval, "manual_axis_type", None)
    return {} if kind is None or kind.empty else {"manual_axis_type": kind, "sharding": aval.sharding}


def within_named_axes(jaxpr: Any) -> bool:
    """Whether a program belongs into the axes that are being mapped over: it has collectives over them, or they are jax.shard_map's.

    Such a program cannot be compiled by itself. No public function lists the axes.
    """
    names = set(_core.get_axis_env().axis_names())
    if not names:
        return False
    used = {effect.name for effect in jaxpr.effects if isinstance(effect, _core.NamedAxisEffect)}
    return bool(names & used) or bool(jax.sharding.get_abstract_mesh().manual_axes)


def is_ref_type(aval: Any) -> bool:
    """Whether an abstract value is that of a `jax.Ref`; the class is not public."""
    return type(aval).__name__ == "AbstractRef"


def is_ref(value: Any) -> bool:
    """Whether a value is a `jax.Ref`, or stands for one in a trace."""
    return is_ref_type(getattr(value, "aval", None)) or type(value).__name__ in ("Ref", "ArrayRef", "MutableArray")


# ------------------------------------------------------------------------------------------------------------- policies
# A policy of JAX's own is a function of a primitive (the object, not its name), avals and parameters.


def ask_policy(policy: Callable[..., Any], primitive: str, params: Any, value: Any, name: str | None) -> str:
    """Returns "save", "offload" or "recompute": what a policy of JAX's own says of a value, as the result of `primitive`, or as `name`d."""
    from jax._src import ad_checkpoint
    from jax._src.interpreters import partial_eval as pe

    aval = jax.core.ShapedArray(value.shape, value.dtype)
    if name is not None:
        answer = policy(ad_checkpoint.name_p, aval, name=name)
    else:
        answer = policy(_primitives().get(primitive, _core.Primitive(primitive)), aval, **params)
    if isinstance(answer, pe.Offloadable):
        return "offload"
    return "save" if answer is True or answer is pe.Saveable or isinstance(answer, pe.SaveableType) else "recompute"


def everything_saveable(primitive: Any, *avals: Any, **params: Any) -> bool:
    """JAX's policy of this name, but for complex values, which jax.checkpoint cannot keep (see `kept_equations`): they are recomputed."""
    made = params.get("new_dtype", params.get("dtype"))
    dtypes = [getattr(aval, "dtype", None) for aval in avals] + [made]
    if primitive.name in ("complex", "fft", "eig"):
        return False
    return not any(d is not None and jax.dtypes.issubdtype(d, jax.numpy.complexfloating) for d in dtypes)


def _primitives() -> dict[str, Any]:
    from jax.extend.core import primitives

    return {p.name: p for p in vars(primitives).values() if isinstance(p, _core.Primitive)}


# ------------------------------------------------------------------------------------------------ targets and measurement


def checkpoint_options(platform: str) -> dict[str, str]:
    """Returns the compiler options without which the compiler undoes unrolled checkpointing on that platform.

    On the CPU of jax 0.10.2 XLA's pass "cse_barrier_expander" removes the optimization barriers before the common subexpressions are
    merged, so that the recomputation is merged with what it was to replace. jax 0.12.0.1 keeps the barriers. There is nothing between to
    try; with the pass disabled jax 0.12.0.1 compiles to the same memory, so up to there the options do no harm.

    Loops over less than a KiB become one kernel by "small-while-loop-hoisting", and what emits that kernel does not know barriers: the
    compiler fails ("Unhandled opcode for elemental IR emission"). So that pass goes too.
    """
    if platform == "cpu" and JAX_VERSION < (0, 12):
        return {
            "xla_disable_hlo_passes": "cse_barrier_expander,optimization-barrier-expander,small-while-loop-hoisting"
        }
    return {}


def start_within(context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Has JAX's backends start within a context, whoever is the first to need them; nothing changes once they have.

    Up to 0.12 there is no hook: `jax.devices()`, a first computation and a compilation all come to `xla_bridge.backends`, which is replaced
    until it has run.
    """
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        return
    start = xla_bridge.backends

    @functools.wraps(start)
    def backends() -> Any:
        try:
            with context():
                return start()
        finally:
            if xla_bridge.backends is backends:
                xla_bridge.backends = start

    xla_bridge.backends = backends


def cuda_topology(name: str, config: str, count: int) -> tuple[Any, ...]:
    """Returns `count` compile-only GPUs of the kind that the target configuration (a text proto) describes.

    JAX registers what makes topologies together with the backend, and in 0.10 and 0.12 does neither where CUDA's libraries are missing,
    which only running needs. Then the plugin's own initialisation is called without its check of them, and the backend that it registers
    is taken back, for nothing could run on it.
    """
    from jax._src import xla_bridge
    from jax.experimental import topologies

    xla_bridge._discover_and_register_pjrt_plugins()
    if "cuda" not in xla_bridge._topology_factories:
        import importlib

        plugin = importlib.import_module(f"jax_plugins.{cuda_plugin()}")
        known = dict(xla_bridge._backend_factories)
        with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
            plugin.initialize()
        if "cuda" not in known:
            xla_bridge._backend_factories.pop("cuda", None)
    description = topologies.get_topology_desc(name, platform="cuda", target_config=config, topology=f"1x1x{count}")
    return tuple(description.devices)


def cuda_plugin() -> str | None:
    """Returns the name of the installed CUDA plugin of JAX in `jax_plugins`, or None; imports no plugin."""
    import importlib.util

    if importlib.util.find_spec("jax_plugins") is None:
        return None
    return next(
        (name for name in ("xla_cuda13", "xla_cuda12") if importlib.util.find_spec(f"jax_plugins.{name}")), None
    )


def tpu_topology(name: str, **options: Any) -> tuple[Any, ...]:
    """Returns the compile-only TPUs of a slice such as "v5e:2x2".

    libtpu looks for its machine in the environment and, without these variables, in the network; and it lets only one process load it,
    lest two drive one TPU: where there is none, that would only keep two processes from compiling at once. The variables are there while
    it loads and no longer.
    """
    from jax.experimental import topologies

    from jaxckpt._quiet import tpu_visible

    variables = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
    if not tpu_visible():
        variables["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    with _environment(variables):
        return tuple(topologies.get_topology_desc(name, platform="tpu", **options).devices)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, and takes them away again."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


class _NoPersistentCache(contextlib.ContextDecorator):
    """Compiles in earnest: what comes from the persistent compilation cache brings no buffer assignment.

    For a compile-only device the cache cannot be read at all, and JAX warns. Its switch `jax_enable_compilation_cache` is looked at only
    once in a process, so switching it off here could leave the user's cache off for good; two variables hold that one look's outcome.
    The first thread to come in changes them and the last to leave restores them.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, (False, False)

    def __enter__(self) -> None:
        from jax._src import compilation_cache as cache

        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = cache._cache_checked, cache._cache_used
                cache._cache_checked, cache._cache_used = True, False

    def __exit__(self, *exception: object) -> None:
        from jax._src import compilation_cache as cache

        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                cache._cache_checked, cache._cache_used = self._before


no_persistent_cache = _NoPersistentCache()


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """What JAX hands to XLA to compile, which can be written to a folder and compiled in another process of the same JAX.

    `jax.stages.Lowered` cannot be told to compile elsewhere, and exporting it (jax.export) makes another program of it.

    Attributes:
      name: of the program.
      module: the program as MLIR's bytecode.
      options: XLA's options, as a serialised message.
      devices: the ids of the devices it is for, in their order.
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

    def compile(self, devices: Sequence[Any]) -> None:
        """Compiles it for the devices of these ids among `devices`; they are compile-only ones."""
        from jax._src import compiler
        from jax._src.interpreters import mlir
        from jax._src.lib import xla_client
        from jax._src.lib.mlir import ir

        known = {device.id: device for device in devices}
        chosen = xla_client.DeviceList(tuple(known[identity] for identity in self.devices))
        options = xla_client.CompileOptions.ParseFromString(self.options)
        with mlir.make_ir_context():
            module = ir.Module.parse(self.module)
            compiler.backend_compile_and_load(devices[0].client, module, chosen, options, ())


CompileError = jax.errors.JaxRuntimeError


class _RequestMade(Exception):
    pass


_making = threading.local()
_making_lock = threading.Lock()


def compile_request(lowered: Any, options: dict[str, Any]) -> CompileRequest | None:
    """Returns what `lowered.compile(compiler_options=options)` would hand to XLA; None where the program calls back into this process.

    JAX makes XLA's options (device assignment, partitioner, layouts) on the way to its one call of the compiler; so that call is
    replaced, for this thread and for this one time, by one that notes what it is given.
    """
    from jax._src import compiler

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
    with _making_lock, no_persistent_cache:
        compile_ = compiler.backend_compile_and_load
        compiler.backend_compile_and_load, _making.now = note, True
        try:
            lowered.compile(compiler_options=options)
        except _RequestMade:
            pass
        finally:
            compiler.backend_compile_and_load, _making.now = compile_, False
    return made[0] if made else None


# ----------------------------------------------------------------------------------------------------------------- scans
# Room for random keys: no public function makes keys of a dtype that is only known as an abstract value.


def blank_keys(aval: Any) -> Any:
    """Returns random keys of an abstract value, all of zero words; to be written over."""
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.random.wrap_key_data(jax.numpy.zeros(data.shape, data.dtype), impl=aval.dtype._impl)
