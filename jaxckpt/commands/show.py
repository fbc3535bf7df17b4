"""`jaxckpt show`: a plan from its file, again."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from jaxckpt._errors import ArgumentError
from jaxckpt.commands import base, output, saved
from jaxckpt.commands.base import Command
from jaxckpt.core.plan import Plan
from jaxckpt.show import frontiers, plot
from jaxckpt.show import saved as pages
from jaxckpt.show.tree import nothing, plan_lines


def _options(parser: argparse.ArgumentParser) -> None:
    base.add(parser, "plan", metavar="PLAN.json", help="a file of `jaxckpt plan --output` or of Plan.save")
    base.factory_options(parser, optional=True)
    base.add(
        parser,
        "--plot",
        metavar="OUT.png",
        help="write a picture: peak against recomputation if the file has the plans for other budgets, else the peaks; "
        "also .svg and .pdf",
    )
    base.add(parser, "--html", metavar="OUT.html", help="write one self-contained page: figures, regions, picture")


def _run(options: argparse.Namespace) -> None:
    output.check_files(options)
    plan, view = saved.read(options.plan)
    if options.factory is not None:
        graph = saved.graph_of(plan, options)
        title = f"{options.factory}{saved.target_text(plan)}"
        view = saved.View(title, tuple(plan_lines(plan, graph)), None if view is None else view.frontier)
    title = f"Plan for {view.title}" if view is not None else f"Plan in {options.plan}{saved.target_text(plan)}"
    tree = list(_outline(plan)) if view is None else list(view.tree)
    frontier = None if view is None else view.frontier
    report = plan.report
    output.tell(pages.saved_view(report, tree, title))
    if frontier is not None and any(point.peak_bytes for point in frontier.points):
        output.tell(frontiers.frontier_view(frontier))
    if report is None and frontier is None and options.plot:
        hint = "Plan.save wrote a plan that nothing is known of."
        raise ArgumentError("--plot", "for a plan with figures", options.plan, hint)
    output.write(
        options.plot,
        lambda: plot.render(pages.saved_figure(report, frontier, title), plot.check_suffix(options.plot)),
    )
    output.write(options.html, lambda: pages.saved_page(report, tree, title, frontier))


def _outline(plan: Plan) -> Iterable[str]:
    """Yields what can be said of a plan's regions without the model."""
    yield from saved.regions_of(plan).values() or [nothing(plan)]
    yield "Give the model too, to see names and bytes: jaxckpt show PLAN.json FACTORY."


COMMAND = Command(
    "show a plan from its file: its figures, its tree, its frontier",
    _options,
    _run,
    """\
  jaxckpt show plan.json --html plan.html
  jaxckpt show plan.json my_train.py:make_step
""",
)
