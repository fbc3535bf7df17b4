"""Models drawn at random, of ten kinds: what a planner meets that was not built with them.

    jaxckpt plan benchmarks/models/mixed.py:second --set seed=2 --target cuda:h100 --budget 60%

A kind and a seed are a model. The kind says what is special about its blocks or about its step, the seed draws its
sizes and what its blocks consist of. `KINDS` has all of them; `STEPS` those whose step is not `jax.value_and_grad`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxckpt.models import common

Array = jax.Array
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}


@dataclass(frozen=True)
class Size:
    """What the seed draws.

    Attributes:
      blocks: in a row.
      width: of the residual stream.
      batch, tokens: sequences, and their length.
      inner: how much wider the MLP is inside.
      heads: of attention; 0 for blocks without.
      gated: whether the MLP multiplies two branches.
      activation: of the MLP, one of `ACTIVATIONS`.
      mean: whether norms subtract the mean (layer norm), or only scale (RMS norm).
      vocabulary: of the head.
      dtype: of activations.
    """

    blocks: int
    width: int
    batch: int
    tokens: int
    inner: int
    heads: int
    gated: bool
    activation: str
    mean: bool
    vocabulary: int
    dtype: Any = jnp.float32


def drawn(seed: int) -> Size:
    """Returns the sizes of a seed."""
    draw = random.Random(seed)
    return Size(
        blocks=draw.randint(4, 9),
        width=draw.choice((128, 256, 384)),
        batch=draw.choice((4, 8, 16)),
        tokens=draw.choice((128, 256, 512)),
        inner=draw.choice((2, 3, 4)),
        heads=draw.choice((0, 2, 4)),
        gated=draw.random() < 0.4,
        activation=draw.choice(sorted(ACTIVATIONS)),
        mean=draw.random() < 0.5,
        vocabulary=draw.choice((512, 4_096, 16_384)),
    )


def _normed(x: Array, scale: Array, size: Size) -> Array:
    wide = x.astype(jnp.float32)
    if size.mean:
        wide = wide - wide.mean(-1, keepdims=True)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def _attention(w: Any, x: Array, size: Size) -> Array:
    tokens, width = x.shape[-2:]
    q, k, v = jnp.moveaxis((x @ w["qkv"].astype(x.dtype)).reshape(*x.shape[:-1], 3, size.heads, -1), -3, 0)
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) * (width // size.heads) ** -0.5
    scores = jnp.where(jnp.tri(tokens, dtype=bool), scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(x.shape) @ w["out"].astype(x.dtype)


def _mlp(w: Any, x: Array, size: Size) -> Array:
    up = ACTIVATIONS[size.activation](x @ w["up"].astype(x.dtype))
    if size.gated:
        up = up * (x @ w["gate"].astype(x.dtype))
    return up @ w["down"].astype(x.dtype)


def block(w: Any, x: Array, size: Size) -> Array:
    """Attention, where the size has heads, and an MLP, each behind a norm and added to the residual stream."""
    if size.heads:
        x = x + _attention(w, _normed(x, w["norm1"], size), size)
    return x + _mlp(w, _normed(x, w["norm2"], size), size)


def _in_branches(w: Any, x: Array, size: Size) -> Array:
    """The block in one branch and half of it in the other; a loop on stopped values beside them."""
    x = lax.cond(w["gain"] > 0, lambda x: block(w, x, size), lambda x: x + _mlp(w, x, size), x)
    noise = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, lax.stop_gradient(x)))[1]
    return x + 0.1 * noise * x


def _with_loops(w: Any, x: Array, size: Size) -> Array:
    """The block, with a loop of cheap operations in it."""
    x = block(w, x, size)
    return lax.fori_loop(0, 4, lambda i, h: jnp.sin(h) * 1.1 + w["gain"] * jnp.tanh(h), x)


def shapes(size: Size) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a block's parameters."""
    width, inside = size.width, size.inner * size.width
    shapes = {"up": (width, inside), "down": (inside, width), "norm2": (width,), "gain": ()}
    if size.gated:
        shapes["gate"] = (width, inside)
    if size.heads:
        shapes |= {"qkv": (width, 3 * width), "out": (width, width), "norm1": (width,)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def _language(
    size: Size, checkpoint: common.Transform | None, segment_size: int | str, run: Callable[..., Array], tied: bool
) -> common.Model:
    """A language model of such blocks: loss(parameters, tokens); `tied`: whether the head is the embedding."""

    def one(state: Any, x: Array) -> tuple[Array, None]:
        return run(state, x, size), None

    stack = common.sequence([one] * size.blocks, checkpoint, segment_size)

    def loss(parameters: Any, tokens: Array) -> Array:
        x = parameters["embedding"][tokens[..., :-1]].astype(size.dtype)
        x, _ = stack(parameters["blocks"], x)
        table = parameters["embedding"].T if tied else parameters["head"]
        logits = (x @ table.astype(x.dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[..., 1:]).mean()

    shape = jax.ShapeDtypeStruct
    parameters: dict[str, Any] = {"blocks": [shapes(size)] * size.blocks}
    parameters["embedding"] = shape((size.vocabulary, size.width), jnp.float32)
    if not tied:
        parameters["head"] = shape((size.width, size.vocabulary), jnp.float32)
    return loss, (parameters, shape((size.batch, size.tokens + 1), jnp.int32))


def _regression(
    size: Size, checkpoint: common.Transform | None, segment_size: int | str, how: Callable[..., Callable[..., Array]]
) -> common.Model:
    """Blocks on real inputs; `how` makes the loss of (parameters, xs, ys) from the network."""

    def one(state: Any, x: Array) -> tuple[Array, None]:
        return block(state, x, size), None

    stack = common.sequence([one] * size.blocks, checkpoint, segment_size)
    shape = jax.ShapeDtypeStruct
    xs = shape((size.batch, size.tokens, size.width), size.dtype)
    return how(lambda parameters, x: stack(parameters, x)[0]), ([shapes(size)] * size.blocks, xs, xs)


def _penalised(network: Callable[..., Array]) -> Callable[..., Array]:
    """A loss with the squared norm of its own gradient with respect to the inputs: second derivatives."""

    def loss(parameters: Any, xs: Array, ys: Array) -> Array:
        error = lambda x: jnp.square(network(parameters, x) - ys).mean()
        value, slope = jax.value_and_grad(error)(xs)
        return value + 0.1 * jnp.square(slope).sum()

    return loss


def _for_each_example(network: Callable[..., Array]) -> Callable[..., Array]:
    """A loss of one example, mapped."""

    def loss(parameters: Any, xs: Array, ys: Array) -> Array:
        one = lambda x, y: jnp.square(network(parameters, x) - y).mean()
        return jax.vmap(one)(xs, ys).mean()

    return loss


def residual(checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, seed: int = 0) -> common.Model:
    """Residual blocks without attention, and a head."""
    return _language(replace(drawn(seed), heads=0), checkpoint, segment_size, block, tied=False)


def attention(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, seed: int = 0
) -> common.Model:
    """Blocks with attention, and a head."""
    size = drawn(seed)
    return _language(replace(size, heads=size.heads or 4), checkpoint, segment_size, block, tied=False)


def branches(checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, seed: int = 0) -> common.Model:
    """A cond and a while loop in each block."""
    return _language(drawn(seed), checkpoint, segment_size, _in_branches, tied=False)


def loops(checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, seed: int = 0) -> common.Model:
    """A loop in each block."""
    return _language(drawn(seed), checkpoint, segment_size, _with_loops, tied=False)


def second(checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, seed: int = 0) -> common.Model:
    """A loss with second derivatives in it."""
    size = drawn(seed)
    return _regression(replace(size, blocks=min(size.blocks, 6)), checkpoint, segment_size, _penalised)


def tied(checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, seed: int = 0) -> common.Model:
    """The embedding is the head."""
    return _language(drawn(seed), checkpoint, segment_size, block, tied=True)


def half(checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, seed: int = 0) -> common.Model:
    """Activations in bfloat16, parameters in float32."""
    return _language(replace(drawn(seed), dtype=jnp.bfloat16), checkpoint, segment_size, block, tied=False)


def mapped(checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, seed: int = 0) -> common.Model:
    """A loss for each example, under `jax.vmap`."""
    return _regression(drawn(seed), checkpoint, segment_size, _for_each_example)


def _with_state(made: common.Model) -> common.Model:
    """A model whose arguments are those of `adamw`: optimizer's state and all."""
    loss, (parameters, *rest) = made
    return loss, (parameters, jax.eval_shape(_optimizer().init, parameters), *rest)


def _optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-4)


def adamw(loss: Callable[..., Array]) -> Callable[..., Any]:
    """Returns a step of AdamW: step(parameters, state, tokens) -> (parameters, state, loss)."""

    def step(parameters: Any, state: Any, tokens: Array) -> tuple[Any, Any, Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, tokens)
        updates, state = _optimizer().update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    return step


def adamw_donated(loss: Callable[..., Array]) -> Callable[..., Any]:
    """Returns a step of AdamW that takes the memory of parameters and state for the new ones."""
    return jax.jit(adamw(loss), donate_argnums=(0, 1))


def optimised(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, seed: int = 0
) -> common.Model:
    """A language model with the state of AdamW."""
    return _with_state(_language(drawn(seed), checkpoint, segment_size, block, tied=False))


KINDS: Mapping[str, Callable[..., common.Model]] = {
    "residual": residual,
    "attention": attention,
    "branches": branches,
    "loops": loops,
    "second": second,
    "tied": tied,
    "half": half,
    "mapped": mapped,
    "adamw": optimised,
    "adamw_donated": optimised,
}
STEPS: Mapping[str, Callable[..., Any]] = {"adamw": adamw, "adamw_donated": adamw_donated}
"""Makes the step of a kind; `jax.value_and_grad` does for the others."""
