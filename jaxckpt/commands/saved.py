"""Plan files as commands write and read them: a plan, and how it was shown, so that it can be shown without its
model.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxckpt import variants
from jaxckpt._errors import ArgumentError, PlanMismatchError, TargetError
from jaxckpt.commands import base
from jaxckpt.core import outline
from jaxckpt.core.files import read_whole
from jaxckpt.core.graph import Graph
from jaxckpt.core.plan import MemoryEstimate, Plan, PlanReport, sealed
from jaxckpt.core.regions import every_region
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.targets import target_of
from jaxckpt.planner.frontier import Frontier, Point, Way
from jaxckpt.planner.subject import seen_by_planner

logger = logging.getLogger("jaxckpt")

OTHER_ARGUMENTS = 0.02
"""Arguments of a step that differ by more than this share are those of another step, or lie otherwise."""


@dataclass(frozen=True)
class View:
    """How a plan was shown when it was made.

    Attributes:
      title: what was planned, and for which target.
      tree: the lines of its tree.
      frontier: plans for other budgets, without their recipes; None where none were asked for.
    """

    title: str
    tree: tuple[str, ...] = ()
    frontier: Frontier | None = None


def text_of(plan: Plan, view: View) -> str:
    """Returns the text of a plan's file, which `Plan.load` reads too."""
    content = json.loads(plan.to_json())
    del content["digest"]
    frontier = None if view.frontier is None else view.frontier.to_json()
    return sealed({**content, "view": {"title": view.title, "tree": list(view.tree), "frontier": frontier}})


def read(path: str | os.PathLike[str]) -> tuple[Plan, View | None]:
    """Returns the plan in a file, and how it was shown; None for the second if `Plan.save` wrote the file.

    Raises:
      PlanMismatchError: the file is no plan, or one of another format.
      ArgumentError: there is no such file.
    """
    try:
        content = read_whole(path)
    except FileNotFoundError as error:
        raise ArgumentError("PLAN.json", "a file that `jaxckpt plan --output` or Plan.save wrote", str(path)) from error
    except ArgumentError as error:  # a folder, a pipe
        raise PlanMismatchError(f"{path} must be a file that Plan.save wrote; it is no regular file.") from error
    try:
        text = content.decode()
        plan = Plan.from_json(text)
    except UnicodeDecodeError as error:
        raise PlanMismatchError(f"{path} must be a file that Plan.save wrote; it is no text.") from error
    except PlanMismatchError as error:
        raise PlanMismatchError(f"{path}: {error}") from error
    raw = json.loads(text).get("view")
    if raw is None:
        return plan, None
    frontier = None if raw["frontier"] is None else _frontier(raw["frontier"])
    return plan, View(raw["title"], tuple(raw["tree"]), frontier)


def _frontier(raw: Mapping[str, Any]) -> Frontier:
    """Returns the frontier that `Frontier.to_json` wrote, its plans without their recipes."""
    points = tuple(
        Point(
            point["budget"],
            point["budget_bytes"],
            _figures(point) if point["fits"] else None,
            point["why"],
            point.get("least_bytes"),  # files of earlier versions have none
            point.get("stretch"),
        )
        for point in raw["points"]
    )
    return Frontier(
        raw["target"], _way(raw["unplanned"]), points, tuple(map(_way, raw["others"])), raw.get("costs", "roofline")
    )


def _way(raw: Mapping[str, Any]) -> Way:
    return Way(raw["name"], raw["peak_bytes"], raw["flops"], raw["seconds"])


def _figures(point: Mapping[str, Any]) -> PlanReport:
    predicted = None
    if point["predicted_bytes"] is not None:
        predicted = MemoryEstimate(point["predicted_bytes"], 0, 0, 0)
    return PlanReport(
        Plan((), ""),
        budget=point["budget_bytes"],
        predicted=predicted,
        measured_bytes=point["peak_bytes"],
        flops=point["flops"],
        seconds=point["seconds"],
    )


def graph_of(plan: Plan, options: argparse.Namespace) -> Graph:
    """Returns the graph of the model that a plan is held against.

    Args:
      plan: the plan.
      options: those of `base.factory_options`.

    Raises:
      PlanMismatchError: the plan is for another program.
    """
    loaded = base.load(options)
    built = base.build(options, loaded, variants.variants_for(loaded[0], chosen=["none"]))
    built.check(options.factory)
    step = built.suited_step("none")
    where = None if plan.report is None else plan.report.target
    try:
        target_of(where)
    except TargetError:  # a plan can be looked at where its target's compiler is not installed
        where = None
    graph, arguments = seen_by_planner(built.functions["none"], built.args, step, where, plan.respect_checkpoints)
    planned = None if plan.predicted is None else plan.predicted.argument_bytes
    if planned is not None and abs(arguments - planned) > OTHER_ARGUMENTS * planned:
        logger.warning(
            "the arguments of %s take %s on a device, those of the plan's step %s. The figures are of that step.",
            options.factory, format_bytes(arguments), format_bytes(planned),
        )  # fmt: skip
    plan.check(graph)
    return graph


def target_text(plan: Plan) -> str:
    """Returns " on " and the target that a plan was made for; "" where that is not known."""
    return "" if plan.report is None or plan.report.target is None else f" on {plan.report.target}"


def regions_of(plan: Plan) -> dict[tuple[str, str], str]:
    """Returns (kind and place, what is done there) -> a line that says so, for each region, planned loop, tile, and
    stretch that the function runs again.
    """
    lines = {}
    for region in every_region(plan.regions):
        where = f"region {region.start} {region.stop} {region.body} {region.checkpoint}"
        what = json.dumps({str(index): str(action) for index, action in sorted(region.actions.items())})
        lines[where, what] = outline.region_line(region)
    for loop in plan.loops:
        lines[f"loop {loop.op} {loop.body}", json.dumps(loop.schedule.to_json())] = outline.loop_line(loop)
    for tile in plan.tiles:
        lines["tiles", repr(tile)] = outline.tile_line(tile)
    for each in plan.recomputed:
        lines["recomputed", repr(each)] = outline.recomputed_line(each)
    return lines
