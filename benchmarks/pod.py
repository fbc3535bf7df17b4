"""Plans for a pod of 2,048 chips, made on this machine; and how planning grows with the number of chips.

    python -m benchmarks.pod                        # ten minutes on two cores; nothing is run
    python -m benchmarks.pod --budgets 40GiB --chips --no-save

The model is models/pod.py's mixture of experts of 671 billion parameters; its step is AdamW's, with donated parameters
and state. For the growth the same five blocks are planned on 8 to 2,048 chips, each with two sequences for every four
chips, at 70% of the peak that the step has without a plan. Every plan is made in a process of its own that has nothing
cached.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

import jaxckpt
from benchmarks import reporting
from jaxckpt.core.files import write_whole
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.targets import start_backend
from jaxckpt.models import pod
from jaxckpt.show.table import markdown

BUDGETS = ("64GiB", "40GiB")
GROWTH = "70%"
"""The budget of the plans that show the growth; on 8 chips the parameters and their gradients are more than half."""
MESHES = {8: (1, 2, 4), 64: (2, 8, 4), 512: (4, 32, 4), 2048: (16, 32, 4)}
"""(data, expert, tensor) by the number of chips."""
TARGETS = {8: "tpu:v5p:2x2x2", 64: "tpu:v5p:4x4x4", 512: "tpu:v5p:8x8x8", 2048: "tpu:v5p:16x16x8"}


def grown(chips: int) -> tuple[Any, tuple[Any, ...]]:
    """Returns (loss, args) of one block with an MLP and four with experts, of 671B's sizes, on so many chips."""
    data, expert, tensor = MESHES[chips]
    return pod.moe671b(dense=1, sparse=4, batch=2 * data * expert, data=data, expert=expert, tensor=tensor)


def plan_one(chips: int, budget: str | None) -> dict[str, Any]:
    """Returns the figures of a plan: of the whole model's training step at a budget, or of the growth's step."""
    loss, args = grown(chips) if budget is None else pod.moe671b()
    step: Any = jax.value_and_grad if budget is None else pod.training
    args = args if budget is None else (args[0], pod.state(args[0]), *args[1:])
    target, start = TARGETS[chips], time.perf_counter()
    try:
        unplanned = jaxckpt.measure(step(loss), *args, target=target, generate_code=False).peak_bytes
    except jaxckpt.DoesNotFitError as error:
        unplanned = error.needed_bytes or 0
    compiled = time.perf_counter() - start
    jax.clear_caches()
    start = time.perf_counter()
    plan = jaxckpt.plan(loss, *args, budget=budget or GROWTH, target=target, step=step)
    report = plan.report
    assert report is not None and report.unplanned_seconds and report.seconds
    return {
        "chips": chips,
        "asked": budget,
        "budget_bytes": plan.budget,
        "peak_bytes": plan.measured_bytes,
        "predicted_bytes": report.predicted_bytes,
        "unplanned_bytes": unplanned,
        "added": report.seconds / report.unplanned_seconds - 1,
        "planning_seconds": time.perf_counter() - start,
        "compile_seconds": compiled,
        "process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


def in_fresh_process(chips: int, budget: str | None) -> dict[str, Any]:
    """Returns `plan_one` of a process that has planned and cached nothing before."""
    command = [sys.executable, "-m", "benchmarks.pod", "--one", str(chips), budget or ""]
    environment = os.environ | {"JAXCKPT_CACHE_DIR": "off"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['chips']:,}", format_bytes(row["unplanned_bytes"]), format_bytes(row["budget_bytes"]),
        format_bytes(row["peak_bytes"]), format_bytes(row["predicted_bytes"]), f"{row['added']:+.1%}",
        f"{row['compile_seconds']:.0f} s", f"{row['planning_seconds']:.0f} s", f"{row['process_mib'] / 1024:.1f} GiB",
    ]  # fmt: skip


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the tables in Markdown."""
    header = [
        "chips", "peak without a plan", "budget", "compiled peak", "predicted", "added time", "one compilation",
        "planned in", "process",
    ]  # fmt: skip
    whole, growth = [row for row in rows if row["asked"]], [row for row in rows if not row["asked"]]
    parts = ["# Plans for a pod", "Bytes are those of one chip. Added time is by the target's rates, of the step's."]
    if whole:
        parts += ["## 671 billion parameters, with AdamW", markdown(header, [_cells(row) for row in whole])]
    if growth:
        parts += ["## The same five blocks on more chips", markdown(header, [_cells(row) for row in growth])]
        parts += ["![seconds and GiB over the number of chips](pod.png)"]
    return "\n\n".join(parts)


def figure(rows: Sequence[dict[str, Any]]) -> bytes:
    """Returns a picture of the growth's seconds, and of its peaks a chip, as PNG."""
    from matplotlib.figure import Figure

    from jaxckpt.show.plot import LINES, render

    drawing = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = drawing.subplots(1, 2)
    chips = [row["chips"] for row in rows]
    lines = (
        (left, "planning", lambda row: row["planning_seconds"]),
        (left, "one compilation", lambda row: row["compile_seconds"]),
        (right, "without a plan", lambda row: row["unplanned_bytes"] / 2**30),
        (right, f"with a plan for {GROWTH} of it", lambda row: row["peak_bytes"] / 2**30),
    )
    for (axes, label, value), colour in zip(lines, (LINES[0], LINES[1], LINES[0], LINES[1]), strict=True):
        axes.plot(chips, [value(row) for row in rows], "o-", color=colour, label=label)
    for axes, unit in ((left, "seconds on this machine"), (right, "GiB a chip")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(chips, [f"{each:,}" for each in chips])
        axes.set(xlabel="chips", ylabel=unit)
        axes.set_ylim(bottom=0)
        axes.legend(loc="best", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    drawing.suptitle("The same five blocks, two sequences for every four chips", x=0.01, ha="left")
    return render(drawing, "png")


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", nargs="*", default=list(BUDGETS), metavar="BYTES", help="of the whole model")
    parser.add_argument("--chips", nargs="*", type=int, default=list(MESHES), choices=list(MESHES), metavar="N")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    start_backend()
    if given.one:
        print(json.dumps(plan_one(int(given.one[0]), given.one[1] or None)))
        return 0
    rows = []
    for chips, budget in [*((2048, budget) for budget in given.budgets), *((chips, None) for chips in given.chips)]:
        rows.append(in_fresh_process(chips, budget))
        print(_cells(rows[-1]), file=sys.stderr, flush=True)
    text = report(rows)
    print(text)
    if not given.no_save:
        reporting.save("pod", text, rows)
        write_whole(reporting.RESULTS / "pod.png", figure([row for row in rows if not row["asked"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
