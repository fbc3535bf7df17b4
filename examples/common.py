"""What the examples share: flags, planning, the loop with its bar and checkpoint files, and `--compare`.

An example has a parser (`parser`), and `make_step(options)`, which returns the loss, the arguments of the training step
and what makes the step of the loss. Its `main` goes on with `parse`, `planned` and `Run`, in this order.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import resource
import statistics
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxckpt

MIB = 2**20
RUNS = ("file", "budget", "plan", "steps", "save", "save_every", "compare", "report", "figures")
"""Flags that do not change what is computed at a step. A run may be resumed with others."""


# ---------------------------------------------------------------------------------------------------------------- flags


def parser(file: str, doc: str, *, steps: int, budget: str, **sizes: int) -> argparse.ArgumentParser:
    """Returns the parser with the flags of all examples, and one for each size.

    Args:
      file: of the example, which `--compare` starts.
      doc: its first lines, for `--help`.
      steps: the default of `--steps`.
      budget: the default of `--budget`.
      **sizes: names of other flags, with their defaults: positive numbers.
    """
    made = argparse.ArgumentParser(
        prog=pathlib.Path(file).name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.set_defaults(file=file)
    folder = {"metavar": "FOLDER", "type": pathlib.Path}
    made.add_argument(
        "--budget", default=budget, help=f"such as 60%%, 4GiB, or none for no plan ({budget.replace('%', '%%')})"
    )
    made.add_argument("--steps", type=positive, default=steps, help=f"training steps ({steps})")
    made.add_argument("--seed", type=int, default=0, help="of parameters and batches (0)")
    made.add_argument("--save", **folder, help="write checkpoint files here, and go on from the one that is there")
    made.add_argument("--save-every", type=positive, default=50, help="steps between two checkpoint files (50)")
    made.add_argument("--compare", **folder, help="train without and with a plan; write a table and a picture here")
    made.add_argument("--plan", metavar="FILE", type=pathlib.Path, help="take the plan from here, or write it here")
    made.add_argument("--report", metavar="FILE", type=pathlib.Path, help="write losses and memory here, as JSON")
    made.add_argument("--figures", metavar="FILE", type=pathlib.Path, help=argparse.SUPPRESS)
    for name, default in sizes.items():
        made.add_argument("--" + name.replace("_", "-"), type=positive, default=default, help=f"({default})")
    return made


def positive(text: str) -> int:
    """Returns the positive number that a flag gives."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def parse(
    made: argparse.ArgumentParser, argv: list[str] | None, check: Callable[[Any], str | None] = lambda options: None
) -> argparse.Namespace:
    """Returns the flags. With `--compare`, runs the comparison and ends the program.

    Args:
      made: the parser.
      argv: the words of the command line; None for this program's.
      check: returns what is wrong with the flags together, or None.
    """
    options = made.parse_args(argv)
    if message := check(options):
        made.error(message)
    if options.compare is not None:
        if options.budget == "none" or options.save is not None:
            made.error("--compare needs a --budget for the plan, and no --save: it trains from the start, twice.")
        from comparison import compare

        raise SystemExit(compare(options))
    return options


def with_devices(count: int) -> list[jax.Device]:
    """Returns the first `count` devices. On the CPU, they are made; JAX must not have been used before."""
    if count > 1:
        with contextlib.suppress(RuntimeError):  # JAX is in use: the devices that are there have to do
            jax.config.update("jax_num_cpu_devices", count)
    if len(jax.devices()) < count:
        raise SystemExit(f"--devices must be at most the number of devices here, {len(jax.devices())}; got {count}.")
    return jax.devices()[:count]


# ----------------------------------------------------------------------------------------------------------------- plan


def planned(options: argparse.Namespace, loss: Callable, *args: Any, step: Callable) -> Callable:
    """Returns `jaxckpt.plan(loss, *args, budget=options.budget, step=step).apply(loss)`; with "none", the loss.

    The plan is stored next to the checkpoint files, or in `--plan`, and is not made a second time. A stored plan of
    another program is a PlanMismatchError when the step is compiled.
    """
    if options.budget == "none":
        return loss
    file = options.plan or (options.save and options.save / f"plan-{options.budget}.json")
    try:
        if file and file.exists():
            plan = jaxckpt.Plan.load(file)
            if options.plan and plan.budget:  # the names of the others have their budgets in them
                made = f"made for {plan.budget / MIB:.1f} MiB"
                print(f"Takes the plan in {file}, {made}; --budget {options.budget} has no effect.", file=sys.stderr)
        else:
            plan = jaxckpt.plan(loss, *args, budget=options.budget, step=step)
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                plan.save(file)
        fun = plan.apply(loss)
        if options.figures:  # for --compare, in a process of its own
            peaks = jaxckpt.compare({"without": loss, "planned": fun}, *args, step=step, time=True)
            figures = {
                "peak": [row.peak_bytes for row in peaks],
                "recompute": peaks["planned"].recompute,
                "time_ratio": peaks["planned"].time_ratio,
                "predicted": plan.report.predicted_bytes,
                "budget_bytes": plan.budget,
            }
            options.figures.write_text(json.dumps(figures))
            raise SystemExit(0)
    except jaxckpt.JaxckptError as error:
        raise SystemExit(f"--budget {options.budget}: {error}") from error
    return fun


