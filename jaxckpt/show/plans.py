"""Plans as text, pictures and pages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group

from jaxckpt.core.outline import kept_text
from jaxckpt.core.regions import every_region
from jaxckpt.core.units import counted, format_bytes
from jaxckpt.show import html, plot, table
from jaxckpt.show.frontiers import frontier_figure, frontier_parts
from jaxckpt.show.timeline import timeline_fragment
from jaxckpt.show.tree import nothing, plan_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase
    from matplotlib.text import Annotation

    from jaxckpt.core.graph import Graph
    from jaxckpt.core.plan import MemoryEstimate, PlanReport
    from jaxckpt.memory.report import MemoryReport
    from jaxckpt.planner.frontier import Frontier


WORTH_SAYING = 0.01
"""Share of the peak from which bytes that could be donated are told."""

BESIDE = 5
"""Points between a bar, or the line of the budget, and a label."""


def plan_cells(report: PlanReport) -> list[tuple[str, str, str]]:
    """Returns (what, how much, in relation to what) for each figure of a plan that is known."""
    whole = report.unplanned_bytes

    def share(size: int) -> str:
        return f"{size / whole:.1%}" if whole else ""

    cells = []
    if whole is not None:
        without = "a plan" if report.plan.respect_checkpoints else "your checkpoints"
        cells.append((f"peak without {without}", format_bytes(whole), ""))
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
    if (unused := report.donatable_bytes or 0) > WORTH_SAYING * (whole or report.budget or 0):
        cells.append(
            (
                "not donated",
                format_bytes(unused),
                "of arguments that the step replaces: jax.jit(step, donate_argnums=...)",
            )
        )
    if report.host_bytes:
        beside = "" if report.measured_host_bytes is None else f"predicted {format_bytes(report.host_bytes)}"
        there = report.host_bytes if report.measured_host_bytes is None else report.measured_host_bytes
        cells.append(("in host memory", format_bytes(there), beside))
        waits = f", the step waits {table.format_seconds(report.host_waits)} for it" if report.host_waits else ""
        full = f"{report.host_share:.0%} full{waits}"
        cells.append(("the host's link", table.format_seconds(report.host_seconds or 0.0), full))
    if report.recompute is not None:
        more = (report.flops or 0) - (report.unplanned_flops or 0)
        cells.append(("recomputation", f"{table.format_count(more)}FLOPs", f"{report.recompute:+.1%} of the step's"))
    if (time := added_time(report)) is not None:
        cells.append((f"time {report.seconds_by}", "", f"{time:+.1%}"))
    if report.times is not None:
        planned, bare = report.times
        on = f"{planned / bare:.2f} × the {table.format_seconds(bare)} of the step as it is, run on {report.timed_on}"
        cells.append(("time of a step", table.format_seconds(planned), on))
    if report.options_line:
        cells.append(("compile with", "", report.options_line))
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
    return table.titled(title, table.figures_table(plan_cells(report)), tree=plan_lines(report.plan, graph))


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
    return report.plan.title


def _recipe(report: PlanReport) -> str:
    """Returns a sentence on what a plan does."""
    plan = report.plan
    if not any((plan.regions, plan.loops, plan.tiles, plan.recomputed)):
        return nothing(plan)
    regions = list(every_region(plan.regions))
    actions = [
        *(region.actions for region in regions),
        *(each for loop in plan.loops for each in loop.schedule.all_actions()),
    ]
    parts = [counted(len(regions), "region")] if regions else []
    parts += [counted(len(plan.loops), "planned loop")] if plan.loops else []
    parts += [f"tiles in {counted(len(plan.tiles), 'place')}"] if plan.tiles else []
    parts += [f"what runs again in {counted(len(plan.recomputed), 'place')}"] if plan.recomputed else []
    return f"{' and '.join(parts)}: {kept_text(actions) or 'keep nothing but what goes in'}."


# ------------------------------------------------------------------------------------------------------------- pictures


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
        labels = _draw_peaks(parts[0], report)
        axes = parts[1].subplots()
        plot.add_title(axes, "Live bytes over the step")
        plot.draw_timelines(axes, steps_of(report))
        _part_from_budget(figure, labels, report)
    return figure


def _peaks_figure(report: PlanReport) -> Figure:
    plot.require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(plot.STYLE):
        figure = Figure(figsize=(7.6, _peaks_height(report)), dpi=150, layout="constrained")
        _part_from_budget(figure, _draw_peaks(figure, report), report)
    return figure


def _peaks_height(report: PlanReport) -> float:
    return 1.5 + 0.55 * max(len(_peaks(report)), 1)


def _draw_peaks(figure: FigureBase, report: PlanReport) -> list[Annotation]:
    """Draws the peaks of a plan, and returns their labels; within the style of all pictures."""
    known = _peaks(report)
    most, unit, divisor = _peaks_scale(report)
    axes = figure.subplots()
    labels: list[Annotation] = []
    for place, (name, peak) in enumerate(known):
        _peak_bar(axes, place, peak / divisor, plot.GREY if name == "without a plan" else plot.FRONT)
        if name == "planned, predicted" and report.predicted is not None:
            _parts_bar(axes, place, report.predicted, divisor)
        label = axes.annotate(
            format_bytes(peak), (peak / divisor, place), (BESIDE, 0), textcoords="offset points", va="center",
            fontsize=8.5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
        labels.append(label)
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
    added = "" if time is None else f": {time:+.1%} time {report.seconds_by}"
    plot.add_title(axes, f"Plan{'' if report.target is None else f' on {report.target}'}{added}")
    return labels


def _peaks_scale(report: PlanReport) -> tuple[int, str, float]:
    """Returns (the most bytes that the peaks' picture shows, its unit, the bytes of the unit)."""
    most = max([*(peak for _, peak in _peaks(report)), report.budget or 0, 1])
    return (most, *plot.unit_of(most))


def _part_from_budget(figure: Figure, labels: Sequence[Annotation], report: PlanReport) -> None:
    """Moves labels of peaks that the line of the budget would cross to the right of it."""
    if report.budget is None:
        return
    figure.draw_without_rendering()  # fixes the layout, because everything below is measured in it
    scale = figure.dpi / 72
    *_, divisor = _peaks_scale(report)
    for label in labels:
        axes: Any = label.axes
        line, _ = axes.transData.transform((report.budget / divisor, 0))
        box = label.get_window_extent().padded(2 * scale)
        if box.x0 < line < box.x1:
            end, _ = axes.transData.transform(label.xy)
            label.set_position(((line - end) / scale + BESIDE, 0))


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
        *frontier_parts(frontier),
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
