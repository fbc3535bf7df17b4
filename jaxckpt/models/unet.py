"""A U-Net that predicts the noise in an image: what the way down makes, the way up needs, long after.

    jaxckpt compare unet --target cuda:h100

Sources: O. Ronneberger et al., "U-Net", 2015; J. Ho et al., "Denoising Diffusion Probabilistic Models", 2020: residual
blocks with group normalisation, told the time by a sinusoidal embedding; here without attention.

A block is one residual block, with the change of resolution before it. Skipped values live from the way down to the way
up whatever the blocks recompute: they are what checkpointing cannot drop.

Tags within a block: resample, conv_in, conv_out, shortcut, skip (what a block on the way down leaves for the way up).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxckpt.models import common, data

TIMES = 1000
"""Steps of the diffusion; beta goes from 1e-4 to 0.02 in equal steps, as in the paper."""


@dataclass(frozen=True)
class Size:
    """Sizes of a U-Net.

    Attributes:
      width: channels at full resolution.
      factors: channels at each resolution as a multiple of `width`; each is half the one before.
      depth: blocks at each resolution on the way down, and as many on the way up.
      batch: images in a batch.
      pixels: along a side, a multiple of 8 and of 2 ** (len(factors) - 1).
      channels: of the image.
      dtype: of activations.
    """

    width: int = 128
    factors: tuple[int, ...] = (1, 2, 4, 8)
    depth: int = 2
    batch: int = 32
    pixels: int = 128
    channels: int = 3
    dtype: Any = jnp.bfloat16


def _norm(x: jax.Array, name: str, dtype: Any) -> jax.Array:
    """Returns x normalised by groups of at least 4 channels, and SiLU of that; within the module that calls it."""
    return nn.silu(nn.GroupNorm(min(32, x.shape[-1] // 4), dtype=dtype, name=name)(x))


class Residual(nn.Module):
    """Two convolutions with group normalisation, the time added between them, and a shortcut.

    Attributes:
      features: channels of the output.
      resample: "down" halves the image first, "up" doubles it, "" leaves it.
      dtype: of activations.
    """

    features: int
    resample: str
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array, skip: jax.Array | None = None) -> jax.Array:
        """Returns (batch, height, width, features); time is (batch, 4 * width), and skip is joined to x's channels."""
        conv = partial(nn.Conv, self.features, dtype=self.dtype)
        if self.resample == "down":
            x = checkpoint_name(conv((3, 3), strides=2, name="resample")(x), "resample")
        elif self.resample == "up":
            x = x.repeat(2, axis=1).repeat(2, axis=2)
            x = checkpoint_name(conv((3, 3), name="resample")(x), "resample")
        if skip is not None:
            x = jnp.concatenate([x, skip], axis=-1)
        y = checkpoint_name(conv((3, 3), name="conv_in")(_norm(x, "norm_in", self.dtype)), "conv_in")
        y = y + nn.Dense(self.features, dtype=self.dtype, name="time")(nn.silu(time))[:, None, None]
        y = checkpoint_name(conv((3, 3), name="conv_out")(_norm(y, "norm_out", self.dtype)), "conv_out")
        if x.shape[-1] != self.features:
            x = checkpoint_name(conv((1, 1), name="shortcut")(x), "shortcut")
        return x + y


