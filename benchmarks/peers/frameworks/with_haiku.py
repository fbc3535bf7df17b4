"""Haiku: `hk.remat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk

from benchmarks.peers import on_jax
from benchmarks.peers.blocks import Parts, loss_of, parts_of
from benchmarks.peers.measured import Measured
from benchmarks.peers.tasks import Shapes, Task
from benchmarks.peers.variants import Variant


class Part(hk.Module):
    """A part of a model, with its parameters."""

    def __init__(self, fun: Callable[..., Any], shapes: Shapes, name: str) -> None:
        super().__init__(name=name)
        self.fun, self.shapes = fun, shapes

    def __call__(self, *inputs: Any) -> Any:
        """Returns what the function makes of the parameters and the inputs."""
        weights = {
            name: hk.get_parameter(name, shape, init=hk.initializers.Constant(0.0)) for name, shape in self.shapes
        }
        return self.fun(weights, *inputs)


def stack(parts: Parts) -> Callable[[Any], Any]:
    """Blocks one after the other."""

    def model(x):
        x = Part(parts.first, parts.task.first, name="first")(x)
        for i, shapes in enumerate(parts.task.blocks):
            block = Part(parts.block, shapes, name=f"block{i}")
            x = block(x)
        return x

    return model


def remat_stack(parts: Parts) -> Callable[[Any], Any]:
    """`hk.remat` of each block."""

    def model(x):
        x = Part(parts.first, parts.task.first, name="first")(x)
        for i, shapes in enumerate(parts.task.blocks):
            block = Part(parts.block, shapes, name=f"block{i}")
            x = hk.remat(block)(x)
        return x

    return model


def loop(parts: Parts) -> Callable[[Any], Any]:
    """A loop over time."""

    def model(xs):
        state = Part(parts.first, parts.task.first, name="first")(xs)
        cell = Part(parts.block, parts.task.blocks[0], name="block0")
        state, _ = hk.scan(lambda state, x: (cell(state, x), None), state, xs)
        return state[0]

    return model


def remat_loop(parts: Parts) -> Callable[[Any], Any]:
    """`hk.remat` of each iteration."""

    def model(xs):
        state = Part(parts.first, parts.task.first, name="first")(xs)
        cell = Part(parts.block, parts.task.blocks[0], name="block0")
        state, _ = hk.scan(lambda state, x: (hk.remat(cell)(state, x), None), state, xs)
        return state[0]

    return model


VARIANTS = {"plain": Variant(stack, loop), "hk.remat": Variant(remat_stack, remat_loop)}


def build(task: Task, variant: Variant) -> Measured:
    """Returns the figures of a variant."""
    parts = parts_of(task)
    params, x = parts.arguments()
    model = hk.without_apply_rng(hk.transform(variant.maker(task.loop)(parts)))
    named = {"first": params["first"]} | {f"block{i}": weights for i, weights in enumerate(params["blocks"])}
    return on_jax.measured(lambda params, x: loss_of(model.apply(params, x)), (named, x))
