"""Self-contained pages: one file that loads nothing from elsewhere, with a light and a dark style."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxckpt.core.shown import THIS
from jaxckpt.core.units import format_bytes
from jaxckpt.show import plot
from jaxckpt.show.table import NOTE, buffer_cells, comparison_cells, report_cells
from jaxckpt.show.timeline import timeline_fragment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxckpt.memory.compare import Comparison
    from jaxckpt.memory.report import MemoryReport

BUFFERS = 12
"""Number of largest buffers that a page lists for each variant."""

_CSS = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #616e7c; --rule: #cbd2d9; --ground: #ffffff; --mark: #e6f0fb; --link: #0967d2 }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #9aa5b1; --rule: #3e4c59; --ground: #14191f; --mark: #16324f; --link: #6db3f8 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground) }
body { max-width: 62rem; margin: 2.5rem auto; padding: 0 1.25rem }
h1 { font-size: 1.5rem; margin: 0 0 .25rem } h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem }
p { margin: .5rem 0 } .soft, figcaption { color: var(--soft); font-size: .9em }
.advice { border-left: 4px solid var(--link); padding: .4rem .9rem; background: var(--mark) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule) }
th { font-weight: 600; border-bottom-width: 2px } th:first-child, td:first-child, .text { text-align: left }
tr.front td { background: var(--mark); font-weight: 600 }
td.text { white-space: normal } td.source { overflow-wrap: anywhere; color: var(--soft); font-size: .9em; min-width: 12rem }
figure { margin: 1rem 0 }
figure img { background: #ffffff; border-radius: 6px; padding: .5rem; box-sizing: border-box; width: 100%; height: auto }
pre { font: 13px/1.45 ui-monospace, monospace; margin: .5rem 0 }
summary { cursor: pointer; padding: .35rem 0 } details { border-bottom: 1px solid var(--rule) } details table { margin: .25rem 0 1rem }
"""

# In a notebook the page belongs to somebody else: only borders, and inherited colours.
_FRAGMENT_CSS = (
    ".jaxckpt td, .jaxckpt th { text-align: right; padding: .2em .7em } .jaxckpt td:first-child, .jaxckpt "
    "th:first-child { text-align: left }"
    " .jaxckpt tr.front td { font-weight: bold }"
)


def comparison_page(comparison: Comparison) -> str:
    """Returns the page of a comparison: table, picture, timelines of the Pareto front, largest buffers of each variant.

    Raises:
      MissingPackageError: matplotlib, which draws the pictures, is not installed.
    """
    base = comparison.baseline
    shown = {row.name: row.report for row in (base, *(row for row in comparison.pareto() if row is not base))}
    parts = [
        f"<h1>Checkpointing variants on {escape(comparison.target)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in _summary(comparison)),
        *(f"<p>{escape(f'{name} {why}.')}</p>" for name, why in comparison.left_out),
        _advice(comparison.advice()),
        f'<div class="wide">{_comparison_table(comparison)}</div>',
        f'<p class="soft">{escape(NOTE)}</p>',
        "<h2>Memory against recomputation</h2>",
        image(
            plot.comparison_figure(comparison, title=False),
            "Compiled peak of each variant against the FLOPs that it computes again.",
        ),
        "<h2>Live bytes over the step</h2>",
        image(
            plot.timelines_figure(shown, title=False),
            "Bytes that are live at each point of the compiled schedule, of the first variant and the Pareto front.",
        ),
        "<h2>Every buffer over the step</h2>",
        timeline_fragment(shown),
        "<h2>Largest buffers at the peak</h2>",
        *(details(f"{row.name}: {format_bytes(row.peak_bytes)}", buffers_of(row.report)) for row in comparison),
    ]
    return page(f"Checkpointing variants on {comparison.target}", parts)


