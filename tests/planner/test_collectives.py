"""Collectives that the compiler puts in: read from compiled programs, and counted by the planner."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.core.lift import trace
from jaxckpt.memory.collectives import by_kind
from jaxckpt.planner.collectives import place_of
from jaxckpt.planner.problems import problem_of

MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
WIDTH, ROWS, LAYERS = 1024, 4096, 6
MATRIX = WIDTH * WIDTH * 2


def over(x, *axes):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*axes)))


def block(x, w):
    whole = over(over(w, "data"))  # an all-gather; the gradient is shared as the weights are
    return over(jnp.tanh(x @ whole), "data")


def unrolled(ws, x):
    for i in range(LAYERS):
        x = block(x, ws[i])
    return jnp.sum(x**2)


def scanned(ws, x):
    x, _ = lax.scan(lambda x, w: (block(x, w), None), x, ws)
    return jnp.sum(x**2)


def struct(shape, *axes):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(MESH, P(*axes)))


def arguments(loss, rows=ROWS):
    ws = struct((LAYERS, WIDTH, WIDTH), None, "data")
    if loss is unrolled:
        ws = [struct((WIDTH, WIDTH), "data")] * LAYERS
    return ws, struct((rows, WIDTH), "data")


def gathers(report, operation=""):
    found = [c for c in report.collectives if c.kind == "all-gather" and operation in c.operation]
    return sum(c.runs for c in found), sum(c.runs * c.sent_bytes for c in found)


@pytest.mark.parametrize(
    "target", [pytest.param("cuda:h100x8", marks=pytest.mark.cuda), pytest.param("tpu:v5e:2x4", marks=pytest.mark.tpu)]
)
@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_what_is_sent_is_what_a_ring_of_so_many_devices_sends(loss, target):
    report = jaxckpt.measure(loss, *arguments(loss), target=target)
    assert all(c.devices == 8 for c in report.collectives)
    matrices = sum(c.runs * c.sent_bytes for c in report.collectives if c.sent_bytes > 1024)
    assert matrices == LAYERS * MATRIX * 7 / 8  # each device has an eighth, and sends it on seven times
    assert "sent to other devices" in str(report)


def _mapped(ws, x):
    """FSDP by hand: each weight is gathered where it is used, and again in the backward pass."""

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ jax.lax.all_gather(w, "data", tiled=True))

    for w in ws:
        x = layer(x, w)
    return jax.lax.pmean(jnp.mean(x.astype(jnp.float32) ** 2), "data")


@pytest.mark.parametrize(
    "target", [pytest.param("cuda:h100x8", marks=pytest.mark.cuda), pytest.param("tpu:v5e:2x4", marks=pytest.mark.tpu)]
)
def test_all_collectives_of_a_function_that_is_mapped_are_told_though_they_have_one_channel(target):
    loss = jax.shard_map(_mapped, mesh=MESH, in_specs=(P("data"), P("data")), out_specs=P())
    report = jaxckpt.measure(jax.value_and_grad(loss), *arguments(unrolled), target=target)
    sent = by_kind(report.collectives)
    part = MATRIX * 7 / 8
    assert sent["all-gather"][1] == 2 * LAYERS * part, "once forward, once backward"
    assert sent["reduce-scatter"][1] == LAYERS * part
    assert sent["all-reduce"][1] == pytest.approx(2 * 4 * 7 / 8), "the loss"
    assert {c.devices for c in report.collectives} == {8}


@pytest.mark.parametrize(
    "target", [pytest.param("cuda:h100x8", marks=pytest.mark.cuda), pytest.param("tpu:v5e:2x4", marks=pytest.mark.tpu)]
)
@pytest.mark.parametrize("scattered", [False, True])
def test_sums_that_the_compiler_puts_in_are_of_all_devices_of_their_axes(target, scattered):
    """Of a weight's gradient, over the axis of the rows alone; a gradient that stays sharded is a reduce-scatter."""
    mesh = jaxckpt.Target(target).mesh((4, 2), ("rows", "other"))
    where = NamedSharding(mesh, P("rows") if scattered else P())
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=where)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("rows")))
    step = jax.jit(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)), out_shardings=where)
    found = [c for c in jaxckpt.measure(step, w, x, target=target).collectives if c.kind.startswith(("all-r", "red"))]
    (matrix,) = (c for c in found if c.sent_bytes > 1024)
    assert matrix.kind == ("reduce-scatter" if scattered else "all-reduce") and matrix.devices == 4
    assert matrix.sent_bytes == (1 if scattered else 2) * 4 * WIDTH**2 * 3 / 4


def test_one_device_sends_nothing():
    report = jaxckpt.measure(lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((64, 64), jnp.float32), target="cpu")
    assert report.collectives == () and "sent" not in str(report)


@pytest.mark.cuda
@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_an_operation_waits_for_what_the_compiler_sends_for_it(loss):
    args = arguments(loss)
    problem = problem_of(loss, *args, target="cuda:h100x8")
    graph = problem.model.shards.applied(trace(jax.value_and_grad(loss), *args))
    sent = problem.model.shards.sent
    forward = sum(
        sent.seconds(graph, op) * op.repeats for op in graph.walk() if not op.bodies and not place_of(graph, op)[2]
    )
    assert forward == pytest.approx(LAYERS * MATRIX * 7 / 8 / problem.target.link_bandwidth, rel=0.01)
    plain = problem_of(loss, *args, target="cuda:h100x8", collectives=False)
    assert problem.plain.time.seconds > plain.plain.time.seconds + forward
    assert problem.plain.flops == plain.plain.flops


@pytest.mark.cuda
def test_gathered_weights_are_kept_where_that_is_cheaper_and_gathered_again_where_memory_is_short():
    args = arguments(unrolled, rows=1024)  # a matmul takes less than its weights take to arrive
    build = functools.partial(problem_of, unrolled, *args, target="cuda:h100x8")
    counting, blind = build(), build(collectives=False)
    least = None
    with pytest.raises(jaxckpt.InfeasibleBudgetError) as caught:
        counting.plan(counting.argument_bytes + 1)
    least = caught.value.least_bytes
    again = {}
    for budget in (least, counting.unplanned.peak_bytes - 1):
        for name, problem in (("counting", counting), ("blind", blind)):
            plan = problem.plan(budget)
            assert plan.measured_bytes <= budget
            again[name, budget == least] = gathers(plan.measured, "rematted")[0]
    assert again["counting", True] > again["counting", False]
    assert again["counting", False] <= again["blind", False]


@pytest.mark.cuda
def test_constraints_of_one_line_do_not_share_the_gather_of_one():
    args = arguments(unrolled)
    problem = problem_of(unrolled, *args, target="cuda:h100x8")
    graph = problem.graph
    seconds = problem.model.shards.sent.seconds
    each = sorted(seconds(graph, op) for op in graph.ops if op.primitive == "sharding_constraint")
    gather = MATRIX * 7 / 8 / problem.target.link_bandwidth
    assert each[-LAYERS:] == pytest.approx([gather] * LAYERS, rel=0.01) and max(each[:-LAYERS]) < gather / 1000
