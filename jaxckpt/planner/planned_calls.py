"""A function with its plans: one for each signature that it is called with, made once, whichever thread calls first.

What is found of a call is a jaxpr with the plan's checkpoints in it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import InfeasibleBudgetError, JaxckptError
from jaxckpt.core import leaves, lift
from jaxckpt.core.graph import aval_bytes
from jaxckpt.core.plan import Plan
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.gradient import suited
from jaxckpt.memory.targets import target_of
from jaxckpt.planner import calls, problems
from jaxckpt.planner.budget import DEVICE, budget_bytes, normal, resident_bytes
from jaxckpt.planner.calls import Call
from jaxckpt.planner.measured import step_peak
from jaxckpt.planner.stored_plans import AutoSettings, PlanFile, peak_of
from jaxckpt.planner.watch import watch_here

logger = logging.getLogger("jaxckpt")


@dataclass(frozen=True, eq=False)
class _Planned:
    """A plan and the function as it is under the plan: a jaxpr of its array leaves. None where it closes over what is
    being traced.

    What the jaxpr returns is of the structure `out_tree`; where the call has objects, `results` says what it is: see
    `lift.Lifted.results`.
    """

    plan: Plan
    jaxpr: Any = None
    out_tree: Any = None
    results: Any = None

    def finish(self, call: Call, out: list[Any]) -> Any:
        """Returns the result of a call, of what the jaxpr returned."""
        out = [leaves.array(leaf) for leaf in out]
        if call.taken is None:
            return jax.tree.unflatten(self.out_tree, out)
        assert call.taken.lifted is not None
        call.taken.lifted.results = self.results
        return call.taken.finish(out)


class PlannedCalls:
    """A function with its plans. Threads that call with one signature plan it once; other signatures do not wait."""

    def __init__(self, fun: Callable[..., Any], settings: AutoSettings, folder: pathlib.Path | None) -> None:
        self.fun, self.settings, self.folder = fun, settings, folder
        self.signature = lift.signature_of(fun)
        self.lock = threading.Lock()
        self.here = threading.local()
        self.valued: set[Any] = set()  # keys of calls with numbers whose values the function needs
        self.ahead: dict[Any, Any] = {}  # key without shardings -> key with them, (args, kwargs) that `plan` was given
        self.peaks: dict[Any, int] = {}  # key -> bytes of the last plan's step
        self.caps: dict[Any, int] = {}  # key -> the most bytes since a step ran out of memory
        self.given_up: set[Any] = set()  # keys whose stored plan is one that was tried in vain

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the function's value, by its plan."""
        if getattr(self.here, "busy", False):  # the function calls itself, or this is the planner's own trace of it
            return self.fun(*args, **kwargs)
        call, planned = self._found(args, kwargs)
        if (watch := watch_here()) is not None:
            watch.used[self, call.key] = None
        if planned.jaxpr is None:
            with self._busy():
                closed = calls.closed(call, self.fun)
                return planned.plan.apply(closed.fun)(*closed.args)
        out = _compat.eval_jaxpr(
            _compat.open_jaxpr(planned.jaxpr), _compat.jaxpr_consts(planned.jaxpr), *map(leaves.array, call.arrays)
        )
        return planned.finish(call, out)

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Returns the plan; one for sharded arguments also serves calls of these shapes where no sharding can be
        seen.
        """
        call, planned = self._found(args, kwargs)
        unsharded = call.without_shardings()
        if unsharded is not None:
            made: Future[_Planned] = Future()
            made.set_result(planned)  # that of the call may be gone by now: another thread may have planned it again
            with self.lock:
                _plans_of(self).setdefault(unsharded.key, made)
                self.ahead.setdefault(unsharded.key, (call.key, lift.map_leaves(_shape, (args, kwargs))))
        return planned.plan

    def peak(self, key: Any) -> int | None:
        """Returns the bytes of the step under the plan for calls with this key, compiled or else predicted; None if
        nothing is known.
        """
        return self.peaks.get(self._source(key))

    def cap(self, key: Any, most: int | None) -> int | None:
        """Has calls with this key planned again within `most` bytes, whatever the budget allows; returns what was the
        most before. None is no such bound.
        """
        source = self._source(key)
        with self.lock:
            before = self.caps.pop(source, None)
            if most is not None:
                self.caps[source] = most
            elif before is not None:
                self.given_up.add(source)
            for each in {key, source}:
                _plans_of(self).pop(each, None)
        return before

    def _source(self, key: Any) -> Any:
        """Returns the key of the call that is planned for calls with this key: that with shardings, where there is
        one.
        """
        return self.ahead[key][0] if key in self.ahead else key

    def _parse(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, numbers: bool = True) -> Call:
        return calls.parse(args, kwargs, self.signature, self.settings.static_argnums, self.fun, numbers=numbers)

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, _Planned]:
        """Takes a call apart and returns what is planned for it: with numbers as arrays, or as they are if the function
        needs their values.
        """
        call = self._parse(args, kwargs)
        if call.key not in self.valued:
            try:
                return call, self._planned(call)
            except Exception as error:
                needed = lift.is_value_needed(error, args, kwargs) and any(map(lift.is_number, call.arrays))
                if isinstance(error, JaxckptError) or not needed:
                    raise
        valued = self._parse(args, kwargs, numbers=False)
        planned = self._planned(valued)
        self.valued.add(call.key)
        return valued, planned

    def _planned(self, call: Call) -> _Planned:
        plans = _plans_of(self)
        found = plans.get(call.key)
        if found is None:
            with self.lock:
                found = plans.get(call.key)
                if mine := found is None:
                    found = plans[call.key] = Future()
            if mine:
                self._fulfil(found, plans, call)
        return found.result()

    def _fulfil(self, promise: Future[_Planned], plans: dict[Any, Future[_Planned]], call: Call) -> None:
        try:
            key, (args, kwargs) = self.ahead.get(call.key, (call.key, ((), {})))
            promise.set_result(self._make(call if key == call.key else self._parse(args, kwargs), key))
        except BaseException as error:
            with self.lock:
                plans.pop(call.key, None)  # the next call tries again; those that wait hear of it
            promise.set_exception(error)

    def _make(self, call: Call, key: Any) -> _Planned:
        with self._busy():
            closed = calls.closed(call, self.fun)
            # Nothing here is to become part of a trace that the call may be in: planning compiles, and may run,
            # functions of its own.
            with _compat.clean_trace():
                plan = self._stored_or_new(call, key, closed)
                if closed.closes:
                    return _Planned(plan)
                if call.taken is None:
                    jaxpr, out = jax.make_jaxpr(plan.apply(closed.fun), return_shape=True)(*closed.shapes)
                    return _Planned(plan, jaxpr, jax.tree.structure(out))
                jaxpr = jax.make_jaxpr(plan.apply(call.taken.fun))(*calls.shapes_of(call))
                assert call.taken.lifted is not None
                return _Planned(plan, jaxpr, results=call.taken.lifted.results)

    def _stored_or_new(self, call: Call, key: Any, closed: calls.Closed) -> Plan:
        settings, fun, shapes = self.settings, closed.fun, closed.shapes
        budget = settings.budget
        if closed.bound:
            logger.warning(
                "%s is planned within axes that are mapped over, where nothing can be compiled: unverified", self.name
            )
            if normal(budget).endswith("%"):
                budget = budget_bytes(
                    budget, unplanned=lambda: self._estimate(fun, shapes), target=settings.planning.target, resident=0
                )
        if normal(budget) == DEVICE:
            here = self._resident(call, shapes)
            budget = budget_bytes(budget, unplanned=_unasked, target=settings.planning.target, resident=here)
        cap = self.caps.get(key)
        if cap is not None:  # so the last plan was within the budget: a share needs no look at the unplanned peak
            bytes_ = functools.partial(budget_bytes, budget, unplanned=_unasked, target=settings.planning.target)
            budget = cap if normal(budget).endswith("%") else min(bytes_(), cap)
        file = None if self.folder is None else PlanFile(self.folder, settings, self.name, fun, shapes)
        vain = key in self.given_up
        self.given_up.discard(key)
        stored = None if file is None or vain else file.load(budget, cap)
        if stored is not None:
            self.peaks[key] = peak_of(stored)
            return stored
        make = functools.partial(
            problems.plan,
            fun,
            *shapes,
            verify=settings.verify and not closed.bound,
            solver=settings.solver,
            progress=settings.progress,
            **settings.planning.keywords(),
        )
        plan = self._within(make, budget, 0 if cap is None else self.peaks.get(key, 0))
        self.peaks[key] = peak = peak_of(plan)
        logger.info("planned %s within %s: peak %s", self.name, format_bytes(plan.budget or 0), format_bytes(peak))
        if file is not None:
            file.save(plan)
        return plan

    def _within(self, make: Callable[..., Plan], budget: int | str, peak: int) -> Plan:
        """Returns the plan for a budget, or else the one that needs least, if that is less than the last one's peak; 0
        where there was none that is to be left.
        """
        while True:
            try:
                return make(budget=budget)
            except InfeasibleBudgetError as error:
                least = error.least_bytes
                if least is None or isinstance(budget, str) or not budget < least < peak:
                    raise
                budget = least

    def _resident(self, call: Call, shapes: tuple[Any, ...]) -> int:
        """Returns the bytes of the arguments that are on the device already: of a call within a trace, as many of them
        as the arguments of the step around it have there.
        """
        target, watch = self.settings.planning.target, watch_here()
        here = any(isinstance(leaf, jax.Array) and not _compat.is_tracer(leaf) for leaf in call.arrays)
        if watch is None or here:
            return resident_bytes(call.arrays, target)
        own = sum(map(_bytes_on_one, lift.leaves(self.fun, shapes)))
        return min(own, resident_bytes(watch.arrays, target))

    def _estimate(self, fun: Callable[..., Any], shapes: tuple[Any, ...]) -> int:
        """Returns the peak of the step without a plan, as its trace lets one expect."""
        step = suited(self.settings.planning.step, fun, shapes)(fun)
        target = target_of(self.settings.planning.target)
        return step_peak(step, shapes, target)

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.fun, "__name__", "function"))

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        self.here.busy = True
        try:
            yield
        finally:
            self.here.busy = False


@_compat.weakref_lru_cache
def _plans_of(made: PlannedCalls) -> dict[Any, Future[_Planned]]:
    """Returns the plans of a function in the present configuration of JAX, which what is traced depends on."""
    return {}


def _shape(leaf: Any) -> Any:
    """Returns shape, dtype and sharding of an array, and anything else as it is."""
    return calls.abstract(leaf) if isinstance(leaf, jax.Array) else leaf


def _bytes_on_one(leaf: Any) -> int:
    """Returns the bytes of an array, or of a shape, on one device."""
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return aval_bytes(jax.ShapeDtypeStruct(shape, leaf.dtype))


def _unasked() -> int:
    raise AssertionError("only a share of the unplanned peak needs it")
