"""What a schedule of a loop is: which carries are kept from the forward to the backward pass, and in what order
iterations run again.

A schedule is a value: one frozen dataclass in one file. `jaxckpt.scan`, plans, plan files, pictures and the planner ask
it; none of them knows which schedules there are. A class with a `kind` is known by that name from its definition on, in
this package or anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

import jax

from jaxckpt._errors import ArgumentError, PlanMismatchError
from jaxckpt.actions import Action, action_from
from jaxckpt.actions.base import enter, to_json
from jaxckpt.core.scans import ScanRun, Values


@dataclass(frozen=True)
class LoopCost:
    """What running a loop by a schedule costs.

    Attributes:
      kept_carries: carries kept from the forward to the backward pass.
      peak_carries: most carries kept at once, in the backward pass.
      residual_iterations: most iterations whose residuals are kept at once.
      runs: runs of the body over a forward and a backward pass; as many as there are iterations are the forward pass.
      host_carries: most carries kept at once in host memory; the others are in device memory.
      transfers: carries moved between device and host memory, both ways.
    """

    kept_carries: int
    peak_carries: int
    residual_iterations: int
    runs: int
    host_carries: int = 0
    transfers: int = 0


@dataclass(frozen=True)
class Iterations:
    """Consecutive iterations that run alike: what is printed of a schedule.

    Attributes:
      count: how many.
      how: in what way, as a phrase that follows their number, such as ", in segments of 4".
      actions: index of a value of the body -> its action in each of them; None: the iterations are left to JAX.
      kept: whether the values that the actions keep are kept of all these iterations, from the forward to the backward
        pass.
      unsaid: what is printed as kept where `actions` is None.
    """

    count: int
    how: str = ""
    actions: Mapping[int, Action] | None = None
    kept: bool = False
    unsaid: str = ""


KINDS: dict[str, type[LoopSchedule]] = {}
"""The classes of schedules by their kind."""


class LoopSchedule:
    """How the iterations of a scan run. Schedules are values: equal where kind and parameters are, hashable, and
    written to plan files.

    A subclass is a frozen dataclass with a `kind`; its fields are its parameters: numbers, strings, flags, schedules,
    tuples of these, and mappings from values to actions. It defines `resolved`, which makes it of other schedules, or
    else `run` and `cost`, and `iterations` where more is to be printed than its name. A class with a mapping among its
    fields takes its hash from here: `__hash__ = LoopSchedule.__hash__`.

    Attributes:
      kind: its name in plan files; "" for one that is in none.
      recodes_carries: whether it can keep carries by an action that changes them, such as `compress`.
    """

    kind: ClassVar[str] = ""
    recodes_carries: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__dict__.get("kind"):
            enter(KINDS, cls.kind, cls)

    def resolved(self, length: int) -> LoopSchedule:
        """Returns the schedule that it means for so many iterations."""
        raise NotImplementedError(f"{type(self).__name__} must define resolved, or run and cost")

    def refusal(self, length: int) -> str:
        """Returns why it cannot run so many iterations, a sentence; "" where it can."""
        return ""

    def cost(self, length: int) -> LoopCost:
        """Returns what running so many iterations costs."""
        return self._meant(length).cost(length)

    def run(self, scan: ScanRun) -> tuple[Values, Values]:
        """Runs a scan: the carry after the last iteration, and the ys."""
        return self._meant(scan.body.length).run(scan)

    def iterations(self, length: int) -> tuple[Iterations, ...]:
        """Returns what is told of so many iterations, in the order in which they run; by default its name."""
        if type(self).resolved is LoopSchedule.resolved:
            return (Iterations(length, f", {self}"),)
        return tuple(replace(each, how=f", {self}{each.how}") for each in self._meant(length).iterations(length))

    def _meant(self, length: int) -> LoopSchedule:
        """Returns what `resolved` does.

        Raises:
          ArgumentError: it returns no schedule, or itself.
        """
        found = self.resolved(length)
        if not isinstance(found, LoopSchedule) or found == self:
            rule = f"one whose `resolved` returns another schedule, an instance; {type(self).__name__}'s did not"
            raise ArgumentError("schedule", rule, found)
        return found

    def all_actions(self) -> Iterator[Mapping[int, Action]]:
        """Yields what it says of values of the body, and what the schedules in it say: index of the value -> its
        action; equal ones once.
        """
        seen: list[Mapping[int, Action]] = []
        for actions in _actions(tuple(self.parameters().values())):
            if actions not in seen:
                seen.append(actions)
                yield actions

    def carry_actions(self) -> Iterator[int]:
        """Yields the values that have actions at the start of segments; these must be carries."""
        for inner in _schedules(tuple(self.parameters().values())):
            yield from inner.carry_actions()

    def parameters(self) -> dict[str, Any]:
        """Returns its parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """Returns the schedule as a JSON object: its kind and its parameters; `schedule_from` reads it back."""
        return {"kind": self.kind, **{name: _to_json(value) for name, value in self.parameters().items()}}

    def __hash__(self) -> int:
        parts = (tuple(sorted(x)) if isinstance(x, Mapping) else x for x in self.parameters().values())
        return hash((self.kind, *parts))

    def __reduce__(self) -> tuple[Any, ...]:  # a mapping proxy can be neither pickled nor copied
        plain = {name: dict(x) if isinstance(x, MappingProxyType) else x for name, x in self.parameters().items()}
        return _made, (type(self), plain)


