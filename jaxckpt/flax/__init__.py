"""Gradient checkpointing of Flax modules, linen and nnx: the same model and parameters, with less memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxckpt._errors import ArgumentError, MissingPackageError, explains, refuse_call

try:
    import flax.linen as nn
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] != "flax":
        raise
    raise MissingPackageError(
        "jaxckpt.flax needs flax, which is not installed. Install it with: pip install 'jaxckpt[flax]'."
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


@explains
def checkpoint(
    target: Any = None,
    /,
    *others: Any,
    policy: Any = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
) -> Any:
    """Returns the module class, method or function of modules with its intermediates recomputed in the backward pass.

    A class becomes a subclass of the same name. So parameters have the same names and initial values, and can be
    loaded. State changes once: BatchNorm's statistics, rng counts, sown values. The recomputation draws the same random
    numbers as the forward pass.

    Arguments that are arrays, or containers of arrays, are traced. All other arguments, with Python's bools and
    numbers, are static and are passed on unchanged, by position or by keyword: `block(x, train=True)`. Use
    `static_argnums` for arrays to branch on and for containers that must not be traced. Results that are not arrays are
    passed on unchanged.

    Args:
      target: a linen or nnx module class (for its `__call__`) or a partial of one; a method in the body of such a
        class, above or below `@nn.compact`; a bound method; an instance of an nnx module; a function of modules, which
        has linen modules first. Of an nnx instance a `jax.tree_util.Partial` is returned, which may stand in its place
        in a model, one level of paths deeper (`apply` keeps the paths). If it is omitted, a decorator is returned.
      *others: none. The arguments of a call belong to what is returned.
      policy: says what is kept, as in `jaxckpt.checkpoint`.
      prevent_cse: as in `jaxckpt.checkpoint`. False is right only inside a scan.
      static_argnums: numbers of positional arguments that are passed on unchanged. `self`, and a module that is the
        first argument of a function, are not counted: in `block(x, train)`, x is 0. They also apply if the argument is
        passed by name. Negative numbers count from the last positional parameter.

    Raises:
      ArgumentError: the target is none of these or not all that is given by position, the policy is invalid, or an
        argument number is out of range.

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
    refuse_call(others, "target", "checkpoint(target)(*args)")
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
    if isinstance(bound, _NnxModule):
        return jax.tree_util.Partial(_checkpoint_function(target.__func__, made), bound)
    if isinstance(bound, nn.Module):
        return functools.partial(_checkpoint_function(target.__func__, made), bound)
    return _checkpoint_function(target, made)


def apply(model: Any, rules: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Any:
    """Returns a model in which the submodules at matching paths are checkpointed. Source and parameters do not change.

    Args:
      model: an instance of a linen or nnx module. It is not changed; the returned nnx model shares its Variables.
      rules: a mapping, or pairs, from a glob over paths to a policy (as for `jaxckpt.checkpoint`, None too). The first
        glob that matches a submodule decides, and its `__call__` is checkpointed. Paths are those of the parameters:
        "Block_0/Dense_1" in linen, "layers/0/mlp" in nnx. `*` and `?` match within a name, and `**` also matches "/".
        "" is the model itself.

    Raises:
      ArgumentError: the model is not a module, a policy is invalid, or a glob matches no path. For linen, the last is
        raised after the model's first call, because submodules exist only then.

    >>> import jax, jax.numpy as jnp
    >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(8)])
    >>> less = apply(model, {"layers_*": "dots"})
    >>> params = less.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> bool((less.apply(params, jnp.ones((1, 4))) == model.apply(params, jnp.ones((1, 4)))).all())
    True
    """
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules) if isinstance(rules, Iterable) else [rules]
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
        raise ArgumentError("target", rule, target, "Decorate other methods in the class.")
    return make(target, made)


def _checkpoint_function(target: Callable[..., Any], made: _Options) -> Callable[..., Any]:
    """Returns a function checkpointed as one of linen or of nnx. For a method in a class body, the first call decides
    which.
    """

    @functools.cache
    def linen() -> Callable[..., Any]:
        if not hasattr(checkpointed, "compact") or hasattr(target, "compact"):
            return _linen_method(target, made)
        # @nn.compact is above this decorator, so it has marked only the result of this decorator
        marked = functools.wraps(target)(lambda *args, **kwargs: target(*args, **kwargs))
        return _linen_method(nn.compact(marked), made)

    nnx = _nnx_function(target, made)

    @functools.wraps(target)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):
            return linen()(*args, **kwargs)
        return nnx(*args, **kwargs)

    _mark_wrapped(checkpointed)  # jaxckpt manages module state
    return checkpointed
