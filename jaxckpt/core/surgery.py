"""Surgery on jaxprs, each kind once: the programs inside of an equation, slices, stretches cut out, equations taken
out, operands held fixed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jaxckpt import _compat
from jaxckpt.core import primitives
from jaxckpt.core.primitives import Holds


def placed_programs(primitive: str, params: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int | None], Any]]:
    """Yields ((parameter, place in it or None), jaxpr) for the programs that an operation holds.

    The scalar functions of reductions, scatters and sorts are not programs in that sense.
    """
    if primitives.of(primitive).holds is Holds.SCALARS:
        return
    for name, param in params.items():
        if _compat.is_jaxpr(param):
            yield (name, None), param
        elif isinstance(param, tuple):
            for place, item in enumerate(param):
                if _compat.is_jaxpr(item):
                    yield (name, place), item


def programs(eqn: Any) -> list[Any]:
    """Returns the programs that an equation holds, closed or open as they are."""
    found = placed_programs(_compat.primitive_name(eqn), _compat.equation_params(eqn))
    return [jaxpr for _, jaxpr in found]


def with_programs(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """Returns an equation with the programs that it holds changed; itself where `change` returns each as it is."""
    changes: dict[str, Any] = {}
    for name, param in _compat.equation_params(eqn).items():
        if _compat.is_jaxpr(param):
            new: Any = change(param)
            same = new is param
        elif isinstance(param, tuple) and any(map(_compat.is_jaxpr, param)):
            new = tuple(change(item) if _compat.is_jaxpr(item) else item for item in param)
            same = all(a is b for a, b in zip(new, param))
        else:
            continue
        if not same:
            changes[name] = new
    return _compat.replace_params(eqn, **changes) if changes else eqn


def with_programs_mapped(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """Does as `with_programs`; the program of a `jax.shard_map` is changed where the axes are those of a device, so
    that what `change` traces may vary over them.
    """
    if primitives.of(_compat.primitive_name(eqn)).holds is not Holds.MAPPED:
        return with_programs(eqn, change)
    return _compat.run_mapped(eqn, lambda: with_programs(eqn, change))


def walk(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a program and of those in it, at any depth, those of a shared program once."""
    waiting, seen = [jaxpr], set[int]()
    while waiting:
        program = _compat.open_jaxpr(waiting.pop())
        if id(program) not in seen:
            seen.add(id(program))
            yield from program.eqns
            waiting += (inner for eqn in program.eqns for inner in _compat.held_jaxprs(eqn))


class Rewriter:
    """Changes a closed jaxpr and those in it, each once, so that what was shared stays shared. A subclass defines
    `equation`, or `program` where more than single equations change.
    """

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}

    def jaxpr(self, original: Any) -> Any:
        """Returns the closed jaxpr, changed; itself where nothing changes."""
        if id(original) not in self._done:
            self._done[id(original)] = (original, self.program(original))  # holds it, so that its id stays its own
        return self._done[id(original)][1]

    def program(self, original: Any) -> Any:
        """Returns a closed jaxpr with each equation changed."""
        program = _compat.open_jaxpr(original)
        eqns = [self.equation(eqn) for eqn in program.eqns]
        if all(new is eqn for eqn, new in zip(program.eqns, eqns)):
            return original
        rebuilt = _compat.rewritten(program, eqns, list(program.outvars))
        return _compat.like(original, rebuilt, _compat.jaxpr_consts(original))

    def equation(self, eqn: Any) -> Any:
        """Returns an equation, changed; itself where it stays."""
        return eqn


def used(eqns: Sequence[Any]) -> list[Any]:
    """Returns the variables that equations read and none of them makes, in the order of their first use."""
    made = {var for eqn in eqns for var in eqn.outvars}
    found: dict[Any, None] = {}
    for eqn in eqns:
        for var in eqn.invars:
            if not isinstance(var, _compat.Literal) and var not in made:
                found[var] = None
    return list(found)


def unaliased(eqns: Sequence[Any], values: Mapping[Any, Any]) -> list[Any]:
    """Returns equations that read each value by one variable: the one that an equation of theirs makes, or else the one
    that is read first.

    Args:
      eqns: in an order in which they can run.
      values: variable -> the value that it is. Several are one value where something gives it a further name.
    """
    variables: dict[Any, Any] = {}
    found = []
    for eqn in eqns:
        operands = [
            atom if isinstance(atom, _compat.Literal) else variables.setdefault(values[atom], atom)
            for atom in eqn.invars
        ]
        variables.update((values[var], var) for var in eqn.outvars)
        found.append(eqn.replace(invars=operands))
    return found


