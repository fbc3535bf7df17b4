"""ResNet-50 with batch normalisation, whose running statistics come out of the checkpointed blocks.

    jaxckpt compare resnet50 --target cuda:h100

Sources: K. He et al., "Deep Residual Learning for Image Recognition", 2016; the stride in the 3 by 3 convolution and
the last scale of a block at zero as in P. Goyal et al., "Accurate, Large Minibatch SGD", 2017; S. Ioffe and C. Szegedy,
"Batch Normalization", 2015.

A block is one bottleneck.

Tags within a block: conv_in, conv_mid, conv_out, shortcut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Sizes of a ResNet.

    Attributes:
      stages: bottlenecks in each stage; every stage but the first halves the image.
      width: channels of the stem; a stage's output has 4, 8, 16 ... times as many.
      batch: images in a batch.
      pixels: along a side, a multiple of 8.
      classes: at least 10, the digits'.
      stem: whether a 7 by 7 convolution and a maximum first bring the image to a quarter; else one 3 by 3 convolution
        leaves its size.
      dtype: of activations.
    """

    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    batch: int = 128
    pixels: int = 224
    classes: int = 1000
    stem: bool = True
    dtype: Any = jnp.bfloat16


def _modules(dtype: Any) -> tuple[Callable, Callable]:
    init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
    conv = partial(nn.Conv, use_bias=False, dtype=dtype, kernel_init=init)
    return conv, partial(nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=dtype)


class Bottleneck(nn.Module):
    """1 by 1, 3 by 3 and 1 by 1 convolution beside a shortcut; `features` inside, 4 times as many outside."""

    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns (batch, height / stride, width / stride, 4 * features)."""
        conv, norm = _modules(self.dtype)
        y = checkpoint_name(conv(self.features, (1, 1), name="conv_in")(x), "conv_in")
        y = nn.relu(norm(name="norm_in")(y))
        y = conv(self.features, (3, 3), strides=self.stride, name="conv_mid")(y)
        y = nn.relu(norm(name="norm_mid")(checkpoint_name(y, "conv_mid")))
        y = checkpoint_name(conv(4 * self.features, (1, 1), name="conv_out")(y), "conv_out")
        y = norm(name="norm_out", scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = conv(4 * self.features, (1, 1), strides=self.stride, name="conv_shortcut")(x)
            x = norm(name="norm_shortcut")(checkpoint_name(x, "shortcut"))
        return nn.relu(x + y)


class Stem(nn.Module):
    """From an image to the first stage's input."""

    size: Size

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns (batch, pixels / 4, pixels / 4, width), or with `stem=False` (batch, pixels, pixels, width)."""
        conv, norm = _modules(self.size.dtype)
        window, stride = ((7, 7), 2) if self.size.stem else ((3, 3), 1)
        x = conv(self.size.width, window, strides=stride, name="conv")(images.astype(self.size.dtype))
        x = nn.relu(norm(name="norm")(x))
        return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME") if self.size.stem else x


def resnet50(
    checkpoint: common.Transform | None = None,
    segment_size: int | str = 1,
    *,
    statistics: bool = False,
    real: bool = False,
    **sizes: Any,
) -> common.Model:
    """16 bottlenecks, images of 224 by 224, batch 128, bfloat16 activations: 25.6 M parameters (97 MiB).

    A block's input is 25 to 196 MiB.

    Args:
      checkpoint: the transform put round each run of `segment_size` bottlenecks; None puts none.
      segment_size: bottlenecks a run, or "sqrt".
      statistics: whether the loss returns the new running statistics beside itself (for `has_aux=True`).
      real: whether args are real arrays: initialised parameters, and the digits, scaled up.
      **sizes: fields of `Size`.

    Returns:
      (loss, args): `loss(params, stats, images, labels)`, or with `statistics` the same returning (loss, new stats).
      Images are float32 (batch, pixels, pixels, 3), labels int32 (batch,). `params` is {"stem", "blocks", "head"}, and
      `stats` the same without a head.
    """
    return _factory(replace(Size(), **sizes), checkpoint, segment_size, statistics, real)


def small(
    checkpoint: common.Transform | None = None,
    segment_size: int | str = 1,
    *,
    statistics: bool = False,
    real: bool = False,
    **sizes: Any,
) -> common.Model:
    """4 bottlenecks on the digits, 16 by 16 pixels, float32, for a CPU: 53 K parameters (0.2 MiB).

    Otherwise as `resnet50`.
    """
    size = Size(stages=(2, 2), width=16, batch=32, pixels=16, classes=10, stem=False, dtype=jnp.float32)
    return _factory(replace(size, **sizes), checkpoint, segment_size, statistics, real)


def _factory(
    size: Size, checkpoint: common.Transform | None, segment_size: int | str, statistics: bool, real: bool
) -> common.Model:
    if size.classes < 10:
        raise ValueError(f"classes must be at least 10, one for each digit; got {size.classes!r}.")
    stem, head = Stem(size), nn.Dense(size.classes)
    modules = [
        Bottleneck(size.width * 2**stage, 2 if stage and not index else 1, size.dtype)
        for stage, count in enumerate(size.stages)
        for index in range(count)
    ]
    blocks = common.sequence(_functions(modules), checkpoint, segment_size)

    def train(params, stats, images, labels):
        x, new_stem = _apply(stem, (params["stem"], stats["stem"]), images)
        x, new_blocks = blocks(list(zip(params["blocks"], stats["blocks"], strict=True)), x)
        logits = common.apply(head, params["head"], jnp.mean(x.astype(jnp.float32), axis=(1, 2)))
        return common.cross_entropy(logits, labels), {"stem": new_stem, "blocks": new_blocks}

    def loss(params, stats, images, labels):
        return train(params, stats, images, labels)[0]

    return train if statistics else loss, (*_parameters(size, stem, modules, head, real), *_batch(size, real))


def _apply(module: nn.Module, state: tuple, x: jax.Array) -> tuple[jax.Array, dict]:
    params, stats = state
    x, new = module.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
    return x, new["batch_stats"]


def _functions(modules: Sequence[nn.Module]) -> list[Callable]:
    """Returns a block per module; equal modules share one, so that JAX traces it once."""
    functions: dict = {}
    return [functions.setdefault(module, partial(_apply, module)) for module in modules]


def _parameters(
    size: Size, stem: nn.Module, modules: Sequence[nn.Module], head: nn.Module, real: bool
) -> tuple[dict, dict]:
    def init(key):
        keys = jax.random.split(key, len(modules) + 2)
        x = jnp.zeros((1, size.pixels, size.pixels, 3))
        variables = []
        for module, each in zip([stem, *modules], keys):
            x, new = module.init_with_output(each, x)
            variables.append(new)
        first, *rest = variables
        params = {"stem": first["params"], "blocks": [each["params"] for each in rest]}
        stats = {"stem": first["batch_stats"], "blocks": [each["batch_stats"] for each in rest]}
        return params | {"head": head.init(keys[-1], jnp.mean(x, axis=(1, 2)).astype(jnp.float32))["params"]}, stats

    return common.initialise(init, common.random_key(0), real=real)


def _batch(size: Size, real: bool) -> tuple:
    if real:
        return tuple(map(jnp.asarray, data.digits_batch(size.batch, size.pixels, 3)))
    return common.struct(size.batch, size.pixels, size.pixels, 3), common.struct(size.batch, dtype=jnp.int32)
