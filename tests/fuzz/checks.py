"""What must hold of every program: equal results and gradients, kept values as decided and not computed again, budgets
that hold.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxckpt
from jaxckpt import ForwardModeError, InfeasibleBudgetError, NotDifferentiableError, Plan, Policy, UnmatchedTagError
from jaxckpt.core.graph import Body, Graph, graph_of
from jaxckpt.core.reads import is_effect
from jaxckpt.planner.problems import problem_of
from jaxckpt.policies import policy_of
from tests.fuzz.cases import Case, Failed, Invalid
from tests.fuzz.compare import Differentiated, compare, is_array, is_inexact, wide


def check(case: Case) -> None:
    """Checks a case.

    Raises:
      Invalid: the program fails without jaxckpt.
      Failed: a promise does not hold.
      Exception: whatever else jaxckpt raises.
    """
    {"checkpoint": _check_checkpoint, "scan": _check_scan, "plan": _check_plan, "auto": _check_auto}[case.kind](case)


# ----------------------------------------------------------------------------------------------------------- checkpoint


def _reference(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...], Differentiated]:
    try:
        fun, args = case.program.load()
        return fun, args, Differentiated(fun, args)
    except Exception as error:
        raise Invalid(f"{type(error).__name__}: {error}") from error


def _check_checkpoint(case: Case) -> None:
    fun, args, reference = _reference(case)
    policy = case.option("policy")
    statics = tuple(i for i, arg in enumerate(args) if (not is_array(arg) and isinstance(arg, str)) or callable(arg))
    wrapped = jaxckpt.checkpoint(fun, policy=policy, prevent_cse=case.option("prevent_cse"), static_argnums=statics)
    graph = _traced(fun, args)
    try:
        actual = compare(
            "results and gradients under a checkpoint are those without", reference, wrapped, args, case.option("mode")
        )
    except UnmatchedTagError:
        _must_be_unmatched(policy_of(policy), graph)
        return
    except ForwardModeError as error:
        # Eagerly, jax.checkpoint too evaluates a custom_vjp's tangents that are constants, which a custom_jvp made.
        try:
            compare("JAX's", reference, jax.checkpoint(fun, static_argnums=statics), args, case.option("mode"))
        except ForwardModeError:
            raise Invalid(f"jax.checkpoint alone raises {error}") from error
        raise
    rules = policy_of(policy)
    if rules is None:
        rules = Policy()
    assert isinstance(rules, Policy)
    kept = rules.decide(graph)
    if not rules.as_jax()[0] or rules.default != jaxckpt.SAVE:
        _nothing_kept_unasked(wrapped, args, graph, kept)
    keeping = functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable, static_argnums=statics
    )
    _nothing_kept_computed_again(reference, actual, graph, kept, lambda: Differentiated(keeping(fun), args))


def _traced(fun: Callable[..., Any], args: tuple[Any, ...]) -> Graph:
    return jaxckpt.trace(*_of_arrays(fun, args))


def _of_arrays(fun: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns `fun` as a function of the arrays among the leaves of its arguments, and those arrays."""
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def of_arrays(*arrays: Any) -> Any:
        full = list(leaves)
        for i, x in zip(places, arrays):
            full[i] = x
        return fun(*jax.tree.unflatten(tree, full))

    return of_arrays, *(leaves[i] for i in places)


def _must_be_unmatched(policy: Any, graph: Graph) -> None:
    globs = {glob for selector, _ in policy.rules for glob in selector.globs}
    try:
        Policy([(glob, "save") for glob in globs]).decide(graph)
    except UnmatchedTagError:
        return
    raise Failed("a strict policy whose globs all match is taken", f"{policy} of {graph.tags}")


def _nothing_kept_unasked(
    wrapped: Callable[..., Any], args: tuple[Any, ...], graph: Graph, kept: dict[int, Any]
) -> None:
    """What differentiation keeps besides arguments is named as the policy's values are, and of their shapes."""
    of_arrays, *arrays = _of_arrays(wrapped, args)
    report = jaxckpt.residuals(of_arrays, *(jnp.asarray(x) for x in arrays))
    values = [graph.values[index] for index in kept]
    allowed: Counter = Counter()
    for value in values:
        for name in {_unnumbered(value.label), *value.tags}:
            allowed[name] += value.kept_bytes
    for op in graph.walk():
        if op.primitive in RULES and not kept.keys().isdisjoint(op.outputs):
            for value in (graph.values[index] for index in op.inputs):  # what a rule hands on is what it was given
                for name in {_unnumbered(value.label), *value.tags}:
                    allowed[name] += value.kept_bytes
    shapes = {(value.shape, _part(value.dtype)) for value in values}
    hidden = {tag for value in graph.values if not value.addressable or value.primitive in RULES for tag in value.tags}
    sizes: Counter = Counter()
    for residual in report.residuals:
        if residual.argument:
            continue
        name = _unnumbered(residual.name)
        if not any((residual.shape[i:], residual.dtype) in shapes for i in range(4)):
            raise Failed(
                "nothing is kept that the policy drops",
                f"{residual} is kept, and nothing of its shape is by the policy",
            )
        if name in _INSIDE:  # what comes out of a branch or a nested checkpoint is reported by that alone
            continue
        if name in hidden:  # a kept value that a rule of the user's, or what follows a nested checkpoint, names anew
            continue
        if name not in allowed:
            raise Failed(
                "nothing is kept that the policy drops", f"{residual} is kept; the policy keeps {sorted(allowed)}"
            )
        sizes[name] += residual.bytes
        if sizes[name] > allowed[name]:
            raise Failed(
                "no more bytes are kept than the policy names", f"{name}: {sizes[name]} bytes, of {allowed[name]}"
            )


