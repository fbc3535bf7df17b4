"""Linen modules for the tests, and what is asked of them."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxckpt
from jaxckpt.flax import checkpoint

X = jax.random.normal(jax.random.key(9), (64, 8))
KEY = jax.random.key(0)


class Block(nn.Module):
    """A residual block whose hidden activations, 64 x 64, are what memory goes to."""

    hidden: int = 64

    @nn.compact
    def __call__(self, x: Any, train: bool = False, scale: Any = None) -> Any:
        h = jaxckpt.tag(nn.Dense(self.hidden)(x), "up")
        h = nn.gelu(h)
        h = nn.Dropout(0.5, deterministic=not train)(h)
        h = nn.Dense(x.shape[-1])(h)
        return x + (h if scale is None else h * scale)


Checkpointed = checkpoint(Block)
Whole = checkpoint(Block, static_argnums=(1,))


class Stack(nn.Module):
    """Blocks named automatically, with a dropout of its own behind them that shares their rng stream."""

    block: Any = Block
    depth: int = 2

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        for _ in range(self.depth):
            x = self.block()(x, train)
        return nn.Dropout(0.5, deterministic=not train)(x)


def loss_of(model: nn.Module, *args: Any, state: Any = None, **kwargs: Any) -> Any:
    """Returns params, x -> loss, with a dropout key."""
    state = {} if state is None else state

    def loss(params: Any, x: Any) -> Any:
        out = model.apply({"params": params, **state}, x, *args, rngs={"dropout": jax.random.key(1)}, **kwargs)
        return (jax.tree.leaves(out)[0] ** 2).sum()

    return loss


@functools.cache
def params_of(model: nn.Module) -> Any:
    """Returns parameters of the model's shapes; drawn by numpy, for compiling initialisers takes longer than the
    tests.
    """
    return drawn(model, X)["params"]


def drawn(model: nn.Module, *args: Any) -> Any:
    """Returns variables of the model's shapes and dtypes."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: model.init(KEY, *args))
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) / max(1, np.prod(x.shape[-2:-1])) ** 0.5, x.dtype)
    return jax.tree.map(draw, shapes)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        h = nn.gelu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(64)(x)))
        count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        if train:
            count.value += 1
        return x + nn.Dense(8)(h)


class Net(nn.Module):
    """Two blocks that take a flag."""

    block: Any

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        for _ in range(2):
            x = self.block()(x, train=train)
        return x


class Noisy(nn.Module):
    """Two streams, drawn from in turn, in setup too: y = x * noise, so dy/dx shows what the recomputation drew."""

    def setup(self) -> None:
        self.shift = jax.random.normal(self.make_rng("noise"), (8,)) if self.has_rng("noise") else jnp.zeros(8)

    def __call__(self, x: Any) -> Any:
        for stream in ("noise", "more", "noise"):
            x = jnp.sin(x) * jax.random.normal(self.make_rng(stream), x.shape)
        return x + self.shift


class Flagless(nn.Module):
    """Drops the flag that `Stack` passes on."""

    inner: Any

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return self.inner()(x)


def carry(block: Any) -> Any:
    class Step(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return block()(x), None

    return Step


def around(name: str, block: Any) -> Any:
    """Returns a module class: the block inside a lifted transform."""
    over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
    if name == "scan":

        class Scanned(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                return nn.scan(carry(block), length=4, **over)()(x, None)[0]

        return Scanned
    if name == "vmap":

        class Mapped(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                return nn.vmap(block, in_axes=0, **over)()(x.reshape(4, 16, 8)).reshape(64, 8)

        return Mapped
    return {"jit": nn.jit, "remat": nn.remat, "checkpoint": checkpoint}[name](block)


def train_steps(model: nn.Module, xs: Any, steps: int) -> Any:
    state = model.init(KEY, xs[0], True)
    optimizer = optax.sgd(0.05)

    @jax.jit
    def step(state: Any, opt: Any, x: Any) -> Any:
        rest = {k: v for k, v in state.items() if k != "params"}

        def loss(params: Any) -> Any:
            y, updated = model.apply({"params": params, **rest}, x, True, mutable=list(rest))
            return ((y - 1.0) ** 2).mean(), updated

        (_, updated), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = optimizer.update(grads, opt)
        return {"params": optax.apply_updates(state["params"], updates), **updated}, opt

    opt = optimizer.init(state["params"])
    for x in xs[:steps]:
        state, opt = step(state, opt, x)
    return state
