"""What is called wrongly is an error of the tree, which names the argument, the rule and what came."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import ArgumentError, InfeasibleBudgetError, Policy

WS, X = [jnp.eye(16) * 0.5] * 4, jnp.ones((64, 16))


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


PLAN = {"budget": "1GiB", "target": "cpu", "verify": False}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jaxckpt.plan(loss, WS, X, **PLAN, step=lambda fun: 3),
            "step must be a function that makes a function",
        ),
        (lambda: jaxckpt.plan(loss, **PLAN), "args must be the arguments of the step"),
        (lambda: jaxckpt.plan(loss, WS, X, **PLAN, actions="save"), "actions must be a sequence of actions"),
        (lambda: jaxckpt.plan(loss, WS, X, **PLAN).apply(3), "fun must be a function, the one that the plan"),
        (lambda: jaxckpt.frontier(loss, WS, X, budgets=(), target="cpu"), "budgets must be at least one budget"),
        (lambda: jaxckpt.checkpoint_sequential(jnp.sin), "layers must be a sequence of functions"),
        (lambda: jaxckpt.verify(loss, WS, X), "reference must be a function"),
        (lambda: jaxckpt.count_flops(3, X), "fun must be a function; got 3"),
        (lambda: jaxckpt.checkpoint(loss, static_argnames="mode"), "static_argnames must be names of arguments of fun"),
        (lambda: Policy({}, strict="no"), "strict must be a bool; got 'no'"),
        (
            lambda: jax.grad(lambda x: jaxckpt.measure(loss, WS, x, target="cpu").peak_bytes * 1.0)(X),
            r"float32\[64,16\]",
        ),
    ],
)
def test_an_argument_that_breaks_a_rule_is_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_a_prediction_is_called_one():
    with pytest.raises(InfeasibleBudgetError, match="The least budget predicted to fit is"):
        jaxckpt.plan(loss, WS, X, budget=X.nbytes * 2, target="cpu", verify=False)


@pytest.mark.parametrize("policy", ["dots", Policy([(jaxckpt.op("tanh"), "save")])], ids=str)
def test_a_program_that_depends_on_a_value_is_told_of_static_arguments(policy):
    chosen = jaxckpt.checkpoint(lambda x, train: jnp.sin(x) if train else x, policy=policy)
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        jax.grad(chosen)(1.0, True)
    assert any("static_argnums or static_argnames" in note for note in caught.value.__notes__)
