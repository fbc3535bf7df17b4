"""Frontiers as text, pictures and pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from jaxckpt.core.units import format_bytes
from jaxckpt.show import html, plot, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from jaxckpt.core.plan import PlanReport
    from jaxckpt.planner.frontier import Frontier, Point, Way


FRONTIER_NOTE = (
    "peak: compiled, with arguments and outputs. predicted: before the plan was compiled. recomputed: FLOPs more "
    "than those of the step without a plan; time: {by}."
)
OWN = 7
"""Columns of a plan itself; those of the way beside it follow."""
BESIDE_NOTE = " beside it: the cheapest other way that needs no more memory than the plan."


def _note(frontier: Frontier) -> str:
    return FRONTIER_NOTE.format(by=frontier.seconds_by) + (BESIDE_NOTE if frontier.others else "")


def frontier_cells(frontier: Frontier) -> tuple[list[str], list[list[str]]]:
    """Returns the table's header and rows as text; the terminal, the page and the benchmarks show the same."""
    header = ["budget", "peak", "of budget", "predicted", "error", "recomputed", "time"]
    if frontier.others:
        header += ["beside it", "recomputed", "time"]
    return header, [_point_cells(frontier, point) for point in frontier.points]


def _point_cells(frontier: Frontier, point: Point) -> list[str]:
    width = 10 if frontier.others else 7
    budget = f"{point.budget}" if isinstance(point.budget, str) else format_bytes(point.budget_bytes)
    if point.plan is None:
        return [budget, "no plan fits", *[""] * (width - 2)]
    cells = [budget]
    cells += (
        ["", ""]
        if point.peak_bytes is None
        else [format_bytes(point.peak_bytes), f"{point.peak_bytes / point.budget_bytes:.1%}"]
    )
    cells.append("" if point.predicted_bytes is None else format_bytes(point.predicted_bytes))
    cells.append("" if point.prediction_error is None else f"{point.prediction_error:+.1%}")
    cells += [f"{frontier.recompute(point):+.1%}", f"{frontier.overhead(point):+.1%}"]
    if frontier.others:
        best = frontier.best_other(point)
        cells += (
            ["none", "", ""]
            if best is None
            else [best.name, f"{frontier.recompute(best):+.1%}", f"{frontier.overhead(best):+.1%}"]
        )
    return cells


class _FrontierTables:
    """The table of a frontier; two of them, one below the other, where the terminal is too narrow for one."""

    def __init__(self, header: list[str], rows: list[list[str]]) -> None:
        self.header, self.rows = header, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        every = list(range(len(self.header)))
        whole = self._table(every)
        if len(every) <= OWN or console.measure(whole, options=options.update(width=1000)).maximum <= options.max_width:
            yield whole
        else:
            yield self._table(every[:OWN])
            yield self._table([0, *every[OWN:]])

    def _table(self, places: list[int]) -> Table:
        shown = table.plain_table()
        for i in places:
            shown.add_column(
                self.header[i], justify="left" if i in (0, OWN) else "right", no_wrap=i != OWN, overflow="fold"
            )
        for row in self.rows:
            shown.add_row(*(Text(row[i]) for i in places))
        return shown


def frontier_view(frontier: Frontier) -> Group:
    """Returns what is printed of a frontier: its table, what the columns mean, and why budgets have no plan."""
    shown = _FrontierTables(*frontier_cells(frontier))
    unplanned = (
        ""
        if frontier.unplanned.peak_bytes is None
        else f"; as it is the step needs {format_bytes(frontier.unplanned.peak_bytes)}"
    )
    infeasible = next((point.why for point in reversed(frontier.points) if point.plan is None), "")
    return table.titled(f"Plans on {frontier.target}{unplanned}", shown, _note(frontier), infeasible)


# ------------------------------------------------------------------------------------------------------------- pictures

MEASURES = {
    "seconds": "time of recomputation {by}, in % of the step",
    "flops": "recomputed FLOPs, in % of the step",
}


def save_frontier(frontier: Frontier, path: str | os.PathLike[str]) -> None:
    """Writes the picture of a frontier: peak against recomputation; raises as `jaxckpt.show.plot.save_comparison`."""
    plot.save(path, lambda: frontier_figure(frontier))