def stretch(eqns: Sequence[Any], inputs: Sequence[Any], results: Sequence[Any], of: Any) -> Any:
    """Returns equations of the open jaxpr `of` as an open jaxpr of their own."""
    return _compat.build_jaxpr([], inputs, results, eqns, of.debug_info)


def with_equations(jaxpr: Any, eqns: Sequence[Any]) -> Any:
    """Returns an open jaxpr with other equations, whose effects are its own then."""
    return _compat.build_jaxpr(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, eqns, jaxpr.debug_info)


def inputs_of(jaxpr: Any) -> list[Any]:
    """Returns the variables of an open jaxpr's constants, then those of its arguments: the operands of `evaluate`."""
    return [*jaxpr.constvars, *jaxpr.invars]


def constants_as_inputs(jaxpr: Any) -> Any:
    """Returns an open jaxpr whose constants are its first arguments."""
    return _compat.build_jaxpr([], inputs_of(jaxpr), jaxpr.outvars, jaxpr.eqns, jaxpr.debug_info)


Item = TypeVar("Item")


def live(
    items: Sequence[Item],
    results: Iterable[Any],
    made: Callable[[Item], Collection[Any]],
    read: Callable[[Item], Iterable[Any]],
    always: Callable[[Item], bool] = lambda item: False,
) -> list[Item]:
    """Returns the items that it takes to make the results, in order: the others are dead code.

    Args:
      items: equations, operations and the like, in an order in which they can run.
      results: what has to be there at the end.
      made, read: what an item makes and what it reads; nothing is made by two of them.
      always: whether an item is taken although nothing uses what it makes.
    """
    wanted = set(results)
    found = []
    for item in reversed(items):
        if not wanted.isdisjoint(made(item)) or always(item):
            found.append(item)
            wanted.update(read(item))
    return found[::-1]


def needed(eqns: Sequence[Any], inputs: Iterable[Any], outputs: Iterable[Any], *, effects: bool = False) -> list[Any]:
    """Returns, in order, the equations that it takes to get from `inputs` to `outputs`, and those with side effects if
    asked.
    """
    given = set(inputs)
    made = {var for eqn in eqns for var in eqn.outvars}
    missing = lambda atoms: [var for var in atoms if isinstance(var, _compat.Var) and var not in given]
    found = live(
        eqns,
        missing(outputs),
        lambda eqn: eqn.outvars,
        lambda eqn: missing(eqn.invars),
        lambda eqn: effects and bool(eqn.effects),
    )
    lacking = {var for eqn in found for var in missing(eqn.invars)} - made
    assert not lacking, lacking
    return found


def function(
    eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], debug_info: Any, *, effects: bool = False
) -> Callable[..., list[Any]]:
    """Returns the function of `inputs` (variables) to `outputs` (variables or literals) that only runs the equations
    that it takes.

    Args:
      effects: whether equations with side effects are run although nothing uses their results.
    """
    run = needed(eqns, inputs, outputs, effects=effects)
    # DropVars are no inputs that build_jaxpr could bind; an unused position gets a variable of its own.
    names = [_compat.fresh_var(var.aval) if isinstance(var, _compat.DropVar) else var for var in inputs]
    jaxpr = _compat.build_jaxpr([], names, outputs, run, debug_info)
    return lambda *values: _compat.eval_jaxpr(jaxpr, [], *values)


def depends(eqns: Sequence[Any], sources: Iterable[Any]) -> set[Any]:
    """Returns the variables that depend on `sources`, themselves included."""
    found = set(sources)
    for eqn in eqns:
        if not found.isdisjoint(var for var in eqn.invars if isinstance(var, _compat.Var)):
            found.update(eqn.outvars)
    return found


def sources(eqns: Sequence[Any], results: Iterable[Any]) -> set[Any]:
    """Returns the variables that `results` depend on with a derivative, themselves included: through values of inexact
    dtypes alone.
    """

    def read(eqn: Any) -> list[Any]:
        operands = (var for var in eqn.invars if isinstance(var, _compat.Var))
        return [var for var in operands if jax.dtypes.issubdtype(getattr(var.aval, "dtype", bool), np.inexact)]

    wanted = {var for var in results if isinstance(var, _compat.Var)}
    return wanted.union(*(read(eqn) for eqn in live(eqns, wanted, lambda eqn: eqn.outvars, read)))


