"""The work of planning grows with the program, not with its square."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from benchmarks.planning_scale import exponent, leaves
from jaxckpt.core.graph import trace
from jaxckpt.core.liveness import graph_peak
from jaxckpt.planner import model, predictions, stages
from jaxckpt.planner.chain import Keep
from jaxckpt.planner.problems import problem_of


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Counts calls of Python functions in jaxckpt: time that does not depend on the machine."""
    count = [0]

    def note(frame, event, argument):
        if event == "call" and "/jaxckpt/" in frame.f_code.co_filename:
            count[0] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(before)


def test_the_estimate_of_a_peak_takes_calls_in_proportion_to_the_leaves():
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    rows = []
    for size in (200, 800):
        # activations are no larger than gradients, and live in them
        args = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * size, jax.ShapeDtypeStruct((2, 8), jnp.float32)
        graph = trace(jax.grad(loss), *args)
        with counted_calls() as count:
            graph_peak(graph, "cuda")
        rows.append({"size": size, "calls": count[0]})
    assert exponent(rows, lambda row: row["calls"]) < 1.2, rows


def needing_a_plan(fun, args):
    """Returns a budget for which something must be computed again."""
    return graph_peak(trace(jax.value_and_grad(fun), *args), "cpu") - 1


def test_planning_takes_calls_in_proportion_to_the_leaves(monkeypatch):
    monkeypatch.setattr(model, "OPERATIONS", 0)  # what is spent on wider stretches is bounded, and no small part here
    rows = []
    for size in (100, 300):
        fun, args = leaves(size)
        with counted_calls() as count:
            jaxckpt.plan(fun, *args, budget=needing_a_plan(fun, args), target="cpu", verify=False)
        rows.append({"size": size, "calls": count[0]})
    assert exponent(rows, lambda row: row["calls"]) < 1.1, rows


@pytest.mark.parametrize(("nested", "flat"), [(0, True), (10**6, False)])
def test_of_a_large_program_no_regions_in_regions_are_traced_for_an_estimate(nested, flat, monkeypatch):
    monkeypatch.setattr(predictions, "NESTED", nested)
    fun, args = leaves(40)
    problem = problem_of(fun, *args, target="cpu")
    assert not all(isinstance(item, Keep) for item in problem.table.solution(problem.table.least))
    seen = []
    standing = predictions.standing_bytes
    monkeypatch.setattr(predictions, "standing_bytes", lambda of, each: seen.append(each) or standing(of, each))
    problem.plan(needing_a_plan(fun, args), verify=False)
    assert [all(isinstance(item, Keep) for item in solution) for solution in seen] == [flat]


def test_a_long_stretch_without_matmuls_is_cut_into_equal_stages_of_few_operations():
    def loss(x):
        for _ in range(600):
            x = jnp.tanh(x) * 1.01
        return jnp.sum(x)

    graph = trace(loss, jax.ShapeDtypeStruct((256,), jnp.float32))
    places = stages.cuts(graph)
    sizes = [b - a for a, b in itertools.pairwise(places)]
    assert max(sizes) <= stages.LONG and len(set(sizes[:-1])) == 1
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    plan = jaxckpt.plan(loss, x, budget="40%", target="cpu", verify=False)
    assert len(plan.regions) > 1


@pytest.mark.parametrize("scans", [stages.LOOPS, 3 * stages.LOOPS])
def test_of_many_scans_those_that_hold_most_are_planned_as_loops(scans):
    def loss(w, x):
        for number in range(scans):
            x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=2 + (number == 1))
        return jnp.sum(x)

    w, x = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    graph = trace(loss, w, x)
    loops = stages.loops(graph)
    longest = max(range(len(graph.ops)), key=lambda place: graph.ops[place].params.get("length", 0))
    assert len(loops) == stages.LOOPS and longest in loops
    texts = {place: str(place) for place in range(len(graph.ops))}
    assert len(stages.join(graph, stages.cuts(graph), lambda a, b: texts[a])) - 1 <= stages.MOST_STAGES
