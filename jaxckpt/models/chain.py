"""The plain chain, where every closed form can be checked by hand, and its opposite, where checkpointing cannot help.

    jaxckpt compare chain --target cuda:h100

Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016: n equal layers in segments of sqrt(n)
keep some 2 sqrt(n) activations for one more forward pass.

Tags within a block: dense (the value before tanh).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxckpt.models import common, data

CLASSES = 10


class Layer(nn.Module):
    """tanh of a dense layer as wide as its input, (batch, width)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of x."""
        # tanh shrinks what it is given; a gain of 1.1 keeps the variance over a hundred layers.
        init = nn.initializers.variance_scaling(1.1**2, "fan_in", "truncated_normal")
        return jnp.tanh(checkpoint_name(nn.Dense(x.shape[-1], kernel_init=init, name="dense")(x), "dense"))


def chain(
    checkpoint: common.Transform | None = None,
    segment_size: int | str = 1,
    *,
    layers: int = 100,
    width: int = 1024,
    batch: int = 8192,
    real: bool = False,
) -> common.Model:
    """100 layers x -> tanh(x W + b) of width 1024, float32, and a dense head of 10 classes.

    105 M parameters (400 MiB), and as much of gradients. 8,192 rows: each layer keeps its output, 32 MiB, so 3.1 GiB
    in all; activations are most of the peak. Data: the digits, 64 pixels over and over.

    Returns:
      (loss, args): `loss(params, x, labels)` with x (batch, width), labels int32 (batch,); `params` is
      {"layers": [...], "head"}.
    """
    return _factory(checkpoint, segment_size, layers, width, batch, real)


def wide(
    checkpoint: common.Transform | None = None,
    segment_size: int | str = 1,
    *,
    layers: int = 8,
    width: int = 4096,
    batch: int = 32,
    real: bool = False,
) -> common.Model:
    """8 layers of width 4096 on 32 rows: 134 M parameters (512 MiB), 4 MiB of activations.

    Checkpointing can save next to nothing here. The answer to "why does my memory not fall?": look at what the peak is
    made of first. Otherwise as `chain`.
    """
    return _factory(checkpoint, segment_size, layers, width, batch, real)


def _factory(
    checkpoint: common.Transform | None, segment_size: int | str, layers: int, width: int, batch: int, real: bool
) -> common.Model:
    layer, head = Layer(), nn.Dense(CLASSES)

    def block(params, x):
        return common.apply(layer, params, x), None

    blocks = common.sequence([block] * layers, checkpoint, segment_size)

    def loss(params, x, labels):
        x, _ = blocks(params["layers"], x)
        return common.cross_entropy(common.apply(head, params["head"], x), labels)

    def init(module: nn.Module, key: jax.Array) -> Any:
        return module.init(key, jnp.zeros((1, width)))["params"]

    keys = jax.random.split(common.random_key(0))
    params = {
        "layers": common.initialise_equal(partial(init, layer), keys[0], layers, real=real),
        "head": common.initialise(partial(init, head), keys[1], real=real),
    }
    if real:
        return loss, (params, *map(jnp.asarray, data.digits_features(batch, width)))
    return loss, (params, common.struct(batch, width), common.struct(batch, dtype=jnp.int32))
