"""Trains a U-Net to find handwritten digits in photographs: flax linen, AdamW, donated parameters and moments.

    python examples/unet_scenes.py                                # planned for 60% of the peak; two minutes on a CPU
    python examples/unet_scenes.py --budget none                  # the same losses without a plan
    python examples/unet_scenes.py --compare results              # both; a table and a picture
    python examples/unet_scenes.py --save run                     # writes checkpoint files; a killed run goes on
    python examples/unet_scenes.py --size 256 --width 64 --batch 32 --steps 2000                           # on a GPU
    jaxckpt plan examples/unet_scenes.py:make_step --budget 60%

A scene is a part of one of scikit-learn's two photographs, with four of its digits on it. Each pixel has a class: one
of ten digits, or none. No scene is drawn twice.
"""

from __future__ import annotations

import functools

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits, load_sample_images

PARSER = common.parser(__file__, __doc__, steps=240, budget="60%", size=64, levels=3, width=16, batch=16)
OPTIMIZER = optax.adamw(optax.linear_schedule(0, 2e-3, 30), eps=1e-5)


class Convolutions(nn.Module):
    """Two convolutions with norms."""

    width: int

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.gelu(nn.GroupNorm(8)(nn.Conv(self.width, (3, 3))(x)))
        return x


class UNet(nn.Module):
    """Images (batch, size, size, 3) to logits of eleven classes at each pixel."""

    levels: int
    width: int

    @nn.compact
    def __call__(self, x):
        skips = []
        for level in range(self.levels):
            x = Convolutions(self.width * 2**level)(x)
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = Convolutions(self.width * 2**self.levels)(x)
        for level in reversed(range(self.levels)):
            x = nn.ConvTranspose(self.width * 2**level, (2, 2), (2, 2))(x)
            x = Convolutions(self.width * 2**level)(jnp.concatenate([x, skips[level]], axis=-1))
        return nn.Dense(11)(x)


@functools.cache
def pictures():
    """Returns two photographs (427, 640, 3) with values in 0 to 1, digits (1797, 8, 8) in 0 to 1, and their labels."""
    digits = load_digits()
    return [image / 255 for image in load_sample_images().images], digits.images / 16, digits.target


def batch_of(options, number):
    """Returns (scenes, classes) of a step: float32 (batch, size, size, 3), int32 (batch, size, size); 10 is none."""
    photographs, digits, labels = pictures()
    draw = np.random.default_rng((options.seed, number))
    scenes = np.zeros((options.batch, options.size, options.size, 3), np.float32)
    classes = np.full(scenes.shape[:3], 10, np.int32)
    for scene, classes_of in zip(scenes, classes):
        photograph = photographs[draw.integers(2)]
        top, left = (draw.integers(0, side - options.size) for side in photograph.shape[:2])
        scene[:] = photograph[top : top + options.size, left : left + options.size]
        for _ in range(4):
            chosen, (top, left) = draw.integers(len(digits)), draw.integers(0, options.size - 16, 2)
            ink = digits[chosen].repeat(2, axis=0).repeat(2, axis=1)
            there = scene[top : top + 16, left : left + 16]
            there[:] = there * (1 - ink[..., None]) + ink[..., None] * draw.random(3)
            classes_of[top : top + 16, left : left + 16][ink > 0.5] = labels[chosen]
    return jax.device_put((scenes, classes))


def step_of(loss):
    def step(params, moments, scenes, classes):
        value, grads = jax.value_and_grad(loss)(params, scenes, classes)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return jax.jit(step, donate_argnums=(0, 1))


def make_step(options=None):
    """Returns the loss, the arguments of the training step, and what makes the step of the loss."""
    options = options or PARSER.parse_args([])
    model = UNet(options.levels, options.width)

    def loss(params, scenes, classes):
        logits = model.apply({"params": params}, scenes)
        return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()

    scenes, classes = batch_of(options, 0)
    params = model.init(jax.random.key(options.seed), scenes)["params"]
    return loss, (params, OPTIMIZER.init(params), scenes, classes), step_of


def check(options):
    """Returns what is wrong with the flags, or None."""
    if options.size % 2**options.levels or not 32 <= options.size < 427:
        return (
            f"--size must be a multiple of 2 to the power of --levels, {2**options.levels}, and 32 to 426 pixels; "
            + (f"got {options.size}.")
        )
    if options.width % 8:
        return f"--width must be a multiple of 8, the groups of a norm; got {options.width}."
    return None


def main(argv=None):
    options = common.parse(PARSER, argv, check)
    loss, (params, moments, *batch), step_of = make_step(options)
    fun = common.planned(options, loss, params, moments, *batch, step=step_of)
    run = common.Run(options, step_of(fun), params, moments, *batch)
    params, moments = run.restore((params, moments))
    for number in run.steps():
        params, moments, value = run.step(params, moments, *batch_of(options, number))
        run.record(value, (params, moments))
    scenes, classes = batch_of(options, options.steps)  # not seen yet
    logits, digits = UNet(options.levels, options.width).apply({"params": params}, scenes), classes < 10
    found = jax.nn.softmax(logits)[..., 10] < 0.5  # more probably one of the digits than none
    run.finish(digits_intersection_over_union=float((found & digits).sum() / (found | digits).sum()))


if __name__ == "__main__":
    main()
