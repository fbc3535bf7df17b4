from __future__ import annotations

import functools
import pickle
from dataclasses import replace
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState

import jaxckpt
from jaxckpt import ArgumentError, ForwardModeError, Policy, Slots, StructureError
from jaxckpt.flax import checkpoint, scan_layers, stack_layers, unstack_layers
from jaxckpt.models import common, gpt
from tests.flax.linen_models import KEY, Block, Net, Noisy, Normed, X
from tests.flax.measures import assert_close, cost, identical

SIZE = replace(gpt.Size(), layers=5, width=16, heads=2, tokens=8, vocabulary=64, dropout=0.25, dtype=jnp.float32)
TOKENS = jax.random.randint(jax.random.key(3), (2, SIZE.tokens), 0, SIZE.vocabulary)


class Gpt(nn.Module):
    """A GPT with its blocks unrolled; with a schedule, as one scan."""

    schedule: Any = None
    block: Any = gpt.Block
    policy: Any = None

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embedding = gpt.Embedding(SIZE)
        x = embedding(tokens)
        if self.schedule is None:
            for _ in range(SIZE.layers):
                x = self.block(SIZE)(x)
        else:
            x = scan_layers(self.block, SIZE.layers, schedule=self.schedule, policy=self.policy)(SIZE)(x)
        return gpt.Head(SIZE)(x, embedding.variables["params"]["tokens"]["embedding"])


@functools.cache
def unrolled(block: Any = gpt.Block) -> Any:
    """Returns the unrolled GPT's params, loss and gradients, with dropout."""
    params = drawn(Gpt(block=block), TOKENS)["params"]
    return params, *jax.jit(jax.value_and_grad(loss_of(Gpt(block=block))))(params)


