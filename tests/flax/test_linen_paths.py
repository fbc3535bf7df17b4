from __future__ import annotations

import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxckpt import ArgumentError
from jaxckpt.flax import apply
from tests.flax.linen_models import (
    KEY,
    Block,
    Flagless,
    Net,
    Noisy,
    Normed,
    Stack,
    X,
    around,
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

# -------------------------------------------------------------------------------------------------------------- by path


class Deep(nn.Module):
    """Stacks in a field, in setup, and in a compact method, with paths of two levels."""

    first: nn.Module

    def setup(self) -> None:
        self.second = Stack(Block, 1)
        self.list = [Block(), Block()]

    def __call__(self, x: Any, train: bool = False) -> Any:
        x = self.second(self.first(x, train), train=train)
        for block in self.list:
            x = block(x, train)
        return x

    def half(self, x: Any) -> Any:
        return self.first(x)


DEEP = Deep(Stack(Block, 2))


@pytest.mark.parametrize(
    ("rules", "checkpointed"),
    [
        ({"first/Block_0": None}, 1),
        ({"first/*": "nothing"}, 2),
        ({"*/Block_?": None, "list_1": "dots"}, 3),
        ({"first/*": "dots", "**/Block_*": None}, 1),
        ([("list_0", "dots"), ("list_*", None)], 1),
    ],
    ids=str,
)
def test_rules_by_path_checkpoint_what_they_match(rules, checkpointed):
    ours = apply(DEEP, rules)
    assert isinstance(ours, Deep) and type(ours).__name__ == "Deep"
    assert identical(ours.init(KEY, X), DEEP.init(KEY, X))
    params = params_of(DEEP)
    losses = loss_of(ours, True), loss_of(DEEP, True)
    less, more = (cost(loss, params, X) for loss in losses)
    assert less.matmuls == more.matmuls + checkpointed  # a block recomputes one: the other's result is used linearly
    assert less.bytes < more.bytes - checkpointed * 64 * 64 * 4


def test_gradients_under_rules_are_those_without(traces):
    both = gradients(loss_of(apply(DEEP, {"**/Block_0": None}), True), loss_of(DEEP, True), params_of(DEEP), X)
    # Some are sums of terms a thousand times as large: their rounding is that of the largest.
    assert_close(*(jax.tree.map(lambda leaf: leaf / jnp.max(jnp.abs(leaf)), each) for each in both))


def test_the_whole_model_is_the_empty_path():
    ours = apply(Block(), {"": None})
    params = params_of(Block())
    assert_cheaper(loss_of(ours), loss_of(Block()), params, X)
    each = apply(Block(), {"**": None})
    assert cost(loss_of(each), params, X).matmuls == cost(loss_of(Block()), params, X).matmuls


def test_rules_leave_the_model_and_its_source_alone():
    again = apply(DEEP, {"**": None})
    assert type(DEEP) is Deep and type(again) is not Deep
    assert again.first is DEEP.first
    assert again.clone(name="x").name == "x"
    assert apply(DEEP, {}).apply({"params": params_of(DEEP)}, X).shape == X.shape
    copied = pickle.loads(pickle.dumps(again))
    assert copied.init(KEY, X)["params"].keys() == params_of(DEEP).keys()


def test_rules_hold_for_models_inside_models_and_for_other_methods():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(8)(self.inner(x)) + apply(Stack(Block, 2), {"Block_1": None})(x)

    plain, ours = Outer(DEEP), Outer(apply(DEEP, {"first/*": None}))
    assert identical(plain.init(KEY, X), ours.init(KEY, X))
    params = params_of(plain)
    assert cost(loss_of(ours), params, X).matmuls == cost(loss_of(plain), params, X).matmuls + 2
    params, half = params_of(DEEP), {"method": "half"}
    losses = loss_of(apply(DEEP, {"first/*": None}), **half), loss_of(DEEP, **half)
    assert_cheaper(*losses, params, X)


def test_rules_hold_inside_lifted_transforms():
    plain = around("scan", Block)()
    ours = apply(plain, {"ScanStep_0/Block_0": None})
    params = params_of(plain)
    assert_close(*gradients(loss_of(ours), loss_of(plain), params, X))
    assert_cheaper(loss_of(ours), loss_of(plain), params, X)


def test_state_streams_and_intermediates_under_rules_are_those_without(traces):
    plain = Stack(lambda: Flagless(Noisy))
    rngs = {"noise": jax.random.key(1), "more": jax.random.key(2)}
    run = lambda model: model.apply({}, X, rngs=rngs, capture_intermediates=True, mutable=["intermediates"])
    assert_close(run(apply(plain, {"*/Noisy_0": "nothing"})), run(plain))
    xs = jax.random.normal(jax.random.key(3), (3, 64, 8))
    plain = Net(Normed)
    assert_close(train_steps(apply(plain, {"Normed_*": None}), xs, 3), train_steps(plain, xs, 3))


def test_a_path_that_matches_nothing_is_an_error_with_the_nearest():
    ours = apply(DEEP, {"first/Blok_0": None, "first/*": None})
    with pytest.raises(ArgumentError, match=r"got 'first/Blok_0'\. Did you mean 'first/Block_0'"):
        ours.init(KEY, X)
    with pytest.raises(ArgumentError, match="rules must be a mapping"):
        apply(DEEP, ["first/*"])
    with pytest.raises(ArgumentError, match="policy must be a preset"):
        apply(DEEP, {"first/*": "dits"})
    with pytest.raises(ArgumentError, match="model must be an instance"):
        apply(Deep, {"first/*": None})


def test_a_rule_that_matched_once_may_miss_later():
    class Heads(nn.Module):
        @nn.compact
        def __call__(self, x: Any, auxiliary: bool) -> Any:
            y = Block()(x)
            return y + Block(name="auxiliary")(x) if auxiliary else y

    ours = apply(Heads(), {"aux*": None})
    params = ours.init(KEY, X, True)
    assert ours.apply(params, X, False).shape == X.shape
