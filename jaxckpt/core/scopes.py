"""Scopes that say which region of a plan an operation belongs to, for the planner's own traces.

What the compiler is given is traced without: its reports show the user's scopes, and what is stored of a plan's step is
found again when a user compiles it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from jaxckpt.core.regions import Address

Function = TypeVar("Function", bound=Callable)

PATTERN = r"jaxckpt(\d+)_(\d+)"
"""A region's scope, with its first operation and the one after its last."""

_wanted: contextvars.ContextVar[tuple[str, Address] | None] = contextvars.ContextVar("wanted", default=None)


@contextlib.contextmanager
def regions_in_scopes(fingerprint: str, address: Address) -> Iterator[None]:
    """Until it is left, what is traced of a plan's stretches, regions and what lies between them, is in a scope for
    each.

    Args:
      fingerprint: of the program; plans for others, as in a function that is planned already, are left alone.
      address: of the body of that program that is looked at; operations of others have other numbers.
    """
    token = _wanted.set((fingerprint, address))
    try:
        yield
    finally:
        _wanted.reset(token)


def in_scope(fun: Function, start: int, stop: int, of: Callable[[], tuple[str, Address]]) -> Function:
    """Returns a function of the operations start..stop, in a scope if that is wanted of the program and the body that
    `of` returns.
    """
    wanted = _wanted.get()
    return fun if wanted is None or wanted != of() else jax.named_scope(f"jaxckpt{start}_{stop}")(fun)