# ------------------------------------------------------------------------------------------------------------- the loop


class Run:
    """A compiled training step, and what goes on around its calls.

    Args:
      options: the flags.
      step: the training step: a jitted function.
      *args: its arguments, the state first.
    """

    def __init__(self, options: argparse.Namespace, step: Any, *args: Any) -> None:
        self.options = options
        self.step = step.lower(*args).compile(compiler_options=jaxckpt.compiler_options())
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.settings = json.dumps({k: v for k, v in sorted(vars(options).items()) if k not in RUNS})
        self.file = options.save and options.save / "checkpoint.npz"
        self.before = self.peak = 0.0

    def restore(self, state: Any) -> Any:
        """Returns the state in the checkpoint file, where there is one; otherwise the given one."""
        if not (self.file and self.file.exists()):
            return state
        leaves, tree = jax.tree.flatten(state)
        try:
            with self.file.open("rb") as file, np.load(file) as stored:
                if (settings := stored["settings"].item()) != self.settings:
                    raise SystemExit(
                        f"--save must be the folder of a run with the same flags. {self.file} is of {settings}; this "
                        f"run has {self.settings}. Give other flags or another folder."
                    )
                self.losses = stored["losses"].tolist()
                # jnp.array copies: a step that donates its state must not write into NumPy's memory.
                found = [jnp.array(stored[f"leaf{i}"], jnp.result_type(leaf)) for i, leaf in enumerate(leaves)]
        except (zipfile.BadZipFile, AttributeError, EOFError, LookupError, ValueError) as error:
            raise SystemExit(
                f"--save must be a folder whose checkpoint file is whole; {self.file} is not: {error}. Remove the file "
                f"to start anew, or give another folder."
            ) from error
        where = [leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves]
        print(f"Goes on after step {len(self.losses)} of {self.file}.", file=sys.stderr)
        return tree.unflatten([jax.device_put(new, place) for new, place in zip(found, where, strict=True)])

    def save(self, state: Any) -> None:
        """Writes the state and the losses to the checkpoint file, whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        leaves = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
        partial = self.file.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(file, settings=self.settings, losses=np.array(self.losses), **leaves)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.file)  # a run that is killed leaves the file of before, or this one

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the steps that are left, and shows the progress."""
        self.before = forget_peak()
        with _bar(self.options.steps, len(self.losses)) as show:
            for number in range(len(self.losses), self.options.steps):
                start = time.perf_counter()
                yield number
                self.seconds.append(time.perf_counter() - start)
                show(number + 1, f"loss {self.losses[-1]:.4f}  {self.seconds[-1]:.2f} s a step")
        self.peak = resident_mib("VmHWM")  # what comes after the training is not in it

    def record(self, loss: jax.Array, state: Any) -> None:
        """Stores the loss of a step; every `--save-every` steps and after the last one, writes a checkpoint file."""
        self.losses.append(float(loss))
        if self.file and (len(self.losses) % self.options.save_every == 0 or len(self.losses) == self.options.steps):
            self.save(state)

    def finish(self, **figures: float) -> None:
        """Prints what came out, with such figures as `accuracy=0.97`, and writes `--report`."""
        peak, device = self.peak, jax.local_devices()[0].memory_stats() or {}
        on_device = device.get("peak_bytes_in_use")
        said = "".join(f", {name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())
        print(
            f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} in {len(self.losses)} steps{said}, peak resident "
            f"memory {peak:.0f} MiB, {peak - self.before:.0f} MiB of it for training"
            + (f", {on_device / MIB:.0f} MiB on the device" if on_device else "")
        )
        if self.options.report:
            seconds = statistics.median(self.seconds) if self.seconds else None
            report = {"losses": self.losses, "figures": figures, "resident_mib": peak, "before_mib": self.before}
            report |= {"device_bytes": on_device, "seconds": seconds}
            self.options.report.write_text(json.dumps(report))


@contextlib.contextmanager
def _bar(total: int, done: int) -> Iterator[Callable[[int, str], None]]:
    """Yields a function of (steps done, a text): a bar in a terminal, ten plain lines elsewhere; on standard error."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True)) as shown:
            task = shown.add_task("", total=total, completed=done)
            yield lambda number, text: shown.update(task, completed=number, description=text)
    else:
        each = max(1, total // 10)
        yield (
            lambda number, text: (
                print(f"step {number} of {total}  {text}", file=sys.stderr, flush=True)
                if number % each == 0 or number == total
                else None
            )
        )


def resident_mib(what: str) -> float:
    """Returns resident memory of this process in MiB: "VmRSS" now, or "VmHWM" its peak (elsewhere than on Linux, both
    are the peak of the whole process).
    """
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split(f"{what}:")[1].split()[0]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 1024)


def forget_peak() -> float:
    """Starts the peak of resident memory anew, without what compiling took; returns what is resident, in MiB."""
    with contextlib.suppress(OSError, AttributeError):  # this is for Linux
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    return resident_mib("VmRSS")
