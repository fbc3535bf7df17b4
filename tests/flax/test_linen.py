from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import pickle
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt.flax
from jaxckpt import SAVE, ArgumentError, Policy, UnmatchedTagError
from jaxckpt._errors import MissingPackageError
from jaxckpt.flax import checkpoint
from tests.flax.linen_models import (
    KEY,
    Block,
    Checkpointed,
    Net,
    Stack,
    Whole,
    X,
    loss_of,
    params_of,
)
from tests.flax.measures import (
    assert_cheaper,
    assert_close,
    cost,
    gradients,
    identical,
)

# ---------------------------------------------------------------------------------------------------------------- names


def test_parameters_have_the_names_and_the_very_values_of_the_plain_model():
    plain, ours = Stack(Block), Stack(Checkpointed)
    assert identical(plain.init(KEY, X), ours.init(KEY, X))
    assert set(params_of(ours)) == {"Block_0", "Block_1"}
    assert identical(jax.jit(plain.init)(KEY, X), jax.jit(ours.init)(KEY, X))
    assert_cheaper(loss_of(ours), loss_of(plain), params_of(plain), X)


def test_checkpointed_and_plain_blocks_share_one_count_of_names():
    class Mixed(nn.Module):
        some: Any

        @nn.compact
        def __call__(self, x: Any) -> Any:
            for block in (Block, self.some, Block):
                x = block()(x)
            return x

    assert set(params_of(Mixed(Checkpointed))) == {"Block_0", "Block_1", "Block_2"}
    params = params_of(Mixed(Block))
    full, one, all_of_them = (
        cost(loss_of(model), params, X).bytes for model in (Mixed(Block), Mixed(Checkpointed), Stack(Checkpointed, 3))
    )
    assert all_of_them < one < full


def test_parameters_saved_by_orbax_load_both_ways(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    plain, ours = Stack(Block), Stack(Checkpointed)
    with ocp.StandardCheckpointer() as saver:
        for name, source, target in (("plain", plain, ours), ("ours", ours, plain)):
            saved = source.init(jax.random.key(5), X)
            saver.save(tmp_path / name, saved)
            saver.wait_until_finished()
            loaded = saver.restore(tmp_path / name, jax.eval_shape(target.init, KEY, X))
            assert identical(loaded, saved)
            assert_close(target.apply(loaded, X), source.apply(saved, X))
    assert_cheaper(loss_of(ours), loss_of(plain), loaded["params"], X)


# ------------------------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (None, []),
        ("nothing", []),
        (jax.checkpoint_policies.nothing_saveable, []),
        (Policy({"up": SAVE}), [(64, 64)]),
        (jax.checkpoint_policies.save_only_these_names("up"), [(64, 64)]),
        ("dots", [(64, 64)]),
    ],
    ids=["None", "nothing", "jax", "tag", "jax names", "dots"],
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


def test_everything_keeps_as_much_as_no_checkpoint_does():
    plain, ours = Stack(Block), Stack(checkpoint(Block, policy="everything"))
    params = params_of(plain)
    less, more = cost(loss_of(ours), params, X), cost(loss_of(plain), params, X)
    assert less.matmuls == more.matmuls
    assert less.bytes > 0.9 * more.bytes


def test_under_vmap_a_policy_keeps_what_it_names():
    ours = Stack(checkpoint(Block, policy="dots_no_batch"), 1)
    params = params_of(ours)
    batched = lambda params, xs: jax.vmap(loss_of(ours), (None, 0))(params, xs).sum()
    assert (5, 64, 64) in cost(batched, params, jnp.stack([X] * 5)).shapes


def test_unknown_policies_and_tags_are_errors():
    with pytest.raises(ArgumentError, match=r"policy must be a preset's name; got 'dot'\. Did you mean 'dots'"):
        checkpoint(Block, policy="dot")
    ours = Stack(checkpoint(Block, policy=Policy({"upp": SAVE})))
    with pytest.raises(UnmatchedTagError, match="'upp' matches no tag .* Did you mean 'up'"):
        ours.apply(ours.init(KEY, X), X)


