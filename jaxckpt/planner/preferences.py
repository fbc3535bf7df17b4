"""Orders of a stage's candidates, and the solution that takes the first of each stage: what is known of a chain without
solving it.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxckpt.planner.chain import Candidate, Chain, Keep

Preference = Callable[[Candidate], tuple[float, ...]]


def single(chain: Chain, preference: Preference) -> tuple[Keep, ...]:
    """Returns each stage with the candidate that `preference` puts first."""
    return tuple(
        Keep(stage, stage + 1, min(range(len(candidates)), key=lambda o: preference(candidates[o])))
        for stage in range(chain.length)
        for candidates in [chain.segment(stage, stage + 1).candidates]
    )


def fastest(candidate: Candidate) -> tuple[float, float]:
    """Puts the candidate first that recomputes the least."""
    return candidate.time, candidate.kept


def tightest(candidate: Candidate) -> tuple[float, float]:
    """Puts the candidate first that needs the fewest bytes at once."""
    return candidate.kept + candidate.work, candidate.time


def leanest(candidate: Candidate) -> tuple[float, float]:
    """Puts the candidate first that keeps the fewest bytes."""
    return candidate.kept, candidate.time


def barest(candidate: Candidate) -> tuple[float, float]:
    """Puts the candidate first that keeps nothing, as a checkpoint without a policy does; then as `leanest`."""
    return candidate.kept + bool(candidate.how), candidate.time


def on_device(preference: Preference) -> Callable[[Candidate], tuple[float, ...]]:
    """Returns the preference with candidates that have something on the host put last."""
    return lambda candidate: (candidate.on_host, *preference(candidate))
