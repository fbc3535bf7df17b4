"""`compress("narrow")` keeps integers in a dtype that the program shows to be wide enough, and in no narrower one."""

from __future__ import annotations

import copy
import functools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxckpt
from jaxckpt import OFFLOAD, RECOMPUTE, SAVE, ArgumentError, Policy, compress, tag
from jaxckpt.actions import action_from
from jaxckpt.core import intervals
from jaxckpt.core.graph import trace
from jaxckpt.core.plan import Plan
from tests.helpers import assert_trees_close

NARROW = compress("narrow")
INFO = np.iinfo(np.int32)
W = jax.random.normal(jax.random.key(0), (64, 200))
X = jax.random.normal(jax.random.key(1), (32, 64))


def routed(w, x):
    scores = x @ w
    _, best = jax.lax.top_k(scores, 4)
    order = tag(jnp.argsort(scores, axis=-1), "order")
    return jnp.sin(jnp.take_along_axis(scores, order, -1)[:, :4]) * jnp.sin(
        jnp.take_along_axis(scores, tag(best, "best"), -1)
    )


def loss(w, x):
    return routed(w, x).sum()


# ------------------------------------------------------------------------- the intervals: what is computed lies in them


def at(x, index):
    return jnp.take(x.reshape(-1), jnp.clip(index, 0, x.size - 1)).reshape(index.shape)


UNARY = {
    "neg": lambda x: -x,
    "clip": lambda x: jnp.clip(x, -7, 300),
    "clip_crossed": lambda x: jax.lax.clamp(9, x, 2),
    "mod": lambda x: x % 13,
    "rem": lambda x: jax.lax.rem(x, jnp.int32(-40)),
    "div": lambda x: x // 7,
    "truncated": lambda x: jax.lax.div(x, jnp.int32(-3)),
    "half": lambda x: x >> 1,
    "unsigned_half": lambda x: jax.lax.shift_right_arithmetic(x.astype(jnp.uint8), jnp.uint8(1)).astype(jnp.int32),
    "logical": lambda x: jax.lax.shift_right_logical(x, jnp.int32(4)),
    "masked": lambda x: x & 255,
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "cummax": lambda x: jax.lax.cummax(x, 1),
    "sum": lambda x: x.sum(-1, keepdims=True) + 0 * x,
    "max": lambda x: x.max(0, keepdims=True) - x,
    "count": lambda x: jnp.cumsum(x > 0, -1, dtype=jnp.int32),
    "bincount": lambda x: jnp.zeros_like(x) + jnp.bincount(x.reshape(-1) & 3, length=5).astype(jnp.int32),
    "argmax": lambda x: jnp.argmax(x, -1, keepdims=True).astype(jnp.int32) + x * 0,
    "argsort": lambda x: jnp.argsort(x, -1).astype(jnp.int32),
    "top": lambda x: jax.lax.top_k(x, x.shape[-1])[1],
    "top_values": lambda x: jax.lax.top_k(x, x.shape[-1])[0],
    "sorted": lambda x: jnp.sort(x, 0),
    "iota": lambda x: jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) - 2,
    "bytes": lambda x: x.astype(jnp.int8).astype(jnp.int32),
    "unsigned": lambda x: x.astype(jnp.uint8).astype(jnp.int32),
    "rounded": lambda x: jnp.tanh(x.astype(jnp.float32)).astype(jnp.int32),
    "rolled": lambda x: jnp.roll(x, 1, 1),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 0)), constant_values=-9)[:, :-1],
    "set": lambda x: x.at[:, 0].set(5),
    "applied": lambda x: (x & 7).at[:, 0].apply(lambda v: v * 1000 - 9),
    "constant": lambda x: (x & 7).at[:, 0].apply(lambda v: jnp.full_like(v, -9)),
    "added": lambda x: (x & 7).at[:, 0].add(x[:, 1] & 255),
    "multiplied": lambda x: (x & 7).at[:, 0].multiply(-5),
    "lowest": lambda x: (x & 7).at[:, 0].min(-5),
    "picked": lambda x: at(x, x),
    "filled_with_the_least": lambda x: jnp.take_along_axis(x & 7, x, 1, mode="fill"),
    "filled": lambda x: jnp.take_along_axis(x, x, 1, mode="fill", fill_value=-3),
    "remainder": lambda x: (x & 127) % 13,
    "compared": lambda x: jnp.where((x < 4) == ~(x >= 4), x, 7) + (x <= 2) - (x > -3) * (x != 5),
    "inverted": lambda x: ~x,
    "barrier": lambda x: jax.lax.optimization_barrier((x + 1, x))[0],
}
BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "mod": lambda x, y: x % jnp.maximum(y, 1),
    "div": lambda x, y: jax.lax.div(x, jnp.where(y == 0, 1, y)),
    "where": lambda x, y: jnp.where(x > y, x, y),
    "shift": lambda x, y: x >> (y & 7),
    "concatenated": lambda x, y: jnp.concatenate([x, y], 1)[:, 1:6],
    "split": lambda x, y: jnp.split(jnp.concatenate([x, y], 1), 2, 1)[1],
}


