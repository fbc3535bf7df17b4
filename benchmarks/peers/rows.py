"""The figures of a variant, and how one process measures those of a framework."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import process
from benchmarks.peers.tasks import TASKS, Task
from benchmarks.peers.variants import lines_written

PAIRS = 7


@dataclass(frozen=True)
class Row:
    """One variant of one model in one framework.

    Attributes:
      framework, task, variant: names.
      error: why there are no figures, in one line; "" if there are.
      possible: whether the framework can do this for such a model, by what it documents.
      against: the variant of the same framework without checkpoints that ratios refer to.
      bytes: peak of the live bytes in value and gradient, without parameters and input.
      share: `bytes` divided by those of `against`.
      matmuls: matmuls and convolutions that run.
      more: `matmuls` minus those of `against`.
      compiled_matmuls: those in the program that XLA compiled; None if it has loops, or if there is none.
      time: processor time divided by that of `against`; the median over interleaved pairs.
      lines: what a user writes: the source lines that the plain model does not have.
      loss, norm: the value, and the Euclidean norm of the gradient.
    """

    framework: str
    task: str
    variant: str
    error: str = ""
    possible: bool = True
    against: str = "plain"
    bytes: int = 0
    share: float = 0.0
    matmuls: int = 0
    more: int = 0
    compiled_matmuls: int | None = None
    time: float = 0.0
    lines: tuple[str, ...] = ()
    loss: float = 0.0
    norm: float = 0.0


def framework(name: str) -> Any:
    """Returns the module of a framework."""
    return importlib.import_module(f"benchmarks.peers.frameworks.with_{name}")


def rows_of(name: str, task: Task, pairs: int = PAIRS) -> Iterator[Row]:
    """Measures all variants of a framework on a model, in this process. What fails has its error in its row."""
    module, built = framework(name), {}
    for variant_name, variant in module.VARIANTS.items():
        where = (name, task.name, variant_name)
        if (why := variant.why_not(task.name, task.loop)) is not None:
            yield Row(*where, error=why, possible=False)
            continue
        try:
            made = built[variant_name] = module.build(task, variant)
            if (base := built.get(variant.against)) is None:
                raise RuntimeError(f"there is nothing to compare it with, because {variant.against!r} failed")
            time = process.time_ratio(made.run, base.run, pairs)
        except Exception as error:  # a peer that fails is a row of the table
            print(f"{where}: {error!r}", file=sys.stderr)
            yield Row(*where, error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200])
            continue
        yield Row(
            *where,
            against=variant.against,
            bytes=made.bytes,
            share=made.bytes / base.bytes,
            matmuls=made.matmuls,
            more=made.matmuls - base.matmuls,
            compiled_matmuls=made.compiled_matmuls,
            time=time,
            lines=tuple(_lines(module, variant, task.loop)),
            loss=made.loss,
            norm=made.norm,
        )


def resident(name: str, task: str, variant: str) -> int | None:
    """Returns how far a step raises the resident memory of this process, in bytes."""
    module = framework(name)
    run: Callable[[], Any] = module.build(TASKS[task](), module.VARIANTS[variant]).run
    return process.resident_bytes(run)


def disagreements(rows: Sequence[Row]) -> list[str]:
    """Returns where the models of a task are not the same: other losses, gradients, or matmuls without checkpoints."""
    found = []
    for task in dict.fromkeys(row.task for row in rows):
        good = [row for row in rows if row.task == task and not row.error]
        first = good[0] if good else None
        for row in good:
            off = max(abs(row.loss / first.loss - 1), abs(row.norm / first.norm - 1))
            if off > 1e-2:
                found.append(f"{task}, {row.framework}, {row.variant}: value or gradient is off by {off:.1%}")
            if row.variant == row.against and row.matmuls != first.matmuls:
                found.append(f"{task}, {row.framework}, {row.variant}: {row.matmuls} matmuls for {first.matmuls}")
    return found


def _lines(module: Any, variant: Any, loop: bool) -> list[str]:
    return lines_written(variant.maker(loop), module.VARIANTS["plain"].maker(loop))
