"""Slots that the planner offers for scans: what they keep and take, and plans below what nested segments reach."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import InfeasibleBudgetError, Slots
from jaxckpt.core.constants import KEPT_FOR_LESS, SAME_TIME, SHORTEST
from jaxckpt.core.graph import trace
from jaxckpt.core.plan import Loop, Plan
from jaxckpt.memory.targets import target_of
from jaxckpt.models import lstm
from jaxckpt.planner.context import Context
from jaxckpt.planner.inside import whole
from jaxckpt.planner.problems import problem_of
from jaxckpt.planner.scans import loop_candidates_of
from jaxckpt.schedules import checkpointed
from tests.helpers import assert_trees_close, gradient_executions, kept_bytes

WIDTH, ROWS, LENGTH = 16, 512, 300
CARRY = WIDTH * ROWS * 4


def loss(w, c, xs):
    return jnp.sum(jax.lax.scan(lambda c, x: (jnp.tanh(jnp.tanh(c @ w + x) @ w), None), c, xs)[0] ** 2)


def arguments(length=LENGTH):
    return jnp.eye(WIDTH) * 0.9, jnp.ones((ROWS, WIDTH)), jnp.linspace(0.0, 1.0, length * WIDTH).reshape(length, WIDTH)


def candidates(length=LENGTH, once=True, fun=loss):
    graph = trace(fun, *arguments(length))
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    weights = next(value.index for value in graph.values if value.kind == "argument")
    context = Context(target_of("cpu"), once=once)
    return graph, place, loop_candidates_of(graph, graph.ops[place], whole(graph, [weights]).active, context)


def test_slots_are_offered_below_what_nested_segments_reach_and_only_where_they_pay():
    *_, found = candidates()
    slots = [c for c in found.candidates if isinstance(c.schedule, Slots)]
    others = [c for c in found.candidates if not isinstance(c.schedule, Slots)]
    least = lambda some: min(c.bytes + c.work for c in some)
    assert least(slots) < least(others) / 2
    for one in slots:
        rivals = [c for c in others if c.bytes <= one.bytes and c.bytes + c.work <= one.bytes + one.work]
        assert all(c.time.effort > one.time.effort for c in rivals)
    assert not [c for c in candidates(once=False)[2].candidates if isinstance(c.schedule, Slots)]
    assert not [c for c in candidates(SHORTEST - 1)[2].candidates if isinstance(c.schedule, Slots)]


def test_of_ways_that_take_the_same_time_the_one_of_fewer_bytes_is_offered():
    *_, found = candidates(512)
    same = SAME_TIME * (found.forward + found.backward).effort
    assert sum(isinstance(c.schedule, Slots) for c in found.candidates) >= 3
    written = None, checkpointed(512)
    for way, other in itertools.permutations([c for c in found.candidates if c.schedule not in written], 2):
        saved = way.bytes + way.work - other.bytes - other.work
        leaner = saved > 0 and other.bytes <= way.bytes + KEPT_FOR_LESS * saved
        assert not (leaner and other.time.effort <= way.time.effort + same), (way, other)


def test_slots_keep_the_bytes_and_run_as_often_as_their_candidate_says():
    graph, place, found = candidates()
    plain = gradient_executions(loss, *arguments())["dot_general"]
    slots = [c for c in found.candidates if isinstance(c.schedule, Slots)]
    for choice in (slots[0], slots[len(slots) // 2]):
        planned = Plan((), graph.fingerprint, loops=(Loop(place, choice.schedule),)).apply(loss)
        kept = kept_bytes(planned, *arguments())
        assert choice.bytes <= kept <= choice.bytes + 2 * CARRY  # the initial carry, and the result that is squared
        again = (choice.schedule.cost(LENGTH).runs - LENGTH) * found.forward.effort / LENGTH
        more = choice.time.effort - choice.unseen - again  # on a CPU some of it is not in a trace
        assert -1e-9 <= more <= LENGTH * 25e-6 and choice.unseen > 0
    assert plain == LENGTH * 2 + LENGTH * 4


def test_a_plan_below_what_segments_reach_has_slots_and_fits():
    args = arguments()
    nested = problem_of(loss, *args, target="cpu", reverse_only=False)
    with pytest.raises(InfeasibleBudgetError) as caught:
        nested.plan(nested.argument_bytes + 10 * CARRY)
    least = caught.value.least_bytes
    budget = (nested.argument_bytes + least) // 2
    with pytest.raises(InfeasibleBudgetError):
        nested.plan(budget)
    plan = jaxckpt.plan(loss, *args, budget=budget, target="cpu")
    assert isinstance(plan.loops[0].schedule, Slots)
    assert plan.measured_bytes <= budget < least < nested.unplanned.peak_bytes
    step = jax.jit(jax.value_and_grad(plan.apply(loss)))
    assert_trees_close(step(*args), jax.jit(jax.value_and_grad(loss))(*args), rtol=1e-3, atol=1e-3)
    assert jaxckpt.Plan.from_json(plan.to_json()).loops == plan.loops


def test_steps_that_differentiate_a_gradient_get_no_slots():
    def penalised(fun):
        def step(w, c, xs):
            slope = lambda w: jnp.sum(jax.grad(fun)(w, c, xs) ** 2)
            return jax.grad(slope)(w)

        return step

    problem = problem_of(loss, *arguments(40), target="cpu", step=penalised)
    chain = problem.model.chain
    hows = [c.how for s in range(chain.length) for c in chain.segment(s, s + 1).candidates]
    assert hows and not any(isinstance(how, Slots) for how in hows)


def test_on_a_cpu_slots_are_for_what_nothing_else_fits():
    """By the rates they take less time than a checkpoint around each iteration; a CPU takes more."""
    loss, args = lstm.lstm(steps=512, width=64, batch=32)
    hand, _ = lstm.lstm(steps=512, width=64, batch=32, checkpoint=jax.checkpoint)
    peak = jaxckpt.measure(jax.value_and_grad(hand), *args, target="cpu", generate_code=False).peak_bytes
    problem = problem_of(loss, *args, target="cpu")
    (loop,) = problem.plan(peak).loops
    assert not isinstance(loop.schedule, Slots)
    (loop,) = problem.plan(peak // 6).loops
    assert isinstance(loop.schedule, Slots)
