"""Plans with values on the host: the link is one resource of a step, and what is moved leaves the device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import OFFLOAD, RECOMPUTE, SAVE, ArgumentError, compress
from jaxckpt.core.constants import LINK_FULL
from jaxckpt.core.plan import Plan
from jaxckpt.core.regions import every_region
from jaxckpt.planner.chain import Candidate, Carried, Chain, Keep, Segment, cost
from jaxckpt.planner.host import Host, host_budget_bytes, host_use
from jaxckpt.planner.solvers.optimal import Optimal

MIB = 2**20
LAYERS = 6
WIDE = {"rows": 32768, "width": 16384, "hidden": 16384, "dtype": jnp.bfloat16}
"""Sizes of layers whose matmuls take longer than to move a value to the host and back."""
ROUNDING = 1e-12
"""Two plans of one price add their seconds up in different orders."""


def loss(ws, x):
    for up, down in ws:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean(x.astype(jnp.float32) ** 2)


def scanned(ws, x):
    block = lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None)
    return jnp.mean(jax.lax.scan(block, x, ws)[0].astype(jnp.float32) ** 2)


def shapes(rows=4096, width=512, hidden=2048, dtype=jnp.float32):
    struct = jax.ShapeDtypeStruct
    return [(struct((width, hidden), dtype), struct((hidden, width), dtype))] * LAYERS, struct((rows, width), dtype)


def chain(link=1.0, layers=8):
    """Equal stages, each of which saves 10 bytes, moves them, or computes 1.9 seconds again."""
    ways = (
        Candidate(0, 1.9, 1, 1.9),
        Candidate(10, 0.0, 1, 0.0),
        Candidate(0, 0.0, 1, 0.0, link=link, host=10),
    )
    segments = {}
    for start in range(layers):
        for stop in range(start + 1, layers + 1):
            segments[start, stop] = Segment(float(stop - start), 1, 0, ways if stop == start + 1 else ())
    carried = tuple(Carried(1, stage, (stage + 1,)) for stage in range(layers - 1))
    return Chain(layers, segments, carried)


def moved(made, solution):
    return sum(made.candidate(item).on_host for item in solution if isinstance(item, Keep))


def test_the_link_is_filled_and_not_more_than_filled():
    """Each of eight values takes a second of the link, or 1.9 seconds of recomputation, in which the link may work."""
    made = chain()
    for seconds, most in ((3.5, 6), (0.5, 5), (20.0, 8)):
        room = lambda count, seconds=seconds: LINK_FULL * (seconds + 1.9 * (8 - count))
        assert most <= room(most) and (most == 8 or most + 1 > room(most + 1)), "one more has no room"
        host = Host(made, Optimal(), seconds)
        solution = host.solve(12)
        assert moved(made, solution) == host_use(made, solution).link == most and host.admits(solution)


def test_a_host_never_costs_more_than_none():
    made = chain()
    for seconds in (0.5, 2.5, 6.0):
        host = Host(made, Optimal(), seconds)
        for limit in range(10, 100, 10):
            with_host, without = host.solve(limit), host.without(limit)
            if without is not None:
                assert cost(made, with_host).time <= cost(made, without).time + 1e-9


def test_host_memory_is_bounded():
    made = chain()
    for budget, most in ((0, 0), (25, 2), (10**6, 8)):
        host = Host(made, Optimal(), 100.0, budget)
        solution = host.solve(12)
        assert host_use(made, solution).bytes <= budget and moved(made, solution) == most


def test_a_step_waits_for_what_nothing_hides():
    """A second of the link that other work hides costs nothing; one that the step waits for is paid."""
    paid = Candidate(0, 1.0, 1, 1.0, host=10, waits=1.0)
    for again, moves in ((0.9, 0), (1.1, 1)):
        stage = Segment(1.0, 1, 0, (Candidate(0, again, 1, again), paid))
        made = Chain(1, {(0, 1): stage})
        host = Host(made, Optimal(), 100.0)
        solution = host.solve(5)
        assert moved(made, solution) == moves and host.admits(solution)
        assert host_use(made, solution).exposed(100.0) == float(moves)


@pytest.mark.cuda
def test_a_gpu_waits_for_transfers_outside_of_loops():
    """To compute these small layers again takes less than to move what they keep: a plan that waits moves nothing."""
    moving, ask = {"actions": (RECOMPUTE, SAVE, OFFLOAD)}, {"target": "cuda:h100", "verify": False}
    small, plain = (jaxckpt.plan(loss, *shapes(), budget="65%", **ask, **more) for more in (moving, {}))
    assert small.report.host_bytes == 0 and small.overhead == pytest.approx(plain.overhead, ROUNDING)
    wide, plain = (jaxckpt.plan(loss, *shapes(**WIDE), budget="90%", **ask, **more) for more in (moving, {}))
    assert wide.report.host_waits == wide.report.host_seconds > 0 and wide.overhead < plain.overhead
    ws, x = shapes(rows=8192)
    stacked = jax.tree.map(lambda *leaves: jax.ShapeDtypeStruct((LAYERS, *leaves[0].shape), leaves[0].dtype), *ws)
    looped = jaxckpt.plan(scanned, stacked, x, budget="50%", **ask, **moving).report
    assert looped.host_seconds > 0 and looped.host_waits == 0.0


@pytest.mark.tpu
def test_a_tpu_moves_to_the_host_beside_other_work():
    """It waits for what comes back: that is fetched when its region's backward pass begins."""
    ask = {"budget": "90%", "target": "tpu:v5e:2x2", "verify": False}
    args = shapes(rows=16384, width=8192, hidden=8192, dtype=jnp.bfloat16)
    made, plain = (jaxckpt.plan(loss, *args, **ask, **more) for more in ({"actions": (RECOMPUTE, SAVE, OFFLOAD)}, {}))
    assert (
        made.report.host_seconds == pytest.approx(2 * made.report.host_waits, ROUNDING) and made.report.host_waits > 0
    )
    assert made.overhead < plain.overhead


