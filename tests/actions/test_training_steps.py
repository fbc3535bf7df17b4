"""Ten training steps with each exact action: the losses are those of the step without a plan."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import OFFLOAD, SAVE, Policy, compress, op, shard, where
from tests.helpers import gradient_executions

LAYERS, ROWS, WIDTH, EXPERTS = 4, 256, 64, 8
STEPS = 10


def init() -> Any:
    keys = jax.random.split(jax.random.key(0), 3 * LAYERS)
    normal = lambda key, *shape: jax.random.normal(key, shape) * shape[-2] ** -0.5
    return [
        {
            "up": normal(keys[3 * i], WIDTH, 4 * WIDTH),
            "down": normal(keys[3 * i + 1], 4 * WIDTH, WIDTH),
            "scales": normal(keys[3 * i + 2], WIDTH, EXPERTS),
        }
        for i in range(LAYERS)
    ]


def loss(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
    """A network with dropout, relu, and a sort: what each exact form is for is among its values."""
    for i, layer in enumerate(params):
        hidden = x @ layer["up"]
        mask = (hidden > 0) & jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, hidden.shape)
        scores = jax.nn.softmax(x @ layer["scales"])
        order = jnp.argsort(scores, axis=-1)
        ranked = jnp.take_along_axis(scores, order, -1)
        x = x + jnp.where(mask, hidden / 0.9, 0) @ layer["down"] * ranked[:, -1:]
    return jnp.mean((x - y) ** 2)


def batches() -> Any:
    for number in range(STEPS):
        x = jax.random.normal(jax.random.key(number), (ROWS, WIDTH))
        yield x, jnp.roll(x, 1, 1) * 0.5, jax.random.key(100 + number)


def trained(fun: Any) -> list[float]:
    optimizer = optax.adam(1e-2)
    params = init()
    state, losses = optimizer.init(params), []

    @jax.jit
    def step(params, state, batch):
        value, gradient = jax.value_and_grad(fun)(params, *batch)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    for batch in batches():
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses


@pytest.fixture(scope="module")
def expected() -> list[float]:
    found = trained(loss)
    assert found[-1] < 0.7 * found[0]  # it learns
    return found


EXACT = [OFFLOAD, compress("bits"), compress("narrow"), compress("bits") | OFFLOAD, compress("narrow") | OFFLOAD]


@pytest.mark.compile
@pytest.mark.parametrize("action", EXACT, ids=str)
def test_a_policy(action, expected):
    kept = where(lambda value: value.dtype == bool or value.primitive in ("sort", "dot_general"))
    policy = Policy([(kept, action)])
    plain = jaxckpt.residuals(jaxckpt.checkpoint(loss, policy=Policy([(kept, SAVE)])), init(), *next(batches()))
    fun = jaxckpt.checkpoint(loss, policy=policy)
    found = jaxckpt.residuals(fun, init(), *next(batches()))
    assert action is OFFLOAD or found.kept_bytes < plain.kept_bytes
    copies = gradient_executions(fun, init(), *next(batches()))["device_put"]  # there and back, in each layer
    assert copies >= 2 * LAYERS if action.on_host else copies == 0
    np.testing.assert_allclose(trained(fun), expected, rtol=2e-6)


def train_in_shards() -> None:
    """Trains with matmuls' results distributed over eight devices, and without; in a process that has them."""
    assert len(jax.devices()) == 8
    expected = trained(loss)
    with jax.set_mesh(jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        fun = jaxckpt.checkpoint(loss, policy=Policy([(op("dot_general"), shard(P(None, "model")))]))
        assert gradient_executions(fun, init(), *next(batches()))["sharding_constraint"] >= LAYERS
        losses = trained(fun)  # eight devices add up in another order
    np.testing.assert_allclose(losses[:3], expected[:3], rtol=2e-6)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.compile
def test_shard_on_eight_devices():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    program = "from tests.actions.test_training_steps import train_in_shards; train_in_shards()"
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
