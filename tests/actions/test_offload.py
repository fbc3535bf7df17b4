"""OFFLOAD in a policy: what it names is on the host between the passes, in scans and unrolled, beside other actions,
and in derivatives of derivatives.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import OFFLOAD, RECOMPUTE, SAVE, Plan, Policy, compress, tag
from jaxckpt.core.regions import Loop, Region
from jaxckpt.memory.targets import target_of
from jaxckpt.schedules import Mixed, Slots, checkpointed
from tests.helpers import executions, gradient_executions

LAYERS, ROWS, WIDTH = 8, 2048, 128
UP = LAYERS * ROWS * 4 * WIDTH * 4  # bytes of all that is called "up"
FORMS = ("unrolled", "scanned", "scanned, prevent_cse")


def layers(form, action):
    """A loss of MLP layers under a checkpoint each."""
    policy = Policy({"up": action})
    checkpoint = functools.partial(jaxckpt.checkpoint, policy=policy, prevent_cse=form != "scanned")
    layer = checkpoint(lambda x, w: x + jnp.sin(tag(x @ w[0], "up")) @ w[1])

    def loss(ws, x):
        if form == "unrolled":
            for w in zip(*ws):
                x = layer(x, w)
        else:
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, ws)
        return jnp.sum(x**2)

    return loss


SHAPES = (LAYERS, WIDTH, 4 * WIDTH), (LAYERS, 4 * WIDTH, WIDTH)


def report(form, action, target):
    ws = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES)
    if form == "unrolled":
        ws = tuple([jax.ShapeDtypeStruct(w.shape[1:], w.dtype)] * LAYERS for w in ws)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return jaxckpt.measure(jax.value_and_grad(layers(form, action)), ws, x, target=target, generate_code=False)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_the_h100_holds_none_of_it_between_the_passes(form):
    """With or without a loop: neither the values, nor weights, nor what the gradients of all layers are made of."""
    none, saved, away = (report(form, action, "cuda:h100") for action in (RECOMPUTE, SAVE, OFFLOAD))
    assert saved.peak_bytes - none.peak_bytes > 0.8 * UP
    assert away.host_bytes == pytest.approx(UP, rel=0.01) and none.host_bytes == saved.host_bytes == 0
    assert away.peak_bytes <= none.peak_bytes + 3 * UP / LAYERS


@pytest.mark.cuda
def test_compressed_values_go_to_the_host_unrolled():
    none, away = (report("unrolled", action, "cuda:h100") for action in (RECOMPUTE, compress("int8") | OFFLOAD))
    assert away.host_bytes == pytest.approx(UP * (1 / 4 + 1 / 128), rel=0.01)
    assert away.peak_bytes <= none.peak_bytes + 3 * UP / LAYERS


@pytest.mark.cuda
@pytest.mark.parametrize("inner", [OFFLOAD, compress("int8") | OFFLOAD], ids=repr)
def test_what_a_checkpoint_in_a_checkpoint_offloads_leaves_the_device(inner):
    """Both offload: the results of the outer one wait for the copies of the inner one, too."""

    def measured(outer, inner):
        mlp = lambda x, w: x + jnp.tanh(tag(jnp.sin(x @ w), "up")) @ w.T
        layer = jaxckpt.checkpoint(mlp, policy=None if inner is None else Policy({"*": inner}))
        policy = None if outer is None else Policy({"*": outer})
        block = jaxckpt.checkpoint(lambda x, w: jnp.sin(tag(layer(x, w), "out")), policy=policy)
        loss = lambda ws, x: jnp.mean(functools.reduce(block, ws, x) ** 2)
        ws = [jax.ShapeDtypeStruct((WIDTH, 8 * WIDTH), jnp.float32)] * LAYERS
        x = jax.ShapeDtypeStruct((4 * ROWS, WIDTH), jnp.float32)
        return jaxckpt.measure(jax.value_and_grad(loss), ws, x, target="cuda:h100", generate_code=False)

    one, both = measured(OFFLOAD, None), measured(OFFLOAD, inner)
    kept = LAYERS * 4 * ROWS * (WIDTH + 8 * WIDTH) * 4
    assert one.host_bytes == both.host_bytes == pytest.approx(kept, rel=0.01)
    assert both.peak_bytes <= 1.01 * one.peak_bytes < kept


@pytest.mark.tpu
@pytest.mark.parametrize("form", FORMS)
def test_the_tpu_holds_none_of_it(form):
    """Unrolled too, where the compiler takes barriers out: there a fetch depends on the cotangents' numbers."""
    none, away = (report(form, action, "tpu:v5e:2x2") for action in (RECOMPUTE, OFFLOAD))
    assert away.host_bytes == pytest.approx(UP, rel=0.01)
    assert away.peak_bytes <= none.peak_bytes + 3 * UP / LAYERS


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("cuda:h100", marks=pytest.mark.cuda),
        pytest.param("cuda:h100x8", marks=pytest.mark.cuda),
        pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu),
    ],
)
def test_in_shard_map_nothing_of_a_layer_waits_for_the_gradients_of_weights_that_devices_add_up(target):
    """Weights are the same on all devices and rows are not: what goes on to the layer before waits for both."""
    devices = target_of(target).count
    mesh = target_of(target).mesh((devices,), ("d",))
    shaped = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    args = tuple([shaped(P(), *shape[1:])] * LAYERS for shape in SHAPES), shaped(P("d"), devices * ROWS, WIDTH)

    def temporaries(action, check):
        part = lambda ws, x: lax.psum(layers("unrolled", action)(ws, x), "d")
        loss = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=check)
        return jaxckpt.measure(jax.value_and_grad(loss), *args, target=target, generate_code=False).temp_bytes

    away = temporaries(OFFLOAD, True)
    assert away <= temporaries(OFFLOAD, False) + UP / LAYERS
    assert away <= temporaries(RECOMPUTE, True) + 3 * UP / LAYERS


