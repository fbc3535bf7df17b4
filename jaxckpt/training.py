"""Training steps for the command line: found by `module:function`, or made with an optimizer of optax.

A maker of a step takes a loss and returns the training step, as the argument `step` of `jaxckpt.plan` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxckpt._errors import ArgumentError, FactoryError, MissingPackageError, nearest
from jaxckpt.core import lift
from jaxckpt.core.leaves import is_inexact
from jaxckpt.memory.gradient import StepMaker
from jaxckpt.memory.gradient import made as made_step

OPTIMIZERS = ("adam", "adamw", "sgd", "adafactor", "adagrad", "lamb", "lion", "rmsprop")
"""The optimizers that can be asked for by name: functions of optax that take a learning rate."""

LEARNING_RATE = 1e-3
"""What the optimizers are made with. No figure of memory depends on it."""


def optimised(name: str, args: tuple[Any, ...]) -> tuple[StepMaker, tuple[Any, ...]]:
    """Returns (step, args) for training with an optimizer of optax: `step(loss)(params, state, *batch) -> (params,
    state, loss)`. It donates parameters and state.

    Args:
      name: one of OPTIMIZERS.
      args: arguments of the loss: parameters, and what comes after them. Arrays or shapes.

    Returns:
      The maker of the step, and its arguments: those of the loss, with the optimizer's state after the parameters.
      The state is laid out over devices as the parameters are.

    Raises:
      ArgumentError: there is no such optimizer, or the parameters are a module of nnx.
      MissingPackageError: optax is not installed.

    >>> import jax.numpy as jnp
    >>> step, args = optimised("adamw", ({"w": jnp.ones((4, 4))}, jnp.ones((2, 4))))
    >>> params, state, value = step(lambda params, x: jnp.sum(x @ params["w"]))(*args)
    >>> len(jax.tree.leaves(state))  # a count and two moments
    3
    """
    if name not in OPTIMIZERS:
        raise ArgumentError("--optimizer", f"one of {', '.join(OPTIMIZERS)}", name, nearest(name, OPTIMIZERS))
    if not args:
        raise ArgumentError("--optimizer", "for a loss with parameters as its first argument", name)
    if lift.module_gradient(args[0], values=True) is not None:
        hint = "Return (loss, args, step) from the factory, with the nnx.Optimizer among args: see `jaxckpt init nnx`."
        raise ArgumentError("--optimizer", "for parameters that are a tree of arrays, not a module of nnx", name, hint)
    try:
        import optax
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "--optimizer needs optax, which is not installed. Install it with: pip install 'jaxckpt[flax]' "
            "(from a clone: pip install -e '.[flax]')."
        ) from error
    optimizer = getattr(optax, name)(LEARNING_RATE)
    places = [place for place, leaf in enumerate(jax.tree.leaves(args[0])) if is_inexact(leaf)]

    def moving(params: Any) -> list[Any]:
        leaves = jax.tree.leaves(params)
        return [leaves[place] for place in places]

    def like(leaf: Any, of: Any) -> Any:
        if isinstance(of, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=of.sharding if leaf.shape == of.shape else None
            )
        return jax.device_put(leaf, of.sharding) if hasattr(of, "sharding") and leaf.shape == of.shape else leaf

    first = moving(args[0])
    shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in first)
    state = (jax.eval_shape if shapes else lambda make, params: make(params))(optimizer.init, first)
    state = optax.tree.map_params(optimizer, like, state, first)

    def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
        def step(params: Any, state: Any, *rest: Any) -> tuple[Any, Any, Any]:
            leaves, tree = jax.tree.flatten(params)

            def put(values: Sequence[Any]) -> Any:
                merged = list(leaves)
                for place, value in zip(places, values, strict=True):
                    merged[place] = value
                return jax.tree.unflatten(tree, merged)

            now = moving(params)
            value, gradients = jax.value_and_grad(lambda values: loss(put(values), *rest))(now)
            updates, state = optimizer.update(gradients, state, now)
            return put(optax.apply_updates(now, updates)), state, value

        return jax.jit(step, donate_argnums=(0, 1))

    return step_of, (args[0], state, *args[1:])


def check_step(name: str, step: StepMaker, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises FactoryError for a training step that cannot be planned as it is meant.

    Args:
      name: what to call the factory.
      step: the maker of the step.
      fun: the loss.
      args: of the step.

    Raises:
      FactoryError: `step(fun)` is no function of such arguments, or it returns no state: nothing with the shape and
        dtype of any of its arguments, or of a parameter that the loss is differentiated with respect to. A compiler
        leaves out what is computed and not returned, so such a step would keep nothing and need nothing.
    """
    try:
        made = made_step(step, fun, args)
    except ArgumentError as error:
        raise FactoryError(f"{name}: {error}") from error
    from jaxckpt.planner.observe import observe

    seen = observe(fun, step, args)
    given = jax.tree.leaves((seen.args, seen.kwargs))
    parameters = Counter((given[place].shape, given[place].dtype) for place in seen.differentiated)
    # The loss may get its parameters in another dtype, or as parts of one vector: the step's own arguments count too.
    parameters.update((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args) if hasattr(leaf, "dtype"))
    out = lift.attempt(made, args, {}, lambda call: jax.eval_shape(call.fun, *call.args))
    returned = Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(out) if leaf.shape)
    shaped = Counter({kind: count for kind, count in parameters.items() if kind[0]})
    if shaped and not (shaped & returned):
        raise FactoryError(
            f"{name}: the training step must return its new state, or the gradients. It returns nothing of the shapes "
            f"of its parameters, and a compiler leaves out what is not returned. Return (state, loss), for example."
        )
