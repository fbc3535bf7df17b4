"""Slots in plans: values and gradients, carries kept in the compiled program, runs of the body, what is refused; a
schedule of one's own.
"""

from __future__ import annotations

import functools
import json
import pickle
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt import OFFLOAD, SAVE, ArgumentError, ForwardModeError, Plan, PlanMismatchError, Region, Slots, scan
from jaxckpt.core.graph import trace
from jaxckpt.core.plan import Loop
from jaxckpt.core.schedule import LoopCost
from jaxckpt.memory.report import measure
from jaxckpt.schedules import LoopSchedule, Mixed, checkpointed, describe, schedule_from
from jaxckpt.show.tree import plan_lines
from tests.helpers import assert_trees_close, gradient_executions, kept_bytes

LENGTH, ROWS, WIDTH = 48, 64, 16


def body(w, c, x):
    return jnp.tanh(c @ w + x), jnp.sum(c)


def loss(w, c, xs, reverse=False):
    last, ys = jax.lax.scan(functools.partial(body, w), c, xs, reverse=reverse)
    return jnp.sum(last**2) + jnp.sum(ys * jnp.arange(len(xs)))


def arguments(length=LENGTH):
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (WIDTH, WIDTH)) / 4,
        jax.random.normal(keys[1], (ROWS, WIDTH)),
        jax.random.normal(keys[2], (length, ROWS, WIDTH)),
    )


def planned(schedule, fun=loss, args=None, regions=()):
    """The function under a plan whose scan runs by a schedule; the plan has been through JSON."""
    graph = trace(fun, *(args or arguments()))
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    plan = Plan(tuple(regions), graph.fingerprint, loops=(Loop(place, schedule),))
    again = Plan.from_json(plan.to_json())
    assert again == plan and hash(again.loops[0]) == hash(plan.loops[0])
    return again.apply(fun)


def dot_of_the_body():
    graph = trace(loss, *arguments())
    loop = next(op for op in graph.ops if op.primitive == "scan")
    return next(op.outputs[0] for op in loop.bodies[0].ops if op.primitive == "dot_general")


DOT = dot_of_the_body()
CARRY = ROWS * WIDTH * 4
SCHEDULES = [
    Slots(1),
    Slots(4),
    Slots(100),
    Slots(3, run_length=1),
    Slots(3, run_length=5),
    Slots(3, run_length=4, actions={DOT: SAVE}),
    Slots(3, run_length=4, actions={}),
    Mixed(((20, Slots(2)), (12, checkpointed(12, (5,))), (16, Slots(3, run_length=4)))),
]


def test_all_values_of_a_body_that_computes_with_numbers_are_kept():
    """JAX computes some of them, the bounds of `jnp.clip`, when it traces the body again: they are no variables."""

    def loss(c, xs):
        last, ys = jax.lax.scan(lambda c, x: (c + jnp.sin(jnp.clip(x * c, -0.5, 0.5)), jnp.sum(c)), c, xs)
        return jnp.sum(last) + jnp.sum(ys)

    args = jnp.linspace(-1, 1, 8), jnp.linspace(-2, 2, 12 * 8).reshape(12, 8)
    loop = next(op for op in trace(loss, *args).ops if op.primitive == "scan")
    every = {index: SAVE for op in loop.bodies[0].ops for index in op.outputs}
    kept = planned(Slots(3, run_length=4, actions=every), loss, args)
    assert_trees_close(jax.grad(kept, (0, 1))(*args), jax.grad(loss, (0, 1))(*args))


@pytest.mark.parametrize(
    ("schedule", "reverse"),
    [*((schedule, False) for schedule in SCHEDULES), (SCHEDULES[5], True), (SCHEDULES[7], True)],
)
def test_a_planned_loop_with_slots_has_the_scans_value_and_gradients(schedule, reverse):
    fun = functools.partial(loss, reverse=reverse)
    args = arguments()
    actual = jax.jit(jax.value_and_grad(planned(schedule, fun), argnums=(0, 1, 2)))(*args)
    expected = jax.jit(jax.value_and_grad(fun, argnums=(0, 1, 2)))(*args)
    assert_trees_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [2, 5, 12])
def test_a_planned_loop_keeps_as_many_carries_as_it_has_slots(count):
    kept = kept_bytes(planned(Slots(count, run_length=1)), *arguments())
    assert (count + 1) * CARRY <= kept < (count + 2) * CARRY, "one more is the result, which the loss squares"
    assert kept_bytes(planned(checkpointed(LENGTH)), *arguments()) >= LENGTH * CARRY


def test_the_compiled_step_of_a_longer_loop_with_slots_takes_no_more_memory():
    def temporaries(length, schedule):
        args = arguments(length)
        step = jax.value_and_grad(planned(schedule, args=args))
        return measure(step, *args, target="cpu").temp_bytes

    few, many = (temporaries(length, Slots(4, run_length=1)) for length in (48, 4 * 48))
    segments = temporaries(4 * 48, checkpointed(4 * 48, (14,)))
    assert many <= few + 2**10 < segments - 6 * CARRY
    assert few >= 4 * CARRY, "slots are kept"


