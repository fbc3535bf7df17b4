"""Results that depend on no argument, and arguments that are returned: arrays of the dtypes that jax.jit gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import SAVE, Policy, op
from tests.helpers import gradient_executions

W, X = jnp.eye(16) * 0.5, jnp.ones((512, 16))
CONSTANTS = {
    "bool": lambda: jnp.array(False),
    "int": lambda: jnp.array(3, jnp.int32),
    "weak": lambda: jnp.asarray(2.5),
    "half": lambda: jnp.array(2, jnp.float16),
    "complex": lambda: jnp.asarray(1j),
    "key": lambda: jax.random.key(0),
    "rows": lambda: jnp.arange(3),
    "empty": lambda: jnp.zeros((0, 2)),
    "number": lambda: 3,
    "flag": lambda: True,
    "numpy": lambda: np.float32(2),
}


def loss(w, x, scale):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2), {"scale": scale, **{name: make() for name, make in CONSTANTS.items()}}


def with_aux(fun):
    return jax.value_and_grad(fun, has_aux=True)


def planned(fun, *args):
    plan = jaxckpt.plan(fun, *args, budget="80%", step=with_aux)
    assert plan.regions
    return plan.apply(fun)


WAYS = {
    "plan": planned,
    "auto": lambda fun, *_: jaxckpt.autocheckpoint(fun, budget="80%", step=with_aux),
    "policy": lambda fun, *_: jaxckpt.checkpoint(fun, policy=Policy({op("dot_general"): SAVE})),
    "preset": lambda fun, *_: jaxckpt.checkpoint(fun, policy="dots"),
    "none": lambda fun, *_: jaxckpt.checkpoint(fun),
    "JAX's": lambda fun, *_: jaxckpt.checkpoint(fun, policy=jax.checkpoint_policies.dots_saveable),
}


def kinds(tree):
    return jax.tree.map(lambda leaf: (isinstance(leaf, jax.Array), leaf.dtype, getattr(leaf, "weak_type", False)), tree)


@pytest.mark.parametrize("way", WAYS)
def test_constants_come_back_as_the_arrays_that_jit_makes_of_them(way):
    wrapped = WAYS[way](loss, W, X, 2.0)
    expected = kinds(jax.jit(loss)(W, X, 2.0))
    for call in (wrapped, jax.jit(wrapped), jax.jit(with_aux(wrapped)), with_aux(wrapped)):
        out = call(W, X, 2.0)
        value, aux = out if not isinstance(out[0], tuple) else out[0]
        assert kinds((value, aux)) == expected
    assert gradient_executions(lambda w: wrapped(w, X, 2.0)[0], W)["tanh"] > 6  # some run again


@pytest.mark.parametrize("way", WAYS)
def test_constants_come_back_as_arrays_beside_leaves_that_are_none(way):
    def named(w, x, name):
        value, aux = loss(w, x, 1.0)
        return value, {name: aux["bool"], "number": aux["number"]}

    wrapped = WAYS[way](named, W, X, "first")
    aux = wrapped(W, X, "first")[1]
    assert isinstance(aux["first"], jax.Array) and aux["first"].dtype == jnp.bool
    assert aux["number"] == 3 and "bool" not in aux


@pytest.mark.parametrize("way", WAYS)
def test_state_that_becomes_a_constant_does_not_change_the_next_steps_program(way):
    traces = []

    def stateful(w, first, x):
        value = loss(w, x, 1.0)[0] + jnp.where(first, 1.0, 2.0)
        return value, jnp.array(False)

    wrapped = WAYS[way](stateful, W, jnp.array(True), X)

    @jax.jit
    def step(w, first, x):
        traces.append(1)
        (value, first), gradient = with_aux(wrapped)(w, first, x)
        return w - gradient, first, value

    w, first = W, jnp.array(True)
    for _ in range(3):
        w, first, _ = step(w, first, X)
    (eager, first), _ = with_aux(wrapped)(w, first, X)
    (eager, first), _ = with_aux(wrapped)(w, first, X)  # the state of the step before
    assert isinstance(first, jax.Array) and len(traces) == 1
    np.testing.assert_allclose(eager, with_aux(stateful)(w, first, X)[0][0], rtol=1e-5)
