"""Plan and Region: what is to be kept, where. Frozen, printable, to and from JSON, with the fingerprint of the graph that they fit."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from jaxckpt._errors import PlanMismatchError
from jaxckpt.core.actions import Action, action_from
from jaxckpt.core.files import write_whole
from jaxckpt.core.graph import Graph, Value
from jaxckpt.core.units import format_bytes

FORMAT = 2
"""Version of the JSON form."""


@dataclass(frozen=True)
class Region:
    """A stretch of operations whose intermediate values are dropped after the forward pass, but for those with another action.

    Attributes:
      start, stop: the stretch, a half-open interval of `Graph.ops`.
      actions: index of a value that is computed in the stretch -> its action; RECOMPUTE where there is none.
      regions: nested regions, disjoint and in order, in the same numbering.
      checkpoint: False for a stretch that is left to JAX as it stands.
      tied: whether all gradients that its backward pass computes are there before an earlier stretch's backward pass begins. A compiler that
        puts some of them off keeps alive what they are computed from.
    """

    start: int
    stop: int
    actions: Mapping[int, Action] = field(default_factory=lambda: MappingProxyType({}))
    regions: tuple[Region, ...] = ()
    checkpoint: bool = True
    tied: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", MappingProxyType(dict(self.actions)))
        _check_order(self.regions, self.start, self.stop)

    def __hash__(self) -> int:
        return hash((self.start, self.stop, tuple(sorted(self.actions)), self.regions))


@dataclass(frozen=True)
class Run:
    """Some iterations of a `lax.scan`, one after the other, run alike.

    Attributes:
      count: how many iterations.
      segments: nested segment lengths, outermost first: the iterations go in segments of so many, of which only the carry that they start
        from is kept, those in segments again, and so on. () keeps the carry of each iteration.
      actions: index of a value that the body computes -> its action, for each iteration of an innermost segment.
      checkpoint: False leaves each such iteration to JAX, which keeps what derivatives need, also of loops inside.
    """

    count: int
    segments: tuple[int, ...] = ()
    actions: Mapping[int, Action] = field(default_factory=lambda: MappingProxyType({}))
    checkpoint: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        object.__setattr__(self, "actions", MappingProxyType(dict(self.actions)))
        if self.count < 1 or any(length < 1 for length in self.segments):
            raise PlanMismatchError(f"a run has at least one iteration, and so have its segments; got {self}")

    def __hash__(self) -> int:
        return hash((self.count, self.segments, tuple(sorted(self.actions)), self.checkpoint))


@dataclass(frozen=True)
class Loop:
    """How one `lax.scan` of the function is run: in the runs' ways.

    Attributes:
      op: its place in `Graph.ops`.
      runs: in the order in which the iterations run; their counts add up to the scan's length.
    """

    op: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class MemoryEstimate:
    """What a plan was predicted to need, before its last compilation.

    Attributes:
      peak_bytes: of the whole step, arguments and outputs and all.
      argument_bytes: of the step's arguments.
      kept_bytes: kept from the forward to the backward pass.
      work_bytes: the rest: gradients, and what the dearest stretch needs while it runs.
    """

    peak_bytes: int
    argument_bytes: int
    kept_bytes: int
    work_bytes: int


@dataclass(frozen=True)
class Plan:
    """What becomes of every intermediate value of one function: see `Region`. What lies outside all regions is left to JAX.

    Attributes:
      regions: disjoint, in order.
      fingerprint: that of the graph that the plan was made for.
      prevent_cse: whether the compiler is kept from merging the recomputation with the forward pass; False is right inside a `lax.scan` only.
      notes: a line for each region, for people.
      loops: how scans of the function are run, where not as they stand.
      budget: bytes that the planner was given; None for a plan that has none, as a policy's.
      target: name of the target that it was planned for, or None.
      predicted: what the planner expected of the step, or None.
      measured: what the compiler said of the step; None where nobody asked, and in a plan that was loaded.
      measured_bytes: the peak that the compiler said, also in a plan that was loaded.
      unplanned_bytes: the step's compiled peak without the plan, where it was looked at.
      overhead: seconds of recomputation over those of a step without any, both by the target's rates; None where nothing was planned.
    """

    regions: tuple[Region, ...]
    fingerprint: str
    prevent_cse: bool = True
    notes: tuple[str, ...] = ()
    loops: tuple[Loop, ...] = ()
    budget: int | None = None
    target: str | None = None
    predicted: MemoryEstimate | None = None
    measured: Any = field(default=None, compare=False, repr=False)
    measured_bytes: int | None = None
    unplanned_bytes: int | None = None
    overhead: float | None = None

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
                "loops": [{"op": loop.op, "runs": [_run_to_json(run) for run in loop.runs]} for loop in self.loops],
                **{name: getattr(self, name) for name in _RECORD},
                "predicted": None if self.predicted is None else asdict(self.predicted),
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
            loops = tuple(Loop(loop["op"], tuple(map(_run_from_json, loop["runs"]))) for loop in raw["loops"])
            predicted = None if raw["predicted"] is None else MemoryEstimate(**raw["predicted"])
            record = {name: raw[name] for name in _RECORD}
            notes = tuple(raw["notes"])
            return cls(
                regions, raw["fingerprint"], bool(raw["prevent_cse"]), notes, loops, predicted=predicted, **record
            )
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
        for loop in self.loops:
            for run in loop.runs:
                each = sum(graph.values[i].bytes for i in run.actions)
                kept += each * run.count if not run.segments else 0
        lines = [
            f"Plan for {self.fingerprint}: {len(list(_walk(self.regions)))} regions, {format_bytes(kept)} kept in them"
        ]
        lines += _describe(self.regions, graph, "")
        lines += _describe_loops(self.loops, graph)
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [f"Plan for {self.fingerprint}{'' if self.target is None else f' on {self.target}'}"]
        figures = {
            "budget": self.budget,
            "predicted": None if self.predicted is None else self.predicted.peak_bytes,
            "compiled": self.measured_bytes,
            "without a plan": self.unplanned_bytes,
        }
        known = [f"{name} {format_bytes(figure)}" for name, figure in figures.items() if figure is not None]
        if self.overhead is not None:
            known.append(f"recomputation {self.overhead:.1%} of the step's time")
        lines += [f"  {', '.join(known)}"] if known else []
        for region, note in zip(self.regions, self.notes or ("",) * len(self.regions)):
            kept = f"keeps {len(region.actions)} values " if region.checkpoint else ""
            lines.append(f"  ops {region.start}..{region.stop}: {kept}{note}".rstrip())
        for loop in self.loops:
            runs = (
                f"{run.count} iterations{''.join(f' in {n}s' for n in run.segments)}{'' if run.checkpoint else ' as they stand'}"
                for run in loop.runs
            )
            lines.append(f"  scan at {loop.op}: {', then '.join(runs)}")
        return "\n".join(lines)


_RECORD = ("budget", "target", "measured_bytes", "unplanned_bytes", "overhead")


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


def _run_to_json(run: Run) -> dict[str, Any]:
    return {
        "count": run.count,
        "segments": list(run.segments),
        "actions": {str(index): action.to_json() for index, action in sorted(run.actions.items())},
        "checkpoint": run.checkpoint,
    }


def _run_from_json(raw: dict[str, Any]) -> Run:
    actions = {int(index): action_from(a) for index, a in raw["actions"].items()}
    return Run(raw["count"], tuple(raw["segments"]), actions, bool(raw.get("checkpoint", True)))


def _region_to_json(region: Region) -> dict[str, Any]:
    return {
        "start": region.start,
        "stop": region.stop,
        "actions": {str(index): action.to_json() for index, action in sorted(region.actions.items())},
        "regions": [_region_to_json(inner) for inner in region.regions],
        "checkpoint": region.checkpoint,
        "tied": region.tied,
    }


def _region_from_json(raw: dict[str, Any]) -> Region:
    actions = {int(index): action_from(action) for index, action in raw["actions"].items()}
    inner = tuple(_region_from_json(inner) for inner in raw["regions"])
    return Region(raw["start"], raw["stop"], actions, inner, bool(raw["checkpoint"]), bool(raw["tied"]))


def _describe(regions: tuple[Region, ...], graph: Graph, indent: str) -> Iterator[str]:
    for region in regions:
        kept = [graph.values[index] for index in region.actions]
        total = format_bytes(sum(value.kept_bytes for value in kept))
        if not region.checkpoint:
            yield f"{indent}├─ ops {region.start}..{region.stop}  as they stand"
            continue
        yield f"{indent}├─ ops {region.start}..{region.stop}  keeps {len(kept)} of its values, {total}"
        for value in sorted(kept, key=lambda v: -v.kept_bytes)[:8]:
            yield f"{indent}│    {region.actions[value.index]!r:9} {_value_line(value)}"
        yield from _describe(region.regions, graph, indent + "│  ")


def _describe_loops(loops: tuple[Loop, ...], graph: Graph) -> Iterator[str]:
    for loop in loops:
        op = graph.ops[loop.op]
        yield f"├─ scan of {op.params['length']} iterations (operation {loop.op})  {op.source}"
        for run in loop.runs:
            segments = "".join(f", in segments of {length}" for length in run.segments)
            if not run.checkpoint:
                yield f"│  ├─ {run.count} iterations{segments}: as they stand"
                continue
            kept = [graph.values[index] for index in run.actions]
            each = format_bytes(sum(value.bytes for value in kept))
            yield f"│  ├─ {run.count} iterations{segments}: keeps its carry and {len(kept)} values of each, {each}"
            for value in sorted(kept, key=lambda v: -v.bytes)[:8]:
                yield f"│  │    {run.actions[value.index]!r:9} {_value_line(value)}"


def _value_line(value: Value) -> str:
    times = f" ×{value.repeats}" if value.repeats > 1 else ""
    return f"{value.label:24} {value.dtype}{list(value.shape)}{times} {format_bytes(value.kept_bytes)}  {value.source}"
