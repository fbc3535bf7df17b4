"""Does a plan hold when it runs? Models on this machine's device: the allocator's peak and the step's time.

    JAX_PLATFORMS=cuda python -m benchmarks.gpu     # on a GPU: the models at full size
    python -m benchmarks.gpu                        # on a CPU: small ones; the peak is the process's resident memory
    python -m benchmarks.gpu --only "gpt2 40%" --no-save

Plans are made for the chip as if it were not here ("cuda:h100"), so a machine without one can make them:

    python -m benchmarks.gpu --target cuda:h100 --prepare plans                   # no GPU: writes plans, runs nothing
    JAX_PLATFORMS=cuda python -m benchmarks.gpu --plans plans --jobs 4            # on the GPU: plans nothing, runs them

Each step runs in a process of its own, because an allocator's peak cannot be reset. The peak of a GPU is that of
`Device.memory_stats()`. JAX allocates on demand (XLA_PYTHON_CLIENT_PREALLOCATE=false), so that the peak is that of the
program. After its peak is read, the step as it is runs in the same process, turn by turn with the plan: the ratio of
times is the median of the turns' ratios. The predicted ratio is by the target's rates.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

import jaxckpt
from benchmarks import reporting
from jaxckpt.core.files import write_whole
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.chips import CHIPS
from jaxckpt.memory.platforms import PLATFORMS
from jaxckpt.memory.targets import Target, start_backend, target_of
from jaxckpt.models import gpt, resnet, unet
from jaxckpt.planner.frontier import cost_of
from jaxckpt.show.table import format_seconds, markdown

MODELS: dict[str, Callable[..., Any]] = {
    "gpt2": gpt.gpt2,
    "resnet50": resnet.resnet50,
    "unet": unet.unet,
    "gpt2, 128,256 words": functools.partial(gpt.gpt2, vocabulary=128_256),
}
SMALL: dict[str, Callable[..., Any]] = {
    "gpt2": functools.partial(gpt.small, layers=4, batch=32, width=256),
    "resnet50": functools.partial(resnet.small, batch=64),
}
"""Small models: enough bytes to be seen in a process's memory, and steps of about a second on two cores."""
WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "tiles": {"tile": True},
    "offload": {"actions": (jaxckpt.RECOMPUTE, jaxckpt.SAVE, jaxckpt.OFFLOAD)},
    "int8": {"actions": (jaxckpt.RECOMPUTE, jaxckpt.SAVE, jaxckpt.compress("int8"))},
}
"""What a plan may do besides keeping and recomputing -> arguments of `jaxckpt.frontier`."""
AS_IT_IS, BY_HAND = "as it is", "by hand"
STEPS = 10


@dataclass(frozen=True)
class Case:
    """A step that is run.

    Attributes:
      model: of MODELS.
      budget: of the plan; AS_IT_IS for no plan, BY_HAND for a checkpoint around each block.
      way: of WAYS.
    """

    model: str
    budget: str = AS_IT_IS
    way: str = ""

    @property
    def name(self) -> str:
        """What it is called in tables, and what `--only` compares."""
        return " ".join(filter(None, (self.model, self.budget, self.way)))

    @property
    def file(self) -> str:
        """Name of the file of its plan."""
        return "".join(c if c.isalnum() else "-" for c in self.name) + ".json"


def cases(platform: str) -> list[Case]:
    """Returns what is run on a platform: on a CPU the small models alone."""
    plain = [Case(model, budget) for model in SMALL for budget in (AS_IT_IS, "80%", "60%", "40%", BY_HAND)]
    if platform == "cpu":
        return plain
    return [
        *plain,
        Case("gpt2", "30%"),
        *(Case("gpt2", "30%", way) for way in ("offload", "int8")),
        Case("unet"),
        Case("unet", "50%"),
        Case("gpt2, 128,256 words"),
        Case("gpt2, 128,256 words", "20%", "tiles"),
    ]