@st.composite
def programs(draw):
    steps, count = [], 1
    for _ in range(draw(st.integers(1, 7))):
        if draw(st.booleans()):
            steps.append((draw(st.sampled_from(sorted(UNARY))), draw(st.integers(0, count - 1)), None))
        else:
            operands = st.integers(0, count - 1)
            steps.append((draw(st.sampled_from(sorted(BINARY))), draw(operands), draw(operands)))
        count += 1
    return steps


def run(steps, x):
    values = [x]
    for name, left, right in steps:
        values.append(UNARY[name](values[left]) if right is None else BINARY[name](values[left], values[right]))
    return values


@given(steps=programs(), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_what_is_computed_lies_in_its_interval(steps, seed):
    rng = np.random.default_rng(seed)
    graph = trace(functools.partial(run, steps), jax.ShapeDtypeStruct((3, 5), jnp.int32))
    extreme = rng.choice([INFO.min, INFO.min + 1, -300, -1, 0, 1, 2, 4, 300, INFO.max - 1, INFO.max], (3, 5))
    for x in (extreme, rng.integers(-6, 6, (3, 5)), rng.integers(0, 5, (3, 5))):
        computed = run(steps, jnp.asarray(x, jnp.int32))
        for index, array in zip(graph.body.outputs, computed):
            interval = (INFO.min, INFO.max) if index is None else graph.values[index].interval
            assert interval[0] <= int(array.min()) and int(array.max()) <= interval[1], steps


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mod", (-12, 25)),  # of a remainder, and of that plus 13: `jnp.remainder` selects one of them
        ("remainder", (0, 12)),
        ("inverted", (INFO.min, INFO.max)),
        ("clip", (-7, 300)),
        ("masked", (0, 255)),
        ("count", (0, 5)),
        ("bincount", (0, 15)),
        ("argsort", (0, 4)),
        ("top", (0, 4)),
        ("iota", (-2, 2)),
        ("rem", (-39, 39)),
        ("bytes", (-128, 127)),
        ("neg", (INFO.min, INFO.max)),
        ("cumsum", (INFO.min, INFO.max)),
        ("applied", (INFO.min, INFO.max)),
        ("constant", (INFO.min, INFO.max)),
        ("unsigned_half", (0, 255)),
    ],
)
def test_intervals_that_programs_show(name, expected):
    graph = trace(UNARY[name], jax.ShapeDtypeStruct((3, 5), jnp.int32))
    assert graph.values[graph.body.outputs[0]].interval == expected


@pytest.mark.parametrize("name", sorted(UNARY))
def test_each_operation_of_one_operand_stays_in_its_interval(name):
    """Each by itself: drawn programs reach few of them on the numbers that tell."""
    graph = trace(UNARY[name], jax.ShapeDtypeStruct((3, 5), jnp.int32))
    low, high = graph.values[graph.body.outputs[0]].interval
    for seed in range(3):
        x = np.random.default_rng(seed).choice([INFO.min, -300, -1, 0, 1, 2, 4, 127, 200, 255, 300, INFO.max], (3, 5))
        computed = UNARY[name](jnp.asarray(x, jnp.int32))
        assert low <= int(computed.min()) and int(computed.max()) <= high


def test_every_rule_is_of_a_primitive_that_the_tests_reach_or_that_only_moves():
    seen = set()
    for fun in UNARY.values():
        seen |= {op.primitive for op in trace(fun, jax.ShapeDtypeStruct((3, 5), jnp.int32)).walk()}
    for fun in BINARY.values():
        seen |= {op.primitive for op in trace(fun, *[jax.ShapeDtypeStruct((3, 5), jnp.int32)] * 2).walk()}
    moves = "copy reshape squeeze transpose broadcast_in_dim slice rev dynamic_slice dynamic_update_slice tile stack"
    alike = "unstack sharding_constraint all_gather device_put cummin reduce_min argmin"
    assert {*intervals.TABLE, "sort", "top_k", "split", "optimization_barrier"} <= {
        *seen,
        *moves.split(),
        *alike.split(),
    }


# --------------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("action", [NARROW, NARROW | OFFLOAD, NARROW | compress("int8")], ids=str)
def test_indices_are_kept_in_bytes_and_gradients_are_equal(action):
    planned = jaxckpt.checkpoint(loss, policy=Policy({"order": action, "best": action}))
    kept = kept_of(planned, W, X)
    assert sorted((str(each.dtype), each.shape) for each in kept) == [("uint8", (32, 4)), ("uint8", (32, 200))]
    np.testing.assert_array_equal(jax.jit(jax.grad(planned))(W, X), jax.jit(jax.grad(loss))(W, X))


