"""checkpoint: one function, its intermediate values kept or recomputed as a policy says."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.ad_checkpoint

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, EffectsError
from jaxckpt.core.emit import emit, run
from jaxckpt.core.graph import Graph, trace
from jaxckpt.policies import Policy, resolve


def tag(x: Any, name: str) -> Any:
    """Returns `x` as it is, its leaves named for policies: `jax.ad_checkpoint.checkpoint_name` on every leaf.

    Args:
      x: a pytree of arrays.
      name: what a policy's tag globs match.

    Raises:
      ArgumentError: the name is no string, or empty.

    >>> import jax, jax.numpy as jnp
    >>> layer = lambda x, w: jnp.tanh(tag(x @ w, "up"))
    >>> f = checkpoint(layer, policy=Policy({"up": "save"}))
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError("name", "a string that is not empty", name)
    return jax.tree.map(lambda leaf: jax.ad_checkpoint.checkpoint_name(leaf, name), x)


def checkpoint(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    policy: Any = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Returns `fun` with its intermediate values recomputed in the backward pass, but for those that the policy keeps.

    One checkpoint around a whole model saves nothing, because all of its recomputation comes back at once: put it around each layer, or
    each few layers (`checkpoint_sequential`).

    Args:
      fun: a function of pytrees of arrays, with any number of outputs. Left out: a decorator is returned.
      policy: None (keep only the inputs), a `Policy`, a preset's name ("dots"), or one of `jax.checkpoint_policies`. With None, or JAX's
        own, or a policy that keeps nothing or everything, the result is `jax.checkpoint(fun)`.
        Another `Policy` is decided when `fun` is traced, at each call with new shapes.
      prevent_cse: whether the compiler is kept from merging the recomputation with the forward pass. False is right only inside `lax.scan`,
        where nothing can be merged, and is faster there.
      static_argnums: positional arguments that are no arrays and select the program; they must be hashable.

    Raises:
      ArgumentError: the policy is none, or an argument number is out of range.
      UnmatchedTagError: at the call: a strict policy's glob matches no tag.
      EffectsError: at the call, with a `Policy`: the function has side effects that the recomputation would repeat.

    >>> import jax, jax.numpy as jnp
    >>> @checkpoint(policy="dots")
    ... def layer(x, w):
    ...     return jnp.tanh(x @ w)
    >>> jax.grad(lambda x, w: layer(x, w).sum())(jnp.ones((2, 2)), jnp.ones((2, 2))).shape
    (2, 2)
    """
    if fun is None:
        return functools.partial(checkpoint, policy=policy, prevent_cse=prevent_cse, static_argnums=static_argnums)
    if not callable(fun):
        raise ArgumentError("fun", "a function", fun, "Use @checkpoint or @checkpoint(policy=...).")
    numbers = _static_argnums(static_argnums)
    resolved = resolve(policy)
    is_jaxs, own = resolved.as_jax() if isinstance(resolved, Policy) else (True, resolved)
    if is_jaxs:
        inner = jax.checkpoint(fun, policy=own, prevent_cse=prevent_cse, static_argnums=numbers)
        return _checked(fun, inner, numbers, resolved) if numbers or isinstance(resolved, Policy) else inner
    assert isinstance(resolved, Policy)
    decided = resolved

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        dynamic, statics = _split(args, numbers)
        leaves, in_tree = jax.tree.flatten((dynamic, kwargs))
        avals = tuple(_aval(leaf) for leaf in leaves)
        with _compat.working_checkpoints():
            graph, emitted = _decided(fun, decided, prevent_cse, statics, len(args), in_tree, avals, dynamic, kwargs)
            return run(graph, emitted, dynamic, kwargs)

    return checkpointed


def _decided(
    fun: Callable[..., Any],
    policy: Policy,
    prevent_cse: bool,
    statics: tuple[tuple[int, Any], ...],
    count: int,
    in_tree: Any,
    avals: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Graph, Any]:
    """Traces, decides and emits; or finds it done: equal calls of one function (a layer used at every depth) are analysed once."""
    holder = _cache(fun)
    key = (policy, prevent_cse, statics, count, in_tree, avals)
    try:
        found = holder.get(key)
    except TypeError as error:
        unhashable = [i for i, value in statics if not _hashable(value)]
        raise ArgumentError("static_argnums", "of hashable arguments", unhashable) from error
    if found is not None:
        return found
    graph = trace(_with_statics(fun, statics, count), *args, **kwargs)
    disallowed = _compat.remat_disallowed_effects(graph.jaxpr)
    if disallowed:
        name = getattr(fun, "__name__", fun)
        raise EffectsError(
            f"fun ({name}) must be free of side effects to be checkpointed, for the recomputation would repeat them; it has "
            f"{', '.join(map(str, disallowed))}. Move io_callback, pure effects and the like out of it, or checkpoint less."
        )
    made = graph, emit(graph, policy.regions(graph), prevent_cse)
    if not any(_compat.is_tracer(const) for const in _compat.jaxpr_consts(graph.jaxpr)):
        holder[key] = made
    return made


@_compat.weakref_lru_cache
def _cache(fun: Callable[..., Any]) -> dict[Any, Any]:
    """Returns what has been emitted for a function, in the present configuration of JAX; dropped with the function."""
    return {}


def _aval(leaf: Any) -> Any:
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    return aval, getattr(aval, "weak_type", False)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _static_argnums(numbers: int | Sequence[int]) -> tuple[int, ...]:
    listed = (numbers,) if isinstance(numbers, int) and not isinstance(numbers, bool) else numbers
    if not isinstance(listed, Sequence) or not all(isinstance(n, int) and not isinstance(n, bool) for n in listed):
        raise ArgumentError("static_argnums", "an int or a sequence of ints", numbers)
    return tuple(listed)


def _check_range(numbers: tuple[int, ...], count: int) -> None:
    for number in numbers:
        if not -count <= number < count:
            raise ArgumentError(
                "static_argnums",
                f"within the {count} positional arguments of the call",
                number,
                "Pass that argument by position.",
            )


def _checked(
    fun: Callable[..., Any], inner: Callable[..., Any], numbers: tuple[int, ...], policy: Any
) -> Callable[..., Any]:
    """Returns `inner` with argument numbers checked, and with a policy of ours where checkpoints work."""

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        _check_range(numbers, len(args))
        with _compat.working_checkpoints() if isinstance(policy, Policy) else contextlib.nullcontext():
            return inner(*args, **kwargs)

    return checkpointed


def _split(args: tuple[Any, ...], numbers: tuple[int, ...]) -> tuple[tuple[Any, ...], tuple[tuple[int, Any], ...]]:
    _check_range(numbers, len(args))
    places = {number % len(args) for number in numbers}
    dynamic = tuple(arg for i, arg in enumerate(args) if i not in places)
    return dynamic, tuple((i, args[i]) for i in sorted(places))


def _with_statics(fun: Callable[..., Any], statics: tuple[tuple[int, Any], ...], count: int) -> Callable[..., Any]:
    if not statics:
        return fun
    fixed = dict(statics)

    def call(*dynamic: Any, **kwargs: Any) -> Any:
        rest = iter(dynamic)
        return fun(*(fixed[i] if i in fixed else next(rest) for i in range(count)), **kwargs)

    return call
