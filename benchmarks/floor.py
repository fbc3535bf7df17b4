"""Where a person gets with checkpoints around blocks, does a plan get, and at no more work?

    python -m benchmarks.floor                                 # 7 models and 30 random ones for an H100: hours
    python -m benchmarks.floor --models second:0 branches:2    # two of the random ones: minutes
    python -m benchmarks.floor --target cpu --models residual:0 half:1

Each way by hand is compiled: `jax.checkpoint` around each block and around every two, and each preset around each
block. Its compiled peak, to the byte, is the budget of a plan. The plan must fit, with no more FLOPs and no more
seconds by the target's rates. A budget below the least that any plan fits is asked for too: the least budget that its
error names must have a plan, and no plan may need less.

Each row is saved at once in results/floor-TARGET.json; rows that exist are not planned again, unless --replan.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import jaxckpt
from benchmarks import frontier, reporting
from benchmarks.models import mixed
from jaxckpt.core.files import write_whole
from jaxckpt.core.units import format_bytes
from jaxckpt.factories import load, make
from jaxckpt.memory.report import measure
from jaxckpt.memory.targets import start_backend, target_of
from jaxckpt.planner.frontier import cost_of
from jaxckpt.planner.problems import Problem, problem_of
from jaxckpt.show.table import markdown

PRESETS = ("nothing", "everything", "dots", "dots_no_batch", "hybrid")
SEEDS = 3
MODELS = (*frontier.MODELS, *(f"{kind}:{seed}" for kind in mixed.KINDS for seed in range(SEEDS)))
ROUNDING = 1e-3
"""Work that differs by less, as a share of the step, is the same work."""


def ways() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, arguments of the factory) of what is done by hand."""
    yield "each block", {"checkpoint": jax.checkpoint}
    yield "every two", {"checkpoint": jax.checkpoint, "segment_size": 2}
    for preset in PRESETS:
        yield f"{preset} on each", {"checkpoint": functools.partial(jaxckpt.checkpoint, policy=preset)}


