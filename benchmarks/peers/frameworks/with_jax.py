"""JAX alone: `jax.checkpoint` with each of its policies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from benchmarks.peers import on_jax
from benchmarks.peers.blocks import Parts, loss_of, parts_of
from benchmarks.peers.measured import Measured
from benchmarks.peers.tasks import Task
from benchmarks.peers.variants import Variant

Loss = Callable[[Any, Any], Any]


def stack(parts: Parts) -> Loss:
    """Blocks one after the other."""
    block = parts.block

    def loss(params, x):
        x = parts.first(params["first"], x)
        for weights in params["blocks"]:
            x = block(weights, x)
        return loss_of(x)

    return loss


def checkpointed_stack(parts: Parts, policy: Any) -> Loss:
    """A checkpoint around each block."""
    block = jax.checkpoint(parts.block, policy=policy)

    def loss(params, x):
        x = parts.first(params["first"], x)
        for weights in params["blocks"]:
            x = block(weights, x)
        return loss_of(x)

    return loss


def loop(parts: Parts) -> Loss:
    """A loop over time."""

    def loss(params, xs):
        def step(state, x):
            return parts.block(params["blocks"][0], state, x), None

        state, _ = lax.scan(step, parts.first(params["first"], xs), xs)
        return loss_of(state[0])

    return loss


def checkpointed_loop(parts: Parts, policy: Any) -> Loss:
    """A checkpoint around each iteration."""

    def loss(params, xs):
        @functools.partial(jax.checkpoint, policy=policy)
        def step(state, x):
            return parts.block(params["blocks"][0], state, x), None

        state, _ = lax.scan(step, parts.first(params["first"], xs), xs)
        return loss_of(state[0])

    return loss


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}

VARIANTS = {"plain": Variant(stack, loop)} | {
    f"jax.checkpoint, {name}": Variant(
        functools.partial(checkpointed_stack, policy=policy), functools.partial(checkpointed_loop, policy=policy)
    )
    for name, policy in POLICIES.items()
}


def build(task: Task, variant: Variant) -> Measured:
    """Returns the figures of a variant."""
    parts = parts_of(task)
    return on_jax.measured(variant.maker(task.loop)(parts), parts.arguments())
