"""The transformer whose attention has a custom rule, and how often a plan runs that attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from benchmarks import attention
from benchmarks.models import flash
from tests.helpers import assert_trees_close

SMALL = functools.partial(flash.transformer, batch=1, tokens=2 * flash.BLOCK, layers=3, width=64, heads=2)


def plain(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize("way", ["whole", "blocks", "pallas"])
def test_each_way_is_attention(way):
    qkv = jax.random.normal(jax.random.key(0), (3, 2, 2 * flash.BLOCK, 2, 8))
    flashed = flash.attention(way, interpret=True)
    actual, expected = (
        jax.jit(jax.value_and_grad(lambda qkv, f=f: jnp.sum(jnp.sin(f(*qkv)))))(qkv) for f in (flashed, plain)
    )
    assert_trees_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_around_each_block_runs_attention_again():
    """Else the counts below would be equal whatever a plan did."""
    kernels = lambda *transform: attention.kernel_calls(
        *(lambda loss, args: (jax.value_and_grad(loss), args))(*SMALL(*transform, way="pallas", interpret=True)), "cpu"
    )
    assert (kernels(), kernels(jax.checkpoint)) == (3, 6)
    runs = lambda loss, args: attention.attention_runs(loss, args, "whole", "cpu")["matmuls"]
    assert runs(*SMALL(way="whole")) == 3 * (2 + 5)
    assert runs(*SMALL(jax.checkpoint, way="whole")) == 3 * (2 + 2 + 5)


@pytest.mark.once
@pytest.mark.parametrize("way", ["whole", "pallas"])
def test_a_plan_runs_no_attention_again(way):
    loss, args = SMALL(way=way, interpret=True)
    budget = jaxckpt.measure(jax.value_and_grad(loss), *args, target="cpu").peak_bytes * 7 // 10
    plan = jaxckpt.plan(loss, *args, budget=budget, target="cpu")
    assert plan.measured_bytes <= budget
    runs = lambda fun: attention.attention_runs(fun, args, way, "cpu")
    assert runs(plan.apply(loss)) == runs(loss)
