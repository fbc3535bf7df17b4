from __future__ import annotations

import copy
import functools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxckpt
from jaxckpt import SAVE, ArgumentError, Policy, UnmatchedTagError
from jaxckpt.flax import apply, checkpoint
from jaxckpt.flax.nnx import _Memo
from tests.flax.measures import assert_cheaper, assert_close, cost, gradients

X = jax.random.normal(jax.random.key(9), (64, 8))


class Block(nnx.Module):
    """A residual block whose hidden activations, 64 x 64, are what memory goes to."""

    def __init__(self, rngs: nnx.Rngs, hidden: int = 64) -> None:
        self.up = nnx.Linear(8, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any, train: bool = False, scale: Any = None) -> Any:
        h = nnx.gelu(jaxckpt.tag(self.up(x), "up"))
        h = self.down(self.dropout(h, deterministic=not train))
        return x + (h if scale is None else h * scale)

    def half(self, x: Any) -> Any:
        return self.down(nnx.gelu(self.up(x)))


Checkpointed = checkpoint(Block)
Whole = checkpoint(Block, static_argnums=(1,))


class Stack(nnx.Module):
    def __init__(self, block: Any = Block, depth: int = 2) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.blocks = nnx.List([block(rngs) for _ in range(depth)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any, train: bool = False) -> Any:
        for block in self.blocks:
            x = block(x, train)
        return self.dropout(x, deterministic=not train)


def loss_of(model: Any, *args: Any, call: Any = None, **kwargs: Any) -> Any:
    """Returns params, x -> loss, of a copy of the model."""
    graph, _, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, x: Any) -> Any:
        module = nnx.merge(graph, params, rest, copy=True)
        return ((call or type(module).__call__)(module, x, *args, **kwargs) ** 2).sum()

    return loss


def params_of(model: Any) -> Any:
    return nnx.state(model, nnx.Param)


# ----------------------------------------------------------------------------------------------------- names and values


def test_the_state_has_the_paths_and_the_very_values_of_the_plain_model():
    plain, ours = Stack(), Stack(Checkpointed)
    assert_close(nnx.state(ours), nnx.state(plain), rtol=0, atol=0)
    assert_close(*gradients(loss_of(ours), loss_of(plain), params_of(plain), X))
    assert_cheaper(loss_of(ours), loss_of(plain), params_of(plain), X)
    nnx.update(ours, nnx.state(plain))


def test_states_saved_by_orbax_load_both_ways(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as saver:
        for name, source, target in (("plain", Stack(), Stack(Checkpointed)), ("ours", Stack(Checkpointed), Stack())):
            kernel = source.blocks[1].up.kernel
            kernel[...] = kernel[...] + 1
            state = nnx.to_pure_dict(nnx.state(source, nnx.Param))
            saver.save(tmp_path / name, state)
            saver.wait_until_finished()
            wanted = nnx.state(target, nnx.Param)
            nnx.replace_by_pure_dict(wanted, saver.restore(tmp_path / name, nnx.to_pure_dict(wanted)))
            nnx.update(target, wanted)
            assert_close(target(X), source(X))
    assert_cheaper(loss_of(source), loss_of(target), params_of(target), X)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (None, []),
        ("nothing", []),
        (Policy({"up": SAVE}), [(64, 64)]),
        (jax.checkpoint_policies.save_only_these_names("up"), [(64, 64)]),
        ("dots", [(64, 64)]),
    ],
    ids=["None", "nothing", "tag", "jax", "dots"],
)
def test_a_policy_keeps_what_it_names_and_no_more(policy, kept):
    plain, ours = Stack(Block, 1), Stack(checkpoint(Block, policy=policy), 1)
    params = params_of(plain)
    less, more = cost(loss_of(ours), params, X), cost(loss_of(plain), params, X)
    assert [shape for shape in less.shapes if shape == (64, 64)] == kept
    assert more.shapes.count((64, 64)) > 1
    assert less.matmuls == more.matmuls + (not kept)
    if policy == "dots" or not kept:
        assert_close(*gradients(loss_of(ours), loss_of(plain), params, X))


def test_unknown_tags_are_errors():
    with pytest.raises(UnmatchedTagError, match=r"Did you mean 'up'"):
        checkpoint(Block, policy=Policy({"upp": SAVE}))(nnx.Rngs(0))(X)


# ------------------------------------------------------------------------------------------------ methods and functions


