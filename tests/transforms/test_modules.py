"""A checkpointed module in a model: its arrays are still the model's, so that they get gradients and train."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxckpt
import jaxckpt.flax
from tests.helpers import executions

X = jnp.linspace(-1.0, 1.0, 4096 * 16).reshape(4096, 16)
KEYS = jax.random.split(jax.random.key(0), 4)


class Net(eqx.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def equinox_net(wrap):
    """Four layers, each given to `wrap`."""
    layers = [eqx.nn.MLP(16, 16, 64, 1, key=key, activation=jax.nn.gelu) for key in KEYS]
    return Net([wrap(layer) for layer in layers])


def equinox_loss(net, x):
    return jnp.mean(jax.vmap(net)(x) ** 2)


def of_arrays(net):
    """The loss of a model's arrays, and these."""
    arrays, rest = eqx.partition(net, eqx.is_array)
    return (lambda arrays, x: equinox_loss(eqx.combine(arrays, rest), x)), arrays


@pytest.mark.parametrize("policy", [None, "dots", jaxckpt.Policy({jaxckpt.op("tanh"): "save"})], ids=str)
def test_a_checkpointed_module_of_equinox_may_stand_in_its_place(policy):
    plain, wrapped = (equinox_net(wrap) for wrap in (lambda layer: layer, jaxckpt.checkpoint(policy=policy)))
    (loss, arrays), (checkpointed, inside) = of_arrays(plain), of_arrays(wrapped)
    wanted, got = (
        jax.tree.leaves(jax.grad(fun)(leaves, X)) for fun, leaves in ((loss, arrays), (checkpointed, inside))
    )
    assert len(got) == len(wanted) == 16
    for ours, theirs in zip(got, wanted):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    kept = [jaxckpt.residuals(fun, leaves, X).total_bytes for fun, leaves in ((loss, arrays), (checkpointed, inside))]
    assert kept[1] < 0.75 * kept[0]
    assert jax.tree.structure(wrapped) == jax.tree.structure(equinox_net(jaxckpt.checkpoint(policy=policy)))


def test_a_model_of_checkpointed_modules_trains_like_the_plain_one():
    def trained(wrap):
        net, optimizer = equinox_net(wrap), optax.adam(1e-2)
        state = optimizer.init(eqx.filter(net, eqx.is_array))
        for _ in range(3):
            value, gradients = eqx.filter_value_and_grad(equinox_loss)(net, X[:64])
            updates, state = optimizer.update(gradients, state)
            net = eqx.apply_updates(net, updates)
        return float(value)

    before = float(equinox_loss(equinox_net(lambda layer: layer), X[:64]))
    plain = trained(lambda layer: layer)
    assert plain < 0.9 * before
    assert trained(jaxckpt.checkpoint) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    "together",
    [
        functools.partial(jaxckpt.checkpoint_sequential, segment_size=2, checkpoint_last=True),
        lambda layers: jaxckpt.tile(eqx.nn.Sequential([eqx.nn.Lambda(each) for each in layers]), in_axes=(0,), tiles=4),
    ],
    ids=["sequential", "tile"],
)
def test_modules_that_run_together_keep_their_arrays(together):
    layers = [eqx.nn.Linear(16, 16, key=key) for key in KEYS]
    mapped = [jax.tree_util.Partial(lambda layer, x: jnp.tanh(jax.vmap(layer)(x)), layer) for layer in layers]
    made = together(mapped)
    arrays, rest = eqx.partition(made, eqx.is_array)
    assert len(jax.tree.leaves(arrays)) == 8
    got = jax.grad(lambda arrays: jnp.sum(eqx.combine(arrays, rest)(X) ** 2))(arrays)
    wanted = jax.grad(lambda layers: jnp.sum(functools.reduce(lambda x, layer: layer(x), layers, X) ** 2))(mapped)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


# ---------------------------------------------------------------------------------------------------------------- nnx


class Model(nnx.Module):
    def __init__(self, rngs):
        norm = functools.partial(nnx.BatchNorm, 64, rngs=rngs)
        block = lambda: nnx.Sequential(nnx.Linear(16, 64, rngs=rngs), norm(), nnx.gelu, nnx.Linear(64, 16, rngs=rngs))
        self.blocks, self.head = nnx.List([block() for _ in range(3)]), nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize("checkpoint", [jaxckpt.checkpoint, jaxckpt.flax.checkpoint])
def test_a_checkpointed_module_of_nnx_may_stand_in_its_place(checkpoint):
    plain, wrapped = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    for place, block in enumerate(wrapped.blocks):
        wrapped.blocks[place] = checkpoint(block)
    wrapped.head = checkpoint(wrapped.head)
    wanted, got = (jax.tree.leaves(nnx.grad(nnx_loss)(model, X)) for model in (plain, wrapped))
    assert len(got) == len(wanted) == 20
    for ours, theirs in zip(got, wanted):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(model, nnx.BatchStat)) for model in (wrapped, plain))):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        assert not np.isin(ours, (0.0, 1.0)).all()  # the statistics of the batch
    dots = [executions(nnx.grad(nnx_loss), model, X)["dot_general"] for model in (plain, wrapped)]
    assert dots[1] > dots[0]
    for model in (plain, wrapped):
        model.eval()
    np.testing.assert_allclose(wrapped(X), plain(X), rtol=1e-5, atol=1e-6)
