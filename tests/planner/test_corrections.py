"""What a trace of the step teaches the chain."""

from __future__ import annotations

import functools
import itertools

import jax
import pytest

from benchmarks.models import gpt, unet
from jaxckpt.core.emit import regions_in_scopes
from jaxckpt.core.graph import graph_of, trace
from jaxckpt.core.liveness import graph_peak, graph_profile
from jaxckpt.planner import corrections
from jaxckpt.planner.chain import Drop, Phase, cost, items, moments
from jaxckpt.planner.corrections import Corrections, traced_moments
from jaxckpt.planner.problems import problem_of

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
    with regions_in_scopes(plan.fingerprint):
        assert "jaxckpt0_" in scopes()
    with regions_in_scopes("another program"):  # a planned function within the one that is planned
        assert scopes() == plain
    assert scopes() == plain and "jaxckpt0_" not in plain
    step = jax.value_and_grad(problem.model.plan(_solutions(problem)[0]).apply(problem.fun))
    assert "jaxckpt0_" not in str(jax.make_jaxpr(step)(*problem.args))


def test_a_profile_peaks_where_the_estimate_says(problem):
    step = jax.value_and_grad(problem.fun)
    graph = graph_of(jax.make_jaxpr(step)(*problem.args))
    profile = graph_profile(graph, problem.target.platform)
    assert max(size for _, size in profile) == graph_peak(graph, problem.target.platform)
    assert len({size for _, size in profile}) > 10


def test_the_moments_of_a_solution_peak_where_it_does(problem):
    solutions = _solutions(problem)
    assert any(isinstance(item, Drop) for solution in solutions for _, item in items(solution))
    for solution in solutions:
        said, chain = moments(problem.model.chain, solution), problem.model.chain
        assert max(said.values()) <= cost(chain, solution).peak
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
        both = set(said) & set(traced)
        assert all(said[moment] >= traced[moment] for moment in both)
        # What is live before and after a stretch is the chain's own: no correction of the stretch goes below that.
        exact = [moment for moment in both if said[moment] < traced[moment] + unit]
        assert len(exact) > 0.7 * len(both) and len(exact) > sum(plain[moment] == traced[moment] for moment in both)


def test_what_one_solution_teaches_holds_for_the_next(problem):
    chain, solutions = problem.model.chain, _solutions(problem, 12)
    plain, corrected = [], []
    for known, other in itertools.pairwise(solutions):
        learned = Corrections(chain)
        learned.add(known, problem.traced(known).moments, 1)
        peak = {each: max(problem.traced(each).moments.values()) for each in (known, other)}
        offset = peak[known] - cost(chain, known).peak  # the best that one offset for the whole step can do
        plain.append(abs(cost(chain, other).peak + offset - peak[other]))
        corrected.append(abs(cost(learned.chain, other).peak - peak[other]))
    if sum(plain) < 5e-3 * sum(max(problem.traced(each).moments.values()) for each in solutions):
        assert sum(corrected) < 1.1 * sum(plain)  # equal blocks: the chain is right about them but for one offset
    else:
        assert sum(corrected) < 0.8 * sum(plain)


def test_nothing_traced_corrects_nothing():
    loss, args = GPT()
    chain = problem_of(loss, *args, target="cpu").model.chain
    learned = Corrections(chain)
    assert learned.chain is chain
    learned.add((), {}, 1)
    assert learned.chain == chain and learned.chain.segments == chain.segments
