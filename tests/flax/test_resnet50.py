"""The whole ResNet-50, on images of 32 by 32: what BatchNorm keeps is what it keeps without checkpointing."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.tree import leaves

from jaxckpt.flax import apply, checkpoint
from jaxckpt.models.data import digits_batch
from jaxckpt.models.resnet import Bottleneck, Size, Stem
from tests.flax.measures import assert_close, cost

SIZE = Size(batch=4, pixels=32, classes=10, dtype=jnp.float32)


class ResNet50(nn.Module):
    """The bottlenecks of the benchmark in one module, named automatically."""

    block: Any = Bottleneck

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = Stem(SIZE)(images)
        for stage, count in enumerate(SIZE.stages):
            for index in range(count):
                stride = 2 if stage and not index else 1
                x = self.block(SIZE.width * 2**stage, stride, SIZE.dtype)(x)
        return nn.Dense(SIZE.classes)(x.mean((1, 2)))


def loss_of(model: nn.Module) -> Any:
    def loss(params: Any, stats: Any, images: Any, labels: Any) -> Any:
        logits, new = model.apply({"params": params, "batch_stats": stats}, images, mutable=["batch_stats"])
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return losses.mean(), new["batch_stats"]

    return loss


def trained(model: nn.Module, params: Any, stats: Any, images: Any, labels: Any, steps: int = 10) -> Any:
    @jax.jit
    def step(params: Any, stats: Any) -> Any:
        grads, stats = jax.grad(loss_of(model), has_aux=True)(params, stats, images, labels)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), stats

    for _ in range(steps):
        params, stats = step(params, stats)
    return params, stats


@pytest.mark.once
@pytest.mark.usefixtures("optimised")
def test_running_statistics_after_ten_steps_are_equal_with_and_without():
    plain, ours = ResNet50(), ResNet50(checkpoint(Bottleneck))
    images, labels = map(jnp.asarray, digits_batch(SIZE.batch, SIZE.pixels, 3))
    variables = jax.jit(plain.init)(jax.random.key(0, impl="unsafe_rbg"), images)
    params, stats = variables["params"], variables["batch_stats"]
    bare, *less = (
        cost(lambda p, m=m: loss_of(m)(p, stats, images, labels)[0], params).bytes
        - 4 * sum(map(jnp.size, leaves(params)))
        for m in (plain, ours, apply(plain, {"Bottleneck_*": "nothing"}))
    )
    assert max(less) < 0.3 * bare
    before, after = (trained(m, params, stats, images, labels) for m in (plain, ours))
    assert_close(after, before, rtol=1e-3, atol=1e-5)
    moved = [float(abs(new - old).max()) for new, old in zip(leaves(after[1]), leaves(stats), strict=True)]
    assert len(moved) == 2 * 53
    assert min(moved) > 1e-3
