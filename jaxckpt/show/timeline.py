"""The interactive timeline: every buffer of one or more compiled programs over their schedules, as a piece of a page.

The piece has its style, its program and its data in it, and loads nothing. `static/` has the style and the program, in
plain JavaScript; `timeline_data` is what it draws. Small buffers are one band, so that a program of 50,000 buffers
opens quickly: see `SHARE` and `MOST`.
"""

from __future__ import annotations

import functools
import html
import importlib.resources
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxckpt.memory.buffers import Lifetime, Space, live_bytes

if TYPE_CHECKING:
    from jaxckpt.memory.report import MemoryReport

SHARE = 0.001
"""Buffers below this share of the most live bytes of their memory are drawn as one band for each kind."""

MOST = 3000
"""Number of buffers that are drawn alone: if more are above `SHARE`, only the largest ones are."""

KINDS = ("argument", "output", "constant", "temporary")

_SCRIPTS = ("layout.js", "draw.js", "widget.js")
_STYLE = "timeline.css"


def timeline_fragment(reports: Mapping[str, MemoryReport]) -> str:
    """Returns the timelines of some programs on the same scales, as HTML to be put into a page.

    Args:
      reports: name -> report. The first two are shown at first; a switch shows the others.

    Raises:
      TargetError: a compiler gave no buffer assignment that could be read.
    """
    style, *scripts = map(_static, (_STYLE, *_SCRIPTS))
    code = "\n".join(scripts)
    return (
        f'<div class="jaxckpt-timeline"><style>\n{style}</style>\n'
        f'<script type="application/json">{_embedded(timeline_data(reports))}</script>\n'
        f"<noscript>This timeline is drawn by JavaScript, which is switched off here. {html.escape(_summary(reports))}"
        f'</noscript></div>\n<script>\n"use strict";\n(() => {{\n{code}}})();\n</script>'
    )


def timeline_data(reports: Mapping[str, MemoryReport]) -> dict[str, Any]:
    """Returns what a timeline draws, as plain values.

    For each program and each memory, `bands` has a row of numbers for each buffer that is drawn alone: first and last
    position, bytes, kind, and the texts of name, shape, operation and source line, as indices into `texts`. `small` has
    the other buffers, added up by kind: the positions at which their bytes change, and the bytes from there on. At
    every position, the bytes of the bands and of the small ones that are live add up to the report's timeline.
    """
    texts: dict[str, int] = {}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    programs = [
        {
            "name": name,
            "target": report.target,
            "peak": report.peak_bytes,
            "labels": [text(label) for label in report.timeline().labels],
            "spaces": [_space(space, len(report.timeline().labels), text) for space in report.spaces()],
        }
        for name, report in reports.items()
    ]
    return {"kinds": KINDS, "share": SHARE, "most": MOST, "programs": programs, "texts": list(texts)}


def _space(space: Space, length: int, text: Callable[[str], int]) -> dict[str, Any]:
    live = live_bytes(space.lifetimes, length)
    peak = max(live, default=0)
    bands, small = divided(space.lifetimes, peak)
    return {
        "name": space.name,
        "peak": peak,
        "at": live.index(peak) if live else 0,
        "count": len(space.lifetimes),
        "below": max((life.buffer.bytes for life in small), default=0),
        "bands": [_row(life, text) for life in bands],
        "small": [
            {"kind": KINDS.index(kind), "count": len(of_kind), "changes": _changes(of_kind, length)}
            for kind in KINDS
            if (of_kind := [life for life in small if life.buffer.kind == kind])
        ],
    }


def divided(lifetimes: Sequence[Lifetime], peak: int) -> tuple[list[Lifetime], list[Lifetime]]:
    """Returns the buffers that are drawn alone, and those that are too small for that; buffers of no bytes are left
    out.

    Args:
      lifetimes: the buffers of one memory.
      peak: the most bytes of them that are live at once.
    """
    order = sorted((life for life in lifetimes if life.buffer.bytes), key=lambda life: -life.buffer.bytes)
    count = sum(life.buffer.bytes >= SHARE * peak for life in order)
    return order[: min(count, MOST)], order[min(count, MOST) :]


def _row(life: Lifetime, text: Callable[[str], int]) -> list[int]:
    buffer = life.buffer
    words = (buffer.name, buffer.shape, buffer.operation, buffer.source)
    return [life.first, life.last, buffer.bytes, KINDS.index(buffer.kind), *map(text, words)]


def _changes(lifetimes: Iterable[Lifetime], length: int) -> list[list[int]]:
    live = live_bytes(lifetimes, length)
    return [[at, size] for at, size in enumerate(live) if at == 0 or size != live[at - 1]]


def _summary(reports: Mapping[str, MemoryReport]) -> str:
    return " ".join(f"{name}: {report.timeline()}" for name, report in reports.items())


def _embedded(data: dict[str, Any]) -> str:
    """Returns data as JSON that no parser of HTML ends early: a name may be "</script>"."""
    text = json.dumps(data, separators=(",", ":"))  # ASCII alone
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def _static(name: str) -> str:
    return importlib.resources.files("jaxckpt.show").joinpath("static", name).read_text("utf-8")
