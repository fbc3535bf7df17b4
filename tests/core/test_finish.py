"""What is done last to the programs that jaxckpt returns: scans wait for their operands, so that checkpoints around
unrolled blocks with scans save memory; kernels whose results are kept are not run again.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas

import jaxckpt
from jaxckpt import _compat
from jaxckpt.core import surgery
from jaxckpt.core.finish import finished_function

S = jax.ShapeDtypeStruct
TARGETS = ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda)]


def lstm(w, x):
    """A layer over the first axis of x, in one scan."""
    width = x.shape[-1]

    def step(state, row):
        h, cell = state
        i, f, o, u = jnp.split(row @ w[0] + h @ w[1], 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(u)
        h = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (h, cell), h

    zero = jnp.zeros((x.shape[1], width))
    return x + lax.scan(step, (zero, zero), x)[1]


def stack(layer):
    def loss(weights, x):
        for w in weights:
            x = layer(w, x)
        return jnp.sum(x * x)

    return loss


LAYERS = [S((2, 32, 128), jnp.float32)] * 6
ROWS = S((64, 32, 32), jnp.float32)


@functools.cache
def temporaries(target, wrap):
    report = jaxckpt.measure(jax.grad(stack(wrap(lstm))), LAYERS, ROWS, target=target)
    return report.temp_bytes


def as_it_is(layer):
    return layer


def keeping_by_name(layer):
    return jaxckpt.checkpoint(layer, policy=jaxckpt.Policy({"h": jaxckpt.SAVE}, strict=False))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("wrap", [jaxckpt.checkpoint, keeping_by_name])
def test_checkpoints_around_layers_with_a_scan_save_memory(target, wrap):
    assert temporaries(target, wrap) < 0.4 * temporaries(target, as_it_is)


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda:h100", marks=[pytest.mark.cuda, pytest.mark.long])])
def test_a_plan_of_layers_with_a_scan_fits_a_third_of_the_peak(target):
    made = jaxckpt.plan(stack(lstm), LAYERS, ROWS, budget="33%", target=target)
    planned = jaxckpt.measure(jax.grad(made.apply(stack(lstm))), LAYERS, ROWS, target=target)
    assert planned.peak_bytes <= made.budget


def chunks(x):
    return x.reshape(8, -1, x.shape[-1])


@jax.custom_vjp
def attended(q, k, v):
    return rule_forward(q, k, v)[0]


def rule_forward(q, k, v):
    weights = jax.nn.softmax(q @ k.T)
    return weights @ v, (q, k, v)


def rule_backward(kept, out):
    """In chunks of the queries: one scan, whose results are the parts of a cotangent."""
    q, k, v = kept

    def step(sums, rows):
        _, back = jax.vjp(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, rows[0], k, v)
        dq, dk, dv = back(rows[1])
        return (sums[0] + dk, sums[1] + dv), dq

    (dk, dv), dq = lax.scan(step, (jnp.zeros_like(k), jnp.zeros_like(v)), (chunks(q), chunks(out)))
    return dq.reshape(q.shape), dk, dv


attended.defvjp(rule_forward, rule_backward)


def rule_layer(w, x):
    return x + attended(x @ w[0], x @ w[1], jnp.tanh(x @ w[2]))


def test_scans_in_rules_of_the_users_wait_too():
    shapes = [S((3, 256, 256), jnp.float32)] * 8, S((1024, 256), jnp.float32)
    bytes_of = lambda wrap: jaxckpt.measure(jax.grad(stack(wrap(rule_layer))), *shapes, target="cpu").temp_bytes
    assert bytes_of(jaxckpt.checkpoint) < 0.8 * bytes_of(jax.checkpoint)


@pytest.mark.parametrize("jit", [True, False])
def test_rules_with_scans_have_the_same_derivatives(jit):
    keys = jax.random.split(jax.random.key(0), 3)
    weights, x = [jax.random.normal(key, (3, 4, 4)) for key in keys[:2]], jax.random.normal(keys[2], (16, 4))
    run = lambda wrap: (jax.jit if jit else lambda f: f)(jax.grad(stack(wrap(rule_layer)), (0, 1)))(weights, x)
    for wanted, found in zip(jax.tree.leaves(run(as_it_is)), jax.tree.leaves(run(jaxckpt.checkpoint))):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


X = jnp.linspace(0.1, 1, 28).reshape(7, 4)
C = jnp.linspace(0.5, 1, 4)


def sines(c, x, **settings):
    c, ys = lax.scan(lambda c, row: (jnp.sin(c * row), c + row), c, x, **settings)
    return jnp.sum(c) + jnp.sum(ys * ys)


def all_kinds(c, x, **settings):
    """ys of many kinds: integers, keys, empty ones, narrow ones, such as no operand goes into."""

    def step(c, row):
        c = jnp.sin(c * row)
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(0), jnp.int32(row[0] * 9)))
        return c, (row > 0.5, jnp.int32(3), key, jnp.zeros((0, 3)), c.astype(jnp.bfloat16), jax.random.key(1))

    c, (*ys, keys) = lax.scan(step, c, x, **settings)
    return c, ys, jax.random.key_data(keys)


@pytest.mark.parametrize("unroll", [1, 2, 7, False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_that_waits_returns_what_a_scan_returns(unroll, reverse):
    run = functools.partial(all_kinds, unroll=unroll, reverse=reverse)
    found_all = jax.jit(finished_function(run))(C, X)
    for wanted, found in zip(jax.tree.leaves(run(C, X)), jax.tree.leaves(found_all)):
        assert jax.typeof(found) == jax.typeof(wanted)
        np.testing.assert_array_equal(found, wanted)


TRANSFORMS = {
    "grad": lambda f: jax.grad(f, (0, 1))(C, X),
    "grad of a checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1))(C, X),
    "jvp": lambda f: jax.jvp(f, (C, X), (C, X)),
    "hessian": lambda f: jax.hessian(f)(C, X),
    "forward over reverse": lambda f: jax.jvp(jax.grad(jax.checkpoint(f)), (C, X), (C, X)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (0, None))(jnp.stack([C, 2 * C]), X),
    "grad of vmap": lambda f: jax.grad(lambda c: jnp.sum(jax.vmap(f, (None, 0))(c, jnp.stack([X, 2 * X]))))(C),
    "third derivatives": lambda f: jax.grad(lambda c: jnp.sum(jax.hessian(f)(c, X) ** 2))(C),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_derivative_of_a_scan_that_waits_waits_and_is_that_of_the_scan(name):
    transform = TRANSFORMS[name]
    found_all = jax.jit(lambda: transform(finished_function(sines)))()
    for wanted, found in zip(jax.tree.leaves(jax.jit(lambda: transform(sines))()), jax.tree.leaves(found_all)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    scans = list(scans_of(jax.make_jaxpr(lambda: transform(finished_function(sines)))().jaxpr))
    # jax 0.12 makes the forward pass of a checkpoint's scan outside of its context.
    assert sum(map(_compat.waits, scans)) >= len(scans) - ("checkpoint" in name) >= 1


def scans_of(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in surgery.programs(eqn):
            yield from scans_of(_compat.open_jaxpr(inner))


def test_scans_of_others_are_lowered_as_before():
    before = jax.jit(lambda c, x: sines(c, x)).lower(C, X).as_text()
    jax.jit(finished_function(sines)).lower(C, X)
    assert jax.jit(lambda c, x: sines(c, x)).lower(C, X).as_text() == before
    assert "optimization_barrier" not in before


@pytest.mark.parametrize("length", [0, 1])
def test_short_scans(length):
    run = lambda c: lax.scan(lambda c, _: (c + 1, c), c, None, length=length)
    for wanted, found in zip(jax.tree.leaves(run(C)), jax.tree.leaves(jax.jit(finished_function(run))(C))):
        np.testing.assert_array_equal(found, wanted)


def test_ordered_effects_come_in_order():
    seen = []

    def step(c, row):
        jax.debug.callback(lambda v: seen.append(int(v)), c, ordered=True)
        return c + 1, row

    jax.jit(finished_function(lambda x: lax.scan(step, jnp.int32(0), x)))(X)
    jax.effects_barrier()
    assert seen == list(range(7))


def test_with_the_checks_of_jax():
    with jax.enable_checks(True):
        jax.jit(jax.grad(finished_function(sines)))(C, X)


def test_one_program_for_several_platforms():
    exported = jax.export.export(jax.jit(finished_function(sines)), platforms=("cpu", "cuda", "tpu"))(C, X)
    np.testing.assert_allclose(exported.call(C, X), sines(C, X), rtol=1e-6)


def test_a_symbolic_length_can_be_exported():
    (rows,) = jax.export.symbolic_shape("rows")
    run = jaxckpt.checkpoint(lambda x: lax.map(jnp.sin, x))
    exported = jax.export.export(jax.jit(run))(S((rows, 4), jnp.float32))
    np.testing.assert_array_equal(exported.call(X), jnp.sin(X))


# ------------------------------------------------------------------------------------------------- kernels of Pallas


def scaled(x):
    """A kernel with two results: a block at a time twice x, and its rows' sums."""

    def kernel(x_ref, twice_ref, sums_ref):
        twice_ref[...] = 2 * x_ref[...]
        sums_ref[...] = jnp.sum(x_ref[...], axis=1, keepdims=True)

    shapes = S(x.shape, x.dtype), S((x.shape[0], 1), x.dtype)
    return pallas.pallas_call(kernel, out_shape=shapes, interpret=True, name="scaled")(x)


