"""A `lax.scan` run as the schedule of a plan's `Loop` says. The scan's equation becomes the equations of that program,
in the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import jax

from jaxckpt import _compat
from jaxckpt._errors import PlanMismatchError
from jaxckpt.actions import Action
from jaxckpt.core import reads, surgery
from jaxckpt.core.graph import Op
from jaxckpt.core.inline import inline
from jaxckpt.core.reads import Flat
from jaxckpt.core.regions import Loop
from jaxckpt.core.scans import Iteration, ScanBody, ScanRun, Values
from jaxckpt.core.schedule import ran
from jaxckpt.core.stored import unmarked


@dataclass(frozen=True)
class NamedBody:
    """A scan's body that names what is kept.

    Attributes:
      fun: the body as a function of constants, carry and x, whose derivative reads what is kept.
      plain: the same without a derivative of its own.
      policy: of a checkpoint that keeps what is named.
      names: of what is kept.
    """

    fun: Flat
    plain: Flat
    policy: Any
    names: frozenset[str]


class NamesFor(Protocol):
    """Names what is kept of a scan."""

    def body(self, actions: Mapping[int, Action]) -> NamedBody:
        """Returns the body, naming what the actions keep of its values and of its carry."""

    def carries(self, actions: Mapping[int, Action]) -> tuple[Flat, Any]:
        """Returns a function from the carry to itself, the leaves with an action named, and the policy of a checkpoint
        that keeps these.
        """


def can_be_rewritten(op: Op) -> bool:
    """Whether an operation is a scan that a plan can say something about: one with iterations, and no constants
    inside.
    """
    return op.primitive == "scan" and op.params["length"] > 0 and not _compat.jaxpr_consts(op.params["jaxpr"])


def carries_of(op: Op) -> Sequence[int]:
    """Returns the values that the carry of a scan is in its body."""
    consts, carries = _compat.num_scan_consts_carry(dict(op.params))
    return op.bodies[0].inputs[consts : consts + carries]


def check_loop(loop: Loop, op: Op | None) -> None:
    """Raises where an operation, None for none, cannot be run as a loop says.

    Raises:
      PlanMismatchError: it is no such scan, or the schedule cannot run so many iterations.
    """
    if op is None:
        why = "There is no such operation."
    elif not can_be_rewritten(op):
        why = f"It is {op.primitive}, of no iterations." if op.primitive == "scan" else f"It is {op.primitive}."
    else:
        length = op.params["length"]
        why = loop.schedule.refusal(length)
        why = why and f"The scan is of {length}. {why}"
    if why:
        raise PlanMismatchError(
            f"A loop must be a scan that its schedule can run; got operation {loop.op} for {loop.schedule!r:.200}. "
            f"{why} Plan anew."
        )


def rewrite(eqn: Any, op: Op, loop: Loop, names: NamesFor) -> list[Any]:
    """Returns equations that take the place of a scan's.

    Raises:
      PlanMismatchError: as of `check_loop`.
    """
    check_loop(loop, op)
    params = _compat.equation_params(eqn)
    consts, carries = _compat.num_scan_consts_carry(params)
    jaxpr = _compat.open_jaxpr(params["jaxpr"])
    xs = len(jaxpr.invars) - consts - carries
    body = ScanBody(jaxpr, consts, carries, xs, params["length"], params["reverse"])
    unroll = params["unroll"]

    def scan(*operands: Any) -> list[Any]:
        fixed, init, rows = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
        run = _Planned(body=body, consts=list(fixed), init=list(init), xs=list(rows), unroll=unroll, names=names)
        state, ys = ran(loop.schedule, run)
        return [*state, *ys]

    closed = jax.make_jaxpr(scan)(*(var.aval for var in eqn.invars))
    return surgery.splice(closed, eqn)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Planned(ScanRun):
    """A scan of a planned program; `names` names what is kept of it."""

    names: NamesFor

    def loop(self, f: Iteration) -> tuple[Values, Values]:
        # Written out as a whole it is no loop, and XLA merges what is run again with the first run.
        run = replace(self, unroll=1) if self.unroll >= self.body.length else self
        return ScanRun.loop(run, f)

    def iteration(self, actions: Mapping[int, Action] | None, *, alone: bool = False) -> Iteration:
        named, carries = self.names.body(actions or {}), self.body.carries

        def run(state: Values, x: Values) -> tuple[Values, Values]:
            out = named.fun(*self.consts, *state, *x)
            return out[:carries], out[carries:]

        return run if actions is None else jax.checkpoint(run, policy=named.policy, prevent_cse=alone)

    def segment(self, run: Iteration, *, alone: bool = False) -> Iteration:
        return jax.checkpoint(run, prevent_cse=alone)

    def segment_from(
        self, within: Callable[[Self], Iteration], actions: Mapping[int, Action], *, alone: bool = False
    ) -> Iteration:
        fixed, carries = self.body.consts, self.body.carries
        named, policy = self.names.carries(actions)

        def flat(*operands: Any) -> list[Any]:
            start, rows = named(*operands[fixed : fixed + carries]), list(operands[fixed + carries :])
            state, ys = within(replace(self, consts=list(operands[:fixed])))(start, rows)
            return [*state, *ys]

        kept = jax.checkpoint(reads.reads_names(flat), policy=policy, prevent_cse=alone)

        def run(state: Values, x: Values) -> tuple[Values, Values]:
            out = kept(*self.consts, *state, *x)
            return out[:carries], out[carries:]

        return run

    def keeping(self, actions: Mapping[int, Action] | None) -> tuple[_Planned, list[Any] | None]:
        named, body = self.names.body(actions or {}), self.body
        closed = inline(jax.make_jaxpr(named.plain)(*(var.aval for var in body.jaxpr.invars)))
        jaxpr = _compat.open_jaxpr(closed)
        extra = _compat.jaxpr_consts(closed)
        inputs = surgery.inputs_of(jaxpr)
        opened = _compat.build_jaxpr([], inputs, jaxpr.outvars, jaxpr.eqns, jaxpr.debug_info)
        names = ((eqn, _compat.equation_name(eqn)) for eqn in jaxpr.eqns)
        named_here = (eqn.invars[0] for eqn, name in names if name and unmarked(name) in named.names)
        kept = [atom for atom in named_here if isinstance(atom, _compat.Var)]  # JAX makes some of them literals
        traced = replace(body, jaxpr=opened, consts=body.consts + len(extra))
        return replace(self, body=traced, consts=[*extra, *self.consts]), None if actions is None else kept
