"""The chain of tanh layers that the tests of this folder compile: uniform, and small enough to compile in a second or
two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt.memory.report import MemoryReport, measure
from tests.helpers import chain_in_segments

LAYERS, BATCH, WIDTH = 32, 512, 256
ACTIVATION = BATCH * WIDTH * 4  # 0.5 MiB
WEIGHTS = LAYERS * WIDTH * WIDTH * 4  # 8 MiB


def plain(fun: Callable) -> Callable:
    return fun


def step(segment: int = 1, wrap: Callable = plain) -> Callable:
    """Value and gradient of the chain with `wrap` around each `segment` layers."""

    return jax.value_and_grad(chain_in_segments(wrap, segment))


def arguments() -> tuple[Any, Any]:
    """Weights and input, as shapes."""
    return [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS, jax.ShapeDtypeStruct(
        (BATCH, WIDTH), jnp.float32
    )


@functools.cache
def report(target: str, segment: int = 0, bare: bool = False) -> MemoryReport:
    """What the step needs, plain (segment 0) or with jax.checkpoint around segments; compiled once for all tests."""
    fun = step(segment, jax.checkpoint) if segment else step()
    return measure(fun, *arguments(), target=target, compiler_options={} if bare else None)
