"""How long does planning take, and what does a plan do to the compiler's time?

    python -m benchmarks.planning                   # about five minutes; writes results/planning.md, .json and .png
    python -m benchmarks.planning --layers 12 --no-compile --no-save

GPTs of 12 to 96 unrolled blocks for an H100: seconds of tracing and analysis, and of solving for every budget, each in
a new process. For the sizes in COMPILED also the compiler's seconds for the step planned for half of its peak, divided
by those for the step without a plan.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from benchmarks import reporting
from jaxckpt.core.files import write_whole
from jaxckpt.models import gpt
from jaxckpt.planner.problems import problem_of
from jaxckpt.show.table import markdown

LAYERS = (12, 24, 48, 96)
COMPILED = (12, 48)
TARGET = "cuda:h100"


def measure_one(layers: int, compiled: bool) -> dict[str, Any]:
    """Returns the figures of one size: seconds for each task."""
    fun, args = gpt.gpt2(layers=layers)
    start = time.perf_counter()
    problem = problem_of(fun, *args, target=TARGET, cache=False)  # what is timed includes compiling
    analysed = time.perf_counter()
    problem.table.solution(problem.table.least)
    solved = time.perf_counter()
    row = {
        "layers": layers,
        "operations": len(problem.graph.ops),
        "stages": problem.model.chain.length,
        "analysed": problem.model.distinct,
        "analysis_seconds": analysed - start,
        "solving_seconds": solved - analysed,
    }
    if compiled:
        plan = problem.plan("50%")
        row["compile_ratio"] = plan.measured.compile_seconds / problem.unplanned.compile_seconds
    return row


def in_fresh_process(layers: int, compiled: bool) -> dict[str, Any]:
    """Returns the result of `measure_one` in a new process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.planning",
        "--one",
        str(layers),
        *([] if compiled else ["--no-compile"]),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def figure(rows: list[dict[str, Any]]) -> bytes:
    """Returns a picture of seconds over operations, as PNG."""
    from matplotlib.figure import Figure

    from jaxckpt.show.plot import render

    drawing = Figure(figsize=(7, 4.2), layout="constrained")
    axes = drawing.subplots()
    operations = [row["operations"] for row in rows]
    seconds = [row["analysis_seconds"] + row["solving_seconds"] for row in rows]
    axes.plot(operations, seconds, "o-", color="#0b66c3", label="analysis and solving")
    axes.plot([0, operations[-1]], [0, seconds[-1]], ":", color="#8a939c", label="in proportion")
    for row, x, y in zip(rows, operations, seconds):
        axes.annotate(f"{row['layers']} blocks", (x, y), (0, 8), textcoords="offset points", ha="center")
    axes.set(xlabel="operations of the traced function", ylabel="seconds", xlim=(0, None), ylim=(0, 1.2 * max(seconds)))
    axes.set_title("Planning a GPT, compiles not counted", loc="left")
    axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return render(drawing, "png")


def main() -> None:
    """Runs the measurements that the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_one(options.one, not options.no_compile)))
        return
    rows = []
    for layers in options.layers:
        rows.append(in_fresh_process(layers, layers in COMPILED and not options.no_compile))
        print(rows[-1], file=sys.stderr, flush=True)
    header = [
        "blocks",
        "operations",
        "stages",
        "stretches analysed",
        "analysis",
        "solving",
        "compile, planned over not",
    ]
    cells = [
        [
            str(row["layers"]), str(row["operations"]), str(row["stages"]), str(row["analysed"]), f"{row['analysis_seconds']:.1f} s",
            f"{row['solving_seconds']:.1f} s", f"{row['compile_ratio']:.2f}" if "compile_ratio" in row else "",
        ]
        for row in rows
    ]  # fmt: skip
    text = f"# Planning a GPT of so many unrolled blocks\n\n{markdown(header, cells)}\n\n![seconds over operations](planning.png)\n"
    print(text)
    if not options.no_save:
        reporting.save("planning", text, rows)
        write_whole(reporting.RESULTS / "planning.png", figure(rows))


if __name__ == "__main__":
    main()