def _unnumbered(label: str) -> str:
    """Returns "sin" of "sin 12": the numbers of a function depend on what it is traced in."""
    return re.sub(r" \d+$", "", label)


_INSIDE = (
    "reduce_precision",
    "optimization_barrier",
    "name",
    "cond",
    "checkpoint",
    "remat",
    "remat2",
    "scan",
    "while",
    "custom_jvp_call",
    "custom_vjp_call",
    "closed_call",
    "eval_jaxpr",
    "jit",
    "pjit",
)


def _part(dtype: Any) -> Any:
    """Returns the dtype that is kept of a value: of a complex one its parts'."""
    return np.dtype("float32") if dtype == np.complex64 else dtype


SPARED = ("dot_general", "conv_general_dilated", "cumsum", "sin", "cos")
"""Primitives whose derivatives do not read their own results, so that a kept result is all that a recomputation is
needed for.
"""
RULES = ("checkpoint", "remat", "remat2", "custom_vjp_call", "custom_jvp_call")
"""Operations whose bodies run by rules of their own."""


def _nothing_kept_computed_again(
    reference: Differentiated,
    actual: Differentiated,
    graph: Graph,
    kept: dict[int, Any],
    everything: Callable[[], Differentiated],
) -> None:
    """An operation runs as often as without a checkpoint, and once more for each run of which a result is dropped."""
    before, after = _executions(reference.closed), _executions(actual.closed)
    again: Counter = Counter()
    inside = {index for op in graph.walk() if op.primitive in RULES for body in op.bodies for index in _indices(body)}
    printed = set(_read_by_effects(graph.body))
    for op in graph.walk():
        if op.index in inside:  # a rule may run it once more, and a checkpoint around the rule do so again
            again[op.primitive] += 3 * op.repeats
        else:  # of a call that a print reads there is one with names inside and one without; the compiler merges them
            again[op.primitive] += op.repeats * (any(index not in kept for index in op.outputs) + (op.index in printed))
    for primitive in SPARED:
        if inside and primitive in ("sin", "cos"):  # a rule may have the one for the other
            continue
        if after[primitive] > before[primitive] + again[primitive]:
            # Cotangents that are zero go on through a checkpoint, where without one they stop.
            before = _executions(everything().closed)
        if after[primitive] > before[primitive] + again[primitive]:
            raise Failed(
                "nothing is computed again that is kept",
                f"{primitive} runs {after[primitive]} times, {before[primitive]} without a checkpoint; "
                f"{again[primitive]} more are dropped",
            )


def _read_by_effects(body: Body) -> Iterator[int]:
    """Yields the operations that a print or the like depends on: JAX runs it again, on values from before they are
    named.
    """
    read: set[int] = set()
    for op in reversed(body.ops):
        if is_effect(op.equation) or not read.isdisjoint(op.outputs):
            read.update(op.inputs)
            yield op.index
        for inner in op.bodies:
            yield from _read_by_effects(inner)


def _indices(body: Body) -> Iterator[int]:
    for op in body.ops:
        yield op.index
        for inner in op.bodies:
            yield from _indices(inner)


def _executions(closed: Any) -> Counter:
    count: Counter = Counter()
    for operation in graph_of(closed).walk():
        count[operation.primitive] += operation.repeats
    return count


# ---------------------------------------------------------------------------------------------------------------- scans


def _check_scan(case: Case) -> None:
    _, args, reference = _reference(case)
    options = {name: case.option(name) for name in case.options}

    def scan(f: Any, init: Any, xs: Any, length: int, reverse: bool = False, unroll: int = 1) -> Any:
        try:
            return jaxckpt.scan(f, init, xs, length, reverse, unroll, **options)
        except InfeasibleBudgetError as error:  # each scan names a least of its own, and that is enough
            if "budget" not in options:
                raise
            return jaxckpt.scan(f, init, xs, length, reverse, unroll, **{**options, "budget": _least(error)})

    fun, _ = case.program.load(scan)
    compare("results and gradients of a scan are lax.scan's", reference, fun, args, "walk")


# -------------------------------------------------------------------------------------------------------------- budgets


def _least(error: InfeasibleBudgetError) -> int:
    """Returns the bytes that an error says would be enough, or that the arguments take alone; its text must say the
    same.
    """
    if error.least_bytes is None:
        raise Failed("an infeasible budget says the least that is feasible", str(error)) from error
    if not re.search(rf"(?:to fit is |\(){error.least_bytes} bytes\b", str(error)):
        raise Failed("an error's text and its figures are the same", f"{error.least_bytes}: {error}") from error
    return error.least_bytes