def tiled(shape):
    """Returns a shape as a TPU lays it out: in tiles of 8 x 128."""
    return [-(-side // tile) * tile for side, tile in zip(shape, [*[1] * (len(shape) - 2), 8, 128][-len(shape) or 2 :])]


@pytest.mark.tpu
@pytest.mark.parametrize("shape", [(0, 5), (), (1, 9), (2047, 511), (3, 5, 257)])
def test_a_tpu_fetches_arrays_of_any_shape(shape):
    layer = jaxckpt.checkpoint(lambda x: jnp.sin(tag(jnp.cos(x), "h")) * x, policy=Policy({"h": OFFLOAD}))
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    step = jax.value_and_grad(lambda x: jnp.sum(layer(layer(layer(x)))))
    made = jaxckpt.measure(step, x, target="tpu:v5e:2x2", generate_code=False)
    size, padded = (4 * math.prod(sides) for sides in (shape, tiled(shape)))
    assert 3 * size <= made.host_bytes <= 3 * padded + 2**15 and (made.host_bytes > 0) == (size > 0)


@pytest.mark.tpu
def test_a_tpu_fetches_in_shard_map_what_each_layers_backward_pass_reads_when_it_begins():
    """What has come back may stay there for longer: XLA puts off the matmuls of gradients that devices add up."""
    mesh = target_of("tpu:v5e:2x2").mesh((4,), ("d",))
    shaped = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    args = tuple([shaped(P(), *shape[1:])] * LAYERS for shape in SHAPES), shaped(P("d"), 4 * ROWS, WIDTH)

    part = lambda ws, x: lax.psum(layers("unrolled", OFFLOAD)(ws, x), "d")
    loss = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    made = jaxckpt.measure(jax.value_and_grad(loss), *args, target="tpu:v5e:2x2", generate_code=False)
    assert made.host_bytes == pytest.approx(UP, rel=0.01)
    (main,) = (space for space in made.spaces() if space.name == "main memory")
    halves = sorted(life.first for life in main.lifetimes if "dynamic_slice" in life.buffer.operation)
    assert len(halves) == 2 * LAYERS
    assert all(later - last > 10 for last, later in zip(halves[1::2], halves[2::2])), "a layer's, and then the next's"


def test_what_the_derivative_does_not_read_is_not_kept_on_the_host():
    """What tells when a backward pass begins takes all that is on the host, and holds none of it."""

    def fun(w, x):
        return jnp.sum(tag(jnp.sin(tag(x @ w, "read")) + 1.0, "unread"))

    away = jaxckpt.checkpoint(fun, policy=Policy({"read": OFFLOAD, "unread": OFFLOAD}))
    assert [kept.name for kept in jaxckpt.residuals(away, W, X).residuals if not kept.argument] == ["read"]


# ------------------------------------------------------------------------------------------------------- beside others

W = 0.3 * jax.random.normal(jax.random.key(0), (8, 8))
X = jax.random.normal(jax.random.key(1), (4, 8))


def two(w, x):
    """Two values, one computed from the other."""
    return jnp.tanh(tag(jnp.cos(tag(jnp.sin(x @ w), "first")), "second") @ w)


def chain(policy, form="unrolled"):
    step = two if policy is None else jaxckpt.checkpoint(two, policy=policy)
    if form == "unrolled":
        return lambda w, x: jnp.sum(step(w, step(w, x)) ** 2)
    body = (lambda w, x: step(w, step(w, x))) if form == "two in a scan" else step
    return lambda w, x: jnp.sum(lax.scan(lambda x, _: (body(w, x), None), x, None, length=2)[0] ** 2)


@pytest.mark.parametrize("first", [SAVE, OFFLOAD, compress("bfloat16")], ids=repr)
@pytest.mark.parametrize("second", [SAVE, OFFLOAD, compress("bfloat16")], ids=repr)
@pytest.mark.parametrize("form", ["checkpoint", "plan"])
def test_what_is_kept_is_not_computed_again_whatever_the_rest_is_kept_as(first, second, form):
    policy = Policy({"first": first, "second": second})
    fun = jaxckpt.checkpoint(two, policy=policy)
    if form == "plan":
        fun = policy.plan(jaxckpt.trace(two, W, X)).apply(two)
    counts = gradient_executions(lambda w: jnp.sum(fun(w, X)), W)
    assert counts["sin"] == counts["cos"] == 2  # the value and the other one's derivative
    assert counts["dot_general"] == 7 and counts["device_put"] == 2 * [first, second].count(OFFLOAD)


def a_loop(length):
    """A loss with a scan; its graph, the values by their tags, and the scan's place."""

    def scanned(w, x):
        return jnp.sum(lax.scan(lambda x, _: (two(w, x), None), x, None, length=length)[0])

    graph = jaxckpt.trace(scanned, W, X)
    named = {tag: value.index for value in graph.values for tag in value.tags}
    (op,) = (place for place, op in enumerate(graph.ops) if op.primitive == "scan")
    return scanned, graph, named, op


def test_a_loop_of_a_plan_keeps_values_on_the_host_and_here():
    scanned, graph, named, op = a_loop(4)
    counts = []
    for actions in ({}, {"first": OFFLOAD, "second": SAVE}):
        kept = {named[name]: action for name, action in actions.items()}
        plan = Plan((), graph.fingerprint, loops=(Loop(op, checkpointed(4, (), kept)),))
        counts.append(gradient_executions(lambda w: plan.apply(scanned)(w, X), W))
    assert counts[0]["sin"] - counts[1]["sin"] == counts[0]["cos"] - counts[1]["cos"] == 4


# --------------------------------------------------------------------------------------- derivatives, all kinds of them


@pytest.mark.parametrize("form", ["unrolled", "scanned", "two in a scan"])
def test_derivatives_of_derivatives(form):
    """JAX's own policies with offloaded names fail in reverse mode over reverse mode (jax 0.10.2 to 0.12.0.1)."""
    exact, away = (chain(policy, form) for policy in (None, Policy({"first": OFFLOAD})))
    penalty = lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, X) ** 2))
    product = lambda f: lambda w: jax.jvp(jax.grad(lambda w: f(w, X)), (w,), (w,))[1]
    examples = lambda f: lambda w: jax.vmap(lambda x: jax.grad(f)(w, x))(jnp.stack([X, 2 * X]))
    again = (penalty, lambda f: jax.jit(penalty(f)))
    if form == "two in a scan" and jax.__version_info__ < (
        0,
        12,
    ):  # JAX takes cotangents of stacked values to the device
        with pytest.raises(ValueError, match="Expected cotangent type"):
            penalty(away)(W)
        again = ()
    for derivative in (*again, product, examples):
        np.testing.assert_allclose(derivative(away)(W), derivative(exact)(W), rtol=1e-4, atol=1e-5)