def test_in_a_scan_under_vmap_and_second_derivatives():
    block = jaxckpt.checkpoint(routed, policy=Policy({"order": NARROW}))
    for fun in (routed, block):
        stacked = lambda ws, x, fun=fun: jax.lax.scan(lambda x, w: (jnp.tile(fun(w, x), 16), None), x, ws)[0].sum()
        gradient = jax.grad(stacked)(jnp.stack([W] * 3), X)
        if fun is routed:
            expected, kept = gradient, jaxckpt.residuals(stacked, jnp.stack([W] * 3), X)
    assert_trees_close(gradient, expected)
    found = jaxckpt.residuals(stacked, jnp.stack([W] * 3), X)
    assert (jnp.uint8, (3, 32, 200)) in [(each.dtype, each.shape) for each in found.residuals]
    assert sum(each.bytes for each in found.residuals) < sum(each.bytes for each in kept.residuals)
    assert_trees_close(jax.vmap(jax.grad(lambda w: block(w, X).sum()))(jnp.stack([W, -W]))[1], jax.grad(loss)(-W, X))
    second = lambda fun: jax.grad(lambda w: jnp.sum(jax.grad(lambda w: fun(w, X).sum())(w) ** 2))
    assert_trees_close(second(block)(W), second(routed)(W), rtol=1e-4, atol=1e-4)  # of numbers up to 60


def kept_of(fun, *args):
    return [each for each in jaxckpt.residuals(fun, *args).residuals if not each.argument]


def wide(x):
    return jnp.sin(x) * jnp.take(jnp.sin(x), tag(jnp.round(x * 100).astype(jnp.int32), "index"), mode="clip")


def test_integers_that_may_not_fit_are_saved_as_they_are():
    x = jnp.linspace(0.0, 900.0, 64)
    planned = jaxckpt.checkpoint(lambda x: wide(x).sum(), policy=Policy({"index": NARROW}))
    assert [each.dtype for each in kept_of(planned, x)] == [jnp.int32]
    assert_trees_close(jax.grad(planned)(x), jax.grad(lambda x: wide(x).sum())(x))


def test_what_a_function_puts_into_an_index_is_not_cut():
    x = jnp.arange(4.0) + 1

    def moved(x):
        index = jnp.argsort(x).at[0].apply(lambda i: i + 1000)
        return jnp.sum(jnp.sin(x * tag(index, "index")))

    kept = jaxckpt.checkpoint(moved, policy=Policy({"index": NARROW}))
    np.testing.assert_array_equal(jax.grad(kept)(x), jax.grad(moved)(x))


def test_a_plan_for_other_numbers_does_not_cut_these():
    """Literals are no part of a plan's fingerprint: the dtype is found again for the program that a plan is used on."""

    def indexed(x, most):
        index = tag(jnp.clip(jnp.round(x * 100).astype(jnp.int32), 0, most), "index")
        return (jnp.sin(x) * jnp.sin(jnp.take(x, index, mode="clip"))).sum()

    x = jnp.linspace(0.0, 3000.0, 4096)
    small, large = (functools.partial(indexed, most=most) for most in (200, 4000))
    assert trace(small, x).fingerprint == trace(large, x).fingerprint
    plan = Policy({"index": NARROW}).plan(trace(small, x))
    assert "uint8" in plan.to_json()
    applied = Plan.from_json(plan.to_json()).apply(large)
    assert_trees_close(jax.grad(applied)(x), jax.grad(large)(x))
    assert [str(each.dtype) for each in kept_of(applied, x)] == ["uint16"]


@pytest.mark.cuda
def test_the_planner_keeps_permutations_in_bytes():
    """What a sort costs is not run again, for a quarter of what its indices take."""

    def blocks(ws, x):
        for w in ws:
            scores = x @ w
            x = x + jnp.sin(jnp.take_along_axis(scores, jnp.argsort(scores, axis=-1), -1)) @ w.T
        return x.sum()

    ws, x = [jax.ShapeDtypeStruct(W.shape, W.dtype)] * 4, jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    plans = {}
    for actions in ((RECOMPUTE, SAVE), (RECOMPUTE, SAVE, NARROW)):
        made = plans[actions] = jaxckpt.plan(blocks, ws, x, budget="70%", target="cuda:h100", actions=actions)
        assert made.measured_bytes <= made.budget
    plain, made = plans.values()
    assert made.overhead < 0.8 * plain.overhead
    assert "compress('narrow') as uint8" in {
        str(action) for region in made.regions for action in region.actions.values()
    }


