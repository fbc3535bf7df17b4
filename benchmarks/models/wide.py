"""Networks drawn at random whose values skip many stages: for such, a chain of stages is a poor model.

    jaxckpt plan benchmarks/models/wide.py:wide --set seed=2 --target cuda:h100 --budget 60%

A seed draws one of four builds and its widths:

- "towers": two stacks side by side that read each other now and then, and meet at the end;
- "levels": an encoder and a decoder; every block of the decoder reads every level of the encoder (UNet 3+, Huang et al.
  2020, arXiv:2004.08790);
- "dense": each block reads all blocks before it in its group (DenseNet, Huang et al. 2017, arXiv:1608.06993);
- "drawn": each block reads a few blocks before it, drawn at random (Xie et al. 2019, arXiv:1904.01569).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxckpt.models import common

Array = jax.Array
Reads = list[list[int]]
"""For each node the nodes that it reads, all earlier; a node that reads none reads the input."""


def towers(draw: random.Random, nodes: int) -> Reads:
    """Two stacks, even and odd nodes; every third block or so reads the other stack too."""
    reads = [[node - 2] if node > 1 else [] for node in range(nodes - 1)]
    for node in range(3, nodes - 1):
        if draw.random() < 0.3:
            reads[node].append(node - 3 if node % 2 else node - 1)
    return [*reads, [nodes - 3, nodes - 2]]


def levels(draw: random.Random, nodes: int) -> Reads:
    """An encoder, and a decoder that reads all of its levels."""
    half = nodes // 2
    encoder = [[node - 1] if node else [] for node in range(half)]
    return [*encoder, *([*range(half), node - 1] if node > half else [*range(half)] for node in range(half, nodes))]


def dense(draw: random.Random, nodes: int) -> Reads:
    """Groups of four to six nodes, each of which reads all before it in the group, and the end of the last group."""
    reads: Reads = []
    while len(reads) < nodes:
        first = len(reads)
        for node in range(first, min(first + draw.randint(4, 6), nodes)):
            reads.append([*range(max(first - 1, 0), node)])
    return reads


def drawn(draw: random.Random, nodes: int) -> Reads:
    """Each node reads the one before it, and up to three others."""
    return [
        sorted({node - 1, *draw.sample(range(node), min(node, draw.randint(0, 3)))} - {-1}) for node in range(nodes)
    ]


BUILDS: Mapping[str, Callable[[random.Random, int], Reads]] = {
    "towers": towers,
    "levels": levels,
    "dense": dense,
    "drawn": drawn,
}


def wide(checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, seed: int = 0) -> common.Model:
    """A network of blocks that read several earlier ones; `checkpoint` is put around each block.

    Args:
      checkpoint: what to put around a block.
      segment_size: only 1: other runs of blocks have no boundary.
      seed: what is drawn.

    Returns:
      (loss, args), on shapes.
    """
    draw = random.Random(seed)
    reads = list(BUILDS.values())[seed % len(BUILDS)](draw, draw.randint(12, 18))
    widths = [draw.choice((128, 256, 384, 512)) for _ in reads]
    rows, entry = draw.choice((8_192, 16_384)), 256
    wrap = checkpoint or (lambda fun: fun)

    def block(weights: Mapping[str, Array], inputs: Sequence[Array]) -> Array:
        x = jnp.concatenate(inputs, axis=-1) @ weights["mix"]
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        return jax.nn.gelu(x @ weights["up"]) @ weights["down"]

    def loss(parameters: Sequence[Mapping[str, Array]], x: Array) -> Array:
        values: list[Array] = []
        for weights, read in zip(parameters, reads):
            values.append(wrap(block)(weights, [values[node] for node in read] or [x]))
        return jnp.square(values[-1]).mean()

    def weights(node: int) -> dict[str, jax.ShapeDtypeStruct]:
        inputs, width = sum(widths[each] for each in reads[node]) or entry, widths[node]
        shapes = {"mix": (inputs, width), "up": (width, 3 * width), "down": (3 * width, width)}
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    return loss, ([weights(node) for node in range(len(reads))], jax.ShapeDtypeStruct((rows, entry), jnp.float32))
