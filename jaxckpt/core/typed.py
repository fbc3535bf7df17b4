"""Keys of Python values for caches: equal where the values' types are too, at every depth."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def typed(value: Any) -> Any:
    """Returns a key that equals another value's where the values are equal and of one type, at every depth.

    Python takes 1, 1.0 and True for equal, and 0.0 and -0.0, which may select different programs. A NaN equals nothing,
    not even itself. Containers that can be hashed are looked into: tuples, named tuples, frozen sets, and the fields of
    dataclasses. The key can be hashed where the value can.

    >>> typed((1, 2)) == typed((1, 2)), typed((1, 2)) == typed((True, 2)), typed(0.0) == typed(-0.0)
    (True, False, False)
    """
    kind = type(value)
    if kind in (float, complex) or isinstance(value, np.inexact):
        return kind, repr(value)
    for base in (tuple, frozenset):
        # A subclass that says itself what is equal is left to that.
        own = any(getattr(kind, name) is not getattr(base, name) for name in ("__eq__", "__hash__"))
        if isinstance(value, base) and not own:
            return kind, base(map(typed, value))
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.eq:  # type: ignore[attr-defined]
        fields = (typed(getattr(value, field.name)) for field in dataclasses.fields(kind) if field.compare)
        # A class may take a field that cannot be hashed out of its hash; that field is compared with the value.
        return kind, value, tuple(key if hashable(key) else None for key in fields)
    return kind, value


def hashable(value: Any) -> bool:
    """Returns whether a value can be hashed."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
