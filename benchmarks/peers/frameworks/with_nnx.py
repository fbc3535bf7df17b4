"""Flax nnx: `nnx.remat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from benchmarks.peers import on_jax
from benchmarks.peers.blocks import Parts, loss_of, parts_of
from benchmarks.peers.measured import Measured
from benchmarks.peers.tasks import Task
from benchmarks.peers.variants import Variant


class Part(nnx.Module):
    """A part of a model, with its parameters."""

    def __init__(self, fun: Callable[..., Any], weights: Any) -> None:
        self.fun = fun
        self.names = tuple(weights)
        for name, value in weights.items():
            setattr(self, name, nnx.Param(value))

    def __call__(self, *inputs: Any) -> Any:
        """Returns what the function makes of the parameters and the inputs."""
        return self.fun({name: getattr(self, name)[...] for name in self.names}, *inputs)


def stack(parts: Parts, params: Any) -> nnx.Module:
    """Blocks one after the other."""
    call = Part.__call__

    class Model(nnx.Module):
        def __init__(self):
            self.first = Part(parts.first, params["first"])
            self.blocks = nnx.List([Part(parts.block, weights) for weights in params["blocks"]])

        def __call__(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = call(block, x)
            return x

    return Model()


def remat_stack(parts: Parts, params: Any) -> nnx.Module:
    """`nnx.remat` of each block."""
    call = nnx.remat(Part.__call__)

    class Model(nnx.Module):
        def __init__(self):
            self.first = Part(parts.first, params["first"])
            self.blocks = nnx.List([Part(parts.block, weights) for weights in params["blocks"]])

        def __call__(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = call(block, x)
            return x

    return Model()


def loop(parts: Parts, params: Any) -> nnx.Module:
    """A loop over time."""
    call = Part.__call__

    class Model(nnx.Module):
        def __init__(self):
            self.first = Part(parts.first, params["first"])
            self.cell = Part(parts.block, params["blocks"][0])

        def __call__(self, xs):
            scan = nnx.scan(call, in_axes=(None, nnx.Carry, 0), out_axes=nnx.Carry)
            return scan(self.cell, self.first(xs), xs)[0]

    return Model()


def remat_loop(parts: Parts, params: Any) -> nnx.Module:
    """`nnx.remat` of each iteration."""
    call = nnx.remat(Part.__call__)

    class Model(nnx.Module):
        def __init__(self):
            self.first = Part(parts.first, params["first"])
            self.cell = Part(parts.block, params["blocks"][0])

        def __call__(self, xs):
            scan = nnx.scan(call, in_axes=(None, nnx.Carry, 0), out_axes=nnx.Carry)
            return scan(self.cell, self.first(xs), xs)[0]

    return Model()


VARIANTS = {"plain": Variant(stack, loop), "nnx.remat": Variant(remat_stack, remat_loop)}


def build(task: Task, variant: Variant) -> Measured:
    """Returns the figures of a variant."""
    parts = parts_of(task)
    params, x = parts.arguments()
    graph, state = nnx.split(variant.maker(task.loop)(parts, params))
    return on_jax.measured(lambda state, x: loss_of(nnx.merge(graph, state)(x)), (state, x))
