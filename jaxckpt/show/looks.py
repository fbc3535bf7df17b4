"""Registers how each type is shown. Drawing code is imported when something is drawn, because importing rich and
matplotlib takes long.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxckpt.core.graph import Graph
from jaxckpt.core.plan import Plan, PlanReport
from jaxckpt.core.shown import Look, show_as, show_progress_as
from jaxckpt.memory.compare import Comparison
from jaxckpt.memory.report import MemoryReport
from jaxckpt.planner.frontier import Frontier
from jaxckpt.show.progress import progress_bar


def _comparison_text(comparison: Comparison) -> str:
    from jaxckpt.show.table import comparison_view, to_text

    return to_text(comparison_view(comparison))


def _comparison_fragment(comparison: Comparison) -> str:
    from jaxckpt.show.html import comparison_fragment

    return comparison_fragment(comparison)


def _comparison_page(comparison: Comparison) -> str:
    from jaxckpt.show.html import comparison_page

    return comparison_page(comparison)


def _comparison_picture(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    from jaxckpt.show.plot import save_comparison

    save_comparison(comparison, path)


def _report_page(report: MemoryReport, beside: Mapping[str, MemoryReport]) -> str:
    from jaxckpt.show.html import report_page

    return report_page(report, f"Memory on {report.target}", beside)


def _report_picture(report: MemoryReport, path: str | os.PathLike[str]) -> None:
    from jaxckpt.show.plot import save_report

    save_report(report, path)


def _frontier_text(frontier: Frontier) -> str:
    from jaxckpt.show.frontiers import frontier_view
    from jaxckpt.show.table import to_text

    return to_text(frontier_view(frontier))


def _frontier_fragment(frontier: Frontier) -> str:
    from jaxckpt.show.frontiers import frontier_fragment

    return frontier_fragment(frontier)


def _frontier_picture(frontier: Frontier, path: str | os.PathLike[str]) -> None:
    from jaxckpt.show.frontiers import save_frontier

    save_frontier(frontier, path)


def _plan_text(plan: Plan, graph: Graph) -> str:
    from jaxckpt.show.tree import plan_text

    return plan_text(plan, graph)


def _plan_report_text(report: PlanReport) -> str:
    from jaxckpt.show.plans import report_view
    from jaxckpt.show.table import to_text

    return to_text(report_view(report))


def _plan_report_fragment(report: PlanReport) -> str:
    from jaxckpt.show.plans import report_fragment

    return report_fragment(report)


def _plan_report_page(report: PlanReport) -> str:
    from jaxckpt.show.plans import report_page

    return report_page(report)


def _plan_report_picture(report: PlanReport, path: str | os.PathLike[str]) -> None:
    from jaxckpt.show.plans import save_plan_report

    save_plan_report(report, path)


show_as(Comparison, Look(_comparison_text, _comparison_fragment, _comparison_page, _comparison_picture))
show_as(MemoryReport, Look(page=_report_page, picture=_report_picture))
show_as(Plan, Look(_plan_text))
show_as(PlanReport, Look(_plan_report_text, _plan_report_fragment, _plan_report_page, _plan_report_picture))
show_as(Frontier, Look(_frontier_text, _frontier_fragment, picture=_frontier_picture))
show_progress_as(progress_bar)
