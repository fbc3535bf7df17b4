"""Tables for a terminal, with rich."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from jaxckpt.core import primitives
from jaxckpt.core.primitives import Holds
from jaxckpt.core.sources import short_source
from jaxckpt.core.units import counted, format_bytes
from jaxckpt.memory.collectives import by_kind

if TYPE_CHECKING:
    from jaxckpt.memory.compare import Comparison, Row
    from jaxckpt.memory.report import MemoryReport
    from jaxckpt.memory.residuals import ResidualReport
    from jaxckpt.memory.targets import TargetTable

WIDTH = 120
"""Width, in columns, of text that is not printed to a terminal."""
LEAST_WIDTH = 80
"""Width, in columns, that tables need. A narrower terminal breaks their lines."""


def to_text(renderable: Any, width: int = WIDTH) -> str:
    """Returns a rich renderable as plain text, without colours and trailing blanks."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, highlight=False)
    console.print(renderable, crop=False)  # tables are no wider; lines of trees may be
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())


def comparison_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Returns the table's header and rows as text. The terminal, the page and the benchmarks show the same."""
    header = ["variant", "peak", "of first", "recomputed", "estimate", "error"]
    if comparison.timed_on is not None:
        header += [f"time on {comparison.timed_on}", "of first"]
    return header, [_cells(row, comparison) for row in comparison]


def _cells(row: Row, comparison: Comparison) -> list[str]:
    share = row.peak_bytes / comparison.baseline.peak_bytes if comparison.baseline.peak_bytes else 1.0
    cells = [
        row.name + (" *" if row.on_front else ""),
        format_bytes(row.peak_bytes),
        f"{share:.1%}",
        f"{row.recompute:+.1%}",
        "" if row.estimate_bytes is None else format_bytes(row.estimate_bytes),
        "" if row.estimate_error is None else f"{row.estimate_error:+.1%}",
    ]
    if row.seconds is not None and row.time_ratio is not None:
        cells += [format_seconds(row.seconds), f"{row.time_ratio:.2f}"]
    return cells


NOTE = (
    "*: Pareto front of peak and recomputation. peak: compiled, with arguments and outputs. recomputed: FLOPs more "
    "than the leanest "
    "variant's. estimate: of the peak, from the traced step, with its error."
)


def comparison_view(comparison: Comparison) -> Group:
    """Returns the printed form of a comparison: its table, the meaning of the columns, and the advice if there is
    one.
    """
    header, rows = comparison_cells(comparison)
    table = plain_table()
    for i, name in enumerate(header):
        # Figures are never cut. If there is not enough room, long names of variants take several lines.
        words = name.replace(" ", "\n", 1)
        table.add_column(words, justify="right" if i else "left", no_wrap=i > 0, overflow="fold", vertical="bottom")
    for row, cells in zip(comparison, rows):
        table.add_row(*map(Text, cells), style="bold" if row.on_front else "")
    refused = "".join(f"\n{name} {why}." for name, why in comparison.left_out)
    return titled(f"Checkpointing variants on {comparison.target}", table, NOTE + refused, comparison.advice())


def plain_table(**settings: Any) -> Table:
    """Returns an empty table in the common style. The settings are those of rich's `Table`."""
    return Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, **settings)


def figures_table(rows: Sequence[tuple[str, ...]], header: Sequence[str] | None = None) -> Table:
    """Returns figures with their names; columns 1 and, with a header, 2 are aligned right."""
    shown = plain_table(show_header=header is not None)
    for place in range(len(rows[0]) if rows else 1):
        name = header[place] if header is not None else ""
        shown.add_column(Text(name), justify="right" if place == 1 or (header and place == 2) else "left")
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown


def titled(
    title: str, table: RenderableType, note: str = "", advice: str | None = None, tree: Sequence[str] = ()
) -> Group:
    """Returns a table with lines of text, and those of a tree, above and below it. Rich's title and caption cannot be
    wider than the table.
    """
    lines: list[RenderableType] = [Text(note, style="dim")] if note else []
    lines += [Text(advice)] if advice else []
    lines += [_Tree(tree)] if tree else []
    return Group(Text(title, style="bold"), table, *lines)


