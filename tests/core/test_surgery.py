"""Surgery on jaxprs: what is taken is what it takes, and what comes out computes the same."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxckpt import _compat
from jaxckpt.core import surgery
from jaxckpt.core.graph import trace

X, Y = jnp.arange(1.0, 4.0), jnp.array([0.5, 0.25, 2.0])


def jaxpr_of(fun, *args):
    return _compat.open_jaxpr(jax.make_jaxpr(fun)(*args))


def names(eqns):
    return [eqn.primitive.name for eqn in eqns]


def both(x, y):
    a = jnp.sin(x)
    b = jnp.cos(y)
    return a * 2, a + b


def test_a_slice_runs_only_what_an_output_takes():
    jaxpr = jaxpr_of(both, X, Y)
    first = surgery.needed(jaxpr.eqns, jaxpr.invars, jaxpr.outvars[:1])
    assert names(first) == ["sin", "mul"]
    run = surgery.function(jaxpr.eqns, jaxpr.invars, jaxpr.outvars[:1], jaxpr.debug_info)
    assert jnp.array_equal(run(X, Y)[0], jnp.sin(X) * 2)
    ran = jax.make_jaxpr(run)(X, Y)
    assert "cos" not in str(ran)


def test_a_slice_starts_at_what_is_given_and_lacks_nothing():
    jaxpr = jaxpr_of(both, X, Y)
    sin = jaxpr.eqns[0].outvars[0]
    assert names(surgery.needed(jaxpr.eqns, [sin], jaxpr.outvars[:1])) == ["mul"]
    with pytest.raises(AssertionError):
        surgery.needed(jaxpr.eqns, jaxpr.invars[:1], jaxpr.outvars[1:])


def test_side_effects_are_run_where_asked():
    def fun(x):
        jax.debug.print("{}", x)
        return jnp.sin(x), jnp.cos(x)

    jaxpr = jaxpr_of(fun, X)
    plain = surgery.needed(jaxpr.eqns, jaxpr.invars, jaxpr.outvars[:1])
    asked = surgery.needed(jaxpr.eqns, jaxpr.invars, jaxpr.outvars[:1], effects=True)
    assert names(plain) == ["sin"] and len(asked) == 2 and asked[1] is plain[0]


def test_what_depends_on_a_variable_is_what_is_computed_from_it():
    jaxpr = jaxpr_of(both, X, Y)
    found = surgery.depends(jaxpr.eqns, [jaxpr.invars[1]])
    assert names([eqn for eqn in jaxpr.eqns if found.issuperset(eqn.outvars)]) == ["cos", "add"]


def test_an_equation_is_taken_out_and_its_result_read_from_another():
    closed = jax.make_jaxpr(lambda x: jnp.sin(jax.ad_checkpoint.checkpoint_name(jnp.tanh(x), "a")) + 1)(X)
    named = lambda eqn, operands: operands[0] if _compat.equation_name(eqn) == "a" else None
    without = _compat.open_jaxpr(surgery.without(closed, named))
    assert names(without.eqns) == ["tanh", "sin", "add"]
    assert jnp.array_equal(surgery.evaluate(without, X)[0], jnp.sin(jnp.tanh(X)) + 1)
    # A result of the program that goes is what is read instead.
    closed = jax.make_jaxpr(lambda x: (jnp.tanh(x), jnp.sin(x)))(X)
    first = lambda eqn, operands: operands[0] if eqn.primitive.name == "tanh" else None
    assert jnp.array_equal(surgery.evaluate(_compat.open_jaxpr(surgery.without(closed, first)), X)[0], X)


def test_a_function_with_holes_is_differentiated_in_what_moves_alone():
    fun, moving = surgery.with_holes(lambda x, n, y: jnp.sum(x * y) * n, [X, 3, Y], [False, False, True])
    assert moving == [Y]
    assert jnp.array_equal(jax.grad(fun)(*moving), 3 * X)
    with pytest.raises(ValueError):
        surgery.with_holes(lambda x: x, [X], [])[0]()


def test_what_has_two_names_is_read_by_one_and_goes_in_once():
    def fun(x, y):
        a = jnp.sin(x)
        return a * checkpoint_name(a, "a"), y * checkpoint_name(y, "y")

    body = trace(fun, X, Y).body
    eqns = surgery.unaliased([op.equation for op in body.ops], body.values)
    assert names(eqns) == ["sin", "mul", "mul"], "a name is no operation"
    for eqn in eqns[1:]:
        assert len(set(eqn.invars)) == 1
    assert len(surgery.used(eqns)) == 2
    run = surgery.stretch(eqns, surgery.used(eqns), [eqn.outvars[0] for eqn in eqns[1:]], body.jaxpr)
    for found, expected in zip(surgery.evaluate(run, X, Y), fun(X, Y)):
        assert jnp.array_equal(found, expected)


def test_equations_run_in_scopes_of_their_own():
    jaxpr = jaxpr_of(both, X, Y)
    run = functools.partial(surgery.evaluate_in_scopes, jaxpr, "here")
    ran = jaxpr_of(run, X, Y)
    assert [_compat.name_stack(eqn) for eqn in ran.eqns] == [f"here{number}" for number in range(len(jaxpr.eqns))]
    for found, expected in zip(run(X, Y), both(X, Y)):
        assert jnp.array_equal(found, expected)