def counted_runs(schedule, length):
    """How often the body runs in a value and gradient of a planned scan."""
    ran = []

    @jax.custom_jvp
    def square(c):
        def host(c):
            ran.append(1)
            return np.asarray(c) ** 2

        return jax.pure_callback(host, jax.ShapeDtypeStruct(c.shape, c.dtype), c)

    square.defjvp(lambda primals, tangents: (square(*primals), 2 * primals[0] * tangents[0]))

    def fun(c):
        return jnp.sum(jax.lax.scan(lambda c, _: (jnp.sin(square(c)), None), c, length=length)[0])

    c = jnp.ones(3)
    jax.block_until_ready(jax.jit(jax.grad(planned(schedule, fun, (c,))))(c))
    return len(ran)


@pytest.mark.parametrize(("count", "run"), [(3, 1), (6, 1), (3, 4)])
def test_iterations_of_a_planned_loop_run_as_often_as_its_schedule_says(count, run):
    schedule = Slots(count, run_length=run)
    runs = counted_runs(schedule, 40)
    assert runs <= schedule.cost(40).runs <= describe(40, Slots(count)).runs + 40
    assert runs > counted_runs(Slots(40), 40) >= 40


def test_a_planned_loop_with_slots_within_regions_and_loops():
    w, c, xs = arguments(12)

    def outer(w, c, xs):
        out, _ = jax.lax.scan(lambda c, _: (jax.lax.scan(functools.partial(body, w), c, xs)[0], None), c, length=3)
        return jnp.sum(out**2)

    graph = trace(outer, w, c, xs)
    around = next(op for op in graph.ops if op.primitive == "scan")
    inside = next(i for i, op in enumerate(around.bodies[0].ops) if op.primitive == "scan")
    inner = Loop(inside, Slots(3, run_length=2), ((around.index, 0),))
    region = Region(0, len(graph.ops), {})
    expected = jax.grad(outer)(w, c, xs)
    for regions, loops in (
        ((), (inner,)),
        ((region,), (inner,)),
        ((), (inner, Loop(graph.ops.index(around), Slots(2)))),
    ):
        plan = Plan(regions, graph.fingerprint, loops=loops)
        assert_trees_close(jax.jit(jax.grad(plan.apply(outer)))(w, c, xs), expected, rtol=1e-4, atol=1e-4)
    batched = jax.vmap(jax.grad(Plan((), graph.fingerprint, loops=(inner,)).apply(outer)), (None, 0, None))
    assert_trees_close(batched(w, jnp.stack([c, c]), xs)[1], expected, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_what_slots_cannot_do_is_refused_in_plans_too():
    with pytest.raises(PlanMismatchError, match="can only SAVE values.*OFFLOAD"):
        Slots(3, actions={DOT: OFFLOAD})
    fun, args = planned(Slots(3)), arguments()
    with pytest.raises(ForwardModeError, match="forward mode.*nor can a plan that has it"):
        jax.jvp(fun, args, args)
    with pytest.raises(ForwardModeError, match="more than once, nor can a plan"):
        jax.grad(lambda w: jnp.sum(jax.grad(fun)(w, *args[1:]) ** 2))(args[0])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"count": 0}, "count must be an int of at least 1"),
        ({"kind": "spots"}, "of a kind that is defined.*'spots'"),
        ({"size": 3}, "size"),
    ],
)
def test_a_schedule_of_a_plan_file_that_is_none_is_refused(change, match):
    raw = {**Slots(3).to_json(), **change}
    with pytest.raises(PlanMismatchError, match=match):
        schedule_from(raw)


def test_values_that_are_no_part_of_the_body_are_refused():
    with pytest.raises(PlanMismatchError, match="made elsewhere|there is none"):
        planned(Slots(3, actions={10**6: SAVE}))(*arguments())


# ---------------------------------------------------------------------------------------------- a schedule of one's own


@dataclass(frozen=True)
class Late(LoopSchedule):
    """Keeps the carry of each iteration but the last ones, which keep all that they compute."""

    kind: ClassVar[str] = "late"

    last: int

    def resolved(self, length: int) -> LoopSchedule:
        first = length - min(self.last, length)
        return Mixed(((first, checkpointed(first)), (length - first, checkpointed(length - first, remat=False))))


