"""How values and progress are shown: a table from types to functions. `jaxckpt.show` fills it when the package is
imported.

So a report knows nothing of tables, pages and pictures, and still prints as one. What is registered imports rich or
matplotlib when it is called, not before.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxckpt._errors import ArgumentError
from jaxckpt.core import lift
from jaxckpt.core.files import write_whole

Progress = Callable[[int, int, str], None]
"""Called as `progress(done, total, what)` before each task, and after the last task with `what` ""."""


def silent(done: int, total: int, what: str) -> None:
    """The progress that nobody wants to know."""


Bar = Callable[[str, bool], contextlib.AbstractContextManager[Progress | None]]
"""Called as `bar(title, wanted)`: see `jaxckpt.show.progress`, which registers the one that there is."""

F = TypeVar("F", bound=Callable[..., Any])

_bars: list[Bar] = []
_under_way: contextvars.ContextVar[bool] = contextvars.ContextVar("jaxckpt_under_way", default=False)


def show_progress_as(bar: Bar) -> None:
    """Has progress be shown in this way."""
    _bars[:] = [bar]


def check_progress(progress: Any) -> None:
    """Raises `ArgumentError` for what `progress` cannot be."""
    takes_three = callable(progress) and lift.accepts(progress, (0, 0, ""))
    if not (progress is None or isinstance(progress, bool) or takes_three):
        raise ArgumentError("progress", "a function of (done, total, what), True, False or None", progress)


@contextlib.contextmanager
def telling(progress: Progress | bool | None, title: str) -> Iterator[Progress | None]:
    """Yields the function that gets the progress of what runs within; None where nobody wants to know.

    Args:
      progress: such a function; True for a bar; False for nothing; None for a bar in a terminal, from the third second
        on, and a line each half minute elsewhere. What jaxckpt calls within itself shows no bar of its own.
      title: what is shown before the first piece of work.

    Raises:
      ArgumentError: `progress` is none of these.
    """
    check_progress(progress)
    quiet = progress is False or (progress is None and _under_way.get())
    token = _under_way.set(True)
    try:
        if isinstance(progress, bool) or progress is None:
            with contextlib.nullcontext() if quiet or not _bars else _bars[0](title, progress is True) as report:
                yield report
        else:
            yield progress
    finally:
        _under_way.reset(token)


def tells(title: str) -> Callable[[F], F]:
    """Has a function take `progress` as `telling` does; it is given the function that gets the progress, or None."""

    def decorate(fun: F) -> F:
        @functools.wraps(fun)
        def call(*args: Any, progress: Progress | bool | None = None, **kwargs: Any) -> Any:
            with telling(progress, title) as report:
                return fun(*args, progress=report, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


THIS = "this program"
"""The name of a report on its own page."""


@dataclass(frozen=True)
class Look:
    """How values of one type are shown; None where they are not shown in that way.

    Attributes:
      text: (value, whatever `text_of` is given besides) -> lines for a terminal.
      fragment: value -> HTML for a notebook.
      page: (value, whatever `save_page` is given besides) -> a whole page of HTML.
      picture: (value, path) writes a picture to that file.
    """

    text: Callable[..., str] | None = None
    fragment: Callable[[Any], str] | None = None
    page: Callable[..., str] | None = None
    picture: Callable[[Any, str | os.PathLike[str]], None] | None = None


_looks: dict[type, Look] = {}


def show_as(kind: type, look: Look) -> None:
    """Has values of a type, and of its subclasses that have no look of their own, be shown in this way."""
    _looks[kind] = look


def text_of(value: Any, *besides: Any) -> str:
    """Returns a value as lines for a terminal."""
    return _way(value, "text")(value, *besides)  # type: ignore[no-any-return]


def fragment_of(value: Any) -> str:
    """Returns a value as HTML for a notebook."""
    return _way(value, "fragment")(value)  # type: ignore[no-any-return]


def save_page(value: Any, path: str | os.PathLike[str], *besides: Any) -> None:
    """Writes a value's page to a file, whole or not at all; raises as `write_whole`."""
    write_whole(path, _way(value, "page")(value, *besides))


def save_picture(value: Any, path: str | os.PathLike[str]) -> None:
    """Writes a value's picture to a file; its suffix is the format.

    Raises:
      ArgumentError: matplotlib writes no files with that suffix, or the folder does not exist.
      MissingPackageError: matplotlib is not installed.
    """
    _way(value, "picture")(value, path)


def _way(value: Any, way: str) -> Callable[..., Any]:
    for kind in type(value).__mro__:
        if (found := getattr(_looks.get(kind), way, None)) is not None:
            return found  # type: ignore[no-any-return]
    raise TypeError(f"A value must be of a type that jaxckpt.show knows as a {way}; got a {type(value).__name__}.")
