"""Runs random programs and says what does not hold: `python -m tests.fuzz --minutes 10 --seed 0`."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAXCKPT_CACHE_DIR", "off")

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.fuzz.cases import KINDS, Case, Invalid, kind_at, make, signature
from tests.fuzz.checks import check
from tests.fuzz.programs import indented
from tests.fuzz.shrink import shrink

FRESH = 250
"""JAX's caches are emptied after so many programs, for compiled operations fill the memory."""
console = Console(soft_wrap=True, highlight=False)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 where everything holds, 1 where something does not."""
    options = _parser().parse_args(argv)
    if options.case:
        seed, index = (int(part) for part in options.case.split(":"))
        return _one(make(seed, index), options)
    return _many(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, help="how long to go on (default: 10, or without end where --programs is given)"
    )
    parser.add_argument("--programs", type=int, help="how many programs to run at most")
    parser.add_argument("--seed", type=int, default=0, help="of the programs (default: 0)")
    parser.add_argument("--start", type=int, default=0, metavar="INDEX", help="index of the first program (default: 0)")
    parser.add_argument("--only", choices=sorted(KINDS), help="only programs that are checked so")
    parser.add_argument("--case", metavar="SEED:INDEX", help="run one program again, and cut it down if it fails")
    parser.add_argument(
        "--shrink",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="to cut a failing program down; 0 for not at all (default: 60)",
    )
    return parser


def failure(case: Case) -> BaseException | None:
    """Returns what a case raises."""
    try:
        check(case)
    except Exception as error:
        return error
    return None


def _one(case: Case, options: argparse.Namespace) -> int:
    error = failure(case)
    if error is None:
        console.print(case.source(), markup=False)
        console.print(f"{case.kind} {case.seed}:{case.index}, {len(case.program)} statements: everything holds")
        return 0
    _report(case, error, options.shrink)
    return 1


def _report(case: Case, error: BaseException, seconds: float) -> None:
    """Prints a failure with the smallest program that has it."""
    what = signature(error)
    same = lambda other: (found := failure(other)) is not None and signature(found) == what
    small = shrink(case, same, seconds) if seconds and not isinstance(error, Invalid) else case
    last = failure(small) or error
    console.rule(f"{case.kind} {case.seed}:{case.index}", style="red")
    console.print(
        f"{what}\n{case.command}\n{len(case.program)} statements, cut down to {len(small.program)}:\n", markup=False
    )
    console.print(indented(small.source()), markup=False)
    lines = "".join(traceback.format_exception(last)).splitlines()
    console.print(indented("\n".join(lines[-12:])), markup=False)


def _cases(options: argparse.Namespace) -> Iterator[int]:
    """Yields the indices of the programs to run, as long as there is time."""
    minutes = options.minutes if options.minutes is not None else (10.0 if options.programs is None else float("inf"))
    until, index, done = time.monotonic() + 60 * minutes, options.start, 0
    while time.monotonic() < until and (options.programs is None or done < options.programs):
        if options.only in (None, kind_at(options.seed, index)):
            yield index
            done += 1
        index += 1


def _many(options: argparse.Namespace) -> int:
    failures: dict[str, list[Case]] = {}
    invalid: list[Case] = []
    counts: Counter = Counter()
    seconds: Counter = Counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("programs", total=options.programs)
        for index in _cases(options):
            start = time.monotonic()
            case = make(options.seed, index)
            error = failure(case)
            counts[case.kind] += 1
            seconds[case.kind] += time.monotonic() - start
            if isinstance(error, Invalid):
                invalid.append(case)
            elif error is not None:
                known = failures.setdefault(signature(error), [])
                known.append(case)
                if len(known) == 1:
                    _report(case, error, options.shrink)
            total = counts.total()
            progress.update(
                task,
                advance=1,
                description=f"{sum(map(len, failures.values()))} failures, "
                f"{total / max(sum(seconds.values()), 1e-9):.1f} a second",
            )
            if not console.is_terminal and total % 100 == 0:
                print(f"{total} programs, {sum(map(len, failures.values()))} failures", flush=True)
            if total % FRESH == 0:
                jax.clear_caches()
    return _summary(options.seed, counts, seconds, failures, invalid)


def _summary(seed: int, counts: Counter, seconds: Counter, failures: dict[str, list[Case]], invalid: list[Case]) -> int:
    console.rule(f"seed {seed}")
    for kind in counts:
        console.print(f"{kind:12}{counts[kind]:6} programs, {counts[kind] / seconds[kind]:.1f} a second")
    if invalid:
        console.print(
            f"{len(invalid)} that JAX itself refuses: {', '.join(f'{c.seed}:{c.index}' for c in invalid[:10])}"
        )
    for what, cases in failures.items():
        console.print(f"{len(cases)} × {what}", markup=False)
        console.print(indented("\n".join(case.command for case in cases[:3])), markup=False)
    if not failures:
        console.print("Everything holds.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
