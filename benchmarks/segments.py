"""How long should a segment be? And: why does my memory not fall?

    python -m benchmarks.segments              # a few minutes; runs smaller models on this machine
    python -m benchmarks.segments --no-save    # prints only

For the chain of 100 dense layers and GPT-2 (12 blocks): segments of 0 (no checkpoints), 1, 2, 5, 10 and sqrt(blocks).
Memory is compiled for an H100 at full size; nothing of that runs. Time is the ratio of medians of interleaved steps of
a smaller model of as many blocks. The last table is a model whose parameters are large beside its activations.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import jaxckpt
from benchmarks import reporting
from jaxckpt import factories
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.compare import Comparison, compare
from jaxckpt.memory.estimate import estimate_memory_savings
from jaxckpt.models import chain, gpt
from jaxckpt.show.table import markdown

SEGMENTS: tuple[int | str, ...] = (0, 1, 2, 5, 10, "sqrt")
TARGET = "cuda:h100"
# What is run to be timed: as many blocks, less of everything else.
SMALL = {
    "chain": functools.partial(chain.chain, width=256, batch=1024),
    "gpt2": functools.partial(gpt.small, layers=12),
}


def variants(factory: Callable[..., Any], segments: tuple[int | str, ...], *, real: bool = False) -> tuple[dict, tuple]:
    """Returns name -> loss of the factory's model with segments of each size, and the arguments of all."""
    made: dict[str, Callable] = {}
    args: tuple = ()
    for segment in segments:
        settings = {"checkpoint": jaxckpt.checkpoint, "segment_size": segment} if segment else {"checkpoint": None}
        loss, some = factories.make(factory, **settings, real=real and not made)
        made[str(segment)], args = loss, args or some
    return made, args


def run(
    name: str, factory: Callable[..., Any], segments: tuple[int | str, ...], *, time: bool
) -> tuple[Comparison, Comparison | None]:
    """Returns the comparison at full size for the target, and that of the small model that is timed."""
    say = lambda done, total, what: print(f"{name}: {done}/{total} {what}", file=sys.stderr, flush=True)
    losses, args = variants(factory, segments)
    memory = compare(losses, *args, target=TARGET, progress=say)
    if not time:
        return memory, None
    losses, args = variants(SMALL[name], segments, real=True)
    return memory, compare(losses, *args, time=True, progress=say)


def table(memory: Comparison, timed: Comparison | None, closed_form: Callable[[int | str], int] | None = None) -> str:
    """Returns a comparison as a table in Markdown.

    Args:
      memory: at full size.
      timed: of the smaller model.
      closed_form: segment -> the peak in bytes by the closed form of a uniform chain.
    """
    header = ["segment", f"peak, {memory.target}", "of none", "recomputed", "estimate", "error"]
    header += ["closed form", "error"] if closed_form else []
    header += [f"time on {timed.timed_on}, of none"] if timed else []
    rows = []
    for row in memory:
        segment = row.name if row.name == "sqrt" else int(row.name)
        cells = [
            row.name,
            format_bytes(row.peak_bytes),
            f"{row.peak_bytes / memory.baseline.peak_bytes:.1%}",
            f"{row.recompute:+.1%}",
            format_bytes(row.estimate_bytes or 0),
            f"{row.estimate_error or 0:+.1%}",
        ]
        if closed_form:
            expected = closed_form(segment)
            cells += [format_bytes(expected), f"{expected / row.peak_bytes - 1:+.1%}"]
        if timed:
            cells.append(f"{timed[row.name].time_ratio:.2f}")
        rows.append(cells)
    return markdown(header, rows)


def chain_peak(layers: int, activation_bytes: int, memory: Comparison) -> Callable[[int | str], int]:
    """Returns segment -> expected peak: arguments, gradients, the closed form's activations.

    An activation is larger than a layer's gradient, so it cannot live in the gradient's buffer while that is not
    written.
    """
    given = memory.baseline.report.argument_bytes + memory.baseline.report.output_bytes

    def peak(segment: int | str) -> int:
        without, with_, _ = estimate_memory_savings(layers, activation_bytes, segment or 1)
        return given + (with_ if segment else without)

    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-time", action="store_true", help="compile only")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()

    layers, width, batch = 100, 1024, 8192
    long, long_timed = run(
        "chain",
        functools.partial(chain.chain, layers=layers, width=width, batch=batch),
        SEGMENTS,
        time=not options.no_time,
    )
    deep, deep_timed = run("gpt2", gpt.gpt2, SEGMENTS, time=not options.no_time)
    wide, _ = run("wide", chain.wide, (0, 1, 2, "sqrt"), time=False)
    text = "\n".join(
        [
            "# Segments of how many blocks?",
            "",
            f"## A chain of {layers} dense layers of {width}, {batch} rows",
            "",
            table(long, long_timed, chain_peak(layers, 4 * width * batch, long)),
            "",
            "Closed form: arguments, gradients and `estimate_memory_savings`. Estimate: from the traced step.",
            "",
            "## GPT-2, 12 blocks of 768, 8 sequences of 1,024 tokens",
            "",
            table(deep, deep_timed),
            "",
            "Time is of smaller models with as many blocks: the chain with 1,024 rows of 256, the GPT with 8 "
            "sequences of 128 tokens "
            "and a width of 128.",
            "",
            "## Why does my memory not fall?",
            "",
            "8 dense layers of width 4096 on 32 rows: the parameters, and gradients as large, are the memory.",
            "",
            table(wide, None),
            "",
            f"What the report says: *{wide.advice()}*",
        ]
    )
    print(text)
    if not options.no_save:
        results = {"chain": long, "chain_timed": long_timed, "gpt2": deep, "gpt2_timed": deep_timed, "wide": wide}
        reporting.save(
            "segments", text, {name: result.to_json() for name, result in results.items() if result is not None}
        )


if __name__ == "__main__":
    main()
