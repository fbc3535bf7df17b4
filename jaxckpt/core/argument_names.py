"""The arguments of a call: their numbers, their items, and the names of these and of their leaves, in messages and
reports: "args[0]['w']", "batch['x']".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxckpt._errors import ArgumentError
from jaxckpt.core.units import as_int


def positional(place: int, parameters: Sequence[str] = ()) -> str:
    """Returns the name of a positional argument: its parameter, or "args[2]" where that is not given.

    Args:
      place: of the argument, from 0.
      parameters: names of the positional parameters.
    """
    return parameters[place] if place < len(parameters) else f"args[{place}]"


def leaf_name(path: tuple[Any, ...], parameters: Sequence[str] = (), *, keyword: str = "{}") -> str:
    """Returns the name of a leaf: that of its argument, and the way to it from there.

    Args:
      path: of the leaf in the pytree (args, kwargs).
      parameters: as of `positional`.
      keyword: how to write the name of a keyword argument.

    >>> [(path, _)] = jax.tree_util.tree_leaves_with_path(((), {"batch": {"x": 1}}))
    >>> leaf_name(path), leaf_name(path, keyword="kwargs[{!r}]")
    ("batch['x']", "kwargs['batch']['x']")
    """
    kind, key, *rest = path
    head = positional(key.idx, parameters) if kind.idx == 0 else keyword.format(key.key)
    return head + jax.tree_util.keystr(tuple(rest))


def named_leaves(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Sequence[str] = ()
) -> list[tuple[str, Any]]:
    """Returns the leaves of a call's arguments, each with its name; `parameters` as of `positional`.

    >>> named_leaves(({"w": 1.0}, 2.0), {"mask": 3.0})
    [("args[0]['w']", 1.0), ('args[1]', 2.0), ('mask', 3.0)]
    """
    return [(leaf_name(path, parameters), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs))]


def of_leaf(name: str) -> str:
    """Returns the name of a leaf, from what JAX calls an argument of a function of leaves by name. Others stay.

    >>> of_leaf("arguments['model.head.bias']"), of_leaf("params['w']")
    ('model.head.bias', "params['w']")
    """
    found = _OF_LEAVES.fullmatch(name)
    return found[2] if found else name


_OF_LEAVES = re.compile(r"arguments\[(['\"])(.*)\1\]")
"""`arguments` is what such functions call them."""


def items(value: Any) -> tuple[Any, ...] | None:
    """Returns the items of an argument that is a sequence or another iterable; None if it is one thing: text, bytes, an
    array without axes; or a set, whose order changes from run to run.

    >>> import numpy as np
    >>> items([1, 2]), items("save"), items(np.float32(3))
    ((1, 2), None, None)
    """
    if (
        isinstance(value, (str, bytes, set, frozenset))
        or not isinstance(value, Iterable)
        or getattr(value, "shape", None) == ()
    ):
        return None
    return tuple(value)


def argument_numbers(numbers: int | Sequence[int]) -> tuple[int, ...]:
    """Returns `static_argnums` as ints.

    Raises:
      ArgumentError: it is something other than an int or a sequence of ints.

    >>> argument_numbers(1), argument_numbers([0, 2])
    ((1,), (0, 2))
    """
    listed: Any = numbers if isinstance(numbers, Sequence) and not isinstance(numbers, bytes) else (numbers,)
    found = tuple(n for n in map(as_int, listed) if n is not None)
    if len(found) < len(listed):
        raise ArgumentError("static_argnums", "an int or a sequence of ints", numbers)
    return found
