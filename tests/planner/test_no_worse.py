"""Plans that are no worse than checkpoints by hand that fit, in FLOPs and in seconds, each for itself."""

import functools
import threading
from types import SimpleNamespace

import jax
import pytest

import jaxckpt
from benchmarks.models import mixed
from jaxckpt.core.constants import EVEN
from jaxckpt.factories import make
from jaxckpt.memory.report import measure
from jaxckpt.memory.targets import Target
from jaxckpt.planner import no_worse
from jaxckpt.planner.chain import Candidate, Chain, Segment, cost
from jaxckpt.planner.costs import Time
from jaxckpt.planner.frontier import cost_of
from jaxckpt.planner.no_worse import NoWorse, Reweighed, reweighed
from jaxckpt.planner.problems import problem_of
from jaxckpt.planner.solvers.optimal import Optimal

pytestmark = pytest.mark.usefixtures("shared_answers")


@pytest.mark.once
@pytest.mark.parametrize("preset", ["dots_no_batch"])
def test_a_plan_computes_no_more_than_a_preset_of_its_peak(preset, tmp_path):
    """By the sum alone it computes 0.26% of the step more, in less time."""
    target, factory = Target("cuda:h100"), functools.partial(mixed.attention, seed=0)
    loss, args = make(factory)
    hand, _ = make(factory, checkpoint=functools.partial(jaxckpt.checkpoint, policy=preset))
    step = jax.value_and_grad
    budget = measure(step(hand), *args, target=target, generate_code=False).peak_bytes
    problem = problem_of(loss, *args, target=target, step=step, cache=tmp_path)
    plan = problem.plan(budget)
    assert plan.measured_bytes <= budget
    plain, by_hand, planned = (cost_of(step(fun), args, target) for fun in (loss, hand, plan.apply(loss)))
    assert plain[0] < planned[0] <= by_hand[0], "FLOPs, and some are recomputed"
    assert planned[1] < by_hand[1]
    assert problem.plan(budget) == plan, "it counts as the cheapest from then on"
    again = problem_of(loss, *args, target=target, step=step, cache=tmp_path)
    assert again.plan(budget) == plan, "and for other calls"
    cheapest = min(
        (t for t in problem.tries.values() if t.fits(budget)), key=lambda t: problem.effort(t.solution, t.by_hand)
    )
    assert cheapest.traced.flops > by_hand[0], "by the sum another one is"


def test_flops_weigh_more_or_less_in_a_chain():
    ways = (
        Candidate(0, 12.0, 0, 2.0, "computes"),
        Candidate(0, 9.0, 0, 8.0, "moves"),
        Candidate(100, 0.0, 0, 0.0, "keeps"),
    )
    chain = Chain(1, {(0, 1): Segment(15.0, 0, 0, ways)})
    model = SimpleNamespace(chain=chain, forward=(5.0,))
    of = lambda factor: reweighed(model, factor).segments[0, 1]
    assert of(1.0) == chain.segments[0, 1]
    assert [each.time for each in of(0.0).candidates] == [2.0, 8.0, 0.0] and of(0.0).forward_time == 5.0
    assert [each.time for each in of(4.0).candidates] == [42.0, 12.0, 0.0] and of(4.0).forward_time == 45.0
    best = {factor: Optimal().answer(reweighed(model, factor), 50) for factor in (0.0, 1.0)}
    assert [chain.candidate(best[factor][0]).how for factor in (0.0, 1.0)] == ["computes", "moves"]


class Problem:
    """A problem whose plans are named: name -> (FLOPs, seconds, peak)."""

    def __init__(self, plans, by_hand):
        self.plans, self.by_hand, self.lock, self.tries = plans, by_hand, threading.Lock(), {}
        self.plain = SimpleNamespace(flops=1000.0, time=Time(1000.0, 2000.0))
        self.model, self.compiled = SimpleNamespace(quick=True, chain=None), []

    def traced(self, name, by_hand=False):
        flops, seconds, _ = self.plans[name]
        return SimpleNamespace(flops=flops, time=Time(seconds, seconds + flops))

    def seconds(self, name, by_hand=False):
        return self.plans[name][1]

    def effort(self, name, by_hand=False):
        return sum(self.plans[name][:2])

    def compile(self, name, by_hand):
        self.compiled.append(name)
        fits = lambda budget: self.plans[name][2] <= budget
        return SimpleNamespace(solution=name, by_hand=by_hand, fits=fits, effort=self.effort(name))


