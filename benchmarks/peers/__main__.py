"""What do other libraries' checkpoints save and cost on the same models, and what does a user write for them?

    pip install -e ".[peers]"
    python -m benchmarks.peers                       # ten minutes; writes results/peers.md, .json and .png
    python -m benchmarks.peers --frameworks jax linen --anew

A framework that is not installed is left out, and named. What an earlier run has saved without an error is not measured
again, unless `--anew` is given. Each framework runs in a process of its own.

Four models: a chain of MLP layers, a GPT, a ResNet, and an LSTM over time. Every framework gets the same parameters and
the same input, float32, and runs the same operations; the loss is the mean of squares of what comes out. All rows agree
in value and gradient, and all models without checkpoints run the same number of matmuls.

- **Memory**: the peak of the bytes that are live in one value and gradient, without parameters and input, and with the
  gradients. On JAX: the compiled program's temporaries and outputs. In PyTorch: the allocations of the CPU's allocator,
  as its profiler records them.
- **Matmuls**: matmuls and convolutions that a step runs, and how many of them are recomputation. On JAX they are
  counted in the jaxpr of the step, loops multiplied out or run; in PyTorch as operations are dispatched, and for
  compiled models in the profiler's record.
- **Time**: processor time on one core, by that of the same framework without checkpoints: the median over pairs of runs
  that follow each other. Freed memory stays with the process, so that no step pays for new pages. A plain row compares
  a model with itself. Two runs of the benchmark differed by at most 0.15, and for PyTorch's checkpoints of the LSTM by
  0.5; bytes and matmuls were the same.
- **Lines**: source lines that the plain model does not have. The benchmark counts them; imports do not count.

All programs on JAX are compiled with `jaxckpt.compiler_options()`. Without these options XLA for CPUs (jax 0.10) undoes
the checkpoints of unrolled models, whichever library has placed them. PyTorch and XLA for CPUs need different bytes for
the same model without checkpoints. So the shares compare checkpoints, and the bytes compare frameworks. The models are
shallow: schemes for very deep ones, such as `nn.remat_scan`, show less here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import reporting
from benchmarks.peers import process, report, rows
from benchmarks.peers.frameworks import PACKAGES
from benchmarks.peers.rows import Row
from benchmarks.peers.tasks import TASKS

CHECKED = [
    ("jax", "GPT", "plain"),
    ("jax", "GPT", "jax.checkpoint, nothing"),
    ("jaxckpt", "GPT", "jaxckpt.plan, 60%"),
    ("torch", "GPT", "plain"),
    ("torch", "GPT", "checkpoint"),
    ("jax", "LSTM", "plain"),
    ("torch", "LSTM", "plain"),
]
"""Rows whose bytes are compared with the resident memory of a process."""


def version(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing() -> dict[str, str]:
    """Returns framework -> the package that is not installed."""
    wanted = ((name, package) for name, packages in PACKAGES.items() for package in packages)
    return {name: package for name, package in wanted if version(package) is None}


def child(*arguments: str) -> Iterator[Any]:
    """Runs this module in a process of its own; yields what it prints, one JSON value a line.

    Raises:
      RuntimeError: the process failed; the message is the last line that it wrote.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
    command = [sys.executable, "-m", "benchmarks.peers", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith(("{", "[")):
                yield json.loads(line)
    if running.returncode:
        raise RuntimeError(f"the process ended with {running.returncode}")


def measure(name: str, tasks: Sequence[str]) -> Iterator[Row]:
    """Measures a framework on some models in a process of its own. If the process fails, each model that it has not
    finished has a row that says so.
    """
    finished = set()
    try:
        for found in child("--measure", name, *tasks):
            if isinstance(found, list):
                finished.update(found)
            else:
                yield Row(**found | {"lines": tuple(found["lines"])})
    except RuntimeError as error:
        for task in tasks:
            if task not in finished:
                yield Row(name, task, "the variants that are not in the table", error=str(error))


def main() -> int:
    """Measures what no earlier run has saved, and writes the results after each row. Returns 1 if models differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", nargs="+", default=list(PACKAGES), choices=PACKAGES)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--anew", action="store_true", help="measure again what an earlier run has saved")
    parser.add_argument(
        "--jobs", type=int, default=2, help="frameworks that are measured at the same time; 2 if not given"
    )
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--resident", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        return _measure_here(*options.measure)
    if options.resident is not None:
        process.settle(process.RETURN)
        print(json.dumps([rows.resident(*options.resident)]))
        return 0

    data = _read()
    absent = missing()
    lock = threading.Lock()

    def fill(name: str) -> None:
        mine = [row for row in data["rows"] if row["framework"] == name]
        failed = {row["task"] for row in mine if row["error"] and row["possible"]}
        done = {row["task"] for row in mine} - failed
        tasks = [task for task in options.tasks if options.anew or task not in done]
        if name in absent or not tasks:
            return
        with lock:
            data["rows"] = [row for row in data["rows"] if row["framework"] != name or row["task"] not in tasks]
            data["versions"] |= {package: version(package) for package in PACKAGES[name]}
        for row in measure(name, tasks):
            print(f"{row.task}, {name}, {row.variant}: {row.error or f'{row.share:.0%}'}", file=sys.stderr, flush=True)
            with lock:
                data["rows"].append(dataclasses.asdict(row))
                _write(data)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(fill, options.frameworks))
    for name, task, variant in CHECKED:
        where = f"{name}, {task}, {variant}"
        if name in absent or (where in data["resident"] and not options.anew):
            continue
        if name in options.frameworks and task in options.tasks:
            try:
                (data["resident"][where],) = next(child("--resident", name, task, variant))
            except (RuntimeError, StopIteration) as error:
                print(f"{where}: {error}", file=sys.stderr)
    _write(data)
    report.picture(report.ordered(data), reporting.RESULTS / f"{report.NAME}.png")
    return int(bool(rows.disagreements(report.ordered(data))))


def _measure_here(name: str, *tasks: str) -> int:
    process.settle(process.KEEP)
    for task in tasks:
        for row in rows.rows_of(name, TASKS[task]()):
            print(json.dumps(dataclasses.asdict(row)), flush=True)
        print(json.dumps([task]), flush=True)
    return 0


def _read() -> dict[str, Any]:
    file = reporting.RESULTS / f"{report.NAME}.json"
    if not file.exists():
        return {"rows": [], "versions": {}, "resident": {}}
    return dict(json.loads(file.read_text())["results"])


def _write(data: dict[str, Any]) -> None:
    data["absent"] = missing()
    reporting.save(report.NAME, report.text(__doc__, data), data)


if __name__ == "__main__":
    sys.exit(main())
