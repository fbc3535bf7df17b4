"""`costs="compiler"`: seconds of operations by the cost model of a TPU's compiler."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.core.graph import trace
from jaxckpt.memory import cycles
from jaxckpt.memory.cycles import CompiledKernel, compiled_kernels, kernels
from jaxckpt.memory.targets import target_of
from jaxckpt.models import gpt
from jaxckpt.planner.costs import roofline
from jaxckpt.planner.cycles import Cycles
from jaxckpt.planner.frontier import cost_of
from jaxckpt.planner.problems import problem_of
from tests.helpers import assert_trees_close

TPU = "tpu:v5e:2x2"
WIDE = 1024
ARGS = [jax.ShapeDtypeStruct((WIDE, WIDE), jnp.bfloat16)] * 6, jax.ShapeDtypeStruct((4 * WIDE, WIDE), jnp.bfloat16)

TEXT = """
HloModule jit_run

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0), metadata={op_name="values[0]"}
  ROOT %exp = f32[8]{0} exponential(%p), metadata={op_name="jit(run)/op1/exp"}
}

%fused (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %nested = f32[8]{0} fusion(%q), kind=kLoop, calls=%inner, metadata={op_name="jit(run)/op2/add"}
  ROOT %mul = f32[8]{0} multiply(%nested, %nested), metadata={op_name="jit(run)/op3/mul"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %sorted = f32[8]{0} sort(%x), metadata={op_name="jit(run)/op4/sort"}
  %odd = f32[8]{0} copy(%x), metadata={op_name="jit(run)/op5/copy"}, backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
  %copy = f32[8]{0} copy(%sorted), backend_config={"window_config":{"estimated_cycles":"7"}}
  ROOT %fusion = f32[8]{0} fusion(%copy), kind=kLoop, calls=%fused, metadata={op_name="jit(run)/op3/mul"}, backend_config={"window_config":{"estimated_cycles":"120"}}
}
"""  # noqa: E501


def loss(ws, x):
    for w in ws:
        x = jax.nn.gelu(x @ w)
    return jnp.sum(x.astype(jnp.float32))


def test_kernels_name_what_is_fused_in_them_and_those_without_an_estimate_are_told_apart():
    name = "jit(run)/op{}/{}".format
    assert kernels(TEXT) == [
        CompiledKernel(None, (name(4, "sort"),)),
        CompiledKernel(None, (name(5, "copy"),)),
        CompiledKernel(7, ()),
        CompiledKernel(120, (name(3, "mul"), name(2, "add"), name(1, "exp"))),
    ]


@pytest.mark.tpu
def test_a_large_matmul_takes_nearly_what_its_peak_rate_says():
    args = jnp.ones((8192, 2048), jnp.bfloat16), jnp.ones((2048, 2048), jnp.bfloat16)
    target = target_of(TPU)
    found = compiled_kernels(jnp.dot, args, target, cache=False)
    seconds = sum(kernel.cycles or 0 for kernel in found) / target.clock
    assert 1 <= seconds / (2 * 8192 * 2048**2 / target.flops["bfloat16"]) < 1.1


@pytest.mark.once
@pytest.mark.tpu
def test_an_operation_that_is_known_holds_for_others_like_it_and_none_is_compiled_twice(monkeypatch, tmp_path):
    graph = trace(lambda w, x: jnp.tanh(x @ w), *(ARGS[0][0], ARGS[1]))
    target = target_of(TPU)
    rates = roofline(graph, target)
    found = Cycles(target, tmp_path)
    found.learn(graph, graph.ops, graph.body, rates)
    again = trace(lambda w, x: jnp.tanh(x @ w) + jnp.sin(x), *(ARGS[0][0], ARGS[1]))
    dot, tanh, sin, _ = again.ops
    peak = dot.flops / target.flops["bfloat16"]
    assert peak < found.seconds(again, dot) < 1.3 * peak < rates(graph.ops[0])
    assert found.seconds(again, tanh) is not None and found.seconds(again, sin) is None

    monkeypatch.setattr(cycles, "compiled_for", lambda *args: pytest.fail("compiled again"))
    other = Cycles(target, tmp_path)
    other.learn(graph, graph.ops, graph.body, rates)  # from the cache
    found.learn(graph, graph.ops, graph.body, rates)  # all of it is known
    assert other.known == found.known


@pytest.mark.once
@pytest.mark.tpu
def test_stretches_add_up_to_the_whole_step_where_the_roofline_does_not():
    model, args = gpt.gpt2(layers=2, width=512, heads=8, vocabulary=4096)
    target = target_of(TPU)
    problem = problem_of(model, *args, target=TPU, costs="compiler")
    step = jax.value_and_grad(model)
    whole = sum(kernel.cycles or 0 for kernel in compiled_kernels(step, args, target)) / target.clock
    graph = trace(step, *args)
    rates = roofline(graph, target)
    known = roofline(graph, target, cycles=problem.asked.cycles)
    stretches, modelled = (sum(map(seconds, graph.ops)) for seconds in (known, rates))
    assert 0.9 < stretches / whole < 1.25 < modelled / whole
    assert problem.plain.time.seconds == pytest.approx(stretches)


@pytest.mark.once
@pytest.mark.tpu
@pytest.mark.parametrize("scanned", [False, True])
def test_a_plan_by_the_compilers_seconds_fits_and_tells_them(scanned):
    def in_a_scan(ws, x):
        x, _ = jax.lax.scan(lambda x, w: (jax.nn.gelu(x @ w), None), x, ws)
        return jnp.sum(x.astype(jnp.float32))

    fun = in_a_scan if scanned else loss
    args = (jax.ShapeDtypeStruct((6, WIDE, WIDE), jnp.bfloat16), ARGS[1]) if scanned else ARGS
    by_rates, by_compiler = (
        jaxckpt.plan(fun, *args, budget="70%", target=TPU, costs=costs) for costs in ("roofline", "compiler")
    )
    assert by_compiler.measured_bytes <= by_compiler.budget
    for made, words in (by_rates, "by the target's rates"), (by_compiler, "by the target's compiler"):
        loaded = type(made).from_json(made.to_json()).report
        assert f"time {words}" in " ".join(str(made.report).split()) and loaded.seconds_by == words
    # By the rates of this library a matmul takes three times of what the compiler says.
    assert by_compiler.report.unplanned_seconds < 0.6 * by_rates.report.unplanned_seconds
    small = jax.tree.map(lambda leaf: 0.01 * jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype), args)
    actual, expected = (jax.jit(jax.grad(f))(*small) for f in (by_compiler.apply(fun), fun))
    assert_trees_close(actual, expected, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda)])
def test_only_a_tpus_compiler_has_estimates(target):
    with pytest.raises(jaxckpt.ArgumentError, match="costs must be 'roofline'.*writes no estimates"):
        jaxckpt.plan(loss, *ARGS, budget="70%", target=target, costs="compiler")


@pytest.mark.tpu
def test_sharded_and_mapped_functions_are_refused():
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct(ARGS[1].shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    with pytest.raises(jaxckpt.ArgumentError, match="costs must be 'roofline' for sharded arguments"):
        jaxckpt.plan(loss, ARGS[0], x, budget="70%", target=TPU, costs="compiler")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    def mapped(ws, x):
        return jax.lax.psum(loss(ws, x), "x")

    with pytest.raises(jaxckpt.ArgumentError, match=r"costs must be 'roofline' for a function inside of jax.shard_map"):
        jaxckpt.plan(mapped, ARGS[0], x, budget="70%", target=TPU, costs="compiler")


@pytest.mark.once
@pytest.mark.tpu
def test_a_frontiers_ways_are_all_in_the_compilers_seconds():
    def by_blocks(ws, x):
        for w in ws:
            x = jax.checkpoint(lambda x, w: jax.nn.gelu(x @ w))(x, w)
        return jnp.sum(x.astype(jnp.float32))

    found = jaxckpt.frontier(
        loss, *ARGS, budgets=("80%",), target=TPU, costs="compiler", verify=False, others={"blocks": by_blocks}
    )
    _, by_rates = cost_of(jax.value_and_grad(loss), ARGS, TPU)
    assert found.seconds_by == "by the target's compiler" and found.seconds_by in str(found).replace("\n", " ")
    assert found.unplanned.seconds < 0.6 * by_rates
    # Each block's matmul runs once more, of three. By the rates of one and the compiler of the other it is faster.
    assert 0.2 < found.overhead(found.others[0]) < 0.5
    assert 0 < found.overhead(found.points[0]) < 0.5
