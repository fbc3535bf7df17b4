"""Rules for the FLOPs of one execution of an operation, and for how often it runs the programs that it holds: which
primitive has which stands in `jaxckpt.core.primitives`.

A multiply-add counts as two operations, a transcendental function as one per element, moving or reshaping data as none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Avals = list[Any]
Params = Mapping[str, Any]
FlopsRule = Callable[[Avals, Avals, Params], int]
"""Abstract values of operands and results, and the equation's parameters -> FLOPs."""
RunsRule = Callable[[Params], float]
"""The equation's parameters -> how often one execution of the operation runs each of its programs; a mean may be no
int."""


def size(aval: Any) -> int:
    """Returns the number of elements of an abstract value; of none for tokens and the like."""
    return math.prod(getattr(aval, "shape", ()))


def free(inputs: Avals, outputs: Avals, params: Params) -> int:
    """Of what computes nothing."""
    return 0


def each_output(inputs: Avals, outputs: Avals, params: Params) -> int:
    """One for each element of the results."""
    return sum(size(out) for out in outputs)


def each_input(inputs: Avals, outputs: Avals, params: Params) -> int:
    """One for each element of the first operand."""
    return size(inputs[0])


def reduction(inputs: Avals, outputs: Avals, params: Params) -> int:
    """One for each element of the first operand; none where there is nothing to reduce, as over axes of one element."""
    given, made = size(inputs[0]), size(outputs[0])
    return 0 if given == made else given


def dot_general(inputs: Avals, outputs: Avals, params: Params) -> int:
    """Of a matmul, its batch and contracted dimensions named."""
    (contracted, _), _ = params["dimension_numbers"]
    return 2 * size(outputs[0]) * math.prod(inputs[0].shape[axis] for axis in contracted)


def scaled_matmul(inputs: Avals, outputs: Avals, params: Params) -> int:
    """Of cuDNN's block-scaled matmul, which names no dimensions: operands are (batch, rows, k) and (batch, columns,
    k).
    """
    if "dimension_numbers" in params:
        return dot_general(inputs, outputs, params)
    return 2 * size(outputs[0]) * int(inputs[0].shape[-1])


def ragged_dot(inputs: Avals, outputs: Avals, params: Params) -> int:
    """Of a matmul of rows with the matrices of their groups."""
    # Every row of the left operand meets one group's matrix.
    dims = params.get("ragged_dot_dimension_numbers")
    (contracted, _), _ = dims.dot_dimension_numbers if dims is not None else (((inputs[0].ndim - 1,), ()), ((), ()))
    rows_times_k = size(inputs[0])
    k = math.prod(inputs[0].shape[axis] for axis in contracted)
    return 2 * rows_times_k * max(size(outputs[0]) // max(rows_times_k // max(k, 1), 1), 1)


def conv(inputs: Avals, outputs: Avals, params: Params) -> int:
    """Of a convolution."""
    # Each output element is a sum over the kernel's spatial extent and its input channels. The kernel's channel axis is
    # already divided by feature_group_count; a grouped batch (as in a kernel's gradient) sums over its share of the
    # batch alone.
    kernel = inputs[1].shape
    spec = params["dimension_numbers"].rhs_spec
    return 2 * size(outputs[0]) * math.prod(kernel[axis] for axis in spec[1:])


def sort(inputs: Avals, outputs: Avals, params: Params) -> int:
    """One comparison for each element and level of a merge."""
    length = inputs[0].shape[params.get("dimension", -1)]
    return size(inputs[0]) * math.ceil(math.log2(length)) if length > 1 else 0


def top_k(inputs: Avals, outputs: Avals, params: Params) -> int:
    """Of the largest k of a row."""
    return size(inputs[0]) * max(math.ceil(math.log2(params["k"] + 1)), 1)


def fft(inputs: Avals, outputs: Avals, params: Params) -> int:
    """Of a fast Fourier transform."""
    points = math.prod(params["fft_lengths"])
    return round(5 * size(outputs[0]) * math.log2(points)) if points > 1 else 0


def window(inputs: Avals, outputs: Avals, params: Params) -> int:
    """One for each element of every window."""
    return size(outputs[0]) * math.prod(params["window_dimensions"])


def window_scatter(inputs: Avals, outputs: Avals, params: Params) -> int:
    """One for each element of the window of every element."""
    return size(inputs[0]) * math.prod(params["window_dimensions"])


def scatter(inputs: Avals, outputs: Avals, params: Params) -> int:
    """One for each element of the updates."""
    return size(inputs[2])


def cubic(factor: float) -> FlopsRule:
    """Returns the rule of a factorisation: so many times rows times columns times the lesser of both."""

    def rule(inputs: Avals, outputs: Avals, params: Params) -> int:
        *batch, rows, columns = inputs[0].shape
        return round(factor * math.prod(batch) * rows * columns * min(rows, columns))

    return rule


def triangular_solve(inputs: Avals, outputs: Avals, params: Params) -> int:
    """Of a triangular system for each right-hand side."""
    return size(inputs[1]) * int(inputs[0].shape[-1])


def integer_pow(inputs: Avals, outputs: Avals, params: Params) -> int:
    """Of repeated squaring."""
    return size(outputs[0]) * max(abs(params["y"]).bit_length() + abs(params["y"]).bit_count() - 2, 1)


def threefry(inputs: Avals, outputs: Avals, params: Params) -> int:
    """Of random bits."""
    # 20 rounds of add, rotate (two shifts and an or) and xor on each of the two words.
    return 100 * sum(size(out) for out in outputs)


# ------------------------------------------------------------------------------------------- how often its programs run


def once(params: Params) -> int:
    """Of a call, and where nobody knows."""
    return 1


def each_iteration(params: Params) -> int:
    """Of a scan."""
    return int(params["length"])


def each_block(params: Params) -> int:
    """Of a kernel that runs for each block of a grid; extents that are known only when it runs count as 1."""
    return math.prod(extent for extent in params["grid_mapping"].grid if isinstance(extent, int))
