"""What the tests ask of a function: what its differentiation keeps, how often an operation runs, whether two results
agree.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt.core.graph import trace
from jaxckpt.memory.residuals import residuals


def kept_shapes(fun: Callable, *args: Any) -> Counter:
    """Shapes of what differentiation keeps besides arguments."""
    return Counter(r.shape for r in residuals(fun, *args).residuals if not r.argument)


def kept_bytes(fun: Callable, *args: Any) -> int:
    """Bytes of what differentiation keeps besides arguments."""
    return residuals(fun, *args).kept_bytes


def executions(fun: Callable, *args: Any) -> Counter:
    """How often each primitive runs in `fun(*args)`, loops multiplied out."""
    count: Counter = Counter()
    for op in trace(fun, *args).walk():
        count[op.primitive] += op.repeats
    return count


def gradient_executions(fun: Callable, *args: Any) -> Counter:
    """How often each primitive runs in the value and gradient of `fun`, in its first argument."""
    return executions(jax.value_and_grad(fun), *args)


def assert_trees_close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Both trees have one structure, and their leaves agree."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


def chain_in_segments(wrap: Callable, segment: int = 1) -> Callable:
    """A loss (matrices, x) -> mean of squares of a chain of matmuls and tanh, `wrap` around each `segment` of them."""

    @wrap
    def block(x: Any, ws: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    def loss(ws: Any, x: Any) -> Any:
        for i in range(0, len(ws), segment):
            x = block(x, ws[i : i + segment])
        return jnp.mean(x**2)

    return loss


def mib(shape: tuple[int, ...], itemsize: int = 4) -> float:
    """MiB of an array."""
    return math.prod(shape) * itemsize / 2**20


def time_ratio(first: Callable[[], object], second: Callable[[], object], turns: int) -> tuple[float, list[float]]:
    """Seconds of `first` by seconds of `second`: the median over `turns` pairs, and the pairs' ratios for a message.

    Seconds are this process's own work. The two calls of a pair follow one another, so that both find the machine as
    busy; each function runs once before, for what is made once in a process. What another process does to one or two
    calls moves the least of several turns, and not the median of the pairs. Garbage is not collected meanwhile: late in
    a suite one collection walks more objects than a short call takes time for, and it falls on one of the pair.
    """

    def seconds(call: Callable[[], object]) -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    seconds(first), seconds(second)
    gc.collect()
    gc.disable()
    try:
        ratios = sorted(seconds(first) / seconds(second) for _ in range(turns))
    finally:
        gc.enable()
    return statistics.median(ratios), ratios
