"""Plans in words: a line for each region, loop and tile. `jaxckpt.show.tree` draws the whole."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from jaxckpt.actions import SAVE, Action
from jaxckpt.core.graph import Graph, Value
from jaxckpt.core.regions import Address, Loop, RecomputedStretch, Region, TiledStretch
from jaxckpt.core.units import counted


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


def iterations_around(address: Address, loops: Iterable[Loop], graph: Graph) -> int:
    """Returns how many iterations planned loops have in whose bodies a body lies; 1 if it lies in none. What is kept in
    it is kept of one iteration at a time, as it runs again, and not of all. Loops of which some iterations are left to
    JAX do not count.
    """
    found = 1
    for loop in loops:
        op = graph.at(loop.body).ops[loop.op]
        if address[: len(loop.body) + 1] == (*loop.body, (op.index, 0)):
            told = loop.schedule.iterations(op.params["length"])
            found *= op.params["length"] if all(each.actions is not None or each.unsaid for each in told) else 1
    return found


def tile_line(tile: TiledStretch, value: Value | None = None) -> str:
    """Returns a line on a tiled stretch; with the value whose axis is divided, where that is known."""
    along = "" if value is None else f" along axis {tile.axis} of {value.label} {list(value.shape)}"
    return f"ops {tile.start}..{tile.stop} in {counted(tile.tiles, 'tile')}{along}"


def recomputed_line(each: RecomputedStretch) -> str:
    """Returns a line on a stretch that the function runs again."""
    return f"ops {each.start}..{each.stop} run again in front of op {each.at}"


def _inside(address: Address) -> str:
    """Returns where a body lies, in words, without its graph."""
    bodies = [f"{index}{f' (body {number})' if number else ''}" for index, number in address]
    return f" inside of operation {', '.join(bodies)}" if address else ""


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
