"""The cheapest schedule of a chain, by dynamic programming over (start, stop, bytes): Rotor's recursion with options and gradients.

With T(s, t, m) the least seconds of recomputation for the backward pass of the stages s..t, their inputs kept, m bytes free:

    T(s, t, m) = min over s < j <= t of
        min over options o of span (s, j):   time_o + T(j, t, m - kept_o - output)     where kept_o + work_o <= m - gradients(j, t)
        forward_time(s, j) + T(s, j, m - gradients(j, t)) + T(j, t, m - output)

each also where the forward run of s..j fits into m. T falls in steps as m grows, so it is kept as those steps, exactly, in bytes: no grid, and a
schedule is found at the very least budget that has one. Sources: Beaumont et al. 2019 (arXiv:1911.13214); Zhao et al. 2023 (arXiv:2307.01236).

Guarantee: optimal for the model of `jaxckpt.planner.chain`, up to `STEPS` steps kept of each T; of more, those nearest to one another in
bytes are merged (upwards, so that a schedule never needs more than it says); the least budget is always kept.
"""

from __future__ import annotations

import numpy as np

from jaxckpt.planner.chain import Chain, Drop, Keep, Schedule, Span

STEPS = 400

Steps = tuple[np.ndarray, np.ndarray]
"""Bytes (rising) and seconds (falling): with so many bytes so many seconds are enough."""


def optimal(chain: Chain, budget: int) -> Schedule | None:
    """Returns the cheapest schedule that peaks at no more than `budget` bytes, or None if there is none."""
    return Table(chain).schedule(budget)


def least_budget(chain: Chain) -> int:
    """Returns the least bytes that a schedule of the chain peaks at."""
    return Table(chain).least


class Table:
    """T(s, t, .) for all s < t of one chain: solves once, answers for every budget."""

    def __init__(self, chain: Chain, steps: int = STEPS) -> None:
        self.chain, self.steps = chain, steps
        length = chain.length
        self.gradients = np.zeros((length + 1, length + 1), np.int64)
        self.table: dict[tuple[int, int], Steps] = {}
        for start in range(length, -1, -1):
            for stop in range(start + 1, length + 1):
                self.gradients[start, stop] = chain.span(start, stop).gradient
        for width in range(1, length + 1):
            for start in range(length - width + 1):
                self.table[start, start + width] = self._solve(start, start + width)

    @property
    def least(self) -> int:
        """The least bytes that a schedule peaks at."""
        return int(self.table[0, self.chain.length][0][0])

    def schedule(self, budget: int) -> Schedule | None:
        """Returns the cheapest schedule within the budget, or None."""
        return self._rebuild(0, self.chain.length, budget) if self.chain.length and budget >= self.least else None

    def frontier(self) -> list[tuple[int, float]]:
        """Returns (bytes, seconds) of every step: the cheapest time at each budget."""
        if not self.chain.length:
            return [(0, 0.0)]
        return [(int(b), float(s)) for b, s in zip(*self.table[0, self.chain.length])]

    def _solve(self, start: int, stop: int) -> Steps:
        found: list[Steps] = []
        for j, span in self.chain.keepable[start]:
            if j <= stop:
                found += [self._keep(span, o, j, stop, start) for o in range(len(span.options))]
        found += [self._drop(start, j, stop) for j in range(start + 1, stop + 1)]
        return _lower(found, self.steps)

    def _keep(self, span: Span, number: int, j: int, stop: int, start: int) -> Steps:
        option = span.options[number]
        kept = self.chain.output(start, j, stop) + option.kept
        later = self._later(j, stop)
        floor = max(
            span.forward_work,
            kept,
            option.kept + option.work + int(self.gradients[j, stop]),
            int(self.gradients[start, stop]),
        )
        return np.maximum(later[0] + kept, floor), later[1] + option.time

    def _drop(self, start: int, j: int, stop: int) -> Steps:
        if (start, j) not in self.table:  # the whole stretch, dropped at its end: never better than keeping
            return _NONE
        span = self.chain.span(start, j)
        later, again = self._later(j, stop), self.table[start, j]
        output = self.chain.output(start, j, stop)
        first, second = later[0] + output, again[0] + int(self.gradients[j, stop])
        bytes_ = np.unique(np.concatenate([first, second]))
        floor = max(span.forward_work, output, int(self.gradients[start, stop]), int(first[0]), int(second[0]))
        bytes_ = np.unique(np.maximum(bytes_, floor))
        seconds = _at(first, later[1], bytes_) + _at(second, again[1], bytes_) + span.forward_time
        return bytes_, seconds

    def _later(self, j: int, stop: int) -> Steps:
        return self.table[j, stop] if j < stop else _DONE

    def _rebuild(self, start: int, stop: int, budget: int) -> Schedule:
        if start == stop:
            return ()
        best: tuple[float, Keep | Drop | None, int, int] = (np.inf, None, 0, 0)
        for j, span in self.chain.keepable[start]:
            if j > stop:
                continue
            for o, option in enumerate(span.options):
                bytes_, seconds = self._keep(span, o, j, stop, start)
                if bytes_[0] <= budget and (time := float(_at(bytes_, seconds, budget))) < best[0]:
                    best = (time, Keep(start, j, o), j, budget - self.chain.output(start, j, stop) - option.kept)
        for j in range(start + 1, stop):
            bytes_, seconds = self._drop(start, j, stop)
            if len(bytes_) and bytes_[0] <= budget and (time := float(_at(bytes_, seconds, budget))) < best[0]:
                best = (time, Drop(start, j, ()), j, budget - self.chain.output(start, j, stop))
        _, item, j, rest = best
        assert item is not None, "the table says that this budget is enough"
        if isinstance(item, Drop):
            item = Drop(start, j, self._rebuild(start, j, budget - int(self.gradients[j, stop])))
        return (item, *self._rebuild(j, stop, rest))


_DONE: Steps = (np.zeros(1, np.int64), np.zeros(1))
_NONE: Steps = (np.zeros(0, np.int64), np.zeros(0))


def _at(bytes_: np.ndarray, seconds: np.ndarray, budget: np.ndarray | int) -> np.ndarray:
    """Returns the seconds at each budget; every budget is at least the first step's."""
    return seconds[np.searchsorted(bytes_, budget, side="right") - 1]


def _lower(found: list[Steps], limit: int) -> Steps:
    """Returns the lower envelope of several step functions, at most `limit` steps of it."""
    bytes_ = np.concatenate([each[0] for each in found])
    seconds = np.concatenate([each[1] for each in found])
    order = np.lexsort((seconds, bytes_))
    bytes_, seconds = bytes_[order], seconds[order]
    falling = np.minimum.accumulate(seconds)
    first = np.concatenate([[True], seconds[1:] < falling[:-1] * (1 - 1e-12)])
    bytes_, seconds = bytes_[first], seconds[first]
    distinct = np.concatenate([bytes_[1:] != bytes_[:-1], [True]])
    bytes_, seconds = bytes_[distinct], seconds[distinct]
    if len(bytes_) > limit:  # drop the steps that save the least: those with the next one near in bytes
        gaps = np.diff(bytes_)
        keep = np.ones(len(bytes_), bool)
        keep[1 + np.argsort(gaps[1:], kind="stable")[: len(bytes_) - limit]] = False
        bytes_, seconds = bytes_[keep], seconds[keep]
    return bytes_, seconds
