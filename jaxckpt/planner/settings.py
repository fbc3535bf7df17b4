"""What plans are asked for beside a function, its arguments and a budget: the settings of `jaxckpt.plan`, which
`frontier`, `autocheckpoint` and the commands share.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt._errors import ArgumentError, check_flags
from jaxckpt.actions import RECOMPUTE, SAVE, Action, action_from
from jaxckpt.core.argument_names import items
from jaxckpt.memory.cache import folder_of
from jaxckpt.memory.gradient import StepMaker, check_step
from jaxckpt.memory.targets import Target
from jaxckpt.planner.host import host_budget_bytes, parse_host_budget

COSTS = ("roofline", "measured", "compiler")


@dataclass(frozen=True)
class PlanSettings:
    """The settings that a problem depends on, each as of `jaxckpt.plan`.

    Raises:
      ArgumentError: one of them is invalid, whatever the target is.
    """

    target: Target | str | None = None
    step: StepMaker = jax.value_and_grad
    actions: Sequence[Action | str] = (RECOMPUTE, SAVE)
    host_budget: int | str | None = None
    costs: str = "roofline"
    reverse_only: bool = True
    respect_checkpoints: bool = True
    tile: bool = False
    cache: str | os.PathLike[str] | bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", actions_of(self.actions))
        check_flags(reverse_only=self.reverse_only, respect_checkpoints=self.respect_checkpoints, tile=self.tile)
        if not isinstance(self.costs, str) or self.costs not in COSTS:
            raise ArgumentError("costs", f"one of {', '.join(COSTS)}", self.costs)
        check_step(self.step)
        parse_host_budget(self.host_budget)
        folder_of(self.cache)

    @property
    def wanted(self) -> tuple[Action, ...]:
        """The allowed actions, each once."""
        return tuple(self.actions)  # type: ignore[arg-type]  # `__post_init__` has made actions of their names

    @property
    def keeping(self) -> tuple[Action, ...]:
        """The allowed actions that keep a value."""
        return tuple(action for action in self.wanted if action.keeps)

    def keywords(self) -> dict[str, Any]:
        """Returns them as keyword arguments of `jaxckpt.plan`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def check_target(self, target: Target) -> int | None:
        """Checks the settings against the target that was looked up. Returns the bytes of the host budget; None for no
        bound.

        Raises:
          ArgumentError: the target lacks what a setting needs.
        """
        host_bytes = host_budget_bytes(self.host_budget, target)
        for action in self.wanted:
            if refusal := action.refusal(target):
                raise ArgumentError("actions", f"actions that {target.name} can take", action, refusal)
        if self.costs == "measured" and not target.local:
            hint = "Leave out the target to plan for this machine."
            raise ArgumentError("costs", f"'roofline' for {target.name}, which is not here", self.costs, hint)
        if self.costs == "compiler" and not target.clock:
            rule = f"'roofline' or, on the device itself, 'measured' for {target.name}"
            hint = f"XLA for {target.platform} writes no estimates into its programs; XLA for TPUs does."
            raise ArgumentError("costs", rule, self.costs, hint)
        return host_bytes


def actions_of(actions: Sequence[Action | str]) -> tuple[Action, ...]:
    """Returns the actions that a planner is allowed, each once.

    Raises:
      ArgumentError: `actions` is not a sequence of actions, or lacks RECOMPUTE or SAVE.
    """
    given = items(actions)
    if given is None:
        raise ArgumentError("actions", "a sequence of actions, such as (RECOMPUTE, SAVE)", actions)
    wanted = tuple(dict.fromkeys(action_from(action, f"actions[{place}]") for place, action in enumerate(given)))
    if RECOMPUTE not in wanted or SAVE not in wanted:
        hint = "Values between regions are saved, and other values are recomputed, so both actions are needed."
        raise ArgumentError("actions", "a sequence with RECOMPUTE and SAVE in it", wanted, hint)
    return wanted