# -------------------------------------------------------------------------------------------------------------- methods


def dense_twice(self: nn.Module, x: Any) -> Any:
    return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(64)(x)))


def classes(checkpoint: Any) -> dict[str, type[nn.Module]]:
    """Returns modules that use a decorator in every place."""

    class Below(nn.Module):
        @checkpoint
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return dense_twice(self, x)

    class Above(nn.Module):
        @nn.compact
        @checkpoint
        def __call__(self, x: Any) -> Any:
            return dense_twice(self, x)

    class Helper(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return self.half(self.half(x))

        @checkpoint
        def half(self, x: Any) -> Any:
            return dense_twice(self, x)

    class SetUp(nn.Module):
        def setup(self) -> None:
            self.up, self.down = nn.Dense(64), nn.Dense(8)
            self.scale = self.param("scale", nn.initializers.ones, (8,))

        def __call__(self, x: Any) -> Any:
            return self.decode(self.encode(x))

        @checkpoint
        def encode(self, x: Any) -> Any:
            return nn.gelu(nn.gelu(self.up(x)))[:, :32]

        @checkpoint
        def decode(self, x: Any) -> Any:
            return self.down(nn.gelu(jnp.concatenate([x, x], -1))) * self.scale

    class BoundMethod(nn.Module):
        def setup(self) -> None:
            self.blocks = [Block(), Block()]

        def __call__(self, x: Any) -> Any:
            for block in self.blocks:
                x = checkpoint(block.__call__)(x)
            return x

    class OfModules(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            first, second = Block(), Block()
            return checkpoint(lambda first, second, x: second(first(x)))(first, second, x)

    return {cls.__name__: cls for cls in (Below, Above, Helper, SetUp, BoundMethod, OfModules)}


PLAIN = classes(lambda method: method)


@pytest.mark.parametrize("name", PLAIN)
def test_methods_are_checkpointed_with_names_and_values_as_without(name):
    plain, ours = PLAIN[name](), classes(checkpoint)[name]()
    assert identical(plain.init(KEY, X), ours.init(KEY, X))
    params = params_of(plain)
    assert_close(*gradients(loss_of(ours), loss_of(plain), params, X))
    assert cost(loss_of(ours), params, X).bytes <= 0.75 * cost(loss_of(plain), params, X).bytes


def test_a_method_with_options_keeps_what_they_say():
    ours = classes(checkpoint(policy="dots"))["Above"]()
    params = params_of(ours)
    assert (64, 64) in cost(loss_of(ours), params, X).shapes
    assert (64, 64) not in cost(loss_of(classes(checkpoint)["Above"]()), params, X).shapes


def test_an_unbound_module_gives_the_errors_of_flax():
    with pytest.raises(nn.module.errors.CallCompactUnboundModuleError):
        Checkpointed()(X)


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "block", [Checkpointed, Whole, checkpoint(Block, static_argnums=-2)], ids=["bare", "declared", "negative"]
)
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_flags_arrive_as_python_values(block, by):
    net = Stack if by == "position" else Net
    plain, ours = net(Block), net(block)
    params = plain.init(KEY, X, True)["params"]
    outputs = []
    for train in (True, False):
        assert_cheaper(loss_of(ours, train), loss_of(plain, train), params, X)
        outputs.append(ours.apply({"params": params}, X, train, rngs={"dropout": KEY}))
        assert_close(outputs[-1], plain.apply({"params": params}, X, train, rngs={"dropout": KEY}))
    assert not jnp.allclose(*outputs)


def test_arrays_by_keyword_are_traced_and_differentiated():
    def loss(block: Any, params: Any, scale: Any) -> Any:
        return (block().apply({"params": params}, X, scale=scale) ** 2).sum()

    params, scale = params_of(Block()), jnp.full((8,), 0.3)
    ours, plain = functools.partial(loss, Checkpointed), functools.partial(loss, Block)
    assert_close(*gradients(ours, plain, params, scale, argnums=(0, 1)))
    assert_cheaper(ours, plain, params, scale)


class Picky(nn.Module):
    """Takes whatever there is, and looks at it."""

    @nn.compact
    def __call__(
        self, x: Any, options: Any, *more: Any, activation: Any = None, mode: str = "", size: int = 1, **rest: Any
    ) -> Any:
        assert options["twice"] is True
        assert options["table"].shape == (64,)
        assert more == ("more", None) or not more
        assert mode in ("fast", "")
        assert rest == {} or rest["extra"] == (1, 2.5)
        h = activation(nn.Dense(16 * size)(x)) + options["table"]
        return nn.Dense(8)(h), {"mode": mode, "size": size, "none": None}


def test_containers_are_traced_in_part_and_results_may_hold_anything():
    options = {"twice": True, "table": jnp.arange(64.0)}
    call = lambda module, params: module.apply(
        {"params": params}, X, options, "more", None, activation=nn.gelu, mode="fast", size=4, extra=(1, 2.5)
    )
    params = Picky().init(KEY, X, options, activation=nn.gelu, size=4)["params"]
    ours, plain = checkpoint(Picky)(), Picky()
    assert call(ours, params)[1] == {"mode": "fast", "size": 4, "none": None}
    losses = [lambda params, module=module: (call(module, params)[0] ** 2).sum() for module in (ours, plain)]
    assert_close(*gradients(*losses, params))
    assert_cheaper(*losses, params, at_most=0.7)


class Branches(nn.Module):
    @nn.compact
    def __call__(self, x: Any, table: Any) -> Any:
        return nn.Dense(8)(nn.gelu(nn.Dense(64)(x if table.any() else -x)))


def test_an_array_to_branch_on_is_declared_or_named_in_the_error():
    table = np.array([True, False])
    params = Branches().init(KEY, X, table)["params"]
    ours = checkpoint(Branches, static_argnums=1)()
    assert ours.apply({"params": params}, X, table).shape == (64, 8)
    assert ours.apply({"params": params}, X, table=table).shape == (64, 8)
    assert_cheaper(loss_of(ours, table), loss_of(Branches(), table), params, X)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"arguments\['table'\]") as raised:
        checkpoint(Branches)().apply({"params": params}, X, table)
    assert any("static_argnums" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("numbers", [3, (0, 7), -4])
def test_argument_numbers_out_of_range_are_errors(numbers):
    with pytest.raises(
        ArgumentError,
        match=r"static_argnums .* Block.__call__: 0 \(x\), 1 \(train\), 2 \(scale\); .*`self` is not counted",
    ):
        checkpoint(Block, static_argnums=numbers)


@pytest.mark.parametrize("numbers", [True, "1", 1.0, (1, None)])
def test_argument_numbers_are_ints(numbers):
    with pytest.raises(ArgumentError, match="static_argnums must be an int or a sequence of ints"):
        checkpoint(Block, static_argnums=numbers)


def test_a_call_that_is_wrong_without_checkpointing_gives_pythons_error():
    params = params_of(Block())
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        Checkpointed().apply({"params": params}, X, x=X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'trian'"):
        Checkpointed().apply({"params": params}, X, trian=True)


@pytest.mark.parametrize("target", [Block(), 3, int, nn.Module], ids=repr)
def test_other_targets_are_errors(target):
    with pytest.raises(ArgumentError, match="target must be"):
        checkpoint(target)


# -------------------------------------------------------------------------------------------------------------- classes


class Custom(nn.Module):
    """A class with an equality and a hash of its own."""

    size: int = 3

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    def __hash__(self) -> int:
        return 5

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(self.size)(x)


def test_the_class_passes_for_the_original():
    assert (Checkpointed.__name__, Checkpointed.__qualname__, Checkpointed.__module__) == (
        "Block",
        "Block",
        Block.__module__,
    )
    assert Checkpointed.__doc__ == Block.__doc__
    block = Checkpointed(hidden=16)
    assert isinstance(block, Block)
    assert [f.name for f in dataclasses.fields(block)] == [f.name for f in dataclasses.fields(Block)]
    assert repr(block) == repr(Block(hidden=16))
    assert block == Checkpointed(16) and hash(block) == hash(Checkpointed(16)) and block != Checkpointed(17)
    assert checkpoint(Custom)(3) == Custom(4) and hash(checkpoint(Custom)()) == 5
    assert block.copy(hidden=7).hidden == 7
    assert Checkpointed().tabulate(KEY, X) == Block().tabulate(KEY, X)
    bound = Checkpointed().bind({"params": params_of(Block())})
    assert bound(X).shape == X.shape


def test_the_same_class_is_made_once():
    assert checkpoint(Block) is Checkpointed
    assert checkpoint(Block, policy="dots") is checkpoint(Block, policy="dots") is not Checkpointed


class Rebound(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(8)(x)


Rebound = checkpoint(Rebound)  # type: ignore[misc]


def test_instances_are_pickled_and_copied():
    for again in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        block = again(Checkpointed(hidden=5))
        assert type(block) is Checkpointed and block.hidden == 5
        assert type(again(Rebound())) is Rebound


def test_partials_of_classes():
    ours = checkpoint(functools.partial(Block, hidden=128))
    assert isinstance(ours, functools.partial) and ours().hidden == 128
    params = params_of(ours())
    assert_cheaper(loss_of(ours()), loss_of(Block(128)), params, X)


class Doubled(Checkpointed):
    """A subclass of a checkpointed class, which calls it."""

    factor: int = 2

    @nn.compact
    def __call__(self, x: Any, **kwargs: Any) -> Any:
        return self.factor * super().__call__(x, **kwargs)


class Hooked(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(8)(self.activation(nn.Dense(64)(x)))

    def activation(self, h: Any) -> Any:
        return nn.gelu(h)


class Overridden(checkpoint(Hooked)):  # type: ignore[misc]
    def activation(self, h: Any) -> Any:
        return jnp.sin(jnp.sin(h))


def test_subclasses_of_a_checkpointed_class_keep_what_they_override():
    params = params_of(Block())
    assert identical(params, params_of(Doubled()))
    assert_close(Doubled(factor=3).apply({"params": params}, X), 3 * Block().apply({"params": params}, X))
    assert_cheaper(loss_of(Doubled()), loss_of(Block()), params, X)

    class Plain(Hooked):
        activation = Overridden.activation

    params = params_of(Plain())
    assert_close(Overridden().apply({"params": params}, X), Plain().apply({"params": params}, X))
    assert_cheaper(loss_of(Overridden()), loss_of(Plain()), params, X, at_most=0.7)


def test_interceptors_see_one_call_a_call():
    calls = []

    def interceptor(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        calls.append((context.module.path, context.method_name))
        return next_fun(*args, **kwargs)

    def seen(block: Any) -> list[Any]:
        calls.clear()
        with nn.intercept_methods(interceptor):
            Stack(block).apply({"params": params_of(Stack())}, X)
        return sorted(set(calls) - {((), "<lambda>")})  # flax checks setups by a call of a function of its own

    assert seen(Checkpointed) == seen(Block)


# ------------------------------------------------------------------------------------------------------------- optional


def test_without_flax_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax.linen", None)
    spec = importlib.util.spec_from_file_location("jaxckpt_flax_again", jaxckpt.flax.__file__)
    with pytest.raises(MissingPackageError, match=r"pip install 'jaxckpt\[flax\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_equal_policies_make_one_class():
    made = {jaxckpt.flax.checkpoint(Block, policy=Policy({"up": SAVE})) for _ in range(3)}
    assert len(made) == 1
