"""A kept result spares its operation also where the operation's own derivative reads it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxckpt
from jaxckpt import OFFLOAD, SAVE, Policy, op, tag
from tests.helpers import assert_trees_close, gradient_executions, kept_shapes

X, W = jnp.linspace(0.1, 0.6, 64).reshape(8, 8), jnp.eye(8) + 0.01

OPERATIONS = {
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "logistic": jax.nn.sigmoid,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "rsqrt": lax.rsqrt,
    "max": lambda x: jnp.maximum(x, 0.3),
    "reduce_max": lambda x: jnp.max(x, axis=-1, keepdims=True) * x,
    "erf_inv": lambda x: lax.erf_inv(x * 0.1),
    "cbrt": jnp.cbrt,
}


def asks_for_its_result():
    """Whether JAX's derivative of a maximum of two compares them with the result: that of jax 0.12 does not."""
    eqns = jax.make_jaxpr(lambda x, y: jax.jvp(lax.max, (x, y), (x, y)))(1.0, 2.0).jaxpr.eqns
    results = [var for eqn in eqns if eqn.primitive.name == "max" for var in eqn.outvars]
    return any(
        eqn.primitive.name == "eq" and any(var is result for var in eqn.invars for result in results) for eqn in eqns
    )


COMPARED = ("max", "reduce_max") if asks_for_its_result() else ("reduce_max",)
"""Their derivative looks for the result among the operands."""

SETTINGS = {
    "alone": lambda layer: layer,
    "vmap": lambda layer: lambda x, w: jax.vmap(layer, (0, None))(x[:, None], w)[:, 0],
    "jit": lambda layer: jax.jit(lambda x, w: jax.jit(layer)(x, w)),
    "scan": lambda layer: lambda x, w: lax.scan(lambda c, _: (layer(c, w), None), x, length=3)[0],
    "cond": lambda layer: lambda x, w: lax.cond(x[0, 0] > 0, layer, lambda x, w: x @ w, x, w),
}


def by_primitive(name):
    return lambda primitive, *_, **__: primitive.name == name


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kept_result_spares_as_much_as_a_predicate_on_the_primitive(name, setting):
    whole = SETTINGS[setting](lambda x, w: OPERATIONS[name](x @ w) @ w)
    ours = jaxckpt.checkpoint(whole, policy=Policy([(op(name), SAVE)]))
    theirs = jax.checkpoint(whole, policy=by_primitive(name))
    loss = lambda fun: lambda x, w: jnp.sum(fun(x, w))
    counts, expected = (gradient_executions(loss(fun), X, W) for fun in (ours, theirs))
    assert counts["dot_general"] <= expected["dot_general"]
    if name in COMPARED:  # it runs again with its operand, which JAX's predicate has computed again, too
        nothing = jax.checkpoint(whole)
        assert counts[name] == gradient_executions(loss(nothing), X, W)[name] > expected[name]
    else:
        assert counts[name] <= expected[name]
    assert kept_shapes(loss(ours), X, W) == kept_shapes(loss(theirs), X, W)
    assert_trees_close(jax.grad(loss(ours))(X, W), jax.grad(loss(whole))(X, W), rtol=1e-4)


@pytest.mark.parametrize("name", ["tanh", "exp", "logistic", "sqrt"])
def test_neither_the_operation_nor_the_matmul_before_it_runs_again(name):
    layer = jaxckpt.checkpoint(lambda x, w: OPERATIONS[name](x @ w) @ w, policy=Policy([(op(name), SAVE)]))
    counts = gradient_executions(lambda x, w: jnp.sum(layer(x, w)), X, W)
    assert (counts[name], counts["dot_general"]) == (1, 4)
    nothing = jaxckpt.checkpoint(lambda x, w: OPERATIONS[name](x @ w) @ w, policy=Policy([(op("sinh"), SAVE)]))
    counts = gradient_executions(lambda x, w: jnp.sum(nothing(x, w)), X, W)
    assert (counts[name], counts["dot_general"]) == (2, 5)


