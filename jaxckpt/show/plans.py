"""Plans and frontiers as text, pictures and pages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from jaxckpt.core.outline import kept_text
from jaxckpt.core.regions import every_region
from jaxckpt.core.units import counted, format_bytes
from jaxckpt.show import html, plot, table
from jaxckpt.show.timeline import timeline_fragment
from jaxckpt.show.tree import nothing, plan_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase
    from matplotlib.text import Annotation
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from jaxckpt.core.graph import Graph
    from jaxckpt.core.plan import MemoryEstimate, PlanReport
    from jaxckpt.memory.report import MemoryReport
    from jaxckpt.planner.frontier import Frontier, Point, Way


def plan_cells(report: PlanReport) -> list[tuple[str, str, str]]:
    """Returns (what, how much, in relation to what) for each figure of a plan that is known."""
    whole = report.unplanned_bytes

    def share(size: int) -> str:
        return f"{size / whole:.1%}" if whole else ""

    cells = []
    if whole is not None:
        cells.append(("peak without a plan", format_bytes(whole), ""))
    if report.budget is not None:
        cells.append(("budget", format_bytes(report.budget), share(report.budget)))
    if report.peak_bytes is not None:
        cells.append(("peak, compiled", format_bytes(report.peak_bytes), share(report.peak_bytes)))
    if report.predicted_bytes is not None:
        error = report.prediction_error
        beside = share(report.predicted_bytes) if error is None else f"{error:+.1%} off"
        cells.append(("peak, predicted", format_bytes(report.predicted_bytes), beside))
    if report.predicted is not None and report.predicted.kept_bytes:
        cells.append(("kept for the backward pass", format_bytes(report.predicted.kept_bytes), ""))
    if report.donated_bytes:
        cells.append(("donated", format_bytes(report.donated_bytes), "of arguments, which results are written to"))
    if report.host_bytes:
        beside = "" if report.measured_host_bytes is None else f"predicted {format_bytes(report.host_bytes)}"
        there = report.host_bytes if report.measured_host_bytes is None else report.measured_host_bytes
        cells.append(("in host memory", format_bytes(there), beside))
        cells.append(
            ("the host's link", table.format_seconds(report.host_seconds or 0.0), f"{report.host_share:.0%} full")
        )
    if report.recompute is not None:
        more = (report.flops or 0) - (report.unplanned_flops or 0)
        cells.append(("recomputation", f"{table.format_count(more)}FLOPs", f"{report.recompute:+.1%} of the step's"))
    if (time := added_time(report)) is not None:
        cells.append(("time by the target's rates", "", f"{time:+.1%}"))
    if report.times is not None:
        planned, bare = report.times
        on = f"{planned / bare:.2f} × the {table.format_seconds(bare)} of the step as it is, run on {report.timed_on}"
        cells.append(("time of a step", table.format_seconds(planned), on))
    return cells


def added_time(report: PlanReport) -> float | None:
    """Returns the share of time that a plan adds: of the traced steps where they are known, else as the planner has
    it.
    """
    return report.overhead if report.slowdown is None else report.slowdown


def plan_view(report: PlanReport, graph: Graph, title: str) -> Group:
    """Returns what is printed of a plan: its figures, and its regions as a tree.

    Args:
      report: the plan and what is known of it.
      graph: of the function that it was made for.
      title: what was planned.
    """
    return table.titled(
        title, table.figures_table(plan_cells(report)), advice="\n".join(plan_lines(report.plan, graph))
    )


def report_view(report: PlanReport) -> Group:
    """Returns what is printed of a report where the function is not at hand: its figures, and how much the plan
    holds.
    """
    return table.titled(_title(report), table.figures_table(plan_cells(report)), advice=_recipe(report))


def report_fragment(report: PlanReport) -> str:
    """Returns the report for a notebook: its table, its regions, and live bytes if matplotlib is installed."""
    content = html.table_of([_title(report), "", ""], plan_cells(report))
    content += html.details("What is kept where", _recipe_lines(report))
    if steps_of(report) and importlib.util.find_spec("matplotlib") is not None:
        content += html.details("Live bytes over the step", _timelines(report))
    return html.fragment(content, _recipe(report))


def report_page(report: PlanReport) -> str:
    """Returns the page of a report: figures, peaks, every buffer of both steps, regions, the largest buffers.

    Raises:
      MissingPackageError: matplotlib, which draws the pictures, is not installed.
    """
    title = _title(report)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        html.figures_of(plan_cells(report)),
        f"<p>{html.escape(_recipe(report))}</p>",
    ]
    if _peaks(report):
        parts += ["<h2>Peaks</h2>", html.image(_peaks_figure(report), "Peaks of the step against the budget.")]
    if steps_of(report):
        parts += ["<h2>Every buffer over the step</h2>", timeline_fragment(steps_of(report))]
    parts += ["<h2>What is kept where</h2>", f'<div class="wide">{_recipe_lines(report)}</div>']
    if report.measured is not None:
        parts += ["<h2>Largest buffers at the peak</h2>", f'<div class="wide">{html.buffers_of(report.measured)}</div>']
    return html.page(title, parts)


def steps_of(report: PlanReport) -> dict[str, MemoryReport]:
    """Returns name -> what the compiler said, of the steps that were compiled: without the plan and with it."""
    steps = {"without a plan": report.unplanned, "planned": report.measured}
    return {name: step for name, step in steps.items() if step is not None}


def _timelines(report: PlanReport) -> str:
    steps = steps_of(report)
    with_it = "without the plan and with it" if len(steps) == 2 else next(iter(steps))
    caption = f"Bytes that are live at each point of the compiled schedule, {with_it}."
    return html.image(plot.timelines_figure(steps, title=False), caption)


def _recipe_lines(report: PlanReport) -> str:
    return f"<pre>{html.escape(str(report.plan))}</pre>"


def _title(report: PlanReport) -> str:
    return f"Plan for {report.plan.fingerprint}{'' if report.target is None else f' on {report.target}'}"


def _recipe(report: PlanReport) -> str:
    """Returns a sentence on what a plan does."""
    plan = report.plan
    if not plan.regions and not plan.loops and not plan.tiles:
        return nothing(plan)
    regions = list(every_region(plan.regions))
    actions = [
        *(region.actions for region in regions),
        *(each for loop in plan.loops for each in loop.schedule.all_actions()),
    ]
    parts = [counted(len(regions), "region")] if regions else []
    parts += [counted(len(plan.loops), "planned loop")] if plan.loops else []
    parts += [f"tiles in {counted(len(plan.tiles), 'place')}"] if plan.tiles else []
    return f"{' and '.join(parts)}: {kept_text(actions) or 'keep nothing but what goes in'}."


# --------------------------------------------------------------------------------------------------------- the frontier

FRONTIER_NOTE = (
    "peak: compiled, with arguments and outputs. predicted: before the plan was compiled. recomputed: FLOPs more "
    "than those of the step without a plan; time: by the target's rates."
)
OWN = 7
"""Columns of a plan itself; those of the way beside it follow."""
BESIDE_NOTE = " beside it: the cheapest other way that needs no more memory than the plan."


def _note(frontier: Frontier) -> str:
    return FRONTIER_NOTE + (BESIDE_NOTE if frontier.others else "")


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
    "seconds": "time of recomputation by the target's rates, in % of the step",
    "flops": "recomputed FLOPs, in % of the step",
}


def save_plan_report(report: PlanReport, path: str | os.PathLike[str]) -> None:
    """Writes the picture of a plan's report; raises as `jaxckpt.show.plot.save_comparison`."""
    plot.save(path, lambda: plan_report_figure(report))


