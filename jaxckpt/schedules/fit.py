"""The fastest schedule of a scan that takes at most so many bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxckpt._errors import InfeasibleBudgetError
from jaxckpt.core.graph import aval_bytes
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.scans import ScanBody
from jaxckpt.core.schedule import LoopSchedule
from jaxckpt.core.units import format_bytes
from jaxckpt.schedules.budget import SlotBudget, everything, residual_bytes, stacked_bytes, working_bytes
from jaxckpt.schedules.pullback import backward
from jaxckpt.schedules.segments import nearest_divisors, plain, segmented
from jaxckpt.schedules.slots import SlotsWithin


@dataclass(frozen=True)
class Priced:
    """A schedule, the runs of the body that it takes, and the bytes that it takes at most.

    Attributes:
      reverse_only: whether what it runs can be differentiated in reverse mode alone, and once.
    """

    schedule: LoopSchedule
    body_runs: int
    bytes: int
    reverse_only: bool = False


def fit(body: ScanBody, limit: int, *, policy: bool = False) -> Priced:
    """Returns the schedule with the fewest runs of the body that takes at most `limit` bytes, if all that can be is
    differentiated.

    Args:
      body: of the scan.
      limit: bytes.
      policy: whether something is kept of iterations that are checkpointed.

    Of equals, the one that JAX can differentiate in every way comes first, and then the one that takes less.

    Raises:
      InfeasibleBudgetError: no schedule fits; it names the bytes of the one that takes least.
    """
    choices = list(_choices(body, limit, policy))
    fitting = [choice for choice in choices if choice.bytes <= limit]
    if not fitting:
        least = min(choice.bytes for choice in choices)
        raise InfeasibleBudgetError(
            f"budget must be at least {format_bytes(least)} ({least} bytes), the need of the schedule that keeps "
            "least: one carry, and the working memory of an iteration and its backward pass; got "
            f"{format_bytes(limit)} ({limit} bytes). Raise the budget, or make the scan body smaller.",
            least_bytes=least,
            budget_bytes=limit,
        )
    return min(fitting, key=lambda choice: (choice.body_runs, choice.reverse_only, choice.bytes))


def _choices(body: ScanBody, limit: int, policy: bool) -> Iterator[Priced]:
    length, one, residuals = body.length, sum(map(stacked_bytes, body.carry_avals)), residual_bytes(body)
    wanted = everything(body)
    at_once = backward(body, wanted, None, defer=False)
    working = working_bytes(body, at_once)
    yield Priced(plain(length), length, length * residuals + working)
    yield Priced(plain(length, remat=True), 2 * length, length * (one + policy * residuals) + working)
    xs = sum(stacked_bytes(var.aval) for var in body.jaxpr.invars[body.consts + body.carries :])
    ys = sum(map(stacked_bytes, body.y_avals))
    sums = sum(aval_bytes(var.aval) for var in body.jaxpr.invars[: body.consts] if is_inexact(var.aval))
    # Every row of a segment: residuals, and as blocks the rows of xs, of the ys' cotangents, and of cotangents of xs.
    row = residuals + 2 * xs + 2 * ys
    best = math.isqrt(length * one // max(row, 1))
    for size in {min(max(size, 1), length) for size in (best, best + 1, *nearest_divisors(length, best))}:
        nest = segmented(length, size)
        if nest.inner is not None:
            copies = 2 * length * (xs + ys) if nest.rest else 0
            yield Priced(nest, nest.body_runs, nest.count * one + nest.residuals * row + copies + sums + working)
    if one:
        runs = SlotBudget(body, limit)
        mixed = runs.choose(wanted)
        yield Priced(SlotsWithin(limit), mixed.body_runs, runs.bytes(wanted, mixed), reverse_only=True)
