"""Plan: what is to be kept of a function, where; PlanReport: what was predicted, compiled and found of it.

A plan is a recipe: two plans that do the same are equal, whatever is known of them. Its report is saved and loaded with
it.
"""

from __future__ import annotations

import functools
import hashlib
import html
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, PlanMismatchError, refuse_call
from jaxckpt.actions import Action, action_from
from jaxckpt.core import outline, shown
from jaxckpt.core.again import with_recomputed
from jaxckpt.core.bare import bare
from jaxckpt.core.emit import emit
from jaxckpt.core.emit import run as run_emitted
from jaxckpt.core.files import read_whole, write_whole
from jaxckpt.core.graph import Graph, trace
from jaxckpt.core.lift import transformed
from jaxckpt.core.plan_checks import check_loops, check_regions
from jaxckpt.core.regions import (
    Loop,
    RecomputedStretch,
    Region,
    TiledStretch,
    all_of,
    by_body,
    check_flag,
    check_order,
    set_fields,
)
from jaxckpt.core.schedule import schedule_from
from jaxckpt.core.shared_traces import traced_once
from jaxckpt.core.tiling.stretches import with_tiles
from jaxckpt.core.units import added, format_bytes

FORMAT = 12
"""Version of the JSON form."""
READ_FORMATS = (7, 8, 9, 10, 11, FORMAT)
"""Versions that are read. Reports of format 7 have no figures of host memory; plans of formats 7 and 8 have no
`pools_apart`; tiled stretches of formats 7 to 9 have no `parts`; plans of formats 7 to 10 have no `arguments`;
those of formats 7 to 11 have no `recomputed`."""


@dataclass(frozen=True)
class MemoryEstimate:
    """What a plan was predicted to need, before its last compilation.

    Attributes:
      peak_bytes: of the whole step, arguments and outputs and all.
      argument_bytes: of the step's arguments.
      kept_bytes: kept from the forward to the backward pass.
      work_bytes: the rest: gradients, and what the stretch that needs most needs while it runs.
    """

    peak_bytes: int
    argument_bytes: int
    kept_bytes: int
    work_bytes: int


