"""Regions and planned loops inside of loops, branches, loops in loops, mapped functions and calls: what is kept is what
they name, and no more.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import SAVE, Plan, PlanMismatchError, Policy, Region, tag
from jaxckpt.core.regions import Loop
from jaxckpt.schedules import checkpointed
from tests.actions.half import HALF, half_is_known
from tests.helpers import assert_trees_close, executions

__all__ = ["half_is_known"]
ROWS, WIDTH, HIDDEN = 64, 16, 48
W = jax.random.normal(jax.random.key(0), (WIDTH, HIDDEN)) / 6
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
WIDE = ROWS * HIDDEN * 4


def layer(x, w):
    return jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x


def scanned(w, x):
    return jnp.sum(jax.lax.scan(lambda x, _: (layer(layer(x, w), w), None), x, None, length=5)[0] ** 2)


def branched(w, x):
    both = [lambda x: layer(layer(x, w), w), lambda x: 2 * x]
    return jnp.sum(jax.lax.switch(jnp.argmax(x[0]) * 0, both, x) ** 2)


def nested(w, x):
    inner = lambda x: jax.lax.scan(lambda x, _: (layer(layer(x, w), w), None), x, None, length=2)[0]
    return jnp.sum(jax.lax.scan(lambda x, _: (inner(jnp.cos(x)), None), x, None, length=3)[0] ** 2)


def mapped(w, x, mesh=None):
    mesh = mesh or jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    both = jax.shard_map(lambda w, x: layer(layer(x, w), w), mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    return jnp.sum(both(w, x) ** 2)


MESH = jaxckpt.Target("cuda:h100").mesh((1,), ("d",))


def mapped_there(w, x):
    """Over a device of the target, which need not be here."""
    return mapped(w, x, MESH)


def called(w, x):
    here = SingleDeviceSharding(jax.devices()[0])
    return jnp.sum(jax.jit(lambda w, x: layer(layer(x, w), w), in_shardings=(here, here))(w, x) ** 2)


REPEATS = {scanned: 5, branched: 1, nested: 6, mapped: 1, called: 1}
COMPILED = {scanned: 5, branched: 1, nested: 6, mapped_there: 1}


def body_of(graph, depth):
    """Returns the address of the body that is so many loops or branches deep, and the body."""
    address, body = (), graph.body
    for _ in range(depth):
        op = next(op for op in body.ops if op.bodies)
        address, body = (*address, (op.index, 0)), op.bodies[0]
    return address, body


def halves(fun, action):
    """Returns a plan with a region around each of the two layers in the body, of which the first keeps its hidden
    value.
    """
    graph = jaxckpt.trace(fun, W, X)
    address, body = body_of(graph, 2 if fun is nested else 1)
    hidden = [value.index for value in graph.values if "hidden" in value.tags]
    middle = next(place for place, op in enumerate(body.ops) if op.primitive == "add") + 1
    regions = (
        Region(0, middle, {} if action is None else {hidden[0]: action}, body=address),
        Region(middle, len(body.ops), {}, body=address),
    )
    return Plan(regions, graph.fingerprint), graph


def kept(fun):
    """Returns the bytes of hidden values, and of all that is kept beside arguments."""
    residuals = [r for r in jaxckpt.residuals(fun, W, X).residuals if not r.argument]
    return sum(r.bytes for r in residuals if r.shape[-2:] == (ROWS, HIDDEN)), sum(r.bytes for r in residuals)


@pytest.mark.parametrize("fun", REPEATS, ids=lambda fun: fun.__name__)
def test_a_region_in_a_body_keeps_what_it_names(fun):
    none, _ = halves(fun, None)
    saved, _ = halves(fun, SAVE)
    half, _ = halves(fun, HALF)
    assert kept(none.apply(fun))[0] == 0 < kept(fun)[0]
    assert kept(saved.apply(fun))[0] == REPEATS[fun] * WIDE
    assert kept(half.apply(fun))[0] == REPEATS[fun] * WIDE // 2
    # Beside it each region keeps its input, and the loop or branch what it needs itself.
    assert kept(saved.apply(fun))[1] - kept(none.apply(fun))[1] == REPEATS[fun] * WIDE


@pytest.mark.compile
@pytest.mark.parametrize("fun", REPEATS, ids=lambda fun: fun.__name__)
def test_values_and_gradients_stay_and_what_is_kept_is_not_computed_again(fun):
    count = {}
    for action in (None, SAVE):
        plan, _ = halves(fun, action)
        step = jax.value_and_grad(plan.apply(fun), argnums=(0, 1))
        assert_trees_close(step(W, X), jax.value_and_grad(fun, argnums=(0, 1))(W, X), rtol=1e-4, atol=1e-3)
        assert_trees_close(jax.jit(step)(W, X), jax.value_and_grad(fun, argnums=(0, 1))(W, X), rtol=1e-4, atol=1e-3)
        count[action] = executions(jax.grad(plan.apply(fun)), W, X)["tanh"]
    assert count[None] - count[SAVE] == REPEATS[fun]
    assert count[None] == 2 * executions(jax.grad(fun), W, X)["tanh"]


@pytest.mark.parametrize("fun", REPEATS, ids=lambda fun: fun.__name__)
def test_a_policy_keeps_the_same_bytes(fun):
    policy = jaxckpt.checkpoint(fun, policy=Policy({"hidden": SAVE}))
    assert kept(policy) == (2 * REPEATS[fun] * WIDE,) * 2


def test_a_loop_in_a_loop_is_run_in_segments():
    """The inner scan of 8 iterations goes in segments of 4, so of each outer iteration two carries are kept."""

    def fun(w, x):
        inner = lambda x: jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, length=8)[0]
        return jnp.sum(jax.lax.scan(lambda x, _: (inner(x), None), x, None, length=3)[0] ** 2)

    graph = jaxckpt.trace(fun, W, X)
    address, body = body_of(graph, 1)
    place = next(place for place, op in enumerate(body.ops) if op.primitive == "scan")
    plan = Plan((), graph.fingerprint, loops=(Loop(place, checkpointed(8, (4,)), address),))
    assert kept(plan.apply(fun)) == (0, (3 * 2 + 1) * X.nbytes)  # one for the square of the result
    assert_trees_close(jax.grad(plan.apply(fun))(W, X), jax.grad(fun)(W, X), rtol=1e-4, atol=1e-3)
    assert Plan.from_json(plan.to_json()) == plan
    assert "in segments of 4" in plan.describe(graph)


def test_a_region_around_the_loop_and_one_inside():
    """The outer one drops all that the loop kept; the inner one holds while the loop runs again."""
    plan, graph = halves(scanned, SAVE)
    outer = Plan((Region(0, len(graph.ops)), *plan.regions), graph.fingerprint)
    assert kept(outer.apply(scanned)) == (0, 0)
    assert_trees_close(jax.grad(outer.apply(scanned))(W, X), jax.grad(scanned)(W, X), rtol=1e-4, atol=1e-3)


def test_such_plans_print_and_are_stored():
    plan, graph = halves(nested, HALF)
    again = Plan.from_json(plan.to_json())
    assert again == plan and hash(again) == hash(plan)
    text = plan.describe(graph)
    assert "Each time that scan (operation" in text and "keeps what goes in and out" in text and "half hidden" in text
    assert "inside of operation 0, 2" in str(plan)


@pytest.mark.parametrize(
    "body", [((99, 0),), ((0, 0),), ((1, 7),), ((1, 0), (99, 0))], ids=["nowhere", "no body", "no such body", "deeper"]
)
def test_an_address_of_no_body_is_a_mismatch(body):
    graph = jaxckpt.trace(lambda w, x: scanned(jnp.sin(w), x), W, X)
    with pytest.raises(
        PlanMismatchError, match="body must be one of a loop, a branch, a checkpoint, a jax.shard_map or a call"
    ):
        Plan((Region(0, 1, body=body),), graph.fingerprint).check(graph)


def test_what_an_address_must_be():
    for wrong in (3, "x", ((1,),), ((-1, 0),), (("a", 0),)):
        with pytest.raises(PlanMismatchError):
            Region(0, 1, body=wrong)
    with pytest.raises(PlanMismatchError, match="regions of a region must have its own body"):
        Region(0, 2, regions=(Region(0, 1, body=((1, 0),)),))
    while_loop = lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]
    graph = jaxckpt.trace(while_loop, X)
    (op,) = graph.ops
    with pytest.raises(PlanMismatchError, match="it is while"):
        Plan((Region(0, 1, body=((op.index, 1),)),), graph.fingerprint).check(graph)


def by_hand(fun, policy):
    """Returns the function with a checkpoint around each layer, the first of which keeps what the policy says."""
    first = jax.checkpoint(layer, policy=policy)
    both = lambda x, w: jax.checkpoint(layer)(first(x, w), w)

    def scan(w, x):
        return jnp.sum(jax.lax.scan(lambda x, _: (both(x, w), None), x, None, length=5)[0] ** 2)

    def nest(w, x):
        inner = lambda x: jax.lax.scan(lambda x, _: (both(x, w), None), x, None, length=2)[0]
        return jnp.sum(jax.lax.scan(lambda x, _: (inner(jnp.cos(x)), None), x, None, length=3)[0] ** 2)

    def branch(w, x):
        return jnp.sum(jax.lax.switch(jnp.argmax(x[0]) * 0, [lambda x: both(x, w), lambda x: 2 * x], x) ** 2)

    def shard(w, x):
        one = jax.shard_map(lambda w, x: both(x, w), mesh=MESH, in_specs=(P(), P("d")), out_specs=P("d"))
        return jnp.sum(one(w, x) ** 2)

    return {scanned: scan, branched: branch, nested: nest, mapped_there: shard}[fun]


LARGE = jax.ShapeDtypeStruct((256, 2048), jnp.float32), jax.ShapeDtypeStruct((4096, 256), jnp.float32)
LARGE_WIDE = 4096 * 2048 * 4


def peak(fun):
    return jaxckpt.measure(jax.value_and_grad(fun), *LARGE, target="cuda:h100", generate_code=False).peak_bytes


@pytest.mark.cuda
@pytest.mark.parametrize("fun", COMPILED, ids=lambda fun: fun.__name__)
def test_the_compiled_program_needs_no_more_than_checkpoints_by_hand(fun):
    graph = jaxckpt.trace(fun, *LARGE)
    peaks = []
    for action, policy in ((None, None), (SAVE, jax.checkpoint_policies.save_only_these_names("hidden"))):
        peaks.append(peak(Plan(halves(fun, action)[0].regions, graph.fingerprint).apply(fun)))
        hand = peak(by_hand(fun, policy))
        assert 0.9 * hand < peaks[-1] <= 1.01 * hand
    assert peaks[1] - peaks[0] >= max(COMPILED[fun] - 1, 0.5) * LARGE_WIDE


@pytest.mark.cuda
@pytest.mark.parametrize("fun", COMPILED, ids=lambda fun: fun.__name__)
def test_the_program_that_a_policy_compiles_to_holds_the_values_that_it_names(fun):
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    wrapped = jaxckpt.checkpoint(fun, policy=Policy({"hidden": SAVE}))
    held = 2 * COMPILED[fun] * LARGE_WIDE  # until the backward pass has begun
    assert held <= peak(wrapped) <= 1.01 * peak(jax.checkpoint(fun, policy=policy))
