"""Trains a ResNet on scikit-learn's handwritten digits: flax nnx, BatchNorm, AdamW, a donated state.

python examples/resnet_digits.py                              # planned for 60% of the peak; two minutes on a CPU
python examples/resnet_digits.py --budget none                # the same losses without a plan
python examples/resnet_digits.py --compare results            # both; a table and a picture
python examples/resnet_digits.py --save run                   # writes checkpoint files; a killed run goes on
python examples/resnet_digits.py --blocks 24 --width 128 --batch 1024 --steps 1000                     # on a GPU
jaxckpt plan examples/resnet_digits.py:make_step --budget 60%
"""

from __future__ import annotations

import functools
import itertools

import common
import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

PARSER = common.parser(__file__, __doc__, steps=100, budget="60%", blocks=6, width=32, batch=256)
HELD_OUT = 297
"""Images that the model is not trained on, the last of 1,797."""


class Block(nnx.Module):
    """Two convolutions and a shortcut; with `stride` 2, half the size in each direction."""

    def __init__(self, channels, width, stride, rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, padding="SAME", rngs=rngs)
        self.first, self.norm = (
            conv(channels, width, (3, 3), strides=stride),
            nnx.BatchNorm(width, momentum=0.9, rngs=rngs),
        )
        self.second, self.last_norm = conv(width, width, (3, 3)), nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.shortcut = conv(channels, width, (1, 1), strides=stride)

    def __call__(self, x):
        h = nnx.silu(self.norm(self.first(x)))
        return nnx.silu(self.shortcut(x) + self.last_norm(self.second(h)))


class ResNet(nnx.Module):
    """Images of 8 x 8 pixels to logits of ten classes; the width doubles after each third of the blocks."""

    def __init__(self, blocks, width, rngs):
        self.stem = nnx.Conv(1, width, (3, 3), padding="SAME", rngs=rngs)
        widths = [width * 2 ** (3 * i // blocks) for i in range(-1, blocks)]
        widths[0] = width
        self.blocks = nnx.List([Block(a, b, b // a, rngs) for a, b in itertools.pairwise(widths)])
        self.head = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def loss(model, images, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
    return optax.softmax_cross_entropy(model(images), targets).mean()


@functools.cache
def digits():
    """Returns (images, labels): float32 (1797, 8, 8, 1) in 0 to 1, and int32 (1797,), in a random order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return images[order].reshape(-1, 8, 8, 1).astype(np.float32) / 16, labels[order].astype(np.int32)


def batch_of(options, number):
    """Returns (images, labels) of a step; images are moved by up to a pixel."""
    images, labels = digits()
    draw = np.random.default_rng((options.seed, number))
    chosen = draw.integers(0, len(images) - HELD_OUT, options.batch)
    wide, (down, right) = np.pad(images[chosen], ((0, 0), (1, 1), (1, 1), (0, 0))), draw.integers(0, 3, 2)
    return jax.device_put((wide[:, down : down + 8, right : right + 8], labels[chosen]))


def step_of(loss):
    def step(model, optimizer, images, labels):
        value, grads = nnx.value_and_grad(loss)(model, images, labels)
        optimizer.update(model, grads)
        return value

    return nnx.jit(step, donate_argnums=(0, 1))


def make_step(options=None):
    """Returns the loss, the arguments of the training step, and what makes the step of the loss."""
    options = options or PARSER.parse_args([])
    model = ResNet(options.blocks, options.width, nnx.Rngs(options.seed))
    optimizer = nnx.Optimizer(model, optax.adamw(optax.linear_schedule(0, 1e-3, 30), eps=1e-5), wrt=nnx.Param)
    return loss, (model, optimizer, *batch_of(options, 0)), step_of


def main(argv=None):
    options = common.parse(PARSER, argv)
    loss, (model, optimizer, *batch), step_of = make_step(options)
    fun = common.planned(options, loss, model, optimizer, *batch, step=step_of)
    run = common.Run(options, step_of(fun), model, optimizer, *batch)
    model, optimizer = run.restore((model, optimizer))
    for number in run.steps():
        value = run.step(model, optimizer, *batch_of(options, number))
        run.record(value, (model, optimizer))
    model.eval()  # the statistics of training take the place of the batch's
    images, labels = (each[-HELD_OUT:] for each in digits())
    run.finish(accuracy_on_held_out_images=float((model(images).argmax(-1) == labels).mean()))


if __name__ == "__main__":
    main()
