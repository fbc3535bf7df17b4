"""residuals: the arrays that differentiation keeps from the forward to the backward pass, before any compiler.

XLA recomputes cheap elementwise chains inside fusions. So in unrolled code, the sum of the residuals is more than what
is really kept. In a scan it is exact, because nothing fuses across the loop. `jaxckpt.measure` reports what is really
kept.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, NotDifferentiableError
from jaxckpt.core import lift, primitives, surgery
from jaxckpt.core.graph import INTERNAL, aval_bytes
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.sources import short_source
from jaxckpt.core.units import counted, format_bytes


@dataclass(frozen=True)
class Residual:
    """One array that is kept.

    Attributes:
      name: its tag, its path if it is an argument, or the operation that makes it.
      shape, dtype, bytes: those of the array; in a loop, the first axis is the iterations.
      argument: whether it is an argument (or closed over), which is in memory anyway.
      source: "file.py:12 (function)" of the operation that makes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    argument: bool
    source: str


@dataclass(frozen=True)
class ResidualReport:
    """The arrays that differentiation keeps, the largest first. When printed, equal arrays of one operation and source
    line are one row, and the last rows are sums.

    Attributes:
      residuals: each array once.
    """

    residuals: tuple[Residual, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all residuals."""
        return sum(r.bytes for r in self.residuals)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the residuals that are not arguments: the cost of keeping."""
        return sum(r.bytes for r in self.residuals if not r.argument)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the residuals as plain values."""
        return [{**vars(r), "shape": list(r.shape), "dtype": str(r.dtype)} for r in self.residuals]

    def __str__(self) -> str:
        kept = [r for r in self.residuals if not r.argument]
        rest = len(self.residuals) - len(kept)
        groups: dict[tuple[str, str, str], list[int]] = {}
        for r in kept:
            groups.setdefault((f"{r.dtype}{list(r.shape)}", r.name, r.source), []).append(r.bytes)
        rows = [
            (format_bytes(sum(sizes)), f"{len(sizes)} × " if len(sizes) > 1 else "", *words)
            for words, sizes in sorted(groups.items(), key=lambda group: -sum(group[1]))
        ]
        wide = max((len(count) for _, count, *_ in rows), default=0)
        lines = [
            f"{size:>10}  {count:>{wide}}{array}  {name}  {short_source(source)}".rstrip()
            for size, count, array, name, source in rows
        ]
        lines.append(
            f"{format_bytes(self.kept_bytes):>10}  kept for the backward pass, in {counted(len(kept), 'array')}"
        )
        if rest:
            given = format_bytes(self.total_bytes - self.kept_bytes)
            lines.append(f"{given:>10}  in {counted(rest, 'argument')} besides, in memory anyway")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def residuals(fun: Callable[..., Any], *args: Any) -> ResidualReport:
    """Returns what `jax.vjp(fun, *args)` keeps for the backward pass.

    Args:
      fun: a function of pytrees of arrays: the loss, not the training step, of which it would list what a second
        derivative keeps. It is differentiated with respect to every argument of an inexact dtype.
      *args: arrays, or anything with a shape and a dtype; modules; other leaves are passed as they are. Nothing is
        computed.

    Raises:
      ArgumentError: `fun` is not a function.
      NotDifferentiableError: no argument, or no result, has an inexact dtype.

    >>> import jax.numpy as jnp
    >>> report = residuals(lambda x: jnp.sin(x).sum(), jnp.ones(3))
    >>> report.kept_bytes, len(report.residuals)
    (12, 1)
    """
    if not callable(fun):
        raise ArgumentError("fun", "a function", fun)
    return lift.attempt(fun, args, {}, _of_call)


def _of_call(call: lift.Taken) -> ResidualReport:
    named = call.paths() if call.whole else sorted(call.paths())  # as the leaves of a dictionary lie
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    inexact = [is_inexact(leaf) for leaf in leaves]
    if not any(inexact):
        raise NotDifferentiableError(
            "args must have a leaf of an inexact dtype (float or complex) to be differentiated; there is none."
        )

    def kept(*leaves: Any) -> list[Any]:
        def run(*leaves: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return [leaf for leaf in jax.tree.leaves(call.fun(*args, **kwargs)) if is_inexact(leaf)]

        varying, given = surgery.with_holes(run, leaves, inexact)
        out, pullback = jax.vjp(varying, *given)
        if not out:
            raise NotDifferentiableError(
                "fun must return a leaf of an inexact dtype to be differentiated; it returns none."
            )
        return jax.tree.leaves(pullback)

    closed = jax.make_jaxpr(kept)(*leaves)
    made = _Makers(_compat.open_jaxpr(closed))
    arguments = {var: name for var, (name, _) in zip(made.jaxpr.invars, named)}
    arguments |= dict.fromkeys(made.jaxpr.constvars, "closed-over constant")
    found: dict[Any, Residual] = {}
    for var in made.jaxpr.outvars:
        if isinstance(var, _compat.Literal):
            continue
        origin = made.origin(var)
        if (whole := made.unshaped(origin)) in arguments:
            origin = whole
        if origin in found or getattr(var.aval, "dtype", None) == jax.dtypes.float0:
            continue
        name, source = (arguments[origin], "") if origin in arguments else made.describe(origin)
        found[origin] = Residual(
            name, tuple(var.aval.shape), var.aval.dtype, aval_bytes(var.aval), origin in arguments, source
        )
    return ResidualReport(tuple(sorted(found.values(), key=lambda r: (r.argument, -r.bytes, r.name))))


def _passed_on(eqn: Any, place: int) -> int | None:
    """Returns the place of the operand that a call returns as it is at a place of its results; None if it does not."""
    programs = surgery.programs(eqn)
    if len(programs) != 1 or not primitives.of(_compat.primitive_name(eqn)).holds.in_line:
        return None
    inner = _compat.open_jaxpr(programs[0])
    result = inner.outvars[place]
    if len(inner.invars) != len(eqn.invars) or isinstance(result, _compat.Literal):
        return None
    origin = _Makers(inner).origin(result)
    return inner.invars.index(origin) if origin in inner.invars else None


class _Makers:
    """The equation of a jaxpr that makes each variable, and the name of each variable."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.named = {
            self.origin(eqn.invars[0]): eqn
            for eqn in jaxpr.eqns
            if _compat.equation_name(eqn) is not None and not isinstance(eqn.invars[0], _compat.Literal)
        }

    def origin(self, var: Any) -> Any:
        """Returns the variable that `var` is a copy of: through names, barriers, the rounding of residuals by JAX, and
        calls that return an operand as it is.
        """
        while (eqn := self.makers.get(var)) is not None:
            place: int | None = eqn.outvars.index(var)
            if _compat.equation_name(eqn) is None and not primitives.is_same(
                _compat.primitive_name(eqn), eqn.params, var.aval.dtype
            ):
                place = _passed_on(eqn, eqn.outvars.index(var))
            if place is None or isinstance(eqn.invars[place], _compat.Literal):
                break
            var = eqn.invars[place]
        return var

    def unshaped(self, var: Any) -> Any:
        """Returns the variable that `var` has the elements of, in another shape: of an argument, it takes no memory."""
        while (eqn := self.makers.get(var)) is not None:
            if _compat.primitive_name(eqn) not in ("reshape", "squeeze", "expand_dims"):
                break
            var = self.origin(eqn.invars[0])
        return var

    def describe(self, var: Any) -> tuple[str, str]:
        """Returns name and source line of the operation that makes a variable, also inside calls and loops."""
        eqn = self.makers.get(var)
        if eqn is None:
            return "", ""
        if var in self.named:  # a tag says more than the operation
            return _label(str(_compat.equation_name(self.named[var]))), _compat.source_line(eqn)
        place = eqn.outvars.index(var)
        for param in _compat.equation_params(eqn).values():
            if not _compat.is_jaxpr(param) or len(_compat.open_jaxpr(param).outvars) != len(eqn.outvars):
                continue
            inner = _Makers(_compat.open_jaxpr(param))
            result = inner.jaxpr.outvars[place]
            if not isinstance(result, _compat.Literal):
                name, source = inner.describe(inner.origin(result))
                return name or _compat.primitive_name(eqn), source or _compat.source_line(eqn)
        return _compat.primitive_name(eqn), _compat.source_line(eqn)


def _label(name: str) -> str:
    return name.rpartition(":")[2] if name.startswith(INTERNAL) else name