def test_a_schedule_of_ones_own_runs_in_a_scan_and_in_a_plan():
    args, schedule = arguments(), Late(8)

    def scanned(w, c, xs, schedule):
        last, ys = scan(functools.partial(body, w), c, xs, schedule=schedule)
        return jnp.sum(last**2) + jnp.sum(ys * jnp.arange(len(xs)))

    expected = jax.value_and_grad(loss)(*args)
    assert_trees_close(jax.value_and_grad(scanned)(*args, schedule), expected, rtol=1e-4, atol=1e-4)
    assert_trees_close(jax.value_and_grad(planned(schedule))(*args), expected, rtol=1e-4, atol=1e-4)
    matmuls = lambda fun, *args: gradient_executions(fun, *args)["dot_general"]
    plain = matmuls(loss, *args)
    assert matmuls(planned(schedule), *args) == matmuls(lambda *a: scanned(*a, schedule), *args) == plain + LENGTH - 8


@dataclass(frozen=True)
class Each(LoopSchedule):
    """Runs each iteration under a checkpoint; nothing but what it must define."""

    kind: ClassVar[str] = "each"

    def run(self, scan):
        return scan.loop(scan.iteration({}))

    def cost(self, length):
        return LoopCost(length, length, 1, 2 * length)


def test_a_schedule_of_ones_own_needs_run_and_cost_alone():
    args = arguments()
    expected = jax.value_and_grad(loss)(*args)
    assert_trees_close(jax.value_and_grad(planned(Each()))(*args), expected, rtol=1e-4, atol=1e-4)
    graph = trace(loss, *args)
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    plan = Plan((), graph.fingerprint, loops=(Loop(place, Each()),))
    assert "48 iterations, Each()" in plan.describe(graph) and Plan.from_json(plan.to_json()) == plan


@dataclass(frozen=True)
class Itself(LoopSchedule):
    kind: ClassVar[str] = "itself"

    def resolved(self, length):
        return Itself()


@dataclass(frozen=True)
class Named(LoopSchedule):
    kind: ClassVar[str] = "named"

    def resolved(self, length):
        return "sqrt"


@dataclass(frozen=True)
class Forgets(LoopSchedule):
    kind: ClassVar[str] = "forgets"

    def run(self, scan):
        scan.loop(scan.iteration({}))

    def cost(self, length):
        return LoopCost(length, length, 1, 2 * length)


@dataclass(frozen=True)
class Other(LoopSchedule):
    """Returns a carry of another shape, and says no cost."""

    kind: ClassVar[str] = "other carry"

    def run(self, scan):
        _, ys = scan.loop(scan.iteration({}))
        return [x[..., None] for x in scan.init], ys

    def cost(self, length):
        return None


def test_a_schedule_of_ones_own_that_says_no_cost_is_told_so():
    with pytest.raises(ArgumentError, match="one whose `cost` returns a LoopCost; Other's did not; got None"):
        describe(12, Other())


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (Other(), r"`run` returns float.* as carry; Other's did not; got 'float.*, 1\]'"),
        (Itself(), r"`resolved` returns another schedule, an instance; Itself's did not; got Itself\(\)"),
        (Named(), "`resolved` returns another schedule, an instance; Named's did not; got 'sqrt'"),
        (Forgets(), r"`run` returns \(carry, ys\); Forgets's did not; got None"),
    ],
)
def test_a_schedule_of_ones_own_that_forgets_something_is_told_what(schedule, said):
    w, c, xs = arguments()
    with pytest.raises(ArgumentError, match=f"schedule must be one whose {said}"):
        scan(functools.partial(body, w), c, xs, schedule=schedule)
    with pytest.raises(ArgumentError, match=f"schedule must be one whose {said}"):
        jax.value_and_grad(planned(schedule))(w, c, xs)


def test_two_schedules_cannot_have_one_kind():
    with pytest.raises(ArgumentError, match=r"kind must be a name of its own.*got 'each'\. It is that of .*Each"):

        class Other(LoopSchedule):
            kind = "each"


def test_a_schedule_of_ones_own_is_written_read_printed_and_described():
    schedule = Late(8)
    assert schedule_from(schedule.to_json()) == schedule == pickle.loads(pickle.dumps(schedule))
    counted = Late(np.int64(8))
    assert schedule_from(json.loads(json.dumps(counted.to_json()))) == counted == schedule
    assert describe(LENGTH, schedule).runs == 2 * LENGTH - 8
    graph = trace(loss, *arguments())
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    plan = Plan((), graph.fingerprint, loops=(Loop(place, schedule),))
    for text in (plan.describe(graph), "\n".join(plan_lines(plan, graph))):
        assert "40 iterations, Late(last=8)" in text and "8 iterations, Late(last=8)" in text
    assert "Late(last=8)" in str(plan)
    slots = Plan((), graph.fingerprint, loops=(Loop(place, Slots(5)),))
    for text in (slots.describe(graph), "\n".join(plan_lines(slots, graph))):
        assert "48 iterations, at most 5 of their carries kept at once: what is needed of them runs again" in text
    with pytest.raises(ArgumentError, match="schedule must be one that can run the scan's 48 iterations.*It is of 9"):
        scan(functools.partial(body, arguments()[0]), *arguments()[1:], schedule=checkpointed(9))
