"""The leaves of a call's arguments: which are arrays and so traced, which are constants, which are passed as they
are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxckpt import _compat


def is_array(x: Any) -> bool:
    """Returns whether a leaf is an array, and so traced; all else is static: Python's bools and numbers too, and
    NumPy's scalars.
    """
    if isinstance(x, jax.Array) or _compat.is_tracer(x):
        return True
    if isinstance(x, (str, bytes, jax.ShapeDtypeStruct)) or callable(x) or is_number(x):
        return False
    try:
        jax.typeof(x)
    except TypeError:  # arrays of strings, objects
        return False
    return True


def is_symbolic(values: Iterable[Any]) -> bool:
    """Returns whether a dimension of some arrays, or of variables of a program, has no known size: `jax.export` traces
    such.
    """
    return any(not isinstance(size, int) for x in values for size in getattr(getattr(x, "aval", x), "shape", ()))


def is_number(x: Any) -> bool:
    """Returns whether a leaf is a number of Python's, bools among them, or a scalar of NumPy's."""
    return isinstance(x, (bool, int, float, complex, np.generic))


def numbers_of_modules(tree: Any) -> list[bool]:
    """Returns for each leaf of a pytree whether it is a number of an equinox module: equinox's own transformations
    (`eqx.filter_jit`) pass it as it is, so its layers may ask for its type.
    """
    module = getattr(sys.modules.get("equinox"), "Module", None)  # before it is imported, there are no modules
    if module is None:
        return [False] * len(jax.tree.leaves(tree))
    is_module = lambda x: isinstance(x, module)
    parts = jax.tree.leaves(tree, is_leaf=is_module)
    return [is_module(part) and is_number(leaf) for part in parts for leaf in jax.tree.leaves(part)]


def is_given(x: Any) -> bool:
    """Returns whether a leaf is an array or stands for one; numbers are static."""
    return isinstance(x, jax.ShapeDtypeStruct) or is_array(x)


def is_operand(x: Any) -> bool:
    """Returns whether a leaf is an array, stands for one (`jax.ShapeDtypeStruct`), or is a number, which JAX takes for
    one.
    """
    return is_number(x) or is_given(x)


def array(leaf: Any) -> Any:
    """Returns an array of JAX's, from itself, from one of NumPy's, or from a number (whose type stays weak).

    What a jaxpr returns is not always one: a constant of it is a number of Python's, or of JAX's own kind.
    """
    if isinstance(leaf, jax.Array) or getattr(leaf, "dtype", None) == jax.dtypes.float0:
        return leaf
    return jax.numpy.asarray(leaf)


class Whole:
    """A leaf whose content is passed as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


def defines_call(base: type) -> bool:
    """Returns whether instances can be called; `callable(base)` is true of every class."""
    return any("__call__" in vars(cls) for cls in base.__mro__)


def is_inexact(leaf: Any) -> bool:
    """Returns whether a leaf, or an abstract value, has a float or complex dtype, and so gradients."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (float, complex))
    return bool(jax.dtypes.issubdtype(dtype, np.inexact))
