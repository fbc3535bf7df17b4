from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxckpt._errors import ArgumentError, ForwardModeError
from jaxckpt.actions import OFFLOAD, RECOMPUTE, SAVE
from jaxckpt.core.graph import trace
from jaxckpt.memory.report import measure
from jaxckpt.policies import Policy, op
from jaxckpt.schedules import Nested, Slots, extra_iterations, pullback, schedule_of
from jaxckpt.transforms.checkpoint import checkpoint, tag
from jaxckpt.transforms.scan import scan
from tests.helpers import (
    assert_trees_close,
    executions,
    gradient_executions,
    kept_bytes,
    kept_shapes,
    time_ratio,
)

TARGETS = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda:h100", id="h100", marks=pytest.mark.cuda),
    pytest.param("tpu:v5e:2x2", id="v5e", marks=pytest.mark.tpu),
]
FAST = {"xla_backend_optimization_level": "0"}  # compiles in two thirds of the time

# ------------------------------------------------------------------------------------------------- values and gradients
# A program is drawn from its number: a step with some of everything, a length, a schedule. Compiling is what takes
# time, so that the 500 cases are random data for 56 programs.

PROGRAMS, CASES = 56, 500


@dataclass(frozen=True)
class Program:
    """What a random case runs."""

    number: int
    length: int
    reverse: bool
    schedule: Any
    unroll: int
    policy: Any
    parts: frozenset[str]
    dtype: str

    @staticmethod
    def draw(number: int) -> Program:
        rng = np.random.default_rng(number)
        structure = np.random.default_rng(1000 + number // 4)  # four schedules of one structure share a reference
        length = int(structure.choice([0, 1, 2, 3, 5, 7, 8, 11, 13, 16, 19]))
        named = [
            Slots(1),
            Slots(2),
            Slots(3),
            Slots(5),
            Slots(9),
            Slots(40),
            "every",
            "sqrt",
            "log",
            1,
            3,
            4,
            (3, 3, 3),
            (2, 5, 2),
        ]
        every_one = [named[number % len(named)], "none"] if length == 0 else [named[number % len(named)]]
        parts = [
            p
            for p in ("tokens", "floats", "key", "counter", "unmoved", "ys", "keys out", "none", "pair")
            if structure.random() < 0.5
        ]
        return Program(
            number,
            length,
            bool(structure.random() < 0.5),
            every_one[0],
            int(rng.choice([1, 1, 2, 3, 4])),
            rng.choice(np.array([None, None, None, "dots", "nothing", "everything"], dtype=object)),
            frozenset(parts),
            str(structure.choice(["float32", "float32", "float32", "bfloat16"])),
        )

    def operands(self, seed: int) -> Any:
        """Parameters, initial float carry and float xs: what is differentiated."""
        rng = np.random.default_rng(seed)
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.4, self.dtype)
        weights = {"inner": draw(4, 4), "outer": draw(4, 3), "table": draw(5, 4), "bias": draw(4)}
        init = (draw(2, 4), draw(3)) if "pair" in self.parts else (draw(2, 4), None)
        return weights, init, draw(self.length, 2, 4) if "floats" in self.parts else None

    def step(self, weights: Any, carry: Any, x: Any) -> Any:
        """A step with a matmul, a lookup, noise, a counter, and results of several kinds."""
        (h, extra), count, key, fixed = carry
        z = h @ weights["inner"] + weights["bias"]
        if x["tokens"] is not None:
            z = z + weights["table"][x["tokens"]]
        if x["floats"] is not None:
            z = z * jax.nn.sigmoid(x["floats"])
        if key is not None:
            key, sub = jax.random.split(key)
            z = z * jax.random.bernoulli(sub, 0.8, z.shape)
        if fixed is not None:
            z = z + jnp.sin(fixed)
        new = jnp.tanh(z) + h * weights["bias"]
        if extra is not None:
            extra = jnp.cos(extra) + (new @ weights["outer"]).sum(0)
        y = {"sum": new.sum(-1), "count": count, "z": z} if "ys" in self.parts else None
        if "keys out" in self.parts and key is not None:
            y = (y, key)
        return ((new, extra), None if count is None else count + 1, key, fixed), (
            y,
            None if "none" in self.parts else new[0, 0],
        )

    def loss(self, run: Callable, operands: Any, tokens: Any) -> tuple[Any, Any]:
        weights, init, floats = operands
        carry = (
            init,
            0 if "counter" in self.parts else None,
            jax.random.key(7) if "key" in self.parts else None,
            jnp.full((4,), 0.3, self.dtype) if "unmoved" in self.parts else None,
        )
        xs = {"tokens": tokens if "tokens" in self.parts else None, "floats": floats}
        last, ys = run(functools.partial(self.step, weights), carry, xs, length=self.length, reverse=self.reverse)
        leaves = [
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in jax.tree.leaves((last, ys))
        ]
        moving = [x.astype(jnp.float32) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        total = sum(jnp.sum(jnp.sin(x) * (1 + 0.1 * jnp.arange(x.size).reshape(x.shape))) for x in moving)
        return total, leaves


def compiled(program: Program, run: Callable) -> Callable:
    def both(operands: Any, tokens: Any) -> Any:
        return jax.value_and_grad(functools.partial(program.loss, run), has_aux=True)(operands, tokens)

    return jax.jit(both, compiler_options=FAST)


@functools.cache
def reference(number: int) -> Callable:
    return compiled(Program.draw(4 * number), lax.scan)


@functools.cache
def candidate(number: int) -> Callable:
    program = Program.draw(number)
    options: dict[str, Any] = {"schedule": program.schedule, "unroll": program.unroll, "policy": program.policy}
    return compiled(program, functools.partial(scan, **options))


@pytest.fixture(params=[False, True], ids=["at once", "settled later"])
def settled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to add up the cotangents of constants, which otherwise depends on their size."""
    monkeypatch.setattr(pullback, "LARGE", 0 if request.param else pullback.LARGE)
    return bool(request.param)


@given(number=st.integers(0, PROGRAMS - 1), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=CASES, deadline=None, derandomize=True)
def test_values_and_gradients_are_those_of_lax_scan(number: int, seed: int) -> None:
    program = Program.draw(number)
    before, pullback.LARGE = pullback.LARGE, 0 if number % 3 else pullback.LARGE
    try:
        operands, tokens = (
            program.operands(seed),
            jnp.asarray(np.random.default_rng(seed).integers(0, 5, (program.length, 2))),
        )
        expected = reference(number // 4)(operands, tokens)
        actual = candidate(number)(operands, tokens)
    finally:
        pullback.LARGE = before
    tolerance = 2e-5 if program.dtype == "float32" else 6e-2
    (value, aux), grads = expected
    scale = max([1.0, *(float(jnp.max(jnp.abs(g.astype(jnp.float32)))) for g in jax.tree.leaves(grads) if g.size)])
    assert_trees_close(actual[0], (value, aux), rtol=tolerance, atol=tolerance)
    as_floats = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float32), tree)
    assert_trees_close(as_floats(actual[1]), as_floats(grads), rtol=tolerance, atol=tolerance * scale)


def test_the_random_programs_cover_what_they_should() -> None:
    programs = [Program.draw(number) for number in range(PROGRAMS)]
    assert {p.length for p in programs} >= {0, 1, 13}
    assert len({str(p.schedule) for p in programs}) == 14
    assert {p.dtype for p in programs} == {"float32", "bfloat16"} and {p.reverse for p in programs} == {False, True}
    for part in ("tokens", "floats", "key", "counter", "unmoved", "ys", "keys out", "none", "pair"):
        assert 6 < sum(part in p.parts for p in programs) < PROGRAMS


# ---------------------------------------------------------------------------------------------- how often the body runs


class Counter:
    """A matmul that counts its executions as they happen, in the forward and in the backward pass."""

    def __init__(self, width: int) -> None:
        self.runs = 0
        self.weight = np.random.default_rng(0).normal(size=(width, width)).astype(np.float32) * 0.3

        @jax.custom_jvp
        def multiply(h: Any) -> Any:
            return jax.pure_callback(self._multiply, jax.ShapeDtypeStruct(h.shape, h.dtype), h)

        multiply.defjvp(lambda primals, tangents: (multiply(*primals), tangents[0] @ self.weight))
        self.multiply = multiply

    def _multiply(self, h: Any) -> Any:
        self.runs += 1
        return np.asarray(h) @ self.weight


def count_runs(length: int, **options: Any) -> int:
    counter = Counter(4)

    def loss(h: Any) -> Any:
        return jnp.sum(scan(lambda c, _: (jnp.tanh(counter.multiply(c)), None), h, length=length, **options)[0] ** 2)

    jax.block_until_ready(jax.jit(jax.grad(loss))(jnp.ones((2, 4))))
    return counter.runs


def test_the_counter_counts() -> None:
    assert count_runs(10, schedule="none") == 10
    assert count_runs(10, schedule="every") == 20
    assert count_runs(12, schedule=(3, 2, 2)) == 36


@pytest.mark.parametrize(("length", "slots"), [(10, 3), (56, 3), (100, 5), (100, 10), (1000, 10), (1000, 50)])
def test_slots_run_the_body_no_more_often_than_revolve(length: int, slots: int) -> None:
    assert count_runs(length, schedule=Slots(slots)) <= length + 1 + extra_iterations(length, slots)


@pytest.mark.parametrize("run", [2, 3, 7])
def test_runs_of_steps_run_the_step_as_often_as_planned(run: int) -> None:
    assert count_runs(50, schedule=Slots(4), unroll=run) == binomial_runs(50, run, 4)


def binomial_runs(length: int, run: int, slots: int) -> int:
    units = -(-length // run)
    return 2 * length + run * (extra_iterations(units, min(slots, units)) - units + 1)


@pytest.mark.parametrize("schedule", ["sqrt", "log", 7, (5, 3, 4), "every", "none"])
def test_nested_schedules_run_the_step_as_often_as_described(schedule: Any) -> None:
    nest = schedule_of(53, schedule)
    assert isinstance(nest, Nested)
    assert count_runs(53, schedule=schedule) == nest.body_runs


def test_slots_keep_no_more_carries_than_they_are() -> None:
    def loss(h: Any, schedule: Any) -> Any:
        return jnp.sum(scan(lambda c, _: (jnp.tanh(c * 1.1), None), h, length=200, schedule=schedule)[0])

    h = jnp.ones((64, 64))
    for slots in (1, 3, 10, 500):
        assert kept_bytes(lambda h, n=slots: loss(h, Slots(n)), h) <= min(slots, 200) * h.nbytes
    assert kept_bytes(lambda h: loss(h, "none"), h) > 199 * h.nbytes


# ------------------------------------------------------------------------------------------------------ compiled memory


WIDTH, BATCH, STEPS = 128, 64, 240
CARRY = BATCH * WIDTH * 4


def chain(schedule: Any, length: int = STEPS, **options: Any) -> tuple[Callable, tuple[Any, ...]]:
    """Gradient of a recurrence whose carry is two arrays, with rows read and written, and what to compile it for."""

    def loss(weights: Any, h: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            a, b = carry
            z = jnp.tanh(a @ weights + x)
            return (z, jnp.sin(b) * z), None

        a, b = scan(step, (h, h), xs, schedule=schedule, **options)[0]
        return jnp.sum(a * b)

    shapes = (WIDTH, WIDTH), (BATCH, WIDTH), (length, WIDTH)
    return jax.grad(loss, argnums=(0, 1)), tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


@functools.cache
def temporaries(target: str, schedule: Any, length: int = STEPS) -> float:
    """Compiled temporaries, in carries. (On the TPU small programs report none, so the peak beyond arguments.)"""
    fun, args = chain(schedule, length)
    report = measure(fun, *args, target=target, generate_code=False)
    return (report.peak_bytes - report.argument_bytes if target.startswith("tpu") else report.temp_bytes) / (2 * CARRY)


@pytest.mark.parametrize("target", TARGETS)
def test_every_schedule_keeps_what_it_should_and_no_more(target: str) -> None:
    kept = {
        schedule: temporaries(target, schedule)
        for schedule in ("none", "every", "sqrt", "log", 60, (4, 60), (3, 8, 10), Slots(12))
    }
    spare = 9  # working memory of one iteration and its backward pass
    padding = 1.3 if target.startswith("tpu") else 1.02  # the TPU lays arrays out in tiles
    assert kept["none"] >= 2 * STEPS
    assert 0.9 * STEPS <= kept["every"] <= padding * STEPS + spare
    residuals = kept["none"] / STEPS  # of an iteration, in carries
    for schedule in ("sqrt", "log", 60, (4, 60), (3, 8, 10)):
        nest = schedule_of(STEPS, schedule)
        assert isinstance(nest, Nested)
        assert kept[schedule] <= padding * (nest.carries + nest.residuals * residuals) + spare, schedule
    assert kept[Slots(12)] <= padding * 12 + spare
    assert kept["log"] < kept["sqrt"] < kept["every"] < kept["none"]


@pytest.mark.parametrize("target", TARGETS)
def test_slots_take_the_memory_of_slots_whatever_the_length(target: str) -> None:
    assert temporaries(target, Slots(12), 5 * STEPS) <= temporaries(target, Slots(12)) + 1
    # The shorter last run is a program of its own, with working memory of its own.
    assert temporaries(target, Slots(12), 5 * STEPS + 1) <= temporaries(target, Slots(12)) + 8


@pytest.mark.parametrize(
    "target", [pytest.param("cuda:h100", marks=pytest.mark.cuda), pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu)]
)
@pytest.mark.parametrize("schedule", ["every", 24, Slots(20)])
def test_offloaded_carries_lie_on_the_host(target: str, schedule: Any) -> None:
    here, away = (
        measure(*_flat(chain(schedule, carry=action)), target=target, generate_code=False) for action in (SAVE, OFFLOAD)
    )
    kept = {"every": STEPS, 24: STEPS // 24}.get(schedule, 6)
    assert here.host_bytes == 0
    assert away.host_bytes >= 0.9 * kept * 2 * CARRY
    if kept > 50:
        assert away.peak_bytes < 0.2 * here.peak_bytes


def _flat(pair: tuple[Any, tuple[Any, ...]]) -> list[Any]:
    return [pair[0], *pair[1]]


@pytest.mark.parametrize("schedule", ["every", "sqrt", (3, 4), Slots(4)])
def test_offloaded_carries_give_the_same_gradients(schedule: Any) -> None:
    args = [
        jnp.asarray(np.random.default_rng(i).normal(size=shape) * 0.2, jnp.float32)
        for i, shape in enumerate([(4, 4), (2, 4), (11, 4)])
    ]
    assert_trees_close(jax.jit(_small(schedule, carry=OFFLOAD))(*args), jax.jit(_small(schedule))(*args))


@pytest.mark.parametrize(
    "options", [{}, {"carry": OFFLOAD}, {"policy": "everything"}, {"policy": Policy({op("sin"): SAVE})}], ids=str
)
@pytest.mark.parametrize("schedule", ["every", "sqrt", (3, 4), Slots(4)])
def test_complex_carries_have_the_same_gradients(schedule: Any, options: dict) -> None:
    def step(c: Any, w: Any) -> Any:
        c = jnp.sin(c * w)
        return c / (1 + jnp.abs(c)), jnp.abs(c).sum()

    def loss(run: Any, x: Any, ws: Any) -> Any:
        c, ys = run(step, x * (0.3 + 0.2j), ws)
        return jnp.abs(c).sum() + ys.sum()

    args = jnp.linspace(0.1, 1.0, 8), jnp.linspace(0.1, 1.0, 11)
    grads = [
        jax.jit(jax.grad(functools.partial(loss, run), argnums=(0, 1)))(*args)
        for run in (functools.partial(scan, schedule=schedule, **options), jax.lax.scan)
    ]
    assert_trees_close(*grads)


@pytest.mark.parametrize("schedule", [4, Slots(4)])
def test_counters_and_keys_of_an_offloaded_carry_stay_where_they_are(schedule: Any) -> None:
    def step(carry: Any, x: Any) -> Any:
        h, counts, keys = carry
        noise = jax.vmap(lambda key: jax.random.uniform(key, (4,)))(keys)
        return (jnp.tanh(h + noise + x), counts + 1, jax.vmap(jax.random.fold_in)(keys, counts)), None

    def loss(h: Any, carry: Any) -> Any:
        start = (h, jnp.zeros(2, jnp.int32), jax.random.split(jax.random.key(0), 2))
        return scan(step, start, jnp.ones((11, 2, 4)), schedule=schedule, carry=carry)[0][0].sum()

    h = jnp.ones((2, 4))
    grads = [jax.jit(jax.grad(functools.partial(loss, carry=carry)))(h) for carry in (SAVE, OFFLOAD)]
    assert_trees_close(*grads)
    away = re.findall(r"(\w+)<host>", str(jax.make_jaxpr(jax.grad(functools.partial(loss, carry=OFFLOAD)))(h)))
    assert set(away) == {"f32"}


def _within(wrap: Callable, outer: Any, inner: Any = "sqrt", **options: Any) -> Callable:
    """A scan whose body, wrapped, runs two other scans."""

    def loss(h: Any) -> Any:
        run = wrap(lambda h: scan(lambda h, x: (jnp.sin(h * x), None), h, jnp.ones(16), schedule=inner, **options)[0])
        return scan(lambda h, x: (run(run(h)) * x, None), h, jnp.ones(9), schedule=outer, **options)[0].sum()

    return loss


def _levels(schedule: Any, length: int, **options: Any) -> Callable:
    return lambda h: scan(lambda h, x: (jnp.sin(h * x), None), h, jnp.ones(length), schedule=schedule, **options)[
        0
    ].sum()


@pytest.mark.parametrize(
    "fun",
    [
        functools.partial(_levels, "log", 300),
        functools.partial(_levels, (21, 5), 103),
        functools.partial(_levels, (30, 10, 3), 120, policy="dots"),
        functools.partial(_within, lambda f: f, "sqrt"),
        functools.partial(_within, lambda f: f, "every", "every"),
        functools.partial(_within, jax.jit, 2, (6, 3)),
        functools.partial(_within, checkpoint, (3, 3), "log"),
        functools.partial(_within, lambda f: lambda h: jax.lax.cond(h[0] > 0, f, jnp.sin, h), 3),
        functools.partial(_within, lambda f: lambda h: _within(jax.jit, 3, carry=OFFLOAD)(h) + f(h), "sqrt"),
    ],
)
def test_carries_of_inner_levels_and_scans_are_not_kept_with_the_outer_ones(fun: Callable) -> None:
    h = jnp.linspace(0.1, 1.0, 5)
    away = fun(carry=OFFLOAD)
    assert kept_shapes(away, h) == kept_shapes(fun(carry=SAVE), h)
    assert executions(jax.grad(away), h)["sin"] == executions(jax.grad(fun(carry=SAVE)), h)["sin"]
    traced = str(jax.make_jaxpr(jax.grad(away))(h))
    assert "<host>" in traced
    again = fun(carry=OFFLOAD)
    named = [re.findall(r"name=(jaxckpt:\S+)", text) for text in (traced, str(jax.make_jaxpr(jax.grad(again))(h)))]
    assert named[0] == named[1] != []


def _small(schedule: Any, **options: Any) -> Callable:
    def loss(weights: Any, h: Any, xs: Any) -> Any:
        return jnp.sum(
            scan(lambda c, x: (jnp.tanh(c @ weights + x), c.sum()), h, xs, schedule=schedule, **options)[0] ** 2
        )

    return jax.grad(loss, argnums=(0, 1, 2))


def test_cotangents_of_constants_are_added_up_and_not_stacked(settled: bool) -> None:
    def loss(weights: Any, h: Any) -> Any:
        return jnp.sum(scan(lambda c, _: (jnp.tanh(c @ weights), None), h, length=100, schedule=Slots(10))[0])

    weights, h = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((4, 512), jnp.float32)
    report = measure(jax.grad(loss), weights, h, target="cpu")
    assert report.temp_bytes < 3.5 * 512 * 512 * 4


def test_rows_of_an_embedding_are_added_to_its_cotangent_in_place() -> None:
    table = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    tokens = jax.ShapeDtypeStruct((100, 2), jnp.int32)

    def loss(table: Any, tokens: Any) -> Any:
        step = lambda c, t: (jnp.tanh(c + table[t]), None)
        return jnp.sum(scan(step, jnp.zeros((2, 64)), tokens, schedule=Slots(10))[0])

    assert measure(jax.grad(loss), table, tokens, target="cpu").temp_bytes < 0.1 * 4096 * 64 * 4


def test_cotangents_of_xs_are_written_in_place(settled: bool) -> None:
    def loss(weights: Any, h: Any, xs: Any) -> Any:
        return jnp.sum(scan(lambda c, x: (jnp.tanh(c @ weights + x), c), h, xs, schedule=Slots(6))[0])

    shapes = (8, 8), (16, 8), (5000, 16, 8)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    report = measure(jax.grad(loss, argnums=(0, 1, 2)), *args, target="cpu")
    assert report.temp_bytes < 0.1 * 5000 * 16 * 8 * 4


def test_what_is_not_differentiated_costs_nothing() -> None:
    def loss(weights: Any, xs: Any) -> Any:
        return jnp.sum(
            scan(lambda c, x: (jnp.tanh(c @ weights + x @ weights), None), jnp.zeros((2, 8)), xs, schedule=Slots(3))[0]
        )

    weights, xs = jnp.ones((8, 8)), jnp.ones((12, 2, 8))
    with_xs = gradient_executions(lambda both: loss(*both), (weights, xs))["dot_general"]
    assert gradient_executions(lambda w: loss(w, xs), weights)["dot_general"] < with_xs


@pytest.mark.cuda
def test_a_long_lstm_on_an_h100_takes_a_small_part_of_lax_scans_temporaries() -> None:
    length, batch, width = 10007, 32, 128
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)
    weights = {
        "table": shape(256, width),
        "x": shape(width, 4 * width),
        "h": shape(width, 4 * width),
        "out": shape(width, 256),
    }

    def loss(weights: Any, tokens: Any, run: Callable) -> Any:
        def step(carry: Any, pair: Any) -> Any:
            h, c, total = carry
            gates = weights["table"][pair[0]] @ weights["x"] + h @ weights["h"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            logits = jax.nn.log_softmax(h @ weights["out"])
            return (h, c, total - jnp.mean(jnp.take_along_axis(logits, pair[1][:, None], 1))), None

        zeros = jnp.zeros((batch, width))
        return run(step, (zeros, zeros, 0.0), (tokens[:-1], tokens[1:]))[0][2]

    def temp(run: Callable) -> int:
        gradient = jax.value_and_grad(lambda weights, tokens: loss(weights, tokens, run))
        return measure(
            gradient, weights, shape(length + 1, batch, dtype=jnp.int32), target="cuda:h100", generate_code=False
        ).temp_bytes

    plain, sqrt, log = (temp(run) for run in (lax.scan, scan, functools.partial(scan, schedule="log")))
    slots = temp(functools.partial(scan, schedule=Slots(20)))
    assert sqrt <= 0.03 * plain
    assert slots < log < sqrt


# --------------------------------------------------------------------------------- size of the program, transformations


@pytest.mark.parametrize("slots", [32, 64])
def test_the_program_is_no_larger_for_a_thousand_times_the_steps(slots: int) -> None:
    def size(length: int) -> int:
        weights, h = jnp.ones((8, 8)), jnp.ones((2, 8))
        loss = lambda w: jnp.sum(
            scan(lambda c, _: (jnp.tanh(c @ w) + h, None), h, length=length, schedule=Slots(slots))[0]
        )
        return len(list(trace(jax.grad(loss), weights).walk()))

    # the longer scan has the plain schedule, the shorter one may take runs of iterations: some 30 operations more,
    # whatever the length
    assert size(100_000) == size(1_000_000) <= size(100) <= size(100_000) + 40


def objective(schedule: Any, length: int = 11, unroll: int = 1) -> Callable:
    """A scalar function of one array, with rows, results and a closed-over matrix."""
    rng = np.random.default_rng(3)
    weights, xs = (jnp.asarray(rng.normal(size=shape) * 0.4, jnp.float32) for shape in ((3, 3), (length, 3)))

    def fun(h: Any) -> Any:
        last, ys = scan(
            lambda c, x: (jnp.tanh(c @ weights + x * h), jnp.sin(c)), h, xs, schedule=schedule, unroll=unroll
        )
        return jnp.sum(last**2) + jnp.sum(ys * xs)

    return fun


H = jnp.asarray([0.3, -0.2, 0.5])
BATCHED = jnp.stack([H, 2 * H])
TRANSFORMS: dict[str, tuple[Callable, Any]] = {
    "vmap of grad": (lambda f: jax.vmap(jax.grad(f)), BATCHED),
    "grad of vmap": (lambda f: jax.grad(lambda b: jax.vmap(f)(b).sum()), BATCHED),
    "hessian": (jax.hessian, H),  # forward over reverse
    "jvp": (lambda f: lambda h: jax.jvp(f, (h,), (h + 1,)), H),
    "grad of grad": (lambda f: jax.grad(lambda h: jnp.sum(jax.grad(f)(h) ** 2)), H),
    "in a checkpoint": (lambda f: jax.grad(jax.checkpoint(f)), H),
    "in a scan": (
        lambda f: jax.grad(lambda h: lax.scan(lambda c, _: (jnp.sin(f(c)) * c, None), h, length=3)[0].sum()),
        H,
    ),
}


@functools.cache
def transformed(name: str, schedule: Any) -> Any:
    transform, at = TRANSFORMS[name]
    return jax.jit(transform(objective(schedule)), compiler_options=FAST)(at)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("schedule", ["every", "log", (3, 2, 2)])
def test_nested_schedules_have_forward_mode_higher_orders_and_vmap(schedule: Any, name: str) -> None:
    assert_trees_close(transformed(name, schedule), transformed(name, "none"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name not in ("jvp", "grad of grad")])
@pytest.mark.parametrize("unroll", [1, 3])
def test_slots_have_vmap_nesting_and_forward_over_reverse(
    name: str, unroll: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pullback, "LARGE", 0)
    transform, at = TRANSFORMS[name]
    actual = jax.jit(transform(objective(Slots(3), unroll=unroll)), compiler_options=FAST)(at)
    assert_trees_close(actual, transformed(name, "none"), rtol=1e-4, atol=1e-5)


def test_a_symbolic_number_of_rows_is_refused_by_name() -> None:
    (rows,) = jax.export.symbolic_shape("rows")
    run = lambda x: scan(lambda c, row: (c + row, c), jnp.zeros(3), x, schedule="none")
    with pytest.raises(ArgumentError, match="xs must be arrays with a number of rows that is known"):
        jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct((rows, 3), jnp.float32))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f: jax.jvp(f, (H,), (H,)),
        lambda f: jax.jit(lambda h: jax.jvp(f, (h,), (h,)))(H),
        lambda f: jax.jvp(jax.jit(f), (H,), (H,)),
        lambda f: jax.jacfwd(f)(H),
    ],
)
def test_forward_mode_of_slots_is_an_error_that_names_the_schedules_that_have_it(differentiate: Callable) -> None:
    with pytest.raises(
        ForwardModeError, match=r"schedule=Slots\(n\).*forward mode.*schedule=\"sqrt\", \"log\", an int or a tuple"
    ):
        differentiate(objective(Slots(3)))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f: jax.grad(lambda h: jax.grad(f)(h).sum())(H),
        lambda f: jax.jit(jax.grad(lambda h: jax.grad(f)(h).sum()))(H),
        lambda f: jax.grad(lambda h: jax.value_and_grad(f)(h)[0])(H),
    ],
)
def test_reverse_over_reverse_of_slots_is_an_error_that_says_what_can(differentiate: Callable) -> None:
    with pytest.raises(
        ForwardModeError, match=r"in reverse more than once.*; jax.jvp of jax.grad .* is fine.*schedule=\"sqrt\""
    ):
        differentiate(objective(Slots(3)))


@pytest.mark.parametrize("schedule", ["sqrt", Slots(3)])
def test_a_step_may_stop_before_the_end_by_a_mask(schedule: Any) -> None:
    def solve(x: Any, run: Callable, **options: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            value, done = state
            new = jnp.where(done, value, value - (value**2 - x) / (2 * value))
            return (new, done | (jnp.abs(new**2 - x) < 1e-6 * x)), done

        (value, _), done = run(step, (x, jnp.array(False)), length=40, **options)
        return value, done.sum()

    for x in (2.0, 1e4):
        (value, waited), slope = jax.value_and_grad(lambda x: solve(x, scan, schedule=schedule), has_aux=True)(x)
        assert abs(value - x**0.5) < 1e-3 * x**0.5 and waited > 10
        assert_trees_close(slope, jax.grad(lambda x: solve(x, lax.scan)[0])(x))


# ---------------------------------------------------------------------------------------------------- policies, budgets


def tagged_loss(weights: Any, h: Any, xs: Any, **options: Any) -> Any:
    def step(c: Any, x: Any) -> Any:
        up = tag(c @ weights, "up")
        return jnp.tanh(jnp.sin(up) @ weights.T + x), None

    return jnp.sum(scan(step, h, xs, **options)[0])


ARGS = jnp.full((8, 16), 0.1), jnp.ones((4, 8)), jnp.ones((20, 4, 8))


@pytest.mark.parametrize("schedule", ["every", 5, (2, 5, 2)])
def test_a_policy_keeps_its_values_of_each_step(schedule: Any) -> None:
    def dots(policy: Any) -> int:
        gradient = functools.partial(tagged_loss, h=ARGS[1], xs=ARGS[2], schedule=schedule, policy=policy)
        return gradient_executions(gradient, ARGS[0])["dot_general"]

    # Keeping "up" saves its matmul in every iteration's backward pass.
    assert dots("nothing") - dots(Policy({"up": "save"})) >= 19
    assert dots("dots") <= dots(Policy({"up": "save"}))


def test_a_policy_says_what_a_run_of_slots_keeps() -> None:
    run = lambda policy: gradient_executions(
        lambda w: tagged_loss(w, *ARGS[1:], schedule=Slots(2), unroll=5, policy=policy), ARGS[0]
    )["dot_general"]
    assert run("nothing") - run(Policy({"up": "save"})) >= 1  # one matmul less in a loop that is written once
    expected = jax.jit(jax.grad(functools.partial(tagged_loss, schedule="none")))(*ARGS)
    for policy in ("everything", jax.checkpoint_policies.dots_saveable, Policy({"up": "save"})):
        gradient = jax.grad(functools.partial(tagged_loss, schedule=Slots(2), unroll=5, policy=policy))
        assert_trees_close(jax.jit(gradient)(*ARGS), expected)


# ------------------------------------------------------------------------------------------------------------ bad input


def test_bad_schedules_and_actions() -> None:
    run = lambda **options: scan(lambda c, _: (c, None), 0.0, length=10, **options)
    for schedule, message in [
        ("square", "schedule must be one of"),
        (0, "at least 1"),
        ((3, 0), "ints of at least 1"),
        ((3, 3), "product is at least the length, 10"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            run(schedule=schedule)
    with pytest.raises(ArgumentError, match="carry must be SAVE, OFFLOAD or"):
        run(carry=RECOMPUTE)
    with pytest.raises(ArgumentError, match="carry must be an action"):
        run(carry="keep")
    with pytest.raises(ArgumentError, match="policy must be a preset's name"):
        run(policy="dotz")
    with pytest.raises(ArgumentError, match="policy must be without OFFLOAD where the schedule is Slots"):
        scan(lambda c, _: (jnp.sin(c), None), 0.0, length=10, schedule=Slots(2), policy=Policy(default=OFFLOAD))


@pytest.mark.parametrize("schedule", ["sqrt", Slots(3)])
def test_lax_scans_own_messages_reach_the_user(schedule: Any) -> None:
    run = functools.partial(scan, schedule=schedule)
    with pytest.raises(ValueError, match="scan got values with different leading axis sizes: 5, 4"):
        run(lambda c, x: (c, None), 0.0, (jnp.ones(5), jnp.ones(4)))
    with pytest.raises(TypeError, match="carry input and carry output must have"):
        run(lambda c, x: ((c, c), None), 0.0, jnp.ones(5))
    with pytest.raises(TypeError, match="carry input and carry output must have equal types"):
        run(lambda c, x: (c.astype(jnp.bfloat16), None), jnp.ones(3), jnp.ones(5))
    with pytest.raises(ValueError, match="length"):
        run(lambda c, x: (c, None), 0.0, jnp.ones(5), length=4)


@pytest.mark.parametrize("schedule", ["none", "every", "sqrt", "log", 3, (2, 2), Slots(2)])
@pytest.mark.parametrize("length", [0, 1])
def test_no_step_and_one_step(schedule: Any, length: int) -> None:
    def run(w: Any) -> Any:
        last, ys = scan(lambda c, x: (c * w + x, c), 1.0, jnp.arange(float(length)), schedule=schedule)
        return last + ys.sum(), ys

    (value, ys), slope = jax.value_and_grad(run, has_aux=True)(3.0)
    assert (float(value), float(slope), ys.shape) == ((1.0, 0.0, (0,)) if length == 0 else (4.0, 1.0, (1,)))


# --------------------------------------------------------------------------------------------------------- compile time


def test_compiling_slots_takes_as_long_at_length_100000_as_at_100() -> None:
    def compiled(length: int) -> None:
        def loss(w: Any, carry: Any, xs: Any) -> Any:
            def step(carry: Any, x: Any) -> Any:
                carry = jnp.tanh(carry @ w + x)
                return carry, (carry**2).sum()

            carry, ys = scan(step, carry, xs, schedule=Slots(32))
            return (carry**2).sum() + ys.sum()

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (4, 16), (length, 4, 16))]
        jax.jit(jax.grad(loss)).lower(*shapes).compile()

    ratio, ratios = time_ratio(lambda: compiled(100_000), lambda: compiled(100), turns=9)
    assert ratio <= 1.3, ratios
