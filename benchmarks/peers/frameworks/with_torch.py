"""PyTorch: its checkpoints, selective contexts, and the memory budget of its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from benchmarks.peers import on_torch
from benchmarks.peers.measured import Measured
from benchmarks.peers.tasks import Shapes, Task, draw
from benchmarks.peers.torch_blocks import BLOCK, FIRST
from benchmarks.peers.variants import Variant

aten = torch.ops.aten
MATMULS = [aten.mm.default, aten.bmm.default, aten.convolution.default]


class Part(torch.nn.Module):
    """A part of a model, with its parameters."""

    def __init__(self, fun: Callable[..., Any], shapes: Shapes, weights: Any) -> None:
        super().__init__()
        self.fun = fun
        self.names = [name for name, _ in shapes]
        for name in self.names:
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(weights[name])))

    def forward(self, *inputs: Any) -> Any:
        """Returns what the function makes of the parameters and the inputs."""
        return self.fun({name: getattr(self, name) for name in self.names}, *inputs)


def stack(first: Any, blocks: Any) -> Callable[[Any], Any]:
    """Blocks one after the other."""

    def loss(x):
        x = first(x)
        for block in blocks:
            x = block(x)
        return x.square().mean()

    return loss


def checkpointed_stack(first: Any, blocks: Any) -> Callable[[Any], Any]:
    """`checkpoint` around each block."""

    def loss(x):
        x = first(x)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

    return loss


def sequential_stack(first: Any, blocks: Any) -> Callable[[Any], Any]:
    """`checkpoint_sequential` in about as many segments as each has blocks."""

    def loss(x):
        x = first(x)
        x = checkpoint_sequential(blocks, round(len(blocks) ** 0.5), x, use_reentrant=False)
        return x.square().mean()

    return loss


def selective_stack(first: Any, blocks: Any) -> Callable[[Any], Any]:
    """`checkpoint` around each block that saves what matmuls and convolutions return."""
    contexts = functools.partial(create_selective_checkpoint_contexts, MATMULS)

    def loss(x):
        x = first(x)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()

    return loss


def compiled_stack(first: Any, blocks: Any) -> Callable[[Any], Any]:
    """The compiled model."""

    def loss(x):
        x = first(x)
        for block in blocks:
            x = block(x)
        return x.square().mean()

    return torch.compile(loss)


def budget_stack(first: Any, blocks: Any, budget: float) -> Callable[[Any], Any]:
    """The compiled model, with a share of its activations."""
    torch._functorch.config.activation_memory_budget = budget

    def loss(x):
        x = first(x)
        for block in blocks:
            x = block(x)
        return x.square().mean()

    return torch.compile(loss)


def loop(first: Any, blocks: Any) -> Callable[[Any], Any]:
    """A loop over time."""

    def loss(xs):
        state = first(xs)
        for x in xs:
            state = blocks[0](state, x)
        return state[0].square().mean()

    return loss


def checkpointed_loop(first: Any, blocks: Any) -> Callable[[Any], Any]:
    """`checkpoint` around each iteration."""

    def loss(xs):
        state = first(xs)
        for x in xs:
            state = checkpoint(blocks[0], state, x, use_reentrant=False)
        return state[0].square().mean()

    return loss


def sequential_loop(first: Any, blocks: Any) -> Callable[[Any], Any]:
    """`checkpoint_sequential` in about as many segments as each has iterations."""

    def loss(xs):
        state = first(xs)
        steps = [functools.partial(lambda x, state: blocks[0](state, x), x) for x in xs]
        state = checkpoint_sequential(steps, round(len(steps) ** 0.5), state, use_reentrant=False)
        return state[0].square().mean()

    return loss


def selective_loop(first: Any, blocks: Any) -> Callable[[Any], Any]:
    """`checkpoint` around each iteration that saves what matmuls return."""
    contexts = functools.partial(create_selective_checkpoint_contexts, MATMULS)

    def loss(xs):
        state = first(xs)
        for x in xs:
            state = checkpoint(blocks[0], state, x, use_reentrant=False, context_fn=contexts)
        return state[0].square().mean()

    return loss


def compiled_loop(first: Any, blocks: Any) -> Callable[[Any], Any]:
    """The compiled loop."""

    def loss(xs):
        state = first(xs)
        for x in xs:
            state = blocks[0](state, x)
        return state[0].square().mean()

    return torch.compile(loss)


def budget_loop(first: Any, blocks: Any, budget: float) -> Callable[[Any], Any]:
    """The compiled loop, with a share of its activations."""
    torch._functorch.config.activation_memory_budget = budget

    def loss(xs):
        state = first(xs)
        for x in xs:
            state = blocks[0](state, x)
        return state[0].square().mean()

    return torch.compile(loss)


VARIANTS = {
    "plain": Variant(stack, loop),
    "checkpoint": Variant(checkpointed_stack, checkpointed_loop),
    "checkpoint_sequential, sqrt": Variant(sequential_stack, sequential_loop),
    "selective contexts: matmuls": Variant(selective_stack, selective_loop),
    "plain, torch.compile": Variant(compiled_stack, compiled_loop, against="plain, torch.compile"),
} | {
    f"activation_memory_budget, {budget}": Variant(
        functools.partial(budget_stack, budget=budget),
        functools.partial(budget_loop, budget=budget),
        against="plain, torch.compile",
    )
    for budget in (0.5, 0.2)
}


def build(task: Task, variant: Variant) -> Measured:
    """Returns the figures of a variant."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    params, x = draw(task)
    if task.name == "ResNet":
        params = {"first": _channels_first(params["first"]), "blocks": [_channels_first(w) for w in params["blocks"]]}
        x = x.transpose(0, 3, 1, 2).copy()
    first = Part(FIRST[task.name], task.first, params["first"])
    blocks = torch.nn.Sequential(
        *(Part(BLOCK[task.name], shapes, weights) for shapes, weights in zip(task.blocks, params["blocks"]))
    )
    loss = variant.maker(task.loop)(first, blocks)
    try:
        parameters = [*first.parameters(), *blocks.parameters()]
        return on_torch.measured(loss, parameters, torch.from_numpy(x), variant.against != "plain")
    finally:
        torch._functorch.config.activation_memory_budget = 1.0


def _channels_first(weights: Any) -> Any:
    """Kernels (height, width, in, out) become (out, in, height, width), and a shift per pixel (channels, ...)."""
    order = {4: (3, 2, 0, 1), 3: (2, 0, 1), 1: (0,)}
    return {name: value.transpose(order[value.ndim]).copy() for name, value in weights.items()}
