"""Cuts a failing program down, greedily: what can be left out while it fails in the same way is left out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from tests.fuzz.cases import Case
from tests.fuzz.programs import Function, Kind, Node, Program, Statement, replace_statements, statements_of


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """Returns the smallest case that was found within so many seconds for which `fails` still holds."""
    until = time.process_time() + seconds
    smaller = True
    while smaller and time.process_time() < until:
        smaller = False
        for candidate in _smaller(case):
            if time.process_time() > until:
                break
            if fails(candidate):
                case, smaller = candidate, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yields cases with something left out, the largest cuts first."""
    program = case.program
    for fun in _fewer_statements(program.fun):
        yield dataclasses.replace(case, program=dataclasses.replace(program, fun=fun))
    for candidate in (*_fewer_outputs(program), *_fewer_arguments(program)):
        yield dataclasses.replace(case, program=candidate)


def _fewer_statements(fun: Function) -> Iterator[Function]:
    everything = list(statements_of(fun))
    size = len(everything)
    while size:
        for start in range(len(everything) - size, -1, -size):
            chunk = everything[start : start + size]
            shorter = without(fun, {id(statement) for statement in chunk})
            if shorter is not None and shorter != fun:
                yield shorter
        size //= 2
    for statement in everything:  # one operand for another that was there earlier
        if statement.bodies:
            continue
        for operand in statement.operands:
            other = _earlier(fun, operand)
            if other is not None:
                yield renamed(fun, {operand: other}, only=statement)


def without(fun: Function, gone: set[int]) -> Function | None:
    """Returns the function without some statements; what uses their results uses earlier values of the kind, or a
    literal.
    """
    return _without(fun, gone, [], {})


def _without(fun: Function, gone: set[int], scope: list[tuple[str, Kind]], instead: dict[str, str]) -> Function:
    scope = [*(scope if fun.closed else []), *zip(fun.params, fun.kinds)]
    statements: list[Statement] = []
    for statement in fun.statements:
        if id(statement) not in gone:
            bodies = tuple(_without(body, gone, scope, instead) for body in statement.bodies)
            operands = tuple(instead.get(name, name) for name in statement.operands)
            statements.append(dataclasses.replace(statement, bodies=bodies, operands=operands))
            scope += zip(statement.results, statement.kinds)
            continue
        for name, kind in zip(statement.results, statement.kinds):
            same = [other for other, its in scope if its == kind]
            if same:
                instead[name] = same[-1]
            else:
                statements.append(Statement(f"$out = {kind.literal}", (), (name,), (kind,)))
                scope.append((name, kind))
    outputs = tuple(instead.get(name, name) for name in fun.outputs)
    made = dataclasses.replace(fun, statements=tuple(statements), outputs=outputs)
    return _tidied(made) if fun.name == "fun" else made


def _tidied(fun: Function) -> Function:
    """Returns the function without literals that nothing uses."""
    used = set(fun.outputs) | {name for statement in statements_of(fun) for name in statement.operands}
    used |= {name for statement in statements_of(fun) for body in statement.bodies for name in body.outputs}
    return replace_statements(
        fun, lambda s: None if not s.operands and not s.bodies and not used & set(s.results) else s
    )


def renamed(fun: Function, names: dict[str, str], only: Statement) -> Function:
    """Returns the function with other operands in one statement."""
    change = lambda s: dataclasses.replace(s, operands=tuple(names.get(n, n) for n in s.operands)) if s is only else s
    return replace_statements(fun, change)


def _earlier(fun: Function, name: str) -> str | None:
    """Returns the first result of the function's own statements that is of the same kind as `name`, if that is another
    and earlier.
    """
    kinds = {result: kind for s in fun.statements for result, kind in zip(s.results, s.kinds)}
    if name not in kinds:
        return None
    first = next(result for result, kind in kinds.items() if kind == kinds[name])
    return first if first != name else None


def _fewer_outputs(program: Program) -> Iterator[Program]:
    fun = program.fun
    if "jnp.sum" in fun.returns and " + " in fun.returns:
        first, _, _ = fun.returns.partition(" + ")
        for name in fun.outputs:
            yield dataclasses.replace(program, fun=dataclasses.replace(fun, returns=first, outputs=(name,)))
    elif "jnp.sum" not in fun.returns and fun.returns != "$0":
        for name in dict.fromkeys(fun.outputs):
            yield dataclasses.replace(program, fun=dataclasses.replace(fun, returns="$0", outputs=(name,)))
        for name in dict.fromkeys(fun.outputs):
            rest = tuple(other for other in fun.outputs if other != name)
            if rest:
                returns = f"({', '.join(f'${i}' for i in range(len(rest)))},)"
                yield dataclasses.replace(program, fun=dataclasses.replace(fun, returns=returns, outputs=rest))


def _fewer_arguments(program: Program) -> Iterator[Program]:
    used = set(program.fun.outputs) | {name for s in statements_of(program.fun) for name in s.operands}
    used |= {name for s in statements_of(program.fun) for body in s.bodies for name in body.outputs}
    leaves = [leaf for node in program.args for leaf in node.leaves()]
    plain = tuple(Node("leaf", leaf) for leaf in leaves if leaf.name in used)
    if plain and plain != program.args:
        yield dataclasses.replace(program, args=plain)
    for i, node in enumerate(program.args):
        rest = (*program.args[:i], *program.args[i + 1 :])
        if rest and not any(leaf.name in used for leaf in node.leaves()) and node.mode[0] not in used:
            yield dataclasses.replace(program, args=rest)
        kept = tuple(part for part in node.parts if any(leaf.name in used for leaf in part.leaves()))
        if node.form in ("dict", "tuple", "list") and kept and len(kept) < len(node.parts):
            yield dataclasses.replace(
                program, args=(*program.args[:i], dataclasses.replace(node, parts=kept), *program.args[i + 1 :])
            )
