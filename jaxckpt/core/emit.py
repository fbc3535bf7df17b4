"""Emit: a plan becomes a function. Regions are nested `jax.checkpoint`s, and what they keep are names inserted into the
jaxpr.

Names, not policies that JAX calls back: JAX is about to turn policies into data (flag jax_remat3), and then a callable
one means "recompute all". A value that is kept is named where it is computed; in a loop's body too, where the name
keeps it for every iteration.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import PlanMismatchError
from jaxckpt.actions import SAVE, Action, given
from jaxckpt.core import pooling, primitives, reads, stored, surgery
from jaxckpt.core.checkpoints import NamedProgram, checkpointed, in_checkpoints, naming, policy_keeping, whole_region
from jaxckpt.core.finish import finished, has_one_scan
from jaxckpt.core.graph import Body, Graph, Op, inputs_of
from jaxckpt.core.leaves import array
from jaxckpt.core.loops import NamedBody, carries_of
from jaxckpt.core.loops import rewrite as rewrite_loop
from jaxckpt.core.primitives import Holds
from jaxckpt.core.reads import INTERNAL, Flat
from jaxckpt.core.regions import Address, Loop, Region, by_body, every_region, kept_actions
from jaxckpt.core.rules import Rule


def emit(
    graph: Graph,
    regions: tuple[Region, ...],
    prevent_cse: bool | tuple[bool, ...] = True,
    loops: tuple[Loop, ...] = (),
    pools_apart: bool = False,
    whole: bool = False,
) -> Flat:
    """Returns the function `(constants..., arguments...) -> results`, flat lists, that keeps what the regions say and
    recomputes the rest.

    Args:
      graph: the traced function.
      regions: disjoint, in order; those of a plan that was made for this graph.
      prevent_cse: as of `Plan`; or, with one region around everything, for each constant and argument.
      loops, pools_apart: as of `Plan`.
      whole: whether the function is all that a step differentiates, and not one layer of many.

    Raises:
      PlanMismatchError: a loop is no scan of the graph, or one that its schedule cannot run.
    """
    if not regions and not loops and not pools_apart:
        return functools.partial(surgery.evaluate, _compat.open_jaxpr(graph.jaxpr))
    names = _Names(graph)
    names.place(graph, regions, loops, prevent_cse)
    own = names.regions.get((), ())
    actions: dict[int, Action] = {}
    for region in every_region(regions):
        going_in = set(_going_in(region, graph))
        actions |= {i: a for i, a in region.actions.items() if a.keeps and i not in going_in}
    if stray := [loop.op for loop in names.loops.get((), {}).values() if not 0 <= loop.op < len(graph.ops)]:
        raise PlanMismatchError(f"The plan has a loop at operation {stray[0]} of {len(graph.ops)}. Plan anew.")
    groups = _rewrite(graph.body, names, actions, _boundaries(own))
    lone = whole and has_one_scan(graph.jaxpr)
    groups = [[finished(eqn, lone) for eqn in group] for group in groups]
    if pools_apart:
        groups = [[each for eqn in group for each in pooling.with_axis(eqn)] for group in groups]
    program = NamedProgram(graph.body, groups, names, prevent_cse, graph.calls.folded)
    if len(own) == 1 and (own[0].start, own[0].stop) == (0, len(graph.ops)):
        return whole_region(own[0], program)
    return in_checkpoints(own, program)


def run(graph: Graph, emitted: Flat, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls the function that `emit` returned with arguments like those of the trace. All results are arrays."""
    leaves = jax.tree.leaves((args, kwargs))
    out = emitted(*_compat.jaxpr_consts(graph.jaxpr), *leaves)
    return jax.tree.unflatten(graph.out_tree, map(array, out))


