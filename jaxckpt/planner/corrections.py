"""What the chain says of a solution, held against a trace of the step, moment by moment, and corrected.

The chain puts a step together from stretches that were each looked at alone. In the step a stretch may need more: what
comes before and after it is there in forms that it cannot see. Or less: what goes into it is written over. Both stay
the same from one solution to the next, so what one solution taught holds for others.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxckpt.core.shared_traces import PATTERN
from jaxckpt.planner.chain import Chain, Moment, Phase, Segment, Solution, moments

_PART = re.compile(PATTERN + r"|rematted_computation")


def traced_moments(profile: Iterable[tuple[str, int]], places: Sequence[int]) -> dict[Moment, int]:
    """Returns the most bytes that a step needs at each moment of a solution.

    Args:
      profile: (scopes, bytes) of each operation, as of `liveness.graph_profile`, traced with its regions in scopes.
      places: the operations that the stages start with, and one after the last.
    """
    stage = {place: number for number, place in enumerate(places)}
    found: dict[Moment, int] = {}
    for scopes, size in profile:
        for start, stop, phase in _moments(scopes):
            if start in stage and stop in stage:
                key = stage[start], stage[stop], phase
                found[key] = max(found.get(key, 0), size)
    return found


@functools.lru_cache(maxsize=4096)
def _moments(scopes: str) -> tuple[Moment, ...]:
    """Returns the moments that an operation belongs to, by the regions among its scopes.

    The regions around a forward operation run forward, all of them. Of a backward one the innermost runs backward; but
    what lies in those that a region around them runs again, runs forward. It is a backward one if what is transposed is
    around the regions: inside of one the function may differentiate for itself.
    """
    regions: list[tuple[int, int]] = []
    first, again = len(scopes), None
    for part in _PART.finditer(scopes):
        if part[1] is None:
            again = len(regions)
        else:
            first = min(first, part.start())
            regions.append((int(part[1]), int(part[2])))
    if "transpose(" not in scopes[:first]:
        return tuple((*region, Phase.FORWARD) for region in regions)
    if again is not None and again < len(regions):
        return tuple((*region, Phase.AGAIN) for region in regions[again:])
    return tuple((*region, Phase.BACKWARD) for region in regions[-1:])


class Corrections:
    """A chain, and by how many bytes traced solutions differ from what it says."""

    def __init__(self, chain: Chain) -> None:
        self._plain = chain
        self._exact: dict[Moment, int] = {}
        self._near: dict[Phase, list[int | None]] = {phase: [None] * chain.length for phase in Phase}
        self._corrected: Chain | None = chain

    @property
    def chain(self) -> Chain:
        """The chain, corrected by all that was added."""
        if self._corrected is None:
            segments = {(s, t): self._segment(s, t, segment) for (s, t), segment in self._plain.segments.items()}
            self._corrected = replace(self._plain, segments=segments)
        return self._corrected

    def add(self, solution: Solution, traced: Mapping[Moment, int], unit: int) -> None:
        """Takes note of a traced solution; where it contradicts an earlier one, it counts.

        Args:
          solution: of the chain.
          traced: the most bytes that the step needs at each moment, besides the program's arguments.
          unit: corrections are multiples of so many bytes, so that equal stretches stay equal.
        """
        said = moments(self._plain, solution)
        for (start, stop, phase), size in traced.items():
            if (start, stop, phase) in said:
                if phase is Phase.BACKWARD and stop == self._plain.length:
                    # The last stretch runs backward right after it ran forward, and may need most before: a loss in
                    # tiles computes its gradients in the forward pass.
                    size = max(size, traced.get((start, stop, Phase.FORWARD), size))
                error = -(-(size - said[start, stop, phase]) // unit) * unit
                self._exact[start, stop, phase] = error
                self._near[phase][start:stop] = [error] * (stop - start)
        self._corrected = None

    def _segment(self, start: int, stop: int, segment: Segment) -> Segment:
        forward, again, backward = (self._error(start, stop, phase) for phase in _PHASES)
        # Solvers know one forward run. What the first one needs more is mostly what is there for the whole step.
        run = again if again is not None else min(forward or 0, backward or 0)
        candidates = (replace(each, work=max(each.work + (backward or 0), -each.kept)) for each in segment.candidates)
        return replace(segment, forward_work=max(segment.forward_work + run, 0), candidates=tuple(candidates))

    def _error(self, start: int, stop: int, phase: Phase) -> int | None:
        """Returns the bytes by which a moment needs more than the chain says: as traced, or as its stages did. None
        where nothing is known.
        """
        if (start, stop, phase) in self._exact:
            return self._exact[start, stop, phase]
        near = [error for error in self._near[phase][start:stop] if error is not None]
        return sum(near) // len(near) if near else None


_PHASES = (Phase.FORWARD, Phase.AGAIN, Phase.BACKWARD)
