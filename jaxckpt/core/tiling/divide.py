"""Divides a program into what runs once before the tiles, what runs in each tile, and what runs once after them.

What depends on no tiled argument runs before, as a random mask of all rows does: tiles take slices of it, so dropout
draws what it drew. Sums over the axis are complete after the last tile. What uses them runs after, on complete sums:
dividing by a count, a logarithm, another loss. An operation that needs both a complete sum and rows couples rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt import _compat
from jaxckpt._errors import TilingError
from jaxckpt.core import primitives, surgery
from jaxckpt.core.graph import aval_bytes
from jaxckpt.core.inline import inline, without_checkpoint, without_checkpoints
from jaxckpt.core.sources import short_source
from jaxckpt.core.tiling import axes
from jaxckpt.core.tiling import gathers as gathers  # these two note their rules
from jaxckpt.core.tiling import nested as nested
from jaxckpt.core.tiling.follow import Lines, ShareKey, axis_of, differentiable, error, located
from jaxckpt.core.tiling.loop import Tiles
from jaxckpt.core.tiling.shares import (
    SUM,
    WHOLE,
    CoupledError,
    Kind,
    Passage,
    Share,
    has_range_of_float32,
    shape_of,
    zeros,
)

_JOINED = (
    "Return the rows and the sum, and join them outside; a variance in tiles is jnp.mean(x**2) - jnp.mean(x) ** 2. "
    "Or tile another axis."
)


@dataclass(frozen=True, eq=False)
class Tiling:
    """A program that runs tile by tile.

    Attributes:
      program: the open jaxpr.
      consts: its constants.
      tiles: what runs in tiles; None where nothing does.
      before, after: what runs once, in order.
      outs: what a tile has of each result; WHOLE for what is computed before or after the tiles.
    """

    program: Any
    consts: tuple[Any, ...]
    tiles: Tiles | None
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    outs: tuple[Share, ...]

    def run(self, *values: Any) -> list[Any]:
        """Returns the program's results, of its constants and arguments."""
        inputs = surgery.inputs_of(self.program)
        env = dict(zip(inputs, values, strict=True))
        operands = [] if self.tiles is None else [var for var, _ in self.tiles.operands]
        made = [] if self.tiles is None else [var for var, _ in self.tiles.results]
        ending = [atom for atom in self.program.outvars if isinstance(atom, _compat.Var)]
        known = {*inputs, *made, *(var for eqn in self.after for var in eqn.outvars)}
        wanted = [var for var in (*operands, *surgery.used(self.after), *ending) if var not in known or var in inputs]
        self._extend(env, self.before, [var for var in dict.fromkeys(wanted) if var not in env])
        if self.tiles is not None:
            env.update(zip(made, self.tiles(*(env[var] for var in operands)), strict=True))
        self._extend(env, self.after, [var for var in dict.fromkeys(ending) if var not in env])
        return [atom.val if isinstance(atom, _compat.Literal) else env[atom] for atom in self.program.outvars]

    def rows_made_before(self) -> tuple[int, set[int]]:
        """Returns the bytes of what runs before the tiles and is taken by rows, and the places of the arguments that it
        is computed of.
        """
        makers = {var: eqn for eqn in self.before for var in eqn.outvars}
        operands = [] if self.tiles is None else self.tiles.operands
        taken = {var for var, share in operands if share.kind is Kind.ROWS and var in makers}
        sources, todo = set(taken), list(taken)
        while todo:
            eqn = makers.get(todo.pop())
            new = [] if eqn is None else [atom for atom in eqn.invars if isinstance(atom, _compat.Var)]
            todo += [var for var in new if var not in sources]
            sources.update(new)
        places = {place for place, var in enumerate(self.program.invars) if var in sources}
        return sum(aval_bytes(var.aval) for var in taken), places

    def _extend(self, env: dict[Any, Any], eqns: Sequence[Any], wanted: Sequence[Any]) -> None:
        """Computes variables, and adds them to those that are known."""
        given = list(env)
        needed = surgery.function(eqns, given, wanted, self.program.debug_info)
        env.update(zip(wanted, needed(*(env[var] for var in given)), strict=True))


def undivided(closed: Any) -> Tiling:
    """Returns a program that runs once: where the axis has one row, there is nothing to divide, and nothing couples."""
    jaxpr = _compat.open_jaxpr(closed)
    outs = (WHOLE,) * len(jaxpr.outvars)
    return Tiling(jaxpr, tuple(_compat.jaxpr_consts(closed)), None, tuple(jaxpr.eqns), (), outs)


