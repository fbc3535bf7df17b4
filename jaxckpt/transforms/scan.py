"""scan: lax.scan with a schedule that says which carries are kept for the backward pass.

The step is traced once, by lax.scan itself. A nested schedule then becomes scans of checkpointed scans, plain JAX, with all that JAX can do to
them; `Slots` goes to `jaxckpt.transforms.binomial`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError
from jaxckpt.actions import OFFLOAD, SAVE, Action, action_from
from jaxckpt.core.graph import graph_of, trace
from jaxckpt.core.units import parse_bytes
from jaxckpt.policies import Policy, from_jax, policy_of
from jaxckpt.transforms.binomial import scan_with_slots
from jaxckpt.transforms.budget import Runs, fit
from jaxckpt.transforms.checkpoint import checkpoint
from jaxckpt.transforms.schedules import Nested, Schedule, Slots, resolve
from jaxckpt.transforms.step import Scan, Step, Values, is_inexact, take_apart

# The name of carries that are kept on the host, with a number of its own at each level: a checkpoint moves all that bears its name, in inner
# segments and in inner scans too, which keep their carries for no longer than they run.
_CARRY = "jaxckpt.scan:carry:"

Body = Callable[[Values, Values], tuple[Values, Values]]


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    schedule: Schedule = "sqrt",
    policy: Any = None,
    carry: Action | str = SAVE,
    budget: int | str | None = None,
) -> tuple[Any, Any]:
    """`lax.scan`, keeping only some of the carries for the backward pass and running steps again to come by the others.

    Arguments and results are lax.scan's, and its errors where they do not fit together.

    Args:
      f: the step, (carry, x) -> (carry, y), of pytrees. What it closes over is differentiated too.
      init: the carry before the first step; integers and random keys may be in it.
      xs: pytree of arrays with one row a step, or None.
      length: steps; may be left out where there are xs.
      reverse: whether to start from the last row.
      unroll: as of lax.scan, for the innermost steps. With `Slots`: the steps that one turn of the backward loop takes; what is kept of them
        comes on top of the slots. 1 leaves the number to the schedule, which pays for it in slots.
      schedule: "none" (lax.scan as it is), "every" (each step checkpointed), "sqrt" (segments of square-root length, one more run of each
        step), "log" (segments of segments, 4 at every level: fewest carries, about log4(length) more runs), an int (steps in a segment), a
        tuple of ints (nested lengths, outermost first; their product at least the length), or `Slots(n)`: at most n carries' bytes, placed
        by the binomial optimum. Lengths need not divide: a shorter last segment takes what is left, and nothing is padded.
      policy: what is kept of each step where steps are checkpointed or gone through again; as of `jaxckpt.checkpoint`.
      carry: SAVE, or OFFLOAD to keep the carries between segments in host memory; nothing moves where none are kept.
      budget: bytes ("64MiB") that differentiating the scan may take, instead of a schedule: the one with the least recomputation that fits.
        It bounds what the compiled value and gradient takes beside arguments, results and their cotangents, and beside what the compiler
        takes for the scan without a gradient: kept carries, residuals, copies, and what a step's backward pass works with. Whatever the
        target, and if all that can be is differentiated.

    Returns:
      The carry after the last step, and the ys with one row a step.

    Raises:
      ArgumentError: the schedule, the policy, the action or the budget is none.
      InfeasibleBudgetError: no schedule fits into the budget; the error names the least bytes that one takes.
      ForwardModeError: when a scan with `Slots` is differentiated forward.
      TypeError, ValueError: lax.scan's own.

    >>> import jax, jax.numpy as jnp
    >>> from jaxckpt.transforms.schedules import Slots
    >>> def loss(w, schedule):
    ...     return scan(lambda c, x: (jnp.sin(w * c + x), None), 0.0, jnp.arange(1000.0), schedule=schedule)[0]
    >>> [round(float(jax.grad(loss)(0.5, schedule)), 4) for schedule in ("none", "sqrt", Slots(10))]
    [-0.9009, -0.9009, -0.9009]
    """
    action = _carry_action(carry)
    if not callable(f):
        raise ArgumentError("f", "a function (carry, x) -> (carry, y)", f)
    if not hasattr(unroll, "__index__") or unroll < 0:
        raise ArgumentError("unroll", "a bool, or a whole number of at least 0", unroll)
    if rowless := [x for x in jax.tree.leaves(xs) if not getattr(x, "shape", ())]:
        raise ArgumentError("xs", "a pytree of arrays with one row a step, or None", rowless[0])
    if budget is not None and schedule != "sqrt":
        raise ArgumentError("schedule", "left out where there is a budget, which chooses it", schedule)
    policy_of(policy)
    limit = None if budget is None else parse_bytes(budget, "budget")
    resolve(0, schedule)
    taken = take_apart(f, init, xs, length, reverse, unroll)
    if taken is None:
        return lax.scan(f, init, xs, length, reverse, unroll)
    plan = resolve(taken.step.length, schedule) if limit is None else fit(taken.step, limit, policy=policy is not None)
    if not isinstance(plan, Nested):
        kept = None
        if policy is not None:
            taken, kept = _kept_by(policy, taken)
        if not isinstance(plan, Slots):
            assert limit is not None
            return taken.finish(*scan_with_slots(taken, Runs(taken.step, limit, kept), kept=kept, carry=action))
        run = taken.step.length if unroll is True else max(int(unroll), 1)
        return taken.finish(*scan_with_slots(taken, plan.count, run=run, kept=kept, carry=action))
    return taken.finish(*_scan_nested(taken, plan, policy, action, unroll))


def _carry_action(carry: Action | str) -> Action:
    action = action_from(carry, "carry")
    if action not in (SAVE, OFFLOAD):
        raise ArgumentError("carry", "SAVE or OFFLOAD: the carries between segments are what is kept", carry)
    return action


# --------------------------------------------------------------------------------------------------------- nested schedules


def _scan_nested(taken: Scan, plan: Nested, policy: Any, carry: Action, unroll: int | bool) -> tuple[Values, Values]:
    step = taken.step

    def body(state: Values, x: Values) -> tuple[Values, Values]:
        return step.run(taken.consts, state, x)

    # Inside a scan nothing can be merged with the forward pass, so there is no need to prevent it.
    inner = body if policy is None else checkpoint(body, policy=policy, prevent_cse=False)
    return _run(plan, body, inner, policy, _names(plan, step, carry), step.reverse, unroll, taken.init, taken.xs)


def _names(plan: Nested, step: Step, carry: Action) -> tuple[str, ...]:
    """Returns the names of the carries that each level keeps on the host, outermost first; none where they stay on the device.

    Numbers go up from those in the body: the same program has the same names wherever it is traced.
    """
    if carry == SAVE:
        return ()
    tags = {tag for value in graph_of(_compat.close_jaxpr(step.jaxpr, ())).values for tag in value.tags}
    numbers = [tag.removeprefix(_CARRY) for tag in tags if tag.startswith(_CARRY)]
    first = max((int(number) for number in numbers if number.isdigit()), default=-1) + 1
    return tuple(f"{_CARRY}{number}" for number in reversed(range(first, first + plan.levels)))


def _run(
    plan: Nested,
    body: Body,
    inner: Body,
    policy: Any,
    names: tuple[str, ...],
    reverse: bool,
    unroll: int | bool,
    init: Values,
    xs: Values,
) -> tuple[Values, Values]:
    """Runs the steps of a nest; `inner` is the step as it is in plain stretches, `body` without the policy, `names` as of `_names`."""

    def steps(f: Body, init: Values, xs: Values, length: int) -> tuple[Values, Values]:
        return lax.scan(f, init, xs, length=length, reverse=reverse, unroll=unroll)

    if plan.inner is None:
        return steps(_checkpointed(body, policy, names) if plan.remat else inner, init, xs, plan.length)
    deeper, size, main = plan.inner, plan.inner.length, plan.count * plan.inner.length

    def segment(state: Values, rows: Values) -> tuple[Values, Values]:
        return _run(deeper, body, inner, policy, names[1:], reverse, unroll, state, rows)

    first, rest = _cut(xs, main, plan.rest, reverse)
    segments = [x.reshape(plan.count, size, *x.shape[1:]) for x in first]
    state, ys = lax.scan(_checkpointed(segment, None, names), init, segments, length=plan.count, reverse=reverse)
    ys = [y.reshape(main, *y.shape[2:]) for y in ys]
    if plan.rest:
        state, last = steps(inner, state, rest, plan.rest)
        ys = [jnp.concatenate([b, a] if reverse else [a, b]) for a, b in zip(ys, last)]
    return state, ys


def _cut(xs: Values, main: int, rest: int, reverse: bool) -> tuple[Values, Values]:
    """Returns the rows of the segments, and those of the steps that come after them."""
    if not rest:
        return xs, []
    if reverse:
        return [x[rest:] for x in xs], [x[:rest] for x in xs]
    return [x[:main] for x in xs], [x[main:] for x in xs]


def _checkpointed(f: Body, policy: Any, names: tuple[str, ...]) -> Body:
    """Returns a step or a segment under a checkpoint, of which the carry that it starts from is kept: on the host by the first name, if any."""
    if not names:
        return checkpoint(f, policy=policy, prevent_cse=False)
    if policy is not None:
        raise ArgumentError(
            "policy",
            "None with schedule='every' and carry=OFFLOAD",
            policy,
            "Use a segment length, such as schedule=1.",
        )

    name = names[0]

    def named(state: Values, x: Values) -> tuple[Values, Values]:
        away = [
            jax.ad_checkpoint.checkpoint_name(leaf, name) if is_inexact(jax.typeof(leaf)) else leaf for leaf in state
        ]
        return f(away, x)

    offload = _compat.keep_names([], [name])

    def run(state: Values, x: Values) -> tuple[Values, Values]:
        with _compat.working_checkpoints():
            return jax.checkpoint(named, policy=offload, prevent_cse=False)(state, x)

    return run


# ------------------------------------------------------------------------------------------------------ what a policy keeps


def _kept_by(policy: Any, taken: Scan) -> tuple[Scan, list[Any]]:
    """Returns the scan with its step traced for the policy, and the variables of the step that the policy keeps."""
    resolved = policy_of(policy)
    assert resolved is not None
    rules = resolved if isinstance(resolved, Policy) else from_jax(resolved)
    graph = trace(
        lambda *flat: _compat.eval_jaxpr(taken.step.jaxpr, [], *flat), *(var.aval for var in taken.step.jaxpr.invars)
    )
    actions = rules.decide(graph)
    if others := {action for action in actions.values() if action.keeps and action != SAVE}:
        named = " or ".join(sorted(map(repr, others)))
        rule = f"without {named} where the schedule is Slots(n): what a run keeps is needed at once"
        raise ArgumentError("policy", rule, policy, "carry=OFFLOAD moves the carries.")
    jaxpr = _compat.open_jaxpr(graph.jaxpr)
    # A tag gives a second variable to a value; keeping the first is enough.
    makers = [eqn for eqn in jaxpr.eqns if _compat.equation_name(eqn) is None]
    made = {var for eqn in makers for var in eqn.outvars if not isinstance(var, _compat.DropVar)}
    kept = [var for var, index in graph.body.values.items() if index in actions and var in made]
    opened = _compat.build_jaxpr([], [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, jaxpr.debug_info)
    extra = _compat.jaxpr_consts(graph.jaxpr)
    step = replace(taken.step, jaxpr=opened, consts=taken.step.consts + len(extra))
    return replace(taken, step=step, consts=[*extra, *taken.consts]), kept
