"""Is a preset equal to `jax.checkpoint` with JAX's policy? Peak and matmuls of each model and each preset with a
counterpart.

    python -m benchmarks.parity                # H100 target; writes benchmarks/results/parity.md and parity.json
    python -m benchmarks.parity gpt2 moe       # some models only
    python -m benchmarks.parity --engine       # what is saved is stored by jaxckpt's own derivative; writes engine.md

Peaks are compiled. Matmuls and convolutions are counted in the traced value and gradient, with all iterations of loops.
If both lower to the same text, they are one program, which is compiled once.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
from rich.progress import track

import jaxckpt
from benchmarks.reporting import save
from jaxckpt import SAVE, Action, Policy
from jaxckpt.core.units import format_bytes
from jaxckpt.factories import load
from jaxckpt.memory.targets import start_backend
from jaxckpt.policies import PRESETS

COUNTERPARTS: dict[str, Any] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""Presets, and the policies of JAX that they are compared with. `hybrid` has none."""

MODELS = {
    "gpt2": "jaxckpt.models.gpt:gpt2",
    "gpt2_scan": "jaxckpt.models.gpt:gpt2_scan",
    "resnet50": "jaxckpt.models.resnet:resnet50",
    "unet": "jaxckpt.models.unet:unet",
    "lstm": "jaxckpt.models.lstm:lstm",
    "moe": "jaxckpt.models.moe:moe",
    "chain": "jaxckpt.models.chain:chain",
}


@dataclass(frozen=True)
class Row:
    """One model under one preset, with jaxckpt and with JAX: peaks in bytes, matmuls and convolutions in a step."""

    model: str
    preset: str
    peak_bytes: int
    jax_peak_bytes: int
    matmuls: int
    jax_matmuls: int
    same_program: bool


def ours(preset: Any) -> Callable[..., Any]:
    """Returns the transform that puts jaxckpt's checkpoint around a function."""
    return functools.partial(jaxckpt.checkpoint, policy=preset)


@functools.cache
def kept_as_it_is() -> Action:
    """Returns an action that keeps a value as it is, by the derivative that encodes and decodes values."""

    class AsItIs(Action):
        kind = "as_it_is"
        changes = True
        listed = False

        def admits(self, value: Any) -> bool:
            return True

        def encode(self, x: Any) -> Any:
            return x

        def decode(self, stored: Any, like: Any) -> Any:
            return stored

        def error(self, dtype: Any) -> float:
            return 0.0

    return AsItIs()


def by_engine(preset: str) -> Callable[..., Any]:
    """Returns the transform that keeps what a preset saves by that derivative."""
    rules = PRESETS[preset].rules
    return ours(Policy([(where, kept_as_it_is() if action is SAVE else action) for where, action in rules]))


def jaxs(policy: Any) -> Callable[..., Any]:
    """Returns the transform that puts JAX's checkpoint around a function."""
    return functools.partial(jax.checkpoint, policy=policy)


def step(spec: str, sizes: dict[str, Any], transform: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns (value and gradient of the model's loss, its arguments)."""
    loss, args = load(spec)(checkpoint=transform, **sizes)
    return jax.value_and_grad(loss), args


def lowered(spec: str, sizes: dict[str, Any], transform: Callable[..., Any]) -> str:
    """Returns the text of the lowered step."""
    fun, args = step(spec, sizes, transform)
    return jax.jit(fun).lower(*args).as_text()


def matmuls(fun: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Returns how many matmuls and convolutions a function runs."""
    ops = jaxckpt.trace(fun, *args).walk()
    return sum(op.repeats for op in ops if op.primitive in ("dot_general", "conv_general_dilated"))


@functools.cache
def compare_with_jax(
    spec: str, sizes: tuple[tuple[str, Any], ...], *, preset: str, target: str, engine: bool = False
) -> Row:
    """Compiles a model's step under a preset and under its counterpart, and counts their matmuls; with `engine` what
    the preset saves is kept as of `by_engine`.
    """
    sizes = dict(sizes)
    mine, theirs = by_engine(preset) if engine else ours(preset), jaxs(COUNTERPARTS[preset])
    same = lowered(spec, sizes, mine) == lowered(spec, sizes, theirs)
    peaks = [
        jaxckpt.measure(*_flat(step(spec, sizes, wrap)), target=target).peak_bytes
        for wrap in ([mine] if same else [mine, theirs])
    ]
    counts = [matmuls(*step(spec, sizes, wrap)) for wrap in (mine, theirs)]
    return Row(spec.rpartition(":")[2], preset, peaks[0], peaks[-1], counts[0], counts[1], same)


def _flat(pair: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    return pair[0], *pair[1]


def main() -> None:
    """Runs the comparison and writes the table."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    arguments.add_argument("--target", default="cuda:h100")
    arguments.add_argument("--engine", action="store_true", help="keep what is saved by jaxckpt's own derivative")
    options = arguments.parse_args()
    start_backend()
    pairs = [
        (model, preset)
        for model in options.models
        for preset in (("dots", "dots_no_batch") if options.engine else COUNTERPARTS)
    ]
    rows = [
        compare_with_jax(MODELS[model], (), preset=preset, target=options.target, engine=options.engine)
        for model, preset in track(pairs, description="compiling")
    ]
    lines = [
        f"# Presets{', kept by the engine of actions,' if options.engine else ''} against JAX's own policies, {options.target}",
        "",
        "| model | preset | peak | peak of `jax.checkpoint` | difference | matmuls | matmuls of `jax.checkpoint` |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (model, _), row in zip(pairs, rows):
        difference = "one program" if row.same_program else f"{row.peak_bytes / row.jax_peak_bytes - 1:+.2%}"
        peaks = f"{format_bytes(row.peak_bytes)} | {format_bytes(row.jax_peak_bytes)} | {difference}"
        lines.append(f"| {model} | {row.preset} | {peaks} | {row.matmuls} | {row.jax_matmuls} |")
    save("engine" if options.engine else "parity", "\n".join(lines), [asdict(row) for row in rows])
    print("\n".join(lines))


if __name__ == "__main__":
    main()
