"""How far is a chain's plan from the optimum over all orders of runs?

    python -m benchmarks.optimum                          # ten models and five wide graphs: an hour
    python -m benchmarks.optimum --models unet wide:1     # some of them
    python -m benchmarks.optimum --seconds 300            # for each proof

A model is cut into stages as `jaxckpt.plan` cuts it. At limits between the least that the chain's solutions fit and
what keeps everything, the chain's cheapest solution is held against what HiGHS proves of all orders in which the stages
can run (`jaxckpt.planner.solvers.bound`). Both count by the same model of bytes and seconds. Nothing is compiled but
the step without checkpoints.

Each row is saved at once in results/optimum.json; rows that exist are not proved again, unless --again.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import frontier, reporting
from benchmarks.models.wide import wide
from jaxckpt.core.files import write_whole
from jaxckpt.core.units import format_bytes
from jaxckpt.factories import load, make
from jaxckpt.memory.targets import start_backend
from jaxckpt.planner.chain import Chain, cost
from jaxckpt.planner.problems import problem_of
from jaxckpt.planner.solvers.bound import bound
from jaxckpt.planner.solvers.optimal import Table
from jaxckpt.show.table import markdown

SHARES = (0.02, 0.15, 0.4)
"""Of the way from the least limit to the one that recomputes nothing: where recomputation is dear."""
MODELS = (
    *((name, target) for target, names in frontier.TARGETS.items() for name in names),
    *((f"wide:{seed}", "cuda:h100") for seed in range(5)),
)
FAR = 0.03
"""A chain is far from the optimum if its step takes longer by more than this share."""


def model(name: str) -> Callable[..., Any]:
    """Returns the factory of a model: one of `frontier.MODELS`, or wide:SEED."""
    if name in frontier.MODELS:
        return load(frontier.MODELS[name])
    return functools.partial(wide, seed=int(name.partition(":")[2]))


def limits(chain: Chain) -> Iterator[int]:
    """Yields the limits that are asked for, in bytes besides arguments."""
    known = [limit for limit, _ in Table(chain).frontier()]
    for share in SHARES:
        yield round(known[0] + share * (known[-1] - known[0]))


def prove(name: str, target: str, seconds: float) -> dict[str, Any]:
    """Returns the row of a model: its stages, and for each limit the chain's seconds and what is proved."""
    loss, args = make(model(name))
    made = problem_of(loss, *args, target=target).model
    chain, table = made.chain, Table(made.chain)
    step = 3 * sum(chain.segment(stage, stage + 1).forward_time for stage in range(chain.length))
    rows = []
    for limit in dict.fromkeys(limits(chain)):
        solution = table.solution(limit)
        assert solution is not None, "a limit of its own frontier"
        known = cost(chain, solution).time
        start = time.perf_counter()
        proved = bound(chain, limit, seconds, known)
        rows.append(
            {
                "limit_bytes": limit,
                "chain": known / step,
                "least": proved.least_time / step,
                "found": min(proved.time, known) / step,
                "seconds": time.perf_counter() - start,
            }
        )
    skips = sum(value.uses[-1] > value.made + 1 for value in chain.carried)
    return {"stages": chain.length, "values": len(chain.carried), "skips": skips, "limits": rows}


def report(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table in Markdown."""
    lines, far = [], []
    for name, row in rows.items():
        for each in row["limits"]:
            apart = (1 + each["chain"]) / (1 + each["least"]) - 1
            better = (1 + each["chain"]) / (1 + each["found"]) - 1
            if apart > FAR:
                far.append(f"{name} at {format_bytes(each['limit_bytes'])}: at most {apart:.1%}, at least {better:.1%}")
            lines.append(
                [
                    name,
                    str(row["stages"]),
                    f"{row['skips']} of {row['values']}",
                    format_bytes(each["limit_bytes"]),
                    f"{each['chain']:+.2%}",
                    f"{each['least']:+.2%}",
                    f"{each['found']:+.2%}",
                    f"{apart:.2%}",
                    f"{each['seconds']:.0f} s",
                ]
            )
    header = ["model", "stages", "values that skip", "limit", "chain", "proved", "found", "apart", "proof"]
    return "\n".join(
        [
            "# The chain's plan and the optimum",
            "",
            "What is recomputed, as a share of the step, by the planner's own seconds: by the chain's cheapest solution; "
            "what HiGHS proved that no order of the stages' runs is below; the best order that was found. The optimum "
            "lies between the last two. Apart: how much longer the chain's step takes than the proved bound, at most.",
            "",
            f"{len(rows)} models, {len(lines)} limits. "
            + (f"No chain is {FAR:.0%} from the bound." if not far else f"Further than {FAR:.0%} from the bound:"),
            "",
            *(f"- {line}" for line in far),
            *([""] if far else []),
            markdown(header, lines),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    names = {f"{name}@{target}": (name, target) for name, target in MODELS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", help="gpt2, wide:3, resnet50@tpu:v5e:2x2; all if left out"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of each proof")
    parser.add_argument("--again", action="store_true", help="prove again")
    given = parser.parse_args(argv)
    chosen = [each if "@" in each else f"{each}@cuda:h100" for each in given.models or names]
    unknown = [each for each in chosen if each not in names]
    if unknown:
        parser.error(f"--models must be of {', '.join(names)}; got {unknown[0]}.")
    start_backend()
    path = reporting.RESULTS / "optimum.json"
    rows: dict[str, Any] = json.loads(path.read_text())["results"] if path.is_file() else {}
    for each in chosen:
        if each in rows and not given.again:
            continue
        start = time.perf_counter()
        rows[each] = prove(*names[each], given.seconds)
        write_whole(path, json.dumps({"environment": reporting.environment(), "results": rows}, indent=1) + "\n")
        print(f"{each}: {time.perf_counter() - start:.0f} s", flush=True)
    reporting.save("optimum", report(rows), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
