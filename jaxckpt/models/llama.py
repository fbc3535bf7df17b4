"""Llama: a causal transformer with RMS norms, rotary positions, grouped-query attention and a gated feed-forward, as
one scan; sharded.

    jaxckpt plan llama70b --budget 24GiB --target tpu:v5p:4x4x4

Source: A. Dubey et al., "The Llama 3 Herd of Models", 2024 (arXiv:2407.21783), table 3. Parameters and activations are
bfloat16; softmax, norms and loss are taken in float32; attention materialises its scores. Parameters are sharded over
both axes of a mesh (data, model), a batch's sequences over data, heads and the feed-forward's inside over model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.models import common

THETA = 500_000.0
ACROSS, BACK = ("data", "model"), ("model", "data")


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama, and the mesh that it is sharded over.

    Attributes:
      layers, width, heads, vocabulary, batch, tokens: as of `jaxckpt.models.gpt.Size`.
      key_heads: of keys and values; each serves heads / key_heads queries.
      inner: of the feed-forward.
      data, model: sizes of the mesh's axes; 1 and 1 for no sharding.
      dtype: of parameters and activations.
    """

    layers: int = 80
    width: int = 8192
    heads: int = 64
    key_heads: int = 8
    inner: int = 28672
    vocabulary: int = 128256
    batch: int = 64
    tokens: int = 4096
    data: int = 16
    model: int = 4
    dtype: Any = jnp.bfloat16

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads


def llama70b(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """70 billion parameters (131 GiB in bfloat16) over 16 x 4 devices; 64 sequences of 4,096 tokens."""
    return _factory(replace(Size(), **sizes), checkpoint, segment_size, real)


def small(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """8 layers of 128, float32, on one device, for a CPU."""
    size = Size(
        layers=8, width=128, heads=4, key_heads=2, inner=384, vocabulary=512, batch=8, tokens=128, data=1, model=1, dtype=jnp.float32
    )  # fmt: skip
    return _factory(replace(size, **sizes), checkpoint, segment_size, real)


def _factory(size: Size, checkpoint: common.Transform | None, segment_size: int | str, real: bool) -> common.Model:
    """Returns (loss, args): `loss(params, inputs, targets)`, the mean cross-entropy in nats."""
    layout = _Layout(size)
    axes = _axes(size)

    def step(params: Any, x: jax.Array) -> tuple[jax.Array, None]:
        # Said of each layer's parameters, it holds for the gradients too.
        params = {name: layout.of(row, *axes[name][1]) for name, row in params.items()}
        return _block(size, layout, params, x), None

    blocks = common.scan(step, checkpoint, segment_size, size.layers)

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        embedding = layout.of(params["embedding"], *BACK)
        x = layout.of(embedding[inputs], "data")
        x, _ = blocks(params["blocks"], x)
        logits = layout.of(norm(x, params["norm"]) @ layout.of(params["head"], *ACROSS), "data", None, "model")
        return common.cross_entropy(logits, targets)

    return loss, (_parameters(size, layout, real), *_batch(size, layout, real))


class _Layout:
    """What lies where: a mesh (data, model), or one device."""

    def __init__(self, size: Size) -> None:
        shape, names, types = (size.data, size.model), ("data", "model"), (AxisType.Auto, AxisType.Auto)
        self.mesh = AbstractMesh(shape, names, axis_types=types) if math.prod(shape) > 1 else None

    def of(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Returns x, which the compiler lays out over these axes of the mesh."""
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*axes)))

    def struct(self, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        """Returns an argument that lies over these axes."""
        sharding = None if self.mesh is None else NamedSharding(self.mesh, P(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x over its root mean square, times the scale; taken in float32."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Turns pairs of x (batch, tokens, heads, head) by their positions' angles; J. Su et al. 2021
    (arXiv:2104.09864).
    """
    tokens, head = x.shape[1], x.shape[-1]
    angles = jnp.outer(jnp.arange(tokens), THETA ** -(jnp.arange(0, head, 2) / head))[None, :, None]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def _block(size: Size, layout: _Layout, params: Any, x: jax.Array) -> jax.Array:
    """Returns (batch, tokens, width), as x."""
    x = x + layout.of(_attention(size, layout, params, norm(x, params["norm_attention"])), "data")
    hidden = norm(x, params["norm_mlp"])
    gate, up = (layout.of(hidden @ params[name], "data", None, "model") for name in ("gate", "up"))
    hidden = jax.nn.silu(checkpoint_name(gate, "gate")) * checkpoint_name(up, "up")
    return x + layout.of(hidden @ params["down"], "data")


def _attention(size: Size, layout: _Layout, params: Any, x: jax.Array) -> jax.Array:
    batch, tokens, _ = x.shape
    query = (x @ params["query"]).reshape(batch, tokens, size.heads, size.head)
    key, value = ((x @ params[name]).reshape(batch, tokens, size.key_heads, size.head) for name in ("key", "value"))
    query, key, value = (
        layout.of(checkpoint_name(v, name), "data", None, "model")
        for v, name in ((rotate(query), "query"), (rotate(key), "key"), (value, "value"))
    )
    query = query.reshape(batch, tokens, size.key_heads, -1, size.head)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key) * size.head**-0.5
    scores = layout.of(scores, "data", "model").astype(jnp.float32)
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min)).astype(x.dtype)
    context = jnp.einsum("bkgqs,bskd->bqkgd", weights, value).reshape(batch, tokens, size.width)
    return checkpoint_name(layout.of(context, "data", None, "model"), "context") @ params["out"]


def _parameters(size: Size, layout: _Layout, real: bool) -> Any:
    """Returns {"embedding", "blocks", "norm", "head"}; blocks are stacked, (layers, ...)."""
    w = size.width
    blocks = {
        n: layout.struct((size.layers, *shape), size.dtype, None, *axes) for n, (shape, axes) in _axes(size).items()
    }
    shapes = {
        "embedding": layout.struct((size.vocabulary, w), size.dtype, *BACK),
        "blocks": blocks,
        "norm": layout.struct((w,), size.dtype),
        "head": layout.struct((w, size.vocabulary), size.dtype, *ACROSS),
    }
    if not real:
        return shapes
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(common.random_key(0), len(leaves))
    return jax.tree.unflatten(tree, [_initial(key, leaf) for key, leaf in zip(keys, leaves)])


def _axes(size: Size) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Returns shape and axes of the mesh of a block's parameters, by name."""
    w, f, kv = size.width, size.inner, size.key_heads * size.head
    return {
        "query": ((w, w), ACROSS), "key": ((w, kv), ACROSS), "value": ((w, kv), ACROSS), "out": ((w, w), BACK),
        "gate": ((w, f), ACROSS), "up": ((w, f), ACROSS), "down": ((f, w), BACK),
        "norm_attention": ((w,), ()), "norm_mlp": ((w,), ()),
    }  # fmt: skip


def _initial(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns ones for scales of norms, which are the leaves that no axis contracts, and normal numbers for
    matrices.
    """
    if leaf.ndim == 1 or (leaf.ndim == 2 and leaf.shape[0] < leaf.shape[1] // 8):
        return jnp.ones(leaf.shape, leaf.dtype)
    return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)


def _batch(size: Size, layout: _Layout, real: bool) -> tuple:
    """Returns (inputs, targets), int32 (batch, tokens)."""
    if real:
        from jaxckpt.models import data

        return tuple(map(jnp.asarray, data.text_batch(size.batch, size.tokens, size.vocabulary)))
    tokens = layout.struct((size.batch, size.tokens), jnp.int32, "data")
    return tokens, tokens
