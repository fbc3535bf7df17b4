"""scan_layers: run a stack of equal blocks as one scan with any schedule of `jaxckpt.scan`, for linen and nnx."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
from flax import nnx

from jaxckpt._errors import ArgumentError
from jaxckpt.core.leaves import defines_call
from jaxckpt.core.units import as_int
from jaxckpt.flax.linen_layers import stack_class as _linen_class
from jaxckpt.flax.nnx_layers import stack_class as _nnx_class
from jaxckpt.flax.stack import Stack
from jaxckpt.flax.trees import pattern_parts
from jaxckpt.policies import policy_of
from jaxckpt.schedules import Schedule, schedule_of


def scan_layers(
    Block: Any, length: int, *, schedule: Schedule = "sqrt", policy: Any = None, names: str | None = None
) -> Any:
    """Returns a module class: a stack of `length` equal blocks as one scan, with its parameters stacked along axis 0.

    An instance is made with a block's arguments and called with a block's arguments. The first argument of the call,
    any pytree of arrays, goes through the layers. All other arguments are the same for each layer; those that are
    arrays are differentiated. Each layer has its own state, which is stacked like the parameters: statistics, rng
    streams, sown values, caches.

    The stack computes the same as the unrolled layers, which repeat `x = Block()(x)`, with dropout too. It has the same
    initial parameters. `stack_layers` and `unstack_layers` convert trained parameters.

    - linen: each layer draws the random numbers of the unrolled layer with its name in `names`. Inside a lifted
      transform in the block (`nn.remat`, `nn.vmap`, another stack), each layer draws different numbers, which are not
      those of the unrolled layer. Inside `jaxckpt.flax.checkpoint` they are those of the unrolled layer.
    - nnx: the layers are made one after the other, each with its own streams. Variables that all layers share, such as
      an `nnx.Rngs` that a block keeps, or Variables in a call's arguments, go from layer to layer.

    Args:
      Block: a linen or nnx module class, or a partial of one.
      length: number of layers, at least 1.
      schedule: as in `jaxckpt.scan`: "none", "every", "sqrt", "log", layers in a segment, nested lengths, or
        `Slots(n)`.
      policy: says what is kept of each layer that is run again, as in `jaxckpt.checkpoint`. With None, only its input
        is kept, so a segment never holds the values of more than one layer. With "everything", a segment holds the
        values of all its layers, and each layer runs once less.
      names: only for linen: the names of the unrolled layers, with "{}" for the number; "Block_{}" for a class Block.

    Raises:
      ArgumentError: an argument is none of these; or, at the call, a linen block holds a module from outside.
      StructureError: at the call: the block does not return the structure that it takes.
      ForwardModeError: a stack with `Slots` is differentiated forward.

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
        hint = "Pass the class. Pass the block's own arguments to the class that is returned." * isinstance(
            Block, tuple(kinds)
        )
        raise ArgumentError("Block", "a subclass of nn.Module or nnx.Module with a __call__", Block, hint)
    layers = as_int(length)
    if layers is None or layers < 1:
        raise ArgumentError("length", "an int of at least 1, the number of layers", length)
    schedule_of(layers, schedule)
    policy_of(policy)
    if names is not None and make is _nnx_class:
        raise ArgumentError("names", "omitted for a block of nnx, whose streams have no names", names)
    names = f"{Block.__name__}_{{}}" if names is None else names
    if len(pattern_parts(names, "names")) > 1:
        raise ArgumentError("names", "a name, not a path: the unrolled layers are where the stack is", names)
    return make(Block, Stack(layers, tuple(schedule) if isinstance(schedule, list) else schedule, policy, names))
