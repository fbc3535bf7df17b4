"""Measures a model in a framework on JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxckpt
from benchmarks.peers import count
from benchmarks.peers.measured import Measured


def measured(loss: Callable[..., Any], args: tuple[Any, ...]) -> Measured:
    """Compiles value and gradient of a loss, with the options that checkpointing needs on the CPU, and runs it once."""
    step = jax.value_and_grad(loss)
    program = jax.jit(step).lower(*args).compile(compiler_options=jaxckpt.compiler_options("cpu"))
    memory = program.memory_analysis()
    run = lambda: jax.block_until_ready(program(*args))
    value, gradient = run()
    return Measured(
        memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes,
        count.executed(step, *args),
        count.compiled(program.as_text()),
        float(value),
        float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))),
        run,
    )