def test_integers_keys_and_what_is_not_differentiated_pass():
    def fun(w, frozen, key, rows, flag):
        h = tag(jnp.sin(frozen @ w), "h") * jax.random.uniform(key, (4, 8))
        return jnp.where(flag, h[rows], 0.0) @ w, (rows + 1, key, None)

    def loss(fun, w, frozen):
        out, (more, key, _) = fun(w, frozen, jax.random.key(2), jnp.arange(4), True)
        return jnp.sum(out**2), (more, key)

    away = jaxckpt.checkpoint(fun, policy=Policy({"h": OFFLOAD}))
    for argnums in (1, 2, (1, 2)):
        exact, _ = jax.grad(loss, argnums, has_aux=True)(fun, W, X)
        got, (more, key) = jax.grad(loss, argnums, has_aux=True)(away, W, X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, exact)
        assert more.tolist() == [1, 2, 3, 4] and key == jax.random.key(2)
    # No cotangent of the frozen input is computed: its matmul is missing.
    one = lambda w, x: loss(away, w, x)[0]
    both, some = (executions(jax.grad(one, argnums), W, X)["dot_general"] for argnums in ((0, 1), 0))
    assert some == both - 1


# -------------------------------------------------------------------------------------------------------- within others


def switched(index, x):
    return lax.switch(index, [lambda x: tag(jnp.sin(x), "h") ** 2, jnp.cos, lambda x: jnp.exp(tag(x * x, "h"))], x)


