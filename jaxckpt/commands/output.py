"""What commands print and write: reports on standard output, files, progress on standard error."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from jaxckpt.core.files import check_writable, write_whole
from jaxckpt.core.shown import silent, telling
from jaxckpt.show import plot, table

_reports: ContextVar[TextIO | None] = ContextVar("_reports", default=None)
"""Where reports go: None for standard output."""


@contextmanager
def reports_alone() -> Iterator[None]:
    """While it is open, only reports go to standard output. What a model's file prints goes to standard error."""
    token = _reports.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _reports.reset(token)
        with _to_whoever_reads():
            sys.stdout.flush()


@contextmanager
def _to_whoever_reads() -> Iterator[None]:
    """While it is open, standard output is written to. If its reader has gone away, as `head` does, what is left is
    dropped, now and when Python ends; the command goes on, since it may have files to write.
    """
    try:
        yield
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, (_reports.get() or sys.stdout).fileno())
        os.close(nowhere)


def check_files(options: argparse.Namespace) -> None:
    """Raises for files that cannot be written, before the minutes of compiling."""
    for option in ("plot", "json", "html", "output"):
        path = getattr(options, option, None)
        if path is None:
            continue
        check_writable(path, f"--{option}")
        if option == "plot":
            plot.check_suffix(path)
        if option == "html" and options.command != "measure":  # whose page has no pictures of matplotlib
            plot.require_matplotlib()


def write(path: str | None, content: Callable[[], str | bytes]) -> None:
    """Writes a file, if one is asked for, and says so."""
    if path is not None:
        write_whole(path, content())
        print(f"wrote {path}", file=sys.stderr)


def tell(*parts: Any) -> None:
    """Prints tables and sentences as wide as the terminal, or as `table.WIDTH` without a terminal."""
    console = Console(highlight=False, file=_reports.get())
    console.width = max(console.width, table.LEAST_WIDTH)
    for part in filter(None, parts):
        shown = Text(part) if isinstance(part, str) else part
        if console.is_terminal:
            console.print(shown)
            continue
        with _to_whoever_reads():
            print(table.to_text(shown), file=_reports.get())


@contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yields the function that gets the progress: see `jaxckpt.show.progress`."""
    with telling(None, "starting") as report:
        yield report or silent
