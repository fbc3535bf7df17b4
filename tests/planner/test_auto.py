"""autocheckpoint: one plan for each signature, whatever traces the call, whatever threads call; plans kept on disk."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import timeit
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt._errors import ArgumentError, InfeasibleBudgetError
from jaxckpt.core.graph import trace
from jaxckpt.core.plan import Plan, PlanReport, Region
from jaxckpt.memory import cache
from jaxckpt.memory.report import measure
from jaxckpt.planner import calls, planned_calls, problems
from jaxckpt.planner.auto import autocheckpoint
from jaxckpt.planner.solvers.milp import Milp
from tests.helpers import assert_trees_close, executions, gradient_executions, kept_bytes

WS, X = [jnp.eye(16) * 0.5 + 0.01] * 6, jnp.linspace(-1, 1, 128 * 16).reshape(128, 16)


def loss(ws, x, scale=1.0):
    for w in ws:
        x = jnp.tanh(x @ w) * scale
    return jnp.mean(x**2)


@pytest.fixture
def planner(monkeypatch):
    """A planner that takes no time: halves of the function are checkpointed. Counts its calls and keeps their
    arguments.
    """
    asked = []

    def plan(fun, *args, **settings):
        asked.append((args, settings))
        graph = trace(fun, *args)
        half = len(graph.ops) // 2
        made = Plan((Region(0, half), Region(half, len(graph.ops))), graph.fingerprint)
        return PlanReport(made, budget=1000).plan

    monkeypatch.setattr(problems, "plan", plan)
    return asked


def test_it_is_the_function_and_keeps_less(planner):
    planned = autocheckpoint(loss, budget="60%")
    assert_trees_close(jax.value_and_grad(planned)(WS, X), jax.value_and_grad(loss)(WS, X))
    assert kept_bytes(planned, WS, X) < 0.5 * kept_bytes(loss, WS, X)
    assert gradient_executions(planned, WS, X)["dot_general"] > gradient_executions(loss, WS, X)["dot_general"]
    assert planned.__name__ == "loss"


def test_each_signature_is_planned_once(planner):
    planned = autocheckpoint(budget="60%")(loss)
    for _ in range(3):
        planned(WS, X), jax.jit(planned)(WS, X), jax.grad(planned)(WS, X), jax.jit(jax.grad(planned))(WS, X)
        planned(WS, np.asarray(X)), planned([jnp.zeros((16, 16))] * 6, X)
    assert len(planner) == 1
    planned(WS, X[:64])
    planned(WS, X.astype(jnp.bfloat16))
    planned(tuple(WS), X)
    planned(WS, X, 2.0)
    planned(WS, X, 3.0)  # a number is an argument, not a choice
    assert len(planner) == 5


def test_keyword_arguments_are_the_same_call(planner):
    planned = autocheckpoint(loss, budget="60%")
    assert planned(WS, X, 2.0) == planned(WS, x=X, scale=2.0) == planned(ws=WS, x=X, scale=2.0)
    assert len(planner) == 1
    assert_trees_close(jax.grad(lambda ws: planned(ws=ws, x=X))(WS), jax.grad(loss)(WS, X))


def test_keyword_only_arrays_come_after_the_others(planner):
    planned = autocheckpoint(lambda ws, *, x: loss(ws, x), budget="60%")
    assert_trees_close(jax.grad(planned)(WS, x=X), jax.grad(loss)(WS, X))
    (args, _), *_ = planner
    assert [len(jax.tree.leaves(arg)) for arg in args] == [6, 1]


def test_what_the_planner_is_asked(planner):
    autocheckpoint(
        loss, budget=12345, target="cuda:h100", step=jax.grad, costs="measured", verify=False, solver="greedy"
    )(WS, X)
    ((args, settings),) = planner
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), args) == jax.tree.map(lambda a: (a.shape, a.dtype), (WS, X))
    assert {name: settings[name] for name in ("budget", "target", "step", "costs", "verify", "solver")} == {
        "budget": 12345, "target": "cuda:h100", "step": jax.grad, "costs": "measured", "verify": False, "solver": "greedy",
    }  # fmt: skip


def test_static_leaves_choose_a_plan(planner):
    def switched(ws, x, options, flag):
        y = loss(ws, x)
        return (y if options["mode"] == "plain" else 2 * y) if flag else options["activation"](y)

    planned = autocheckpoint(switched, budget="60%")
    plain = planned(WS, X, {"mode": "plain", "activation": jnp.tanh}, True)
    double = planned(WS, X, {"mode": "double", "activation": jnp.tanh}, True)
    other = planned(WS, X, {"mode": "plain", "activation": jnp.tanh}, False)
    assert (float(double), float(other)) == pytest.approx((2 * float(plain), np.tanh(float(plain))))
    planned(WS, X, {"mode": "plain", "activation": jnp.tanh}, True)
    assert len(planner) == 3
    with pytest.raises(ArgumentError, match="args must be arrays, numbers, or else hashable"):
        planned(WS, X, {"mode": bytearray(b"a"), "activation": jnp.tanh}, True)


def test_static_argnums_are_taken_whole(planner):
    def repeated(ws, x, times):
        for _ in range(times):
            x = jnp.tanh(x @ ws[0])
        return jnp.mean(x**2)

    planned = autocheckpoint(repeated, budget="60%", static_argnums=np.int64(2))
    assert_trees_close(jax.grad(planned)(WS, X, 3), jax.grad(lambda ws, x: repeated(ws, x, 3))(WS, X))
    jitted = jax.jit(planned, static_argnums=2)
    assert float(jitted(WS, X, 3)) == pytest.approx(float(repeated(WS, X, 3)))
    planned(WS, X, 4)
    assert len(planner) == 2
    with pytest.raises(ArgumentError, match="static_argnums must be within the 2 positional"):
        planned(WS, X)


class Options(NamedTuple):
    scale: Any


@dataclasses.dataclass(frozen=True)
class Config:
    scale: Any


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: ((x, "a"),), Options, Config])
def test_static_arguments_of_equal_values_and_other_types_are_other_programs(wrap, planner):
    seen: list[str] = []

    def switched(ws, x, static):
        seen.append(repr(static))
        return loss(ws, x) * (1 + len(set(seen)))

    planned = autocheckpoint(switched, budget="60%", static_argnums=2)
    values = [wrap(value) for value in (1, 1.0, True, 0.0, -0.0)]
    first = [float(planned(WS, X, value)) for value in values]
    assert len(planner) == len(values)
    assert [float(planned(WS, X, value)) for value in values] == first
    assert len(planner) == len(values) and len(set(first)) == len(values)


def test_numbers_whose_values_are_needed_are_told_apart_by_sign_and_type(planner):
    sign = lambda ws, x, by: loss(ws, x) * float(np.copysign(1, by)) * (2 if isinstance(by, float) else 1)
    planned = autocheckpoint(sign, budget="60%")
    plain = float(loss(WS, X))
    got = [float(planned(WS, X, by)) for by in (0.0, -0.0, 1, 1.0, 0.0)]
    assert got == pytest.approx([2 * plain, -2 * plain, plain, 2 * plain, 2 * plain])


def test_under_vmap_the_plan_is_for_one_example(planner):
    planned, several = autocheckpoint(loss, budget="60%"), jnp.stack([X, 2 * X])
    assert_trees_close(jax.vmap(planned, (None, 0))(WS, several), jax.vmap(loss, (None, 0))(WS, several))
    got = jax.jit(jax.grad(lambda ws: jax.vmap(planned, (None, 0))(ws, several).sum()))(WS)
    assert_trees_close(got, jax.grad(lambda ws: jax.vmap(loss, (None, 0))(ws, several).sum())(WS))
    ((args, _),) = planner
    assert args[1].shape == X.shape


def test_planning_within_a_trace_leaves_nothing_in_it(planner, monkeypatch):
    stub = problems.plan

    def computes(fun, *args, **settings):
        jax.jit(lambda: jnp.cos(jnp.arange(5.0)))().block_until_ready()  # as a planner that times stages would
        measure(jax.value_and_grad(fun), *args)
        return stub(fun, *args, **settings)

    monkeypatch.setattr(problems, "plan", computes)
    planned = autocheckpoint(loss, budget="60%")
    with jax.checking_leaks():
        seen = executions(jax.jit(planned), WS, X)
    assert len(planner) == 1
    assert seen["cos"] == 0 and seen["dot_general"] == 6


def test_a_function_that_closes_over_traced_values_is_planned_with_them_as_arguments(planner):
    def train_step(ws, x):
        return jax.value_and_grad(autocheckpoint(lambda ws: loss(ws, 2 * x), budget="60%"))(ws)

    expected = jax.value_and_grad(lambda ws: loss(ws, 2 * X))(WS)
    for step in (jax.jit(train_step), train_step):
        assert_trees_close(step(WS, X), expected)
    # And what it closes over is differentiated, at each call anew.
    planned = {}

    def outer(x, ws):
        fun = planned.setdefault("it", autocheckpoint(lambda ws: loss(ws, held[0]), budget="60%"))
        held[:] = [x]
        return fun(ws)

    held = []
    for x in (X, 3 * X):
        assert_trees_close(jax.grad(outer)(x, WS), jax.grad(lambda x: loss(WS, x))(x))
    assert (
        gradient_executions(outer, X, WS)["dot_general"]
        > gradient_executions(lambda x, ws: loss(ws, x), X, WS)["dot_general"]
    )


def test_a_function_that_calls_itself_is_planned_as_it_is(planner):
    @autocheckpoint(budget="60%")
    def halves(ws, x):
        return loss(ws, x) if x.shape[0] <= 32 else halves(ws, x[: x.shape[0] // 2]) + halves(ws, x[x.shape[0] // 2 :])

    assert float(halves(WS, X)) == pytest.approx(sum(float(loss(WS, X[i : i + 32])) for i in range(0, 128, 32)))
    assert len(planner) == 1


def test_threads_with_one_signature_plan_once_and_others_do_not_wait(planner, monkeypatch):
    stub, started, go_on = problems.plan, threading.Event(), threading.Event()

    def slow(fun, *args, **settings):
        if args[1].shape[0] == 128:
            started.set()
            assert go_on.wait(30)
        return stub(fun, *args, **settings)

    monkeypatch.setattr(problems, "plan", slow)
    planned, results = autocheckpoint(loss, budget="60%"), []
    threads = [threading.Thread(target=lambda: results.append(float(planned(WS, X)))) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert started.wait(30)
    small = float(planned(WS, X[:32]))  # while the others are being planned
    assert results == [] and small == pytest.approx(float(loss(WS, X[:32])))
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(results) == 6 and len(set(results)) == 1
    assert len(planner) == 2


def test_what_fails_is_told_to_all_that_wait_and_tried_again_later(planner, monkeypatch):
    stub, failures = problems.plan, [InfeasibleBudgetError("no plan fits; the least budget that fits is 7 bytes")]

    def fails_first(fun, *args, **settings):
        if failures:
            time.sleep(0.2)
            raise failures.pop()
        return stub(fun, *args, **settings)

    monkeypatch.setattr(problems, "plan", fails_first)
    planned, caught = autocheckpoint(loss, budget="1%"), []

    def call():
        try:
            planned(WS, X)
        except InfeasibleBudgetError as error:
            caught.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert caught and all("least budget" in text for text in caught)
    planned(WS, X)
    assert len(planner) == 1


def test_plan_shows_what_was_planned_and_plans_ahead_from_shapes(planner):
    planned = autocheckpoint(loss, budget="60%")
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (WS, X))
    plan = planned.plan(*shapes)
    assert isinstance(plan, Plan) and len(plan.regions) == 2
    planned(WS, X)
    assert planned.plan(WS, X) is plan and len(planner) == 1


def test_a_plan_for_sharded_shapes_serves_where_shardings_cannot_be_seen(planner):
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    planned = autocheckpoint(loss, budget="60%")
    plan = planned.plan(WS, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding))
    assert planner[0][0][1].sharding == sharding
    jax.jit(planned)(WS, X)
    assert len(planner) == 1 and planned.plan(WS, X) is plan


def test_configuration_is_part_of_the_signature(planner):
    planned = autocheckpoint(loss, budget="60%")
    planned(WS, X)
    with jax.default_matmul_precision("float32"):
        planned(WS, X)
        assert "HIGHEST" in str(jax.make_jaxpr(planned)(WS, X))
    assert len(planner) == 2
    assert "HIGHEST" not in str(jax.make_jaxpr(planned)(WS, X))


# ----------------------------------------------------------------------------------------------------------------- disk


def files(folder):
    return sorted(folder.glob("*"))


def test_plans_are_kept_and_read_back(planner, tmp_path):
    folder = tmp_path / "plans" / "here"
    first = autocheckpoint(loss, budget="60%", path=folder)
    assert not folder.exists()
    made = first.plan(WS, X)
    assert len(planner) == 1 and [path.name.startswith("loss-") for path in files(folder)] == [True]
    assert autocheckpoint(loss, budget=" 60.0 %", path=str(folder)).plan(WS, X) == made
    assert len(planner) == 1
    autocheckpoint(loss, budget="50%", path=folder).plan(WS, X)
    autocheckpoint(loss, budget="60%", path=folder, target="cuda:h100").plan(WS, X)
    autocheckpoint(loss, budget="60%", path=folder, step=jax.grad).plan(WS, X)
    autocheckpoint(loss, budget="60%", path=folder, verify=False).plan(WS, X)
    first.plan(WS, X[:64])
    assert len(planner) == 6 and len(files(folder)) == 6


@pytest.mark.parametrize(
    "changed",
    [
        "XLA_FLAGS", "LIBTPU_INIT_ARGS", "jax", "jaxlib", "jaxckpt", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt",
    ],
)  # fmt: skip
def test_whatever_decides_a_compiler_s_answer_plans_anew(planner, tmp_path, monkeypatch, changed):
    plan = lambda: autocheckpoint(loss, budget="60%", path=tmp_path).plan(WS, X)
    plan()
    version = cache._version
    if changed.isupper():
        monkeypatch.setenv(changed, os.environ.get(changed, "") + " --xla_nothing=1")
    else:
        monkeypatch.setattr(cache, "_version", lambda package: "999" if package == changed else version(package))
    plan()
    plan()
    assert len(planner) == len(files(tmp_path)) == 2


def test_whatever_a_step_is_jitted_with_plans_anew(planner, tmp_path):
    """Neither donation nor options of the compiler are in the program that JAX traces."""

    def step(fun, **settings):
        return jax.jit(lambda ws, x: [w - g for w, g in zip(ws, jax.grad(fun)(ws, x))], **settings)

    makers = [
        step,
        functools.partial(step, donate_argnums=0),
        functools.partial(step, compiler_options={"xla_backend_optimization_level": 1}),
    ]
    for _ in range(2):
        for maker in makers:
            autocheckpoint(loss, budget="60%", step=maker, path=tmp_path).plan(WS, X)
    assert len(planner) == len(files(tmp_path)) == 3


def test_solvers_of_one_class_are_told_apart_by_their_parameters(planner, tmp_path):
    for seconds in (1, 60, 60):
        autocheckpoint(loss, budget="60%", solver=Milp(seconds), path=tmp_path).plan(WS, X)
    assert len(planner) == len(files(tmp_path)) == 2


@pytest.mark.tpu
def test_which_argument_is_sharded_plans_anew(planner, tmp_path):
    mesh = jaxckpt.Target("tpu:v5e:2x2").mesh((4,), ("d",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    fun = lambda x, y: jnp.sum(jnp.tanh(x) * jnp.tanh(y))
    plain, placed = jax.ShapeDtypeStruct((8, 8), X.dtype), jax.ShapeDtypeStruct((8, 8), X.dtype, sharding=here)
    for args in ((plain, placed), (placed, plain)):
        autocheckpoint(fun, budget="90%", target="tpu:v5e:2x2", path=tmp_path).plan(*args)
    assert len(planner) == len(files(tmp_path)) == 2


def test_a_changed_function_is_planned_again(planner, tmp_path):
    autocheckpoint(lambda ws, x: loss(ws, x), budget="60%", path=tmp_path)(WS, X)
    autocheckpoint(lambda ws, x: loss(ws, x) + loss(ws, -x), budget="60%", path=tmp_path)(WS, X)
    assert len(planner) == 2 and len(files(tmp_path)) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b'{"format": 999}', b"[1, 2]", b"null", None])
def test_a_file_that_is_no_plan_is_planned_over_with_a_warning(planner, tmp_path, caplog, content):
    autocheckpoint(loss, budget="60%", path=tmp_path)(WS, X)
    (path,) = files(tmp_path)
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2] if content is None else content)
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        planned = autocheckpoint(loss, budget="60%", path=tmp_path)
        assert_trees_close(planned(WS, X), loss(WS, X))
    assert len(planner) == 2
    assert any(path.name in record.message and "planned again" in record.message for record in caplog.records)
    assert path.read_bytes() == good


def test_a_file_edited_to_another_plan_is_planned_over_with_a_warning(planner, tmp_path, caplog):
    autocheckpoint(loss, budget="60%", path=tmp_path)(WS, X)
    (path,) = files(tmp_path)
    good = path.read_text()
    path.write_text(json.dumps(json.loads(good) | {"regions": [], "loops": []}, indent=1))
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        planned = autocheckpoint(loss, budget="60%", path=tmp_path)
        assert_trees_close(planned(WS, X), loss(WS, X))
    assert len(planner) == 2 and planned.plan(WS, X) == Plan.from_json(good)
    assert "planned again" in caplog.text and path.read_text() == good


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_in_a_plans_place_is_left_alone(planner, tmp_path, caplog, kind):
    autocheckpoint(loss, budget="60%", path=tmp_path)(WS, X)
    (path,) = files(tmp_path)
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert_trees_close(autocheckpoint(loss, budget="60%", path=tmp_path)(WS, X), loss(WS, X))
    assert len(planner) == 2 and path.is_fifo() == (kind == "pipe")
    assert "planned again" in caplog.text and "could not be kept" in caplog.text


def test_a_plan_of_another_function_under_this_name_is_planned_over(planner, tmp_path, caplog):
    autocheckpoint(loss, budget="60%", path=tmp_path)(WS, X)
    (path,) = files(tmp_path)
    other = trace(lambda x: jnp.sin(x).sum(), X)
    Plan((Region(0, 1),), other.fingerprint).save(path)
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert_trees_close(autocheckpoint(loss, budget="60%", path=tmp_path)(WS, X), loss(WS, X))
    assert "another function" in caplog.text and len(planner) == 2


def test_a_folder_that_cannot_be_written_is_a_warning(planner, tmp_path, caplog):
    planned = autocheckpoint(loss, budget="60%", path=tmp_path / "folder")
    (tmp_path / "folder").write_text("a file since")
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert_trees_close(planned(WS, X), loss(WS, X))
    assert "could not be kept" in caplog.text


def test_device_budgets_are_looked_at_again_when_a_plan_is_read(planner, tmp_path, monkeypatch):
    free = {"now": 1000}
    monkeypatch.setattr(planned_calls, "budget_bytes", lambda budget, **_: free["now"])
    plan = autocheckpoint(loss, budget="device", path=tmp_path).plan(WS, X)
    assert plan.budget == 1000 and planner[0][1]["budget"] == 1000
    for now, plans in ((1050, 1), (1000, 1), (999, 2), (1200, 3)):
        free["now"] = now
        autocheckpoint(loss, budget="device", path=tmp_path).plan(WS, X)
        assert len(planner) == plans, now


FRESH = """
import sys, jax, jax.numpy as jnp
from jaxckpt import autocheckpoint
from jaxckpt.planner import problems
from jaxckpt.memory.report import measure

