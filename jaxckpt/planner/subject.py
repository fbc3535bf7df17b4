"""A function as the planner sees it: what its step does with it, its graph, and the model of each body in it that may
be planned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxckpt._errors import ArgumentError, InWords, JaxckptError
from jaxckpt.actions import Action
from jaxckpt.core import lift, purity
from jaxckpt.core.bare import bare, has_checkpoints
from jaxckpt.core.constants import INNERMOST_SHARE
from jaxckpt.core.graph import Graph
from jaxckpt.core.lift import refuse_module, trace
from jaxckpt.core.shown import Progress
from jaxckpt.core.units import counted
from jaxckpt.memory.gradient import PLAIN, STEP_TOO, StepMaker, came_for, made, not_a_loss, suited
from jaxckpt.memory.targets import Target, target_of
from jaxckpt.planner.collectives import NOTHING, Sent
from jaxckpt.planner.context import Context, is_quick
from jaxckpt.planner.cycles import Cycles
from jaxckpt.planner.inside import Inside, innermost, whole
from jaxckpt.planner.measured import Asked
from jaxckpt.planner.model import Model, build
from jaxckpt.planner.observe import Seen, observe
from jaxckpt.planner.settings import PlanSettings
from jaxckpt.planner.shards import WHOLE, Shards, device_bytes, is_sharded, laid_out, read

logger = logging.getLogger("jaxckpt")


@dataclass(frozen=True)
class Bodies:
    """The bodies of a function that may be planned.

    Attributes:
      first: the one that is planned.
      other: where no plan of `first` fits: the whole function, or a `jax.shard_map` in it that does not hold most of
        it. None where there is none.
    """

    first: Inside
    other: Inside | None


class Subject:
    """A function, observed in its step and traced.

    Args:
      fun: the function as it was given.
      args: of the step.
      settings: what plans are asked for.
      progress: told before each piece of work that takes time.
      cycles: what the compiler has said already, where `settings.costs` is "compiler".
      of: the same function without tiles, if it was analysed: equal stretches are not analysed again.

    Attributes:
      asked: what plans are asked for, with the target and the compiler's cycles looked up.
      graph: the function as traced.

    Raises:
      ArgumentError: the arguments do not suit the function, or a setting does not suit the target.
      NotDifferentiableError: the step does not differentiate the function.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        settings: PlanSettings,
        progress: Progress | None,
        cycles: Cycles | None,
        of: Subject | None = None,
    ) -> None:
        if not callable(fun):
            hint = "The loss comes first: plan(loss, *args, ...)." if any(map(callable, args)) else ""
            raise ArgumentError("fun", "a function", fun, hint)
        refuse_module(fun, "a function of the parameters")
        self.settings, self.progress = settings, progress
        self.stretches: dict[tuple[Action, ...], dict[Any, Any]] = {} if of is None else of.stretches
        target = target_of(settings.target)
        host_bytes = settings.check_target(target)
        step, seen = _observed(fun, args, settings)
        if not settings.respect_checkpoints:
            if not seen.run(lambda: has_checkpoints(seen.fun, seen.args, seen.kwargs)):
                logger.warning("%s has no checkpoints: respect_checkpoints=False changes nothing", lift.title(fun))
            seen = replace(seen, fun=bare(seen.fun))
        self.seen, self.graph = seen, seen.run(lambda: trace(seen.fun, *seen.args, **seen.kwargs))
        purity.refuse_refs(fun, self.graph)
        if seen.results_over > 1 and not is_sharded(laid_out(args, seen.shardings)):
            logger.warning(
                "the step lays its results out over %d devices, and no argument says how it lies: all of them are "
                "planned whole on each device. jax.eval_shape drops shardings: give jax.ShapeDtypeStruct(shape, dtype, "
                "sharding=...), or in_shardings to the step's jax.jit.",
                seen.results_over,
            )
        if settings.costs == "compiler" and cycles is None:
            cycles = Cycles(target, settings.cache)
        self.asked = Asked(
            fun,
            laid_out(args, seen.shardings),
            step,
            target,
            settings.respect_checkpoints,
            settings.cache,
            settings.costs,
            cycles,
            host_bytes,
            settings.wanted,
        )

    def bodies(self) -> Bodies:
        """Returns the bodies that may be planned.

        Raises:
          EffectsError: the one that is planned works on a `jax.Ref`.
        """
        graph, seen = self.graph, self.seen
        arguments = [value.index for value in graph.values if value.kind == "argument"]
        differentiated = [arguments[place] for place in seen.differentiated]
        all_of_it = whole(graph, differentiated, [graph.body.outputs[place] for place in seen.results], seen.mapped)
        inner, smaller = (innermost(all_of_it, share) for share in (INNERMOST_SHARE, 0.0))
        if inner.address:
            purity.refuse_refs(self.asked.fun, inner.graph)
            return Bodies(inner, all_of_it)
        enters = smaller.address and self.settings.costs == "roofline" and purity.ref_in(smaller.graph) is None
        return Bodies(inner, smaller if enters else None)

    def shards(self, inside: Inside) -> Shards:
        """Returns how the compiler shards a body's values; all of them whole where a device holds all of it. Compiles
        the function where its arguments are sharded.

        Raises:
          ArgumentError: the costs are of stretches that are run or compiled for one device.
        """
        asked, costs = self.asked, self.settings.costs
        if inside.mapped:  # its bytes are those of one device
            if costs != "roofline":
                rule, hint = "'roofline' for a function inside of jax.shard_map", "A part of it cannot be run alone."
                raise ArgumentError("costs", rule, costs, hint)
            return WHOLE
        if not is_sharded(asked.args):
            return WHOLE
        if asked.cycles is not None:
            rule, hint = "'roofline' for sharded arguments", "Stretches are compiled for one device."
            raise ArgumentError("costs", rule, costs, hint)
        if self.progress is not None:
            self.progress(0, 1, "reading how the compiler shards")
        leaves = lift.leaves(asked.fun, asked.args)
        return read(inside.graph, leaves, jax.tree.leaves((self.seen.args, self.seen.kwargs)), asked.target)

    def model(
        self,
        inside: Inside,
        keeping: tuple[Action, ...],
        shards: Shards,
        sent: Sent = NOTHING,
        *,
        finer: bool = False,
        calls: tuple[tuple[int, int], ...] = (),
    ) -> tuple[Graph, Model]:
        """Returns the function, with the bytes that one device holds, and the model of a body of it.

        Args:
          inside: the body.
          keeping: the actions that may keep a value.
          shards: of the body: see `shards`.
          sent: what operations wait for other devices.
          finer, calls: as of `Context`.
        """
        inside = replace(inside, graph=shards.applied(inside.graph))
        alike = shards == WHOLE and sent == NOTHING and not inside.mapped  # equal stretches take the same time
        context = Context(
            self.asked.target,
            replace(shards, sent=sent),
            self.settings.costs == "measured",
            self.asked.cycles,
            keeping,
            self.settings.reverse_only and not self.seen.again,
            is_quick(self.graph) and not is_sharded(self.asked.args),
            finer,
            calls,
            stretches=self.stretches.setdefault(keeping, {}) if alike else {},
        )
        found = inside.run(lambda: build(inside, context, self.progress))
        return shards.applied(self.graph), replace(
            found,
            fingerprint=self.graph.fingerprint,
            address=inside.address,
            outside_bytes=inside.outside_bytes,
            mapped=inside.mapped,
        )


