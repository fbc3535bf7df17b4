"""A solver of the user's own: an instance of a class that is registered nowhere."""

import threading
from typing import Any

import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import ArgumentError, InfeasibleBudgetError
from jaxckpt.planner.chain import Keep, cost
from jaxckpt.planner.problems import problem_of
from jaxckpt.planner.solvers import Infeasible, Solver, solver

WS, X = [jnp.ones((32, 32))] * 12, jnp.ones((4096, 32))


def loss(ws, x):
    for w in ws:
        x = jnp.sin(jnp.tanh(x @ w))
    return jnp.sum(x)


def leanest(chain):
    candidates = [chain.segment(stage, stage + 1).candidates for stage in range(chain.length)]
    return tuple(
        Keep(stage, stage + 1, min(range(len(each)), key=lambda o: each[o].kept))
        for stage, each in enumerate(candidates)
    )


class Lean(Solver):
    """Keeps the least of each stage, and drops no stage."""

    name = "lean"

    def __init__(self):
        self.asked = []

    def solve(self, chain, limit):
        self.asked.append(limit)
        found = leanest(chain)
        peak = cost(chain, found).peak
        return found if peak <= limit else Infeasible(peak, found)


@pytest.fixture(scope="module")
def problem():
    return problem_of(loss, WS, X, target="cpu")


def test_an_instance_plans(problem):
    lean = Lean()
    found = problem.plan("80%", solver=lean)
    assert lean.asked and found.measured_bytes <= found.budget
    assert found.regions == problem.model.plan(leanest(problem.model.chain)).regions
    assert found.regions != problem.plan("80%").regions, "else anything could have made it"
    again = jaxckpt.plan(loss, WS, X, budget="80%", target="cpu", solver=Lean())
    assert again.regions == found.regions


def test_a_frontier_and_autocheckpoint_take_an_instance(problem, tmp_path):
    (point,) = jaxckpt.frontier(loss, WS, X, budgets=("80%",), target="cpu", verify=False, solver=Lean()).points
    planned = jaxckpt.autocheckpoint(loss, budget="80%", target="cpu", verify=False, solver=Lean(), path=tmp_path)
    expected = problem.model.plan(leanest(problem.model.chain)).regions
    assert point.plan.regions == planned.plan(WS, X).regions == expected
    (stored,) = tmp_path.iterdir()
    jaxckpt.autocheckpoint(loss, budget="80%", target="cpu", verify=False, path=tmp_path).plan(WS, X)
    assert len(list(tmp_path.iterdir())) == 2 and stored.exists(), "another solver's plan is another plan"


@pytest.mark.parametrize("verify", [True, False])
def test_it_answers_for_its_own_feasibility(problem, verify):
    exact = least(problem, "chain", verify)
    own = least(problem, Lean(), verify)
    assert own > 1.1 * exact
    with pytest.raises(InfeasibleBudgetError, match="Only plans of the solver 'lean' were looked for; solver='chain' "):
        problem.plan((own + exact) // 2, solver=Lean(), verify=verify)
    assert problem.plan((own + exact) // 2, solver="chain", verify=verify).regions
    found = problem.plan(own, solver=Lean(), verify=verify)
    assert (found.measured_bytes or found.predicted.peak_bytes) <= own


def test_a_solver_may_let_the_search_take_what_others_found():
    class Open(Lean):
        own_only = False

    problem = problem_of(loss, WS, X, target="cpu")
    others = problem.plan("60%")
    assert problem.recall("60%", Open()) == others and problem.recall("60%", Lean()) is None


def least(problem, solver, verify):
    with pytest.raises(InfeasibleBudgetError) as caught:
        problem.plan(problem.argument_bytes + 1, solver=solver, verify=verify)
    return caught.value.least_bytes


def test_of_one_that_knows_no_least_the_step_as_it_is_is_the_least(problem):
    class Silent(Solver):
        name = "silent"

        def solve(self, chain, limit):
            return Infeasible()

    with pytest.raises(InfeasibleBudgetError, match="Use that") as caught:
        problem.plan("60%", solver=Silent())
    assert caught.value.least_bytes == problem.unplanned.peak_bytes, "the step as it is fits that"
    assert caught.value.stretch is not None


@pytest.mark.parametrize(
    "answer",
    [
        lambda chain: leanest(chain)[1:],
        lambda chain: leanest(chain)[::-1],
        lambda chain: tuple(
            Keep(k.start, k.stop, max(range(n), key=lambda o: chain.segment(k.start, k.stop).candidates[o].kept))
            for k in leanest(chain)
            for n in [len(chain.segment(k.start, k.stop).candidates)]
        ),
    ],
    ids=["leaves a stage out", "out of order", "over the budget"],
)
def test_an_answer_that_is_none_is_an_error(problem, answer):
    class Wrong(Lean):
        name = "wrong"

        def solve(self, chain, limit):
            found = super().solve(chain, limit)
            return found if isinstance(found, Infeasible) else answer(chain)

    least_bytes = least(problem, Lean(), False)
    rule = "(are tuples of Keep and Drop that cover every stage once|peak at no more than the limit)"
    with pytest.raises(ArgumentError, match=f"solver must be one whose solutions {rule}.* wrong returned"):
        problem.plan(least_bytes, solver=Wrong(), verify=False)


@pytest.mark.parametrize("solution", [(Keep(0, 1, 0),) * 9, (Keep(0, 1, 99),), (Keep(0, 1, -1),), "stages", None, 3])
@pytest.mark.parametrize("verify", [False, True])
def test_what_is_no_solution_at_all_is_an_error(problem, solution, verify):
    class Odd(Solver):
        name = "odd"

        def solve(self, chain, limit):
            rest = leanest(chain)[1:] if isinstance(solution, tuple) and len(solution) == 1 else ()
            return (*solution, *rest) if rest else solution

    with pytest.raises(ArgumentError, match="Keep and Drop that cover every stage once, in order.*odd returned"):
        problem.plan("60%", solver=Odd(), verify=verify)


def test_an_instance_keeps_what_budgets_share(problem, monkeypatch):
    optimal: Any = solver("chain")
    chain = problem.model.chain
    table = optimal.table(chain)
    assert optimal.table(chain) is table
    other = problem_of(lambda w, x: jnp.sum(jnp.tanh(x @ w)), WS[0], X, target="cpu").model.chain
    assert optimal.solve(other, 2**40) == optimal.table(other).solution(2**40)
    assert optimal.table(chain) is not table, "the last chain's alone is kept"
    assert problem.table is problem.table


def test_threads_may_ask_one_instance_of_several_chains(problem):
    other = problem_of(lambda w, x: jnp.sum(jnp.tanh(x @ w)), WS[0], X, target="cpu").model.chain
    chains, shared, found = [problem.model.chain, other], solver("sqrt"), []
    expected = [solver("sqrt").least(chain) for chain in chains]
    ask = lambda i: found.extend((i, shared.least(chains[i])) for _ in range(20))
    threads = [threading.Thread(target=ask, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80 and all(solution == expected[i] for i, solution in found)