def test_it_is_a_value_with_one_file_form():
    assert action_from(NARROW.to_json()) is NARROW or action_from(NARROW.to_json()) == NARROW
    assert action_from({"kind": "compress", "form": "narrow"}) == NARROW == copy.copy(NARROW)
    assert copy.copy(compress("int8")) == pickle.loads(pickle.dumps(compress("int8"))) == compress("int8")
    assert action_from("narrow") == NARROW and hash(NARROW) == hash(compress("narrow"))
    graph = trace(loss, W, X)
    used = Policy({"order": NARROW}).decide(graph)
    (action,) = used.values()
    assert action != NARROW and action_from(json.loads(json.dumps(action.to_json()))) == action
    assert str(NARROW) == "compress('narrow')" and "uint8" in str(action)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: action_from({"kind": "narrow", "dtype": "uint7"}), "uint8, int8, uint16"),
        (lambda: compress("narrow", key=jax.random.key(0)), "rounds nothing"),
        (lambda: compress("narow"), "narrow"),
    ],
)
def test_bad_arguments(made, message):
    with pytest.raises(ArgumentError, match=message):
        made()


@jax.custom_vjp
def ordered(x):
    return jnp.sort(x, -1)


def ordered_forward(x):
    order = jax.lax.sort((x, jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)), num_keys=1)[1]
    return jnp.take_along_axis(x, order, -1), order


def ordered_backward(order, d):
    return (jnp.zeros_like(d).at[jnp.arange(len(d))[:, None], order].add(d),)


ordered.defvjp(ordered_forward, ordered_backward)


def test_residuals_of_custom_rules_are_kept_in_bytes():
    policy = Policy({"ordered/0": NARROW})
    fun = lambda x: jnp.sum(jnp.sin(ordered(x)))
    for kept in (jaxckpt.checkpoint(fun, policy=policy), policy.plan(trace(fun, X)).apply(fun)):
        assert [str(each.dtype) for each in kept_of(kept, X)] == ["uint8"]
        np.testing.assert_array_equal(jax.grad(kept)(X), jax.grad(fun)(X))


PLACES = {
    "clip": lambda i: jnp.clip(i, 0, 63),
    "remainder": lambda i: i % 64,
    "call": jax.jit(lambda i: jnp.minimum(jnp.maximum(i, 0), 63)),
    "checkpoint": jax.checkpoint(lambda i: jnp.clip(i, 0, 63)),
    "branches": lambda i: jax.lax.cond(i[0] > 3, lambda i: jnp.clip(i, 0, 63), lambda i: i % 7, i),
    "scan": lambda i: jax.lax.scan(lambda c, y: (c, jnp.clip(y, 0, 63)), 0, i)[1],
    "carry": lambda i: jax.lax.scan(lambda c, y: (jnp.clip(y, 0, 9), None), jnp.full((8,), 99), i.reshape(-1, 8))[0],
    "randint": lambda i: jax.random.randint(jax.random.key(0), i.shape, 0, 64),
}


@pytest.mark.parametrize("planned", [False, True], ids=["checkpoint", "plan"])
@pytest.mark.parametrize("name", PLACES)
def test_bounds_are_seen_through_calls_and_programs(name, planned):
    """In a checkpoint calls stay calls: the bounds of `jnp.clip` are operands of one."""
    z = jnp.linspace(0.0, 900.0, 64)

    def picked(z):
        index = tag(PLACES[name](jnp.round(z).astype(jnp.int32)), "index")
        return jnp.sum(jnp.sin(z[: len(index)]) * jnp.sin(jnp.take(z, index, mode="clip")))

    policy = Policy({"index": NARROW})
    kept = policy.plan(trace(picked, z)).apply(picked) if planned else jaxckpt.checkpoint(picked, policy=policy)
    assert [each.dtype.itemsize for each in kept_of(kept, z)] == [1]
    np.testing.assert_array_equal(jax.grad(kept)(z), jax.grad(picked)(z))


def test_one_function_called_with_other_bounds_keeps_each_index_as_it_fits():
    @jax.jit
    def bounded(i, most):
        return tag(jnp.clip(i, 0, most), "index")

    @jax.checkpoint
    def again(i, most):
        return bounded(i, most) + 0

    z = jnp.linspace(0.0, 4000.0, 4096)

    def picked(z, call):
        i = jnp.round(z).astype(jnp.int32)
        return sum(jnp.sum(jnp.sin(z) * jnp.sin(jnp.take(z, call(i, most), mode="clip"))) for most in (100, 4000))

    for call in (bounded, again):
        fun = functools.partial(picked, call=call)
        kept = jaxckpt.checkpoint(fun, policy=Policy({"index": NARROW}))
        if call is bounded:
            assert sorted(str(each.dtype) for each in kept_of(kept, z)) == ["uint16", "uint8"]
        np.testing.assert_array_equal(jax.grad(kept)(z), jax.grad(fun)(z))
