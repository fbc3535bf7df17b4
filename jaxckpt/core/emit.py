"""Emit: a plan becomes a function. Regions are nested `jax.checkpoint`s, and what they keep are names inserted into the jaxpr.

Names, not policies that JAX calls back: JAX is about to turn policies into data (flag jax_remat3), and then a callable one means "recompute
all". A value that is kept is named where it is computed; in a loop's body too, where the name keeps it for every iteration.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxckpt import _compat
from jaxckpt._errors import PlanMismatchError
from jaxckpt.actions import SAVE, Action
from jaxckpt.core import reads, stored, surgery
from jaxckpt.core.graph import Body, Graph, Op
from jaxckpt.core.leaves import array
from jaxckpt.core.loops import rewrite as rewrite_loop
from jaxckpt.core.reads import INTERNAL, Flat
from jaxckpt.core.regions import Loop, Region


def emit(
    graph: Graph, regions: tuple[Region, ...], prevent_cse: bool | tuple[bool, ...] = True, loops: tuple[Loop, ...] = ()
) -> Flat:
    """Returns the function `(constants..., arguments...) -> results`, flat lists, that keeps what the regions say and recomputes the rest.

    Args:
      graph: the traced function.
      regions: disjoint, in order; those of a plan that was made for this graph.
      prevent_cse: as of `Plan`; or, with one region around everything, for each constant and argument.
      loops: as of `Plan`.

    Raises:
      PlanMismatchError: a loop is no scan of the graph, or of another length.
    """
    if not regions and not loops:
        return functools.partial(surgery.evaluate, _compat.open_jaxpr(graph.jaxpr))
    names = _Names(graph)
    actions = {i: a for region in regions for i, a in _all_actions(region).items()}
    if stray := [loop.op for loop in loops if not 0 <= loop.op < len(graph.ops)]:
        raise PlanMismatchError(f"The plan has a loop at operation {stray[0]} of {len(graph.ops)}. Plan anew.")
    cuts = sorted({place for region in regions for place in _boundaries(region)})
    rewritten = _rewrite(graph.body, names, actions, {loop.op: loop for loop in loops}, cuts)
    if len(regions) == 1 and (regions[0].start, regions[0].stop) == (0, len(graph.ops)):
        return _region(regions[0], graph, rewritten, names, prevent_cse)
    return _stretch(0, len(graph.ops), regions, graph, rewritten, names, prevent_cse)


def run(graph: Graph, emitted: Flat, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls what `emit` returned, on the arguments that the graph was traced with or others like them; all results are arrays."""
    leaves = jax.tree.leaves((args, kwargs))
    out = emitted(*_compat.jaxpr_consts(graph.jaxpr), *leaves)
    return jax.tree.unflatten(graph.out_tree, map(array, out))


class Named:
    """A body's operations with a name at each of their results, to be looked at in stretches: see `stretch`."""

    def __init__(self, graph: Graph, body: Body) -> None:
        self.graph, self.body = graph, body
        values = {index: SAVE for op in body.ops for index in op.outputs if graph.values[index].addressable}
        self.names = _Names(graph, whole=True)
        self.groups = _rewrite(body, self.names, values, cuts=range(len(body.ops)))

    def stretch(self, start: int, stop: int, outputs: Sequence[int]) -> tuple[Any, list[int]]:
        """Returns the operations start..stop as a jaxpr with the values `outputs` for results, and the values that its inputs are."""
        eqns = [eqn for group in self.groups[start:stop] for eqn in group]
        if stop == len(self.body.ops):
            eqns += [eqn for group in self.groups[stop:] for eqn in group]
        made = {var for eqn in eqns for var in eqn.outvars}
        inputs = surgery.used(eqns)
        where = {self.body.values[var]: var for var in made if var in self.body.values}
        wanted = [where[index] for index in outputs]
        jaxpr = surgery.stretch(eqns, inputs, wanted, self.body.jaxpr)
        return jaxpr, [self.body.values[var] for var in inputs]

    def value(self, eqn: Any) -> int | None:
        """Returns the value that an equation names, in this jaxpr or in one that JAX made from it; None where it is no such equation."""
        name = _compat.equation_name(eqn)
        return int(name.split(":")[2]) if name is not None and name.startswith(self.names.prefix) else None