def frontier_figure(
    frontier: Frontier,
    chosen: PlanReport | None = None,
    *,
    title: str | None = None,
    measures: Sequence[str] = ("seconds",),
) -> Figure:
    """Returns the figure of peak memory against recomputation: plans as a line, other ways as points.

    Args:
      frontier: what to draw; plans that were not compiled are drawn at their predicted peak, hollow.
      chosen: a plan to point out, with its budget as a line.
      title: above the figure; None for one of its own, "" for none.
      measures: of recomputation, a panel for each: "seconds" or "flops".
    """
    plot.require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    if title is None:
        title = f"Memory against recomputation on {frontier.target}"
    with matplotlib.rc_context(plot.STYLE):
        key = _letters(frontier, _top(frontier, chosen))
        width = (7.6 if len(measures) == 1 else 6.0 * len(measures)) + (2.4 if key else 0)
        figure = Figure(figsize=(width, 4.8), dpi=150, layout="constrained")
        labels: list[Annotation] = []
        for place, (axes, measure) in enumerate(
            zip(figure.subplots(1, len(measures), squeeze=False, sharey=True)[0], measures)
        ):
            labels += _draw_panel(axes, frontier, chosen, measure, key, last=place == len(measures) - 1)
            if title and not place:
                plot.add_title(axes, title)
        plot.part_labels(figure, labels)
    return figure


def _top(frontier: Frontier, chosen: PlanReport | None = None) -> float:
    """Returns the bytes up to which is drawn."""
    planned: list[Point | PlanReport] = [point for point in frontier.points if point.plan is not None]
    planned += [] if chosen is None else [chosen]
    ways = [way.peak_bytes for way in (frontier.unplanned, *frontier.others) if way.peak_bytes is not None]
    largest = max([*ways, *map(_peak, planned)], default=1)
    # What needs far more than the step as it is says nothing about saving, and would squeeze all the rest.
    return 1.12 * min(largest, 1.3 * (frontier.unplanned.peak_bytes or largest))


def _letters(frontier: Frontier, top: float) -> dict[str, str]:
    """Returns a letter for each way that is drawn and not the planner's, from the largest peak down."""
    ways = sorted((w for w in frontier.others if w.peak_bytes is not None), key=lambda way: -(way.peak_bytes or 0))
    names = [way.name for way in ways if (way.peak_bytes or 0) <= top]
    return {name: chr(ord("a") + i) if i < 26 else f"a{i - 25}" for i, name in enumerate(names)}


def _together(
    points: Sequence[tuple[float, float, str]], wide: float, top: float
) -> list[tuple[tuple[float, float], str]]:
    """Returns where to write which names: points that lie too near to one another for two names get one."""
    groups: list[list[tuple[float, float, str]]] = []
    for x, y, name in points:
        near = next((g for g in groups if abs(g[0][0] - x) < 0.025 * wide and abs(g[0][1] - y) < 0.03 * top), None)
        if near is None:
            groups.append([(x, y, name)])
        else:
            near.append((x, y, name))
    return [
        ((max(x for x, *_ in group), group[0][1]), ", ".join(sorted(name for *_, name in group))) for group in groups
    ]


