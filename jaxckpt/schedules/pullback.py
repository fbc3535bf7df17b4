"""The backward pass of an iteration: what to keep for it, and which cotangents can wait.

*What to keep*: a few values of an iteration that make its backward pass cheap, the results of matmuls and the like,
carried on through sums as long as that makes them no larger. Everything else is elementwise and computed again.

*What can wait*: the cotangent of a matrix that is closed over is a sum over iterations of products, d(W) = sum over t
of outer(x_t, d(y_t)). Taken iteration by iteration that is a small matmul and a pass over all of d(W) each time. The
factors are kept for a run of iterations instead, and one matmul contracts over the iterations too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat
from jaxckpt.core import primitives, surgery
from jaxckpt.core.constants import ADDED, DIVIDED, ITERATION, KEPT, LARGE, TURN, UNDIVIDED
from jaxckpt.core.graph import aval_bytes
from jaxckpt.core.inline import inline
from jaxckpt.core.primitives import Holds, Result
from jaxckpt.core.reads import INTERNAL, redirect
from jaxckpt.core.scans import ScanBody, Values
from jaxckpt.schedules.body import in_forward_pass, pick, split
from jaxckpt.schedules.optimum import TurnCosts

# --------------------------------------------------------------------------------------------------------- what to keep


def is_cheap(eqn: Any) -> bool:
    """Whether an equation is not dear (`Primitive.dear`), or calls what is not; a loop or a branch always is."""
    facts = primitives.of(_compat.primitive_name(eqn))
    if facts.holds is Holds.CALL or facts.forward_rule:
        return all(is_cheap(e) for program in surgery.programs(eqn) for e in _compat.open_jaxpr(program).eqns)
    return not facts.dear


def dear_values(body: ScanBody) -> list[Any] | None:
    """Returns the variables of the body to keep so that computing the others again is cheap; None where keeping
    values cannot do that.

    It cannot where a loop or another inner program does the work: its own intermediate values would be needed. (A
    function with a derivative of its own, jax.custom_jvp, brings that along.)
    """
    dear = [eqn for eqn in body.jaxpr.eqns if not is_cheap(eqn) and eqn.outvars]
    if any(surgery.programs(eqn) and not primitives.of(_compat.primitive_name(eqn)).forward_rule for eqn in dear):
        return None
    kept = [var for eqn in dear for var in eqn.outvars if not isinstance(var, _compat.DropVar)]
    return _carried_on(body.jaxpr.eqns, kept, body.jaxpr.outvars)


def _carried_on(eqns: Sequence[Any], kept: list[Any], results: Sequence[Any]) -> list[Any]:
    """Returns the kept variables, each replaced by the sum that it goes into where nothing else uses it and the sum is
    no larger.
    """
    uses: dict[Any, list[Any]] = {}
    for eqn in eqns:
        for var in eqn.invars:
            if isinstance(var, _compat.Var):
                uses.setdefault(var, []).append(eqn)
    finals = {var for var in results if isinstance(var, _compat.Var)}
    chosen = dict.fromkeys(kept)
    for eqn in eqns:  # in order, so a value is carried on as far as it goes
        operands = [v for v in eqn.invars if isinstance(v, _compat.Var) and v in chosen]
        if not operands or not primitives.of(_compat.primitive_name(eqn)).linear or len(eqn.outvars) != 1:
            continue
        only_here = all(uses[v] == [eqn] and v not in finals for v in operands)
        if only_here and aval_bytes(eqn.outvars[0].aval) <= sum(aval_bytes(v.aval) for v in operands):
            for v in operands:
                del chosen[v]
            chosen[eqn.outvars[0]] = None
    return list(chosen)


_KEPT = f"{INTERNAL}kept:"  # what begins the names of an iteration's kept values


def _with_names(body: ScanBody, kept: Sequence[Any]) -> Any:
    """Returns the body's jaxpr with names at the values of `kept`."""
    places = {var: place for place, var in enumerate(kept)}
    eqns: list[Any] = []
    for eqn in body.jaxpr.eqns:
        outvars = [_compat.fresh_var(var.aval) if var in places else var for var in eqn.outvars]
        eqns.append(eqn.replace(outvars=outvars))
        eqns += (
            _compat.name_equation(computed, var, f"{_KEPT}{places[var]}", eqn)
            for computed, var in zip(outvars, eqn.outvars)
            if var in places
        )
    return _compat.rewritten(body.jaxpr, eqns, body.jaxpr.outvars)