class Named:
    """A body's operations with a name at each of their results, to be looked at in stretches: see `stretch`.

    Args:
      graph: the function.
      body: its own, or one inside.
      loops: how scans of the function are run, as of `Plan`.
      within: values of the programs that its operations hold, whose names `checkpointed` can keep too, each by an
        action. Then what has a name can be kept, and only that.
    """

    def __init__(
        self, graph: Graph, body: Body, loops: Sequence[Loop] = (), within: Mapping[int, Action] | None = None
    ) -> None:
        self.graph, self.body, self.loops = graph, body, loops
        own = {index: SAVE for op in body.ops for index in op.outputs if graph.values[index].addressable}
        self.names = _Names(graph, whole=within is None)
        self.names.place(graph, (), loops, True)
        self.names.beside |= frozenset(_beside(within or {}))
        self.groups = _rewrite(body, self.names, own if within is None else within, cuts=range(len(body.ops)))
        self.views = body.views

    def checkpointed(
        self, start: int, stop: int, outputs: Sequence[int], actions: Mapping[int, Action]
    ) -> tuple[Flat, Any, list[int]]:
        """Returns the operations start..stop as a function that keeps what `actions` say, values inside of operations
        too, and recomputes the rest; beside it what `stretch` returns.
        """
        kept = Named(self.graph, self.body, self.loops, actions)
        jaxpr, inputs = kept.stretch(start, stop, outputs)
        run = functools.partial(surgery.evaluate, jaxpr)
        return checkpointed(run, Region(start, stop, actions), kept.names, True), jaxpr, inputs

    def stretch(self, start: int, stop: int, outputs: Sequence[int]) -> tuple[Any, list[int]]:
        """Returns the operations start..stop, but for views, as a jaxpr with the values `outputs` for results, and the
        values that its inputs are.
        """
        shown = self.views
        eqns = [eqn for place in range(start, stop) if place not in shown for eqn in self.groups[place]]
        if stop == len(self.body.ops):
            eqns += [eqn for group in self.groups[stop:] for eqn in group]
        made = {var for eqn in eqns for var in eqn.outvars}
        inputs = surgery.used(eqns)
        where = {self.body.values[var]: var for var in made if var in self.body.values}
        wanted = [where[index] for index in outputs]
        jaxpr = surgery.stretch(eqns, inputs, wanted, self.body.jaxpr)
        return jaxpr, [self.body.values[var] for var in inputs]

    def value(self, eqn: Any) -> int | None:
        """Returns the value that an equation names, in this jaxpr or in one that JAX made from it; None where it is no
        such equation.
        """
        name = _compat.equation_name(eqn)
        return int(name.split(":")[2]) if name is not None and name.startswith(self.names.prefix) else None


class _Names:
    """The name that the emitter gives to a value: none that the program has already, or an outer region would keep an
    inner one's values.

    With `whole` a complex value has one name, as to look at; without, one at each of its parts, as jax.checkpoint can
    keep it.
    """

    def __init__(self, graph: Graph, whole: bool = False) -> None:
        self.whole = whole
        self.read: set[int] = (
            set()
        )  # values that the derivative of their own operation reads, and those that are stored
        self.beside: frozenset[int] = frozenset()  # values of regions that keep some in another form or on the host
        self.shared: dict[Any, tuple[Any, Any, list[int]]] = {}  # calls that have been given names, see `_call`
        self.same: dict[int, int] = {}  # value -> the one whose name it has, where two calls are one program
        taken = {name for body in _bodies(graph.body) for name in _internal_names(body)}
        level = 0
        while any(name.startswith(f"{INTERNAL}{level}:") for name in taken):
            level += 1
        self.prefix = f"{INTERNAL}{level}:"
        self.graph = graph
        self.starts: frozenset[int] = frozenset()  # values that a region keeps of what goes in
        self.regions: dict[Address, tuple[Region, ...]] = {}
        self.loops: dict[Address, dict[int, Loop]] = {}
        self.prevent_cse = True
        self.addresses: dict[int, Address] = {
            id(graph.body): ()
        }  # of bodies that regions or planned loops lie in, or around these

    def place(self, graph: Graph, regions: Sequence[Region], loops: Sequence[Loop], prevent_cse: Any) -> None:
        """Sets what lies in which body."""
        self.regions = by_body(regions)
        self.loops = {address: {loop.op: loop for loop in each} for address, each in by_body(loops).items()}
        self.prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else True
        kept: list[Mapping[int, Action]] = [kept_actions(region) for region in regions]
        kept += [actions for loop in loops for actions in loop.schedule.all_actions()]
        self.beside = frozenset(index for actions in kept for index in _beside(actions))
        self.starts = frozenset(index for region in every_region(tuple(regions)) for index in _going_in(region, graph))
        for address in {*self.regions, *self.loops}:
            for depth in range(len(address) + 1):
                self.addresses[id(graph.at(address[:depth]))] = address[:depth]

    def regions_in(self, body: Body) -> tuple[Region, ...]:
        """Returns the regions of a body."""
        return self.regions.get(self.addresses[id(body)], ()) if id(body) in self.addresses else ()

    def loops_in(self, body: Body) -> Mapping[int, Loop]:
        """Returns how scans of a body are run, by their places in it."""
        return self.loops.get(self.addresses[id(body)], {}) if id(body) in self.addresses else {}

    def __call__(self, index: int) -> str:
        index = self.same.get(index, index)
        value = self.graph.values[index]
        return f"{self.prefix}{index}:{value.tags[0] if value.tags else value.label}"  # an argument has a label too

    def given(self, index: int, action: Action) -> Action:
        """Returns an action as this program's value can have it: a plan can be for other numbers than these."""
        return given(action, self.graph.values[index]) if action.changes else action

    def equations(self, operand: Any, result: Any, index: int, maker: Any, action: Action) -> list[Any]:
        """Returns the equations by which the variable `result` is `operand`, a value, with its name; at the source line
        of `maker`.
        """
        if index in self.beside:
            self.read.add(index)
            marker = stored.marker(self(index), self.given(index, action))
            return [_compat.name_equation(operand, result, marker, maker)]
        if self.whole:
            return [_compat.name_equation(operand, result, self(index), maker)]
        return _compat.kept_equations(operand, result, self(index), maker)


