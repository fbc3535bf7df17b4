"""Region and Loop: which operations of a function are run again, how its scans run, and the action of each value in
them. Frozen, checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxckpt._errors import PlanMismatchError
from jaxckpt.actions import Action
from jaxckpt.core.argument_names import items
from jaxckpt.core.schedule import LoopSchedule
from jaxckpt.core.units import as_int

Address = tuple[tuple[int, int], ...]
"""Where a body lies: for each operation around it, the outermost first, (its `Op.index`, the body's place in
`Op.bodies`).

() is the function's own."""


@dataclass(frozen=True)
class Region:
    """A stretch of operations whose intermediate values are dropped after the forward pass, but for those with another
    action.

    Attributes:
      start, stop: the stretch, a half-open interval of the operations of its body: of `Graph.ops`, or of those of a
        body inside: a loop's, a branch's, a mapped function's.
      actions: index of a value that is computed in the stretch -> its action; RECOMPUTE where there is none. What goes
        in is saved; it may have another action too, where no regions are nested.
      regions: nested regions, disjoint and in order, in the same numbering.
      checkpoint: False for a stretch that is left to JAX as it stands.
      tied: whether all gradients that its backward pass computes are there before an earlier stretch's backward pass
        begins. A compiler that puts some of them off keeps alive what they are computed from.
      body: the address of the body that it lies in; see `Graph.at`. Nested regions lie in the same one.
    """

    start: int
    stop: int
    actions: Mapping[int, Action] = field(default_factory=lambda: MappingProxyType({}))
    regions: tuple[Region, ...] = ()
    checkpoint: bool = True
    tied: bool = False
    body: Address = ()

    def __post_init__(self) -> None:
        set_fields(self, start=whole(self.start, "start"), stop=whole(self.stop, "stop"))
        set_fields(self, body=checked_address(self.body))
        set_fields(self, actions=checked_actions(self.actions), regions=all_of(self.regions, Region, "regions"))
        check_flag(self.checkpoint, "checkpoint")
        check_flag(self.tied, "tied")
        check_order(self.regions, self.start, self.stop)
        if any(inner.body != self.body for inner in self.regions):
            raise PlanMismatchError(
                f"regions of a region must have its own body, {self.body}; got {self.regions!r:.200}. Plan anew."
            )

    def __hash__(self) -> int:
        kept = tuple(sorted(self.actions))
        return hash((self.start, self.stop, kept, self.regions, self.checkpoint, self.tied, self.body))

    def __reduce__(self) -> tuple[type[Region], tuple[Any, ...]]:  # a mapping proxy can be neither pickled nor copied
        return Region, (self.start, self.stop, dict(self.actions), self.regions, self.checkpoint, self.tied, self.body)


@dataclass(frozen=True)
class Loop:
    """How one `lax.scan` of the function is run.

    Attributes:
      op: its place in `Graph.ops`, or among the operations of the body that it lies in.
      schedule: in what way; the values that it names are those of the scan's body.
      body: the address of the body that the scan lies in.
    """

    op: int
    schedule: LoopSchedule
    body: Address = ()

    def __post_init__(self) -> None:
        set_fields(self, op=whole(self.op, "op"), body=checked_address(self.body))
        all_of([self.schedule], LoopSchedule, "schedule")


@dataclass(frozen=True)
class TiledStretch:
    """A stretch of operations that is run tile by tile, as `jaxckpt.tile` runs a function.

    Attributes:
      start, stop: the stretch, a half-open interval of `Graph.ops`.
      value: index of a value that the stretch reads.
      axis: the axis of that value that is divided; the stretch's other values have it where the operations put it.
      tiles: into how many tiles. If it does not divide the axis, each has ceil(rows / tiles) rows, and the last one
        what is left.
      parts: into how many parts of consecutive rows the axis is cut; each tile has rows of every part, so that devices
        that hold the axis in parts compute a part of every tile each.
      round: 0 for a stretch of the function itself, 1 for one of the function that has those of round 0 in tiles, and
        so on.
    """

    start: int
    stop: int
    value: int
    axis: int
    tiles: int
    round: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        for name in ("start", "stop", "value", "axis", "tiles", "round", "parts"):
            set_fields(self, **{name: whole(getattr(self, name), f"a tiled stretch's {name}")})
        if self.start >= self.stop or self.tiles < 1 or self.parts < 1:
            raise PlanMismatchError(
                f"a tiled stretch must have operations, and tiles and parts must be at least 1; got {self}. Plan anew."
            )


