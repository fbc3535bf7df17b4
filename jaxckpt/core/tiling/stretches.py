"""Stretches of a function's operations that run tile by tile: what a plan's tiles say, done to the function."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import PlanMismatchError, TilingError
from jaxckpt.core import surgery
from jaxckpt.core.emit import grouped
from jaxckpt.core.emit import run as run_emitted
from jaxckpt.core.graph import Graph, aval_bytes, trace
from jaxckpt.core.regions import TiledStretch
from jaxckpt.core.tiling.divide import Tiling, divided
from jaxckpt.core.tiling.shares import WHOLE, Share, rows, rows_of_tile

SCOPE = "jaxckpt.tile"
"""The scope of what runs tile by tile."""


def with_tiles(graph: Graph, tiles: Sequence[TiledStretch], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    """Returns the graph of a function with stretches in tiles.

    Args:
      graph: of the function.
      tiles: those of a round disjoint, the last one first.
      args, kwargs: the function's arguments, or arrays like them.

    Raises:
      PlanMismatchError: the tiles are not of this graph.
    """
    for each in _rounds(tiles):
        graph = trace(_run_within(graph, each), *args, **kwargs)
    return graph


def tiled(fun: Callable[..., Any], tiles: Sequence[TiledStretch]) -> Callable[..., Any]:
    """Returns a function of arrays with stretches in tiles. A trace of it is what `with_tiles` returns."""
    *before, last = _rounds(tiles)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        graph = with_tiles(trace(fun, *args, **kwargs), [tile for each in before for tile in each], args, kwargs)
        return _run_within(graph, last)(*args, **kwargs)

    return call


def _rounds(tiles: Sequence[TiledStretch]) -> list[list[TiledStretch]]:
    return [list(each) for _, each in itertools.groupby(tiles, lambda tile: tile.round)]


def _run_within(graph: Graph, tiles: Sequence[TiledStretch]) -> Callable[..., Any]:
    if any(later.start < tile.stop for later, tile in itertools.pairwise(tiles)):
        raise PlanMismatchError(f"tiled stretches of a round must be disjoint, the last one first; got {tiles}.")
    inside = functools.partial(_run, Stretches(graph), tiles)
    return lambda *args, **kwargs: run_emitted(graph, inside, args, kwargs)


class Stretches:
    """Stretches of a graph's operations, to be tiled."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.jaxpr = graph, graph.body.jaxpr
        self.groups = grouped(graph.body)

    def equations(self, start: int, stop: int) -> list[Any]:
        """Returns the equations of the operations start..stop, with the names that follow them."""
        return self.graph.calls.folded(
            [self.graph.calls.closed(eqn) for each in self.groups[start:stop] for eqn in each]
        )

    def program(self, start: int, stop: int) -> tuple[Any, list[Any], list[Any]]:
        """Returns the operations start..stop as an open jaxpr, and the variables that it reads and that others read."""
        eqns = self.equations(start, stop)
        made = [var for eqn in eqns for var in eqn.outvars if not isinstance(var, _compat.DropVar)]
        after = (eqn for each in self.groups[stop:] for eqn in each)
        wanted = {var for eqn in after for var in eqn.invars if isinstance(var, _compat.Var)}
        wanted.update(var for var in self.jaxpr.outvars if isinstance(var, _compat.Var))
        ins, outs = surgery.used(eqns), [var for var in made if var in wanted]
        return surgery.stretch(eqns, ins, outs, self.jaxpr), ins, outs

    def tiling(self, tile: TiledStretch) -> tuple[Tiling, list[Any], list[Any]]:
        """Returns a stretch divided, and the variables that it reads and makes.

        Raises:
          TilingError: an operation couples the rows.
          PlanMismatchError: the tile is not of this graph, or would repeat a side effect.
        """
        if tile.stop > len(self.graph.ops):
            raise PlanMismatchError(f"The plan tiles operations to {tile.stop} of {len(self.graph.ops)}. Plan anew.")
        program, ins, outs = self.program(tile.start, tile.stop)
        index = {var: self.graph.body.values.get(var) for var in ins}
        if tile.value not in index.values():
            raise PlanMismatchError(
                f"The plan tiles operations {tile.start} to {tile.stop} along value {tile.value}, which they do not "
                "read. Plan anew."
            )
        shape = self.graph.values[tile.value].shape
        if tile.axis >= len(shape) or tile.tiles * tile.parts > shape[tile.axis] or shape[tile.axis] % tile.parts:
            inside = f" in {tile.parts} parts" if tile.parts > 1 else ""
            raise PlanMismatchError(
                f"The plan has {tile.tiles} tiles{inside} of axis {tile.axis} of {list(shape)}. Plan anew."
            )
        if effects := _compat.side_effects(program):
            what = ", ".join(map(str, effects))
            raise PlanMismatchError(f"The plan tiles what has side effects, which each tile would repeat: {what}.")
        size = shape[tile.axis]
        shares = [rows(tile.axis) if index[var] == tile.value else WHOLE for var in ins]
        cut = size, rows_of_tile(size, tile.tiles, tile.parts), tile.parts
        return _with_more_rows(_compat.close_jaxpr(program, ()), shares, cut), ins, outs