def _going_in(region: Region, graph: Graph) -> Iterator[int]:
    """Yields the values that a region keeps, by an action, of what goes into it."""
    if not all(action.saves for action in region.actions.values()):  # it saves only what it makes
        ops = graph.at(region.body).ops
        if region.body or (region.start, region.stop) != (0, len(ops)):
            yield from (index for index in inputs_of(ops[region.start : region.stop]) if index in region.actions)


def _bodies(body: Body) -> list[Body]:
    """Returns a body and all that are inside it."""
    found = [body]
    for each in found:  # grows while it is gone through
        found.extend(inner for op in each.ops for inner in op.bodies)
    return found


def _internal_names(body: Body) -> list[str]:
    names = (_compat.equation_name(eqn) for eqn in body.jaxpr.eqns)
    return [stored.unmarked(name) for name in names if name is not None and name.startswith(INTERNAL)]


def _beside(actions: Mapping[int, Action]) -> Mapping[int, Action]:
    """Returns what a region keeps, if it keeps some value in another form or on the host: all of that is stored by the
    exact forward pass. Named alone, a value that is computed from another one would be kept as it is when that one is
    restored.
    """
    kept = {index: action for index, action in actions.items() if action.keeps}
    return kept if any(action.changes or action.on_host for action in kept.values()) else {}


# ---------------------------------------------------------------------------------------------------- names into jaxprs


def _boundaries(regions: Sequence[Region]) -> list[int]:
    """Returns the places where regions begin and end, nested ones too, rising."""
    inner = (place for region in regions for place in _boundaries(region.regions))
    return sorted({*inner, *(region.start for region in regions), *(region.stop for region in regions)})


def _rewrite(
    body: Body,
    names: _Names,
    actions: Mapping[int, Action],
    cuts: Sequence[int] = (),
) -> list[list[Any]]:
    """Returns for each operation of the body its equations: itself, its values' names, and names of the user's, as of
    `_with_late_names`.

    `cuts` are places, rising, across which only named values are passed.
    """
    loops = names.loops_in(body)
    groups: list[list[Any]] = []
    named: set[int] = set()
    ops = iter(enumerate(body.ops))
    pending: list[Any] = []  # late names
    before: dict[Any, tuple[int, Any]] = {}  # variable with a name -> where it is made, and the one without
    calls: dict[
        Any, tuple[int, Any]
    ] = {}  # result of a call with names inside -> where it is made, and the call without
    for eqn, late in _with_late_names(body.jaxpr):
        if _is_alias(eqn):
            index = body.values[eqn.invars[0]]
            group = pending if late else groups[-1]
            if index in actions and index not in named and names.graph.values[index].kind != "intermediate":
                named.add(index)
                group.extend(names.equations(eqn.invars[0], eqn.outvars[0], index, eqn, actions[index]))
            else:
                group.append(eqn)
            continue
        place, op = next(ops)
        if reads.is_effect(eqn):
            groups.append([*pending, *_effect(eqn, before, calls, cuts, place)])
            pending = []
            continue
        group = _rewrite_op(eqn, op, names, actions, loops.get(place))
        if place not in loops:
            before.update((var, (place, new)) for var, new in zip(eqn.outvars, group[0].outvars) if var is not new)
            # A function with a rule may hand an operand on as it is, and so the name of it.
            holds = primitives.of(op.primitive).holds
            handed = holds is Holds.RULE and any(index in actions for index in op.inputs)
            inside = (
                holds not in (Holds.LOOP, Holds.BRANCHES)
                and not _is_mapped_anew(op, names)
                and any(index in actions for body in op.bodies for index in _own_values(body))
            )
            if handed or inside:
                calls.update((var, (place, eqn)) for var in eqn.outvars)
        groups.append([*pending, *group])
        pending = []
    if pending:
        groups.append(pending)
    return groups


