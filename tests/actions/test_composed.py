"""Actions in a row: `compress("int8") | OFFLOAD` and the like."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import OFFLOAD, RECOMPUTE, SAVE, ArgumentError, Plan, Policy, Target, compress, shard, tag
from jaxckpt.actions import action_from, given
from jaxckpt.actions.base import Composed
from jaxckpt.core.graph import Value
from tests.helpers import executions

W = jax.random.normal(jax.random.key(0), (32, 256)) / 6
X = jax.random.normal(jax.random.key(1), (64, 32))
AWAY = compress("int8") | OFFLOAD
PAIRS = [AWAY, compress("bfloat16") | shard("model"), shard((None, "model")) | OFFLOAD, compress("bits") | OFFLOAD]


def value(shape, dtype="float32"):
    return Value(0, shape, jnp.dtype(dtype), int(np.prod(shape)) * jnp.dtype(dtype).itemsize)


def loss(w, x):
    for _ in range(3):
        x = jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x
    return jnp.sum(x**2)


def scanned(w, x):
    body = lambda x, _: (jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x, None)
    return jnp.sum(jax.lax.scan(body, x, None, length=3)[0] ** 2)


def branched(w, x):
    wide = lambda x: jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x
    for sign in (1, 1, 1):
        x = jax.lax.cond(sign * jnp.sum(x**2) > 0, wide, lambda x: 2 * x, x)
    return jnp.sum(x**2)


@pytest.mark.parametrize("action", PAIRS, ids=repr)
def test_they_are_values_that_print_and_go_through_json(action):
    names = {"compress": compress, "OFFLOAD": OFFLOAD, "shard": shard, "P": jax.sharding.PartitionSpec}
    for again in (eval(repr(action), names), action_from(action.to_json()), copy.deepcopy(action)):
        assert again == action and hash(again) == hash(action) and repr(again) == repr(action)
    assert pickle.loads(pickle.dumps(action)) == action
    assert action != action.parts[0] and action not in (SAVE, RECOMPUTE, OFFLOAD)


def test_the_order_counts_and_brackets_do_not():
    first, second, third = compress("int8"), shard("model"), OFFLOAD
    assert (first | second) | third == first | (second | third) == Composed((first, second, third))
    assert first | second != second | first
    assert SAVE | first == first | SAVE == first and SAVE | SAVE == SAVE
    assert SAVE | first | SAVE | third == first | third


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: RECOMPUTE | SAVE, "RECOMPUTE keeps nothing"),
        (lambda: compress("int8") | RECOMPUTE, "RECOMPUTE keeps nothing"),
        (lambda: OFFLOAD | compress("int8"), r"Write compress\('int8'\) \| OFFLOAD"),
        (lambda: OFFLOAD | OFFLOAD, "moved to the host once"),
        (lambda: compress("int8") | compress("bfloat16"), "both round values"),
        (lambda: action_from({"kind": "composed", "parts": ["offload"]}), "at least two actions"),
        (lambda: action_from({"kind": "composed", "parts": "offload"}), "at least two actions"),
        (lambda: SAVE | 3, "each side of . must be an action; got 3"),
        (lambda: action_from({"kind": "composed"}), "composed with the parameters that it has"),
        (lambda: action_from({"kind": "composed", "parts": ["offload", "squeeze"]}), "one of recompute"),
    ],
)
def test_what_does_not_go_together(made, message):
    with pytest.raises(ArgumentError, match=message):
        made()


def test_bytes_costs_errors_and_refusals_are_those_of_the_parts():
    wide, small = value((64, 256)), compress("int8")
    assert AWAY.device_bytes(wide) == 0 and AWAY.host_bytes(wide) == small.device_bytes(wide)
    assert AWAY.cost(wide).host_bytes == 2 * small.device_bytes(wide)
    assert AWAY.cost(wide).flops == small.cost(wide).flops > 0
    assert AWAY.error("float32") == small.error("float32") > 0
    assert AWAY.refusal(Target("cpu")) == OFFLOAD.refusal(Target("cpu"))
    assert AWAY.changes and AWAY.on_host and AWAY.keeps and not PAIRS[1].on_host


def test_a_part_that_does_not_admit_a_value_is_left_out():
    assert given(AWAY, value((64, 256))) == AWAY
    assert given(AWAY, value((64,), "int32")) == OFFLOAD == given(AWAY, value(()))
    assert given(compress("bits") | shard("model"), value((8, 8))) == shard("model")
    assert given(compress("int8") | shard((None, None, "model")), value((8, 8), "int32")) == SAVE


@pytest.mark.parametrize("fun", [loss, scanned, branched], ids=lambda fun: fun.__name__)
@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_encoded_values_are_kept_on_the_host(fun, form):
    away = compress(form) | OFFLOAD
    found = {a: jaxckpt.checkpoint(fun, policy=Policy({"hidden": a})) for a in (SAVE, compress(form), away)}
    kept = {a: jaxckpt.residuals(f, W, X).kept_bytes for a, f in found.items()}
    wide = value((64, 256))
    assert kept[SAVE] - kept[away] == 3 * (wide.bytes - away.host_bytes(wide))
    assert kept[away] == kept[compress(form)]
    assert executions(jax.grad(found[away]), W, X)["tanh"] == 3
    gradient, small = (jax.jit(jax.grad(found[a]))(W, X) for a in (away, compress(form)))
    np.testing.assert_allclose(gradient, small, rtol=1e-4, atol=1e-4)
    moved = str(jax.make_jaxpr(jax.grad(found[away]))(W, X)).count("Host")
    assert moved > str(jax.make_jaxpr(jax.grad(found[compress(form)]))(W, X)).count("Host") == 0


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["in", "up"])
def test_eight_gpus_save_what_one_saves_in_unrolled_layers(name):
    """XLA puts off the gradients of weights that devices add up: a layer's are computed before the layer before."""

    def temporaries(target):
        mesh = Target(target).mesh((Target(target).count,), ("d",))
        shaped = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        weights = [(shaped(P(), 256, 1024), shaped(P(), 1024, 256))] * 8
        x = shaped(P("d"), 2048 * Target(target).count, 256)
        block = lambda x, w: jnp.tanh(tag(x, "in") + jnp.sin(jax.nn.gelu(tag(tag(x, "in") @ w[0], "up")) @ w[1]))
        layer = jaxckpt.checkpoint(block, policy=Policy({name: compress("int8")}))
        loss = lambda ws, x: jnp.mean(functools.reduce(layer, ws, x) ** 2)
        return jaxckpt.measure(jax.value_and_grad(loss), weights, x, target=target, generate_code=False).temp_bytes

    assert temporaries("cuda:h100x8") < 1.2 * temporaries("cuda:h100")


