"""Which checkpoints, written as people write them, a search compiles next."""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jaxckpt.core.constants import CLOSE, OVERSTATED_LOOP, OVERTIMED, TINIEST, TINY
from jaxckpt.memory.platforms import PLATFORMS
from jaxckpt.planner.chain import Solution, cost
from jaxckpt.planner.measured import Measured, Try
from jaxckpt.planner.predictions import Predictions


def most_overstated(problem: Measured) -> float:
    """Returns how many times its compiled peak a step may be estimated to need on the target's platform, at most."""
    return PLATFORMS[problem.target.platform].overstated


def likely(predictions: Predictions, solution: Solution) -> float:
    """Returns the estimate up to which a solution, written by hand, may be within the budget."""
    problem, budget = predictions.problem, predictions.budget
    if problem.model.checkpoints_loops(solution):  # others say nothing of what a body needs
        return OVERSTATED_LOOP * budget
    return min(most_overstated(problem) * budget, predictions.most_estimated(budget))


def first_blocks(predictions: Predictions) -> Sequence[Solution]:
    """Returns checkpoints around the first blocks alone, each of which keeps nothing: the fewest blocks that the
    chain says may fit, and one more. None of a program whose traces take long.
    """
    problem = predictions.problem
    if not predictions.quick or not problem.by_hand:
        return ()
    limit = (1 + CLOSE) * predictions.modelled_limit(predictions.budget)
    left = problem.model.with_last_blocks_left(problem.by_hand[0])
    return [solution for solution in left if cost(predictions.chain, solution).peak <= limit][-2:]


def with_last_blocks_left(predictions: Predictions, best: Try) -> Iterator[Solution]:
    """Yields a plan by hand with some of its last blocks left to JAX, as many as are estimated to fit, the most first:
    each more keeps more, by the trace too. Ends at one that does not recompute less than the best plan.
    """
    problem = predictions.problem
    limit = predictions.budget * problem.estimate(best.solution, by_hand=True) // best.compiled
    left = problem.model.with_last_blocks_left(best.solution)
    fitting = bisect.bisect_right(left, limit, key=functools.partial(problem.estimate, by_hand=True))
    dearest = best.effort - TINY * problem.plain.time.effort
    yield from itertools.takewhile(lambda each: problem.effort(each, by_hand=True) < dearest, reversed(left[:fitting]))


def leanest(problem: Measured, count: int) -> list[Solution]:
    """Returns the plans as people write them that need least by the model, so many of each cut."""
    chosen: dict[Solution, None] = {}
    cuts: collections.Counter[tuple[tuple[int, int], ...]] = collections.Counter()
    for solution in sorted(problem.by_hand, key=lambda solution: cost(problem.model.chain, solution).peak):
        cut = tuple((item.start, item.stop) for item in solution)
        if cuts[cut] < count:
            chosen[solution] = None
        cuts[cut] += 1
    return list(chosen)


def next_by_hand(predictions: Predictions, times: Mapping[Solution, float], best: Try) -> Solution | None:
    """Returns the solution, written by hand, to be compiled next; None where none is cheaper and likely to fit.

    Estimates may be above the compiled peak. The compiled plans say how many times, and the first solution is taken
    that fits if its estimate is too high by as much. If there is none, and the compiled plans do not say enough,
    the leanest one is taken, provided that it fits if its estimate is too high by as much as any on this platform, and
    by little more than those that were compiled, if these are several.

    Args:
      predictions: of the search.
      times: what solutions take by the chain.
      best: the best plan so far.
    """
    cheaper = _cheaper(predictions, times, best)
    chosen = next((solution for solution in cheaper if may_fit(predictions, solution)), None)
    if chosen is None and (predictions.overstated(by_hand=True) is None or predictions.quick):
        # What one is worth another may not be.
        estimate = functools.partial(predictions.problem.estimate, by_hand=True)
        near = [solution for solution in cheaper if estimate(solution) <= likely(predictions, solution)]
        chosen = min(near, key=estimate, default=None)
    return chosen


def is_worth_a_trace(predictions: Predictions, solution: Solution) -> bool:
    """Whether a solution, written by hand, may fit by the chain's bytes, or a trace takes no time."""
    if predictions.quick:
        return True
    limit = predictions.modelled_limit_by_hand(most_overstated(predictions.problem) * predictions.budget)
    return cost(predictions.chain, solution).peak <= limit


def may_fit(predictions: Predictions, solution: Solution) -> bool:
    """Whether a solution, written by hand, fits if its estimate is too high by as much as those of compiled plans."""
    known = predictions.overstated(by_hand=True) or predictions.overstated(by_hand=False) or 1.0
    slack = CLOSE if predictions.quick else TINY  # equal estimates may be 64 bytes apart
    return predictions.problem.estimate(solution, by_hand=True) <= (1 + slack) * max(known, 1.0) * predictions.budget


def _cheaper(predictions: Predictions, times: Mapping[Solution, float], best: Try) -> list[Solution]:
    """Returns the solutions that, written by hand, take less than the best plan and are not compiled yet, the
    cheapest first. Those that are far above it by the chain's `times`, or, of a large program, far above the budget by
    its bytes, are not traced.
    """
    problem, chain = predictions.problem, predictions.chain
    slowest = OVERTIMED * max(cost(chain, best.solution).time, best.effort)
    dearest = best.effort - (TINIEST if predictions.quick else TINY) * problem.plain.time.effort
    loops = problem.model.checkpoints_loops  # which may take less than what the chain compares with, the step as it is
    traced = lambda s: times[s] < slowest and is_worth_a_trace(predictions, s)
    near = [s for s in times if loops(s) or traced(s)]
    near = [s for s in near if not problem.is_compiled(s, by_hand=True)]
    efforts = {solution: problem.effort(solution, by_hand=True) for solution in near}
    return sorted((s for s in near if efforts[s] < dearest), key=lambda solution: efforts[solution])
