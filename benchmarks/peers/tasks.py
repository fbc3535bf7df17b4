"""The four models as data: shapes, parameters and input, the same for every framework.

A model is a `first` part, then blocks. The loss is the mean of squares of what comes out. Each framework runs the same
functions on the same arrays: `blocks` has them in JAX, `torch_blocks` in PyTorch.

The first part adds a parameter to the input. So every matmul of a block has gradients in both of its operands, in an
unrolled model and in a loop alike, and the counts of frameworks can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Task:
    """One model.

    Attributes:
      name: of the model; it names the functions in `blocks` and `torch_blocks`.
      x: shape of the input.
      first: parameters of the first part, by name.
      blocks: parameters of each block. A loop has one block, which it runs for each row of the input.
      loop: whether the model is a loop over time.
      segment: blocks in a segment, about the square root of their number.
    """

    name: str
    x: tuple[int, ...]
    first: Shapes
    blocks: tuple[Shapes, ...]
    loop: bool = False
    segment: int = 2

    @property
    def steps(self) -> int:
        """How many blocks run, one after the other."""
        return self.x[0] if self.loop else len(self.blocks)


def chain(layers: int = 9, rows: int = 1024, width: int = 128) -> Task:
    """An MLP with residual layers x + tanh(x U) D, 4 times as wide inside."""
    block = (("up", (width, 4 * width)), ("down", (4 * width, width)))
    return Task("chain", (rows, width), (("shift", (width,)),), (block,) * layers, segment=3)


def gpt(layers: int = 4, batch: int = 4, tokens: int = 128, width: int = 128) -> Task:
    """Transformer blocks with four heads; the scores of the attention are materialised."""
    norms = tuple((name, (width,)) for name in ("scale_1", "shift_1", "scale_2", "shift_2"))
    matrices = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    return Task(
        "GPT", (batch, tokens, width), (("positions", (tokens, width)),), ((*norms, *matrices.items()),) * layers
    )


def resnet(batch: int = 32, pixels: int = 32, width: int = 16, stages: tuple[int, ...] = (2, 2)) -> Task:
    """Residual blocks of two convolutions with batch normalisation; each stage but the first halves the image."""
    blocks, channels = [], width
    for stage, count in enumerate(stages):
        for i in range(count):
            new = width * 2**stage
            block = [("conv_1", (3, 3, channels, new)), ("scale_1", (new,)), ("shift_1", (new,))]
            block += [("conv_2", (3, 3, new, new)), ("scale_2", (new,)), ("shift_2", (new,))]
            if stage and i == 0:
                block.append(("shortcut", (1, 1, channels, new)))
            blocks.append(tuple(block))
            channels = new
    first = (("shift", (pixels, pixels, 3)), ("stem", (3, 3, 3, width)))
    return Task("ResNet", (batch, pixels, pixels, 3), first, tuple(blocks))


def lstm(steps: int = 36, batch: int = 64, width: int = 128) -> Task:
    """An LSTM over time. Its first state is learned."""
    first = (("hidden", (width,)), ("cell", (width,)))
    return Task("LSTM", (steps, batch, width), first, ((("gates", (2 * width, 4 * width)),),), loop=True, segment=6)


TASKS: Mapping[str, Callable[[], Task]] = {"chain": chain, "GPT": gpt, "ResNet": resnet, "LSTM": lstm}


def draw(task: Task) -> tuple[dict[str, Any], np.ndarray]:
    """Returns (parameters, x), float32, the same in every process.

    Parameters are {"first": {name: array}, "blocks": [{name: array}, ...]}.
    """
    random = np.random.default_rng(0)

    def part(shapes: Shapes) -> dict[str, np.ndarray]:
        return {name: _parameter(random, name, shape) for name, shape in shapes}

    params = {"first": part(task.first), "blocks": [part(shapes) for shapes in task.blocks]}
    return params, random.standard_normal(task.x, np.float32)


def _parameter(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.startswith("scale"):
        return np.ones(shape, np.float32)
    inputs = np.prod(shape[:-1]) if len(shape) in (2, 4) else 100
    return random.standard_normal(shape, np.float32) * np.float32(inputs**-0.5)
