"""What the functions of `autocheckpoint` do while a step runs, for `adaptive`, and what they are told of the step."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Replanned(Protocol):
    """A function that can be planned again tighter."""

    @property
    def name(self) -> str:
        """The function's name."""

    def peak(self, key: Any) -> int | None:
        """Returns the bytes of the step under the plan for calls with this key; None if nothing is known."""

    def cap(self, key: Any, most: int | None) -> int | None:
        """Has calls with this key planned again within `most` bytes, whatever the budget allows; returns what was the
        most before. None is no such bound.
        """


@dataclass(frozen=True, eq=False)
class Watch:
    """A step that runs.

    Attributes:
      arrays: the step's arguments. While the step is traced its functions see no arrays, and still have to know what is
        on the device already.
      used: (function, key of its call), in the order of the calls.
    """

    arrays: Sequence[Any]
    used: dict[tuple[Replanned, Any], None] = field(default_factory=dict)


_here: contextvars.ContextVar[Watch | None] = contextvars.ContextVar("jaxckpt_watch", default=None)


def watch_here() -> Watch | None:
    """Returns the step that runs; None outside of one."""
    return _here.get()


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Has the calls of functions of `autocheckpoint` noted, those in traces too."""
    token = _here.set(watch)
    try:
        yield
    finally:
        _here.reset(token)
