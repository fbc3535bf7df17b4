"""Files of the plans of `autocheckpoint`, one for each step, and the settings that tell them apart."""

from __future__ import annotations

import hashlib
import json
import logging
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxckpt._errors import JaxckptError, PlanMismatchError
from jaxckpt.core import lift
from jaxckpt.core.bare import trace_bare
from jaxckpt.core.constants import STALE
from jaxckpt.core.lift import trace
from jaxckpt.core.plan import FORMAT, Plan
from jaxckpt.core.shown import Progress
from jaxckpt.memory.cache import surroundings
from jaxckpt.memory.gradient import PLAIN, not_a_loss, suited
from jaxckpt.memory.report import devices_of
from jaxckpt.memory.targets import target_of
from jaxckpt.planner.budget import DEVICE, normal
from jaxckpt.planner.measured import step_and_settings
from jaxckpt.planner.settings import PlanSettings
from jaxckpt.planner.solvers import Solver

logger = logging.getLogger("jaxckpt")


@dataclass(frozen=True)
class AutoSettings:
    """What `autocheckpoint` is asked for, each as of `jaxckpt.plan`, and which arguments are static."""

    budget: int | str
    planning: PlanSettings
    verify: bool = True
    solver: str | Solver = "chain"
    static_argnums: tuple[int, ...] = ()
    progress: Progress | bool | None = None


class PlanFile:
    """The file of one step's plan: the same for the same step and settings, in any process.

    Args:
      folder: it lies in; made when the plan is saved.
      settings: that the plan is made with.
      name: of the function that is planned.
      fun, shapes: the function, and its arguments.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        settings: AutoSettings,
        name: str,
        fun: Callable[..., Any],
        shapes: tuple[Any, ...],
    ) -> None:
        self.settings, self.name, self.fun, self.shapes = settings, name, fun, shapes
        self.path = folder / self._file_name()

    def load(self, budget: Any, cap: int | None) -> Plan | None:
        """Returns the plan; None where there is none that serves this step.

        Args:
          budget: the budget in bytes, where it is what the device has; otherwise not looked at.
          cap: the most bytes that the plan may need; None for no such bound.
        """
        try:
            plan = Plan.load(self.path)
            plan.check((trace if plan.respect_checkpoints else trace_bare)(self.fun, *self.shapes))
        except FileNotFoundError:
            return None
        except (OSError, PlanMismatchError) as error:
            logger.warning("%s does not serve %s, which is planned again: %s", self.path, self.name, error)
            return None
        if cap is not None and peak_of(plan) > cap:
            return None  # it is the plan that ran out of memory; the new one replaces it
        if normal(self.settings.budget) == DEVICE:
            stored = plan.budget or 0
            return plan if STALE * budget <= stored <= budget else None
        return plan

    def save(self, plan: Plan) -> None:
        """Writes a plan; where that fails, the log says so."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            plan.save(self.path)
        except (OSError, JaxckptError) as error:
            logger.warning("the plan of %s could not be kept in %s: %s", self.name, self.path, error)

    def _file_name(self) -> str:
        settings, planning, fun, shapes = self.settings, self.settings.planning, self.fun, self.shapes
        step, target = suited(planning.step, fun, shapes), target_of(planning.target)
        try:
            graph, jitted = step_and_settings(step(fun), shapes, target)
        except TypeError as error:
            wrong = not_a_loss(self.name, fun, shapes) if planning.step in PLAIN else None
            if wrong is not None:
                raise wrong from error
            raise
        facts = {
            "format": FORMAT,
            "compilers": surroundings(),
            "step": graph.fingerprint,
            "jitted": jitted,
            "shardings": [str(getattr(leaf, "sharding", None)) for leaf in lift.leaves(fun, shapes)],
            "budget": normal(settings.budget),
            "target": [target.name, target.row_text],
            "devices": devices_of(lift.leaves(fun, shapes), target),
            "actions": [repr(action) for action in planning.wanted],
            "host_budget": str(planning.host_budget),
            "costs": planning.costs,
            "solver": _solver_title(settings.solver),
            "respect_checkpoints": planning.respect_checkpoints,
            "tile": planning.tile,
            "verify": settings.verify,
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        name = "".join(c if c.isalnum() else "_" for c in self.name)[:40]
        return f"{name}-{digest}.json"


def _solver_title(solver: str | Solver) -> str:
    """Returns what tells a solver from others in any process."""
    if isinstance(solver, str):
        return solver
    return f"{type(solver).__module__}.{type(solver).__qualname__} {solver.name} {dict(solver.parameters())}"


def peak_of(plan: Plan) -> int:
    """Returns the bytes of the step under a plan: compiled, or else predicted, or else the budget."""
    return plan.measured_bytes or (plan.predicted.peak_bytes if plan.predicted else plan.budget or 0)
