"""Nested segments: keep the carry at the start of each segment, run a segment again when the backward pass reaches it,
and treat the segment in the same way inside. With one level of square-root length this is Chen et al. 2016
(arXiv:1604.06174).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

from jaxckpt._errors import PlanMismatchError
from jaxckpt.actions import Action
from jaxckpt.core.constants import LOG_BASE
from jaxckpt.core.regions import all_of, check_flag, checked_actions, set_fields, whole
from jaxckpt.core.scans import Iteration, ScanRun, Values
from jaxckpt.core.schedule import Iterations, LoopCost, LoopSchedule
from jaxckpt.core.units import counted


@dataclass(frozen=True)
class Nested(LoopSchedule):
    """Iterations in segments: `count` segments of `inner.length` iterations, each checkpointed, then `rest` iterations.

    The rest is shorter than a segment, or than there are segments. It is last: where the scan's backward pass follows
    its forward pass at once, its values are needed first and checkpointing it saves nothing, so its iterations run as
    those in segments do. Where the backward pass comes later, as in a planned program, the rest is a shorter segment
    (`tail`).

    Attributes:
      length: iterations.
      count: checkpointed segments; 0 for plain iterations.
      inner: what each segment is; None for plain iterations.
      rest: iterations after the last segment.
      remat: whether plain iterations are checkpointed one by one ("every").
      actions: index of a value of the body -> its action. In plain iterations that are checkpointed, of what the body
        computes, and of the carry that an iteration starts from. With segments, of the carry that one starts from.
      tail: what the rest is where it is checkpointed as a segment; None where it is not.
    """

    kind: ClassVar[str] = "nested"
    recodes_carries: ClassVar[bool] = True

    length: int
    count: int = 0
    inner: Nested | None = None
    rest: int = 0
    remat: bool = False
    actions: Mapping[int, Action] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    tail: Nested | None = field(default=None, repr=False)

    __hash__ = LoopSchedule.__hash__

    def __post_init__(self) -> None:
        numbers = {name: whole(getattr(self, name), name) for name in ("length", "count", "rest")}
        set_fields(self, **numbers, actions=checked_actions(self.actions))
        check_flag(self.remat, "remat")
        for name in ("inner", "tail"):
            all_of([nest] if (nest := getattr(self, name)) is not None else [], Nested, name)
        covered = self.rest + (0 if self.inner is None else self.count * self.inner.length)
        ended = self.tail is None or (self.tail.length == self.rest and self.inner is not None)
        if covered != self.length or not ended or (self.inner is None) != (self.count == 0):
            raise PlanMismatchError(
                f"Segments and rest must be as many iterations as the schedule; it has {self.length}, of which they "
                f"cover {covered}; got "
                f"{self!r:.200}. Plan anew."
            )
        if self.actions and self.inner is None and not self.remat:
            raise PlanMismatchError(
                f"Only segments, and iterations that are checkpointed one by one, may have actions; got actions in "
                f"{self!r:.200}. Plan anew."
            )

    @property
    def body_runs(self) -> int:
        """Runs of the body over a forward and a backward pass."""
        return self.length + self._again

    @property
    def steps(self) -> int:
        """`body_runs`, by its older name."""
        return self.body_runs

    @property
    def _again(self) -> int:
        if self.inner is None:
            return self.length if self.remat else 0
        return self.count * self.inner.body_runs + (
            self._rest.body_runs if self.tail is not None else self._rest._again
        )

    @property
    def _plain(self) -> Nested:
        """What the iterations of the innermost segments are."""
        return self if self.inner is None else self.inner._plain

    @property
    def _rest(self) -> Nested:
        """What the rest is."""
        if self.tail is not None or self.inner is None:
            return self.tail or self
        return replace(self._plain, length=self.rest, rest=self.rest)

    @property
    def levels(self) -> int:
        """Levels of checkpoints, one within the other."""
        return 1 + self.inner.levels if self.inner is not None else int(self.remat)

    @property
    def kept(self) -> int:
        """Carries kept from the forward to the backward pass."""
        if self.inner is None:
            return self.length if self.remat else 0
        return self.count + (1 if self.tail is not None else self._rest.kept)

    @property
    def carries(self) -> int:
        """Most carries kept at once in the backward pass: the segments' starts of every level."""
        inside = 0 if self.inner is None else self.inner.carries
        return self.kept + max(inside, 0 if self.tail is None else self.tail.carries)

    @property
    def residuals(self) -> int:
        """Most iterations whose residuals are kept at once: those of the innermost segment, or of a rest."""
        if self.inner is None:
            return min(self.length, 1) if self.remat else self.length
        return max(self.inner.residuals, self._rest.residuals)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the nested segments, outermost first."""
        return () if self.inner is None else (self.inner.length, *self.inner.lengths)

    def refusal(self, length: int) -> str:
        """Returns why it cannot run so many iterations; "" where it can."""
        return "" if length == self.length else f"It is of {self.length} iterations."

    def cost(self, length: int) -> LoopCost:
        """Returns what running it costs."""
        return LoopCost(self.kept, self.carries, self.residuals, self.body_runs)

    def iterations(self, length: int) -> tuple[Iterations, ...]:
        """Returns what is told of its iterations."""
        how = self._segments
        inmost = self._plain
        actions = inmost.actions if inmost.remat else None
        how += " that run again" if how and actions is None else ""
        return (Iterations(self.length, how, actions, self.inner is None),)

    @property
    def _segments(self) -> str:
        """The nested segments in words."""
        if self.inner is None:
            return ""
        kept = ", ".join(dict.fromkeys(map(str, self.actions.values())))
        return f", in segments of {self.inner.length}{f' ({kept} their carries)' if kept else ''}{self.inner._segments}"

    def __str__(self) -> str:
        segments = self._segments
        if not self._plain.remat:
            how = ", which run again" if segments else " left to JAX"
            return f"{counted(self.length, 'iteration')}{segments}{how}"
        actions = self._plain.actions
        when = " while its segment runs again" if segments else ""
        alone = "" if segments else ", each keeps its carry alone"
        kept = f", each keeps {counted(len(actions), 'value')}{when}" if actions else alone
        return f"{counted(self.length, 'iteration')}{segments}{kept}"

    def carry_actions(self) -> Iterator[int]:
        """Yields the values that have actions at the start of segments."""
        yield from self.actions if self.inner is not None else ()
        yield from super().carry_actions()

    def run(self, scan: ScanRun) -> tuple[Values, Values]:
        """Runs the iterations."""
        if self.inner is None:
            return scan.loop(scan.iteration(self.actions if self.remat else None, alone=self.length == 1))
        main = self.length - self.rest
        first, last = scan.rows([main, self.rest]) if self.rest else (scan.xs, [])
        blocks = [x.reshape(self.count, self.inner.length, *x.shape[1:]) for x in first]
        segments = replace(scan, body=replace(scan.body, length=self.count), xs=blocks, unroll=1)
        state, ys = segments.loop(self._segment(self.inner, scan, alone=self.count == 1))
        stacked = [[y.reshape(main, *y.shape[2:]) for y in ys]]
        if self.rest:
            if self.tail is None:
                state, ys = self._rest.run(scan.over(self.rest, state, last))
            else:
                state, ys = self._segment(self.tail, scan, alone=True)(state, last)
            stacked.append(ys)
        return state, scan.joined(stacked)

    def _segment(self, nest: Nested, scan: ScanRun, *, alone: bool) -> Iteration:
        """Returns a segment, checkpointed, as a function of its carry and its rows."""

        def within(scan: ScanRun) -> Iteration:
            return lambda state, rows: nest.run(scan.over(nest.length, state, rows, deeper=True))

        if self.actions:
            return scan.segment_from(within, self.actions, alone=alone)
        return scan.segment(within(scan), alone=alone)


def checkpointed(
    length: int,
    lengths: Sequence[int] = (),
    actions: Mapping[int, Action] | None = None,
    *,
    remat: bool = True,
    carries: Mapping[int, Action] | None = None,
) -> Nested:
    """Returns iterations in nested segments of which the last, shorter one is checkpointed too, as planned programs
    have them.

    Args:
      length: iterations, at least 1.
      lengths: of the nested segments, outermost first; () for none.
      actions: index of a value that the body computes -> its action, for each iteration of an innermost segment.
      remat: False leaves each such iteration to JAX, which keeps what derivatives need, also of loops inside.
      carries: index of a carry, as an input of the body -> its action where it is kept from the forward to the backward
        pass: at the start of each outermost segment, or of each iteration where there are no segments.

    >>> nest = checkpointed(10, (4,))
    >>> nest.count, nest.kept, nest.tail.length
    (2, 3, 2)
    """
    length, lengths = whole(length, "length"), [whole(size, "lengths") for size in lengths]
    if length < 1 or any(size < 1 for size in lengths):
        raise PlanMismatchError(
            f"Iterations and the lengths of segments must be at least 1; got {length} iterations in {lengths}. Plan "
            f"anew."
        )
    if not lengths:
        return Nested(length, rest=length, remat=remat, actions={**(actions or {}), **(carries or {})})
    size = min(lengths[0], length)
    count, rest = divmod(length, size)
    inside = lambda some: checkpointed(some, lengths[1:], actions, remat=remat)
    return Nested(length, count, inside(size), rest, actions=carries or {}, tail=inside(rest) if rest else None)


def plain(length: int, *, remat: bool = False) -> Nested:
    """Returns iterations without segments; `remat`: each checkpointed by itself."""
    return Nested(length, rest=length, remat=remat)


def nested(length: int, lengths: Sequence[int]) -> Nested:
    """Returns `length` iterations in nested segments.

    Args:
      length: iterations.
      lengths: outermost first: so many segments, each of so many segments, ..., each of so many iterations. Their
        product must be at least `length`; where it is more, segments are made equal and as long as need be, and what
        does not divide comes last.

    >>> nested(100, (10, 10))
    Nested(length=100, count=10, inner=Nested(length=10, count=0, inner=None, rest=10, remat=False), rest=0,
    remat=False)
    >>> nested(103, (10, 11)).rest
    3
    """
    if length == 0 or len(lengths) == 1:
        return plain(length)
    count = min(lengths[0], length)
    cover = math.prod(lengths[1:])
    shorter, longer = length // count, -(-length // count)
    # Segments rounded down leave a rest of fewer iterations than there are segments; rounded up, of fewer than a
    # segment has. The first is better in a deep nest, where a long rest would want segments of its own.
    size = longer if longer * longer <= length and longer <= cover else shorter
    return _segments(length, min(size, cover), lengths[1:])


def segmented(length: int, size: int) -> Nested:
    """Returns `length` iterations in segments of `size` iterations; the last takes what is left and is not
    checkpointed.

    >>> segmented(10, 4).count, segmented(10, 4).rest
    (2, 2)
    """
    return plain(length) if size >= length else _segments(length, size, (size,))


def _segments(length: int, size: int, lengths: Sequence[int]) -> Nested:
    inner = nested(size, lengths)
    count, rest = divmod(length, size)
    return Nested(length, count, inner, rest)


def sqrt_size(length: int) -> int:
    """Returns iterations in a segment of "sqrt": about the square root; a divisor of the length if one is near, since a
    rest costs a copy of xs.

    >>> sqrt_size(10000), sqrt_size(1000), sqrt_size(10007)
    (100, 25, 100)
    """
    root = math.isqrt(max(length, 1))
    far = min(root // 2, 2**16)  # of a scan that long nobody minds the rest
    near = [size for size in range(max(1, root - far), root + far + 1) if length % size == 0]
    near = [size for size in near if length <= 2.25 * size * size and size * size <= 2.25 * length]
    # Residuals of an iteration are larger than a carry, so of two divisors as near, the shorter segment.
    closest = min(near, key=lambda size: (max(size * size, length) / min(size * size, length), size), default=None)
    return root + (length > root * (root + 1)) if closest is None else closest


def nearest_divisors(length: int, size: int) -> list[int]:
    """Returns the largest divisor of a length that is at most `size`, and the smallest that is more; the length's own
    if there is no other.

    >>> nearest_divisors(20_000, 141), nearest_divisors(10_007, 100)
    ([125, 160], [1, 10007])
    """
    small = [d for d in range(1, min(math.isqrt(length), 2**20) + 1) if length % d == 0]
    divisors = sorted({*small, *(length // d for d in small)})
    below = [d for d in divisors if d <= max(size, 1)][-1:]
    return below + [d for d in divisors if d > max(size, 1)][:1]


def log_lengths(length: int) -> tuple[int, ...]:
    """Returns the nested lengths of "log": 4 at every level but the innermost, which has 2 to 8 iterations.

    >>> log_lengths(256), log_lengths(10007)
    ((4, 4, 4, 4), (4, 4, 4, 4, 4, 4, 3))
    """
    levels = max(1, round(math.log(max(length, 1), LOG_BASE)))
    outer = LOG_BASE ** (levels - 1)
    return (LOG_BASE,) * (levels - 1) + (max(1, -(-length // outer)),)