@pytest.mark.parametrize("action", [OFFLOAD, compress("int8"), compress("bfloat16") | OFFLOAD], ids=repr)
@pytest.mark.parametrize("form", ["unrolled", "scanned"])
def test_the_source_line_of_what_is_kept_is_the_users(form, action):
    found = jaxckpt.residuals(chain(Policy({"first": action}), form), W, X).residuals
    sources = [each.source for each in found if each.name == "first"]
    assert sources and all("test_offload.py" in source and source.endswith("(two)") for source in sources)


def test_branches_that_are_selected_from():
    """Under vmap over the index, all branches run."""
    away = jaxckpt.checkpoint(switched, policy=Policy({"h": OFFLOAD}))
    grads = lambda f: jax.vmap(jax.grad(lambda x, i: jnp.sum(f(i, x))))(jnp.stack([X, 2 * X, -X]), jnp.arange(3))
    np.testing.assert_allclose(grads(away), grads(switched), rtol=1e-6)


@pytest.mark.cuda
def test_the_h100_keeps_values_of_branches_in_a_scan_on_the_host():
    def report(action):
        layer = jaxckpt.checkpoint(
            lambda x, w: x + lax.cond(x[0, 0] > 0, lambda x: jnp.sin(tag(x @ w[0], "up")) @ w[1], jnp.sin, x),
            policy=Policy({"up": action}),
            prevent_cse=False,
        )
        loss = lambda ws, x: jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)
        args = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES)
        x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
        return jaxckpt.measure(jax.value_and_grad(loss), args, x, target="cuda:h100", generate_code=False)

    saved, away = report(SAVE), report(OFFLOAD)
    assert away.host_bytes == pytest.approx(UP, rel=0.01)
    assert away.peak_bytes < saved.peak_bytes - 0.7 * UP


