"""Plan and Region: what is to be kept, where. Frozen, printable, to and from JSON, with the fingerprint of the graph that they fit."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxckpt._errors import PlanMismatchError
from jaxckpt.core.actions import Action, action_from
from jaxckpt.core.files import write_whole
from jaxckpt.core.graph import Graph, Value
from jaxckpt.core.units import format_bytes

FORMAT = 1
"""Version of the JSON form."""


@dataclass(frozen=True)
class Region:
    """A stretch of operations whose intermediate values are dropped after the forward pass, but for those with another action.

    Attributes:
      start, stop: the stretch, a half-open interval of `Graph.ops`.
      actions: index of a value that is computed in the stretch -> its action; RECOMPUTE where there is none.
      regions: nested regions, disjoint and in order, in the same numbering.
    """

    start: int
    stop: int
    actions: Mapping[int, Action] = field(default_factory=lambda: MappingProxyType({}))
    regions: tuple[Region, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", MappingProxyType(dict(self.actions)))
        _check_order(self.regions, self.start, self.stop)

    def __hash__(self) -> int:
        return hash((self.start, self.stop, tuple(sorted(self.actions)), self.regions))


@dataclass(frozen=True)
class Plan:
    """What becomes of every intermediate value of one function: see `Region`. What lies outside all regions is left to JAX.

    Attributes:
      regions: disjoint, in order.
      fingerprint: that of the graph that the plan was made for.
      prevent_cse: whether the compiler is kept from merging the recomputation with the forward pass; False is right inside a `lax.scan` only.
      notes: a line for each region, for people.
    """

    regions: tuple[Region, ...]
    fingerprint: str
    prevent_cse: bool = True
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_order(self.regions, 0, None)

    def apply(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function with `fun`'s values that keeps and recomputes what the plan says.

        It is traced at each call with new shapes; one that the plan was not made for raises `PlanMismatchError`.
        """
        from jaxckpt.core.emit import apply_plan

        return apply_plan(self, fun)

    def check(self, graph: Graph) -> None:
        """Raises `PlanMismatchError` where the plan was not made for this graph."""
        if graph.fingerprint != self.fingerprint:
            stop = max((region.stop for region in self.regions), default=0)
            size = (
                f"; it covers operations up to {stop}, the function has {len(graph.ops)}"
                if stop > len(graph.ops)
                else ""
            )
            arguments = ", ".join(f"{v.dtype}{list(v.shape)}" for v in graph.values if v.kind == "argument")
            raise PlanMismatchError(
                f"The plan was made for another function, or other shapes: it fits the program {self.fingerprint}, this one is "
                f"{graph.fingerprint}{size}. Arguments that came: {arguments[:400]}. Make a plan for this function."
            )

    def to_json(self) -> str:
        """Returns the plan as JSON text; `Plan.from_json` reads it back."""
        return json.dumps(
            {
                "format": FORMAT,
                "fingerprint": self.fingerprint,
                "prevent_cse": self.prevent_cse,
                "notes": list(self.notes),
                "regions": [_region_to_json(region) for region in self.regions],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that `to_json` wrote.

        Raises:
          PlanMismatchError: the text is cut short, edited beyond recognition, or from another version.
        """
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise PlanMismatchError(
                    f"The plan is of format {raw['format']}; this version reads format {FORMAT}. Plan anew."
                )
            regions = tuple(_region_from_json(region) for region in raw["regions"])
            return cls(regions, raw["fingerprint"], bool(raw["prevent_cse"]), tuple(raw["notes"]))
        except PlanMismatchError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanMismatchError(
                f"The plan does not parse ({error!r}): the file is cut short or was edited. Plan anew."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote."""
        return cls.from_json(pathlib.Path(path).read_text())

    def describe(self, graph: Graph) -> str:
        """Returns the plan as a tree: regions, the values kept in each, their bytes."""
        self.check(graph)
        kept = sum(graph.values[i].kept_bytes for region in _walk(self.regions) for i in region.actions)
        lines = [
            f"Plan for {self.fingerprint}: {len(list(_walk(self.regions)))} regions, {format_bytes(kept)} kept in them"
        ]
        lines += _describe(self.regions, graph, "")
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [f"Plan for {self.fingerprint}"]
        for region, note in zip(self.regions, self.notes or ("",) * len(self.regions)):
            lines.append(f"  ops {region.start}..{region.stop}: keeps {len(region.actions)} values {note}".rstrip())
        return "\n".join(lines)


def _check_order(regions: tuple[Region, ...], start: int, stop: int | None) -> None:
    at = start
    for region in regions:
        if region.start < at or region.stop < region.start or (stop is not None and region.stop > stop):
            raise PlanMismatchError(
                f"regions must be disjoint, in order and inside what holds them; got {region.start}..{region.stop}"
            )
        at = region.stop


def _walk(regions: tuple[Region, ...]) -> Iterator[Region]:
    for region in regions:
        yield region
        yield from _walk(region.regions)


def _region_to_json(region: Region) -> dict[str, Any]:
    return {
        "start": region.start,
        "stop": region.stop,
        "actions": {str(index): action.to_json() for index, action in sorted(region.actions.items())},
        "regions": [_region_to_json(inner) for inner in region.regions],
    }


def _region_from_json(raw: dict[str, Any]) -> Region:
    actions = {int(index): action_from(action) for index, action in raw["actions"].items()}
    return Region(raw["start"], raw["stop"], actions, tuple(_region_from_json(inner) for inner in raw["regions"]))


def _describe(regions: tuple[Region, ...], graph: Graph, indent: str) -> Iterator[str]:
    for region in regions:
        kept = [graph.values[index] for index in region.actions]
        total = format_bytes(sum(value.kept_bytes for value in kept))
        yield f"{indent}├─ ops {region.start}..{region.stop}  keeps {len(kept)} of its values, {total}"
        for value in sorted(kept, key=lambda v: -v.kept_bytes)[:8]:
            yield f"{indent}│    {region.actions[value.index]!r:9} {_value_line(value)}"
        yield from _describe(region.regions, graph, indent + "│  ")


def _value_line(value: Value) -> str:
    times = f" ×{value.repeats}" if value.repeats > 1 else ""
    return f"{value.label:24} {value.dtype}{list(value.shape)}{times} {format_bytes(value.kept_bytes)}  {value.source}"
