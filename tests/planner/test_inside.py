"""Plans of what a `jax.shard_map` maps, and of calls that say how arrays lie: the body is planned, in bytes of one
device.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import ArgumentError, InfeasibleBudgetError, Plan, PlanMismatchError, Target
from jaxckpt.core.graph import trace, walk
from jaxckpt.core.regions import every_region
from jaxckpt.planner import model, problems, stages
from jaxckpt.planner.inside import innermost, whole
from tests.actions.half import HALF, half_is_known
from tests.helpers import assert_trees_close

__all__ = ["half_is_known"]
WIDTH, ROWS, LAYERS = 32, 1024, 4
AUTO = (AxisType.Auto,)
WS = {
    "up": jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, 4 * WIDTH)) / 8,
    "down": jax.random.normal(jax.random.key(1), (LAYERS, 4 * WIDTH, WIDTH)) / 8,
}
X = jax.random.normal(jax.random.key(2), (ROWS, WIDTH))


def block(x, w):
    return x + jnp.tanh(jax.nn.gelu(x @ w["up"])) @ w["down"]


def unrolled(ws, x, layer=block):
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(lambda w, i=i: w[i], ws))
    return jnp.mean(x**2)


def scanned(ws, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, ws)[0] ** 2)


def mapped(fun):
    mesh = jax.make_mesh((1,), ("d",), axis_types=AUTO)
    local = lambda ws, x: jax.lax.pmean(fun(ws, x), "d")
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())


def twice_mapped(fun):
    mesh = jax.make_mesh((1, 1), ("d", "m"), axis_types=2 * AUTO)
    inner = jax.shard_map(lambda ws, x: jax.lax.pmean(fun(ws, x), "m"), in_specs=P(), out_specs=P(), axis_names={"m"})
    outer = lambda ws, x: jax.lax.pmean(inner(ws, x), "d")
    return jax.shard_map(outer, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), axis_names={"d"})


def called(fun):
    here = SingleDeviceSharding(jax.devices()[0])
    return lambda ws, x: jax.jit(fun, in_shardings=(here, here))(ws, 2 * x) + jnp.sum(ws["up"])


WRAPPERS = {"mapped": mapped, "mapped in a mapped one": twice_mapped, "a call": called}


def step_flops(fun):
    return jaxckpt.count_flops(jax.value_and_grad(fun), WS, X)


@pytest.mark.compile
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("fun", [unrolled, scanned], ids=lambda fun: fun.__name__)
def test_a_plan_lies_in_the_body_fits_and_recomputes_less_than_each_block(fun, wrap):
    wrapped = wrap(fun)
    plan = jaxckpt.plan(wrapped, WS, X, budget="60%", target="cpu")
    assert plan.measured_bytes <= plan.budget < plan.unplanned_bytes
    # Under jit: JAX cannot differentiate a mapped function in a mapped one eagerly, with a plan or without.
    planned, plain = (jax.jit(jax.grad(each)) for each in (plan.apply(wrapped), wrapped))
    assert_trees_close(planned(WS, X), plain(WS, X), rtol=1e-4, atol=1e-6)
    depth = 2 if wrap is twice_mapped else 1
    addresses = [region.body for region in plan.regions] + [loop.body for loop in plan.loops]
    assert addresses and all(len(address) == depth for address in addresses)
    every = step_flops(wrap(lambda ws, x: unrolled(ws, x, jax.checkpoint(block)))) / step_flops(wrap(unrolled)) - 1
    added = step_flops(plan.apply(wrapped)) / step_flops(wrapped) - 1
    assert 0 < added < every / 3
    assert Plan.from_json(plan.to_json()) == plan
    text = plan.describe(trace(wrapped, WS, X))
    assert f": {len(list(every_region(plan.regions)))} region" in text
    assert text.count("Each time that ") == len(set(addresses))
    assert ("scan of" in text) == bool(plan.loops)


@pytest.mark.compile
def test_an_action_of_ones_own_keeps_values_of_a_mapped_function():
    wrapped = mapped(unrolled)
    plan = jaxckpt.plan(wrapped, WS, X, budget="45%", target="cpu", actions=("recompute", "save", HALF))
    assert plan.measured_bytes <= plan.budget
    assert any(action == HALF for region in plan.regions for action in region.actions.values())
    assert_trees_close(jax.grad(plan.apply(wrapped))(WS, X), jax.grad(wrapped)(WS, X), rtol=2e-2, atol=1e-3)


@pytest.mark.compile
def test_autocheckpoint_plans_what_is_mapped_too():
    wrapped = mapped(unrolled)
    planned = jaxckpt.autocheckpoint(wrapped, budget="60%", target="cpu")
    assert_trees_close(jax.grad(planned)(WS, X), jax.grad(wrapped)(WS, X), rtol=1e-4, atol=1e-6)
    assert step_flops(planned) > step_flops(wrapped)


def test_what_is_the_smaller_part_of_a_function_is_not_entered():
    def mostly_outside(ws, x):
        return unrolled(
            ws,
            jax.shard_map(
                jnp.sin, mesh=jax.make_mesh((1,), ("d",), axis_types=AUTO), in_specs=P("d"), out_specs=P("d")
            )(x),
        )

    for fun, entered in ((mostly_outside, False), (mapped(unrolled), True), (unrolled, False)):
        graph = trace(fun, WS, X)
        arguments = [value.index for value in graph.values if value.kind == "argument"]
        found = innermost(whole(graph, arguments))
        assert bool(found.address) == found.mapped == entered
        assert len(found.differentiated) == len(arguments)


@pytest.mark.compile
def test_two_mapped_functions_of_one_size_stay_whole():
    def loss(ws, x):
        return jnp.mean(over(lambda x: unrolled(ws, x)[None] * x)(over(lambda x: unrolled(ws, x)[None] * x)(x)))

    def over(fun):
        mesh = jax.make_mesh((1,), ("d",), axis_types=AUTO)
        return jax.shard_map(fun, mesh=mesh, in_specs=P("d"), out_specs=P("d"))

    with pytest.raises(InfeasibleBudgetError, match="A jax.shard_map that is not most of the function"):
        jaxckpt.plan(loss, WS, X, budget="15%", target="cpu")


@pytest.mark.compile
def test_an_infeasible_budget_names_operations_of_the_body():
    with pytest.raises(InfeasibleBudgetError) as error:
        jaxckpt.plan(mapped(unrolled), WS, X, budget="10%", target="cpu")
    assert re.search(r"operations \d+–\d+ inside of shard_map, \w+ at ", error.value.stretch)
    found = jaxckpt.plan(mapped(unrolled), WS, X, budget=error.value.least_bytes, target="cpu")
    assert found.measured_bytes <= error.value.least_bytes


@pytest.mark.compile
def test_where_no_plan_of_the_body_fits_the_function_is_planned_from_outside(monkeypatch):
    """The body does most, and the least that it can do with is above what a checkpoint around it needs."""
    for module in (model, problems, stages):
        monkeypatch.setattr(module, "FEW_STAGES", 0)  # single checkpoints in it would need less
    monkeypatch.setattr(stages, "NECKS", 0)  # so would checkpoints between necks
    mesh = jax.make_mesh((1,), ("d",), axis_types=AUTO)
    over = lambda fun: jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    most, rest = over(lambda ws, x: block(x, ws)), over(lambda ws, x: jnp.tanh(x @ ws["square"]))
    first = {"up": WS["up"][0], "down": WS["down"][0], "square": jnp.eye(WIDTH)}

    def loss(ws, x):
        for _ in range(6):
            x = rest(ws, x)
        return jnp.mean(most(ws, x) ** 2)

    graph = trace(loss, first, X)
    arguments = [value.index for value in graph.values if value.kind == "argument"]
    assert innermost(whole(graph, arguments)).address, "the body is planned first"
    with pytest.raises(InfeasibleBudgetError) as error:
        jaxckpt.plan(loss, first, X, budget="20%", target="cpu")
    peak = jaxckpt.measure(jax.value_and_grad(loss), first, X, target="cpu").peak_bytes
    share = math.ceil(1000 * error.value.least_bytes / peak) / 10
    plan = jaxckpt.plan(loss, first, X, budget=f"{share}%", target="cpu")
    assert plan.measured_bytes <= plan.budget < 0.9 * peak and plan.unplanned_bytes == peak
    assert all(region.body == () for region in plan.regions)
    assert_trees_close(jax.grad(plan.apply(loss))(first, X), jax.grad(loss)(first, X), rtol=1e-4, atol=1e-6)


def test_of_equal_mapped_functions_none_is_most():
    each = mapped(lambda ws, x: block(x, jax.tree.map(lambda w: w[0], ws)).sum())
    graph = trace(lambda ws, x: sum(each(ws, x * i) for i in range(4)), WS, X)
    assert not innermost(whole(graph, [])).address


def test_parts_of_what_is_mapped_cannot_be_timed():
    with pytest.raises(ArgumentError, match="costs must be 'roofline' for a function inside of jax.shard_map"):
        jaxckpt.plan(mapped(unrolled), WS, X, budget="60%", costs="measured")


def test_a_plan_for_a_mapped_function_does_not_fit_the_function_itself():
    plan = jaxckpt.plan(mapped(unrolled), WS, X, budget="1GiB", verify=False)
    with pytest.raises(PlanMismatchError):
        plan.apply(unrolled)(WS, X)


@pytest.mark.compile
def test_of_plain_arrays_what_one_device_holds_counts_too():
    """Outside, their residuals are those of all devices: the step as it is was thought to need eight times as much."""
    source = (
        SPREAD
        + """
