"""Results that are batched alike, whichever program computes them.

A `jax.custom_vjp` under `jax.jit`, `jax.checkpoint` or a policy is batched before it is differentiated: JAX then takes
the batch axes of the plain function's results for those of the forward rule's (jax 0.10 to 0.12.0.1). Where the two
programs put them in different places gradients are wrong, without an error if the sizes happen to be equal. So the
results of both go through `batched_alike`: each is batched along its first axis as soon as any operand is that it
depends on.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxckpt import _compat
from jaxckpt.core.scans import ScanBody, Values

_alike = _compat.Primitive("jaxckpt_batched_alike")
_alike.multiple_results = True


def batched_alike(results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Returns the results as they are. Batched, each has the batch as its first axis if anything here is batched."""
    if not results:
        return []
    return _alike.bind(*results, *operands, count=len(results))  # type: ignore[no-any-return]


def results_alike(body: ScanBody, results: Values, operands: Values) -> Values:
    """Returns the results of a scan, carries and ys, each batched alike with the operands that it depends on."""
    groups: dict[int, list[int]] = {}
    for place, mask in enumerate(_dependencies(body)):
        groups.setdefault(mask, []).append(place)
    out = list(results)
    for mask, places in groups.items():
        read = [operand for i, operand in enumerate(operands) if mask >> i & 1]
        for place, value in zip(places, batched_alike([results[i] for i in places], read)):
            out[place] = value
    return out


def _mask(known: dict[Any, int], atom: Any) -> int:
    return known.get(atom, 0) if isinstance(atom, _compat.Var) else 0


def _dependencies(body: ScanBody) -> list[int]:
    """Returns for each carry and y of a scan the operands that it depends on, as the bits of a number."""
    jaxpr, first, last = body.jaxpr, body.consts, body.consts + body.carries
    masks = [1 << i for i in range(len(jaxpr.invars))]
    while True:
        known = dict(zip(jaxpr.invars, masks))
        read = functools.partial(_mask, known)
        for eqn in jaxpr.eqns:
            mask = functools.reduce(operator.or_, map(read, eqn.invars), 0)
            known.update(dict.fromkeys(eqn.outvars, mask))
        found = [read(atom) for atom in jaxpr.outvars]
        carried = [mask | more for mask, more in zip(masks[first:last], found)]
        if carried == masks[first:last]:
            return [*carried, *found[body.carries :]]
        masks[first:last] = carried


def _results(*values: Any, count: int) -> list[Any]:
    return list(values[:count])


def _batched(values: Sequence[Any], axes: Sequence[Any], *, count: int) -> tuple[list[Any], list[int]]:
    size = next(value.shape[axis] for value, axis in zip(values, axes) if axis is not None)
    moved = [
        jnp.broadcast_to(value, (size, *value.shape)) if axis is None else jnp.moveaxis(value, axis, 0)
        for value, axis in zip(values[:count], axes)
    ]
    return _alike.bind(*moved, *values[count:], count=count), [0] * count


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, count: int) -> tuple[list[Any], list[Any]]:
    moving = [tangent for tangent in tangents[:count] if not isinstance(tangent, _compat.Zero)]
    found = iter(batched_alike(moving, primals[count:]) if moving else ())
    out = [tangent if isinstance(tangent, _compat.Zero) else next(found) for tangent in tangents[:count]]
    return _alike.bind(*primals, count=count), out


def _transpose(cotangents: Sequence[Any], *values: Any, count: int) -> list[Any]:
    return [*cotangents, *([None] * (len(values) - count))]


_alike.def_impl(_results)
_alike.def_abstract_eval(lambda *avals, count: list(avals[:count]))
_compat.register_lowering(_alike, _compat.lower_fun(_results, multiple_results=True))
_compat.batching_rules[_alike] = _batched
_compat.jvp_rules[_alike] = _jvp
_compat.transpose_rules[_alike] = _transpose