def made(case: Case, *, real: bool = False) -> tuple[Callable[..., Any], Any]:
    """Returns the loss and the arguments of a case: the small model's on a CPU."""
    factory = (SMALL if target_of().platform == "cpu" else MODELS)[case.model]
    return factory(jax.checkpoint if case.budget == BY_HAND else None, real=real)


def step_of(loss: Callable[..., Any]) -> Any:
    """Returns the compiled step's function: value and gradient, with the options that the device needs."""
    return jax.jit(jax.value_and_grad(loss), compiler_options=jaxckpt.compiler_options() or None)


# ------------------------------------------------------------------------------------------------------------- planning


def prepare(wanted: Sequence[Case], target: Target, folder: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Plans what is to be run, for a target that need not be here.

    Args:
      wanted: cases.
      target: what to plan for.
      folder: gets the plans, and `rows.json`.
      say: gets a line for each case.

    Returns:
      A row for each case that fits: "case", "target", "predicted_bytes" (None without a plan), "compiled_bytes",
      "host_bytes" and "predicted_ratio" (of the seconds, by the target's rates).
    """
    os.makedirs(folder, exist_ok=True)
    rows: list[dict[str, Any]] = []
    factories = SMALL if target.platform == "cpu" else MODELS
    bare: dict[str, float] = {}
    for case in wanted:
        loss, args = factories[case.model](jax.checkpoint if case.budget == BY_HAND else None)
        row: dict[str, Any] = {"case": vars(case), "target": target.name, "predicted_bytes": None}
        if case.budget in (AS_IT_IS, BY_HAND):
            report = jaxckpt.measure(jax.value_and_grad(loss), *args, target=target, generate_code=False)
            _, seconds = cost_of(jax.value_and_grad(loss), args, target)
            row |= {"compiled_bytes": report.peak_bytes, "host_bytes": report.host_bytes}
        else:
            point = jaxckpt.frontier(loss, *args, budgets=[case.budget], target=target, **WAYS[case.way]).points[0]
            if point.plan is None:
                say(f"{case.name}: {point.why}")
                continue
            point.plan.save(os.path.join(folder, case.file))
            seconds = point.seconds or 0.0
            row |= {"predicted_bytes": point.predicted_bytes, "compiled_bytes": point.peak_bytes}
            row["host_bytes"] = point.report.measured_host_bytes if point.report else None
        if case.model not in bare:
            plain, _ = factories[case.model]()
            _, bare[case.model] = cost_of(jax.value_and_grad(plain), args, target)
        row["predicted_ratio"] = seconds / bare[case.model]
        rows.append(row)
        write_whole(os.path.join(folder, "rows.json"), json.dumps(rows, indent=1))
        say(f"{case.name}: {format_bytes(row['compiled_bytes'])}, {row['predicted_ratio']:.2f} of the time")
    return rows


# -------------------------------------------------------------------------------------------------------------- running


def run_here(case: Case, plan: jaxckpt.Plan | None, steps: int) -> dict[str, Any]:
    """Runs a step in this process.

    Args:
      case: the step.
      plan: what to put the loss under; None for nothing.
      steps: how many runs are timed; with 0 it is compiled only, and "here_bytes" is all that is said.

    Returns:
      "peak_bytes" (of the allocator; on the CPU what the process takes more than before it had the arguments),
      "here_bytes" (the compiler's peak of the program that ran, None where it does not say), "seconds" (the median of
      the steps), "ratio" (the median, over turns, of its seconds over those of the step as it is; None where that does
      not fit), "loss" and "device".
    """
    loss, shapes = made(case)
    compiled = step_of(loss if plan is None else plan.apply(loss)).lower(*shapes).compile()
    here = _peak_of(compiled)
    if not steps:
        return {"here_bytes": here}
    _, args = made(case, real=True)
    args = jax.block_until_ready(jax.device_put(args))
    before = _start_of_peak() - sum(leaf.nbytes for leaf in jax.tree.leaves(args))
    out = jax.block_until_ready(compiled(*args))
    value, stats = float(out[0]), jax.local_devices()[0].memory_stats() or {}
    peak = stats["peak_bytes_in_use"] if "peak_bytes_in_use" in stats else _peak_resident() - before
    del out
    device = jax.local_devices()[0].device_kind
    row = {"peak_bytes": int(peak), "here_bytes": here, "loss": value, "device": device}
    other = None if case.budget == AS_IT_IS else step_of(made(Case(case.model))[0]).lower(*shapes).compile()
    try:
        if other is not None:
            jax.block_until_ready(other(*args))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        other = None
    times, others = [], []
    for _ in range(steps):
        times.append(_seconds(compiled, args))
        if other is not None:
            others.append(_seconds(other, args))
    row["seconds"] = statistics.median(times)
    row["ratio"] = statistics.median(a / b for a, b in zip(times, others)) if others else None
    return row


def _peak_of(compiled: Any) -> int | None:
    """Returns the compiler's peak of a program; None for one that comes from JAX's cache, which does not keep it."""
    stats = compiled.memory_analysis()
    if stats.host_temp_size_in_bytes:  # XLA counts it in the peak
        return int(stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes) + int(
            stats.temp_size_in_bytes
        )
    return int(stats.peak_memory_in_bytes) or None


def _seconds(compiled: Any, args: Any) -> float:
    """Returns the seconds of one run."""
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    return time.perf_counter() - start


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


def run_apart(row: dict[str, Any], folder: str, steps: int) -> dict[str, Any]:
    """Runs the case of a row in a separate process; steps and result are those of `run_here`."""
    case = Case(**row["case"])
    command = [sys.executable, "-m", "benchmarks.gpu", "--worker", json.dumps(row["case"]), "--steps", str(steps)]
    if row["predicted_bytes"] is not None:
        command += ["--plan", os.path.join(folder, case.file)]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{case.name} did not run: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(
    rows: Sequence[dict[str, Any]],
    folder: str,
    steps: int,
    jobs: int,
    say: Callable[[str], None],
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Runs the cases of rows, one after the other, and returns the rows with what `run_here` says of each.

    A case that fails is left out, and told.

    Args:
      rows, folder: of `prepare`.
      steps: how many runs are timed.
      jobs: how many are compiled at once before the first one runs; 1 compiles each when its turn comes. The steps as
        they are come first and alone, so that XLA tunes kernels on an idle device.
      say: gets a line for each case.
      keep: gets the rows so far after each case.
    """
    ahead: dict[str, dict[str, Any]] = {}

    def compile_ahead(row: dict[str, Any]) -> None:
        name, start = Case(**row["case"]).name, time.perf_counter()
        with contextlib.suppress(RuntimeError):  # it is told when its turn comes
            ahead[name] = run_apart(row, folder, steps=0)
        say(f"{name}: compiled in {time.perf_counter() - start:.0f} s")

    if jobs > 1:
        first = [row for row in rows if row["case"]["budget"] == AS_IT_IS]
        for row in first:
            compile_ahead(row)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(compile_ahead, [row for row in rows if row not in first]))
    found = []
    for row in rows:
        name = Case(**row["case"]).name
        try:
            ran = {**row, **run_apart(row, folder, steps)}
        except RuntimeError as error:
            say(str(error))
            continue
        ran["here_bytes"] = ran["here_bytes"] or ahead.get(name, {}).get("here_bytes")
        found.append(ran)
        say(
            f"{name}: {format_bytes(ran['peak_bytes'])} of {format_bytes(ran['compiled_bytes'])}, "
            f"{format_seconds(ran['seconds'])}"
        )
        keep(found)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns rows as a table in Markdown."""
    header = ["step", "predicted peak", "compiled peak", "compiled here", "peak as it ran", "over compiled"]
    header += ["time", "of as it is", "predicted", "loss"]
    lines = [
        [
            Case(**row["case"]).name,
            "" if row["predicted_bytes"] is None else format_bytes(row["predicted_bytes"]),
            format_bytes(row["compiled_bytes"]),
            "" if row["here_bytes"] is None else format_bytes(row["here_bytes"]),
            format_bytes(row["peak_bytes"]),
            f"{row['peak_bytes'] / row['compiled_bytes'] - 1:+.1%}",
            format_seconds(row["seconds"]),
            "" if row["ratio"] is None else f"{row['ratio']:.3f}",
            f"{row['predicted_ratio']:.3f}",
            f"{row['loss']:.5f}",
        ]
        for row in rows
    ]
    return markdown(header, lines)


def main() -> None:
    """Plans, runs, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help='names of steps, such as "gpt2 40%%"')
    parser.add_argument("--steps", type=int, default=STEPS, help="runs that are timed")
    parser.add_argument("--jobs", type=int, default=1, help="steps that are compiled at once before they run")
    parser.add_argument("--target", help="what to plan for; by default this machine's chip, by its name")
    parser.add_argument("--prepare", metavar="FOLDER", help="write plans to a folder; run nothing")
    parser.add_argument("--plans", metavar="FOLDER", help="run the plans of a folder; plan nothing")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Before the backend starts: the compilations of this process must not take memory that the runs need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def say(line: str) -> None:
        print(line, flush=True)

    if options.worker:
        start_backend()
        plan = jaxckpt.Plan.load(options.plan) if options.plan else None
        print(json.dumps(run_here(Case(**json.loads(options.worker)), plan, options.steps)))
        return
    with tempfile.TemporaryDirectory(prefix="jaxckpt-") as temporary:
        folder = options.prepare or options.plans or temporary
        # All processes share what they compile, and what XLA learnt of kernels on the device.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(temporary, "compiled"))
        if options.plans:
            rows = json.loads(pathlib.Path(folder, "rows.json").read_text())
        else:
            target = Target(options.target) if options.target else chip()
            known = {case.name: case for case in cases(target.platform)}
            if missing := [name for name in options.only if name not in known]:
                parser.error(f"--only: there is no {missing[0]!r}; there are {', '.join(map(repr, known))}")
            wanted = [case for name, case in known.items() if not options.only or name in options.only]
            rows = prepare(wanted, target, folder, say)
        if options.prepare:
            return
        rows = [row for row in rows if not options.only or Case(**row["case"]).name in options.only]
        save = functools.partial(_save, steps=options.steps)
        rows = run(rows, folder, options.steps, options.jobs, say, (lambda rows: None) if options.no_save else save)
    print(report(rows, options.steps) if rows else "Nothing ran.")


