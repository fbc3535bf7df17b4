"""Does a plan hold when it runs? GPT-2 and ResNet-50 on this machine's device: the allocator's peak and the step's
time.

    JAX_PLATFORMS=cuda python -m benchmarks.gpu    # on a GPU, the models at full size
    python -m benchmarks.gpu                       # on the CPU, small models; the peak is the process's resident memory
    python -m benchmarks.gpu --models gpt2 --budgets 50% --no-save

Each step runs in a separate process, because an allocator's peak cannot be reset. The peak of a GPU is that of
`Device.memory_stats()`. JAX allocates on demand (XLA_PYTHON_CLIENT_PREALLOCATE=false), so that the peak is that of the
program. The predicted ratio of times is by the target's rates.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jaxckpt
from benchmarks import reporting
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.targets import start_backend, target_of
from jaxckpt.models import gpt, resnet
from jaxckpt.planner.frontier import cost_of, point
from jaxckpt.planner.problems import problem_of
from jaxckpt.show.table import format_seconds, markdown

MODELS: dict[str, Callable[..., Any]] = {"gpt2": gpt.gpt2, "resnet50": resnet.resnet50}
SMALL: dict[str, Callable[..., Any]] = {
    "gpt2": functools.partial(gpt.small, layers=4, batch=32, width=256),
    "resnet50": functools.partial(resnet.small, batch=64),
}
"""Small models: enough bytes to be seen in a process's memory, and steps of about a second on two cores."""
BUDGETS = ("40%", "60%", "80%")
STEPS = 10


def factory(model: str) -> Callable[..., Any]:
    """Returns the model's factory, a small one on a CPU."""
    return (SMALL if target_of().platform == "cpu" else MODELS)[model]


def run_here(model: str, plan: jaxckpt.Plan | None, steps: int) -> dict[str, Any]:
    """Runs a model's step in this process.

    Args:
      model: of MODELS.
      plan: what to put the loss under; None for nothing.
      steps: how many runs are timed.

    Returns:
      "peak_bytes" (of the allocator; on the CPU what the process takes more than before it had the arguments),
      "seconds" (the median of the steps), "loss" and "device".
    """
    loss, args = factory(model)(real=True)
    fun = loss if plan is None else plan.apply(loss)
    args = jax.block_until_ready(jax.device_put(args))
    step = jax.jit(jax.value_and_grad(fun), compiler_options=jaxckpt.compiler_options() or None)
    compiled = step.lower(*args).compile()
    before = _start_of_peak() - sum(leaf.nbytes for leaf in jax.tree.leaves(args))
    out = jax.block_until_ready(compiled(*args))
    value, stats = float(out[0]), jax.local_devices()[0].memory_stats() or {}
    peak = stats["peak_bytes_in_use"] if "peak_bytes_in_use" in stats else _peak_resident() - before
    times = []
    del out
    for _ in range(steps):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    kind = jax.local_devices()[0].device_kind
    return {"peak_bytes": int(peak), "seconds": statistics.median(times), "loss": value, "device": kind}


def _start_of_peak() -> int:
    """Returns the resident bytes of the process, and resets its peak (Linux)."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _peak_resident()


def _peak_resident() -> int:
    """Returns the peak of the process's resident bytes. (On Linux, the figure of getrusage includes the parent's.)"""
    status = pathlib.Path("/proc/self/status")
    if status.is_file():
        mark = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(mark.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_apart(model: str, plan: jaxckpt.Plan | None, steps: int) -> dict[str, Any]:
    """Runs a model's step in a separate process; arguments and result are those of `run_here`."""
    with tempfile.TemporaryDirectory(prefix="jaxckpt-") as folder:
        command = [sys.executable, "-m", "benchmarks.gpu", "--worker", model, "--steps", str(steps)]
        if plan is not None:
            path = os.path.join(folder, "plan.json")
            plan.save(path)
            command += ["--plan", path]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"{model} did not run: {done.stderr.strip()[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])


def measure_model(model: str, budgets: Sequence[str], steps: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Plans a model for each budget, runs it as it is and under each plan, and returns a row for each."""
    loss, args = factory(model)()
    problem = problem_of(loss, *args)
    _, bare_seconds = cost_of(jax.value_and_grad(loss), args, problem.target)
    rows: list[dict[str, Any]] = []
    for budget in (None, *budgets):
        planned = None if budget is None else point(problem, budget)
        if planned is not None and planned.plan is None:
            say(f"{model}, {budget}: {planned.why}")
            continue
        ran = run_apart(model, None if planned is None else planned.plan, steps)
        compiled = problem.unplanned.peak_bytes if planned is None else planned.peak_bytes
        row = {
            "model": model,
            "budget": budget,
            "predicted_bytes": None if planned is None else planned.predicted_bytes,
            "compiled_bytes": compiled,
            "predicted_ratio": 1.0 if planned is None else (planned.seconds or 0.0) / bare_seconds,
            **ran,
        }
        row["ratio"] = row["seconds"] / (rows[0] if rows else row)["seconds"]
        rows.append(row)
        say(
            f"{model}, {budget or 'as it is'}: {format_bytes(row['peak_bytes'])} of {format_bytes(compiled)}, "
            f"{format_seconds(row['seconds'])}"
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns rows as a table in Markdown."""
    header = ["model", "budget", "predicted peak", "compiled peak", "peak as it ran", "over compiled"]
    header += ["step", "of as it is", "predicted", "loss"]
    lines = [
        [
            row["model"],
            row["budget"] or "as it is",
            "" if row["predicted_bytes"] is None else format_bytes(row["predicted_bytes"]),
            format_bytes(row["compiled_bytes"]),
            format_bytes(row["peak_bytes"]),
            f"{row['peak_bytes'] / row['compiled_bytes'] - 1:+.1%}",
            format_seconds(row["seconds"]),
            f"{row['ratio']:.2f}",
            f"{row['predicted_ratio']:.2f}",
            f"{row['loss']:.5f}",
        ]
        for row in rows
    ]
    return markdown(header, lines)


def main() -> None:
    """Runs the models and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--steps", type=int, default=STEPS, help="runs that are timed")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Before the backend starts: the compilations of this process must not take memory that the runs need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    start_backend()
    if options.worker:
        plan = jaxckpt.Plan.load(options.plan) if options.plan else None
        print(json.dumps(run_here(options.worker, plan, options.steps)))
        return
    rows = []
    for model in options.models.split(","):
        rows += measure_model(model, options.budgets.split(","), options.steps, lambda line: print(line, flush=True))
    device = rows[0]["device"]
    small = (
        " The models are small ones, and the peak is what the process takes." if target_of().platform == "cpu" else ""
    )
    text = "\n".join(
        [
            f"# Plans as they run on {device}",
            "",
            table(rows),
            "",
            f"Peak as it ran: of the allocator. Time: median of {options.steps} steps; predicted: by the target's "
            f"rates.{small}",
        ]
    )
    print(text)
    if not options.no_save:
        name = "".join(c if c.isalnum() else "-" for c in device.lower())
        reporting.save(f"gpu-{name}", text, rows)


if __name__ == "__main__":
    main()
