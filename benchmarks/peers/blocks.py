"""The parts of the models in JAX: every framework on JAX runs these functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers.tasks import Task, draw

HEADS = 4

Weights = Mapping[str, jax.Array]


def add_shift(weights: Weights, x: jax.Array) -> jax.Array:
    """Returns x plus the first part's only parameter, broadcast over the batch."""
    (shift,) = weights.values()
    return x + shift


def mlp(weights: Weights, x: jax.Array) -> jax.Array:
    """A layer of the chain; x is (rows, width)."""
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def transformer(weights: Weights, x: jax.Array) -> jax.Array:
    """A block of the GPT; x is (batch, tokens, width)."""
    batch, tokens, width = x.shape
    qkv = layer_norm(x, weights["scale_1"], weights["shift_1"]) @ weights["qkv"]
    query, key, value = jnp.split(qkv.reshape(batch, tokens, 3 * HEADS, width // HEADS), 3, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, jnp.finfo(x.dtype).min)
    context = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value).reshape(x.shape)
    x = x + context @ weights["out"]
    up = layer_norm(x, weights["scale_2"], weights["shift_2"]) @ weights["up"]
    return x + jax.nn.gelu(up) @ weights["down"]


def layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Normalises the last axis."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale + shift


def stem(weights: Weights, x: jax.Array) -> jax.Array:
    """The first part of the ResNet; x is (batch, height, width, 3)."""
    return convolve(x + weights["shift"], weights["stem"])


def residual(weights: Weights, x: jax.Array) -> jax.Array:
    """A block of the ResNet; x is (batch, height, width, channels). With a shortcut it halves the image."""
    stride = 2 if "shortcut" in weights else 1
    y = batch_norm(convolve(x, weights["conv_1"], stride), weights["scale_1"], weights["shift_1"])
    y = batch_norm(convolve(jax.nn.relu(y), weights["conv_2"]), weights["scale_2"], weights["shift_2"])
    if stride == 2:
        x = convolve(x, weights["shortcut"], stride)
    return jax.nn.relu(x + y)


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolves with a margin of zeros, of the same width on each side."""
    margin = kernel.shape[0] // 2
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), [(margin, margin)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Normalises each channel over batch and image."""
    axes = tuple(range(x.ndim - 1))
    return (x - x.mean(axes)) * jax.lax.rsqrt(x.var(axes) + 1e-5) * scale + shift


def start(weights: Weights, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first state of the LSTM, (hidden, cell), both (batch, width); xs is (steps, batch, width)."""
    hidden, cell = (jnp.broadcast_to(weights[name], xs.shape[1:]) for name in ("hidden", "cell"))
    return hidden, cell


def lstm_cell(weights: Weights, state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step of the LSTM; returns the next (hidden, cell)."""
    hidden, cell = state
    into, forget, out, new = jnp.split(jnp.concatenate([x, hidden], -1) @ weights["gates"], 4, axis=-1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


def loss_of(x: jax.Array) -> jax.Array:
    """The loss: the mean of squares."""
    return jnp.mean(x**2)


FIRST: Mapping[str, Callable[..., Any]] = {"chain": add_shift, "GPT": add_shift, "ResNet": stem, "LSTM": start}
BLOCK: Mapping[str, Callable[..., Any]] = {
    "chain": mlp,
    "GPT": transformer,
    "ResNet": residual,
    "LSTM": lstm_cell,
}


@dataclass(frozen=True)
class Parts:
    """What a framework on JAX makes a model of.

    Attributes:
      task: shapes.
      first: the first part, (weights, x) -> x; for a loop, (weights, xs) -> state.
      block: a block, (weights, x) -> x; for a loop, (weights, state, x) -> state.
    """

    task: Task
    first: Callable[..., Any]
    block: Callable[..., Any]

    def arguments(self) -> tuple[Any, jax.Array]:
        """Returns (parameters, x); parameters are {"first": {...}, "blocks": [{...}, ...]}."""
        return jax.tree.map(jnp.asarray, draw(self.task))


def parts_of(task: Task) -> Parts:
    """Returns the parts of a model."""
    return Parts(task, FIRST[task.name], BLOCK[task.name])