def found(monkeypatch, plans, by_hand, solved=(), less=()):
    """Returns (what is found instead of "best", what was compiled); `solved`: what solvers of other weights find."""
    problem = Problem(plans, by_hand)
    predictions = SimpleNamespace(
        problem=problem,
        budget=100,
        quick=True,
        overstated=lambda by_hand: 1.0,
        predicted_by_hand=lambda name: problem.plans[name][2] if name != "liar" else 90,
        predicted=lambda name: plans[name][2],
        is_traced=lambda name: True,
    )
    monkeypatch.setattr(no_worse, "chain_costs", lambda model, name: plans[name][:2])
    monkeypatch.setattr(no_worse, "Reweighed", lambda problem, budget, solver, factor: factor)
    asked = iter(solved)
    host = SimpleNamespace(solve=lambda limit: next(asked, None))
    monkeypatch.setattr(no_worse, "Aims", lambda factor, solver: SimpleNamespace(next=host.solve, host=host))
    monkeypatch.setattr(no_worse, "cost", lambda chain, name: SimpleNamespace(peak=plans[name][2]))
    best = SimpleNamespace(solution="best", by_hand=False, effort=problem.effort("best"))
    looked = NoWorse(predictions, Optimal(), best, problem.compile).find([(name, True) for name in less])
    return looked and looked.solution, problem.compiled


PLANS = {
    "best": (1010, 1000, 90),
    "fewer": (1000, 1100, 95),
    "faster": (1020, 990, 95),
    "between": (1000, 1012, 95),
    "dear": (1000, 1099, 95),
    "large": (1000, 1011, 101),
    "liar": (990, 1100, 120),
    "worse": (1020, 1015, 90),
}


def test_the_best_plan_stays_where_it_is_no_worse(monkeypatch):
    assert found(monkeypatch, PLANS, ["worse"], ["between"]) == (None, [])
    assert found(monkeypatch, PLANS, [], ["between"]) == (None, [])


def test_a_plan_that_computes_no_more_than_a_rival_takes_the_place_of_the_best(monkeypatch):
    assert found(monkeypatch, PLANS, ["fewer", "worse"], ["between"]) == ("between", ["fewer", "between"])
    assert found(monkeypatch, PLANS, [], ["between"], less=["fewer"])[0] == "between", "one for less memory"


def test_a_plan_that_takes_no_longer_than_a_rival_does(monkeypatch):
    plans = {**PLANS, "between": (1015, 990, 95)}
    assert found(monkeypatch, plans, ["faster"], ["between"])[0] == "between"
    assert found(monkeypatch, plans, ["faster"], [])[0] == "faster", "the rival itself, as it is hardly dearer"


def test_what_does_not_fit_is_no_rival_and_no_plan(monkeypatch):
    assert found(monkeypatch, PLANS, ["liar"], ["between"]) == (None, ["liar"])
    assert found(monkeypatch, PLANS, ["liar", "fewer"], ["between"])[0] == "between"
    assert found(monkeypatch, PLANS, ["fewer"], ["large", "between"]) == ("between", ["fewer", "large", "between"])


def test_a_plan_that_is_much_dearer_does_not(monkeypatch):
    assert sum(PLANS["dear"][:2]) > sum(PLANS["best"][:2]) + EVEN * 2000
    assert found(monkeypatch, PLANS, ["fewer"], ["dear"]) == (None, ["fewer"])


def test_predictions_of_another_weight_order_by_it():
    problem = SimpleNamespace(
        model=SimpleNamespace(chain=Chain(0, {}), forward=(), quick=True, places=(0,)),
        traced=lambda name, by_hand=False: SimpleNamespace(
            time=Time(*{"computes": (1.0, 5.0), "moves": (4.0, 4.5)}[name])
        ),
        effort=lambda name, by_hand=False: {"computes": 5.0, "moves": 4.5}[name],
    )
    for factor, cheaper in ((1.0, "moves"), (0.0, "computes"), (4.0, "moves")):
        weighed = Reweighed(problem, 100, Optimal(), factor)
        weighed.is_traced = lambda name: True
        assert min(("computes", "moves"), key=weighed.effort) == cheaper
    assert cost(Chain(0, {}), ()).time == 0.0
