"""GPT: a causal transformer with layer norms before each half, GELU, learned positions; unrolled, or as one scan.

    jaxckpt compare gpt2 --target cuda:h100

Sources: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; A. Vaswani et al., "Attention
Is All You Need", 2017. Activations are bfloat16 and parameters float32; softmax and loss are taken in float32, as is
usual; attention materialises its scores, and the head is not tied to the embedding unless asked.

Activations of a block in bytes, with s tokens, batch b, width h, a heads, at 2 bytes an element: s b h (34 + 5 a s / h)
as counted by V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.

Tags within a block: qkv, attn_scores, attn_weights, attn_context, attn_out, mlp_up, mlp_out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxckpt.models import common, data


@dataclass(frozen=True)
class Size:
    """Sizes of a GPT.

    Attributes:
      layers: blocks, one after the other.
      width: of the residual stream; the MLP's inside is 4 times that.
      heads: of attention; divides `width`.
      batch: sequences in a batch.
      tokens: tokens in a sequence.
      vocabulary: distinct tokens, at least 256.
      dropout: rate after the embedding and at the end of each half of a block; 0 takes no random key.
      tied: whether the head's matrix is the embedding's.
      dtype: of activations.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    batch: int = 8
    tokens: int = 1024
    vocabulary: int = 32000
    dropout: float = 0.0
    tied: bool = False
    dtype: Any = jnp.bfloat16


kernel_init = nn.initializers.normal(0.02)


class Attention(nn.Module):
    """Causal self-attention of x (batch, tokens, width), scores materialised as (batch, heads, tokens, tokens)."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns (batch, tokens, width)."""
        batch, tokens, width = x.shape
        dense = partial(nn.Dense, dtype=self.dtype, kernel_init=kernel_init)
        qkv = checkpoint_name(dense(3 * width, name="qkv")(x), "qkv")
        query, key, value = jnp.split(qkv.reshape(batch, tokens, 3 * self.heads, width // self.heads), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // self.heads) ** -0.5
        scores = checkpoint_name(scores, "attn_scores").astype(jnp.float32)
        scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, jnp.finfo(jnp.float32).min)
        weights = checkpoint_name(jax.nn.softmax(scores).astype(self.dtype), "attn_weights")
        context = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, tokens, width)
        return checkpoint_name(dense(width, name="out")(checkpoint_name(context, "attn_context")), "attn_out")


class Mlp(nn.Module):
    """Two dense layers with GELU between them, 4 times as wide inside."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of x, (batch, tokens, width)."""
        dense = partial(nn.Dense, dtype=self.dtype, kernel_init=kernel_init)
        up = checkpoint_name(dense(4 * x.shape[-1], name="up")(x), "mlp_up")
        return checkpoint_name(dense(x.shape[-1], name="out")(nn.gelu(up)), "mlp_out")


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and added to the residual stream."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of x, (batch, tokens, width)."""
        size = self.size
        norm = partial(nn.LayerNorm, dtype=size.dtype)
        drop = partial(nn.Dropout, size.dropout, deterministic=not size.dropout)
        x = x + drop()(Attention(size.heads, size.dtype, name="attention")(norm(name="norm_attention")(x)))
        return x + drop()(Mlp(size.dtype, name="mlp")(norm(name="norm_mlp")(x)))


