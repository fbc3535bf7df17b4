"""A transformer whose attention is a custom rule that keeps (q, k, v, out, logsumexp), as flash attentions are.

    jaxckpt plan benchmarks/models/flash.py:short --budget 60% --target cuda:h100

Source of the rule: T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022:
the forward pass keeps the logarithm of each row's sum of exponentials, the backward pass makes the weights anew. Here
attention is not causal, activations are bfloat16, there are no norms and no vocabulary: all that counts is the rule.

Ways, each with the same values:

- "whole": all scores at once.
- "blocks": a loop over blocks of queries, in both passes.
- "pallas": a Pallas kernel for the forward pass, one program for each sequence, head and block of queries; the backward
  pass is that of "blocks".
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxckpt.models import common

Array = jax.Array
BLOCK = 256
"""Queries in a block."""
ROWS = 128
"""Queries in a block of the Pallas kernel, whose scores and keys a TPU holds in 16 MiB."""
KERNEL = "flash_forward"
"""The Pallas kernel's name."""


def _rows(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Returns (out, logsumexp) of queries (batch, queries, heads, size) over all keys."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    total = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(scores - total[..., None]).astype(q.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v), total


def _rows_back(k: Array, v: Array, rows: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """Returns cotangents of (q, k, v) by the rows (q, out, logsumexp, cotangent of out)."""
    q, out, total, d = rows
    scale = q.shape[-1] ** -0.5
    p = jnp.exp(jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * scale - total[..., None])
    dp = jnp.einsum("bthd,bshd->bhts", d, v).astype(jnp.float32)
    inner = jnp.sum((d * out).astype(jnp.float32), -1).transpose(0, 2, 1)
    ds, p = (p * (dp - inner[..., None]) * scale).astype(q.dtype), p.astype(q.dtype)
    return (
        jnp.einsum("bhts,bshd->bthd", ds, k),
        jnp.einsum("bhts,bthd->bshd", ds, q),
        jnp.einsum("bhts,bthd->bshd", p, d),
    )


def _blocks(x: Array, axis: int) -> Array:
    """Returns the array with a leading axis of blocks of an axis."""
    shape = (*x.shape[:axis], x.shape[axis] // BLOCK, BLOCK, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _joined(x: Array, axis: int) -> Array:
    """Returns the array whose blocks these are."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _in_blocks(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    out, total = lax.map(lambda rows: _rows(rows, k, v), _blocks(q, 1))
    return _joined(out, 1), _joined(total, 2)


def _in_blocks_back(q: Array, k: Array, v: Array, out: Array, total: Array, d: Array) -> tuple[Array, Array, Array]:
    def one(sums: tuple[Array, Array], rows: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        dq, *more = _rows_back(k, v, rows)
        return (sums[0] + more[0], sums[1] + more[1]), dq

    zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    (dk, dv), dq = lax.scan(one, zeros, (_blocks(q, 1), _blocks(out, 1), _blocks(total, 2), _blocks(d, 1)))
    return _joined(dq, 1), dk.astype(k.dtype), dv.astype(v.dtype)


def _kernel(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, total_ref: Any) -> None:
    q, k, v = q_ref[0, 0], k_ref[0, 0], v_ref[0, 0]
    scores = lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    most = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    product = jnp.dot((weights / total).astype(v.dtype), v, preferred_element_type=jnp.float32)
    out_ref[0, 0] = product.astype(out_ref.dtype)
    total_ref[0, 0] = most + jnp.log(total)


def _by_kernel(q: Array, k: Array, v: Array, interpret: bool) -> tuple[Array, Array]:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    batch, heads, tokens, size = q.shape
    rows = pl.BlockSpec((1, 1, ROWS, size), lambda b, h, i: (b, h, i, 0))
    every = pl.BlockSpec((1, 1, tokens, size), lambda b, h, i: (b, h, 0, 0))
    out, total = pl.pallas_call(
        _kernel,
        grid=(batch, heads, tokens // ROWS),
        in_specs=[rows, every, every],
        out_specs=[rows, pl.BlockSpec((1, 1, ROWS, 1), lambda b, h, i: (b, h, i, 0))],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((*q.shape[:3], 1), jnp.float32)],
        interpret=interpret,
        name=KERNEL,
    )(q, k, v)
    return out.transpose(0, 2, 1, 3), total[..., 0]


@functools.cache
def attention(way: str, interpret: bool = False) -> Any:
    """Returns the function of (q, k, v), each (batch, tokens, heads, size), with its custom rule.

    Args:
      way: "whole", "blocks" or "pallas".
      interpret: run Pallas kernels as ordinary operations, as a CPU must.
    """
    forward = {"whole": _rows, "blocks": _in_blocks, "pallas": functools.partial(_by_kernel, interpret=interpret)}[way]

    @jax.custom_vjp
    def flash(q: Array, k: Array, v: Array) -> Array:
        return forward(q, k, v)[0]

    def kept(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
        out, total = forward(q, k, v)
        return out, (q, k, v, out, total)

    def backward(residuals: tuple[Array, ...], d: Array) -> tuple[Array, Array, Array]:
        if way == "whole":
            q, k, v, out, total = residuals
            return _rows_back(k, v, (q, out, total, d))
        return _in_blocks_back(*residuals, d)

    flash.defvjp(kept, backward)
    return flash


def transformer(
    checkpoint: common.Transform | None = None,
    *,
    way: str = "blocks",
    batch: int = 8,
    tokens: int = 1024,
    layers: int = 6,
    width: int = 768,
    heads: int = 12,
    interpret: bool = False,
) -> common.Model:
    """Returns (loss, args): blocks of attention and an MLP of four times the width; the loss is the mean square.

    Args:
      checkpoint: put around each block.
      way: of the attention: see the head of this file.
      interpret: run Pallas kernels as ordinary operations.
    """
    attend = attention(way, interpret)

    def block(w: Any, x: Array) -> Array:
        q, k, v = ((x @ w[name]).reshape(batch, tokens, heads, -1) for name in "qkv")
        x = x + attend(q, k, v).reshape(batch, tokens, width) @ w["o"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    if checkpoint is not None:
        block = checkpoint(block)

    def loss(parameters: Any, x: Array) -> Array:
        for w in parameters:
            x = block(w, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    one = {
        **{name: shape(width, width) for name in "qkvo"},
        "up": shape(width, 4 * width),
        "down": shape(4 * width, width),
    }
    return loss, ([one] * layers, shape(batch, tokens, width))


short = functools.partial(transformer, batch=8, tokens=1024)
long = functools.partial(transformer, batch=2, tokens=8192)
