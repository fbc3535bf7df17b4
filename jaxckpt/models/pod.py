"""A mixture of experts of DeepSeek-V3's sizes, for a pod: data, expert and tensor parallel in one `jax.shard_map`.

    jaxckpt plan moe671b --budget 40GiB --target tpu:v5p:16x16x8

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv:2412.19437), section 4.2, for the sizes; attention is
grouped-query attention here, with as many heads as make 671 billion parameters. V. Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022: between attentions a device has its part of the tokens.
D. Lepikhin et al., "GShard", 2020: experts with a capacity, tokens sent to them and back by all-to-all.

On a mesh (data, expert, tensor) a device holds:

- of the tokens: its sequences, over data and expert; of these its tokens, over tensor. Attention and the dense MLP
  gather them; heads, the MLP's inside and the vocabulary are cut over tensor.
- of the weights: a part of the rows over data and expert, of the columns over tensor. Each block gathers its own.
- of the experts: a part over expert and tensor; of their rows a part over data.

Parameters and activations are bfloat16; norms, softmax, the router and the loss are taken in float32. Routing has no
auxiliary loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.models import common, llama

Array = jax.Array
AXES = ("data", "expert", "tensor")
GROUPS = ("data", "expert")
"""Axes that sequences and the rows of weights are cut over."""
HOMES = ("expert", "tensor")
"""Axes that experts are cut over."""
COLUMNS, ROWS = P(GROUPS, "tensor"), P("tensor", GROUPS)


@dataclass(frozen=True)
class Size:
    """Sizes of a mixture of experts, and the mesh that it is cut over.

    Attributes:
      dense, sparse: blocks with an MLP, and after them blocks with experts.
      width, heads, vocabulary, batch, tokens: as of `jaxckpt.models.gpt.Size`.
      key_heads: of keys and values; each serves heads / key_heads queries.
      head: width of a head.
      inner: of the dense MLP.
      experts, chosen, expert_inner: experts in a block, how many a token visits, and their inside, which is also that
        of the one expert that all tokens visit.
      spare: room for tokens in an expert, as a multiple of what an even spread gives it.
      data, expert, tensor: sizes of the mesh's axes.
      dtype: of parameters and activations.
    """

    dense: int = 3
    sparse: int = 58
    width: int = 7168
    heads: int = 96
    key_heads: int = 8
    head: int = 128
    inner: int = 18432
    experts: int = 256
    chosen: int = 8
    expert_inner: int = 2048
    spare: float = 1.25
    vocabulary: int = 129280
    batch: int = 1024
    tokens: int = 4096
    data: int = 16
    expert: int = 32
    tensor: int = 4
    dtype: Any = jnp.bfloat16

    @property
    def mesh_shape(self) -> tuple[int, int, int]:
        """Sizes of the mesh's axes."""
        return self.data, self.expert, self.tensor


def moe671b(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """671 billion parameters over 16 x 32 x 4 devices; 1,024 sequences of 4,096 tokens."""
    return _factory(replace(Size(), **sizes), checkpoint, segment_size, real)


def small(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """1 + 3 blocks of 64, float32, on one device, for a CPU."""
    size = Size(
        dense=1, sparse=3, width=64, heads=8, key_heads=4, head=8, inner=128, experts=8, chosen=2, expert_inner=32,
        vocabulary=512, batch=8, tokens=32, data=1, expert=1, tensor=1, dtype=jnp.float32,
    )  # fmt: skip
    return _factory(replace(size, **sizes), checkpoint, segment_size, real)


def _factory(size: Size, checkpoint: common.Transform | None, segment_size: int | str, real: bool) -> common.Model:
    """Returns (loss, args): `loss(params, inputs, targets)`, the mean cross-entropy in nats.

    Where `real`, the mesh is one of devices that are here.
    """
    make_mesh: Any = jax.make_mesh if real else AbstractMesh
    mesh = make_mesh(size.mesh_shape, AXES, axis_types=(AxisType.Auto,) * 3)
    blocks = {
        kind: common.scan(functools.partial(_block, size, kind), checkpoint, segment_size, count)
        for kind, count in (("dense", size.dense), ("sparse", size.sparse))
    }
    specs = _tree(size, lambda shape, spec: spec)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P(GROUPS), P(GROUPS)), out_specs=P())
    def loss(params: Any, inputs: Array, targets: Array) -> Array:
        x = _embedded(gathered(params["embedding"], P(None, GROUPS)), inputs)
        for kind in ("dense", "sparse"):
            x, _ = blocks[kind](params[kind], x)
        x = lax.all_gather(llama.norm(x, params["norm"]), "tensor", axis=1, tiled=True)
        logits = x @ gathered(params["head"], P(GROUPS))
        return lax.psum(jnp.sum(_surprise(logits, targets)), GROUPS) / (size.batch * size.tokens)

    return loss, (_parameters(size, mesh, real), *_batch(size, mesh, real))


