"""LSTM over 1,024 steps of text: a language model of bytes, one `lax.scan` over time.

    jaxckpt compare lstm --target cuda:h100

`checkpoint` goes around the scan body, or around segments of `segment_size` iterations, as a scan of scans. Embedding,
head and loss are in the scan body, so that everything that is kept is kept by an iteration.

Sources: S. Hochreiter and J. Schmidhuber, "Long Short-Term Memory", 1997; F. Gers et al., "Learning to Forget", 2000
(the forget gate; its bias starts at 1). Checkpoints over time: A. Gruslys et al., "Memory-Efficient Backpropagation
Through Time", 2016.

Tags within a block (a step): gates, logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxckpt.models import common, data

BYTES = 256


@dataclass(frozen=True)
class Size:
    """Sizes of an LSTM.

    Attributes:
      steps: bytes in a sequence.
      width: of cell and hidden state.
      batch: sequences in a batch.
    """

    steps: int = 1024
    width: int = 1024
    batch: int = 64


class Step(nn.Module):
    """One step in time: a byte in, the logits of the next one out."""

    width: int

    @nn.compact
    def __call__(self, state: tuple[jax.Array, jax.Array], token: jax.Array) -> tuple[tuple, jax.Array]:
        """Returns (state, logits (batch, 256)): state is (cell, hidden), both (batch, width); token is (batch,)."""
        cell, hidden = state
        # An embedding straight to the gates is the input's matrix product, taken by look-up.
        gates = nn.Embed(BYTES, 4 * self.width, name="input")(token) + nn.Dense(4 * self.width, name="hidden")(hidden)
        into, forget, out, new = jnp.split(checkpoint_name(gates, "gates"), 4, axis=-1)
        cell = nn.sigmoid(forget + 1.0) * cell + nn.sigmoid(into) * jnp.tanh(new)
        hidden = nn.sigmoid(out) * jnp.tanh(cell)
        return (cell, hidden), checkpoint_name(nn.Dense(BYTES, name="logits")(hidden), "logits")


def lstm(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """1,024 steps of width 1024, 64 sequences of bytes, float32: 5.5 M parameters (21 MiB).

    The state is 0.5 MiB a step; plain differentiation keeps a few MiB a step.
    """
    return _factory(replace(Size(), **sizes), checkpoint, segment_size, real)


def small(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """128 steps of width 64, 16 sequences: 99 K parameters (0.4 MiB). Runs on a CPU in a moment."""
    return _factory(replace(Size(steps=128, width=64, batch=16), **sizes), checkpoint, segment_size, real)


def _factory(size: Size, checkpoint: common.Transform | None, segment_size: int | str, real: bool) -> common.Model:
    """Returns (loss, args): `loss(params, inputs, targets)`, int32 (batch, steps); the loss is in nats a byte."""
    module = Step(size.width)

    def step(tokens, state, params):
        token, target = tokens
        state, logits = common.apply(module, params, state, token)
        return state, common.cross_entropy(logits, target)

    steps = common.scan(step, checkpoint, segment_size, size.steps)

    def loss(params, inputs, targets):
        zeros = jnp.zeros((inputs.shape[0], size.width))
        _, losses = steps((inputs.T, targets.T), (zeros, zeros), params)
        return jnp.mean(losses)

    zeros = jnp.zeros((1, size.width))
    token = jnp.zeros(1, jnp.int32)
    params = common.initialise(
        lambda key: module.init(key, (zeros, zeros), token)["params"], common.random_key(0), real=real
    )
    if real:
        return loss, (params, *map(jnp.asarray, data.text_batch(size.batch, size.steps, BYTES)))
    tokens = common.struct(size.batch, size.steps, dtype=jnp.int32)
    return loss, (params, tokens, tokens)
