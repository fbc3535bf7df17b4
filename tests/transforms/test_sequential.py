"""checkpoint_sequential: every segment size, and what it keeps and recomputes."""

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import ArgumentError, StructureError, checkpoint_sequential
from jaxckpt.transforms.sequential import segment_length
from tests.helpers import assert_trees_close, executions, kept_shapes

X = jnp.linspace(-1.0, 1.0, 24).reshape(4, 6)


def model(depth, **options):
    def fun(ws, x):
        layers = [lambda x, w=w: jnp.sin(x @ w) for w in ws]
        return jnp.sum(checkpoint_sequential(layers, **options)(x))

    return fun, [jnp.sin(jnp.arange(36.0) + i).reshape(6, 6) for i in range(depth)]


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("segment_size", [1, 2, 3, 10, 100, "sqrt"])
@pytest.mark.parametrize("checkpoint_last", [False, True])
def test_values_gradients_and_recomputation_for_every_segment_size(depth, segment_size, checkpoint_last):
    fun, ws = model(depth, segment_size=segment_size, checkpoint_last=checkpoint_last)
    plain = lambda ws, x: model(depth, segment_size=depth)[0](ws, x)
    assert_trees_close(jax.value_and_grad(fun, argnums=(0, 1))(ws, X), jax.value_and_grad(plain, argnums=(0, 1))(ws, X))
    size = segment_length(segment_size, depth)
    last = depth - (depth - 1) // size * size  # layers in the last segment
    left_alone = 0 if checkpoint_last else last
    matmuls = executions(jax.grad(fun, argnums=(0, 1)), ws, X)["dot_general"]
    assert matmuls == 3 * depth + (depth - left_alone)
    between = (depth - 1) // size
    kept_in_last = 2 * last - 1 if left_alone else 0
    assert kept_shapes(fun, ws, X)[(4, 6)] == between + kept_in_last


def test_a_policy_for_each_segment():
    fun, ws = model(6, segment_size=2, policy="dots", checkpoint_last=True)
    assert executions(jax.grad(fun), ws, X)["dot_general"] == 3 * 6 - 1
    assert kept_shapes(fun, ws, X)[(4, 6)] == 6 + 2


def test_no_layers_are_the_identity():
    tree = {"x": X, "none": None}
    assert checkpoint_sequential([])(tree) is tree


def test_layers_of_pytrees_random_keys_and_integers():
    def layer(state):
        key, carry = jax.random.split(state["key"])
        noise = jax.random.normal(key, state["x"].shape)
        return {"x": jnp.sin(state["x"] + noise), "step": state["step"] + 1, "key": carry, "none": None}

    state = {"x": X, "step": jnp.int32(0), "key": jax.random.key(1), "none": None}
    run = lambda f, x: f({**state, "x": x})
    plain = lambda state: layer(layer(layer(layer(layer(state)))))
    segmented = checkpoint_sequential([layer] * 5, segment_size=2)
    assert int(run(segmented, X)["step"]) == 5
    grad = lambda f: jax.grad(lambda x: run(f, x)["x"].sum())(X)
    assert_trees_close(grad(segmented), grad(plain))


@pytest.mark.parametrize("segment_size", [0, -1, 2.5, "half", None, True])
def test_segment_sizes_that_are_none(segment_size):
    with pytest.raises(ArgumentError, match='segment_size must be an int of at least 1, or "sqrt"; got') as caught:
        checkpoint_sequential([jnp.sin], segment_size=segment_size)
    assert repr(segment_size) in str(caught.value)


def test_checkpoint_last_is_a_bool():
    with pytest.raises(ArgumentError, match="checkpoint_last must be True or False; got 'no'"):
        checkpoint_sequential([jnp.sin], checkpoint_last="no")


def test_a_layer_that_is_no_function_is_named():
    with pytest.raises(ArgumentError, match=r"layers\[1\] must be a function x -> x; got 3"):
        checkpoint_sequential([jnp.sin, 3])


@pytest.mark.parametrize("segment_size", [1, 2, 3])
def test_a_layer_that_returns_another_structure_is_named(segment_size):
    def pair(x):
        return x, x

    def scale(x):
        return x * 2.0

    with pytest.raises(StructureError) as caught:
        jax.grad(lambda x: checkpoint_sequential([scale, pair, scale], segment_size=segment_size)(x).sum())(X)
    message = str(caught.value)
    assert "layers[2] (scale) must take what layers[1] returned" in message
    assert "float32[4, 6]" in message


