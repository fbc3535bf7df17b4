"""FLOPs of each operation: by hand for each rule of the table, and as XLA counts them where it has a count of the same
thing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxckpt import compiler_options
from jaxckpt.core import flops as rules
from jaxckpt.core.graph import trace
from jaxckpt.core.lift import count_flops
from jaxckpt.core.primitives import TABLE

F = jnp.float32


def shape(*sizes: int, dtype: Any = F) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def conv(stride: int = 1, padding: Any = "VALID", **options: Any) -> Callable[..., Any]:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, k: lax.conv_general_dilated(x, k, (stride, stride), padding, dimension_numbers=numbers, **options)


def window(reduce: Any, start: float = 0.0) -> Callable[..., Any]:
    return lambda x: lax.reduce_window(x, start, reduce, (1, 2, 2), (1, 2, 2), "VALID")


def scattered(update: str) -> Callable[..., Any]:
    return lambda x, i, u: getattr(x.at[i], update)(u)


IMAGE, KERNEL = shape(2, 9, 9, 3), shape(3, 3, 3, 5)
ROWS = shape(4, dtype=jnp.int32)
SCATTER = shape(10, 6), ROWS, shape(4, 6)
KEY = jax.eval_shape(lambda: jax.random.key(0))

# primitive -> function, arguments, FLOPs of the operation by hand
BY_HAND: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "dot_general": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (shape(5, 2, 3), shape(5, 3, 4)), 5 * 2 * 2 * 3 * 4),
    "ragged_dot_general": (lax.ragged_dot, (shape(6, 3), shape(2, 3, 4), shape(2, dtype=jnp.int32)), 2 * 6 * 3 * 4),
    "conv_general_dilated": (conv(), (IMAGE, KERNEL), 2 * (2 * 7 * 7 * 5) * (3 * 3 * 3)),
    "reduce_sum": (lambda x: jnp.sum(x, 1), (shape(4, 6),), 24),
    "reduce_max": (lambda x: jnp.max(x, 0), (shape(4, 6),), 24),
    "reduce_min": (jnp.min, (shape(4, 6),), 24),
    "reduce_prod": (jnp.prod, (shape(4, 6),), 24),
    "reduce_and": (jnp.all, (shape(4, 6, dtype=jnp.bool_),), 24),
    "reduce_or": (jnp.any, (shape(4, 6, dtype=jnp.bool_),), 24),
    "reduce_xor": (lambda x: lax.reduce_xor(x, (0, 1)), (shape(4, 6, dtype=jnp.int32),), 24),
    "reduce": (lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (1,)), (shape(4, 6),), 24),
    "argmax": (lambda x: jnp.argmax(x, 1), (shape(4, 6),), 24),
    "argmin": (lambda x: jnp.argmin(x, 1), (shape(4, 6),), 24),
    "cumsum": (lambda x: jnp.cumsum(x, 1), (shape(4, 6),), 24),
    "cumprod": (lambda x: jnp.cumprod(x, 1), (shape(4, 6),), 24),
    "cummax": (lambda x: lax.cummax(x, 1), (shape(4, 6),), 24),
    "cummin": (lambda x: lax.cummin(x, 1), (shape(4, 6),), 24),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), (shape(4, 6),), 24),
    "reduce_window_sum": (window(lax.add), (shape(3, 8, 8),), (3 * 4 * 4) * 4),
    "reduce_window_max": (window(lax.max, -math.inf), (shape(3, 8, 8),), (3 * 4 * 4) * 4),
    "reduce_window_min": (window(lax.min, math.inf), (shape(3, 8, 8),), (3 * 4 * 4) * 4),
    "reduce_window": (window(lambda a, b: a + 2 * b), (shape(3, 8, 8),), (3 * 4 * 4) * 4),
    "select_and_scatter_add": (jax.grad(lambda x: jnp.sum(window(lax.max, -math.inf)(x))), (shape(3, 8, 8),), 48 * 4),
    "scatter": (scattered("set"), SCATTER, 24),
    "scatter-add": (scattered("add"), SCATTER, 24),
    "scatter-mul": (scattered("multiply"), SCATTER, 24),
    "scatter-min": (scattered("min"), SCATTER, 24),
    "scatter-max": (scattered("max"), SCATTER, 24),
    "sort": (lambda x: jnp.sort(x, 1), (shape(4, 16),), 4 * 16 * 4),
    "top_k": (lambda x: lax.top_k(x, 3), (shape(4, 16),), 4 * 16 * 2),
    "fft": (lambda x: jnp.fft.fft(x), (shape(4, 16, dtype=jnp.complex64),), 5 * 4 * 16 * 4),
    "integer_pow": (lambda x: x**7, (shape(4, 6),), 24 * 4),  # x², x³ = x² x, x⁶, x⁷
    "cholesky": (lax.linalg.cholesky, (shape(2, 6, 6),), 2 * 6**3 // 3),
    "lu": (lax.linalg.lu, (shape(6, 6),), 2 * 6**3 // 3),
    "eigh": (lax.linalg.eigh, (shape(6, 6),), 9 * 6**3),
    "eig": (lax.linalg.eig, (shape(6, 6),), 25 * 6**3),
    "svd": (lax.linalg.svd, (shape(8, 6),), 20 * 8 * 6 * 6),
    "householder_product": (lax.linalg.householder_product, (shape(8, 6), shape(6)), round(4 / 3 * 8 * 6 * 6)),
    "triangular_solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), (shape(6, 6), shape(6, 3)), 6 * 6 * 3),
    "random_bits": (lambda key: jax.random.bits(key, (8,)), (KEY,), 100 * 8),
    # without a rule: one for each element that comes out
    "tanh": (jnp.tanh, (shape(4, 6),), 24),
    "mul": (lambda x, y: x * y, (shape(4, 6), shape(4, 6)), 24),
    "select_n": (lambda c, x, y: lax.select(c, x, y), (shape(4, dtype=jnp.bool_), shape(4), shape(4)), 4),
}  # fmt: skip
UNSEEN = {
    "scaled_matmul_wrapper": "is of cuDNN",
    "scatter-sub": "comes from no function of every version",
    "select_and_scatter": "has no function in jax.lax",
    "select_and_gather_add": "comes from the forward mode of a window alone",
    "qr": "is written out as geqrf and householder_product",
    "geqrf": "has a private function alone",
    "threefry2x32": "is what random_bits becomes when it is lowered",
    "random_fold_in": "is counted as random_bits",
    "random_split": "is counted as random_bits",
}


@pytest.mark.parametrize("primitive", BY_HAND)
def test_an_operation_counts_what_it_does_by_hand(primitive: str) -> None:
    fun, args, expected = BY_HAND[primitive]
    found = [op.flops for op in trace(fun, *args).walk() if op.primitive == primitive]
    assert found == [expected]


def test_each_rule_of_the_table_is_counted_by_hand() -> None:
    ruled = {name for name, row in TABLE.items() if row.flops not in (rules.free, rules.each_output)}
    assert ruled - set(UNSEEN) <= set(BY_HAND)
    assert not set(UNSEEN) & set(BY_HAND)


def test_what_only_moves_or_renames_counts_nothing() -> None:
    def moved(x: Any) -> Any:
        x = jnp.concatenate([x.T.reshape(4, 6), lax.rev(x, (0,))], axis=0)
        x = jnp.pad(x[1:, None], ((0, 1), (0, 0), (2, 0))).squeeze(1)
        return lax.dynamic_update_slice(x, lax.dynamic_slice(x, (0, 0), (2, 2)), (1, 1)).astype(jnp.bfloat16)

    graph = trace(moved, shape(4, 6))
    assert {"reshape", "transpose", "concatenate", "pad", "dynamic_slice"} <= {op.primitive for op in graph.walk()}
    assert [op.primitive for op in graph.walk() if op.flops and math.prod(graph.values[op.outputs[0]].shape) > 1] == []


# ---------------------------------------------------------------------------------------------------------- against XLA


def counted_by_xla(fun: Callable[..., Any], *args: Any) -> float:
    """FLOPs and transcendental functions of the compiled program."""
    costs = jax.jit(fun).lower(*args).compile().cost_analysis()
    return sum(max(costs.get(name, 0.0), 0.0) for name in ("flops", "transcendentals"))


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (lambda a, b: a @ b, (shape(32, 48), shape(48, 16))),
        (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (shape(4, 16, 8), shape(4, 24, 8))),
        (conv(), (IMAGE, KERNEL)),
        (conv(stride=2), (IMAGE, KERNEL)),
        (conv(feature_group_count=3), (IMAGE, shape(3, 3, 1, 6))),
        (lambda x: jnp.sum(x, 1), (shape(32, 64),)),
        (lambda x: jnp.max(x, 0), (shape(32, 64),)),
        (lambda x, y: x * y + x, (shape(32, 64), shape(32, 64))),
        (lambda x: jnp.tanh(jnp.exp(x)), (shape(32, 64),)),
        (jax.grad(lambda a, b: jnp.sum(jnp.sin(a @ b)), argnums=(0, 1)), (shape(32, 48), shape(48, 16))),
    ],
    ids=["matmul", "batched", "conv", "strided", "grouped", "sum", "max", "elementwise", "transcendental", "gradient"],
)  # fmt: skip
def test_xla_counts_the_same(fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # A sum of n takes n - 1 additions; XLA counts those.
    assert count_flops(fun, *args) == pytest.approx(counted_by_xla(fun, *args), rel=0.04)


def test_a_checkpoint_counts_the_matmuls_that_it_runs_again_as_xla_does() -> None:
    def loss(w: Any, x: Any) -> Any:
        for _ in range(3):
            x = jnp.sin(x @ w)
        return jnp.sum(x)

    args = shape(64, 64), shape(128, 64)
    steps = [jax.value_and_grad(f) for f in (loss, jax.checkpoint(loss))]
    ours = [count_flops(step, *args) for step in steps]
    compiled = [
        jax.jit(step, compiler_options=compiler_options("cpu") or None).lower(*args).compile() for step in steps
    ]
    xlas = [program.cost_analysis()["flops"] for program in compiled]
    matmul = 2 * 128 * 64 * 64
    assert ours[1] - ours[0] == pytest.approx(3 * matmul, rel=0.1)
    assert ours[1] - ours[0] == pytest.approx(xlas[1] - xlas[0], rel=0.1)
