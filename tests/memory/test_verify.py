"""verify: says yes to what agrees, and names the worst array of what does not."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import ArgumentError, NotDifferentiableError, VerificationError
from tests.helpers import kept_bytes

PARAMS = {"w": jnp.sin(jnp.arange(12.0)).reshape(3, 4), "none": None, "count": jnp.int32(3)}
X = jnp.linspace(0.0, 1.0, 6).reshape(2, 3)


def loss(params, x):
    return {"y": jnp.sin(x @ params["w"]), "count": params["count"] + 1}


def test_a_checkpointed_function_agrees():
    found = jaxckpt.verify(jaxckpt.checkpoint(loss, policy="dots"), loss, PARAMS, X)
    assert found.leaves == 4  # two outputs, two gradients
    assert found.max_rel_error <= found.rtol == 1e-5
    assert "4 arrays agree" in str(found)


def test_a_wrong_value_is_found_and_named():
    with pytest.raises(
        VerificationError, match=r"differ in 1 of 4 arrays. The worst is output\['y'\]: off by .* is allowed"
    ):
        jaxckpt.verify(lambda p, x: {**loss(p, x), "y": loss(p, x)["y"] + 0.01}, loss, PARAMS, X)


def test_a_wrong_gradient_under_right_values_is_found_and_named():
    @jax.custom_vjp
    def sine(z):
        return jnp.sin(z)

    sine.defvjp(lambda z: (jnp.sin(z), z), lambda z, g: (g * jnp.cos(z) * 1.5,))
    wrong = lambda p, x: {"y": sine(x @ p["w"]), "count": p["count"] + 1}
    with pytest.raises(VerificationError, match=r"differ in 2 of 4 arrays. The worst is gradient of args\[\d\]"):
        jaxckpt.verify(wrong, loss, PARAMS, X)


LAYERS = {
    name: {"w": jnp.cos(jnp.arange(9.0) + i).reshape(3, 3), "b": jnp.ones(3)}
    for i, name in enumerate(("first", "last"))
}


def model(layers, x, broken=None):
    for name, layer in layers.items():
        weights = wrong_by_a_hundredth(layer["w"]) if name == broken else layer["w"]
        x = jnp.tanh(x @ weights + layer["b"])
    return jnp.sum(x**2)


@jax.custom_vjp
def wrong_by_a_hundredth(w):
    """The identity; the first row's cotangent comes out by 1% too large, as it would of a recomputation that reads
    something else.
    """
    return w


wrong_by_a_hundredth.defvjp(lambda w: (w, None), lambda _, ct: (ct.at[0].multiply(1.01),))


@pytest.mark.parametrize("broken", LAYERS)
def test_the_one_gradient_that_is_wrong_is_named_and_how_far_off_it_is(broken):
    planned = jaxckpt.checkpoint(functools.partial(model, broken=broken), policy="dots")
    with pytest.raises(VerificationError) as caught:
        jaxckpt.verify(planned, model, LAYERS, X)
    assert f"differ in 1 of 6 arrays. The worst is gradient of args[0]['{broken}']['w']: off by" in str(caught.value)
    off = float(re.search(r", ([\d.e-]+) of its largest value", str(caught.value))[1])
    assert 0 < off <= 0.0101
    assert jaxckpt.verify(planned, model, LAYERS, X, rtol=0.02).worst == f"gradient of args[0]['{broken}']['w']"


def test_a_plan_that_drops_a_gradient_is_found(monkeypatch):
    graph = jaxckpt.trace(model, LAYERS, X)
    plan = jaxckpt.Plan((jaxckpt.Region(0, len(graph.ops) // 2),), graph.fingerprint)
    assert kept_bytes(plan.apply(model), LAYERS, X) < kept_bytes(model, LAYERS, X)
    assert jaxckpt.verify(plan.apply(model), model, LAYERS, X).leaves == 6
    checkpoint = jax.checkpoint
    stopped = lambda fun, **options: lambda *args: checkpoint(fun, **options)(*map(jax.lax.stop_gradient, args))
    monkeypatch.setattr(jax, "checkpoint", stopped)
    with pytest.raises(
        VerificationError, match=r"differ in [34] of 6 arrays. The worst is gradient of args\[0\]\['first'\]"
    ):
        jaxckpt.verify(plan.apply(model), model, LAYERS, X[:, :3])


def test_a_difference_within_the_tolerance_passes_and_integers_must_be_equal():
    near = lambda p, x: {**loss(p, x), "y": loss(p, x)["y"] * (1 + 1e-3)}
    assert jaxckpt.verify(near, loss, PARAMS, X, rtol=1e-2).max_rel_error > 5e-4
    other = lambda p, x: {**loss(p, x), "count": p["count"]}
    with pytest.raises(VerificationError, match="count"):
        jaxckpt.verify(other, loss, PARAMS, X, rtol=1e-2)


def test_shapes_are_filled_with_seeded_data_and_keys_are_drawn():
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (PARAMS, X))
    one, two = (jaxckpt.verify(loss, loss, *shapes) for _ in range(2))
    assert one == two
    noisy = lambda x, key: x * jax.random.normal(key, x.shape)
    assert jaxckpt.verify(jaxckpt.checkpoint(noisy), noisy, X, jax.random.key(0)).leaves == 2


def test_nothing_to_differentiate_is_an_error():
    with pytest.raises(NotDifferentiableError):
        jaxckpt.verify(lambda x: x + 1, lambda x: x + 1, jnp.arange(3))


@pytest.mark.parametrize("rtol", [-1, "small", True])
def test_a_tolerance_that_is_none(rtol):
    with pytest.raises(ArgumentError, match="rtol must be a number of at least 0, or None; got"):
        jaxckpt.verify(loss, loss, PARAMS, X, rtol=rtol)
