"""Refuses, by name, what a traced function must not do: put traced values into Python objects, change its arguments,
use `jax.Ref`s.

JAX does not see any of that. The function is traced apart from the call, perhaps never again, so what it puts aside
would be a value of a trace that is over. Objects of nnx are another matter: `jaxckpt.core.lift` puts their state back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxckpt import _compat
from jaxckpt._errors import EffectsError
from jaxckpt.core import lift
from jaxckpt.core.argument_names import leaf_name
from jaxckpt.core.graph import Graph, Op
from jaxckpt.core.inline import called
from jaxckpt.core.reach import put_aside
from jaxckpt.core.sources import short_source

_HINT = "Return the value instead (has_aux=True in the gradient), or keep it in an nnx.Variable of an argument."


def refusing(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, to be traced, with its side effects on Python objects as errors.

    Raises:
      EffectsError: at the call: it put a traced value into an object, or changed a container among its arguments.
    """

    name_of = functools.partial(leaf_name, keyword="kwargs[{!r}]")

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = lift.paths_of((args, kwargs))
        refuse_ref_arguments(fun, [(name_of(path), leaf) for path, leaf in given.items()])
        out, where = put_aside(fun, lambda: fun(*args, **kwargs), lambda value: lift.has_objects([value]))
        if where:
            raise EffectsError(
                f"{_name(fun)} must not put traced values into Python objects, for it is traced apart from its "
                f"calls; it put one into {where}. {_HINT}"
            )
        try:
            after = lift.paths_of((args, kwargs))
        except Exception:  # an argument that is used up, as an eqx.nn.State is after its `set`
            return out
        changed = [path for path in {**given, **after} if given.get(path, call) is not after.get(path, call)]
        if changed:
            where = ", ".join(map(name_of, changed[:3]))
            raise EffectsError(
                f"{_name(fun)} must not change its arguments, for it is traced apart from its calls; it changed "
                f"{where}. {_HINT}"
            )
        return out

    return call


def refuse_ref_arguments(fun: Callable[..., Any], paths: list[tuple[str, Any]]) -> None:
    """Raises EffectsError where an argument is a `jax.Ref`.

    Args:
      fun: the function.
      paths: what to call each leaf of its arguments, and it.
    """
    for path, leaf in paths:
        if _compat.is_ref(leaf):
            raise EffectsError(
                f"{_name(fun)} must not take a jax.Ref, which it may change as a side effect; {path} is one. "
                "Pass its value, ref[...], and return the new one."
            )


def refuse_refs(fun: Callable[..., Any], graph: Graph) -> None:
    """Raises EffectsError where the operations of a function read or write a `jax.Ref`."""
    if (op := ref_in(graph)) is not None:
        raise EffectsError(
            f"{_name(fun)} must not work on jax.Refs, whose order of reads and writes a recomputation would change; "
            f"it does so in {op.primitive} at {short_source(op.source)}. Carry the value from one operation to the next instead."
        )


def refuse_effects(fun: Callable[..., Any], graph: Graph) -> None:
    """Raises EffectsError where a function has effects that a recomputation would repeat, such as `io_callback`."""
    if not _compat.remat_disallowed_effects(graph.jaxpr):
        return
    op = next((op for op in graph.walk() if _compat.remat_disallowed_effects(op.equation)), None)
    where = "" if op is None else f" in {op.primitive} at {short_source(op.source)}"
    raise EffectsError(
        f"{_name(fun)} must have no side effects, because the recomputation would repeat them; it has some{where}. Move "
        "them out of the function: return what they need, and act on it in the step."
    )


def ref_in(graph: Graph) -> Op | None:
    """Returns the first operation of a function that reads or writes a `jax.Ref`; None where there is none."""
    ops = list(graph.ops)
    for op in ops:  # grows while it is gone through
        equation = op.equation
        if called(equation) is not None:
            ops.extend(inner for body in op.bodies for inner in body.ops)
        if any(_compat.is_ref_type(var.aval) for var in (*equation.invars, *equation.outvars)):
            return op
    return None


def _name(fun: Callable[..., Any]) -> str:
    return f"fun ({getattr(fun, '__name__', type(fun).__name__)})"