def drawn(model: nn.Module, *args: Any) -> Any:
    """Returns variables of the model's shapes."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: model.init({"params": KEY, "dropout": KEY}, *args))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / max(1, x.shape[0]) ** 0.5, x.dtype), shapes)


def loss_of(model: nn.Module) -> Any:
    def loss(params: Any) -> Any:
        logits = model.apply({"params": params}, TOKENS, rngs={"dropout": KEY})
        return common.cross_entropy(logits, TOKENS)

    return loss


# ---------------------------------------------------------------------------------------------------------------- linen


@pytest.mark.parametrize("schedule", ["every", "sqrt", (2, 3), Slots(2)], ids=str)
def test_a_gpt_computes_what_the_unrolled_one_does_dropout_included(schedule):
    params, loss, grads = unrolled()
    converted = stack_layers(params, "Block_{}")
    ours, ours_grads = jax.jit(jax.value_and_grad(loss_of(Gpt(schedule))))(converted)
    assert_close(ours, loss)
    assert_close(unstack_layers(ours_grads, "Block_{}"), grads, rtol=1e-4, atol=1e-6)
    assert identical(unstack_layers(converted, "Block_{}"), params)


def test_the_stack_is_initialised_to_the_unrolled_parameters():
    for model, pattern in ((Net(Normed), "Normed_{}"), (Net(Block), "Block_{}")):

        class Stacked(nn.Module):
            block: Any = model.block

            @nn.compact
            def __call__(self, x: Any, train: bool) -> Any:
                return scan_layers(self.block, 2)()(x, train=train)

        assert_close(Stacked().init(KEY, X, False), stack_layers(model.init(KEY, X, False), pattern))


class Names(nn.Module):
    """Layers with names of their own; with `stacked`, as one scan that is told them."""

    stacked: bool
    block: Any = Block

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.stacked:
            return scan_layers(self.block, 3, names="layers_{}")(name="layers")(x, True)
        for i in range(3):
            x = self.block(name=f"layers_{i}")(x, True)
        return x


@pytest.mark.parametrize(
    ("block", "separated"),
    [(Block, False), (Block, True), (checkpoint(Block), False), (checkpoint(Block, policy="dots"), False)],
)
def test_streams_are_those_of_layers_of_the_names_given_within_a_checkpoint_too(block, separated):
    with flax.config.temp_flip_flag("fix_rng_separator", separated):
        params = drawn(Names(False), X)["params"]
        rngs = {"dropout": KEY}
        out = Names(False).apply({"params": params}, X, rngs=rngs)
        ours = Names(True, block).apply({"params": stack_layers(params, "layers_{}", "layers")}, X, rngs=rngs)
    assert_close(ours, out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrapped", [Noisy, checkpoint(Noisy), nn.remat(Noisy), nn.jit(Noisy)], ids=str)
def test_every_layer_draws_numbers_of_its_own_whatever_is_in_the_block(wrapped):
    class Sown(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            self.sow("intermediates", "noise", wrapped()(jnp.ones(8)))
            return x

    stack = scan_layers(Sown, 4)()
    keys = {"noise": jax.random.key(1), "more": jax.random.key(2)}
    for inner in (stack, scan_layers(scan_layers(Sown, 2), 2)()):
        noise = inner.apply({}, X, rngs=keys, mutable=["intermediates"])[1]["intermediates"]["noise"][0]
        assert len(np.unique(noise)) == 4 * 8


@pytest.mark.parametrize("schedule", ["sqrt", Slots(2)], ids=str)
def test_statistics_counts_and_sown_values_are_each_layers_own(schedule):
    class Sowing(Normed):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            out = super().__call__(x, train)
            self.sow("intermediates", "mean", out.mean())
            return out

    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            return scan_layers(Sowing, 2, schedule=schedule)()(x, train=train)

    plain, ours = Net(Sowing), Stacked()
    state = plain.init(KEY, X, False)
    states = [dict(state), dict(stack_layers(state, "Sowing_{}"))]

    def step(model: Any, state: Any, x: Any) -> Any:
        rest = {k: v for k, v in state.items() if k not in ("params", "intermediates")}

        def loss(params: Any) -> Any:
            out, new = model.apply(
                {"params": params, **rest}, x, True, mutable=["batch_stats", "counts", "intermediates"]
            )
            return (out**2).mean(), new

        (_, new), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), **new}

    steps = [jax.jit(functools.partial(step, model)) for model in (plain, ours)]
    for i in range(3):
        states = [one(state, X + i) for one, state in zip(steps, states)]
    assert_close(unstack_layers(states[1], "Sowing_{}"), states[0], rtol=1e-4, atol=1e-5)
    assert states[1]["counts"]["SowingStack_0"]["calls"].tolist() == [3, 3]
    mean = states[1]["batch_stats"]["SowingStack_0"]["BatchNorm_0"]["mean"]
    assert mean.shape == (2, 64) and abs(mean[0] - mean[1]).max() > 1e-3


def test_other_arguments_are_the_same_for_each_layer_static_or_differentiated():
    scale = jnp.linspace(0.1, 1.0, 8)
    params = drawn(Net(Block), X, True)["params"]

    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool, scale: Any) -> Any:
            return scan_layers(functools.partial(Block, 64), 2)()(x, train, scale=scale)

    def plain(params: Any, scale: Any) -> Any:
        x = X
        for i in range(2):
            x = Block().apply({"params": params[f"Block_{i}"]}, x, False, scale)
        return (x**2).sum()

    def ours(params: Any, scale: Any) -> Any:
        return (Stacked().apply({"params": stack_layers(params, "Block_{}")}, X, False, scale) ** 2).sum()

    assert_close(*(jax.jit(jax.grad(f, (0, 1)))(params, scale) for f in (ours, plain)), rtol=1e-4, atol=1e-4)


class Deep(nn.Module):
    """16 blocks of one matmul up and one down, or as one scan."""

    schedule: Any
    policy: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return scan_layers(Block, 16, schedule=self.schedule, policy=self.policy)()(x)


def test_what_is_kept_and_run_again_is_what_the_schedule_says():
    def of(schedule: Any, policy: Any = None) -> Any:
        model = Deep(schedule, policy)
        return cost(lambda params: (model.apply({"params": params}, X) ** 2).sum(), drawn(Deep("none"), X)["params"])

    none, every, sqrt, everything = of("none"), of("every"), of("sqrt"), of("sqrt", "everything")
    # A block runs two matmuls forward and four backward. Of a run again only the first is needed, but to go on, both.
    assert none.matmuls == 16 * 6
    assert every.matmuls == 16 * (6 + 1)
    assert everything.matmuls == 16 * (6 + 2)
    assert sqrt.matmuls == everything.matmuls + 16
    hidden, carry = 64 * 64 * 4, 64 * 8 * 4
    assert none.bytes > every.bytes + 16 * hidden
    assert every.bytes - sqrt.bytes > (16 - 5) * carry  # every carry, and one of four
    assert of("none", "nothing").bytes < none.bytes - 16 * hidden


def test_policies_hold_within_a_layer_and_unknown_tags_are_errors():
    params = drawn(Deep("none"), X)["params"]
    loss = lambda model: lambda params: (model.apply({"params": params}, X) ** 2).sum()
    kept = cost(loss(Deep("every", Policy({"up": jaxckpt.SAVE}))), params)
    assert (16, 64, 64) in kept.shapes and (16, 64, 64) not in cost(loss(Deep("every")), params).shapes
    with pytest.raises(jaxckpt.UnmatchedTagError, match="Did you mean 'up'"):
        loss(Deep("every", Policy({"upp": jaxckpt.SAVE})))(params)


@pytest.mark.once
@pytest.mark.cuda
def test_h100_peak_of_48_layers_is_below_that_of_a_checkpoint_around_each_block_in_a_plain_scan():
    size = replace(gpt.Size(), layers=48, vocabulary=512)
    plain, args = gpt.deep_scan(functools.partial(jax.checkpoint, prevent_cse=False), vocabulary=512)
    stack = scan_layers(gpt.Block, 48)(size)

    def ours(params: Any, inputs: Any, targets: Any) -> Any:
        x = stack.apply({"params": params["blocks"]}, gpt.embed(size, params, inputs))
        return common.cross_entropy(gpt.logits(size, params, x), targets)

    peaks = [
        jaxckpt.measure(jax.value_and_grad(f), *args, target="cuda:h100", generate_code=False).peak_bytes
        for f in (ours, plain)
    ]
    assert peaks[0] < peaks[1] - 250 * 2**20, (
        peaks
    )  # of 48 kept inputs of 12 MiB, 36 less; a segment's gradients come on top


def test_a_stack_is_differentiated_forward_but_with_slots():
    params = drawn(Deep("none"), X)["params"]
    run = lambda schedule: jax.jvp(lambda x: Deep(schedule).apply({"params": params}, x), (X,), (X,))[1]
    assert_close(run("sqrt"), run("none"), rtol=1e-4, atol=1e-4)
    with pytest.raises(ForwardModeError, match="Use a nested schedule"):
        run(Slots(3))


def test_a_stack_pickles_and_is_called_like_its_block():
    stack = scan_layers(Block, 3)(hidden=5)
    assert pickle.loads(pickle.dumps(stack)) == stack
    assert type(stack).__name__ == "BlockStack" and isinstance(stack, Block)
    assert scan_layers(Block, 3) is scan_layers(Block, 3)


def test_partitioned_parameters_get_an_axis_that_is_not_partitioned():
    class Sharded(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.ones, ("in", "out")))(x)

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return Sharded()(Sharded()(x))

    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return scan_layers(Sharded, 2)()(x)

    ours, plain = Stacked().init(KEY, X), Plain().init(KEY, X)
    assert ours["params"]["ShardedStack_0"]["Dense_0"]["kernel"].names == (None, "in", "out")
    assert identical(stack_layers(plain, "Sharded_{}"), ours) and identical(unstack_layers(ours, "Sharded_{}"), plain)
    assert_close(Stacked().apply(ours, X), Plain().apply(plain, X))


# ------------------------------------------------------------------------------------------------------------------ nnx


class Layer(nnx.Module):
    """An MLP of a GPT's block, with dropout, statistics, and if asked a stream that all layers share."""

    def __init__(self, rngs: nnx.Rngs, shared: bool = False) -> None:
        init = nnx.initializers.normal(0.3)  # a function of its own in every layer
        self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.rngs = rngs if shared else nnx.data(None)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any, train: bool = True, rngs: Any = None, scale: Any = 1.0) -> Any:
        self.calls[...] += 1
        h = nnx.gelu(self.norm(self.up(x), use_running_average=not train))
        h = self.dropout(h, deterministic=not train)
        for streams in (self.rngs, rngs):
            if streams is not None:
                h = h * jax.random.uniform(streams.noise(), h.shape)
        return x + scale * self.down(h)


