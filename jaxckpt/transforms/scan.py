"""scan: lax.scan with a schedule that says which carries are kept for the backward pass.

The body is traced once, by lax.scan itself. How it runs then is the schedule's: see `jaxckpt.schedules`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.ad_checkpoint
from jax import lax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, InWords, check_flags, explains
from jaxckpt.actions import SAVE, Action, action_from
from jaxckpt.core import surgery
from jaxckpt.core.finish import finished_function
from jaxckpt.core.graph import graph_of, trace
from jaxckpt.core.leaves import is_inexact, is_symbolic
from jaxckpt.core.scans import Iteration, ScanRun, Values
from jaxckpt.core.schedule import ran
from jaxckpt.core.units import as_int, format_bytes, parse_bytes
from jaxckpt.policies import Policy, from_jax, policy_of
from jaxckpt.schedules import Schedule, schedule_of
from jaxckpt.schedules.body import take_apart
from jaxckpt.schedules.fit import fit
from jaxckpt.transforms.checkpoint import checkpoint

logger = logging.getLogger("jaxckpt")

# The name of carries that are not saved as they are, with a number of its own at each level: a checkpoint moves all
# that bears its name, in inner segments and in inner scans too, which keep their carries for no longer than they run.
_CARRY = "jaxckpt.scan:carry:"


class _Unasked(str):
    """The name of the schedule that is taken where none is asked for."""


_DEFAULT = _Unasked("sqrt")


@explains
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    schedule: Schedule = _DEFAULT,
    policy: Any = None,
    carry: Action | str = SAVE,
    budget: int | str | None = None,
) -> tuple[Any, Any]:
    """`lax.scan` that keeps only some of the carries for the backward pass, and runs iterations again to obtain the
    others.

    Arguments, results and errors are those of lax.scan.

    Args:
      f: the scan body, (carry, x) -> (carry, y), of pytrees. What it closes over is differentiated too.
      init: the carry before the first iteration; integers and random keys may be in it.
      xs: pytree of arrays with one row an iteration, or None.
      length: iterations; may be left out where there are xs.
      reverse: whether to start from the last row.
      unroll: as of lax.scan, for the innermost iterations. With `Slots`: the iterations that one turn of the backward
        loop takes; what is kept of them comes on top of the slots. 1 leaves the number to the schedule, which pays for
        it in slots. Where a budget picks slots, it picks this number too.
      schedule: "none" (lax.scan as it is; with a policy, each iteration keeps what the policy says), "every" (each
        iteration checkpointed), "sqrt" (segments of square-root length, one more run of each iteration), "log"
        (segments of segments, 4 at every level: fewest carries, about log4(length) more runs), an int (iterations in a
        segment), a tuple of ints (nested lengths, outermost first; their product at least the length),
        `Slots(n, host=0)`: at most n carries' bytes, and so many carries in host memory, placed by the optimum; or any
        other `jaxckpt.schedules.LoopSchedule`. Lengths need not divide: a shorter last segment takes what is left, and
        nothing is padded.
      policy: what is kept of each iteration where iterations are checkpointed or gone through again; as of
        `jaxckpt.checkpoint`.
      carry: what becomes of the carries between segments. SAVE; OFFLOAD, to keep them in host memory; or an action
        that keeps another form of them, such as `compress("bfloat16")` and `compress("int8") | OFFLOAD`, in schedules
        of segments. The scan's results stay exact; the backward pass runs segments again from what is restored. If no
        carries are kept, nothing changes. SAVE where the schedule has host slots.
      budget: bytes ("64MiB") that differentiating the scan may take, instead of a schedule: the one with the least
        recomputation that fits. It bounds the memory that the compiled value and gradient takes in addition to
        arguments, results, their cotangents, and the memory of the scan without a gradient: kept carries, residuals,
        copies, and the working memory of an iteration's backward pass. It holds for every target, and if everything is
        differentiated that can be. The log of "jaxckpt" says which schedule it is (level INFO).

    Returns:
      The carry after the last iteration, and the ys with one row an iteration.

    Raises:
      ArgumentError: the schedule, the policy, the action or the budget is invalid.
      InfeasibleBudgetError: no schedule fits into the budget; the error names the least bytes that one takes.
      ForwardModeError: when a scan with `Slots` is differentiated forward.
      TypeError, ValueError: lax.scan's own.

    >>> import jax, jax.numpy as jnp
    >>> from jaxckpt.schedules import Slots
    >>> def loss(w, schedule):
    ...     return scan(lambda c, x: (jnp.sin(w * c + x), None), 0.0, jnp.arange(1000.0), schedule=schedule)[0]
    >>> [round(float(jax.grad(loss)(0.5, schedule)), 4) for schedule in ("none", "sqrt", Slots(10))]
    [-0.9009, -0.9009, -0.9009]
    """
    action = _carry_action(carry)
    if not callable(f):
        raise ArgumentError("f", "a function (carry, x) -> (carry, y)", f)
    given = unroll if isinstance(unroll, bool) else as_int(unroll)
    if given is None or given < 0:
        raise ArgumentError("unroll", "a bool, or a whole number of at least 0", unroll)
    unroll = given
    if length is not None:
        count = as_int(length)
        if count is None or count < 0:
            raise ArgumentError("length", "an int of at least 0, or None", length)
        length = count
    check_flags(reverse=reverse)
    if rowless := [x for x in jax.tree.leaves(xs) if not getattr(x, "shape", ())]:
        raise ArgumentError("xs", "a pytree of arrays with one row an iteration, or None", rowless[0])
    if budget is not None and schedule is not _DEFAULT:
        raise ArgumentError("schedule", "omitted if a budget is given, because the budget chooses it", schedule)
    policy_of(policy)
    if isinstance(budget, str) and budget.strip().endswith("%"):
        hint = "A share of the whole step's peak is for jaxckpt.plan(loss, *args, budget='60%'), which plans its scans."
        raise ArgumentError("budget", "bytes that the scan may take, such as '64MiB'", budget, hint)
    limit = None if budget is None else parse_bytes(budget, "budget")
    known = schedule_of(0, schedule)
    if action.changes and (budget is not None or not known.recodes_carries):
        rule = "SAVE, OFFLOAD or another that keeps the carry as it is, with Slots, your own schedule, and a budget"
        hint = "Use a schedule of segments, such as 'sqrt', or set `recodes_carries = True` in your own."
        raise ArgumentError("carry", rule, action, hint)
    taken = take_apart(f, init, xs, length, reverse, unroll)
    if taken is None:
        return lax.scan(f, init, xs, length, reverse, unroll)
    call = _Call(
        body=taken.body,
        consts=taken.consts,
        init=taken.init,
        xs=taken.xs,
        unroll=unroll,
        carry=action,
        policy=policy,
        name=_first_name(taken.body.jaxpr, action),
    )
    if limit is None:
        chosen = schedule_of(taken.body.length, schedule)
    elif is_symbolic(taken.body.jaxpr.invars):
        shapes = [list(var.aval.shape) for var in taken.body.jaxpr.invars if is_symbolic([var])]
        hint = "Bytes of what is symbolic are not known: give a schedule, such as schedule='sqrt'."
        raise ArgumentError("budget", "left out where shapes are symbolic", InWords(f"a scan of {shapes}"), hint)
    else:
        found = fit(taken.body, limit, policy=policy is not None)
        chosen, runs = found.schedule, found.body_runs / max(taken.body.length, 1)
        facts = taken.body.length, budget, found.schedule, runs, format_bytes(found.bytes)
        logger.info("jaxckpt.scan, %d iterations within %s: %s, %.2f runs of each, at most %s", *facts)
    run = lambda consts, init, xs: ran(chosen, replace(call, consts=consts, init=init, xs=xs))
    return taken.finish(*finished_function(run)(call.consts, call.init, call.xs))


def _carry_action(carry: Action | str) -> Action:
    action = action_from(carry, "carry")
    if not action.keeps:
        rule = "SAVE, OFFLOAD or an action that keeps another form: the carries between segments are what is kept"
        raise ArgumentError("carry", rule, carry)
    return action


def _first_name(jaxpr: Any, carry: Action) -> int | None:
    """Returns the number of the first name for carries that are kept elsewhere, or in another form; None
    where they are saved.

    Numbers go up from those in the body: the same program has the same names wherever it is traced.
    """
    if carry.saves:
        return None
    tags = {tag for value in graph_of(_compat.close_jaxpr(jaxpr, ())).values for tag in value.tags}
    numbers = [tag.removeprefix(_CARRY) for tag in tags if tag.startswith(_CARRY)]
    return max((int(number) for number in numbers if number.isdigit()), default=-1) + 1


@dataclass(frozen=True, eq=False, kw_only=True)
class _Call(ScanRun):
    """A call of `jaxckpt.scan`.

    Attributes:
      policy: what is kept of each iteration that is checkpointed or gone through again.
      name: as of `_first_name`; each level of segments has the next one.
    """

    policy: Any
    name: int | None

    def iteration(self, actions: Mapping[int, Action] | None, *, alone: bool = False) -> Iteration:
        # Inside a scan the compiler cannot merge the recomputation with the forward pass, so prevent_cse is not needed.
        if actions:
            hint = "Actions by the numbers of values are for plans; in jaxckpt.scan, use policy=."
            raise ArgumentError("schedule", "one without actions", dict(actions), hint)
        body = lambda state, x: self.body.run(self.consts, state, x)
        if actions is None:
            return body if self.policy is None else checkpoint(body, policy=self.policy, prevent_cse=False)
        if self.name is None:
            return checkpoint(body, policy=self.policy, prevent_cse=False)
        if self.policy is not None:
            rule = f"None with schedule='every' and carry={self.carry!r}"
            hint = "Use a segment length, such as schedule=1."
            raise ArgumentError("policy", rule, self.policy, hint)
        return self._away(body)

    def segment(self, run: Iteration, *, alone: bool = False) -> Iteration:
        return checkpoint(run, prevent_cse=False) if self.name is None else self._away(run)

    def _away(self, f: Iteration) -> Iteration:
        """Returns iterations under a checkpoint of which the carry that they start from is kept on the host, or in
        another form.
        """
        assert self.name is not None
        name = f"{_CARRY}{self.name + self.depth}"

        def named(state: Values, x: Values) -> tuple[Values, Values]:
            away = [
                jax.ad_checkpoint.checkpoint_name(leaf, name) if is_inexact(jax.typeof(leaf)) else leaf
                for leaf in state
            ]
            return f(away, x)

        return checkpoint(named, policy=Policy({name: self.carry}, strict=False), prevent_cse=False)

    def keeping(self, actions: Mapping[int, Action] | None) -> tuple[_Call, list[Any] | None]:
        if actions:
            hint = "Actions by the numbers of values are for plans; in jaxckpt.scan, use policy=."
            raise ArgumentError("schedule", "one without actions", dict(actions), hint)
        if self.policy is None:
            return self, None
        resolved = policy_of(self.policy)
        assert resolved is not None
        rules = resolved if isinstance(resolved, Policy) else from_jax(resolved)
        body = self.body
        graph = trace(lambda *flat: _compat.eval_jaxpr(body.jaxpr, [], *flat), *(var.aval for var in body.jaxpr.invars))
        decided = rules.decide(graph)
        if others := {action for action in decided.values() if action.keeps and not action.saves}:
            named = " or ".join(sorted(map(repr, others)))
            rule = f"without {named} where the schedule is Slots(n): what a run keeps is needed at once"
            raise ArgumentError("policy", rule, self.policy, "carry=OFFLOAD moves the carries.")
        jaxpr = _compat.open_jaxpr(graph.jaxpr)
        # A tag gives a second variable to a value; keeping the first is enough.
        makers = [eqn for eqn in jaxpr.eqns if _compat.equation_name(eqn) is None]
        made = {var for eqn in makers for var in eqn.outvars if not isinstance(var, _compat.DropVar)}
        kept = [var for var, index in graph.body.values.items() if index in decided and var in made]
        opened = surgery.constants_as_inputs(jaxpr)
        extra = _compat.jaxpr_consts(graph.jaxpr)
        traced = replace(body, jaxpr=opened, consts=body.consts + len(extra))
        return replace(self, body=traced, consts=[*extra, *self.consts]), kept
