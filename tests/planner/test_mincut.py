"""The minimum cut against every choice there is."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt.actions import OFFLOAD, SAVE
from jaxckpt.planner.mincut import Node, Storage, cheapest_first, hull


@st.composite
def programs(draw):
    """Random programs: operations in order, each reading some earlier values; value 0 is an input."""
    count = draw(st.integers(1, 6))
    operations = []
    for place in range(count):
        inputs = draw(st.sets(st.integers(0, place), min_size=1, max_size=3))
        operations.append(Node(tuple(inputs), (place + 1,), draw(st.integers(0, 50)) / 10))
    size = {place + 1: draw(st.integers(0, 40)) for place in range(count) if draw(st.booleans())}
    needed = draw(st.sets(st.integers(0, count), min_size=1))
    free = draw(st.sets(st.sampled_from(sorted(size)))) if size else set()
    return operations, needed, size, free


def saved(size):
    """Returns the one way to keep each value: as it is."""
    return {key: [Storage(SAVE, bytes_)] for key, bytes_ in size.items()}


def every_choice(operations, needed, size, free):
    """Yields (bytes, seconds) of every set of kept values from which the rest can be computed."""
    maker = {op.outputs[0]: op for op in operations}
    for count in range(len(size) + 1):
        for kept in itertools.combinations(size, count):
            seconds, waiting, seen = 0.0, [v for v in needed if v not in kept], set()
            while waiting:
                value = waiting.pop()
                if value in seen or value not in maker:
                    continue
                seen.add(value)
                seconds += maker[value].seconds
                waiting += [v for v in maker[value].inputs if v not in kept]
            yield sum(size[v] for v in kept if v not in free), seconds


@settings(max_examples=150, deadline=None, derandomize=True)
@given(programs())
def test_no_choice_is_cheaper_at_any_price(program):
    operations, needed, size, free = program
    found = hull(operations, needed, saved(size), free)
    choices = list(every_choice(*program))
    for price in (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0):
        best = min(seconds + price * bytes_ for bytes_, seconds in choices)
        ours = min(choice.seconds + price * choice.bytes for choice in found)
        assert ours == pytest.approx(best, rel=1e-4, abs=1e-4)
    assert all((choice.bytes, pytest.approx(choice.seconds)) in choices for choice in found)
    assert min(choice.bytes for choice in found) == min(bytes_ for bytes_, _ in choices)


def test_what_is_kept_anyway_costs_nothing():
    operations = [Node((0,), (1,), 5.0), Node((1,), (2,), 1.0)]
    (choice,) = cheapest_first(hull(operations, [2], saved({1: 100, 2: 10}), free=[1, 2]))
    assert choice.kept == {2: SAVE} and choice.bytes == 0 and choice.seconds == 0.0


def test_an_operation_with_two_results_runs_once():
    operations = [Node((0,), (1, 2), 5.0)]
    assert hull(operations, [1, 2], {})[0].seconds == 5.0


def test_large_sizes_and_small_times_do_not_overflow():
    operations = [Node((i,), (i + 1,), 1e-9) for i in range(200)]
    size = {i + 1: 2**50 for i in range(200)}
    found = hull(operations, list(size), saved(size))
    assert found[0].bytes == 0 and found[-1].seconds == 0.0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(programs(), st.integers(1, 20))
def test_at_each_price_a_value_is_kept_in_the_way_that_costs_least(program, seconds):
    """Two ways for each value, whole or half of its bytes for some seconds: no choice of sets and ways is cheaper."""
    operations, needed, size, free = program
    extra = seconds / 10
    ways = {key: [Storage(SAVE, bytes_), Storage(OFFLOAD, bytes_ // 2, extra)] for key, bytes_ in size.items()}
    found = hull(operations, needed, ways, free)
    for price in (0.01, 0.1, 1.0):
        weights = {
            key: 0.0 if key in free else min(price * bytes_, price * (bytes_ // 2) + extra)
            for key, bytes_ in size.items()
        }
        totals = [kept + again for kept, again in every_choice(operations, needed, weights, set())]
        ours = min(choice.seconds + price * choice.bytes for choice in found)
        assert ours == pytest.approx(min(totals), rel=1e-4, abs=1e-4)
