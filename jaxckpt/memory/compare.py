"""Compare variants of one function: compiled peak, recomputation, estimate, time."""

from __future__ import annotations

import functools
import os
import statistics
import time as clock
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxckpt._errors import ArgumentError, DoesNotFitError, NotDifferentiableError, check_flags, did_you_mean, explains
from jaxckpt.core import lift, shown
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.lift import trace
from jaxckpt.core.liveness import donated_arguments, graph_peak
from jaxckpt.core.shown import Progress, silent, tells
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.gradient import PLAIN, made, not_a_loss, suited
from jaxckpt.memory.report import MemoryReport, measure
from jaxckpt.memory.targets import Target, compiler_options, target_of
from jaxckpt.memory.verify import fill

FORMAT = 1
"""Version of the JSON form."""


ROUNDS = range(3, 16)
"""The least and the most rounds of a timing; the most is excluded."""
SAME = 0.001
"""Two variants are equally good in memory or FLOPs up to this relative difference."""
TIMING_SECONDS = 60.0
"""Seconds for a timing: it takes as many rounds as fit in them, within ROUNDS."""


@dataclass(frozen=True)
class Row:
    """One variant.

    Attributes:
      name: the caller's name for it.
      report: the compiler's report of its step.
      estimate_bytes: the peak, estimated from the traced step alone: see `jaxckpt.core.liveness`. None if an argument
        is sharded over several devices, because the estimate would be for all of them together.
      flops: FLOPs of the traced step, with recomputation.
      recompute_flops: FLOPs more than those of the variant with the fewest FLOPs.
      recompute: `recompute_flops` divided by the FLOPs of the variant with the fewest FLOPs.
      seconds: median time of a step on the local backend; None if nothing was timed.
      time_ratio: `seconds` divided by those of the first variant.
      on_front: whether it is on the Pareto front of peak and recomputation, so that no other variant beats it: see
        `pareto_front`.
    """

    name: str
    report: MemoryReport
    estimate_bytes: int | None
    flops: int
    recompute_flops: int
    recompute: float
    seconds: float | None
    time_ratio: float | None
    on_front: bool

    @property
    def peak_bytes(self) -> int:
        """Compiled peak in bytes, with arguments and outputs."""
        return self.report.peak_bytes

    @property
    def estimate_error(self) -> float | None:
        """The relative error of the estimate: positive if it is more than the compiled peak. None if there is no
        estimate.
        """
        if self.estimate_bytes is None:
            return None
        return self.estimate_bytes / self.peak_bytes - 1 if self.peak_bytes else 0.0