def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

if sys.argv[2] == "read":
    def plan(*args, **settings):
        raise AssertionError("planned again")
    problems.plan = plan
shapes = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 8, jax.ShapeDtypeStruct((2048, 32), jnp.float32)
planned = autocheckpoint(loss, budget="75%", path=sys.argv[1])
print(planned.plan(*shapes).measured_bytes, measure(jax.value_and_grad(planned), *shapes).peak_bytes)
print(measure(jax.value_and_grad(loss), *shapes).peak_bytes)
"""


def test_a_fresh_process_reads_the_plan_and_compiles_to_the_same_peak(tmp_path):
    def run(what):
        return subprocess.run(
            [sys.executable, "-c", FRESH, str(tmp_path), what], capture_output=True, text=True, check=True
        ).stdout.split()

    made = run("make")
    assert run("read") == made
    promised, compiled, unplanned = map(int, made)
    # Not to the byte: jax 0.10 compiles a jaxpr that is run again to some bytes less than the function that it was made
    # of.
    assert compiled == pytest.approx(promised, rel=1e-3)
    assert max(promised, compiled) <= 0.75 * unplanned


# --------------------------------------------------------------------------------------------------------- the real one


def test_the_compiled_peak_is_within_the_budget():
    ws, x, scale = [jnp.eye(32)] * 8, jnp.ones((2048, 32)), 0.5  # a number, whose type is weak
    planned = autocheckpoint(loss, budget="70%")
    plain = measure(jax.value_and_grad(loss), ws, x, scale).peak_bytes
    assert measure(jax.value_and_grad(planned), ws, x, scale).peak_bytes <= 0.7 * plain
    assert_trees_close(jax.value_and_grad(planned)(ws, x, scale), jax.value_and_grad(loss)(ws, x, scale))


def masked(ws, x):
    mask = jnp.tril(jnp.ones((256, 256), bool))
    for w in ws:
        x = jnp.tanh(jnp.where(mask, x @ x.T, 0.0) @ x @ w + jnp.ones(16))
    return jnp.mean(x**2)


MASKED = [jnp.eye(16)] * 4, jnp.ones((256, 16)) / 16


def test_constants_of_the_function_are_computed_and_not_held():
    plan = problems.plan(masked, *MASKED, budget="80%")
    auto = autocheckpoint(masked, budget="80%")
    assert auto.plan(*MASKED).fingerprint == plan.fingerprint
    assert auto.plan(*MASKED).measured_bytes == pytest.approx(plan.measured_bytes, rel=1e-3)
    assert measure(jax.value_and_grad(auto), *MASKED).peak_bytes == pytest.approx(plan.measured_bytes, rel=1e-3)
    least = []
    for call in (lambda **to: problems.plan(masked, *MASKED, **to), lambda **to: autocheckpoint(masked, **to)(*MASKED)):
        with pytest.raises(InfeasibleBudgetError) as caught:
            call(budget=100_000)
        least.append(re.search(r"least budget found to fit is (\d+)", str(caught.value))[1])
    assert int(least[0]) == pytest.approx(int(least[1]), rel=1e-3)


def test_a_scan_whose_body_ignores_its_carry_is_planned():
    def ignores(w, x):
        for _ in range(4):
            x = jnp.cos(jnp.sin(x @ w) * 2)
        return jnp.sum(jax.lax.scan(lambda c, _: (jnp.zeros(4), jnp.sum(jnp.sin(x @ w))), jnp.ones(4), None, 4)[1])

    args = jnp.eye(64) * 0.5, jnp.ones((512, 64))
    planned = autocheckpoint(ignores, budget="80%")
    assert planned.plan(*args).regions
    assert_trees_close(jax.grad(planned)(*args), jax.grad(ignores)(*args), rtol=1e-5)


@pytest.mark.parametrize("check", [False, True])
def test_the_first_call_may_be_within_a_mapped_function(check, caplog):
    P, mesh = jax.sharding.PartitionSpec, jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def collective(ws, x):
        return jax.lax.psum(masked(ws, x), "d")

    def step(fun):
        each = lambda ws, x: jax.value_and_grad(fun)(ws, x)
        specs = {"in_specs": (P(), P("d")), "out_specs": (P(), P()), "check_vma": check}
        return jax.jit(jax.shard_map(each, mesh=mesh, **specs))

    planned = autocheckpoint(collective, budget="70%")
    assert_trees_close(step(planned)(*MASKED), step(collective)(*MASKED), rtol=1e-4)
    assert "unverified" in caplog.text
    assert jaxckpt.count_flops(step(planned), *MASKED) > jaxckpt.count_flops(step(collective), *MASKED)  # it recomputes
    several = MASKED[1][None]
    axis = {"in_axes": (None, 0), "axis_name": "d"}
    expected = jax.vmap(collective, **axis)(MASKED[0], several)
    assert_trees_close(jax.vmap(planned, **axis)(MASKED[0], several), expected)


def test_later_calls_cost_nothing_within_jit_and_a_lookup_outside(planner, monkeypatch):
    planned = autocheckpoint(loss, budget="60%")
    jitted = jax.jit(planned)
    jitted(WS, X)

    def parse(*args):
        raise AssertionError("a compiled call comes here")

    monkeypatch.setattr(calls, "parse", parse)
    jitted(WS, X)
    monkeypatch.undo()

    many = [jnp.ones((2, 2))] * 100
    parsed = lambda: calls.parse((many, X), {}, None, ())
    seconds = min(timeit.repeat(parsed, timer=time.process_time, number=20, repeat=5)) / 20  # others may use the cores
    assert seconds < 2e-3, seconds  # of 101 arrays; some 100 µs on an idle machine


@pytest.mark.parametrize("budget", [0, -1, "12 GB or so", "140%", None, 0.5])
def test_what_is_no_budget_is_an_error_at_once(budget):
    with pytest.raises(ArgumentError, match="budget must be"):
        autocheckpoint(loss, budget=budget)
    with pytest.raises(ArgumentError, match="budget must be"):
        autocheckpoint(budget=budget)


@pytest.mark.parametrize(
    "option",
    [
        {"costs": "flops"},
        {"tile": 1},
        {"actions": ("save",)},
        {"solver": "best"},
        {"cache": 42},
        {"step": 3},
        {"host_budget": "much"},
    ],
)
def test_what_is_no_option_is_an_error_at_once(option):
    with pytest.raises(ArgumentError, match=f"{next(iter(option))} must be"):
        autocheckpoint(loss, budget="60%", **option)


def test_what_is_no_function_or_no_folder_is_an_error_at_once(tmp_path):
    with pytest.raises(ArgumentError, match="fun must be a function"):
        autocheckpoint(3, budget="60%")
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ArgumentError, match="path must be a folder"):
        autocheckpoint(loss, budget="60%", path=path)


def test_an_error_in_the_function_is_the_users_own(planner):
    def broken(ws, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        autocheckpoint(broken, budget="60%")(WS, X)


def test_numbers_among_the_arguments_count_as_the_plan_counts_them():
    def loss(w, scale, steps):
        for _ in range(3):
            w = jnp.tanh(w @ w) * scale
        return jnp.sum(w) * steps

    args = jnp.ones((32, 32)), 2.0, 3
    least = []
    for refused in (
        lambda: jaxckpt.plan(loss, *args, budget="5KiB", target="cpu", verify=False),
        lambda: autocheckpoint(loss, budget="5KiB", target="cpu", verify=False)(*args),
    ):
        with pytest.raises(InfeasibleBudgetError) as caught:
            refused()
        least.append(re.search(r"is (\d+) bytes", str(caught.value))[1])
    assert least[0] == least[1]


@pytest.mark.parametrize("stored", [False, True])
def test_a_loss_with_metrics_is_told_of_its_step_and_planned_with_it(stored, tmp_path):
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2), {"mean": x.mean(0)}

    args = [jnp.eye(32)] * 8, jnp.ones((512, 32))
    path = tmp_path if stored else None
    with pytest.raises(jaxckpt.NotDifferentiableError, match="jax.value_and_grad, has_aux=True"):
        autocheckpoint(loss, budget="60%", path=path)(*args)
    step = functools.partial(jax.value_and_grad, has_aux=True)
    planned = autocheckpoint(loss, budget="60%", path=path, step=step)
    assert_trees_close(step(planned)(*args), step(loss)(*args))
    plan = planned.plan(*args)
    assert plan.measured_bytes <= plan.budget < plan.unplanned_bytes and plan.regions
    assert len(list(tmp_path.iterdir())) == stored
