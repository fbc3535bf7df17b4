"""What a trace of the step teaches the chain."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxckpt import Plan, PlanMismatchError, Region
from jaxckpt.core.graph import trace
from jaxckpt.core.plan import TiledStretch
from jaxckpt.core.shared_traces import SharedTraces
from jaxckpt.core.tiling.stretches import tiled
from jaxckpt.memory.report import measure
from jaxckpt.models import gpt, unet
from jaxckpt.planner import corrections
from jaxckpt.planner.aims import Aims
from jaxckpt.planner.chain import Drop, Phase, cost, items, moments
from jaxckpt.planner.corrections import Corrections, traced_moments
from jaxckpt.planner.predictions import Predictions
from jaxckpt.planner.problems import problem_of
from jaxckpt.planner.search import Search

GPT = functools.partial(gpt.small, layers=6, width=64, heads=2, batch=4, tokens=64, vocabulary=256)
UNET = functools.partial(unet.small, pixels=32, depth=2)


@pytest.fixture(scope="module", params=[(GPT, "cuda:h100"), (UNET, "cuda:h100")], ids=["gpt", "unet"])
def problem(request):
    make, target = request.param
    loss, args = make()
    return problem_of(loss, *args, target=target)


def _solutions(problem, count=6):
    """Solutions all over the frontier, with some that drop among them."""
    limits = [limit for limit, _ in problem.table.frontier()]
    chosen = [limits[round(i * (len(limits) - 1) / (count - 1))] for i in range(count)]
    found = list(dict.fromkeys(problem.table.solution(limit) for limit in chosen))
    assert len(found) > 2
    return found


SCOPES = {
    "/jvp(jaxckpt0_9)/Block/": [(0, 9, Phase.FORWARD)],
    "/jvp(jaxckpt0_9)/jaxckpt0_4": [(0, 9, Phase.FORWARD), (0, 4, Phase.FORWARD)],
    "/transpose(jvp(jaxckpt0_9))/mul": [(0, 9, Phase.BACKWARD)],
    "/transpose(jvp(jaxckpt0_9))/jvp(jaxckpt0_9)/rematted_computation/mul": [(0, 9, Phase.BACKWARD)],
    "/transpose(jvp(jaxckpt0_9))/jvp(jaxckpt0_9)/rematted_computation/jaxckpt0_4/mul": [(0, 4, Phase.AGAIN)],
    "/transpose(jvp(jaxckpt0_9))/jvp(jaxckpt0_9)/jaxckpt0_4/mul": [(0, 4, Phase.BACKWARD)],
    "/transpose(jvp(jaxckpt0_9))/jvp(jaxckpt0_9)/jaxckpt0_4/rematted_computation/mul": [(0, 4, Phase.BACKWARD)],
    "/transpose(jvp(jaxckpt0_9))/jvp(jaxckpt0_9)/jaxckpt0_4/rematted_computation/jaxckpt1_2/jaxckpt1_3": [
        (1, 2, Phase.AGAIN),
        (1, 3, Phase.AGAIN),
    ],
    "/jvp(jaxckpt4_8)/transpose(jvp())/mul": [(4, 8, Phase.FORWARD)],  # the loss has a gradient in it
    "/transpose(jvp(jaxckpt4_8))/jvp(jaxckpt4_8)/rematted_computation/transpose(jvp())": [(4, 8, Phase.BACKWARD)],
    "/jit(step)/vmap(transpose(jvp(jaxckpt4_8)))/mul": [(4, 8, Phase.BACKWARD)],
    "/vmap(jvp(jaxckpt4_8))/mul": [(4, 8, Phase.FORWARD)],
    "/jit(loss)/Block": [],
    "": [],
}


@pytest.mark.parametrize("scopes", SCOPES)
def test_scopes_say_which_run_of_which_region_it_is(scopes):
    assert list(corrections._moments(scopes)) == SCOPES[scopes]


def test_the_most_of_each_run_counts_and_regions_of_other_bodies_do_not():
    profile = [("/jvp(jaxckpt0_4)", 3), ("/jvp(jaxckpt0_4)/a", 7), ("/jvp(jaxckpt0_3)", 9), ("/b", 11)]
    assert traced_moments(profile, (0, 4, 6)) == {(0, 1, Phase.FORWARD): 7}


def test_regions_are_in_scopes_only_where_that_is_asked_for(problem):
    plan = problem.model.plan(_solutions(problem)[0])
    step = jax.value_and_grad(plan.apply(problem.fun))
    scopes = lambda: " ".join(op.scope for op in trace(step, *problem.args).walk())
    plain = scopes()
    with SharedTraces(problem.fun, plan.fingerprint, ()).another(scoped=True):
        scoped = scopes()
    assert "jaxckpt0_" in scoped
    for other in (("another program", ()), (plan.fingerprint, ((3, 0),))):  # a planned function in this one; a body
        with SharedTraces(problem.fun, *other).another(scoped=True):
            assert scopes() == plain
    assert scopes() == plain and "jaxckpt0_" not in plain


def _calls():
    """Blocks that are calls of one program, with a loop and a custom derivative in each."""

    @jax.jit
    def block(x, w):
        h = jax.nn.silu(x @ w)
        h, _ = jax.lax.scan(lambda c, _: (jnp.sin(c) * h, None), h, None, length=3)
        return x + jnp.tanh(h @ w.T)

    def loss(ws, x):
        for w in ws:
            x = block(x, w)
        return jnp.mean(x**2)

    return loss, ([jax.ShapeDtypeStruct((32, 96), jnp.float32)] * 6, jax.ShapeDtypeStruct((512, 32), jnp.float32))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(GPT, id="gpt", marks=pytest.mark.once),
        pytest.param(UNET, id="unet", marks=pytest.mark.once),
        pytest.param(_calls, id="calls"),
    ],
)
def test_what_is_traced_once_for_all_plans_is_what_is_traced_for_each(make):
    loss, args = make()
    problem = problem_of(loss, *args, target="cuda:h100")
    called = []

    def counted(*args):
        called.append(args)
        return loss(*args)

    problem.asked = dataclasses.replace(problem.asked, fun=counted)
    plans = list(map(problem.model.plan, _solutions(problem, 4)))
    shared = list(map(problem.look, plans))
    assert len(called) == 1
    for plan in plans:
        with problem._shared_traces.another():
            again = str(jax.make_jaxpr(jax.value_and_grad(plan.apply(counted)))(*args))
        assert again == str(jax.make_jaxpr(jax.value_and_grad(plan.apply(loss)))(*args))
    assert len(called) == 1
    problem._shared_traces = SharedTraces(
        None, plans[0].fingerprint, ()
    )  # of another function, with which nothing is shared
    assert list(map(problem.look, plans)) == shared and len(called) == 1 + len(plans)


def test_programs_that_differ_in_what_their_fingerprint_leaves_out_share_nothing():
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["s"])
    @dataclasses.dataclass
    class Module:
        w: jax.Array
        s: float

    def fun(module, x):
        return jnp.sum(jnp.tanh(x @ module.w) * module.s)

    w, x = jnp.eye(4), jnp.ones((3, 4))
    graph = trace(fun, Module(w, 2.0), x)
    plan = Plan((Region(0, len(graph.ops)),), graph.fingerprint)
    step = lambda fun: lambda w, x: (fun(Module(w, 2.0), x), fun(Module(w, 3.0), x))
    with SharedTraces(fun, plan.fingerprint, ()).another():
        assert step(plan.apply(fun))(w, x) == step(fun)(w, x)


def test_a_function_that_a_step_changes_between_its_calls_is_traced_again():
    mode = {"training": True}

    def fun(w, x):
        return jnp.sum(jnp.tanh(x @ w)) if mode["training"] else jnp.sum(jnp.cos(x @ w) ** 2)

    def step(fun):
        def both(w, x):
            mode["training"] = True
            gradient = jax.grad(fun)(w, x)
            mode["training"] = False
            return gradient, fun(w, x)

        return both

    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    mode["training"] = True
    graph = trace(fun, *args)
    plan = Plan((Region(0, len(graph.ops)),), graph.fingerprint)
    traces = SharedTraces(fun, plan.fingerprint, ())
    for _ in range(2):
        with traces.another(), pytest.raises(PlanMismatchError):
            jax.eval_shape(step(plan.apply(fun)), *args)


@pytest.mark.once
def test_users_see_no_scopes_and_a_plan_is_not_compiled_twice(tmp_path):
    loss, args = GPT()
    found = problem_of(loss, *args, target="cuda:h100", cache=tmp_path).plan("70%")
    assert found.regions
    assert not any("jaxckpt" in buffer.operation for buffer in found.measured.largest(100))
    assert not any("jaxckpt" in label for label in found.measured.timeline().labels)
    stored = set(tmp_path.iterdir())
    step = jax.value_and_grad(found.apply(loss))
    report = measure(step, *args, target="cuda:h100", generate_code=False, cache=tmp_path)
    assert set(tmp_path.iterdir()) == stored and report.peak_bytes == found.measured_bytes


def test_the_moments_of_a_solution_peak_where_it_does(problem):
    solutions = _solutions(problem)
    assert any(isinstance(item, Drop) for solution in solutions for _, item in items(solution))
    for solution in solutions:
        said, chain = moments(problem.model.chain, solution), problem.model.chain
        assert max(said.values()) == cost(chain, solution).peak
        nested = list(items(solution))
        assert {(item.start, item.stop) for _, item in nested} == {(start, stop) for start, stop, _ in said}
        assert any(phase is Phase.AGAIN for *_, phase in said) == any(depth > 0 for depth, _ in nested)


def test_each_run_of_each_region_is_found_in_the_trace(problem):
    for solution in _solutions(problem):
        said, traced = moments(problem.model.chain, solution), problem.traced(solution).moments
        backward = {moment for moment in said if moment[2] is Phase.BACKWARD}
        assert backward <= set(traced)
        peak = problem.traced(solution).peak_bytes
        assert 0.9 * peak < problem.argument_bytes + max(traced.values()) <= peak


def test_corrected_by_a_solution_the_chain_says_of_it_what_the_trace_says(problem):
    chain, unit = problem.model.chain, 4096
    for solution in _solutions(problem):
        learned, traced = Corrections(chain), problem.traced(solution).moments
        learned.add(solution, traced, unit)
        said, plain = moments(learned.chain, solution), moments(chain, solution)
        assert said != plain
        both = [moment for moment in set(said) & set(traced) if moment[2] is Phase.BACKWARD]
        assert all(said[moment] >= traced[moment] for moment in both)
        # What is live before and after a stretch is the chain's own: no correction of the stretch goes below that.
        exact = [moment for moment in both if said[moment] < traced[moment] + unit]
        assert len(exact) > 0.7 * len(both) and len(exact) > sum(plain[moment] == traced[moment] for moment in both)


@pytest.mark.parametrize("teacher", ["richest", "middle", "leanest"])
def test_what_one_solution_teaches_holds_for_the_others(problem, teacher):
    chain, solutions = problem.model.chain, _solutions(problem, 9)
    known = solutions[{"richest": -1, "middle": len(solutions) // 2, "leanest": 0}[teacher]]
    peak = {each: max(problem.traced(each).moments.values()) for each in solutions}
    learned = Corrections(chain)
    learned.add(known, problem.traced(known).moments, 1)
    offset = peak[known] - cost(chain, known).peak  # the best that one offset for the whole step can do
    single = [abs(cost(chain, each).peak + offset - peak[each]) / peak[each] for each in solutions]
    corrected = [abs(cost(learned.chain, each).peak - peak[each]) / peak[each] for each in solutions]
    assert sum(corrected) <= sum(single) + 0.04 * len(solutions)


def test_what_a_solution_teaches_holds_for_the_next(problem):
    chain, solutions = problem.model.chain, _solutions(problem, 12)
    single, corrected = [], []
    for known, other in itertools.pairwise(solutions):
        learned = Corrections(chain)
        learned.add(known, problem.traced(known).moments, 1)
        peak = {each: max(problem.traced(each).moments.values()) for each in (known, other)}
        offset = peak[known] - cost(chain, known).peak
        single.append(abs(cost(chain, other).peak + offset - peak[other]) / peak[other])
        corrected.append(abs(cost(learned.chain, other).peak - peak[other]) / peak[other])
    print(problem.target.name, sum(single), sum(corrected))
    assert sum(corrected) < max(0.9 * sum(single), 0.02 * len(solutions))


def test_a_step_that_has_the_loss_in_a_loop_of_its_own_is_planned_all_the_same():
    loss, args = GPT()

    def accumulated(loss):
        def step(params, *batch):
            one = lambda total, part: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, *part)), None)
            parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
            return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)[0]

        return step

    found = problem_of(loss, *args, target="cuda:h100", step=accumulated)
    plan = found.plan("70%")
    assert plan.measured_bytes <= plan.budget and plan.regions
    assert not any(each.moments for each in found._traced.values())


def test_nothing_traced_corrects_nothing():
    loss, args = GPT()
    chain = problem_of(loss, *args, target="cpu").model.chain
    learned = Corrections(chain)
    assert learned.chain is chain
    learned.add((), {}, 1)
    assert learned.chain == chain and learned.chain.segments == chain.segments


@pytest.mark.cuda
def test_a_loss_in_tiles_needs_most_before_its_backward_pass_and_the_chain_learns_it():
    """Its gradients are computed in the forward pass, while all blocks' values are kept."""
    loss, args = gpt.gpt2(layers=4, width=128, heads=2, vocabulary=32_000, tokens=256, batch=8)
    graph = trace(loss, *args)
    first = next(
        op for op in graph.ops if op.primitive == "dot_general" and graph.values[op.outputs[0]].shape[-1] == 32_000
    )
    start = graph.ops.index(first)
    tile = TiledStretch(start=start, stop=len(graph.ops), value=first.inputs[0], axis=0, tiles=4, round=0, parts=1)
    problem = problem_of(tiled(loss, [tile]), *args, target="cuda:h100")
    chain, solutions = problem.model.chain, _solutions(problem)
    last = [moment for moment in problem.traced(solutions[-1]).moments if moment[1] == chain.length]
    forward, backward = (
        max(problem.traced(solutions[-1]).moments[moment] for moment in last if moment[2] is phase)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    assert forward > 1.1 * backward
    for solution in solutions:
        learned = Corrections(chain)
        learned.add(solution, problem.traced(solution).moments, 1)
        peak = max(problem.traced(solution).moments.values())
        assert cost(learned.chain, solution).peak == pytest.approx(peak, rel=0.02)
    plan = problem.plan("85%")
    assert plan.regions and plan.measured_bytes <= plan.budget


@pytest.mark.once
def test_where_no_plan_fits_leaner_ones_are_found_by_what_traces_teach():
    made, args = UNET()
    problem = problem_of(made, *args, target="cpu")
    solver = problem.solver("chain")
    least = solver.least(problem.model.chain)
    aims = Aims(Predictions(problem, problem.argument_bytes, solver), solver)
    found = {each: problem.estimate(each) for each in aims.leanest(least)}
    for_more = Aims(Predictions(problem, 2 * problem.plain.peak_bytes, solver), solver)
    assert for_more.leanest(least) == list(found), "an error's least budget depends on the budget that was asked for"
    assert min(found.values()) < 0.98 * problem.estimate(least)
    peak = problem.measure_planned(problem.plan_of(least)).peak_bytes
    search = Search(problem, round(0.95 * peak), solver, True, lambda *_: None)
    assert search._floor(least).fits(search.budget), "a plan that is traced to need less does"
