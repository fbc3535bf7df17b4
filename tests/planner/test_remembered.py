"""Plans that one call returned, and another one knows of."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt.planner import search
from jaxckpt.planner.problems import problem_of
from jaxckpt.planner.remembered import Found, Remembered

WS = [jax.random.normal(jax.random.key(number), (32, 32)) / 6 for number in range(8)]
X = jax.random.normal(jax.random.key(9), (4096, 32))


def make():
    """Returns a new function, as another call or another process has it."""

    def loss(ws, x):
        for w in ws:
            x = x + jnp.sin(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    return loss


def plan(folder, budget, **more):
    return jaxckpt.plan(make(), WS, X, budget=budget, target="cpu", cache=folder, **more)


def files(folder):
    return sorted(folder.glob("*.plans"))


@pytest.fixture
def nothing_is_searched(monkeypatch):
    def fail(*_):
        raise AssertionError("a search")

    def begin():
        monkeypatch.setattr(search.Search, "_search", fail)
        monkeypatch.setattr(search.Search, "_floor", fail)

    return begin


def test_the_same_budget_is_not_searched_again(tmp_path, nothing_is_searched):
    first = plan(tmp_path, "50%")
    nothing_is_searched()
    again = plan(tmp_path, "50%")
    assert again == first and again.measured_bytes == first.measured_bytes <= again.budget == first.budget
    assert again.report.flops == first.report.flops
    with pytest.raises(AssertionError, match="a search"):
        plan(tmp_path, "55%")
    with pytest.raises(AssertionError, match="a search"):
        plan(False, "50%")


def test_a_plan_for_less_is_a_plan_for_more(tmp_path, monkeypatch):
    less = plan(tmp_path, "50%")
    monkeypatch.setattr(search.Search, "_floor", lambda *_: None)
    monkeypatch.setattr(search.Search, "_search", lambda self, _: self.known())
    more = plan(tmp_path, "70%")
    assert more == less and more.budget > less.budget and more.measured_bytes == less.measured_bytes
    with pytest.raises(jaxckpt.InfeasibleBudgetError):
        plan(tmp_path, less.measured_bytes - 1)


def test_the_least_that_an_error_names_is_known_to_other_calls(tmp_path, monkeypatch):
    with pytest.raises(jaxckpt.InfeasibleBudgetError) as raised:
        plan(tmp_path, "20%")
    least = raised.value.least_bytes
    monkeypatch.setattr(search.Search, "_floor", lambda *_: None)
    monkeypatch.setattr(search.Search, "_search", lambda self, _: self.known())
    assert plan(tmp_path, least).measured_bytes == least
    with pytest.raises(jaxckpt.InfeasibleBudgetError):
        plan(False, least)


def test_no_more_time_for_more_memory_in_calls_of_any_order(tmp_path):
    budgets = [40, 80, 60, 40]
    found = [(budget, plan(tmp_path, f"{budget}%")) for budget in budgets]
    for number, (budget, made) in enumerate(found):
        for before, known in found[:number]:
            assert before > budget or made.overhead <= known.overhead + 1e-9
    (path,) = files(tmp_path)
    assert {each["budget"] for each in json.loads(path.read_text())} == {made.budget for _, made in found}


def test_other_problems_have_other_files(tmp_path):
    plan(tmp_path, "50%")
    plan(tmp_path, "50%", actions=[jaxckpt.RECOMPUTE, jaxckpt.SAVE, jaxckpt.compress("bfloat16")])
    jaxckpt.plan(make(), WS[:6], X, budget="50%", target="cpu", cache=tmp_path)
    assert len(files(tmp_path)) == 3


def test_nothing_is_written_where_there_is_no_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan("off", "50%")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan, and the folder with its file."""
    folder = tmp_path_factory.mktemp("planned")
    return plan(folder, "50%"), folder


@pytest.mark.parametrize("content", ["", "[1]", "cut", "stages", "words", "endless"])
def test_a_file_that_does_not_read_is_none(planned, tmp_path, content):
    first, folder = planned
    (made,) = files(folder)
    path, kept = tmp_path / made.relative_to(folder), made.read_text()
    path.parent.mkdir(parents=True, exist_ok=True)
    if content == "cut":
        content = kept[:-9]
    elif content == "stages":
        content = json.dumps([{**json.loads(kept)[0], "solution": [[0, 1, 999, False]]}])
    elif content in ("words", "endless"):
        content = json.dumps([{**json.loads(kept)[0], "compiled": "few" if content == "words" else float("inf")}])
    path.write_text(content)
    assert plan(tmp_path, "50%") == first
    assert json.loads(path.read_text()) == json.loads(kept)


def test_solutions_are_read_as_they_were_written(tmp_path):
    problem = problem_of(make(), WS, X, target="cpu", cache=tmp_path)
    chain = problem.model.chain
    remembered = Remembered(tmp_path / "folder", chain, ["facts"])
    solutions = [solution for solution in problem.by_hand if solution]
    for number, solution in enumerate(solutions):
        remembered.add(Found(number, 10 + number, 0.5, solution, number % 2 == 0))
    assert [each.solution for each in remembered.plans()] == solutions and len(solutions) > 2
    remembered.add(Found(1, 99, 0.25, solutions[0], True))
    assert [each.budget for each in remembered.plans()].count(1) == 1
    assert not Remembered(tmp_path / "folder", chain, ["others"]).plans()
    assert not Remembered(None, chain, ["facts"]).plans()