@dataclass(frozen=True)
class Plan:
    """What becomes of every intermediate value of one function: see `Region`. What lies outside all regions is left to
    JAX.

    Attributes:
      regions: those of one body disjoint and in order.
      fingerprint: that of the graph that the plan was made for.
      prevent_cse: whether the compiler is kept from merging the recomputation with the forward pass; False is right
        inside a `lax.scan` only.
      notes: a line for each region, for people; they do not count when plans are compared.
      loops: how scans of the function are run that are not left to JAX.
      respect_checkpoints: whether the function keeps the checkpoints that are in it. False: the plan is one for
        `jaxckpt.without_checkpoints` of the function.
      tiles: stretches that run tile by tile, the first round's first, and of a round the last one first. Regions and
        loops are of the function that has all of them in tiles.
      recomputed: stretches that the function itself runs again, where it takes a gradient. Regions and loops are of
        the function that does. There are none where there are tiles.
      tiled_fingerprint: that of the graph of the function with its tiles, or with what it runs again; "" where there is
        neither.
      pools_apart: whether maxima over windows, which make a gradient out of zeros, are written such that the
        compiler does not store these from the forward pass on: see `jaxckpt.core.pooling`. Those in loops and in the
        function's own checkpoints stay as they are. Changes no value.
      arguments: what the function takes, "name: type[shape]" for each array, as of a plan of the planner; for messages.
      report: what is known of it: see `PlanReport`. None for a plan that no planner made, such as a policy's. Plans are
        equal, and have one hash, whatever their reports, notes and arguments say.
    """

    regions: tuple[Region, ...]
    fingerprint: str
    prevent_cse: bool = True
    notes: tuple[str, ...] = field(default=(), compare=False)
    loops: tuple[Loop, ...] = ()
    respect_checkpoints: bool = True
    report: PlanReport | None = field(default=None, compare=False, repr=False)
    tiles: tuple[TiledStretch, ...] = ()
    tiled_fingerprint: str = ""
    pools_apart: bool = False
    arguments: tuple[str, ...] = field(default=(), compare=False, repr=False)
    recomputed: tuple[RecomputedStretch, ...] = ()

    def __post_init__(self) -> None:
        set_fields(self, regions=all_of(self.regions, Region, "regions"), loops=all_of(self.loops, Loop, "loops"))
        set_fields(self, tiles=all_of(self.tiles, TiledStretch, "tiles"))
        set_fields(self, recomputed=all_of(self.recomputed, RecomputedStretch, "recomputed"))
        if self.tiles and self.recomputed:
            raise PlanMismatchError(
                f"a plan must have tiles or stretches that run again; got {self.tiles!r:.100} and "
                f"{self.recomputed!r:.100}. Plan anew."
            )
        if self.tiled_fingerprint and not (self.tiles or self.recomputed):
            raise PlanMismatchError(
                "tiled_fingerprint must be empty in a plan without tiles and without stretches that run again; got "
                f"{self.tiled_fingerprint!r:.80}. Plan anew."
            )
        rounds = [tile.round for tile in self.tiles]
        if rounds != sorted(rounds) or not isinstance(self.tiled_fingerprint, str):
            raise PlanMismatchError(f"tiles must be in the order of their rounds; got {self.tiles!r:.200}. Plan anew.")
        set_fields(self, notes=all_of(self.notes, str, "notes"))
        set_fields(self, arguments=all_of(self.arguments, str, "arguments"))
        check_flag(self.prevent_cse, "prevent_cse")
        check_flag(self.respect_checkpoints, "respect_checkpoints")
        check_flag(self.pools_apart, "pools_apart")
        for regions in by_body(self.regions).values():
            check_order(regions, 0, None)
        if self.report is not None and not isinstance(self.report, PlanReport):
            raise PlanMismatchError(f"report must be a PlanReport or None; got {self.report!r:.80}.")
        if self.report is not None and self.report.plan != self:
            set_fields(self, report=None)  # made with `dataclasses.replace`: what was found is of another recipe

    @property
    def budget(self) -> int | None:
        """Bytes that the planner was given; None without a report, as all that is read from it."""
        return None if self.report is None else self.report.budget

    @property
    def target(self) -> str | None:
        """Name of the target that the plan was made for."""
        return None if self.report is None else self.report.target

    @property
    def predicted(self) -> MemoryEstimate | None:
        """What the planner expected of the step."""
        return None if self.report is None else self.report.predicted

    @property
    def measured(self) -> Any:
        """What the compiler said of the step, a `MemoryReport`; None where nobody asked, and in a plan that was
        loaded.
        """
        return None if self.report is None else self.report.measured

    @property
    def measured_bytes(self) -> int | None:
        """The step's compiled peak, also in a plan that was loaded."""
        return None if self.report is None else self.report.measured_bytes

    @property
    def unplanned_bytes(self) -> int | None:
        """The step's compiled peak without the plan, where it was looked at."""
        return None if self.report is None else self.report.unplanned_bytes

    @property
    def overhead(self) -> float | None:
        """The seconds that the plan adds to a step, as a share of the step's seconds without a plan: recomputation, and
        transfers that nothing hides. `report.costs` says whose seconds they are.
        """
        return None if self.report is None else self.report.overhead

    def apply(self, fun: Callable[..., Any], *others: Any) -> Callable[..., Any]:
        """Returns a function with `fun`'s values that keeps and recomputes what the plan says.

        Call it in a jitted step: outside of `jax.jit` it is traced at every call. A function, or shapes, that the plan
        was not made for raise `PlanMismatchError`. Modules of nnx among its arguments change as `fun` changes them,
        once a call.
        """
        refuse_call(others, "fun", "plan.apply(fun)(*args)")
        if not callable(fun):
            raise ArgumentError("fun", "a function, the one that the plan was made for", fun)
        return transformed(self._applied, fun)

    def _applied(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of arrays under the plan."""
        source = fun if self.respect_checkpoints else bare(fun)

        @functools.wraps(fun)
        def planned(*args: Any, **kwargs: Any) -> Any:
            with _compat.working_checkpoints():
                graph = traced_once(lambda: trace(source, *args, **kwargs), fun, args, kwargs, self.fingerprint)
                graph = self._checked(graph, args, kwargs)
                emitted = emit(graph, self.regions, self.prevent_cse, self.loops, self.pools_apart, whole=True)
                return run_emitted(graph, emitted, args, kwargs)

        return planned

    def check(self, graph: Graph) -> None:
        """Raises `PlanMismatchError` where the plan was not made for this graph, or names what is not in it.

        Regions must lie within the graph, the values that they keep be made by their operations and be such as can be
        kept; loops must be scans that their schedules can run; tiles must be of its operations.
        """
        if not isinstance(graph, Graph):
            raise ArgumentError("graph", "what jaxckpt.trace(fun, *args) returned", graph)
        self.tiled_graph(graph)

    def tiled_graph(self, graph: Graph) -> Graph:
        """Returns the graph that regions and loops are of, from that of the function; both are checked: see `check`."""
        if not self.tiles and not self.recomputed:
            return self._checked(graph, (), {})
        avals = [var.aval for var in graph.body.jaxpr.invars]
        weak = [bool(getattr(aval, "weak_type", False)) for aval in avals]
        leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=w) for aval, w in zip(avals, weak)]
        return self._checked(graph, *jax.tree.unflatten(graph.in_tree, leaves))

    def _checked(self, graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
        """Returns the graph of the function in its tiles, or with what it runs again; args, kwargs: of the function, or
        arrays like them.
        """
        self._check_made_for(graph)
        found = with_recomputed(with_tiles(graph, self.tiles, args, kwargs), self.recomputed, args, kwargs)
        if found is not graph and self.tiled_fingerprint not in ("", found.fingerprint):
            kind = "tiled" if self.tiles else "recomputing"
            raise PlanMismatchError(
                f"The plan's regions are of the {kind} program {self.tiled_fingerprint}, this one is "
                f"{found.fingerprint}: it was made by another version of jax or jaxckpt. Plan anew."
            )
        check_regions(self.regions, found)
        check_loops(self.loops, found)
        return found

    def _check_made_for(self, graph: Graph) -> None:
        if graph.fingerprint != self.fingerprint:
            stop = max((region.stop for region in self.regions if not region.body), default=0)
            size = (
                f"; it covers operations up to {stop}, the function has {len(graph.ops)}"
                if stop > len(graph.ops)
                else ""
            )
            came = arguments_of(graph)
            program = (
                "the program itself differs: its code was edited; or a static argument, training or evaluation mode, a "
                "mesh, or a string or number selects another one; or it is another function, such as the training step "
                "in the place of its loss"
            )
            if not self.arguments:
                shapes = [each.rpartition(": ")[2] for each in came]
                what = f"Arguments that came: {_some(shapes)}. If the plan was made for these, {program}."
            elif changed := _changed(self.arguments, came):
                what = f"Other arguments came: {_some(changed)}."
                if len(came) != len(self.arguments):
                    what += " If this is the training step: a plan is for its loss, step_of(plan.apply(loss))."
            else:
                what = f"The arguments are those of the plan, so {program}."
            raise PlanMismatchError(
                f"The plan was made for another function, or other shapes: it fits the program {self.fingerprint}, "
                f"this one is {graph.fingerprint}{size}. {what} Make a plan for this function."
            )

    def to_json(self) -> str:
        """Returns the plan as JSON text; `Plan.from_json` reads it back."""
        content = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "prevent_cse": self.prevent_cse,
            "notes": list(self.notes),
            "respect_checkpoints": self.respect_checkpoints,
            "regions": [_region_to_json(region) for region in self.regions],
            "loops": [{"op": loop.op, "schedule": loop.schedule.to_json(), "body": loop.body} for loop in self.loops],
            "tiles": [asdict(tile) for tile in self.tiles],
            "recomputed": [asdict(each) for each in self.recomputed],
            "tiled_fingerprint": self.tiled_fingerprint,
            "pools_apart": self.pools_apart,
            "arguments": list(self.arguments),
            "report": None if self.report is None else _report_to_json(self.report),
        }
        return sealed(content)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that `to_json` wrote.

        Raises:
          PlanMismatchError: the text is cut short, was edited, or is from another version.
          ArgumentError: it is no text.
        """
        if not isinstance(text, str):
            raise ArgumentError("text", "a string that Plan.to_json returned", text, "Plan.load(path) reads a file.")
        try:
            raw = json.loads(text) if text.lstrip().startswith("{") else None
            if not isinstance(raw, dict) or "format" not in raw:
                raise PlanMismatchError("The file must be one that Plan.save wrote; it is something else. Plan anew.")
            if raw["format"] not in READ_FORMATS:
                read = " and ".join(map(str, READ_FORMATS))
                raise PlanMismatchError(
                    f"The plan is of format {raw['format']!r:.40}; this version reads format {read}. Plan anew."
                )
            if raw.pop("digest", None) != _digest(raw):
                raise PlanMismatchError(
                    "The plan must be as it was written; its digest says that it was edited. Plan anew."
                )
            regions = tuple(map(_region_from_json, raw["regions"]))
            loops = tuple(Loop(loop["op"], schedule_from(loop["schedule"]), loop["body"]) for loop in raw["loops"])
            (fingerprint,) = _typed({"fingerprint": raw["fingerprint"]}, {"fingerprint": str}).values()
            plan = cls(regions, fingerprint, raw["prevent_cse"], raw["notes"], loops, raw["respect_checkpoints"])
            tiles = tuple(TiledStretch(**tile) for tile in raw["tiles"])
            apart = raw.get("pools_apart", False)  # formats before 9 have none
            plan = replace(
                plan,
                tiles=tiles,
                tiled_fingerprint=raw["tiled_fingerprint"],
                pools_apart=apart,
                arguments=raw.get("arguments", ()),
                recomputed=tuple(RecomputedStretch(**each) for each in raw.get("recomputed", ())),
            )
            return plan if raw["report"] is None else _report_from_json(raw["report"], plan).plan
        except PlanMismatchError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanMismatchError(
                f"The plan does not parse ({repr(error)[:200]}): the file is cut short or was edited. Plan anew."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, whole or not at all.

        Raises:
          ArgumentError: the folder does not exist, or `path` is a folder, a device, a pipe or a socket.
          OSError: the file cannot be written.
        """
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote.

        Raises:
          PlanMismatchError: the file is not as `save` wrote it, or is a device, a pipe or a socket.
          OSError: there is no such file, it is a folder, or it cannot be read.
        """
        try:
            return cls.from_json(read_whole(path).decode())
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{path}: {error}") from error
        except (ArgumentError, UnicodeDecodeError) as error:
            raise PlanMismatchError(
                f"A plan must be a text file that Plan.save wrote; {path} is none. Plan anew."
            ) from error

    def describe(self, graph: Graph | None = None) -> str:
        """Returns the plan as a tree in the order in which it runs: what is kept of each part, with bytes, shape and
        source line of every kept value, and what runs again. Parts that repeat are told once, with their number.

        Args:
          graph: `jaxckpt.trace(fun, *args)` of the function that the plan was made for. A plan that was just made does
            not need it; then bytes are those of one device, and shapes those of the function.

        Raises:
          PlanMismatchError: the graph is another function's.
          ArgumentError: it is none, and the plan is from a file or was written by hand.
        """
        if graph is None and self.report is not None and self.report.tree:
            return self.report.tree
        if not isinstance(graph, Graph):
            raise ArgumentError("graph", "what jaxckpt.trace(fun, *args) returns", graph)
        return shown.text_of(self, graph)

    def tile_lines(self, graph: Graph) -> list[str]:
        """Returns a line for each tiled stretch, with its value for those of the function's own graph, and for each
        stretch that runs again.
        """
        tiles = [outline.tile_line(tile, None if tile.round else graph.values[tile.value]) for tile in self.tiles]
        return [*tiles, *map(outline.recomputed_line, self.recomputed)]

    @property
    def title(self) -> str:
        """What the plan is for, in words: the target, if it is known, and the traced program."""
        return f"Plan{'' if self.target is None else f' on {self.target}'} for the program {self.fingerprint}"

    def __str__(self) -> str:
        lines = [self.title]
        figures = {
            "budget": self.budget,
            "predicted": None if self.predicted is None else self.predicted.peak_bytes,
            "compiled": self.measured_bytes,
            "without a plan": self.unplanned_bytes,
        }
        known = [f"{name} {format_bytes(figure)}" for name, figure in figures.items() if figure is not None]
        if self.report is not None and self.overhead is not None:
            known.append(f"added time {self.report.seconds_by} {self.overhead:+.1%}")
        lines += [f"  {', '.join(known)}"] if known else []
        lines += [] if self.report is None or not self.report.host_bytes else [f"  {self.report.host_line}"]
        lines += (
            []
            if self.report is None or not self.report.options_line
            else [f"  compile with {self.report.options_line}"]
        )
        lines += [] if self.regions else [f"  {note}" for note in self.notes]
        notes = itertools.chain(self.notes, itertools.repeat(""))
        for region, note in zip(self.regions, notes):
            lines.append(f"  {outline.region_line(region)} {note}".rstrip())
        lines += [f"  {outline.tile_line(tile)}" for tile in self.tiles]
        lines += [f"  {outline.recomputed_line(each)}" for each in self.recomputed]
        lines += [f"  {outline.loop_line(loop)}" for loop in self.loops]
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws what is known of the plan: see `PlanReport.plot`. Raises ArgumentError for a plan without a report."""
        self._reported().plot(path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page of the plan: see `PlanReport.to_html`. Raises ArgumentError for a plan without a report."""
        self._reported().to_html(path)

    def _reported(self) -> PlanReport:
        if self.report is None:
            hint = "A plan that is made or changed by hand has none."
            raise ArgumentError("plan", "one with a report, as jaxckpt.plan makes it", self, hint)
        return self.report

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>" if self.report is None else self.report._repr_html_()


@dataclass(frozen=True)
class PlanReport:
    """What was predicted, compiled and found of a plan: prints as a table, shows as one in a notebook, draws itself.

    `report.plan.report` is the report, so what is planned can be handed on as either. Where a figure is not known, it
    is None.

    Attributes:
      plan: the recipe.
      budget: bytes that the planner was given.
      asked: the budget as it was asked for, such as "60%", where that is known.
      target: name of the target that was planned for.
      predicted: what the planner expected of the step, before the plan's own compilation.
      measured: what the compiler said of the step, a `MemoryReport`; it is not saved.
      unplanned: what the compiler said of the step without the plan, where it was compiled; it is not saved.
      measured_bytes: the step's compiled peak.
      donated_bytes: bytes of donated arguments that the compiled step writes its results to.
      donatable_bytes: bytes of arguments that the step returns the next values of, and does not donate: with
        `donate_argnums` in its `jax.jit` they need no second place. Not known of steps on several devices.
      unplanned_bytes: the step's compiled peak without the plan.
      overhead: `slowdown`; of a plan that was not compiled, the seconds of recomputation as the planner's model has
        them, over those of the step.
      flops: FLOPs of the planned step as traced, recomputation counted; with sharded arguments, of all devices.
      seconds: of the planned step as traced, by what `costs` says; of one device.
      costs: whose seconds they are: "roofline", of the target's rates, or "compiler", of its compiler's cost model; of
        a plan that was not compiled also "measured", on the local device.
      unplanned_flops, unplanned_seconds: the same of the step without the plan.
      host_bytes: in host memory, as the planner's model has them: of all that the plan moves there.
      measured_host_bytes: in host memory, as the compiler says.
      host_seconds: of the link to the host, both ways, by the target's rates. Other work hides them as far as it goes,
        but for `host_waits`: `seconds` counts what it does not hide.
      host_waits: seconds of `host_seconds` that the step waits for the link, because the target's compiler does not
        run such transfers beside other work: those of unrolled layers on a GPU.
      host_share: how full the link is: `host_seconds` over the seconds of the planned step.
      compiler_options: (name, value) of the options of XLA without which the target's compiler undoes checkpoints, as
        `jaxckpt.compiler_options` gives them; empty for most targets.
      tree: the plan as `Plan.describe` tells it, with bytes of one device; "" of a plan from a file.
      times: median seconds of (the planned step, the step without the plan), where they were run.
      timed_on: name of the backend that ran them.
    """

    plan: Plan
    budget: int | None = None
    asked: int | str | None = None
    target: str | None = None
    predicted: MemoryEstimate | None = None
    measured: Any = field(default=None, compare=False, repr=False)
    unplanned: Any = field(default=None, compare=False, repr=False)
    measured_bytes: int | None = None
    donated_bytes: int | None = None
    donatable_bytes: int | None = None
    unplanned_bytes: int | None = None
    overhead: float | None = None
    flops: int | None = None
    seconds: float | None = None
    unplanned_flops: int | None = None
    unplanned_seconds: float | None = None
    times: tuple[float, float] | None = None
    timed_on: str | None = None
    host_bytes: int | None = None
    measured_host_bytes: int | None = None
    host_seconds: float | None = None
    host_waits: float | None = None
    host_share: float | None = None
    costs: str = "roofline"
    compiler_options: tuple[tuple[str, str], ...] = ()
    tree: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.measured is not None:
            set_fields(self, donated_bytes=self.measured.alias_bytes)
        set_fields(self, plan=replace(self.plan, report=self))

    @property
    def peak_bytes(self) -> int | None:
        """The step's compiled peak."""
        return self.measured_bytes

    @property
    def predicted_bytes(self) -> int | None:
        """The peak as the planner predicted it before it compiled this plan."""
        return None if self.predicted is None else self.predicted.peak_bytes

    @property
    def kept_bytes(self) -> int | None:
        """Bytes kept from the forward to the backward pass, as the planner predicted them."""
        return None if self.predicted is None else self.predicted.kept_bytes

    @property
    def prediction_error(self) -> float | None:
        """Predicted over compiled peak, less 1: positive where the prediction says more."""
        if not self.measured_bytes or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def recompute(self) -> float | None:
        """FLOPs that the plan adds, over those of the step without it."""
        return added(self.flops, self.unplanned_flops)

    @property
    def slowdown(self) -> float | None:
        """Seconds that the plan adds to the traced step, over those of the step without it; whose: `costs`."""
        return added(self.seconds, self.unplanned_seconds)

    @property
    def seconds_by(self) -> str:
        """Whose `seconds` are, in words."""
        return SECONDS_BY[self.costs]

    @property
    def host_line(self) -> str:
        """What the plan takes of the host, in words; "" where it takes nothing."""
        if not self.host_bytes:
            return ""
        size = self.host_bytes if self.measured_host_bytes is None else self.measured_host_bytes
        waits = ", and the step waits for it" if self.host_waits else ""
        return f"in host memory {format_bytes(size)}, its link {self.host_share or 0.0:.0%} full{waits}"

    @property
    def options_line(self) -> str:
        """What to compile the planned step with, in words; "" where the target's compiler needs no options, or the plan
        is empty.
        """
        if not self.compiler_options or not self.plan.regions:  # loops run again on their own
            return ""
        return "compiler_options=jaxckpt.compiler_options(), else the compiler may undo the plan"

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as plain values, without the plan: bytes, FLOPs, seconds, shares."""
        times = None
        if self.times is not None:
            times = {"planned": self.times[0], "as it is": self.times[1], "on": self.timed_on}
        return {
            "target": self.target,
            "compiler_options": dict(self.compiler_options),
            "plan": {
                "budget": self.asked if self.asked is not None else self.budget,
                "budget_bytes": self.budget,
                "fits": True,
                "why": "",
                "peak_bytes": self.peak_bytes,
                "predicted_bytes": self.predicted_bytes,
                "prediction_error": self.prediction_error,
                "flops": self.flops,
                "seconds": self.seconds,
                "donated_bytes": self.donated_bytes,
                "donatable_bytes": self.donatable_bytes,
                "host_bytes": self.measured_host_bytes,
                "predicted_host_bytes": self.host_bytes,
                "host_seconds": self.host_seconds,
                "host_waits": self.host_waits,
                "host_share": self.host_share,
            },
            "unplanned": {
                "name": "as it is",
                "peak_bytes": self.unplanned_bytes,
                "flops": self.unplanned_flops,
                "seconds": self.unplanned_seconds,
            },
            "costs": self.costs,
            "recompute": self.recompute,
            "overhead": self.slowdown if self.slowdown is not None else self.overhead,
            "times": times,
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the step's peaks against the budget to a file: .png, .svg or .pdf (extra: plot). Of a step that was
        compiled, also its live bytes over the schedule, over those of the step without the plan.
        """
        shown.save_picture(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained page (extra: plot): figures, peaks, live bytes of both steps, regions, and the
        largest buffers.
        """
        shown.save_page(self, path)

    def __str__(self) -> str:
        return shown.text_of(self)

    def _repr_html_(self) -> str:
        return shown.fragment_of(self)


SECONDS_BY = {
    "roofline": "by the target's rates",
    "compiler": "by the target's compiler",
    "measured": "by runs on this machine",
}
"""Costs -> whose seconds they are, in words."""


SHOWN_ARGUMENTS = 4, 4
"""Of many arguments, the numbers of the first and of the last ones that an error lists: the batch comes last."""


def arguments_of(graph: Graph) -> list[str]:
    """Returns what a program takes, each argument as "name: type[shape]"."""
    return [f"{value.label}: {value.dtype}{list(value.shape)}" for value in graph.values if value.kind == "argument"]


def _changed(made_for: Sequence[str], came: Sequence[str]) -> list[str]:
    """Returns the arguments that are others than the plan's, as text."""
    missing = "none"
    counts = [f"{len(came)} arrays (the plan's: {len(made_for)})"] if len(came) != len(made_for) else []
    ours, theirs = ({each.rpartition(": ")[0]: each for each in given} for given in (came, made_for))
    if 2 * len(ours.keys() & theirs.keys()) > len(came):  # most names are the same ones
        names = dict.fromkeys((*ours, *theirs))
        pairs = [(ours.get(name, f"{name}: {missing}"), theirs.get(name, f": {missing}")) for name in names]
    else:
        pairs = list(itertools.zip_longest(came, made_for, fillvalue=missing))
    others = [f"{ours} (the plan's: {theirs.rpartition(': ')[2]})" for ours, theirs in pairs if ours != theirs]
    return counts + others


def _some(arguments: Sequence[str]) -> str:
    """Returns a list of arguments as text, the first and the last ones of a long one."""
    first, last = SHOWN_ARGUMENTS
    if (more := len(arguments) - first - last) > 0:
        arguments = [*arguments[:first], f"{more} more", *arguments[-last:]]
    return ", ".join(arguments)


_ESTIMATE = dict.fromkeys(MemoryEstimate.__dataclass_fields__, int)


def sealed(content: Mapping[str, Any]) -> str:
    """Returns the text of a plan's file with its digest, which tells whether it was edited."""
    return json.dumps({**content, "digest": _digest(content)}, indent=1)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------- what a plan may hold


def _typed(raw: Mapping[Any, Any], kinds: Mapping[Any, Any]) -> dict[Any, Any]:
    for name, value in raw.items():
        if isinstance(value, bool) or not isinstance(value, kinds[name]):
            raise PlanMismatchError(f"{name} is of another type than Plan.save writes; got {value!r:.80}. Plan anew.")
    return dict(raw)


_REPORT: dict[str, Any] = {
    "budget": int, "asked": (int, str), "target": str, "measured_bytes": int, "donated_bytes": int, "unplanned_bytes": int,
    "donatable_bytes": int,
    "overhead": (int, float), "flops": int, "seconds": (int, float), "unplanned_flops": int,
    "unplanned_seconds": (int, float), "timed_on": str, "host_bytes": int, "measured_host_bytes": int,
    "host_seconds": (int, float), "host_waits": (int, float), "host_share": (int, float), "costs": str,
}  # fmt: skip


def _report_to_json(report: PlanReport) -> dict[str, Any]:
    return {
        **{name: getattr(report, name) for name in _REPORT},
        "times": None if report.times is None else list(report.times),
        "predicted": None if report.predicted is None else asdict(report.predicted),
        "compiler_options": dict(report.compiler_options),
    }


def _report_from_json(raw: dict[str, Any], plan: Plan) -> PlanReport:
    figures = _typed({name: raw[name] for name in _REPORT if raw.get(name) is not None}, _REPORT)
    if figures.get("costs", "roofline") not in SECONDS_BY:
        raise PlanMismatchError(
            f"costs must be one of {', '.join(SECONDS_BY)}; got {figures['costs']!r:.80}. Plan anew."
        )
    predicted = None if raw["predicted"] is None else MemoryEstimate(**_typed(raw["predicted"], _ESTIMATE))
    times = None
    if raw["times"] is not None:
        first, second = _typed(dict(enumerate(raw["times"])), dict.fromkeys(range(2), (int, float))).values()
        times = first, second
    options = raw.get("compiler_options", {})  # files of a version before do not say
    needed = tuple(_typed(options, dict.fromkeys(options, str)).items())
    return PlanReport(plan, predicted=predicted, times=times, compiler_options=needed, **figures)


def _region_to_json(region: Region) -> dict[str, Any]:
    return {
        "start": region.start,
        "stop": region.stop,
        "actions": {str(index): action.to_json() for index, action in sorted(region.actions.items())},
        "regions": [_region_to_json(inner) for inner in region.regions],
        "checkpoint": region.checkpoint,
        "tied": region.tied,
        "body": region.body,
    }


def _region_from_json(raw: dict[str, Any]) -> Region:
    inner = tuple(map(_region_from_json, raw["regions"]))
    actions = _actions_from_json(raw["actions"])
    return Region(raw["start"], raw["stop"], actions, inner, raw["checkpoint"], raw["tied"], raw["body"])


def _actions_from_json(raw: dict[str, Any]) -> dict[int, Action]:
    try:
        return {int(index): action_from(action) for index, action in raw.items()}
    except ArgumentError as error:
        raise PlanMismatchError(
            f"The actions of a plan must be of kinds that are defined; {error} Import what defines it, or plan anew."
        ) from error
