"""The matmuls of weights' gradients, which wait for the end of a run of `Slots`: how many iterations are contracted at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxckpt
from jaxckpt.schedules import Slots
from tests.helpers import assert_trees_close, gradient_executions

BATCH, WIDTH = 32, 128
SHAPES = {"x": (WIDTH, 4 * WIDTH), "h": (WIDTH, 4 * WIDTH), "bias": (4 * WIDTH,)}
SLOTS = Slots(4, run_length=10)


def step(weights: Any, carry: Any, x: Any) -> Any:
    cell, hidden = carry
    into, forget, out, new = jnp.split(x @ weights["x"] + hidden @ weights["h"] + weights["bias"], 4, axis=-1)
    cell = jax.nn.sigmoid(forget + 1) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
    return (cell, jax.nn.sigmoid(out) * jnp.tanh(cell)), None


def loss(weights: Any, xs: Any, run: Callable[..., Any] = jaxckpt.scan, **options: Any) -> Any:
    init = jnp.zeros((xs.shape[1], WIDTH)), jnp.zeros((xs.shape[1], WIDTH))
    return jnp.sum(run(lambda carry, x: step(weights, carry, x), init, xs, **options)[0][1] ** 2)


def arguments(length: int, batch: int = BATCH) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    weights = {name: 0.1 * jax.random.normal(next(keys), shape) for name, shape in SHAPES.items()}
    return weights, jax.random.normal(next(keys), (length, batch, WIDTH))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("length", [20, 23, 7])
def test_gradients_of_several_parts_are_those_of_lax_scan(length: int, reverse: bool) -> None:
    """With a last run that is as long as the others, one that is shorter, and one alone."""
    args = arguments(length)
    expected = jax.grad(loss, argnums=(0, 1))(*args, lax.scan, reverse=reverse)
    assert_trees_close(jax.grad(loss, argnums=(0, 1))(*args, schedule=SLOTS, reverse=reverse), expected)


@pytest.mark.parametrize("transform", [jax.vmap, lambda f: jax.jvp(f, (arguments(12)[0],), (arguments(12)[0],))[1]])
def test_several_parts_are_batched_and_differentiated_forward(transform: Any) -> None:
    weights, xs = arguments(12)
    if transform is jax.vmap:
        several = jax.tree.map(lambda w: jnp.stack([w, -w]), weights)
        gradient = lambda run, **options: jax.vmap(lambda w: jax.grad(loss)(w, xs, run, **options))(several)
    else:
        gradient = lambda run, **options: transform(lambda w: jax.grad(loss)(w, xs, run, **options))
    assert_trees_close(gradient(jaxckpt.scan, schedule=SLOTS), gradient(lax.scan))


def test_short_contractions_with_small_results_are_one_for_a_run() -> None:
    """Counted: two matmuls of an iteration run when it is stored and when it is run again, two in its backward pass for
    the carry and x, and two a part. Ten iterations of 32 rows are two parts, of 2 rows one.
    """
    dots = lambda batch: gradient_executions(lambda *args: loss(*args, schedule=SLOTS), *arguments(20, batch))
    parts = {batch: dots(batch)["dot_general"] for batch in (BATCH, 2)}
    assert parts[BATCH] - parts[2] == 2 * 2


@pytest.mark.cuda
def test_the_h100_does_not_hold_a_contraction_in_several_parts_at_once() -> None:
    """It divides one of 320 rows in four, 2 MiB; a run keeps 1 MiB."""
    spec = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    weights, _ = arguments(1)
    xs = jax.ShapeDtypeStruct((10 * 101, BATCH, WIDTH), jnp.float32)
    gradient = jax.value_and_grad(lambda *args: loss(*args, schedule=Slots(32, host=100, run_length=10)))
    report = jaxckpt.measure(gradient, spec(weights), xs, target="cuda:h100")
    assert report.peak_bytes - report.argument_bytes - report.output_bytes <= 3 * 2**20