class Method(Block):
    @checkpoint(policy="nothing")
    def __call__(self, x: Any, train: bool = False) -> Any:
        return super().__call__(x, train)


CALLS = {
    "module first": checkpoint(lambda block, x: block(x)),
    "module later": lambda block, x: checkpoint(lambda x, block: block(x))(x, block),
    "in a container": lambda block, x: checkpoint(lambda x, *, blocks: blocks["one"](x))(x, blocks={"one": block}),
    "instance": lambda block, x: checkpoint(block)(x),
    "bound method": lambda block, x: checkpoint(block.half)(x),
    "closure": lambda block, x: checkpoint(lambda x: block(x))(x),
    "decorated": lambda block, x: Method.__call__(block, x),
}


@pytest.mark.parametrize("name", CALLS)
def test_methods_functions_and_instances_are_checkpointed(name):
    block = Method(nnx.Rngs(0, dropout=1))
    plain = loss_of(block, call=Block.half if name == "bound method" else lambda block, x: Block.__call__(block, x))
    ours = loss_of(block, call=CALLS[name])
    params = params_of(block)
    assert_close(*gradients(ours, plain, params, X))
    assert_cheaper(ours, plain, params, X, at_most=0.7)


def test_functions_without_modules_are_checkpointed_too():
    f = lambda x: jnp.sin(jnp.sin(x @ x.T)).sum()
    assert_cheaper(lambda x: checkpoint(f)(x), f, X)


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "block", [Checkpointed, Whole, checkpoint(Block, static_argnums=-2)], ids=["bare", "declared", "negative"]
)
def test_flags_arrive_as_python_values(block):
    plain, ours = Block(nnx.Rngs(0, dropout=1)), block(nnx.Rngs(0, dropout=1))
    params = params_of(plain)
    for args, kwargs in (((True,), {}), ((), {"train": True}), ((False,), {"scale": 2.0})):
        losses = loss_of(ours, *args, **kwargs), loss_of(plain, *args, **kwargs)
        assert_close(*(loss(params, X) for loss in losses))
        assert_cheaper(*losses, params, X, at_most=0.7)


def test_arrays_by_keyword_are_traced_and_differentiated():
    scale = jnp.full((8,), 0.3)
    losses = [
        lambda params, scale, block=block: loss_of(block, scale=scale)(params, X)
        for block in (Checkpointed(nnx.Rngs(0)), Block(nnx.Rngs(0)))
    ]
    params = params_of(Block(nnx.Rngs(0)))
    assert_close(*gradients(*losses, params, scale, argnums=(0, 1)))
    assert_cheaper(*losses, params, scale, at_most=0.7)


def test_arrays_whose_paths_read_alike_are_told_apart():
    block = Block(nnx.Rngs(0))
    tables = {"a.b": jnp.float32(1), "a": {"b": jnp.float32(2)}}
    assert float(checkpoint(lambda block, t: t["a.b"] + 10 * t["a"]["b"])(block, tables)) == 21


class Branches(nnx.Module):
    def __init__(self) -> None:
        self.inner = Block(nnx.Rngs(0))

    def __call__(self, x: Any, table: Any, *more: Any, **rest: Any) -> Any:
        return self.inner(x if table.any() else -x), {"more": more, **rest}


def test_an_array_to_branch_on_is_declared_or_named_in_the_error():
    table = np.array([True, False])
    out, rest = checkpoint(Branches, static_argnums=1)()(X, table, "a", None, mode="b", size=3)
    assert (out.shape, rest) == ((64, 8), {"more": ("a", None), "mode": "b", "size": 3})
    declared = checkpoint(Branches, static_argnums=1)()
    call = lambda module, x: module(x, table=table)[0]
    assert_cheaper(loss_of(declared, call=call), loss_of(Branches(), call=call), params_of(declared), X, at_most=0.7)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"arguments\['table'\]") as raised:
        checkpoint(Branches)()(X, table)
    assert any("static_argnums" in note for note in raised.value.__notes__)


def test_argument_numbers_out_of_range_are_errors():
    with pytest.raises(
        ArgumentError, match=r"static_argnums .* Block.__call__: 0 \(x\), 1 \(train\), 2 \(scale\); got 3"
    ):
        checkpoint(Block, static_argnums=3)
    with pytest.raises(ArgumentError, match=r"0 \(x\); got 1. `self` is not counted"):
        checkpoint(Block.half, static_argnums=1)(Block(nnx.Rngs(0)), X)
    with pytest.raises(ArgumentError, match=r"0 \(x\), 1 \(block\); got 2"):
        checkpoint(lambda x, block: block(x), static_argnums=2)(X, Block(nnx.Rngs(0)))


