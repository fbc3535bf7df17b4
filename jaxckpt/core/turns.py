"""Loops of jaxckpt's own of which only run time says how often they run: what they take is counted by the mean.

A while loop does not say how often it runs, so that its operations are counted once. `Slots` knows, from its schedule,
how many iterations its loops run again in all. The mean for one run of the loop stands in the name of its body:
parameters of operations do not last, names of functions do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax import lax

from jaxckpt import _compat

TITLE = "jaxckpt_turns@"
"""What begins the name of such a body."""


def loop(first: Any, end: Any, body: Callable[[Any, Any], Any], state: Any, turns: float) -> Any:
    """Runs `state = body(i, state)` for the ints i from `first` to before `end`, and returns the state.

    Args:
      first, end: ints, which may be traced.
      turns: how often the body runs on average, at least 0: what its operations are counted as.
    """

    def turn(both: tuple[Any, Any]) -> tuple[Any, Any]:
        i, state = both
        return i + 1, body(i, state)

    turn.__name__ = turn.__qualname__ = f"{TITLE}{turns!r}"
    return lax.while_loop(lambda both: both[0] < end, turn, (first, state))[1]


def said(params: Mapping[str, Any]) -> float:
    """Returns how often a while loop runs its body, for what is counted: the mean if it is one of these, else 1."""
    title = _compat.jaxpr_title(params["body_jaxpr"])
    return float(title.removeprefix(TITLE)) if title.startswith(TITLE) else 1
