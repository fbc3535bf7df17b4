"""Runs a traced program one operation at a time: most in NumPy, loops as Python's.

No program is compiled, and an operation gives the same result wherever it stands. So what is recomputed is what was
computed, to the bit, and a comparison costs milliseconds. NumPy's sums and products are rounded otherwise than XLA's,
which no comparison minds; an operation that is not in the table is JAX's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from jaxckpt import _compat

_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
)
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def walk(closed: Any, *args: Any) -> list[Any]:
    """Returns the results of a closed jaxpr."""
    jaxpr = _compat.open_jaxpr(closed)
    arrays = [_array(x, var.aval) for x, var in zip(args, jaxpr.invars)]
    with np.errstate(all="ignore"):
        return _run(jaxpr, _compat.jaxpr_consts(closed), arrays)


def _array(x: Any, aval: Any) -> Any:
    return x if _is_key(aval.dtype) else np.asarray(x, aval.dtype)


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env = {var: _array(x, var.aval) for var, x in zip(jaxpr.constvars, consts)} | dict(zip(jaxpr.invars, args))
    read = lambda atom: _array(atom.val, atom.aval) if isinstance(atom, _compat.Literal) else env[atom]
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _equation(eqn, [read(atom) for atom in eqn.invars])))
    return [read(atom) for atom in jaxpr.outvars]


def _called(closed: Any, *args: Any) -> list[Any]:
    return _run(_compat.open_jaxpr(closed), _compat.jaxpr_consts(closed), args)


def _equation(eqn: Any, values: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        called = next((params[key] for key in _BODIES if _compat.is_jaxpr(params.get(key))), None)
        if called is not None:
            return _called(called, *values)
    if name == "scan" and params["length"]:
        return _scan(params, values)
    if name == "cond":
        place, *operands = values
        return _called(params["branches"][min(max(int(place), 0), len(params["branches"]) - 1)], *operands)
    if name == "while":
        m, n = params["cond_nconsts"], params["body_nconsts"]
        state = values[m + n :]
        while bool(_called(params["cond_jaxpr"], *values[:m], *state)[0]):
            state = _called(params["body_jaxpr"], *values[m : m + n], *state)
        return state
    if name in ("optimization_barrier", "debug_callback"):
        return values
    if name in _NUMPY and not any(_is_key(getattr(x, "dtype", None)) for x in values):
        out = _NUMPY[name](params, *values)
        if out is not None:
            return [np.asarray(out).astype(eqn.outvars[0].aval.dtype, copy=False)]
    return [_array(x, var.aval) for x, var in zip(_by_jax(eqn, values), eqn.outvars)]


def _by_jax(eqn: Any, values: list[Any]) -> list[Any]:
    inputs = [_compat.fresh_var(jax.typeof(value)) for value in values]
    debug_info = jax.make_jaxpr(lambda: 0)().jaxpr.debug_info
    outputs = [_compat.fresh_var(var.aval) for var in eqn.outvars]
    jaxpr = _compat.build_jaxpr([], inputs, outputs, [eqn.replace(invars=inputs, outvars=outputs)], debug_info)
    return _compat.eval_jaxpr(jaxpr, [], *values)


def _scan(params: dict[str, Any], values: list[Any]) -> list[Any]:
    consts, carries = _consts_and_carries(params)
    fixed, state, xs = values[:consts], values[consts : consts + carries], values[consts + carries :]
    steps = range(params["length"])
    rows = []
    for i in reversed(steps) if params["reverse"] else steps:
        out = _called(params["jaxpr"], *fixed, *state, *(x[i] for x in xs))
        state = out[:carries]
        rows.append(out[carries:])
    if params["reverse"]:
        rows.reverse()
    return [*state, *(jnp.stack(column) if _is_key(column[0].dtype) else np.stack(column) for column in zip(*rows))]


def _consts_and_carries(params: dict[str, Any]) -> tuple[int, int]:
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    operands = params[
        "ft_in"
    ]  # jax 0.12: (consts, carry, xs), of one class in a scan as it was written, of another in a transposed one
    if hasattr(operands, "elts"):
        return len(operands.elts[0]), len(operands.elts[1])
    consts, carry, _ = operands.tree.children()
    return consts.num_leaves, carry.num_leaves


def _is_key(dtype: Any) -> bool:
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


# ----------------------------------------------------------------------------------------------------------- operations


def _wide(x: np.ndarray) -> np.ndarray:
    """Returns it in a type that every function of NumPy's and SciPy's takes."""
    return x.astype(np.float32) if x.dtype.kind not in "fc" or x.dtype == np.float16 else x


def _dot(params: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (left, right), (batch_left, batch_right) = params["dimension_numbers"]
    letters = iter("abcdefghijklmnop")
    of_a, of_b = [next(letters) for _ in a.shape], [next(letters) for _ in b.shape]
    for i, j in [*zip(left, right), *zip(batch_left, batch_right)]:
        of_b[j] = of_a[i]
    batch = [of_a[i] for i in batch_left]
    rest_a = [c for i, c in enumerate(of_a) if i not in (*left, *batch_left)]
    rest_b = [c for j, c in enumerate(of_b) if j not in (*right, *batch_right)]
    return np.einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join([*batch, *rest_a, *rest_b])}", _wide(a), _wide(b))


def _divided(params: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    return a / b if a.dtype.kind not in "iu" else None


def _broadcast(params: Any, x: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for size, place in zip(x.shape, params["broadcast_dimensions"]):
        shape[place] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _cumulative(ufunc: Any) -> Callable[..., np.ndarray]:
    def run(params: Any, x: np.ndarray) -> np.ndarray:
        axis = params["axis"]
        x = np.flip(x, axis) if params["reverse"] else x
        out = ufunc.accumulate(_wide(x) if x.dtype.kind not in "iub" else x, axis=axis)
        return np.flip(out, axis) if params["reverse"] else out

    return run


def _reduced(ufunc: Any) -> Callable[..., np.ndarray]:
    return lambda params, x: ufunc.reduce(_wide(x) if x.dtype.kind not in "iub" else x, axis=tuple(params["axes"]))


def _padded(params: Any, x: np.ndarray, value: np.ndarray) -> np.ndarray | None:
    if any(low < 0 or high < 0 for low, high, _ in params["padding_config"]):
        return None
    shape = [
        low + high + max(n + (n - 1) * inner, 0) for n, (low, high, inner) in zip(x.shape, params["padding_config"])
    ]
    out = np.full(shape, value, x.dtype)
    out[tuple(slice(low, n - high, inner + 1) for n, (low, high, inner) in zip(shape, params["padding_config"]))] = x
    return out


def _sliced(params: Any, x: np.ndarray) -> np.ndarray:
    strides = params["strides"] or [1] * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _starts(x: np.ndarray, sizes: Sequence[int], starts: Sequence[Any]) -> tuple[slice, ...]:
    clamped = [min(max(int(start), 0), n - size) for start, n, size in zip(starts, x.shape, sizes)]
    return tuple(slice(start, start + size) for start, size in zip(clamped, sizes))


def _updated(params: Any, x: np.ndarray, update: np.ndarray, *starts: Any) -> np.ndarray:
    out = x.copy()
    out[_starts(x, update.shape, starts)] = update
    return out


def _converted(params: Any, x: np.ndarray) -> np.ndarray | None:
    if params["new_dtype"] == np.bool_:
        return x != 0
    return x.real if x.dtype.kind == "c" and params["new_dtype"] != np.complex64 else x


def _rounded(params: Any, x: np.ndarray) -> np.ndarray | None:
    info = jnp.finfo(x.dtype)
    return x if (params["exponent_bits"], params["mantissa_bits"]) == (info.nexp, info.nmant) else None


def _unary(f: Any) -> Callable[..., np.ndarray]:
    return lambda params, x: f(x)


def _float(f: Any) -> Callable[..., np.ndarray]:
    return lambda params, x: f(_wide(x))


def _binary(f: Any) -> Callable[..., np.ndarray]:
    return lambda params, a, b: f(a, b)


_NUMPY: dict[str, Callable[..., Any]] = {
    **{
        name: _float(getattr(np, name))
        for name in ("sin", "cos", "tan", "tanh", "exp", "log", "log1p", "expm1", "sqrt", "cbrt", "exp2")
    },
    **{
        name: _unary(f)
        for name, f in {
            "neg": np.negative,
            "floor": np.floor,
            "ceil": np.ceil,
            "abs": np.abs,
            "not": np.logical_not,
        }.items()
    },
    **{
        name: _unary(f)
        for name, f in {
            "real": np.real,
            "imag": np.imag,
            "conj": np.conj,
            "is_finite": np.isfinite,
            "copy": np.copy,
        }.items()
    },
    **{name: _unary(lambda x: x) for name in ("copy_p", "name")},
    "sign": lambda params, x: np.sign(x) if x.dtype.kind != "c" else None,
    "not": lambda params, x: np.invert(x),
    "square": _unary(lambda x: x * x),
    "rsqrt": _float(lambda x: 1 / np.sqrt(x)),
    "logistic": _float(lambda x: 1 / (1 + np.exp(-x))),
    "erf": _float(scipy.special.erf),
    "erf_inv": _float(scipy.special.erfinv),
    "integer_pow": lambda params, x: (
        x ** np.asarray(params["y"]).astype(x.dtype) if params["y"] >= 0 else 1 / x ** (-params["y"])
    ),
    "add": _binary(np.add),
    "add_any": _binary(np.add),
    "sub": _binary(np.subtract),
    "mul": _binary(np.multiply),
    "div": _divided,
    "max": _binary(np.maximum),
    "min": _binary(np.minimum),
    "atan2": lambda params, a, b: np.arctan2(_wide(a), _wide(b)),
    "and": _binary(np.bitwise_and),
    "or": _binary(np.bitwise_or),
    "xor": _binary(np.bitwise_xor),
    **{
        name: _binary(getattr(np, full))
        for name, full in {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"}.items()
    },
    **{name: _binary(getattr(np, full)) for name, full in {"gt": "greater", "ge": "greater_equal"}.items()},
    "complex": lambda params, a, b: a + 1j * b,
    "convert_element_type": _converted,
    "reduce_precision": _rounded,
    "broadcast_in_dim": lambda params, x, *sizes: None if sizes else _broadcast(params, x),
    "reshape": lambda params, x, *sizes: None if sizes else x.reshape(params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "expand_dims": lambda params, x: np.expand_dims(x, tuple(params["dimensions"])),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "rev": lambda params, x: np.flip(x, tuple(params["dimensions"])),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "slice": _sliced,
    "pad": _padded,
    "dynamic_slice": lambda params, x, *starts: x[_starts(x, params["slice_sizes"], starts)],
    "dynamic_update_slice": _updated,
    "select_n": lambda params, place, *cases: (
        np.choose(place.astype(np.int32), cases) if len(cases) > 2 else np.where(place, cases[1], cases[0])
    ),
    "clamp": lambda params, low, x, high: np.minimum(np.maximum(x, low), high),
    "iota": lambda params: np.broadcast_to(
        np.arange(params["shape"][params["dimension"]]).reshape(
            [-1 if i == params["dimension"] else 1 for i in range(len(params["shape"]))]
        ),
        params["shape"],
    ),
    "dot_general": _dot,
    "reduce_sum": _reduced(np.add),
    "reduce_prod": _reduced(np.multiply),
    "reduce_max": _reduced(np.maximum),
    "reduce_min": _reduced(np.minimum),
    "reduce_and": _reduced(np.logical_and),
    "reduce_or": _reduced(np.logical_or),
    "cumsum": _cumulative(np.add),
    "cumprod": _cumulative(np.multiply),
    "cummax": _cumulative(np.maximum),
    "cummin": _cumulative(np.minimum),
    "cumlogsumexp": _cumulative(np.logaddexp),
    "argmax": lambda params, x: np.argmax(x, params["axes"][0]),
    "argmin": lambda params, x: np.argmin(x, params["axes"][0]),
}
"""Primitive -> its result; None where NumPy's is another. What is returned is converted to the result's type."""
