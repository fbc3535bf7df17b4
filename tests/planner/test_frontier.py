"""frontier: one analysis for many budgets, what fits none has its place, and what is put beside is measured alike."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt._errors import ArgumentError
from jaxckpt.core.lift import count_flops
from jaxckpt.memory.report import measure
from jaxckpt.memory.targets import Target
from jaxckpt.planner import frontier as module
from jaxckpt.planner.frontier import frontier

ARGS = [jnp.zeros((32, 32))] * 10, jnp.ones((2048, 32))


def loss(ws, x, wrap=lambda f: f):
    layer = wrap(lambda x, w: jnp.tanh(x @ w))
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2)


def test_budgets_share_an_analysis_and_each_has_its_place(monkeypatch):
    analysed = []
    problem_of = module.problems.problem_of
    monkeypatch.setattr(
        module.problems, "problem_of", lambda *args, **kwargs: analysed.append(1) or problem_of(*args, **kwargs)
    )
    said = []
    others = {"two": lambda ws, x: jax.checkpoint(functools.partial(loss, ws[:5]))(x) + loss(ws[5:], x)}
    found = frontier(
        loss, *ARGS, budgets=("2%", "45%", "80%"), target="cpu", others=others,
        progress=lambda done, total, what: said.append((done, total, what)),
    )  # fmt: skip
    assert analysed == [1]
    assert [point.budget for point in found.points] == ["2%", "45%", "80%"]
    none, tight, wide = found.points
    assert none.plan is None and none.why and none.peak_bytes is None
    whole = measure(jax.value_and_grad(loss), *ARGS, target="cpu").peak_bytes
    assert found.unplanned.peak_bytes == whole
    for point in (tight, wide):
        planned = jax.value_and_grad(point.plan.apply(loss))
        assert point.peak_bytes == measure(planned, *ARGS, target="cpu").peak_bytes <= point.budget_bytes
        assert point.flops == count_flops(planned, *ARGS)
    assert found.recompute(tight) >= found.recompute(wide) > 0
    assert found.others[0].peak_bytes == measure(jax.value_and_grad(others["two"]), *ARGS, target="cpu").peak_bytes
    assert said[-1][0] == said[-1][1] and any("45%" in what for _, _, what in said)
    values = found.to_json()
    assert [point["fits"] for point in values["points"]] == [False, True, True]


def test_without_verifying_nothing_is_compiled_but_the_step_as_it_is(monkeypatch):
    problem = module.problems.problem_of(loss, *ARGS, target="cpu")
    assert problem.unplanned.peak_bytes

    def compiles(*args, **settings):
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr("jaxckpt.planner.measured.measure", compiles)
    monkeypatch.setattr("jaxckpt.planner.measured.measure_traced", compiles)
    monkeypatch.setattr(module, "measure", compiles)
    found = module.sweep(problem, ("60%",), verify=False)
    assert found.points[0].peak_bytes is None and found.points[0].predicted_bytes <= found.points[0].budget_bytes


def test_without_verifying_budgets_in_bytes_compile_nothing_at_all(monkeypatch):
    def compiles(*args, **settings):
        raise AssertionError("nothing is to be compiled")

    whole = measure(jax.value_and_grad(loss), *ARGS, target="cpu").peak_bytes
    monkeypatch.setattr("jaxckpt.memory.report.compiled_for", compiles)
    monkeypatch.setattr("jaxckpt.memory.report._assign", compiles)
    others = {"every": lambda ws, x: loss(ws, x, jax.checkpoint)}
    found = frontier(loss, *ARGS, budgets=(6 * whole // 10, 10**4), target="cpu", others=others,
                     verify=False, cache=False)  # fmt: skip
    fits, none = found.points
    assert found.unplanned.peak_bytes is None and found.others[0].peak_bytes is None
    assert found.overhead(found.others[0]) > found.overhead(fits) > 0 and "Plans on cpu" in str(found)
    assert found.recompute(none) is None and found.overhead(none) is None
    assert found.to_json()["points"][1]["least_bytes"] == none.least_bytes > 10**4


def test_seconds_that_were_measured_are_told_as_such():
    said = {}
    for verify in (False, True):
        report = jaxckpt.plan(loss, *ARGS, budget="60%", costs="measured", verify=verify).report
        said[verify] = report.costs
        assert report.seconds_by in str(report)
    assert said == {False: "measured", True: "roofline"}
    found = frontier(loss, *ARGS, budgets=("60%",), costs="measured", verify=False)
    assert found.costs == found.points[0].report.costs == "roofline"


def test_what_is_no_budget_is_an_error():
    with pytest.raises(ArgumentError, match="budgets must be at least one budget"):
        frontier(loss, *ARGS, budgets=(), target="cpu")
    with pytest.raises(ArgumentError, match=r"budgets\[0\] must be"):
        frontier(loss, *ARGS, budgets=("half",), target="cpu")


@pytest.mark.cuda
def test_seconds_of_a_sharded_step_are_those_of_one_device():
    """Rows over four devices: each takes what one device takes for a quarter of the rows, in the step as it is, by
    hand, and planned.
    """
    mesh = Target("cuda:h100x4").mesh((4,), ("data",))
    ws = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 6
    quarter, whole = (jax.ShapeDtypeStruct((rows, 256), jnp.float32) for rows in (8192, 4 * 8192))
    sharded = jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=NamedSharding(mesh, PartitionSpec("data")))
    others = {"layers": lambda ws, x: loss(ws, x, jax.checkpoint)}
    four, one, all_on_one = (
        frontier(loss, ws, x, budgets=("90%",), target=target, others=others, verify=False)
        for x, target in ((sharded, "cuda:h100x4"), (quarter, "cuda:h100"), (whole, "cuda:h100"))
    )
    assert four.unplanned.seconds == pytest.approx(one.unplanned.seconds, rel=0.01)
    assert four.others[0].seconds == pytest.approx(one.others[0].seconds, rel=0.01)
    assert one.others[0].seconds > 1.1 * one.unplanned.seconds
    assert 0.8 * four.unplanned.seconds < four.points[0].seconds < 2 * four.unplanned.seconds
    assert four.unplanned.seconds < 0.5 * all_on_one.unplanned.seconds
    assert four.unplanned.flops == all_on_one.unplanned.flops


def test_a_frontier_and_a_report_count_the_step_as_it_is_in_one_way():
    """A jitted step with random numbers is another program to JAX when it is traced within another trace."""

    def noisy(ws, x, key):
        for place, w in enumerate(ws):
            kept = jax.random.bernoulli(jax.random.fold_in(key, place), 0.9, x.shape)
            x = x + jnp.where(kept, jax.nn.softmax(x @ w), 0)
        return jnp.mean(x**2)

    def step_of(loss):
        return jax.jit(lambda ws, *rest: jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, *rest)))

    args = [jnp.ones((64, 64))] * 4, jnp.ones((512, 64)), jax.random.key(0)
    found = jaxckpt.frontier(noisy, *args, budgets=("60%",), step=step_of, others={"by hand": noisy})
    report = jaxckpt.plan(noisy, *args, budget="60%", step=step_of).report
    assert found.unplanned.seconds == report.unplanned_seconds == found.others[0].seconds
    assert found.overhead(found.points[0]) == report.slowdown != 0
