"""Runs tiles: the loop over them, and its derivative.

The loop is a `jax.custom_jvp`, so that every mode and order of differentiation works: JAX transposes the tangents. It
has two derivatives.

- In general, the tangents are a second loop, whose body is under a `jax.checkpoint` and computes its tile again. Its
  transpose is the backward pass. A tangent of a whole operand of a narrow dtype is given to it as float32, so that its
  transpose, the sum of the tiles' gradients, is added up in float32. (The transpose of a `lax.scan` adds up in the
  operand's own dtype.)
- Where all that has a derivative is one sum of scalars, a loss, each tile computes its gradients at once, in the
  forward pass. The tangent is the product of these gradients and the operands' tangents, and the backward pass only
  scales them. Nothing is computed twice, and nothing but the gradients is kept (Hsu et al., "Liger Kernel", 2024, do
  that for a language model's head). Such a gradient of a whole operand is float32 or wider. Not so where a backward
  rule of the user's may not be linear, or where devices send one another something: there the gradients of the loss,
  scaled, need not be those of the scaled loss. Nor where a value has a dtype of a smaller range than float32, such as
  float16: a user scales the loss so that gradients are in that range.

A `jax.custom_vjp` would do for reverse mode, but it has no forward mode. Rows of the results are written in place, into
what the loop carries, so a result is in memory once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat
from jaxckpt.core.tiling.follow import Line, ShareKey, differentiable, evaluate
from jaxckpt.core.tiling.shares import SUM, WHOLE, At, Kind, Share, is_differentiable, shape_of, unfolded, wide, zeros

_Values = list[Any]


class Tiles:
    """A function of whole arrays that runs tile by tile.

    Args:
      operands, results: (variable, what a tile has of it).
      lines: what a tile computes.
      total: rows of the axis.
      size: rows of a tile; the last one may have fewer.
      parts: into how many parts of consecutive rows the axis is cut; each tile has rows of every part.
      scales: whether the gradients of a scaled loss are its gradients, scaled.
      rules: whether there are derivatives of the user's in the tiles.
    """

    def __init__(
        self,
        operands: Sequence[ShareKey],
        results: Sequence[ShareKey],
        lines: Sequence[Line],
        total: int,
        size: int,
        parts: int,
        *,
        scales: bool,
        rules: bool,
    ) -> None:
        self.operands, self.results, self.lines = operands, results, lines
        self.total, self.size, self.parts = total, size, parts
        self.scales, self.ruled = scales, rules
        found = differentiable(lines, operands)
        self._depends = [found[key] for key in results]
        self._loop = self._with_derivative()

    def __call__(self, *operands: Any) -> _Values:
        """Returns the results, of whole operands."""
        return list(self._loop(*operands))

    # ------------------------------------------------------------------------------------------------------ one tile

    def tile(self, at: At, operands: Sequence[Any]) -> _Values:
        """Returns a tile's results, of what it has of the operands."""
        env: dict[ShareKey, Any] = dict(zip(self.operands, operands, strict=True))
        evaluate(self.lines, env, at)
        return [env[key] for key in self.results]

    def _at(self, start: Any, size: int | None = None) -> At:
        """Returns where a tile is, whose first row is the `start`-th in the order of the tiles."""
        return At(start, self.size if size is None else size, self.total, self.parts)

    def _taken(self, at: At, operands: Sequence[Any]) -> tuple[At, _Values]:
        """Returns where the tile is, and what it has of the operands.

        Whole operands are tied to the tile: the compiler would move what a tile computes of these alone out of the
        loop, weights in another type or order, and keep it for all tiles.
        """
        taken, start = list(operands), jnp.asarray(at.start)
        groups: dict[Any, list[int]] = {}  # a barrier's results all vary over the axes that one of its operands does
        for place, (var, share) in enumerate(self.operands):
            if share == WHOLE and var.aval.ndim and is_differentiable(var.aval.dtype):
                groups.setdefault(_compat.varying_axes(jax.typeof(operands[place])), []).append(place)
        for varying, places in groups.items():
            mark, tied = lax.optimization_barrier((start, [operands[place] for place in places]))
            if varying == _compat.varying_axes(jax.typeof(start)):
                at = replace(at, start=mark)
            for place, value in zip(places, tied, strict=True):
                taken[place] = value
        return at, [at.take(value, share) for value, (_, share) in zip(taken, self.operands)]

    def _start(self) -> _Values:
        """Returns what results are added to, or written into."""
        return [zeros(var.aval, wide(var.aval.dtype) if share == SUM else None) for var, share in self.results]

    def _added(self, at: At, into: _Values, found: Sequence[Any]) -> _Values:
        return [
            old + new.astype(old.dtype) if share == SUM else at.put(old, new.astype(old.dtype), share)
            for old, new, (_, share) in zip(into, found, self.results, strict=True)
        ]

    def _finished(self, found: Sequence[Any]) -> _Values:
        return [_compat.typed(value, var.aval) for value, (var, _) in zip(found, self.results)]

    # ------------------------------------------------------------------------------------------------------ all tiles

    def _over(
        self,
        body: Callable[[At, _Values, _Values], tuple[_Values, _Values]],
        state: _Values,
        rows: Sequence[tuple[Any, Share]],
    ) -> tuple[_Values, list[Any], _Values | None]:
        """Runs a body over the tiles.

        Args:
          body: (where, state, what the tile has of `rows`) -> (state, more).
          state: before the first tile.
          rows: whole values and where they have the axis.

        Returns:
          The state after the last tile; what else the tiles returned, stacked; and what the smaller last tile returned.
        """
        count, rest = divmod(self.total, self.size)
        stacked = [self._stacked(value, share) for value, share in rows]
        if count == 1:
            state, more = body(self._at(0), state, [whole[0] for whole, _ in stacked])
            more = [each[None] for each in more]
        else:

            def step(state: _Values, xs: tuple[Any, _Values]) -> tuple[_Values, _Values]:
                return body(self._at(xs[0]), state, xs[1])

            starts = jnp.arange(count, dtype=jnp.int32) * self.size
            state, more = lax.scan(step, state, (starts, [whole for whole, _ in stacked]))
        if not rest:
            return state, more, None
        state, last = body(self._at(count * self.size, rest), state, [left for _, left in stacked])
        return state, more, last

    def _stacked(self, value: Any, share: Share) -> tuple[Any, Any]:
        """Returns the tiles of a whole value, stacked, and the smaller last one; None where all are alike."""
        count, rest = divmod(self.total, self.size)
        folded = value.reshape(unfolded(value.shape, share, self.total, self.parts))
        dim, of_part = share.dim + 2, self.size // self.parts
        shape = folded.shape
        main = lax.slice_in_dim(folded, 0, count * of_part, axis=dim)
        main = jnp.moveaxis(main.reshape(*shape[:dim], count, of_part, *shape[dim + 1 :]), dim, 0)
        tile = lambda rows: self._at(0, rows).sized(value.shape, share)
        left = lax.slice_in_dim(folded, count * of_part, shape[dim], axis=dim).reshape(tile(rest)) if rest else None
        return main.reshape(count, *tile(self.size)), left

    def _unstacked(self, stacked: Any, left: Any, share: Share) -> Any:
        """Returns the whole value of the tiles, stacked, and the smaller last one."""
        count, rest = divmod(self.total, self.size)
        tile = stacked.shape[1:]
        shape = unfolded(tile, share, self.size, self.parts)
        dim = share.dim + 2
        folded = jnp.moveaxis(stacked.reshape(count, *shape), 0, dim)
        folded = folded.reshape(*shape[:dim], count * shape[dim], *shape[dim + 1 :])
        if left is not None:
            last = left.reshape(unfolded(left.shape, share, rest, self.parts))
            folded = lax.concatenate([folded, last], dim)
        return folded.reshape([n // self.size * self.total if d == share.dim else n for d, n in enumerate(tile)])

    def run(self, operands: Sequence[Any]) -> _Values:
        """Returns the results, of whole operands, without a derivative of its own."""

        def body(at: At, state: _Values, _: _Values) -> tuple[_Values, _Values]:
            at, taken = self._taken(at, operands)
            return self._added(at, state, self.tile(at, taken)), []

        return self._finished(self._over(body, self._start(), [])[0])

    def tangents(self, operands: Sequence[Any], moving: dict[int, Any], outs: Sequence[int]) -> tuple[_Values, _Values]:
        """Returns the results, if there are derivatives of the user's in the tiles, and tangents of some results.

        With derivatives of the user's the results are those of their forward rules, as in JAX: another derivative of
        them is one of these rules' operations, and forward mode has no other.

        Args:
          operands: whole.
          moving: place of an operand -> its tangent.
          outs: places of the results.
        """
        kinds = {place: self.operands[place][1] for place in moving}
        of_rows = [place for place in moving if kinds[place].kind is Kind.ROWS]
        of_whole = {
            place: tangent.astype(wide(tangent.dtype)) for place, tangent in moving.items() if place not in of_rows
        }
        sums = [place for place in outs if self.results[place][1] == SUM]
        others = [place for place in outs if place not in sums]
        begin = self._start() if self.ruled else []

        def compute(
            state: _Values, fixed: Sequence[Any], whole: dict[int, Any], given: _Values, start: Any, *, size: int
        ) -> tuple[_Values, _Values]:
            at, taken = self._taken(self._at(start, size), fixed)
            tangents = dict(zip(of_rows, given)) | {p: t.astype(taken[p].dtype) for p, t in whole.items()}

            def some(*values: Any) -> tuple[_Values, _Values]:
                found = list(taken)
                for place, value in zip(tangents, values):
                    found[place] = value
                results = self.tile(at, found)
                return [results[place] for place in (*sums, *others)], results

            start_from = [taken[place] for place in tangents]
            _, found, results = jax.jvp(some, start_from, list(tangents.values()), has_aux=True)
            values = self._added(at, state[: len(begin)], results) if begin else []
            added = [old + new.astype(old.dtype) for old, new in zip(state[len(begin) :], found)]
            return [*values, *added], found[len(sums) :]

        def body(at: At, state: _Values, given: _Values) -> tuple[_Values, _Values]:
            run = _checkpoint(functools.partial(compute, size=at.size), prevent_cse=isinstance(at.start, int))
            return run(state, list(operands), of_whole, given, jnp.asarray(at.start, jnp.int32))

        avals = [self.results[place][0].aval for place in sums]
        init = [*begin, *(zeros(aval, wide(aval.dtype)) for aval in avals)]
        state, more, last = self._over(body, init, [(moving[place], kinds[place]) for place in of_rows])
        results = self._finished(state[: len(begin)]) if begin else []
        found = dict(zip(sums, state[len(begin) :]))
        for i, place in enumerate(others):
            share = self.results[place][1]
            found[place] = self._unstacked(more[i], None if last is None else last[i], share)
        return results, [found[place].astype(self.results[place][0].aval.dtype) for place in outs]

    def gradients(self, operands: Sequence[Any], moving: Sequence[int], loss: int) -> tuple[_Values, _Values]:
        """Returns the results, and the gradients of one of them, a loss, in some operands.

        Args:
          operands: whole.
          moving: places of the operands.
          loss: the place of the result, a sum of scalars.
        """
        kinds = [self.operands[place][1] for place in moving]

        def compute(
            state: _Values, sums: _Values, fixed: Sequence[Any], start: Any, *, size: int
        ) -> tuple[_Values, _Values]:
            at, taken = self._taken(self._at(start, size), fixed)

            def of(*some: Any) -> tuple[Any, _Values]:
                given = list(taken)
                for place, value in zip(moving, some):
                    given[place] = value
                found = self.tile(at, given)
                return found[loss], found

            places = tuple(range(len(moving)))
            (_, found), slopes = jax.value_and_grad(of, places, has_aux=True)(*(taken[place] for place in moving))
            grads = [
                at.put(old, new.astype(old.dtype), share) if share.kind is Kind.ROWS else old + new.astype(old.dtype)
                for old, new, share in zip(sums, slopes, kinds)
            ]
            return self._added(at, state, found), grads

        def body(at: At, state: _Values, _: _Values) -> tuple[_Values, _Values]:
            run = _checkpoint(functools.partial(compute, size=at.size), prevent_cse=False)
            count = len(self.results)
            found, grads = run(state[:count], state[count:], list(operands), jnp.asarray(at.start, jnp.int32))
            return [*found, *grads], []

        avals = [self.operands[place][0].aval for place in moving]
        begin = [zeros(a, wide(a.dtype) if s.kind is Kind.WHOLE else None) for a, s in zip(avals, kinds)]
        state = self._over(body, [*self._start(), *begin], [])[0]
        count = len(self.results)
        return self._finished(state[:count]), state[count:]

    # ----------------------------------------------------------------------------------------------------- derivative

    def _with_derivative(self) -> Callable[..., _Values]:
        loop = jax.custom_jvp(lambda *operands: self.run(operands))
        zero = jax.custom_derivatives.SymbolicZero

        def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[_Values, _Values]:
            moving = {
                place: tangent
                for place, tangent in enumerate(tangents)
                if not isinstance(tangent, zero) and is_differentiable(self.operands[place][0].aval.dtype)
            }
            outs = self._moved(moving)
            found: dict[int, Any] = {}
            if not outs:
                results = list(loop(*primals))
            elif self.scales and len(outs) == 1 and self._is_loss(outs[0]):
                gradients = functools.partial(self.gradients, moving=list(moving), loss=outs[0])
                by_rules = self.ruled and not _compat.SCANS_KEEP_RULES
                results, slopes = (_with_rules(gradients) if by_rules else gradients)(primals)
                products = [_product(slope, tangent) for slope, tangent in zip(slopes, moving.values())]
                dtype = self.results[outs[0]][0].aval.dtype
                total = functools.reduce(jnp.add, [each.astype(wide(dtype)) for each in products])
                found[outs[0]] = total.astype(dtype)
            else:
                results, slopes = self.tangents(primals, moving, outs)
                found = dict(zip(outs, slopes))
                results = results if self.ruled else list(loop(*primals))
            avals = [_compat.tangent_aval(result) for result in results]
            return results, [found.get(place, zero(aval)) for place, aval in enumerate(avals)]

        loop.defjvp(derivative, symbolic_zeros=True)
        return loop

    def _moved(self, moving: dict[int, Any]) -> list[int]:
        """Returns the places of the results that have tangents if these operands do."""
        return [place for place, sources in enumerate(self._depends) if not sources.isdisjoint(moving)]

    def _is_loss(self, place: int) -> bool:
        var, share = self.results[place]
        return share == SUM and not shape_of(var) and bool(jnp.issubdtype(var.aval.dtype, jnp.floating))


def _checkpoint(fun: Callable[..., Any], *, prevent_cse: bool) -> Callable[..., Any]:
    """Returns a function under a checkpoint that keeps nothing; see `_compat.working_checkpoints`."""

    def run(*values: Any) -> Any:
        with _compat.working_checkpoints():
            return jax.checkpoint(fun, prevent_cse=prevent_cse)(*values)

    return run


def _with_rules(fun: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """Returns a function whose loops keep the derivatives of the user's that are in them.

    jax before 0.12 takes them out of a scan that is run while a linear function is built, as the derivatives of a
    `jax.custom_jvp` are, also where nothing of the scan is linear. Then second derivatives are those of the function
    without the user's.
    """
    whole = jax.custom_jvp(fun)
    whole.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    return whole


def _product(slope: Any, tangent: Any) -> Any:
    """Returns the part of a loss's tangent that an operand's tangent makes.

    Both factors are float32 or wider: the transpose gives rows their gradient times what the loss's gradient is, and
    that number would be rounded to the rows' dtype first, by the same factor in all rows.
    """
    dtype = wide(slope.dtype)
    return jnp.real(jnp.sum(slope.astype(dtype) * tangent.astype(dtype)))
