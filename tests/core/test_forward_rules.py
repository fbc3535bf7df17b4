"""Custom rules opened: what is dear to compute in the rule of a `jax.custom_jvp` is a value that policies and plans can
keep.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import OFFLOAD, SAVE, Policy, compress
from jaxckpt.core.graph import trace
from tests.helpers import assert_trees_close, executions

WIDTH = 16
DOTS = jax.checkpoint_policies.dots_saveable


def layers(x, w):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


@jax.custom_jvp
def own(x, w):
    return layers(x, w)


@own.defjvp
def _own(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    h = jnp.tanh(x @ w)
    y = jnp.tanh(jaxckpt.tag(h @ w, "second"))
    return y, (1 - y * y) * (((1 - h * h) * (dx @ w + x @ dw)) @ w + h @ dw)


@jax.custom_jvp
def differentiated(x, w):
    return layers(x, w)


differentiated.defjvp(lambda primals, tangents: jax.jvp(layers, primals, tangents))


@jax.custom_jvp
@jax.jit
def symbolic(x, w):
    return layers(x, w)


def _symbolic(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    still = [isinstance(each, jax.custom_derivatives.SymbolicZero) for each in tangents]
    h = jnp.tanh(x @ w)
    y = jnp.tanh(h @ w)
    dh = (0.0 if still[0] else dx @ w) + (0.0 if still[1] else x @ dw)
    return y, (1 - y * y) * (((1 - h * h) * dh) @ w + (0.0 if still[1] else h @ dw))


symbolic.defjvp(_symbolic, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def indexed(x, w, power, places):
    return layers(x, w) * power, jnp.argmax(x, -1) + places


@indexed.defjvp
def _indexed(power, primals, tangents):
    (x, w, places), (dx, dw, _) = primals, tangents
    y, dy = jax.jvp(layers, (x, w), (dx, dw))
    where = jnp.argmax(x, -1) + places
    return (y * power, where), (dy * power, np.zeros(where.shape, jax.dtypes.float0))


def with_integers(x, w):
    y, places = indexed(x, w, 2, jnp.arange(x.shape[0]))
    return y * jnp.cos(places)[:, None]


@jax.custom_jvp
def product(x, w):
    return x @ w


product.defjvp(lambda primals, tangents: (primals[0] @ primals[1], tangents[0] @ primals[1] + primals[0] @ tangents[1]))


@jax.custom_vjp
def reverse(x, w):
    return x @ w


reverse.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, d: (d @ kept[1].T, kept[0].T @ d))

RULES = {
    "its own": own,
    "jax.jvp": differentiated,
    "symbolic zeros": symbolic,
    "integers, a static argument": with_integers,
    "its result is a matmul": product,
    "its result is a matmul, reverse": reverse,
}


def block(rule, w, x):
    return x + jnp.sin(rule(jnp.sin(x), w))


PLACES = {
    "unrolled": lambda f, w, x: f(w, f(w, x)),
    "scan": lambda f, w, x: lax.scan(lambda h, _: (f(w, h), None), x, None, length=3)[0],
    "cond": lambda f, w, x: lax.cond(x[0, 0] > -10, lambda x: f(w, x), lambda x: f(w, 2 * x), x),
    "jit": lambda f, w, x: jax.jit(f)(w, x),
    "vmap": lambda f, w, x: jax.vmap(lambda x: f(w, x))(jnp.stack([x, 2 * x])),
    "shard_map": lambda f, w, x: jax.shard_map(
        lambda w, x: f(lax.pcast(w, ("d",), to="varying"), x),
        mesh=jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(P(), P("d")),
        out_specs=P("d"),
    )(w, x),
}


def function(rule, place):
    return functools.partial(PLACES[place], functools.partial(block, rule))


def arguments():
    keys = jax.random.split(jax.random.key(3))
    return jax.random.normal(keys[0], (WIDTH, WIDTH)) / 4, jax.random.normal(keys[1], (8, WIDTH))


def total(fun):
    return lambda w, x: jnp.sum(fun(w, x) ** 2)


def matmuls(fun, *args):
    return executions(jax.grad(total(fun), (0, 1)), *args)["dot_general"]


def shapes(fun, *args):
    return sorted(each.shape for each in jaxckpt.residuals(fun, *args).residuals if not each.argument)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rule", RULES)
def test_matmuls_in_a_rule_are_kept_as_jaxs_own_policy_keeps_them(rule, place):
    if place == "shard_map" and "integers" in rule:
        pytest.skip("JAX refuses its zeros of integers there, without a checkpoint too")
    (w, x), fun = arguments(), function(RULES[rule], place)
    mine, theirs = jaxckpt.checkpoint(fun, policy="dots"), jax.checkpoint(fun, policy=DOTS)
    bare, again = matmuls(fun, w, x), matmuls(jax.checkpoint(fun), w, x)
    assert matmuls(mine, w, x) == matmuls(theirs, w, x) == bare < again
    if place != "cond":
        assert shapes(mine, w, x) == shapes(theirs, w, x) != []
    assert_trees_close(jax.grad(total(mine), (0, 1))(w, x), jax.grad(total(fun), (0, 1))(w, x), rtol=1e-4, atol=1e-5)


DERIVATIVES = {
    "jvp": lambda f, w, x: jax.jvp(f, (w, x), (jnp.cos(w), jnp.sin(x))),
    "weights alone": lambda f, w, x: jax.grad(total(f))(w, x),
    "reverse over reverse": lambda f, w, x: jax.grad(lambda w: jnp.sum(jax.grad(total(f), 1)(w, x) ** 2))(w),
    "forward over reverse": lambda f, w, x: jax.jvp(jax.grad(total(f)), (w, x), (jnp.cos(w), jnp.sin(x)))[1],
    "vmap of the gradient": lambda f, w, x: jax.vmap(jax.grad(total(f)), (None, 0))(w, jnp.stack([x, 2 * x])),
    "linearize": lambda f, w, x: jax.linearize(f, w, x)[1](jnp.cos(w), jnp.sin(x)),
}
KEPT = {
    "dots": ("dot_general", SAVE),
    "dots on the host": ("dot_general", OFFLOAD),
    "dots in fewer bits": ("dot_general", compress("bfloat16")),
    "the result": ("custom_jvp_call", SAVE),
}
"""Operation that makes what is kept, and how it is kept."""


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("rule", ["its own", "symbolic zeros"])
def test_derivatives_are_those_without_a_checkpoint(rule, derivative, kept):
    (w, x), fun = arguments(), function(RULES[rule], "unrolled")
    name, action = KEPT[kept]
    wrapped = jaxckpt.checkpoint(fun, policy=Policy({jaxckpt.op(name): action}))
    found, expected = (jax.jit(functools.partial(DERIVATIVES[derivative], f))(w, x) for f in (wrapped, fun))
    error = 0.02 if action == compress("bfloat16") else 1e-5
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert jnp.linalg.norm(one - other) <= error * jnp.linalg.norm(other)


@pytest.mark.parametrize("action", [OFFLOAD, compress("bfloat16"), compress("bfloat16") | OFFLOAD], ids=repr)
@pytest.mark.parametrize("place", ["unrolled", "scan"])
def test_matmuls_in_a_rule_are_kept_in_any_form(place, action):
    (w, x), fun = arguments(), function(own, place)
    wrapped = jaxckpt.checkpoint(fun, policy=Policy({jaxckpt.op("dot_general"): action}))
    assert matmuls(wrapped, w, x) == matmuls(fun, w, x)


def test_a_tag_in_a_rule_is_kept():
    (w, x), fun = arguments(), functools.partial(block, own)
    wrapped = jaxckpt.checkpoint(fun, policy=Policy({"second": SAVE}))
    assert [each.name for each in jaxckpt.residuals(wrapped, w, x).residuals if not each.argument] == ["second"]
    assert matmuls(fun, w, x) < matmuls(wrapped, w, x) < matmuls(jax.checkpoint(fun), w, x)


def test_a_tag_that_the_rule_does_not_give_is_an_error():
    @jax.custom_jvp
    def hidden(x, w):
        return jnp.tanh(jaxckpt.tag(x @ w, "hidden"))

    hidden.defjvp(lambda primals, tangents: jax.jvp(lambda x, w: jnp.tanh(x @ w), primals, tangents))
    w, x = arguments()
    with pytest.raises(jaxckpt.UnmatchedTagError, match="'hidden', which is inside a function with a custom"):
        jaxckpt.checkpoint(hidden, policy=Policy({"hidden": SAVE}))(x, w)


@jax.custom_jvp
def scaled(x, w):
    return jnp.sin(x @ w)


def _scaled(primals, tangents):
    """Another derivative where one operand alone has a tangent; what it runs forward is another thing for `w` alone."""
    (x, w), (dx, dw) = primals, tangents
    still = [isinstance(each, jax.custom_derivatives.SymbolicZero) for each in tangents]
    if still[0]:
        h = (2 * x) @ w / 2
        return jnp.sin(h), 5 * jnp.cos(h) * (x @ dw)
    h = x @ w
    if still[1]:
        return jnp.sin(h), 2 * jnp.cos(h) * (dx @ w)
    return jnp.sin(h), jnp.cos(h) * (dx @ w + x @ dw)


scaled.defjvp(_scaled, symbolic_zeros=True)

MOVING = {
    "both": lambda f, w, x: f(jnp.sin(x), w),
    "a constant": lambda f, w, x: f(jnp.sin(x), jnp.eye(WIDTH) / 2) + jnp.sum(w),
    "stop_gradient": lambda f, w, x: f(jnp.sin(x), lax.stop_gradient(w)),
    "the weights": lambda f, w, x: f(lax.stop_gradient(x), jnp.sin(w)),
    "the weights of a loop": lambda f, w, x: lax.scan(lambda h, w: (h + f(x, w), None), x, jnp.stack([w, w]))[0],
}


@pytest.mark.parametrize("action", [SAVE, OFFLOAD], ids=repr)
@pytest.mark.parametrize("argument", [0, 1, (0, 1)], ids=str)
@pytest.mark.parametrize("moving", MOVING)
def test_with_symbolic_zeros_the_derivative_is_that_of_what_is_differentiated(moving, argument, action):
    (w, x), fun = arguments(), functools.partial(MOVING[moving], scaled)
    wrapped = jaxckpt.checkpoint(fun, policy=Policy({jaxckpt.op("dot_general"): action}))
    gradients = [jax.jit(jax.grad(total(each), argument))(w, x) for each in (wrapped, fun)]
    assert_trees_close(*gradients, rtol=1e-5, atol=1e-6)
    tangents = [jax.jvp(lambda x, f=f: f(w, x), (x,), (jnp.cos(x),))[1] for f in (wrapped, fun)]
    assert_trees_close(*tangents, rtol=1e-5, atol=1e-6)
    if moving not in ("the weights", "the weights of a loop"):
        bare, again = matmuls(fun, w, x), matmuls(jax.checkpoint(fun), w, x)
        assert matmuls(wrapped, w, x) == bare < again


def test_a_rule_that_refuses_tangents_of_an_operand_is_opened_for_those_of_the_other():
    @jax.custom_jvp
    def refusing(x, w):
        return jnp.tanh(x @ w)

    def rule(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        if not isinstance(dw, jax.custom_derivatives.SymbolicZero):
            raise NotImplementedError("the weights are fixed")
        y = jnp.tanh(x @ w)
        return y, (1 - y * y) * (dx @ w)

    refusing.defjvp(rule, symbolic_zeros=True)
    w, x = arguments()
    fun = lambda x: jnp.sum(refusing(jnp.sin(x), w))
    wrapped = jaxckpt.checkpoint(fun, policy="dots")
    assert_trees_close(jax.grad(wrapped)(x), jax.grad(fun)(x))
    assert executions(jax.grad(wrapped), x) == executions(jax.grad(jax.checkpoint(fun, policy=DOTS)), x)
    with pytest.raises(NotImplementedError, match="the weights are fixed"):
        jax.grad(lambda w: jnp.sum(jaxckpt.checkpoint(refusing, policy="dots")(x, w)))(w)


def test_activations_are_not_opened():
    """Their rules run nothing dear: what they keep is computed again from their operands."""
    activations = lambda x: jax.nn.silu(jax.nn.relu(x)) + jax.nn.gelu(x)
    graph = trace(activations, jnp.ones(4))
    calls = [op for op in graph.walk() if op.primitive == "custom_jvp_call"]
    assert calls and all(len(op.outputs) == 1 for op in calls)


@pytest.mark.compile
def test_a_plan_keeps_matmuls_of_a_rule_rather_than_run_them_again():
    """A layer's input costs its two matmuls again, and the first matmul alone costs none."""

    def loss(ws, x, wrap=lambda f: f):
        for w in ws:
            x = wrap(functools.partial(block, own))(w, x)
        return jnp.sum(x**2)

    w, _ = arguments()
    ws, x = [w, -w, w / 2, -w / 2], jnp.ones((2048, WIDTH)) / 4
    wrap = functools.partial(jax.checkpoint, policy=DOTS)
    programs = [jax.value_and_grad(functools.partial(loss, wrap=each)) for each in (lambda f: f, wrap)]
    plain, peak = (jaxckpt.measure(each, ws, x, target="cpu").peak_bytes for each in programs)
    plan = jaxckpt.plan(loss, ws, x, budget=peak, target="cpu")
    planned = jax.value_and_grad(plan.apply(loss))
    assert plan.measured_bytes <= peak < plain
    assert executions(planned, ws, x)["dot_general"] == executions(programs[0], ws, x)["dot_general"]
    assert_trees_close(jax.jit(planned)(ws, x), jax.jit(programs[0])(ws, x), rtol=1e-3, atol=1e-3)