@jax.custom_vjp
def kernel_rule(x):
    return scaled(x)[0]


kernel_rule.defvjp(lambda x: (lambda out: (out[0], out))(scaled(x)), lambda kept, d: (2 * d + 0 * kept[0] * kept[1],))


def with_kernel(x):
    for _ in range(3):
        x = kernel_rule(jnp.sin(x))
    return jnp.sum(x)


def kernels(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for inner in surgery.programs(eqn):
                yield from kernels(_compat.open_jaxpr(inner))


def count_kernels(fun):
    return sum(1 for _ in kernels(jax.make_jaxpr(jax.grad(fun))(jnp.ones((8, 128))).jaxpr))


@pytest.mark.parametrize(
    ("policy", "runs"), [("everything", 3), (jaxckpt.Policy({"kernel_rule/*": jaxckpt.SAVE}), 3), (None, 6)]
)
def test_a_kernel_whose_results_are_kept_is_not_run_again(policy, runs):
    assert count_kernels(jaxckpt.checkpoint(with_kernel, policy=policy)) == runs


@pytest.mark.parametrize("policy", [jaxckpt.Policy({"kernel_rule/*": jaxckpt.SAVE}), None])
def test_a_function_with_a_kernel_has_the_same_gradient(policy):
    x = jnp.linspace(-1, 1, 1024).reshape(8, 128)
    wanted = jax.jit(jax.grad(with_kernel))(x)
    np.testing.assert_allclose(jax.jit(jax.grad(jaxckpt.checkpoint(with_kernel, policy=policy)))(x), wanted, rtol=1e-6)
    batched = jax.vmap(jax.grad(jaxckpt.checkpoint(with_kernel, policy=policy)))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(batched[0], wanted, rtol=1e-6)
