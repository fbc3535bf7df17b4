"""Plans from files, and two plans side by side: views, picture and page without the function that was planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxckpt.core.units import format_bytes
from jaxckpt.show import frontiers, html, plans, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group

    from jaxckpt.core.plan import PlanReport
    from jaxckpt.planner.frontier import Frontier


def saved_view(report: PlanReport | None, tree: Sequence[str], title: str) -> Group:
    """Returns what is printed of a plan from a file: its figures and its tree."""
    return table.titled(title, table.figures_table([] if report is None else plans.plan_cells(report)), tree=tree)


def saved_figure(report: PlanReport | None, frontier: Frontier | None, title: str) -> Figure:
    """Returns the frontier with the plan on it; without a frontier, the plan's peaks."""
    if frontier is not None:
        return frontiers.frontier_figure(frontier, report, title=title)
    assert report is not None, "a plan without a report has nothing to draw"
    return plans.plan_report_figure(report)


def saved_page(report: PlanReport | None, tree: Sequence[str], title: str, frontier: Frontier | None) -> str:
    """Returns the page of a plan from a file: figures, regions, picture.

    Raises:
      MissingPackageError: matplotlib, which draws the pictures, is not installed.
    """
    lines = html.escape("\n".join(tree))
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if report is not None:
        parts.append(html.figures_of(plans.plan_cells(report)))
    parts += ["<h2>What is kept where</h2>", f'<div class="wide"><pre>{lines}</pre></div>']
    if report is not None or frontier is not None:
        parts += ["<h2>Memory</h2>", html.image(saved_figure(report, frontier, ""), "The plan's peak.")]
    if frontier is not None and any(point.peak_bytes for point in frontier.points):
        parts.append(f'<div class="wide">{html.table_of(*frontiers.frontier_cells(frontier))}</div>')
    return html.page(title, parts)


def difference_cells(first: PlanReport | None, second: PlanReport | None) -> list[tuple[str, str, str, str]]:
    """Returns (what, of the first plan, of the second, how much the second has more) for each figure that is known of
    one of them.
    """

    def row(what: str, name: str) -> tuple[str, str, str, str] | None:
        one, two = (None if report is None else getattr(report, name) for report in (first, second))
        if one is None and two is None:
            return None
        show = format_bytes if name.endswith("bytes") or name == "budget" else _flops
        shown = ["" if figure is None else show(figure) for figure in (one, two)]
        more = ""
        if one is not None and two is not None:
            gap = two - one
            share = f" ({gap / one:+.1%})" if one and gap else ""
            more = f"{'-' if gap < 0 else '+'}{show(abs(gap))}{share}" if gap else "the same"
        return what, shown[0], shown[1], more

    found: list[tuple[str, str, str, str]] = []
    targets = [None if report is None else report.target for report in (first, second)]
    if any(target is not None for target in targets):
        found.append(("target", targets[0] or "", targets[1] or "", "the same" if targets[0] == targets[1] else ""))
    rows = [
        row("peak without a plan", "unplanned_bytes"),
        row("budget", "budget"),
        row("peak, compiled", "peak_bytes"),
        row("peak, predicted", "predicted_bytes"),
        row("kept for the backward pass", "kept_bytes"),
        row("donated", "donated_bytes"),
        row("FLOPs of the planned step", "flops"),
    ]
    found += [cells for cells in rows if cells is not None]
    added = [None if report is None else plans.added_time(report) for report in (first, second)]
    if any(share is not None for share in added):
        shown = ["" if share is None else f"{share:+.1%}" for share in added]
        whose = list(dict.fromkeys(report.seconds_by for report in (first, second) if report is not None))
        # Targets differ in rates, so that shares of time by the one and by the other have no difference.
        alike = len(whose) == 1 and targets[0] == targets[1] and None not in added
        more = f"{100 * ((added[1] or 0) - (added[0] or 0)):+.1f} points" if alike else ""
        found.append((f"time {', '.join(whose)}", shown[0], shown[1], more))
    return found


def difference_view(
    names: tuple[str, str], cells: Sequence[tuple[str, str, str, str]], lines: Sequence[str], title: str
) -> Group:
    """Returns what is printed of two plans: their figures side by side, and the lines in which they differ."""
    return table.titled(title, table.figures_table(cells, ["", *names, "difference"]), tree=lines)


def _flops(count: float) -> str:
    return f"{table.format_count(count)}FLOPs"
