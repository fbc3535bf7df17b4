"""Is a plan better than checkpoints placed by hand? Every model, at 15 to 95% of the peak without checkpoints.

    python -m benchmarks.frontier                                    # hours: about 250 steps for an H100 and a TPU v5e
    python -m benchmarks.frontier --models gpt2 --targets cuda:h100  # one of them
    python -m benchmarks.frontier --replan                           # plans again; keeps the peaks by hand

Checkpoints by hand use `jax.checkpoint`: around each block with each of JAX's policies that need no names, around every
2, 3, 4, 6 and sqrt(L) of the L blocks, around the first quarter, half, three quarters and all but one of the blocks.
For a scan, the segments are scans in a scan. Beside these, `jaxckpt.checkpoint` is around each block with each preset
that keeps something and not everything.

Each row is saved at once in results/frontier-MODEL-TARGET.json; rows that exist are not compiled again. The tables and
the picture are made from all rows, and results/frontier.md from all models and targets.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jaxckpt
from benchmarks import reporting
from jaxckpt.core.files import write_whole
from jaxckpt.core.plan import MemoryEstimate, Plan, PlanReport
from jaxckpt.core.units import format_bytes
from jaxckpt.factories import load, make
from jaxckpt.memory.targets import start_backend, target_of
from jaxckpt.planner.frontier import Frontier, Point, Way, cost_of, point, point_to_json, way, way_to_json
from jaxckpt.planner.model import BLOCK_PRESETS
from jaxckpt.planner.problems import problem_of
from jaxckpt.show import plans, plot
from jaxckpt.show.table import markdown

MODELS = {
    "gpt2": "jaxckpt.models.gpt:gpt2",
    "gpt2_scan": "jaxckpt.models.gpt:gpt2_scan",
    "deep": "jaxckpt.models.gpt:deep",
    "resnet50": "jaxckpt.models.resnet:resnet50",
    "unet": "jaxckpt.models.unet:unet",
    "lstm": "jaxckpt.models.lstm:lstm",
    "moe": "jaxckpt.models.moe:moe",
}
TARGETS: Mapping[str, tuple[str, ...]] = {
    "cuda:h100": tuple(MODELS),
    "tpu:v5e:2x2": ("gpt2", "resnet50", "unet"),
}
POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable", "everything_saveable")
"""JAX's policies that need neither names nor host memory."""
SEGMENTS: tuple[int | str, ...] = (2, 3, 4, 6, "sqrt")
SHARES = ("15%", "25%", "30%", "40%", "50%", "60%", "70%", "80%", "90%", "95%")
"""The budgets, of the peak without checkpoints."""
SAME = 0.001
"""Below this share of the step both are nothing, and two plans cost the same: plans weigh FLOPs against seconds."""
MUCH = 0.1
"""A plan is much better if it recomputes less than the best by hand by this share."""

# -------------------------------------------------------------------------------------------------------------- by hand


@dataclass(frozen=True)
class ByHand:
    """Checkpoints placed by hand.

    Attributes:
      name: the name in tables.
      policy: name of one of JAX's policies; None keeps the inputs of a segment.
      preset: name of a preset of jaxckpt, in place of a policy.
      segment_size: blocks in a segment.
      first: only the first `first` segments are checkpointed; None for all.
    """

    name: str
    policy: str | None = None
    segment_size: int | str = 1
    first: int | None = None
    preset: str | None = None


def by_hand(factory: Callable[..., Any]) -> list[ByHand]:
    """Returns the ways to checkpoint a model's blocks by hand; `factory` is as in `jaxckpt.factories`."""
    runs = count_runs(factory)
    # A scan has one body, so its first iterations cannot have other checkpoints than the rest.
    shares = sorted({round(runs * share / 4) for share in (1, 2, 3)} | {runs - 1}) if runs > 1 else []
    return [
        *(ByHand(f"each block, {name}", name) for name in POLICIES),
        *(ByHand(f"each block, preset {name}", preset=name) for name in BLOCK_PRESETS),
        *(ByHand(f"every {size} blocks", segment_size=size) for size in SEGMENTS),
        *(ByHand(f"first {n} of {runs} blocks", first=n) for n in shares if 0 < n < runs),
    ]


