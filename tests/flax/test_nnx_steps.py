"""nnx models in plan, autocheckpoint, checkpoint and what measures: state changes once a step, and memory is saved."""

import functools

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxckpt
from jaxckpt.core.lift import leaves
from tests.helpers import kept_bytes

pytestmark = pytest.mark.usefixtures("shared_answers")
WIDTH, DEPTH = 32, 3


class Net(nnx.Module):
    """Layers with statistics and noise, so that a call changes BatchStats and the count of a stream of random
    numbers.
    """

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(DEPTH)])
        self.norms = nnx.List([nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(DEPTH)])
        self.noise = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        for layer, norm in zip(self.layers, self.norms):
            x = x + self.noise(nnx.tanh(norm(nnx.tanh(layer(x)))))
        return x


def loss(model, x):
    return jnp.mean(model(x) ** 2)


X = jax.random.normal(jax.random.key(1), (512, WIDTH))


def arrays(tree):
    """Returns all arrays of nnx objects or trees, by path."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    data = lambda a: jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a
    return {jax.tree_util.keystr(path): np.asarray(data(leaf)) for path, leaf in flat}


def assert_same(actual, expected):
    actual, expected = arrays(actual), arrays(expected)
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(actual[path], value, rtol=1e-3, atol=1e-5, err_msg=path)


@functools.cache
def the_plan():
    return jaxckpt.plan(loss, Net(), X, budget="65%")


WAYS = {
    "plan": lambda fun: the_plan().apply(fun),
    "autocheckpoint": jaxckpt.autocheckpoint(budget="65%"),
    "checkpoint": jaxckpt.checkpoint,
    "checkpoint, policy": jaxckpt.checkpoint(policy="dots"),
}


@pytest.mark.parametrize(
    ("way", "jit"),
    [
        ("plan", nnx.jit),
        ("plan", lambda step: step),
        ("autocheckpoint", nnx.jit),
        ("checkpoint", nnx.jit),
        ("checkpoint, policy", nnx.jit),
    ],
    ids=["plan", "plan, eager", "autocheckpoint", "checkpoint", "policy"],
)
def test_state_changes_once_a_step(way, jit):
    plain, other = Net(), Net()
    step, planned = jit(nnx.value_and_grad(loss)), jit(nnx.value_and_grad(WAYS[way](loss)))
    for _ in range(2):
        assert_same(planned(other, X), step(plain, X))
        assert_same(nnx.state(other), nnx.state(plain))
    assert int(other.noise.rngs.count[...]) == 2 * DEPTH
    assert np.abs(np.asarray(other.norms[0].mean[...])).max() > 0


@pytest.mark.parametrize(
    "step",
    [
        jax.value_and_grad,
        lambda fun: nnx.jit(nnx.value_and_grad(fun, argnums=nnx.DiffState(0, nnx.Param))),
    ],
    ids=["default", "nnx"],
)
def test_the_compiled_peak_is_within_the_budget(step):
    plan = jaxckpt.plan(loss, Net(), X, budget="65%", step=step)
    assert plan.measured_bytes <= plan.budget <= 0.65 * plan.unplanned_bytes
    peak = jaxckpt.measure(nnx.value_and_grad(plan.apply(loss)), Net(), X).peak_bytes
    assert peak <= 1.05 * plan.budget < 0.8 * jaxckpt.measure(nnx.value_and_grad(loss), Net(), X).peak_bytes


def test_the_default_step_is_measured_as_its_users_run_it():
    """`nnx.jit` returns the values of all Variables beside the gradients."""
    plan = jaxckpt.plan(loss, Net(), X, budget="65%")
    jitted = jaxckpt.measure(nnx.jit(nnx.value_and_grad(plan.apply(loss))), Net(), X)
    assert plan.measured_bytes == jitted.peak_bytes
    assert plan.unplanned_bytes == jaxckpt.measure(nnx.jit(nnx.value_and_grad(loss)), Net(), X).peak_bytes


def test_a_step_with_an_optimizer_is_planned_and_trains_alike():
    def train(fun):
        def step(model, optimizer, x):
            value, gradients = nnx.value_and_grad(fun)(model, x)
            optimizer.update(model, gradients)
            return value

        return step

    def fresh():
        model = Net()
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), X

    plan = jaxckpt.plan(loss, *fresh(), budget="70%", step=train)
    assert plan.measured_bytes <= plan.budget
    one, other = fresh(), fresh()
    for _ in range(2):
        assert_same(nnx.jit(train(plan.apply(loss)))(*one), nnx.jit(train(loss))(*other))
    assert_same(nnx.state(one[:2]), nnx.state(other[:2]))
    assert int(one[1].step[...]) == 2
    peaks = [jaxckpt.measure(train(fun), *fresh()).peak_bytes for fun in (plan.apply(loss), loss)]
    assert peaks[0] <= 0.75 * peaks[1]
    given = nnx.jit(train(loss), donate_argnums=(0, 1))
    assert jaxckpt.measure(given, *fresh()).alias_bytes > 0  # what nnx.jit was told holds


def test_what_only_measures_changes_no_state():
    model, planned = Net(), the_plan().apply(loss)
    before = arrays(nnx.state(model))
    table = jaxckpt.compare({"plain": loss, "planned": planned}, model, X)
    assert table["planned"].peak_bytes < 0.8 * table["plain"].peak_bytes
    assert table["planned"].recompute_flops > 0
    assert "agree" in str(jaxckpt.verify(planned, loss, model, X))
    found = jaxckpt.frontier(loss, model, X, budgets=("65%",))
    assert found.points[0].peak_bytes <= found.points[0].budget_bytes
    jaxckpt.autocheckpoint(loss, budget="65%").plan(model, X)
    assert before.keys() == arrays(nnx.state(model)).keys()
    for path, value in before.items():
        np.testing.assert_array_equal(arrays(nnx.state(model))[path], value)


def test_a_split_model_is_planned_with_its_graph_as_an_argument():
    graph, params, rest = nnx.split(Net(), nnx.Param, ...)

    def pure(params, rest, x):
        model = nnx.merge(graph, params, rest, copy=True)
        value = loss(model, x)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    step = lambda fun: jax.value_and_grad(fun, has_aux=True)
    plan = jaxckpt.plan(pure, params, rest, X, budget="65%", step=step)
    assert plan.measured_bytes <= plan.budget
    assert_same(jax.jit(step(plan.apply(pure)))(params, rest, X), jax.jit(step(pure))(params, rest, X))


def test_a_loss_within_a_train_step_is_planned_with_what_it_closes_over():
    def step(wrap, model, optimizer, x):
        value, gradients = nnx.value_and_grad(wrap(lambda model: loss(model, 2 * x)))(model)
        optimizer.update(model, gradients)
        return value

    states = []
    for wrap in (jaxckpt.autocheckpoint(budget="80%"), lambda fun: fun):
        model = Net()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        value = nnx.jit(functools.partial(step, wrap))(model, optimizer, X)
        states.append((value, nnx.state(model)))
    assert_same(*states)


def test_flags_and_shapes_go_beside_a_model():
    def flagged(model, x, train, scale):
        model.eval() if not train else model.train()
        return loss(model, x) * scale

    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    plan = jaxckpt.plan(flagged, Net(), shape, True, 2.0, budget="65%")
    assert plan.measured_bytes <= plan.budget
    one, other = Net(), Net()
    assert_same(plan.apply(flagged)(one, X, True, scale=2.0), flagged(other, X, True, 2.0))
    auto = jaxckpt.autocheckpoint(flagged, budget="65%")
    assert_same(auto(one, X, True, scale=2.0), flagged(other, X, True, 2.0))
    assert_same(nnx.state(one), nnx.state(other))


def test_a_method_and_a_module_are_functions_of_it():
    one, other = Net(), Net()
    assert_same(jaxckpt.checkpoint(one, policy="dots")(X), other(X))
    assert_same(jaxckpt.checkpoint(one.__call__)(X), other(X))
    assert_same(nnx.state(one), nnx.state(other))
    assert int(one.noise.rngs.count[...]) == 2 * DEPTH


def test_the_leaves_of_a_model_are_each_counted_once():
    model = Net()
    assert len(leaves(lambda a, b: None, (model, model))) == len(leaves(lambda a: None, (model,)))
    assert kept_bytes(the_plan().apply(loss), Net(), X) < 0.6 * kept_bytes(loss, Net(), X)


def test_a_module_that_the_loss_closes_over_is_to_be_an_argument():
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    with pytest.raises(flax.errors.TraceContextError) as caught:
        jaxckpt.plan(lambda x: jnp.mean(model(x) ** 2), jnp.ones((8, 4)), budget="60%")
    assert caught.value.__notes__[-1].endswith("pass them as arguments.")
