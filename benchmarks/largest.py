"""How large a batch fits one GPU? Without checkpoints, with the best preset, and with a plan.

    python -m benchmarks.largest                     # an hour or more on two cores; nothing is run
    python -m benchmarks.largest gpt2 --ways plan    # one row; the others stay as they are

Each way is searched for the largest batch whose compiled gradient step fits the memory of an H100. A preset stands
around each block of the model (or, "whole", around all of it), and is the best of all. A plan may compute at most one
forward pass more than the step without it, as in P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal
Tensor Rematerialization" (2020); the last way admits all actions, and so may use the host's memory and keep rounded
values. A batch is the largest to within 3%.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

import jaxckpt
from benchmarks.all_actions import ALL
from benchmarks.reporting import RESULTS, save
from jaxckpt import RECOMPUTE, SAVE, DoesNotFitError, InfeasibleBudgetError, factories, variants
from jaxckpt.core.graph import trace
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.targets import start_backend
from jaxckpt.planner.problems import problem_of
from jaxckpt.show.table import markdown

MODELS = ("gpt2", "resnet50", "unet")
WAYS = ("none", "preset", "plan", "all actions")
WITHIN = 0.03


@dataclass(frozen=True)
class Row:
    """The largest batch of one way.

    Attributes:
      model, way: see above.
      batch: examples in it; 0 where not even one fits.
      peak_bytes: compiled, with that batch.
      flops: what the step computes more than the one without checkpoints, of its FLOPs.
      seconds: by the target's rates, of those of the step without checkpoints.
      note: the preset, or how the plan keeps values.
      searching_seconds: what the search took.
    """

    model: str
    way: str
    batch: int
    peak_bytes: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    note: str = ""
    searching_seconds: float = 0.0


@dataclass(frozen=True)
class Fit:
    """What fits with one batch."""

    peak_bytes: int
    flops: float
    seconds: float
    note: str = ""


def largest(fits: Callable[[int], Fit | None], start: int) -> tuple[int, Fit | None]:
    """Returns the largest batch that fits, to within `WITHIN`, and what fits.

    Args:
      fits: what fits with a batch; None where nothing does. A smaller batch than one that fits is taken to fit.
      start: where to begin.

    >>> largest(lambda batch: Fit(batch, 0, 0) if batch <= 100 else None, 8)[0]
    100
    """
    low, best, high = 0, None, math.inf
    batch = start
    while high - low > max(WITHIN * low, 1):
        found = fits(batch)
        if found is None:
            high = batch
        else:
            low, best = batch, found
        batch = 2 * low if high == math.inf else (low + int(high) + 1) // 2
        if low == 0 and high <= 1:
            break
    return low, best


class Model:
    """A model with any batch, and a GPU."""

    def __init__(self, name: str, target: jaxckpt.Target, cache: str | None) -> None:
        self.factory, self.target, self.cache = factories.load(name), target, cache
        self.budget = target.memory_bytes

    def built(self, batch: int, names: Iterable[str]) -> variants.Built:
        """Returns some variants of the model."""
        chosen = variants.variants_for(self.factory, chosen=list(names))
        return variants.build(self.factory, chosen, settings={"batch": batch})

    def counted(self, made: variants.Built, name: str) -> tuple[float, float]:
        """Returns the FLOPs of a variant's gradient, and of its forward pass."""
        fun = made.functions[name]
        return trace(jax.value_and_grad(fun), *made.args).flops, trace(fun, *made.args).flops

    def by_hand(self, name: str, batch: int) -> Fit | None:
        """Returns what fits with a variant."""
        made = self.built(batch, dict.fromkeys(["none", name]))
        try:
            report = jaxckpt.measure(made.made_step(name), *made.args, target=self.target, generate_code=False)
        except DoesNotFitError:
            return None
        if report.peak_bytes > self.budget:
            return None
        plain, _ = self.counted(made, "none")
        return Fit(report.peak_bytes, self.counted(made, name)[0] / plain - 1, 0.0, name)

    def planned(self, actions: Sequence[Any], batch: int) -> Fit | None:
        """Returns what fits with a plan that computes at most one forward pass more."""
        made = self.built(batch, ["none"])
        problem = problem_of(made.functions["none"], *made.args, target=self.target, actions=actions, cache=self.cache)
        plain, forward = self.counted(made, "none")
        for verify in (False, True):  # the first takes no compilation, and says no to most that are far too large
            try:
                plan = problem.plan(self.budget, verify=verify)
            except InfeasibleBudgetError as error:
                if verify or error.least_bytes is None or error.least_bytes > 1.1 * self.budget:
                    return None
                continue
            report = plan.report
            assert report is not None
            if report.flops is not None and report.flops > plain + 1.02 * forward:
                return None
        assert report.measured_bytes is not None and report.flops is not None
        host = f"{format_bytes(report.measured_host_bytes)} on the host" if report.measured_host_bytes else ""
        return Fit(report.measured_bytes, report.flops / plain - 1, plan.overhead or 0.0, host)


