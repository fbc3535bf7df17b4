"""Functions of bytes that fall in steps: with so many bytes free, so many seconds of recomputation are enough. The
exact solver's arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_BINS = 1024
_ROW = 1 << 48  # bytes: more than any chain has; 2**14 rows of it fit into an int64


class Staircase(NamedTuple):
    """A falling step function.

    Attributes:
      bytes: int64, rising: where each step begins. Below the first the function has no value.
      seconds: float64, falling: its value from there on.
    """

    bytes: np.ndarray
    seconds: np.ndarray

    @property
    def least(self) -> int:
        """The least bytes that it has a value for."""
        return int(self.bytes[0])

    def at(self, limit: np.ndarray | int) -> np.ndarray:
        """Returns the seconds at each limit, none of which is below `least`."""
        return self.seconds[np.searchsorted(self.bytes, limit, side="right") - 1]

    def below(self, end: int) -> Staircase:
        """Returns the steps that begin below `end` bytes."""
        if self.bytes[-1] < end:
            return self
        count = int(self.bytes.searchsorted(end))
        return Staircase(self.bytes[:count], self.seconds[:count])


DONE = Staircase(np.zeros(1, np.int64), np.zeros(1))
"""What no stages at all need."""


def joined(
    first: list[Staircase], second: list[Staircase], extra: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns where first[i] + second[i] has steps, and its value there: row numbers, bytes, and seconds with extra[i]
    added.

    One search serves all rows: they lie one after another on one axis.
    """
    rows, bytes_, seconds, places, begin = [], [], [], [], []
    for side in (first, second):
        counts = np.array([len(each.bytes) for each in side])
        row = np.repeat(np.arange(len(side)), counts)
        rows.append(row)
        bytes_.append(np.concatenate([each.bytes for each in side]))
        seconds.append(np.concatenate([each.seconds for each in side]))
        places.append(bytes_[-1] + row * _ROW)
        begin.append(bytes_[-1][np.cumsum(counts) - counts])
    found = []
    for one, other in ((0, 1), (1, 0)):
        has = bytes_[one] >= begin[other][rows[one]]  # elsewhere the other one has no value yet
        at, row = bytes_[one][has], rows[one][has]
        step = np.searchsorted(places[other], places[one][has], side="right") - 1
        found.append((row, at, seconds[one][has] + seconds[other][step] + extra[row]))
    return tuple(np.concatenate(each) for each in zip(*found))  # type: ignore[return-value]


def envelope(bytes_: np.ndarray, seconds: np.ndarray) -> Staircase:
    """Returns the least step function through some of the points and above none of them."""
    if len(bytes_) > 4 * _BINS:  # leave out at once what a point of an earlier bin is no worse than: less to sort
        low, best = int(bytes_.min()), seconds.min()
        high = int(bytes_[seconds <= best].min())
        bin_ = np.minimum((bytes_ - low) * (_BINS / max(high - low, 1)), _BINS).astype(np.intp)
        least = np.full(_BINS + 1, np.inf)
        np.minimum.at(least, bin_, seconds)
        before = np.concatenate([[np.inf], np.minimum.accumulate(least)[:-1]])
        better = seconds < before[bin_]
        bytes_, seconds = bytes_[better], seconds[better]
    order = np.argsort(bytes_)
    bytes_, seconds = bytes_[order], seconds[order]
    falls = np.ones(len(bytes_), bool)
    falls[1:] = seconds[1:] < np.minimum.accumulate(seconds)[:-1] * (1 - 1e-12)
    bytes_, seconds = bytes_[falls], seconds[falls]
    last = np.append(bytes_[1:] != bytes_[:-1], True)
    return Staircase(bytes_[last], seconds[last])


def thin(steps: Staircase, limit: int) -> Staircase:
    """Returns at most `limit` (two or more) of the steps, the first and the last among them, near the original and
    never below it.

    Leaving a step out costs the area between the curves; the cheapest go first, never two neighbours at a time, and the
    areas are taken anew.
    """
    bytes_, seconds = steps
    while (excess := len(bytes_) - limit) > 0:
        area = (seconds[:-2] - seconds[1:-1]) * (bytes_[2:] - bytes_[1:-1])
        lowest = np.ones(len(area), bool)
        lowest[1:] &= area[1:] < area[:-1]
        lowest[:-1] &= area[:-1] <= area[1:]
        candidates = np.flatnonzero(lowest)
        candidates = candidates[np.argsort(area[candidates])]
        keep = np.ones(len(bytes_), bool)
        keep[1 + candidates[: min(excess, max(1, len(candidates) // 2))]] = False
        bytes_, seconds = bytes_[keep], seconds[keep]
    return Staircase(bytes_, seconds)