def grouped(body: Body) -> list[list[Any]]:
    """Returns for each operation of a body its equations: itself, and names, as of `_with_late_names`."""
    groups: list[list[Any]] = []
    pending: list[Any] = []  # late names
    for eqn, late in _with_late_names(body.jaxpr):
        if not _is_alias(eqn):
            groups.append([*pending, eqn])
            pending = []
        else:
            (pending if late else groups[-1]).append(eqn)
    return [*groups, pending] if pending else groups


def _with_late_names(jaxpr: Any) -> list[tuple[Any, bool]]:
    """Returns a jaxpr's equations, each with whether it is a late name: one that is not given to what the operation
    before it makes, but to an input or to an older value.

    These stand where the value is first read by that name, or nowhere. Elsewhere a region that has no use for the value
    would take it and hand it on.
    """
    made: set[Any] = set()  # what the last operation makes, by all its names
    late: dict[Any, Any] = {}  # late name that nothing has read yet -> its equation
    found: list[tuple[Any, bool]] = []

    def place(variables: Sequence[Any]) -> None:
        for var in variables:
            names = []  # the last one first: a name may be given to another name
            while not isinstance(var, _compat.Literal) and var in late:
                names.append(late.pop(var))
                var = names[-1].invars[0]
            found.extend((eqn, True) for eqn in reversed(names))

    for eqn in jaxpr.eqns:
        if not _is_alias(eqn):
            place(eqn.invars)
            found.append((eqn, False))
            made = set(eqn.outvars)
        elif eqn.invars[0] in made:
            found.append((eqn, False))
            made.update(eqn.outvars)
        else:
            late[eqn.outvars[0]] = eqn
    place(jaxpr.outvars)
    return found


def _is_alias(eqn: Any) -> bool:
    return _compat.equation_name(eqn) is not None and not isinstance(eqn.invars[0], _compat.Literal)


