"""checkpoint_sequential: a sequence of layers, checkpointed in segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxckpt._errors import ArgumentError, StructureError
from jaxckpt.transforms.checkpoint import checkpoint

Layer = Callable[[Any], Any]


def checkpoint_sequential(
    layers: Sequence[Layer],
    *,
    segment_size: int | str = 2,
    policy: Any = None,
    checkpoint_last: bool = False,
) -> Layer:
    """Returns the layers one after the other as one function, each run of `segment_size` of them under a checkpoint.

    Args:
      layers: functions x -> x, of one pytree of arrays each. None of them: the result is the identity.
      segment_size: layers in a segment, at least 1; the last segment takes what is left. "sqrt": the square root of their number, rounded,
        which keeps the fewest values for one extra forward pass (Chen et al. 2016, arXiv:1604.06174).
      policy: for each segment, as of `checkpoint`.
      checkpoint_last: whether the last segment is checkpointed too. Its values are needed at once, when the backward pass begins, so
        recomputing them saves nothing.

    Raises:
      ArgumentError: `segment_size` is no int of at least 1 and not "sqrt", or a layer is no function.
      StructureError: at the call: a layer could not take what the one before it returned.

    >>> import jax.numpy as jnp
    >>> f = checkpoint_sequential([jnp.sin] * 5, segment_size="sqrt")
    >>> float(f(0.0)), checkpoint_sequential([])("anything")
    (0.0, 'anything')
    """
    if not isinstance(layers, Iterable):
        raise ArgumentError("layers", "a sequence of functions x -> x", layers)
    layers = tuple(layers)
    for i, layer in enumerate(layers):
        if not callable(layer):
            raise ArgumentError(f"layers[{i}]", "a function x -> x", layer)
    size = segment_length(segment_size, len(layers))
    segments = [range(start, min(start + size, len(layers))) for start in range(0, len(layers), size)]

    def run_segment(which: range) -> Layer:
        def segment(x: Any) -> Any:
            for i in which:
                x = _call(layers[i], i, x)
            return x

        is_last = which.stop == len(layers)
        return segment if is_last and not checkpoint_last else checkpoint(segment, policy=policy)

    functions = [run_segment(which) for which in segments]

    def sequence(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    return sequence


def segment_length(segment_size: int | str, count: int) -> int:
    """Returns layers in a segment: an int of at least 1 as it is, "sqrt" as the rounded square root of `count`.

    Raises:
      ArgumentError: it is neither.

    >>> segment_length("sqrt", 100), segment_length(3, 100)
    (10, 3)
    """
    if segment_size == "sqrt":
        return max(1, round(math.sqrt(count)))
    if isinstance(segment_size, int) and not isinstance(segment_size, bool) and segment_size >= 1:
        return segment_size
    raise ArgumentError("segment_size", 'an int of at least 1, or "sqrt"', segment_size)


def _call(layer: Layer, i: int, x: Any) -> Any:
    """Calls layer i; an error about what it was handed says which layers did not fit."""
    try:
        return layer(x)
    except (TypeError, ValueError) as error:
        if i == 0 or isinstance(error, StructureError):
            raise
        shapes = jax.tree.map(
            lambda leaf: f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__, x
        )
        name = getattr(layer, "__name__", type(layer).__name__)
        raise StructureError(
            f"layers[{i}] ({name}) must take what layers[{i - 1}] returned; that was {shapes}, and it failed with "
            f"{type(error).__name__}: {error}. Layers take and return one pytree of one structure."
        ) from error