def divided(closed: Any, shares: Sequence[Share], size: int, rows: int, parts: int) -> Tiling:
    """Returns a program divided.

    Args:
      closed: the program, with no effects.
      shares: what a tile has of its arguments.
      size: rows of the axis.
      rows: rows of a tile; the last one may have fewer.
      parts: into how many parts of consecutive rows the axis is cut; it divides both.

    Raises:
      TilingError: an operation couples rows.
    """
    program = inline(closed)
    while True:
        try:
            return _divided(program, shares, size, rows, parts)
        except _Stopped as stopped:
            # A checkpoint may hold a sum over the axis, and what needs it complete. The others stay.
            opened = without_checkpoint(program, stopped.eqn)
            if opened is program:
                opened = without_checkpoints(program)
            if opened is program:
                raise stopped.why from None
            program = inline(opened)


class _Stopped(Exception):
    """An equation that couples rows.

    Args:
      eqn: the equation, of the program that is divided.
      why: the error.
    """

    def __init__(self, eqn: Any, why: TilingError) -> None:
        super().__init__(str(why))
        self.eqn, self.why = eqn, why


def _divided(program: Any, shares: Sequence[Share], size: int, rows: int, parts: int) -> Tiling:
    plain = _Division(program, shares, size, folded=False)
    sums = plain.losses()
    if len(sums) > 1 and all(share == SUM and not shape_of(var) for var, share in sums):
        # Several sums that lead linearly to one: what is linear is computed in tiles, so that there is one loss.
        with contextlib.suppress(_Stopped):  # where what follows the sums has no rule, it runs after the tiles
            single = _Division(program, shares, size, folded=True)
            if len(single.losses()) < len(sums):
                return single.tiling(rows, parts)
    return plain.tiling(rows, parts)


def _unscaled(name: str) -> bool:
    """Whether the derivative of a scaled result need not be the derivative, scaled: a backward rule of the user's may
    clip it, and what devices send one another depends on what each of them has.
    """
    facts = primitives.of(name)
    return facts.backward_rule or facts.collective


def _is_a_rule(name: str) -> bool:
    facts = primitives.of(name)
    return facts.holds is primitives.Holds.RULE or facts.backward_rule


def _holds(jaxpr: Any, test: Callable[[str], bool]) -> bool:
    """Whether the name of an operation of a program, or of one inside of them, passes a test."""
    return any(test(_compat.primitive_name(eqn)) for eqn in surgery.walk(jaxpr))


def _has_range(jaxpr: Any) -> bool:
    """Whether all values of a program, those inside of its operations too, have the range of float32."""
    return all(
        has_range_of_float32(var.aval.dtype)
        for var in (*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars))
    ) and all(_has_range(_compat.open_jaxpr(inner)) for eqn in jaxpr.eqns for inner in _compat.held_jaxprs(eqn))


def _of_whole_values(eqn: Any, passage: Passage, debug_info: Any) -> list[Any]:
    """Returns equations that compute those results of an operation in the tiles that are the same in every tile: a
    counter that a loop carries beside rows, or what a checkpoint makes of a weight alone.
    """
    used = [out == WHOLE and not isinstance(var, _compat.DropVar) for var, out in zip(eqn.outvars, passage.outs)]
    if not any(used):
        return []
    if axes.is_each_by_itself(eqn):
        return [surgery.only(eqn, used)]
    wants = {atom: want for atom, want in zip(eqn.invars, passage.wants) if isinstance(atom, _compat.Var)}
    operands = list(wants)
    results = [var for var in eqn.outvars if not isinstance(var, _compat.DropVar)]
    program = _compat.build_jaxpr([], operands, results, [eqn], debug_info)
    lean, needed = _compat.without_unused(program, [flag for var, flag in zip(eqn.outvars, used) if var in results])
    taken = [var for var, flag in zip(operands, needed) if flag]
    whole = [var for var in taken if wants[var] == WHOLE]

    def compute(*values: Any) -> list[Any]:
        # Nothing that is the same in every tile depends on rows, but not every operation says so.
        given = dict(zip(whole, values))
        out = surgery.evaluate(lean, *(given[var] if var in given else zeros(var.aval) for var in taken))
        return [jnp.copy(each) if any(each is value for value in values) else each for each in out]

    made = eqn.replace(invars=whole, outvars=[var for var, flag in zip(eqn.outvars, used) if flag])
    return surgery.splice(jax.make_jaxpr(compute)(*(var.aval for var in whole)), made)


