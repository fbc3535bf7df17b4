from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt._errors import ArgumentError
from jaxckpt.schedules import (
    Binomial,
    Nested,
    Places,
    Slots,
    TurnCosts,
    binomial,
    describe,
    extra_iterations,
    nested,
    places,
    places_bytes,
    plain,
    repetitions,
    revolve,
    schedule_of,
    segmented,
    split,
)

KNOWN = [(10, 3, 15), (56, 3, 210), (100, 5, 316), (100, 10, 222), (1000, 10, 3636), (1000, 50, 1948)]


@functools.cache
def optimum(length: int, slots: int) -> int:
    """t by its recursion, every split tried."""
    if length <= 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(j + optimum(length - j, slots - 1) + optimum(j, slots) for j in range(1, length))


def run_moves(length: int, slots: int) -> int:
    """Runs revolve's moves as a machine would, checking each; returns the iterations advanced."""
    stored: dict[int, int] = {}
    at, waiting, advanced = 0, length, 0
    for move in revolve(length, slots):
        if move.kind == "store":
            assert at == move.iteration and 0 <= move.slot < slots
            stored[move.slot] = at
        elif move.kind == "restore":
            assert stored[move.slot] == move.iteration
            at = move.iteration
        elif move.kind == "advance":
            assert at == move.iteration < move.stop < waiting
            advanced += move.stop - move.iteration
            at = move.stop
        else:
            assert move.kind == "adjoint" and at == move.iteration == waiting - 1
            at, waiting = -1, move.iteration
    assert waiting == 0
    return advanced


def run_places(where: Places) -> list[int]:
    """Does what a compiled loop does, checking that each adjoint has its carry; returns the iterations advanced for
    each adjoint.
    """
    starts, left, top = where.whole
    advances = []
    for unit in range(where.length - 1, -1, -1):
        at, advanced = int(starts[top]), 0
        while at < unit:
            taken = int(where.cut(where.reach, unit + 1 - at, where.slots - top, int(left[top])))
            assert 1 <= taken <= unit - at
            repetitions_left, left[top] = left[top], left[top] - 1
            at, advanced = at + taken, advanced + taken
            if at < unit:
                top += 1
                assert top < where.slots
                starts[top], left[top] = at, repetitions_left
        if unit == where.length - 1:
            assert top == where.top and list(starts) == list(where.starts) and list(left) == list(where.left)
        if starts[top] == unit:
            top -= 1
        advances.append(advanced)
    assert top == -1
    return advances


@pytest.mark.parametrize(("length", "slots", "iterations"), KNOWN)
def test_extra_iterations_are_the_published_ones(length: int, slots: int, iterations: int) -> None:
    assert extra_iterations(length, slots) == iterations


def test_extra_iterations_are_the_optimum_of_every_split() -> None:
    for length in range(45):
        for slots in range(1, 12):
            assert extra_iterations(length, slots) == optimum(length, slots), (length, slots)


def test_the_split_attains_the_optimum() -> None:
    for length in range(2, 45):
        for slots in range(2, 12):
            j = split(length, slots)
            assert optimum(length, slots) == j + optimum(length - j, slots - 1) + optimum(j, slots), (length, slots)


def test_no_step_is_run_more_often_than_repetitions_say() -> None:
    for length, slots in [(10, 3), (56, 3), (57, 3), (100, 5), (7, 1)]:
        runs = np.zeros(length, int)
        for move in revolve(length, slots):
            if move.kind == "advance":
                runs[move.iteration : move.stop] += 1
        assert runs.max() == repetitions(length, slots)


@given(length=st.integers(0, 150), slots=st.integers(1, 160))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_moves_reverse_every_step_with_the_slots_there_are_in_the_fewest_advances(length: int, slots: int) -> None:
    assert run_moves(length, slots) == extra_iterations(length, slots)


@given(length=st.integers(1, 200), slots=st.integers(1, 210))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_places_take_the_fewest_advances(length: int, slots: int) -> None:
    where = places(length, slots)
    assert sum(run_places(where)) == extra_iterations(length, slots)
    assert {table.dtype for table in (where.reach, where.starts, where.left)} == {np.dtype(np.int32)}


@pytest.mark.parametrize(("length", "slots"), [(20_000, 64), (5_000, 2), (3_000, 1), (5_000, 4_000)])
def test_places_of_long_scans_take_the_fewest_advances(length: int, slots: int) -> None:
    assert sum(run_places(places(length, slots))) == extra_iterations(length, slots)


@pytest.mark.parametrize("slots", [1, 2, 12, 64, 2000])
def test_places_take_few_bytes_whatever_the_length(slots: int) -> None:
    where = places(1_000_000, slots)
    tables = where.reach.nbytes + where.starts.nbytes + where.left.nbytes
    assert tables <= places_bytes(1_000_000, slots) <= max(20_000, 64 * slots)


# ------------------------------------------------------------------------------------------------------ nested segments