@dataclass(frozen=True)
class RecomputedStretch:
    """A stretch of operations that the function itself runs again, in front of an operation that reads what they made:
    see `jaxckpt.core.again`.

    Attributes:
      start, stop: the stretch, a half-open interval of `Graph.ops`.
      at: the operation in front of which it runs again. Those from there on read what it makes then.
    """

    start: int
    stop: int
    at: int

    def __post_init__(self) -> None:
        for name in ("start", "stop", "at"):
            set_fields(self, **{name: whole(getattr(self, name), f"a recomputed stretch's {name}")})
        if not self.start < self.stop <= self.at:
            raise PlanMismatchError(
                f"a recomputed stretch must have operations, and end before it runs again; got {self}. Plan anew."
            )


def every_region(regions: tuple[Region, ...]) -> Iterator[Region]:
    """Yields regions and those nested in them."""
    for region in regions:
        yield region
        yield from every_region(region.regions)


def kept_actions(region: Region) -> dict[int, Action]:
    """Returns the actions that keep something, of a region and of those nested in it."""
    actions = {index: action for index, action in region.actions.items() if action.keeps}
    for inner in region.regions:
        actions |= kept_actions(inner)
    return actions


# ------------------------------------------------------------------------------------------------- what fields may hold


def set_fields(instance: Any, **fields: Any) -> None:
    """Sets fields of a frozen dataclass that is being made."""
    for name, value in fields.items():
        object.__setattr__(instance, name, value)


def whole(value: Any, what: str) -> int:
    """Returns a whole number, 0 or more, as an int."""
    found = as_int(value)
    if found is None or found < 0:
        raise PlanMismatchError(f"{what} must be a whole number, 0 or more; got {value!r:.80}. Plan anew.")
    return found


def check_flag(value: Any, what: str) -> None:
    """Raises where a value is neither True nor False."""
    if not isinstance(value, bool):
        raise PlanMismatchError(f"{what} must be True or False; got {value!r:.80}. Plan anew.")


def all_of(values: Iterable[Any], kind: type, what: str) -> tuple[Any, ...]:
    """Returns values that are all of one type, as a tuple."""
    found = items(values)
    if found is None or not all(isinstance(value, kind) for value in found):
        raise PlanMismatchError(f"{what} must each be of type {kind.__name__}; got {values!r:.80}. Plan anew.")
    return found


def checked_actions(actions: Mapping[int, Action]) -> Mapping[int, Action]:
    """Returns a mapping from values to actions that cannot be changed."""
    if not isinstance(actions, Mapping):
        raise PlanMismatchError(f"actions must be a mapping from values to actions; got {actions!r:.80}. Plan anew.")
    all_of(actions.values(), Action, "actions")
    return MappingProxyType({whole(index, "an action's value"): action for index, action in actions.items()})


def checked_address(address: Any) -> Address:
    """Returns an address of whole numbers, as a tuple of pairs."""
    try:
        return tuple((whole(op, "body"), whole(place, "body")) for op, place in address)
    except (TypeError, ValueError) as error:
        if isinstance(error, PlanMismatchError):
            raise
        raise PlanMismatchError(
            f"body must be pairs of an operation and one of its bodies; got {address!r:.80}. Plan anew."
        ) from error


def by_body(items: Iterable[Any]) -> dict[Address, tuple[Any, ...]]:
    """Returns regions, or loops, by the body that they lie in, in order."""
    found: dict[Address, tuple[Any, ...]] = {}
    for item in items:
        found[item.body] = (*found.get(item.body, ()), item)
    return found


def check_order(regions: tuple[Region, ...], start: int, stop: int | None) -> None:
    """Raises where regions overlap, are out of order, or do not lie within start..stop."""
    at = start
    for region in regions:
        if region.start < at or region.stop < region.start or (stop is not None and region.stop > stop):
            end = "" if stop is None else f", and end by {stop}"
            raise PlanMismatchError(
                f"regions must be disjoint and in order, begin at {start} or later{end}; got "
                f"{region.start}..{region.stop} where {at} was reached. Plan anew."
            )
        at = region.stop