def _least_budget(plan: Callable[[int], Any]) -> int:
    """Returns the least budget that a planner accepts, as it says itself: for a byte the arguments', for those what
    fits.
    """
    try:
        made = plan(1)
    except InfeasibleBudgetError as error:
        arguments = _least(error)
    else:
        raise Failed("a budget of a byte is infeasible", f"{made}")
    try:
        plan(arguments)
    except InfeasibleBudgetError as error:
        return _least(error)
    return arguments


def _check_plan(case: Case) -> None:
    fun, args, reference = _reference(case)
    mode = case.option("mode")
    try:
        problem = problem_of(fun, *args, target="cpu")
    except NotDifferentiableError as error:
        _must_be_constant(reference, args, error)
        return
    planned = lambda budget, verify=False: problem.plan(budget, verify=verify)
    most = planned(1 << 40)
    assert most.predicted is not None
    least = _least_budget(planned)
    _hold(fun, args, reference, planned(least), least, mode)
    try:
        below = planned(least - 1)
    except InfeasibleBudgetError as error:
        if _least(error) != least and least > problem.argument_bytes:
            raise Failed(
                "the least budget is the same whatever the budget", f"{_least(error)} bytes, and {least}"
            ) from error
    else:
        raise Failed("below the least budget nothing fits", f"{least - 1} bytes: {below}")
    budget = least + int(case.option("share") * max(most.predicted.peak_bytes - least, 0))
    middle = planned(budget)
    if case.option("twice") and middle != (
        again := jaxckpt.plan(fun, *args, budget=budget, target="cpu", verify=False)
    ):
        raise Failed("a function has one plan for a budget", f"{middle}, then {again}")
    _hold(fun, args, reference, middle, budget, mode)
    if case.option("verify"):
        _prove(fun, args, reference, planned, budget)


def _prove(
    fun: Callable[..., Any], args: tuple[Any, ...], reference: Differentiated, planned: Callable[..., Plan], budget: int
) -> None:
    """The compiled peak of a verified plan is within its budget, and the least that an error says is enough."""
    try:
        plan = planned(budget, True)
    except InfeasibleBudgetError as error:
        budget = _least(error)
        plan = planned(budget, True)
    if plan.measured_bytes is None or plan.measured_bytes > budget:
        raise Failed("a verified plan's compiled peak is within its budget", f"{plan.measured_bytes} bytes of {budget}")
    compare("results and gradients under a plan are those without", reference, plan.apply(fun), args, "jit")


def _hold(
    fun: Callable[..., Any], args: tuple[Any, ...], reference: Differentiated, plan: Plan, budget: int, mode: str | None
) -> None:
    if plan.predicted is None or plan.predicted.peak_bytes > budget:
        raise Failed("a plan's predicted peak is within its budget", f"{plan.predicted} of {budget}")
    again = Plan.from_json(plan.to_json())
    if again != plan:
        raise Failed("a stored plan is the plan", f"{again} for {plan}")
    if mode is not None:
        compare("results and gradients under a plan are those without", reference, again.apply(fun), args, mode)


def _must_be_constant(reference: Differentiated, args: tuple[Any, ...], error: Exception) -> None:
    """A step that does not differentiate the function is one whose function does not depend on its first argument."""
    count = sum(is_inexact(leaf) for leaf in jax.tree.leaves(args[0]))
    gradients = reference.run("walk")[1][:count]
    if any(np.any(wide(gradient) != 0) for gradient in gradients):
        raise Failed("what can be differentiated can be planned", str(error))


def _check_auto(case: Case) -> None:
    fun, args, reference = _reference(case)
    auto = lambda budget: jaxckpt.autocheckpoint(fun, budget=budget, target="cpu", verify=False)
    try:
        problem = problem_of(fun, *args, target="cpu")
    except NotDifferentiableError as error:
        _must_be_constant(reference, args, error)
        return
    least = _least_budget(lambda budget: problem.plan(budget, verify=False))
    planned = auto(least)
    try:
        plan = planned.plan(*args)
    except InfeasibleBudgetError as error:
        detail = f"plan: {least} bytes; autocheckpoint: {error}"
        raise Failed("plan and autocheckpoint find the same least budget", detail) from error
    try:
        below = auto(least - 1).plan(*args)
    except InfeasibleBudgetError:
        pass
    else:
        raise Failed(
            "plan and autocheckpoint find the same least budget", f"plan: {least} bytes; autocheckpoint: {below}"
        )
    _hold(fun, args, reference, plan, least, None)
    compare(
        "results and gradients under autocheckpoint are those without", reference, planned, args, case.option("mode")
    )
    if case.option("verify"):
        proved = jaxckpt.autocheckpoint(fun, budget="100%", target="cpu")
        compare("results and gradients under autocheckpoint are those without", reference, proved, args, "jit")
        plan = proved.plan(*args)
        if plan.measured_bytes is None or plan.measured_bytes > plan.budget:
            raise Failed(
                "a verified plan's compiled peak is within its budget", f"{plan.measured_bytes} bytes of {plan.budget}"
            )