_BRANCHES = re.compile(r"[-+]?[│├└─ ]*(?:[\d.]+ \w+  )?")
"""What stands in a tree's line before its words: branches, and the bytes of a value. Before it, the sign of a
difference."""


class _Tree:
    """Lines of a tree. In a terminal, what does not fit goes on below, behind the tree's branches; elsewhere lines are
    as long as they are.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            if not console.is_terminal or len(line) <= options.max_width:
                yield Text(line, no_wrap=True, overflow="ignore")
                continue
            branches = _BRANCHES.match(line)
            head = branches[0] if branches else ""
            rest = re.sub(r"[^│ ]", " ", head.replace("├", "│"))
            words = Text(line[len(head) :]).wrap(console, max(options.max_width - len(head), 20), overflow="fold")
            for place, part in enumerate(words):
                yield Text((rest if place else head) + part.plain, no_wrap=True, overflow="ignore")


def report_cells(report: MemoryReport) -> list[tuple[str, str]]:
    """Returns (name, value) for each figure of a report. Figures that only some programs have are left out if they are
    0.
    """
    optional = {
        "arguments reused for outputs": report.alias_bytes,
        "host memory": report.host_bytes,
        "of the peak on the chip": report.on_chip_bytes,
        "program": report.code_bytes,
        **{f"sent, {runs:,} × {kind}": round(sent) for kind, (runs, sent) in by_kind(report.collectives).items()},
    }
    cells = [
        ("peak", format_bytes(report.peak_bytes)),
        ("arguments", format_bytes(report.argument_bytes)),
        ("outputs", format_bytes(report.output_bytes)),
        ("temporaries", format_bytes(report.temp_bytes)),
        *((name, format_bytes(size)) for name, size in optional.items() if size),
    ]
    if report.flops is not None:
        cells.append(("compiler's FLOPs", f"{report.flops:.3g}"))
    until = "buffers assigned in" if report.stopped else "compiled in"
    return [*cells, (until, format_seconds(report.compile_seconds))]


def report_view(report: MemoryReport, title: str) -> Group:
    """Returns the printed form of a compiled program: its figures, and the advice if there is one."""
    return titled(f"{title}, compiled for {report.target}", figures_table(report_cells(report)), advice=report.advice())


def report_values(report: MemoryReport) -> dict[str, Any]:
    """Returns a report's figures, its advice and its ten largest buffers as plain values, for JSON."""
    largest = [dataclasses.asdict(buffer) for buffer in report.largest(10)]
    return {**report.to_json(), "advice": report.advice(), "largest": largest}


def buffer_cells(report: MemoryReport, count: int) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of the buffers that are live at the peak, the largest first. Equal buffers of one
    operation are one row.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for buffer in report.largest(sys.maxsize):
        operation = buffer.operation if buffer.kind == "argument" else readable_operation(buffer.operation)
        kind = (buffer.kind, buffer.shape, operation or buffer.name, short_source(buffer.source))
        groups.setdefault(kind, []).append(buffer.bytes)
    return ["bytes", "buffers", "kind", "array", "operation", "source"], _largest_groups(groups, count)


_TRANSFORM = re.compile(r"(?:jit|jvp|transpose|vmap|checkpoint|remat)\((.*)\)")
_PARTS_OF_JAX = {"", "rematted_computation", *primitives.holding(Holds.CALL, Holds.CHECKPOINT)}


def readable_operation(name: str) -> str:
    """Returns a readable form of XLA's name of an operation: its pass, and the user's scopes.

    >>> readable_operation("jit(loss)/transpose(jvp(jvp()))/checkpoint/rematted_computation/Block/mlp/tanh")
    'recomputed Block/mlp/tanh'
    >>> readable_operation("jit(loss)/transpose(jvp(Head))/dot_general"), readable_operation("jit(loss)/jvp()/add")
    ('backward Head/dot_general', 'forward add')
    """
    first, _, rest = name.partition("/")
    parts = (rest if _TRANSFORM.fullmatch(first) and rest else name).split("/")
    recomputed, backward, differentiated = (word in name for word in ("rematted_computation", "transpose(", "jvp("))
    for i, part in enumerate(parts):
        while found := _TRANSFORM.fullmatch(part):
            part = found[1]
        parts[i] = part
    which = "recomputed " if recomputed else "backward " if backward else "forward " if differentiated else ""
    return which + "/".join(part for part in parts if part not in _PARTS_OF_JAX)