class NoCall(nnx.Module):
    pass


def test_modules_without_a_call_are_no_targets():
    with pytest.raises(ArgumentError, match="with a __call__"):
        checkpoint(NoCall)
    with pytest.raises(ArgumentError, match="target must be"):
        checkpoint(NoCall())


# ---------------------------------------------------------------------------------------------------------------- state


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any, train: bool = True) -> Any:
        self.calls[...] += 1
        return x + nnx.relu(self.norm(self.conv(x), use_running_average=not train))


def trained(model: Any, steps: int) -> Any:
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: ((model(x, train=True) - 1.0) ** 2).mean())(model))

    for x in jax.random.normal(jax.random.key(3), (steps, 4, 16, 8)):
        step(model, optimizer, x)
    return nnx.state(model)


def test_running_statistics_after_ten_steps_are_the_plain_ones_and_counts_count_once(traces):
    plain, ours = Stack(Normed), Stack(checkpoint(Normed, policy="nothing"))
    x = jnp.ones((4, 16, 8))
    less, more = (cost(loss_of(model, True), params_of(model), x) for model in (ours, plain))
    assert less.bytes < 0.7 * more.bytes
    before, after = trained(plain, 10), trained(ours, 10)
    assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert int(ours.blocks[1].calls[...]) == 10
    assert float(abs(ours.blocks[1].norm.mean[...]).max()) > 1e-2


def test_rng_streams_are_drawn_as_without_in_the_block_and_behind_it(traces):
    plain, ours = Stack(), Stack(checkpoint(Block, policy="nothing"))
    params = params_of(plain)
    losses = loss_of(ours, True), loss_of(plain, True)
    assert_close(*gradients(*losses, params, X))
    assert_cheaper(*losses, params, X)
    for _ in range(2):
        assert_close(ours(X, True), plain(X, True))
    assert_close(nnx.state(ours, nnx.RngState), nnx.state(plain, nnx.RngState))


class Noisy(nnx.Module):
    """Draws from two streams of an Rngs that is an argument."""

    def __call__(self, x: Any, rngs: nnx.Rngs) -> Any:
        for stream in (rngs.noise, rngs.more, rngs.noise):
            x = jnp.sin(x) * jax.random.normal(stream(), x.shape)
        return x


@pytest.mark.parametrize("by", ["position", "keyword"])
def test_streams_that_are_arguments_advance_as_without(by, traces):
    def run(cls: Any) -> Any:
        def loss(x: Any) -> Any:
            rngs, module = nnx.Rngs(noise=1, more=2), cls()
            for _ in range(2):
                x = module(x, rngs) if by == "position" else module(x, rngs=rngs)
            counts = rngs.noise.count[...] + 10 * rngs.more.count[...]
            return x.sum() + counts

        return loss

    ours, plain = run(checkpoint(Noisy)), run(Noisy)
    assert_close(ours(X), plain(X))
    assert_close(*gradients(ours, plain, X))
    assert cost(ours, X).bytes < 0.6 * cost(plain, X).bytes


