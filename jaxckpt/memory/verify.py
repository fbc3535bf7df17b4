"""Check that two functions agree in values and gradients. Checkpointing must not change them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, NotDifferentiableError, VerificationError, explains
from jaxckpt.actions import Action
from jaxckpt.core import lift, stored
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.shown import Progress, silent, tells
from jaxckpt.core.units import as_int

# Recomputation repeats the same operations, but XLA may order and fuse them in another way. The table has the relative
# error of that for each dtype. If a program has several dtypes, the coarsest counts, because rounding in bfloat16 also
# changes float32 gradients.
TOLERANCES = {
    "float64": 1e-11,
    "complex128": 1e-11,
    "float32": 1e-5,
    "complex64": 1e-5,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
COARSEST = 0.25
"""The tolerance of dtypes that are not in the table: float8 and narrower."""
FLOOR = 0.01
"""The error of a gradient is relative to its largest value, or to this part of the largest value of all gradients if
that is more. So if a gradient is zero except for rounding (a bias before a normalisation), the rounding is not an
error."""


@dataclass(frozen=True)
class ActionError:
    """What one action does to the gradients, where it alone of those that change gradients is used.

    Attributes:
      action: such as `compress("int8")`.
      worst: the leaf whose gradient is off most, such as "gradient of args[0]['w']".
      rel_error: of that leaf, the norm of the difference over the norm of the reference's gradient; the latter is taken
        to be at least a hundredth of the largest of all leaves.
      cosine: of the angle between both gradients of that leaf.
      total_rel_error, total_cosine: of all leaves together, as one vector.
    """

    action: Action
    worst: str
    rel_error: float
    cosine: float
    total_rel_error: float
    total_cosine: float

    def __str__(self) -> str:
        return (
            f"{self.action!r}: gradients off by {self.total_rel_error:.3g} of their norm, cosine "
            f"{self.total_cosine:.6f}; the worst is {self.worst}: {self.rel_error:.3g}, cosine {self.cosine:.6f}."
        )


@dataclass(frozen=True)
class Verification:
    """The result of `verify` for functions that agree.

    Attributes:
      leaves: number of arrays that were compared, outputs and gradients.
      worst: the array with the largest error, such as "gradient of args[0]['w']" or "output".
      max_abs_error: the largest absolute error in that array.
      max_rel_error: that error divided by the largest magnitude in the reference's array; see `verify`.
      rtol: the tolerance for `max_rel_error`.
      per_action: what each action that changes gradients does to them; empty if the function uses none. The other
        figures are then of the function with these values saved as they are.
    """

    leaves: int
    worst: str
    max_abs_error: float
    max_rel_error: float
    rtol: float
    per_action: tuple[ActionError, ...] = ()

    def __str__(self) -> str:
        exact = f"Without {' and '.join(repr(each.action) for each in self.per_action)}, " if self.per_action else ""
        worst = (
            f"the worst is {self.worst}: off by {self.max_abs_error:.3g}, {self.max_rel_error:.3g} of its largest value"
            if self.max_abs_error
            else "all are equal"
        )
        agree = f"{exact}{self.leaves} arrays agree within {self.rtol:g}; {worst}."
        return "\n".join([agree, *map(str, self.per_action)])


@dataclass(frozen=True)
class _Difference:
    path: str
    absolute: float
    relative: float


@explains
@tells("tracing the functions")
def verify(
    fun: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    rtol: float | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Verification:
    """Compares two functions: every output, and the gradient with respect to every inexact leaf of the arguments.

    Both run compiled, on the local backend. Both gradients are pulled back from the same cotangents, one for every
    inexact output, with normal values from the seed. The error of an array is its largest absolute difference, divided
    by the largest magnitude in the reference's array; for a gradient, the divisor is at least a hundredth of the
    largest magnitude in all gradients. Integers, booleans and keys must be equal. NaN agrees with NaN, and an infinity
    with the same infinity.

    Some actions change gradients, such as `compress("int8")`. If `fun` keeps values by such actions, in a plan or in a
    policy anywhere in it, it is compared with these values saved as they are. Then each of the actions is used alone,
    and `Verification.per_action` says what that does to the gradients. With `rtol`, that error must be within it too.

    Args:
      fun: the function to check, for example one with checkpoints.
      reference: the function that it must equal.
      *args: pytrees for both. A `jax.ShapeDtypeStruct` is filled with seeded data: see `fill`.
      rtol: the allowed relative error. By default 1e-5 for float32, 1e-11 for float64, 1e-2 for float16 and 5e-2 for
        bfloat16; the coarsest dtype in the reference's program decides.
      seed: the seed of cotangents and filled data.
      progress: True shows a bar, or lines where there is no terminal; False nothing; None a bar in a terminal, after
        two seconds, and elsewhere a line each half minute. A function is called as `progress(done, total, what)` before
        each run.

    Raises:
      VerificationError: the functions differ. The message has the worst array, its path and its errors.
      NotDifferentiableError: no argument, or no output, has an inexact dtype.
      ArgumentError: `rtol` is not a number of at least 0, or `seed` is no integer of 32 bits.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda x: jnp.sum(jnp.sin(x))
    >>> verify(jax.checkpoint(f), f, jnp.arange(3.0)).leaves
    2
    """
    if rtol is not None and (isinstance(rtol, bool) or not isinstance(rtol, (int, float)) or not rtol >= 0):
        raise ArgumentError("rtol", "a number of at least 0, or None", rtol)
    number = as_int(seed)
    if number is None:
        raise ArgumentError("seed", "a whole number", seed)
    if not abs(number) < 2**31:
        raise ArgumentError("seed", "a whole number between -(2**31) and 2**31", seed)
    seed = number
    for argument, given in (("fun", fun), ("reference", reference)):
        if not callable(given):
            raise ArgumentError(argument, "a function; verify(fun, reference, *args) compares two", given)
    lift.refuse_traced(reference, args, "verify")
    args, asked = fill(args, seed), rtol
    if rtol is None:
        rtol = _tolerance(reference, args)
    alike = functools.wraps(reference)(lambda *args: fun(*args))  # so that its arguments have the same names

    def run(each: Callable[..., Any]) -> tuple[Any, Any]:
        both = functools.partial(_outputs_and_gradients, name=_name(each), seed=seed)
        return lift.attempt(each, args, {}, both)  # type: ignore[no-any-return]

    assert not isinstance(progress, bool), "tells"
    tell = progress or silent
    lossy = stored.lossy_actions(_compat.open_jaxpr(lift.trace(alike, *args).jaxpr))
    runs = 2 + len(lossy)
    tell(0, runs, f"running {_name(fun)}")
    with stored.only_lossy(None) if lossy else contextlib.nullcontext():
        got = run(alike)
    tell(1, runs, f"running {_name(reference)}")
    expected = run(reference)
    differences = [*_compare(got[0], expected[0], "output"), *_compare(got[1], expected[1], "gradient of args", FLOOR)]
    worst = max(differences, key=lambda difference: difference.relative)
    wrong = sum(difference.relative > rtol for difference in differences)
    if wrong:
        raise VerificationError(
            f"{_name(fun)} and {_name(reference)} differ in {wrong} of {len(differences)} arrays. The worst is "
            f"{worst.path}: off by "
            f"{worst.absolute:.6g}, {worst.relative:.3g} of its largest value; {rtol:g} is allowed. Check that both "
            f"functions are pure (no changing "
            "closures, no random numbers without a key), so that a recomputation reads the same values as the "
            "forward pass."
        )
    per_action: list[ActionError] = []
    for action in lossy:
        tell(2 + len(per_action), runs, f"running {_name(fun)} with {action!r}")
        with stored.only_lossy(action):
            per_action.append(_action_error(action, run(alike)[1], expected[1]))
    tell(runs, runs, "")
    too_far = max(per_action, key=lambda each: each.rel_error, default=None)
    if asked is not None and too_far is not None and not too_far.rel_error <= asked:
        raise VerificationError(f"Gradients must be within rtol={asked:g}. {too_far} Use another action, or no rtol.")
    return Verification(len(differences), worst.path, worst.absolute, worst.relative, rtol, tuple(per_action))


def _action_error(action: Action, got: Any, expected: Any) -> ActionError:
    pairs = [
        ("gradient of args" + jax.tree_util.keystr(path), _flat(a), _flat(b))
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected))
    ]
    least = FLOOR * max((float(np.linalg.norm(b)) for _, _, b in pairs), default=0.0)
    each = {path: _error(a, b, least) for path, a, b in pairs}
    worst = max(each, key=lambda path: each[path])
    total = _error(np.concatenate([got for _, got, _ in pairs]), np.concatenate([known for _, _, known in pairs]))
    return ActionError(action, worst, *each[worst], *total)


def _flat(array: Any) -> np.ndarray:
    return _wide(array).ravel()


def _error(got: np.ndarray, expected: np.ndarray, least: float = 0.0) -> tuple[float, float]:
    """Returns the norm of the difference over that of what is expected, which is taken to be at least `least`, and the
    cosine of the angle between both; infinity where the difference is not finite.
    """
    off, sizes = float(np.linalg.norm(got - expected)), [float(np.linalg.norm(each)) for each in (got, expected)]
    if not np.isfinite(off):
        return float("inf"), 0.0
    scale = max(sizes[1], least)
    cosine = float(np.vdot(expected, got).real) / (sizes[0] * sizes[1]) if all(sizes) else float(sizes[0] == sizes[1])
    return (off / scale if scale else float(off > 0)), cosine


def fill(args: Any, seed: int = 0) -> Any:
    """Returns the pytree with each `jax.ShapeDtypeStruct` replaced by seeded data. Other leaves do not change.

    Inexact dtypes get normal values, divided by the square root of the array's second-last dimension (1 if there is
    none), so that the product of many matrices neither explodes nor vanishes. Integers get 0 or 1, which are valid
    indices; booleans get both values; keys are new keys.

    >>> import jax, jax.numpy as jnp
    >>> fill({"tokens": jax.ShapeDtypeStruct((2, 3), jnp.int32), "scale": 2.0})["tokens"].shape
    (2, 3)
    """
    leaves, tree = jax.tree.flatten(args)
    keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
    filled = [_fill(leaf, key) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf, key in zip(leaves, keys)]
    return jax.tree.unflatten(tree, filled)


def _fill(leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    shape, dtype = leaf.shape, leaf.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(
            jax.random.key(jax.random.randint(key, (), 0, 2**30), impl=_compat.key_implementation(dtype).name), shape
        )
    if dtype == jax.dtypes.float0:
        return np.zeros(shape, dtype)  # type: ignore[return-value]
    if jnp.issubdtype(dtype, jnp.inexact):
        fan_in = shape[-2] if len(shape) >= 2 else 1
        wide = jnp.complex64 if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.float32
        return (jax.random.normal(key, shape, wide) / max(fan_in, 1) ** 0.5).astype(dtype)
    return jax.random.bernoulli(key, 0.5, shape).astype(dtype)


def _tolerance(fun: Callable[..., Any], args: tuple[Any, ...]) -> float:
    dtypes = {value.dtype for value in lift.trace(fun, *args).values if value.dtype is not None}
    inexact = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    return max((TOLERANCES.get(str(dtype), COARSEST) for dtype in inexact), default=0.0)


def _outputs_and_gradients(call: lift.Taken, *, name: str, seed: int) -> tuple[Any, Any]:
    """Returns (outputs, gradients). Gradients have the structure of the arguments, with None for leaves that are not
    differentiated.
    """
    fun = call.everything
    leaves, tree = jax.tree.flatten(call.args if call.whole else call.args[0])
    active = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]
    if not active:
        dtypes = sorted({str(jnp.result_type(leaf)) for leaf in leaves})
        raise NotDifferentiableError(
            f"{name} has nothing to differentiate: no argument is of a floating-point or complex dtype; got "
            f"{dtypes or 'no arrays'}."
        )

    def run(leaves: list[Any]) -> tuple[Any, list[Any]]:
        def differentiated(inexact: list[Any]) -> tuple[list[Any], Any]:
            merged = list(leaves)
            for i, leaf in zip(active, inexact):
                merged[i] = leaf
            given = jax.tree.unflatten(tree, merged)
            out = fun(*given) if call.whole else fun(given)
            return [leaf for leaf in jax.tree.leaves(out) if is_inexact(leaf)], out

        smooth, pull_back, out = jax.vjp(differentiated, [jnp.asarray(leaves[i]) for i in active], has_aux=True)
        if not smooth:
            raise NotDifferentiableError(
                f"{name} has nothing to differentiate: no output is of a floating-point or complex dtype."
            )
        keys = jax.random.split(jax.random.key(seed + 1), len(smooth))
        cotangents = [_cotangent(leaf, key) for leaf, key in zip(smooth, keys)]
        return out, pull_back(cotangents)[0]

    from jaxckpt.memory.targets import compiler_options

    out, inexact = jax.jit(run, compiler_options=compiler_options() or None)(leaves)
    gradients: list[Any] = [None] * len(leaves)
    for i, gradient in zip(active, inexact):
        gradients[i] = gradient
    return out, jax.tree.unflatten(tree, gradients)


def _cotangent(leaf: jax.Array, key: jax.Array) -> jax.Array:
    wide = jnp.complex64 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else jnp.float32
    return jax.random.normal(key, leaf.shape, wide).astype(leaf.dtype)


def _compare(got: Any, expected: Any, what: str, floor: float = 0.0) -> list[_Difference]:
    """Compares two trees leaf by leaf. An error's scale is at least `floor` times the largest magnitude of all
    leaves.
    """
    here, there = str(jax.tree.structure(got)), str(jax.tree.structure(expected))
    if here != there:
        raise VerificationError(f"The {what} differs in structure: {here} against the reference's {there}.")
    paths = [what + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(got)]
    pairs = list(zip(paths, jax.tree.leaves(got), jax.tree.leaves(expected)))
    for path, a, b in pairs:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise VerificationError(
                f"The {path} differs in kind: {a.dtype}{list(a.shape)} against the reference's "
                f"{b.dtype}{list(b.shape)}."
            )
    least = floor * max((_largest(_wide(b)) for _, _, b in pairs), default=0.0) if floor else 0.0
    return [_difference(path, _wide(a), _wide(b), least) for path, a, b in pairs]


def _wide(array: Any) -> np.ndarray:
    """Returns a NumPy array that holds the same values: float64, complex128, or the integers as they are; a key's
    words.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return np.asarray(array).astype(np.complex128)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return np.asarray(array).astype(np.float64)
    return np.asarray(array)


def _largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(array[np.isfinite(array)]), initial=0.0))


def _difference(path: str, got: np.ndarray, expected: np.ndarray, least: float) -> _Difference:
    if not np.issubdtype(got.dtype, np.inexact):
        off = 0.0 if np.array_equal(got, expected) else np.inf
        return _Difference(path, off, off)
    differs = ~((got == expected) | (np.isnan(got) & np.isnan(expected)))
    if not differs.any():
        return _Difference(path, 0.0, 0.0)
    if not (np.isfinite(got[differs]).all() and np.isfinite(expected[differs]).all()):
        return _Difference(path, np.inf, np.inf)
    absolute = float(np.max(np.abs(got[differs] - expected[differs])))
    scale = max(_largest(expected), least)
    return _Difference(path, absolute, absolute / scale if scale else np.inf)


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", type(fun).__name__)
