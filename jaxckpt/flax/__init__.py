"""Gradient checkpointing of flax modules, linen and nnx: the same model, the same parameters, less memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxckpt._errors import ArgumentError, MissingPackageError

try:
    import flax.linen as nn
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] != "flax":
        raise
    raise MissingPackageError(
        "jaxckpt.flax needs flax, which is not installed: pip install 'jaxckpt[flax]'."
    ) from error

from jaxckpt._compat.flax import NnxModule as _NnxModule
from jaxckpt._compat.flax import mark_wrapped as _mark_wrapped
from jaxckpt.core.leaves import defines_call as _defines_call
from jaxckpt.flax.functional import Options as _Options
from jaxckpt.flax.functional import Rules as _Rules
from jaxckpt.flax.functional import options as _options
from jaxckpt.flax.layers import scan_layers
from jaxckpt.flax.linen import apply as _linen_apply
from jaxckpt.flax.linen import method as _linen_method
from jaxckpt.flax.linen import module_class as _linen_class
from jaxckpt.flax.nnx import apply as _nnx_apply
from jaxckpt.flax.nnx import function as _nnx_function
from jaxckpt.flax.nnx import module_class as _nnx_class
from jaxckpt.flax.trees import stack_layers, unstack_layers

__all__ = ["apply", "checkpoint", "scan_layers", "stack_layers", "unstack_layers"]


def checkpoint(
    target: Any = None, /, *, policy: Any = None, prevent_cse: bool = True, static_argnums: int | Sequence[int] = ()
) -> Any:
    """Returns a module class, a method or a function of modules that recomputes its intermediates in the backward pass.

    A class becomes a subclass of the same name, so parameters are named, initialised and loaded as without. State
    changes once: BatchNorm's statistics, rng counts, sown values. The recomputation draws the random numbers that the
    forward pass drew.

    Arguments that are arrays, or arrays in containers, are traced. All others, Python's bools and numbers too, are
    static and arrive as they are, by position or by keyword: `block(x, train=True)`. `static_argnums` is for the rest:
    arrays to branch on, containers to leave alone. Results that are no arrays arrive as they are, too.

    Args:
      target: a linen or nnx module class (its `__call__` is meant) or a partial of one; a method in the body of such a
        class, above or below `@nn.compact`; a bound method; an instance of an nnx module; a function of modules, of
        which linen's come first. Left out: a decorator is returned.
      policy: what is kept; as of `jaxckpt.checkpoint`.
      prevent_cse: as of `jaxckpt.checkpoint`: False is right only inside a scan.
      static_argnums: numbers of positional arguments that are passed as they are. Self, and a module that a function
        takes first, are not counted: in `block(x, train)`, x is 0. They hold too where such an argument is passed by
        name. Negative ones count from the last positional parameter.

    Raises:
      ArgumentError: the target is none of these, the policy is none, or an argument number is out of range.

    >>> import jax, jax.numpy as jnp
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, train):
    ...         return x + nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(4)(x)))
    >>> class Model(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, train=False):
    ...         for _ in range(2):
    ...             x = checkpoint(Block)()(x, train)
    ...         return x
    >>> sorted(Model().init(jax.random.key(0), jnp.ones((1, 4)))["params"])
    ['Block_0', 'Block_1']
    """
    made = _options(policy, prevent_cse, static_argnums)
    if target is None:
        return functools.partial(checkpoint, policy=policy, prevent_cse=prevent_cse, static_argnums=static_argnums)
    if isinstance(target, functools.partial) and isinstance(target.func, type):
        return functools.partial(_checkpoint_class(target.func, made), *target.args, **target.keywords)
    if isinstance(target, type):
        return _checkpoint_class(target, made)
    if isinstance(target, nn.Module):
        hint = "Checkpoint its class, or submodules of it with jaxckpt.flax.apply(module, {path: policy})."
        raise ArgumentError("target", "a class, a method or a function, where modules are linen's", target, hint)
    if isinstance(target, _NnxModule):
        target = type(target).__call__.__get__(target) if _defines_call(type(target)) else None
    if not callable(target):
        raise ArgumentError("target", "a module class, a method, or a function of modules", target)
    bound = getattr(target, "__self__", None)
    if isinstance(bound, (nn.Module, _NnxModule)):
        return functools.partial(_checkpoint_function(target.__func__, made), bound)
    return _checkpoint_function(target, made)


def apply(model: Any, rules: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Any:
    """Returns a model with the submodules checkpointed that are picked by path, its source and parameters as they are.

    Args:
      model: an instance of a linen or nnx module. It is left alone; an nnx model that is returned shares its Variables.
      rules: a mapping, or pairs, from a glob over paths to a policy (anything that `jaxckpt.checkpoint` takes, None
        among it). The first glob that matches a submodule counts, and its `__call__` is checkpointed. Paths are those
        of the parameters: "Block_0/Dense_1" in linen, "layers/0/mlp" in nnx. `*` and `?` stay within a name, `**`
        crosses "/"; "" is the model itself.

    Raises:
      ArgumentError: the model is no module, a policy is none, or a glob matches no path: with linen after the model's
        first call, for its submodules exist only then.

    >>> import jax, jax.numpy as jnp
    >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(8)])
    >>> less = apply(model, {"layers_*": "dots"})
    >>> params = less.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> bool((less.apply(params, jnp.ones((1, 4))) == model.apply(params, jnp.ones((1, 4)))).all())
    True
    """
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ArgumentError("rules", "a mapping, or pairs, from path globs to policies", rules)
    made = _Rules(tuple((path, _options(policy, True, ())) for path, policy in pairs))
    if isinstance(model, nn.Module):
        return _linen_apply(model, made)
    if isinstance(model, _NnxModule):
        return _nnx_apply(model, made)
    raise ArgumentError("model", "an instance of a linen or nnx module", model)


def _checkpoint_class(target: type, made: _Options) -> type:
    kinds = {nn.Module: _linen_class, _NnxModule: _nnx_class}
    make = next((make for kind, make in kinds.items() if issubclass(target, kind)), None)
    if make is None or not _defines_call(target):
        rule = "a subclass of nn.Module or nnx.Module with a __call__"
        raise ArgumentError("target", rule, target, "Other methods are decorated in the class.")
    return make(target, made)


def _checkpoint_function(target: Callable[..., Any], made: _Options) -> Callable[..., Any]:
    """Returns a function checkpointed as linen's or as nnx's; of a method in a class body, only a call tells which."""

    @functools.cache
    def linen() -> Callable[..., Any]:
        if not hasattr(checkpointed, "compact") or hasattr(target, "compact"):
            return _linen_method(target, made)
        # @nn.compact stands above this decorator and so has marked only what the decorator returned
        marked = functools.wraps(target)(lambda *args, **kwargs: target(*args, **kwargs))
        return _linen_method(nn.compact(marked), made)

    nnx = _nnx_function(target, made)

    @functools.wraps(target)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):
            return linen()(*args, **kwargs)
        return nnx(*args, **kwargs)

    _mark_wrapped(checkpointed)  # managing module state is left to us
    return checkpointed
