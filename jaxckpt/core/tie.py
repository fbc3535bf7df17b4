"""A barrier for tangents; transposed, it is one for cotangents. It leaves out those that are not needed.

`jax.lax.optimization_barrier` on tangents keeps all of them, and transposed makes zeros of the cotangents that are
missing. Those run through the whole backward pass before them: work for nothing, and NaN where a derivative is
infinite. A value that later stretches read only for what nobody differentiates, such as a metric carried along, has no
cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxckpt import _compat

KEY_BYTES = 16
"""Bytes of the largest random key of JAX, that of rbg."""
KEYS = 1024
"""Random keys of a function's layers, at most. Judged by no model: 16 KiB behind a barrier cost nothing."""

_tie = _compat.Primitive("jaxckpt_tie")
_tie.multiple_results = True


def tie(*tangents: Any) -> list[Any]:
    """Returns the tangents as they are. In reverse mode, their cotangents are passed on only when all of them have been
    computed.
    """
    return _tie.bind(*tangents)  # type: ignore[no-any-return]


def _held(*values: Any) -> list[Any]:
    return list(jax.lax.optimization_barrier(list(values)))


def _jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    moving = [tangent for tangent in tangents if not isinstance(tangent, _compat.Zero)]
    held = iter(_tie.bind(*moving) if moving else ())
    out = [tangent if isinstance(tangent, _compat.Zero) else next(held) for tangent in tangents]
    return _tie.bind(*primals), out


def _transpose(cotangents: Any, *operands: Any) -> list[Any]:
    # What nobody needs is gone by now. Zeros that are left are made: up to jax 0.12 scans cannot be transposed for
    # stacked ones.
    made = list(map(_compat.instantiate_zeros, cotangents))
    # Within `jax.shard_map` JAX's barrier makes its values vary over the axes of all.
    return _held(*made) if len(_alike(dict(enumerate(made)))) < 2 else tie(*made)


def _drop_unused(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    if not any(used):
        return list(used), None
    pick = lambda values: [value for value, flag in zip(values, used) if flag]
    return list(used), eqn.replace(invars=pick(eqn.invars), outvars=pick(eqn.outvars))


_tie.def_impl(_held)
_tie.def_abstract_eval(lambda *avals: list(avals))
_compat.register_lowering(_tie, _compat.lower_fun(_held, multiple_results=True))
_compat.batching_rules[_tie] = lambda args, axes: (_tie.bind(*args), axes)
_compat.jvp_rules[_tie] = _jvp
_compat.transpose_rules[_tie] = _transpose
_compat.drop_unused(_tie, _drop_unused)


def tied(fun: Callable[..., list[Any]], parts: Collection[int]) -> Callable[..., list[Any]]:
    """Returns the function with its inputs behind one barrier. Transposed, that holds their cotangents: none goes on
    before all are there. Of `parts` the cotangents alone are held: behind a barrier a view is a copy.

    Random keys, and what is as small, wait for the other inputs: else XLA for the CPU draws the numbers of all
    stretches first.
    """

    def call(*inputs: Any) -> list[Any]:
        held: dict[int, Any] = {}
        moving = {place: x for place, x in enumerate(inputs) if jax.dtypes.issubdtype(jax.typeof(x).dtype, np.inexact)}
        small = {place: x for place, x in enumerate(inputs) if place not in moving and _is_small(x)}
        for places in _alike({**moving, **small}):
            if not any(place in moving for place in places):
                small = {place: x for place, x in small.items() if place not in places}
        shown = [place for place in moving if place in parts]
        whole = [place for place in sorted({**moving, **small}) if place not in shown]
        held.update(zip([*whole, *shown], _hold([inputs[i] for i in whole], [inputs[i] for i in shown])))
        return fun(*(held.get(place, x) for place, x in enumerate(inputs)))

    return call


def _is_small(x: Any) -> bool:
    """Whether a value is no larger than the random keys of all layers may be."""
    aval = jax.typeof(x)
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return aval.size <= KEYS  # type: ignore[no-any-return]
    return aval.size * aval.dtype.itemsize <= KEYS * KEY_BYTES  # type: ignore[no-any-return]


def tied_tangents(tangents: Sequence[Any]) -> list[Any]:
    """Returns tangents whose cotangents are passed on only when all of them are there."""
    return tie(*tangents) if tangents else []


def _alike(arrays: Mapping[int, Any]) -> Collection[list[int]]:
    """Returns the places of arrays that can share a barrier of JAX's: within `jax.shard_map` those that vary over the
    same axes, since it makes its values vary over the axes of all.
    """
    found: dict[Any, list[int]] = {}
    for place, x in arrays.items():
        found.setdefault(_compat.varying_axes(jax.typeof(x)), []).append(place)
    return found.values()


def together(values: Sequence[Any]) -> list[Any]:
    """Returns values behind one barrier for each kind of `_alike`: none is read before all of its kind are there."""
    held: dict[int, Any] = {}
    for places in _alike(dict(enumerate(values))):
        held.update(zip(places, jax.lax.optimization_barrier([values[place] for place in places])))
    return [held[place] for place in range(len(values))]


@jax.custom_jvp
def _hold(values: list[Any], shown: list[Any]) -> list[Any]:
    """Returns values behind a barrier, as `together` does, and those that are shown as they are. The tangents of all
    are behind one.
    """
    return [*together(values), *shown]


def _hold_tangents(primals: Any, tangents: Any) -> Any:
    # The barrier's own rule makes a tangent of zeros of a missing one, so that what is not differentiated would get a
    # cotangent: that of frozen parameters, of a mask, of the images under the first convolution.
    zero = jax.custom_derivatives.SymbolicZero
    given = [*tangents[0], *tangents[1]]
    moving = [tangent for tangent in given if not isinstance(tangent, zero)]
    held = iter(tie(*moving) if moving else ())
    return _hold(*primals), [tangent if isinstance(tangent, zero) else next(held) for tangent in given]


_hold.defjvp(_hold_tangents, symbolic_zeros=True)
