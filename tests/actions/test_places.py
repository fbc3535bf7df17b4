"""Where values may lie that an action changes, and what the engine costs besides the action."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import OFFLOAD, RECOMPUTE, SAVE, Action, Plan, Policy, compress, tag, where
from jaxckpt.actions import KINDS
from tests.helpers import executions

W = jax.random.normal(jax.random.key(0), (32, 64)) / 6
X = jax.random.normal(jax.random.key(1), (128, 32))
WIDE = 128 * 64 * 4
SMALL = compress("bfloat16")


@pytest.fixture
def same():
    """An action that goes through the engine for changes, and changes nothing."""

    class Same(Action):
        kind = "same"
        changes = True

        def encode(self, x):
            return x

        def decode(self, stored, like):
            return stored

    yield Same()
    del KINDS["same"]


def layer(w, x):
    return jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x


@pytest.mark.compile
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_the_engine_itself_costs_no_operation_and_hardly_a_byte(same, scanned):
    def model(policy):
        wrapped = jaxckpt.checkpoint(layer, policy=policy, prevent_cse=not scanned)

        def loss(w, x):
            if scanned:
                x = jax.lax.scan(lambda x, _: (wrapped(w, x), None), x, None, length=6)[0]
            else:
                for _ in range(6):
                    x = wrapped(w, x)
            return jnp.sum(x**2)

        return loss

    def figures(policy):
        report = jaxckpt.measure(jax.value_and_grad(model(policy)), W, X, target="cpu")
        count = executions(jax.grad(model(policy)), W, X)
        kept = jaxckpt.residuals(model(policy), W, X).kept_bytes
        return report.peak_bytes, kept, count["dot_general"], count["tanh"]

    saved, through = figures(Policy({"hidden": SAVE})), figures(Policy({"hidden": same}))
    own = figures(jax.checkpoint_policies.save_only_these_names("hidden"))
    # JAX's own policy of names runs tanh again, whose derivative reads the result from before its name.
    assert through[1:] == saved[1:] and saved[1] == own[1] and saved[2] <= own[2]
    assert through[0] <= 1.01 * saved[0] + WIDE
    exact = jax.grad(model(Policy({"hidden": SAVE})))(W, X)
    np.testing.assert_array_equal(jax.grad(model(Policy({"hidden": same})))(W, X), exact)


def blocks(policy, scanned):
    def block(w, x):
        return layer(w, tag(x, "in"))

    wrapped = jaxckpt.checkpoint(block, policy=policy)

    def loss(w, x):
        x = jnp.sin(x)
        if scanned:
            x = jax.lax.scan(lambda x, _: (wrapped(w, x), None), x, None, length=4)[0]
        else:
            for _ in range(4):
                x = wrapped(w, x)
        return jnp.sum(x**2)

    return loss


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_a_tagged_argument_is_kept_in_another_form_instead_of_itself(scanned):
    policies = {action: Policy({"in": action}) for action in (RECOMPUTE, SAVE, OFFLOAD, SMALL)}
    kept = {a: jaxckpt.residuals(blocks(p, scanned), W, X).kept_bytes for a, p in policies.items()}
    assert kept[RECOMPUTE] == kept[SAVE] == kept[OFFLOAD]
    assert kept[SAVE] - kept[SMALL] == 4 * X.nbytes // 2
    traced = {a: str(jax.make_jaxpr(jax.grad(blocks(p, scanned)))(W, X)) for a, p in policies.items()}
    assert "Host" in traced[OFFLOAD] and "Host" not in traced[SAVE]
    exact = jax.grad(blocks(None, scanned))(W, X)
    for action, bound in ((SAVE, 1e-5), (OFFLOAD, 1e-5), (SMALL, 0.03)):
        got = jax.grad(blocks(policies[action], scanned))(W, X)
        assert float(jnp.max(jnp.abs(got - exact))) <= bound * float(jnp.max(jnp.abs(exact)))


def test_a_plan_holds_an_action_of_an_argument():
    fun = lambda w, x: jnp.sum(layer(w, tag(x, "in")))
    plan = Policy({"in": SMALL}).plan(jaxckpt.trace(fun, W, X))
    assert Plan.from_json(plan.to_json()) == plan
    assert jaxckpt.residuals(plan.apply(fun), W, X).kept_bytes == X.nbytes // 2
    rounded = jax.grad(fun)(W, X.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(jax.grad(plan.apply(fun))(W, X), rounded, rtol=1e-5, atol=1e-4)


@jax.custom_vjp
def flash(q, k):
    return jnp.tanh(q @ k)


def flash_forward(q, k):
    scores = q @ k
    return jnp.tanh(scores), (q, k, jnp.tanh(scores), jnp.cos(scores))


def flash_backward(residuals, g):
    q, k, out, _ = residuals
    scores = g * (1 - out * out)
    return scores @ k.T, q.T @ scores


flash.defvjp(flash_forward, flash_backward)


@pytest.mark.parametrize("action", [SMALL, compress("int8"), SMALL | OFFLOAD], ids=repr)
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_residuals_of_custom_rules(action, scanned):
    step = lambda w, x: jnp.sin(flash(x, w)) @ w.T + x

    def loss(w, x):
        if scanned:
            return jnp.sum(jax.lax.scan(lambda x, _: (step(w, x), None), x, None, length=2)[0] ** 2)
        return jnp.sum(step(w, step(w, x)) ** 2)

    found = {a: jaxckpt.checkpoint(loss, policy=Policy({"flash/[23]": a})) for a in (SAVE, action)}
    saved, small = (jaxckpt.residuals(f, W, X).kept_bytes for f in found.values())
    one = action.stored_bytes(jaxckpt.core.graph.Value(0, (128, 64), jnp.dtype("float32"), WIDE))
    assert saved == 4 * WIDE and small == 4 * one
    exact = jax.grad(loss)(W, X)
    got = jax.grad(found[action])(W, X)
    assert 0 < float(jnp.max(jnp.abs(got - exact))) < 0.02 * float(jnp.max(jnp.abs(exact)))
    count = [executions(jax.grad(f), W, X)["dot_general"] for f in found.values()]
    assert count[0] == count[1]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("action", [SMALL, SMALL | OFFLOAD], ids=repr)
def test_inside_of_a_shard_map_with_the_checkpoint_outside(action, check):
    mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x):
        body = lambda x, _: (layer(w, x), None)
        return jax.lax.psum(jnp.sum(jax.lax.scan(body, layer(w, x), None, length=2)[0] ** 2), "b")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("b")), out_specs=P(), check_vma=check)
    saved, small = (jaxckpt.checkpoint(mapped, policy=Policy({"hidden": a})) for a in (SAVE, action))
    kept = [jaxckpt.residuals(f, W, X).kept_bytes for f in (saved, small)]
    assert kept[0] - kept[1] == 3 * WIDE // 2
    assert executions(jax.grad(small), W, X)["tanh"] == 3
    exact, got = (jax.jit(jax.grad(f))(W, X) for f in (mapped, small))
    assert 0 < float(jnp.max(jnp.abs(got - exact))) < 0.01 * float(jnp.max(jnp.abs(exact)))


def test_masks_of_relu_and_dropout_take_a_bit_a_value_and_gradients_are_bitwise_equal():
    def dropped(w, x, key):
        x = jnp.where(x > 0, x, 0)  # relu
        return x + jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)

    def loss(policy):
        layer = jaxckpt.checkpoint(dropped, policy=policy)

        def run(w, x):
            for place in range(3):
                x = layer(w, x - 0.1, jax.random.key(place))
            return jnp.sum(x**2)

        return run

    masks = lambda action: Policy([(where(lambda value: value.dtype == bool), action)])
    count = {a: jaxckpt.residuals(loss(masks(a)), W, X).kept_bytes for a in (SAVE, compress("bits"))}
    assert count[SAVE] - count[compress("bits")] == 3 * 2 * (X.size - X.size // 8)
    got, exact = (jax.grad(loss(masks(a)), 1)(W, X) for a in (compress("bits"), SAVE))
    np.testing.assert_array_equal(got, exact)


def test_a_branch_inside_of_a_shard_map():
    mesh = jax.make_mesh((1,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P("m")

    def fun(w, x):
        def body(w, x):
            hidden = lambda x: jnp.sin(tag(jnp.tanh(x @ w), "h")) @ w.T
            return jax.lax.cond(jnp.sum(x) > 0, hidden, lambda x: 2 * x, x)

        return jnp.sum(jax.shard_map(body, mesh=mesh, in_specs=(P(), spec), out_specs=spec)(w, x) ** 2)

    args = jnp.ones((16, 16)) / 20, jnp.ones((8, 16))
    exact = jax.grad(fun)(*args)
    got = jax.grad(jaxckpt.checkpoint(fun, policy=Policy({"h": compress("bfloat16")})))(*args)
    assert 0 < float(jnp.max(jnp.abs(got - exact))) < 0.01 * float(jnp.max(jnp.abs(exact)))


def clipped(x):
    return jnp.sum(jnp.sin(jnp.clip(jnp.sin(x), -0.5, 0.5) * x))


def clipped_in_a_scan(x):
    def step(c, x):
        return (c[0] + clipped(x * c[0]), jnp.clip(jnp.float32(0.3), 0.0, 1.0)), None

    (total, last), _ = jax.lax.scan(step, (1.0, jnp.float32(0.3)), x.reshape(4, -1))
    return total * last


def clipped_in_a_branch(x):
    return jax.lax.cond(x[0] < 0, clipped, lambda x: clipped(2 * x) * jnp.clip(jnp.float32(0.3), 0.0, 1.0), x)


@pytest.mark.parametrize("planned", [False, True], ids=["checkpoint", "plan"])
@pytest.mark.parametrize("fun", [clipped, clipped_in_a_scan, clipped_in_a_branch])
def test_numbers_that_jax_computes_as_it_traces_again_may_be_kept(fun, planned, same):
    """The bounds of `jnp.clip` become literals when the calls are written out and traced again."""
    x = jnp.linspace(-1, 1, 64)
    for policy in (
        Policy([(where(lambda value: True), same)]),
        Policy([(jaxckpt.op("convert_element_type"), SAVE), (jaxckpt.op("sin"), same)]),
    ):
        kept = policy.plan(jaxckpt.trace(fun, x)).apply(fun) if planned else jaxckpt.checkpoint(fun, policy=policy)
        np.testing.assert_allclose(jax.grad(kept)(x), jax.grad(fun)(x), rtol=1e-6)


@pytest.mark.parametrize("action", [jaxckpt.SAVE, jaxckpt.OFFLOAD, jaxckpt.compress("bfloat16")])
def test_an_input_that_is_tagged_is_listed_by_its_tag_whatever_keeps_it(action):
    def block(w, x):
        return jnp.tanh(jnp.tanh(jaxckpt.tag(x, "block_in") @ w) @ w)

    kept = jaxckpt.checkpoint(block, policy=jaxckpt.Policy({"block_in": action}))
    report = jaxckpt.residuals(lambda w, x: jnp.sum(kept(w, kept(w, x * 2))), jnp.eye(8), jnp.ones((16, 8)))
    assert [each.name for each in report.residuals if not each.argument] == ["block_in"] * 2
