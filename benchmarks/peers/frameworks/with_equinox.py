"""Equinox: `eqx.filter_checkpoint`, and its checkpointed scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
from jax import lax

from benchmarks.peers import on_jax
from benchmarks.peers.blocks import loss_of, parts_of
from benchmarks.peers.measured import Measured
from benchmarks.peers.tasks import Task
from benchmarks.peers.variants import Variant


class Part(eqx.Module):
    """A part of a model, with its parameters."""

    weights: Any
    fun: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, *inputs: Any) -> Any:
        """Returns what the function makes of the parameters and the inputs."""
        return self.fun(self.weights, *inputs)


class Model(eqx.Module):
    """A model as it is stored: its parts."""

    first: Part
    blocks: list[Part]


def stack() -> Callable[[Model, Any], Any]:
    """Blocks one after the other."""

    def apply(model, x):
        x = model.first(x)
        for block in model.blocks:
            x = block(x)
        return x

    return apply


def checkpointed_stack() -> Callable[[Model, Any], Any]:
    """`eqx.filter_checkpoint` around each block."""

    def apply(model, x):
        x = model.first(x)
        for block in model.blocks:
            x = eqx.filter_checkpoint(block)(x)
        return x

    return apply


def loop() -> Callable[[Model, Any], Any]:
    """A loop over time."""

    def apply(model, xs):
        def step(state, x):
            return model.blocks[0](state, x), None

        state, _ = lax.scan(step, model.first(xs), xs)
        return state[0]

    return apply


def checkpointed_loop() -> Callable[[Model, Any], Any]:
    """`eqx.filter_checkpoint` around each iteration."""

    def apply(model, xs):
        def step(state, x):
            return eqx.filter_checkpoint(model.blocks[0])(state, x), None

        state, _ = lax.scan(step, model.first(xs), xs)
        return state[0]

    return apply


def scanned_loop() -> Callable[[Model, Any], Any]:
    """Equinox's checkpointed scan, with 6 checkpoints."""

    def apply(model, xs):
        def step(state, x):
            return model.blocks[0](state, x), None

        state, _ = eqxi.scan(step, model.first(xs), xs, kind="checkpointed", checkpoints=6)
        return state[0]

    return apply


VARIANTS = {
    "plain": Variant(stack, loop),
    "eqx.filter_checkpoint": Variant(checkpointed_stack, checkpointed_loop),
    "equinox's checkpointed scan, 6": Variant(loop=scanned_loop),
}


def build(task: Task, variant: Variant) -> Measured:
    """Returns the figures of a variant."""
    parts = parts_of(task)
    params, x = parts.arguments()
    model = Model(Part(params["first"], parts.first), [Part(weights, parts.block) for weights in params["blocks"]])
    apply = variant.maker(task.loop)()
    return on_jax.measured(lambda model, x: loss_of(apply(model, x)), (model, x))
