"""The default gradient of a training step: with respect to everything in the first argument that can be
differentiated.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt._errors import ArgumentError, InWords, NotDifferentiableError
from jaxckpt.core import lift
from jaxckpt.core.argument_names import named_leaves
from jaxckpt.core.leaves import is_inexact, numbers_of_modules
from jaxckpt.core.units import counted

StepMaker = Callable[[Callable[..., Any]], Callable[..., Any]]

PLAIN = (jax.value_and_grad, jax.grad)
"""Training steps that are a gradient with respect to all leaves of the first argument."""


_RULE = "a function that takes the loss and returns the training step, such as jax.value_and_grad"


def check_step(step: Any) -> None:
    """Raises ArgumentError for a step that is no function."""
    if not callable(step):
        raise ArgumentError("step", _RULE, step)


def made(step: StepMaker, fun: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns `step(fun)`, the training step of a function.

    Args:
      step: as in `jaxckpt.plan`.
      fun: the function.
      args: the step's arguments.

    Raises:
      ArgumentError: `step` makes no step of a function, or the step that it makes does not take so many arguments.
    """
    check_step(step)
    try:
        training = step(fun)
    except TypeError as error:
        if lift.accepts(step, (fun,)) and _TAKEN_FOR_AN_ARRAY not in str(error):
            raise
        hint = "If it is a training step, give the function that makes it: step=step_of, and not step=step_of(loss)."
        raise ArgumentError("step", _RULE, step, hint) from error
    if not callable(training):
        hint = f"It returned no function but {type(training).__name__}: {training!r:.60}."
        raise ArgumentError("step", _RULE, step, hint)
    if isinstance(training, jax.stages.Compiled):
        hint = (
            "The step that it makes is compiled. Return it jitted; lower and compile step_of(plan.apply(loss)) later."
        )
        raise ArgumentError("step", _RULE, step, hint)
    if step not in PLAIN and not lift.accepts(training, args):
        rule = f"the arguments of the training step that `step` makes, {lift.signature_of(training)}"
        raise ArgumentError(
            "args", rule, InWords(counted(len(args), "argument")), "Give those of the step, not of the loss."
        )
    return training


_TAKEN_FOR_AN_ARRAY = "Error interpreting argument"
"""What JAX says of a function that is given to a jitted one."""


def suited(step: StepMaker, fun: Callable[..., Any], args: tuple[Any, ...]) -> StepMaker:
    """Returns the step, or its replacement if JAX's gradient does not accept the first argument.

    For a module of nnx, `jax.value_and_grad` becomes `nnx.value_and_grad` with respect to its Params. For any other
    tree with leaves that are integers, random keys, numbers of equinox modules or not arrays, it becomes the gradient
    with respect to the other leaves; so it does if the function needs the value of a Python float among them.

    Args:
      step: as in `jaxckpt.plan`.
      fun: the function; it is traced if there are such floats.
      args: the step's arguments.

    Raises:
      NotDifferentiableError: nothing in the first argument can be differentiated.
    """
    if step not in PLAIN or not args:
        return step
    instead = lift.module_gradient(args[0], values=step is jax.value_and_grad)
    if instead is not None:
        return instead
    named = named_leaves(args[:1], {})
    inexact = [is_inexact(leaf) and not number for (_, leaf), number in zip(named, numbers_of_modules(args[:1]))]
    if not any(inexact):
        kinds = [f"{name} is {getattr(leaf, 'dtype', type(leaf).__name__)}" for name, leaf in named]
        raise NotDifferentiableError(
            "The first argument must have arrays of floating-point or complex types, because the step takes "
            "gradients with respect to them; "
            f"{', '.join(kinds[:3]) or 'it has no arrays'}. Put the parameters first, or pass your own step."
        )
    if all(inexact) and not (any(lift.is_number(leaf) for _, leaf in named) and _needs_value(step(fun), args)):
        return step
    return functools.partial(_of_inexact, step)


STEP_TOO = "If they are those of a training step, give what makes it too: step=step_of; in a factory, return it third."
"""What to do where the arguments of a training step came without the step."""


