"""The interval that the integers of a value lie in, as far as the program shows it: an index of an axis, a rank, a
remainder, a count of booleans.

Ranges follow the operations by one table of rules. A rule gets the intervals of the operands, and returns that of
every result, or None where nothing is known. Arithmetic that may wrap around in its dtype has no interval. What the
table does not name has the interval of its dtype, which no operation leaves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from jaxckpt import _compat
from jaxckpt.core import primitives
from jaxckpt.core.primitives import Holds

Range = tuple[int, int]
"""The least and the greatest integer, both included."""
Ranges = Sequence[Range | None]
RangeRule = Callable[[Ranges, Any, Mapping[str, Any]], Range | None]
"""(the operands' intervals, the equation, its parameters) -> the interval of each result; None for not known."""


@functools.cache
def of_dtype(dtype: Any) -> Range | None:
    """Returns the interval of a dtype of integers or booleans; None for others.

    >>> of_dtype(np.dtype("int8"))
    (-128, 127)
    """
    if not isinstance(dtype, np.dtype):
        return None  # keys
    if dtype == np.bool_:
        return 0, 1
    if not np.issubdtype(dtype, np.integer):
        return None
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def of_literal(value: Any) -> Range | None:
    """Returns the interval of a number that stands in the program; None if it is no integer."""
    array = np.asarray(value)
    if array.size == 0 or of_dtype(array.dtype) is None:
        return None
    return int(array.min()), int(array.max())


def of_results(primitive: str, operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> list[Range | None]:
    """Returns the interval of each result of an equation; None where it is no integer.

    Args:
      primitive: the name of its primitive.
      operands: their intervals; None where one is no integer.
      eqn: the equation.
      params: its parameters.
    """
    if primitive in _EACH_RESULT:
        found = _EACH_RESULT[primitive](operands, eqn)
    else:
        rule = TABLE.get(primitive) if len(eqn.outvars) == 1 else None
        found = [None if rule is None else rule(operands, eqn, params)] * len(eqn.outvars)
    return [
        within(var.aval.dtype if hasattr(var.aval, "dtype") else None, each) for var, each in zip(eqn.outvars, found)
    ]


def of_programs_results(primitive: str, operands: Ranges, eqn: Any, programs: Sequence[Ranges]) -> list[Range | None]:
    """Returns the interval of each result of an equation that holds programs, where the results are what these return:
    of a call, a checkpoint, a custom rule, a `jax.shard_map`, branches, or a scan.

    Args:
      primitive, operands, eqn: as of `of_results`.
      programs: for each program, the intervals of what it returns.
    """
    holds, found = primitives.of(primitive).holds, list(programs)
    if primitive == "scan":
        consts, carries = _compat.num_scan_consts_carry(_compat.equation_params(eqn))
        first = [*operands[consts : consts + carries], *programs[0][carries:]]  # of no iterations they come out
        found.append(first)
    elif holds is not Holds.BRANCHES and (not holds.returns or len(found) != 1):
        found = []
    if not found or any(len(each) != len(eqn.outvars) for each in found):
        return of_results(primitive, operands, eqn, _compat.equation_params(eqn))
    types = (getattr(var.aval, "dtype", None) for var in eqn.outvars)
    return [within(dtype, _hull(each)) for dtype, each in zip(types, zip(*found))]


def within(dtype: Any, interval: Range | None) -> Range | None:
    """Returns the interval if the dtype holds all of it, else the dtype's: results that do not fit wrap around."""
    whole = of_dtype(dtype)
    if whole is None or interval is None:
        return whole
    return interval if whole[0] <= interval[0] and interval[1] <= whole[1] else whole


# ------------------------------------------------------------------------------------------------------ the rules


def _hull(operands: Ranges) -> Range | None:
    known = [each for each in operands if each is not None]
    if len(known) < len(operands) or not known:
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def _some(*places: int) -> RangeRule:
    """One of the operands at these places, element by element."""
    return lambda operands, eqn, params: _hull([operands[place] for place in places])


def _all(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    return _hull(operands)


def _corners(combine: Callable[[int, int], int]) -> RangeRule:
    """Of two operands, where the extremes of the result are at extremes of the operands."""

    def rule(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
        left, right = operands
        if left is None or right is None:
            return None
        found = [combine(a, b) for a in left for b in right]
        return min(found), max(found)

    return rule


def _sizes(axes: Any, eqn: Any) -> list[int]:
    return [eqn.invars[0].aval.shape[axis] for axis in axes]


def _axis_index(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    return 0, max(math.prod(_sizes(params["axes"], eqn)) - 1, 0)


def _iota(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    return 0, max(params["shape"][params["dimension"]] - 1, 0)


def _times(interval: Range | None, least: int, most: int) -> Range | None:
    """A sum of `least` to `most` numbers of an interval."""
    if interval is None:
        return None
    low, high = interval
    return min(low * most, low * least), max(high * most, high * least)


def _sum(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    count = math.prod(_sizes(params["axes"], eqn))
    return _times(operands[0], count, count)


def _cumulative(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    return _times(operands[0], 1, max(*_sizes([params["axis"]], eqn), 1))


def _clamp(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    least, x, most = operands
    if least is None or x is None or most is None:
        return None
    low, high = (min(max(x[end], least[end]), most[end]) for end in (0, 1))
    return low, high


def _rem(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    """The sign is that of the dividend; the result is smaller than the divisor. By zero it is the dividend or -1."""
    x, divisor = operands
    if x is None or divisor is None or divisor[0] <= 0 <= divisor[1]:
        return None
    most = max(abs(divisor[0]), abs(divisor[1])) - 1
    return (0 if x[0] >= 0 else max(-most, x[0])), (0 if x[1] <= 0 else min(most, x[1]))


def _divided(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    x, divisor = operands
    if x is None or divisor is None or divisor[0] <= 0 <= divisor[1]:
        return None
    found = [(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1) for a in x for b in divisor]
    found += [0] if x[0] <= 0 <= x[1] else []
    return min(found), max(found)


def _compared(certain: Callable[[Range, Range], bool], never: Callable[[Range, Range], bool]) -> RangeRule:
    """A comparison that is true, or false, of all that the operands can be."""

    def rule(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
        left, right = operands
        if left is None or right is None:
            return None
        return (1, 1) if certain(left, right) else (0, 0) if never(left, right) else (0, 1)

    return rule


def _below(left: Range, right: Range) -> bool:
    return left[1] < right[0]


def _not_above(left: Range, right: Range) -> bool:
    return left[1] <= right[0]


def _equal(left: Range, right: Range) -> bool:
    return left == right and left[0] == left[1]


def _apart(left: Range, right: Range) -> bool:
    return left[1] < right[0] or right[1] < left[0]


def _turned(of: Callable[[Range, Range], bool]) -> Callable[[Range, Range], bool]:
    return lambda left, right: of(right, left)


def _selected(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    which, *cases = operands
    return _hull(cases if which is None else cases[max(which[0], 0) : which[1] + 1])


def _not(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    (x,) = operands
    boolean = eqn.invars[0].aval.dtype == np.bool_
    return None if x is None else (1 - x[1], 1 - x[0]) if boolean else (-1 - x[1], -1 - x[0])


def _negative(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    return None if operands[0] is None else (-operands[0][1], -operands[0][0])


def _masked(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    """`and` of two numbers of which one is not negative is between 0 and that one."""
    bounds = [each[1] for each in operands if each is not None and each[0] >= 0]
    return (0, min(bounds)) if bounds else None


def _right(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    x, by = operands
    if x is None or by is None or x[0] < 0 or by[0] < 0:
        return None
    return 0, x[1] >> min(by[0], 64)


def _right_with_sign(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    """The highest bit fills up, of an unsigned number too: 200 of uint8 becomes 228."""
    x, bits = operands[0], 8 * eqn.invars[0].aval.dtype.itemsize
    return None if x is None or x[1] >> (bits - 1) else _right(operands, eqn, params)


def _gathered(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    """An element of the operand, or what stands for one that is not there."""
    mode = GatherScatterMode.from_any(params["mode"])
    if mode in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS):
        return operands[0]
    fill = params.get("fill_value")
    known = mode == GatherScatterMode.FILL_OR_DROP and fill is not None
    return _hull([operands[0], of_literal(fill)]) if known else None


def _scattered(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    """An element of the operand or of the updates, where an update takes the place of what was there. The same
    primitive puts what a function makes of an element in its place (`x.at[i].apply(function)`).
    """
    update = params["update_jaxpr"]
    if update is not None:
        program = _compat.open_jaxpr(update)
        if program.eqns or program.outvars[0] is not program.invars[1]:
            return None
    return _hull([operands[0], operands[2]])


def _added(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    """An element of the operand, and at most one number of each window of updates."""
    base, count = operands[0], math.prod(eqn.invars[1].aval.shape[:-1])
    more = _times(operands[2], count, 0)
    return None if base is None or more is None else (base[0] + more[0], base[1] + more[1])


def _own(operands: Ranges, eqn: Any) -> list[Range | None]:
    """Each result is made of the elements of the operand in its place."""
    return list(operands)


def _extremes(operands: Ranges, eqn: Any, params: Mapping[str, Any]) -> Range | None:
    return operands[0] if math.prod(_sizes(params["axes"], eqn)) else None  # of nothing it is the dtype's extreme


def _top(operands: Ranges, eqn: Any) -> list[Range | None]:
    size = eqn.invars[0].aval.shape[eqn.params.get("axis", -1)]
    return [operands[0], (0, max(size - 1, 0))]


def _split(operands: Ranges, eqn: Any) -> list[Range | None]:
    return [operands[0]] * len(eqn.outvars)


_FIRST = _some(0)
_ROWS: tuple[tuple[str, RangeRule], ...] = (
    ("iota", _iota),
    ("argmax argmin", _axis_index),
    ("copy reshape squeeze transpose broadcast_in_dim slice rev dynamic_slice tile", _FIRST),
    ("convert_element_type sharding_constraint all_gather cummax cummin", _FIRST),
    ("reduce_max reduce_min", _extremes),
    ("concatenate stack pad", _all),
    ("dynamic_update_slice", _some(0, 1)),
    ("scatter", _scattered),
    ("scatter-add", _added),
    ("select_n", _selected),
    ("lt", _compared(_below, _turned(_not_above))),
    ("le", _compared(_not_above, _turned(_below))),
    ("gt", _compared(_turned(_below), _not_above)),
    ("ge", _compared(_turned(_not_above), _below)),
    ("eq", _compared(_equal, _apart)),
    ("ne", _compared(_apart, _equal)),
    ("not", _not),
    ("max", _corners(max)),
    ("min", _corners(min)),
    ("add", _corners(lambda a, b: a + b)),
    ("sub", _corners(lambda a, b: a - b)),
    ("mul", _corners(lambda a, b: a * b)),
    ("neg", _negative),
    ("rem", _rem),
    ("div", _divided),
    ("clamp", _clamp),
    ("and", _masked),
    ("shift_right_logical", _right),
    ("shift_right_arithmetic", _right_with_sign),
    ("gather", _gathered),
    ("reduce_sum", _sum),
    ("cumsum", _cumulative),
)
TABLE: Mapping[str, RangeRule] = {name: rule for names, rule in _ROWS for name in names.split()}
"""Primitive -> the rule of its only result."""

_ROWS_OF_MANY: tuple[tuple[str, Callable[[Ranges, Any], list[Range | None]]], ...] = (
    ("sort optimization_barrier device_put", _own),
    ("top_k", _top),
    ("split unstack", _split),
)
_EACH_RESULT = {name: rule for names, rule in _ROWS_OF_MANY for name in names.split()}
"""Primitive -> the rule of all of its results."""
