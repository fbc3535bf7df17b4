"""Is an attention with a custom rule run again by a plan? Its matmuls and its kernels are counted.

    python -m benchmarks.attention                          # some ten minutes; nothing is run
    python -m benchmarks.attention --targets cuda:h100 --no-save

The models are those of models/flash.py: six blocks of width 768 whose attention keeps (q, k, v, out, logsumexp). A plan
is made at each budget. Counted are the matmuls of the planned step that have batch dimensions, which only attention's
have, loops multiplied out; for Pallas the kernel's calls in the compiled program. No more of them than in the step
without a plan means that no attention is run again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jaxckpt
from benchmarks import reporting
from benchmarks.models import flash
from jaxckpt.core.graph import trace
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.platforms import PLATFORMS
from jaxckpt.memory.report import traced_for
from jaxckpt.memory.targets import start_backend, target_of
from jaxckpt.planner.frontier import cost_of
from jaxckpt.planner.problems import problem_of
from jaxckpt.show.table import markdown

SHARES = (50, 60, 70, 80, 90)
SIZES: dict[str, Callable[..., Any]] = {"8 x 1,024": flash.short, "2 x 8,192": flash.long}
TARGETS = ("cuda:h100", "tpu:v5e:2x2", "cpu")


def cases(targets: list[str]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yields (target, way, size, arguments of the factory)."""
    for target in targets:
        if target != "cpu":
            yield target, "whole", "8 x 1,024", {}
            for size in SIZES:
                yield target, "blocks", size, {}
        if target.startswith("tpu"):
            for size in SIZES:
                yield target, "pallas", size, {}
        if target == "cpu":
            yield target, "pallas", "8 x 1,024", {"interpret": True}


def attention_matmuls(step: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Returns how often matmuls with batch dimensions run."""
    return sum(
        op.repeats
        for op in trace(step, *args).walk()
        if op.primitive == "dot_general" and any(op.params["dimension_numbers"][1])
    )


def kernel_calls(step: Callable[..., Any], args: tuple[Any, ...], target: str) -> int:
    """Returns how often the compiled program calls the Pallas kernel; on a CPU, how many loops are the kernel's."""
    where = target_of(target)
    traced = traced_for(step, args, where)
    with jax.default_device(where.devices[0]):
        lowered = traced.lower(lowering_platforms=(PLATFORMS[where.platform].lowering,))
        text = lowered.compile(compiler_options=jaxckpt.compiler_options(target)).as_text()
    marks = ('custom_call_target="tpu_custom_call"',) if target.startswith("tpu") else (flash.KERNEL, " while(")
    return sum(all(mark in line for mark in marks) for line in text.splitlines())


def attention_runs(fun: Callable[..., Any], args: tuple[Any, ...], way: str, target: str) -> dict[str, int]:
    """Returns how often attention runs in a value and its gradient: its matmuls, and of Pallas its kernel."""
    step = jax.value_and_grad(fun)
    found = {"matmuls": attention_matmuls(step, args)}
    return found | ({"kernels": kernel_calls(step, args, target)} if way == "pallas" else {})


def run(targets: list[str]) -> list[dict[str, Any]]:
    """Returns a row for each model, target and budget."""
    rows: list[dict[str, Any]] = []
    for target, way, size, how in cases(targets):
        loss, args = SIZES[size](way=way, **how)
        where, problem = target_of(target), problem_of(loss, *args, target=target)
        peak = problem.unplanned.peak_bytes

        plain = attention_runs(loss, args, way, target)
        plain_flops, plain_seconds = cost_of(jax.value_and_grad(loss), args, where)
        for share in SHARES:
            start = time.perf_counter()
            row: dict[str, Any] = {"target": target, "way": way, "size": size, "share": share, "peak_bytes": peak}
            row |= {"plain": plain, "budget_bytes": peak * share // 100}
            try:
                plan = problem.plan(row["budget_bytes"])
            except jaxckpt.InfeasibleBudgetError as error:
                row["why"] = str(error)
            else:
                row |= {
                    "planned_bytes": plan.measured_bytes,
                    "planned": attention_runs(plan.apply(loss), args, way, target),
                }
                flops, seconds = cost_of(jax.value_and_grad(plan.apply(loss)), args, where)
                row |= {"flops": flops / plain_flops - 1, "seconds": seconds / plain_seconds - 1}
            row["planning_seconds"] = time.perf_counter() - start
            rows.append(row)
            print(_cells(row), flush=True)
        jax.clear_caches()
    return rows


def run_again(row: dict[str, Any]) -> int:
    """Returns how many matmuls and kernels of attention a plan runs more than the step without a plan."""
    return sum(row["planned"][what] - row["plain"][what] for what in row["plain"])


def _cells(row: dict[str, Any]) -> list[str]:
    about = [row["target"], row["way"], row["size"], format_bytes(row["peak_bytes"]), f"{row['share']}%"]
    if "why" in row:
        return [*about, "no plan fits", "", "", ""]
    counts = [f"{row['planned'][what]} of {row['plain'][what]} {what}" for what in row["plain"]]
    peak = f"{row['planned_bytes'] / row['peak_bytes']:.1%}"
    return [*about, peak, ", ".join(counts), f"{row['flops']:+.1%}", f"{row['seconds']:+.1%}"]


def report(rows: list[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    header = ["target", "attention", "tokens", "peak", "budget", "plan's peak", "attention runs", "FLOPs", "time"]
    again = [row for row in rows if "why" in row or run_again(row)]
    over = [row for row in rows if row.get("planned_bytes", 0) > row["budget_bytes"]]
    said = [
        "# Attention with a custom rule",
        f"{len(rows)} plans. Without a plan, or with an attention that is run again: {len(again)}. Over the budget: "
        f"{len(over)}.",
        "Peaks of plans are shares of the peak without a plan; FLOPs and time (by the target's rates) are what a plan "
        "adds to the step. In the last but two: how often attention's matmuls run in the planned step, of how often in "
        "the step without a plan; for Pallas also the kernel's calls.",
        markdown(header, [_cells(row) for row in rows]),
    ]
    return "\n\n".join(said)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--no-save", action="store_true", help="print only")
    given = parser.parse_args()
    start_backend()
    rows = run(given.targets)
    text = report(rows)
    print(text)
    if not given.no_save:
        reporting.save("attention", text, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