def _peaks(report: PlanReport) -> list[tuple[str, int]]:
    """Returns (name, bytes) of the peaks that are known."""
    bars = [("without a plan", report.unplanned_bytes), ("planned, predicted", report.predicted_bytes)]
    bars += [("planned, compiled", report.peak_bytes)]
    return [(name, peak) for name, peak in bars if peak is not None]


def plan_report_figure(report: PlanReport) -> Figure:
    """Returns the figure of a plan's peaks: without the plan, predicted (by its parts), compiled, against the budget.
    Below it, where the step was compiled, are its live bytes over those of the step without the plan.
    """
    plot.require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    if not steps_of(report):
        return _peaks_figure(report)
    high = _peaks_height(report)
    with matplotlib.rc_context(plot.STYLE):
        figure = Figure(figsize=(7.6, high + 3.6), dpi=150, layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(high, 3.6))
        _draw_peaks(parts[0], report)
        axes = parts[1].subplots()
        plot.add_title(axes, "Live bytes over the step")
        plot.draw_timelines(axes, steps_of(report))
    return figure


def _peaks_figure(report: PlanReport) -> Figure:
    plot.require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(plot.STYLE):
        figure = Figure(figsize=(7.6, _peaks_height(report)), dpi=150, layout="constrained")
        _draw_peaks(figure, report)
    return figure


def _peaks_height(report: PlanReport) -> float:
    return 1.5 + 0.55 * max(len(_peaks(report)), 1)


