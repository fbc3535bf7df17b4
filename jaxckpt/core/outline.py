"""Plans in words: a line for each region, loop and tile, and the whole as a tree where the graph is at hand."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxckpt.actions import SAVE, Action
from jaxckpt.core.graph import Graph, Op, Value
from jaxckpt.core.plan_checks import body_at, scan_of
from jaxckpt.core.regions import Address, Loop, Region, TiledStretch, by_body, every_region
from jaxckpt.core.units import counted, format_bytes


def kept_text(actions: Iterable[Mapping[int, Action]]) -> str:
    """Returns how many values are kept by which action: "offload 1 value, save 3 values"; "" for none."""
    counts = collections.Counter(str(action) for each in actions for action in each.values())
    return ", ".join(f"{action} {counted(count, 'value')}" for action, count in sorted(counts.items()))


def region_line(region: Region) -> str:
    """Returns a line on a region, without those nested in it."""
    where = f"ops {region.start}..{region.stop}{_inside(region.body)}"
    if not region.checkpoint:
        return f"{where}: left to JAX"
    saved = all(action == SAVE for action in region.actions.values())
    kinds = "" if saved else f" ({kept_text([region.actions])})"
    return f"{where}: keeps {counted(len(region.actions), 'value')}{kinds}"


def loop_line(loop: Loop) -> str:
    """Returns a line on a planned loop."""
    return f"scan at {loop.op}{_inside(loop.body)}: {loop.schedule}"


def tile_line(tile: TiledStretch, value: Value | None = None) -> str:
    """Returns a line on a tiled stretch; with the value whose axis is divided, where that is known."""
    along = "" if value is None else f" along axis {tile.axis} of {value.label} {list(value.shape)}"
    return f"ops {tile.start}..{tile.stop} in {counted(tile.tiles, 'tile')}{along}"


def _inside(address: Address) -> str:
    """Returns where a body lies, in words, without its graph."""
    return f" inside of operation {', '.join(str(index) for index, _ in address)}" if address else ""


def place_text(address: Address, graph: Graph) -> str:
    """Returns a body in words: "scan (operation 3), cond (operation 7, branch 1)"."""
    ops = [
        next(op for op in graph.at(address[:depth]).ops if op.index == index)
        for depth, (index, _) in enumerate(address)
    ]
    return ", ".join(
        f"{op.primitive} (operation {op.index}{f', branch {place}' if len(op.bodies) > 1 else ''})"
        for op, (_, place) in zip(ops, address)
    )


def tree(regions: tuple[Region, ...], loops: tuple[Loop, ...], tiles: Sequence[str], title: str, graph: Graph) -> str:
    """Returns regions and loops as a tree, with the bytes of what they keep.

    Args:
      regions, loops: of a plan.
      tiles: lines on its tiles.
      title: what the tree begins with.
      graph: of the function, in its tiles.
    """
    kept = sum(_stored(region.actions, graph) for region in every_region(regions))
    for loop in loops:
        length = scan_of(loop, graph).params["length"]
        for some in loop.schedule.iterations(length):
            kept += _stored(some.actions or {}, graph, each=True) * some.count if some.kept else 0
    lines = [f"{title}, {format_bytes(kept)} kept in them"]
    lines += [f"├─ {line}" for line in tiles]
    regions_in, loops_in = by_body(regions), by_body(loops)
    for address in sorted({*regions_in, *loops_in}):
        indent = "│  " if address else ""
        if address:
            lines.append(f"├─ in {place_text(address, graph)}")
        lines += _describe(regions_in.get(address, ()), graph, indent)
        lines += (
            indent + line for line in _describe_loops(loops_in.get(address, ()), body_at(address, graph).ops, graph)
        )
    return "\n".join(lines)


def _describe(regions: tuple[Region, ...], graph: Graph, indent: str) -> Iterator[str]:
    for region in regions:
        kept = [graph.values[index] for index in region.actions]
        total = format_bytes(_stored(region.actions, graph))
        if not region.checkpoint:
            yield f"{indent}├─ ops {region.start}..{region.stop}  left to JAX"
            continue
        yield f"{indent}├─ ops {region.start}..{region.stop}  keeps {len(kept)} of its values, {total}"
        for value in sorted(kept, key=lambda v: -v.kept_bytes)[:8]:
            yield f"{indent}│    {region.actions[value.index]!r:9} {_value_line(value)}"
        yield from _describe(region.regions, graph, indent + "│  ")


def _describe_loops(loops: tuple[Loop, ...], ops: Sequence[Op], graph: Graph) -> Iterator[str]:
    for loop in loops:
        op = ops[loop.op]
        yield f"├─ scan of {counted(op.params['length'], 'iteration')} (operation {loop.op})  {op.source}"
        for some in loop.schedule.iterations(op.params["length"]):
            what = f"│  ├─ {counted(some.count, 'iteration')}{some.how}"
            if some.actions is None:
                yield f"{what}: {some.unsaid or 'left to JAX'}"
                continue
            kept = [graph.values[index] for index in some.actions]
            each = format_bytes(_stored(some.actions, graph, each=True))
            yield f"{what}: keeps its carry and {counted(len(kept), 'value')} of each, {each}"
            for value in sorted(kept, key=lambda v: -v.bytes)[:8]:
                yield f"│  │    {some.actions[value.index]!r:9} {_value_line(value)}"


def _stored(actions: Mapping[int, Action], graph: Graph, each: bool = False) -> int:
    """Returns the bytes that actions keep, in all iterations or of `each`."""
    values = [(action, graph.values[index]) for index, action in actions.items()]
    return sum(action.stored_bytes(value) * (1 if each else value.repeats) for action, value in values)


def _value_line(value: Value) -> str:
    times = f" ×{value.repeats}" if value.repeats > 1 else ""
    return f"{value.label:24} {value.dtype}{list(value.shape)}{times} {format_bytes(value.kept_bytes)}  {value.source}"
