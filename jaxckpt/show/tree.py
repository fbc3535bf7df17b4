"""A plan as a tree: what runs in order, what of it is kept, what is computed again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxckpt.actions import SAVE
from jaxckpt.core.outline import iterations_around, place_text
from jaxckpt.core.plan_checks import scan_of
from jaxckpt.core.regions import by_body, every_region
from jaxckpt.core.sources import short_source
from jaxckpt.core.units import counted, format_bytes
from jaxckpt.show import table

if TYPE_CHECKING:
    from jaxckpt.actions import Action
    from jaxckpt.core.graph import Graph, Op, Value
    from jaxckpt.core.plan import Loop, Plan, Region

NAMED = 6
"""Maximum number of kinds of kept values of a region that are listed by name in a short tree,"""
LISTED = 0.01
"""if they are at least this share of what the region keeps."""
WIDEST_NAME = 40
"""Letters of a kept value's name; of a longer one the end."""
LONGEST_PATTERN = 12
"""A sequence of at most this many regions that repeats is printed once, with its number."""


@dataclass(frozen=True)
class _Stretch:
    """Operations start..stop of a function and what the plan says of them: a region, a loop, or nothing."""

    start: int
    stop: int
    region: Region | None = None
    loop: Loop | None = None


def nothing(plan: Plan) -> str:
    """Returns a sentence on a plan without regions and loops. Only a planner knows that the step fits."""
    fits = "the step fits as it is" if plan.report is not None else "the plan has no regions and no loops"
    return f"{fits[0].upper()}{fits[1:]}: nothing is recomputed."


def plan_text(plan: Plan, graph: Graph) -> str:
    """Returns a plan as a tree that names every kept value, under a line that says how much is kept."""
    tiled = plan.tiled_graph(graph)
    kept = sum(_stored(region.actions, tiled) for region in plan.regions)  # nested ones keep it as they run again
    for loop in plan.loops:
        for some in loop.schedule.iterations(scan_of(loop, tiled).params["length"]):
            kept += _stored(some.actions or {}, tiled, each=True) * some.count if some.kept else 0
    title = f"{plan.title}: {counted(len(list(every_region(plan.regions))), 'region')}"
    lines = _lines(plan, tiled, plan.tile_lines(graph), short=False)
    return "\n".join([f"{title}, {format_bytes(kept)} kept in them", *lines])


def plan_lines(plan: Plan, graph: Graph) -> list[str]:
    """Returns a plan as the lines of a tree: what runs in order, what of it is kept and what is computed again. Of each
    region the largest values are named.

    Parts that repeat (the blocks of a model) are printed once, with their number.
    """
    return _lines(plan, plan.tiled_graph(graph), plan.tile_lines(graph), short=True)


def _lines(plan: Plan, graph: Graph, told: Sequence[str], short: bool) -> list[str]:
    """Returns the lines of `plan_lines`.

    Args:
      plan: the plan.
      graph: of the function in its tiles, or with what it runs again.
      told: a line for each tile, and for each stretch that runs again.
      short: whether the largest values of a region alone are named.
    """
    tiles = [f"First, {line}." for line in told]
    if not plan.regions and not plan.loops:
        return tiles or [nothing(plan)]
    regions, loops = by_body(plan.regions), by_body(plan.loops)
    lines = [*tiles, "In the order in which it runs:"]
    for address in sorted({(), *regions, *loops}):
        inside = replace(graph, body=graph.at(address))
        if address:
            lines.append(f"Each time that {place_text(address, graph)} runs:")
        stretches = _stretches(regions.get(address, ()), loops.get(address, ()), 0, len(inside.ops))
        lines += _Drawing(inside, short, iterations_around(address, plan.loops, graph)).tree(stretches, "")
    return lines


def _stretches(regions: Sequence[Region], loops: Sequence[Loop], start: int, stop: int) -> list[_Stretch]:
    """Returns what covers the operations start..stop in order, gaps included."""
    pieces = [_Stretch(region.start, region.stop, region=region) for region in regions]
    inside = [(stretch.start, stretch.stop) for stretch in pieces]
    pieces += [
        _Stretch(loop.op, loop.op + 1, loop=loop)
        for loop in loops
        if start <= loop.op < stop and not any(a <= loop.op < b for a, b in inside)
    ]
    covered, at = [], start
    for stretch in sorted(pieces, key=lambda stretch: stretch.start):
        if stretch.start > at:
            covered.append(_Stretch(at, stretch.start))
        covered.append(stretch)
        at = stretch.stop
    return [*covered, *([_Stretch(at, stop)] if at < stop else [])]