def report_page(report: MemoryReport, title: str, beside: Mapping[str, MemoryReport] | None = None) -> str:
    """Returns the page of one compiled program: figures, interactive timeline, largest buffers.

    Args:
      report: what was compiled.
      title: of the page.
      beside: name -> report of other programs, whose timelines are drawn beside this one.

    Raises:
      TargetError: the compiler gave no buffer assignment that could be read.
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">compiled for {escape(report.target)}</p>',
        _advice(report.advice()),
        figures_of(report_cells(report)),
        "<h2>Every buffer over the program</h2>",
        timeline_fragment({THIS: report, **(beside or {})}),
        "<h2>Largest buffers at the peak</h2>",
        f'<div class="wide">{buffers_of(report)}</div>',
    ]
    return page(title, parts)


def comparison_fragment(comparison: Comparison) -> str:
    """Returns the table of a comparison for a notebook."""
    return fragment(_comparison_table(comparison), " ".join(filter(None, [NOTE, comparison.advice()])))


def fragment(content: str, note: str) -> str:
    """Returns a table and a note below it for a notebook."""
    return f'<div class="jaxckpt"><style>{_FRAGMENT_CSS}</style>{content}<p><small>{escape(note)}</small></p></div>'


def _summary(comparison: Comparison) -> Iterable[str]:
    base = comparison.baseline
    least = min(comparison, key=lambda row: (row.peak_bytes, row.recompute_flops))
    if least is base or not base.peak_bytes:
        yield f"No variant needs less than {base.name}: {format_bytes(base.peak_bytes)} at the peak."
        return
    more = (
        f", for {least.recompute:.1%} more FLOPs than the leanest"
        if least.recompute
        else ", without recomputing anything"
    )
    yield (
        f"{least.name} needs least: {format_bytes(least.peak_bytes)} at the peak, "
        f"{least.peak_bytes / base.peak_bytes:.0%} of the "
        f"{format_bytes(base.peak_bytes)} of {base.name}{more}."
    )


def _comparison_table(comparison: Comparison) -> str:
    header, rows = comparison_cells(comparison)
    return table_of(header, rows, ["front" if row.on_front else "" for row in comparison])


def buffers_of(report: MemoryReport) -> str:
    """Returns the table of the largest buffers that are live at the peak."""
    header, rows = buffer_cells(report, BUFFERS)
    return table_of(header, rows, text_from=2)


def figures_of(rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of figures, which has no header."""
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def table_of(
    header: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = (), text_from: int | None = None
) -> str:
    """Returns a table of text. Columns from `text_from` on are aligned left; the last column is a source line."""

    def kind(i: int) -> str:
        if text_from is None or i < text_from:
            return ""
        return ' class="text source"' if i == len(header) - 1 else ' class="text"'

    head = "".join(f"<th{kind(i).replace(' source', '')}>{escape(cell)}</th>" for i, cell in enumerate(header))
    lines = []
    for j, row in enumerate(rows):
        cells = "".join(f"<td{kind(i)}>{escape(cell)}</td>" for i, cell in enumerate(row))
        lines.append(f'<tr class="{classes[j]}">{cells}</tr>' if classes and classes[j] else f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def image(figure: Figure, caption: str) -> str:
    """Returns a figure as an image within the page."""
    # As an image, the picture does not share styles and ids with the page. Letters are outlines: the reader may not
    # have the font.
    data = base64.b64encode(plot.render(figure, "svg", outlines=True)).decode()
    return f'<figure><img alt="{escape(caption)}" src="data:image/svg+xml;base64,{data}"><figcaption>{escape(caption)}</figcaption></figure>'


def details(summary: str, content: str) -> str:
    """Returns content that a click on its summary opens."""
    return f'<details><summary>{escape(summary)}</summary><div class="wide">{content}</div></details>'


def _advice(text: str | None) -> str:
    return f'<p class="advice">{escape(text)}</p>' if text else ""


def page(title: str, parts: Iterable[str]) -> str:
    """Returns a whole page from its parts, without empty parts."""
    body = "\n".join(filter(None, parts))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def escape(value: str) -> str:
    """Returns text as it is written in a page."""
    return html.escape(str(value))
