from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxckpt.flax import checkpoint
from tests.flax.linen_models import (
    KEY,
    Block,
    Checkpointed,
    Flagless,
    Net,
    Noisy,
    Normed,
    Stack,
    X,
    around,
    carry,
    drawn,
    loss_of,
    params_of,
    train_steps,
)
from tests.flax.measures import (
    assert_cheaper,
    assert_close,
    cost,
    gradients,
    identical,
)

# ---------------------------------------------------------------------------------------------------------------- state


class ConvBlock(nn.Module):
    """A ResNet's block, small."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        h = nn.relu(norm()(nn.Conv(x.shape[-1], (3, 3), use_bias=False)(x)))
        h = norm(scale_init=nn.initializers.zeros)(nn.Conv(x.shape[-1], (3, 3), use_bias=False)(h))
        return nn.relu(x + h)


class ResNet(nn.Module):
    block: Any = ConvBlock

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.Conv(8, (3, 3))(x)
        for _ in range(2):
            x = self.block()(x, train)
        return nn.Dense(4)(x.mean((1, 2)))


def test_statistics_and_counts_change_once_a_call(traces):
    plain, ours = Net(Normed), Net(checkpoint(Normed))
    xs = jax.random.normal(jax.random.key(3), (10, 64, 8))
    before, after = train_steps(plain, xs, 10), train_steps(ours, xs, 10)
    assert_close(after, before)
    assert int(after["counts"]["Normed_1"]["calls"]) == 11  # one by init
    state = {k: before[k] for k in ("batch_stats", "counts")}
    losses = [loss_of(model, True, state=state, mutable=list(state)) for model in (ours, plain)]
    assert_cheaper(*losses, before["params"], X)


def test_a_resnets_running_statistics_after_ten_steps_are_the_plain_ones():
    xs = jax.random.normal(jax.random.key(4), (10, 4, 8, 8, 3))
    plain, ours = ResNet(), ResNet(checkpoint(ConvBlock, policy=None))
    before, after = train_steps(plain, xs, 10), train_steps(ours, xs, 10)
    assert_close(after["batch_stats"], before["batch_stats"], rtol=1e-4, atol=1e-5)
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), after, plain.init(KEY, xs[0], True))
    assert min(jax.tree.leaves(moved["batch_stats"])) > 1e-3
    state = {"batch_stats": before["batch_stats"]}
    ours_bytes, plain_bytes = (
        cost(loss_of(m, True, state=state, mutable=["batch_stats"]), before["params"], xs[0]).bytes
        for m in (ours, plain)
    )
    assert ours_bytes < 0.6 * plain_bytes


def test_rng_streams_are_drawn_as_without_in_the_block_and_behind_it(traces):
    plain, ours = Stack(Block), Stack(checkpoint(Block, policy="nothing"))
    params = params_of(plain)
    key = {"dropout": jax.random.key(7)}
    assert_close(ours.apply({"params": params}, X, True, rngs=key), plain.apply({"params": params}, X, True, rngs=key))
    losses = loss_of(ours, True), loss_of(plain, True)
    assert_close(*gradients(*losses, params, X))
    assert_cheaper(*losses, params, X)


def test_the_recomputation_draws_from_every_stream_what_the_forward_pass_drew(traces):
    rngs = {"noise": jax.random.key(1), "more": jax.random.key(2)}
    plain, ours = Stack(lambda: Flagless(Noisy)), Stack(lambda: Flagless(checkpoint(Noisy)))
    run = lambda model: lambda x: model.apply({}, x, rngs=rngs).sum()
    assert_close(run(ours)(X), run(plain)(X))
    assert_close(*gradients(run(ours), run(plain), X))
    assert cost(run(ours), X).bytes < 0.6 * cost(run(plain), X).bytes


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = self.perturb("hidden", nn.Dense(64)(x))
        self.sow("intermediates", "norm", (h**2).sum())
        return nn.Dense(8)(nn.gelu(nn.gelu(h)))


def test_sow_perturb_and_captured_intermediates_work(traces):
    plain, ours = Sowing(), checkpoint(Sowing)()
    variables = plain.init(KEY, X)
    assert identical(variables, ours.init(KEY, X))
    run = lambda model: model.apply(variables, X, capture_intermediates=True, mutable=["intermediates"])
    assert_close(run(ours), run(plain))
    assert len(run(ours)[1]["intermediates"]["norm"]) == 1

    def loss(model: nn.Module, variables: Any) -> Any:
        return (model.apply(variables, X) ** 2).sum()

    ours_loss, plain_loss = functools.partial(loss, ours), functools.partial(loss, plain)
    grads, plain_grads = gradients(ours_loss, plain_loss, variables)
    assert float(abs(grads["perturbations"]["hidden"]).max()) > 0
    assert_close(grads, plain_grads)
    assert_cheaper(ours_loss, plain_loss, variables, at_most=0.8)


# ---------------------------------------------------------------------------------------------------- shared parameters


class Twice(nn.Module):
    block: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        block = self.block()
        return block(block(x))


class Output(nn.Module):
    """Takes the embedding of another module: as a field, or as an argument."""

    embed: Any = None

    @nn.compact
    def __call__(self, h: Any, embed: Any = None) -> Any:
        return (self.embed or embed).attend(nn.gelu(nn.Dense(64)(h)))


class Tied(nn.Module):
    output: Any
    by: str

    def setup(self) -> None:
        self.embed = nn.Embed(16, 64)
        self.out = self.output(self.embed if self.by == "field" else None)

    def __call__(self, tokens: Any) -> Any:
        h = self.embed(tokens)
        return self.out(h) if self.by == "field" else self.out(h, self.embed)


def test_one_instance_called_twice_shares_its_parameters():
    plain, ours = Twice(Block), Twice(Checkpointed)
    params = params_of(plain)
    assert identical(params, params_of(ours))
    assert_close(*gradients(loss_of(ours), loss_of(plain), params, X))
    assert_cheaper(loss_of(ours), loss_of(plain), params, X)


@pytest.mark.parametrize("by", ["field", "argument"])
def test_tied_embeddings_get_the_gradient_of_both_uses(by):
    tokens = jnp.arange(256) % 16
    plain, ours = Tied(Output, by), Tied(checkpoint(Output), by)
    params = plain.init(KEY, tokens)["params"]
    assert identical(params, ours.init(KEY, tokens)["params"])
    losses = [
        lambda params, model=model: (model.apply({"params": params}, tokens) ** 2).sum() for model in (ours, plain)
    ]
    assert_close(*gradients(*losses, params), rtol=1e-4, atol=1e-4)
    assert_cheaper(*losses, params, at_most=0.8)


# ---------------------------------------------------------------------------------------------------- lifted transforms


TRANSFORMS = ["scan", "vmap", "jit", "remat", "checkpoint"]


@pytest.mark.parametrize(
    ("name", "policy"), [*((name, None) for name in TRANSFORMS), ("scan", "nothing"), ("vmap", "nothing")]
)
def test_lifted_transforms_around(name, policy):
    plain, ours = around(name, Block)(), around(name, checkpoint(Block, policy=policy))()
    assert jax.tree.structure(params_of(ours)) == jax.tree.structure(params_of(plain))
    params = params_of(plain)
    assert_close(*gradients(loss_of(ours), loss_of(plain), params, X), rtol=1e-4, atol=1e-4)
    bare = plain if name in ("scan", "vmap", "jit") else Block()
    assert_cheaper(loss_of(ours), loss_of(bare), params, X)


@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "nothing") for name in TRANSFORMS), ("scan", None), ("jit", None)]
)
def test_lifted_transforms_inside(name, policy):
    inside = around(name, Block)
    plain, ours = inside(), checkpoint(inside, policy=policy)()
    assert jax.tree.structure(params_of(ours)) == jax.tree.structure(params_of(plain))
    params = params_of(plain)
    assert_close(*gradients(loss_of(ours), loss_of(plain), params, X), rtol=1e-4, atol=1e-4)
    bare = plain if name in ("scan", "vmap", "jit") else Block()
    assert_cheaper(loss_of(ours), loss_of(bare), params, X)


def test_dropout_in_a_scan_is_drawn_as_without():
    plain, ours = (
        nn.scan(
            carry(lambda: Stack(block, 1)),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        for block in (functools.partial(Flagged, Block), functools.partial(Flagged, Checkpointed))
    )
    params = drawn(plain(), X, None)["params"]
    losses = [loss_of(model(), None) for model in (ours, plain)]
    assert_close(*gradients(*losses, params, X))


class Flagged(nn.Module):
    """Sets the flag whatever it is told."""

    inner: Any

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return self.inner()(x, train=True)


@pytest.mark.parametrize("policy", [None, "dots"])
def test_jax_transforms_around(policy):
    plain, ours = Stack(Block, 1), Stack(checkpoint(Block, policy=policy), 1)
    params = params_of(plain)
    xs = jnp.stack([X, 2 * X])

    def everything(f: Any, params: Any, xs: Any) -> Any:
        return (
            jax.jvp(f, (params, X), (params, X)),
            jax.vmap(jax.grad(f), (None, 0))(params, xs),
            jax.grad(scanned(f))(params, xs),
        )

    def scanned(f: Any) -> Any:
        return lambda params, xs: jax.lax.scan(lambda total, x: (total + f(params, x), None), 0.0, xs)[0]

    f, g = loss_of(ours, True), loss_of(plain, True)
    assert_close(*jax.jit(lambda *args: (everything(f, *args), everything(g, *args)))(params, xs), rtol=1e-4, atol=1e-4)
    assert cost(scanned(f), params, xs).bytes < 0.75 * cost(scanned(g), params, xs).bytes
