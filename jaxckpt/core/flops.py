"""FLOPs of an operation, by primitive: one table.

A multiply-add counts as two operations, a transcendental function as one per element, moving or reshaping data as none. What is not in
the table counts as one operation per output element, the documented default; what holds other jaxprs (loops, branches, calls) is added up
from them by `jaxckpt.core.graph`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Avals = list[Any]
Rule = Callable[[Avals, Avals, dict[str, Any]], int]


def size(aval: Any) -> int:
    """Returns the number of elements of an abstract value; of none for tokens and the like."""
    return math.prod(getattr(aval, "shape", ()))


def _free(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    return 0


def _each_output(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    return sum(size(out) for out in outputs)


def _each_input(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    return size(inputs[0])


def _dot_general(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    (contracted, _), _ = params["dimension_numbers"]
    return 2 * size(outputs[0]) * math.prod(inputs[0].shape[axis] for axis in contracted)


def _ragged_dot(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    # Every row of the left operand meets one group's matrix.
    dims = params.get("ragged_dot_dimension_numbers")
    (contracted, _), _ = dims.dot_dimension_numbers if dims is not None else (((inputs[0].ndim - 1,), ()), ((), ()))
    rows_times_k = size(inputs[0])
    k = math.prod(inputs[0].shape[axis] for axis in contracted)
    return 2 * rows_times_k * max(size(outputs[0]) // max(rows_times_k // max(k, 1), 1), 1)


def _conv(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    # Each output element is a sum over the kernel's spatial extent and its input channels. The kernel's channel axis is already
    # divided by feature_group_count; a grouped batch (as in a kernel's gradient) sums over its share of the batch alone.
    kernel = inputs[1].shape
    spec = params["dimension_numbers"].rhs_spec
    return 2 * size(outputs[0]) * math.prod(kernel[axis] for axis in spec[1:])


def _sort(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    length = inputs[0].shape[params.get("dimension", -1)]
    return size(inputs[0]) * math.ceil(math.log2(length)) if length > 1 else 0


def _top_k(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    return size(inputs[0]) * max(math.ceil(math.log2(params["k"] + 1)), 1)


def _fft(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    points = math.prod(params["fft_lengths"])
    return round(5 * size(outputs[0]) * math.log2(points)) if points > 1 else 0


def _cumulative(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    return size(inputs[0])


def _window(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    return size(outputs[0]) * math.prod(params["window_dimensions"])


def _window_scatter(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    return size(inputs[0]) * math.prod(params["window_dimensions"])


def _scatter(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    return size(inputs[2])


def _cubic(factor: float) -> Rule:
    def rule(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
        *batch, rows, columns = inputs[0].shape
        return round(factor * math.prod(batch) * rows * columns * min(rows, columns))

    return rule


def _triangular_solve(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    return size(inputs[1]) * int(inputs[0].shape[-1])


def _integer_pow(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    return size(outputs[0]) * max(abs(params["y"]).bit_length() + abs(params["y"]).bit_count() - 2, 1)


def _threefry(inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    # 20 rounds of add, rotate (two shifts and an or) and xor on each of the two words.
    return 100 * sum(size(out) for out in outputs)


_MOVES = """
    broadcast_in_dim reshape transpose squeeze expand_dims concatenate pad slice dynamic_slice dynamic_update_slice gather rev copy copy_p
    convert_element_type bitcast_convert_type iota name stop_gradient optimization_barrier sharding_constraint device_put split tile
    reduce_precision real imag random_wrap random_unwrap random_seed pvary pbroadcast mesh_cast reshard layout_constraint
    broadcast zeros_like symbolic_zeros empty full create_token after_all
""".split()  # noqa: SIM905

FLOPS: dict[str, Rule] = {
    **dict.fromkeys(_MOVES, _free),
    **dict.fromkeys(
        (
            "reduce_sum",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_and",
            "reduce_or",
            "reduce_xor",
            "reduce",
            "argmax",
            "argmin",
        ),
        _each_input,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _cumulative),
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    **dict.fromkeys(("select_and_scatter", "select_and_scatter_add", "select_and_gather_add"), _window_scatter),
    **dict.fromkeys(
        ("scatter", "scatter_add", "scatter-add", "scatter_mul", "scatter_min", "scatter_max", "scatter_sub"), _scatter
    ),
    "dot_general": _dot_general,
    "scaled_matmul_wrapper": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    "sort": _sort,
    "top_k": _top_k,
    "fft": _fft,
    "integer_pow": _integer_pow,
    "cholesky": _cubic(1 / 3),
    "lu": _cubic(2 / 3),
    "qr": _cubic(2),
    "geqrf": _cubic(4 / 3),
    "householder_product": _cubic(4 / 3),
    "eigh": _cubic(9),
    "eig": _cubic(25),
    "svd": _cubic(20),
    "triangular_solve": _triangular_solve,
    "threefry2x32": _threefry,
    "random_bits": _threefry,
    "random_fold_in": _threefry,
    "random_split": _threefry,
}


def flops(primitive: str, inputs: Avals, outputs: Avals, params: dict[str, Any]) -> int:
    """Returns the FLOPs of one execution of an operation that holds no other jaxprs.

    Args:
      primitive: the name of JAX's primitive.
      inputs, outputs: abstract values of the operands and results.
      params: the equation's parameters.
    """
    rule = FLOPS.get(primitive, _each_output)
    if rule is _dot_general and "dimension_numbers" not in params:
        # cuDNN's block-scaled matmul names no dimensions: operands are (batch, rows, k) and (batch, columns, k).
        return 2 * size(outputs[0]) * int(inputs[0].shape[-1])
    return rule(inputs, outputs, params)
