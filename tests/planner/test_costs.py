"""Seconds by the target's rates: what moves nothing in the compiled program takes none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import Slots
from jaxckpt.core import primitives
from jaxckpt.core.graph import trace
from jaxckpt.core.liveness import estimate_peak
from jaxckpt.memory.targets import target_of
from jaxckpt.planner.costs import Time, behind_barrier, roofline, timer, written

H100 = target_of("cuda:h100")
X = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
W = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)


def seconds(fun, *args):
    graph = trace(fun, *args)
    time = roofline(graph, H100)
    return sum(map(time, graph.ops))


def test_a_barrier_moves_nothing_but_ends_a_fusion():
    plain = seconds(lambda x, w: x @ w @ w, X, W)
    assert seconds(lambda x, w: lax.optimization_barrier(x @ w) @ w, X, W) == pytest.approx(plain)
    # tanh is fused into the sum; behind a barrier it is written and read again.
    fused = seconds(lambda x: jnp.sum(jnp.tanh(x)), X)
    held = seconds(lambda x: jnp.sum(lax.optimization_barrier(jnp.tanh(x))), X)
    moved = 2 * 2048 * 2048 * 4 / H100.bandwidth
    assert held - fused == pytest.approx(moved, rel=0.01)


def test_rounding_to_its_own_type_is_free_and_to_a_narrower_one_is_not():
    plain = seconds(lambda x, w: x @ w @ w, X, W)
    assert seconds(lambda x, w: lax.reduce_precision(x @ w, 8, 23) @ w, X, W) == pytest.approx(plain)
    assert seconds(lambda x, w: lax.reduce_precision(x @ w, 5, 10) @ w, X, W) > 1.01 * plain


def test_keeping_the_matmuls_costs_no_more_than_the_matmuls_kept():
    """`jax.checkpoint` rounds what it keeps to its own type: nothing that the seconds should count."""

    def loss(x, w, policy):
        block = jax.checkpoint(lambda x: jnp.sin(x @ w) @ w, policy=policy)
        return jnp.sum(block(block(x)))

    def step(policy):
        return seconds(jax.grad(lambda w, x: loss(x, w, policy)), W, X)

    plain = seconds(jax.grad(lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w) @ w @ w) @ w)), W, X)
    saved, nothing = step(jax.checkpoint_policies.dots_saveable), step(jax.checkpoint_policies.nothing_saveable)
    assert saved < 1.1 * plain < nothing


@pytest.mark.parametrize("around", [jax.checkpoint, jax.jit, lambda fun: lambda x: lax.cond(x[0, 0] > 0, fun, fun, x)])
def test_what_a_matmul_reads_is_written_wherever_it_is_computed(around):
    """A region's results, as a call's and a branch's, are in memory where the rest of the step wants them there."""
    plain = seconds(lambda x, w: jnp.tanh(x) @ w, X, W)
    written = 2 * 2048 * 2048 * 4 / H100.bandwidth
    assert plain - seconds(lambda x, w: x @ w, X, W) == pytest.approx(written, rel=0.01)
    assert seconds(lambda x, w: around(jnp.tanh)(x) @ w, X, W) == pytest.approx(plain, rel=0.01)


def test_a_functions_own_derivative_hides_no_traffic():
    plain = seconds(lambda x, w: jnp.maximum(x, 0) @ w, X, W)
    assert seconds(lambda x, w: jax.nn.relu(x) @ w, X, W) == pytest.approx(plain, rel=0.01)


def test_to_keep_what_is_computed_where_it_is_used_takes_a_write():
    graph = trace(lambda x, w: jnp.sum(jnp.exp(jnp.tanh(x @ w)) @ w), X, W)
    write = written(graph, H100)
    made = {op.primitive: write(op.outputs[0]) for op in graph.ops}
    assert made["tanh"] == Time(X.size * 4 / H100.bandwidth, X.size * 4 / H100.bandwidth)
    assert made["exp"] == made["dot_general"] == Time()  # a matmul reads the one and writes the other anyway


def test_a_barrier_behind_what_is_computed_where_it_is_used_adds_what_that_reads_and_writes():
    graph = trace(lambda x, w: jnp.sum(jnp.exp(jnp.tanh(x @ w)) @ w), X, W)
    added = behind_barrier(graph, H100)
    made = {op.primitive: added(op.outputs[0]) for op in graph.ops}
    plain = seconds(lambda x, w: jnp.sum(jnp.exp(jnp.tanh(x @ w)) @ w), X, W)
    held = seconds(lambda x, w: jnp.sum(jnp.exp(lax.optimization_barrier(jnp.tanh(x @ w))) @ w), X, W)
    assert made["tanh"].seconds == pytest.approx(held - plain, rel=0.01)
    assert made["tanh"].seconds == pytest.approx(2 * X.size * 4 / H100.bandwidth)
    assert made["exp"] == made["dot_general"] == Time()