class Model(nnx.Module):
    """Five layers between two projections; with a schedule, as one scan."""

    def __init__(self, schedule: Any = None, shared: bool = False, policy: Any = None) -> None:
        rngs = nnx.Rngs(0, dropout=1, noise=2)
        self.first = nnx.Linear(8, 8, rngs=rngs)
        if schedule is None:
            self.blocks = nnx.List([Layer(rngs, shared) for _ in range(5)])
        else:
            self.blocks = scan_layers(Layer, 5, schedule=schedule, policy=policy)(rngs, shared)
        self.last = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any, **kwargs: Any) -> Any:
        x = self.first(x)
        for block in self.blocks if isinstance(self.blocks, nnx.List) else [self.blocks]:
            x = block(x, **kwargs)
        return self.last(x)


@nnx.jit
def gradient(model: Any, rngs: Any, x: Any, scale: Any) -> Any:
    loss = lambda model, rngs, scale: (model(x, rngs=rngs, scale=scale) ** 2).mean()
    return nnx.value_and_grad(loss, argnums=(0, 2))(model, rngs, scale)


def pure(state: Any) -> Any:
    return nnx.to_pure_dict(state)


@pytest.mark.parametrize(
    ("schedule", "shared"), [("none", True), ("log", False), ("sqrt", True), (Slots(2), True)], ids=str
)
def test_nnx_layers_compute_and_change_what_unrolled_ones_do(schedule, shared):
    plain, ours = Model(shared=shared), Model(schedule, shared)
    assert_close(pure(stack_layers(nnx.state(plain), "blocks/{}")), pure(nnx.state(ours)), rtol=0, atol=0)
    noise = [nnx.Rngs(noise=7) for _ in range(2)]
    for _ in range(2):
        for x in (X, X + 1):
            (loss, grads), (our_loss, our_grads) = (
                gradient(model, rngs, x, jnp.float32(0.5)) for model, rngs in zip((plain, ours), noise)
            )
            assert_close(our_loss, loss)
            assert_close(pure(unstack_layers(our_grads[0], "blocks/{}")), pure(grads[0]), rtol=1e-3, atol=1e-5)
            assert_close(our_grads[1], grads[1], rtol=1e-4)
    assert_close(pure(unstack_layers(nnx.state(ours), "blocks/{}")), pure(nnx.state(plain)), rtol=1e-4, atol=1e-5)
    assert noise[0].noise.count[...] == noise[1].noise.count[...] == 4 * 5
    assert ours.blocks.calls[...].tolist() == [4] * 5  # type: ignore[attr-defined]
    assert ours.blocks.dropout.rngs.count[...].tolist() == [4] * 5  # type: ignore[attr-defined]


