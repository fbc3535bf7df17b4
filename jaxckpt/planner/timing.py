"""Seconds of a stretch as it runs here, to put a roofline right: `costs="measured"`."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt.memory.targets import compiler_options
from jaxckpt.memory.verify import fill

ROUNDS = 5
LEAST = 0.02
"""Seconds that a round takes at least: short stretches run several times in it."""


def run_seconds(jaxpr: Any) -> float:
    """Returns the seconds of one run of a jaxpr on the local device: the median of some rounds, on seeded data.

    Args:
      jaxpr: open, without constants.
    """
    arguments = jax.device_put(fill([jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in jaxpr.invars]))
    options = compiler_options() or None
    compiled = (
        jax.jit(lambda *xs: _compat.eval_jaxpr(jaxpr, [], *xs), compiler_options=options).lower(*arguments).compile()
    )

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            out = compiled(*arguments)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    run(1)
    times = max(1, int(LEAST / max(run(1), 1e-9)))
    return statistics.median(run(times) / times for _ in range(ROUNDS))
