"""Llama 70B with FSDP through `jax.jit`: what do the compiler's collectives take, and do plans that count them differ?

    python -m benchmarks.collectives        # minutes on two cores; nothing is run

Parameters are sharded over all chips; the compiler gathers those of a layer before it uses them, and adds up gradients
where they lie. Every plan is told in the same seconds, collectives counted, whether it was made with them or not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jaxckpt
from benchmarks import reporting
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.collectives import by_kind
from jaxckpt.memory.targets import start_backend
from jaxckpt.models import llama
from jaxckpt.planner.frontier import cost_of
from jaxckpt.planner.problems import Problem, problem_of
from jaxckpt.show.table import markdown

TARGET = "tpu:v5p:4x4x4"
MESHES = {"FSDP over 64": (64, 1), "FSDP over 16, tensor parallel over 4": (16, 4)}
"""Name -> (data, model)."""
BUDGETS = ("60GiB", "45GiB", "30GiB")


def row(counting: Problem, made_by: Problem, loss: Any, budget: str) -> dict[str, Any]:
    """Returns what a plan takes, told by the problem that counts collectives."""
    try:
        plan = made_by.plan(budget)
    except jaxckpt.InfeasibleBudgetError as error:
        return {"why": str(error)}
    assert plan.measured is not None
    flops, seconds = cost_of(counting.planned(plan), counting.args, counting.target, counting.model.shards)
    sent = {kind: [runs, sent] for kind, (runs, sent) in by_kind(plan.measured.collectives).items()}
    return {"peak_bytes": plan.measured_bytes, "flops": flops, "seconds": seconds, "sent": sent}


def run(mesh: tuple[int, int], budgets: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of one mesh."""
    loss, args = llama.llama70b(data=mesh[0], model=mesh[1])
    counting, blind = (problem_of(loss, *args, target=TARGET, collectives=each) for each in (True, False))
    sent = counting.model.shards.sent
    plain, without = counting.plain, blind.plain
    found: dict[str, Any] = {
        "plain": {"flops": plain.flops, "seconds": plain.time.seconds, "without": without.time.seconds},
        "elsewhere": sent.elsewhere,
        "plans": {},
    }
    for budget in budgets:
        found["plans"][budget] = {
            "counting": row(counting, counting, loss, budget),
            "blind": row(counting, blind, loss, budget),
        }
    return found


def report(results: dict[str, Any]) -> str:
    """Returns the tables in Markdown."""
    steps, plans = [], []
    for name, found in results.items():
        plain = found["plain"]
        steps.append([name, *(f"{plain[key]:.2f} s" for key in ("without", "seconds"))])
        for budget, both in found["plans"].items():
            for how, made in both.items():
                which = "with them" if how == "counting" else "without them"
                if "why" in made:
                    plans.append([name, budget, which, "no plan fits", "", "", ""])
                    continue
                sent = sum(each for _, each in made["sent"].values())
                plans.append(
                    [
                        name,
                        budget,
                        which,
                        format_bytes(made["peak_bytes"]),
                        f"{made['flops'] / plain['flops'] - 1:+.1%}",
                        f"{made['seconds'] / plain['seconds'] - 1:+.1%}",
                        format_bytes(round(sent)),
                    ]
                )
    return "\n".join(
        [
            f"# Llama 70B on 64 chips, and the compiler's collectives, {TARGET}",
            "",
            "Time of a step by the target's rates, without a plan: computation alone, and with the collectives that "
            "the compiler puts in, as if nothing ran beside them.",
            "",
            markdown(["sharding", "computation", "with collectives"], steps),
            "",
            "Plans that were made with collectives counted, and without. Both are told with them counted. What a chip "
            "sends is read from the compiled planned step.",
            "",
            markdown(["sharding", "budget", "made", "compiled peak", "FLOPs", "time", "a chip sends"], plans),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), metavar="BYTES")
    parser.add_argument("--no-save", action="store_true", help="print only")
    given = parser.parse_args(argv)
    start_backend()
    results = {name: run(mesh, given.budgets) for name, mesh in MESHES.items()}
    text = report(results)
    print(text)
    if not given.no_save:
        reporting.save("collectives", text, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