@pytest.mark.parametrize("name", ["cumprod", "cummax", "cumlogsumexp"])
def test_a_kept_cumulative_result_is_read_where_it_is_used(name):
    # JAX differentiates these as scans over partial results, so their own derivative never reads the result.
    fun = {"cumprod": lax.cumprod, "cummax": lax.cummax, "cumlogsumexp": lax.cumlogsumexp}[name]
    layer = lambda x, w: jnp.sin(fun(x @ w, axis=1) @ w)
    kept = jaxckpt.checkpoint(layer, policy=Policy([(op(name), SAVE)]))
    nothing = jaxckpt.checkpoint(layer)
    loss = lambda fun: lambda x, w: jnp.sum(fun(x, w))
    assert kept_shapes(loss(kept), X, W) == {(8, 8): 1}
    counts, all_again = (gradient_executions(loss(f), X, W)["mul"] for f in (kept, nothing))
    assert counts <= all_again
    assert_trees_close(jax.grad(loss(kept))(X, W), jax.grad(loss(layer))(X, W), rtol=1e-4)


@pytest.mark.parametrize("name", ["tanh", "exp"])
def test_the_flag_for_new_checkpoints_changes_nothing(name):
    old = jax.config.jax_remat3  # type: ignore[attr-defined]
    jax.config.update("jax_remat3", True)
    try:
        test_neither_the_operation_nor_the_matmul_before_it_runs_again(name)
    finally:
        jax.config.update("jax_remat3", old)


def custom_jvp_exp():
    @jax.custom_jvp
    def own(x):
        return jnp.exp(x)

    @own.defjvp
    def rule(primals, tangents):
        result = own(*primals)
        return result, result * tangents[0]

    return own


def custom_vjp_exp():
    @jax.custom_vjp
    def own(x):
        return jnp.exp(x)

    def forward(x):
        result = jnp.exp(x)
        return result, result

    own.defvjp(forward, lambda result, ct: (ct * result,))
    return own


@pytest.mark.parametrize(
    ("own", "name"), [(custom_jvp_exp(), "custom_jvp_call"), (custom_vjp_exp(), "custom_vjp_call")]
)
def test_a_rule_of_the_users_that_reads_its_result_reads_the_kept_one(own, name):
    layer = jaxckpt.checkpoint(lambda x, w: own(x @ w) @ w, policy=Policy([(op(name), SAVE)]))
    counts = gradient_executions(lambda x, w: jnp.sum(layer(x, w)), X, W)
    assert (counts["exp"], counts["dot_general"]) == (1, 4)
    assert_trees_close(
        jax.grad(lambda x: jnp.sum(layer(x, W)))(X), jax.grad(lambda x: jnp.sum(own(x @ W) @ W))(X), rtol=1e-5
    )


def test_a_kept_complex_result_spares_its_operation():
    layer = lambda x, w: jnp.abs(jnp.exp(1j * (x @ w)) @ w.astype(jnp.complex64))
    kept = jaxckpt.checkpoint(layer, policy=Policy([(op("exp"), SAVE)]))
    counts = gradient_executions(lambda x, w: jnp.sum(kept(x, w)), X, W)
    assert counts["exp"] == 1
    assert_trees_close(
        jax.grad(lambda x: jnp.sum(kept(x, W)))(X), jax.grad(lambda x: jnp.sum(layer(x, W)))(X), rtol=1e-4
    )


def test_higher_orders_and_forward_mode_go_through_redirected_reads():
    layer = lambda x: jnp.sum(jnp.tanh(x @ W) ** 3)
    kept = jaxckpt.checkpoint(layer, policy=Policy([(op("tanh"), SAVE)]))
    assert_trees_close(jax.hessian(kept)(X[:2, :8]), jax.hessian(layer)(X[:2, :8]), rtol=1e-4)
    assert_trees_close(jax.jvp(kept, (X,), (W,)), jax.jvp(layer, (X,), (W,)), rtol=1e-5)


