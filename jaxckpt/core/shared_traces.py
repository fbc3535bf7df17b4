"""The planner's own traces of a program under one plan after another: what they share, and which region of a plan an
operation belongs to.

What the compiler is given is traced without scopes: its reports show the user's, and what is stored of a plan's step is
found again when a user compiles it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from jaxckpt import _compat
from jaxckpt.core.constants import SHARED_PARTS
from jaxckpt.core.graph import Graph
from jaxckpt.core.regions import Address

Function = TypeVar("Function", bound=Callable)

PATTERN = r"jaxckpt(\d+)_(\d+)"
"""A region's scope, with its first operation and the one after its last."""


class SharedTraces:
    """Traces of one program under one plan after another.

    The user's function is traced once for all of them. A region that plans have in common is one function, so that what
    JAX has made of it (its jaxpr, its derivative) is there for the next plan.

    Args:
      fun: the function that plans are applied to. If a call takes it apart (see `lift.take`), nothing is shared.
      fingerprint: of the program; plans for others, as in a function that is planned already, are left alone.
      address: of the body of that program that is looked at; operations of others have other numbers.
    """

    def __init__(self, fun: Callable[..., Any], fingerprint: str, address: Address) -> None:
        self.fun = fun
        self.fingerprint, self.address = fingerprint, address
        self.graphs: dict[Hashable, Graph] = {}
        self.parts: dict[Hashable, Any] = {}

    @contextlib.contextmanager
    def another(self, scoped: bool = False) -> Iterator[None]:
        """A context for one trace more; `scoped`: in it each of a plan's stretches, regions and what lies between them,
        is in a scope.
        """
        token = _current.set(_OneTrace(self, scoped, set()))
        try:
            yield
        finally:
            _current.reset(token)


@dataclass(frozen=True)
class _OneTrace:
    """One trace.

    Attributes:
      shared: what it shares with others.
      scoped: see `SharedTraces.another`.
      called: the ways in which it has called the function.
    """

    shared: SharedTraces
    scoped: bool
    called: set[Hashable]


_current: contextvars.ContextVar[_OneTrace | None] = contextvars.ContextVar("current", default=None)


def traced_once(
    trace: Callable[[], Graph], fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, fingerprint: str
) -> Graph:
    """Returns `trace()`, the graph of `fun(*args, **kwargs)`; within a look at the program with that fingerprint, that
    of the first look that calls the function so. A second call in one look is traced: the function may have become
    another one in between, as a module that goes from training to evaluation.
    """
    look = _current.get()
    if look is None or look.shared.fingerprint != fingerprint or look.shared.fun is not fun:
        return trace()
    leaves, tree = jax.tree.flatten((args, kwargs))
    key = (tree, tuple(map(jax.typeof, leaves)), _compat.trace_context())
    if key in look.called:
        return trace()
    look.called.add(key)
    found = look.shared.graphs.get(key)
    if found is None:
        found = trace()
        if not any(map(_compat.is_tracer, _compat.jaxpr_consts(found.jaxpr))):
            look.shared.graphs[key] = found
    return found


def part(
    make: Callable[[], Function],
    start: int,
    stop: int,
    graph: Graph,
    address: Address,
    key: Callable[[], Hashable],
    nested: bool,
) -> Function:
    """Returns a function of the operations start..stop: what `make` returns. Within a look at the program and the body,
    it is one function for all plans with the same key, and in a scope where that is wanted.

    Args:
      make, start, stop: see above.
      graph, address: the program, and the body of it.
      key: returns all that the function depends on besides the graph.
      nested: whether other parts lie in it.
    """
    look = _current.get()
    if look is None or (look.shared.fingerprint, look.shared.address) != (graph.fingerprint, address):
        return make()
    found = _shared(look, make, graph, key, nested)
    return jax.named_scope(f"jaxckpt{start}_{stop}")(found) if look.scoped else found


def _shared(
    look: _OneTrace, make: Callable[[], Function], graph: Graph, key: Callable[[], Hashable], nested: bool
) -> Function:
    """Returns what `make` returns, or returned for the same graph and key."""
    shared = look.shared
    if all(graph is not each for each in tuple(shared.graphs.values())):  # traced for this look alone
        return make()
    whole = id(graph), key(), nested and look.scoped
    found: Function | None = shared.parts.get(whole)
    if found is None:
        found = make()
        if len(shared.parts) >= SHARED_PARTS:
            shared.parts.clear()
        shared.parts[whole] = found
    return found
