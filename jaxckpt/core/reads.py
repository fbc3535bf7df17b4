"""A derivative that reads the result of its own operation reads it from where it is kept.

`jax.checkpoint` keeps what is named: `n = name(tanh(x))`. The derivative of `tanh` reads `tanh(x)` itself, from before
it was named, so a policy that keeps `n` spends the memory and runs `tanh`, and all that leads to `x`, again. A name is
an identity. So after differentiation every read of `tanh(x)` can be a read of `n`, in loops and branches too: then what
is kept is what is read.

`reads_names` puts that into a function: its derivative is JAX's own, with the reads redirected. Functions whose kept
values no derivative reads in that way do not need it: `needs_redirection` tells.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt import _compat
from jaxckpt._errors import EffectsError
from jaxckpt.core import primitives, stored, surgery
from jaxckpt.core.forward import forward_pass
from jaxckpt.core.primitives import Holds
from jaxckpt.core.tie import tied_tangents

INTERNAL = stored.INTERNAL

CALL = "jaxckpt_reads_names"
"""What the call is named in a jaxpr by which `reads_names` brings its derivative; then come the words of its flags, and
the number of loops around it."""

_WAITS, _TIES, _LOOPS = "_waits", "_ties", "_in_"

_loops = jax.make_user_context(default_value=0)
"""Loops of jaxckpt around what is traced."""


def in_loop() -> contextlib.AbstractContextManager[Any]:
    """Within this context, what is traced is the body of a loop. If the loop is differentiated, its iterations are in
    order: a barrier in each would hold one more value, or stand in the way of a loop around it that keeps its own
    values on the host. What is differentiated within an iteration is ordered as everywhere.
    """
    return _loops(_loops.value + 1)  # type: ignore[no-any-return]


Flat = Callable[..., list[Any]]


def redirect(closed: Any) -> Any:
    """Returns the jaxpr with the reads of a value that the emitter names, those behind the name, as reads of the name's
    result.
    """
    return _Redirect().jaxpr(closed)


class _Redirect(surgery.Rewriter):
    def program(self, original: Any) -> Any:
        opened = _compat.open_jaxpr(original)
        names = _names(opened.eqns)
        inside = {id(eqn): self._inside(eqn) for eqn in opened.eqns}
        if not names and all(new is eqn for eqn, new in zip(opened.eqns, inside.values())):
            return original
        named: dict[Any, Any] = {}
        eqns: list[Any] = []
        early = {id(eqn) for naming, _ in names.values() for eqn in naming}

        def name(values: Sequence[Any]) -> None:
            """Names values as soon as they are there, for JAX puts the derivative of an operation right behind it."""
            waiting = list(values)
            while waiting:
                if (value := waiting.pop()) in names:
                    naming, result = names[value]
                    eqns.extend(naming)
                    named[value] = result
                    waiting += [var for eqn in naming for var in eqn.outvars]

        name(surgery.inputs_of(opened))
        for eqn in opened.eqns:
            if id(eqn) not in early:
                new = inside[id(eqn)]
                eqns.append(new if is_effect(new) else new.replace(invars=[_read(named, var) for var in new.invars]))
                name(eqn.outvars)
        outvars = [_read(named, var) for var in opened.outvars]
        rebuilt = _compat.rewritten(opened, eqns, outvars)
        return _compat.like(original, rebuilt, _compat.jaxpr_consts(original))

    def _inside(self, eqn: Any) -> Any:
        return surgery.with_programs(_compat.batched_reverse_rule(eqn), self.jaxpr)


def _names(eqns: Sequence[Any]) -> dict[Any, tuple[list[Any], Any]]:
    """Returns for each value that the emitter names (equations that do it, result): one, or those for both parts of a
    complex value. None for a value that is compared with what it is computed of.
    """
    found: dict[Any, tuple[list[Any], Any]] = {}
    makers: dict[Any, Any] = {}
    for eqn in eqns:
        makers.update(dict.fromkeys(eqn.outvars, eqn))
        name = _compat.equation_name(eqn)
        if name is not None and name.startswith(INTERNAL) and not isinstance(eqn.invars[0], _compat.Literal):
            if not _is_compared(eqn, makers):
                found[eqn.invars[0]] = [eqn], eqn.outvars[0]
        elif _compat.primitive_name(eqn) == "complex":
            named = [makers.get(var) for var in eqn.invars if not isinstance(var, _compat.Literal)]
            parts = [each.invars[0] for each in named if each is not None and _is_key(each.invars[:1], found)]
            taken = [makers[part] for part in parts if part in makers]
            names = [_compat.primitive_name(each) for each in taken]
            if names != ["real", "imag"] or taken[0].invars[0] is not taken[1].invars[0]:
                continue
            naming = [each for part, maker in zip(parts, taken) for each in (maker, *found.pop(part)[0])]
            found[taken[0].invars[0]] = [*naming, eqn], eqn.outvars[0]
    return found


def _is_compared(naming: Any, makers: Mapping[Any, Any]) -> bool:
    """Whether an equation names a value that the derivative of its own operation compares with the operands. That one
    runs the operation again; it needs the operands in any case. If these are computed again, or come back rounded, they
    may differ from before in the last digit, and none would be equal to the value that was kept.
    """
    maker = makers.get(naming.invars[0])
    return maker is not None and primitives.of(_compat.primitive_name(maker)).compares


def _is_key(atoms: Sequence[Any], mapping: Mapping[Any, Any]) -> bool:
    return any(isinstance(atom, _compat.Var) and atom in mapping for atom in atoms)


def _read(named: dict[Any, Any], atom: Any) -> Any:
    while (
        not isinstance(atom, _compat.Literal) and atom in named
    ):  # a name may be named again, by a checkpoint around this one
        atom = named[atom]
    return atom


# --------------------------------------------------------------------------------------------------------- the function


def reads_names(
    fun: Flat, *, waits: bool = False, ties: bool = False, change: Callable[[Any], Any] | None = None
) -> Flat:
    """Returns the function with a derivative that reads values behind the names that the emitter gave to them.

    Args:
      fun: flat lists of arrays in and out; it closes over nothing that is being traced.
      waits: whether the results wait until what goes to the host is there: see `stored`.
      ties: whether of the cotangents of its inputs none goes on before all are there.
      change: what is done to the traced function, a closed jaxpr, before it is differentiated; None for nothing.
    """

    def call(*args: Any) -> list[Any]:
        closed = jax.make_jaxpr(fun)(*args)
        if change is not None:
            closed = change(closed)
        if not _compat.allowed_in_custom_rules(closed):
            again = _compat.remat_disallowed_effects(_compat.open_jaxpr(closed))  # then it only runs forward
            if not again and stored.has_markers(_compat.open_jaxpr(closed)):
                raise EffectsError(
                    "A function must have no side effects if a value in it is kept in another form or on the host; it "
                    "has "
                    f"{', '.join(map(str, _compat.open_jaxpr(closed).effects))}. Save the value as it is, or move "
                    f"the effect out."
                )
            return _compat.eval_jaxpr(_compat.open_jaxpr(closed), _compat.jaxpr_consts(closed), *args)
        return call_reading_names(closed, waits, ties, _loops.value)(*args)

    return call


def call_reading_names(closed: Any, waits: bool, ties: bool, loops: int) -> Flat:
    """Returns the function of a closed jaxpr, with the derivative that `reads_names` says; `loops`: around it."""

    def primal(*args: Any) -> list[Any]:
        return _compat.eval_jaxpr(_compat.open_jaxpr(closed), _compat.jaxpr_consts(closed), *args)

    primal.__name__ = primal.__qualname__ = f"{CALL}{_WAITS * waits}{_TIES * ties}{_LOOPS}{loops}"
    made = jax.custom_jvp(primal)
    marked = stored.has_markers(_compat.open_jaxpr(closed))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        zero = jax.custom_derivatives.SymbolicZero
        moving = tuple(not isinstance(tangent, zero) for tangent in tangents)
        both, out_moving = differentiated(moving)
        given = [tangent for tangent in tangents if not isinstance(tangent, zero)]
        within = _loops.value >= loops  # it is differentiated in the loop in which it is called
        given = tied_tangents(given) if ties and within else given
        if marked:
            results, kept = stored.run_storing(forward(), primals, waits and within)
            flat = stored.run_with(both, kept, [*primals, *given])
        else:
            flat = _compat.eval_jaxpr(_compat.open_jaxpr(both), _compat.jaxpr_consts(both), *primals, *given)
            results = flat[: len(out_moving)]
        out = iter(flat[len(out_moving) :])
        return results, [
            next(out) if flag else zero(_compat.tangent_aval(result)) for result, flag in zip(results, out_moving)
        ]

    @functools.cache
    def forward() -> Any:
        return forward_pass(closed)

    @functools.cache
    def differentiated(moving: tuple[bool, ...]) -> tuple[Any, list[bool]]:
        both, out_moving = _compat.jvp_jaxpr(closed, moving)
        return redirect(both), out_moving

    made.defjvp(derivative, symbolic_zeros=True)
    return made


def is_effect(eqn: Any) -> bool:
    """Whether an equation is run for its side effects alone, such as a debugging print.

    It reads its operands from before they are named: jax.checkpoint fails on a kept value that such an equation reads
    (a KeyError, up to jax 0.12.0.1).
    """
    return bool(eqn.effects) and all(isinstance(var, _compat.DropVar) for var in eqn.outvars)


def is_call(eqn: Any) -> bool:
    """Whether an equation is the call that `reads_names` makes."""
    return _compat.primitive_name(eqn) == "custom_jvp_call" and _title(eqn).startswith(CALL)


def _title(eqn: Any) -> str:
    return _compat.jaxpr_title(eqn.params["call_jaxpr"])


def with_program(eqn: Any, closed: Any) -> Any:
    """Returns a call that `reads_names` has made with another program, and that one's derivative."""
    title = _title(eqn)
    call = call_reading_names(closed, _WAITS in title, _TIES in title, int(title.rpartition(_LOOPS)[2]))
    made = jax.make_jaxpr(call)(*(var.aval for var in eqn.invars))
    last = _compat.open_jaxpr(made).eqns[-1]
    return last.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