def test_what_does_not_depend_on_what_is_differentiated_has_no_tangent():
    def layer(x, mask):
        return jnp.tanh(x @ W), jnp.tanh(mask)

    kept = jaxckpt.checkpoint(layer, policy=Policy([(op("tanh"), SAVE)]))

    def loss(x, mask):
        y, limit = kept(x, mask)
        # A while loop has no reverse mode: it may not see a tangent.
        steps = lax.while_loop(lambda s: s[0] < limit[0, 0], lambda s: (s[0] + 0.1, s[1] * 1.5), (0.0, limit[0, 1]))
        return jnp.sum(y) * steps[1]

    assert np.isfinite(jax.grad(loss)(X, X)).all()


def test_a_tag_inside_nested_checkpoints_is_kept_by_the_one_that_names_it():
    inner = jaxckpt.checkpoint(lambda x, w: tag(jnp.tanh(x @ w), "a") @ w, policy=Policy({"a": SAVE}))
    outer = jaxckpt.checkpoint(lambda x, w: jnp.sin(inner(jnp.cos(x), w)), policy=Policy([(op("cos"), SAVE)]))
    both = jaxckpt.checkpoint(lambda x, w: jnp.sin(inner(jnp.cos(x), w)), policy=Policy([(op("tanh"), SAVE)]))
    loss = lambda fun: lambda x, w: jnp.sum(fun(x, w))
    plain = lambda x, w: jnp.sin(jnp.tanh(jnp.cos(x) @ w) @ w)
    for fun in (outer, both):
        assert_trees_close(jax.grad(loss(fun))(X, W), jax.grad(loss(plain))(X, W), rtol=1e-4)
        assert gradient_executions(loss(fun), X, W)["dot_general"] <= 6
    assert gradient_executions(loss(both), X, W)["tanh"] == 1  # the outer one's decision reaches into the inner one


def test_the_planner_knows_that_a_kept_result_spares_its_operation():
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    args = [jnp.zeros((64, 64))] * 8, jnp.ones((4096, 64))
    found = jaxckpt.plan(loss, *args, budget="75%", target="cpu")
    plain, planned = (gradient_executions(fun, *args) for fun in (loss, found.apply(loss)))
    assert found.measured_bytes <= found.budget < found.unplanned_bytes
    assert planned["tanh"] - plain["tanh"] < 8  # some of the results are kept, and what is kept is not computed again
    assert 0 < planned["dot_general"] - plain["dot_general"] <= planned["tanh"] - plain["tanh"]


def thresholded(w, x, mark=tag):
    """What XLA computes again of such a softmax differs in the last digit: another fusion."""
    y = jax.nn.softmax(x @ w, -1) * jnp.sin(3.3 * x) + jnp.tanh(x) / 3
    return y * mark(jnp.min(y, -1), "least")[:, None]


@pytest.mark.compile
@pytest.mark.parametrize("action", [SAVE, OFFLOAD, "plan"], ids=str)
def test_a_kept_extreme_is_not_looked_for_among_numbers_that_are_computed_again(action):
    """None of them need be equal to it: the gradient would be lost, or divided by zero of them."""
    w, x = jax.random.normal(jax.random.key(0), (32, 32)) / 5, jax.random.normal(jax.random.key(1), (256, 32))

    def loss(ws, x, layer=thresholded):
        for w in ws:
            x = x + layer(w, x)
        return jnp.mean(x**2)

    args = [w] * 6, x
    if action == "plan":
        plain = lambda ws, x: loss(ws, x, lambda w, x: thresholded(w, x, lambda value, name: value))
        kept = jaxckpt.plan(plain, *args, budget="60%", target="cpu").apply(plain)
    else:
        layer = jaxckpt.checkpoint(thresholded, policy=Policy({"least": action}))
        kept = lambda ws, x: loss(ws, x, layer)
    assert gradient_executions(kept, *args)["reduce_min"] == 12, "each runs again with its operand"
    gradient = lambda fun: jax.jit(jax.grad(fun), compiler_options=jaxckpt.compiler_options())(*args)
    assert_trees_close(gradient(kept), gradient(loss), rtol=1e-3, atol=1e-6)
