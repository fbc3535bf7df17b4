"""equinox models, and other trees with leaves that are no arrays: they work as they are."""

import dataclasses
import functools
import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import ArgumentError, NotDifferentiableError, Policy
from tests.helpers import assert_trees_close, kept_bytes

pytestmark = pytest.mark.usefixtures("shared_answers")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "equinox.md"


@pytest.mark.once
def test_the_pages_code_runs(capsys):
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    for plan in (names["plan"], names["whole"], names["stateful"]):
        assert plan.measured_bytes <= plan.budget < plan.unplanned_bytes and plan.regions
    args = names["model"], names["x"], names["y"]
    grad = lambda fun: eqx.filter_jit(eqx.filter_value_and_grad(fun))(*args)
    for fun in (names["planned"], names["checkpointed_loss"]):
        assert_trees_close(jax.tree.leaves(grad(fun)), jax.tree.leaves(grad(names["loss"])))
    peaks = [jaxckpt.measure(eqx.filter_value_and_grad(names[fun]), *args).peak_bytes for fun in ("planned", "loss")]
    assert peaks[0] <= 0.62 * peaks[1]
    expected = names["with_state"](names["stateful_loss"])(names["normed"], names["statistics"], *args[1:])
    got = names["with_state"](names["stateful"].apply(names["stateful_loss"]))(
        names["normed"], names["statistics"], *args[1:]
    )
    assert_trees_close(jax.tree.leaves(got), jax.tree.leaves(expected), rtol=1e-4)
    assert "planned" in capsys.readouterr().out


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    ws: list
    activation: object
    mode: str
    depth: int
    key: jax.Array
    nothing: object = None


def model(**changes):
    made = Model([jnp.eye(32) * 0.5] * 6, jnp.tanh, "residual", 6, jax.random.key(0))
    return dataclasses.replace(made, **changes)


def loss(model, x, *, scale=1.0):
    for i in range(model.depth):  # needs the number's value
        y = model.activation(x @ model.ws[i])
        x = x + y if model.mode == "residual" else y
    return jnp.mean(x**2) * scale + 0 * jax.random.normal(model.key)


X = jnp.linspace(-1, 1, 512 * 32).reshape(512, 32)


def test_strings_functions_keys_and_numbers_go_with_the_arrays():
    plan = jaxckpt.plan(loss, model(), X, budget="70%")
    assert plan.regions and plan.measured_bytes <= plan.budget
    auto = jaxckpt.autocheckpoint(loss, budget="70%")
    assert auto.plan(model(), X).measured_bytes == pytest.approx(plan.measured_bytes, rel=1e-3)
    gradient = lambda fun: jax.value_and_grad(lambda ws: fun(model(ws=ws), X, scale=2.0))(model().ws)
    scaled = jaxckpt.plan(functools.partial(loss, scale=2.0), model(), X, budget="70%")
    assert scaled.measured_bytes <= scaled.budget
    assert_trees_close(gradient(auto), gradient(loss))
    planned = scaled.apply(functools.partial(loss, scale=2.0))
    assert_trees_close(gradient(lambda model, x, scale: planned(model, x)), gradient(loss))


@pytest.mark.parametrize("policy", [None, "dots", Policy({}, default=jaxckpt.SAVE)], ids=str)
def test_checkpoint_takes_leaves_that_are_no_arrays(policy):
    checkpointed = jaxckpt.checkpoint(loss, policy=policy)
    gradient = lambda fun: jax.value_and_grad(lambda ws: fun(model(ws=ws), X, scale=2.0))(model().ws)
    assert_trees_close(gradient(checkpointed), gradient(loss))


def test_a_plan_for_leaves_that_are_no_arrays_names_what_it_keeps():
    made, x = model(), jnp.ones((512, 32))
    plan = jaxckpt.plan(loss, made, x, budget="60%", step=eqx.filter_value_and_grad)
    kept = sum(len(region.actions) for region in plan.regions)
    told = plan.describe(jaxckpt.trace(loss, made, x))
    assert kept and sum(map(int, re.findall(r"keeps (\d+) value", told))) == kept


