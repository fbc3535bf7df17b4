"""What this process takes: processor time of a step, resident memory of a step."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Step = Callable[[], Any]
"""Runs a step to its end, and returns what it made."""

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
"""Parameters of glibc's `mallopt`."""
KEEP = {MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1}
"""Freed memory stays with the process, so that no step pays for new pages."""
RETURN = {MMAP_MAX: 2**16, MMAP_THRESHOLD: 2**14, TRIM_THRESHOLD: 2**17}
"""Freed memory goes back to the system, so that resident memory is memory in use."""


def settle(memory: Mapping[int, int]) -> None:
    """Keeps this process on one core, so that its processor time is its work, and says what becomes of freed memory.

    Args:
      memory: KEEP to measure time, RETURN to measure resident memory.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for parameter, value in memory.items():
        if mallopt is not None:
            mallopt(parameter, value)


def time_ratio(step: Step, plain: Step, pairs: int) -> float:
    """Returns the processor time of a step divided by that of the plain one: the median over pairs of runs.

    The two runs of a pair follow each other, in turns one and the other first.
    """
    ratios = []
    for i in range(pairs):
        first, second = (step, plain) if i % 2 else (plain, step)
        one, other = _seconds(first), _seconds(second)
        ratios.append(one / other if i % 2 else other / one)
    return statistics.median(ratios)


def resident_bytes(step: Step) -> int | None:
    """Returns how far the resident memory of this process rises in a step; None where the system does not tell.

    The process has settled with RETURN. What the step returns is counted.
    """
    status, reset = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")
    if not status.is_file() or not reset.is_file():
        return None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _field(status, "VmRSS")
    reset.write_text("5")
    made = step()
    peak = _field(status, "VmHWM")
    del made
    return peak - before


def _seconds(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def _field(status: pathlib.Path, name: str) -> int:
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