def narrower(x):
    return x[:, :3]


def dense(x):
    return x @ jnp.ones((6, 6))


def of_a_pair(x):
    left, right = x
    return left + right


def of_a_dictionary(x):
    return x["h"] * 2.0


def with_an_attribute(x):
    return x.reshape(6, 4)


@pytest.mark.parametrize("segment_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("layers", "place", "came"),
    [
        ([jnp.sin, narrower, dense], 2, "float32[4, 3]"),
        ([narrower, jnp.sin, jnp.cos, dense], 3, "float32[4, 3]"),
        ([lambda x: (x, x), of_a_pair, of_a_pair], 2, "float32[4, 6]"),
        ([lambda x: {"h": x}, of_a_dictionary, of_a_dictionary], 2, "float32[4, 6]"),
        ([lambda x: (x, x), with_an_attribute], 1, "('float32[4, 6]', 'float32[4, 6]')"),
    ],
)
def test_what_a_layer_does_not_take_but_took_before_is_named(layers, place, came, segment_size):
    with pytest.raises(StructureError) as caught:
        jax.eval_shape(checkpoint_sequential(layers, segment_size=segment_size), X)
    rule = f"layers[{place}] ({layers[place].__name__}) must take what layers[{place - 1}] returned; that was {came}"
    assert str(caught.value).startswith(rule)
    assert caught.value.__cause__ is not None


class Configured:
    def __init__(self, width):
        self.width = width

    def __call__(self, x):
        if self.width < 0:
            raise ValueError("negative width in config")
        return x


def failing(error):
    def broken(x):
        raise error

    return broken


def once():
    """A layer that fails in its first call alone."""
    calls = []

    def flaky(x):
        calls.append(x)
        if len(calls) == 1:
            raise ValueError("not yet")
        return x

    return flaky


@pytest.mark.parametrize("segment_size", [1, 2, 3])
@pytest.mark.parametrize("before", [jnp.sin, lambda x: (x, x), narrower])
@pytest.mark.parametrize(
    ("layer", "kind", "message"),
    [
        (failing(RuntimeError("mine")), RuntimeError, "mine"),
        (failing(TypeError("mine")), TypeError, "mine"),
        (failing(KeyError("mine")), KeyError, "mine"),
        (failing(AttributeError("mine")), AttributeError, "mine"),
        (failing(ArgumentError("width", "positive", -1)), ArgumentError, "width must be positive; got -1."),
        (Configured(-1), ValueError, "negative width in config"),
        (lambda x: jnp.zeros("wide"), TypeError, "wide"),
        (lambda x: int("wide"), ValueError, "invalid literal for int"),
        (once, ValueError, "not yet"),
    ],
)
def test_an_error_of_a_layers_own_passes_with_a_note_that_names_the_layer(layer, kind, message, before, segment_size):
    layer = layer() if layer is once else layer
    with pytest.raises(kind, match=message) as caught:
        checkpoint_sequential([jnp.cos, before, layer, jnp.sin], segment_size=segment_size)(X)
    assert not isinstance(caught.value, StructureError)
    name = getattr(layer, "__name__", type(layer).__name__)
    assert any(note.startswith(f"layers[2] ({name}) raised this. It was given ") for note in caught.value.__notes__)


def test_a_layer_that_branches_on_values_has_jaxs_error():
    branching = lambda x: x if x.sum() > 0 else (x, x)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(checkpoint_sequential([lambda x: (x, x), lambda x: x[0], branching]))(X)
    with pytest.raises(ValueError, match="negative sum"):  # eager: the value is there
        checkpoint_sequential([jnp.sin, lambda x: negative(x)], segment_size=2)(jnp.ones(3) * -1)


def negative(x):
    if float(x.sum()) < 0:
        raise ValueError("negative sum")
    return x


def test_segments_keep_less_the_longer_they_are():
    kept = []
    for size in (1, 2, 4):
        fun, ws = model(16, segment_size=size, checkpoint_last=True)
        kept.append(jaxckpt.residuals(fun, ws, X).kept_bytes)
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 3 * kept[2]