def leaves(nest: Nested) -> Iterator[tuple[int, int]]:
    """For each iteration, in order: how often it runs in a forward and backward pass, and how many segment starts are
    kept around it.
    """
    if nest.inner is None:
        yield from [(2 if nest.remat else 1, 0)] * nest.length
        return
    for _ in range(nest.count):
        yield from ((runs + 1, around + nest.count) for runs, around in leaves(nest.inner))
    yield from [(1, nest.count)] * nest.rest


@given(length=st.integers(0, 300), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_nested_lengths_cover_every_step_once_and_say_how_often_it_runs(length: int, lengths: list[int]) -> None:
    if np.prod(lengths) < length:
        with pytest.raises(ArgumentError, match=f"product is at least the length, {length}"):
            schedule_of(length, tuple(lengths))
        return
    nest = schedule_of(length, tuple(lengths))
    assert isinstance(nest, Nested)
    iterations = list(leaves(nest))
    assert len(iterations) == nest.length == length
    assert sum(runs for runs, _ in iterations) == nest.body_runs
    assert max((around for _, around in iterations), default=0) <= nest.carries


@given(length=st.integers(0, 3000), size=st.integers(1, 60))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_an_int_is_the_steps_in_a_segment_and_the_rest_is_shorter(length: int, size: int) -> None:
    nest = segmented(length, size)
    if size >= length:
        assert nest == plain(length)
    else:
        assert nest.inner is not None and nest.inner.length == size and nest.rest < size
        assert nest.count * size + nest.rest == length


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 97, 1000, 1024, 10007])
def test_sqrt_keeps_few_carries_and_runs_each_step_at_most_twice(length: int) -> None:
    nest = schedule_of(length, "sqrt")
    assert isinstance(nest, Nested)
    assert nest.body_runs <= 2 * length
    assert nest.carries + nest.residuals <= 2.2 * max(length, 1) ** 0.5 + 1


@pytest.mark.parametrize("length", [100, 1000, 1009, 10007, 100_000])
def test_log_keeps_fewer_carries_than_sqrt_and_no_more_than_five_a_level(length: int) -> None:
    log, sqrt = schedule_of(length, "log"), schedule_of(length, "sqrt")
    assert isinstance(log, Nested) and isinstance(sqrt, Nested)
    assert log.carries + log.residuals < sqrt.carries + sqrt.residuals
    assert log.carries <= 5 * np.log(length) / np.log(4)
    assert log.body_runs <= length * (np.log(length) / np.log(4) + 1.5)


# --------------------------------------------------------------------------------------------------- runs of iterations


