"""Follows an axis through a program, and evaluates the program for one tile.

The program is traced once, with all rows. Nothing is traced again with fewer: a function may read a size (a mean
divides by the number of rows). So a tile runs the equations as they are, with other parameters where they hold the
axis's size. `core/tiling/axes.py` says how the axis passes through an operation, and which parameters these are;
`core/tiling/nested.py` says it for operations that hold programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxckpt import _compat
from jaxckpt._errors import TilingError
from jaxckpt.core import primitives, surgery
from jaxckpt.core.inline import inline
from jaxckpt.core.sources import short_source
from jaxckpt.core.tiling import axes
from jaxckpt.core.tiling.shares import WHOLE, At, Axis, CoupledError, Kind, Passage, Share, is_differentiable

ShareKey = tuple[Any, Share]
"""A variable, and what a tile has of it."""


@dataclass(frozen=True, eq=False)
class Line:
    """One operation of a tile.

    Attributes:
      inputs: keys, or literals.
      outputs: keys.
      run: computes the results.
      stops: whether no derivative passes through it.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[ShareKey, ...]
    run: Callable[[At, list[Any]], Sequence[Any]]
    stops: bool = False


class Lines:
    """The operations of a tile, in order, as they are found.

    Args:
      axis: the axis.
      shares: variable -> what a tile has of it; grows.
      debug_info: of the program.
      outside: takes a key of a whole value, or of rows of one, that is computed outside of the tiles. None where there
        is nothing outside: then tiles slice whole values.
    """

    def __init__(
        self, axis: Axis, shares: dict[Any, Share], debug_info: Any, outside: Callable[[ShareKey], None] | None = None
    ) -> None:
        self.axis, self.shares, self.debug_info, self.outside = axis, shares, debug_info, outside
        self.lines: list[Line] = []
        self.makers: dict[Any, Any] = {}  # whole value -> the equation that makes it
        self._there: set[ShareKey] = set()
        self._lean: dict[ShareKey, bool] = {}
        self._narrow: dict[ShareKey, tuple[Any, Passage | None]] = {}

    def share(self, atom: Any) -> Share:
        """Returns what a tile has of a variable or a literal."""
        return WHOLE if isinstance(atom, _compat.Literal) else self.shares[atom]

    def note_whole(self, eqn: Any) -> None:
        """Notes an equation of whole values alone."""
        for var in eqn.outvars:
            self.shares[var] = WHOLE
            self.makers[var] = eqn

    def add(self, eqn: Any, passage: Passage) -> None:
        """Adds an equation, and what it takes of its operands.

        Raises:
          CoupledError: it takes of an operand what a tile does not have.
        """
        inputs = tuple(self.need(atom, want) for atom, want in zip(eqn.invars, passage.wants, strict=True))
        made = [
            _compat.fresh_var(var.aval) if out == WHOLE and self.outside is not None else var
            for var, out in zip(eqn.outvars, passage.outs, strict=True)
        ]  # a result that is the same in every tile is computed outside, for what reads it
        outputs = tuple(zip(made, passage.outs))
        stops = any(primitives.is_flat(_compat.primitive_name(eqn), atom.aval.dtype) for atom in eqn.invars[:1])
        self.lines.append(Line(inputs, outputs, self._run(eqn, passage), stops))
        self._there.update(outputs)
        self.shares.update(outputs)

    def need(self, atom: Any, want: Share) -> Any:
        """Returns the key of what is wanted of a value, or the literal that it is.

        Raises:
          CoupledError: a tile does not have that.
        """
        have = self.share(atom)
        key = (atom, want)
        if isinstance(atom, _compat.Literal):
            if want == WHOLE:
                return atom
            key = (_Same(atom), want)
        if have == want:
            if have == WHOLE and self.outside is not None:
                self.outside(key)
            return key
        if key in self._there:
            return key
        if have != WHOLE:
            raise CoupledError(_MISSING[have.kind, want.kind])
        if want.kind is Kind.ROWS and isinstance(atom, _compat.Var):
            if self._is_lean(atom, want):
                self._make(atom, want)
                return key
            if self.outside is not None:
                self.outside(key)
                return key
        self._there.add(key)
        whole = self.need(atom, WHOLE)
        self.lines.append(Line((whole,), (key,), lambda at, operands: [at.take(operands[0], want)]))
        return key

    def _is_lean(self, atom: Any, want: Share) -> bool:
        """Whether a tile makes its rows of a whole value from values that are smaller, or from nothing."""
        todo = [(atom, want)]
        while todo:  # not by recursion: a chain of operations may be as long as it likes
            key = todo[-1]
            eqn, found = self._narrowed(key)
            needed: list[ShareKey] = []
            if found is not None and primitives.of(_compat.primitive_name(eqn)).elementwise:
                needed = _rows_of(eqn, found)
            if unknown := [each for each in needed if each not in self._lean]:
                todo += unknown
            else:
                self._lean[key] = found is not None and all(self._lean[each] for each in needed)
                todo.pop()
        return self._lean[atom, want]

    def _narrowed(self, key: ShareKey) -> tuple[Any, Passage | None]:
        """Returns the equation that makes a whole value, and how a tile makes its rows; None for neither."""
        if key not in self._narrow:
            eqn = self.makers.get(key[0])
            self._narrow[key] = eqn, None if eqn is None else axes.narrowed(eqn, key[1], self.axis)
        return self._narrow[key]

    def _make(self, atom: Any, want: Share) -> None:
        """Adds what makes a tile's rows of a whole value, and of those that it is made of."""
        todo = [(atom, want)]
        while todo:
            key = todo[-1]
            eqn, found = self._narrowed(key)
            assert found is not None, "it is lean"
            lean = [each for each in _rows_of(eqn, found) if each not in self._there and self._is_lean(*each)]
            if lean:
                todo += lean
                continue
            todo.pop()
            if key not in self._there:
                inputs = tuple(self.need(a, share) for a, share in zip(eqn.invars, found.wants, strict=True))
                self.lines.append(Line(inputs, (key,), self._run(eqn, found)))
                self._there.add(key)

    def _run(self, eqn: Any, passage: Passage) -> Callable[[At, list[Any]], Sequence[Any]]:
        return passage.run or functools.partial(_run, eqn, passage.params, self.debug_info)


