"""Checkpoints: regions of a body whose values have names become functions, nested `jax.checkpoint`s that keep some of
these names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxckpt import _compat
from jaxckpt.actions import Action
from jaxckpt.core import inline, primitives, reads, shared_traces, surgery
from jaxckpt.core.constants import MUCH
from jaxckpt.core.graph import Body, Graph, aval_bytes
from jaxckpt.core.primitives import Result
from jaxckpt.core.reads import Flat
from jaxckpt.core.regions import Address, Loop, Region, kept_actions
from jaxckpt.core.tie import tied


class Naming(Protocol):
    """What the emitter says of the names that it gives to values.

    Attributes:
      graph: the function.
      regions, loops: what lies in which body.
      addresses: id of a body -> its address, for bodies that regions or planned loops lie in, and those around them.
      read: values that are read by their names: by the derivatives of their own operations, or as they were stored.
      beside: values of regions that keep some of theirs in another form or on the host: all are stored.
      starts: values that a region keeps, by an action, of what goes in.
    """

    graph: Graph
    regions: dict[Address, tuple[Region, ...]]
    loops: dict[Address, dict[int, Loop]]
    addresses: dict[int, Address]
    read: set[int]
    beside: frozenset[int]
    starts: frozenset[int]

    def equations(self, operand: Any, result: Any, index: int, maker: Any, action: Action) -> list[Any]:
        """Returns the equations by which the variable `result` is `operand`, a value, with its name."""

    def __call__(self, index: int) -> str:
        """Returns the name of a value."""


@dataclass(frozen=True)
class NamedProgram:
    """A body that is made into a function in regions.

    Attributes:
      body: the operations.
      groups: their equations, with names.
      names: what is named how.
      prevent_cse: as of `emit`.
      folded: makes calls of equations that were written out of some.
    """

    body: Body
    groups: list[list[Any]]
    names: Naming
    prevent_cse: bool | tuple[bool, ...]
    folded: Callable[[list[Any]], list[Any]]

    def part(
        self, make: Callable[[], Flat], start: int, stop: int, region: Region | None, variables: tuple[Hashable, ...]
    ) -> Flat:
        """Returns the function that `make` returns of a region, or of what lies between two: see `shared_traces.part`.

        Args:
          make, start, stop, region: see above.
          variables: what it depends on besides the region and what is inside of operations.
        """
        names, own = self.names, self.names.addresses[id(self.body)]

        def key() -> Hashable:
            others = tuple(each for address, regions in names.regions.items() if address != own for each in regions)
            loops = tuple(loop for each in names.loops.values() for loop in each.values())
            kept = sorted(i for each in (region, *others) if each is not None for i in kept_actions(each))
            named = tuple((i, names(i), i in names.read, i in names.beside) for i in kept)
            return region, others, loops, self.prevent_cse, named, variables

        return shared_traces.part(make, start, stop, names.graph, own, key, region is not None and bool(region.regions))

    @functools.cached_property
    def parts(self) -> Mapping[Any, Any]:
        """The variables that these views make, each with its equation."""
        return {var: eqn for place in self.shown for eqn in self.groups[place] for var in eqn.outvars}

    def with_views(self, eqns: list[Any]) -> list[Any]:
        """Returns the equations of a region, behind those of the views that it reads where these show much of an input:
        to have the rest of its gradient too costs little then, and a view outside is kept for the region.
        """
        read: dict[Any, list[Any]] = {}
        for var in surgery.used(eqns):
            for base in self._bases(var) if var in self.parts else ():
                read.setdefault(base, []).append(var)
        size = lambda variables: sum(aval_bytes(var.aval) for var in variables)
        most = [var for base, shown in read.items() if size(shown) >= MUCH * size([base]) for var in shown]
        inside: set[int] = set()
        while most:
            eqn = self.parts[most.pop()]
            inside.add(id(eqn))
            most += [var for var in surgery.used([eqn]) if var in self.parts]
        showing = (eqn for place in sorted(self.shown) for eqn in self.groups[place])
        return [*(eqn for eqn in showing if id(eqn) in inside), *eqns]

    def _bases(self, var: Any) -> set[Any]:
        """Returns the inputs that a view shows a part of."""
        if var not in self.parts:
            return {var}
        return {base for source in surgery.used([self.parts[var]]) for base in self._bases(source)}

    @functools.cached_property
    def shown(self) -> frozenset[int]:
        """Places of the views that are given no names, nor show what is given one."""
        given = {*self.body.jaxpr.constvars, *self.body.jaxpr.invars}
        found = set()
        for place in sorted(self.body.views):
            group = self.groups[place]
            if len(group) == 1 and given.issuperset(surgery.used(group)):
                given.update(group[0].outvars)
                found.add(place)
        return frozenset(found)

    def equations(self, start: int, stop: int) -> list[Any]:
        """Returns those of the operations start..stop, but for views; with the last one names that follow it."""
        end = len(self.groups) if stop == len(self.body.ops) else stop
        return [eqn for place in range(start, end) if place not in self.shown for eqn in self.groups[place]]


def whole_region(region: Region, program: NamedProgram) -> Flat:
    """Returns a whole program as one checkpoint."""
    if region.regions:
        inner = in_checkpoints(region.regions, program)
    else:
        eqns = program.folded([eqn for group in program.groups for eqn in group])
        inner = functools.partial(surgery.evaluate, surgery.with_equations(program.body.jaxpr, eqns))
    away = any(action.on_host for action in region.actions.values())
    apart = away or any(action.changes for action in region.actions.values())
    # In a loop the order is given; a barrier would hold one more value.
    ties = region.tied and apart and any(jax.tree.leaves(program.prevent_cse))

    def made() -> Flat:
        fun = checkpointed(inner, region, program.names, program.prevent_cse, waits=ties and away, ties=ties)
        return tied(fun, ()) if region.tied and not apart else fun

    return program.part(made, region.start, region.stop, region, ())


def checkpointed(
    fun: Flat,
    region: Region,
    names: Naming,
    prevent_cse: bool | tuple[bool, ...],
    *,
    waits: bool = False,
    ties: bool = False,
) -> Flat:
    """Returns a stretch with the checkpoint that its region asks for; `waits` and `ties` as of `reads_names`."""
    if not region.checkpoint:
        return fun
    if not names.read.isdisjoint(region.actions):
        change = None
        if any(action.changes or action.on_host for action in region.actions.values()):
            # A checkpoint in it that stores values in another form or on the host would store what this region keeps
            # of them in its own derivative, beside this forward pass: a second time, and when the compiler likes,
            # since the region's results do not wait for it.
            kept = {names(i) for i, action in region.actions.items() if action.keeps}
            change = functools.partial(inline.without_own_calls, names=kept)
        fun = reads.reads_names(fun, waits=waits, ties=ties, change=change)
    return jax.checkpoint(fun, policy=policy_keeping(region.actions, names), prevent_cse=prevent_cse)


def policy_keeping(actions: Mapping[int, Action], names: Naming) -> Any:
    """Returns the policy of a `jax.checkpoint` that keeps what the actions say, by names."""
    # What goes to the host is there when it is named; see `stored`.
    return _compat.keep_names([names(i) for i, action in actions.items() if action.keeps])


def in_checkpoints(regions: tuple[Region, ...], program: NamedProgram) -> Flat:
    """Returns a whole program with `regions` as checkpoints and what lies between them as it is."""
    jaxpr = program.body.jaxpr
    inputs = surgery.inputs_of(jaxpr)
    return _stretch(0, len(program.body.ops), regions, program, inputs, list(jaxpr.outvars))


def _stretch(
    start: int, stop: int, regions: tuple[Region, ...], program: NamedProgram, inputs: list[Any], outputs: list[Any]
) -> Flat:
    """Returns a function of `inputs` (variables) to `outputs` (variables or literals) over the operations
    start..stop.
    """
    stretches: list[tuple[Flat, list[Any], list[Any]]] = []
    needed = {var for var in outputs if not isinstance(var, _compat.Literal)}
    for begin, end, region in reversed(_cuts(start, stop, regions)):
        eqns = program.equations(begin, end)
        outs = [var for eqn in eqns for var in eqn.outvars if var in needed]
        eqns = eqns if region is None else program.with_views(eqns)
        ins = surgery.used(eqns)
        make = functools.partial(_part, begin, end, region, program, eqns, ins, outs)
        views = tuple(place for place, var in enumerate(ins) if var in program.parts)
        given = tuple(name for eqn in eqns if (name := _compat.equation_name(eqn)) is not None)
        fun = program.part(make, begin, end, region, (begin, end, *ins, None, *outs, None, *views, None, *given))
        stretches.append((fun, ins, outs))
        needed |= set(ins)

    def call(*args: Any) -> list[Any]:
        env = dict(zip(inputs, args))

        def read(var: Any) -> Any:
            if var not in env:  # a view, made where it is first read
                eqn = program.parts[var]
                ins = surgery.used([eqn])
                shown = surgery.evaluate(surgery.stretch([eqn], ins, eqn.outvars, program.body.jaxpr), *map(read, ins))
                env.update(zip(eqn.outvars, shown))
            return env[var]

        for fun, ins, outs in reversed(stretches):
            env.update(zip(outs, fun(*map(read, ins))))
        return [var.val if isinstance(var, _compat.Literal) else read(var) for var in outputs]

    return call


def _part(
    start: int,
    stop: int,
    region: Region | None,
    program: NamedProgram,
    eqns: list[Any],
    inputs: list[Any],
    outputs: list[Any],
) -> Flat:
    """Returns the function of one region of a stretch, or of what lies between two of them: `eqns`."""
    if region is not None and region.regions:
        fun = _stretch(start, stop, region.regions, program, inputs, outputs)
    else:
        fun = _evaluated(program, eqns, inputs, outputs)
    if region is None:
        return fun
    casts = _casts(program, eqns) if region.tied and region.checkpoint and not region.regions else []
    if casts:
        fun = _tied_behind(casts, program, eqns, inputs, outputs)
    if not program.names.starts.isdisjoint(region.actions):
        fun = _from_named(fun, region, program, eqns[0], inputs)
    fun = checkpointed(fun, region, program.names, program.prevent_cse, waits=region.tied)
    if casts or not region.tied:
        return fun
    views = [place for place, var in enumerate(inputs) if var in program.parts]
    return tied(fun, views)


def naming(
    variables: Sequence[Any],
    values: Sequence[int | None],
    actions: Mapping[int, Action],
    names: Naming,
    maker: Any,
    of: Any,
) -> Flat:
    """Returns a function from values to themselves, in which those that have an action are named.

    Args:
      variables: of the values.
      values: their indices; None for one that has none.
      actions: value -> its action.
      names: of the program.
      maker: an equation, at whose line the names are.
      of: the open jaxpr that the variables are of.
    """
    given = [_compat.fresh_var(var.aval) for var in variables]
    each = [(var, fresh, index) for var, fresh, index in zip(variables, given, values) if index in actions]
    eqns = [e for var, fresh, i in each if i is not None for e in names.equations(fresh, var, i, maker, actions[i])]
    results = [var if index in actions else fresh for var, fresh, index in zip(variables, given, values)]
    return functools.partial(surgery.evaluate, surgery.stretch(eqns, given, results, of))


def _from_named(fun: Flat, region: Region, program: NamedProgram, maker: Any, inputs: list[Any]) -> Flat:
    """Returns the function of a region with those of its inputs named first that it keeps by an action."""
    names, values = program.names, [program.body.values.get(var) for var in inputs]
    actions = {index: action for index, action in region.actions.items() if index in names.starts}
    named = naming(inputs, values, actions, names, maker, program.body.jaxpr)
    return lambda *args: fun(*named(*args))


def _evaluated(program: NamedProgram, eqns: list[Any], inputs: list[Any], outputs: list[Any]) -> Flat:
    jaxpr = surgery.stretch(program.folded(eqns), inputs, outputs, program.body.jaxpr)
    return functools.partial(surgery.evaluate, jaxpr)


def _casts(program: NamedProgram, eqns: list[Any]) -> list[Any]:
    """Returns the views of a region that are what they show, under another type, and the views that these read."""
    found: list[Any] = []
    read: set[Any] = set()
    for eqn in reversed(eqns):
        if not any(var in program.parts for var in eqn.outvars):
            continue
        is_same = primitives.of(_compat.primitive_name(eqn)).result is Result.SAME
        if is_same or not read.isdisjoint(eqn.outvars):
            found.append(eqn)
            read.update(surgery.used([eqn]))
    return found[::-1]


def _tied_behind(
    casts: list[Any], program: NamedProgram, eqns: list[Any], inputs: list[Any], outputs: list[Any]
) -> Flat:
    """Returns the function of a region whose inputs are tied behind casts by which they come to vary over the devices
    of a `jax.shard_map`. The transpose of a cast is a sum over the devices, for which nothing waits then. The casts
    are in the checkpoint: outside, what it keeps of a weight would be a copy for each device.
    """
    rest = [eqn for eqn in eqns if not any(eqn is cast for cast in casts)]
    behind = surgery.used(rest)
    body = _evaluated(program, rest, behind, outputs)
    parts = [place for place, var in enumerate(behind) if var in program.parts]
    shown = surgery.stretch(casts, inputs, behind, program.body.jaxpr)
    return lambda *args: tied(body, parts)(*surgery.evaluate(shown, *args))


def _cuts(start: int, stop: int, regions: tuple[Region, ...]) -> list[tuple[int, int, Region | None]]:
    cuts: list[tuple[int, int, Region | None]] = []
    at = start
    for region in regions:
        if at < region.start:
            cuts.append((at, region.start, None))
        cuts.append((region.start, region.stop, region))
        at = region.stop
    return [*cuts, (at, stop, None)] if at < stop else cuts
