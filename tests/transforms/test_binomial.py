"""The compiled loops of `Slots`: the body runs as often as the optimum says, and the carries that are kept are the
slots.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxckpt
from jaxckpt.schedules import Slots, extra_iterations, optimum
from jaxckpt.transforms.scan import scan
from tests.helpers import assert_trees_close
from tests.transforms.test_scan import Counter

ROWS, WIDTH = 3, 5
H = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)), jnp.float32)
FAST = {"xla_backend_optimization_level": "0"}


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one iteration only, as the optimum is known for; longer ones take fewer iterations, and some bytes."""
    monkeypatch.setattr(optimum, "LONGEST_RUN", 1)


def loss(counter: Counter, schedule: Any, length: int, h: Any) -> Any:
    """A recurrence of `length` iterations, each of which runs the counter once."""
    return jnp.sum(
        scan(lambda c, _: (jnp.tanh(counter.multiply(c)), None), h, length=length, schedule=schedule)[0] ** 2
    )


CASES = [(1, 1), (2, 1), (9, 1), (10, 3), (13, 2), (13, 12), (13, 13), (13, 40), (56, 3), (100, 5)]


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize(("length", "slots"), CASES)
def test_the_compiled_program_runs_the_step_as_often_as_the_optimum_and_keeps_the_slots(
    length: int, slots: int
) -> None:
    counter = Counter(WIDTH)
    step = jax.jit(jax.grad(lambda h: loss(counter, Slots(slots), length, h)), compiler_options=FAST)
    compiled = step.lower(H).compile()
    jax.block_until_ready(compiled(H))
    # The forward pass, one run of each iteration to differentiate it, and what the optimum adds, less the forward pass
    # that it counts.
    assert counter.runs == length + 1 + extra_iterations(length, min(slots, length))
    buffers = {int(rows) for rows in re.findall(rf"f32\[(\d+),{ROWS},{WIDTH}\]", compiled.as_text())}
    assert max(buffers, default=1) == min(slots, length)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize(("length", "slots"), [(13, 2), (56, 3), (20, 20)])
def test_what_the_forward_pass_hands_on_is_a_row_for_each_slot(length: int, slots: int) -> None:
    counter = Counter(WIDTH)
    report = jaxckpt.residuals(lambda h: loss(counter, Slots(slots), length, h), H)
    stacks = [r.shape for r in report.residuals if r.shape[1:] == H.shape]
    assert stacks == [(slots, *H.shape)]
    assert report.kept_bytes <= (slots + 1) * H.nbytes  # the last carry, of which the loss is the square


def test_without_a_gradient_each_step_runs_once_and_nothing_is_kept() -> None:
    counter = Counter(WIDTH)
    plain = jax.jit(lambda h: loss(counter, Slots(3), 17, h), compiler_options=FAST).lower(H).compile()
    jax.block_until_ready(plain(H))
    assert counter.runs == 17
    assert not re.findall(rf"f32\[\d+,{ROWS},{WIDTH}\]", plain.as_text())


@pytest.mark.parametrize(("slots", "run"), [(2, 4), (3, 5), (40, 3)])
def test_runs_of_several_steps_keep_a_row_for_each_slot_and_for_each_step_of_a_run(slots: int, run: int) -> None:
    length = 23
    counter = Counter(WIDTH)
    fun = lambda h: jnp.sum(
        scan(lambda c, _: (jnp.tanh(counter.multiply(c)), None), h, length=length, schedule=Slots(slots), unroll=run)[0]
        ** 2
    )
    compiled = jax.jit(jax.grad(fun), compiler_options=FAST).lower(H).compile()
    jax.block_until_ready(compiled(H))
    units = -(-length // run)
    assert counter.runs == 2 * length + run * (extra_iterations(units, min(slots, units)) - units + 1)
    buffers = {int(rows) for rows in re.findall(rf"f32\[(\d+),{ROWS},{WIDTH}\]", compiled.as_text())}
    assert max(buffers) == max(min(slots, units), run)
    expected = jax.grad(
        lambda h: jnp.sum(lax.scan(lambda c, _: (jnp.tanh(c @ counter.weight), None), h, length=length)[0] ** 2)
    )
    assert_trees_close(compiled(H), expected(H), rtol=1e-4)