def build(factory: Callable[..., Any], how: ByHand) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a model's (loss, arguments) with checkpoints as `how` says."""
    if how.preset is not None:
        return make(factory, checkpoint=functools.partial(jaxckpt.checkpoint, policy=how.preset))
    policy = None if how.policy is None else getattr(jax.checkpoint_policies, how.policy)
    wrap = functools.partial(jax.checkpoint, policy=policy)
    if how.first is None:
        return make(factory, checkpoint=wrap, segment_size=how.segment_size)
    runs = _Runs()
    loss, args = make(factory, checkpoint=lambda run: runs.split(run, wrap(run), how.first or 0))
    return runs.counted(loss), args


def count_runs(factory: Callable[..., Any]) -> int:
    """Returns the number of segments of a model; 1 for a scan."""
    runs = _Runs()
    loss, args = make(factory, checkpoint=lambda run: runs.split(run, run, 0))
    jax.eval_shape(runs.counted(loss), *args)
    return runs.count


class _Runs:
    """Counts the segments while a loss is traced."""

    def __init__(self) -> None:
        self.count = 0

    def counted(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the loss, which starts to count when it is traced."""

        def fun(*args: Any) -> Any:
            self.count = 0
            return loss(*args)

        return fun

    def split(self, plain: Callable[..., Any], checkpointed: Callable[..., Any], first: int) -> Callable[..., Any]:
        """Returns a run that is checkpointed if it is one of the first."""

        def run(*args: Any) -> Any:
            self.count += 1
            return (checkpointed if self.count <= first else plain)(*args)

        return run


# -------------------------------------------------------------------------------------------------------------- running


def run(
    model: str,
    factory: Callable[..., Any],
    target: str,
    budgets: Sequence[str],
    rows: dict[str, Any],
    *,
    plan: bool = True,
    recount: bool = False,
    save: Callable[[dict[str, Any]], None] = lambda rows: None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Fills in what is missing in the rows of a model and target, and returns them.

    Args:
      model: its name, for messages.
      factory: as of `jaxckpt.factories`.
      target: name of a target.
      budgets: of the planner, as `jaxckpt.plan` takes them.
      rows: {"unplanned": row, "by hand": {name: row}, "planned": {budget: row}} of an earlier run, or {}.
      plan: whether to plan too.
      recount: whether FLOPs and seconds of the rows by hand are counted again; their compiled peaks stay.
      save: called with all rows after each new one.
      say: called with a line on each new one.
    """
    rows = {"unplanned": rows.get("unplanned"), "by hand": rows.get("by hand", {}), "planned": rows.get("planned", {})}
    loss, args = make(factory, checkpoint=None)
    step, where = jax.value_and_grad, target_of(target)

    def again(row: dict[str, Any] | None, fun: Callable[..., Any], its_args: tuple[Any, ...]) -> None:
        if recount and row is not None:
            row["flops"], row["seconds"] = cost_of(step(fun), its_args, where)

    again(rows["unplanned"], loss, args)
    if rows["unplanned"] is None:
        rows["unplanned"] = way_to_json(way("as it is", loss, args, step, where))
        save(rows)
        say(f"{model}, {target}, as it is: {_line(rows['unplanned'])}")
    for how in by_hand(factory):
        if how.name in rows["by hand"]:
            if recount:
                again(rows["by hand"][how.name], *build(factory, how))
        else:
            fun, its_args = build(factory, how)
            rows["by hand"][how.name] = way_to_json(way(how.name, fun, its_args, step, where))
            save(rows)
            say(f"{model}, {target}, {how.name}: {_line(rows['by hand'][how.name])}")
    missing = [budget for budget in budgets if budget not in rows["planned"]] if plan else []
    if missing:
        start = time.perf_counter()
        problem = problem_of(loss, *args, target=where)
        seconds = time.perf_counter() - start
        for budget in missing:
            start = time.perf_counter()
            found = point_to_json(point(problem, budget))
            found |= {"analysis_seconds": seconds, "planning_seconds": time.perf_counter() - start}
            rows["planned"][budget] = found
            save(rows)
            say(f"{model}, {target}, planned for {budget}: {_line(found)}")
    return rows


def _line(row: dict[str, Any]) -> str:
    if row.get("why"):
        return str(row["why"])
    peak = "does not fit" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"])
    return f"{peak}, {row['flops']:.4g} FLOPs, {row['seconds'] * 1e3:.4g} ms by the target's rates"


# ------------------------------------------------------------------------------------------------------------ reporting


def frontier_of(target: str, rows: dict[str, Any]) -> Frontier:
    """Returns rows as a frontier, for pictures and tables."""
    ways = [Way(**row) for row in rows["by hand"].values()]
    points = [_point(row) for _, row in sorted(rows["planned"].items(), key=lambda item: item[1]["budget_bytes"])]
    return Frontier(target, Way(**rows["unplanned"]), tuple(points), tuple(ways))


def _point(row: dict[str, Any]) -> Point:
    if not row["fits"]:
        return Point(row["budget"], row["budget_bytes"], None, row["why"])
    predicted = row["predicted_bytes"] and MemoryEstimate(row["predicted_bytes"], 0, 0, 0)
    report = PlanReport(
        Plan((), ""),  # the plan itself is not saved with its row
        measured_bytes=row["peak_bytes"],
        predicted=predicted or None,
        flops=row["flops"],
        seconds=row["seconds"],
    )
    return Point(row["budget"], row["budget_bytes"], report)


@dataclass(frozen=True)
class Verdict:
    """One budget: the plan against the best by hand.

    Attributes:
      within: whether the compiled peak is within the budget.
      error: of the prediction, over the compiled peak.
      best: the best by hand with a peak no larger than the plan's; None if there is none.
      gains: by measure ("flops", "seconds"), how much less the plan recomputes than the best by hand of that measure,
        as a share of the latter; None if there is no best.
      gains_in_budget: the same against the best by hand within the budget, which may be larger than the plan.
    """

    within: bool
    error: float
    best: Way | None
    gains: Mapping[str, float | None]
    gains_in_budget: Mapping[str, float | None]


def verdict(frontier: Frontier, planned: Point) -> Verdict | None:
    """Returns how a plan did; None where no plan fits."""
    if planned.plan is None or planned.peak_bytes is None:
        return None
    return Verdict(
        planned.peak_bytes <= planned.budget_bytes,
        planned.prediction_error or 0.0,
        frontier.best_other(planned, "flops"),
        {by: _gain(frontier, planned, by, planned.peak_bytes) for by in ("flops", "seconds")},
        {by: _gain(frontier, planned, by, planned.budget_bytes) for by in ("flops", "seconds")},
    )


def _gain(frontier: Frontier, planned: Point, by: str, within: int) -> float | None:
    best = frontier.best_other(planned, by, within)
    if best is None:
        return None
    base = getattr(frontier.unplanned, by)
    ours, theirs = (getattr(each, by) - base for each in (planned, best))
    if max(abs(ours), abs(theirs)) <= SAME * base:
        return 0.0
    return (theirs - ours) / theirs if theirs > 0 else -(ours - theirs) / base


def report(model: str, target: str, rows: dict[str, Any]) -> str:
    """Returns the tables of a model and target in Markdown."""
    frontier = frontier_of(target, rows)
    whole = frontier.unplanned.peak_bytes or 1
    planned = []
    for each in frontier.points:
        found = verdict(frontier, each)
        if found is None:
            planned.append([str(each.budget), format_bytes(each.budget_bytes), "no plan fits", *[""] * 7])
            continue
        best = found.best
        beside = (
            ["none so small", "", ""]
            if best is None
            else [best.name, f"{frontier.recompute(best):+.1%}", f"{frontier.overhead(best):+.1%}"]
        )
        planned.append(
            [
                str(each.budget), format_bytes(each.budget_bytes), format_bytes(each.peak_bytes or 0), f"{found.error:+.1%}",
                f"{frontier.recompute(each):+.1%}", f"{frontier.overhead(each):+.1%}", *beside, _percent(found.gains["flops"]),
            ]
        )  # fmt: skip
    header = [
        "budget",
        "in bytes",
        "compiled peak",
        "prediction off by",
        "recomputed",
        "time",
        "best by hand",
        "recomputed",
        "time",
        "less",
    ]
    hand = [
        [each.name, "" if each.peak_bytes is None else format_bytes(each.peak_bytes), f"{(each.peak_bytes or 0) / whole:.1%}",
         f"{frontier.recompute(each):+.1%}", f"{frontier.overhead(each):+.1%}"]
        for each in sorted((frontier.unplanned, *frontier.others), key=lambda each: each.peak_bytes or 0)
    ]  # fmt: skip
    why = [f"{each.budget}: {each.why}" for each in frontier.points if each.plan is None]
    return "\n".join(
        [
            f"# {model} on {target}",
            "",
            f"Without checkpoints the step's peak is {format_bytes(whole)}.",
            "",
            "## Planned",
            "",
            markdown(header, planned),
            "",
            "recomputed: FLOPs beyond those of the step without checkpoints; time: the same in seconds by the "
            "target's rates. best by hand: the "
            "entry below with the fewest FLOPs whose compiled peak is no larger than the plan's; less: how much "
            "less the plan recomputes.",
            *(["", *why] if why else []),
            "",
            "## By hand",
            "",
            markdown(["", "compiled peak", "of none", "recomputed", "time"], hand),
        ]
    )


def _percent(gain: float | None) -> str:
    return "" if gain is None else f"{gain:+.0%}"


def summary(frontiers: Mapping[tuple[str, str], Frontier]) -> str:
    """Returns one line for each model and target, and the sum of all, in Markdown."""
    header = ["model", "target", "budgets with a plan", "within budget", "prediction: median", "worst"]
    header += ["FLOPs no more than by hand", f"{MUCH:.0%} less", "time no more", f"{MUCH:.0%} less"]
    header += ["within the budget: FLOPs no more", "time no more", "more memory: FLOPs no more", "time no more"]
    lines, every, steps = [], [], []
    for (model, target), frontier in frontiers.items():
        found = [each for each in (verdict(frontier, one) for one in frontier.points) if each is not None]
        every += found
        more = _steps(frontier)
        steps += more
        lines.append([model, target, f"{len(found)} of {len(frontier.points)}", *_counts(found), *_no_more(more)])
    total = sum(len(frontier.points) for frontier in frontiers.values())
    lines.append(["all", "", f"{len(every)} of {total}", *_counts(every), *_no_more(steps)])
    return markdown(header, lines)


def _steps(frontier: Frontier) -> list[tuple[bool, bool]]:
    """Returns for each budget beyond the least one with a plan: whether its plan takes no more FLOPs, and no more
    seconds, than that for the budget before.
    """
    points = sorted(frontier.points, key=lambda each: each.budget_bytes)
    costs = [(each.flops, each.seconds) for each in points if each.flops is not None and each.seconds is not None]
    pairs = itertools.pairwise(costs)
    return [(more[0] <= less[0] * (1 + SAME), more[1] <= less[1] * (1 + SAME)) for less, more in pairs]


def _no_more(steps: Sequence[tuple[bool, bool]]) -> list[str]:
    return [f"{sum(each)} of {len(steps)}" for each in zip(*steps, strict=True)] if steps else ["", ""]


def _counts(found: Sequence[Verdict]) -> list[str]:
    if not found:
        return [""] * 9
    errors = [abs(each.error) for each in found]

    def at_least(gains: Sequence[float | None], gain: float) -> str:
        # If nothing by hand is so small, nothing by hand recomputes less.
        return f"{sum(each is None or each >= gain for each in gains)} of {len(found)}"

    same = {by: [each.gains[by] for each in found] for by in ("flops", "seconds")}
    larger = {by: [each.gains_in_budget[by] for each in found] for by in ("flops", "seconds")}

    return [
        f"{sum(each.within for each in found)} of {len(found)}",
        f"{statistics.median(errors):.1%}",
        f"{max(errors):.1%}",
        at_least(same["flops"], 0.0),
        at_least(same["flops"], MUCH),
        at_least(same["seconds"], 0.0),
        at_least(same["seconds"], MUCH),
        at_least(larger["flops"], 0.0),
        at_least(larger["seconds"], 0.0),
    ]


# ---------------------------------------------------------------------------------------------------------------- files


def stem(model: str, target: str) -> str:
    """Returns the name of the files of a model and target, without suffix."""
    return f"frontier-{model}-{target.replace(':', '-')}"


def read(model: str, target: str) -> dict[str, Any]:
    """Returns the rows that an earlier run with this version of JAX has saved, or {}."""
    path = reporting.RESULTS / f"{stem(model, target)}.json"
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    return saved["results"] if saved["environment"]["jax"] == jax.__version__ else {}


def write(model: str, target: str, rows: dict[str, Any]) -> None:
    """Saves rows, tables and picture of a model and target."""
    reporting.save(stem(model, target), report(model, target, rows), rows)
    figure = plans.frontier_figure(
        frontier_of(target, rows), title=f"{model} on {target}", measures=("flops", "seconds")
    )
    write_whole(reporting.RESULTS / f"{stem(model, target)}.svg", plot.render(figure, "svg", outlines=True))


def write_summary() -> str:
    """Saves results/frontier.md and .json of all results that there are, and returns the text."""
    pairs = [(model, target) for target in TARGETS for model in MODELS if read(model, target).get("planned")]
    frontiers = {pair: frontier_of(pair[1], read(*pair)) for pair in pairs}
    text = "\n".join(
        [
            "# Plans against checkpoints placed by hand",
            "",
            summary(frontiers),
            "",
            "Budgets are shares of the peak without checkpoints. A plan is held against the entries by hand whose "
            "compiled peak is no larger "
            "than its own; where there is none, it counts as better. The last columns are against those within the "
            "budget. More memory: against the plan for the next smaller budget, equal within "
            f"{SAME:.1%}. Each model's tables and picture are in frontier-MODEL-TARGET.md and .svg.",
        ]
    )
    results = {
        f"{model} {target}": [point_to_json(each) for each in frontier.points]
        for (model, target), frontier in frontiers.items()
    }
    reporting.save("frontier", text, results)
    return text


def main() -> None:
    """Runs what is missing and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help=f"of {', '.join(MODELS)}; by default those of each target")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--budgets", default=",".join(SHARES))
    parser.add_argument("--replan", action="store_true", help="forget earlier plans; keep the peaks compiled by hand")
    parser.add_argument("--hand-only", action="store_true", help="plan nothing")
    parser.add_argument("--no-save", action="store_true", help="print only, and start from nothing")
    options = parser.parse_args()
    start_backend()
    chosen = [name for name in options.models.split(",") if name]
    for target in options.targets.split(","):
        for model in chosen or TARGETS.get(target, tuple(MODELS)):
            rows = {} if options.no_save else read(model, target)
            if options.replan:
                rows["planned"] = {}
            save = (lambda rows: None) if options.no_save else functools.partial(write, model, target)
            say = lambda line: print(line, flush=True)
            factory, budgets = load(MODELS[model]), options.budgets.split(",")
            rows = run(
                model,
                factory,
                target,
                budgets,
                rows,
                plan=not options.hand_only,
                recount=options.replan,
                save=save,
                say=say,
            )
            save(rows)
            print(report(model, target, rows), flush=True)
            jax.clear_caches()
    if not options.no_save:
        print(write_summary())


if __name__ == "__main__":
    main()