def _largest_groups(groups: dict[tuple[str, ...], list[int]], count: int | None) -> list[list[str]]:
    order = sorted(groups.items(), key=lambda item: -sum(item[1]))
    return [[format_bytes(sum(sizes)), str(len(sizes)), *cells] for cells, sizes in order[:count]]


def buffers_view(report: MemoryReport, count: int) -> Group:
    """Returns the printed form of the largest buffers that are live at the peak."""
    return titled(
        "Live at the peak, the largest", _text_table(*buffer_cells(report, count), text_from=2, folded=(4, 5))
    )


def residuals_view(report: ResidualReport, count: int | None = 30) -> Group:
    """Returns the printed form of the arrays that differentiation keeps, the largest first. Equal arrays of one source
    line are one row.

    Args:
      report: the result of `jaxckpt.residuals`.
      count: the most rows; None for all. The last row is the sum of the rows that are left out.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    arguments = [residual for residual in report.residuals if residual.argument]
    for residual in report.residuals:
        if not residual.argument:
            kind = (format_array(residual.dtype, residual.shape), residual.name, short_source(residual.source))
            groups.setdefault(kind, []).append(residual.bytes)
    rows = _largest_groups(groups, None)
    if count is not None and len(rows) > count:
        rest = sorted(groups.values(), key=lambda sizes: -sum(sizes))[count:]
        rows = [*rows[:count], [format_bytes(sum(map(sum, rest))), str(sum(map(len, rest))), "of other kinds", "", ""]]
    return titled(
        f"{format_bytes(report.kept_bytes)} kept for the backward pass in "
        f"{counted(sum(map(len, groups.values())), 'array')}",
        _text_table(["bytes", "arrays", "array", "name", "source"], rows, text_from=2, folded=(3, 4)),
        f"Arguments are in memory anyway: {len(arguments)}, {format_bytes(report.total_bytes - report.kept_bytes)}.",
    )


def targets_view(targets: TargetTable) -> Group:
    """Returns the printed form of the targets: those that can be compiled for, and what to install for the others."""
    rows = [
        [
            format_bytes(status.memory_bytes) if status.memory_bytes else "",
            status.name,
            "yes" if status.available else status.reason,
        ]
        for status in targets
    ]
    return titled("Targets", _text_table(["memory", "target", "can be compiled for"], rows, text_from=1, folded=(2,)))


def _text_table(header: list[str], rows: list[list[str]], *, text_from: int, folded: Container[int]) -> Table:
    """Returns a table of text. Columns before `text_from` are numbers. Columns in `folded` become narrower if there is
    not enough room.
    """
    table = plain_table()
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i < text_from else "left", no_wrap=i not in folded, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    """Returns a table in Markdown. The first column is aligned left, the others right.

    >>> print(markdown(["a", "b"], [["x", "1"]]))
    | a | b |
    |:--|--:|
    | x | 1 |
    """
    lines = [header, *rows]
    rule = "|" + "|".join([":--", *["--:"] * (len(header) - 1)]) + "|"
    text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([text[0], rule, *text[1:]])


def format_array(dtype: Any, shape: Iterable[int]) -> str:
    """Returns dtype and shape of an array, such as "float32[8, 1024]"."""
    return f"{dtype}{list(shape)}"


def format_count(count: float) -> str:
    """Returns a large number with three digits and a prefix. The unit follows it.

    >>> format_count(1234567890), format_count(-2500), format_count(0)
    ('1.23 G', '-2.5 k', '0 ')
    """
    prefix, size = next(
        (
            (prefix, size)
            for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
            if abs(count) >= size
        ),
        ("", 1.0),
    )
    return f"{count / size:.3g} {prefix}"


def format_seconds(seconds: float) -> str:
    """Returns a duration with three digits and a fitting unit.

    >>> format_seconds(0.01234), format_seconds(75.0)
    ('12.3 ms', '75 s')
    """
    size, unit = next(
        (size, unit) for size, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if seconds >= size or unit == "µs"
    )
    return f"{seconds / size:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