@dataclass(frozen=True)
class Comparison:
    """Variants of one function, in the given order. It is printed, and shown in a notebook, as a table.

    Attributes:
      rows: one row for each variant; the others are compared with the first.
      target: name of the target that was compiled for.
      timed_on: name of the local backend on which steps were timed; None if none were.
      left_out: (name, reason) of variants without a row, because the target's compiler says that they do not fit the
        device.
    """

    rows: tuple[Row, ...]
    target: str
    timed_on: str | None = None
    left_out: tuple[tuple[str, str], ...] = ()

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise ArgumentError("name", "a variant's name", name, did_you_mean(name, (row.name for row in self.rows)))

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def baseline(self) -> Row:
        """The first variant of those that fit: ratios of times are to its time."""
        return self.rows[0]

    def pareto(self) -> tuple[Row, ...]:
        """Returns the variants that no other variant beats in peak and recomputation, in the order of their peaks."""
        return tuple(
            sorted((row for row in self.rows if row.on_front), key=lambda row: (row.peak_bytes, row.recompute_flops))
        )

    def advice(self) -> str:
        """Returns a sentence if checkpointing can save little for the first variant; otherwise ""."""
        return self.baseline.report.advice() or ""

    def to_json(self) -> dict[str, Any]:
        """Returns everything in the table as plain values: bytes, FLOPs, seconds, ratios."""
        return {
            "format": FORMAT,
            "target": self.target,
            "timed_on": self.timed_on,
            "jax": jax.__version__,
            "advice": self.advice(),
            "left_out": [{"name": name, "why": why} for name, why in self.left_out],
            "variants": [_row_to_json(row) for row in self.rows],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws memory against recomputation, with the Pareto front, to a file: .png, .svg or .pdf (extra: plot)."""
        shown.save_picture(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained page: table, picture, timelines, and the largest buffers of each variant."""
        shown.save_page(self, path)

    def __str__(self) -> str:
        return shown.text_of(self)

    def _repr_html_(self) -> str:
        return shown.fragment_of(self)


@explains
@tells("tracing the variants")
def compare(
    variants: Mapping[str, Callable[..., Any]],
    *args: Any,
    target: Target | str | None = None,
    step: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.value_and_grad,
    time: bool = False,
    cache: str | os.PathLike[str] | bool | None = None,
    progress: Progress | bool | None = None,
) -> Comparison:
    """Compiles the step of each variant of a function for a target, and compares the figures.

    Peaks come from the compiler. Recomputation is counted on the traced step: its FLOPs minus those of the variant with
    the fewest FLOPs. Next to each peak is an estimate from the traced step alone, with its error.

    Args:
      variants: name -> function. The variants compute the same and differ in their checkpoints. Times are compared
        with that of the first one that fits.
      *args: the functions' arguments, pytrees of arrays or `jax.ShapeDtypeStruct`.
      target: what to compile for: see `jaxckpt.Target`; None for the local backend.
      step: makes the training step that is measured from a function: `jax.value_and_grad`, which differentiates with
        respect to the first argument, or a function that also has the optimizer's update.
      time: whether to run each step on the local backend, for any target, with `compiler_options()`. Times are medians
        of interleaved runs. Shapes among the arguments are filled with seeded data (`jaxckpt.memory.verify.fill`). A
        step that donates its arguments gets copies of them, which are not timed.
      cache: where compilers' results are stored: see `jaxckpt.measure`.
      progress: True shows a bar, or lines where there is no terminal; False nothing; None a bar in a terminal, after
        two seconds, and elsewhere a line each half minute. A function is called as `progress(done, total, what)` before
        each piece of work.

    Raises:
      ArgumentError: `variants` is not a mapping of functions, or is empty.
      NotDifferentiableError: the step is a gradient, and the first argument or the result is not differentiable.
      UnknownTargetError, MissingTargetError: see `jaxckpt.Target`.
      DoesNotFitError: no variant fits the target's device. If only some do not fit, `Comparison.left_out` names them.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> comparison = compare({"none": f, "whole": jax.checkpoint(f)}, jnp.ones((4, 4)), jnp.ones((8, 4)))
    >>> [row.recompute_flops for row in comparison]  # the matmul and the tanh again
    [0, 288]
    """
    assert not isinstance(progress, bool), "tells"
    _check(variants)
    check_flags(time=time)
    resolved = target_of(target)
    first = next(iter(variants.values()))
    made(step, first, args)
    lift.refuse_traced(first, args, "compare")
    if step in PLAIN:
        for name, fun in variants.items():
            check_differentiable(name, fun, args)
    step = suited(step, first, args)
    steps = {name: step(fun) for name, fun in variants.items()}
    total = len(variants) * (2 if time else 1)
    progress = progress or silent
    measured = []
    left_out: list[tuple[str, str]] = []
    unfit: DoesNotFitError | None = None
    sharded = any(getattr(getattr(leaf, "sharding", None), "num_devices", 1) > 1 for leaf in lift.leaves(first, args))
    for done, (name, fun) in enumerate(steps.items()):
        progress(done, total, f"compiling {name}")
        graph = trace(fun, *args)
        estimate = None if sharded else graph_peak(graph, resolved.platform, donated_arguments(graph))
        try:
            memory = measure(fun, *args, target=resolved, generate_code=False, cache=cache)
            measured.append((name, memory, estimate, graph.flops))
        except DoesNotFitError as error:
            left_out.append((name, _why(error)))
            unfit = error
    if unfit is not None and not measured:
        raise unfit
    steps = {name: steps[name] for name, *_ in measured}
    seconds = (
        time_steps(steps, fill(args), lambda done, what: progress(len(variants) + done, total, what)) if time else {}
    )
    progress(total, total, "")
    return replace(_comparison(measured, seconds, resolved.name), left_out=tuple(left_out))


def _why(error: DoesNotFitError) -> str:
    needs = "" if error.needed_bytes is None else f": it needs {format_bytes(error.needed_bytes)}"
    return f"does not fit the {format_bytes(error.memory_bytes)} of {error.target}{needs}"


def _comparison(
    measured: list[tuple[str, MemoryReport, int | None, int]], seconds: dict[str, float], target: str
) -> Comparison:
    least = min(flops for _, _, _, flops in measured)
    front = pareto_front([(report.peak_bytes, flops) for _, report, _, flops in measured])
    first = seconds.get(measured[0][0])
    rows = tuple(
        Row(
            name=name,
            report=report,
            estimate_bytes=estimate,
            flops=flops,
            recompute_flops=flops - least,
            recompute=(flops - least) / least if least else 0.0,
            seconds=seconds.get(name),
            time_ratio=seconds[name] / first if first else None,
            on_front=on_front,
        )
        for (name, report, estimate, flops), on_front in zip(measured, front)
    )
    return Comparison(rows, target, jax.default_backend() if seconds else None)


def pareto_front(points: list[tuple[float, float]]) -> list[bool]:
    """Returns for each point whether no other point beats it. In both coordinates, less is better.

    A point beats another if it is better in one coordinate by more than SAME, a thousandth, and not worse in the other
    by more than SAME. For nobody wants twice the memory to save a ten-thousandth of the FLOPs.

    >>> pareto_front([(400, 1000), (200, 1100), (300, 1100), (100, 1500), (400, 1000), (800, 999.5)])
    [True, True, False, True, True, False]
    """

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        no_worse = all(a <= b * (1 + SAME) for a, b in zip(one, other))
        return no_worse and any(a * (1 + SAME) < b for a, b in zip(one, other))

    return [not any(beats(other, point) for other in points) for point in points]


def _check(variants: Any) -> None:
    if not isinstance(variants, Mapping) or not variants:
        hint = (
            "Give each function a name: compare({'plain': loss, 'blocks': other}, *args)." if callable(variants) else ""
        )
        raise ArgumentError("variants", "a mapping from name to function, with at least one", variants, hint)
    for name, fun in variants.items():
        if not isinstance(name, str):
            raise ArgumentError("variants", "a mapping with strings for names", name)
        if not callable(fun):
            raise ArgumentError(f"variants[{name!r}]", "a function", fun)


def check_differentiable(name: str, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises NotDifferentiableError if the gradient of `fun` with respect to its first argument does not exist."""
    if not args:
        raise NotDifferentiableError(f"{name} has nothing to differentiate: it takes no arguments.")
    call = lift.take(fun, args[:1], {})
    wrong = [(path, leaf) for path, leaf in call.paths() if not is_inexact(leaf)]
    if len(wrong) == len(call.paths()):
        got = f"{wrong[0][0]} is {jax.typeof(wrong[0][1]).dtype}" if wrong else "it has no arrays"
        raise NotDifferentiableError(
            f"{name} has nothing to differentiate: the first argument must be of floating-point dtypes, because "
            f"gradients are taken with "
            f"respect to it; {got}. Put the parameters first, or pass your own step."
        )
    if (error := not_a_loss(name, fun, args)) is not None:
        raise error


def time_steps(
    steps: Mapping[str, Callable[..., Any]], args: tuple[Any, ...], progress: Callable[[int, str], None]
) -> dict[str, float]:
    """Returns the median seconds of each step on the local backend.

    Runs are interleaved (A B C A B C ...), so that a slower machine slows all of them down.

    Args:
      steps: name -> function. A step that donates its arguments gets copies of them, which are not timed.
      args: arrays, the arguments of all steps.
      progress: called as `progress(done, what)` before each step is compiled.
    """
    compiled = {}
    for done, (name, fun) in enumerate(steps.items()):
        progress(done, f"timing {name}")
        compiled[name] = lift.attempt(fun, args, {}, functools.partial(_runnable, fun))
    runs: dict[str, list[float]] = {name: [] for name in compiled}
    start = clock.perf_counter()
    for done in range(ROUNDS[-1]):
        if done >= ROUNDS[0] and (clock.perf_counter() - start) * (done + 1) / done > TIMING_SECONDS:
            break
        for name, prepare in compiled.items():
            run = prepare()
            before = clock.perf_counter()
            jax.block_until_ready(run())
            runs[name].append(clock.perf_counter() - before)
    return {name: statistics.median(times) for name, times in runs.items()}


def _runnable(fun: Callable[..., Any], call: lift.Taken) -> Callable[[], Callable[[], Any]]:
    """Returns a function that prepares a run of a step: it returns a function that runs it on its arguments. The step
    is compiled and has run once. The state of objects in the arguments does not change.
    """
    args = jax.device_put(call.args)
    options = compiler_options() or None
    jitted: Callable[..., Any] = jax.jit(call.fun, compiler_options=options)
    if call.whole and hasattr(fun, "lower"):
        jitted = fun
    first = _copies(args)
    jax.block_until_ready(jitted(*first))
    gone = [isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(first)]
    del first
    if not any(gone):
        return lambda: functools.partial(jitted, *args)
    return lambda: functools.partial(jitted, *_copies(args))


def _copies(args: Any) -> Any:
    """Returns arguments with arrays of their own, which a step may take over."""
    copies = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, args)
    return jax.block_until_ready(copies)


def _row_to_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "peak_bytes": row.peak_bytes,
        "estimate_bytes": row.estimate_bytes,
        "estimate_error": row.estimate_error,
        "step_flops": row.flops,
        "recompute_flops": row.recompute_flops,
        "recompute": row.recompute,
        "seconds": row.seconds,
        "time_ratio": row.time_ratio,
        "pareto": row.on_front,
        "compiled": row.report.to_json(),
    }