def _length(stretches: Sequence[_Stretch]) -> int:
    return stretches[-1].stop - stretches[0].start


def _groups(stretches: Sequence[_Stretch], graph: Graph) -> Iterator[tuple[Sequence[_Stretch], int]]:
    """Yields (pattern, how often it comes in a row), so that what is told is shortest at each point."""
    kinds = [_kind(stretch, graph) for stretch in stretches]
    at = 0
    while at < len(stretches):
        best, times = 1, 1
        for length in range(1, min(LONGEST_PATTERN, len(stretches) - at) + 1):
            pattern, count = kinds[at : at + length], 1
            while kinds[at + count * length : at + (count + 1) * length] == pattern:
                count += 1
            if count > 1 and length * (count - 1) > best * (times - 1):
                best, times = length, count
        yield stretches[at : at + best], times
        at += best * times


_PLAIN = "left to JAX, which keeps what derivatives need"


def _kind(stretch: _Stretch, graph: Graph) -> Any:
    """Returns what two stretches have in common that are told as one: operations, shapes, and what is kept, by its
    place.
    """
    ops = graph.ops[stretch.start : stretch.stop]
    program = tuple((op.primitive, tuple(graph.values[i].shape for i in op.outputs)) for op in ops)
    return program, _treatment(stretch, graph, stretch.start)


def _treatment(stretch: _Stretch, graph: Graph, origin: int) -> Any:
    if stretch.loop is not None:
        told = stretch.loop.schedule.iterations(graph.ops[stretch.loop.op].params["length"])
        first = min((i for some in told for i in some.actions or {}), default=0)
        return tuple(
            (replace(some, actions=None), None if some.actions is None else _numbered(some.actions, first))
            for some in told
        )
    if stretch.region is None:
        return None
    where = {
        index: (place, i)
        for place, op in enumerate(graph.ops[stretch.start : stretch.stop])
        for i, index in enumerate(op.outputs)
    }
    going_in = sorted(index for index in stretch.region.actions if index not in where)
    where |= {index: (-1, i) for i, index in enumerate(going_in)}
    kept = tuple(sorted((where[index], repr(action)) for index, action in stretch.region.actions.items()))
    inner = tuple(
        (
            region.start - origin,
            region.stop - origin,
            _treatment(_Stretch(region.start, region.stop, region), graph, origin),
        )
        for region in stretch.region.regions
    )
    return kept, inner


def _numbered(actions: Mapping[int, Action], first: int) -> Any:
    """Returns actions with the values counted from `first`."""
    return tuple((index - first, repr(action)) for index, action in sorted(actions.items()))