class Entry(nn.Module):
    """The first convolution, and the embedding of the time."""

    size: Size

    @nn.compact
    def __call__(self, images: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (x, time): (batch, pixels, pixels, width) and (batch, 4 * width); times is int32 (batch,)."""
        width, dtype = self.size.width, self.size.dtype
        angles = times[:, None] * jnp.exp(-jnp.log(10000.0) * jnp.arange(width // 2) / (width // 2))
        time = nn.Dense(4 * width, dtype=dtype, name="time_in")(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        time = nn.Dense(4 * width, dtype=dtype, name="time_out")(nn.silu(time))
        return nn.Conv(width, (3, 3), dtype=dtype, name="conv")(images.astype(dtype)), time


class Exit(nn.Module):
    """The last normalisation and the convolution to the noise."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns (batch, pixels, pixels, channels), float32."""
        x = _norm(x, "norm", self.size.dtype)
        init = nn.initializers.normal(1e-3)
        x = nn.Conv(self.size.channels, (3, 3), dtype=self.size.dtype, kernel_init=init, name="conv")(x)
        return x.astype(jnp.float32)


def unet(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """Channels 128, 256, 512, 1024 from 128 by 128 pixels down to 16 by 16; 17 blocks: 167 M parameters (637 MiB).

    Batch 32, bfloat16 activations: a value of 128 channels at full resolution is 128 MiB.
    """
    return _factory(replace(Size(), **sizes), checkpoint, segment_size, real)


def small(
    checkpoint: common.Transform | None = None, segment_size: int | str = 1, *, real: bool = False, **sizes: Any
) -> common.Model:
    """Channels 16 and 32 on the digits, 16 by 16 pixels, float32, for a CPU: 5 blocks, 103 K parameters (0.4 MiB)."""
    size = Size(width=16, factors=(1, 2), depth=1, batch=16, pixels=16, channels=1, dtype=jnp.float32)
    return _factory(replace(size, **sizes), checkpoint, segment_size, real)


def _factory(size: Size, checkpoint: common.Transform | None, segment_size: int | str, real: bool) -> common.Model:
    """Returns (loss, args): `loss(params, images, noise, times)`, the mean squared error of the noise predicted.

    Images and noise are float32 (batch, pixels, pixels, channels), times int32 (batch,) below 1,000; `params` is
    {"entry", "blocks", "exit"}.
    """
    if size.pixels % 2 ** (len(size.factors) - 1):
        raise ValueError(f"pixels must be a multiple of {2 ** (len(size.factors) - 1)}; got {size.pixels!r}.")
    entry, leave = Entry(size), Exit(size)
    kinds, modules = _blocks(size)
    functions: dict = {}
    members = [functions.setdefault(each, partial(_apply, *each)) for each in zip(kinds, modules, strict=True)]
    blocks = common.sequence(members, checkpoint, segment_size)
    kept = np.cumprod(1 - np.linspace(1e-4, 0.02, TIMES)).astype(np.float32)

    def loss(params, images, noise, times):
        share = jnp.asarray(kept)[times][:, None, None, None]
        noisy = jnp.sqrt(share) * images + jnp.sqrt(1 - share) * noise
        x, time = common.apply(entry, params["entry"], noisy, times)
        (x, _), _ = blocks(params["blocks"], (x, ()), time)
        return jnp.mean(jnp.square(common.apply(leave, params["exit"], x) - noise))

    def init(key):
        keys = jax.random.split(key, len(modules) + 2)
        images = jnp.zeros((1, size.pixels, size.pixels, size.channels))
        (x, time), first = entry.init_with_output(keys[0], images, jnp.zeros(1, jnp.int32))
        carry, found = (x, ()), []
        for kind, module, each in zip(kinds, modules, keys[1:]):
            x, skip, skips = _take(kind, carry)
            x, variables = module.init_with_output(each, x, time, skip)
            carry = _give(kind, x, skips)
            found.append(variables["params"])
        return {"entry": first["params"], "blocks": found, "exit": leave.init(keys[-1], carry[0])["params"]}

    return loss, (common.initialise(init, common.random_key(0), real=real), *_batch(size, real))


def _blocks(size: Size) -> tuple[list[str], list[Residual]]:
    """Returns the kind of each block ("down", "middle", "up") and its module, in the order in which they run."""
    kinds, modules = [], []
    channels = [size.width * factor for factor in size.factors]
    for level, features in enumerate(channels):
        for index in range(size.depth):
            kinds.append("down")
            modules.append(Residual(features, "down" if level and not index else "", size.dtype))
    kinds.append("middle")
    modules.append(Residual(channels[-1], "", size.dtype))
    for level, features in reversed(list(enumerate(channels))):
        for index in range(size.depth):
            kinds.append("up")
            modules.append(Residual(features, "up" if level + 1 < len(channels) and not index else "", size.dtype))
    return kinds, modules


def _apply(kind: str, module: Residual, params: Any, carry: tuple, time: jax.Array) -> tuple[tuple, None]:
    x, skip, skips = _take(kind, carry)
    return _give(kind, common.apply(module, params, x, time, skip), skips), None


def _take(kind: str, carry: tuple) -> tuple:
    """Returns (x, skip, skips): a block on the way up takes the value that was put last."""
    x, skips = carry
    return (x, skips[-1], skips[:-1]) if kind == "up" else (x, None, skips)


def _give(kind: str, x: jax.Array, skips: tuple) -> tuple:
    """Returns (x, skips): a block on the way down leaves its output for the way up."""
    if kind != "down":
        return x, skips
    x = checkpoint_name(x, "skip")
    return x, (*skips, x)


def _batch(size: Size, real: bool) -> tuple:
    shape = (size.batch, size.pixels, size.pixels, size.channels)
    if not real:
        return common.struct(*shape), common.struct(*shape), common.struct(size.batch, dtype=jnp.int32)
    images, _ = data.digits_batch(size.batch, size.pixels, size.channels)
    noise, times = jax.random.split(jax.random.key(1))
    return jnp.asarray(images), jax.random.normal(noise, shape), jax.random.randint(times, (size.batch,), 0, TIMES)
