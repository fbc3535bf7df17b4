"""What is said where no plan fits a budget."""

from __future__ import annotations

from collections.abc import Sequence

from jaxckpt._errors import InfeasibleBudgetError, TilingError
from jaxckpt.actions import OFFLOAD
from jaxckpt.core import primitives
from jaxckpt.core.graph import Op
from jaxckpt.core.primitives import Holds
from jaxckpt.core.regions import TiledStretch
from jaxckpt.core.sources import short_source
from jaxckpt.core.units import format_bytes
from jaxckpt.planner.measured import Measured

REASONS = 3
"""Operations that stand in the way of tiles that an error names, at most."""

_OPAQUE = {
    "shard_map": "A jax.shard_map that is not most of the function is kept or run again as a whole: checkpoint parts "
    "of what it maps with jaxckpt.checkpoint.",
    "while": "Nothing inside of a while loop is planned.",
}
"""Primitive -> a sentence, for operations that the planner does not look into."""


def no_plan(
    measured: Measured, budget: int, least: int | None, *, verified: bool, refused: bool, solver: str = ""
) -> InfeasibleBudgetError:
    """Returns the error for a budget that no plan fits.

    Args:
      measured: the function, with what was measured of it.
      budget: bytes.
      least: the least bytes that are known to be enough; None where nothing is known.
      verified: whether the compiler says so; else they are predicted.
      refused: whether plans were compiled, and the compiler refused every one.
      solver: the name of the one whose plans alone were wanted; "" where others were looked for too.
    """
    results = _result_bytes(measured)
    below = budget <= measured.argument_bytes + (results or 0)  # the step is traced only if that says nothing
    below = below and budget <= measured.used_argument_bytes + (results or 0)
    advice = "Use a smaller batch, or shard the arguments over more devices."
    if least is not None:
        found = "found" if verified else "predicted"
        # What is kept on the host is neither an argument nor a result.
        actions, apart = measured.asked.actions, measured.target.host_is_apart and not below
        more = f"actions=({', '.join(map(repr, (*actions, OFFLOAD)))}), " if apart and OFFLOAD not in actions else ""
        advice = (
            f"The least budget {found} to fit is {least} bytes ({format_bytes(least)}). Use that, a smaller batch, {more}"
            "or shard the arguments over more devices."
        )
    elif refused:
        advice = f"The compiler for {measured.target.name} refused every plan. {advice}"
    if solver:
        advice += f" Only plans of the solver {solver!r} were looked for; solver='chain' looks for more."
    if measured.asked.respect_checkpoints and any(_is_checkpoint(op) for op in measured.graph.walk()):
        advice += (
            " The function has checkpoints of its own, which stay as they are; respect_checkpoints=False "
            "(--ignore-checkpoints) plans without them."
        )
    if below:
        advice = f"{_standing(measured, results)} alone. No plan goes below that. {advice}"
    stretch, said = _widest(measured, least, results, standing=not below)
    return InfeasibleBudgetError(
        f"budget must be enough for the plan that keeps least; got {format_bytes(budget)} ({budget} bytes). {advice} "
        f"{said}",
        least_bytes=least,
        budget_bytes=budget,
        stretch=stretch,
    )


def no_plan_with_tiles(
    error: InfeasibleBudgetError, tiles: Sequence[TiledStretch], refused: Sequence[TilingError], operations: int
) -> InfeasibleBudgetError:
    """Returns the error for a budget that no plan fits with tiles either.

    Args:
      error: the one that names the least budget.
      tiles: of the plan that needs so much; none where it has none.
      refused: what stood in the way of more tiles.
      operations: how many of the function microbatches hold.
    """
    coupling = dict.fromkeys((each.operation, each.line, each.reason) for each in refused)
    reasons = [f"{name}{f' at {line}' if line else ''} {reason}" for name, line, reason in coupling][:REASONS]
    found = ", ".join(
        f"the whole function in {tile.tiles} microbatches"
        if tile.round == 0 and tile.stop - tile.start == operations
        else f"operations {tile.start}–{tile.stop} in {tile.tiles} tiles"
        for tile in tiles
    )
    said = f" That is with {found}." if tiles else ""
    if reasons:
        said += f" No axis goes through more of it. Operations couple the rows along an axis: {'; '.join(reasons)}."
    return InfeasibleBudgetError(
        f"{error}{said}", least_bytes=error.least_bytes, budget_bytes=error.budget_bytes, stretch=error.stretch
    )


