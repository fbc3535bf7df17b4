"""checkpoint_sequential: a sequence of layers, checkpointed in segments."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt._errors import ArgumentError, InWords, JaxckptError, StructureError, check_flags, explains, refuse_call
from jaxckpt.core.argument_names import items
from jaxckpt.core.lift import is_model, result_of
from jaxckpt.core.units import as_int
from jaxckpt.policies import policy_of
from jaxckpt.transforms.checkpoint import checkpoint

logger = logging.getLogger("jaxckpt")

LayerFunction = Callable[[Any], Any]


@explains
def checkpoint_sequential(
    layers: Sequence[LayerFunction],
    *others: Any,
    segment_size: int | str = 2,
    policy: Any = None,
    checkpoint_last: bool = False,
) -> LayerFunction:
    """Returns one function that runs the layers one after the other, with a checkpoint around each segment of
    `segment_size` layers.

    Args:
      layers: functions x -> x of a pytree of arrays. With no layers, the result is the identity. Of modules of equinox
        or nnx, the result is a `jax.tree_util.Partial`, which may stand in their place in a model.
      *others: none. The argument of a call belongs to the function that is returned.
      segment_size: layers in a segment, at least 1; the last segment takes what is left. "sqrt": the square root of
        their number, rounded, which keeps the fewest values for one extra forward pass (Chen et al. 2016,
        arXiv:1604.06174).
      policy: for each segment, as of `checkpoint`.
      checkpoint_last: whether the last segment is checkpointed too. Its values are needed at once, when the backward
        pass begins, so recomputing them saves nothing.

    Raises:
      ArgumentError: `segment_size` is neither an int of at least 1 nor "sqrt", a layer is not a function,
        or `layers` is not all that is given by position.
      StructureError: at the call: a layer does not take what the one before it returned, and does take what came
        earlier. Other exceptions of a layer are not changed; a note names the layer.

    >>> import jax.numpy as jnp
    >>> f = checkpoint_sequential([jnp.sin] * 5, segment_size="sqrt")
    >>> float(f(0.0)), checkpoint_sequential([])("anything")
    (0.0, 'anything')
    """
    refuse_call(others, "layers", "checkpoint_sequential(layers, segment_size=...)(x)")
    given = items(layers)
    if given is None:
        raise ArgumentError("layers", "a sequence of functions x -> x", layers)
    check_flags(checkpoint_last=checkpoint_last)
    policy_of(policy)
    layers = given
    for i, layer in enumerate(layers):
        if not callable(layer):
            raise ArgumentError(f"layers[{i}]", "a function x -> x", layer)
    size = segment_length(segment_size, len(layers))
    if 1 < len(layers) <= size and not checkpoint_last:
        logger.warning(
            "checkpoint_sequential checkpoints nothing: its %d layers are one segment, and the last segment has no "
            "checkpoint. segment_size counts the layers of a segment: give a smaller one, or checkpoint_last=True.",
            len(layers),
        )
    if any(map(is_model, layers)):
        return jax.tree_util.Partial(_OfModels(size, policy, checkpoint_last), layers)
    return _sequential(layers, size, policy, checkpoint_last)


@dataclass(frozen=True)
class _OfModels:
    """Runs modules one after the other; equal for equal settings, for it is part of the structure of a model that they
    are put into.
    """

    size: int
    policy: Any
    checkpoint_last: bool

    def __call__(self, layers: Sequence[LayerFunction], x: Any) -> Any:
        return _sequential(layers, self.size, self.policy, self.checkpoint_last)(x)


def _sequential(layers: Sequence[LayerFunction], size: int, policy: Any, checkpoint_last: bool) -> LayerFunction:
    """Returns the layers' function; arguments as of `checkpoint_sequential`, checked."""
    segments = [range(start, min(start + size, len(layers))) for start in range(0, len(layers), size)]

    def run_segment(which: range) -> LayerFunction:
        def segment(x: Any) -> Any:
            for i in which:
                x = _call(layers[i], i, x)
            return x

        is_last = which.stop == len(layers)
        return segment if is_last and not checkpoint_last else checkpoint(segment, policy=policy)

    functions = [run_segment(which) for which in segments]

    def sequence(x: Any, *others: Any) -> Any:
        if others:
            hint = "Layers take one pytree, as (x, key), and return the next. Parameters are theirs: bind them first."
            raise ArgumentError("x", "the only argument: what the first layer takes", InWords("more"), hint)
        given = x
        try:
            for function in functions:
                x = function(x)
        except _MISFITS as error:
            misfit = _misfit(layers, given, error)
            if misfit is None:
                raise
            raise misfit from error
        return x

    return sequence


def segment_length(segment_size: int | str, count: int) -> int:
    """Returns layers in a segment: an int of at least 1 as it is, "sqrt" as the rounded square root of `count`.

    Raises:
      ArgumentError: it is neither.

    >>> segment_length("sqrt", 100), segment_length(3, 100)
    (10, 3)
    """
    if isinstance(segment_size, str) and segment_size == "sqrt":
        return max(1, round(math.sqrt(count)))
    if (size := as_int(segment_size)) is not None and size >= 1:
        return size
    raise ArgumentError("segment_size", 'an int of at least 1, or "sqrt"', segment_size)


def _call(layer: LayerFunction, i: int, x: Any) -> Any:
    try:
        return layer(x)
    except Exception as error:
        error.add_note(_note(layer, i, x))
        raise


def _note(layer: LayerFunction, i: int, x: Any) -> str:
    return f"layers[{i}] ({_name(layer)}) raised this. It was given {_described(x)}."


_MISFITS = (TypeError, ValueError, AttributeError, LookupError)
"""What a function may raise that is given another structure, or other shapes, than it takes."""


def _misfit(layers: Sequence[LayerFunction], x: Any, error: Exception) -> StructureError | None:
    """Returns the error of a layer that does not take what the one before it returned; None where the error is the
    layer's own.

    It is found by running the layers on shapes alone: the layer raises the error again, and does not where it is given
    what came before.

    Args:
      layers: of the sequence.
      x: what the sequence was called with.
      error: what a layer raised.
    """
    if isinstance(error, (JaxckptError, jax.errors.JAXTypeError, jax.errors.JAXIndexError)):
        return None
    given: list[Any] = [_shapes(x)]
    for i, layer in enumerate(layers):
        failed = _run(layer, given)
        if failed is None:
            continue
        again = type(failed) is type(error) and _note(layer, i, given[i]) in getattr(error, "__notes__", ())
        earlier = [j for j in range(i) if _run(layer, [given[j]]) is None] if again else []
        if not earlier:
            return None
        return StructureError(
            f"layers[{i}] ({_name(layer)}) must take what layers[{i - 1}] returned; that was "
            f"{_described(given[i])}, and it failed with "
            f"{type(error).__name__}: {error}. It does take {_described(given[earlier[-1]])}: let layers[{i - 1}] "
            f"return that."
        )
    return None


def _run(layer: LayerFunction, given: list[Any]) -> Exception | None:
    """Runs a layer on the last of `given`, which are shapes, and adds its result to them; returns what it raises."""
    try:
        given.append(_shapes(result_of(layer, (given[-1],))))
    except Exception as error:
        return error
    return None


def _shapes(x: Any) -> Any:
    is_array = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf, x)


def _described(x: Any) -> str:
    """Returns what to call an argument in a message: its structure, with types and shapes for arrays."""
    describe = lambda leaf: f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__
    return str(jax.tree.map(describe, x))


def _name(layer: LayerFunction) -> str:
    return str(getattr(layer, "__name__", type(layer).__name__))