class _Division:
    """Goes through a program once.

    Args:
      program: the closed jaxpr, its calls written out.
      shares: of its arguments.
      size: of the axis.
      folded: whether what is linear in sums over the axis runs in the tiles rather than after them.
    """

    def __init__(self, program: Any, shares: Sequence[Share], size: int, *, folded: bool) -> None:
        self.jaxpr, self.consts = _compat.open_jaxpr(program), _compat.jaxpr_consts(program)
        self.size, self.folded = size, folded
        self.operands: dict[ShareKey, None] = {}
        given: dict[Any, Share] = dict.fromkeys(self.jaxpr.constvars, WHOLE)
        given.update(zip(self.jaxpr.invars, shares, strict=True))
        self.lines = Lines(axis_of(size), given, self.jaxpr.debug_info, self._outside)
        self.before: list[Any] = []
        self.after: list[Any] = []
        self.results: dict[ShareKey, None] = {}
        self.complete: dict[Any, Any] = {}  # what is computed of complete sums -> the equation that made the sum
        self.makers: dict[Any, Any] = {}
        for eqn in self.jaxpr.eqns:
            try:
                self._place(eqn)
            except TilingError as why:
                raise _Stopped(eqn, why) from None
        self.outs = tuple(self._out(atom) for atom in self.jaxpr.outvars)
        self.operands.update(
            ((var, share), None) for var, share in zip(self.jaxpr.invars, shares) if share.kind is Kind.ROWS
        )

    def _outside(self, key: ShareKey) -> None:
        self.operands[key] = None

    def _place(self, eqn: Any) -> None:
        """Puts an equation before, into, or after the tiles."""
        variables = [atom for atom in eqn.invars if isinstance(atom, _compat.Var)]
        late = [var for var in variables if var in self.complete]
        known = [atom for atom in eqn.invars if isinstance(atom, _compat.Literal) or atom not in self.complete]
        shares = [self.lines.share(atom) for atom in known]
        kinds = {share.kind for share in shares}
        if late:
            if Kind.ROWS in kinds:
                raise error(eqn, CoupledError(self._why(late[0]), _JOINED))
            self._after(eqn)
        elif kinds <= {Kind.WHOLE}:
            self.lines.note_whole(eqn)
            self.before.append(eqn)
        elif Kind.ROWS not in kinds and not self.folded:
            self._after(eqn)
        else:
            try:
                passage = axes.passage(eqn, shares, self.lines.axis)
                self.lines.add(eqn, passage)
                for each in _of_whole_values(eqn, passage, self.jaxpr.debug_info):
                    self.lines.note_whole(each)
                    self.before.append(each)
                self.makers.update(dict.fromkeys(eqn.outvars, eqn))
            except TilingError as inside:
                raise located(eqn, inside) from None
            except CoupledError as why:
                if Kind.ROWS not in kinds:
                    self._after(eqn)
                    return
                sums = [atom for atom, share in zip(eqn.invars, shares) if share == SUM]
                raise error(eqn, CoupledError(self._why(sums[0]), _JOINED) if sums else why) from None

    def _after(self, eqn: Any) -> None:
        source = eqn
        for atom in eqn.invars:
            if isinstance(atom, _compat.Literal):
                continue
            if atom in self.complete:
                source = self.complete[atom]
            elif self.lines.share(atom) == SUM:
                self.results[atom, SUM] = None
                source = self.makers.get(atom, eqn)
        self.after.append(eqn)
        self.complete.update(dict.fromkeys(eqn.outvars, source))

    def _why(self, var: Any) -> str:
        maker = self.complete.get(var, self.makers.get(var))
        if maker is None:
            return "joins rows with a sum over all rows"
        line = short_source(_compat.source_line(maker))
        return f"joins rows with the sum over all rows that {_compat.primitive_name(maker)} at {line} makes"

    def _out(self, atom: Any) -> Share:
        """Notes a result of the program; returns what a tile has of it."""
        if isinstance(atom, _compat.Literal) or atom in self.complete:
            return WHOLE
        share = self.lines.share(atom)
        if share != WHOLE and atom not in self.jaxpr.invars:
            self.results[atom, share] = None
        return share

    def losses(self) -> list[ShareKey]:
        """Returns what the tiles compute that has a derivative."""
        depends = differentiable(self.lines.lines, list(self.operands))
        return [key for key in self.results if depends[key]]

    def tiling(self, rows: int, parts: int) -> Tiling:
        """Returns the program divided, for tiles of so many rows of so many parts of the axis."""
        tiles = None
        if self.results:
            scales = not _holds(self.jaxpr, _unscaled) and _has_range(self.jaxpr)
            rules = _holds(self.jaxpr, _is_a_rule)
            keys = list(self.operands), list(self.results)
            tiles = Tiles(*keys, self.lines.lines, self.size, rows, parts, scales=scales, rules=rules)
        return Tiling(self.jaxpr, tuple(self.consts), tiles, tuple(self.before), tuple(self.after), self.outs)
