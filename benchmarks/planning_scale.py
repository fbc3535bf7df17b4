"""How do planning's time and memory grow with the program?

    python -m benchmarks.planning_scale             # an hour on two cores; writes results/planning_scale.*
    python -m benchmarks.planning_scale --operations 500 1000 2000 --leaves 300 1000 --no-save

`jaxckpt.plan(..., verify=False)` of chains of 500 to 50,000 operations and of 300 to 20,000 leaves, each in a new
process: seconds of processor time, those that JAX takes to trace the same step, and the peak of the process's memory.
The exponents are those of fitted powers of the number of operations or leaves; 1 means proportional. They do not count
memory that the process had before it planned.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxckpt
from benchmarks import reporting
from jaxckpt.core.files import write_whole
from jaxckpt.core.graph import trace
from jaxckpt.core.liveness import graph_peak
from jaxckpt.show.table import markdown

OPERATIONS = (500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
LEAVES = (300, 1_000, 3_000, 10_000, 20_000)
TARGET = "cpu"
X = jax.ShapeDtypeStruct((256, 64), jnp.float32)
W = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def elementwise(size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a loss of `size` operations without a matmul, and its arguments."""

    def loss(x: Any) -> Any:
        for _ in range(size // 2):
            x = jnp.tanh(x) * 1.01
        return jnp.sum(x)

    return loss, (X,)


def matmuls(size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a loss of `size` operations, every second one a matmul with the same matrix, and its arguments."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(size // 2):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    return loss, (W, X)


def leaves(size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a loss of `size` matrices, each with a matmul of its own, and its arguments."""

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    return loss, ([W] * size, X)


KINDS = {"elementwise": elementwise, "matmuls": matmuls, "leaves": leaves}
SAYS = {
    "elementwise": "operations, elementwise",
    "matmuls": "operations, half of them matmuls",
    "leaves": "leaves, a matmul and a tanh each",
}


def measure_one(kind: str, size: int) -> dict[str, Any]:
    """Returns the figures of one program: seconds of processor time, MiB."""
    fun, args = KINDS[kind](size)
    before = _peak_mib()
    start = time.process_time()
    jax.eval_shape(jax.value_and_grad(fun), *args)
    traced = time.process_time()
    budget = graph_peak(trace(jax.value_and_grad(fun), *args), TARGET) - 1  # so that it needs a plan
    jax.clear_caches()
    start_plan = time.process_time()
    plan = jaxckpt.plan(fun, *args, budget=budget, target=TARGET, verify=False)
    seconds = time.process_time() - start_plan
    return {
        "kind": kind,
        "size": size,
        "regions": len(plan.regions),
        "seconds": seconds,
        "jax_seconds": traced - start,
        "base_mib": before,
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def in_fresh_process(kind: str, size: int) -> dict[str, Any]:
    """Returns `measure_one` of a process that has traced nothing before."""
    command = [sys.executable, "-m", "benchmarks.planning_scale", "--one", kind, str(size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def exponent(rows: Sequence[dict[str, Any]], figure: Callable[[dict[str, Any]], float]) -> float:
    """Returns the exponent of the power of the size that fits a figure best, by least squares of logarithms."""
    sizes, figures = [row["size"] for row in rows], [figure(row) for row in rows]
    return float(np.polyfit(np.log(sizes), np.log(figures), 1)[0])


def seconds(row: dict[str, Any]) -> float:
    """Returns the seconds of planning."""
    return float(row["seconds"])


def own_mib(row: dict[str, Any]) -> float:
    """Returns the MiB that planning took, those of the process before it left out."""
    return float(row["peak_mib"] - row["base_mib"])


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the tables of all kinds with their exponents."""
    parts = ["# Planning without verification, over the size of the program"]
    header = [
        "size",
        "regions",
        "planning",
        "JAX traces the step",
        "a thousand of the size",
        "memory",
        "of it planning's",
    ]
    for kind, text in SAYS.items():
        some = [row for row in rows if row["kind"] == kind]
        if not some:
            continue
        cells = [
            [
                f"{row['size']:,}", str(row["regions"]), f"{row['seconds']:.1f} s", f"{row['jax_seconds']:.1f} s",
                f"{1000 * row['seconds'] / row['size']:.2f} s", f"{row['peak_mib']:,.0f} MiB", f"{own_mib(row):,.0f} MiB",
            ]
            for row in some
        ]  # fmt: skip
        parts += [f"## {text}", markdown(header, cells)]
        if len(some) > 1:
            parts.append(f"Exponent of seconds {exponent(some, seconds):.2f}, of memory {exponent(some, own_mib):.2f}.")
    return "\n\n".join([*parts, "![seconds and MiB over the size](planning_scale.png)", ""])


def figure(rows: Sequence[dict[str, Any]]) -> bytes:
    """Returns a picture of seconds and MiB over the size, as PNG."""
    from matplotlib.figure import Figure

    from jaxckpt.show.plot import LINES, render

    drawing = Figure(figsize=(9, 4.2), layout="constrained")
    pairs = list(zip(drawing.subplots(1, 2), ((seconds, "seconds"), (own_mib, "MiB")), strict=True))
    for axes, (value, unit) in pairs:
        for (kind, text), colour in zip(SAYS.items(), LINES, strict=False):
            some = [row for row in rows if row["kind"] == kind]
            if some:
                label = f"{text}: {exponent(some, value):.2f}" if len(some) > 1 else text
                axes.loglog(
                    [row["size"] for row in some], [value(row) for row in some], "o-", color=colour, label=label
                )
        low = min(value(row) / row["size"] for row in rows) / 2
        ends = min(row["size"] for row in rows), max(row["size"] for row in rows)
        axes.loglog(ends, [low * end for end in ends], ":", color="#8a939c", label="in proportion: 1")
        ticks = [size for size in (300, *OPERATIONS) if ends[0] <= size <= ends[1]]
        axes.set_xticks(ticks, [f"{size:,}" for size in ticks], rotation=45)
        axes.set_xticks([], minor=True)
        axes.set(xlabel="operations or leaves", ylabel=unit)
        axes.legend(loc="upper left", fontsize=7.5, title="exponent", alignment="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(top=8 * max(value(row) for row in rows))
    drawing.suptitle("Planning without verification", x=0.01, ha="left")
    return render(drawing, "png")


def main() -> None:
    """Runs what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, nargs="*", default=OPERATIONS)
    parser.add_argument("--leaves", type=int, nargs="*", default=LEAVES)
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_one(options.one[0], int(options.one[1]))))
        return
    rows = []
    for kind in KINDS:
        for size in options.leaves if kind == "leaves" else options.operations:
            rows.append(in_fresh_process(kind, size))
            print(rows[-1], file=sys.stderr, flush=True)
    text = report(rows)
    print(text)
    if not options.no_save:
        reporting.save("planning_scale", text, rows)
        write_whole(reporting.RESULTS / "planning_scale.png", figure(rows))


if __name__ == "__main__":
    main()