def _given(traced: Any, given: Sequence[Any]) -> Any:
    """Returns the jaxpr of a pulled-back iteration that reads the kept values from the variables `given`.

    What computes them is then needed no more, also where a derivative reads the result of its own operation.
    """

    def kept(eqn: Any, operands: Sequence[Any]) -> Any:
        name = _compat.equation_name(eqn) or ""
        return given[int(name.removeprefix(_KEPT))] if name.startswith(_KEPT) else None

    return surgery.without(redirect(traced), kept)


# ---------------------------------------------------------------------------------------------------- the backward pass


@dataclass(frozen=True)
class Wanted:
    """Which cotangents there are and which are asked for: a flag for each constant, initial carry, carry, x and y."""

    consts: tuple[bool, ...]
    init: tuple[bool, ...]
    carry: tuple[bool, ...]
    xs: tuple[bool, ...]
    ys: tuple[bool, ...]

    def limited(self, consts: Sequence[bool], carry: Sequence[bool], xs: Sequence[bool], ys: Sequence[bool]) -> Wanted:
        """Returns those of them that have a flag here too; a carry's is also its initial value's."""
        both = lambda flags, others: tuple(a and b for a, b in zip(flags, others, strict=True))
        return Wanted(
            both(self.consts, consts),
            both(self.init, carry),
            both(self.carry, carry),
            both(self.xs, xs),
            both(self.ys, ys),
        )


