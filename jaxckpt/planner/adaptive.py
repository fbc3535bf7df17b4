"""adaptive: a training step that is planned again, tighter, when it runs out of memory.

`autocheckpoint` wraps a loss, and the loss is usually traced inside of the user's jitted step. So an error of the
compiler or of the device comes out of the step, and the step is what can run again. While it runs, the functions of
`autocheckpoint` in it are noted (`watch.py`). When it runs out of memory, each of them gets a cap below the peak of the
plan that it had, JAX forgets what it traced, and the step runs again with the arguments that it had.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, InfeasibleBudgetError, StateLostError, check_flags
from jaxckpt.core import lift
from jaxckpt.core.constants import TIGHTER
from jaxckpt.core.units import as_int, format_bytes
from jaxckpt.planner.shortage import is_out_of_memory, missing_bytes
from jaxckpt.planner.watch import Replanned, Watch, watching

logger = logging.getLogger("jaxckpt")

F = TypeVar("F", bound=Callable[..., Any])
_Used = dict[tuple[Replanned, Any], None]


@overload
def adaptive(step: F, /, *, tries: int = 4, wait: bool = True) -> F: ...
@overload
def adaptive(step: None = None, /, *, tries: int = 4, wait: bool = True) -> Callable[[F], F]: ...
def adaptive(step: Any = None, /, *, tries: int = 4, wait: bool = True) -> Any:
    """Returns a training step that plans again, tighter, when it runs out of memory, and goes on with its state.

    The step calls a function of `jaxckpt.autocheckpoint`, inside of `jax.jit` or not. If a call ends with JAX's
    RESOURCE_EXHAUSTED, at compile time or at run time, then

    1. the next plan may have the peak of the last plan, lowered by the missing bytes if the error and the device say
       how many there are, and by at least an eighth;
    2. JAX forgets all that it compiled (`jax.clear_caches()`), for a trace anywhere may hold the old plan;
    3. the step runs again with the same arguments.

    Each time is a warning of the logger "jaxckpt". The tighter plan stays for later calls of these shapes. Other errors
    pass as they are.

    Args:
      step: the training step: a function of `jax.jit`, `nnx.jit` or plain Python, that calls functions of
        `jaxckpt.autocheckpoint`. Left out: a decorator is returned.
      tries: how often one call may plan again.
      wait: whether to wait for the results of each call. A device that runs behind Python tells that it is out of
        memory when the results are asked for; without waiting that is after the call, where nothing can be saved.

    If the runtime consumed donated arguments before it failed, the step cannot run again. It raises `StateLostError`;
    the next call uses a tighter plan. So load the state of the last checkpoint, and call it again. A step that fails
    before it starts (at compile time, or as its memory is allocated) consumes nothing. What nnx modules among the
    arguments held is put back before the step runs again. A step of plain Python must not change other state.

    In a program of several processes, one process cannot plan alone: there the error is raised as it came.

    Raises:
      ArgumentError: `step` is not a function, `tries` is not a positive int, or `wait` is not a bool.
      StateLostError: at a call: donated arguments were consumed.
      jax.errors.JaxRuntimeError: at a call: the step's own, with a note that says what was tried, where no tighter plan
        is feasible, `tries` are used up, or no function of `autocheckpoint` runs in the step.

    >>> import jax, jax.numpy as jnp, jaxckpt
    >>> @jaxckpt.autocheckpoint(budget="100%")
    ... def loss(w, x):
    ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
    >>> @jaxckpt.adaptive
    ... @jax.jit
    ... def step(w, x):
    ...     return w - 0.1 * jax.grad(loss)(w, x)
    >>> step(jnp.ones((4, 4)), jnp.ones((8, 4))).shape
    (4, 4)
    """
    most = as_int(tries)
    if most is None or most < 1:
        raise ArgumentError("tries", "an int of at least 1", tries)
    check_flags(wait=wait)
    if step is None:
        return functools.partial(adaptive, tries=tries, wait=wait)
    if not callable(step):
        raise ArgumentError("step", "a function, the training step", step)
    run = _Adaptive(step, most, wait)

    @functools.wraps(step, updated=())
    def adapted(*args: Any, **kwargs: Any) -> Any:
        return run.call(args, kwargs)

    return adapted


class _Adaptive:
    """A step, and the functions of `autocheckpoint` that were traced in it."""

    def __init__(self, step: Callable[..., Any], tries: int, wait: bool) -> None:
        self.step, self.tries, self.wait = step, tries, wait
        self.name = lift.title(step).rpartition(".")[2]
        self.used: dict[Any, _Used] = {}  # kinds of the step's arrays -> what is called with them

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the step's result, of the first run that has memory enough."""
        arrays, restore = lift.snapshot((args, kwargs))
        used = self.used.setdefault(tuple((leaf.shape, str(leaf.dtype)) for leaf in arrays), {})
        trouble: _Trouble | None = None
        while True:
            try:
                return self._run(args, kwargs, Watch(arrays, used))
            except InfeasibleBudgetError as error:
                if trouble is None:
                    raise
                restore()
                raise trouble.given_up(f"No tighter plan is feasible: {error}") from error
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if jax.process_count() > 1:
                    error.add_note("jaxckpt.adaptive plans nothing again: one of several processes cannot do so alone.")
                    raise
                trouble = trouble or _Trouble(self.name, error)
                restore()
                if lost := self._lost(args, kwargs):
                    trouble.tighten(error, used)
                    raise StateLostError(self.name, lost, trouble.events[-1]) from error
                if len(trouble.events) == self.tries:
                    raise trouble.given_up(f"That was try {self.tries} of {self.tries}.") from error
                if not trouble.tighten(error, used) and len(trouble.events) > 1:
                    raise trouble.given_up(
                        f"No function of jaxckpt.autocheckpoint runs in {self.name}: wrap its loss."
                    ) from error

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch) -> Any:
        with watching(watch):
            out = self.step(*args, **kwargs)
            if self.wait:
                results = [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]
                jax.block_until_ready(results or lift.snapshot((args, kwargs))[0])
            return out

    def _lost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Returns the paths of the arguments that the runtime has consumed."""
        paths = lift.take(self.step, args, kwargs).paths()
        return [path for path, leaf in paths if isinstance(leaf, jax.Array) and _is_consumed(leaf)]


def _is_consumed(array: jax.Array) -> bool:
    return not _compat.is_tracer(array) and array.is_deleted()


class _Trouble:
    """What happened in one call since it first ran out of memory.

    Attributes:
      error: the first.
      events: what was planned since, a sentence for each time.
    """

    def __init__(self, step: str, error: BaseException) -> None:
        self.step, self.error = step, error
        self.events: list[str] = []
        self._caps: dict[tuple[Replanned, Any], int | None] = {}  # as they were before

    def tighten(self, error: BaseException, used: _Used) -> bool:
        """Has the functions that were used planned again, within less than the peaks that they have; returns whether
        there are any.
        """
        missing = missing_bytes(str(error), jax.local_devices())
        planned = []
        for function, key in used:
            if peak := function.peak(key):
                most = max(peak - max(missing or 0, math.ceil(peak * TIGHTER)), 1)
                self._caps.setdefault((function, key), function.cap(key, most))
                planned.append(
                    f"{function.name} peaked at {format_bytes(peak)} and is planned within {format_bytes(most)}"
                )
        short = "" if missing is None else f", with {format_bytes(missing)} missing"
        self.events.append(
            f"It ran out of memory{short}: {', '.join(planned) or 'it is traced again to see what to plan'}."
        )
        logger.warning("%s: %s (%s)", self.step, self.events[-1], str(error).splitlines()[0])
        jax.clear_caches()
        return bool(planned)

    def given_up(self, why: str) -> BaseException:
        """Returns the first error with what was tried; plans are what they were."""
        for (function, key), before in self._caps.items():
            function.cap(key, before)
        jax.clear_caches()
        logger.warning("%s: nothing tighter is planned. %s", self.step, why)
        self.error.add_note("\n".join([f"jaxckpt.adaptive tried {self.step} again:", *self.events, why]))
        return self.error
