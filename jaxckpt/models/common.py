"""What every model shares: `checkpoint` around segments of blocks, unrolled or in a scan; parameters on shapes alone.

The functions here are plain JAX. What stands between a model and the compiler is the transform that the caller brings,
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any
Model = tuple[Callable, tuple]
"""What a factory returns: (loss, args), where the first of args are the parameters."""
Transform = Callable[[Callable], Callable]
"""What a factory takes as `checkpoint`: `jax.checkpoint`, a `functools.partial` of it, any such transform."""

Block = Callable[..., tuple[PyTree, PyTree]]
"""`block(state, carry, *shared) -> (carry, out)`: `state` is the block's own (parameters, random key).

`shared` is the same for all; `carry` goes from block to block; `out` is a by-product that stays with the block (running
statistics, an auxiliary loss).
"""


def segment_length(segment_size: int | str, blocks: int) -> int:
    """Returns how many blocks stand in a run: `segment_size` itself, or for "sqrt" the rounded square root of `blocks`.

    Raises:
      ValueError: `segment_size` is neither an int of at least 1 nor "sqrt".

    >>> segment_length("sqrt", 48), segment_length(5, 48)
    (7, 5)
    """
    if segment_size == "sqrt":
        return max(1, round(math.sqrt(blocks)))
    if isinstance(segment_size, int) and not isinstance(segment_size, bool) and segment_size >= 1:
        return segment_size
    raise ValueError(f"segment_size must be an int of at least 1 or 'sqrt'; got {segment_size!r}.")


def sequence(blocks: Sequence[Block], checkpoint: Transform | None, segment_size: int | str) -> Callable:
    """Returns `apply(states, carry, *shared) -> (carry, outs)`: the blocks in a row, `checkpoint` around each run.

    The last run is shorter where `segment_size` does not divide the number of blocks. Runs of the same blocks are one
    function, wrapped once, so that JAX traces it once for all of them.

    >>> add = lambda state, carry: (carry + state, carry)
    >>> carry, outs = sequence([add] * 3, jax.checkpoint, 2)([1, 2, 3], 10)
    >>> int(carry), [int(out) for out in outs]
    (16, [10, 11, 13])
    """
    length = segment_length(segment_size, len(blocks))
    wrapped: dict[tuple[Block, ...], Callable] = {}
    runs = []
    for start in range(0, len(blocks), length):
        members = tuple(blocks[start : start + length])
        if members not in wrapped:
            wrapped[members] = (checkpoint or _identity)(_run(members))
        runs.append((start, wrapped[members]))

    def apply(states: Sequence[PyTree], carry: PyTree, *shared: PyTree) -> tuple[PyTree, list[PyTree]]:
        outs: list[PyTree] = []
        for start, run in runs:
            carry, more = run(list(states[start : start + length]), carry, *shared)
            outs += more
        return carry, outs

    return apply


def _run(members: tuple[Block, ...]) -> Callable:
    def run(states: list[PyTree], carry: PyTree, *shared: PyTree) -> tuple[PyTree, list[PyTree]]:
        outs = []
        for block, state in zip(members, states, strict=True):
            carry, out = block(state, carry, *shared)
            outs.append(out)
        return carry, outs

    return run


def scan(step: Block, checkpoint: Transform | None, segment_size: int | str, length: int) -> Callable:
    """Returns `apply(states, carry, *shared) -> (carry, outs)`: `lax.scan` of `step`, `checkpoint` around each run.

    `states` has a leading axis of `length`, and `outs` has one too. Runs of one step are one scan. Longer ones are a
    scan of scans; steps left over where `segment_size` does not divide `length` are one run of their own after it.
    Without `checkpoint` it is one scan whatever `segment_size` says.

    >>> add = lambda state, carry: (carry + state, carry)
    >>> carry, outs = scan(add, jax.checkpoint, 2, 3)(jnp.array([1, 2, 3]), 10)
    >>> int(carry), outs.tolist()
    (16, [10, 11, 13])
    """
    size = min(segment_length(segment_size, length), length)
    if checkpoint is None:
        size = 1
    whole = length // size * size

    def steps(states: PyTree, carry: PyTree, *shared: PyTree) -> tuple[PyTree, PyTree]:
        return lax.scan(lambda carry, state: step(state, carry, *shared), carry, states)

    run = (checkpoint or _identity)(step if size == 1 else steps)

    def apply(states: PyTree, carry: PyTree, *shared: PyTree) -> tuple[PyTree, PyTree]:
        def over(carry: PyTree, states: PyTree) -> tuple[PyTree, PyTree]:
            return lax.scan(lambda carry, state: run(state, carry, *shared), carry, states)

        if size == 1:
            return over(carry, states)
        # A reshape costs nothing; a slice does, so it is made only where steps are left over.
        first = states if whole == length else jax.tree.map(lambda x: x[:whole], states)
        first = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), first)
        carry, outs = over(carry, first)
        outs = jax.tree.map(lambda y: y.reshape(whole, *y.shape[2:]), outs)
        if whole < length:
            carry, last = run(jax.tree.map(lambda x: x[whole:], states), carry, *shared)
            outs = jax.tree.map(lambda *ys: jnp.concatenate(ys), outs, last)
        return carry, outs

    return apply


def _identity(function: Callable) -> Callable:
    return function


def apply(module: nn.Module, params: PyTree, *args: PyTree, key: jax.Array | None = None) -> Any:
    """Returns what `module` makes of `args` with `params`; `key` is for its dropout."""
    return module.apply({"params": params}, *args, rngs=None if key is None else {"dropout": key})


def random_key(seed: int) -> jax.Array:
    """Returns a key to initialise parameters with: of the generator that compiles soonest, for every kernel draws its
    own.
    """
    return jax.random.key(seed, impl="rbg")


def initialise(init: Callable, *args: PyTree, real: bool) -> PyTree:
    """Returns `init(*args)` where `real`; otherwise its shapes and dtypes, and nothing is computed."""
    return jax.jit(init)(*args) if real else jax.eval_shape(init, *args)


def initialise_equal(init: Callable, key: jax.Array, count: int, *, real: bool) -> list[PyTree]:
    """Returns `count` results of `init(key)`, for equal blocks: a key each where `real`, one trace for all of them."""
    if not real:
        return [jax.eval_shape(init, key)] * count
    compiled = jax.jit(init)
    return [compiled(each) for each in jax.random.split(key, count)]


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, without the array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats of logits (..., classes), taken in float32, and integer labels (...)."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
