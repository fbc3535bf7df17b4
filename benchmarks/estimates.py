"""Is the closed form right? `estimate_memory_savings` against compiled chains.

    python -m benchmarks.estimates                 # H100 and CPU, 8, 32 and 100 layers; some minutes, nothing is run
    python -m benchmarks.estimates --layers 8 --targets cpu --no-save

The chain is jaxckpt/models/chain.py: dense layers and tanh, with `jaxckpt.checkpoint` around each segment of
`segment` layers, also the last. The batch is so large that a layer's activation is a thousand times its parameters. So
the peak consists of activations.

Arguments and gradients are not activations. But XLA may put activations into the buffers of gradients that are not
written yet. So the activation bytes of a compiled program are between peak - arguments - outputs and peak - arguments,
and the given error is the larger of the two. Scratch memory of libraries (cuBLAS on an H100: 32 MiB) is counted as
activations.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import asdict, dataclass

import jax

import jaxckpt
from benchmarks import reporting
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.estimate import estimate_memory_savings
from jaxckpt.memory.report import MemoryReport, measure
from jaxckpt.models.chain import chain
from jaxckpt.show.table import markdown

LAYERS = (8, 32, 100)
SEGMENTS: tuple[int | str, ...] = (1, 2, 4, 10, "sqrt")
TARGETS = ("cuda:h100", "cpu")
WIDTH, BATCH = 256, 262_144
ACTIVATION_BYTES = 4 * WIDTH * BATCH


@dataclass(frozen=True)
class Case:
    """One chain, without and with checkpoints: bytes of activations, estimated and compiled (least and most)."""

    target: str
    layers: int
    segment: int | str
    estimated_without: int
    estimated_with: int
    compiled_without: tuple[int, int]
    compiled_with: tuple[int, int]

    @property
    def error(self) -> float:
        """The larger relative error of the two estimates."""
        pairs = ((self.estimated_without, self.compiled_without), (self.estimated_with, self.compiled_with))
        return max((estimate / size - 1 for estimate, sizes in pairs for size in sizes), key=abs)

    @property
    def saved(self) -> float:
        """The part of activation memory that the compiled program saves, at the least."""
        return 1 - self.compiled_with[1] / self.compiled_without[0]


def activations(report: MemoryReport) -> tuple[int, int]:
    """Returns the least and the most bytes that activations can have at a compiled program's peak."""
    most = report.peak_bytes - report.argument_bytes
    return most - report.output_bytes, most


def run(
    target: str, layers: int, segments: tuple[int | str, ...] = SEGMENTS, *, width: int = WIDTH, batch: int = BATCH
) -> list[Case]:
    """Compiles a chain for a target, without checkpoints and with segments of each size."""

    @functools.cache
    def compiled(segment: int | str | None) -> tuple[int, int]:
        settings = {} if segment is None else {"checkpoint": jaxckpt.checkpoint, "segment_size": segment}
        loss, args = chain(layers=layers, width=width, batch=batch, **settings)
        return activations(measure(jax.value_and_grad(loss), *args, target=target))

    cases = []
    for segment in segments:
        without, with_, _ = estimate_memory_savings(layers, 4 * width * batch, segment)
        cases.append(Case(target, layers, segment, without, with_, compiled(None), compiled(segment)))
        print(f"{target} {layers} layers, segments of {segment}: {cases[-1].error:+.1%}", file=sys.stderr, flush=True)
    return cases


def report(cases: list[Case]) -> str:
    """Returns the table in Markdown, worst error and best saving below it."""
    header = ["chain", "segment", "estimate", "compiled", "error", "saved"]
    rows = [
        [
            f"{case.target}, {case.layers} layers",
            str(case.segment),
            format_bytes(case.estimated_with),
            format_bytes(case.compiled_with[1]),
            f"{case.error:+.1%}",
            f"{case.saved:.1%}",
        ]
        for case in cases
    ]
    worst = max(cases, key=lambda case: abs(case.error))
    longest = max(case.layers for case in cases)
    lines = [
        "# `estimate_memory_savings` against compiled activations",
        "",
        f"A chain of dense layers with tanh, {format_bytes(ACTIVATION_BYTES)} of activation each; bytes are those "
        f"of activations at the peak. "
        "The error is the worse one of the chain without checkpoints and the one with them.",
        "",
        markdown(header, rows),
        "",
        f"Worst error: {worst.error:+.1%} ({worst.target}, {worst.layers} layers, segments of {worst.segment}).",
    ]
    for target in dict.fromkeys(case.target for case in cases):
        best = max(
            (case for case in cases if case.target == target and case.layers == longest), key=lambda case: case.saved
        )
        lines.append(
            f"Best on {longest} layers, {target}: segments of {best.segment} save {best.saved:.1%} of activation "
            f"memory, compiled."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    cases = [case for target in options.targets for layers in options.layers for case in run(target, layers)]
    text = report(cases)
    print(text)
    if not options.no_save:
        reporting.save("estimates", text, [asdict(case) | {"error": case.error, "saved": case.saved} for case in cases])


if __name__ == "__main__":
    main()