def row_of(model: str, way: str, target: jaxckpt.Target, start: int, cache: str | None) -> Row:
    """Returns one row."""
    begun = time.perf_counter()
    made = Model(model, target, cache)

    def told(batch: int, found: Fit | None) -> Fit | None:
        print(f"{model}, {way}: {batch} {'does not fit' if found is None else found}", flush=True)
        return found

    if way == "none":
        batch, fit = largest(lambda batch: told(batch, made.by_hand("none", batch)), start)
    elif way == "preset":
        names = [each.name for each in variants.variants_for(made.factory) if each.where != "none"]
        looked = {name: found for name in names if (found := told(start, made.by_hand(name, start))) is not None}
        leanest = sorted(looked, key=lambda name: looked[name].peak_bytes)[:2]  # of the others none takes less
        tried = [largest(lambda batch, name=name: told(batch, made.by_hand(name, batch)), start) for name in leanest]
        batch, fit = max(tried, key=lambda each: each[0])
    else:
        actions = (RECOMPUTE, SAVE) if way == "plan" else ALL
        batch, fit = largest(lambda batch: told(batch, made.planned(actions, batch)), start)
    seconds = time.perf_counter() - begun
    return Row(model, way, batch, **(asdict(fit) if fit else {}), searching_seconds=seconds)


def table(rows: Sequence[Row], target: jaxckpt.Target) -> str:
    """Returns the report in Markdown."""
    lines = []
    for row in sorted(rows, key=lambda row: (MODELS.index(row.model), WAYS.index(row.way))):
        base = next((each.batch for each in rows if (each.model, each.way) == (row.model, "none")), 0)
        times = f"{row.batch / base:.1f}" if base else ""
        lines.append(
            [
                row.model,
                row.way,
                str(row.batch),
                times,
                format_bytes(row.peak_bytes),
                f"{row.flops:+.1%}",
                row.note,
            ]
        )
    head = ["model", "way", "largest batch", "times", "peak", "FLOPs", ""]
    title = f"# The largest batch on one {target.name}, {format_bytes(target.memory_bytes)}"
    return "\n\n".join([title, __doc__.split("\n\n", 2)[2].strip(), markdown(head, lines)])


def main() -> None:
    """Searches and writes the report, after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="the rows of each model")
    parser.add_argument("--target", default="cuda:h100")
    parser.add_argument("--cache", help="a folder for the compiler's results")
    options = parser.parse_args()
    start_backend()
    target = jaxckpt.Target(options.target)
    stored = RESULTS / "largest.json"
    rows = [Row(**row) for row in json.loads(stored.read_text())["results"]] if stored.is_file() else []
    for model in options.models:
        for way in options.ways:
            known = [row.batch for row in rows if row.model == model and WAYS.index(row.way) < WAYS.index(way)]
            row = row_of(model, way, target, max(known, default=8) or 1, options.cache)
            rows = [*(each for each in rows if (each.model, each.way) != (model, way)), row]
            save("largest", table(rows, target), [asdict(row) for row in rows])
    print(table(rows, target))


if __name__ == "__main__":
    main()