def test_a_number_is_a_model():
    assert jaxckpt.plan(lambda p: p, 1.0, budget=10**6).regions == ()
    assert jaxckpt.plan(lambda p: p["a"] ** 2, {"a": 1.0, "b": None}, budget=10**6).measured_bytes <= 64


def test_nothing_to_differentiate_names_a_leaf():
    with pytest.raises(NotDifferentiableError, match=r"args\[0\]\['n'\] is int32"):
        jaxckpt.plan(lambda p: p["n"].sum() * 1.0, {"n": jnp.arange(3)}, budget=10**6)
    with pytest.raises(NotDifferentiableError, match="first argument"):
        jaxckpt.compare({"a": lambda p: p["n"].sum() * 1.0}, {"n": jnp.arange(3)})


@pytest.mark.parametrize("what", ["plan", "measure", "compare", "verify", "frontier"])
def test_what_is_traced_is_named_and_shapes_are_the_way_out(what):
    calls = {
        "plan": lambda ws: jaxckpt.plan(summed, ws, budget="100%"),
        "measure": lambda ws: jaxckpt.measure(summed, ws),
        "compare": lambda ws: jaxckpt.compare({"a": summed}, ws),
        "verify": lambda ws: jaxckpt.verify(summed, summed, ws),
        "frontier": lambda ws: jaxckpt.frontier(summed, ws, budgets=("80%",)),
    }

    def step(ws):
        calls[what](ws)
        return summed(ws)

    with pytest.raises(ArgumentError, match=rf"args\[0\]\['w'\] must be .* traced.*{what}.*ShapeDtypeStruct"):
        jax.jit(step)({"w": X})
    shapes = {"w": jax.ShapeDtypeStruct((32, 32), jnp.float32)}
    if what in ("plan", "measure"):
        jax.jit(lambda ws: (calls[what](shapes), summed(ws))[1])({"w": X})


def summed(ws):
    return jnp.sum(jnp.tanh(jnp.tanh(ws["w"])))


@pytest.mark.parametrize("verify", [True, False])
def test_a_budget_larger_than_anything_fits(verify):
    plan = jaxckpt.plan(summed, {"w": X}, budget=2**200, verify=verify)
    assert jaxckpt.core.plan.Plan.from_json(plan.to_json()).budget == 2**200


@pytest.mark.parametrize("policy", [None, "nothing", "dots"])
def test_a_module_that_is_called_is_checkpointed_with_its_arrays_as_arguments(policy):
    model, x = eqx.nn.MLP(4, 4, 64, 4, key=jax.random.key(0)), jnp.linspace(0.0, 1.0, 4)
    loss = lambda wrap: lambda model, x: jnp.sum(wrap(model)(x))
    wrap = lambda model: jaxckpt.checkpoint(model, policy=policy)
    plain, ours = (eqx.filter_grad(loss(each))(model, x) for each in (lambda model: model, wrap))
    assert_trees_close(eqx.filter(ours, eqx.is_array), eqx.filter(plain, eqx.is_array), rtol=1e-5)
    arrays, static = eqx.partition(model, eqx.is_array)
    kept = lambda each: kept_bytes(lambda arrays, x: loss(each)(eqx.combine(arrays, static), x), arrays, x)
    assert kept(wrap) < kept(lambda model: model)


def with_aux(fun):
    return eqx.filter_value_and_grad(fun, has_aux=True)