def test_nnx_training_with_an_optimizer_is_the_unrolled_one():
    models = Model(), Model("sqrt")
    # The gradient of a bias before a norm is rounding alone: with an `eps` as large Adam does not make a step of it.
    optimizers = [nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param) for model in models]

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: ((model(x) - 1) ** 2).mean())(model))

    for x in jax.random.normal(jax.random.key(3), (4, 16, 8)):
        for model, optimizer in zip(models, optimizers):
            step(model, optimizer, x)
    converted = [unstack_layers(nnx.state(made), "blocks/{}") for made in (models[1], optimizers[1])]
    for ours, plain in zip(converted, (models[0], optimizers[0])):
        assert_close(pure(ours), pure(nnx.state(plain)), rtol=1e-3, atol=1e-4)
    models[0].blocks[3].up.kernel[...] += 1.0  # and back, into a model
    nnx.update(models[1], stack_layers(nnx.state(models[0]), "blocks/{}"))
    for model in models:
        model.eval()
    assert_close(models[1](X, train=False), models[0](X, train=False), rtol=1e-4, atol=1e-4)


def test_nnx_keeps_and_runs_again_what_the_schedule_says():
    def of(schedule: Any, policy: Any = None) -> Any:
        graph, params, rest = nnx.split(Model(schedule, policy=policy), nnx.Param, ...)
        return cost(lambda params: (nnx.merge(graph, params, rest, copy=True)(X) ** 2).sum(), params)

    none, every, sqrt = of("none"), of("every"), of("sqrt")
    assert every.matmuls == none.matmuls + 5
    assert sqrt.matmuls > every.matmuls
    hidden = 64 * 16 * 4
    assert sqrt.bytes < every.bytes < none.bytes - 5 * 3 * hidden