def _with_more_rows(closed: Any, shares: Sequence[Share], cut: tuple[int, int, int]) -> Tiling:
    """Returns a program divided along an axis of one argument, and of others that have the axis too: those of which
    rows of all tiles would be computed at once, before the tiles. Edges of a graph have several: their ends, and more.
    Not where these rows take fewer bytes than the whole values that they are computed of, as the embeddings of a few
    examples and their weights: each tile would read the weights again, and hold gradients of them.

    Args:
      closed: the program.
      shares: what a tile has of its arguments.
      cut: rows of the axis, rows of a tile, and parts of the axis.

    Raises:
      TilingError: an operation couples the rows, whatever else has the axis.
    """
    found, shares = divided(closed, shares, *cut), list(shares)
    avals = [var.aval for var in found.program.invars]
    refused: set[tuple[int, int]] = set()
    while True:
        size, sources = found.rows_made_before()
        ways = [
            (place, dim)
            for place in sorted(sources)
            for dim, length in enumerate(avals[place].shape)
            if length == cut[0] and shares[place] == WHOLE and (place, dim) not in refused
        ]
        if not ways:
            return found
        place, dim = ways[0]
        refused.add((place, dim))
        more = [rows(dim) if i == place else share for i, share in enumerate(shares)]
        with contextlib.suppress(TilingError):
            other = divided(closed, more, *cut)
            rest, still = other.rows_made_before()
            read = sum(aval_bytes(avals[i]) for i in sources - still if more[i] == WHOLE)
            if size - rest > read:
                found, shares = other, more


def _run(stretches: Stretches, tiles: Sequence[TiledStretch], *args: Any) -> list[Any]:
    """Returns a graph's results, of its constants and arguments, with stretches in tiles."""
    graph, jaxpr, at = stretches.graph, stretches.jaxpr, 0
    env = dict(zip(surgery.inputs_of(jaxpr), args, strict=True))

    def plain(start: int, stop: int) -> None:
        if start < stop or stop == len(graph.ops):
            program, ins, outs = stretches.program(start, len(stretches.groups) if stop == len(graph.ops) else stop)
            env.update(zip(outs, surgery.evaluate(program, *(env[var] for var in ins)), strict=True))

    for tile in reversed(tiles):
        plain(at, tile.start)
        try:
            tiling, ins, outs = stretches.tiling(tile)
        except TilingError as error:
            raise PlanMismatchError(f"The plan tiles what cannot be tiled. {error} Plan anew.") from error
        with jax.named_scope(SCOPE):
            env.update(zip(outs, tiling.run(*(env[var] for var in ins)), strict=True))
        at = tile.stop
    plain(at, len(graph.ops))
    return [atom.val if isinstance(atom, _compat.Literal) else env[atom] for atom in jaxpr.outvars]
