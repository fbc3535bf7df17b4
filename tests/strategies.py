"""Random programs: functions of a dict of arrays, of matmuls, elementwise operations, loops, branches, calls and nested
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from jaxckpt import tag

WIDTH = 4


@jax.custom_jvp
def _scaled(x):
    return jnp.sin(x) * 0.5


@_scaled.defjvp
def _scaled_jvp(primals, tangents):
    return _scaled(*primals), jnp.cos(primals[0]) * 0.5 * tangents[0]


@jax.custom_vjp
def _doubled(x):
    return jnp.tanh(x) * 2


_doubled.defvjp(lambda x: (_doubled(x), jnp.tanh(x)), lambda t, g: (2 * g * (1 - t * t),))

STEPS: dict[str, Callable[..., Any]] = {
    "matmul": lambda w, a, b: a @ w,
    "tanh": lambda w, a, b: jnp.tanh(a),
    "add": lambda w, a, b: a + b,
    "mul": lambda w, a, b: a * jnp.sin(b),
    "softmax": lambda w, a, b: jax.nn.softmax(a) + b,
    "norm": lambda w, a, b: (a - a.mean(-1, keepdims=True)) * lax.rsqrt(a.var(-1, keepdims=True) + 1e-3),
    "jit": lambda w, a, b: jax.jit(lambda x, y: jnp.cos(x @ w) * y)(a, b),
    "scan": lambda w, a, b: lax.scan(lambda c, y: (tag(jnp.tanh(c @ w), "in_loop") + y, None), a, jnp.stack([b, a, b]))[
        0
    ],
    "cond": lambda w, a, b: lax.cond(a[0, 0] > 0, lambda x, y: jnp.sin(x) @ w, lambda x, y: jnp.cos(y), a, b),
    "nested": lambda w, a, b: jax.checkpoint(lambda x, y: jnp.sin(tag(jnp.sin(x @ w), "in_nested")) * y)(a, b),
    "custom_jvp": lambda w, a, b: _scaled(a) + b,
    "custom_vjp": lambda w, a, b: _doubled(b) * a,
    "integer": lambda w, a, b: a * jnp.argsort(b, axis=-1).astype(a.dtype),
    "relu": lambda w, a, b: jax.nn.relu(a) + b,
}

Program = list[tuple[str, int, int, bool]]


def programs(max_size: int = 8) -> st.SearchStrategy[Program]:
    """Lists of (step, first operand, second operand, whether its result is tagged)."""
    place = st.integers(0, 100)
    return st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), place, place, st.booleans()), min_size=1, max_size=max_size
    )


def build(program: Program, outputs: int = 1) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function, of {"w": ..., "x": ...}, and its arguments; results are the sums of the last values."""

    def fun(params: dict[str, Any]) -> Any:
        values = [params["x"], params["x"] * 2.0]
        for i, (step, first, second, tagged) in enumerate(program):
            value = STEPS[step](params["w"], values[first % len(values)], values[second % len(values)])
            values.append(tag(value, f"step_{i}_{step}") if tagged else value)
        results = [jnp.sum(value * (i + 1)) for i, value in enumerate(values[-outputs:])]
        return results[0] if outputs == 1 else tuple(results)

    rng = np.random.default_rng(len(program))
    arrays = {
        "w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 2, jnp.float32),
        "x": jnp.asarray(rng.normal(size=(3, WIDTH)), jnp.float32),
    }
    return fun, (arrays,)
