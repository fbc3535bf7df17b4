"""On this machine's CPU, run for real: is a plan as fast as a checkpoint by hand of the same peak?

    python -m benchmarks.cpu                      # five models: half an hour
    python -m benchmarks.cpu --models gpt lstm    # two of them
    python -m benchmarks.cpu --replan             # plans again; keeps what was compiled by hand

Checkpoints by hand are those of `benchmarks.floor`: around each block and around every two, and each preset around each
block. All of them are compiled and run, and the three fastest that have different peaks, each below the peak of the
step without checkpoints, are each held against a plan: its budget is exactly their peak. The two steps, and the one
without checkpoints, run in turns; times are medians.

Each row is saved at once in results/cpu.json; rows that exist are not run again, unless --replan.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import jaxckpt
from benchmarks import floor, reporting
from benchmarks.models import mixed
from jaxckpt.core.files import write_whole
from jaxckpt.factories import make
from jaxckpt.memory.compare import time_steps
from jaxckpt.memory.report import measure
from jaxckpt.memory.verify import fill
from jaxckpt.models import gpt, lstm, moe, resnet, unet
from jaxckpt.planner.problems import problem_of
from jaxckpt.show.table import markdown

MODELS: Mapping[str, Callable[..., Any]] = {
    "gpt": functools.partial(gpt.small, width=256, tokens=256),
    "lstm": functools.partial(lstm.lstm, steps=512, width=256, batch=32),
    "moe": functools.partial(moe.small, width=128, tokens=256),
    "resnet": functools.partial(resnet.small, width=16, batch=128),
    "unet": functools.partial(unet.small, width=32, factors=(1, 2, 4), batch=64),
    "loops": functools.partial(mixed.loops, seed=1),
}
BEST = 3
ROUNDS = 3
"""How often a pair is timed; the median of the ratios counts."""


def run(factory: Callable[..., Any], row: dict[str, Any], save: Callable[[], None], replan: bool) -> None:
    """Fills in the row of a model: "plain", "by hand", "planned"."""
    loss, args = make(factory)
    hand = {way: make(factory, **how)[0] for way, how in floor.ways()}
    steps = {name: jax.value_and_grad(fun) for name, fun in {"plain": loss, **hand}.items()}
    args = fill(args)
    if "by hand" not in row:
        peaks = {name: measure(step, *args).peak_bytes for name, step in steps.items()}
        seconds = time_steps(steps, args, lambda done, what: None)
        rows = {name: {"peak_bytes": peaks[name], "seconds": seconds[name]} for name in steps}
        row |= {"plain": rows.pop("plain"), "by hand": rows}
        save()
    planned = row.setdefault("planned", {})
    problem = problem_of(loss, *args)
    for way in best(row):
        if way in planned and not replan:
            continue
        start = time.perf_counter()
        try:
            plan = problem.plan(row["by hand"][way]["peak_bytes"])
        except jaxckpt.InfeasibleBudgetError as error:
            planned[way] = {"why": str(error)}
            continue
        took = time.perf_counter() - start
        pair = {"plain": steps["plain"], "hand": steps[way], "plan": jax.value_and_grad(plan.apply(loss))}
        times = [time_steps(pair, args, lambda done, what: None) for _ in range(ROUNDS)]
        ratio = lambda a, b, times=times: statistics.median(each[a] / each[b] for each in times)
        planned[way] = {
            "peak_bytes": plan.measured_bytes,
            "to_hand": ratio("plan", "hand"),
            "hand": ratio("hand", "plain"),
            "plan": ratio("plan", "plain"),
            "planning_seconds": took,
        }
        save()


def best(row: Mapping[str, Any]) -> list[str]:
    """Returns the fastest ways by hand that have different peaks, each below the plain step's."""
    chosen: dict[int, str] = {}
    for way, known in sorted(row["by hand"].items(), key=lambda each: each[1]["seconds"]):
        if known["peak_bytes"] < row["plain"]["peak_bytes"]:
            chosen.setdefault(known["peak_bytes"], way)
    return list(chosen.values())[:BEST]


def report(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table in Markdown."""
    lines, ratios, wrong = [], [], []
    for name, row in rows.items():
        plain = row["plain"]["peak_bytes"]
        for way in best(row):
            made = row["planned"][way]
            peak = f"{row['by hand'][way]['peak_bytes'] / plain:.1%}"
            if "why" in made:
                wrong.append(f"{name}, {way}: no plan fits: {made['why']}")
                lines.append([name, way, peak, "no plan fits", "", "", ""])
                continue
            ratios.append(made["to_hand"])
            if made["to_hand"] > 1.02:
                wrong.append(f"{name}, {way}: the plan takes {made['to_hand']:.3f} of the time by hand")
            times = [f"{made[key]:.3f}" for key in ("hand", "plan", "to_hand")]
            lines.append([name, way, peak, f"{made['peak_bytes'] / plain:.1%}", *times])
    header = ["model", "by hand", "peak", "plan's peak", "time by hand", "time of the plan", "plan to hand"]
    mean = f"On average a plan takes {statistics.mean(ratios):.3f} of the time by hand." if ratios else ""
    return "\n".join(
        [
            "# Plans and checkpoints by hand of the same peak, run on the CPU",
            "",
            "Peaks are shares of the compiled peak without checkpoints; times are shares of that step's time, and of the "
            f"step by hand. Each is the median of {ROUNDS} interleaved timings.",
            "",
            f"{len(rows)} models, {len(lines)} budgets. {mean} "
            + ("No plan takes over 1.02 of the time by hand." if not wrong else "Not so:"),
            "",
            *(f"- {line}" for line in wrong),
            *([""] if wrong else []),
            markdown(header, lines),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 where a plan does not match what is done by hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--replan", action="store_true", help="plan again; what is done by hand is not run again")
    given = parser.parse_args(argv)
    path = reporting.RESULTS / "cpu.json"
    rows: dict[str, Any] = json.loads(path.read_text())["results"] if path.is_file() else {}

    def save() -> None:
        write_whole(path, json.dumps({"environment": reporting.environment(), "results": rows}, indent=1) + "\n")

    for name in given.models:
        start = time.perf_counter()
        run(MODELS[name], rows.setdefault(name, {}), save, given.replan)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    reporting.save("cpu", report(rows), rows)
    return int("Not so:" in report(rows))


if __name__ == "__main__":
    sys.exit(main())
