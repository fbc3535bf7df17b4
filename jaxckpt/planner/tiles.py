"""Which stretches of a function are to run tile by tile.

What bounds a plan from below is the stretch that needs most at once. The chain says at which moments its leanest plan
needs more than there is. The operations of such a moment are divided along an axis of a value that they read, if one
goes through all of them: into as many tiles as it takes. The function with these tiles is planned like any other.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt import _compat
from jaxckpt._errors import TilingError
from jaxckpt.core.constants import (
    ALIKE,
    LITTLE,
    MOST_TILES,
    MUCH_LESS,
    STANDS_OUT,
    TILE_REACH,
    TILED_AXES,
    TRIED_AXES,
)
from jaxckpt.core.graph import Graph, aval_bytes, trace
from jaxckpt.core.liveness import graph_peak
from jaxckpt.core.regions import TiledStretch
from jaxckpt.core.tiling.stretches import SCOPE, Stretches
from jaxckpt.planner.chain import Keep, Phase, Solution, moments
from jaxckpt.planner.model import Model

logger = logging.getLogger("jaxckpt")

Moves = tuple[tuple[bool, ...], tuple[bool, ...]]
"""For each value that a stretch reads, and for each that it makes, whether the derivative passes through it."""


@dataclass(frozen=True)
class _Way:
    """An axis along which a stretch can be divided.

    Attributes:
      place: of the value among those that the stretch reads.
      axis: of it.
      bytes: that the stretch and its derivative need, in as many tiles as were asked for.
      flops: of both.
    """

    place: int
    axis: int
    bytes: int
    flops: int


class Tiler:
    """Finds tiles for a function that was made into a chain.

    Args:
      graph, model: the function, planned as a whole: not a body of it.
      platform: of the target.
      round: of the tiles: see `TiledStretch`.
      devices: over which the arguments may be sharded.
    """

    def __init__(self, graph: Graph, model: Model, platform: str, round: int = 0, devices: int = 1) -> None:
        self.graph, self.model, self.platform, self.round, self.devices = graph, model, platform, round, devices
        self.stretches = Stretches(graph)
        self.refused: list[TilingError] = []  # the last stretch's first; of each, those of activations first
        self._ways: dict[tuple[str, Moves, int], _Way | None] = {}

    def tiles(
        self, solution: Solution, limit: int, more: float = 1.0, *, alone: bool = False, count: int | None = None
    ) -> list[TiledStretch]:
        """Returns tiles for the moments of a solution that need more than a limit; those of the last operations first.

        Args:
          solution: the leanest one, or the one that keeps most.
          limit: bytes, besides the arguments.
          more: how many times as many tiles as the chain says.
          alone: whether to leave out stretches that need too much in however many tiles.
          count: the tiles of each, whatever the chain says. Then the stages of a moment are tiled one by one where no
            axis goes through all of them.
        """
        found: list[TiledStretch] = []
        chosen: list[tuple[int, int]] = []
        too_big = self._too_big(solution, limit)
        for start, stop in sorted(too_big, key=lambda each: each[1] - each[0]):
            size, work = too_big[start, stop]
            around = self._around(start, stop, size)
            if count is not None and stop - start > 1:
                around += [each for a, b in self._within(start, stop) for each in self._around(a, b, size)]
            for s, t in around:
                if any(s < b and a < t for a, b in chosen) or self._is_tiled(s, t):
                    continue
                less = min(work + self._inside(solution, start, stop, s, t), size)
                left = max(less - (size - limit), less // MOST_TILES)
                if alone and less - (size - limit) < left:
                    continue
                many = count or -(-less // max(left, 1))
                tile = self._tile(self.model.places[s], self.model.places[t], many, more)
                if tile is not None:
                    found.append(tile)
                    chosen.append((s, t))
                    break
        return sorted(found, key=lambda tile: -tile.start)

    def dearest(self, solution: Solution) -> list[TiledStretch]:
        """Returns the stretch that needs most itself, in so many tiles, a power of two, that it needs about as much as
        the next one that it does not overlap; nothing where it does not stand out, or no axis goes through.

        Args:
          solution: the leanest one.
        """
        needs = {stages: (size, work) for stages, (size, work) in self._too_big(solution, 0).items() if work}
        if not needs:
            return []
        start, stop = max(needs, key=lambda stages: needs[stages][1])
        size, work = needs[start, stop]
        for s, t in self._around(start, stop, size)[:-1]:  # not the whole function
            rest = max((each for (a, b), (_, each) in needs.items() if b <= s or t <= a), default=work)
            if work >= STANDS_OUT * rest and not self._is_tiled(s, t):
                count = 1 << (work // rest).bit_length() - 1
                tile = self._tile(self.model.places[s], self.model.places[t], count, 1.0)
                if tile is not None:
                    return [tile]
        return []

    def microbatches(self, count: int) -> list[TiledStretch]:
        """Returns the whole function in so many tiles, or as many as it can have; nothing if no axis goes through."""
        most = self.model.chain.length
        tile = None if self._is_tiled(0, most) else self._tile(0, self.model.places[most], count, 1.0)
        return [] if tile is None else [tile]

    def ways(self, solutions: Sequence[Solution]) -> list[TiledStretch]:
        """Returns the stretches that need most under each solution, and those around them, in as many tiles as there
        can be, along each axis that goes through.
        """
        stretches: dict[tuple[int, int], None] = {}
        for solution in solutions:
            needs = self._too_big(solution, 0)
            if not needs:
                continue
            start, stop = max(needs, key=lambda stages: needs[stages])
            inner = self._within(start, stop)[:1] if stop - start > 1 else []
            for a, b in ((start, stop), *inner):
                stretches.update(dict.fromkeys(self._around(a, b, needs[start, stop][0])))
        found: dict[TiledStretch, None] = {}
        for s, t in stretches:
            start, stop = self.model.places[s], self.model.places[t]
            program, ins, outs = self.stretches.program(start, stop)
            if not ins or not outs or _compat.side_effects(program):
                continue
            moves = self._moves(ins, outs)
            whole = self._whole(start, stop, program, ins, moves)
            if whole is None:
                continue
            for way in self._all(start, stop, ins, moves, MOST_TILES, whole):
                if way.bytes < MUCH_LESS * whole:
                    found[self._stretch(start, stop, ins[way.place], way.axis, MOST_TILES)] = None
        return list(found)

    def couplings(self, rows: int) -> list[TilingError]:
        """Returns what stands in the way of tiles of the stretch that needs most, along all axes but one of so many
        rows; nothing if it needs less along another axis, too. An axis of a small weight may go through and spare
        nothing.
        """
        start, stop, _ = self.model.widest()
        program, ins, outs = self.stretches.program(start, stop)
        if not ins or not outs or _compat.side_effects(program):
            return []
        moves = self._moves(ins, outs)
        whole = self._whole(start, stop, program, ins, moves)
        if whole is None:
            return []
        ways = [way for way in self._all(start, stop, ins, moves, MOST_TILES, whole) if way.bytes < MUCH_LESS * whole]
        return self.refused if all(ins[way.place].aval.shape[way.axis] == rows for way in ways) else []

    def _within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the stages start..stop, each alone, those that need most first."""
        chain = self.model.chain
        stages = [(stage, stage + 1) for stage in range(start, stop)]
        return sorted(stages, key=lambda each: -chain.segment(*each).forward_work)

    def _around(self, start: int, stop: int, size: int) -> list[tuple[int, int]]:
        """Returns stretches around stages start..stop, first choices first: the shortest between whose ends little of
        `size` bytes passes (a head with all that is made of its logits, an attention with all that is made of its
        scores); the one between whose ends least passes; and the whole function, in microbatches.
        """
        passing, most = self._passing, self.model.chain.length
        near = [
            (passing[s] + passing[t], t - s, s, t)
            for s in range(max(start - TILE_REACH, 0), start + 1)
            for t in range(stop, min(stop + TILE_REACH, most) + 1)
        ]
        little = [(length, bytes, s, t) for bytes, length, s, t in near if bytes <= LITTLE * size]
        chosen = [min(little)[2:]] if little else []
        return list(dict.fromkeys([*chosen, min(near)[2:], (0, most)]))

    @functools.cached_property
    def _passing(self) -> list[int]:
        """The bytes of the values that pass from before each stage to it and later ones."""
        chain = self.model.chain
        found = [0] * (chain.length + 1)
        for carried in chain.carried:
            for place in range(carried.made + 1, max(carried.uses) + 1):
                found[place] += carried.bytes
        return found

    def _too_big(self, solution: Solution, limit: int) -> dict[tuple[int, int], tuple[int, int]]:
        """Returns (start, stop) of stages -> (the most bytes that are needed at a moment of theirs, those of it that
        they need themselves).
        """
        chain = self.model.chain
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for (start, stop, phase), size in moments(chain, solution).items():
            if size > limit:
                segment = chain.segment(start, stop)
                work = segment.forward_work
                if phase is Phase.BACKWARD:
                    work = max((each.work + each.kept for each in segment.candidates), default=0)
                found[start, stop] = max(found.get((start, stop), (0, 0)), (size, work))
        return found

    def _inside(self, solution: Solution, start: int, stop: int, s: int, t: int) -> int:
        """Returns the bytes that stages s..t keep for, or hand to, one another, besides stages start..stop."""
        chain = self.model.chain
        keeps = [item for item in solution if isinstance(item, Keep) and s <= item.start and item.stop <= t]
        found = sum(chain.candidate(item).kept for item in keeps if (item.start, item.stop) != (start, stop))
        return found + sum(each.bytes for each in chain.carried if s <= each.made and max(each.uses) < t)

    def _is_tiled(self, start: int, stop: int) -> bool:
        places = self.model.places
        return any(SCOPE in op.scope for op in self.graph.ops[places[start] : places[stop]])

    def _tile(self, start: int, stop: int, count: int, more: float) -> TiledStretch | None:
        """Returns operations start..stop in at least so many tiles, or as many as there can be, times `more`; None
        where no axis goes through.
        """
        program, ins, outs = self.stretches.program(start, stop)
        count = min(1 << max(count - 1, 1).bit_length(), MOST_TILES)
        count = min(max(round(count * more), 2), MOST_TILES)
        if not ins or not outs or _compat.side_effects(program):
            return None
        moves = self._moves(ins, outs)
        key = str(program), moves, count
        if key not in self._ways:
            self._ways[key] = self._best(start, stop, program, ins, moves, count)
        way = self._ways[key]
        if way is None:
            return None
        return self._stretch(start, stop, ins[way.place], way.axis, count)

    def _stretch(self, start: int, stop: int, var: Any, axis: int, count: int) -> TiledStretch:
        """Returns operations start..stop in so many tiles of an axis, or as many as it has rows; none is empty."""
        value = self.graph.body.values[var]
        size = self.graph.values[value].shape[axis]
        parts = math.gcd(size, self.devices)
        parts = parts if size >= 2 * parts else 1  # the axis is not sharded, or it cannot be tiled within a shard
        rows = size // parts
        return TiledStretch(start, stop, value, axis, -(-rows // -(-rows // min(count, rows))), self.round, parts)

    def _moves(self, ins: Sequence[Any], outs: Sequence[Any]) -> Moves:
        of, active = self.graph.body.values, self.model.active
        return tuple(of.get(var) in active for var in ins), tuple(of.get(var) in active for var in outs)

    def _best(self, start: int, stop: int, program: Any, ins: Sequence[Any], moves: Moves, count: int) -> _Way | None:
        """Returns the way that needs least; of those that need about as little, the one with the fewest FLOPs."""
        whole = self._whole(start, stop, program, ins, moves)
        if whole is None:
            return None
        found = list(self._all(start, stop, ins, moves, count, whole))
        least = min((way.bytes for way in found), default=whole)
        near = [way for way in found if way.bytes <= ALIKE * least and way.bytes < MUCH_LESS * whole]
        return min(near, key=lambda way: way.flops, default=None)

    def _whole(self, start: int, stop: int, program: Any, ins: Sequence[Any], moves: Moves) -> int | None:
        """Returns the bytes that a stretch and its derivative need without tiles; None where it cannot be asked."""
        try:
            return self._needs(lambda *values: _compat.eval_jaxpr(program, (), *values), ins, moves)[0]
        except (ValueError, TypeError, NotImplementedError) as error:  # it has a result that nobody differentiates
            logger.info("operations %d to %d are not tiled: %s", start, stop, error)
            return None

    def _all(self, start: int, stop: int, ins: Sequence[Any], moves: Moves, count: int, whole: int) -> Iterator[_Way]:
        """Yields the ways in which a stretch can be divided, activations first, until there are enough that need less
        than the `whole`.
        """
        kinds = [self.graph.values[self.graph.body.values[var]].kind for var in ins]
        fixed = [not jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in ins]
        order = sorted(
            range(len(ins)), key=lambda i: (kinds[i] != "intermediate", not fixed[i], -aval_bytes(ins[i].aval))
        )
        tried = useful = 0
        refused: list[TilingError] = []
        for place in order:
            for axis, size in enumerate(ins[place].aval.shape):
                if size < 2 or useful >= TILED_AXES or tried >= TRIED_AXES:
                    continue
                tile = TiledStretch(start, stop, self.graph.body.values[ins[place]], axis, min(count, size))
                try:
                    tiling, _, _ = self.stretches.tiling(tile)
                    needed, flops = self._needs(tiling.run, ins, moves)
                except TilingError as error:
                    refused.append(error)
                    continue
                except (ValueError, TypeError, NotImplementedError) as error:  # as in `_whole`
                    logger.info("operations %d to %d are not tiled along %d: %s", start, stop, axis, error)
                    continue
                tried += 1
                useful += needed < MUCH_LESS * whole
                yield _Way(place, axis, needed, flops)
        self.refused = refused + self.refused

    def _needs(self, run: Callable[..., Any], ins: Sequence[Any], moves: Moves) -> tuple[int, int]:
        """Returns the bytes that a function of variables like `ins` and its derivative need besides its operands, and
        their FLOPs.
        """
        avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in ins]
        moving = [place for place, it_moves in enumerate(moves[0]) if it_moves]
        through = [place for place, it_moves in enumerate(moves[1]) if it_moves]

        def step(*values: Any) -> Any:
            def some(*those: Any) -> Any:
                given = dict(zip(moving, those))
                out = run(*(given.get(place, value) for place, value in enumerate(values)))
                return [out[place] for place in through]

            out, pull = jax.vjp(some, *(values[place] for place in moving))
            return pull([jnp.ones_like(each) for each in out])

        graph = trace(step if moving else run, *avals)
        return graph_peak(graph, self.platform), graph.flops