def test_where_nothing_else_fits_more_is_moved_than_can_be_hidden():
    stage = Segment(1.0, 1, 0, (Candidate(10, 0.0, 1), Candidate(0, 0.0, 1, link=5.0, host=10)))
    made = Chain(1, {(0, 1): stage})
    host = Host(made, Optimal(), 1.0)
    assert moved(made, host.solve(5)) == 1 and not host.admits(host.solve(5))
    assert moved(made, host.solve(11)) == 0
    assert Host(made, Optimal(), 1.0, budget=5).solve(5) is None


@pytest.mark.cuda
def test_moved_values_leave_the_device_and_spare_recomputation():
    """Compiled: the copies are made before what comes after the region, and fetched back one region at a time."""
    args = shapes(**WIDE)
    plans = {
        actions: jaxckpt.plan(loss, *args, budget="90%", target="cuda:h100", actions=actions)
        for actions in ((RECOMPUTE, SAVE), (RECOMPUTE, SAVE, OFFLOAD))
    }
    plain, made = plans.values()
    report = made.report
    assert made.measured_bytes <= made.budget
    assert made.overhead < plain.overhead and 0 < report.host_share <= 1
    kept = [value for region in every_region(made.regions) for value in region.actions.values()]
    assert OFFLOAD in kept and report.measured_host_bytes >= 1024 * MIB  # of one layer's hidden values
    assert "in host memory" in str(made) and "the step waits for it" in str(made) and "host" in report._repr_html_()
    assert report.to_json()["plan"]["host_bytes"] == report.measured_host_bytes
    loaded = Plan.from_json(made.to_json())
    assert loaded == made and loaded.report.host_share == report.host_share


@pytest.mark.cuda
def test_a_host_budget_bounds_what_is_moved():
    args = shapes(**WIDE)
    ask = {"budget": "90%", "target": "cuda:h100", "actions": (RECOMPUTE, SAVE, OFFLOAD), "verify": False}
    free = jaxckpt.plan(loss, *args, **ask)
    assert free.report.host_bytes > 2100 * MIB
    bounded = jaxckpt.plan(loss, *args, **ask, host_budget="2100MiB")
    assert 0 < bounded.report.host_bytes <= 2100 * MIB and bounded.overhead >= free.overhead * (1 - ROUNDING)
    assert jaxckpt.plan(loss, *args, **ask, host_budget=0).report.host_bytes == 0
    assert jaxckpt.plan(loss, *args, **ask, host_budget="1TiB").overhead == pytest.approx(free.overhead, ROUNDING)


@pytest.mark.cuda
def test_a_scan_moves_what_its_iterations_keep():
    ws, x = shapes(rows=8192)
    stacked = jax.tree.map(lambda *leaves: jax.ShapeDtypeStruct((LAYERS, *leaves[0].shape), leaves[0].dtype), *ws)
    made = jaxckpt.plan(scanned, stacked, x, budget="40%", target="cuda:h100", actions=(RECOMPUTE, SAVE, OFFLOAD))
    plain = jaxckpt.plan(scanned, stacked, x, budget="40%", target="cuda:h100")
    assert made.overhead < plain.overhead and made.measured_bytes <= made.budget
    assert made.report.measured_host_bytes > 0 and made.report.host_share <= 1