def _rows_of(eqn: Any, passage: Passage) -> list[ShareKey]:
    """Returns the variables of which an equation takes rows, with these."""
    pairs = zip(eqn.invars, passage.wants)
    return [(atom, share) for atom, share in pairs if share != WHOLE and isinstance(atom, _compat.Var)]


@dataclass(frozen=True, eq=False)
class _Same:
    """Stands for a literal in a key."""

    literal: Any

    @property
    def aval(self) -> Any:
        return self.literal.aval


_MISSING = {
    (Kind.ROWS, Kind.ROWS): "joins values that have the axis in different places",
    (Kind.ROWS, Kind.SUM): "adds a sum over the axis to rows of it",
    (Kind.ROWS, Kind.WHOLE): "needs all rows of the axis at once",
    (Kind.SUM, Kind.ROWS): "joins rows with a sum over all rows",
    (Kind.SUM, Kind.WHOLE): "needs the whole sum over the axis",
}


def _run(eqn: Any, params: Callable[[At], Any] | None, debug_info: Any, at: At, operands: list[Any]) -> list[Any]:
    return surgery.run(eqn if params is None else _compat.replace_params(eqn, **params(at)), debug_info, operands)


def evaluate(lines: Sequence[Line], env: dict[ShareKey, Any], at: At) -> None:
    """Computes what a tile has, into `env`: key -> array."""
    for line in lines:
        operands = [key.val if isinstance(key, _compat.Literal) else env[key] for key in line.inputs]
        env.update(zip(line.outputs, line.run(at, operands), strict=True))


def error(eqn: Any, why: CoupledError, hint: str = "") -> TilingError:
    """Returns the error of an equation that couples."""
    return TilingError(_compat.primitive_name(eqn), short_source(_compat.source_line(eqn)), str(why), hint or why.hint)


def located(eqn: Any, inside: TilingError) -> TilingError:
    """Returns the error of an operation inside of an equation, with the equation's line if it has none itself."""
    if inside.line:
        return inside
    return TilingError(inside.operation, short_source(_compat.source_line(eqn)), inside.reason, inside.hint)