class Sowing(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.linear(x)
        self.sow(nnx.Intermediate, "mean", x.mean())
        self.seen = nnx.Intermediate(x.max())
        return x


def test_nnx_values_that_a_layer_sows_and_variables_that_it_adds_are_stacked():
    class Model(nnx.Module):
        def __init__(self, stacked: bool) -> None:
            rngs = nnx.Rngs(0)
            self.blocks = scan_layers(Sowing, 3)(rngs) if stacked else nnx.List([Sowing(rngs) for _ in range(3)])

        def __call__(self, x: Any) -> Any:
            for block in self.blocks if isinstance(self.blocks, nnx.List) else [self.blocks]:
                x = block(x)
            return x

    models = Model(False), Model(True)
    sown = [nnx.capture(model, nnx.Intermediate)(X)[1] for model in models]
    assert_close(pure(stack_layers(sown[0], "blocks/{}")), pure(sown[1]))
    assert_close(models[1].blocks.seen[...], jnp.stack([block.seen[...] for block in models[0].blocks]))


def test_nnx_stacks_split_merge_and_pickle():
    model = Model("sqrt")
    copied = nnx.merge(*nnx.split(model))
    assert type(copied.blocks).__name__ == "LayerStack" and isinstance(copied.blocks, Layer)
    assert_close(copied(X, train=False), model(X, train=False))
    assert nnx.eval_shape(lambda: Model("sqrt")).blocks.up.kernel.shape == (5, 8, 16)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------------- trees


def layers(count: int = 3) -> Any:
    return {f"Block_{i}": {"kernel": np.full((2, 3), i, np.float32), "bias": np.full(3, i)} for i in range(count)}


def test_stacks_are_found_wherever_they_are_and_come_back():
    tree = {
        "params": {"encoder": layers(12), "decoder": {**layers(), "head": np.ones(2)}},
        "batch_stats": {"encoder": layers(12)},
    }
    stacked = stack_layers(tree, "Block_{}")
    assert stacked["params"]["encoder"]["BlockStack_0"]["bias"][:, 0].tolist() == list(
        range(12)
    )  # by number, not by name
    assert stacked["params"]["decoder"]["BlockStack_0"]["kernel"].shape == (3, 2, 3)
    assert identical(unstack_layers(stacked, "Block_{}"), tree)
    one = stack_layers(tree, "decoder/Block_{}")
    assert one["params"]["encoder"].keys() == layers(12).keys() and "BlockStack_0" in one["params"]["decoder"]
    assert identical(unstack_layers(one, "decoder/Block_{}"), tree)


def test_optimizer_states_train_states_shapes_and_frozen_dicts_are_converted():
    params = layers()
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    stacked = stack_layers(state, "Block_{}")
    assert stacked.opt_state[0].mu["BlockStack_0"]["bias"].shape == (3, 3)
    back = unstack_layers(stacked, "Block_{}")
    assert jax.tree.all(jax.tree.map(np.array_equal, back, state)) and isinstance(back, TrainState)
    frozen = stack_layers(freeze(params), "Block_{}")
    assert isinstance(frozen, FrozenDict) and frozen["BlockStack_0"]["bias"].shape == (3, 3)
    shapes = jax.eval_shape(lambda: params)
    assert jax.tree.leaves(stack_layers(shapes, "Block_{}"))[0].shape == (3, 3)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a == b, unstack_layers(stack_layers(shapes, "Block_{}"), "Block_{}"), shapes)
    )