# ------------------------------------------------------------------------------------------------- what a device does


def gathered(x: Array, over: P) -> Array:
    """Returns x with those axes put together that `over` names for its dimensions."""
    for dimension, names in enumerate(over):
        if names is not None:
            x = lax.all_gather(x, names, axis=dimension, tiled=True)
    return x


def _place(size: int) -> Array:
    """Returns the first of the rows that this device has, of rows of which each on the axis tensor has `size`."""
    return lax.axis_index("tensor") * size


def _picked(table: Array, rows: Array, columns: bool) -> Array:
    """Returns the entries of the table's rows, or of its last axis' columns, that this device has; zeros for others."""
    local = rows - _place(table.shape[-1] if columns else table.shape[0])
    here = (local >= 0) & (local < table.shape[-1 if columns else 0])
    local = jnp.where(here, local, 0)
    if columns:
        return jnp.where(here, jnp.take_along_axis(table, local[..., None], -1)[..., 0], 0)
    return jnp.where(here[..., None], table[local], 0)


def _embedded(table: Array, tokens: Array) -> Array:
    """Returns (sequences, this device's tokens, width) of a table (this device's words, width)."""
    return lax.psum_scatter(_picked(table, tokens, columns=False), "tensor", scatter_dimension=1, tiled=True)


def _surprise(logits: Array, targets: Array) -> Array:
    """Returns the cross-entropy (sequences, tokens) of logits (sequences, tokens, this device's words)."""
    logits = logits.astype(jnp.float32)
    most = lax.pmax(lax.stop_gradient(logits.max(-1)), "tensor")
    total = lax.psum(jnp.exp(logits - most[..., None]).sum(-1), "tensor")
    return jnp.log(total) + most - lax.psum(_picked(logits, targets, columns=True), "tensor")


def _block(size: Size, kind: str, params: Any, x: Array) -> tuple[Array, None]:
    """Returns (sequences, this device's tokens, width), as x."""
    x = x + _attention(size, params, llama.norm(x, params["norm_attention"]))
    hidden = llama.norm(x, params["norm_mlp"])
    if kind == "dense":
        return x + _across(hidden, lambda hidden: _mlp(params, hidden, P(GROUPS), P(None, GROUPS))), None
    rows = hidden.reshape(-1, size.width)
    shared = _mlp(params, hidden, COLUMNS, ROWS)
    return x + shared + _experts(size, params, rows).reshape(x.shape), None


def _across(x: Array, function: Callable[[Array], Array]) -> Array:
    """Returns this device's tokens of the sum over the axis tensor of what `function` makes of all tokens."""
    whole = lax.all_gather(x, "tensor", axis=1, tiled=True)
    return lax.psum_scatter(function(whole), "tensor", scatter_dimension=1, tiled=True)


def _mlp(params: Any, x: Array, into: P, out: P) -> Array:
    """Returns the gated MLP of x, with weights gathered over `into` and `out`."""
    gate, up = (checkpoint_name(x @ gathered(params[name], into), name) for name in ("gate", "up"))
    return (jax.nn.silu(gate) * up) @ gathered(params["down"], out)