class _Names:
    """The name that the emitter gives to a value: none that the program has already, or an outer region would keep an inner one's values.

    With `whole` a complex value has one name, as to look at; without, one at each of its parts, as jax.checkpoint can keep it.
    """

    def __init__(self, graph: Graph, whole: bool = False) -> None:
        self.whole = whole
        self.read: set[int] = (
            set()
        )  # values that the derivative of their own operation reads, and those kept as something else
        self.shared: dict[Any, tuple[Any, Any, list[int]]] = {}  # calls that have been given names, see `_call`
        self.same: dict[int, int] = {}  # value -> the one whose name it has, where two calls are one program
        taken = {name for body in _bodies(graph.body) for name in _internal_names(body)}
        level = 0
        while any(name.startswith(f"{INTERNAL}{level}:") for name in taken):
            level += 1
        self.prefix = f"{INTERNAL}{level}:"
        self.graph = graph

    def __call__(self, index: int) -> str:
        index = self.same.get(index, index)
        return f"{self.prefix}{index}:{self.graph.values[index].label}"

    def equations(self, operand: Any, result: Any, index: int, maker: Any, action: Action) -> list[Any]:
        """Returns the equations by which the variable `result` is `operand`, a value, with its name; at the source line of `maker`."""
        if action.changes:
            self.read.add(index)
            return [_compat.name_equation(operand, result, stored.marker(self(index), action), maker)]
        if self.whole:
            return [_compat.name_equation(operand, result, self(index), maker)]
        return _compat.kept_equations(operand, result, self(index), maker)


def _bodies(body: Body) -> list[Body]:
    """Returns a body and all that are inside it."""
    found = [body]
    for each in found:  # grows while it is gone through
        found.extend(inner for op in each.ops for inner in op.bodies)
    return found


def _internal_names(body: Body) -> list[str]:
    names = (_compat.equation_name(eqn) for eqn in body.jaxpr.eqns)
    return [stored.unmarked(name) for name in names if name is not None and name.startswith(INTERNAL)]


def _all_actions(region: Region) -> dict[int, Action]:
    actions = {index: action for index, action in region.actions.items() if action.keeps}
    for inner in region.regions:
        actions |= _all_actions(inner)
    return actions


# ------------------------------------------------------------------------------------------------------- names into jaxprs


def _boundaries(region: Region) -> Iterator[int]:
    yield from (region.start, region.stop)
    for inner in region.regions:
        yield from _boundaries(inner)


def _rewrite(
    body: Body,
    names: _Names,
    actions: Mapping[int, Action],
    loops: Mapping[int, Loop] = MappingProxyType({}),
    cuts: Sequence[int] = (),
) -> list[list[Any]]:
    """Returns for each operation of the body its equations: itself, its values' names, and names of the user's that follow it.

    `loops` are by the operation's place in the body. `cuts` are places, rising, across which only named values are passed.
    """
    groups: list[list[Any]] = []
    named: set[int] = set()
    ops = iter(enumerate(body.ops))
    pending: list[Any] = []  # names given to inputs before the first operation
    before: dict[Any, tuple[int, Any]] = {}  # variable with a name -> where it is made, and the one without
    calls: dict[
        Any, tuple[int, Any]
    ] = {}  # result of a call with names inside -> where it is made, and the call without
    for eqn in body.jaxpr.eqns:
        if _is_alias(eqn):
            index = body.values[eqn.invars[0]]
            if index in actions and index not in named and names.graph.values[index].kind != "intermediate":
                named.add(index)
                (groups[-1] if groups else pending).extend(
                    names.equations(eqn.invars[0], eqn.outvars[0], index, eqn, actions[index])
                )
            else:
                (groups[-1] if groups else pending).append(eqn)
            continue
        place, op = next(ops)
        if reads.is_effect(eqn):
            groups.append([*pending, *_effect(eqn, before, calls, cuts, place)])
            pending = []
            continue
        group = _rewrite_op(eqn, op, names, actions, loops.get(place))
        if place not in loops:
            before.update((var, (place, new)) for var, new in zip(eqn.outvars, group[0].outvars) if var is not new)
            if op.primitive not in ("scan", "cond") and any(i in actions for b in op.bodies for i in _own_values(b)):
                calls.update((var, (place, eqn)) for var in eqn.outvars)
        groups.append([*pending, *group])
        pending = []
    if pending:
        groups.append(pending)
    return groups


