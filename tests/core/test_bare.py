"""without_checkpoints, and plans that do not respect a function's checkpoints."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxckpt
from jaxckpt import ArgumentError, Plan, PlanMismatchError, autocheckpoint, frontier, plan, without_checkpoints
from tests.actions.half import HALF, half_is_known

__all__ = ["half_is_known"]

WIDTH, DEPTH = 32, 6
"""A chain of matmuls; a checkpoint around one of them runs one matmul again."""


def matmuls(fun, *args):
    """Returns how many matmuls the gradient of a function has, loops multiplied out."""
    graph = jaxckpt.trace(jax.grad(fun), *args)
    return sum(op.repeats for op in graph.walk() if op.primitive == "dot_general")


def layer(x, w):
    return jnp.sin(jnp.sin(x @ w) @ w)


def unrolled(wrap):
    def loss(ws, x):
        for w in ws:
            x = wrap(layer)(x, w)
        return jnp.sum(x)

    return loss


def scanned(wrap):
    def loss(ws, x):
        body = wrap(lambda x, w: (layer(x, w), None))
        return jnp.sum(jax.lax.scan(body, x, ws)[0])

    return loss


def in_jit(wrap):
    return unrolled(lambda f: jax.jit(wrap(f)))


def in_cond(wrap):
    def loss(ws, x):
        for w in ws:
            x = jax.lax.cond(jnp.sum(x) > 0, wrap(layer), lambda x, w: x @ w, x, w)
        return jnp.sum(x)

    return loss


def nested(wrap):
    inner = wrap(layer)
    return unrolled(lambda f: wrap(lambda x, w: inner(inner(x, w), w)))


def vmapped(wrap):
    return lambda ws, x: jnp.sum(jax.vmap(lambda row: unrolled(wrap)(ws, row[None]))(x))


MODELS = [unrolled, scanned, in_jit, in_cond, nested, vmapped]
CHECKPOINTS = [
    jax.checkpoint,
    lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False),
    lambda f: jaxckpt.checkpoint(f, policy="nothing"),
]


@pytest.fixture
def args():
    ws = jax.random.normal(jax.random.key(0), (DEPTH, WIDTH, WIDTH)) / WIDTH**0.5
    return ws, jax.random.normal(jax.random.key(1), (64, WIDTH))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("wrap", CHECKPOINTS)
def test_nothing_is_computed_twice_and_the_gradients_are_the_same(model, wrap, args):
    plain, written = model(lambda f: f), model(wrap)
    bare = without_checkpoints(written)
    assert matmuls(bare, *args) == matmuls(plain, *args)
    if wrap is jax.checkpoint:
        assert matmuls(written, *args) > matmuls(plain, *args), "the test asks something"
    value, gradient = jax.value_and_grad(bare)(*args)
    expected = jax.value_and_grad(plain)(*args)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-5)
    assert matmuls(jax.jit(bare), *args) == matmuls(plain, *args)


def test_what_is_in_a_custom_rule_stays(args):
    @jax.custom_vjp
    def f(x, w):
        return layer(x, w)

    f.defvjp(lambda x, w: jax.vjp(jax.checkpoint(layer), x, w), lambda pull, cotangent: pull(cotangent))
    loss = unrolled(lambda _: f)
    bare = without_checkpoints(loss)
    assert matmuls(bare, *args) == matmuls(loss, *args)
    np.testing.assert_allclose(jax.grad(bare)(*args), jax.grad(loss)(*args), rtol=1e-5)


def closing(wrap):
    constant = np.linspace(0, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
    inner = jax.jit(wrap(lambda x: jnp.sin(x @ constant) @ constant))
    return lambda ws, x: jnp.sum(jax.lax.scan(lambda x, w: (inner(x @ w), None), inner(x), ws)[0])


def test_arrays_that_a_jitted_function_closes_over_stay(args):
    bare = without_checkpoints(closing(jax.checkpoint))
    plain = closing(lambda f: f)
    assert matmuls(bare, *args) == matmuls(plain, *args) < matmuls(closing(jax.checkpoint), *args)
    np.testing.assert_allclose(jax.grad(bare)(*args), jax.grad(plain)(*args), rtol=1e-4, atol=1e-5)


def test_values_kept_as_something_else_are_kept_no_more(args):
    written = unrolled(lambda f: jaxckpt.checkpoint(f, policy=jaxckpt.Policy({jaxckpt.op("dot_general"): HALF})))
    bare, plain = without_checkpoints(written), unrolled(lambda f: f)
    np.testing.assert_allclose(jax.grad(bare)(*args), jax.grad(plain)(*args), rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(jax.grad(written)(*args) - jax.grad(plain)(*args)).max()) > 1e-5, "the test asks something"


def test_names_stay(args):
    named = lambda x, w: jaxckpt.tag(layer(x, w), "out")
    assert jaxckpt.trace(without_checkpoints(unrolled(lambda _: jax.checkpoint(named))), *args).tags == ("out",)


def test_linen_s_remat_and_state(args):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = nn.remat(nn.Dense)(WIDTH)(jnp.sin(x))
            return nn.BatchNorm(use_running_average=False)(x)

    model, x = Model(), args[1]
    variables = model.init(jax.random.key(0), x)

    def loss(params, x):
        out, state = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return jnp.sum(out**2), state

    bare = without_checkpoints(loss)
    (_, state), gradient = jax.value_and_grad(bare, has_aux=True)(variables["params"], x)
    (_, expected), known = jax.value_and_grad(loss, has_aux=True)(variables["params"], x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (state, gradient), (expected, known))


def test_a_module_s_state_changes_once(args):
    class Model(nnx.Module):
        def __init__(self):
            self.dense, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(nnx.remat(lambda dense, x: jnp.sin(dense(x)))(self.dense, x))

    loss = lambda model, x: jnp.sum(model(x) ** 2)
    ours, theirs = Model(), Model()
    np.testing.assert_allclose(without_checkpoints(loss)(ours, args[1]), loss(theirs, args[1]), rtol=1e-5)
    np.testing.assert_allclose(ours.norm.mean[...], theirs.norm.mean[...], rtol=1e-5)
    assert float(jnp.abs(ours.norm.mean[...]).max()) > 0


def test_what_is_no_function_is_refused():
    with pytest.raises(ArgumentError, match="^fun must be a function"):
        without_checkpoints(3)


# --------------------------------------------------------------------------------------------------------------- plans

LARGE = jax.ShapeDtypeStruct((16, 64, 64), jnp.float32), jax.ShapeDtypeStruct((2048, 64), jnp.float32)


@pytest.mark.parametrize("model", [unrolled, scanned])
def test_a_plan_may_open_what_its_user_checkpointed(model, tmp_path):
    """The user's checkpoints recompute everything; at half of the peak without any, less is enough."""
    loss, plain = model(jax.checkpoint), model(lambda f: f)
    found = plan(loss, *LARGE, budget="60%", target="cpu", respect_checkpoints=False)
    known = plan(plain, *LARGE, budget="60%", target="cpu")
    assert found.measured_bytes <= found.budget == known.budget
    assert found.regions == known.regions and found.loops == known.loops
    assert matmuls(found.apply(loss), *LARGE) < matmuls(loss, *LARGE)
    assert matmuls(found.apply(loss), *LARGE) == matmuls(known.apply(plain), *LARGE)
    path = tmp_path / "plan.json"
    found.save(path)
    loaded = Plan.load(path)
    assert loaded == found and not loaded.respect_checkpoints
    assert matmuls(loaded.apply(loss), *LARGE) == matmuls(found.apply(loss), *LARGE)


