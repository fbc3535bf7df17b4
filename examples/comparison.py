"""`--compare`: an example without and with a plan, each in its own process; a table and a picture of both."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from common import MIB, RUNS

LIMITS = {False: 1e-4, True: 2e-2}
"""How much two losses of one step may differ, relative; the second in bfloat16, where rounding differs by more."""


def compare(options: argparse.Namespace) -> int:
    """Trains without and with a plan; writes NAME.md, NAME.json and NAME.png to the folder `--compare`.

    Returns:
      The program's exit code: 1 if the losses differ by more than they may.
    """
    name, folder = pathlib.Path(options.file).stem, options.compare
    flags = flags_of(options)
    found: dict[str, Any] = {"budget": options.budget}
    with tempfile.TemporaryDirectory() as scratch:
        plan, figures, *reports = (pathlib.Path(scratch, each) for each in ("plan", "figures", "without", "planned"))

        def start(*more: object) -> None:
            print("==", *more, file=sys.stderr, flush=True)
            command = [sys.executable, options.file, *flags, *map(str, more)]
            if code := subprocess.run(command).returncode:
                raise SystemExit(code)

        # The plan is made in a process of its own, so that the memory of planning is not that of training.
        start("--budget", options.budget, "--plan", plan, "--figures", figures)
        for report, budget in zip(reports, ("none", options.budget), strict=True):
            start("--budget", budget, "--plan", plan, "--report", report)
        found |= json.loads(figures.read_text())
        found["runs"] = [json.loads(report.read_text()) for report in reports]
    without, with_plan = (np.array(run["losses"]) for run in found["runs"])
    found["difference"] = float(np.max(np.abs(with_plan / without - 1)))
    found["limit"] = LIMITS[getattr(options, "bfloat16", False)]
    found["command"] = f"python examples/{name}.py --budget {options.budget} {' '.join(flags)}"
    found["about"] = about()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(page(name, found))
    (folder / f"{name}.json").write_text(json.dumps(found) + "\n")
    picture(found, folder / f"{name}.png")
    print(table(found))
    if message := failure(found):
        print(message, file=sys.stderr)
    return 1 if message else 0


def failure(found: dict[str, Any]) -> str | None:
    """Returns what is wrong with a comparison, or None: losses of one step that differ by more than they may."""
    if found["difference"] <= found["limit"]:
        return None
    return f"The losses of a step differ by {found['difference']:.1e}, more than {found['limit']:g}."


def flags_of(options: argparse.Namespace) -> list[str]:
    """Returns the flags that start the example again, for what is computed."""
    given = {
        key: value
        for key, value in vars(options).items()
        if key not in RUNS and value is not None and value is not False
    }
    given["steps"] = options.steps
    return [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in given.items()]


def about() -> str:
    """Returns what the figures depend on besides the program: processor, cores, versions."""
    info = pathlib.Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    processor = names[0].partition(": ")[2] if names else platform.machine()
    return f"{processor}, {os.cpu_count()} cores; jax {jax.__version__}, Python {platform.python_version()}"


def page(name: str, found: dict[str, Any]) -> str:
    """Returns the page of a comparison in Markdown."""
    return (
        f"# examples/{name}.py\n\n{table(found)}\n\n![Losses and memory]({name}.png)\n\n"
        f"The training with a plan is `{found['command']}`; the other one has `--budget none`. {found['about']}.\n"
    )


def row(name: str, found: dict[str, Any]) -> str:
    """Returns a comparison as one row: loss without and with a plan, difference, peaks, resident memory, time."""
    runs, (plain, planned) = found["runs"], found["peak"]
    held = [run["resident_mib"] - run["before_mib"] for run in runs]
    cells = [
        f"[`{name}.py`](../benchmarks/results/{name}.md)",
        found["budget"],
        " / ".join(f"{run['losses'][-1]:.4f}" for run in runs),
        difference(found),
        f"{plain / MIB:.1f} / {planned / MIB:.1f} MiB",
        f"{found['predicted'] / planned - 1:+.1%}",
        f"{held[0]:.0f} / {held[1]:.0f} MiB",
        f"{found['time_ratio']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def difference(found: dict[str, Any]) -> str:
    """Returns the largest relative difference of two losses of a step: 0 where all are the same numbers."""
    return f"{found['difference']:.1e}" if found["difference"] else "0"


def table(found: dict[str, Any]) -> str:
    """Returns the figures of a comparison as a table in Markdown."""
    runs, (plain, planned) = found["runs"], found["peak"]
    held = [run["resident_mib"] - run["before_mib"] for run in runs]
    rows = [["loss of the last step", *(f"{run['losses'][-1]:.4f}" for run in runs)]]
    rows += [
        [name.replace("_", " "), *(f"{run['figures'][name]:.3f}" for run in runs)]
        for name in sorted(runs[0]["figures"])
    ]
    rows += [
        ["largest relative difference of two losses of a step", "", difference(found)],
        ["peak, compiled", f"{plain / MIB:.1f} MiB", f"{planned / MIB:.1f} MiB, {planned / plain:.0%}"],
        ["peak, predicted", "", f"{found['predicted'] / MIB:.1f} MiB, {found['predicted'] / planned - 1:+.1%}"],
        ["resident memory of the process, peak while it trains", *(f"{run['resident_mib']:.0f} MiB" for run in runs)],
        ["of it above what was resident before the first step", *(f"{mib:.0f} MiB" for mib in held)],
        ["recomputation, of the step's FLOPs", "", f"{found['recompute']:+.1%}"],
        ["time of a step, interleaved runs", "1", f"{found['time_ratio']:.2f}"],
    ]
    if all(run["device_bytes"] for run in runs):
        rows.append(["peak on the device", *(f"{run['device_bytes'] / MIB:.0f} MiB" for run in runs)])
    head = ["", "without a plan", f"planned for {found['budget']}"]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---", "--:", "--:"], *rows))


def picture(found: dict[str, Any], path: pathlib.Path) -> None:
    """Draws both curves and the memory into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    curves, memory = figure.subplots(1, 2, width_ratios=[1.6, 1])
    names = ["without a plan", f"planned for {found['budget']}"]
    for run, name, look in zip(found["runs"], names, ({"lw": 4, "color": "#b8c2cc"}, {"lw": 1.2, "color": "#0072b2"})):
        curves.plot(range(1, len(run["losses"]) + 1), run["losses"], label=name, **look)
    curves.set(xlabel="step", ylabel="loss", ylim=(0, None))
    curves.legend(frameon=False)
    curves.set_title(f"largest relative difference {difference(found)}", fontsize=10)
    bars = {
        "compiled peak": [peak / MIB for peak in found["peak"]],
        "resident, above\nthe start": [run["resident_mib"] - run["before_mib"] for run in found["runs"]],
    }
    for place, sizes in enumerate(bars.values()):
        for offset, (size, color) in enumerate(zip(sizes, ("#b8c2cc", "#0072b2"))):
            memory.bar(place + 0.38 * offset, size, 0.36, color=color)
            memory.text(place + 0.38 * offset, size, f"{size:.0f}", ha="center", va="bottom", fontsize=9)
    memory.set_xticks([0.19, 1.19], list(bars))
    memory.set_ylabel("MiB")
    memory.set_title("memory", fontsize=10)
    for axes in (curves, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
