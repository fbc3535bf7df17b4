"""Calls written out: a jaxpr whose `jit` equations are replaced by what they call, in loops and branches too.

A plan cuts a program at any operation, so the program must be one list. A call that says something about placement
(shardings, donation, compiler options) stays a call. Where a plan leaves a call whole, `Calls.folded` makes it a call
again, so that JAX differentiates and lowers a function that is called often once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxckpt import _compat
from jaxckpt.core import primitives, reads, stored, surgery
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


def without_checkpoint(closed: Any, eqn: Any) -> Any:
    """Returns the closed jaxpr with a checkpoint, one of its equations, written out, and those others that run the same
    jaxpr; itself where the equation is no checkpoint. Checkpoints in it stay.
    """
    inner = checkpointed(eqn)
    if inner is None:
        return closed
    return _Inliner(lambda each: inner if checkpointed(each) is inner else None, ()).closed(closed)


def without_own_calls(closed: Any, names: Collection[str]) -> Any:
    """Returns the closed jaxpr with those calls that `reads.reads_names` made written out that keep values under these
    names and no others, in checkpoints, loops and branches too: their derivatives are then those of what is around
    them. Itself where it has none.
    """

    def written(eqn: Any) -> Any:
        program = eqn.params["call_jaxpr"] if reads.is_call(eqn) else None
        kept = set() if program is None else stored.kept_names(_compat.open_jaxpr(program))
        return program if kept and kept.issubset(names) else None

    return _Inliner(written, (*_OPENED, Holds.CALL)).closed(closed)


@dataclass(eq=False)
class _Program:
    """A program in the making.

    Attributes:
      constvars, consts: its constants.
      constants: whether it may be given more of them.
      calls: where to note what was written out; None for nowhere.
      eqns: its equations so far.
    """

    constvars: list[Any]
    consts: list[Any]
    constants: bool
    calls: Calls | None
    eqns: list[Any] = field(default_factory=list)


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
        into = _Program(list(jaxpr.constvars), _compat.jaxpr_consts(original), constants, calls)
        renamed: dict[Any, Any] = {}
        result = original
        if self._write(jaxpr.eqns, renamed, into):
            outvars = [surgery.renamed(renamed, var) for var in jaxpr.outvars]
            rebuilt = _compat.build_jaxpr(into.constvars, jaxpr.invars, outvars, into.eqns, jaxpr.debug_info)
            result = _compat.like(original, rebuilt, into.consts)
        self.done[id(original)] = (original, result)  # holds the original, so that its id stays its own
        return result

    def _write(self, source: list[Any], renamed: dict[Any, Any], into: _Program, call: Any = None) -> bool:
        """Appends equations to a program; inside of a call (`call` is its equation) with variables of their own.

        Fills `renamed`, variable -> what it is there. Returns whether anything was written out.
        """
        changed = False
        for eqn in source:
            if call is not None:
                eqn = _undonated(_compat.prepend_name_stack(call, eqn))
            inner = self.written(eqn)
            if inner is not None and (into.constants or not _compat.open_jaxpr(inner).constvars):
                changed = True
                self._write_call(eqn, inner, renamed, into)
                continue
            new = self._descend(eqn)
            here = new is not eqn
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
            into.eqns.append(new)
            if here and into.calls is not None:
                into.calls.add_body(eqn.replace(invars=new.invars, outvars=new.outvars), new)
        return changed

    def _write_call(self, eqn: Any, inner: Any, renamed: dict[Any, Any], into: _Program) -> None:
        """Appends what a call runs, in its place."""
        body = _compat.open_jaxpr(inner)
        mapping = {var: surgery.renamed(renamed, operand) for var, operand in zip(body.invars, eqn.invars)}
        for var, const in zip(body.constvars, _compat.jaxpr_consts(inner)):
            mapping[var] = _compat.fresh_var(var.aval)
            into.constvars.append(mapping[var])
            into.consts.append(const)
        invars, start = [surgery.renamed(renamed, var) for var in eqn.invars], len(into.eqns)
        self._write(body.eqns, mapping, into, eqn)
        results = [surgery.renamed(mapping, result) for result in body.outvars]
        renamed.update(zip(eqn.outvars, results))
        if into.calls is not None:
            written = into.eqns[start:]
            into.calls.add(eqn.replace(invars=invars, outvars=_made(results, written)), written)

    def _descend(self, eqn: Any) -> Any:
        if reads.is_call(eqn):
            program = self.closed(eqn.params["call_jaxpr"], constants=False)
            return eqn if program is eqn.params["call_jaxpr"] else reads.with_program(eqn, program)
        holds = primitives.of(_compat.primitive_name(eqn)).holds
        if holds not in self.entered:
            return eqn
        return surgery.with_programs(eqn, functools.partial(self.closed, constants=holds in _CLOSED))


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


def _undonated(eqn: Any) -> Any:
    """Returns an equation within a call without the donation that it may ask for, which JAX does not heed there."""
    if not any(eqn.params.get("donated_invars", ())):
        return eqn
    return eqn.replace(params={**eqn.params, "donated_invars": (False,) * len(eqn.invars)})


def checkpointed(eqn: Any) -> Any:
    """Returns the jaxpr that the equation computes, and again in the backward pass, or None: it is no checkpoint."""
    if reads.is_call(eqn):  # what jaxckpt.checkpoint makes of values that are kept as something else
        return eqn.params["call_jaxpr"]
    holds = primitives.of(_compat.primitive_name(eqn)).holds
    return _compat.equation_params(eqn)["jaxpr"] if holds is Holds.CHECKPOINT else None


def called(eqn: Any) -> Any:
    """Returns the jaxpr that the equation merely calls, or None: it says nothing about placement."""
    params = eqn.params
    if primitives.of(_compat.primitive_name(eqn)).holds is not Holds.CALL:
        return None
    if "in_shardings" not in params:
        return params.get("call_jaxpr", params.get("jaxpr"))
    plain = (
        all(_compat.is_unspecified(sharding) for sharding in (*params["in_shardings"], *params["out_shardings"]))
        and not any(params["donated_invars"])
        and not params.get("compiler_options_kvs")
    )
    return params["jaxpr"] if plain else None
