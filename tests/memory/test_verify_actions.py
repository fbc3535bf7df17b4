"""What each action that changes gradients does to them, on the user's data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import Policy, VerificationError, compress, tag

W, X = jax.random.normal(jax.random.key(0), (32, 32)) / 6, jax.random.normal(jax.random.key(1), (16, 32))


def loss(w, x):
    for name in ("first", "second"):
        x = jnp.tanh(tag(x @ w, name))
    return jnp.sum(x * x)


def test_each_lossy_action_is_told_apart():
    policy = Policy({"first": compress("int8"), "second": compress("int4")})
    found = jaxckpt.verify(jaxckpt.checkpoint(loss, policy=policy), loss, W, X)
    assert [each.action for each in found.per_action] == [compress("int8"), compress("int4")]
    fine, coarse = found.per_action
    assert 0 < fine.total_rel_error < coarse.total_rel_error < 0.5
    assert 0.9 < coarse.total_cosine < fine.total_cosine < 1
    assert fine.worst.startswith("gradient of args") and "int8" in str(found)
    assert found.max_rel_error <= found.rtol  # the rest is exact


def test_an_exact_function_has_no_such_errors():
    assert jaxckpt.verify(jaxckpt.checkpoint(loss, policy="dots"), loss, W, X).per_action == ()


def test_an_rtol_holds_for_lossy_actions_too():
    coarse = jaxckpt.checkpoint(loss, policy=Policy({"first": compress("int4")}))
    with pytest.raises(VerificationError, match="int4"):
        jaxckpt.verify(coarse, loss, W, X, rtol=1e-3)


def test_a_wrong_function_is_still_found_where_actions_are_lossy():
    lossy = jaxckpt.checkpoint(lambda w, x: 1.01 * loss(w, x), policy=Policy({"first": compress("int8")}))
    with pytest.raises(VerificationError, match="differ"):
        jaxckpt.verify(lossy, loss, W, X)
