"""Under a policy that keeps nothing, and under one that keeps everything, `checkpoint` behaves as jax.checkpoint does.

docs/testing.md has the table of these questions, and the differences that stay.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxckpt
from jaxckpt import SAVE, EffectsError, Policy, op, where
from tests.helpers import assert_trees_close, executions, gradient_executions, kept_bytes

X, W = jnp.linspace(0.1, 0.6, 64).reshape(8, 8), jnp.eye(8) + 0.01


def every(value):
    return True


NOTHING, EVERYTHING = jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.everything_saveable
PAIRS = {
    "nothing": ("nothing", NOTHING),
    "no rule": (Policy(), NOTHING),
    "no rule that picks": (Policy([(op("sinh"), SAVE)]), NOTHING),
    "everything": ("everything", EVERYTHING),
    "saved by default": (Policy(default=SAVE), EVERYTHING),
    "a rule that picks all": (Policy([(where(every), SAVE)]), EVERYTHING),
}
both = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS.keys())


def layer(x, w):
    return jnp.sin(jnp.tanh(x @ w) @ w)


def loss(fun):
    return lambda x, w: jnp.sum(fun(x, w))


def pair(fun, ours, theirs, **how):
    return jaxckpt.checkpoint(fun, policy=ours, **how), jax.checkpoint(fun, policy=theirs, **how)


@both
def test_a_function_is_traced_as_often(ours, theirs):
    counts = []
    for wrap, policy in ((jaxckpt.checkpoint, ours), (jax.checkpoint, theirs)):
        traced = []
        wrapped = wrap(lambda x, w: (traced.append(1), layer(x, w))[1], policy=policy)
        seen = []
        for call in (
            lambda: wrapped(X, W),
            lambda: wrapped(X, W),
            lambda: jax.grad(loss(wrapped))(X, W),
            lambda: jax.jit(wrapped)(X, W),
            lambda: jax.jit(jax.grad(loss(wrapped)))(X, W),
            lambda: wrapped(X[:4], W),
            lambda: wrapped(X[:4], W),
            lambda: wrapped(X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)),
            lambda: jax.vmap(wrapped, (0, None))(X[:, None], W),
            lambda: wrapped(X, w=W),
        ):
            call()
            seen.append(len(traced))
        counts.append(seen)
    assert counts[0] == counts[1]


@both
def test_a_jitted_function_is_lowered_as_often(ours, theirs):
    sizes = []
    for fun in pair(layer, ours, theirs):
        jitted, gradient = jax.jit(lambda x, w, fun=fun: fun(x, w)), jax.jit(jax.grad(loss(fun)))
        for x in (X, X, X[:4], X + 1, X[:4]):
            jitted(x, W)
            gradient(x, W)
        sizes.append((jitted._cache_size(), gradient._cache_size()))  # type: ignore[attr-defined]
    assert sizes[0] == sizes[1] == (2, 2)


@both
def test_a_forward_call_runs_the_same_operations(ours, theirs):
    counts = [executions(fun, X, W) for fun in pair(layer, ours, theirs)]
    for name in ("dot_general", "tanh", "sin", "optimization_barrier"):
        assert counts[0][name] == counts[1][name]
    texts = [jax.jit(fun).lower(X, W).as_text() for fun in pair(layer, ours, theirs)]
    assert [text.count("stablehlo.") for text in texts] == [texts[1].count("stablehlo.")] * 2


@both
def test_a_gradient_keeps_and_recomputes_no_more(ours, theirs):
    wrapped = [loss(fun) for fun in pair(layer, ours, theirs)]
    counts = [gradient_executions(fun, X, W) for fun in wrapped]
    assert counts[0]["dot_general"] == counts[1]["dot_general"]
    assert counts[0]["tanh"] == counts[1]["tanh"]
    # What JAX keeps where all may be kept is what derivatives read (cos x); a rule keeps what the function computes
    # (sin x, x).
    assert kept_bytes(wrapped[0], X, W) <= kept_bytes(wrapped[1], X, W) + X.nbytes
    assert (kept_bytes(wrapped[0], X, W) == 0) == (theirs is NOTHING)


@both
def test_a_print_is_seen_as_often(ours, theirs, capfd):
    def chatty(x, w):
        jax.debug.print("seen {}", x.sum())
        return layer(x, w)

    counts = []
    for fun in pair(chatty, ours, theirs):
        seen = []
        for call in (fun, jax.jit(fun), jax.grad(loss(fun)), jax.jit(jax.grad(loss(fun)))):
            jax.block_until_ready(call(X, W))
            jax.effects_barrier()
            seen.append(capfd.readouterr().out.count("seen"))
        counts.append(seen)
    if (
        ours == PAIRS["a rule that picks all"][0]
    ):  # names keep what results need, and the recomputation prints as JAX's own does
        counts[1] = [1, 1, 2, 2]
    assert counts[0] == counts[1]


@both
def test_static_arguments_are_traced_as_often(ours, theirs):
    counts = []
    for wrap, policy in ((jaxckpt.checkpoint, ours), (jax.checkpoint, theirs)):
        traced = []
        fun = lambda x, mode: (traced.append(mode), getattr(jnp, mode)(x))[1]
        wrapped = wrap(fun, policy=policy, static_argnums=(1,))
        for mode in ("sin", "cos", "sin", "cos"):
            wrapped(X, mode)
            jax.grad(lambda x, mode=mode: jnp.sum(wrapped(x, mode)))(X)
        counts.append(list(traced))
    assert counts[0] == counts[1] == ["sin", "cos"]


@both
def test_effects_run_forward_and_are_refused_in_reverse(ours, theirs):
    seen = []

    def noisy(x, w):
        io_callback(lambda: seen.append(1), None, ordered=True)
        return layer(x, w)

    counts = []
    for fun in pair(noisy, ours, theirs):
        seen.clear()
        fun(X, W)
        jax.jit(fun)(X, W)
        jax.effects_barrier()
        counts.append(len(seen))
        for gradient in (jax.grad(loss(fun)), jax.jit(jax.grad(loss(fun)))):
            with pytest.raises((NotImplementedError, EffectsError), match=r"Effects not supported|side effects"):
                gradient(X, W)
    assert counts == [2, 2]


@both
def test_names_print_alike(ours, theirs):
    def block(x, w):
        """Doc."""
        return layer(x, w)

    wrapped = pair(block, ours, theirs)
    assert {(fun.__name__, fun.__doc__, fun.__wrapped__) for fun in wrapped} == {("block", "Doc.", block)}
    primitives = [[eqn.primitive.name for eqn in jax.make_jaxpr(fun)(X, W).eqns] for fun in wrapped]
    assert primitives[0] == primitives[1]
    scopes = []
    for fun in wrapped:
        text = jax.jit(jax.grad(loss(fun))).lower(X, W).as_text(debug_info=True)
        scopes.append({name.replace("jvp()", "") for name in re.findall(r'"jit\([^"]*/([^"/]*)"', text)})
    assert scopes[0] - scopes[1] <= {"cos", "reduce_precision"}
    for fun in wrapped:
        with pytest.raises(TypeError, match=r"block\(\) missing 1 required positional argument"):
            fun(X)


@both
def test_values_and_gradients_are_equal(ours, theirs):
    one, other = pair(layer, ours, theirs)
    assert_trees_close(one(X, W), other(X, W))
    assert_trees_close(jax.grad(loss(one), (0, 1))(X, W), jax.grad(loss(other), (0, 1))(X, W))
    assert_trees_close(jax.hessian(loss(one))(X[:1], W), jax.hessian(loss(other))(X[:1], W), rtol=1e-4)
    tangent = jax.jvp(one, (X, W), (W, X)), jax.jvp(other, (X, W), (W, X))
    assert_trees_close(*tangent)
    assert np.isfinite(tangent[0][1]).all()