def _is_alias(eqn: Any) -> bool:
    return _compat.equation_name(eqn) is not None and not isinstance(eqn.invars[0], _compat.Literal)


def _effect(
    eqn: Any,
    before: Mapping[Any, tuple[int, Any]],
    calls: Mapping[Any, tuple[int, Any]],
    cuts: Sequence[int],
    place: int,
) -> list[Any]:
    """Returns an equation that is run for its side effects: it reads values from before they are named (see `reads.is_effect`).

    Of a call that gives names inside it reads the results of one that does not; the compiler merges the two.
    """
    copies: dict[int, Any] = {}
    invars = []
    for var in eqn.invars:
        made, call = (None, None) if isinstance(var, _compat.Literal) else calls.get(var, (None, None))
        if made is None or call is None or bisect.bisect(cuts, made) != bisect.bisect(cuts, place):
            invars.append(_bare(before, var, cuts, place))
            continue
        if id(call) not in copies:
            operands = [_bare(before, operand, cuts, place) for operand in call.invars]
            copies[id(call)] = call.replace(
                invars=operands, outvars=[_compat.fresh_var(each.aval) for each in call.outvars]
            )
        invars.append(copies[id(call)].outvars[call.outvars.index(var)])
    return [*copies.values(), eqn.replace(invars=invars)]


def _bare(before: Mapping[Any, tuple[int, Any]], atom: Any, cuts: Sequence[int], place: int) -> Any:
    """Returns the variable without a name, where it is made in the stretch between cuts that `place` is in."""
    if isinstance(atom, _compat.Literal) or atom not in before:
        return atom
    made, bare = before[atom]
    return bare if bisect.bisect(cuts, made) == bisect.bisect(cuts, place) else atom


def _rewrite_op(eqn: Any, op: Op, names: _Names, actions: Mapping[int, Action], loop: Loop | None = None) -> list[Any]:
    changes: dict[str, Any] = {}
    for body in op.bodies:
        if not any(index in actions for index in _own_values(body)):
            continue
        parameter, place = body.param
        original = op.params[parameter] if place is None else op.params[parameter][place]
        new = _rewrite_body(original, body, names, actions)
        if place is None:
            changes[parameter] = new
        else:
            branches = list(changes.get(parameter, op.params[parameter]))
            branches[place] = new
            changes[parameter] = tuple(branches)
    if changes:
        call = reads.is_call(eqn)
        eqn = reads.with_program(eqn, changes["call_jaxpr"]) if call else _compat.replace_params(eqn, **changes)
    outvars, extra = list(eqn.outvars), []
    inside = {
        index for body in op.bodies for index in body.outputs
    }  # a call's results are named where they are computed
    for i, (var, index) in enumerate(zip(eqn.outvars, op.outputs)):
        if index in actions and index not in inside and not isinstance(var, _compat.DropVar):
            outvars[i] = _compat.fresh_var(var.aval)
            extra.extend(names.equations(outvars[i], var, index, eqn, actions[index]))
    if extra:
        kept = [i for i, index in enumerate(op.outputs) if index in actions]
        if reads.needs_redirection(eqn, kept):
            names.read.update(op.outputs[i] for i in kept)
        eqn = eqn.replace(outvars=outvars)
    return [*([eqn] if loop is None else rewrite_loop(eqn, op, loop, functools.partial(_loop_body, op, names))), *extra]


