"""What do more actions bring? Plans with all of them against plans that save and recompute, by the target's rates.

    python -m benchmarks.all_actions                  # writes benchmarks/results/all_actions.md, .json and .svg
    python -m benchmarks.all_actions gpt2 --budgets 30%

Both plans are for one budget of device memory, a share of the peak without checkpoints, and both are compiled. Seconds
are those of the traced step by the target's rates, transfers that nothing hides counted. Where saving and recomputing
do not fit a budget, both plans may run stretches in tiles. "kept" is what a plan keeps by each action: bytes as stored,
on the device or on the host, of all regions together; regions inside of others keep theirs at other times.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.reporting import RESULTS, save
from jaxckpt import OFFLOAD, RECOMPUTE, SAVE, InfeasibleBudgetError, compress, factories, variants
from jaxckpt.core.graph import Graph
from jaxckpt.core.plan import Plan
from jaxckpt.core.regions import every_region
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.targets import start_backend
from jaxckpt.planner.problems import problem_of
from jaxckpt.show import plot

MODELS = {
    "gpt2": "gpt2",
    "resnet50": "resnet50",
    "unet": "unet",
    "gpt2, 4 blocks": "gpt2",
}
SETTINGS = {"gpt2, 4 blocks": {"layers": 4, "batch": 4}}
BUDGETS = ("30%", "15%")
PLAIN = (RECOMPUTE, SAVE)
ALL = (*PLAIN, OFFLOAD, compress("bits"), compress("int8"), compress("float8_e4m3fn"))


@dataclass(frozen=True)
class Row:
    """A plan.

    Attributes:
      model, budget: what was planned for.
      actions: "plain" or "all".
      tiles: whether stretches may run in tiles.
      why: where no plan fits, the planner's word on it.
      budget_bytes, peak_bytes, host_bytes: compiled, but for the budget.
      seconds, unplanned_seconds: of the step by the target's rates.
      host_share: how full the link to the host is.
      kept: bytes by action.
    """

    model: str
    budget: str
    actions: str
    tiles: bool
    why: str = ""
    budget_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    seconds: float = 0.0
    unplanned_seconds: float = 0.0
    host_share: float = 0.0
    kept: dict[str, int] = field(default_factory=dict)

    @property
    def added(self) -> float:
        """Seconds that the plan adds, over those of the step without it."""
        return self.seconds / self.unplanned_seconds - 1 if self.unplanned_seconds else 0.0


def bytes_by_action(plan: Plan, graph: Graph) -> dict[str, int]:
    """Returns the bytes that a plan keeps in regions and planned loops by each action, all iterations together."""
    graph = plan.tiled_graph(graph)
    kept: Counter[str] = Counter()
    for region in every_region(plan.regions):
        for index, action in region.actions.items():
            kept[repr(action)] += action.stored_bytes(graph.values[index]) * graph.values[index].repeats
    for loop in plan.loops:
        op = graph.at(loop.body).ops[loop.op]
        for some in loop.schedule.iterations(op.params["length"]):
            for index, action in (some.actions or {}).items() if some.kept else ():
                kept[repr(action)] += action.stored_bytes(graph.values[index]) * some.count
    return dict(kept)


def planned(model: str, fun: Any, args: Any, budgets: Sequence[str], target: str, cache: str | None) -> list[Row]:
    """Returns the rows of one model."""
    rows = []
    for actions, name in ((PLAIN, "plain"), (ALL, "all")):
        problem = problem_of(fun, *args, target=target, actions=actions, cache=cache)
        tiled = None
        for budget in budgets:
            found, tiles = None, False
            fits = all(not row.tiles for row in rows if (row.budget, row.actions) == (budget, "plain"))
            try:
                found = problem.plan(budget) if fits else None
            except InfeasibleBudgetError:
                fits = False
            if found is None and not fits:
                tiles = True
                tiled = tiled or problem_of(fun, *args, target=target, actions=actions, cache=cache, tile=True)
                try:
                    found = tiled.plan(budget)
                except InfeasibleBudgetError as error:
                    rows.append(Row(model, budget, name, tiles, str(error)))
            if found is not None:
                rows.append(_row(model, budget, name, tiles, found, problem))
            print(rows[-1], flush=True)
    return rows


def _row(model: str, budget: str, name: str, tiles: bool, plan: Plan, problem: Any) -> Row:
    report, kept = plan.report, bytes_by_action(plan, problem.graph)
    assert report is not None
    return Row(
        model,
        budget,
        name,
        tiles,
        "",
        report.budget or 0,
        report.measured_bytes or 0,
        report.measured_host_bytes or 0,
        report.seconds or 0.0,
        problem.plain.time.seconds,
        report.host_share or 0.0,
        kept,
    )


def table(rows: Sequence[Row], target: str) -> str:
    """Returns the report in Markdown."""
    names = ", ".join(map(repr, ALL))
    lines = [f"# All actions on {target}", "", f"{__doc__.split(chr(10) * 2)[2]}", "", f"All actions: {names}.", ""]
    lines += ["| | budget | actions | peak | added time | less | host | link | kept |"]
    lines += ["|---|---:|---|---:|---:|---:|---:|---:|---|"]
    for row in rows:
        title = f"| {row.model} | {row.budget} | {row.actions}{', in tiles' if row.tiles else ''} |"
        if row.why:
            lines.append(f"{title} | no plan fits | | | | |")
            continue
        kept = ", ".join(f"{action} {format_bytes(size)}" for action, size in sorted(row.kept.items()))
        base = _base(rows, row)
        less = f"{1 - row.added / base.added:.0%}" if base is not None and base.added else ""
        peak = f"{format_bytes(row.peak_bytes)} of {format_bytes(row.budget_bytes)}"
        lines.append(
            f"{title} {peak} | {row.added:+.1%} | {less} | {format_bytes(row.host_bytes)} | {row.host_share:.0%} | {kept} |"
        )
    return "\n".join(lines)


def _base(rows: Sequence[Row], row: Row) -> Row | None:
    """Returns the row to compare one with; None for a plain one."""
    if row.actions == "plain":
        return None
    same = (each for each in rows if (each.model, each.budget, each.actions) == (row.model, row.budget, "plain"))
    return next((each for each in same if not each.why), None)


def picture(rows: Sequence[Row], path: str) -> None:
    """Draws the added time of both plans for each model and budget to a file."""

    def figure() -> Any:
        plot.require_matplotlib()
        import matplotlib
        from matplotlib.figure import Figure

        cases = list(dict.fromkeys((row.model, row.budget) for row in rows))
        with matplotlib.rc_context(plot.STYLE):
            made = Figure(figsize=(7.6, 0.7 + 0.62 * len(cases)), dpi=150, layout="constrained")
            axes = made.subplots()
            for number, actions in enumerate(("plain", "all")):
                bars = [(cases.index((r.model, r.budget)), r) for r in rows if r.actions == actions and not r.why]
                places = [place + 0.36 * number - 0.18 for place, _ in bars]
                label = "save and recompute" if actions == "plain" else "all actions"
                colour = plot.GREY if actions == "plain" else plot.FRONT
                for row in (row for row in rows if row.actions == actions and row.why):
                    place = cases.index((row.model, row.budget)) + 0.36 * number - 0.18
                    axes.text(0.4, place, "no plan fits", color=colour, fontsize=8, va="center")
                axes.barh(places, [100 * row.added for _, row in bars], 0.34, color=colour, label=label)
            axes.set_yticks(range(len(cases)), [f"{model} at {budget}" for model, budget in cases])
            axes.invert_yaxis()
            axes.set_xlabel("added time by the target's rates (% of the step)")
            axes.legend(frameon=False, fontsize=8.5)
            plot.add_title(axes, "The same memory, with more ways to keep values")
        return made

    plot.save(path, figure)


def main() -> None:
    """Makes the plans and writes the report."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    arguments.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    arguments.add_argument("--target", default="cuda:h100")
    arguments.add_argument("--cache", help="a folder for the compiler's results")
    arguments.add_argument("--no-save", action="store_true", help="only print")
    options = arguments.parse_args()
    start_backend()
    rows: list[Row] = []
    for name in options.models:
        factory = factories.load(MODELS[name])
        built = variants.build(factory, variants.variants_for(factory, chosen=["none"]), settings=SETTINGS.get(name))
        rows += planned(name, built.functions["none"], built.args, options.budgets, options.target, options.cache)
    if not options.no_save:
        stored = RESULTS / "all_actions.json"
        known = [Row(**row) for row in json.loads(stored.read_text())["results"]] if stored.is_file() else []
        again = {(row.model, row.budget) for row in rows}
        rows = [*(row for row in known if (row.model, row.budget) not in again), *rows]
        save("all_actions", table(rows, options.target), [asdict(row) for row in rows])
        picture(rows, str(RESULTS / "all_actions.svg"))
    print(table(rows, options.target))


if __name__ == "__main__":
    main()