@given(
    length=st.integers(1, 3000),
    slots=st.integers(1, 200),
    row=st.floats(0.2, 12.0),
    again=st.booleans(),
    costs=st.builds(TurnCosts, st.floats(0.0, 30.0), st.floats(0.0, 3.0), st.floats(0.0, 3.0)),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_runs_never_take_more_steps_than_revolve_nor_more_bytes_than_the_slots(
    length: int, slots: int, row: float, again: bool, costs: TurnCosts
) -> None:
    plan = binomial(length, slots, row=row, again=again, costs=costs)
    assert plan.body_runs <= length + 1 + extra_iterations(length, slots)
    assert plan.slots >= 1 and plan.carries(row) <= slots


def count_runs(plan: Binomial) -> int:
    """Runs of the body when the plan is executed: forward pass, carries obtained from the slots, every run gone
    through.
    """
    total = plan.length
    for unit in range(plan.units):
        size = min(plan.run, plan.length - unit * plan.run)
        total += 2 * size - 1 if plan.again else size
    return total + plan.run * sum(run_places(places(plan.units, plan.slots))[1:])


@given(length=st.integers(1, 400), run=st.integers(1, 30), slots=st.integers(1, 40), again=st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_steps_of_a_plan_are_those_that_its_tables_make(length: int, run: int, slots: int, again: bool) -> None:
    run = min(run, length)
    plan = Binomial(length, run, min(slots, -(-length // run)), again)
    assert plan.body_runs == count_runs(plan)


def test_a_slot_holds_residuals_where_that_saves_steps() -> None:
    with_runs, alone = binomial(1024, 64, row=3.0), binomial(1024, 64)
    assert with_runs.run > 1 and with_runs.carries(3.0) <= 64
    assert with_runs.body_runs < 0.93 * alone.body_runs


def test_runs_are_as_long_as_what_they_save_is_dear() -> None:
    def run(turn: float, kept: float) -> int:
        return binomial(1024, 96, row=1.0, costs=TurnCosts(turn, kept)).run

    assert run(0.1, 2.0) == 1  # keeping takes longer than the iterations that are saved
    assert 1 < run(0.0, 0.0) < run(8.0, 0.0)  # a dear turn is worth a few iterations more
    assert run(8.0, 2.0) > 1


def test_slots_beyond_the_length_run_no_step_to_come_by_a_carry() -> None:
    for length in (1, 2, 13):
        plan = binomial(length, length + 5)
        assert plan.body_runs == 2 * length and plan.slots == length


# ---------------------------------------------------------------------------------------------- descriptions, bad input


def test_describe_counts_what_each_schedule_does() -> None:
    assert describe(100, "none").runs == 100 and describe(100, "none").residual_iterations == 100
    every = describe(100, "every")
    assert (every.runs, every.kept_carries, every.residual_iterations) == (200, 100, 1)
    assert (describe(100, 10).runs, describe(100, 10).kept_carries) == (200, 10)
    assert describe(103, 10).runs == 203  # the last three are not run again
    three = describe(1000, (10, 10, 10))
    assert (three.runs, three.kept_carries, three.peak_carries, three.residual_iterations) == (3000, 10, 20, 10)
    for length, slots, iterations in KNOWN:
        slotted = describe(length, Slots(slots))
        assert slotted.runs == length + 1 + iterations and slotted.peak_carries == slots
    assert (three.forward_steps, three.residual_steps) == (three.runs, three.residual_iterations), "the older names"
    assert "runs 200 iterations" in str(describe(100, "sqrt"))
    assert "over 1 iteration: keeps 1 carry, at most 1 at once and the residuals of 1 iteration; runs" in str(
        describe(1, Slots(3))
    )
    assert "runs 1 iteration, 0.00 again" in str(describe(1, "none"))


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("schedule", ["none", "every", "sqrt", "log", 3, (2, 2), Slots(3)])
def test_describe_of_nothing_and_of_one_step(length: int, schedule: object) -> None:
    described = describe(length, schedule)  # type: ignore[arg-type]
    assert length <= described.runs <= 2 * length and described.peak_carries <= length


@pytest.mark.parametrize("row", [0, -1.0, float("nan"), "3", True, None, [3]])
def test_row_of_describe_must_be_a_number_above_zero(row: object) -> None:
    with pytest.raises(ArgumentError, match=r"row must be a number above 0: bytes of an iteration, in carries; got"):
        describe(100, Slots(3), row=row)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, -1, 2.5, "3", True, None])
def test_slots_must_be_an_int_of_at_least_one(count: object) -> None:
    with pytest.raises(ArgumentError, match=r"count must be an int of at least 1, the number of carries to keep; got"):
        Slots(count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("sqr", "Did you mean 'sqrt'"),
        (0, "at least 1 where it is an int"),
        (-3, "at least 1 where it is an int"),
        (2.5, "one of 'none', 'every', 'sqrt', 'log', an int, a tuple of ints, Slots(n) or another LoopSchedule"),
        (True, "one of 'none'"),
        ((), "one of 'none'"),
        ((4, 0), "of ints of at least 1"),
        ((4, "4"), "one of 'none'"),
        ((3, 3), "whose product is at least the length, 10; got (3, 3). Their product is 9."),
        (None, "one of 'none'"),
    ],
)
def test_bad_schedules_say_the_rule_and_what_came(schedule: object, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        describe(10, schedule)  # type: ignore[arg-type]
    assert message in str(caught.value) and str(caught.value).startswith("schedule must be")


@pytest.mark.parametrize("length", [-1, 2.0, "10", True])
def test_bad_lengths(length: object) -> None:
    with pytest.raises(ArgumentError, match="length must be an int of at least 0"):
        describe(length, "sqrt")  # type: ignore[arg-type]


def test_nested_without_levels_is_plain() -> None:
    assert nested(7, (7,)) == plain(7) and nested(0, (3, 3)) == plain(0)


@pytest.mark.parametrize("length", [2**70, 2**70 + 1, 10**30])
@pytest.mark.parametrize(
    "schedule",
    ["none", "every", "sqrt", "log", 7, (2**40, 2**60), (2,) * 100, Slots(1), Slots(64), Slots(2**80)],
    ids=str,
)
def test_describe_ends_at_once_for_lengths_that_no_machine_runs(length: int, schedule: object) -> None:
    start = time.process_time()
    described = describe(length, schedule)  # type: ignore[arg-type]
    assert described.runs >= length
    assert time.process_time() - start < 1


def test_ints_of_numpy_are_ints():
    assert schedule_of(10, np.int32(3)) == schedule_of(10, 3)
    assert schedule_of(10, [np.int64(2), 5]) == schedule_of(10, (2, 5))
    made = Slots(np.int64(3), host=np.int32(2), run_length=np.uint8(4))
    assert made == Slots(3, host=2, run_length=4) and repr(made) == repr(Slots(3, host=2, run_length=4))
    assert str(describe(np.int64(100), made)) == str(describe(100, Slots(3, host=2, run_length=4)))
    assert Slots(4, host=2, transfer=np.float32(0.5)) == Slots(4, host=2, transfer=0.5)
    assert Slots(4).cost(np.int64(100)) == Slots(4).cost(100)
    for wrong in (np.True_, np.float64(3), np.array([3])):
        with pytest.raises(ArgumentError, match="schedule must be"):
            schedule_of(10, wrong)
        with pytest.raises(ArgumentError, match="count must be"):
            Slots(wrong)