def _rewrite_body(original: Any, body: Body, names: _Names, actions: Mapping[int, Action]) -> Any:
    """Returns the jaxpr of a body with names: one for all bodies of a jaxpr of which the same is kept, since JAX caches by identity."""
    own = sorted(_own_values(body) - set(body.inputs))
    given = any(index in actions and names.graph.values[index].kind != "intermediate" for index in body.inputs)
    key = (id(original), tuple((i, actions[index]) for i, index in enumerate(own) if index in actions))
    if not given and key in names.shared:
        _, new, first = names.shared[key]
        names.same.update(zip(own, first))
        names.read.update(index for index, other in zip(own, first) if other in names.read)
        return new
    eqns = [e for group in _rewrite(body, names, actions) for e in group]
    new = _compat.like(original, surgery.with_equations(body.jaxpr, eqns), _compat.jaxpr_consts(original))
    if not given:
        names.shared[key] = original, new, own
    return new


def _loop_body(op: Op, names: _Names, actions: Mapping[int, Action]) -> tuple[Flat, Any]:
    body = op.bodies[0]
    jaxpr = body.jaxpr
    if actions:
        jaxpr = surgery.with_equations(jaxpr, [eqn for group in _rewrite(body, names, actions) for eqn in group])
    fun: Flat = functools.partial(surgery.evaluate, jaxpr)
    return fun if names.read.isdisjoint(actions) else reads.reads_names(fun), _policy(actions, names)


def _own_values(body: Body) -> set[int]:
    return {index for inner in _bodies(body) for index in inner.values.values()}


# --------------------------------------------------------------------------------------------------- regions into functions


def _region(
    region: Region, graph: Graph, groups: list[list[Any]], names: _Names, prevent_cse: bool | tuple[bool, ...]
) -> Flat:
    """Returns the whole function as one checkpoint."""
    jaxpr = _compat.open_jaxpr(graph.jaxpr)
    if not region.regions:
        body = surgery.with_equations(jaxpr, graph.calls.folded([eqn for group in groups for eqn in group]))
        inner: Flat = functools.partial(surgery.evaluate, body)
    else:
        inner = _stretch(region.start, region.stop, region.regions, graph, groups, names, prevent_cse)
    return _checkpointed(inner, region, names, prevent_cse)


def _checkpointed(fun: Flat, region: Region, names: _Names, prevent_cse: bool | tuple[bool, ...]) -> Flat:
    if region.checkpoint:
        if not names.read.isdisjoint(region.actions):
            fun = reads.reads_names(fun)
        fun = jax.checkpoint(fun, policy=_policy(region.actions, names), prevent_cse=prevent_cse)
    return _tied(fun) if region.tied else fun


def _tied(fun: Flat) -> Flat:
    """Returns the function with its inputs behind one barrier. Transposed, that holds their cotangents: none goes on before all are there."""

    def call(*inputs: Any) -> list[Any]:
        # Within jax.shard_map those that vary over the same axes: a barrier makes its values vary over the axes of all, and their tangents not.
        alike: dict[Any, list[int]] = {}
        for place, x in enumerate(inputs):
            aval = jax.typeof(x)
            if jax.dtypes.issubdtype(aval.dtype, np.inexact):
                alike.setdefault(_compat.varying_axes(aval), []).append(place)
        held = {place: x for places in alike.values() for place, x in zip(places, _hold([inputs[i] for i in places]))}
        return fun(*(held.get(place, x) for place, x in enumerate(inputs)))

    return call


@jax.custom_jvp
def _hold(values: list[Any]) -> list[Any]:
    """Returns the values behind one barrier."""
    return jax.lax.optimization_barrier(values)  # type: ignore[no-any-return]