class Embedding(nn.Module):
    """Tokens (batch, tokens) to the residual stream: an embedding plus a learned position."""

    size: Size

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns (batch, tokens, width)."""
        size = self.size
        x = nn.Embed(size.vocabulary, size.width, dtype=size.dtype, embedding_init=kernel_init, name="tokens")(tokens)
        x = x + self.param("positions", kernel_init, (size.tokens, size.width)).astype(size.dtype)
        return nn.Dropout(size.dropout, deterministic=not size.dropout)(x)


class Head(nn.Module):
    """The last layer norm and the logits; a tied head has no matrix of its own."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        """Returns (batch, tokens, vocabulary), in the dtype of activations; embedding is (vocabulary, width)."""
        size = self.size
        x = nn.LayerNorm(dtype=size.dtype, name="norm")(x)
        if size.tied:
            return x @ embedding.astype(size.dtype).T
        return nn.Dense(size.vocabulary, use_bias=False, dtype=size.dtype, kernel_init=kernel_init, name="logits")(x)


def small(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """6 blocks of 128, float32, for a CPU: 1.3 M parameters (5.1 MiB), some 13 MiB of activations a block."""
    size = Size(layers=6, width=128, heads=4, batch=8, tokens=128, vocabulary=512, dtype=jnp.float32)
    return _factory(replace(size, **sizes), checkpoint, segment_size, real, scan=False)


def gpt2(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """12 blocks of 768, as GPT-2's smallest, with 32,000 tokens: 135 M parameters (515 MiB).

    8 sequences of 1,024 tokens: 684 MiB of activations a block by Korthikanti's count, which has dropout's
    masks; some 600 MiB as XLA fuses them.
    """
    return _factory(replace(Size(), **sizes), checkpoint, segment_size, real, scan=False)


def gpt2_scan(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """The same as `gpt2`, as one scan over stacked parameters: nothing is fused across the loop."""
    return _factory(replace(Size(), **sizes), checkpoint, segment_size, real, scan=True)


def deep(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """48 blocks of 768, unrolled: 390 M parameters (1.5 GiB); 8 sequences of 1,024 tokens."""
    return _factory(replace(Size(layers=48), **sizes), checkpoint, segment_size, real, scan=False)


def deep_scan(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """The same as `deep`, as one scan over stacked parameters."""
    return _factory(replace(Size(layers=48), **sizes), checkpoint, segment_size, real, scan=True)


def _factory(
    size: Size, checkpoint: common.Transform | None, segment_size: int | str, real: bool, *, scan: bool
) -> common.Model:
    """Returns (loss, args): `loss(params, inputs, targets)`, and `loss(params, inputs, targets, key)` with dropout.

    `params` is {"embedding", "blocks", "head"}; blocks are a list, or for a scan one tree with a leading axis of
    `layers`. Inputs and targets are int32 (batch, tokens). The loss is the mean cross-entropy in nats.
    """
    if size.width % size.heads:
        raise ValueError(f"heads must divide width, {size.width}; got {size.heads!r}.")
    block = Block(size)

    def step(state, x):
        params, key = state
        return common.apply(block, params, x, key=key), None

    if scan:
        blocks = common.scan(step, checkpoint, segment_size, size.layers)
    else:
        blocks = common.sequence([step] * size.layers, checkpoint, segment_size)

    def loss(params, inputs, targets, key=None):
        keys = None if key is None else jax.random.split(key, size.layers + 1)
        x = embed(size, params, inputs, None if keys is None else keys[-1])
        if scan:
            x, _ = blocks((params["blocks"], None if keys is None else keys[:-1]), x)
        else:
            x, _ = blocks([(each, None if keys is None else keys[i]) for i, each in enumerate(params["blocks"])], x)
        return common.cross_entropy(logits(size, params, x), targets)

    return loss, (parameters(size, block, real=real, scan=scan), *batch(size, real=real))


def embed(size: Size, params: dict, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Returns the first block's input, (batch, tokens, width)."""
    return common.apply(Embedding(size), params["embedding"], inputs, key=key)


def logits(size: Size, params: dict, x: jax.Array) -> jax.Array:
    """Returns the logits (batch, tokens, vocabulary) of the last block's output, (batch, tokens, width)."""
    return common.apply(Head(size), params["head"], x, params["embedding"]["tokens"]["embedding"])


def parameters(size: Size, block: nn.Module, *, real: bool, scan: bool = False) -> dict:
    """Returns {"embedding", "blocks", "head"}; blocks are a list, or for a scan one tree of stacked leaves."""
    keys = jax.random.split(common.random_key(0), 3)
    tokens = jnp.zeros((1, size.tokens), jnp.int32)

    x = jnp.zeros((1, size.tokens, size.width), size.dtype)
    matrix = jnp.zeros((size.vocabulary, size.width))
    blocks = common.initialise_equal(lambda key: block.init(key, x)["params"], keys[1], size.layers, real=real)
    if scan:
        blocks = common.initialise(partial(jax.tree.map, lambda *leaves: jnp.stack(leaves)), *blocks, real=real)
    return {
        "embedding": common.initialise(lambda key: Embedding(size).init(key, tokens)["params"], keys[0], real=real),
        "blocks": blocks,
        "head": common.initialise(lambda key: Head(size).init(key, x, matrix)["params"], keys[2], real=real),
    }


def batch(size: Size, *, real: bool) -> tuple:
    """Returns (inputs, targets), int32 (batch, tokens), and with dropout a random key after them."""
    key = (jax.random.key(1),) if size.dropout else ()
    if real:
        return (*map(jnp.asarray, data.text_batch(size.batch, size.tokens, size.vocabulary)), *key)
    tokens = common.struct(size.batch, size.tokens, dtype=jnp.int32)
    return (tokens, tokens, *jax.eval_shape(lambda: key))
