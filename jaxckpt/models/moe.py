"""Mixture of experts: a transformer whose MLPs are each 8 experts, of which every token visits two.

    jaxckpt compare moe --target cuda:h100

Sources: D. Lepikhin et al., "GShard", 2020: top-2 gates, a capacity per expert, dispatch and combination as dense
einsums, each sequence a group of its own; W. Fedus et al., "Switch Transformers", 2021: the auxiliary loss that
balances the experts. Attention and embedding are the GPT's.

Tags within a block: qkv, attn_scores, attn_weights, attn_context, attn_out, router_probs, moe_dispatch, moe_combine,
expert_in, expert_up, expert_out, moe_out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxckpt.models import common, gpt


@dataclass(frozen=True)
class Size(gpt.Size):
    """Sizes of a mixture-of-experts transformer, beside those of a GPT.

    Attributes:
      experts: MLPs in each block.
      capacity: room for tokens in an expert, as a multiple of what an even spread gives it; what overflows goes by the
        residual alone.
      balance: weight of the auxiliary loss.
    """

    layers: int = 8
    experts: int = 8
    capacity: float = 1.25
    balance: float = 0.01


def route(probs: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Returns (dispatch, combine), each (groups, tokens, experts, room): where tokens go, and the weights to return.

    Each token goes to its two likeliest experts. First choices take their places before second ones, earlier tokens
    before later ones; a token that finds no place is dropped there. The two gates sum to 1, as if neither were dropped.

    Args:
      probs: (groups, tokens, experts), the router's.
      room: places in an expert, a group.
    """
    gates, chosen = jax.lax.top_k(probs, 2)
    gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    combine = jnp.zeros((*probs.shape, room), probs.dtype)
    taken = jnp.zeros((probs.shape[0], 1, probs.shape[-1]), jnp.int32)
    for choice in range(2):
        mask = jax.nn.one_hot(chosen[..., choice], probs.shape[-1], dtype=jnp.int32)
        place = jnp.cumsum(mask, axis=1) - 1 + taken
        taken = taken + jnp.sum(mask, axis=1, keepdims=True)
        # one_hot gives zeros for a place beyond the room, and for the experts not chosen.
        place = jax.nn.one_hot(jnp.where(mask == 1, place, -1), room, dtype=probs.dtype)
        combine = combine + gates[..., choice, None, None] * place
    return (combine > 0).astype(probs.dtype), combine


class Experts(nn.Module):
    """Top-2 routing to MLPs, 4 times as wide inside; returns the auxiliary loss beside its output."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (y, balance): y of the shape of x, (batch, tokens, width), and a scalar, 1 at an even load."""
        size, (_, tokens, width) = self.size, x.shape
        room = max(1, math.ceil(2 * size.capacity * tokens / size.experts))
        logits = nn.Dense(size.experts, use_bias=False, kernel_init=gpt.kernel_init, name="router")(
            x.astype(jnp.float32)
        )
        probs = checkpoint_name(jax.nn.softmax(logits), "router_probs")
        dispatch, combine = route(probs, room)
        dispatch = checkpoint_name(dispatch.astype(size.dtype), "moe_dispatch")
        combine = checkpoint_name(combine.astype(size.dtype), "moe_combine")

        def weight(name: str, *shape: int) -> jax.Array:
            return self.param(name, gpt.kernel_init, (size.experts, *shape)).astype(size.dtype)

        inside = checkpoint_name(jnp.einsum("gtec,gth->egch", dispatch, x), "expert_in")
        up = checkpoint_name(jnp.einsum("egch,ehf->egcf", inside, weight("up", width, 4 * width)), "expert_up")
        out = jnp.einsum("egcf,efh->egch", nn.gelu(up), weight("out", 4 * width, width))
        y = jnp.einsum("gtec,egch->gth", combine, checkpoint_name(out, "expert_out"))
        first = jax.nn.one_hot(jnp.argmax(probs, axis=-1), size.experts)
        balance = size.experts * jnp.sum(jnp.mean(first, axis=(0, 1)) * jnp.mean(probs, axis=(0, 1)))
        return checkpoint_name(y, "moe_out"), balance


class Block(nn.Module):
    """Attention and experts, each behind a layer norm and added to the residual stream."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (y, balance): y of the shape of x, (batch, tokens, width), and the auxiliary loss."""
        size = self.size
        norm = partial(nn.LayerNorm, dtype=size.dtype)
        x = x + gpt.Attention(size.heads, size.dtype, name="attention")(norm(name="norm_attention")(x))
        y, balance = Experts(size, name="experts")(norm(name="norm_experts")(x))
        return x + y, balance


def moe(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """8 blocks of 768 with 8 experts each and 32,000 tokens: 371 M parameters (1.4 GiB), bfloat16 activations.

    8 sequences of 1,024 tokens. The experts' inside is 2.5 times a plain MLP's (two experts, capacity 1.25); dispatch
    and combination are 40 MiB each a block.
    """
    return _factory(replace(Size(), **sizes), checkpoint, segment_size, real)


def small(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """4 blocks of 64 with 4 experts each, float32, for a CPU: 0.7 M parameters (2.6 MiB)."""
    size = Size(layers=4, width=64, heads=2, batch=4, tokens=64, vocabulary=512, experts=4, dtype=jnp.float32)
    return _factory(replace(size, **sizes), checkpoint, segment_size, real)


def _factory(size: Size, checkpoint: common.Transform | None, segment_size: int | str, real: bool) -> common.Model:
    """Returns (loss, args): `loss(params, inputs, targets)`, cross-entropy in nats plus the weighted auxiliary loss.

    Inputs and targets are int32 (batch, tokens); `params` is as a GPT's.
    """
    if size.dropout:
        raise ValueError(f"dropout must be 0 here, where routing is what regularises; got {size.dropout!r}.")
    block = Block(size)

    def step(params, x):
        return common.apply(block, params, x)

    blocks = common.sequence([step] * size.layers, checkpoint, segment_size)

    def loss(params, inputs, targets):
        x = gpt.embed(size, params, inputs)
        x, balances = blocks(params["blocks"], x)
        return common.cross_entropy(gpt.logits(size, params, x), targets) + size.balance * sum(balances) / size.layers

    return loss, (gpt.parameters(size, block, real=real), *gpt.batch(size, real=real))