def below_arguments(asked: int | str, budget: int, needed: int) -> InfeasibleBudgetError:
    """Returns the error for a budget that the arguments alone exceed.

    Args:
      asked: the budget as the user wrote it; `budget` is its bytes.
      needed: bytes of the arguments.
    """
    count = str(asked).strip()
    hint = f"A share of the peak is written '{count}%'. " if count.isdigit() and int(count) <= 100 else ""
    came = f"{count}, which is " if count.endswith("%") else ""
    return InfeasibleBudgetError(
        f"budget must be more than the arguments alone, {format_bytes(needed)} ({needed} bytes); got "
        f"{came}{format_bytes(budget)} ({budget} bytes). {hint}"
        "Use fewer parameters, a smaller batch, or shard the arguments over more devices.",
        least_bytes=needed,
        budget_bytes=budget,
    )


def _is_checkpoint(op: Op) -> bool:
    return primitives.of(op.primitive).holds is Holds.CHECKPOINT


def _source(op: Op) -> str:
    """Returns the user's line that made an operation; of one that jaxckpt made around others, as of tiles, that of the
    largest of these.
    """
    if op.source:
        return op.source
    inside = (each for body in op.bodies for each in body.ops)
    return max(((each.bytes, line) for each in inside if (line := _source(each))), default=(0, ""))[1]


def _result_bytes(measured: Measured) -> int | None:
    """Returns the bytes of the step's results that are no arguments' memory, on one device; None before anything was
    compiled.
    """
    with measured.lock:
        said = [measured.known_unplanned, *(each.report for each in measured.tries.values())]
    return min((each.output_bytes - each.alias_bytes for each in said if each is not None), default=None)


def _standing(measured: Measured, results: int | None) -> str:
    """Returns the start of a sentence that says what every plan of a step needs."""
    arguments = measured.used_argument_bytes
    if not results:
        return f"The step's arguments take {format_bytes(arguments)}"
    return (
        f"The step's arguments ({format_bytes(arguments)}) and results, such as gradients ({format_bytes(results)}), "
        f"take {format_bytes(arguments + results)}"
    )


def _widest(measured: Measured, least: int | None, results: int | None, *, standing: bool) -> tuple[str | None, str]:
    """Returns (which stretch needs most, what is said of it); None where the function has no operations.

    Args:
      least: as of `no_plan`.
      results: bytes, as of `_result_bytes`.
      standing: whether to say what arguments and results need.
    """
    graph, model = measured.graph, measured.model
    if not model.graph.ops:
        return None, "The function itself has no operations."
    start, stop, needed = model.widest()
    largest = max(model.graph.ops[start:stop], key=lambda op: op.bytes)
    place = short_source(_source(largest)) or largest.scope
    stretch = f"operations {start}–{stop}"
    if model.address:  # numbers count in the body that is planned
        around = next(op for op in graph.at(model.address[:-1]).ops if op.index == model.address[-1][0])
        stretch += f" inside of {around.primitive}"
    where = f"{stretch}, {largest.primitive}{f' at {place}' if place else ''}"
    text = f"The stretch that needs most memory needs {format_bytes(needed)} at once: {where}."
    rest = 0 if least is None else least - measured.argument_bytes - needed
    if rest < 0:  # the compiler takes less than the trace says, so that figure would tell nobody anything
        text = f"The stretch that needs most memory: {where}."
    if rest > needed:  # a leaner stretch would change little
        text += f" {_standing(measured, results)} of the least budget." if standing else ""
        others = "" if results else "gradients, "
        text += (
            f" The rest of that budget is {others}what the step around this "
            "stretch computes (updates, gradients of each example), values that pass between stretches, and what "
            "others have in memory at the same time (random bits of dropout, for example)."
        )
    return where, f"{text} {_OPAQUE[largest.primitive]}" if largest.primitive in _OPAQUE else text