def test_equinoxs_donation_counts():
    """What `eqx.filter_jit` donates is planned with, and is that of equinox's own program."""
    network, x = eqx.nn.MLP(64, 64, 256, 6, key=jax.random.key(0)), jnp.linspace(-1, 1, 512 * 64).reshape(512, 64)
    loss = lambda network, x: jnp.mean(jax.vmap(network)(x) ** 2)

    def step_of(donate, loss=loss):
        def step(x, network):
            value, gradients = eqx.filter_value_and_grad(loss)(network, x)
            return eqx.apply_updates(network, jax.tree.map(lambda g: -0.1 * g, gradients)), value

        return eqx.filter_jit(step, donate=donate)

    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(network, eqx.is_array)))
    reports = {each: jaxckpt.measure(step_of(each), x, network) for each in ("none", "all-except-first")}
    own = step_of("all-except-first").lower(x, network).compile().compiled.memory_analysis()
    assert reports["all-except-first"].alias_bytes == own.alias_size_in_bytes == weights
    assert reports["none"].alias_bytes == 0
    for each, ours in reports.items():
        own = step_of(each).lower(x, network).compile(compiler_options=jaxckpt.compiler_options())
        own = own.compiled.memory_analysis()
        assert [ours.argument_bytes, ours.output_bytes, ours.temp_bytes, ours.alias_bytes] == [
            own.argument_size_in_bytes,
            own.output_size_in_bytes,
            own.temp_size_in_bytes,
            own.alias_size_in_bytes,
        ]
    assert reports["all-except-first"].peak_bytes <= reports["none"].peak_bytes - 0.6 * weights
    assert {buffer.operation for buffer in reports["none"].largest(100) if buffer.kind == "argument"} >= {"x"}

    def planned(donate):
        return jaxckpt.plan(loss, x, network, budget="1GiB", step=functools.partial(step_of, donate)).report

    assert planned("none").donatable_bytes == planned("all-except-first").donated_bytes == weights
    assert planned("all-except-first").donatable_bytes == 0


@pytest.mark.parametrize(("step", "aux"), [(eqx.filter_value_and_grad, False), (with_aux, True)])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_autocheckpoint_plans_for_equinoxs_own_gradient(step, aux, jit):
    network = eqx.nn.MLP(16, 16, 32, 4, key=jax.random.key(0))
    x = jnp.linspace(-1, 1, 1024 * 16).reshape(1024, 16)

    def loss(network, x):
        value = jnp.mean(jax.vmap(network)(x) ** 2)
        return (value, jnp.sum(x)) if aux else value

    auto = jaxckpt.autocheckpoint(loss, budget="80%", step=step)
    compiled = eqx.filter_jit if jit else lambda fun: fun
    leaves = lambda fun: jax.tree.leaves(eqx.filter(compiled(step(fun))(network, x), eqx.is_array))
    assert_trees_close(leaves(auto), leaves(loss), rtol=1e-5)
    plan = auto.plan(network, x)
    assert plan.regions and plan.measured_bytes <= plan.budget < plan.unplanned_bytes
    assert jaxckpt.measure(step(auto), network, x).peak_bytes <= plan.budget


@dataclasses.dataclass
class Unhashable:
    """A function with an equality of its own, and so no hash."""

    fun: object

    def __call__(self, *args):
        return self.fun(*args)


def unhashable_step(fun):
    return Unhashable(jax.value_and_grad(fun))