def test_what_passes_a_value_on_is_in_memory_where_that_is():
    same = lambda x: lax.reduce_precision(x, 8, 23)
    graph = trace(lambda x, w: jnp.sum(same(jnp.tanh(x))) + jnp.sum(same(x @ w)), X, W)
    added = behind_barrier(graph, H100)
    tanh, dot = (next(op.outputs[0] for op in graph.ops if op.primitive == each) for each in ("tanh", "dot_general"))
    shaped = {op.inputs[0]: added(op.outputs[0]) for op in graph.ops if op.primitive == "reduce_precision"}
    assert shaped[tanh] == added(tanh) != Time() and shaped[dot] == added(dot) == Time()


def test_a_checkpoints_program_weighs_what_its_operations_weigh():
    """Plans are chosen by the weight of traced steps: elementwise FLOPs weigh nothing, in a checkpoint neither."""

    def weight(fun):
        graph = trace(fun, X, W)
        time = timer(graph, H100)
        return sum(time(op).effort - time(op).seconds for op in graph.ops)

    plain = weight(lambda x, w: jnp.sum(jnp.exp(x @ w)))
    assert weight(lambda x, w: jnp.sum(jax.checkpoint(lambda y: jnp.exp(y @ w))(x))) == pytest.approx(plain)


def test_a_barrier_holds_no_second_copy():
    peak = estimate_peak(lambda x: jnp.sum(jnp.sort(lax.optimization_barrier(x))), X)
    assert peak == pytest.approx(estimate_peak(lambda x: jnp.sum(jnp.sort(x)), X), rel=0.01)


def test_what_two_shard_maps_compute_is_one_program():
    """JAX splits a differentiated `jax.shard_map` into two: what the second one computes from the first one's values is
    not written between them. Without the collectives the step takes what it takes on one device.
    """
    mesh = jax.sharding.AbstractMesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    loss = lambda w, x: jnp.sum(jnp.sin(jax.nn.gelu(x @ w) @ w.T))
    mapped = jax.shard_map(lambda w, x: lax.psum(loss(w, x), "d"), mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    times = []
    for fun in (loss, mapped):
        graph = trace(jax.value_and_grad(fun), W, X)
        time = roofline(graph, H100)
        flat = [op for op in graph.walk() if not op.bodies and not primitives.of(op.primitive).collective]
        times.append(sum(map(time, flat)))
    assert times[1] == pytest.approx(times[0], rel=0.01)


@pytest.mark.tpu
def test_collectives_take_what_they_send_over_the_links():
    target = target_of("tpu:v5e:2x2")
    mesh = target.mesh((4,), ("x",))

    def time(body, out, x=X):
        spread = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=out, check_vma=False)
        return sum(map(roofline(trace(spread, x), target), trace(spread, x).ops))

    block = 2048 * 2048  # a quarter of X, in bytes
    plain = time(lambda x: lax.sort(x), P("x"))
    memory = 2 * block / target.bandwidth
    assert time(lambda x: lax.psum(x, "x"), P()) == pytest.approx(2 * block / target.link_bandwidth + memory)
    gathered = time(lambda x: lax.all_gather(x, "x", tiled=True), P())
    assert gathered == pytest.approx(4 * block / target.link_bandwidth + 5 * block / target.bandwidth)
    moved = time(lambda x: lax.ppermute(x, "x", [(0, 1), (1, 0)]), P("x"))
    assert moved == pytest.approx(block / target.link_bandwidth + memory)
    assert gathered > moved > plain


def test_a_matmul_writes_its_result_in_the_order_in_which_it_is_read():
    """A weight's gradient is a matmul's result transposed, and a barrier behind it moves nothing. What is read in both
    orders is transposed for one of them.
    """
    plain = seconds(lambda x, w: lax.optimization_barrier(x @ w), X, W)
    assert seconds(lambda x, w: lax.optimization_barrier((x @ w).T), X, W) == pytest.approx(plain)
    moved = 2 * 2048 * 2048 * 4 / H100.bandwidth
    both = seconds(lambda x, w: lax.optimization_barrier((x @ w, (x @ w).T)), X, W)
    shared = seconds(lambda x, w: (lambda y: lax.optimization_barrier((y, y.T)))(x @ w), X, W)
    assert shared == pytest.approx(plain + moved, rel=0.01) and both == pytest.approx(2 * plain)
    result = seconds(lambda x, w: (lambda y: (y, lax.optimization_barrier(y.T)))(x @ w), X, W)
    assert result == pytest.approx(plain + moved, rel=0.01)


def test_a_transposed_number_takes_no_time():
    plain = seconds(lambda x: np.float32(2.0) * jnp.tanh(x), X)
    assert seconds(lambda x: lax.transpose(np.float32(2.0), ()) * jnp.tanh(x), X) == pytest.approx(plain)


def over(schedule, wrap):
    """A loss whose scan runs by a schedule; of three examples."""

    def one(c, xs, w):
        last, _ = jaxckpt.scan(lambda c, x: (jnp.tanh(jnp.tanh(c @ w) @ w) + x, None), c, xs, schedule=schedule)
        return jnp.sum(last**2)

    return lambda c, xs, w: jnp.sum(wrap(one)(c, xs, w))


