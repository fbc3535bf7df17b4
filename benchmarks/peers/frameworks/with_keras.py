"""Keras on its JAX backend: `keras.RematScope`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax.numpy as jnp
import keras

from benchmarks.peers import on_jax
from benchmarks.peers.blocks import Parts, loss_of, parts_of
from benchmarks.peers.measured import Measured
from benchmarks.peers.tasks import Shapes, Task
from benchmarks.peers.variants import Variant


class Part(keras.layers.Layer):
    """A part of a model, with its parameters."""

    def __init__(self, fun: Callable[..., Any], shapes: Shapes) -> None:
        super().__init__()
        self.fun = fun
        self.own = {name: self.add_weight(name=name, shape=shape) for name, shape in shapes}
        self.built = True

    def call(self, x: Any) -> Any:
        """Returns what the function makes of the parameters and the input."""
        return self.fun({name: weight.value for name, weight in self.own.items()}, x)


class Cell(Part):
    """A step of a loop, in the form that `keras.layers.RNN` takes; `state_size` is its width, twice."""

    def __init__(self, fun: Callable[..., Any], shapes: Shapes) -> None:
        super().__init__(fun, shapes)
        width = shapes[0][1][0] // 2
        self.state_size, self.output_size = [width, width], width

    def call(self, x: Any, states: Any) -> Any:
        """Returns (output, states)."""
        states = self.fun({name: weight.value for name, weight in self.own.items()}, states, x)
        return states[0], list(states)


class Stack(keras.Model):
    """Layers one after the other."""

    def __init__(self, first: Any, blocks: Any) -> None:
        super().__init__()
        self.first, self.blocks, self.built = first, blocks, True

    def call(self, x: Any) -> Any:
        """Returns what the last block makes."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Loop(keras.Model):
    """A cell over time."""

    def __init__(self, first: Any, rnn: Any) -> None:
        super().__init__()
        self.first, self.rnn, self.built = first, rnn, True

    def call(self, xs: Any) -> Any:
        """Returns the last output; xs is (steps, batch, width)."""
        return self.rnn(jnp.swapaxes(xs, 0, 1), initial_state=list(self.first(xs)))


def stack(parts: Parts) -> keras.Model:
    """Blocks one after the other."""
    first = Part(parts.first, parts.task.first)
    blocks = [Part(parts.block, shapes) for shapes in parts.task.blocks]
    return Stack(first, blocks)


def remat_stack(parts: Parts) -> keras.Model:
    """The blocks in a `RematScope`."""
    first = Part(parts.first, parts.task.first)
    with keras.RematScope(mode="full"):
        blocks = [Part(parts.block, shapes) for shapes in parts.task.blocks]
    return Stack(first, blocks)


def loop(parts: Parts) -> keras.Model:
    """A loop over time."""
    first = Part(parts.first, parts.task.first)
    cell = Cell(parts.block, parts.task.blocks[0])
    return Loop(first, keras.layers.RNN(cell))


def remat_loop(parts: Parts) -> keras.Model:
    """The cell in a `RematScope`."""
    first = Part(parts.first, parts.task.first)
    with keras.RematScope(mode="full"):
        cell = Cell(parts.block, parts.task.blocks[0])
    return Loop(first, keras.layers.RNN(cell))


VARIANTS = {"plain": Variant(stack, loop), "keras.RematScope, full": Variant(remat_stack, remat_loop)}


def build(task: Task, variant: Variant) -> Measured:
    """Returns the figures of a variant."""
    parts = parts_of(task)
    params, x = parts.arguments()
    model = variant.maker(task.loop)(parts)
    shapes, weights = (parts.task.first, *parts.task.blocks), (params["first"], *params["blocks"])
    values = [each[name] for names, each in zip(shapes, weights, strict=True) for name, _ in names]
    for variable, value in zip(model.trainable_variables, values, strict=True):
        variable.assign(value)

    def loss(weights: list[Any], x: Any) -> Any:
        return loss_of(model.stateless_call(weights, [], x)[0])

    return on_jax.measured(loss, ([variable.value for variable in model.trainable_variables], x))
