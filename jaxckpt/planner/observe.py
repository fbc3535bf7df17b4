"""What a step does with its function: what it calls it with, in what it differentiates it, and which results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxckpt import _compat
from jaxckpt._errors import NotDifferentiableError
from jaxckpt.core import lift, purity
from jaxckpt.core.leaves import is_inexact, is_number
from jaxckpt.memory.gradient import StepMaker
from jaxckpt.planner.calls import abstract as abstract_leaf

T = TypeVar("T")


@dataclass
class Seen:
    """What a step does with its function: the arguments that it calls it with, which of their leaves it differentiates
    in, and which leaves of the results it differentiates; `again` says whether it differentiates the gradient too, and
    `mapped` which `jax.shard_map` of the step it is called within, if any. `shardings` are those by which the step's
    `jax.jit` lays out each leaf of its own arguments (`in_shardings`); empty where it says nothing. `results_over` is
    the number of devices over which it lays out its results (`out_shardings`); 1 where it does not say.

    The function is one of arrays alone: see `jaxckpt.core.lift`.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    differentiated: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    again: bool = False
    mapped: _compat.Mapped | None = None
    shardings: tuple[Any, ...] = ()
    results_over: int = 1

    def run(self, fun: Callable[[], T]) -> T:
        """Returns what `fun()` returns, called where the function can be traced."""
        return fun() if self.mapped is None else self.mapped.run(fun)


def observe(fun: Callable[..., Any], step: StepMaker, args: tuple[Any, ...]) -> Seen:
    """Traces the step around the function, each differentiable leaf that goes in or comes out behind an identity whose
    derivative says that it was asked for.
    """
    calls: list[tuple[Seen, set[int], set[int], set[int]]] = []
    around = jax.sharding.get_abstract_mesh()  # within a jax.shard_map the caller's, whose types its values have anyway

    def watch(call: lift.Taken) -> Any:
        purity.refuse_ref_arguments(fun, call.paths())
        leaves, tree = jax.tree.flatten((call.args, call.kwargs))
        abstract = [abstract_leaf(x) if hasattr(x, "shape") else x for x in leaves]
        abstract_args, abstract_kwargs = jax.tree.unflatten(tree, abstract)
        asked: set[int] = set()
        again: set[int] = set()
        ends: set[int] = set()
        mapped = None if jax.sharding.get_abstract_mesh() == around else _compat.mapped_here()
        seen = Seen(call.fun, abstract_args, abstract_kwargs, mapped=mapped)
        calls.append((seen, asked, again, ends))
        leaves = [
            _watch(asked, again, place)(leaf) if is_inexact(leaf) else _traced(leaf) if is_number(leaf) else leaf
            for place, leaf in enumerate(leaves)
        ]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        results, tree = jax.tree.flatten(call.fun(*args, **kwargs))
        results = [
            _watch(ends, set(), place)(leaf) if isinstance(leaf, jax.Array) and is_inexact(leaf) else leaf
            for place, leaf in enumerate(results)
        ]
        return jax.tree.unflatten(tree, results)

    watched = lift.through(purity.refusing(fun), lambda call: call.finish(watch(call)))
    try:
        made = step(watched)
        lift.attempt(made, args, {}, lambda call: jax.eval_shape(call.fun, *call.args))
    except TypeError as error:
        if "forward-mode" not in str(error) or not calls:
            raise
        raise NotDifferentiableError(
            "step must differentiate the function that it is given in reverse mode, as jax.value_and_grad does: forward "
            "mode (jax.jvp, jax.jacfwd) keeps nothing for a backward pass."
        ) from error
    twice = any(again for _, _, again, _ in calls)
    for seen, asked, _, ends in calls:
        if asked:
            places, of_results = tuple(sorted(asked)), tuple(sorted(ends))
            shardings, over = _shardings(made, args)
            return replace(
                seen,
                differentiated=places,
                results=of_results,
                again=twice,
                shardings=shardings,
                results_over=over,
            )
    called = (
        "calls it without taking a gradient, or the result depends on none of the floating-point arrays that it "
        "differentiates: by default those of the first argument"
    )
    raise NotDifferentiableError(
        "step must differentiate the function that it is given, as jax.value_and_grad does; it "
        f"{called if calls else 'does not call it'}. Then there is nothing to keep or to recompute."
    )


def _shardings(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[tuple[Any, ...], int]:
    """Returns the shardings that a jitted step gives its arguments, None for one that it does not lay out, and the
    number of devices over which it lays out its results. It was traced before, and JAX has that trace.
    """
    nothing: tuple[tuple[Any, ...], int] = (), 1
    if not lift.is_jitted(step) or lift.has_objects(args):
        return nothing

    def given(call: lift.Taken) -> tuple[tuple[Any, ...], int]:
        jaxpr = jax.make_jaxpr(call.fun)(*call.args).jaxpr
        where = {id(var): each for eqn in jaxpr.eqns for var, each in zip(eqn.invars, eqn.params["in_shardings"])}
        found = (where.get(id(var)) for var in jaxpr.invars)
        results = (each for eqn in jaxpr.eqns for each in eqn.params["out_shardings"])
        over = (each.num_devices for each in results if not _compat.is_unspecified(each))
        return tuple(None if _compat.is_unspecified(each) else each for each in found), max(over, default=1)

    try:
        return lift.attempt(step, args, {}, given)
    except ValueError:  # it has compiler options, which JAX allows in no other trace
        return nothing


def _traced(number: Any) -> Any:
    """Returns a number as an array that is being traced: a function that needs its value fails, as it does where its
    graph is made, so that both see the same arguments.
    """
    return jax.lax.optimization_barrier(jnp.asarray(number))


def _watch(asked: set[int], again: set[int], place: int) -> Callable[[Any], Any]:
    """Returns an identity; differentiated it enters `place` into `asked`, and into `again` if its gradient is
    differentiated too.
    """

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    def forward(x: Any) -> tuple[Any, None]:
        return x, None

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        asked.add(place)
        return (gradient(cotangent),)

    @jax.custom_jvp
    def gradient(x: Any) -> Any:
        return x

    def tangent(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        again.add(place)
        return gradient(*primals), tangents[0]

    gradient.defjvp(tangent)
    same.defvjp(forward, backward)
    return same
