"""verify: says yes to what agrees, and names the worst array of what does not."""

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import ArgumentError, NotDifferentiableError, VerificationError

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
