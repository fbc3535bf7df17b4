"""Under JAX's stricter settings, and with sizes that are not known: what a user's own function allows, checkpoints do
too. Where they cannot, the error says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxckpt
from jaxckpt import OFFLOAD, SAVE, ArgumentError, Policy, Slots, compress, intensity_above, larger_than, tag
from jaxckpt.actions.compress import FORMS
from tests.helpers import assert_trees_close

W = 0.5 * jax.random.normal(jax.random.key(0), (32, 32))
X = jax.random.normal(jax.random.key(1), (9, 3, 32))
SCHEDULES = ["none", "every", "sqrt", "log", 4, (3, 3), Slots(3), Slots(3, host=2), Slots(2, run_length=3)]
ACTIONS = [SAVE, OFFLOAD, compress("int8", key=jax.random.key(0)), compress("int8") | OFFLOAD]
ACTIONS += [compress(form) for form in FORMS if form != "bits"]


def layer(w: Any, x: Any) -> Any:
    mask = tag(x > 0, "mask")
    return jnp.sum(jnp.where(mask, jnp.tanh(tag(x @ w, "h")), jnp.zeros_like(x)) @ w)


def scanned(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, xs: jnp.sum(run(lambda c, x: (jnp.tanh(c @ w + x), None), xs[0], xs)[0])


def ways() -> dict[str, Callable[..., Any]]:
    found = {
        f"{action!r}": jaxckpt.checkpoint(layer, policy=Policy({"h": action, "mask": compress("bits")}))
        for action in ACTIONS
    }
    found |= {f"{how}": scanned(functools.partial(jaxckpt.scan, schedule=how)) for how in SCHEDULES}
    found["budget"] = scanned(functools.partial(jaxckpt.scan, budget="64KiB"))
    found["tile"] = jaxckpt.tile(layer, in_axes=(None, 0), tiles=3)
    return found


WAYS = ways()
SETTINGS: dict[str, Callable[[], Any]] = {
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "leaks": jax.checking_leaks,
    "nan": lambda: jax.debug_nans(True),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_under_stricter_settings_are_those_without(way: str) -> None:
    expected = jax.jit(jax.grad(WAYS[way]))(W, X)
    for setting in SETTINGS.values():
        with setting():
            again = ways()[way]  # nothing is traced yet
            found = jax.jit(jax.grad(again))(W, X)
        assert_trees_close(found, expected)


def symbolic(spec: str, *constraints: str) -> Any:
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(spec, constraints=constraints), jnp.float32)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("budget", f"{Slots(2, run_length=3)}", "tile")])
def test_what_is_exported_for_any_batch_is_right_for_one(way: str) -> None:
    gradient = jax.jit(jax.grad(WAYS[way]))
    exported = jax.export.export(gradient)(W, symbolic("9, b, 32"))
    assert_trees_close(exported.call(W, X), gradient(W, X))


@pytest.mark.parametrize(
    ("argument", "fun", "spec"),
    [
        ("budget", WAYS["budget"], "9, b, 32"),
        ("run_length", WAYS[f"{Slots(2, run_length=3)}"], "9, b, 32"),
        ("args", jaxckpt.tile(layer, in_axes=(None, 0), tiles=3), "b, 3, 32"),
        ("larger_than", jaxckpt.checkpoint(layer, policy=Policy({larger_than("1KiB"): SAVE})), "9, b, 32"),
        ("intensity_above", jaxckpt.checkpoint(layer, policy=Policy({intensity_above(1_000): SAVE})), "9, b, 32"),
    ],
    ids=["budget", "run_length", "tile", "larger_than", "intensity_above"],
)
def test_what_sizes_decide_says_so_where_they_are_symbolic(argument: str, fun: Any, spec: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}.*must be.*symbolic|^{argument}.*must be.*known"):
        jax.export.export(jax.jit(jax.grad(fun)))(W, symbolic(spec))


@pytest.mark.parametrize("form", ["int8", "float16", "bits"])
def test_blocks_of_a_symbolic_axis_are_an_error(form: str) -> None:
    name = "mask" if form == "bits" else "h"
    fun = lambda x: jnp.sum(jnp.where(tag(x > 0, "mask"), jnp.sin(tag(jnp.cos(x), "h")), jnp.zeros_like(x)))
    checkpointed = jaxckpt.checkpoint(fun, policy=Policy({name: compress(form)}))
    with pytest.raises(ArgumentError, match="^form must be another for values whose last axis has a symbolic size"):
        jax.export.export(jax.jit(jax.grad(checkpointed)))(symbolic("5, n"))


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("schedule", [*SCHEDULES, 3, 5], ids=repr)
def test_weak_types_of_ys_stay_weak(schedule: Any, length: int) -> None:
    """A carry that begins as a number of Python's makes weak ys, also where the last iterations are apart."""
    step = lambda c, x: (c * jnp.sum(x), c * 2)
    expected = lax.scan(step, 1.0, jnp.ones((length, 4)))
    found = jaxckpt.scan(step, 1.0, jnp.ones((length, 4)), schedule=schedule)
    types = lambda tree: jax.tree.map(lambda x: (x.dtype, x.weak_type), tree)
    assert types(found) == types(expected)
    assert expected[1].weak_type