def test_other_names_say_where_the_stack_goes():
    tree = {"layers_0": np.ones(2), "layers_1": np.zeros(2)}
    assert stack_layers(tree, "layers_{}", into="layers")["layers"].shape == (2, 2)
    assert identical(unstack_layers(stack_layers(tree, "layers_{}", "layers"), "layers_{}", "layers"), tree)


def without(tree: Any, name: str) -> Any:
    return {key: value for key, value in tree.items() if key != name}


@pytest.mark.parametrize(
    ("tree", "names", "message"),
    [
        (without(layers(), "Block_1"), "Block_{}", r"all layers from 'Block_0' to 'Block_2'; got .*no 'Block_1'"),
        (without(layers(), "Block_0"), "Block_{}", r"no 'Block_0'"),
        (
            layers() | {"Block_1": {"kernel": np.ones((2, 3))}},
            "Block_{}",
            r"same leaves; .*'Block_0/bias'.*, but no 'Block_1/bias'",
        ),
        (
            layers() | {"Block_2": {"kernel": np.ones((2, 4), np.float32), "bias": np.full(3, 2)}},
            "Block_{}",
            r"same shapes and dtypes; .*float32\[2, 3\] at 'Block_0/kernel' and float32\[2, 4\] at 'Block_2/kernel'",
        ),
        (
            layers() | {"BlockStack_0": 1},
            "Block_{}",
            r"without leaves at 'BlockStack_0', where the result goes; got a leaf at 'BlockStack_0'",
        ),
        (layers(), "Blok_{}", r"contains 'Blok_\{\}'; .* Did you mean 'Block_"),
        (layers(), "Block", r'names must be a path with one "\{\}"'),
        (layers(), "Block_{}_{}", r'names must be a path with one "\{\}"'),
        (layers(), "Block{}", r"into must be given for layers with the names 'Block\{\}'"),
    ],
)
def test_trees_that_cannot_be_stacked_are_errors(tree, names, message):
    with pytest.raises(ArgumentError, match=message):
        stack_layers(tree, names)


def test_trees_that_cannot_be_unstacked_are_errors():
    stacked = stack_layers(layers(), "Block_{}")
    with pytest.raises(ArgumentError, match=r"contains 'BlockStack_0'"):
        unstack_layers(layers(), "Block_{}")
    with pytest.raises(ArgumentError, match=r"have a row for each layer; .*3 rows at .*, .*5 rows at .*more"):
        unstack_layers({"BlockStack_0": {**stacked["BlockStack_0"], "more": np.ones((5, 2))}}, "Block_{}")
    with pytest.raises(ArgumentError, match=r"without leaves at 'Block_\{\}', where the result goes; .*'Block_1/bias'"):
        unstack_layers(stacked | {"Block_1": {"bias": 1}}, "Block_{}")