@dataclass(frozen=True)
class Contraction:
    """A matmul that waits.

    Attributes:
      rows: that it contracts of one iteration.
      size, bytes: of its result.
    """

    rows: int
    size: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Backward:
    """The backward pass of a run of iterations, one iteration at a time and then what could wait.

    A *stack* holds one value of every iteration of the run, rows in the order of xs.

    Attributes:
      wanted: which cotangents it computes.
      defers: whether cotangents of constants may wait for the end of a run.
      again: whether `pull` runs the iteration again, or part of it that is not cheap.
      keep: (consts, carry, x) -> (next carry, kept): runs an iteration and returns what is kept of it. None: nothing
        is, so a run need not be run to its end, and `pull` runs each of its iterations again.
      pull: (consts, stacked rows, x, cotangents of carry and ys, sums) -> (cotangents of carry and x, sums, further
        stacked rows).
      settle: (consts, stacks, x rows, sums) -> sums: what could wait, over all rows. None: nothing could.
      carry_rows: which carries are stacked.
      stacks: abstract value of one row of each stack; carries first, then kept values, then factors that found no stack
        to take over.
      rows: how many of the stacks are carries and kept values, what `pull` reads.
      takes: for each factor that `pull` returns, the stack that its row is written to.
      gathered: abstract value of one row of each of the xs that `settle` reads.
      waiting: the matmuls whose results `settle` adds.
      waiting_bytes: of these results.
    """

    wanted: Wanted
    defers: bool
    again: bool
    keep: Callable[..., tuple[Values, Values]] | None
    pull: Callable[..., tuple[Values, Values, Values, Values]]
    settle: Callable[..., Values] | None
    carry_rows: tuple[int, ...]
    stacks: tuple[Any, ...]
    rows: int
    takes: tuple[int, ...]
    gathered: tuple[Any, ...]
    waiting: tuple[Contraction, ...]
    waiting_bytes: int

    @property
    def iteration_bytes(self) -> int:
        """Bytes that a run keeps of each of its iterations, with the rows of xs that are gathered for what waits."""
        return sum(map(aval_bytes, [*self.stacks, *self.gathered]))

    def parts(self, count: int) -> list[tuple[int, int]]:
        """Returns the iterations that `settle` is run for, (first, end) of each part of a run of `count`.

        XLA for a GPU divides a long contraction with a small result, so that all cores have work: what is to be added
        up lies in memory at once. Where this would be more than the run keeps, fewer iterations are contracted at once.
        """
        most = count
        for matmul in self.waiting:
            if DIVIDED * matmul.bytes > count * self.iteration_bytes:
                most = min(most, max(matmul.size // UNDIVIDED // max(matmul.rows, 1), 1))
        parts = -(-count // most)
        return [(count * i // parts, count * (i + 1) // parts) for i in range(parts)]

    def costs(self, body: ScanBody) -> TurnCosts:
        """Returns what runs of the body are weighed by."""
        unit = body.flops + ITERATION
        return TurnCosts(TURN / unit, KEPT * self.iteration_bytes / unit, ADDED * self.waiting_bytes / unit)


def backward(body: ScanBody, wanted: Wanted, kept: Sequence[Any] | None, *, defer: bool) -> Backward:
    """Returns the backward pass of an iteration.

    Args:
      body: of the scan.
      wanted: which cotangents to compute.
      kept: variables of the body whose values are kept; empty for none.
      defer: whether cotangents of constants may wait for the end of a run.
    """
    kept = list(kept or ())
    named = _with_names(body, kept)
    groups = _Inputs.of(body, wanted, kept)

    def pulled(*flat: Any) -> Values:
        consts, carry, x, _, ct_carry, ct_ys = groups.split(flat)

        def run(*operands: Any) -> Values:
            out = _compat.eval_jaxpr(named, [], *operands)
            return [*pick(out[: body.carries], wanted.carry), *pick(out[body.carries :], wanted.ys)]

        moving = [*wanted.consts, *wanted.carry, *wanted.xs]
        of_moving, primals = surgery.with_holes(run, [*consts, *carry, *x], moving)
        return list(jax.vjp(of_moving, *primals)[1]([*ct_carry, *ct_ys]))

    traced = inline(jax.make_jaxpr(pulled)(*groups.avals))
    traced = _given(traced, groups.split(_compat.open_jaxpr(traced).invars)[3])
    return _Splitter(body, wanted, kept, groups, traced, defer=defer).split()


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a pulled-back iteration in their order: constants, carries, xs, kept values, cotangents of carries
    and of ys.
    """

    avals: list[Any]
    counts: tuple[int, ...]

    @staticmethod
    def of(body: ScanBody, wanted: Wanted, kept: Sequence[Any]) -> _Inputs:
        inputs = [var.aval for var in body.jaxpr.invars]
        cts = [pick(body.carry_avals, wanted.carry), pick(body.y_avals, wanted.ys)]
        cts = [[_compat.cotangent_aval(aval) for aval in part] for part in cts]
        parts = [[var.aval for var in kept], *cts]
        return _Inputs(
            [*inputs, *(aval for part in parts for aval in part)],
            (body.consts, body.carries, body.xs, *map(len, parts)),
        )

    def split(self, flat: Sequence[Any]) -> list[Values]:
        return split(flat, self.counts)


@dataclass(frozen=True, eq=False)
class _Term:
    """A summand of a constant's cotangent that can wait: the sum over iterations of a product, or of a value; then what
    is linear.
    """

    const: int
    var: Any  # the summand
    leaf: Any  # the variable that is summed over iterations
    dot: Any  # its equation where it is a matmul of two factors
    factors: tuple[Any, ...]  # variables to have for every iteration: the matmul's operands, or the leaf


class _Splitter:
    """Parts a pulled-back iteration into what the next iteration waits for and what can wait for the end of a run."""

    def __init__(
        self, body: ScanBody, wanted: Wanted, kept: list[Any], groups: _Inputs, traced: Any, *, defer: bool
    ) -> None:
        jaxpr = _compat.open_jaxpr(traced)
        self.body, self.wanted, self.kept, self.defer = body, wanted, kept, defer
        self.eqns, self.debug_info = jaxpr.eqns, jaxpr.debug_info
        self.inputs = surgery.inputs_of(jaxpr)
        self.extra = _compat.jaxpr_consts(traced)  # arrays that differentiation made, the same at every iteration
        consts, self.carry, self.x, self.kept_in, ct_carry, ct_ys = groups.split(jaxpr.invars)
        self.consts = [*jaxpr.constvars, *consts]
        self.cts = [*ct_carry, *ct_ys]
        self.made = {var: eqn for eqn in self.eqns for var in eqn.outvars}
        self.moving = surgery.depends(self.eqns, [*self.carry, *self.x, *self.kept_in, *self.cts])
        self.cotangents = surgery.depends(self.eqns, self.cts)
        count = sum(wanted.consts), sum(wanted.carry)
        self.ct_consts = jaxpr.outvars[: count[0]]
        self.ct_carry = jaxpr.outvars[count[0] : sum(count)]
        self.ct_x = jaxpr.outvars[sum(count) :]

    def split(self) -> Backward:
        summands = [(i, var) for i, out in enumerate(self.ct_consts) for var in self._summands(out)]
        terms = self._waiting(summands) if self.defer else []
        waiting = {id(term.var) for term in terms}
        at_once = [(i, var) for i, var in summands if id(var) not in waiting]
        roots = list(dict.fromkeys(root for term in terms for root in self._roots(term)))

        settled = self._read_by(terms, roots)
        read = settled | self._read([*self.ct_carry, *self.ct_x, *(var for _, var in at_once), *roots])
        carry_rows = tuple(i for i, var in enumerate(self.carry) if var in read)
        kept_rows = [i for i, var in enumerate(self.kept_in) if var in read]

        rows = [*(self.carry[i] for i in carry_rows), *(self.kept_in[i] for i in kept_rows)]
        stacks = [var.aval for var in rows]
        free = [i for i, var in enumerate(rows) if var not in settled]
        takes: list[int] = []
        for root in roots:
            same = [i for i in free if (stacks[i].shape, stacks[i].dtype) == (root.aval.shape, root.aval.dtype)]
            if same:
                free.remove(same[0])
            else:
                stacks.append(root.aval)
            takes.append(same[0] if same else len(stacks) - 1)
        return Backward(
            wanted=self.wanted,
            defers=self.defer,
            again=self._runs_again(
                [*self.ct_carry, *self.ct_x, *(var for _, var in at_once), *roots], kept=bool(kept_rows)
            ),
            keep=self._keep([self.kept[i] for i in kept_rows]),
            pull=self._pull(rows, at_once, roots),
            settle=self._settle(terms, rows, roots, takes) if terms else None,
            carry_rows=carry_rows,
            stacks=tuple(stacks),
            rows=len(rows),
            takes=tuple(takes),
            gathered=tuple(var.aval for var in self.x if var in settled),
            waiting=_contractions(terms),
            waiting_bytes=sum(aval_bytes(term.dot.outvars[0].aval) for term in terms if term.dot is not None),
        )

    # ---------------------------------------------------------------------------------------------------- what can wait

    def _summands(self, var: Any) -> list[Any]:
        """Returns what a sum is of, in order; one of as many as the iteration uses a constant is as deep, so this does
        not recurse.
        """
        found, waiting = [], [var]
        while waiting:
            var = waiting.pop()
            eqn = self.made.get(var) if isinstance(var, _compat.Var) else None
            if eqn is not None and _compat.primitive_name(eqn) == "add_any":
                waiting.extend(reversed(eqn.invars))
            else:
                found.append(var)
        return found

    def _waiting(self, summands: list[tuple[int, Any]]) -> list[_Term]:
        """Returns the summands that wait: large matmuls, and sums of what is stacked for those anyway."""
        found = [term for i, var in summands if (term := self._term(i, var)) is not None]
        dots = [term for term in found if term.dot is not None]
        products = sum(aval_bytes(term.dot.outvars[0].aval) for term in dots)
        factors = sum(aval_bytes(root.aval) for root in {root for term in dots for root in self._roots(term)})
        if products < LARGE or products * ADDED < factors * KEPT:
            dots = []
        stacked = {root for term in dots for root in self._roots(term)}
        return dots + [term for term in found if term.dot is None and set(self._roots(term)) <= stacked]

    def _term(self, const: int, var: Any) -> _Term | None:
        leaf = var
        while isinstance(leaf, _compat.Var) and leaf in self.made:
            eqn = self.made[leaf]
            name = _compat.primitive_name(eqn)
            moving = [i for i, v in enumerate(eqn.invars) if isinstance(v, _compat.Var) and v in self.moving]
            if name == "dot_general" and len(moving) == 2:
                return _Term(const, var, leaf, eqn, tuple(eqn.invars))
            if len(moving) != 1:
                break
            operand = eqn.invars[moving[0]]
            alone = primitives.of(name).linear and len(eqn.invars) == 1
            if not alone and not primitives.is_linear_in(name, moving[0], operand.aval.dtype):
                break
            leaf = operand
        if isinstance(leaf, _compat.Var) and leaf in self.cotangents and leaf is not var:
            return _Term(const, var, leaf, None, (leaf,))
        return None

    def _roots(self, term: _Term) -> list[Any]:
        """Returns what has to be stacked for a term: of each factor the value under its layout, unless the iteration
        was given it or kept it.
        """
        roots = []
        for factor in term.factors:
            while (eqn := self.made.get(factor)) is not None and _is_layout(eqn):
                factor = eqn.invars[0]
            if factor in self.made or factor in self.cotangents:
                roots.append(factor)
        return roots

    def _read(self, outputs: Iterable[Any]) -> set[Any]:
        """Returns the variables that one iteration of the loop reads for `outputs`, and those of `outputs`
        themselves.
        """
        outputs = [var for var in outputs if isinstance(var, _compat.Var)]
        run = surgery.needed(self.eqns, self.inputs, outputs, effects=not self.defer)
        return {v for eqn in run for v in eqn.invars if isinstance(v, _compat.Var)} | set(outputs)

    def _runs_again(self, outputs: list[Any], *, kept: bool) -> bool:
        forward = [
            eqn
            for eqn in surgery.needed(self.eqns, self.inputs, [var for var in outputs if isinstance(var, _compat.Var)])
            if self.cotangents.isdisjoint(eqn.outvars) and not self.moving.isdisjoint(eqn.outvars)
        ]
        return any(not is_cheap(eqn) for eqn in forward) or (bool(forward) and not kept)

    def _read_by(self, terms: list[_Term], roots: list[Any]) -> set[Any]:
        """Returns the variables that are read for the factors of what waits, but for those that are stacked for it."""
        factors = [factor for term in terms for factor in term.factors]
        run = surgery.needed(self.eqns, [*self.inputs, *roots], factors)
        read = {v for eqn in run for v in eqn.invars if isinstance(v, _compat.Var)}
        return (read | set(factors)) - set(roots)

    # -------------------------------------------------------------------------------------------------------- functions

    def _keep(self, kept: list[Any]) -> Callable[..., tuple[Values, Values]] | None:
        carries, jaxpr = self.body.carries, in_forward_pass(self.body).jaxpr
        if not self.defer or not (kept or jaxpr.effects):
            return None
        run = surgery.function(
            jaxpr.eqns, jaxpr.invars, [*jaxpr.outvars[:carries], *kept], jaxpr.debug_info, effects=True
        )

        def keep(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
            out = run(*consts, *carry, *x)
            return out[:carries], out[carries:]

        return keep

    def _pull(self, rows: list[Any], at_once: list[tuple[int, Any]], roots: list[Any]) -> Callable[..., Any]:
        # What is scattered goes straight into the sum so far, one such summand of each constant, before others are
        # added.
        reads = self._reads([*self.ct_carry, *self.ct_x, *(var for _, var in at_once), *roots])
        scattered = {i: var for i, var in reversed(at_once) if self._is_scattered(var, reads)}
        added = [(i, var) for i, var in at_once if scattered.get(i) is not var]
        targets = [self.made[var].invars[0] for var in scattered.values()]
        outputs = [*self.ct_carry, *self.ct_x, *scattered.values(), *(var for _, var in added), *roots]
        inputs = [*self.consts, *rows, *self.x, *self.cts, *targets]
        # Side effects of the iteration belong to the one that runs it, which is `keep` in a run of several iterations.
        run = surgery.function(self.eqns, inputs, outputs, self.debug_info, effects=not self.defer)
        counts = [len(self.ct_carry), len(self.ct_x), len(scattered), len(added), len(roots)]

        def pull(
            consts: Values, row: Values, x: Values, cts: Values, totals: Values
        ) -> tuple[Values, Values, Values, Values]:
            totals = list(totals)
            out = run(*self.extra, *consts, *row, *x, *cts, *(totals[i] for i in scattered))
            ct_carry, ct_x, sums, summands, factors = split(out, counts)
            for i, value in zip(scattered, sums):
                totals[i] = value
            for (i, _), value in zip(added, summands):
                totals[i] = lax.add(totals[i], value)
            return ct_carry, ct_x, totals, factors

        return pull

    def _reads(self, outputs: Sequence[Any]) -> Counter[int]:
        """Returns how often each variable (its id) is read on the way to `outputs`, or is one of them."""
        run = surgery.needed(self.eqns, self.inputs, outputs, effects=not self.defer)
        return Counter(map(id, [*outputs, *(var for eqn in run for var in eqn.invars)]))

    def _is_scattered(self, var: Any, reads: Counter[int]) -> bool:
        """Whether a summand is rows scattered into zeros, an embedding's, and neither it nor the zeros serve anything
        else.

        For it becomes the sum so far, which nothing else may take for the summand.
        """
        eqn = self.made.get(var) if isinstance(var, _compat.Var) else None
        if eqn is None or _compat.primitive_name(eqn) != "scatter-add":
            return False
        target = self.made.get(eqn.invars[0])
        if target is None or _compat.primitive_name(target) != "broadcast_in_dim":
            return False
        fill = target.invars[0]
        alone = reads[id(var)] == reads[id(eqn.invars[0])] == 1
        return isinstance(fill, _compat.Literal) and not fill.val and alone

    def _settle(
        self, terms: list[_Term], rows: list[Any], roots: list[Any], takes: list[int]
    ) -> Callable[[Values, Values, Values, Values], Values]:
        per_row = [*rows, *roots, *self.x]
        factors = list(dict.fromkeys(factor for term in terms for factor in term.factors))
        expand = surgery.function(self.eqns, [*self.consts, *per_row], factors, self.debug_info)
        tails = [surgery.function(self.eqns, [*self.consts, term.leaf], [term.var], self.debug_info) for term in terms]

        def settle(consts: Values, stacks: Values, x: Values, totals: Values) -> Values:
            consts = [*self.extra, *consts]
            stacked = [*stacks[: len(rows)], *(stacks[i] for i in takes), *x]
            axes = [None] * len(consts) + [0] * len(stacked)
            values = dict(zip(factors, jax.vmap(expand, in_axes=axes)(*consts, *stacked)))
            totals = list(totals)
            for term, tail in zip(terms, tails):
                if term.dot is None:
                    leaf = jnp.sum(values[term.leaf], axis=0, dtype=term.leaf.aval.dtype)
                else:
                    leaf = _contract(term.dot, *(values[factor] for factor in term.factors))
                totals[term.const] = lax.add(totals[term.const], tail(*consts, leaf)[0])
            return totals

        return settle


def _is_layout(eqn: Any) -> bool:
    """Whether an equation only says how its operand lies in memory."""
    return primitives.of(_compat.primitive_name(eqn)).result >= Result.REORDERED and len(eqn.invars) == 1


def _contractions(terms: Sequence[_Term]) -> tuple[Contraction, ...]:
    """Returns the matmuls that waited, those that share an operand as one, which is what XLA makes of them."""
    dots = {id(term.dot): term for term in terms if term.dot is not None}
    found = []
    for term in dots.values():
        left, axes = term.dot.invars[0].aval, term.dot.params["dimension_numbers"][0][0]
        merged = [other.dot.outvars[0].aval for other in dots.values() if set(other.factors) & set(term.factors)]
        rows = math.prod(left.shape[axis] for axis in axes)
        found.append(Contraction(rows, sum(aval.size for aval in merged), sum(map(aval_bytes, merged))))
    return tuple(dict.fromkeys(found))


def _contract(dot: Any, left: Any, right: Any) -> Any:
    """Returns the matmul of an equation with its leading axis, of iterations, contracted too."""
    (left_axes, right_axes), (left_batch, right_batch) = dot.params["dimension_numbers"]
    shift = lambda axes: tuple(axis + 1 for axis in axes)
    params = {**dot.params}
    params["dimension_numbers"] = (
        ((0, *shift(left_axes)), (0, *shift(right_axes))),
        (shift(left_batch), shift(right_batch)),
    )
    # Neighbouring contracted axes are one axis: a plain matmul needs no transposition. Sharded axes cannot be merged.
    sharded = any(part is not None for value in (left, right) for part in jax.typeof(value).sharding.spec)
    if not sharded and not left_batch and tuple(left_axes) == tuple(right_axes) == tuple(range(len(left_axes))):
        merged = len(left_axes) + 1
        left, right = (value.reshape(math.prod(value.shape[:merged]), *value.shape[merged:]) for value in (left, right))
        params["dimension_numbers"] = (((0,), (0,)), ((), ()))
    return dot.primitive.bind(left, right, **params)