def _effect(
    eqn: Any,
    before: Mapping[Any, tuple[int, Any]],
    calls: Mapping[Any, tuple[int, Any]],
    cuts: Sequence[int],
    place: int,
) -> list[Any]:
    """Returns an equation that is run for its side effects: it reads values from before they are named (see
    `reads.is_effect`).

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
    rule = Rule.of(eqn)
    if rule is not None and not any(index in actions for index in op.outputs[rule.results :]):
        eqn = names.graph.calls.closed(eqn)
    mapped = _is_mapped_anew(op, names)
    for body in op.bodies if loop is None and not mapped else ():
        if id(body) not in names.addresses and not any(index in actions for index in _own_values(body)):
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
    else:
        eqn = eqn if rule is not None else names.graph.calls.closed(eqn)
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
    if loop is not None:
        return [*rewrite_loop(eqn, op, loop, _NamedScan(op, names, actions)), *extra]
    return [*(_mapped(eqn, op.bodies[0], names, actions) if mapped else [eqn]), *extra]


def _is_mapped_anew(op: Op, names: _Names) -> bool:
    """Whether an operation is a `jax.shard_map` with regions or planned loops in its body."""
    return primitives.of(op.primitive).holds is Holds.MAPPED and id(op.bodies[0]) in names.addresses


def _mapped(eqn: Any, body: Body, names: _Names, actions: Mapping[int, Action]) -> list[Any]:
    """Returns equations that take the place of a `jax.shard_map`'s, with regions and planned loops in its body. That is
    traced anew, over the axes that it is mapped over.
    """
    mapped = _compat.mapped_as(eqn, lambda *args: _in_regions(body, names, actions)(*args))
    return surgery.splice(jax.make_jaxpr(mapped)(*(var.aval for var in eqn.invars)), eqn)


def _rewrite_body(original: Any, body: Body, names: _Names, actions: Mapping[int, Action]) -> Any:
    """Returns the jaxpr of a body with names: one for all bodies of a jaxpr of which the same is kept, since JAX caches
    by identity.
    """
    own = sorted(_own_values(body) - set(body.inputs))
    has_names = any(index in actions and names.graph.values[index].kind != "intermediate" for index in body.inputs)
    key = (
        id(original),
        tuple(
            (i, names.given(index, actions[index]), index in names.beside)
            for i, index in enumerate(own)
            if index in actions
        ),
    )
    has_names = has_names or id(body) in names.addresses
    if not has_names and key in names.shared:
        _, new, first = names.shared[key]
        names.same.update(zip(own, first))
        names.read.update(index for index, other in zip(own, first) if other in names.read)
        return new
    if names.regions_in(body):
        return _traced(original, body, names, actions)
    eqns = [e for group in _rewrite(body, names, actions) for e in group]
    new = _compat.like(original, surgery.with_equations(body.jaxpr, eqns), _compat.jaxpr_consts(original))
    if not has_names:
        names.shared[key] = original, new, own
    return new


def _traced(original: Any, body: Body, names: _Names, actions: Mapping[int, Action]) -> Any:
    """Returns the jaxpr of a body with its regions."""
    consts = _compat.jaxpr_consts(original)
    fun = _in_regions(body, names, actions)
    closed = jax.make_jaxpr(lambda *args: fun(*consts, *args))(*(var.aval for var in body.jaxpr.invars))
    return _compat.like(original, _compat.open_jaxpr(closed), _compat.jaxpr_consts(closed))


def _in_regions(body: Body, names: _Names, actions: Mapping[int, Action]) -> Flat:
    """Returns a body, of its constants and inputs, as a function with its regions."""
    regions = names.regions_in(body)
    groups = _rewrite(body, names, actions, _boundaries(regions))
    return in_checkpoints(regions, NamedProgram(body, groups, names, names.prevent_cse, list))


@dataclass(frozen=True)
class _NamedScan:
    """Names what is kept of a scan: see `NamesFor`.

    Attributes:
      op: the scan.
      names: of the program.
      within: actions of the regions inside of its body.
    """

    op: Op
    names: _Names
    within: Mapping[int, Action]

    def body(self, actions: Mapping[int, Action]) -> NamedBody:
        """Returns the scan's body that names what is kept; `actions`: of each iteration."""
        body, names = self.op.bodies[0], self.names
        start = carries_of(self.op)
        made = {index: action for index, action in actions.items() if index not in start}
        if id(body) in names.addresses:
            fun = _in_regions(body, names, {**self.within, **made})
        elif made:
            eqns = [eqn for group in _rewrite(body, names, made) for eqn in group]
            fun = functools.partial(surgery.evaluate, surgery.with_equations(body.jaxpr, eqns))
        else:
            fun = functools.partial(surgery.evaluate, body.jaxpr)
        if len(made) < len(actions):
            fun = self._from_named(fun, actions)
        reading = fun if names.read.isdisjoint(actions) else reads.reads_names(fun)
        return NamedBody(reading, fun, policy_keeping(actions, names), frozenset(map(names, actions)))

    def carries(self, actions: Mapping[int, Action]) -> tuple[Flat, Any]:
        """Returns a function from the carry to itself, the leaves with an action named, and the policy of a checkpoint
        that keeps these.
        """
        return self._named(actions), policy_keeping(actions, self.names)

    def _from_named(self, fun: Flat, actions: Mapping[int, Action]) -> Flat:
        """Returns the body with its carry named first, as of `carries`."""
        named, (consts, carries) = self._named(actions), _compat.num_scan_consts_carry(dict(self.op.params))
        stop = consts + carries
        return lambda *args: fun(*args[:consts], *named(*args[consts:stop]), *args[stop:])

    def _named(self, actions: Mapping[int, Action]) -> Flat:
        body, (consts, carries) = self.op.bodies[0], _compat.num_scan_consts_carry(dict(self.op.params))
        variables = body.jaxpr.invars[consts : consts + carries]
        return naming(variables, carries_of(self.op), actions, self.names, self.op.equation, body.jaxpr)


def _own_values(body: Body) -> set[int]:
    return {index for inner in _bodies(body) for index in inner.values.values()}