@pytest.mark.cuda
def test_the_h100_takes_carries_and_values_of_segments_on_the_host():
    layer = jaxckpt.checkpoint(lambda x, w: x + jnp.sin(tag(x @ w[0], "up")) @ w[1], policy=Policy({"up": OFFLOAD}))

    def loss(ws, x):
        scanned = jaxckpt.scan(lambda x, w: (layer(x, w), None), x, ws, schedule="sqrt", carry=OFFLOAD)
        return jnp.sum(scanned[0] ** 2)

    args = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    found = jaxckpt.measure(jax.value_and_grad(loss), args, x, target="cuda:h100", generate_code=False)
    assert found.host_bytes > 2 * UP / LAYERS  # of one segment, and carries
    assert found.peak_bytes < report("scanned", SAVE, "cuda:h100").peak_bytes - 0.7 * UP


@pytest.mark.parametrize("outer", ["nothing", Policy({"first": SAVE}), Policy({"first": OFFLOAD})], ids=repr)
def test_an_outer_policy_reaches_what_an_inner_one_offloads(outer):
    def loss(two):
        return jaxckpt.checkpoint(lambda w, x: jnp.sum(two(w, jnp.tan(two(w, x)))), policy=outer)

    saved, away = (loss(jaxckpt.checkpoint(two, policy=Policy({"first": action}))) for action in (SAVE, OFFLOAD))
    np.testing.assert_allclose(jax.grad(away)(W, X), jax.grad(loss(two))(W, X), rtol=1e-5)
    ran, expected = (gradient_executions(fun, W, X) for fun in (away, saved))
    assert [ran[name] - expected[name] for name in ("sin", "cos", "tan", "dot_general")] == [0, 0, 0, 0]


def test_a_function_with_offloaded_values_runs_in_tiles():
    away = jaxckpt.checkpoint(two, policy=Policy({"first": OFFLOAD}))
    loss = lambda f: lambda w, x: jnp.sum(f(w, x) ** 2)
    tiled = jaxckpt.tile(loss(away), in_axes=(None, 0), tiles=2)
    np.testing.assert_allclose(jax.grad(tiled)(W, X), jax.grad(loss(two))(W, X), rtol=1e-5)
    assert gradient_executions(tiled, W, X)["device_put"] >= 2


def test_a_function_with_side_effects_runs_forward_and_its_derivative_is_refused():
    seen = []

    def fun(w, x):
        h = tag(jnp.sin(x @ w), "h")
        io_callback(lambda x: seen.append(float(x)), None, h[0, 0])
        return jnp.sum(h)

    away = jaxckpt.checkpoint(fun, policy=Policy({"h": OFFLOAD}))
    assert jax.jit(away)(W, X) == pytest.approx(float(jnp.sum(jnp.sin(X @ W))))
    jax.effects_barrier()
    assert len(seen) == 1
    with pytest.raises(jaxckpt.EffectsError, match="side effects"):
        jax.grad(away)(W, X)


@pytest.mark.parametrize("action", [OFFLOAD, compress("bfloat16")], ids=repr)
@pytest.mark.parametrize("within", ["checkpoint", "shard_map", "branch", "scan"])
def test_what_branches_hold(within, action):
    kept = lambda x: tag(jnp.sin(x), "h") ** 2
    mesh = jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,))
    inner = {
        "checkpoint": jax.checkpoint(kept),
        "shard_map": jax.shard_map(kept, mesh=mesh, in_specs=P("d"), out_specs=P("d")),
        "branch": lambda x: lax.cond(x[0, 0] > 0, kept, jnp.cos, x),
        "scan": lambda x: lax.scan(lambda x, _: (kept(x), None), x, None, length=2)[0],
    }[within]
    fun = lambda w, x: jnp.sum(lax.cond(x[1, 1] < 9, lambda x: inner(x @ w), lambda x: x, x))
    away = jax.jit(jax.grad(jaxckpt.checkpoint(fun, policy=Policy({"h": action}))))
    got, exact = away(W, X), jax.grad(fun)(W, X)
    assert np.linalg.norm(got - exact) <= (1e-6 if action == OFFLOAD else 0.03) * np.linalg.norm(exact)


