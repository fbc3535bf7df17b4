"""Random scans of lax.scan's every shape: outputs, gradients, and which outputs have tangents are lax.scan's under
every schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxckpt.schedules import Slots
from jaxckpt.transforms.scan import scan
from tests.helpers import assert_trees_close

FAST = {"xla_backend_optimization_level": "0"}
SCHEDULES: list[dict[str, Any]] = [
    *(
        {"schedule": schedule}
        for schedule in ("none", "every", "sqrt", "log", 3, (2, 3, 4), Slots(1), Slots(2), Slots(30))
    ),
    *({"schedule": Slots(2), "unroll": run} for run in (2, 5)),
    *({"budget": budget} for budget in (2**11, 2**12, 2**30)),
]
KINDS = ("float", "float", "bfloat16", "complex", "int", "bool", "key", "none", "nest")


def leaf(rng: np.random.Generator, kind: str) -> Any:
    """A carry's part of a kind."""
    value = jnp.asarray(rng.uniform(0.2, 0.8, size=(3,)), jnp.float32)
    return {
        "float": value,
        "bfloat16": value.astype(jnp.bfloat16),
        "complex": value * (0.6 + 0.5j),
        "int": jnp.int32(rng.integers(5)),
        "bool": jnp.asarray(bool(rng.integers(2))),
        "key": jax.random.key(int(rng.integers(99))),
        "none": None,
        "nest": {"a": (value, None), "b": [value[:2]]},
    }[kind]


def real(value: Any) -> Any:
    """Three floats made of anything, with a derivative where that has one."""
    parts = []
    for x in jax.tree.leaves(value):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x) % 7
        if jnp.iscomplexobj(x):
            x = x.real + x.imag
        parts.append(jnp.broadcast_to(jnp.sum(x.astype(jnp.float32)), (3,)))
    return sum(parts, jnp.zeros(3)) / max(len(parts), 1)


class Random:
    """A scan drawn from its number."""

    def __init__(self, number: int) -> None:
        rng = np.random.default_rng(number)
        self.options = SCHEDULES[number % len(SCHEDULES)]
        self.length = int(rng.choice([0, 1, 2, 5, 7, 8, 11, 13]))
        self.reverse = bool(rng.integers(2))
        self.init = [leaf(rng, kind) for kind in rng.choice(KINDS, size=rng.integers(1, 4))]
        self.xs = {
            "floats": jnp.asarray(rng.uniform(size=(self.length, 3)), jnp.float32) if rng.integers(2) else None,
            "tokens": jnp.asarray(rng.integers(0, 4, size=self.length)) if rng.integers(2) else None,
        }
        if rng.integers(4) == 0:
            self.xs = None  # type: ignore[assignment]
        self.rules = [str(rng.choice(["mix", "mix", "same", "from x", "stopped", "floor", "own"])) for _ in self.init]
        self.ys = [
            str(rng.choice(["carry", "new", "x", "twice", "none", "constant", "sum"])) for _ in range(rng.integers(4))
        ]
        self.weight = jnp.asarray(rng.uniform(0.3, 0.9, size=(3,)), jnp.float32)

    def step(self, weight: Any, carry: Any, x: Any) -> Any:
        row = real(x) if jax.tree.leaves(x) else jnp.ones(3)
        seen = real(carry)
        following = [self.change(rule, part, seen, row, weight) for rule, part in zip(self.rules, carry)]
        made = {
            "carry": carry[0],
            "new": following[-1],
            "x": x,
            "twice": (following[0], following[0]),
            "none": None,
            "constant": jnp.int32(3),
            "sum": jnp.sum(seen * weight),
        }
        return following, [made[y] for y in self.ys]

    def change(self, rule: str, part: Any, seen: Any, row: Any, weight: Any) -> Any:
        def one(x: Any) -> Any:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.random.fold_in(x, 1)
            if rule == "same":
                return x
            if x.dtype in (jnp.bool_, jnp.int32):
                return ~x if x.dtype == jnp.bool_ else x + 1
            size = x.shape[0]
            new = {
                "mix": lambda: jnp.tanh(seen * weight + row)[:size],
                "from x": lambda: row[:size] * 0.5,
                "stopped": lambda: lax.stop_gradient(seen)[:size] * weight[0],
                "floor": lambda: jnp.floor(seen * 3)[:size] * 0.2,
                "own": lambda: x * 0.4 + seen[:size] * 0.3,
            }[rule]()
            return (new * (0.9 + 0.1j) if jnp.iscomplexobj(x) else new).astype(x.dtype)

        return jax.tree.map(one, part)

    def results(self, run: Callable, moving: Any) -> Any:
        """Leaves of the last carry and of ys, as functions of a closed-over array, the initial floats and xs."""
        weight, init, xs = moving
        rest = iter(init)
        start = jax.tree.map(lambda x: next(rest) if is_moving(x) else x, self.init)
        rows = None if self.xs is None else {**self.xs, "floats": xs}
        return jax.tree.leaves(
            run(functools.partial(self.step, weight), start, rows, length=self.length, reverse=self.reverse)
        )

    @property
    def moving(self) -> Any:
        return (
            self.weight,
            [x for x in jax.tree.leaves(self.init) if is_moving(x)],
            None if self.xs is None else self.xs["floats"],
        )


def is_moving(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def plain(leaves: list[Any]) -> list[Any]:
    keys = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(keys(x)).astype(np.complex64) for x in leaves]


def with_tangents(fun: Callable, args: Any) -> list[bool]:
    """Which results of `fun(args)` have tangents."""
    found: list[bool] = []

    @jax.custom_jvp
    def look(out: Any) -> Any:
        return out

    def tangents(primals: Any, tangents: Any) -> Any:
        found[:] = [not isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents[0]]
        return primals[0], tangents[0]

    look.defjvp(tangents, symbolic_zeros=True)
    jax.make_jaxpr(lambda args: jax.jvp(lambda args: look(fun(args)), (args,), (args,)))(args)
    return found


def check(number: int) -> None:
    case = Random(number)

    def both(run: Callable) -> Any:
        def loss(moving: Any) -> Any:
            out = case.results(run, moving)
            return sum((real(x).sum() * (1 + i) for i, x in enumerate(out)), jnp.float32(0)), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=FAST)(case.moving)

    run = functools.partial(scan, **case.options)
    (value, out), grads = both(run)
    (expected, reference), gradients = both(lax.scan)
    assert [(x.shape, x.dtype) for x in out] == [(x.shape, x.dtype) for x in reference]
    for a, b in zip(plain(out), plain(reference)):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-2)
    np.testing.assert_allclose(value, expected, rtol=2e-2, atol=1e-2)
    assert_trees_close(
        *(jax.tree.map(lambda x: np.asarray(x, np.float32), g) for g in (grads, gradients)), rtol=5e-2, atol=2e-2
    )
    flags = [with_tangents(functools.partial(case.results, r), case.moving) for r in (run, lax.scan)]
    assert flags[0] == flags[1]


@pytest.mark.parametrize("number", range(42))
def test_a_random_scan_is_lax_scans(number: int) -> None:
    check(number)