def seen_by_planner(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    step: StepMaker,
    target: Target | str | None,
    respect_checkpoints: bool = True,
) -> tuple[Graph, int]:
    """Returns the graph of a function as its step calls it, with the bytes that one device holds, and the bytes of the
    step's arguments there; arguments as of `jaxckpt.plan`.
    """
    settings = PlanSettings(target=target, step=step, respect_checkpoints=respect_checkpoints)
    subject = Subject(fun, args, settings, None, None)
    return subject.shards(subject.bodies().first).applied(subject.graph), device_bytes(subject.asked.args)


def _observed(fun: Callable[..., Any], args: tuple[Any, ...], settings: PlanSettings) -> tuple[StepMaker, Seen]:
    """Returns the step that suits the arguments, and what it does with the function; says which argument is wrong where
    it cannot be traced.
    """
    if not args:
        raise ArgumentError("args", "the arguments of the step, arrays or shapes, with at least one", args)
    plain = settings.step in PLAIN
    one = len(args) == 1 and isinstance(args[0], (tuple, list)) and not lift.accepts(fun, args)
    if plain and one and lift.accepts(fun, tuple(args[0])):
        rule = "the arguments of the function, one by one"
        raise ArgumentError(
            "args", rule, InWords(f"one {type(args[0]).__name__}"), "Write plan(fun, *args, budget=...)."
        )
    made(settings.step, fun, args)
    step = suited(settings.step, fun, args)
    try:
        return step, observe(fun, step, args)
    except TypeError as error:
        if plain and not lift.accepts(fun, args):  # asked when it fails: what is lifted takes more than it says
            rule = f"the arguments of the function, {lift.signature_of(fun)}"
            raise ArgumentError("args", rule, InWords(counted(len(args), "argument")), STEP_TOO) from error
        if plain and (wrong := not_a_loss(lift.title(fun), fun, args)) is not None:
            raise wrong from error
        error.add_note(came_for(settings.step, fun, args, error))
        raise
    except JaxckptError:
        raise
    except Exception as error:
        error.add_note(came_for(settings.step, fun, args, error))
        raise
