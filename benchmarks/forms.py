"""Is a plan the same however the loop over layers is written? One model in five forms, each at three budgets.

    python -m benchmarks.forms                   # minutes; nothing is run
    python -m benchmarks.forms --target tpu:v5e:2x2 --no-save

The forms are those of models/forms.py. Budgets are shares of the peak that the form itself has without a plan, and
then the same bytes for all: shares of the unrolled form's peak. Bytes are those of one device, FLOPs are beyond those
of the form without a plan.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any

import jax

import jaxckpt
from benchmarks import reporting
from benchmarks.models.forms import DEVICES, FORMS
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.targets import start_backend
from jaxckpt.planner.problems import problem_of
from jaxckpt.show.table import markdown

SHARES = (40, 60, 80)
OF = ("its own", "the unrolled form's")
"""Whose peak a budget is a share of."""


def run(target: str) -> list[dict[str, Any]]:
    """Returns a row for each form and budget."""
    rows: list[dict[str, Any]] = []
    unrolled: int | None = None
    for name, form in FORMS.items():
        loss, args = form()
        where = f"{target}x{DEVICES}" if "shard_map" in name else target
        problem = problem_of(loss, *args, target=where)
        unrolled = unrolled or problem.unplanned.peak_bytes
        own = problem.unplanned.peak_bytes
        for of, share in itertools.product(OF, SHARES):
            start, budget = time.perf_counter(), (own if of == OF[0] else unrolled) * share // 100
            row: dict[str, Any] = {"form": name, "of": of, "share": share, "budget_bytes": budget}
            try:
                plan = problem.plan(budget)
            except jaxckpt.InfeasibleBudgetError as error:
                row["why"] = str(error)
            else:
                plain = plan.report.unplanned_flops or jaxckpt.count_flops(jax.value_and_grad(loss), *args)
                planned = plan.report.flops or jaxckpt.count_flops(jax.value_and_grad(plan.apply(loss)), *args)
                row |= {"peak_bytes": plan.measured_bytes, "flops": planned / plain - 1, "seconds": plan.overhead}
            row["planning_seconds"] = time.perf_counter() - start
            row["unplanned_bytes"] = own
            rows.append(row)
            print(_line(row), flush=True)
        jax.clear_caches()
    return rows


def _line(row: dict[str, Any]) -> str:
    found = (
        row.get("why") or f"{format_bytes(row['peak_bytes'])}, {row['flops']:+.2%} FLOPs, {row['seconds']:+.2%} time"
    )
    return f"{row['form']}, {row['share']}% of {row['of']} peak: {found} ({row['planning_seconds']:.0f} s)"


def report(target: str, rows: list[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    lines = [f"# One model in five forms, {target}"]
    for of in OF:
        here = [row for row in rows if row["of"] == of]
        cells = [
            [
                row["form"],
                format_bytes(row["unplanned_bytes"]),
                f"{row['share']}%, {format_bytes(row['budget_bytes'])}",
                *(
                    ["no plan fits", "", ""]
                    if "why" in row
                    else [format_bytes(row["peak_bytes"]), f"{row['flops']:+.2%}", f"{row['seconds']:+.2%}"]
                ),
            ]
            for row in here
        ]
        apart = []
        for share in SHARES:
            flops = [row.get("flops", float("inf")) for row in here if row["share"] == share]
            apart.append(f"{share}%: {100 * (max(flops) - min(flops)):.1f} points")
        header = ["form", "peak without a plan", "budget", "compiled peak", "FLOPs", "time by the rates"]
        lines += ["", f"## Shares of {of} peak", "", markdown(header, cells), "", f"FLOPs apart: {', '.join(apart)}."]
    return "\n".join(lines)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cuda:h100")
    parser.add_argument("--no-save", action="store_true", help="print only")
    given = parser.parse_args()
    start_backend()
    rows = run(given.target)
    text = report(given.target, rows)
    print(text)
    if not given.no_save:
        reporting.save(f"forms-{given.target.replace(':', '-')}", text, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
