"""Seconds of a stretch as it runs: more work takes longer, the median counts, short programs run several times,
recomputation is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt.planner import timing
from jaxckpt.planner.timing import LEAST, ROUNDS, run_seconds

X = jax.ShapeDtypeStruct((192, 192), jnp.float32)


def jaxpr_of(fun: Callable[..., Any], *args: Any) -> Any:
    return jax.make_jaxpr(fun)(*args).jaxpr


def products(count: int) -> Any:
    def fun(x: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, y: jnp.tanh(y @ x), x)

    return jaxpr_of(fun, X)


def test_more_work_takes_longer() -> None:
    light, heavy = run_seconds(products(2)), run_seconds(products(60))
    assert 0 < 5 * light < heavy


class Clock:
    """Each run between two looks at it takes the next of some times; the last goes on."""

    def __init__(self, *durations: float) -> None:
        self.durations, self.now, self.looks = list(durations), 0.0, 0

    def perf_counter(self) -> float:
        if self.looks % 2:
            self.now += self.durations.pop(0) if len(self.durations) > 1 else self.durations[0]
        self.looks += 1
        return self.now


class Counted:
    """A function that counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, x: Any) -> Any:
        return jax.pure_callback(self._count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def _count(self, x: Any) -> Any:
        self.runs += 1
        return np.asarray(x)


def test_the_median_of_the_rounds_counts_and_not_the_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = [1.0, 2.0, 100.0, 3.0, 2.5]
    assert len(disturbed) == ROUNDS
    monkeypatch.setattr(timing, "time", Clock(50.0, 1.0, *disturbed))
    assert run_seconds(jaxpr_of(jnp.sin, X)) == 2.5


def test_a_short_program_runs_several_times_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, times = Counted(), 4
    monkeypatch.setattr(timing, "time", Clock(1.0, LEAST / times * 1.001, *[0.5] * ROUNDS))
    found = run_seconds(jaxpr_of(counted, jax.ShapeDtypeStruct((2,), jnp.float32)))
    assert found == 0.5 / (times - 1)
    assert counted.runs == 2 + ROUNDS * (times - 1)


@pytest.mark.parametrize(("wrap", "runs"), [(lambda f: f, 1), (jax.checkpoint, 2)], ids=["kept", "computed again"])
def test_what_a_stretch_computes_again_is_timed(monkeypatch: pytest.MonkeyPatch, wrap: Any, runs: int) -> None:
    counted = Counted()

    @jax.custom_jvp
    def called(x: Any) -> Any:
        return counted(x)

    called.defjvp(lambda primals, tangents: (called(*primals), tangents[0]))
    monkeypatch.setattr(timing, "time", Clock(1.0))
    gradient = jax.value_and_grad(lambda x: jnp.sum(wrap(lambda x: jnp.sin(called(x * 2)))(x)))
    run_seconds(jaxpr_of(gradient, jax.ShapeDtypeStruct((2,), jnp.float32)))
    assert counted.runs == runs * (2 + ROUNDS)


def test_arguments_of_any_type_are_made_up() -> None:
    def fun(x: Any, tokens: Any, flag: Any, key: Any) -> Any:
        return jnp.where(flag, x[tokens] * jax.random.normal(key, (3,)), 0.0)

    args = jnp.ones((4, 3), jnp.bfloat16), jnp.zeros(3, jnp.int32)[0], jnp.asarray(True), jax.random.key(0)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    assert run_seconds(jaxpr_of(fun, *shapes)) > 0


def test_an_error_of_the_program_comes_through() -> None:
    def fails(x: Any) -> Any:
        raise ZeroDivisionError("not for this stretch")

    program = jaxpr_of(lambda x: jax.pure_callback(fails, X, x), X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not for this stretch"):
        run_seconds(program)