def test_respected_checkpoints_are_left_alone():
    loss = unrolled(jax.checkpoint)
    found = plan(loss, *LARGE, budget="100%", target="cpu")
    assert matmuls(found.apply(loss), *LARGE) == matmuls(loss, *LARGE)


def test_with_memory_enough_the_plan_takes_the_checkpoints_out():
    loss = unrolled(jax.checkpoint)
    found = plan(loss, *LARGE, budget="100%", target="cpu", respect_checkpoints=False)
    assert found.regions == ()
    assert matmuls(found.apply(loss), *LARGE) == matmuls(unrolled(lambda f: f), *LARGE)


@pytest.mark.once
def test_frontier_and_autocheckpoint_open_them_too(tmp_path):
    loss = unrolled(jax.checkpoint)
    args = [jax.random.normal(jax.random.key(0), leaf.shape) / 8 for leaf in LARGE]
    points = frontier(loss, *LARGE, budgets=["60%"], target="cpu", respect_checkpoints=False).points
    assert not points[0].plan.respect_checkpoints
    expected = plan(loss, *LARGE, budget="60%", target="cpu", respect_checkpoints=False)
    for _ in range(2):  # the second reads what the first left
        auto = autocheckpoint(loss, budget="60%", target="cpu", respect_checkpoints=False, path=tmp_path)
        found = auto.plan(*args)
        assert found == expected
        np.testing.assert_allclose(jax.grad(auto)(*args), jax.grad(loss)(*args), rtol=1e-4, atol=1e-5)
    assert len(list(tmp_path.iterdir())) == 1
    respected = autocheckpoint(loss, budget="100%", target="cpu", path=tmp_path).plan(*args)
    assert respected.respect_checkpoints and len(list(tmp_path.iterdir())) == 2


def test_a_plan_for_the_function_as_it_is_does_not_fit_the_opened_one(args):
    loss = unrolled(jax.checkpoint)
    found = plan(loss, *args, budget="100%", target="cpu", respect_checkpoints=False)
    with pytest.raises(PlanMismatchError):
        Plan(found.regions, found.fingerprint).apply(loss)(*args)


def test_a_function_without_checkpoints_is_said(args, caplog):
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        plan(unrolled(lambda f: f), *args, budget="100%", target="cpu", respect_checkpoints=False)
    assert "has no checkpoints" in caplog.text


def test_only_a_flag_says_whether_they_count(args):
    with pytest.raises(ArgumentError, match="^respect_checkpoints must be True or False"):
        plan(unrolled(jax.checkpoint), *args, budget="50%", respect_checkpoints="no")


def test_a_model_of_nnx_with_checkpoints_is_planned_without_them():
    """What goes through a checkpoint unchanged, such as a module's parameters, is no result of it any more."""

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(6)])
            self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.remat(lambda layer, x: jnp.sin(layer(jnp.sin(layer(x)))))(layer, x)
            return self.norm(x)

    loss = lambda model, x, mode: jnp.mean(model(x) ** 2)
    x = jax.random.normal(jax.random.key(0), (1024, WIDTH))
    theirs = Model()
    value, expected = nnx.value_and_grad(loss)(theirs, x, "train")
    for budget in ("70%", "100%"):
        ours = Model()
        found = plan(loss, ours, x, "train", budget=budget, target="cpu", respect_checkpoints=False)
        auto = autocheckpoint(loss, budget=budget, target="cpu", respect_checkpoints=False)
        for planned in (found.apply(loss), auto):
            ours = Model()
            got, gradient = nnx.value_and_grad(planned)(ours, x, "train")
            np.testing.assert_allclose(got, value, rtol=1e-5)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), gradient, expected)
            np.testing.assert_allclose(ours.norm.mean[...], theirs.norm.mean[...], rtol=1e-4, atol=1e-6)