def came_for(step: StepMaker, fun: Callable[..., Any], args: tuple[Any, ...], error: Exception) -> str:
    """Returns what a user who gave wrong arguments must know of an error in the step."""
    plain = step in PLAIN
    whose = "the function" if plain else "the training step that `step` makes"
    given = lift.came(fun if plain else step(fun), args)
    hints = []
    if lift.closes_over_objects(error):
        hints.append("Modules of nnx that the function closes over cannot change in it: pass them as arguments.")
    elif any(map(lift.has_objects, args)):
        hints.append("Modules of nnx are differentiated by nnx.value_and_grad and nnx.grad.")
    if "scalar-output" in str(error):  # JAX's, and nnx's
        hints.append("A loss that returns more than its value is differentiated with has_aux=True.")
    if not plain:
        hints.append(
            "jaxckpt.plan takes the arguments of the training step, not of the loss; a `step` of "
            "jaxckpt.autocheckpoint takes those of the loss."
        )
    elif any(map(_is_state, args)):
        hints.append(STEP_TOO)
    return " ".join([f"jaxckpt traced {whose} with the arguments that came, in their order: {given}.", *hints])


def _is_state(argument: Any) -> bool:
    """Returns whether an argument is, or holds, the state of an optimizer, by the names of its classes."""
    named = lambda node: type(node).__name__.endswith("State")
    return any(map(named, jax.tree.leaves(argument, is_leaf=named)))


def _needs_value(step: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Returns whether a step fails because it needs the value of a number that is traced."""
    try:
        lift.attempt(step, args, {}, lambda call: jax.eval_shape(call.fun, *call.args))
    except Exception as error:
        if not lift.is_value_needed(error):
            raise
        return True
    return False


def not_a_loss(name: str, fun: Callable[..., Any], args: tuple[Any, ...]) -> NotDifferentiableError | None:
    """Returns the error for a function that does not return one floating-point scalar; None for one that raises, too.

    Args:
      name: name of the function in the message.
      fun, args: the function, which is traced, and its arguments.
    """
    returned = False

    @functools.wraps(fun)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal returned
        returned = False
        out = fun(*args, **kwargs)
        returned = True
        return out

    try:
        result = lift.result_of(watched, args)
    except TypeError as error:
        # What JAX has no type for, or the function's own error, which is not ours to name.
        return NotDifferentiableError(f"{name} has nothing to differentiate: {error}") if returned else None
    out = jax.tree.leaves(result)
    shown = [f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__ for leaf in out]
    is_scalar = len(out) == 1 and getattr(out[0], "shape", None) == () and is_inexact(out[0])
    if is_scalar and out[0] is result and not jnp.issubdtype(out[0].dtype, jnp.complexfloating):
        return None
    kind = f" in a {type(result).__name__}" if result is not None and out and out[0] is not result else ""
    found = ", ".join([*shown[:3], *([f"{len(shown) - 3} more"] if len(shown) > 3 else [])]) or "nothing"
    gradient = "nnx.value_and_grad" if args and lift.has_objects(args[0]) else "jax.value_and_grad"
    hint = f"Reduce it to one scalar, or pass your own step, such as functools.partial({gradient}, has_aux=True)."
    first = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(args[:1]) if hasattr(leaf, "dtype")]
    if first and shown[-len(first) :] == first:
        hint = "If it is a gradient already, pass the loss itself: the step takes its gradient."
    elif first and not Counter(first) - Counter(shown):
        hint = (
            "If it is a training step, pass the loss, and what makes the step of it: plan(loss, *args, step=step_of)."
        )
    return NotDifferentiableError(
        f"{name} has nothing to differentiate: the function must return one floating-point scalar, the loss; it "
        f"returns {found}{kind}. {hint}"
    )


def _of_inexact(transform: StepMaker, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the gradient of a function with respect to the inexact arrays of its first argument, as a list."""

    @functools.wraps(fun)
    def step(first: Any, *rest: Any) -> Any:
        leaves, tree = jax.tree.flatten(first)
        places = [place for place, leaf in enumerate(leaves) if is_inexact(leaf) and hasattr(leaf, "dtype")]

        def of(moving: list[Any]) -> Any:
            merged = list(leaves)
            for place, leaf in zip(places, moving, strict=True):
                merged[place] = leaf
            return fun(jax.tree.unflatten(tree, merged), *rest)

        return transform(of)([leaves[place] for place in places])

    return step
