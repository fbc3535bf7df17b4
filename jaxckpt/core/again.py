"""Stretches of a function that it runs again itself, in front of an operation that reads what they made.

A function that takes a gradient, such as a loss of energies and forces, keeps the values of the forward pass of that
gradient until its backward pass reads them. It holds them whatever is kept for its own derivative, and there a
cotangent of each stands beside it. Run again where it is needed, a block hands on what goes into it, as it does where
people put `jax.checkpoint` around it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import PlanMismatchError
from jaxckpt.core import surgery
from jaxckpt.core.emit import run as run_emitted
from jaxckpt.core.graph import Graph, trace
from jaxckpt.core.regions import RecomputedStretch
from jaxckpt.core.tie import tie
from jaxckpt.core.tiling.stretches import Stretches


def with_recomputed(
    graph: Graph, recomputed: Sequence[RecomputedStretch], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Graph:
    """Returns the graph of a function that runs stretches again.

    Args:
      graph: of the function.
      recomputed: its stretches.
      args, kwargs: the function's arguments, or arrays like them.

    Raises:
      PlanMismatchError: the stretches are not of this graph, or have side effects.
    """
    if not recomputed:
        return graph
    run = functools.partial(surgery.evaluate, _rewritten(graph, recomputed))
    return trace(lambda *args, **kwargs: run_emitted(graph, run, args, kwargs), *args, **kwargs)


def recomputing(fun: Callable[..., Any], recomputed: Sequence[RecomputedStretch]) -> Callable[..., Any]:
    """Returns a function of arrays that runs stretches again. A trace of it is what `with_recomputed` returns."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        graph = trace(fun, *args, **kwargs)
        run = functools.partial(surgery.evaluate, _rewritten(graph, recomputed))
        return run_emitted(graph, run, args, kwargs)

    return call


def _rewritten(graph: Graph, recomputed: Sequence[RecomputedStretch]) -> Any:
    """Returns the function's open jaxpr in which stretches run again. What is read from there on is what they make
    then; what goes into them is what the function made at first.
    """
    last = max(max(each.at for each in recomputed), max(each.stop for each in recomputed))
    if last >= len(graph.ops):
        raise PlanMismatchError(f"The plan runs operations again at {last} of {len(graph.ops)}. Plan anew.")
    stretches, jaxpr = Stretches(graph), graph.body.jaxpr
    made = {var: place for place, group in enumerate(stretches.groups) for eqn in group for var in eqn.outvars}
    names: dict[Any, Any] = {}  # variable -> the one that is read in its place from here on
    eqns: list[Any] = []
    ends = sorted({0, len(stretches.groups), *(end for each in recomputed for end in (each.start, each.stop, each.at))})

    def plain(start: int, stop: int) -> None:
        """Adds the operations start..stop. A call that a stretch begins or ends in stays written out, since its values
        are read there.
        """
        for low, high in itertools.pairwise(end for end in ends if start <= end <= stop):
            read = lambda eqn: [surgery.renamed(names, atom) for atom in eqn.invars]
            eqns.extend(eqn.replace(invars=read(eqn)) for eqn in stretches.equations(low, high))

    reached = 0
    for each in sorted(recomputed, key=lambda each: each.at):
        plain(reached, each.at)
        reached = each.at
        program, inputs, results = stretches.program(each.start, each.stop)
        if effects := _compat.side_effects(program):
            what = ", ".join(map(str, effects))
            raise PlanMismatchError(f"The plan runs again what has side effects: {what}. Plan anew.")
        arriving = _arriving(stretches, each, results, made)
        # The compiler would merge what runs again with what ran at first, or run it long before it is needed.
        held = [var for var in inputs if var in made] or inputs
        behind = [_compat.fresh_var(var.aval) for var in (*held, *arriving)]
        if behind:
            eqns.append(_barrier([*held, *(surgery.renamed(names, var) for var in arriving)], behind))
        own = dict(zip(held, behind))
        names.update(zip(arriving, behind[len(held) :]))
        for eqn in program.eqns:
            outs = [var if isinstance(var, _compat.DropVar) else _compat.fresh_var(var.aval) for var in eqn.outvars]
            eqns.append(eqn.replace(invars=[surgery.renamed(own, atom) for atom in eqn.invars], outvars=outs))
            own.update(zip(eqn.outvars, outs))
        names.update((var, own[var]) for var in results)
    plain(reached, len(stretches.groups))
    return _compat.rewritten(jaxpr, eqns, [surgery.renamed(names, atom) for atom in jaxpr.outvars])


def _arriving(
    stretches: Stretches, each: RecomputedStretch, results: Sequence[Any], made: Mapping[Any, int]
) -> list[Any]:
    """Returns what is made between a stretch and the place where it runs again, and read there together with what the
    stretch makes: the cotangents that come to it.
    """
    found: dict[Any, None] = {}
    own = set(results)
    for group in stretches.groups[each.at :]:
        for eqn in group:
            read = [atom for atom in eqn.invars if isinstance(atom, _compat.Var)]
            if not own.isdisjoint(read):
                found.update((var, None) for var in read if each.stop <= made.get(var, -1) < each.at)
    return list(found)


def _barrier(operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """Returns the equation of a barrier."""
    program = jax.make_jaxpr(lambda *values: tie(*values))(*(var.aval for var in operands))
    (eqn,) = _compat.open_jaxpr(program).eqns
    return eqn.replace(invars=list(operands), outvars=list(results))
