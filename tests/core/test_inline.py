"""Calls that no policy and no plan cuts stay calls, and those that are alike stay one program."""

from __future__ import annotations

import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.ode import odeint

import jaxckpt
from jaxckpt import SAVE, Plan, Policy, Region, op, tag
from jaxckpt.core.graph import trace, trace_with_calls
from jaxckpt.core.inline import Calls
from tests.core import test_emit as programs
from tests.helpers import assert_trees_close, executions, gradient_executions, kept_shapes, time_ratio

X, W = jnp.linspace(0.1, 0.6, 64).reshape(8, 8), jnp.eye(8) + 0.01
POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    Policy([(op("sinh"), SAVE)]): None,
}


@jax.jit
def block(x):
    for _ in range(20):
        x = jnp.sin(x) + 1.0
    return x @ x


def thrice(x):
    return block(block(block(x)))


def four(wrap):
    def loss(x):
        for _ in range(4):
            x = wrap(thrice)(x)
        return jnp.sum(x)

    return loss


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_jitted_function_that_is_called_often_is_lowered_as_often_as_by_jax(policy):
    ours, theirs = (
        four(lambda f: jaxckpt.checkpoint(f, policy=policy)),
        four(lambda f: jax.checkpoint(f, policy=POLICIES[policy])),
    )
    for make in (lambda f: f, jax.grad):
        text, expected = (jax.jit(make(f)).lower(X).as_text() for f in (ours, theirs))
        assert text.count("func.func") == expected.count("func.func")
        assert len(text) <= 1.02 * len(expected)
    assert_trees_close(jax.grad(ours)(X), jax.grad(four(lambda f: f))(X), rtol=1e-4)


@pytest.mark.parametrize("policy", ["dots", Policy([(op("sin"), SAVE)]), Policy([(op("sinh"), SAVE)])], ids=str)
def test_a_jitted_function_under_a_policy_runs_op_by_op_in_the_time_of_jaxs_checkpoint(policy):
    @jax.jit
    def long(x):
        for _ in range(200):
            x = jnp.sin(x) + 1.0
        return x

    ours, theirs = jaxckpt.checkpoint(long, policy=policy), jax.checkpoint(long)
    ratio, ratios = time_ratio(lambda: [ours(X) for _ in range(300)], lambda: [theirs(X) for _ in range(300)], turns=9)
    assert ratio <= 2.0, ratios  # written out it is ten times and more


def test_values_in_calls_are_decided_on_where_they_are_computed():
    inner = jax.jit(lambda x: jnp.tanh(tag(x @ x, "product")) @ x)
    layer = lambda x: jnp.sin(jax.jit(inner)(x))
    for rule in ("product", op("tanh")):
        wrapped = jaxckpt.checkpoint(layer, policy=Policy([(rule, SAVE)]))
        assert kept_shapes(lambda x: jnp.sum(wrapped(x)), X) == {(8, 8): 1}
    outside = jaxckpt.checkpoint(
        lambda x: jnp.sin(tag(jax.jit(lambda y: y @ y)(x), "made inside")), policy=Policy({"made*": SAVE})
    )
    assert kept_shapes(lambda x: jnp.sum(outside(x)), X) == {(8, 8): 1}


def test_two_calls_of_one_function_may_keep_different_values():
    layer = lambda x: jax.jit(jnp.sinh)(tag(jax.jit(jnp.sinh)(jnp.cos(x)), "first"))
    wrapped = jaxckpt.checkpoint(layer, policy=Policy({"first": SAVE}))
    assert kept_shapes(lambda x: jnp.sum(wrapped(x)), X) == {(8, 8): 1}
    assert_trees_close(jax.grad(lambda x: jnp.sum(wrapped(x)))(X), jax.grad(lambda x: jnp.sum(layer(x)))(X))