def test_what_nobody_differentiates_gets_no_zeros_that_meet_infinity():
    layer = jaxckpt.checkpoint(lambda w, z: (tag(jnp.sin(w), "h") ** 2, z), policy=Policy({"h": OFFLOAD}))

    def loss(w):
        y, z = layer(w, jnp.zeros(()))
        return jnp.sum(y * jnp.sqrt(z))

    _, tangent = jax.jvp(jax.grad(loss), (W,), (W,))
    assert not np.any(np.isnan(tangent))


@pytest.mark.cuda
def test_gradients_within_a_loop_are_ordered_too():
    """Gradients of several batches are added up in a loop: in an iteration there is all that there is outside."""
    loss = layers("unrolled", OFFLOAD)

    def accumulated(scan, ws, xs):
        add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(ws, x)), None)
        return scan(add, jax.tree.map(jnp.zeros_like, ws), xs)[0]

    ws = tuple([jax.ShapeDtypeStruct(shape[1:], jnp.float32)] * LAYERS for shape in SHAPES)
    xs = jax.ShapeDtypeStruct((2, ROWS, WIDTH), jnp.float32)
    for scan in (lax.scan, jaxckpt.scan):
        found = jaxckpt.measure(functools.partial(accumulated, scan), ws, xs, target="cuda:h100", generate_code=False)
        assert found.host_bytes == pytest.approx(UP, rel=0.01)
        assert found.peak_bytes < report("unrolled", SAVE, "cuda:h100").peak_bytes


@pytest.mark.parametrize("first", [0, 1])
def test_regions_that_share_a_program_keep_it_each_in_its_own_way(first):
    """One saves beside what it offloads, the other one only saves."""
    step = jax.jit(lambda w, x: lax.scan(lambda x, _: (two(w, x), None), x, None, length=3)[0])

    def fun(w, x):
        for place in range(2):
            x = step(w, tag(jnp.exp(x), f"exp{place}"))
        return jnp.sum(x)

    graph = jaxckpt.trace(fun, W, X)
    tagged = {name: [value.index for value in graph.values if name in value.tags] for name in ("first", "exp0", "exp1")}
    half = next(place for place, op in enumerate(graph.ops) if tagged["exp1"][0] in op.outputs)
    counts = []
    for saved in (True, False):
        actions = [{index: SAVE} if saved else {} for index in tagged["first"]]
        actions[first] |= {tagged[f"exp{first}"][0]: OFFLOAD}
        regions = Region(0, half, actions[0], tied=True), Region(half, len(graph.ops), actions[1], tied=True)
        counts.append(gradient_executions(Plan(regions, graph.fingerprint).apply(fun), W, X))
    assert counts[1]["sin"] - counts[0]["sin"] == 6


@pytest.mark.parametrize("prevent_cse", [False, (False, False)])
def test_in_a_scan_that_prevents_nothing_no_barrier_is_put(prevent_cse):
    layer = jaxckpt.checkpoint(two, policy=Policy({"first": OFFLOAD}), prevent_cse=prevent_cse)
    loss = lambda w, x: jnp.sum(lax.scan(lambda x, _: (layer(w, x), None), x, None, length=2)[0])
    assert gradient_executions(loss, W, X)["optimization_barrier"] == 0


def shared_layers(count, action, prevent_cse):
    """A loss of a loop whose body is so many layers under a checkpoint each; iterations share the weights."""
    layer = jaxckpt.checkpoint(
        lambda w, x: x + jnp.sin(tag(x @ w, "up")), policy=Policy({"up": action}), prevent_cse=prevent_cse
    )
    body = lambda ws, x: (functools.reduce(lambda x, w: layer(w, x), ws, x), None)
    return lambda ws, x: jnp.sum(lax.scan(lambda x, _: body(ws, x), x, None, length=4)[0] ** 2)


@pytest.mark.parametrize("action", [OFFLOAD, compress("int8")], ids=repr)
def test_in_a_loop_the_first_layer_of_the_body_is_not_held_and_those_after_it_are(action):
    """Nothing comes after the first one's gradients but the next iteration. Twice: traces are shared by equal calls."""
    barriers = lambda count, how: gradient_executions(shared_layers(count, action, how), [W] * count, X)[
        "optimization_barrier"
    ]
    for _ in range(2):
        assert barriers(1, True) == barriers(1, False)
        assert barriers(2, True) > barriers(2, False)