def _save(rows: list[dict[str, Any]], steps: int) -> None:
    name = "".join(c if c.isalnum() else "-" for c in rows[0]["device"].lower())
    reporting.save(f"gpu-{name}", report(rows, steps), rows)


def report(rows: Sequence[dict[str, Any]], steps: int) -> str:
    """Returns rows as a page in Markdown."""
    small = (
        " The models are small ones, and the peak is what the process takes." if target_of().platform == "cpu" else ""
    )
    return "\n".join(
        [
            f"# Plans as they run on {rows[0]['device']}",
            "",
            table(rows),
            "",
            f'Planned for `{rows[0]["target"]}`; "compiled peak" is that of its compiler without the device, '
            f'"compiled here" that of the program that ran. Peak as it ran: of the allocator. Time: median of '
            f"{steps} steps; of as it is: median ratio, turn by turn; predicted: by the target's rates.{small}",
        ]
    )


def chip() -> Target:
    """Returns the target of this machine's chip by its name, as if it were not here; the local one if its compiler
    cannot do that.
    """
    local = target_of()
    row = PLATFORMS[local.platform].local_chip(lambda: local.devices)
    for status in jaxckpt.targets():
        _, _, name = status.name.partition(":")
        if status.available and name and CHIPS[name.partition(":")[0]] is row:
            return Target(status.name)
    return local


if __name__ == "__main__":
    main()
