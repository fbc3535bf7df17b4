"""scan_layers: a stack of equal blocks as one scan, under any schedule of `jaxckpt.scan`; linen and nnx."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
from flax import nnx

from jaxckpt._errors import ArgumentError
from jaxckpt.core.leaves import defines_call
from jaxckpt.flax.linen_layers import stack_class as _linen_class
from jaxckpt.flax.nnx_layers import stack_class as _nnx_class
from jaxckpt.flax.stack import Stack
from jaxckpt.flax.trees import pattern_parts
from jaxckpt.policies import policy_of
from jaxckpt.transforms.schedules import Schedule, resolve


def scan_layers(
    Block: Any, length: int, *, schedule: Schedule = "sqrt", policy: Any = None, names: str | None = None
) -> Any:
    """Returns a module class: a stack of `length` equal blocks as one scan, with its parameters stacked along axis 0.

    It is made with a block's arguments and called with a block's. The first argument of the call, any pytree of arrays,
    goes through the layers; all others are the same for each layer, and differentiated where they are arrays. State is
    each layer's own and stacked like the parameters: statistics, rng streams, sown values, caches.

    The stack computes what the unrolled layers compute, `x = Block()(x)` again and again, dropout included, and is
    initialised to the same parameters; `stack_layers` and `unstack_layers` convert what was trained.

    - linen: every layer draws what an unrolled layer beside the stack would draw that bore its name in `names`. Within
      a lifted transform in the block (`nn.remat`, `nn.vmap`, another stack) each layer draws numbers of its own, but not
      those of the unrolled layer; within `jaxckpt.flax.checkpoint` it does.
    - nnx: every layer is made in turn, with its own streams. Variables that all layers share, such as an `nnx.Rngs`
      that a block keeps, or that stand in a call's arguments, go from layer to layer.

    Args:
      Block: a linen or nnx module class, or a partial of one.
      length: layers, at least 1.
      schedule: as of `jaxckpt.scan`: "none", "every", "sqrt", "log", layers in a segment, nested lengths, or `Slots(n)`.
      policy: what is kept of each layer that is run again; as of `jaxckpt.checkpoint`. None: its input alone, so a
        segment of layers never keeps more than one layer's values. "everything": those of a whole segment, for one run less.
      names: linen alone: what the unrolled layers are called, with "{}" for the number; "Block_{}" for a class Block.

    Raises:
      ArgumentError: one of the arguments is none of these; or, when it is called, a linen block holds a module from outside.
      StructureError: when it is called: the block does not return what it takes.
      ForwardModeError: when a stack with `Slots` is differentiated forward.

    >>> import jax, jax.numpy as jnp
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, train):
    ...         return x + nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(4)(x)))
    >>> class Model(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, train=False):
    ...         return scan_layers(Block, 48)()(x, train)
    >>> params = Model().init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    >>> jax.tree.map(jnp.shape, params)
    {'BlockStack_0': {'Dense_0': {'bias': (48, 4), 'kernel': (48, 4, 4)}}}
    """
    if isinstance(Block, functools.partial) and isinstance(Block.func, type):
        made = scan_layers(Block.func, length, schedule=schedule, policy=policy, names=names)
        return functools.partial(made, *Block.args, **Block.keywords)
    kinds = {nn.Module: _linen_class, nnx.Module: _nnx_class}
    make = next((make for kind, make in kinds.items() if isinstance(Block, type) and issubclass(Block, kind)), None)
    if make is None or not defines_call(Block):
        hint = "Pass the class, and the block's own arguments to what is returned." * isinstance(Block, tuple(kinds))
        raise ArgumentError("Block", "a subclass of nn.Module or nnx.Module with a __call__", Block, hint)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ArgumentError("length", "an int of at least 1, the number of layers", length)
    resolve(length, schedule)
    policy_of(policy)
    if names is not None and make is _nnx_class:
        raise ArgumentError("names", "left out where the block is nnx's, whose streams have no names", names)
    names = names or f"{Block.__name__}_{{}}"
    if len(pattern_parts(names, "names")) > 1:
        raise ArgumentError("names", "a name, not a path: the unrolled layers stand where the stack stands", names)
    return make(Block, Stack(length, tuple(schedule) if isinstance(schedule, list) else schedule, policy, names))
