"""Slots on two levels: the optimum against its recursion and against another package's figures; the compiled loops run
iterations and move carries as often as it says; gradients are those of lax.scan; bad input.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.slots import ORACLE, compiled, counted
from jaxckpt import OFFLOAD, ArgumentError, Slots, residuals, scan
from jaxckpt.schedules import Transfer, describe, extra_iterations, optimal_levels, schedule_from
from tests.helpers import assert_trees_close

FAST = {"xla_backend_optimization_level": "0"}


def by_recursion(length: int, slots: int, host: int, write: float, read: float) -> list[list[float]]:
    """The recursion as it stands: costs by host slots and iterations."""
    alone = [float(extra_iterations(iterations, slots)) for iterations in range(length + 1)]
    table = [alone]
    for m in range(1, host + 1):
        stored, fresh = [0.0] * (length + 1), [0.0] * (length + 1)
        for l in range(1, length + 1):  # noqa: E741
            ways = (j + table[m - 1][l - j] + read + stored[j] for j in range(1, l))
            stored[l] = min(alone[l], *ways) if l > 1 else 0.0
            fresh[l] = min(alone[l], write + stored[l])
        table.append(fresh)
    return table


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("costs", [(0, 0), (0.25, 0.25), (2, 2), (0.5, 3), (3, 0.5), (7, 5), (0, 1), (1, 0)])
def test_the_optimum_is_the_recursions(slots: int, costs: tuple[float, float]) -> None:
    length, host = 26, 4
    table = by_recursion(length, slots, host, *costs)
    for m in range(host + 1):
        for iterations in range(1, length + 1):
            best = optimal_levels(iterations, slots, m, Transfer(*costs))
            assert best.cost(Transfer(*costs)) == pytest.approx(table[m][iterations]), (iterations, m, best)


def followed(moves: Any, length: int, slots: int, host: int) -> tuple[int, int, int]:
    """Follows moves and checks each: the carry at hand, what slots hold, the order of adjoints. Returns runs of the
    iteration beyond the adjoints', writes and reads.
    """
    at, here, there = 0, {}, {}
    iterations = writes = reads = 0
    due = length - 1
    for move in moves:
        if move.kind == "advance":
            assert move.iteration == at < move.stop <= due
            iterations, at = iterations + move.stop - at, move.stop
        elif move.kind in ("store", "write"):
            assert at == move.iteration
            rows, most = (here, slots) if move.kind == "store" else (there, host)
            assert 0 <= move.slot < most
            rows[move.slot] = at
            writes += move.kind == "write"
        elif move.kind in ("restore", "read"):
            assert (here if move.kind == "restore" else there)[move.slot] == move.iteration
            at, reads = move.iteration, reads + (move.kind == "read")
        else:
            assert at == move.iteration == due
            at, due = -1, due - 1
    assert due == -1
    return iterations, writes, reads


@pytest.mark.parametrize("case", [(1, 1, 1), (2, 1, 9), (7, 1, 1), (31, 2, 3), (97, 1, 2), (101, 3, 4), (1009, 4, 20)])
@pytest.mark.parametrize("cost", [0.0, 0.25, 2.0])
def test_its_moves_reverse_the_steps_within_the_slots_at_its_cost(case: tuple[int, int, int], cost: float) -> None:
    length, slots, host = case
    best = optimal_levels(length, slots, host, Transfer(cost, cost))
    assert best.host_rows <= host and best.device_rows <= slots
    found = followed(best.moves(), length, max(best.device_rows, 1), best.host_rows)
    assert found == (best.extra_iterations, best.writes, best.reads)


@pytest.mark.parametrize("case", ORACLE)
def test_iterations_and_transfers_are_at_most_those_of_hrevolve(case: tuple[int, int, int]) -> None:
    iterations, writes, reads = ORACLE[case]
    best = optimal_levels(*case, Transfer(2.0, 2.0))
    assert best.extra_iterations + case[0] <= iterations and best.writes <= writes and best.reads <= reads
    assert best.extra_iterations < 0.9 * extra_iterations(case[0], case[1]), "the host is of use"


@pytest.mark.parametrize("case", [(100, 3, 10), (23, 1, 2)])
def test_the_compiled_loop_runs_and_moves_as_often_as_the_optimum_says(case: tuple[int, int, int]) -> None:
    length, slots, host = case
    best = optimal_levels(length, slots, host, Transfer(2.0, 2.0))
    expected = {"iterations": length + 1 + best.extra_iterations, "writes": best.writes, "reads": best.reads}
    assert counted(*case) == expected
    assert best.writes and best.reads


def test_with_host_slots_for_all_no_iteration_runs_twice_but_to_be_linearised() -> None:
    run = Slots(1, host=40, run_length=1)
    assert optimal_levels(29, 1, 40, Transfer(0.25, 0.25)).extra_iterations == 28, "the forward pass alone"
    assert describe(29, run).runs == 2 * 29 < describe(29, Slots(1, run_length=1)).runs
    told = describe(29, Slots(1, host=40))
    assert told.runs == 2 * 29
    assert told.host_carries <= 29 and told.transfers <= 2 * 29


def recurrence(length: int, schedule: Any, h: Any, **options: Any) -> Any:
    """A carry of floats, a counter, a key, an empty array and a scalar; ys, and weights that are closed over."""
    rng = np.random.default_rng(0)
    weights, xs = (jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32) for shape in ((3, 3), (length, 3)))

    def body(carry: Any, x: Any) -> Any:
        a, count, key, none, scale = carry
        key, once = jax.random.split(key)
        a = jnp.tanh(a @ weights + x * scale) + 0.01 * jax.random.normal(once, a.shape) + none.sum()
        return (a, count + 1, key, none, jnp.cos(scale) + 0.1 * count), jnp.sin(a)

    start = (h, jnp.int32(0), jax.random.key(3), jnp.zeros((0, 3)), jnp.sum(h))
    (a, *_), ys = scan(body, start, xs, schedule=schedule, **options)
    return jnp.sum(a**2) + jnp.sum(ys * xs)


H = jnp.asarray([0.3, -0.2, 0.5])


@pytest.mark.parametrize(
    ("length", "schedule", "options"),
    [
        (1, Slots(1, host=1), {}),
        (2, Slots(1, host=1), {}),
        (3, Slots(1, host=1), {}),
        (13, Slots(1, host=3), {}),
        (13, Slots(2, host=4), {"reverse": True}),
        (31, Slots(2, host=3), {"unroll": 4}),
        (32, Slots(2, host=3), {"unroll": 4}),
        (17, Slots(2, host=100), {}),
        (17, Slots(100, host=2), {}),
    ],
    ids=str,
)
def test_gradients_are_those_of_lax_scan(length: int, schedule: Any, options: dict[str, Any]) -> None:
    ours = jax.jit(jax.grad(lambda h: recurrence(length, schedule, h, **options)), compiler_options=FAST)(H)
    plain = {key: value for key, value in options.items() if key == "reverse"}
    assert_trees_close(ours, jax.grad(lambda h: recurrence(length, "none", h, **plain))(H), rtol=2e-4, atol=1e-5)


BATCH = jnp.stack([H, 2 * H])


@pytest.mark.parametrize(
    ("transform", "at"),
    [
        pytest.param(lambda f: jax.vmap(jax.grad(f)), BATCH, id="vmap of grad"),
        pytest.param(lambda f: jax.grad(lambda b: jax.vmap(f, 1)(b).sum()), BATCH.T, id="grad of vmap over columns"),
        pytest.param(jax.hessian, H, id="hessian"),
    ],
)
@pytest.mark.parametrize("schedule", [Slots(2, host=3), (3, 4)], ids=str)
def test_carries_on_the_host_can_be_batched_and_differentiated_forward(transform, at, schedule) -> None:
    options = {} if isinstance(schedule, Slots) else {"carry": OFFLOAD}
    ours = transform(lambda h: recurrence(11, schedule, h, **options))
    assert "<host>" in str(jax.make_jaxpr(ours)(at))
    expected = transform(lambda h: recurrence(11, "none", h))(at)
    assert_trees_close(jax.jit(ours, compiler_options=FAST)(at), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("transform", [jax.hessian, lambda f: lambda at: jax.jvp(jax.grad(f), (at,), (at,))[1]])
@pytest.mark.parametrize("of", ["constants", "xs"])
def test_carries_on_the_host_begin_with_one_that_is_not_differentiated(of, transform) -> None:
    start = jnp.ones((3, 4))

    def total(run, at) -> Any:
        body = (lambda c, x: (jnp.sin(c @ at), None)) if of == "constants" else (lambda c, x: (jnp.sin(c + x), None))
        return jnp.sum(run(body, start, None if of == "constants" else at, length=9)[0])

    at = 0.5 * jnp.eye(4) if of == "constants" else jnp.linspace(0, 1, 9 * 4).reshape(9, 1, 4)
    ours = transform(functools.partial(total, functools.partial(scan, schedule=Slots(2, host=3))))
    assert "<host>" in str(jax.make_jaxpr(ours)(at))
    expected = transform(functools.partial(total, jax.lax.scan))(at)
    assert_trees_close(jax.jit(ours, compiler_options=FAST)(at), expected, rtol=1e-3, atol=1e-4)


def test_what_is_handed_on_are_rows_on_the_device_and_on_the_host() -> None:
    h = jnp.ones((4, 5))
    run = lambda h: jnp.sum(scan(lambda c, _: (jnp.sin(c), None), h, length=60, schedule=Slots(3, host=8))[0])
    kept = sorted(r.shape[0] for r in residuals(run, h).residuals if r.shape[1:] == h.shape)
    assert kept == [4, 8], "three slots and the last carry, and eight on the host"


@pytest.mark.cuda
def test_more_carries_on_the_host_take_no_more_of_an_h100() -> None:
    few, many, all_here = (compiled(400, s) for s in (Slots(4), Slots(4, host=60), Slots(64)))
    assert many["host_bytes"] >= 50 * many["carry"] > few["host_bytes"] == 0
    assert many["temporaries"] <= few["temporaries"] + 8 * many["carry"]
    assert all_here["temporaries"] >= many["temporaries"] + 40 * many["carry"]


def test_it_is_a_value_that_prints_and_is_written_to_plans() -> None:
    schedule = Slots(32, host=1024)
    assert repr(schedule) == "Slots(32, host=1024)"
    assert schedule_from(schedule.to_json()) == schedule
    assert schedule_from({"kind": "slots", "count": 3, "run_length": None, "actions": None}) == Slots(3)
    text = str(describe(100, Slots(3, host=10, transfer=2.0)))
    assert "at most 10 at once on the host, in 20 transfers" in text
    assert "on the host" not in str(describe(5, Slots(30, host=10)))


@pytest.mark.parametrize("host", [-1, True, 2.0, "4", None])
def test_host_slots_are_a_number(host: Any) -> None:
    with pytest.raises(ArgumentError, match="host must be an int of at least 0"):
        Slots(3, host=host)


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf"), True, "2"])
def test_the_cost_of_a_transfer_is_a_number(cost: Any) -> None:
    with pytest.raises(ArgumentError, match="transfer must be a finite number"):
        Slots(3, host=2, transfer=cost)


def test_all_carries_on_the_host_and_host_slots_are_an_error() -> None:
    run = functools.partial(scan, lambda c, _: (jnp.sin(c), None), jnp.ones(3), length=9, schedule=Slots(2, host=3))
    with pytest.raises(ArgumentError, match="carry must be SAVE where the schedule has host slots"):
        run(carry=OFFLOAD)