over = jax.shard_map(lambda ws, x: jax.lax.pmean(loss(ws, x), "d"), mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
args = np.asarray(ws), np.asarray(x)
peak = jaxckpt.measure(jax.value_and_grad(over), *args).peak_bytes
plans = [jaxckpt.plan(over, *args, budget=round(peak * share)) for share in (0.6, 1.01, 4)]
points = jaxckpt.frontier(over, *args, budgets=[round(peak * share) for share in (0.55, 0.85)]).points
print(json.dumps([
    [[plan.measured_bytes / peak, plan.overhead, len(plan.regions)] for plan in plans],
    jaxckpt.plan(over, *args, budget=4 * peak, verify=False).regions == (),
    [[point.report.measured_bytes / point.budget_bytes, point.report.overhead] for point in points],
]))
"""
    )
    plans, unverified, points = run_on_eight_devices(source)
    assert plans[0][0] <= 0.6 and plans[0][1] > 0 < plans[0][2]
    assert [plan[1:] for plan in plans[1:]] == [[0.0, 0]] * 2 and unverified, "they fit as they are"
    assert 0.9 < points[1][0] <= 1 and points[1][1] < points[0][1] / 2, "more memory was searched anew"


@pytest.mark.compile
def test_a_mapped_function_that_is_not_most_is_planned_where_nothing_else_fits():
    """The compiler fuses what is around it, so that it is most of what is held."""
    source = (
        SPREAD
        + """
def thin(ws, x):
    for i in range(6):
        x = jnp.tanh(x @ ws[i, :, :32]) * jax.nn.sigmoid(x)
    return jax.lax.pmean(jnp.mean(x**2), "d")


over = jax.shard_map(thin, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())


def around(ws, x):
    for i in range(10):
        x = jnp.sin(x) * jnp.cos(x) * (1 + 0.01 * i)
    return over(ws, x)


from jaxckpt.planner.problems import problem_of
problem = problem_of(around, ws, x)
plan = problem.plan("60%")
for a, b in zip(*(jax.tree.leaves(jax.jit(jax.grad(f))(ws, x)) for f in (plan.apply(around), around))):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
inside = all(region.body for region in plan.regions)
print(json.dumps([problem.model.address == (), inside, plan.measured_bytes / plan.budget, plan.overhead]))
"""
    )
    outside, inside, share, overhead = run_on_eight_devices(source)
    assert outside and inside and share <= 1 and 0 < overhead < 0.5


SPREAD = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import jaxckpt
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def loss(ws, x):
    for i in range(6):
        x = x + jnp.tanh(jax.nn.gelu(x @ ws[i])) @ ws[i].T
    return jnp.mean(x**2)


put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
ws = put(jax.random.normal(jax.random.key(0), (6, 32, 64)) / 8, P())
x = put(jax.random.normal(jax.random.key(1), (2048, 32)), P("d"))
"""


def run_on_eight_devices(source, *arguments):
    """Returns what a program prints as JSON that runs on eight CPU devices."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", source, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


SHARDED = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import jaxckpt
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

kind, width, layers, rows = sys.argv[1], 64, 6, 512
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit if kind == "explicit" else AxisType.Auto,))


def block(x, w):
    up, down = (jax.lax.all_gather(w[name], "d", axis=0, tiled=True) for name in ("up", "down"))
    return x + jnp.tanh(jax.nn.gelu(x @ up)) @ down


def unrolled(ws, x):
    for i in range(layers):
        x = block(x, {name: w[i] for name, w in ws.items()})
    return jax.lax.pmean(jnp.mean(x**2), "d")


def scanned(ws, x):
    return jax.lax.pmean(jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, ws)[0] ** 2), "d")


specs = {"up": P(None, "d", None), "down": P(None, "d", None)}
put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
ws = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
ws = {name: put(jax.random.normal(jax.random.key(0), shape) / 8, specs[name]) for name, shape in ws.items()}
x = put(jax.random.normal(jax.random.key(1), (8 * rows, width)), P("d"))
rows = []
for fun in (unrolled, scanned):
    over = jax.shard_map(fun, mesh=mesh, in_specs=(specs, P("d")), out_specs=P())
    plan = jaxckpt.plan(over, ws, x, budget="60%")
    step, plain = (jax.jit(jax.value_and_grad(f)) for f in (plan.apply(over), over))
    for a, b in zip(jax.tree.leaves(step(ws, x)), jax.tree.leaves(plain(ws, x))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    flops = [jaxckpt.count_flops(f, ws, x) for f in (step, plain)]
    rows.append([plan.measured_bytes / plan.unplanned_bytes, flops[0] / flops[1] - 1])
print(json.dumps(rows))
"""


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_blocks_that_gather_their_weights_from_eight_devices_are_planned(kind):
    unrolled_row, scanned_row = run_on_eight_devices(SHARDED, kind)
    for peak, added in (unrolled_row, scanned_row):
        assert peak <= 0.6 and 0 < added < 0.1
    assert abs(unrolled_row[1] - scanned_row[1]) < 0.03


@pytest.mark.cuda
def test_weights_that_all_devices_have_are_planned_for_in_shard_map_as_under_jit():
    """A region's backward pass goes on when its gradients are there, and does not wait for their sum over the devices.
    No plan fitted 60% of the peak when what went on waited for nothing. Nothing keeps a weight for each device.
    """
    target = Target("cuda:h100x8")
    mesh = target.mesh((8,), ("d",))
    shaped = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    args = [(shaped(P(), 256, 1024), shaped(P(), 1024, 256))] * 8, shaped(P("d"), 8 * 2048, 256)

    def loss(ws, x):
        for up, down in ws:
            x = jnp.tanh(x + jnp.sin(jax.nn.gelu(x @ up) @ down))
        return jnp.mean(x**2)

    local = lambda ws, x: jax.lax.pmean(loss(ws, x), "d")
    over = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    plans = {fun: jaxckpt.plan(fun, *args, budget="40%", target=target) for fun in (over, loss)}
    assert all(plan.measured_bytes <= plan.budget for plan in plans.values())
    assert plans[over].overhead == pytest.approx(plans[loss].overhead, abs=0.1) and plans[over].overhead > 0
    graph = trace(jax.value_and_grad(plans[over].apply(over)), *args)
    again = [op for op in graph.walk() if op.primitive in ("remat2", "checkpoint") and op.params["differentiated"]]
    assert len(again) >= 3
    for each in again:
        (body,) = each.bodies
        names = [op.primitive for op in walk(body)]
        assert "psum_invariant" in names and "optimization_barrier" in names
        last = len(names) - 1 - names[::-1].index("optimization_barrier")
        assert "psum_invariant" not in names[:last], "nothing waits for a sum"
    kept = jaxckpt.residuals(plans[over].apply(over), *args)
    weights = 8 * 2 * 256 * 1024 * 4
    assert (
        sum(each.bytes for each in kept.residuals if each.shape[-1] in (256, 1024) and each.shape[0] < 8192) <= weights
    )