@pytest.mark.tpu
@pytest.mark.parametrize("scan", [True, False])
def test_scales_take_their_bytes_on_a_tpu_s_host(scan):
    """Rows of 32 scales would be padded to 128."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 512, 4096), (4, 4096, 512), (1024, 512))]
    layer = lambda x, w: (x + jax.nn.gelu(tag(x @ w[0], "up")) @ w[1], None)
    body = jaxckpt.checkpoint(layer, policy=Policy({"up": AWAY}), prevent_cse=not scan)

    def loss(up, down, x):
        if scan:
            return jnp.sum(jax.lax.scan(body, x, (up, down))[0].astype(jnp.float32))
        for w in zip(up, down):
            x, _ = body(x, w)
        return jnp.sum(x.astype(jnp.float32))

    found = jaxckpt.measure(jax.grad(loss), *shapes, target="tpu:v5e:2x2", generate_code=False)
    assert found.host_bytes == pytest.approx(4 * AWAY.host_bytes(value((1024, 4096), "bfloat16")), rel=0.01)


def test_plans_hold_them():
    graph = jaxckpt.trace(loss, W, X)
    plan = Policy({"hidden": AWAY}).plan(graph)
    assert Plan.from_json(plan.to_json()) == plan and "compress('int8') | OFFLOAD hidden" in plan.describe(graph)
    np.testing.assert_allclose(
        jax.grad(plan.apply(loss))(W, X), jax.grad(jaxckpt.checkpoint(loss, policy=Policy({"hidden": AWAY})))(W, X)
    )


def mixed(w, x, key):
    """Tied weights, several tags, dtypes of all kinds, a scan in a branch in a checkpoint."""
    order = tag(jnp.argsort(x[:, 0]), "order")
    mask = tag(jax.random.bernoulli(key, 0.5, (64, 256)), "mask")
    narrow = tag((x[order] @ w).astype(jnp.bfloat16), "narrow")
    hidden = jnp.where(mask, jnp.tanh(narrow.astype(jnp.float32)), 0)
    body = lambda c, k: (jnp.sin(tag(c @ w, "inner")) @ w.T, jax.random.uniform(tag(k, "key")))
    keys = jax.random.split(key, 2)
    deep = jax.lax.cond(jnp.sum(w) < 1e9, lambda h: jax.lax.scan(body, h, keys)[0], lambda h: h, hidden @ w.T)
    return jnp.sum(tag(deep, "deep") ** 2)


@pytest.mark.parametrize("action", [OFFLOAD, compress("bits"), compress("bits") | OFFLOAD, compress("bfloat16"), AWAY])
def test_every_tag_of_a_mixed_program(action):
    key = jax.random.key(3)
    exact = jax.grad(mixed)(W, X, key)
    within = 0.05 if action.error("float32") else 1e-3  # compiled, the bfloat16 in the program rounds elsewhere
    for tags in (["order", "mask", "narrow", "inner", "key", "deep"], ["mask"], ["inner", "deep"]):
        policies = [Policy(dict.fromkeys(tags, each)) for each in (SAVE, action)]
        saved, kept = (jaxckpt.checkpoint(mixed, policy=policy) for policy in policies)
        most = jaxckpt.residuals(saved, W, X, key).kept_bytes
        assert jaxckpt.residuals(kept, W, X, key).kept_bytes <= most
        bounds = {lambda f: f: within if within > 0.01 else 1e-5, jax.jit: within}
        for wrap, bound in bounds.items():
            got = wrap(jax.grad(kept))(W, X, key)
            assert float(jnp.max(jnp.abs(got - exact))) <= bound * float(jnp.max(jnp.abs(exact)))
    many = jax.vmap(jax.grad(kept), (None, 0, None))(W, jnp.stack([X, X]), key)
    assert all(float(jnp.max(jnp.abs(g - exact))) <= within * float(jnp.max(jnp.abs(exact))) for g in many)


def test_all_short_rows_of_actions_are_equal_however_bracketed():
    parts = [SAVE, compress("bits"), shard("model"), shard((None, "data"))]
    for a, b, c in itertools.product(parts, repeat=3):
        assert (a | b) | c == a | (b | c)
