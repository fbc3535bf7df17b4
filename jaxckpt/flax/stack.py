"""The parts that stacks of linen and nnx blocks share: how to run a stack, and what a layer must return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt._errors import StructureError
from jaxckpt.schedules import Nested, Schedule, schedule_of
from jaxckpt.transforms.scan import scan


@dataclass(frozen=True)
class Stack:
    """How to run a stack: the arguments of `scan_layers` without the block.

    Attributes:
      length: number of layers.
      schedule: as in `jaxckpt.scan`.
      policy: says what is kept of each layer.
      names: names of the unrolled layers, with "{}" for the number.
    """

    length: int
    schedule: Schedule
    policy: Any
    names: str

    def run(self, step: Callable[[Any, Any], tuple[Any, Any]], x: Any, rows: Any) -> tuple[Any, Any]:
        """Scans over the layers: (x, row) -> (x, new row)."""
        return scan(step, x, rows, self.length, schedule=self.schedule, policy=self._within())

    def _within(self) -> Any:
        """Returns the policy of each layer's checkpoint. Without a checkpoint, a segment would keep everything that its
        layers compute.
        """
        plan = schedule_of(self.length, self.schedule)
        if self.policy is None and isinstance(plan, Nested) and plan.inner is not None and plan.residuals > 1:
            return "nothing"
        return self.policy


def check_result(name: str, taken: Any, returned: Any) -> None:
    """Checks that a layer returned the structure that the next layer takes.

    Raises:
      StructureError: structure, shapes or dtypes differ.
    """
    before, after = (jax.tree.map(_kind, tree) for tree in (taken, returned))
    kinds = [(jax.tree.structure(tree), jax.tree.leaves(tree)) for tree in (before, after)]
    if kinds[0] != kinds[1]:
        raise StructureError(
            f"Block must be a module whose call returns the structure of its first argument: {before}; {name} "
            f"returned {after}. "
            "Layers take and return a pytree of the same structure, shapes and dtypes: cast or project before the "
            "stack."
        )


class _Name(str):
    """A string that prints without quotes."""

    __repr__ = str.__str__


def _kind(leaf: Any) -> _Name:
    kind = jax.typeof(leaf)
    return _Name(f"{kind.dtype}[{','.join(map(str, kind.shape))}]")