def model(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns (factory, what makes the step) of a model: one of `frontier.MODELS`, or KIND:SEED of `mixed.KINDS`."""
    if name in frontier.MODELS:
        return load(frontier.MODELS[name]), jax.value_and_grad
    kind, _, seed = name.partition(":")
    return functools.partial(mixed.KINDS[kind], seed=int(seed)), mixed.STEPS.get(kind, jax.value_and_grad)


def run(name: str, target: str, row: dict[str, Any], save: Callable[[], None], replan: bool) -> None:
    """Fills in the row of a model: "plain", "by hand", "planned", "least"."""
    factory, step = model(name)
    where = target_of(target)
    loss, args = make(factory)

    def counted(fun: Callable[..., Any]) -> dict[str, Any]:
        flops, seconds = cost_of(step(fun), args, where)
        return {"flops": flops, "seconds": seconds}

    def compiled(fun: Callable[..., Any]) -> dict[str, Any]:
        return {"peak_bytes": measure(step(fun), *args, target=where, generate_code=False).peak_bytes, **counted(fun)}

    if "plain" not in row:
        row["plain"] = compiled(loss)
    by_hand = row.setdefault("by hand", {})
    for way, how in ways():
        if way not in by_hand:
            by_hand[way] = compiled(make(factory, **how)[0])
            save()
    planned = row.setdefault("planned", {})
    problem: Problem | None = None
    for way, known in sorted(by_hand.items(), key=lambda each: each[1]["peak_bytes"]):
        if way in planned and not replan:
            continue
        problem = problem or problem_of(loss, *args, target=where, step=step)
        planned[way] = _planned(problem, known["peak_bytes"], lambda plan: counted(plan.apply(loss)))
        save()
    if "least" not in row or replan:
        problem = problem or problem_of(loss, *args, target=where, step=step)
        row["least"] = _least(problem)
        save()


def _planned(problem: Problem, budget: int, counted: Callable[[jaxckpt.Plan], dict[str, Any]]) -> dict[str, Any]:
    start, before = time.perf_counter(), len(problem.tries)
    try:
        plan = problem.plan(budget)
    except jaxckpt.InfeasibleBudgetError as error:
        return {"why": str(error), "least_bytes": error.least_bytes, "planning_seconds": time.perf_counter() - start}
    seconds, compilations = time.perf_counter() - start, len(problem.tries) - before
    return {
        "peak_bytes": plan.measured_bytes,
        **counted(plan),
        "planning_seconds": seconds,
        "compilations": compilations,
    }


def _least(problem: Problem) -> dict[str, Any]:
    """Asks for next to nothing, and then for what the error says is the least."""
    try:
        problem.plan(problem.argument_bytes + 1)
    except jaxckpt.InfeasibleBudgetError as error:
        said = error.least_bytes
    else:
        return {"said": None}
    try:
        found = problem.plan(said).measured_bytes
    except jaxckpt.InfeasibleBudgetError:
        found = None
    returned = [made.compiled for made in problem.tries.values() if made.report is not None]
    return {"said": said, "fits": found is not None and found <= said, "least_compiled": min(returned, default=None)}


def failures(name: str, row: dict[str, Any]) -> list[str]:
    """Returns a line for each way by hand that a plan does not match."""
    found = []
    plain = row["plain"]
    for way, known in row["by hand"].items():
        made = row["planned"].get(way)
        if made is None:
            continue
        if "why" in made:
            found.append(f"{name}, {way}: no plan fits {format_bytes(known['peak_bytes'])}: {made['why']}")
            continue
        for by in ("flops", "seconds"):
            more = (made[by] - known[by]) / plain[by]
            if more > ROUNDING:
                found.append(f"{name}, {way}: {more:+.2%} {by}")
        if made["peak_bytes"] > known["peak_bytes"]:
            found.append(f"{name}, {way}: peaks at {format_bytes(made['peak_bytes'])}")
    least = row.get("least", {})
    if least.get("said") is not None:
        if not least["fits"]:
            found.append(f"{name}: the least budget, {format_bytes(least['said'])}, has no plan")
        if least["least_compiled"] is not None and least["least_compiled"] < least["said"]:
            found.append(f"{name}: a plan needs {format_bytes(least['least_compiled'])}, below the least budget")
    return found


def report(target: str, rows: dict[str, Any]) -> str:
    """Returns the table of all models in Markdown."""
    lines, wrong = [], []
    for name, row in rows.items():
        plain = row["plain"]
        share = lambda value, by, plain=plain: f"{value / plain[by] - 1:+.1%}"
        for way, known in sorted(row["by hand"].items(), key=lambda each: each[1]["peak_bytes"]):
            made = row["planned"].get(way)
            if made is None:
                continue
            beside = ["no plan fits", "", ""]
            if "why" not in made:
                part = f"{made['peak_bytes'] / plain['peak_bytes']:.1%}"
                beside = [part, share(made["flops"], "flops"), share(made["seconds"], "seconds")]
            lines.append(
                [
                    name,
                    way,
                    f"{known['peak_bytes'] / plain['peak_bytes']:.1%}",
                    share(known["flops"], "flops"),
                    share(known["seconds"], "seconds"),
                    *beside,
                ]
            )
        wrong += failures(name, row)
    header = ["model", "by hand", "peak", "FLOPs", "time", "plan's peak", "FLOPs", "time"]
    asked = len(lines)
    return "\n".join(
        [
            f"# Plans at the peaks of checkpoints by hand, {target}",
            "",
            "Peaks are shares of the compiled peak without checkpoints; FLOPs and time (by the target's rates) are what "
            "is added to the step without them.",
            "",
            f"{len(rows)} models, {asked} budgets. "
            + ("Every plan fits, with no more FLOPs and no more seconds." if not wrong else "Not so:"),
            "",
            *(f"- {line}" for line in wrong),
            *([""] if wrong else []),
            markdown(header, lines),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 where a plan does not match what is done by hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help="names, or KIND:SEED")
    parser.add_argument("--target", default="cuda:h100")
    parser.add_argument("--replan", action="store_true", help="plan again; what is done by hand is not compiled again")
    parser.add_argument("--name", help="of the files in results/; floor-TARGET if left out")
    given = parser.parse_args(argv)
    start_backend()
    name = given.name or f"floor-{given.target.replace(':', '-')}"
    path = reporting.RESULTS / f"{name}.json"
    rows: dict[str, Any] = json.loads(path.read_text())["results"] if path.is_file() else {}

    def save() -> None:
        write_whole(path, json.dumps({"environment": reporting.environment(), "results": rows}, indent=1) + "\n")

    wrong = []
    for each in given.models:
        start = time.perf_counter()
        run(each, given.target, rows.setdefault(each, {}), save, given.replan)
        found = failures(each, rows[each])
        wrong += found
        print(f"{each}: {time.perf_counter() - start:.0f} s, {len(found)} findings", flush=True)
        for line in found:
            print(f"  {line}", flush=True)
    reporting.save(name, report(given.target, rows), rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