@dataclass(frozen=True, eq=False)
class Followed:
    """A program that an operation holds, followed.

    Attributes:
      shares: of its inputs, its constants first.
      outs: of its results.
    """

    shares: tuple[Share, ...]
    outs: tuple[Share, ...]
    consts: tuple[Any, ...]
    keys: tuple[ShareKey, ...]
    lines: tuple[Line, ...] = field(repr=False)
    results: tuple[Any, ...] = field(repr=False)

    def __call__(self, at: At, inputs: Sequence[Any]) -> list[Any]:
        """Returns a tile's results of a tile's inputs."""
        env: dict[ShareKey, Any] = dict(zip(self.keys, (*self.consts, *inputs), strict=True))
        evaluate(self.lines, env, at)
        return [key.val if isinstance(key, _compat.Literal) else env[key] for key in self.results]


def _has_a_rule(eqn: Any) -> bool:
    """Whether an operation is, or holds, one with a backward rule of the user's for values that have derivatives."""
    if primitives.of(_compat.primitive_name(eqn)).backward_rule:
        return all(any(is_differentiable(each.aval.dtype) for each in them) for them in (eqn.invars, eqn.outvars))
    return any(_has_a_rule(each) for inner in _compat.held_jaxprs(eqn) for each in _compat.open_jaxpr(inner).eqns)


def follow(
    closed: Any,
    shares: Sequence[Share],
    size: int,
    wants: Sequence[Share | None] | None = None,
    *,
    by_row: bool = False,
) -> Followed:
    """Follows an axis through a program of an operation.

    Args:
      closed: the program.
      shares: of its inputs.
      size: of the axis.
      wants: what to have of each result; None for what is found.
      by_row: whether the program is run for each row, with and without tiles.

    Raises:
      TilingError: an operation in it couples.
      CoupledError: a result is not what is wanted.
    """
    program = inline(closed)
    jaxpr, consts = _compat.open_jaxpr(program), _compat.jaxpr_consts(program)
    given = [WHOLE] * len(consts) + list(shares)
    inputs = surgery.inputs_of(jaxpr)
    found = Lines(axis_of(size), dict(zip(inputs, given, strict=True)), jaxpr.debug_info)
    for eqn in jaxpr.eqns:
        own = [found.share(atom) for atom in eqn.invars]
        try:
            if all(share == WHOLE for share in own):
                if not by_row and _has_a_rule(eqn):
                    why = CoupledError(
                        "has a backward rule of its own, which would get a part of its gradient in each tile"
                    )
                    raise error(eqn, why, "Use it before the loop, branch or checkpoint that it is in.")
                found.note_whole(eqn)
                found.add(eqn, Passage(own, [WHOLE] * len(eqn.outvars)))
            else:
                found.add(eqn, axes.passage(eqn, own, found.axis))
        except CoupledError as why:
            raise error(eqn, why) from None
        except TilingError as inside:
            raise located(eqn, inside) from None
    outs = [found.share(atom) for atom in jaxpr.outvars]
    if wants is not None:
        outs = [out if want is None else want for out, want in zip(outs, wants, strict=True)]
    results = tuple(found.need(atom, out) for atom, out in zip(jaxpr.outvars, outs))
    keys = tuple(zip(inputs, given))
    return Followed(tuple(shares), tuple(outs), tuple(consts), keys, tuple(found.lines), results)


def axis_of(size: int) -> Axis:
    """Returns an axis of this size, to be followed."""

    def inside(
        closed: Any, shares: Sequence[Share], wants: Sequence[Share | None] | None = None, *, by_row: bool = False
    ) -> Followed:
        return follow(closed, shares, size, wants, by_row=by_row)

    return Axis(size, inside)


def joined(*shares: Share) -> Share:
    """Returns what a tile has of a value that is one of several, such as a loop's carry.

    Raises:
      CoupledError: there is nothing that all of them can be.
    """
    found = {share for share in shares if share != WHOLE}
    if len(found) > 1:
        raise CoupledError("has the axis in different places, or a sum over it, in its results")
    return found.pop() if found else WHOLE


def differentiable(lines: Sequence[Line], operands: Sequence[ShareKey]) -> dict[ShareKey, set[int]]:
    """Returns key -> the places of the operands that it depends on with a derivative.

    Args:
      lines: of a tile.
      operands: what they start from.
    """
    smooth = lambda key: is_differentiable(key[0].aval.dtype)
    found = {key: {place} if smooth(key) else set() for place, key in enumerate(operands)}
    for line in lines:
        inputs = [found[key] for key in line.inputs if not isinstance(key, _compat.Literal)]
        given = set() if line.stops else set().union(*inputs)
        found.update({key: given if smooth(key) else set() for key in line.outputs})
    return found
