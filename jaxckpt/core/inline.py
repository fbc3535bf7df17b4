"""Calls written out: a jaxpr whose `jit` equations are replaced by what they call, in loops and branches too.

A plan cuts a program at any operation, so the program must be one list. A call that says something about placement
(shardings, donation, compiler options) stays a call. Where a plan leaves a call whole, `Calls.folded` makes it a call
again, so that JAX differentiates and lowers a function that is called often once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt import _compat
from jaxckpt.core import primitives, reads, surgery
from jaxckpt.core.primitives import Holds

_CLOSED = (Holds.LOOP, Holds.BRANCHES)
"""Programs that may have constants of their own."""
_OPENED = (*_CLOSED, Holds.CHECKPOINT, Holds.MAPPED)
"""Programs in which calls are written out."""


@dataclass(frozen=True, eq=False)
class _Call:
    """A call that was written out: its equation, and the equations that took its place."""

    equation: Any
    written: tuple[Any, ...]


class Calls:
    """The calls of one program that were written out."""

    def __init__(self) -> None:
        self._by_first: dict[int, list[_Call]] = {}
        self._bodies: dict[int, _Call] = {}
        self._opened: dict[int, _Call] = {}

    def add(self, equation: Any, written: Sequence[Any]) -> None:
        """Notes a call; one that it was written out inside of is noted after it.

        A call with an operand that it does not use stays written out: as a call it would want a value that may not be
        there.
        """
        used = {id(var) for eqn in written for var in eqn.invars}
        if len(written) > 1 and all(isinstance(var, _compat.Literal) or id(var) in used for var in equation.invars):
            self._by_first.setdefault(id(written[0]), []).append(_Call(equation, tuple(written)))

    def add_body(self, equation: Any, written: Any) -> None:
        """Notes a loop, branch or checkpoint in which calls were written out."""
        self._bodies[id(written)] = _Call(equation, (written,))

    def add_opened(self, equation: Any, opened: Any) -> None:
        """Notes a custom rule that was opened (see `jaxckpt.core.rules`), or an operation with one inside."""
        self._opened[id(opened)] = _Call(equation, (opened,))

    def closed(self, eqn: Any) -> Any:
        """Returns an equation as it was before custom rules in it were opened."""
        found = self._opened.get(id(eqn))
        return eqn if found is None else found.equation

    def folded(self, eqns: Sequence[Any]) -> list[Any]:
        """Returns the equations with calls, and loops with calls in them, as they were where nothing of them was cut or
        changed.
        """
        found: list[Any] = []
        at = 0
        while at < len(eqns):
            for call in reversed(self._by_first.get(id(eqns[at]), ())):  # the outermost first
                stop = at + len(call.written)
                if stop <= len(eqns) and all(a is b for a, b in zip(eqns[at:stop], call.written)):
                    found.append(call.equation)
                    at = stop
                    break
            else:
                body = self._bodies.get(id(eqns[at]))
                found.append(eqns[at] if body is None else body.equation)
                at += 1
        return found


def inline(closed: Any, calls: Calls | None = None) -> Any:
    """Returns the closed jaxpr with its calls written out; itself where it has none.

    Args:
      closed: the jaxpr.
      calls: where to note what was written out.
    """
    return _Inliner(called, _OPENED).closed(closed, calls=calls)


def without_checkpoints(closed: Any) -> Any:
    """Returns the closed jaxpr with what is in its checkpoints written out, wherever they are; itself where it has
    none. Calls stay calls. Custom rules stay as they are: a checkpoint in one is its author's.
    """
    return _Inliner(checkpointed, (*_OPENED, Holds.CALL)).closed(closed)


class _Inliner:
    """Writes programs out that equations hold; each inner jaxpr is done once, so that what was shared stays shared (JAX
    caches by identity).

    Args:
      written: returns what is to be written out in place of an equation, a jaxpr, or None.
      entered: what equations hold in whose programs that is done too.
    """

    def __init__(self, written: Callable[[Any], Any], entered: Collection[Holds]) -> None:
        self.written, self.entered = written, entered
        self.done: dict[int, tuple[Any, Any]] = {}

    def closed(self, original: Any, *, constants: bool = True, calls: Calls | None = None) -> Any:
        """Returns the jaxpr with its calls written out. `constants`: whether it may be given constants of its own."""
        if id(original) in self.done:
            return self.done[id(original)][1]
        jaxpr = _compat.open_jaxpr(original)
        constvars = list(jaxpr.constvars)
        consts = _compat.jaxpr_consts(original) if constants else None
        eqns: list[Any] = []
        changed, renamed = self._equations(jaxpr.eqns, {}, eqns, constvars, consts, None, calls)
        result = original
        if changed:
            outvars = [surgery.renamed(renamed, var) for var in jaxpr.outvars]
            rebuilt = _compat.build_jaxpr(constvars, jaxpr.invars, outvars, eqns, jaxpr.debug_info)
            result = _compat.like(original, rebuilt, _compat.jaxpr_consts(original) if consts is None else consts)
        self.done[id(original)] = (original, result)  # holds the original, so that its id stays its own
        return result

    def _equations(
        self,
        source: list[Any],
        renamed: dict[Any, Any],
        eqns: list[Any],
        constvars: list[Any],
        consts: list[Any] | None,
        call: Any,
        calls: Calls | None,
    ) -> tuple[bool, dict[Any, Any]]:
        """Appends the equations of `source` to `eqns`; inside a call (`call` is its equation) with variables of their
        own.
        """
        changed = False
        for eqn in source:
            if call is not None:
                eqn = _compat.prepend_name_stack(call, eqn)
            inner = self.written(eqn)
            if inner is not None and (consts is not None or not _compat.open_jaxpr(inner).constvars):
                changed = True
                body = _compat.open_jaxpr(inner)
                mapping = {var: surgery.renamed(renamed, operand) for var, operand in zip(body.invars, eqn.invars)}
                for var, const in zip(body.constvars, _compat.jaxpr_consts(inner)):
                    mapping[var] = _compat.fresh_var(var.aval)
                    constvars.append(mapping[var])
                    consts.append(const)  # type: ignore[union-attr]
                invars, start = [surgery.renamed(renamed, var) for var in eqn.invars], len(eqns)
                self._equations(body.eqns, mapping, eqns, constvars, consts, eqn, calls)
                results = [surgery.renamed(mapping, result) for result in body.outvars]
                renamed.update(zip(eqn.outvars, results))
                if calls is not None:
                    calls.add(eqn.replace(invars=invars, outvars=_made(results, eqns[start:])), eqns[start:])
                continue
            new, here = self._descend(eqn)
            changed |= here
            invars = [surgery.renamed(renamed, var) for var in new.invars]
            if call is not None:
                outvars = [
                    var if isinstance(var, _compat.DropVar) else _compat.fresh_var(var.aval) for var in new.outvars
                ]
                renamed.update(zip(new.outvars, outvars))
                new = new.replace(invars=invars, outvars=outvars)
            elif invars != new.invars:
                new = new.replace(invars=invars)
            eqns.append(new)
            if here and calls is not None:
                calls.add_body(eqn.replace(invars=new.invars, outvars=new.outvars), new)
        return changed, renamed

    def _descend(self, eqn: Any) -> tuple[Any, bool]:
        if reads.is_call(eqn):
            program = self.closed(eqn.params["call_jaxpr"])
            changed = program is not eqn.params["call_jaxpr"]
            return (reads.with_program(eqn, program), True) if changed else (eqn, False)
        holds = primitives.of(_compat.primitive_name(eqn)).holds
        if holds not in self.entered:
            return eqn, False
        constants = holds in _CLOSED
        changes: dict[str, Any] = {}
        for name, param in _compat.equation_params(eqn).items():
            if _compat.is_jaxpr(param):
                new: Any = self.closed(param, constants=constants)
            elif isinstance(param, tuple) and any(_compat.is_jaxpr(item) for item in param):
                new = tuple(self.closed(item, constants=constants) for item in param)
                if all(a is b for a, b in zip(new, param)):
                    continue
            else:
                continue
            if new is not param:
                changes[name] = new
        return (_compat.replace_params(eqn, **changes), True) if changes else (eqn, False)


def _made(results: Sequence[Any], eqns: Sequence[Any]) -> list[Any]:
    """Returns the results as an equation can make them: once each, and none that is a literal or made by another
    equation.
    """
    made = {var for eqn in eqns for var in eqn.outvars}
    outvars = []
    for var in results:
        own = not isinstance(var, _compat.Literal) and var in made
        outvars.append(var if own else _compat.fresh_var(var.aval))
        made.discard(outvars[-1])
    return outvars


def checkpointed(eqn: Any) -> Any:
    """Returns the jaxpr that the equation computes, and again in the backward pass, or None: it is no checkpoint."""
    if reads.is_call(eqn):  # what jaxckpt.checkpoint makes of values that are kept as something else
        return eqn.params["call_jaxpr"]
    holds = primitives.of(_compat.primitive_name(eqn)).holds
    return _compat.equation_params(eqn)["jaxpr"] if holds is Holds.CHECKPOINT else None


def called(eqn: Any) -> Any:
    """Returns the jaxpr that the equation merely calls, or None: it says nothing about placement."""
    params = eqn.params
    if primitives.of(eqn.primitive.name).holds is not Holds.CALL:
        return None
    if "in_shardings" not in params:
        return params.get("call_jaxpr", params.get("jaxpr"))
    plain = (
        all(_compat.is_unspecified(sharding) for sharding in (*params["in_shardings"], *params["out_shardings"]))
        and not any(params["donated_invars"])
        and not params.get("compiler_options_kvs")
    )
    return params["jaxpr"] if plain else None
