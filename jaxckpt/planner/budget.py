"""Converts budgets to bytes: "4GiB", "60%" of the peak without a plan, "device"."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, InfeasibleBudgetError
from jaxckpt.core.units import format_bytes, parse_bytes
from jaxckpt.memory.targets import Target, target_of

DEVICE = "device"
RULE = (
    "a number of bytes above 0, a size such as '12GiB', a share of the peak without a plan such as '60%', or 'device'"
)
_SHARE = re.compile(r"\s*(-?\d+(?:\.\d*)?|-?\.\d+)\s*%\s*")
_SHORT = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([kmgt])i?\s*", re.IGNORECASE)
_FRACTION = re.compile(r"\s*(0?\.\d+|1\.0*)\s*")


def budget_bytes(
    budget: Any,
    *,
    unplanned: Callable[[], int],
    target: Target | str | None = None,
    resident: int = 0,
) -> int:
    """Returns a budget in bytes.

    Args:
      budget: bytes (an int); a size, "12GiB"; a share of the peak without a plan, "60%"; or "device": what is free
        on the local device now, or all of the memory of one that is not here.
      unplanned: returns the peak without a plan in bytes; called only for a share, since it takes a compile.
      target: what the budget is for: see `jaxckpt.Target`.
      resident: bytes of the step's arguments that are on the device already. They count in the peak that the budget
        bounds, so they are added to what is free: see `resident_bytes`.

    Raises:
      ArgumentError: it is none of these, is not above 0, is over 100%, or is "device" on a target without memory
        figures (the CPU: its memory is shared with everything else on the machine).
      InfeasibleBudgetError: nothing is free on the device.

    >>> [budget_bytes(budget, unplanned=lambda: 1000, target="cpu") for budget in ("60%", "1.5KiB")]
    [600, 1536]
    """
    check_budget(budget)
    if not isinstance(budget, str):
        return operator.index(budget)
    if budget.strip().lower() == DEVICE:
        return _device_bytes(target_of(target), resident)
    if found := _SHARE.fullmatch(budget):
        return int(float(found[1]) * unplanned() / 100)
    return parse_bytes(budget)


def check_budget(budget: Any, argument: str = "budget") -> None:
    """Raises `ArgumentError` for a budget that is invalid for every program, without compiling anything.

    Args:
      budget: bytes or a text.
      argument: the name that an error gives to it.
    """
    if isinstance(budget, str):
        _check_text(budget, argument)
        return
    if isinstance(budget, float):
        hint = f"A share is text: '{budget:.0%}'." if 0 < budget <= 1 else "Bytes are whole: make it an int."
        raise ArgumentError(argument, RULE, budget, hint)
    try:
        count = None if isinstance(budget, bool) else operator.index(budget)
    except TypeError:
        count = None
    if count is None:
        raise ArgumentError(argument, RULE, budget)
    if count <= 0:
        raise ArgumentError(argument, RULE, budget, "Not even the arguments fit that.")


def _check_text(budget: str, argument: str) -> None:
    if budget.strip().lower() == DEVICE:
        return
    if found := _SHARE.fullmatch(budget):
        share = float(found[1])
        if not 0 < share <= 100:
            hint = "Without a plan it is 100%." if share > 100 else ""
            raise ArgumentError(argument, "a share above 0% and of at most 100%", budget, hint)
        return
    try:
        count = parse_bytes(budget)
    except ArgumentError:
        count, found = 0, _SHORT.fullmatch(budget)
        hint = f"Did you mean '{found[1]}{found[2].upper()}iB'?" if found else ""
        if not _FRACTION.fullmatch(budget):
            raise ArgumentError(argument, RULE, budget, hint) from None
    if _FRACTION.fullmatch(budget):  # bytes are whole, and nobody means one byte
        raise ArgumentError(argument, RULE, budget, f"A share is written with %: '{float(budget):.0%}'.")
    if not count:
        raise ArgumentError(argument, RULE, budget, "Not even the arguments fit that.")


def check_device(budget: Any, target: Target | str | None) -> None:
    """Raises ArgumentError for "device" on a target without memory figures, before any work is done."""
    if isinstance(budget, str) and budget.strip().lower() == DEVICE:
        with contextlib.suppress(InfeasibleBudgetError):  # what is free is asked when it is needed
            _device_bytes(target_of(target), 0)


def normal(budget: Any) -> str:
    """Returns a text that is the same for equal budgets: bytes as digits, a share as "60%", or "device".

    >>> normal("1 KiB"), normal(1024), normal(" 60.0 %"), normal("Device")
    ('1024', '1024', '60%', 'device')
    """
    check_budget(budget)
    if not isinstance(budget, str):
        return str(operator.index(budget))
    if found := _SHARE.fullmatch(budget):
        return f"{float(found[1]):g}%"
    return DEVICE if budget.strip().lower() == DEVICE else str(parse_bytes(budget))


def resident_bytes(args: Any, target: Target | str | None = None) -> int:
    """Returns the bytes of the arrays in `args` that are on the target's first device already; 0 for a target that is
    not here.

    Args:
      args: a pytree of arrays, shapes, whatever a step takes.
      target: see `jaxckpt.Target`.
    """
    resolved = target_of(target)
    if not resolved.local:
        return 0
    device = resolved.devices[0]
    arrays = {
        id(leaf): leaf
        for leaf in jax.tree.leaves(args)
        if isinstance(leaf, jax.Array) and not _compat.is_tracer(leaf) and not leaf.is_deleted()
    }
    return sum(
        shard.data.nbytes
        for array in arrays.values()
        if not jax.numpy.issubdtype(array.dtype, jax.dtypes.extended)
        for shard in array.addressable_shards
        if shard.device == device
    )


def _device_bytes(target: Target, resident: int) -> int:
    if not target.local:
        return target.memory_bytes
    stats = [device.memory_stats() or {} for device in target.devices]
    if not all("bytes_limit" in each for each in stats):
        raise ArgumentError(
            "budget",
            f"bytes or a share on {target.name}, which does not say how much memory is free",
            DEVICE,
            "Give a size such as '8GiB', or a share such as '60%'.",
        )
    # The least of them: a program on several devices needs as much on each.
    free = min(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)
    if free + resident <= 0:
        limit, used = stats[0]["bytes_limit"], stats[0].get("bytes_in_use", 0)
        raise InfeasibleBudgetError(
            f"Nothing is free on {target.name}: {format_bytes(used)} of {format_bytes(limit)} are in use.",
            budget_bytes=0,
        )
    return int(free) + resident