@pytest.mark.once
@pytest.mark.cuda
@pytest.mark.parametrize("action", [OFFLOAD, compress("int8")], ids=str)
def test_a_scan_s_carries_are_kept_as_by_hand(action):
    """At the peak of a checkpoint around each iteration whose carry is kept so; without the action nothing fits."""
    ws, x = shapes(rows=8192, width=256, hidden=1024)
    stacked = jax.tree.map(lambda *leaves: jax.ShapeDtypeStruct((12, *leaves[0].shape), leaves[0].dtype), *ws)

    def by_hand(ws, x):
        def block(x, w):
            x = jaxckpt.tag(x, "carry")
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        block = jaxckpt.checkpoint(block, policy=jaxckpt.Policy({"carry": action}), prevent_cse=False)
        return jnp.mean(jax.lax.scan(block, x, ws)[0] ** 2)

    target = "cuda:h100"
    hand = jaxckpt.measure(jax.value_and_grad(by_hand), stacked, x, target=target, generate_code=False)
    made = jaxckpt.plan(scanned, stacked, x, budget=hand.peak_bytes, target=target, actions=(RECOMPUTE, SAVE, action))
    assert made.measured_bytes <= hand.peak_bytes and made.report.measured_host_bytes == hand.host_bytes
    assert "value" in str(made) and made.report.host_share <= 1
    with pytest.raises(jaxckpt.InfeasibleBudgetError) as told:
        jaxckpt.plan(scanned, stacked, x, budget=hand.peak_bytes, target=target)
    assert told.value.least_bytes > 1.2 * hand.peak_bytes


@pytest.mark.once
@pytest.mark.cuda
def test_what_goes_into_blocks_is_kept_as_by_hand():
    """At the peak of a checkpoint around each block whose input is compressed. By saving and recomputing alone, a plan
    runs most of the blocks twice.
    """
    action, target = compress("int8"), "cuda:h100"
    ws, x = shapes(rows=8192, width=256, hidden=1024)

    def by_hand(ws, x):
        block = lambda x, w: (lambda x: x + jnp.tanh(x @ w[0]) @ w[1])(jaxckpt.tag(x, "block"))
        block = jaxckpt.checkpoint(block, policy=jaxckpt.Policy({"block": action}))
        for w in ws:
            x = block(x, w)
        return jnp.mean(x**2)

    hand = jaxckpt.measure(jax.value_and_grad(by_hand), ws, x, target=target, generate_code=False)
    graph = jaxckpt.trace(loss, ws, x)
    plain, made = (
        jaxckpt.plan(loss, ws, x, budget=hand.peak_bytes, target=target, actions=actions)
        for actions in ((RECOMPUTE, SAVE), (RECOMPUTE, SAVE, action))
    )
    assert made.measured_bytes <= hand.peak_bytes and made.overhead < 0.6 * plain.overhead
    going_in = [
        (region, index)
        for region in every_region(made.regions)
        for index, each in region.actions.items()
        if each == action and not any(index in op.outputs for op in graph.ops[region.start : region.stop])
    ]
    assert len(going_in) >= LAYERS // 2


@pytest.mark.once
@pytest.mark.tpu
def test_a_plan_with_moved_values_trains_as_the_function_does():
    """Planned for a TPU and run here; a CPU's host memory is its own. What the plan saves is moved: layers that run
    here are too small for a plan to do it.
    """
    made = jaxckpt.plan(loss, *shapes(), budget="90%", target="tpu:v5e:2x2", verify=False)

    def moved(region):
        inner = tuple(map(moved, region.regions))
        return dataclasses.replace(region, actions=dict.fromkeys(region.actions, OFFLOAD), regions=inner)

    made = dataclasses.replace(made, regions=tuple(map(moved, made.regions)))
    assert OFFLOAD in [value for region in every_region(made.regions) for value in region.actions.values()]
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS + 1)
    ws = [
        (jax.random.normal(a, (512, 2048)) / 32, jax.random.normal(b, (2048, 512)) / 64)
        for a, b in zip(keys[::2], keys[1::2])
    ]
    x = jax.random.normal(keys[-1], (4096, 512))
    losses = []
    for fun in (loss, made.apply(loss)):
        step, params, seen = jax.jit(jax.value_and_grad(fun)), ws, []
        for _ in range(10):
            value, gradient = step(params, x)
            seen.append(float(value))
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        losses.append(seen)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][-1] < losses[0][0]


def test_a_cpu_has_no_other_memory():
    args = shapes(64, 16, 32)
    with pytest.raises(ArgumentError, match="nothing would be freed"):
        jaxckpt.plan(loss, *args, budget="80%", target="cpu", actions=(RECOMPUTE, SAVE, OFFLOAD))
    with pytest.raises(ArgumentError, match="host_budget"):
        jaxckpt.plan(loss, *args, budget="80%", target="cpu", host_budget="1GiB")


@pytest.mark.parametrize("wrong", [-1, "a lot", 1.5, True, "-3GiB", [1]])
def test_a_host_budget_that_is_none_is_refused(wrong):
    with pytest.raises(ArgumentError, match="host_budget"):
        host_budget_bytes(wrong, jaxckpt.Target("cpu"))
