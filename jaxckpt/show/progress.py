"""Shows what takes time: a bar in a terminal or a notebook, plain lines elsewhere.

A thread draws the bar, so that the elapsed time goes on while a compiler works. The bar is on standard error, and
disappears without a trace. `core/shown.py` says when one is shown.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxckpt.core.shown import Progress

DELAY = 2.0
"""Seconds after which a bar appears that nobody asked for."""
QUIET = 30.0
"""Seconds after which a plain line says what still goes on: the same work where lines were asked for, any work where
nobody asked.
"""


@contextlib.contextmanager
def progress_bar(title: str, wanted: bool) -> Iterator[Progress | None]:
    """Yields the function that gets the progress; None where nothing is shown.

    Args:
      title: what is shown before the first piece of work.
      wanted: whether it was asked for: True shows a bar at once, or plain lines where there is neither a terminal nor a
        notebook. False shows a bar after two seconds in a terminal, elsewhere a line after half a minute, so that a
        batch job does not look as if it hung; and nothing under pytest.
    """
    if not wanted and "PYTEST_CURRENT_TEST" in os.environ:
        yield None
        return
    in_terminal = _is_terminal()
    drawn = (in_terminal or (wanted and _is_notebook_with_widgets())) and _has_rich()
    shown = _bar(title) if drawn else None
    if shown is None:
        with _lines(title, wanted) as report:
            yield report
        return
    bar, report = shown
    with _started(bar.start, bar.stop, 0.0 if wanted else DELAY):
        yield report


def _bar(title: str) -> tuple[Any, Progress]:
    """Returns rich's bar, not yet started, and the function that updates it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    # What the user's function prints stays where it goes: the bar may start in the middle of it.
    alone: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
    bar = Bar(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4, **alone)
    task = bar.add_task(title, total=None)
    return bar, lambda done, total, what: bar.update(task, completed=done, total=total, description=what or title)


@contextlib.contextmanager
def _started(start: Callable[[], None], stop: Callable[[], None], delay: float) -> Iterator[None]:
    """Starts what is shown after so many seconds, and stops it at the end, if it was started."""
    lock, state = threading.Lock(), {"ended": False, "started": False}

    def begin() -> None:
        with lock:
            if not state["ended"]:
                state["started"] = True
                start()

    timer = threading.Timer(delay, begin)
    timer.daemon = True
    if delay:
        timer.start()
    else:
        begin()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            state["ended"] = True
            if state["started"]:
                stop()
        if delay:
            timer.join()


@contextlib.contextmanager
def _lines(title: str, wanted: bool) -> Iterator[Progress]:
    """Yields a function that prints a line for each piece of work, if that is wanted; a thread prints one where a piece
    takes long, or where nothing was said for long.
    """
    ended, lock = threading.Event(), threading.Lock()
    begun = time.monotonic()
    now: dict[str, Any] = {"what": "", "began": begun, "said": begun}

    def say(text: str) -> None:
        now["said"] = time.monotonic()
        if sys.stderr is not None:  # of a process without a console there is none
            with contextlib.suppress(OSError, ValueError):  # or it is closed
                print(f"jaxckpt: {text}", file=sys.stderr, flush=True)

    def report(done: int, total: int, what: str) -> None:
        with lock:
            if what and what != now["what"]:
                now.update(what=what, began=time.monotonic())
                if wanted:
                    say(what)

    def remind() -> None:
        while not ended.wait(QUIET / 4):
            with lock:
                if time.monotonic() - now["said"] >= QUIET and not ended.is_set():
                    since = now["began"] if wanted else begun
                    say(f"{now['what']}, {time.monotonic() - since:.0f} s")

    report(0, 0, title)
    threading.Thread(target=remind, daemon=True).start()
    try:
        yield report
    finally:
        ended.set()


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def _is_notebook_with_widgets() -> bool:
    """Whether this is a kernel of Jupyter with the package that rich's bars need there."""
    kernel = sys.modules.get("ipykernel.zmqshell")
    return kernel is not None and importlib.util.find_spec("ipywidgets") is not None
