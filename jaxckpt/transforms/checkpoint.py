"""checkpoint: one function, with intermediate values kept or recomputed as a policy says."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.ad_checkpoint

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, EffectsError, InWords, explains, refuse_call
from jaxckpt.core import purity
from jaxckpt.core.emit import emit
from jaxckpt.core.finish import finished_function
from jaxckpt.core.graph import trace_with_calls
from jaxckpt.core.leaves import array
from jaxckpt.core.lift import anything, is_model, is_operand, refuse_module
from jaxckpt.policies import Policy, policy_of
from jaxckpt.transforms import statics


def tag(x: Any, name: str) -> Any:
    """Returns `x` with its leaves named for policies: `jax.ad_checkpoint.checkpoint_name` on every leaf.

    Args:
      x: a pytree of arrays.
      name: the tag, which a policy's tag globs match.

    Raises:
      ArgumentError: the name is not a string, or is empty; or a leaf of `x` is not an array.

    >>> import jax, jax.numpy as jnp
    >>> layer = lambda x, w: jnp.tanh(tag(x @ w, "up"))
    >>> f = checkpoint(layer, policy=Policy({"up": "save"}))
    """
    if not isinstance(name, str) or not name:
        hint = "The value comes first: tag(value, name)." if isinstance(x, str) else ""
        raise ArgumentError("name", "a string that is not empty", InWords(type(name).__name__) if hint else name, hint)
    if wrong := [leaf for leaf in jax.tree.leaves(x) if not is_operand(leaf)]:
        raise ArgumentError("x", "a pytree of arrays", wrong[0])
    return jax.tree.map(lambda leaf: jax.ad_checkpoint.checkpoint_name(leaf, name), x)


@explains
def checkpoint(
    fun: Callable[..., Any] | None = None,
    /,
    *others: Any,
    policy: Any = None,
    prevent_cse: bool | Sequence[Any] = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Returns `fun` with its intermediate values recomputed in the backward pass, except those that the policy keeps.

    One checkpoint around a whole model saves nothing, because all recomputed values are in memory at once. Checkpoint
    each layer, or each few layers (`checkpoint_sequential`).

    Args:
      fun: a function of pytrees of arrays with any number of outputs, or a callable module of equinox or nnx. Leaves
        that are not arrays (functions, strings) are passed on unchanged. A call changes modules of nnx among the
        arguments as `fun` does, once. Of a module a `jax.tree_util.Partial` is returned, a pytree of its arrays: it
        may stand in the module's place in a model. If it is omitted, a decorator is returned.
      *others: none. The arguments of a call belong to the function that is returned: `checkpoint(fun)(*args)`.
      policy: None (keep only the inputs), a `Policy`, a preset's name ("dots"), or one of `jax.checkpoint_policies`.
        For None, one of JAX's policies, and a policy that keeps nothing or everything, a call is one of
        `jax.checkpoint(fun)`; the arrays that scans in it fill are allocated when their loops start. Any other `Policy`
        is decided when `fun` is traced, at each call with new shapes.
      prevent_cse: whether the compiler must not merge the recomputation with the forward pass. False is right only
        inside `lax.scan`, where nothing can be merged, and it is faster there. A sequence has an entry for each
        argument of `fun` that is not static: a bool, or a pytree of bools that is a prefix of the argument.
      static_argnums: positional arguments that are not arrays and select the program. `fun` is traced once for each
        type and value of a hashable argument, and at each call for other arguments.
      static_argnames: names of such arguments.

    Raises:
      ArgumentError: the policy is invalid, an argument number is out of range, or `fun` is not all that is given by
        position.
      UnmatchedTagError: at the call: a strict policy's glob matches no tag.
      EffectsError: when it is differentiated, with a `Policy`: the function has side effects that the recomputation
        would repeat. Inside `jax.jit`, and without a `Policy`, the error is JAX's NotImplementedError.

    >>> import jax, jax.numpy as jnp
    >>> @checkpoint(policy="dots")
    ... def layer(x, w):
    ...     return jnp.tanh(x @ w)
    >>> jax.grad(lambda x, w: layer(x, w).sum())(jnp.ones((2, 2)), jnp.ones((2, 2))).shape
    (2, 2)
    """
    refuse_call(others, "fun", "checkpoint(fun)(*args)")
    if fun is None:
        return functools.partial(
            checkpoint,
            policy=policy,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    if not callable(fun):
        raise ArgumentError("fun", "a function", fun, "Use @checkpoint or @checkpoint(policy=...).")
    hint = "Of flax: jaxckpt.flax.checkpoint(Class), or jaxckpt.flax.apply(model, ...). Of equinox: an instance."
    refuse_module(fun, "a function, or a module with its arrays in it", hint)
    static = statics.static(fun, static_argnums, static_argnames)
    barriers = _barriers(prevent_cse)
    resolved = policy_of(policy)
    if not is_model(fun):
        return _checkpointed(_with_hash(fun), resolved, barriers, static)
    if not isinstance(barriers, bool):
        barriers = (True, *barriers)  # the model's arrays are an argument too
    static = None if static is None else static.after_model(_call)
    try:
        call = _call_of_models(resolved, barriers, static)
    except TypeError:  # a policy of one's own, that has no hash
        call = _checkpointed(_call, resolved, barriers, static)
    return jax.tree_util.Partial(call, fun)


def _with_hash(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that JAX's caches take: an instance that can be called, of a class that says when two of its
    instances are equal, has no hash.
    """
    if type(fun).__hash__ is not None:
        return fun
    return functools.wraps(fun)(lambda *args, **kwargs: fun(*args, **kwargs))


@functools.lru_cache(maxsize=256)
def _call_of_models(policy: Any, barriers: bool | tuple[Any, ...], static: statics.Static | None) -> Callable[..., Any]:
    """Returns the checkpointed call of a module; the same for equal arguments, which are as of `_checkpointed`: it is
    part of the structure of a model that the module is put into.
    """
    return _checkpointed(_call, policy, barriers, static)


def _checkpointed(
    fun: Callable[..., Any], policy: Any, barriers: bool | tuple[Any, ...], static: statics.Static | None
) -> Callable[..., Any]:
    """Returns a function under a policy; arguments as of `checkpoint`, resolved."""
    is_jaxs, own = policy.as_jax() if isinstance(policy, Policy) else (True, policy)
    if is_jaxs:

        def plain(dynamic: Callable[..., Any]) -> Callable[..., Any]:
            made = jax.checkpoint(finished_function(dynamic), policy=own, prevent_cse=barriers)

            @functools.wraps(dynamic)
            def call(*args: Any, **kwargs: Any) -> Any:
                if not isinstance(barriers, bool):
                    _of_leaves(barriers, args, kwargs)
                return jax.tree.map(array, made(*args, **kwargs))  # JAX returns constants as numbers

            return call

        if static is None and not isinstance(policy, Policy):
            return _noted(anything(plain(fun), fun, plain), fun)
        return _calling(fun, static, plain, old=isinstance(policy, Policy))
    assert isinstance(policy, Policy)
    return _calling(fun, static, functools.partial(_by_policy, policy=policy, prevent_cse=barriers), old=True)


@contextlib.contextmanager
def _noting(fun: Callable[..., Any]) -> Iterator[None]:
    """A context in which an error about the value of a traced argument says what to do."""
    try:
        yield
    except jax.errors.ConcretizationTypeError as error:
        if not any(_TRACED in note for note in getattr(error, "__notes__", ())):
            error.add_note(
                f"{getattr(fun, '__qualname__', fun)} {_TRACED}. If its program depends on the value of an argument "
                "(`if train:`, `range(n)`), name that argument in static_argnums or static_argnames of "
                "jaxckpt.checkpoint."
            )
        raise


def _noted(whole: Callable[..., Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a checkpointed function, called in `_noting`; `fun`: without checkpoints."""

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        with _noting(fun):
            return whole(*args, **kwargs)

    return checkpointed


_TRACED = "is checkpointed, so its arguments are traced"


def _call(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _barriers(prevent_cse: Any) -> bool | tuple[Any, ...]:
    """Returns `prevent_cse` in the form for jax.checkpoint."""
    if isinstance(prevent_cse, bool):
        return prevent_cse
    of_arguments = isinstance(prevent_cse, Sequence) and not isinstance(prevent_cse, (str, bytes))
    if of_arguments and all(isinstance(leaf, bool) for leaf in jax.tree.leaves(list(prevent_cse))):
        return tuple(prevent_cse)
    raise ArgumentError("prevent_cse", "a bool, or a sequence with a pytree of bools for each argument", prevent_cse)


def _of_leaves(prevent_cse: tuple[Any, ...], args: tuple[Any, ...], kwargs: Any) -> list[bool]:
    """Returns what `prevent_cse` says of each leaf of the arguments.

    Raises:
      ArgumentError: it is not for these arguments.
    """
    given = (args, kwargs) if kwargs else args
    try:
        return jax.tree.leaves(jax.tree.broadcast(prevent_cse, given))
    except ValueError as error:
        structure = jax.tree.structure(given)
        rule = f"a bool, or a sequence with a pytree of bools for each argument: a prefix of {structure}"
        raise ArgumentError("prevent_cse", rule, prevent_cse) from error


def _by_policy(fun: Callable[..., Any], policy: Policy, prevent_cse: bool | tuple[Any, ...]) -> Callable[..., Any]:
    """Returns the function under a policy that is decided on the traced program.

    Equal calls of a function (a layer that is used at every depth) are analysed once.
    """
    barriers = tuple(jax.tree.flatten(prevent_cse))
    settings = policy, tuple(barriers[0]), barriers[1]

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        leaves, in_tree = jax.tree.flatten((args, kwargs))
        holder = _emitted(fun)
        ties = policy.may_tie and not _begins_iteration()
        key = settings, ties, in_tree, tuple(map(jax.typeof, leaves))
        found = holder.get(key)
        if found is None:
            found = _emit(fun, policy, prevent_cse, args, kwargs, ties=ties)
            if not any(map(_compat.is_tracer, found.consts)):
                holder[key] = found
        if found.effects and any(map(_compat.is_linearized, leaves)):
            raise EffectsError(
                f"fun ({getattr(fun, '__name__', fun)}) must have no side effects to be checkpointed and "
                f"differentiated, because the "
                f"recomputation would repeat them; it has {found.effects}. Move io_callback and other effects out "
                f"of it, or "
                "checkpoint less."
            )
        return jax.tree.unflatten(found.out_tree, map(array, found.run(*found.consts, *leaves)))

    return checkpointed


@dataclass(frozen=True)
class _Emitted:
    """A function under a policy: `run` takes `consts` and the arguments' leaves. `effects` names the effects that must
    not repeat.
    """

    run: Callable[..., list[Any]]
    consts: list[Any]
    out_tree: Any
    effects: str


_begun: weakref.WeakSet[Any] = weakref.WeakSet()
"""Bodies of loops, being traced, in which a function has been called under a policy that may tie."""


def _begins_iteration() -> bool:
    """Whether a function under a policy is called for the first time in a loop's body: its gradients come last in an
    iteration of the backward pass, and the loop waits for them. A barrier between a parameter's gradient and the sum
    over iterations would have XLA make the two apart.
    """
    body = _compat.loop_body()
    if body is None or body in _begun:
        return False
    _begun.add(body)
    return True


def _emit(
    fun: Callable[..., Any],
    policy: Policy,
    prevent_cse: bool | tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: Any,
    *,
    ties: bool,
) -> _Emitted:
    with _noting(fun):
        graph = trace_with_calls(purity.refusing(fun), args, kwargs)
    purity.refuse_refs(fun, graph)
    consts = _compat.jaxpr_consts(graph.jaxpr)
    if not isinstance(prevent_cse, bool):
        prevent_cse = (*[False] * len(consts), *_of_leaves(prevent_cse, args, kwargs))
    run = emit(graph, policy.regions(graph, ties=ties), prevent_cse)
    effects = ", ".join(map(str, _compat.remat_disallowed_effects(graph.jaxpr)))
    return _Emitted(run, consts, graph.out_tree, effects)


@_compat.weakref_lru_cache
def _emitted(fun: Callable[..., Any]) -> dict[Any, _Emitted]:
    """Returns the cache of emitted functions for a function, in the present configuration of JAX. It lives as long as
    the function.
    """
    return {}


def _calling(
    fun: Callable[..., Any], static: statics.Static | None, engine: Callable[[Any], Callable[..., Any]], *, old: bool
) -> Callable[..., Any]:
    """Returns a function that closes `fun` over its static arguments, and passes the others to the checkpointed
    function.

    Args:
      engine: makes the checkpointed function from a function without static arguments.
      old: whether to use the old jax.checkpoint instead of the new one, which is not finished: see
        `_compat.working_checkpoints`.
    """
    whole = anything(engine(fun), fun, engine)

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        with _compat.working_checkpoints() if old else contextlib.nullcontext():
            if static is None:
                return whole(*args, **kwargs)
            dynamic, args, kwargs = static.closed(args, kwargs)
            return anything(engine(dynamic), dynamic, engine)(*args, **kwargs)

    return _noted(checkpointed, fun)
