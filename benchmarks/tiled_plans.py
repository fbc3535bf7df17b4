"""Does `tile=True` go below what no recomputation goes below? Large vocabularies, and budgets that no plan fits.

    python -m benchmarks.tiled_plans                             # an hour or two on two cores; nothing is run
    python -m benchmarks.tiled_plans --rows words:128256 unet    # those whose names begin so

GPT-2 with 32,000, 128,256 and 262,144 words is planned for 20 and 30% of its peak and for 1 GiB above arguments and
gradients. Models of results/frontier.md are planned for the budgets that no plan fits there. What couples the rows is
named where nothing is found.

Each row is saved at once in results/tiled_plans.json; rows that exist are not planned again, unless --replan.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jaxckpt
from benchmarks import frontier, reporting
from jaxckpt.core.files import write_whole
from jaxckpt.core.units import format_bytes
from jaxckpt.factories import load, make
from jaxckpt.memory.targets import start_backend
from jaxckpt.models import gpt
from jaxckpt.planner.problems import Problem, problem_of
from jaxckpt.show.table import markdown

WORDS = (32_000, 128_256, 262_144)
OVER = "1GiB above"
H100, V5E = "cuda:h100", "tpu:v5e:2x2"
INFEASIBLE: dict[tuple[str, str], tuple[str, ...]] = {
    ("gpt2", H100): ("25%",),
    ("moe", H100): ("25%", "30%"),
    ("resnet50", H100): ("25%",),
    ("unet", H100): ("25%", "30%"),
    ("gpt2", V5E): ("25%",),
    ("resnet50", V5E): ("25%",),
    ("unet", V5E): ("60%", "50%", "40%", "30%", "25%"),
}
"""(model, target) -> the budgets that no plan without tiles fits."""


def rows() -> dict[str, tuple[Callable[..., Any], str, tuple[str, ...]]]:
    """Returns name -> (factory, target, budgets)."""
    found: dict[str, Any] = {
        f"words:{words}": (lambda words=words: gpt.gpt2(vocabulary=words), H100, ("30%", "20%", OVER))
        for words in WORDS
    }
    for (model, target), budgets in INFEASIBLE.items():
        found[f"{model}@{target}"] = (load(frontier.MODELS[model]), target, budgets)
    return found


def planned(problem: Problem, loss: Any, budget: str) -> dict[str, Any]:
    """Returns the figures of the plan for a budget."""
    gradients = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(problem.args[0]))
    allowed: int | str = problem.argument_bytes + gradients + 2**30 if budget == OVER else budget
    start = time.perf_counter()
    try:
        plan = problem.plan(allowed)
    except jaxckpt.InfeasibleBudgetError as error:
        return {"why": str(error), "least_bytes": error.least_bytes, "planning_seconds": time.perf_counter() - start}
    report = plan.report
    assert report is not None and report.flops is not None and report.unplanned_flops is not None
    return {
        "budget_bytes": problem.budget_bytes(allowed),
        "peak_bytes": plan.measured_bytes,
        "flops": report.flops / report.unplanned_flops - 1,
        "seconds": plan.overhead,
        "tiles": [str(tile) for tile in plan.tiles],
        "planning_seconds": time.perf_counter() - start,
    }


def stops(why: str) -> str:
    """Returns what an error says that stands in the way: what every plan needs, and operations that couple the rows or,
    if none does, the stretch that needs most memory.
    """
    given = re.search(r"gradients \([^)]*\), take ([\d.]+ \w+)", why)
    _, _, coupling = why.partition("along an axis: ")
    found = [f"arguments and gradients take {given[1]}"] if given else []
    found += [" at ".join(each) for each in re.findall(r"(?:^|; )(\w+) at ([^ ]+)", coupling)]
    if not coupling:  # all rows go through: what a single tile needs is what stops
        most = re.search(r"needs most memory needs ([\d.]+ \w+) at once: operations [^,]*, (\w+) at ([^ ]+)", why)
        found += [f"{most[1]} at once for {most[2]} at {most[3]}"] if most else []
    return "; ".join(found)


def report(results: dict[str, Any]) -> str:
    """Returns the table in Markdown."""
    lines = []
    for name in (name for name in rows() if name in results):
        row = results[name]
        for budget, made in row["plans"].items():
            line = [name, format_bytes(row["unplanned_bytes"]), budget]
            if "why" in made:
                least = f"no; the least is {format_bytes(made['least_bytes'])}" if made["least_bytes"] else "no"
                lines.append([*line, least, "", "", stops(made["why"])])
                continue
            share = made["peak_bytes"] / row["unplanned_bytes"]
            tiles = str(len(made["tiles"])) if made["tiles"] else "none"
            lines.append([*line, f"{share:.1%}", f"{made['flops']:+.1%}", f"{made['seconds']:+.1%}", tiles])
    header = [
        "model",
        "peak without a plan",
        "budget",
        "plan's peak",
        "FLOPs",
        "time",
        "tiled stretches, or what stops",
    ]
    return "\n".join(
        [
            "# Plans with tiles",
            "",
            "FLOPs and time, by the target's rates, are what is added to the step without a plan. The models with a "
            "target are those that no plan without tiles fits at these budgets.",
            "",
            markdown(header, lines),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[""], metavar="NAME", help="rows whose names begin so")
    parser.add_argument("--replan", action="store_true")
    given = parser.parse_args(argv)
    start_backend()
    path = reporting.RESULTS / "tiled_plans.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.is_file() else {}
    for name, (factory, target, budgets) in rows().items():
        if not name.startswith(tuple(given.rows)):
            continue
        row = results.setdefault(name, {"plans": {}})
        wanted = [budget for budget in budgets if given.replan or budget not in row["plans"]]
        if not wanted:
            continue
        loss, args = make(factory)
        problem = problem_of(loss, *args, target=target, tile=True)
        for budget in wanted:
            row["plans"][budget] = planned(problem, loss, budget)
            try:
                row["unplanned_bytes"] = problem.unplanned.peak_bytes
            except jaxckpt.DoesNotFitError as error:
                row["unplanned_bytes"] = error.needed_bytes
            write_whole(path, json.dumps({"environment": reporting.environment(), "results": results}, indent=1) + "\n")
            print(name, budget, row["plans"][budget], flush=True)
    reporting.save("tiled_plans", report(results), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