def _draw_panel(
    axes: Axes, frontier: Frontier, chosen: PlanReport | None, measure: str, key: dict[str, str], last: bool
) -> list[Annotation]:
    """Draws a panel, and returns its labels of points."""
    base = getattr(frontier.unplanned, measure) or 1

    def x(way: Way | Point | PlanReport) -> float:
        return 100 * ((getattr(way, measure) or 0) / base - 1)

    shown = [way for way in frontier.others if way.name in key]
    planned = [point for point in frontier.points if point.plan is not None]
    unit, divisor = plot.unit_of(int(_top(frontier, chosen)))
    top = _top(frontier, chosen) / divisor
    drawn: list[Way | Point | PlanReport] = [
        frontier.unplanned,
        *shown,
        *planned,
        *([chosen] if chosen is not None else []),
    ]
    places = [x(way) for way in drawn]
    left, right = min([*places, 0.0]), max([*places, 1.0])
    wide = right - left
    axes.set_xlim(left - 0.05 * wide, right + 0.12 * wide)
    axes.set_ylim(0, top)
    axes.set_xlabel(MEASURES[measure].format(by=frontier.seconds_by))
    axes.set_ylabel(f"peak of the step ({unit})")
    axes.grid(color=plot.FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    if chosen is not None and chosen.budget is not None:
        axes.axhline(
            chosen.budget / divisor, color=plot.LINES[1], linewidth=1.1, linestyle="--", zorder=2, label="budget"
        )
    if shown:
        axes.plot(
            [x(way) for way in shown], [(way.peak_bytes or 0) / divisor for way in shown], "o", markersize=5.5,
            markerfacecolor="white", markeredgecolor=plot.GREY, zorder=3, label="placed by hand",
        )  # fmt: skip
    together = _together([(x(way), (way.peak_bytes or 0) / divisor, key[way.name]) for way in shown], wide, top)
    labels = [
        axes.annotate(letters, place, (4, 4), textcoords="offset points", fontsize=8, color=plot.GREY, zorder=3)
        for place, letters in together
    ]
    _plan_line(axes, [(x(point), _peak(point) / divisor, point.peak_bytes is not None) for point in planned])
    if frontier.unplanned.peak_bytes is not None:
        axes.plot(
            0, frontier.unplanned.peak_bytes / divisor, "s", markersize=6.5, color=plot.INK, zorder=4, label="as it is"
        )
    if chosen is not None:
        name = "this plan" + ("" if chosen.peak_bytes is not None else ", predicted")
        axes.plot(x(chosen), _peak(chosen) / divisor, "*", markersize=15, color=plot.LINES[1], zorder=6, label=name)
    if last:
        axes.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor=plot.FAINT, fontsize=8.5)
        names = [f"{letter}  {name}" for name, letter in key.items()]
        axes.text(
            1.03, 1, "\n".join(names), transform=axes.transAxes, va="top", fontsize=8, color=plot.GREY, linespacing=1.5
        )
    return labels


def _plan_line(axes: Axes, points: list[tuple[float, float, bool]]) -> None:
    points = sorted(points, key=lambda place: place[1])
    if not points:
        return
    compiled = all(done for *_, done in points)
    axes.plot(
        [x for x, *_ in points], [y for _, y, _ in points], "-" if compiled else ":", color=plot.FRONT, linewidth=1.6,
        marker="o", markersize=6, markerfacecolor=plot.FRONT if compiled else "white", zorder=5,
        label="planner" if compiled else "planner, predicted",
    )  # fmt: skip


def _peak(point: Point | PlanReport) -> int:
    return point.peak_bytes or point.predicted_bytes or 0


# ---------------------------------------------------------------------------------------------------------------- pages


def frontier_page(frontier: Frontier, title: str) -> str:
    """Returns the page of a frontier: table and picture; raises as `plan_page`."""
    picture = html.image(frontier_figure(frontier, title=""), "Peak against the time of recomputation.")
    return html.page(title, [f"<h1>{html.escape(title)}</h1>", picture, *frontier_parts(frontier)])


def frontier_parts(frontier: Frontier) -> list[str]:
    """Returns the parts of a page that have a frontier's table and note; none where nothing was compiled."""
    if all(point.peak_bytes is None for point in frontier.points):
        return []
    return [
        f'<div class="wide">{_frontier_table(frontier)}</div>',
        f'<p class="soft">{html.escape(_note(frontier))}</p>',
        _others(frontier),
    ]


def _others(frontier: Frontier) -> str:
    if not frontier.others:
        return ""
    rows = [
        [
            way.name,
            "" if way.peak_bytes is None else format_bytes(way.peak_bytes),
            f"{frontier.recompute(way):+.1%}",
            f"{frontier.overhead(way):+.1%}",
        ]
        for way in sorted((frontier.unplanned, *frontier.others), key=lambda way: way.peak_bytes or 0)
    ]
    return html.details("Placed by hand", html.table_of(["way", "peak", "recomputed", "time"], rows))


def _frontier_table(frontier: Frontier) -> str:
    return html.table_of(*frontier_cells(frontier))


def frontier_fragment(frontier: Frontier) -> str:
    """Returns the frontier's table for a notebook."""
    return html.fragment(_frontier_table(frontier), _note(frontier))
