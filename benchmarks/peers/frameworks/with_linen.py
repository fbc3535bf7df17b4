"""Flax linen: `nn.remat` and `nn.remat_scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.peers import on_jax
from benchmarks.peers.blocks import Parts, loss_of, parts_of
from benchmarks.peers.measured import Measured
from benchmarks.peers.tasks import Shapes, Task
from benchmarks.peers.variants import Variant


class Part(nn.Module):
    """A part of a model, with its parameters."""

    fun: Callable[..., Any]
    shapes: Shapes

    @nn.compact
    def __call__(self, *inputs: Any) -> Any:
        """Returns what the function makes of the parameters and the inputs."""
        weights = {name: self.param(name, nn.initializers.zeros_init(), shape) for name, shape in self.shapes}
        return self.fun(weights, *inputs)


def stack(parts: Parts) -> nn.Module:
    """Blocks one after the other."""
    Block = Part

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Part(parts.first, parts.task.first, name="first")(x)
            for i, shapes in enumerate(parts.task.blocks):
                x = Block(parts.block, shapes, name=f"block{i}")(x)
            return x

    return Model()


def remat_stack(parts: Parts) -> nn.Module:
    """`nn.remat` of each block."""
    Block = nn.remat(Part)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Part(parts.first, parts.task.first, name="first")(x)
            for i, shapes in enumerate(parts.task.blocks):
                x = Block(parts.block, shapes, name=f"block{i}")(x)
            return x

    return Model()


def remat_scan_stack(parts: Parts) -> nn.Module:
    """`nn.remat_scan` of all blocks."""
    Block = nn.remat_scan(Part, lengths=(len(parts.task.blocks) // parts.task.segment, parts.task.segment))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Part(parts.first, parts.task.first, name="first")(x)
            return Block(parts.block, parts.task.blocks[0], name="blocks")(x)

    return Model()


def loop(parts: Parts) -> nn.Module:
    """A loop over time."""
    Cell = Part

    class Model(nn.Module):
        @nn.compact
        def __call__(self, xs):
            state = Part(parts.first, parts.task.first, name="first")(xs)
            cell = Cell(parts.block, parts.task.blocks[0], name="block0")
            step = lambda cell, state, x: (cell(state, x), None)
            state, _ = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})(cell, state, xs)
            return state[0]

    return Model()


def remat_loop(parts: Parts) -> nn.Module:
    """`nn.remat` of each iteration."""
    Cell = nn.remat(Part)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, xs):
            state = Part(parts.first, parts.task.first, name="first")(xs)
            cell = Cell(parts.block, parts.task.blocks[0], name="block0")
            step = lambda cell, state, x: (cell(state, x), None)
            state, _ = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})(cell, state, xs)
            return state[0]

    return Model()


VARIANTS = {
    "plain": Variant(stack, loop),
    "nn.remat": Variant(remat_stack, remat_loop),
    "nn.remat_scan": Variant(remat_scan_stack, skips={"ResNet": "it needs equal blocks"}),
}


def variables(model: nn.Module, params: Any, x: Any) -> Any:
    """Returns the model's variables: those of the task, stacked where the model has stacked ones."""
    blocks = {f"block{i}": weights for i, weights in enumerate(params["blocks"])}
    wanted = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    if "blocks" in wanted:
        leaves = {name: jnp.stack([weights[name] for weights in params["blocks"]]) for name in params["blocks"][0]}
        blocks = {"blocks": jax.tree.map_with_path(lambda at, w: leaves[at[-1].key].reshape(w.shape), wanted["blocks"])}
    return {"params": {"first": params["first"], **blocks}}


def build(task: Task, variant: Variant) -> Measured:
    """Returns the figures of a variant."""
    parts = parts_of(task)
    model, (params, x) = variant.maker(task.loop)(parts), parts.arguments()
    loss = lambda variables, x: loss_of(model.apply(variables, x))
    return on_jax.measured(loss, (variables(model, params, x), x))