def _draw_peaks(figure: FigureBase, report: PlanReport) -> None:
    """Draws the peaks of a plan; within the style of all pictures."""
    known = _peaks(report)
    most = max([*(peak for _, peak in known), report.budget or 0, 1])
    unit, divisor = plot.unit_of(most)
    axes = figure.subplots()
    for place, (name, peak) in enumerate(known):
        _peak_bar(axes, place, peak / divisor, plot.GREY if name == "without a plan" else plot.FRONT)
        if name == "planned, predicted" and report.predicted is not None:
            _parts_bar(axes, place, report.predicted, divisor)
        axes.annotate(
            format_bytes(peak), (peak / divisor, place), (5, 0), textcoords="offset points", va="center",
            fontsize=8.5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    if report.budget is not None:
        colour = plot.LINES[1]
        axes.axvline(report.budget / divisor, color=colour, linewidth=1.1, linestyle="--", label="budget")
    axes.set_yticks(range(len(known)), [name for name, _ in known])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * most / divisor)
    axes.set_xlabel(f"peak of the step ({unit})")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    time = added_time(report)
    added = "" if time is None else f": {time:+.1%} time by the target's rates"
    plot.add_title(axes, f"Plan{'' if report.target is None else f' on {report.target}'}{added}")


def _peak_bar(axes: Axes, place: int, width: float, colour: str, left: float = 0.0, label: str | None = None) -> None:
    axes.barh(place, width, left=left, height=0.55, color=colour, label=label)


def _parts_bar(axes: Axes, place: int, predicted: MemoryEstimate, divisor: float) -> None:
    """Draws the parts of a predicted peak, as far as the peak goes: what is beyond lives in the buffers of others."""
    left = 0
    for label, size, colour in (
        ("arguments", predicted.argument_bytes, plot.LINES[0]),
        ("kept for the backward pass", predicted.kept_bytes, plot.LINES[4]),
        ("work: gradients, recomputation", predicted.work_bytes, plot.LINES[5]),
    ):
        width = max(min(size, predicted.peak_bytes - left), 0)
        _peak_bar(axes, place, width / divisor, colour, left / divisor, label)
        left += width


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
      measures: of recomputation, a panel for each: "seconds" by the target's rates, "flops".
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
            labels += _frontier(axes, frontier, chosen, measure, key, last=place == len(measures) - 1)
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
    points: Sequence[tuple[float, float, str]], right: float, top: float
) -> list[tuple[tuple[float, float], str]]:
    """Returns where to write which names: points that lie too near to one another for two names get one."""
    groups: list[list[tuple[float, float, str]]] = []
    for x, y, name in points:
        near = next((g for g in groups if abs(g[0][0] - x) < 0.025 * right and abs(g[0][1] - y) < 0.03 * top), None)
        if near is None:
            groups.append([(x, y, name)])
        else:
            near.append((x, y, name))
    return [
        ((max(x for x, *_ in group), group[0][1]), ", ".join(sorted(name for *_, name in group))) for group in groups
    ]


def _frontier(
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
    right = max([x(way) for way in drawn] + [1.0])
    axes.set_xlim(-0.05 * right, 1.12 * right)
    axes.set_ylim(0, top)
    axes.set_xlabel(MEASURES[measure])
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
    together = _together([(x(way), (way.peak_bytes or 0) / divisor, key[way.name]) for way in shown], right, top)
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


def plan_page(report: PlanReport, graph: Graph, title: str, frontier: Frontier) -> str:
    """Returns the page of a plan: figures, regions, the picture, every buffer of the compiled steps, the largest ones.

    Args:
      report: of the plan.
      graph: of the function.
      title: of the page.
      frontier: that the plan lies on.

    Raises:
      MissingPackageError: matplotlib, which draws the pictures, is not installed.
    """
    tree = html.escape("\n".join(plan_lines(report.plan, graph)))
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        html.figures_of(plan_cells(report)),
        "<h2>What is kept where</h2>",
        f'<div class="wide"><pre>{tree}</pre></div>',
        "<h2>Memory against recomputation</h2>",
        html.image(
            frontier_figure(frontier, report, title=""),
            "Peak against the time of recomputation, of this plan, of plans for other budgets, and of the step as "
            "it is.",
        ),
        *_frontier_parts(frontier),
    ]
    measured = report.measured
    if measured is not None:
        parts += [
            "<h2>Every buffer over the step</h2>",
            timeline_fragment(steps_of(report)),
            "<h2>Largest buffers at the peak</h2>",
            f'<div class="wide">{html.buffers_of(measured)}</div>',
        ]
    return html.page(title, parts)


def frontier_page(frontier: Frontier, title: str) -> str:
    """Returns the page of a frontier: table and picture; raises as `plan_page`."""
    picture = html.image(frontier_figure(frontier, title=""), "Peak against the time of recomputation.")
    return html.page(title, [f"<h1>{html.escape(title)}</h1>", picture, *_frontier_parts(frontier)])


def _frontier_parts(frontier: Frontier) -> list[str]:
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