def test_what_has_no_hash_is_planned_measured_and_compared_as_what_has_one():
    w, x = jnp.eye(16) * 0.5, jnp.ones((1024, 16))

    def chain(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    fun = Unhashable(chain)
    with pytest.raises(TypeError, match="unhashable"):
        hash(fun)
    assert jaxckpt.measure(fun, w, x).peak_bytes == jaxckpt.measure(chain, w, x).peak_bytes
    plans = [
        jaxckpt.plan(each, w, x, budget="70%", step=step)
        for each, step in ((chain, jax.value_and_grad), (fun, unhashable_step))
    ]
    assert plans[0] == plans[1] and plans[1].measured_bytes <= plans[1].budget
    auto = jaxckpt.autocheckpoint(fun, budget="70%", step=unhashable_step)
    assert auto.plan(w, x).measured_bytes == plans[0].measured_bytes
    assert_trees_close(jax.grad(auto)(w, x), jax.grad(chain)(w, x))
    rows = jaxckpt.compare({"a": fun, "b": auto}, w, x, step=unhashable_step, time=True).rows
    assert rows[1].peak_bytes < rows[0].peak_bytes and all(row.seconds > 0 for row in rows)


def test_state_that_a_filtered_step_makes_constant_serves_the_next_step():
    class Counted(eqx.Module):
        layer: eqx.nn.Linear
        name: str

        def __call__(self, first, x):
            for _ in range(6):
                x = jnp.tanh(jax.vmap(self.layer)(x))
            return jnp.mean(x**2) + jnp.where(first, 1.0, 2.0), jnp.array(False)

    model, x = Counted(eqx.nn.Linear(16, 16, key=jax.random.key(0)), "a"), jnp.ones((1024, 16))
    apply = lambda model, first, x: model(first, x)
    plan = jaxckpt.plan(apply, model, jnp.array(True), x, budget="80%", step=with_aux)
    assert plan.regions
    for wrapped in (plan.apply(apply), jaxckpt.autocheckpoint(apply, budget="80%", step=with_aux)):
        for compiled in (eqx.filter_jit, lambda fun: fun):
            first, plain = jnp.array(True), jnp.array(True)
            for _ in range(3):
                (value, first), _ = compiled(with_aux(wrapped))(model, first, x)
                (expected, plain), _ = compiled(with_aux(apply))(model, plain, x)
                assert isinstance(first, jax.Array) and first.dtype == jnp.bool
                assert_trees_close(value, expected)


class Dropped(eqx.Module):
    dropout: eqx.nn.Dropout
    linear: eqx.nn.Linear
    branches: bool
    scale: float = 0.5

    def __call__(self, x, key):
        x = x + self.dropout(jnp.tanh(self.linear(x)), key=key)
        return self.scale * x if not self.branches or self.scale > 0 else x


@pytest.mark.parametrize("branches", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_numbers_that_branches_ask_for_are_no_arguments_of_the_plan(train, branches):
    """Of several kinds, here: a bool that is asked for, a float that is or is not, and one that is not."""
    linears = [eqx.nn.Linear(16, 16, key=jax.random.key(i)) for i in range(4)]
    blocks = [Dropped(eqx.nn.Dropout(0.1), linear, branches) for linear in linears]
    blocks = blocks if train else eqx.nn.inference_mode(blocks)

    def loss(blocks, x, key):
        for block in blocks:
            x = jax.vmap(block, (0, None))(x, key)
        return jnp.mean(x**2)

    args = blocks, jnp.ones((256, 16)), jax.random.key(1)
    plan = jaxckpt.plan(loss, *args, budget="80%", target="cpu")
    assert plan.measured_bytes <= plan.budget and plan.regions
    got, expected = (jax.tree.leaves(eqx.filter_value_and_grad(fun)(*args)) for fun in (plan.apply(loss), loss))
    assert_trees_close(got, expected, rtol=1e-4)


def test_the_default_step_leaves_out_floats_whose_value_the_function_needs():
    def loss(model, x):
        for w in model["ws"]:
            x = x + model["rate"] * jnp.tanh(x @ w) if model["rate"] > 0 else x
        return jnp.mean(x**2)

    args = {"ws": [jnp.eye(16)] * 4, "rate": 0.5}, jnp.ones((256, 16))
    plan = jaxckpt.plan(loss, *args, budget="80%", target="cpu")
    assert plan.measured_bytes <= plan.budget and plan.regions
    assert jaxckpt.frontier(loss, *args, budgets=("80%",), target="cpu").points[0].plan is not None
    assert len(jaxckpt.compare({"plain": loss}, *args, target="cpu")) == 1
    of = lambda fun: jax.grad(lambda ws: fun({"ws": ws, "rate": 0.5}, args[1]))(args[0]["ws"])
    assert_trees_close(of(plan.apply(loss)), of(loss))


class Attending(eqx.Module):
    """Its layers ask for the types of their numbers: a Dropout has a rate, and a flag."""

    attention: list

    def __init__(self, key, rate=0.0):
        make = functools.partial(eqx.nn.MultiheadAttention, 4, 32, dropout_p=rate)
        self.attention = [make(key=each) for each in jax.random.split(key, 3)]

    def __call__(self, x, key=None):
        for layer in self.attention:
            x = x + layer(x, x, x, key=key)
        return x


def attending_loss(model, x, key=None):
    return jnp.mean(jax.vmap(model, in_axes=(0, None))(x, key) ** 2)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_numbers_of_layers_that_ask_for_their_types_are_passed_as_equinox_passes_them(rate):
    network, x = Attending(jax.random.key(1), rate), jax.random.normal(jax.random.key(0), (4, 64, 32))
    args = (network, x, jax.random.key(2)) if rate else (network, x)
    gradient = lambda loss: eqx.filter_jit(eqx.filter_value_and_grad(loss))(*args)
    expected = gradient(attending_loss)

    plan = jaxckpt.plan(attending_loss, *args, budget="70%")
    assert plan.regions and plan.measured_bytes <= plan.budget < plan.unplanned_bytes
    auto = jaxckpt.autocheckpoint(attending_loss, budget="70%")
    assert auto.plan(*args).regions
    for fun in (plan.apply(attending_loss), auto):
        assert_trees_close(eqx.filter(gradient(fun), eqx.is_array), eqx.filter(expected, eqx.is_array), rtol=1e-5)
    jaxckpt.verify(plan.apply(attending_loss), attending_loss, *args)  # raises where they differ

    kept = jaxckpt.residuals(attending_loss, *args)
    parts, rest = eqx.partition(args, eqx.is_array)
    assert kept.kept_bytes == kept_bytes(lambda parts: attending_loss(*eqx.combine(parts, rest)), parts)
    assert any("attention[0].query_proj.weight" in each.name for each in kept.residuals if each.argument)
    drawn = "random_bits" in str(jax.make_jaxpr(lambda x: attending_loss(network, x, *args[2:]))(x))
    operations = {op.primitive for op in jaxckpt.trace(attending_loss, *args).ops}
    assert drawn == bool(operations & {"random_bits", "threefry2x32"}) == bool(rate), "no dropout at a rate of 0"


@pytest.mark.parametrize("policy", [None, "dots"])
def test_checkpointed_layers_ask_for_their_numbers(policy):
    network, x = Attending(jax.random.key(1)), jax.random.normal(jax.random.key(0), (64, 32))
    wrap = jaxckpt.checkpoint(policy=policy)
    in_place = eqx.tree_at(lambda m: m.attention, network, [wrap(layer) for layer in network.attention])
    called = wrap(lambda layer, x: layer(x, x, x))

    def by_argument(network, x):
        for layer in network.attention:
            x = x + called(layer, x)
        return jnp.sum(x**2)

    plain = lambda network, x: jnp.sum(network(x) ** 2)
    expected = eqx.filter(eqx.filter_grad(plain)(network, x), eqx.is_array)
    for model, loss in ((in_place, plain), (network, by_argument)):
        found = eqx.filter(eqx.filter_grad(loss)(model, x), eqx.is_array)
        assert_trees_close(jax.tree.leaves(found), jax.tree.leaves(expected), rtol=1e-4)
        arrays, rest = eqx.partition(model, eqx.is_array)
        kept = lambda loss, arrays=arrays, rest=rest: kept_bytes(lambda a, x: loss(eqx.combine(a, rest), x), arrays, x)
        full, fixed = eqx.partition(network, eqx.is_array)
        assert kept(loss) < 0.8 * kept_bytes(lambda a, x: plain(eqx.combine(a, fixed), x), full, x)


class Scaled(eqx.Module):
    """Its number is one to compute with: `jax.jit` takes it for an array."""

    ws: list
    scale: float

    def __call__(self, x):
        for w in self.ws:
            x = jnp.tanh(x @ w) * self.scale
        return x


@pytest.mark.parametrize("jit", [eqx.filter_jit, jax.jit, lambda fun: fun], ids=["filter_jit", "jit", "eager"])
def test_a_plan_for_numbers_to_compute_with_holds_under_any_jit(jit):
    network, x = Scaled([jnp.eye(32) * 0.5] * 6, 0.9), jnp.linspace(-1, 1, 1024 * 32).reshape(1024, 32)
    loss = lambda network, x: jnp.mean(network(x) ** 2)
    plan = jaxckpt.plan(loss, network, x, budget="70%")
    assert plan.regions and plan.measured_bytes <= plan.budget
    grad = eqx.filter_grad if jit is eqx.filter_jit else jax.grad
    for changed in (network, eqx.tree_at(lambda n: n.scale, network, 0.5)):
        for fun in (
            plan.apply(loss),
            jaxckpt.checkpoint(loss, policy="dots"),
            jaxckpt.autocheckpoint(loss, budget="70%"),
        ):
            found, expected = (jax.tree.leaves(jit(grad(each))(changed, x)) for each in (fun, loss))
            assert_trees_close(found, expected, rtol=1e-5)