def _hold_tangents(primals: Any, tangents: Any) -> Any:
    # The barrier's own rule makes a tangent of zeros of a missing one, so that what is not differentiated would get a cotangent: that of
    # frozen parameters, of a mask, of the images under the first convolution.
    zero = jax.custom_derivatives.SymbolicZero
    moving = [tangent for tangent in tangents[0] if not isinstance(tangent, zero)]
    held = iter(jax.lax.optimization_barrier(moving))
    return _hold(primals[0]), [tangent if isinstance(tangent, zero) else next(held) for tangent in tangents[0]]


_hold.defjvp(_hold_tangents, symbolic_zeros=True)


def _policy(actions: Mapping[int, Action], names: _Names) -> Any:
    saved = [names(i) for i, action in actions.items() if action.keeps and not action.on_host]
    offloaded = [names(i) for i, action in actions.items() if action.keeps and action.on_host]
    return _compat.keep_names(saved, offloaded)


def _stretch(
    start: int,
    stop: int,
    regions: tuple[Region, ...],
    graph: Graph,
    groups: list[list[Any]],
    names: _Names,
    prevent_cse: bool | tuple[bool, ...],
) -> Flat:
    """Returns the whole function with `regions` as checkpoints and what lies between them as it is."""
    jaxpr = _compat.open_jaxpr(graph.jaxpr)
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return _piece(start, stop, regions, graph, groups, names, prevent_cse, inputs, list(jaxpr.outvars))


def _piece(
    start: int,
    stop: int,
    regions: tuple[Region, ...],
    graph: Graph,
    groups: list[list[Any]],
    names: _Names,
    prevent_cse: bool | tuple[bool, ...],
    inputs: list[Any],
    outputs: list[Any],
) -> Flat:
    """Returns a function of `inputs` (variables) to `outputs` (variables or literals) over the operations start..stop."""
    parts: list[tuple[Flat, list[Any], list[Any]]] = []
    cuts = _cuts(start, stop, regions)
    needed = {var for var in outputs if not isinstance(var, _compat.Literal)}
    for begin, end, region in reversed(cuts):
        eqns = [eqn for group in groups[begin:end] for eqn in group]
        if end == len(graph.ops):
            eqns += [eqn for group in groups[end:] for eqn in group]
        ins = surgery.used(eqns)
        outs = [var for eqn in eqns for var in eqn.outvars if var in needed]
        if region is None:
            fun: Flat = functools.partial(surgery.evaluate, _slice(ins, outs, eqns, graph))
        elif region.regions:
            inner = _piece(begin, end, region.regions, graph, groups, names, prevent_cse, ins, outs)
            fun = _checkpointed(inner, region, names, prevent_cse)
        else:
            fun = _checkpointed(
                functools.partial(surgery.evaluate, _slice(ins, outs, eqns, graph)), region, names, prevent_cse
            )
        parts.append((fun, ins, outs))
        needed |= set(ins)

    def call(*args: Any) -> list[Any]:
        env = dict(zip(inputs, args))
        for fun, ins, outs in reversed(parts):
            env.update(zip(outs, fun(*(env[var] for var in ins))))
        return [var.val if isinstance(var, _compat.Literal) else env[var] for var in outputs]

    return call


def _cuts(start: int, stop: int, regions: tuple[Region, ...]) -> list[tuple[int, int, Region | None]]:
    cuts: list[tuple[int, int, Region | None]] = []
    at = start
    for region in regions:
        if at < region.start:
            cuts.append((at, region.start, None))
        cuts.append((region.start, region.stop, region))
        at = region.stop
    return [*cuts, (at, stop, None)] if at < stop else cuts


def _slice(ins: list[Any], outs: list[Any], eqns: list[Any], graph: Graph) -> Any:
    return surgery.stretch(graph.calls.folded(eqns), ins, outs, _compat.open_jaxpr(graph.jaxpr))