def _made(cls: type[LoopSchedule], parameters: dict[str, Any]) -> LoopSchedule:
    return cls(**parameters)


def _actions(value: Any) -> Iterator[Mapping[int, Action]]:
    if isinstance(value, Mapping):
        yield value
    elif isinstance(value, LoopSchedule):
        yield from value.all_actions()
    elif isinstance(value, tuple):
        for item in value:
            yield from _actions(item)


def _schedules(value: Any) -> Iterator[LoopSchedule]:
    if isinstance(value, LoopSchedule):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _schedules(item)


def _to_json(value: Any) -> Any:
    if isinstance(value, LoopSchedule):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(index): action.to_json() for index, action in sorted(value.items())}
    return [_to_json(item) for item in value] if isinstance(value, tuple) else to_json(value)


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "kind" in value:
            return schedule_from(value)
        return {int(index): action_from(action) for index, action in value.items()}
    return tuple(map(_from_json, value)) if isinstance(value, list) else value


def ran(schedule: LoopSchedule, scan: ScanRun) -> tuple[Values, Values]:
    """Returns what a schedule's `run` does.

    Raises:
      ArgumentError: it returns something else.
    """
    found = schedule.run(scan)
    if not isinstance(found, tuple) or len(found) != 2:
        rule = f"one whose `run` returns (carry, ys); {type(schedule).__name__}'s did not"
        raise ArgumentError("schedule", rule, found)
    ys = [jax.ShapeDtypeStruct((scan.body.length, *row.shape), row.dtype) for row in scan.body.y_avals]
    for what, given, wanted in ("carry", found[0], scan.body.carry_avals), ("ys", found[1], ys):
        rule, came = (", ".join(map(_kind, each)) or "nothing" for each in (wanted, given))
        if rule != came:
            rule = f"one whose `run` returns {rule} as {what}; {type(schedule).__name__}'s did not"
            raise ArgumentError("schedule", rule, came)
    return found


def _kind(x: Any) -> str:
    """Returns the type of an array, or of a number, as text; of what is neither, its class."""
    try:
        aval = x if hasattr(x, "dtype") and hasattr(x, "shape") else jax.typeof(x)
    except TypeError:
        return type(x).__name__
    return f"{aval.dtype}{list(aval.shape)}"


def schedule_from(raw: Any) -> LoopSchedule:
    """Returns a schedule from what `LoopSchedule.to_json` returned.

    Raises:
      PlanMismatchError: there is no such kind, or its parameters are others.
    """
    kind = raw.get("kind") if isinstance(raw, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise PlanMismatchError(
            f"A loop's schedule must be of a kind that is defined: {', '.join(sorted(KINDS))}; got {kind!r:.80}. "
            f"Import what defines it, "
            "or plan anew."
        )
    try:
        return KINDS[kind](**{name: _from_json(value) for name, value in raw.items() if name != "kind"})
    except ArgumentError as error:
        raise PlanMismatchError(f"A {kind} schedule cannot be read: {error} Or plan anew.") from error
    except TypeError as error:
        raise PlanMismatchError(
            f"A {kind} schedule must have the parameters that it has; {error} Plan anew."
        ) from error
