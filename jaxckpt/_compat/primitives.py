"""The names of JAX's primitives in a traced program, and the parameters that jaxckpt reads. Checked with a trace at
first use.

A primitive with another name, or a program in an unknown parameter, would cause no error: loops would count once, and
names in checkpoints would be lost. So a function with one of each is traced and checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.ad_checkpoint
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax._src.interpreters import mlir
from jax.extend.core import primitives
from jax.interpreters import ad

from jaxckpt._compat.jaxprs import equation_name, equation_params, held_jaxprs, num_scan_consts_carry, open_jaxpr
from jaxckpt._compat.jaxprs import primitive_name as name_of
from jaxckpt._compat.names import working_checkpoints
from jaxckpt._compat.needs import unsupported
from jaxckpt._compat.traces import alone


@dataclass(frozen=True)
class Sample:
    """A function that makes an operation of a primitive.

    Attributes:
      names: possible names of the primitive.
      why: its purpose in jaxckpt, as a phrase after "to".
      make: function of a vector of 4 and a matrix of 4 by 4, both float32.
      params: parameters that are read.
      programs: number of programs in its parameters.
    """

    names: tuple[str, ...]
    why: str
    make: Callable[[Any, Any], Any]
    params: tuple[str, ...] = ()
    programs: int = 0


@jax.custom_jvp
def _own_tangents(x: Any) -> Any:
    return lax.sin(x)


_own_tangents.defjvp(lambda primals, tangents: (_own_tangents(*primals), tangents[0]))


@jax.custom_vjp
def _own_cotangents(x: Any) -> Any:
    return lax.sin(x)


_own_cotangents.defvjp(lambda x: (lax.sin(x), None), lambda _, cotangent: (cotangent,))

IMPORTED_LATE = frozenset({"pallas_call"})
"""Primitives of modules that JAX imports at first use."""


def primitive_names() -> frozenset[str]:
    """Returns the names of the primitives of this JAX, with those that other packages have registered. No public
    function lists them.
    """
    tables = vars(primitives).values(), ad.primitive_jvps, ad.primitive_transposes, mlir._lowerings
    found = {each.name for table in tables for each in table if isinstance(each, jax.extend.core.Primitive)}
    return IMPORTED_LATE | found


CHECKPOINTS = ("checkpoint", "remat", "remat2")
_PLACED = ("in_shardings", "out_shardings", "donated_invars", "compiler_options_kvs")
"""Parameters of a call of `jax.jit` that say what it was given beside the function."""
_CONV = lax.ConvDimensionNumbers((0, 1, 2), (0, 1, 2), (0, 1, 2))

SAMPLES: tuple[Sample, ...] = (
    Sample(
        ("scan",),
        "find loops",
        lambda x, _: lax.scan(lambda c, row: (lax.sin(c), row), x, None, length=2)[0],
        ("jaxpr", "length", "reverse", "unroll"),
        1,
    ),
    Sample(("while",), "find loops", lambda x, _: lax.while_loop(lambda c: c[0] < 1.0, lax.sin, x), programs=2),
    Sample(("cond",), "find branches", lambda x, _: lax.cond(x[0] < 1.0, lax.sin, lax.cos, x), programs=2),
    Sample(("jit", "pjit"), "find calls", lambda x, _: jax.jit(lax.sin)(x), ("jaxpr", *_PLACED), 1),
    Sample(
        CHECKPOINTS,
        "find checkpoints",
        lambda x, _: jax.checkpoint(lax.sin)(x),
        ("jaxpr", "prevent_cse", "differentiated", "policy"),
        1,
    ),
    Sample(
        ("custom_jvp_call",),
        "find derivatives of the user's",
        lambda x, _: _own_tangents(x),
        ("call_jaxpr", "jvp_jaxpr_fun", "num_consts"),
        1,
    ),
    Sample(
        ("custom_vjp_call",),
        "find derivatives of the user's",
        lambda x, _: _own_cotangents(x),
        ("call_jaxpr", "fwd_jaxpr_thunk", "out_trees", "num_consts", "symbolic_zeros", "bwd"),
        1,
    ),
    Sample(
        ("convert_element_type",),
        "keep weak types",
        lambda x, _: lax.convert_element_type(x, jnp.int32),
        ("new_dtype", "weak_type", "sharding"),
    ),
    Sample(("optimization_barrier",), "see what stays apart", lambda x, _: lax.optimization_barrier(x)),
    Sample(("dot_general",), "count FLOPs", lambda _, m: lax.dot(m, m), ("dimension_numbers",)),
    Sample(
        ("conv_general_dilated",),
        "count FLOPs",
        lambda _, m: lax.conv_general_dilated(m[None], m[None], (1,), "SAME", dimension_numbers=_CONV),
        ("dimension_numbers",),
    ),
    Sample(("fft",), "count FLOPs", lambda x, _: lax.fft(x, lax.FftType.RFFT, (4,)), ("fft_lengths",)),
    Sample(
        ("reduce_window_max",),
        "count FLOPs",
        lambda x, _: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "VALID"),
        ("window_dimensions",),
    ),
    Sample(("sort",), "count FLOPs", lambda x, _: lax.sort(x), ("dimension",)),
    Sample(("top_k",), "count FLOPs", lambda x, _: lax.top_k(x, 2)[0], ("k",)),
    Sample(("integer_pow",), "count FLOPs", lambda x, _: lax.integer_pow(x, 3), ("y",)),
    Sample(
        ("reduce_precision",),
        "see what rounds a kept value",
        lambda x, _: lax.reduce_precision(x, 8, 7),
        ("exponent_bits", "mantissa_bits"),
    ),
    Sample(
        ("device_put",), "see what is on the host", lambda x, _: jax.device_put(x, jax.memory.Space.Host), ("devices",)
    ),
)


@functools.cache
def check_primitives() -> None:
    """Checks the samples, and that names of values can be read.

    Raises:
      UnsupportedJaxError: a primitive has another name, other parameters, or other programs in them.
    """

    def everything(x: Any, matrix: Any) -> list[Any]:
        return [jax.ad_checkpoint.checkpoint_name(x, "name"), *(sample.make(x, matrix) for sample in SAMPLES)]

    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4,), (4, 4))]
    with alone(), working_checkpoints():
        eqns = list(open_jaxpr(jax.make_jaxpr(everything)(*avals)).eqns)
    if "name" not in map(equation_name, eqns):
        raise unsupported(
            "the primitive name", "find the names of values", "makes no such operation of checkpoint_name"
        )
    for eqn in eqns:  # the list grows: some of JAX's functions are calls
        eqns.extend(inner for program in held_jaxprs(eqn) for inner in open_jaxpr(program).eqns)
    found = {name_of(eqn): eqn for eqn in eqns}
    for sample in SAMPLES:
        eqn = next((found[name] for name in sample.names if name in found), None)
        wrong = "makes no operation of this name" if eqn is None else _difference(eqn, sample)
        if wrong:
            raise unsupported(f"the primitive {sample.names[0]}", sample.why, wrong)
    num_scan_consts_carry(equation_params(found["scan"]))


def _difference(eqn: Any, sample: Sample) -> str:
    params = equation_params(eqn)
    missing = [name for name in sample.params if name not in params]
    if missing:
        return f"gives it the parameters {', '.join(params)}, and no {missing[0]}"
    programs = len(held_jaxprs(eqn))
    return f"gives it {programs} programs instead of {sample.programs}" if programs != sample.programs else ""


def jit_settings(traced: Any) -> str:
    """Returns what `jax.jit` was given beside the function, as text: donated arguments, shardings, compiler options. No
    public attribute of what it traced tells all of them.

    Args:
      traced: a `jax.stages.Traced`, or nnx's wrapper around one. Of another's object nothing is known: "".
    """
    while hasattr(traced, "traced"):
        traced = traced.traced
    if not isinstance(traced, jax.stages.Traced):
        return ""
    params = getattr(traced, "_params", None)
    if params is None or not set(_PLACED) <= set(params):
        raise unsupported("the attribute _params of traced programs", "know what jax.jit was given", "has none")
    return repr([(name, params[name]) for name in _PLACED])
