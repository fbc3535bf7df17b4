"""Steps that gather rows of a table: what is scattered into a gradient in place is nobody else's."""

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import Slots
from tests.helpers import assert_trees_close, executions

ROWS, WIDTH, STEPS = 7, 3, 12
KEY = jax.random.key(0)
E, F = (jax.random.normal(jax.random.fold_in(KEY, i), (ROWS, WIDTH)) for i in range(2))
SQUARE = jax.random.normal(jax.random.fold_in(KEY, 2), (WIDTH, WIDTH))
B = jnp.arange(1.0, WIDTH + 1) / 5
IDS = jax.random.randint(jax.random.fold_in(KEY, 3), (STEPS, 2), 0, WIDTH)

TABLES = {
    "a constant": lambda e, f, s, b, c: e,
    "a constant and a bias": lambda e, f, s, b, c: e + b,
    "two constants": lambda e, f, s, b, c: e + 2 * f,
    "a constant and the carry": lambda e, f, s, b, c: e + c,
    "a constant and its transpose": lambda e, f, s, b, c: s + s.T,
    "a changed row": lambda e, f, s, b, c: e.at[1].mul(b),
    "a product": lambda e, f, s, b, c: e * b * c,
    "a function": lambda e, f, s, b, c: jnp.tanh(e),
    "a choice": lambda e, f, s, b, c: jnp.where(f > 0, e, f),
    "rows of both": lambda e, f, s, b, c: jnp.concatenate([e, f]),
    "a matmul": lambda e, f, s, b, c: e @ s,
}


def loss(params, scan, table, twice):
    def step(c, ids):
        rows = table(*params, c)
        got = rows[ids].sum(0)
        if twice:
            got = got + params[0][ids[::-1]].sum(0) * rows[ids[0]]
        return jnp.sin(c + got), got

    c, ys = scan(step, jnp.ones(WIDTH), IDS)
    return jnp.sum(c * params[3]) + jnp.sum(ys**2)


@pytest.mark.parametrize(("slots", "reverse", "twice"), [(3, False, False), (12, True, True)])
@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_gathered_tables(name, twice, slots, reverse):
    params = E, F, SQUARE, B
    ours = lambda *args: jaxckpt.scan(*args, reverse=reverse, schedule=Slots(slots))
    theirs = lambda *args: jax.lax.scan(*args, reverse=reverse)
    actual, expected = (
        jax.jit(jax.grad(loss), static_argnums=(1, 2, 3))(params, scan, TABLES[name], twice) for scan in (ours, theirs)
    )
    assert_trees_close(actual, expected, rtol=2e-5, atol=1e-5)


def test_rows_of_a_constant_are_scattered_into_the_sum_itself():
    """So no step adds a table of zeros but a few rows."""
    wide = jnp.ones((1000, WIDTH))

    def gathered(table, scan):
        return jnp.sum(scan(lambda c, ids: (jnp.sin(c + table[ids].sum(0)), None), jnp.ones(WIDTH), IDS)[0])

    def adds(f):
        step = jax.make_jaxpr(jax.grad(lambda t: gathered(f(t), lambda *a: jaxckpt.scan(*a, schedule=Slots(3)))))(wide)
        return str(step).count("add 1000") + sum(
            line.split(" = ")[-1].startswith(("add ", "add_any ")) and "f32[1000,3]" in line
            for line in str(step).splitlines()
        )

    assert executions(jax.grad(lambda t: gathered(t, jax.lax.scan)), wide)["scatter-add"] == STEPS
    assert adds(lambda t: t) == 0


@pytest.mark.once
def test_a_constant_that_a_step_uses_a_thousand_times():
    """Held against the formula: XLA takes minutes for lax.scan's derivative, which adds a thousand scatters."""
    uses, length = 1100, 3

    def run(w):
        def step(c, x):
            for _ in range(uses):
                c = c * w[0]
            return c, None

        return jnp.sum(jaxckpt.scan(step, jnp.ones(4), jnp.zeros(length), schedule=Slots(2))[0])

    w = jnp.full((2, 4), 0.9999)
    row = uses * length * w[0] ** (uses * length - 1)
    assert_trees_close(jax.jit(jax.grad(run))(w), jnp.stack([row, jnp.zeros(4)]), rtol=1e-3)