@pytest.mark.cuda
@pytest.mark.parametrize("action", [OFFLOAD, compress("int8")], ids=repr)
def test_in_a_loop_the_gradient_of_a_weight_is_added_to_the_sum_over_iterations_at_once(action):
    """Behind a barrier it would be an array of its own, one more weight's bytes."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 2048), (2048, 2048)))
    measured = lambda how: jaxckpt.measure(
        jax.value_and_grad(shared_layers(1, action, how)), [w], x, target="cuda:h100", generate_code=False
    )
    assert measured(True).peak_bytes <= measured(False).peak_bytes + 2**20  # 16 MiB is a weight


def test_a_loop_that_stores_some_iterations_keeps_what_slots_save():
    scanned, graph, named, op = a_loop(8)

    def counts(first, saved):
        slots = Slots(2, run_length=2, actions={named["second"]: SAVE} if saved else {})
        stored = checkpointed(4, (), {named["first"]: first, named["second"]: SAVE})
        plan = Plan((), graph.fingerprint, loops=(Loop(op, Mixed(((4, stored), (4, slots)))),))
        return gradient_executions(lambda w: plan.apply(scanned)(w, X), W)

    for saved in (True, False):
        assert counts(OFFLOAD, saved)["dot_general"] == counts(SAVE, saved)["dot_general"]
    assert counts(OFFLOAD, True)["sin"] != counts(OFFLOAD, False)["sin"]


POSITIVE = jnp.eye(6) * 3 + jax.random.normal(jax.random.key(5), (6, 6)) / 3
FACTORED = {
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(6)),
    "cholesky of complex values": lambda x: jnp.real(jnp.linalg.cholesky(x @ x.T + 1j * (x - x.T) / 9 + jnp.eye(6))),
    "solved by cholesky": lambda x: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(x @ x.T), jnp.cos(x)),
    "qr": lambda x: jnp.linalg.qr(x)[0] @ jnp.cos(x),
    "lu": lambda x: jax.scipy.linalg.lu(x)[2],
    "eigh": lambda x: jnp.linalg.eigh(x + x.T)[1] ** 2,
    "svd": lambda x: jnp.linalg.svd(x)[1] * x,
    "inverse": jnp.linalg.inv,
    "solved": lambda x: jnp.linalg.solve(x, jnp.cos(x)),
    "solved by a triangle": lambda x: lax.linalg.triangular_solve(x, jnp.cos(x), left_side=True, lower=True),
    "determinant": lambda x: jnp.linalg.slogdet(x)[1] * x,
    "exponential": lambda x: jax.scipy.linalg.expm(x / 9),
}


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", FACTORED)
def test_what_linear_algebra_leaves_undefined_is_not_kept(name, scanned):
    """The upper triangle of what the Cholesky factorization returns is undefined; its derivative takes it to be 0."""

    def loss(x):
        step = lambda x, _: (x + jnp.sin(FACTORED[name](x)) / 9, None)
        x = lax.scan(step, x, None, length=3)[0] if scanned else step(x, None)[0]
        return jnp.sum(jnp.sin(x) * jnp.arange(36.0).reshape(6, 6))

    expected = jax.jit(jax.grad(loss))(POSITIVE)
    names = "cholesky", "lu", "qr", "eigh", "svd", "triangular_solve", "custom_linear_solve"
    factors = functools.reduce(operator.or_, map(jaxckpt.op, names))
    for policy in (
        Policy(default=OFFLOAD),
        Policy(default=compress("bits")),
        Policy({factors: OFFLOAD}, default=SAVE),
        Policy({factors: SAVE}, default=OFFLOAD),
    ):
        gradient = jax.grad(jaxckpt.checkpoint(loss, policy=policy))
        assert "<host>" in str(jax.make_jaxpr(gradient)(POSITIVE)) or policy.default is not OFFLOAD, (
            "else it asks nothing"
        )
        found = jax.jit(gradient)(POSITIVE)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