# ------------------------------------------------------------------------------------------------------------ bad input


class Wider(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(9)(x)


class Narrower(nnx.Module):
    def __init__(self) -> None:
        pass

    def __call__(self, x: Any) -> Any:
        return x.astype(jnp.bfloat16), 1


def test_a_block_that_does_not_return_what_it_takes_is_an_error():
    with pytest.raises(StructureError, match=r"first argument: float32\[64,8\]; Wider returned float32\[64,9\]"):
        scan_layers(Wider, 2)().init(KEY, X)
    with pytest.raises(StructureError, match=r"float32\[64,8\]; Narrower returned \(bfloat16\[64,8\], int32\[\]\)"):
        scan_layers(Narrower, 2)()(X)


@pytest.mark.parametrize(
    ("block", "length", "options", "message"),
    [
        (Block, 0, {}, "length must be an int of at least 1, the number of layers; got 0"),
        (Block, -3, {}, "length must be .*; got -3"),
        (Block, True, {}, "length must be .*; got True"),
        (Layer, 2.0, {}, "length must be .*; got 2.0"),
        (Block(), 2, {}, "(?s)Block must be a subclass .* Pass the class"),
        (dict, 2, {}, "Block must be a subclass"),
        (Block, 2, {"schedule": "sqr"}, "schedule must be .* Did you mean 'sqrt'"),
        (Block, 9, {"schedule": (2, 2)}, "at least the length, 9"),
        (Block, 9, {"policy": "dotz"}, "policy must be .* Did you mean 'dots'"),
        (Block, 9, {"names": "Block"}, 'names must be a path with one "{}"'),
        (Block, 9, {"names": "a/{}"}, "names must be a name, not a path"),
        (Layer, 9, {"names": "a_{}"}, "names must be omitted for a block of nnx"),
    ],
)
def test_bad_arguments_are_errors_at_once(block, length, options, message):
    with pytest.raises(ArgumentError, match=message):
        scan_layers(block, length, **options)
    with pytest.raises(ArgumentError, match="count must be an int of at least 1"):
        scan_layers(Block, 3, schedule=Slots(0))


def test_values_that_are_not_stacked_are_errors_that_name_the_remedy():
    params = drawn(Block(), X)["params"]
    with pytest.raises(ArgumentError, match=r"each of the 3 layers of Block; got .*stack_layers makes them"):
        scan_layers(Block, 3)().apply({"params": params}, X)
    stack = scan_layers(Layer, 3)(nnx.Rngs(0))
    stack.up.kernel = nnx.Param(jnp.ones((2, 8, 16)))
    with pytest.raises(
        ArgumentError, match=r"one row for each of the 3 layers of Layer; got up/kernel of shape \(2, 8, 16\)"
    ):
        stack(X)


class Holder(nn.Module):
    inner: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + self.inner(x)


def test_modules_from_outside_are_errors_but_those_that_a_block_is_given_are_its_own():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            shared = nn.Dense(8)
            shared(x)
            return scan_layers(Holder, 2)(shared)(x)

    with pytest.raises(ArgumentError, match=r"no modules from outside; got \['Dense_0'\]"):
        Model().init(KEY, X)
    assert scan_layers(Holder, 2)(nn.Dense(8)).init(KEY, X)["params"]["inner"]["kernel"].shape == (2, 8, 8)


def test_nnx_layers_that_differ_are_errors():
    class Numbered(nnx.Module):
        made = 0

        def __init__(self) -> None:
            self.number = Numbered.made
            Numbered.made += 1

        def __call__(self, x: Any) -> Any:
            return x

    with pytest.raises(ArgumentError, match="Numbered 0 and Numbered 1 differ in more; got 'number: 0 and 1'"):
        scan_layers(Numbered, 2)()
