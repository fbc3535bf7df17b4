"""The table of the parts of JAX that jaxckpt needs beyond the public interface, and the probe that checks it against
the installed JAX.

`probe` checks what needs no trace: a name exists, a function takes the arguments that jaxckpt passes, a class has the
attributes that are read, a primitive has the expected name. This takes a few milliseconds. Checks that need a trace run
at first use, in `primitives` and `names`. Parts in modules that JAX does not import by itself are looked up at first
use, by `get`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt._errors import UnsupportedJaxError

KNOWN = ("0.10.2", "0.12.0.1")
"""Versions of jax that the tests run with."""

VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version_info__)


@dataclass(frozen=True)
class Need:
    """A part that is not public.

    Attributes:
      symbol: its dotted name.
      why: its purpose, as a phrase after "to".
      positional: its positional arguments: their number or, if their meaning matters, the names of the parameters.
      keywords: names of its keyword arguments.
      has: names of its attributes that are read; for a class, those of its instances.
      name: the name of a primitive in a jaxpr.
      since: the first version of jax that has it; jaxckpt does not need it in older versions.
      late: whether it is looked up at first use, because JAX does not import its module by itself.
    """

    symbol: str
    why: str
    positional: int | tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    name: str = ""
    since: tuple[int, ...] = (0, 10, 2)
    late: bool = False


_JAXPR = ("constvars", "invars", "outvars", "eqns", "effects", "debug_info")
_EQUATION = ("invars", "outvars", "primitive", "params", "effects", "source_info", "ctx")

NEEDS: tuple[Need, ...] = (
    # Jaxprs: `jax.extend.core` has no function that reads or makes an equation.
    Need("jax.extend.core.Var", "make variables for programs that it puts together", positional=1, has=("aval",)),
    Need("jax.extend.core.Literal", "tell constants in equations from variables", has=("val", "aval")),
    Need("jax._src.core.DropVar", "tell results that nobody uses"),
    Need("jax._src.core.Jaxpr", "read traced programs", has=_JAXPR),
    Need("jax.extend.core.ClosedJaxpr", "close programs over their constants", positional=2, has=("jaxpr", "consts")),
    Need(
        "jax.extend.core.Jaxpr",
        "put programs together",
        keywords=("constvars", "invars", "outvars", "eqns", "effects", "debug_info", "is_high"),
    ),
    Need(
        "jax._src.core.Jaxpr.replace",
        "give programs other equations",
        positional=1,
        keywords=("eqns", "outvars"),
    ),
    Need("jax.extend.core.jaxpr_as_fun", "run programs", positional=2),
    Need("jax._src.core.JaxprEqn", "read the operations of programs", has=_EQUATION),
    Need(
        "jax._src.core.JaxprEqn.replace",
        "rewrite the operations of programs",
        positional=1,
        keywords=("invars", "outvars", "params", "source_info", "ctx"),
    ),
    Need("jax._src.core.DebugInfo", "name pieces of programs", has=("with_unknown_names", "func_src_info", "traced_for")),
    Need("jax._src.interpreters.ad.jvp_jaxpr", "differentiate pieces of programs", positional=3),
    Need("jax._src.source_info_util.user_frames", "name source lines", positional=1),
    Need("jax._src.source_info_util.Frame", "name source lines", has=("file_name", "start_line", "function_name")),
    Need("jax._src.source_info_util.user_context", "hand on source lines", positional=1, keywords=("name_stack",)),
    Need("jax._src.source_info_util.current_name_stack", "hand on scopes", positional=0),
    Need(
        "jax._src.source_info_util.SourceInfo",
        "hand on source lines and scopes",
        has=("traceback", "name_stack", "replace"),
    ),
    Need("jax._src.effects.remat_allowed_effects", "refuse side effects that would repeat", has=("filter_not_in",)),
    Need(
        "jax._src.effects.custom_derivatives_allowed_effects",
        "tell which programs may have a derivative of their own",
        has=("filter_not_in",),
    ),
    Need("jax._src.util.cache", "remember what it derives for each configuration of JAX"),
    Need("jax._src.config.trace_context", "trace a function once for plans under the same settings", positional=0),
    Need("jax._src.util.weakref_lru_cache", "remember functions as long as they live", positional=1),
    # What is being traced, and over which axes.
    Need("jax.core.Tracer", "tell what is being traced"),
    Need(
        "jax.core.ShapedArray",
        "describe arrays",
        positional=2,
        keywords=("weak_type",),
        has=("shape", "dtype", "weak_type", "sharding", "manual_axis_type", "to_tangent_aval", "to_ct_aval"),
    ),
    Need("jax._src.interpreters.ad.LinearizeTracer", "tell what is being differentiated in reverse"),
    Need("jax._src.core.eval_context", "trace programs whatever is being traced around them", positional=0),
    Need("jax._src.core.trace_ctx", "see whether a loop's body is traced", has=("trace",)),
    Need("jax._src.core.get_axis_env", "see the axes that are mapped over", positional=0),
    Need("jax._src.core.AxisEnv", "see the axes that are mapped over", has=("axis_names",)),
    Need("jax._src.core.ShardingTypeError", "tell errors over explicit axes of a mesh"),
    Need("jax._src.core.NamedAxisEffect", "tell collectives over axes that are mapped over", has=("name",)),
    Need("jax._src.state.types.AbstractRef", "refuse programs that change references"),
    Need("jax._src.sharding_impls.UnspecifiedValue", "tell calls that say nothing about placement"),
    Need("jax._src.config.disable_jit", "see whether loops are written out", has=("value",)),
    Need("jax.extend.core.get_opaque_trace_state", "forget what it has traced when a trace ends", positional=0),
    Need("jax.extend.core.unmapped_aval", "describe stacks of arrays", positional=3),
    # Operations of its own, and their derivatives.
    Need("jax.extend.core.Primitive", "make operations of its own", positional=1),
    Need("jax._src.core.Primitive", "make operations of its own", has=("bind", "def_impl", "def_abstract_eval", "is_high")),
    Need("jax.interpreters.ad.primitive_jvps", "differentiate operations of its own", has=("__setitem__",)),
    Need("jax._src.interpreters.ad.primitive_jvps", "tell when a loop is differentiated", has=("__getitem__",)),
    Need("jax._src.interpreters.ad.primitive_linearizations", "tell when a loop is differentiated", has=("__getitem__",)),
    Need("jax.interpreters.ad.primitive_transposes", "differentiate operations of its own", has=("__setitem__",)),
    Need("jax.interpreters.partial_eval.dce_rules", "leave out what is not used", has=("__setitem__",)),
    Need("jax.interpreters.partial_eval.dce_jaxpr", "leave out what is not used", positional=2),
    Need("jax.interpreters.ad.Zero", "leave out derivatives that are zero", positional=1, has=("aval",)),
    Need("jax.interpreters.ad.instantiate_zeros", "make arrays of derivatives that are zero", positional=1),
    Need("jax.interpreters.ad.zeros_like_aval", "make arrays of zeros", positional=1),
    Need("jax.interpreters.batching.primitive_batchers", "batch operations of its own", has=("__setitem__",)),
    Need("jax.interpreters.batching.broadcast", "batch operations of its own", positional=4),
    Need("jax._src.interpreters.mlir._lowerings", "know the names of operations", has=("__iter__", "__getitem__")),
    Need("jax._src.interpreters.mlir.LoweringRuleEntry", "lower scans that wait for their operands", has=("rule",)),
    Need("jax.experimental.xla_metadata.set_xla_metadata", "tell which scans wait for their operands"),
    Need(
        "jax._src.core.JaxprEqnContext",
        "tell which scans wait for their operands",
        positional=0,
        has=("manager", "xla_metadata"),
    ),
    Need("jax.interpreters.mlir.register_lowering", "lower operations of its own", positional=2, keywords=("platform", "cacheable")),
    Need(
        "jax.interpreters.mlir.LoweringRuleContext",
        "lower operations of its own",
        has=("module_context", "avals_in", "replace", "jaxpr_eqn_ctx", "platforms"),
    ),
    Need("jax._src.interpreters.mlir.ModuleContext", "tell programs of one device", has=("axis_context", "platforms")),
    Need("jax._src.sharding_impls.ShardingContext", "tell programs of one device", has=("num_devices",)),
    Need("jax._src.sharding_impls.SPMDAxisContext", "tell programs of one device", has=("mesh", "manual_axes")),
    Need("jax.interpreters.mlir.lower_fun", "lower operations of its own", positional=1, keywords=("multiple_results",)),
    # Rules of the user's: `jax.custom_vjp` has no public function that gives its forward and backward rules back.
    Need("jax.extend.core.primitives.custom_lin_p", "batch derivatives of rules of the user's", name="custom_lin"),
    Need("jax._src.core.Primitive.get_bind_params", "run rules of the user's", positional=2),
    Need("jax._src.core.TraceTag", "batch derivatives of rules of the user's", positional=0),
    Need("jax._src.core.unmapped_aval", "batch derivatives of rules of the user's", positional=3),
    Need("jax._src.linear_util.wrap_init", "run rules of the user's", positional=1, keywords=("debug_info",)),
    Need("jax._src.interpreters.ad.CustomVJPException", "refuse derivatives in what a rule closes over"),
    Need("jax._src.interpreters.ad.raise_custom_vjp_error_on_jvp", "refuse forward mode of rules of the user's"),
    Need("jax._src.interpreters.ad.primitive_transposes", "run rules of the user's", has=("__setitem__",)),
    Need("jax._src.interpreters.ad.fancy_transposes", "run rules of the user's", has=("__setitem__",)),
    Need(
        "jax._src.interpreters.batching.batch_custom_vjp_bwd",
        "batch derivatives of rules of the user's",
        positional=5 if VERSION < (0, 12) else 7,
    ),
    Need("jax._src.interpreters.batching.fancy_primitive_batchers", "batch operations of its own", has=("__setitem__",)),
    Need("jax.Ref", "refuse programs that change references"),
    Need("jax.sharding.use_abstract_mesh", "trace programs whatever mesh is set around them", positional=1),
    # Names of values, and policies.
    Need("jax.ad_checkpoint.checkpoint_name", "name values", positional=2),
    Need("jax._src.ad_checkpoint.name_p", "find the names of values", name="name"),
    Need("jax._src.ad_checkpoint.CheckpointName", "find the names of values under the flag jax_remat3"),
    Need("jax._src.ad_checkpoint.CheckpointNameFwd", "find names under the flag jax_remat3", since=(0, 12)),
    Need("jax._src.ad_checkpoint.RematTraced", "find checkpoints under the flag jax_remat3"),
    Need("jax._src.config.remat3", "emit checkpoints without the flag jax_remat3", positional=1, has=("value",)),
    Need("jax._src.interpreters.partial_eval.Saveable", "ask policies of JAX"),
    Need("jax._src.interpreters.partial_eval.SaveableType", "ask policies of JAX"),
    Need("jax._src.interpreters.partial_eval.Offloadable", "ask policies of JAX"),
    # Names of primitives that can be checked without a trace; for the others see `primitives`.
    Need("jax.extend.core.primitives.scan_p", "find loops", name="scan"),
    Need("jax.extend.core.primitives.while_p", "find loops", name="while"),
    Need("jax.extend.core.primitives.cond_p", "find branches", name="cond"),
    Need("jax.extend.core.primitives.jit_p", "find calls", name="jit"),
    Need("jax.extend.core.primitives.custom_jvp_call_p", "find functions with derivatives of their own", name="custom_jvp_call"),
    Need("jax.extend.core.primitives.custom_vjp_call_p", "find functions with derivatives of their own", name="custom_vjp_call"),
    Need("jax._src.shard_map.shard_map_p", "find sharded programs", name="shard_map"),
    Need("jax.extend.core.primitives.add_jaxvals_p", "find sums of gradients", name="add_any"),
    Need("jax.extend.core.primitives.scatter_add_p", "find sums of gradients", name="scatter-add"),
    Need("jax.extend.core.primitives.stop_gradient_p", "see where derivatives end", name="stop_gradient"),
    Need("jax.extend.core.primitives.convert_element_type_p", "keep weak types", name="convert_element_type"),
    Need("jax.extend.core.primitives.complex_p", "keep complex values", name="complex"),
    Need("jax.extend.core.primitives.real_p", "keep complex values", name="real"),
    Need("jax.extend.core.primitives.imag_p", "keep complex values", name="imag"),
    # Backends, topologies, compilers.
    Need("jax._src.xla_bridge.backends", "keep the start of backends quiet", positional=0),
    Need("jax._src.xla_bridge.backends_are_initialized", "keep the start of backends quiet", positional=0),
    Need("jax._src.xla_bridge._discover_and_register_pjrt_plugins", "compile for GPUs that are not here", positional=0),
    Need("jax._src.xla_bridge._topology_factories", "compile for GPUs that are not here", has=("__contains__",)),
    Need("jax._src.xla_bridge._backend_factories", "compile for GPUs that are not here", has=("pop",)),
    Need(
        "jax.experimental.topologies.get_topology_desc",
        "compile for devices that are not here",
        positional=1,
        keywords=("platform",),
        late=True,
    ),
    Need("jax.experimental.mesh_utils.create_device_mesh", "lay devices out in a mesh", positional=2),
    Need("jax._src.compilation_cache._cache_checked", "compile in earnest whatever JAX has cached"),
    Need("jax._src.compilation_cache._cache_used", "compile in earnest whatever JAX has cached"),
    Need("jax._src.compilation_cache.is_cache_used", "compile in earnest whatever JAX has cached", positional=1),
    Need(
        "jax._src.compiler.backend_compile_and_load",
        "stop the compiler once it has assigned buffers",
        positional=("backend", "module", "executable_devices", "options", "host_callbacks"),
    ),
    Need("jax._src.interpreters.mlir.make_ir_context", "stop the compiler once it has assigned buffers", positional=0),
    Need("jax._src.lib.xla_client.DeviceList", "stop the compiler once it has assigned buffers"),
    Need(
        "jax._src.lib.xla_client.CompileOptions",
        "stop the compiler once it has assigned buffers",
        has=("ParseFromString", "SerializeAsString"),
    ),
    Need("jax.extend.mlir.ir.Module", "stop the compiler once it has assigned buffers", has=("parse",)),
    Need("jax.extend.mlir.ir.StringAttr", "stop the compiler once it has assigned buffers", has=("get",)),
    Need("jax.extend.mlir.ir.BoolAttr", "stop the compiler once it has assigned buffers", has=("get",)),
    Need("jax.extend.mlir.ir.Location", "stop the compiler once it has assigned buffers", has=("unknown",)),
    Need("jax.extend.mlir.ir.InsertionPoint", "stop the compiler once it has assigned buffers"),
    Need("jax.extend.mlir.dialects.stablehlo.CustomCallOp", "stop the compiler once it has assigned buffers"),
)  # fmt: skip


def probe(needs: Iterable[Need] = NEEDS) -> None:
    """Checks what needs no trace.

    Raises:
      UnsupportedJaxError: the installed JAX lacks a part, or has it in another form.
    """
    for need in needs:
        if not need.late and need.since <= VERSION:
            check(need)


def get(symbol: str) -> Any:
    """Returns a part that is looked up at first use.

    Raises:
      UnsupportedJaxError: see `probe`.
    """
    return check(next(need for need in NEEDS if need.symbol == symbol))


def check(need: Need, package: str = "jax", known: tuple[str, ...] = KNOWN) -> Any:
    """Returns the part that a need names.

    Args:
      package, known: its package, and the versions of the package that are known to work.

    Raises:
      UnsupportedJaxError: the part is missing, or has another form.
    """
    found = _resolve(need.symbol)
    wrong = "has no such name" if found is _MISSING else _difference(found, need)
    if wrong:
        raise unsupported(need.symbol, need.why, wrong, package, known)
    return found


def unsupported(
    symbol: str, why: str, found: str, package: str = "jax", known: tuple[str, ...] = KNOWN
) -> UnsupportedJaxError:
    """Returns the error for a missing part. The arguments are those of `UnsupportedJaxError`."""
    installed = importlib.import_module(package).__version__
    return UnsupportedJaxError(symbol, why, found, package=package, installed=installed, known=known)


_MISSING = object()


def _resolve(symbol: str) -> Any:
    parts = symbol.split(".")
    found: Any = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:end]))  # the module is not imported yet
            except ImportError:
                return _MISSING
    return found


def _difference(found: Any, need: Need) -> str:
    """Returns how a part differs from the form that is needed, as a phrase after "it"; "" if it does not differ."""
    fields = getattr(found, "__dataclass_fields__", ())
    for attribute in need.has:
        if not hasattr(found, attribute) and attribute not in fields:
            return f"has it without the attribute {attribute!r}"
    if need.name and getattr(found, "name", None) != need.name:
        return f"calls this primitive {getattr(found, 'name', None)!r} instead of {need.name!r}"
    if need.positional is None and not need.keywords:
        return ""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # native code has no signature
        return "" if callable(found) else "has something there that cannot be called"
    given = need.positional or 0
    if isinstance(given, tuple):
        names = tuple(signature.parameters)[: len(given)]
        if names != given:
            return f"has it with the parameters {', '.join(names)} instead of {', '.join(given)}"
        given = len(given)
    try:
        signature.bind(*[None] * given, **dict.fromkeys(need.keywords))
    except TypeError as error:
        return f"has it with other parameters, {signature}: {error}"
    return ""


probe()