@dataclass(frozen=True)
class _Drawing:
    """Draws stretches of one body.

    Attributes:
      graph: the function, with the body for its own.
      short: as of `_lines`.
      around: as of `iterations_around`.
    """

    graph: Graph
    short: bool
    around: int

    def tree(self, stretches: Sequence[_Stretch], indent: str) -> Iterator[str]:
        """Yields the lines of stretches in order; a pattern that repeats once, with its number."""
        groups = list(_groups(stretches, self.graph))
        for place, (first, count) in enumerate(groups):
            last = place == len(groups) - 1
            branch, under = ("└─ ", "   ") if last else ("├─ ", "│  ")
            if len(first) == 1:
                yield from self._stretch(first[0], indent + branch, indent + under, count)
                continue
            stop = first[0].start + count * _length(first)
            yield f"{indent}{branch}{count} times, operations {first[0].start}–{stop}:"
            yield from self.tree(first, indent + under)

    def _stretch(self, stretch: _Stretch, first: str, rest: str, count: int) -> Iterator[str]:
        times = f"{count} times " if count > 1 else ""
        stop = stretch.start + count * (stretch.stop - stretch.start)
        what = _what(self.graph.ops[stretch.start : stretch.stop])
        where = f"{first}{times}{what}  (operations {stretch.start}–{stop})"
        if stretch.loop is not None:
            yield where
            yield from self._loop(stretch.loop, rest)
        elif stretch.region is None or not stretch.region.checkpoint:
            yield f"{where}: {_PLAIN}"
        else:
            actions = stretch.region.actions
            yield f"{where}: {self._keeps(actions)}{' each' if count > 1 and actions else ''}"
            yield from self._values(actions, rest)
            if stretch.region.regions:
                yield f"{rest}runs again as"
                yield from self.tree(_stretches(stretch.region.regions, (), stretch.start, stretch.stop), rest)

    def _loop(self, loop: Loop, indent: str) -> Iterator[str]:
        told = loop.schedule.iterations(self.graph.ops[loop.op].params["length"])
        for place, some in enumerate(told):
            last = place == len(told) - 1
            branch, under = ("└─ ", "   ") if last else ("├─ ", "│  ")
            keeps = some.unsaid or _PLAIN if some.actions is None else self._keeps(some.actions, each=True)
            yield f"{indent}{branch}{counted(some.count, 'iteration')}{some.how}: {keeps}"
            yield from self._values(some.actions or {}, indent + under, each=True)

    def _keeps(self, actions: Mapping[int, Action], each: bool = False) -> str:
        if not actions:
            return "keeps the carry of each" if each else "keeps what goes in and out"
        size = format_bytes(_stored(actions, self.graph, each) // (1 if each else self.around))
        of = " of an iteration that runs again" if self.around > 1 else ""
        if each:
            among = any(self.graph.values[index].kind == "input" for index in actions)
            of = " of each" if among else " of each, and its carry"
        return f"keeps {counted(len(actions), 'value')}, {size}{of}"

    def _values(self, actions: Mapping[int, Action], indent: str, each: bool = False) -> Iterator[str]:
        """Yields what is kept, the largest first; what differs in nothing but its place is one line."""
        alike: dict[tuple[str, str, str], list[int]] = {}
        for index, action in sorted(actions.items()):
            value = self.graph.values[index]
            name = _name(value) if action == SAVE else f"{action} {_name(value)}"
            kind = (name, table.format_array(value.dtype, value.shape), short_source(value.source))
            times = 1 if each else value.repeats // self.around
            alike.setdefault(kind, []).append(action.stored_bytes(value) * times)
        lines = sorted(alike.items(), key=lambda item: -sum(item[1]))
        least = LISTED * sum(sum(sizes) for _, sizes in lines)
        listed = [line for line in lines[:NAMED] if sum(line[1]) >= least] if self.short else lines
        for (name, array, source), sizes in listed:
            count = f"{len(sizes)} × " if len(sizes) > 1 else ""
            if len(count + name) > WIDEST_NAME:  # the end of a scope says most
                name = f"…{name[len(count + name) - WIDEST_NAME + 1 :]}"
            yield f"{indent}{format_bytes(sum(sizes)):>10}  {count + name:{WIDEST_NAME}} {array:26} {source}".rstrip()
        if rest := lines[len(listed) :]:
            size = format_bytes(sum(sum(sizes) for _, sizes in rest))
            others = sum(len(sizes) for _, sizes in rest)
            yield f"{indent}{size:>10}  {others} smaller {'one' if others == 1 else 'ones'}"


def _stored(actions: Mapping[int, Action], graph: Graph, each: bool = False) -> int:
    """Returns the bytes that actions keep, in all iterations or of `each`."""
    values = [(action, graph.values[index]) for index, action in actions.items()]
    return sum(action.stored_bytes(value) * (1 if each else value.repeats) for action, value in values)


def _name(value: Value) -> str:
    if value.tags:
        return value.tags[0]
    return "/".join(filter(None, (value.scope, value.primitive))) or value.label


def _what(ops: Sequence[Op]) -> str:
    """Returns what a stretch is of, in the user's words: the scopes that it was traced in, or else the functions."""
    if not ops:
        return "nothing"
    if len(ops) == 1 and ops[0].bodies:
        return f"{ops[0].primitive} of {_what(ops[0].bodies[0].ops)}"
    scopes = list(dict.fromkeys(op.scope for op in ops if op.scope))
    if not scopes:
        sources = list(dict.fromkeys(short_source(op.source) for op in ops if op.source))
        return sources[0] + (f" to {sources[-1]}" if len(sources) > 1 else "") if sources else ops[0].primitive
    parts = [scope.split("/") for scope in scopes]
    common = [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts))]
    below = list(dict.fromkeys(part[len(common)] for part in parts if len(part) > len(common)))
    head = "/".join(common)
    if len(below) > 4:
        below = [*below[:2], "…", below[-1]]
    return ": ".join(filter(None, (head, ", ".join(below))))