@pytest.mark.parametrize("picked", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_calls_of_one_function_keep_the_carries_of_their_loops_that_are_picked(picked):
    """A loop's carry is no result of an operation; it is a value of the call all the same."""

    @jax.jit
    def block(x):
        body = lambda c, _: (jnp.sin(jnp.sin(tag(c, "carry"))), None)
        return tag(jnp.sin(jax.lax.scan(body, x, None, length=3)[0]), "y")

    def model(x):
        return jnp.sum(block(block(block(x))))

    x = jnp.ones(400)
    graph = trace_with_calls(model, (x,), {})
    carries = [value.index for value in graph.values if "carry" in value.tags]
    assert len(carries) == 3
    wanted = {carries[place] for place in picked}
    policy = Policy([(jaxckpt.where(lambda value: value.index in wanted), SAVE), ("y", SAVE)])
    kept = jaxckpt.residuals(jaxckpt.checkpoint(model, policy=policy), x).residuals
    assert sum(r.shape == (3, 400) for r in kept) == len(picked)
    assert sum(r.shape == (400,) and not r.argument for r in kept) >= 2


def test_scopes_of_calls_are_scopes_of_what_they_compute():
    def layer(x):
        with jax.named_scope("outer"):
            return jax.jit(jax.named_scope("inner")(jnp.sin))(x)

    graphs = trace(layer, X), trace_with_calls(layer, (X,), {})
    scopes = [[v.scope for v in graph.values if v.primitive == "sin"] for graph in graphs]
    assert scopes[0] == scopes[1] == ["outer/inner"]


def test_a_plan_leaves_calls_whole_that_it_does_not_cut():
    def loss(ws, x):
        for w in ws:
            x = jax.jit(lambda x, w: jnp.tanh(x @ w) + x)(x, w)
        return jnp.sum(x)

    args = [W] * 4, X
    graph = trace(loss, *args)
    assert len(graph.ops) == 4 * 3 + 1
    for stops, calls in (((6, 12), 4), ((5, 12), 3), ((3, 4, 9, 12), 3)):
        regions = tuple(Region(start, stop) for start, stop in pairwise((0, *stops)))
        planned = Plan(regions, graph.fingerprint).apply(loss)
        assert executions(planned, *args)["dot_general"] == 4
        text = str(jax.make_jaxpr(planned)(*args))
        assert len(re.findall(r"\bp?jit\[", text)) == calls
        assert_trees_close(jax.grad(planned)(*args), jax.grad(loss)(*args), rtol=1e-4)
    tanh = next(op for op in graph.ops if op.primitive == "tanh").outputs[0]
    kept = Plan((Region(0, 6, {tanh: SAVE}), Region(6, 12)), graph.fingerprint).apply(loss)
    assert len(re.findall(r"\bp?jit\[", str(jax.make_jaxpr(kept)(*args)))) == 3
    assert kept_shapes(kept, *args)[8, 8] == 2  # what the first region keeps, and the input of the second


def test_a_call_with_an_operand_that_it_does_not_use_is_not_folded_over_the_cut_of_a_region():
    def loss(x):
        y = jnp.sin(x)
        z = jnp.cos(y)
        a, b = jax.jit(lambda p, q: (jnp.tanh(p * 2.0), q))(z, y)
        return jnp.sum(a * 2.0) + jnp.sum(b)

    graph = trace(loss, X)
    for cut in range(1, len(graph.ops)):
        planned = Plan((Region(0, cut), Region(cut, len(graph.ops))), graph.fingerprint).apply(loss)
        assert_trees_close(jax.grad(planned)(X), jax.grad(loss)(X), rtol=1e-4)


def test_folding_gives_back_calls_and_calls_in_calls():
    inner = jax.jit(lambda x: jnp.sin(x) * jnp.cos(x))
    outer = jax.jit(lambda x, y: (inner(x) + inner(y), 3.0, inner(x)))
    graph = trace(lambda x: outer(x, x * 2.0)[0] + inner(x), X)
    eqns = list(graph.jaxpr.eqns)
    assert [eqn.primitive.name for eqn in graph.calls.folded(eqns)] == ["mul", "jit", "jit", "add"]
    looped = trace(lambda x: jax.lax.scan(lambda c, _: (outer(c, c)[0], None), jnp.cos(x), length=3)[0], X)
    scans = looped.jaxpr.eqns[-1], looped.calls.folded(looped.jaxpr.eqns)[-1]
    assert ["jit[" in str(eqn.params["jaxpr"]) for eqn in scans] == [False, True]
    cut = graph.calls.folded(eqns[: len(eqns) // 2])
    assert sum(eqn.primitive.name == "jit" for eqn in cut) >= 1  # the outer call is cut, one inside of it is whole
    assert Calls().folded(eqns) == eqns


def test_calls_in_calls_need_no_more_recursion_than_jaxs():
    fun = jnp.sin
    for _ in range(45):
        fun = jax.jit(lambda x, fun=fun: fun(x) * 1.0001)
    assert float(jax.grad(jaxckpt.checkpoint(fun, policy=Policy([(op("sin"), SAVE)])))(1.0)) == pytest.approx(
        float(jax.grad(jax.checkpoint(fun))(1.0))
    )
    assert jaxckpt.plan(fun, 1.0, budget=10**6, target="cpu", verify=False).fingerprint


@pytest.mark.parametrize("number", range(6))
def test_a_plan_of_a_random_program_keeps_and_runs_as_much_whether_its_operations_are_called_or_written_out(number):
    """Each operation is a jitted function, some of them called often, in loops and branches too; regions are nested and
    keep values.
    """
    block, plan = programs.drawn(number)
    written, called = programs.function(block), programs.function(block, call=jax.jit)
    args = programs.W, programs.X
    planned, expected = programs.plan_of(block, trace(called, *args)).apply(called), plan.apply(written)
    assert programs.kept(planned) == programs.kept(expected)
    counts = gradient_executions(planned, *args), gradient_executions(expected, *args)
    assert {name: counts[0][name] for name in programs.COUNTED} == {name: counts[1][name] for name in programs.COUNTED}
    assert_trees_close(jax.grad(planned)(*args), jax.grad(written)(*args), rtol=1e-4)


@pytest.mark.parametrize("action", [jaxckpt.OFFLOAD, jaxckpt.compress("bfloat16")], ids=["offload", "compress"])
def test_a_call_with_constants_in_a_region_of_actions_stays_a_call(action):
    """An ODE's solver is a jitted function that holds arrays: they have no place among the operands of the region."""

    def loss(w, x):
        solved = odeint(lambda y, t, w: jnp.tanh(y @ w) - y, x, jnp.array([0.0, 0.2]), w)[-1]
        return jnp.mean((solved @ w) ** 2)

    def kept(w, x):
        return jaxckpt.checkpoint(loss, policy=Policy(default=action))(w, x)

    planned = jaxckpt.plan(kept, W, X, budget="100%", verify=False).apply(kept)
    assert_trees_close(jax.grad(planned)(W, X), jax.grad(loss)(W, X), rtol=1e-2, atol=1e-4)