def renamed(names: Mapping[Any, Any], atom: Any) -> Any:
    """Returns what an atom is read as, where variables have other names: variable -> atom."""
    return atom if isinstance(atom, _compat.Literal) else names.get(atom, atom)


def without(closed: Any, instead: Callable[[Any, Sequence[Any]], Any]) -> Any:
    """Returns the program without some of its equations.

    Args:
      closed: the program.
      instead: takes an equation and its operands, as they are read now. It returns the atom that is read instead of the
        equation's first result, which then goes; None for an equation that stays.
    """
    jaxpr = _compat.open_jaxpr(closed)
    names: dict[Any, Any] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        operands = [renamed(names, atom) for atom in eqn.invars]
        atom = instead(eqn, operands)
        if atom is None:
            eqns.append(eqn.replace(invars=operands))
        else:
            names[eqn.outvars[0]] = atom
    rebuilt = _compat.rewritten(jaxpr, eqns, [renamed(names, atom) for atom in jaxpr.outvars])
    return _compat.like(closed, rebuilt, _compat.jaxpr_consts(closed))


def with_holes(
    fun: Callable[..., Any], operands: Sequence[Any], moving: Sequence[bool]
) -> tuple[Callable[..., Any], list[Any]]:
    """Returns the function of some operands alone, the others held fixed, and these operands: to be differentiated in
    them.

    Args:
      fun: takes all operands.
      operands: what it is given.
      moving: a flag for each: whether the function returned takes it.
    """

    def of(*some: Any) -> Any:
        rest = iter(some)
        return fun(*(next(rest) if flag else operand for operand, flag in zip(operands, moving, strict=True)))

    return of, [operand for operand, flag in zip(operands, moving) if flag]


def evaluate(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluates an open jaxpr: its constants first, then its arguments."""
    constants = len(jaxpr.constvars)
    return _compat.eval_jaxpr(jaxpr, args[:constants], *args[constants:])


def evaluate_in_scopes(jaxpr: Any, scope: str, *args: Any) -> list[Any]:
    """Evaluates an open jaxpr as `evaluate` does, each equation in a scope of its own: `scope` and its number."""
    known = dict(zip(inputs_of(jaxpr), args, strict=True))
    read = lambda atom: atom.val if isinstance(atom, _compat.Literal) else known[atom]
    for number, eqn in enumerate(jaxpr.eqns):
        with jax.named_scope(f"{scope}{number}"):
            known.update(zip(eqn.outvars, run(eqn, jaxpr.debug_info, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def run(eqn: Any, debug_info: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs one equation with these operands, whatever shapes its variables have."""
    inputs = [_compat.fresh_var(atom.aval) for atom in eqn.invars]
    results = [_compat.fresh_var(var.aval) for var in eqn.outvars]
    program = _compat.build_jaxpr([], inputs, results, [eqn.replace(invars=inputs, outvars=results)], debug_info)
    with jax.enable_checks(False) if getattr(jax.config, "jax_enable_checks", False) else contextlib.nullcontext():
        return _compat.eval_jaxpr(program, [], *operands)


def only(eqn: Any, wanted: Sequence[bool]) -> Any:
    """Returns an equation that makes each of its results of one operand, with those results alone."""
    keep = lambda each: [item for item, flag in zip(each, wanted, strict=True) if flag]
    return eqn.replace(invars=keep(eqn.invars), outvars=keep(eqn.outvars))


def splice(closed: Any, eqn: Any) -> list[Any]:
    """Returns a jaxpr's equations with an equation's operands for its inputs and results for its outputs."""
    jaxpr = _compat.open_jaxpr(closed)
    assert not jaxpr.constvars, "an equation's operands are all that its program uses"
    operands = dict(zip(jaxpr.invars, eqn.invars))
    results = {}
    for inner, outer in zip(jaxpr.outvars, eqn.outvars):
        assert inner not in results and inner not in operands, "every result is computed, and once"
        results[inner] = outer
    return [
        each.replace(
            invars=[var if isinstance(var, _compat.Literal) else operands.get(var, var) for var in each.invars],
            outvars=[results.get(var, var) for var in each.outvars],
        )
        for each in jaxpr.eqns
    ]