class Growing(nnx.Module):
    """Changes its structure when it is called: sows, makes a Variable and a module, changes a flag, returns a part of
    itself."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.block = Block(rngs)
        self.called = False

    def __call__(self, x: Any) -> Any:
        h = self.block.up(x)
        self.norm = nnx.Intermediate((h**2).sum())
        self.spare = nnx.Linear(8, 2, rngs=nnx.Rngs(4))
        self.same, self.called = self.block, True
        return self.block.down(nnx.gelu(nnx.gelu(h))), self.block, self.spare


def test_changes_of_structure_come_out(traces):
    plain, ours = Growing(nnx.Rngs(0)), checkpoint(Growing)(nnx.Rngs(0))
    (y, _, _), (z, block, spare) = plain(X), ours(X)
    assert_close(z, y)
    assert_close(nnx.state(ours), nnx.state(plain))
    assert ours.called
    assert ours.same is ours.block is block
    assert ours.spare is spare
    first = lambda module, x: module(x)[0]
    plain, ours = (loss_of(cls(nnx.Rngs(0)), call=first) for cls in (Growing, checkpoint(Growing)))
    assert_cheaper(ours, plain, params_of(Growing(nnx.Rngs(0))), X, at_most=0.7)


def test_what_is_not_changed_is_the_same_object_and_the_same_array():
    block = Checkpointed(nnx.Rngs(0))
    up, kernel = block.up, block.up.kernel
    value = kernel.get_raw_value()
    block(X)
    assert block.up is up
    assert block.up.kernel is kernel
    assert kernel.get_raw_value() is value


class Capturing(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(8, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = self.perturb("hidden", self.up(x))
        self.sow(nnx.Intermediate, "norm", (h**2).sum())
        return self.down(nnx.gelu(h))


def test_captured_values_and_perturbations_are_those_without(traces):
    def both(cls: Any) -> Any:
        model = cls(nnx.Rngs(0))
        _, perturbations = nnx.capture(model, nnx.Perturbation)(X)

        def loss(model: Any, perturbations: Any) -> Any:
            y, sown = nnx.capture(model, nnx.Intermediate, init=perturbations)(X)
            return (y**2).sum(), sown

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(model, perturbations)

    ours, plain = both(checkpoint(Capturing)), both(Capturing)
    assert_close(ours, plain)
    assert "norm" in str(jax.tree.structure(ours))


# ---------------------------------------------------------------------------------------------------- shared parameters


class Tied(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, 64, rngs=rngs)
        self.up = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, tokens: Any, output: Any) -> Any:
        return output(self.up, self.embed(tokens), self.embed)


def output(up: Any, h: Any, embed: Any) -> Any:
    return embed.attend(nnx.gelu(up(h)))


def test_shared_modules_get_the_gradient_of_all_uses():
    tokens, tied = jnp.arange(256) % 16, Tied()
    graph, params = nnx.split(tied)
    losses = [
        lambda params, f=f: (nnx.merge(graph, params, copy=True)(tokens, f) ** 2).sum()
        for f in (checkpoint(output), output)
    ]
    assert_close(*gradients(*losses, params), rtol=1e-4, atol=1e-4)
    assert_cheaper(*losses, params, at_most=0.8)
    plain, ours = Block(nnx.Rngs(0)), Checkpointed(nnx.Rngs(0))
    losses = [loss_of(block, call=lambda block, x: block(block(x))) for block in (ours, plain)]
    assert_close(*gradients(*losses, params_of(plain), X))
    assert_cheaper(*losses, params_of(plain), X)


def test_one_module_as_two_arguments_stays_one():
    counted = Normed(nnx.Rngs(0))

    @checkpoint
    def both(first: Any, x: Any, second: Any) -> Any:
        assert first is second
        return first(x) + second(x)

    both(counted, jnp.ones((4, 16, 8)), counted)
    assert int(counted.calls[...]) == 2


# ----------------------------------------------------------------------------------------------------------- transforms


def scanned(block: Any, policy: Any = None) -> Any:
    @nnx.split_rngs(splits=4)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Any:
        return block(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(block: Any, x: Any) -> Any:
        return block(x)

    return make(nnx.Rngs(0, dropout=1)), lambda blocks, x: run(blocks, x)


@pytest.mark.parametrize("policy", [None, "nothing"])
def test_inside_nnx_scan_over_stacked_blocks(policy):
    (plain, run), (ours, run_ours) = scanned(Block), scanned(checkpoint(Block, policy=policy))
    assert_close(nnx.state(ours), nnx.state(plain))
    params = params_of(plain)
    losses = loss_of(ours, call=run_ours), loss_of(plain, call=run)
    assert_close(*gradients(*losses, params, X), atol=1e-4)
    assert_cheaper(*losses, params, X)


AROUND = {
    "jit": lambda block: lambda module, x: nnx.jit(lambda module, x: module(x))(module, x),
    "remat": lambda block: lambda module, x: nnx.remat(lambda module, x: module(x))(module, x),
    "vmap": lambda block: (
        lambda module, x: nnx.vmap(lambda module, x: module(x), in_axes=(None, 0))(module, x.reshape(4, 16, 8))
    ),
    "jax scan": lambda block: lambda module, x: jax.lax.scan(lambda x, _: (module(x), None), x, length=3)[0],
}


@pytest.mark.parametrize("name", AROUND)
def test_transforms_around(name):
    plain, ours = Block(nnx.Rngs(0)), checkpoint(Block, policy="nothing")(nnx.Rngs(0))
    run = AROUND[name](Block)
    losses = loss_of(ours, call=run), loss_of(plain, call=run)
    params = params_of(plain)
    assert_close(*gradients(*losses, params, X), atol=1e-4)
    bare = loss_of(plain) if name == "remat" else losses[1]
    assert_cheaper(losses[0], bare, params, X, at_most=0.7)


@pytest.mark.parametrize("name", AROUND)
def test_transforms_inside(name):
    plain = Block(nnx.Rngs(0))
    run = AROUND[name](Block)
    losses = loss_of(plain, call=checkpoint(run)), loss_of(plain, call=run)
    params = params_of(plain)
    assert_close(*gradients(*losses, params, X), atol=1e-4)
    bare = loss_of(plain) if name == "remat" else losses[1]
    assert_cheaper(losses[0], bare, params, X, at_most=0.7)


def test_checkpoints_nest():
    plain, ours = Stack(), checkpoint(Stack)(Checkpointed)
    params = params_of(plain)
    assert_close(*gradients(loss_of(ours, True), loss_of(plain, True), params, X))
    assert_cheaper(loss_of(ours, True), loss_of(Stack(Checkpointed), True), params, X, at_most=0.99)


class Counted(Block):
    traced = 0

    def __call__(self, x: Any, factor: float = 1.0) -> Any:
        Counted.traced += 1
        return factor * self.half(x)


def test_equal_layers_are_traced_once_and_unequal_ones_are_not_mistaken():
    ours = [checkpoint(Counted)(nnx.Rngs(i), hidden) for i, hidden in enumerate((64, 64, 64, 32))]
    plain = [Block(nnx.Rngs(i), hidden) for i, hidden in enumerate((64, 64, 64, 32))]
    factors = (1.0, 1.0, 2.0, 1.0)

    def run(x: Any) -> Any:
        for block, factor in zip(ours, factors, strict=True):
            x = block(x, factor)
        return x

    expected = X
    for block, factor in zip(plain, factors, strict=True):
        expected = factor * block.half(expected)
    Counted.traced = 0
    assert_close(jax.jit(run)(X), expected)
    assert Counted.traced == 3
    assert_close(jax.jit(lambda x: run(x))(X), expected)
    assert Counted.traced == 6


class Waiting:
    """A static argument; it is equal to all others, and while it is hashed for the first time something else runs."""

    def __init__(self, meanwhile: Any = None) -> None:
        self.meanwhile = meanwhile

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Waiting)

    def __hash__(self) -> int:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return 0


def test_threads_that_trace_one_class_at_once_do_not_get_each_others_layers():
    memo: Any = _Memo()
    found: list[list[str]] = [[], []]
    begun, resumed = threading.Event(), threading.Event()

    def theirs(x: Any) -> Any:
        memo.get("begin", lambda: "begun")
        begun.set()
        assert resumed.wait(60)
        found[1] += [memo.get(Waiting(), lambda: made) for made in ("theirs", "again")]
        return x

    def ours(x: Any) -> Any:
        found[0] += [
            memo.get(Waiting(hook), lambda made=made: made) for hook, made in ((switch, "ours"), (None, "again"))
        ]
        return x

    def switch() -> None:
        running.append(pool.submit(jax.eval_shape, theirs, X))
        assert begun.wait(60)

    running: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        jax.eval_shape(ours, X)
        resumed.set()
        running[0].result()
    assert found == [["ours", "ours"], ["theirs", "theirs"]]


class Signed(nnx.Module):
    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, x: Any, times: Any = 1) -> Any:
        kinds = {int: 2.0, float: 3.0, bool: 5.0}
        return jnp.sin(x) * np.copysign(kinds[type(self.by)], self.by) * kinds[type(times)]


def test_layers_whose_static_values_are_equal_and_of_other_types_are_not_mistaken():
    values = [(1, 1), (1.0, 1), (True, 1), (0.0, 1), (-0.0, 1), (1, 1.0), (1, True), (1, 1)]
    run = lambda kind: jax.jit(lambda x: [kind(by)(x, times) for by, times in values])(X)
    assert_close(run(checkpoint(Signed)), run(Signed))


def test_a_function_sees_changes_of_the_modules_that_it_closes_over():
    block = Block(nnx.Rngs(0))
    ours = checkpoint(lambda x: block(x))
    before = ours(X)
    block.down.bias[...] += 1.0
    assert_close(ours(X), before + 1.0)


def test_a_module_of_an_outer_trace_can_be_read():
    block = Checkpointed(nnx.Rngs(0))
    assert jax.jit(lambda x: block(x))(X).shape == X.shape
    assert jax.vmap(lambda x: block(x))(X).shape == X.shape
    with pytest.raises(Exception, match="different trace level"):
        jax.jit(lambda x: block(x, True))(X)  # its rng counts cannot be set from there, checkpointed or not


# -------------------------------------------------------------------------------------------------------------- classes


def test_variables_that_hold_refs_are_refused():
    block = nnx.with_vars(Checkpointed(nnx.Rngs(0)), ref=True)
    with pytest.raises(ArgumentError, match=r"got \['Block', .*ref=False"):
        block(X)


class Unregistered(nnx.Module, pytree=False):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = [Block(rngs)]

    def __call__(self, x: Any) -> Any:
        return self.blocks[0](x)


def test_the_class_passes_for_the_original():
    assert (Checkpointed.__name__, Checkpointed.__qualname__, Checkpointed.__module__) == ("Block", "Block", __name__)
    block = Checkpointed(nnx.Rngs(0), hidden=16)
    assert isinstance(block, Block)
    assert block.half(X).shape == X.shape
    assert checkpoint(Block) is Checkpointed
    assert checkpoint(functools.partial(Block, hidden=4))(nnx.Rngs(0)).up.out_features == 4
    ours = checkpoint(Unregistered)(nnx.Rngs(0))
    assert ours(X).shape == X.shape
    assert not ours._pytree__is_pytree


def test_instances_are_pickled_and_copied():
    block = Checkpointed(nnx.Rngs(0))
    for again in (copy.deepcopy, nnx.clone, lambda x: pickle.loads(pickle.dumps(x))):
        assert type(again(block)) is Checkpointed
        assert_close(again(block)(X), block(X))


class Doubled(Checkpointed):
    def __call__(self, x: Any) -> Any:
        return 2 * super().__call__(x)


def test_subclasses_of_a_checkpointed_class():
    doubled, plain = Doubled(nnx.Rngs(0)), Block(nnx.Rngs(0))
    assert_close(doubled(X), 2 * plain(X))
    assert_cheaper(loss_of(doubled), loss_of(plain), params_of(plain), X, at_most=0.7)


# -------------------------------------------------------------------------------------------------------------- by path


@pytest.mark.parametrize(
    ("rules", "checkpointed"),
    [
        ({"blocks/1": None}, 1),
        ({"blocks/*": "nothing"}, 2),
        ([("blocks/0", "dots"), ("blocks/?", None)], 1),
    ],
    ids=str,
)
def test_rules_by_path_checkpoint_what_they_match(rules, checkpointed):
    plain = Stack()
    ours = apply(plain, rules)
    assert isinstance(ours, Stack)
    assert_close(nnx.state(ours), nnx.state(plain), rtol=0, atol=0)
    params = params_of(plain)
    losses = loss_of(ours, True), loss_of(plain, True)
    less, more = (cost(loss, params, X) for loss in losses)
    assert less.matmuls == more.matmuls + checkpointed
    assert less.bytes < more.bytes - checkpointed * 64 * 64 * 4
    assert_close(*gradients(*losses, params, X))


def test_the_model_is_left_alone_and_shares_its_variables():
    plain = Stack()
    ours = apply(plain, {"": None, "blocks/0": None})
    assert type(plain) is Stack
    assert type(plain.blocks[0]) is Block
    assert type(ours.blocks[0]) is Checkpointed
    assert type(ours.blocks[1]) is Block
    assert type(ours) is checkpoint(Stack)
    assert ours.blocks[1].up.kernel is plain.blocks[1].up.kernel
    params = params_of(plain)
    assert_cheaper(loss_of(apply(plain, {"": None})), loss_of(plain), params, X)


def test_a_path_that_matches_nothing_is_an_error_with_the_nearest():
    with pytest.raises(ArgumentError, match=r"got 'block/\*'"):
        apply(Stack(), {"block/*": None})
    with pytest.raises(ArgumentError, match="Did you mean 'blocks/0'"):
        apply(Stack(), {"block/0": None, "blocks/*": None})