# -------------------------------------------------------------------------------------------------------- which need it


def needs_redirection(eqn: Any, results: Collection[int]) -> bool:
    """Whether the derivative of an equation reads one of its own results, of those at the given places.

    Found by differentiating it, once for each kind; what cannot be differentiated alone needs nothing.
    """
    primitive = _compat.primitive_name(eqn)
    facts = primitives.of(primitive)
    if facts.holds is Holds.RULE:
        return True  # a rule of the user's: most compute the result and use it
    if not facts.asks_result or facts.compares:
        return False
    avals = tuple(var.aval for var in eqn.invars)
    try:
        read = _own_reads(eqn.primitive, avals, tuple(sorted(eqn.params.items())))
    except TypeError:  # parameters that cannot be hashed
        read = _find_own_reads(eqn.primitive, avals, eqn.params)
    return not read.isdisjoint(results)


@_compat.cache_in_context
def _own_reads(primitive: Any, avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> frozenset[int]:
    return _find_own_reads(primitive, avals, dict(params))


def _find_own_reads(primitive: Any, avals: tuple[Any, ...], params: dict[str, Any]) -> frozenset[int]:
    moving = tuple(hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)
    if not any(moving):
        return frozenset()

    def run(*operands: Any) -> list[Any]:
        out = primitive.bind(*operands, **params)
        return list(out) if primitive.multiple_results else [out]

    try:
        closed = jax.make_jaxpr(run)(*avals)
        both, _ = _compat.jvp_jaxpr(closed, moving)
    except (
        Exception
    ):  # no derivative, or none outside of its place (a collective's axis): JAX says so where it is differentiated
        return frozenset()
    opened = _compat.open_jaxpr(both)
    read = {var for eqn in opened.eqns for var in eqn.invars if not isinstance(var, _compat.Literal)}
    count = len(_compat.open_jaxpr(closed).outvars)
    return frozenset(place for place, var in enumerate(opened.outvars[:count]) if var in read)
