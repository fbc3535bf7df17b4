"""What candidates are found for: a target, how arrays lie on it, and what may become of a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxckpt.actions import SAVE, Action
from jaxckpt.core.constants import QUICK
from jaxckpt.core.graph import Body, Graph
from jaxckpt.memory.targets import Target
from jaxckpt.planner.chain import Candidate
from jaxckpt.planner.cycles import Cycles
from jaxckpt.planner.shards import WHOLE, Shards


@dataclass(frozen=True)
class Context:
    """What is the same for all stretches of a program.

    Attributes:
      target: what the program will run on.
      shards: how arrays lie over the target's devices; all bytes are those on one.
      timed: whether each stretch is run on the local device, and the roofline's times are scaled to what that took.
      cycles: what the target's compiler says that operations take; None where it is not asked.
      actions: the ways to keep a value.
      programs: the candidates of branches and short loops that are known: (a body's id, its active values) -> the body
        and those.
      stretches: the candidates of stretches that are known, of this function or of the same one with tiles: see
        `jaxckpt.planner.model`. It is shared by contexts that differ in `in_loop`, `quick`, `finer` and
        `calls` alone.
      calls: one of the ways of `stages.calls`; it is cut where these begin and end.
      in_loop: whether the stretches are of a loop's body.
      quick: whether the program is small, and on one device: see `is_quick`.
      finer: whether the program is cut finer than is needed for most budgets: see `stages.cuts`.
      once: whether the program is differentiated once alone, so that schedules will do which have no second derivative.
    """

    target: Target
    shards: Shards = WHOLE
    timed: bool = False
    cycles: Cycles | None = None
    actions: tuple[Action, ...] = (SAVE,)
    once: bool = True
    quick: bool = False
    finer: bool = False
    calls: tuple[tuple[int, int], ...] = ()
    in_loop: bool = False
    stretches: dict[tuple[str, bool, bool], Any] = field(default_factory=dict, compare=False)
    programs: dict[tuple[int, frozenset[int]], tuple[Body, Sequence[Candidate]]] = field(
        default_factory=dict, compare=False
    )


def is_quick(graph: Graph) -> bool:
    """Whether a program is so small that to compile or to trace it takes little time: of up to `QUICK` operations."""
    return sum(1 for _ in graph.walk()) <= QUICK
