"""A budget bounds the compiled temporaries of a scan's value and gradient, and the fastest schedule that fits is
taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxckpt._errors import ArgumentError, InfeasibleBudgetError
from jaxckpt.core.units import parse_bytes
from jaxckpt.memory.report import measure
from jaxckpt.schedules import Nested, Slots, describe
from jaxckpt.schedules.body import take_apart
from jaxckpt.schedules.fit import fit
from jaxckpt.transforms.scan import scan
from tests.helpers import assert_trees_close

BATCH, WIDTH = 16, 128
TARGETS = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda:h100", id="h100", marks=pytest.mark.cuda),
    pytest.param("tpu:v5e:2x2", id="v5e", marks=pytest.mark.tpu),
]


def rnn(weights: Any, c: Any, x: Any) -> Any:
    return jnp.tanh(c @ weights["w"] + x), None


def elementwise(weights: Any, c: Any, x: Any) -> Any:
    return jnp.tanh(c * weights["b"] + x), None


def lstm(weights: Any, carry: Any, x: Any) -> Any:
    h, c = carry
    i, f, g, o = jnp.split(x @ weights["x"] + h @ weights["h"], 4, -1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None


def inner_loop(weights: Any, c: Any, x: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.tanh(c @ weights["w"] + x), None), c, None, length=3)[0], None


SHAPES = {"w": (WIDTH, WIDTH), "b": (WIDTH,), "x": (WIDTH, 4 * WIDTH), "h": (WIDTH, 4 * WIDTH)}
STEPS: dict[str, tuple[Callable, str]] = {
    "rnn": (rnn, "w"),
    "elementwise": (elementwise, "b"),
    "lstm": (lstm, "xh"),
    "inner loop": (inner_loop, "w"),
}


def gradient(name: str, length: int, **options: Any) -> tuple[Any, ...]:
    """Value and gradients of a scan, and what to compile it for."""
    step, keys = STEPS[name]
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    start = (shape(BATCH, WIDTH),) * 2 if name == "lstm" else shape(BATCH, WIDTH)

    def loss(weights: Any, start: Any, xs: Any) -> Any:
        last = scan(functools.partial(step, weights), start, xs, **options)[0]
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(last))

    weights = {key: shape(*SHAPES[key]) for key in keys}
    return jax.value_and_grad(loss, argnums=(0, 1)), weights, start, shape(length, BATCH, WIDTH)


def temporaries(target: str, *args: Any) -> int:
    """What `budget` bounds: the compiled peak in main memory beside arguments and results."""
    report = measure(*args, target=target, generate_code=False)
    return report.main_memory_bytes - report.argument_bytes - report.output_bytes


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "length", "budget"),
    [
        ("rnn", 3000, "400KiB"),
        ("rnn", 3001, "1MiB"),
        ("rnn", 3001, "40MiB"),
        ("rnn", 3000, "80MiB"),
        ("elementwise", 3001, "100KiB"),
        ("lstm", 1009, "3MiB"),
        ("inner loop", 1000, "1MiB"),
        ("inner loop", 1009, "4MiB"),
    ],
)
def test_a_budget_bounds_the_compiled_temporaries(name: str, length: int, budget: str, target: str) -> None:
    assert temporaries(target, *gradient(name, length, budget=budget)) <= 1.05 * parse_bytes(budget, "budget")


def test_the_integers_that_place_slots_do_not_grow_with_the_scan() -> None:
    short, long = (temporaries("cpu", *gradient("elementwise", length, budget="100KiB")) for length in (500, 50_000))
    assert abs(long - short) < 40_000


def mlp(weights: Any, c: Any, x: Any) -> Any:
    return c + jnp.tanh(c @ weights["w"]) @ weights["w"] + x, None


def normed(weights: Any, c: Any, x: Any) -> Any:
    h = jax.nn.gelu(c @ weights["w"]) + x
    return h / jnp.sqrt(1 + jnp.mean(h * h, -1, keepdims=True)), None


def with_rows(weights: Any, c: Any, x: Any) -> Any:
    return jnp.tanh(c @ weights["w"] + x), jnp.sin(c)


def beyond_plain(step: Callable, key: str, dtype: Any, budget: int) -> int:
    """Returns the bytes that the CPU's compiler takes for a scan with its gradient, beside what it takes for the scan
    alone.
    """
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, dtype)
    args = {key: shape(*SHAPES[key])}, shape(BATCH, WIDTH), shape(200, BATCH, WIDTH)
    run = lambda how, weights, *rest: how(functools.partial(step, weights), *rest)
    plain = functools.partial(run, lax.scan)

    def gradient(cts: Any, *args: Any) -> Any:
        out, pull = jax.vjp(functools.partial(run, functools.partial(scan, budget=budget)), *args)
        return out, pull(cts)

    with_gradient = measure(gradient, jax.eval_shape(plain, *args), *args, target="cpu").temp_bytes
    return with_gradient - measure(plain, *args, target="cpu").temp_bytes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("step", "key"), [(rnn, "w"), (elementwise, "b"), (mlp, "w"), (normed, "w"), (with_rows, "w")])
def test_a_budget_holds_on_the_cpu_which_computes_16_bit_floats_in_float32(
    step: Callable, key: str, dtype: Any
) -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        beyond_plain(step, key, dtype, 1)
    least = caught.value.least_bytes
    for budget in (least, 3 * least, 2**21):
        assert beyond_plain(step, key, dtype, budget) <= 1.05 * budget


def chosen(name: str, length: int, budget: int) -> Any:
    step, keys = STEPS[name]
    weights = {key: jnp.ones(SHAPES[key]) for key in keys}
    start = (jnp.ones((BATCH, WIDTH)),) * (2 if name == "lstm" else 1)
    xs = jax.ShapeDtypeStruct((length, BATCH, WIDTH), jnp.float32)
    found: list[Any] = []

    def look(xs: Any) -> Any:
        taken = take_apart(functools.partial(step, weights), start if len(start) > 1 else start[0], xs, None, False, 1)
        assert taken is not None
        found.append(fit(taken.body, budget))

    jax.eval_shape(look, xs)
    return found[0]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("length", [1000, 1009])
def test_more_bytes_never_mean_more_steps(name: str, length: int) -> None:
    runs = [chosen(name, length, 2**power).body_runs for power in range(22, 32)]
    assert runs == sorted(runs, reverse=True)
    assert runs[-1] == length  # everything kept, as lax.scan does


def test_the_fastest_schedule_that_fits_is_taken() -> None:
    length, carry = 1000, BATCH * WIDTH * 4
    plan = chosen("rnn", length, 200 * carry)
    assert plan.body_runs <= 2 * length  # as "sqrt", which fits
    assert temporaries("cpu", *gradient("rnn", length, schedule="sqrt")) <= 200 * carry
    few = chosen("rnn", length, 30 * carry)
    assert few.body_runs < describe(length, Slots(16)).runs  # 16 slots and what an iteration works with fit
    assert isinstance(chosen("rnn", length, 10**9).schedule, Nested)


def test_a_length_that_does_not_divide_costs_no_copy_of_xs() -> None:
    rows = 3001 * BATCH * WIDTH * 4
    for budget in (2**20, 2**22):
        assert temporaries("cpu", *gradient("rnn", 3001, budget=budget)) <= 1.05 * budget < rows


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("length", [1, 2, 97])
def test_the_least_budget_that_an_error_names_is_feasible(name: str, length: int) -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"budget must be at least .* \(\d+ bytes\)") as caught:
        jax.eval_shape(*gradient(name, length, budget=1))
    least = caught.value.least_bytes
    assert least is not None
    assert temporaries("cpu", *gradient(name, length, budget=least)) <= 1.05 * least
    with pytest.raises(InfeasibleBudgetError):
        jax.eval_shape(*gradient(name, length, budget=least - 1))


@pytest.mark.parametrize("budget", ["40KiB", "100KiB", "1MiB"])
@pytest.mark.parametrize("policy", [None, "dots"])
def test_gradients_within_a_budget_are_those_of_lax_scan(budget: str, policy: Any) -> None:
    weights, start, xs = jnp.full((8, 8), 0.1), jnp.ones((4, 8)), jnp.ones((97, 4, 8))

    def loss(run: Callable, weights: Any, start: Any, xs: Any) -> Any:
        last, ys = run(lambda c, x: (jnp.tanh(c @ weights + x), c.sum(-1)), start, xs)
        return jnp.sum(last**2) + jnp.sum(ys)

    run = functools.partial(scan, budget=budget, policy=policy)
    grads = [jax.jit(jax.grad(functools.partial(loss, r), (0, 1, 2)))(weights, start, xs) for r in (run, lax.scan)]
    assert_trees_close(*grads, rtol=1e-4)


def test_a_scan_that_is_not_differentiated_takes_any_budget_that_fits() -> None:
    run = lambda budget, **options: scan(lambda c, _: (c * 2, None), jnp.ones(256), length=9, budget=budget, **options)
    assert run("64KiB")[0].shape == (256,)
    with pytest.raises(ArgumentError, match="budget must be a number of bytes"):
        run("much")
    with pytest.raises(ArgumentError, match="schedule must be omitted if a budget is given"):
        run("1GiB", schedule=Slots(3))
    with pytest.raises(ArgumentError, match="schedule must be omitted if a budget is given"):
        run("1GiB", schedule="sqrt")  # the default, asked for


def test_the_log_says_which_schedule_a_budget_chose(caplog) -> None:
    caplog.set_level("INFO", logger="jaxckpt")
    start, xs = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((4096, 4, 8), jnp.float32)
    jax.eval_shape(lambda *args: scan(lambda c, x: (jnp.tanh(c + x), None), *args, budget="300KB"), start, xs)
    assert "4096 iterations within 300KB: 4096 iterations, in segments of " in caplog.text
    assert "2.00 runs of each" in caplog.text