def _attention(size: Size, params: Any, x: Array) -> Array:
    def heads(x: Array) -> Array:
        sequences, tokens, _ = x.shape
        query, key, value = (
            (x @ gathered(params[name], P(GROUPS))).reshape(sequences, tokens, -1, size.head)
            for name in ("query", "key", "value")
        )
        query, key = checkpoint_name(llama.rotate(query), "query"), checkpoint_name(llama.rotate(key), "key")
        query = query.reshape(sequences, tokens, key.shape[2], -1, size.head)
        scores = (jnp.einsum("bqkgd,bskd->bkgqs", query, key) * size.head**-0.5).astype(jnp.float32)
        causal = jnp.tril(jnp.ones((tokens, tokens), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min)).astype(x.dtype)
        context = jnp.einsum("bkgqs,bskd->bqkgd", weights, checkpoint_name(value, "value"))
        context = checkpoint_name(context.reshape(sequences, tokens, -1), "context")
        return context @ gathered(params["out"], P(None, GROUPS))

    return _across(x, heads)


def _experts(size: Size, params: Any, x: Array) -> Array:
    """Returns (tokens, width), as x: of each token the sum of its experts, by their gates.

    A token that finds no room in an expert on its way there is dropped by it; earlier tokens come first.
    """
    count = x.shape[0] * size.chosen
    room = math.ceil(count / size.experts * size.spare)
    router = gathered(params["router"], P(GROUPS)).astype(jnp.float32)
    gates, chosen = lax.top_k(jax.nn.softmax(x.astype(jnp.float32) @ router), size.chosen)
    gates = (gates / gates.sum(-1, keepdims=True)).astype(x.dtype)

    visits = chosen.reshape(count)
    before = jnp.cumsum(jax.nn.one_hot(visits, size.experts, dtype=jnp.int32), axis=0) - 1
    place = jnp.take_along_axis(before, visits[:, None], axis=1)[:, 0]
    slots = jnp.where(place < room, visits * room + place, size.experts * room)
    sources = jnp.full(size.experts * room, x.shape[0]).at[slots].set(jnp.arange(count) // size.chosen, mode="drop")

    sent = x.at[sources].get(mode="fill", fill_value=0)
    here = checkpoint_name(_exchanged(size, sent, room), "dispatched")
    weight = lambda name, over: gathered(params[f"expert_{name}"], over)
    gate, up = (
        checkpoint_name(jnp.einsum("erw,ewi->eri", here, weight(name, P(None, "data"))), f"expert_{name}")
        for name in ("gate", "up")
    )
    made = jnp.einsum("eri,eiw->erw", jax.nn.silu(gate) * up, weight("down", P(None, None, "data")))
    back = checkpoint_name(_returned(size, made, room), "returned")
    visited = back.at[slots].get(mode="fill", fill_value=0).reshape(*gates.shape, -1)
    return jnp.einsum("tk,tkw->tw", gates, visited)


def _exchanged(size: Size, sent: Array, room: int) -> Array:
    """Returns (experts here, devices * room, width) of what each device has for all experts (experts * room, width)."""
    homes = size.expert * size.tensor
    parts = sent.reshape(homes, -1, room, sent.shape[-1])
    parts = lax.all_to_all(parts, HOMES, split_axis=0, concat_axis=0, tiled=True)
    return parts.transpose(1, 0, 2, 3).reshape(parts.shape[1], homes * room, -1)


def _returned(size: Size, made: Array, room: int) -> Array:
    """The inverse of `_exchanged`."""
    homes = size.expert * size.tensor
    parts = made.reshape(made.shape[0], homes, room, -1).transpose(1, 0, 2, 3)
    return lax.all_to_all(parts, HOMES, split_axis=0, concat_axis=0, tiled=True).reshape(-1, made.shape[-1])


# ------------------------------------------------------------------------------------------------------- arguments


def _weights(size: Size, kind: str) -> dict[str, tuple[tuple[int, ...], P]]:
    """Returns shape and layout of a block's parameters, by name."""
    w, q, kv = size.width, size.heads * size.head, size.key_heads * size.head
    inner = size.inner if kind == "dense" else size.expert_inner
    weights = {
        "norm_attention": ((w,), P()), "norm_mlp": ((w,), P()),
        "query": ((w, q), COLUMNS), "key": ((w, kv), COLUMNS), "value": ((w, kv), COLUMNS), "out": ((q, w), ROWS),
        "gate": ((w, inner), COLUMNS), "up": ((w, inner), COLUMNS), "down": ((inner, w), ROWS),
    }  # fmt: skip
    if kind == "dense":
        return weights
    into, out = (size.experts, w, inner), (size.experts, inner, w)
    return weights | {
        "router": ((w, size.experts), P(GROUPS)),
        "expert_gate": (into, P(HOMES, "data")), "expert_up": (into, P(HOMES, "data")),
        "expert_down": (out, P(HOMES, None, "data")),
    }  # fmt: skip


def _tree(size: Size, make: Callable[[tuple[int, ...], P], Any]) -> Any:
    """Returns {"embedding", "dense", "sparse", "norm", "head"} of what `make` makes of shapes and layouts."""
    blocks = {
        kind: {name: make((count, *shape), P(None, *spec)) for name, (shape, spec) in _weights(size, kind).items()}
        for kind, count in (("dense", size.dense), ("sparse", size.sparse))
    }
    return {
        "embedding": make((size.vocabulary, size.width), ROWS),
        **blocks,
        "norm": make((size.width,), P()),
        "head": make((size.width, size.vocabulary), COLUMNS),
    }


def _parameters(size: Size, mesh: AbstractMesh | Mesh, real: bool) -> Any:
    """Returns the parameters; a block's are stacked, (blocks, ...)."""
    shapes = _tree(
        size, lambda shape, spec: jax.ShapeDtypeStruct(shape, size.dtype, sharding=NamedSharding(mesh, spec))
    )
    if not real:
        return shapes
    leaves, tree = jax.tree.flatten_with_path(shapes)
    keys = jax.random.split(common.random_key(0), len(leaves))
    values = [_initial(key, path[-1].key, leaf) for key, (path, leaf) in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, values)


def _initial(key: Array, name: str, leaf: jax.ShapeDtypeStruct) -> Array:
    """Returns ones for norms, and normal numbers for matrices."""
    if name.startswith("norm"):
        return jax.device_put(jnp.ones(leaf.shape, leaf.dtype), leaf.sharding)
    return jax.device_put(0.02 * jax.random.normal(key, leaf.shape, leaf.dtype), leaf.sharding)


def _batch(size: Size, mesh: AbstractMesh | Mesh, real: bool) -> tuple[Any, Any]:
    """Returns (inputs, targets), int32 (batch, tokens)."""
    sharding = NamedSharding(mesh, P(GROUPS))
    if real:
        from jaxckpt.models import data

        inputs, targets = data.text_batch(size.batch, size.tokens, size.vocabulary)
        return jax.device_put(inputs, sharding), jax.device_put(targets, sharding)
    tokens = jax.ShapeDtypeStruct((size.batch, size.tokens), jnp.int32, sharding=sharding)
    return tokens, tokens


# ---------------------------------------------------------------------------------------------------- training step


def optimizer() -> optax.GradientTransformation:
    """Returns AdamW with moments in float32."""
    inner = optax.adamw(1e-4)
    wide = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return inner.update(wide(gradients), state, wide(params))

    return optax.GradientTransformation(lambda params: inner.init(wide(params)), update)


def state(params: Any) -> Any:
    """Returns shapes of the optimizer's state, laid out as the parameters."""
    like = lambda leaf, of: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of.sharding)
    return optax.tree.map_params(optimizer(), like, jax.eval_shape(optimizer().init, params), params)


def training(loss: Callable[..., Array]) -> Callable[..., Any]:
    """Returns step(params, state, inputs, targets) -> (params, state, loss), which donates parameters and state."""

    def step(params: Any, state: Any, inputs: Array, targets: Array) -> tuple[Any, Any, Array]:
        value, gradients = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer().update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))
