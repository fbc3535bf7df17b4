"""`jaxckpt plan`: the cheapest plan within a budget."""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from typing import Any

from jaxckpt import factories, variants
from jaxckpt._errors import ArgumentError
from jaxckpt.actions import RECOMPUTE, SAVE, Action, action_from
from jaxckpt.commands import base, output, saved
from jaxckpt.commands.base import Command
from jaxckpt.memory.gradient import StepMaker
from jaxckpt.memory.targets import target_of
from jaxckpt.planner import problems
from jaxckpt.planner.budget import check_budget
from jaxckpt.planner.frontier import BUDGETS, sweep
from jaxckpt.planner.reports import report_of, sketch, timed
from jaxckpt.show import frontiers, plans, plot
from jaxckpt.show.tree import plan_lines


def _options(parser: argparse.ArgumentParser) -> None:
    base.factory_options(parser)
    base.add(
        parser,
        "--budget",
        metavar="BYTES",
        help="the most that the compiled peak may be: 4GiB, 60% (of the peak without a plan), or device (what is "
        "free on it now)",
    )
    base.target_option(parser)
    base.add(
        parser,
        "--actions",
        default="",
        metavar="LIST",
        help="actions to use besides recompute and save: offload, compress(int8), compress(int8)|offload; "
        "separated by commas",
    )
    base.add(parser, "--host-budget", metavar="BYTES", help="the most that may be moved to host memory: 200GiB")
    base.add(
        parser, "--solver", default="chain", metavar="NAME", help="the solver that finds the plan (default: chain)"
    )
    base.add(
        parser,
        "--costs",
        default="roofline",
        metavar="KIND",
        help="the source of seconds: roofline (the default); measured, on this machine; compiler, of a TPU",
    )
    base.add(
        parser,
        "--ignore-checkpoints",
        action="store_true",
        help="plan as if the model had no checkpoints of its own; the plan takes them out",
    )
    base.add(
        parser,
        "--tile",
        action="store_true",
        help="let stretches that need too much at once run tile by tile, where nothing fits or less time is taken",
    )
    base.add(parser, "--no-verify", action="store_true", help="do not compile the plan; its peak is only predicted")
    base.add(
        parser,
        "--frontier",
        action="store_true",
        help=f"also plan for {', '.join(BUDGETS)}, and compile checkpoints placed by hand",
    )
    base.add(
        parser,
        "--time",
        action="store_true",
        help="also run the step with and without the plan, on this machine, on the factory's real data",
    )
    base.add(
        parser,
        "--output",
        metavar="PLAN.json",
        help="write the plan to a file, for jaxckpt.Plan.load(...).apply(loss) and `jaxckpt show`",
    )
    base.file_options(
        parser, "peak against recomputation, with the plan", "figures, regions, picture, timeline, largest buffers"
    )


def _actions(text: str) -> list[Action]:
    """Returns the actions of a list such as "offload, compress(int8) | offload"."""
    return [action_from(item, "--actions") for item in filter(None, map(str.strip, text.split(",")))]


def _run(options: argparse.Namespace) -> None:
    output.check_files(options)
    if options.budget is None and not options.frontier:
        raise ArgumentError("--budget", "given, such as 4GiB or 60%", None, "Or ask for --frontier.")
    if options.budget is None and options.output is not None:
        raise ArgumentError("--output", "given with --budget", options.output, "A frontier has many plans.")
    if options.budget is not None:
        check_budget(options.budget)
    loaded = base.load(options)
    target = target_of(options.target)
    if options.time and not target.local:
        raise ArgumentError("--time", "for a plan for this machine", target.name, "Only this machine can run the step.")
    built = base.build(options, loaded, variants.variants_for(loaded[0], chosen=["none"]), real=options.time)
    fun, verify, solver = built.functions["none"], not options.no_verify, options.solver
    built.check(options.factory)
    found, swept, note = None, None, ""
    with output.progress() as progress:
        problem = problems.problem_of(
            fun,
            *built.args,
            target=target,
            step=built.step_or_gradient,
            actions=(RECOMPUTE, SAVE, *_actions(options.actions)),
            host_budget=options.host_budget,
            costs=options.costs,
            respect_checkpoints=not options.ignore_checkpoints,
            tile=options.tile,
            cache=options.cache,
            progress=progress,
            collectives=verify,
        )
        if options.budget is not None:
            found = report_of(problem, options.budget, verify=verify, solver=solver, progress=progress)
            if options.time:
                found = timed(found, problem, progress)
        if options.frontier:
            by_hand = _by_hand(loaded, options)
            note = "" if by_hand is None else by_hand.note()
            others = {} if by_hand is None or note else by_hand.functions
            swept = sweep(problem, BUDGETS, verify=verify, solver=solver, others=others, progress=progress)
        elif found is not None and (options.plot or options.html):
            progress(0, 1, "predicting other budgets")
            swept = sketch(found, problem, solver=solver)
    title = f"{options.factory} on {target.name}"
    content: dict[str, Any] = {"factory": options.factory}
    if found is not None:
        output.tell(plans.plan_view(found, problem.graph, f"Plan for {title}"))
        view = saved.View(title, tuple(plan_lines(found.plan, problem.graph)), swept)
        output.write(options.output, lambda: saved.text_of(found.plan, view))
        content |= found.to_json()
    if options.frontier and swept is not None:
        output.tell(frontiers.frontier_view(swept), note)
        content["frontier"] = swept.to_json()
    output.write(options.json, lambda: json.dumps(content, indent=1))
    if swept is not None:
        page = frontiers.frontier_page
        if found is not None:
            page = functools.partial(plans.plan_page, found, problem.graph)
        drawn = f"Memory against recomputation, {pathlib.PurePath(options.factory).name} on {target.name}"
        output.write(
            options.plot,
            lambda: plot.render(frontiers.frontier_figure(swept, found, title=drawn), plot.check_suffix(options.plot)),
        )
        output.write(options.html, lambda: page(frontier=swept, title=f"Plan for {title}"))


def _by_hand(loaded: tuple[factories.Factory, StepMaker | None], options: argparse.Namespace) -> variants.Built | None:
    """Returns the variants of the factory with checkpoints around its blocks; None if it can have none."""
    chosen = [variant for variant in variants.variants_for(loaded[0]) if variant.where == "blocks"]
    return base.build(options, loaded, chosen) if chosen else None


COMMAND = Command(
    "find the cheapest plan within a budget of bytes, and prove it with the compiler",
    _options,
    _run,
    """\
  jaxckpt plan gpt2 --budget 4GiB --target cuda:h100 --output plan.json
  jaxckpt plan gpt2 --budget 60% --optimizer adamw
  jaxckpt plan my_train.py:make_step --budget 12GiB
""",
)
