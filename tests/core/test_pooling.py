"""Maxima over windows with one axis more: the same values and gradients, fewer bytes where a compiler shares zeros."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import Plan, Region
from jaxckpt.core import pooling
from jaxckpt.core.graph import trace
from jaxckpt.planner.problems import problem_of


def _pool(x: jax.Array, reduction: Callable[..., Any] = lax.max, least: float = -np.inf) -> jax.Array:
    return lax.reduce_window(x, least, reduction, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def _loss(w: Any, x: jax.Array) -> jax.Array:
    x = _pool(jax.nn.relu(x * w["scale"]))
    for each in w["layers"]:
        x = jnp.tanh(x @ each)
    return jnp.sum(jnp.square(x))


def _arguments(batch: int, pixels: int, channels: int) -> tuple[Any, jax.ShapeDtypeStruct]:
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    weights = {"scale": shape(channels), "layers": [shape(channels, channels)] * 3}
    return weights, shape(batch, pixels, pixels, channels)


def _of_stem(fun: Callable[..., Any], args: Any, pools_apart: bool) -> Plan:
    """Returns the plan that computes all of a function up to its pooling again."""
    graph = trace(fun, *args)
    stop = next(place for place, op in enumerate(graph.ops) if op.primitive.startswith("reduce_window")) + 1
    return Plan((Region(0, stop, {}),), graph.fingerprint, pools_apart=pools_apart)


@pytest.mark.parametrize(("reduction", "least"), [(lax.max, -np.inf), (lax.min, np.inf)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_all_derivatives_are_equal_bit_for_bit(reduction, least, dtype):
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.integers(-3, 3, (2, 9, 8, 3)), dtype)  # equal values: which one gets the gradient?
    x = x.at[0, 0, 0, 0].set(jnp.nan).at[1, :3, :3, 1].set(-jnp.inf)
    fun = lambda x: jnp.sum(jnp.arange(3, dtype=dtype) * _pool(x, reduction, least))
    tangent = jnp.asarray(draw.normal(size=x.shape), dtype)
    plain, apart = (_of_stem(fun, (x,), flag).apply(fun) for flag in (False, True))
    assert "[1,2,9,8,3]" in str(jax.make_jaxpr(apart)(x)).replace(" ", "")
    assert "[1,2,9,8,3]" not in str(jax.make_jaxpr(plain)(x)).replace(" ", "")
    for of in (
        lambda f: jax.value_and_grad(f)(x),
        lambda f: jax.jvp(f, (x,), (tangent,)),
        lambda f: jax.vmap(f)(x[None]),
    ):
        for one, other in zip(jax.tree.leaves(of(apart)), jax.tree.leaves(of(fun)), strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_types_without_infinity_have_a_maximum_too():
    x = jnp.arange(12.0).reshape(2, 6).astype(jnp.float8_e4m3fn)
    fun = lambda x: lax.reduce_window(x, jnp.finfo(x.dtype).min, lax.max, (1, 3), (1, 3), "VALID")
    (eqn,) = jax.make_jaxpr(fun)(x).eqns
    assert eqn.primitive.name == "reduce_window_max" and len(pooling.with_axis(eqn)) == 3
    np.testing.assert_array_equal(_of_stem(fun, (x,), True).apply(fun)(x).astype(np.float32), [[2, 5], [8, 11]])


def test_source_lines_and_scopes_stay():
    def stem(x):
        with jax.named_scope("stem"):
            return _pool(x)

    (eqn,) = jax.make_jaxpr(stem)(jnp.ones((1, 4, 4, 1))).eqns
    assert all(each.source_info is eqn.source_info for each in pooling.with_axis(eqn))


def test_maxima_of_integers_and_other_operations_stay_as_they_are():
    program = jax.make_jaxpr(lambda x: _pool(x, least=-(2**31)) + 1)(jnp.ones((1, 4, 4, 1), jnp.int32))
    assert all(pooling.with_axis(eqn) == [eqn] for eqn in program.eqns)
    assert not pooling.is_in(trace(lambda x: _pool(x, least=-(2**31)), jnp.ones((1, 4, 4, 1), jnp.int32)))


def test_an_operand_whose_type_names_its_sharding_stays_as_it_is():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, 4, 4, 1)), jax.NamedSharding(mesh, P("data")))
        (eqn,) = jax.make_jaxpr(_pool)(x).eqns
        assert pooling.with_axis(eqn) == [eqn]


def test_a_plan_says_it_in_its_file_and_counts_it():
    plan = _of_stem(_loss, _arguments(2, 8, 4), True)
    assert Plan.from_json(plan.to_json()) == plan != dataclasses.replace(plan, pools_apart=False)
    with pytest.raises(jaxckpt.PlanMismatchError, match="pools_apart"):
        dataclasses.replace(plan, pools_apart="yes")


@pytest.mark.cuda
def test_a_gpu_stores_no_zeros_from_the_forward_pass_on():
    args = _arguments(16, 64, 64)
    operand = 16 * 64 * 64 * 64 * 4
    found = {}
    for apart in (False, True):
        step = jax.value_and_grad(_of_stem(_loss, args, apart).apply(_loss))
        found[apart] = jaxckpt.measure(step, *args, target="cuda:h100", generate_code=False).temp_bytes
    assert found[False] - found[True] >= 0.7 * operand


@pytest.mark.cuda
def test_plans_for_a_gpu_write_pools_apart():
    args = _arguments(16, 64, 64)
    plan = jaxckpt.plan(_loss, *args, budget="90%", target="cuda:h100")
    assert plan.pools_apart
    assert plan.measured_bytes <= plan.budget
    by_hand = Plan(plan.regions, plan.fingerprint)
    step = jax.value_and_grad(by_hand.apply(_loss))
    assert jaxckpt.measure(step, *args, target="cuda:h100", generate_code=False).peak_bytes > plan.budget
    assert not problem_of(_loss, *args, target="cpu").model.pools_apart
