"""Seconds by the rates and by the compiler's own cost model, and the plans that either makes.

    python -m benchmarks.cycles                    # an hour on one core; nothing is run
    python -m benchmarks.cycles --models gpt2 --targets tpu:v5e:2x2 --no-save

For each model and TPU: the seconds of the step without a plan by the rates, by the cycles that the compiler says of its
stretches (`costs="compiler"`), and by the cycles of the whole step compiled to the end; how long the stretches took to
compile with an empty and with a full cache; and plans made with either, what they add by both and by the cycles of the
whole planned step.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

import jaxckpt
from benchmarks import reporting
from jaxckpt.core.graph import Graph, trace
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.cycles import compiled_kernels
from jaxckpt.memory.targets import Target, start_backend, target_of
from jaxckpt.models import gpt, llama, resnet
from jaxckpt.planner.costs import timer, total
from jaxckpt.planner.cycles import Cycles
from jaxckpt.planner.problems import Problem, problem_of
from jaxckpt.show.table import markdown

MODELS: dict[str, Callable[..., Any]] = {
    "gpt2": gpt.gpt2,
    "resnet50": resnet.resnet50,
    "llama, 4 blocks": functools.partial(
        llama.llama70b, layers=4, width=4096, heads=32, inner=14336, vocabulary=32000, batch=1, tokens=2048, data=1, model=1
    ),
}  # fmt: skip
TARGETS = ("tpu:v5e:2x2", "tpu:v5p:2x2x1")
SHARES = (40, 60)


def seconds_of(graph: Graph, target: Target, cycles: Cycles | None) -> float:
    """Returns the seconds of a traced step."""
    return total(map(timer(graph, target, cycles=cycles), graph.ops)).seconds


def whole_seconds(step: Callable[..., Any], args: tuple[Any, ...], target: Target) -> float | None:
    """Returns the seconds of a step by the compiler's cycles, compiled to the end; None where it has loops, whose
    kernels are named once however often they run, or where it is refused.
    """
    if any(op.primitive in ("scan", "while") for op in trace(step, *args).walk()):
        return None
    kernels = compiled_kernels(step, args, target, cache=False)
    return None if kernels is None else sum(kernel.cycles or 0 for kernel in kernels) / target.clock


def run(model: str, target: Target) -> dict[str, Any]:
    """Returns the figures of a model on a TPU."""
    loss, args = MODELS[model]()
    step = jax.value_and_grad(loss)
    row: dict[str, Any] = {"model": model, "target": target.name, "plans": []}
    with tempfile.TemporaryDirectory() as cache:

        def analysed(costs: str) -> tuple[Problem, float]:
            jax.clear_caches()
            start = time.perf_counter()
            found = problem_of(loss, *args, target=target, costs=costs, cache=cache)
            return found, time.perf_counter() - start

        rates, row["analysis_seconds"] = analysed("roofline")
        _, row["empty_seconds"] = analysed("compiler")
        compiler, row["full_seconds"] = analysed("compiler")
    known = compiler.asked.cycles
    graph = trace(step, *args)
    row |= {"rates": seconds_of(graph, target, None), "stretches": seconds_of(graph, target, known)}
    row["whole"] = whole_seconds(step, args, target)
    for share in SHARES:
        for name, problem in (("rates", rates), ("compiler", compiler)):
            each: dict[str, Any] = {"share": share, "by": name}
            row["plans"].append(each)
            try:
                plan = problem.plan(f"{share}%")
            except jaxckpt.InfeasibleBudgetError as error:
                each["why"] = str(error)
                continue
            planned_step = jax.value_and_grad(plan.apply(loss))
            planned, whole = trace(planned_step, *args), whole_seconds(planned_step, args, target)
            each |= {
                "peak": plan.measured_bytes,
                "unplanned": plan.unplanned_bytes,
                "flops": planned.flops / graph.flops - 1,
                "added_rates": seconds_of(planned, target, None) / row["rates"] - 1,
                "added_compiler": seconds_of(planned, target, known) / row["stretches"] - 1,
                "added_whole": whole / row["whole"] - 1 if whole and row["whole"] else None,
            }
    return row


def report(rows: list[dict[str, Any]]) -> str:
    """Returns the tables in Markdown."""
    milliseconds = lambda seconds: f"{seconds * 1e3:.1f} ms"
    steps = [
        [
            row["model"], row["target"], milliseconds(row["rates"]), milliseconds(row["stretches"]),
            milliseconds(row["whole"]) if row["whole"] else "", f"{row['analysis_seconds']:.0f} s",
            f"{row['empty_seconds']:.0f} s", f"{row['full_seconds']:.0f} s",
        ]
        for row in rows
    ]  # fmt: skip
    plans = []
    for row in rows:
        for each in row["plans"]:
            about = [row["model"], row["target"], f"{each['share']}%", each["by"]]
            if "why" in each:
                plans.append([*about, "no plan fits", "", "", "", ""])
                continue
            said = f"{format_bytes(each['peak'])} ({each['peak'] / each['unplanned']:.1%})"
            added = (f"{each[key]:+.1%}" for key in ("flops", "added_rates", "added_compiler"))
            whole = "" if each["added_whole"] is None else f"{each['added_whole']:+.1%}"
            plans.append([*about, said, *added, whole])
    return "\n\n".join(
        [
            "# Seconds by the rates and by the compiler",
            "The step without a plan: by the rates; by the compiler's cycles of its stretches; by those of the whole "
            "step, compiled to the end. Then what the analysis takes by the rates, and by cycles with an empty and with "
            "a full cache.",
            markdown(["model", "target", "rates", "stretches", "whole step", "analysis", "empty", "full"], steps),
            "Plans made by either, and what each adds to the step: by the rates, by the cycles of stretches, and by those "
            "of the whole planned step. Steps with loops have no figure there.",
            markdown(
                ["model", "target", "budget", "made by", "peak", "FLOPs", "rates", "stretches", "whole step"], plans
            ),
        ]
    )


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--no-save", action="store_true", help="print only")
    given = parser.parse_args()
    start_backend()
    rows = []
    for model in given.models:
        for target in given.targets:
            rows.append(run(model, target_of(target)))
            print(rows[-1], file=sys.stderr, flush=True)
    text = report(rows)
    print(text)
    if not given.no_save:
        reporting.save("cycles", text, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
