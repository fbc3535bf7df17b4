"""jaxckpt, on the same plain functions as JAX alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

import jaxckpt
from benchmarks.peers.blocks import Parts, loss_of
from benchmarks.peers.frameworks import with_jax
from benchmarks.peers.frameworks.with_jax import Loss
from benchmarks.peers.variants import Variant
from jaxckpt import Policy, Slots, compress, op

Budget = Callable[[Parts], int | str]
"""Makes the budget of a plan."""


def checkpointed_stack(parts: Parts, policy: Any) -> Loss:
    """A checkpoint around each block."""
    block = jaxckpt.checkpoint(parts.block, policy=policy)

    def loss(params, x):
        x = parts.first(params["first"], x)
        for weights in params["blocks"]:
            x = block(weights, x)
        return loss_of(x)

    return loss


def sequential_stack(parts: Parts) -> Loss:
    """A checkpoint around each segment."""
    block = parts.block

    def loss(params, x):
        x = parts.first(params["first"], x)
        layers = [functools.partial(block, weights) for weights in params["blocks"]]
        x = jaxckpt.checkpoint_sequential(layers, segment_size="sqrt")(x)
        return loss_of(x)

    return loss


def planned_stack(parts: Parts, budget: Budget) -> Loss:
    """A plan for a budget."""
    block = parts.block

    def loss(params, x):
        x = parts.first(params["first"], x)
        for weights in params["blocks"]:
            x = block(weights, x)
        return loss_of(x)

    return jaxckpt.plan(loss, *parts.arguments(), budget=budget(parts)).apply(loss)


def checkpointed_loop(parts: Parts, policy: Any) -> Loss:
    """A checkpoint around each iteration."""

    def loss(params, xs):
        @jaxckpt.checkpoint(policy=policy)
        def step(state, x):
            return parts.block(params["blocks"][0], state, x), None

        state, _ = lax.scan(step, parts.first(params["first"], xs), xs)
        return loss_of(state[0])

    return loss


def scheduled_loop(parts: Parts, schedule: Any) -> Loss:
    """A schedule in place of `lax.scan`."""

    def loss(params, xs):
        def step(state, x):
            return parts.block(params["blocks"][0], state, x), None

        state, _ = jaxckpt.scan(step, parts.first(params["first"], xs), xs, schedule=schedule)
        return loss_of(state[0])

    return loss


def planned_loop(parts: Parts, budget: Budget) -> Loss:
    """A plan for a budget."""

    def loss(params, xs):
        def step(state, x):
            return parts.block(params["blocks"][0], state, x), None

        state, _ = lax.scan(step, parts.first(params["first"], xs), xs)
        return loss_of(state[0])

    return jaxckpt.plan(loss, *parts.arguments(), budget=budget(parts)).apply(loss)


def _checkpointed(policy: Any) -> Variant:
    return Variant(
        functools.partial(checkpointed_stack, policy=policy), functools.partial(checkpointed_loop, policy=policy)
    )


def _planned(budget: Budget) -> Variant:
    return Variant(functools.partial(planned_stack, budget=budget), functools.partial(planned_loop, budget=budget))


def peak_of_checkpoint(parts: Parts) -> int:
    """Returns the peak in bytes with `jax.checkpoint` around each block or iteration, parameters and input counted."""
    made = with_jax.checkpointed_loop if parts.task.loop else with_jax.checkpointed_stack
    step = jax.value_and_grad(made(parts, None))
    return jaxckpt.measure(step, *parts.arguments(), target="cpu").peak_bytes


BFLOAT16 = Policy({op("dot_general"): compress("bfloat16"), op("conv_general_dilated"): compress("bfloat16")})

VARIANTS = {
    "plain": with_jax.VARIANTS["plain"],
    "jaxckpt.checkpoint": _checkpointed(None),
    "jaxckpt.checkpoint, hybrid": _checkpointed("hybrid"),
    "jaxckpt.checkpoint, Policy: matmuls in bfloat16": _checkpointed(BFLOAT16),
    "jaxckpt.checkpoint_sequential, sqrt": Variant(sequential_stack),
    "jaxckpt.scan, sqrt": Variant(loop=functools.partial(scheduled_loop, schedule="sqrt")),
    "jaxckpt.scan, Slots(6)": Variant(loop=functools.partial(scheduled_loop, schedule=Slots(6))),
    "jaxckpt.plan, 60%": _planned(lambda parts: "60%"),
    "jaxckpt.plan, peak of jax.checkpoint": _planned(peak_of_checkpoint),
}

build = with_jax.build
