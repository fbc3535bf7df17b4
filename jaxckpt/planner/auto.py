"""autocheckpoint: a function that is planned at its first call, and then runs under its plan.

A call is looked up by its signature: structure, shapes, dtypes, shardings over several devices, and leaves that are not
arrays. What is found is a jaxpr with the plan's checkpoints in it, so a later call costs the lookup, and within
`jax.jit` nothing at all. Planning sees shapes alone, so it is the same inside and outside of jit, grad and vmap, and
nothing of an outer trace gets into it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, cast, overload

import jax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, InfeasibleBudgetError, JaxckptError, PlanMismatchError, check_flags
from jaxckpt.actions import RECOMPUTE, SAVE, Action
from jaxckpt.core import leaves, lift
from jaxckpt.core.bare import trace_bare
from jaxckpt.core.constants import STALE
from jaxckpt.core.graph import aval_bytes
from jaxckpt.core.lift import trace_call as trace
from jaxckpt.core.liveness import graph_peak
from jaxckpt.core.plan import FORMAT, Plan
from jaxckpt.core.shown import Progress, check_progress
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.cache import folder_of, surroundings
from jaxckpt.memory.gradient import suited
from jaxckpt.memory.report import devices_of
from jaxckpt.memory.targets import Target, target_of
from jaxckpt.planner import calls, problems
from jaxckpt.planner.budget import DEVICE, budget_bytes, check_budget, normal, resident_bytes
from jaxckpt.planner.calls import Call
from jaxckpt.planner.measured import step_graph
from jaxckpt.planner.solvers import Solver
from jaxckpt.planner.solvers import solver as solver_for
from jaxckpt.planner.watch import watch_here

logger = logging.getLogger("jaxckpt")


class Autocheckpointed(Protocol):
    """What `autocheckpoint` returns: the function under its plans, and a way to get at them."""

    __name__: str

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the function under the plan for these arguments."""

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan for these arguments, arrays or shapes, made now if it does not exist."""


@overload
def autocheckpoint(
    fun: Callable[..., Any],
    /,
    *,
    budget: int | str,
    target: Target | str | None = None,
    step: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.value_and_grad,
    actions: Sequence[Action | str] = (RECOMPUTE, SAVE),
    host_budget: int | str | None = None,
    costs: str = "roofline",
    verify: bool = True,
    solver: str | Solver = "chain",
    respect_checkpoints: bool = True,
    tile: bool = False,
    cache: str | os.PathLike[str] | bool | None = None,
    path: str | os.PathLike[str] | None = None,
    static_argnums: int | Sequence[int] = (),
    progress: Progress | bool | None = None,
) -> Autocheckpointed: ...
@overload
def autocheckpoint(
    fun: None = None,
    /,
    *,
    budget: int | str,
    target: Target | str | None = None,
    step: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.value_and_grad,
    actions: Sequence[Action | str] = (RECOMPUTE, SAVE),
    host_budget: int | str | None = None,
    costs: str = "roofline",
    verify: bool = True,
    solver: str | Solver = "chain",
    respect_checkpoints: bool = True,
    tile: bool = False,
    cache: str | os.PathLike[str] | bool | None = None,
    path: str | os.PathLike[str] | None = None,
    static_argnums: int | Sequence[int] = (),
    progress: Progress | bool | None = None,
) -> Callable[[Callable[..., Any]], Autocheckpointed]: ...
def autocheckpoint(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    budget: int | str,
    target: Target | str | None = None,
    step: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.value_and_grad,
    actions: Sequence[Action | str] = (RECOMPUTE, SAVE),
    host_budget: int | str | None = None,
    costs: str = "roofline",
    verify: bool = True,
    solver: str | Solver = "chain",
    respect_checkpoints: bool = True,
    tile: bool = False,
    cache: str | os.PathLike[str] | bool | None = None,
    path: str | os.PathLike[str] | None = None,
    static_argnums: int | Sequence[int] = (),
    progress: Progress | bool | None = None,
) -> Autocheckpointed | Callable[[Callable[..., Any]], Autocheckpointed]:
    """Returns `fun` under the cheapest plan within a budget, planned at the first call of each input signature.

    The result has `fun`'s values and derivatives and works under jit, grad and vmap. Its attribute `plan(*args,
    **kwargs)` returns the `Plan` for such a call, and makes it if there is none. It also takes shapes, so that you can
    plan before the first call.

    Args:
      fun: a loss: the first argument is differentiated by `step`. Left out: a decorator is returned.
      budget: bytes, "12GiB", "60%" (of the peak without checkpoints) or "device" (what is free when it is planned); it
        bounds the compiled peak of `step(fun)` of the arguments. See `jaxckpt.plan`. `jaxckpt.adaptive` around the
        training step plans again where a step runs out of memory all the same.
      target: None for the local backend.
      step: makes the training step from `fun`; the step takes the arguments of `fun`.
      actions, host_budget, costs, verify, solver, respect_checkpoints, tile, cache, progress: see `jaxckpt.plan`.
      path: a folder to keep plans in; what another process left there is read instead of planned again, as long as the
        versions of jax, its compilers and jaxckpt, and XLA's flags, are the same. It is made if it does not exist.
      static_argnums: positional arguments that are no arrays and select the program; they must be hashable. Strings,
        bools, functions and other leaves that are neither arrays nor numbers are taken for such wherever they are.

    Plans are kept for as long as what JAX has traced: `jax.clear_caches()` drops them, and another configuration of JAX
    has plans of its own. `path` keeps them beyond that.

    Within `jax.jit` JAX does not say how its arguments are sharded. Call `.plan(...)` with sharded arguments or shapes
    beforehand: that plan then serves calls of the same shapes.

    Raises:
      ArgumentError: at once: the budget is invalid, or `path` is a file; at the call: an argument that is not an array
        cannot be hashed.
      InfeasibleBudgetError and the other errors of `jaxckpt.plan`: at the call.

    >>> import jax, jax.numpy as jnp
    >>> @autocheckpoint(budget="100%")
    ... def loss(w, x):
    ...     return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
    >>> jax.grad(loss)(jnp.ones((4, 4)), jnp.ones((8, 4))).shape
    (4, 4)
    """
    solver_for(solver)
    check_flags(verify=verify, respect_checkpoints=respect_checkpoints, tile=tile)
    folder_of(cache)
    check_progress(progress)
    numbers = static_argnums if isinstance(static_argnums, (tuple, list)) else [static_argnums]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise ArgumentError("static_argnums", "a number of an argument, or a sequence of them", static_argnums)
    settings = _Settings(
        budget,
        target,
        step,
        problems.actions_of(actions),
        host_budget,
        costs,
        verify,
        solver,
        respect_checkpoints,
        tile,
        cache,
        static_argnums,
        progress,
    )
    check_budget(budget)
    if fun is None:
        return functools.partial(_wrapper, settings=settings, path=path)
    return _wrapper(fun, settings, path)


@dataclass(frozen=True)
class _Settings:
    """The settings of `jaxckpt.plan`, and which arguments are static."""

    budget: Any
    target: Any
    step: Callable[..., Any]
    actions: tuple[Action, ...]
    host_budget: int | str | None
    costs: str
    verify: bool
    solver: str | Solver
    respect_checkpoints: bool
    tile: bool
    cache: str | os.PathLike[str] | bool | None
    static_argnums: int | Sequence[int]
    progress: Progress | bool | None = None

    @property
    def static_places(self) -> tuple[int, ...]:
        numbers = self.static_argnums
        return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _wrapper(fun: Callable[..., Any], settings: _Settings, path: str | os.PathLike[str] | None) -> Autocheckpointed:
    if not callable(fun):
        raise ArgumentError("fun", "a function", fun, "Use @autocheckpoint(budget='60%').")
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ArgumentError("path", "the path of a folder", path)
    folder = None if path is None else pathlib.Path(path)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ArgumentError("path", "a folder, for there is a plan for each signature", str(path))
    auto = _Auto(fun, settings, folder)

    @functools.wraps(fun)
    def planned(*args: Any, **kwargs: Any) -> Any:
        return auto.call(args, kwargs)

    def plan(*args: Any, **kwargs: Any) -> Plan:
        """Returns the plan for these arguments, arrays or shapes, made now if it does not exist."""
        return auto.plan(args, kwargs)

    result = cast("Autocheckpointed", planned)
    result.plan = plan  # type: ignore[method-assign]
    return result


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


class _Auto:
    """A function with its plans. Threads that call with one signature plan it once; other signatures do not wait."""

    def __init__(self, fun: Callable[..., Any], settings: _Settings, folder: pathlib.Path | None) -> None:
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
            with self.lock:
                _plans_of(self).setdefault(unsharded.key, _plans_of(self)[call.key])
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
        return calls.parse(args, kwargs, self.signature, self.settings.static_places, self.fun, numbers=numbers)

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, _Planned]:
        """Takes a call apart and returns what is planned for it: with numbers as arrays, or as they are if the function
        needs their values.
        """
        call = self._parse(args, kwargs)
        if call.key not in self.valued:
            try:
                return call, self._planned(call)
            except lift.VALUE_NEEDED as error:
                if isinstance(error, JaxckptError) or not any(map(lift.is_number, call.arrays)):
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
                    budget, unplanned=lambda: self._estimate(fun, shapes), target=settings.target, resident=0
                )
        if normal(budget) == DEVICE:
            here = self._resident(call, shapes)
            budget = budget_bytes(budget, unplanned=_unasked, target=settings.target, resident=here)
        cap = self.caps.get(key)
        if cap is not None:  # so the last plan was within the budget: a share needs no look at the unplanned peak
            bytes_ = functools.partial(budget_bytes, budget, unplanned=_unasked, target=settings.target)
            budget = cap if normal(budget).endswith("%") else min(bytes_(), cap)
        file = None if self.folder is None else self.folder / self._file_name(fun, shapes)
        vain = key in self.given_up
        self.given_up.discard(key)
        if file is not None and not vain and (stored := self._load(file, fun, shapes, budget, cap)) is not None:
            self.peaks[key] = _peak(stored)
            return stored
        make = functools.partial(
            problems.plan,
            fun,
            *shapes,
            target=settings.target,
            step=settings.step,
            actions=settings.actions,
            host_budget=settings.host_budget,
            costs=settings.costs,
            verify=settings.verify and not closed.bound,
            solver=settings.solver,
            respect_checkpoints=settings.respect_checkpoints,
            tile=settings.tile,
            cache=settings.cache,
            progress=settings.progress,
            reverse_only=False,  # what it returns may be differentiated in any way
        )
        plan = make(budget=budget) if cap is None else self._leaner(make, budget, self.peaks.get(key, 0))
        self.peaks[key] = peak = _peak(plan)
        logger.info("planned %s within %s: peak %s", self.name, format_bytes(plan.budget or 0), format_bytes(peak))
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                plan.save(file)
            except (OSError, JaxckptError) as error:
                logger.warning("the plan of %s could not be kept in %s: %s", self.name, file, error)
        return plan

    def _leaner(self, make: Callable[..., Plan], budget: int, peak: int) -> Plan:
        """Returns the plan for a budget, or else the one that needs least, if that is less than the last one's peak."""
        while True:
            try:
                return make(budget=budget)
            except InfeasibleBudgetError as error:
                least = error.least_bytes
                if least is None or not budget < least < peak:
                    raise
                budget = least

    def _resident(self, call: Call, shapes: tuple[Any, ...]) -> int:
        """Returns the bytes of the arguments that are on the device already: of a call within a trace, as many of them
        as the arguments of the step around it have there.
        """
        target, watch = self.settings.target, watch_here()
        here = any(isinstance(leaf, jax.Array) and not _compat.is_tracer(leaf) for leaf in call.arrays)
        if watch is None or here:
            return resident_bytes(call.arrays, target)
        own = sum(map(_bytes_on_one, lift.leaves(self.fun, shapes)))
        return min(own, resident_bytes(watch.arrays, target))

    def _estimate(self, fun: Callable[..., Any], shapes: tuple[Any, ...]) -> int:
        """Returns the peak of the step without a plan, as its trace lets one expect."""
        step = suited(self.settings.step, fun, shapes)
        target = target_of(self.settings.target)
        return graph_peak(step_graph(step(fun), shapes, target), target.platform)

    def _load(
        self, file: pathlib.Path, fun: Callable[..., Any], shapes: tuple[Any, ...], budget: Any, cap: int | None
    ) -> Plan | None:
        try:
            plan = Plan.load(file)
            plan.check((trace if plan.respect_checkpoints else trace_bare)(fun, *shapes))
        except FileNotFoundError:
            return None
        except (OSError, PlanMismatchError) as error:
            logger.warning("%s does not serve %s, which is planned again: %s", file, self.name, error)
            return None
        if cap is not None and _peak(plan) > cap:
            return None  # it is the plan that ran out of memory; the new one replaces it
        if normal(self.settings.budget) == DEVICE:
            stored = plan.budget or 0
            return plan if STALE * budget <= stored <= budget else None
        return plan

    def _file_name(self, fun: Callable[..., Any], shapes: tuple[Any, ...]) -> str:
        """Returns a name that is the same for the same step and settings, in any process."""
        settings = self.settings
        step = suited(settings.step, fun, shapes)
        facts = {
            "format": FORMAT,
            "compilers": surroundings(),
            "step": step_graph(step(fun), shapes, target_of(settings.target)).fingerprint,
            "shardings": [
                str(leaf.sharding) for leaf in lift.leaves(fun, shapes) if getattr(leaf, "sharding", None) is not None
            ],
            "budget": normal(settings.budget),
            "target": target_of(settings.target).name,
            "devices": devices_of(lift.leaves(fun, shapes), target_of(settings.target)),
            "actions": [repr(action) for action in settings.actions],
            "host_budget": str(settings.host_budget),
            "costs": str(settings.costs),
            "solver": _solver_title(settings.solver),
            "respect_checkpoints": settings.respect_checkpoints,
            "tile": settings.tile,
            "verify": settings.verify,
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        name = "".join(c if c.isalnum() else "_" for c in self.name)[:40]
        return f"{name}-{digest}.json"

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
def _plans_of(auto: _Auto) -> dict[Any, Future[_Planned]]:
    """Returns the plans of a function in the present configuration of JAX, which what is traced depends on."""
    return {}


def _solver_title(solver: str | Solver) -> str:
    """Returns what tells a solver from others in any process."""
    if isinstance(solver, str):
        return solver
    return f"{type(solver).__module__}.{type(solver).__qualname__} {solver.name}"


def _peak(plan: Plan) -> int:
    """Returns the bytes of the step under a plan: compiled, or else predicted, or else the budget."""
    return plan.measured_bytes or (plan.predicted.peak_bytes if plan.predicted else plan.budget or 0)


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
