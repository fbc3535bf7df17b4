"""autocheckpoint: a function that is planned at its first call, and then runs under its plan.

A call is looked up by its signature (`planned_calls.py`): structure, shapes, dtypes, shardings over several devices,
and leaves that are not arrays. What is found is a jaxpr with the plan's checkpoints in it, so a later call costs the
lookup, and within `jax.jit` nothing at all. Planning sees shapes alone, so it is the same inside and outside of jit,
grad and vmap, and nothing of an outer trace gets into it.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, overload

import jax

from jaxckpt._errors import ArgumentError, check_flags, explains
from jaxckpt.actions import RECOMPUTE, SAVE, Action
from jaxckpt.core.argument_names import argument_numbers
from jaxckpt.core.plan import Plan
from jaxckpt.core.shown import Progress, check_progress
from jaxckpt.memory.targets import Target
from jaxckpt.planner.budget import check_budget
from jaxckpt.planner.planned_calls import PlannedCalls
from jaxckpt.planner.settings import PlanSettings
from jaxckpt.planner.solvers import Solver
from jaxckpt.planner.solvers import solver as solver_for
from jaxckpt.planner.stored_plans import AutoSettings


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
@explains
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
      budget: bytes, "12GiB", "60%" (of the peak without a plan) or "device" (what is free when it is planned); it
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
      ArgumentError: at once: the budget or another option is invalid, or `path` is a file; at the call: an option does
        not suit the target, or an argument that is not an array cannot be hashed.
      InfeasibleBudgetError and the other errors of `jaxckpt.plan`: at the call.

    >>> import jax, jax.numpy as jnp
    >>> @autocheckpoint(budget="100%")
    ... def loss(w, x):
    ...     return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
    >>> jax.grad(loss)(jnp.ones((4, 4)), jnp.ones((8, 4))).shape
    (4, 4)
    """
    solver_for(solver)
    check_flags(verify=verify)
    check_progress(progress)
    planning = PlanSettings(
        target,
        step,
        actions,
        host_budget,
        costs,
        reverse_only=False,  # what it returns may be differentiated in any way
        respect_checkpoints=respect_checkpoints,
        tile=tile,
        cache=cache,
    )
    settings = AutoSettings(budget, planning, verify, solver, argument_numbers(static_argnums), progress)
    check_budget(budget)
    if fun is None:
        return functools.partial(_wrapper, settings=settings, path=path)
    return _wrapper(fun, settings, path)


def _wrapper(fun: Callable[..., Any], settings: AutoSettings, path: str | os.PathLike[str] | None) -> Autocheckpointed:
    if not callable(fun):
        raise ArgumentError("fun", "a function", fun, "Use @autocheckpoint(budget='60%').")
    if path is not None and (not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or "\0" in str(path)):
        raise ArgumentError("path", "the path of a folder", path)
    folder = None if path is None else pathlib.Path(path)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ArgumentError("path", "a folder, for there is a plan for each signature", str(path))
    made = PlannedCalls(fun, settings, folder)

    @functools.wraps(fun)
    def planned(*args: Any, **kwargs: Any) -> Any:
        return made.call(args, kwargs)

    def plan(*args: Any, **kwargs: Any) -> Plan:
        """Returns the plan for these arguments, arrays or shapes, made now if it does not exist."""
        return made.plan(args, kwargs)

    result = cast("Autocheckpointed", planned)
    result.plan = plan  # type: ignore[method-assign]
    return result