@pytest.mark.parametrize(
    ("length", "schedule"),
    [
        (96, Slots(6, run_length=16)),  # no iteration is run to obtain a carry
        (96, Slots(3, run_length=1)),  # many are, and often
        (100, Slots(4, run_length=8)),
        (100, Slots(3, host=6, run_length=1)),
        (100, Slots(3, host=6, run_length=7)),
    ],
    ids=["none", "often", "uneven", "host", "host in runs"],
)
@pytest.mark.parametrize("wrap", [jax.jit, lambda one: jax.vmap(one, (0, None, None))], ids=["jit", "vmap"])
def test_iterations_that_slots_run_again_are_counted_as_often_as_they_run(wrap, length, schedule):
    args = (jnp.ones((3, 64)), jnp.ones((length, 64)), jnp.eye(64))

    def flops(chosen, make=jax.value_and_grad):
        return trace(make(over(chosen, wrap)), *args).flops

    again = flops(schedule) - flops("none")
    iteration = flops("none", lambda fun: fun) / length
    assert again == pytest.approx((schedule.cost(length).runs - length) * iteration, rel=0.02)


def test_what_a_loop_writes_into_a_buffer_takes_as_long_in_a_larger_buffer():
    def filled(rows, buffer):
        def body(buffer, both):
            i, row = both
            return lax.dynamic_update_slice(buffer, row[None], (i, 0)), None

        return lax.scan(body, buffer, (jnp.arange(8), rows))[0]

    def copied(rows, buffer):  # each iteration begins with the same buffer
        def body(last, both):
            i, row = both
            return lax.dynamic_update_slice(buffer, row[None], (i, 0)), None

        return lax.scan(body, buffer, (jnp.arange(8), rows))[0]

    rows = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    small, large = (jax.ShapeDtypeStruct((count, 1024), jnp.float32) for count in (8, 8192))
    assert seconds(filled, rows, large) == pytest.approx(seconds(filled, rows, small))
    # Each row is read and written once; its new axis moves nothing.
    assert seconds(filled, rows, large) == pytest.approx(2 * 8 * 1024 * 4 / H100.bandwidth, rel=0.01)
    assert seconds(copied, rows, large) > 100 * seconds(copied, rows, small)


def test_axes_of_one_element_come_and_go_for_nothing():
    """The gradient of `x[None]` sums over the axis, which XLA makes a bitcast of."""
    step = lambda shape: lambda x, w: jnp.sum(jnp.sin(jnp.reshape(jnp.expand_dims(x @ w, shape), X.shape)) @ w)
    plain, wider = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w) @ w)), jax.grad(step((0, 2)))
    assert "reduce_sum" in {
        op.primitive for op in trace(jax.grad(lambda x: jnp.sum(jnp.expand_dims(x, 0) ** 2)), X).ops
    }
    assert seconds(wider, X, W) == pytest.approx(seconds(plain, X, W))
    for platform in ("cpu", "cuda", "tpu"):
        assert estimate_peak(wider, X, W, platform=platform) == estimate_peak(plain, X, W, platform=platform)


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, jnp.prod])
def test_a_reduction_of_one_element_computes_nothing_and_others_do(reduce):
    one, many = (lambda x, axis=axis: reduce(x.reshape(1, 64, 32), axis) for axis in (0, 1))
    assert jaxckpt.count_flops(one, jnp.ones(2048)) == 0 < 2048 <= jaxckpt.count_flops(many, jnp.ones(2048))
    graph = trace(one, jnp.ones(2048))
    assert graph.reshapes_units(graph.ops[-1])
    others, turned = trace(many, jnp.ones(2048)), trace(lambda x: x.reshape(64, 32).T, jnp.ones(2048))
    assert not any(others.reshapes_units(op) for op in others.ops if op.flops)
    assert not any(map(turned.reshapes_units, turned.ops))
    argmax = trace(lambda x: jnp.argmax(x, 0), jnp.ones((1, 8)))
    assert not any(argmax.reshapes_units(op) for op in argmax.ops if op.primitive == "argmax")


@pytest.mark.cuda
def test_a_pooling_apart_from_zeros_costs_nothing():
    """Plans for GPUs put an axis of one element in front of what is pooled."""

    def loss(w, x):
        h = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        h = jax.nn.relu(h)
        return jnp.mean(lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") ** 2)

    args = jax.ShapeDtypeStruct((3, 3, 4, 32), jnp.float32), jax.ShapeDtypeStruct((64, 40, 40, 4), jnp.float32)
    graph = trace(loss, *args)
    apart = jaxckpt.Plan((), graph.fingerprint, pools_apart=True).apply(loss)
    assert "reduce_sum" in str(jax.make_jaxpr(jax.grad(apart))(*args))
    assert seconds(jax.grad(apart), *args) == pytest.approx(seconds(jax.grad(loss), *args))
