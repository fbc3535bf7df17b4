"""One table says what primitives are, and says it of JAX as it is."""

from __future__ import annotations

import ast
import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

import jaxckpt
from jaxckpt import _compat
from jaxckpt.core import primitives, reads
from jaxckpt.core.graph import trace
from jaxckpt.core.lift import count_flops
from jaxckpt.core.primitives import TABLE, UNKNOWN, Holds, Kernel, Result
from jaxckpt.models import gpt, llama, lstm, moe, resnet, unet
from jaxckpt.planner.costs import is_dear
from jaxckpt.schedules.pullback import is_cheap
from tests.helpers import gradient_executions

ROOT = pathlib.Path(jaxckpt.__file__).parent
OLD = {
    "checkpoint",
    "remat",
    "pjit",
    "closed_call",
    "core_call",
    "CustomVJPTraced",
}  # of other versions, or of hi primitives
ONLY_NEW = {"log2", "one_minus_square", "polynomial", "reduced_vary_cast", "vary_unreduced_cast"}  # from jax 0.12
X = jnp.ones((4, 8))


@functools.cache
def operations():
    """Returns the operations of the training steps of the benchmark models, one of each primitive."""
    found = {}
    for model in (gpt, llama, lstm, moe, resnet, unet):
        fun, args = model.small()
        found.update((op.primitive, op) for op in trace(jax.grad(fun), *args).walk())
    return found


def lists_of_names(path):
    """Yields (line, names) of every collection of strings in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Set, ast.List, ast.Tuple)):
            items = node.elts
        elif isinstance(node, ast.Dict):
            items = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
            text = node.func.value.value if isinstance(node.func.value, ast.Constant) else ""
            yield node.lineno, set(str(text).split())
            continue
        else:
            continue
        yield node.lineno, {item.value for item in items if isinstance(item, ast.Constant)}


def test_what_primitives_are_is_said_in_one_file():
    known = _compat.primitive_names() | set(TABLE)
    said = ROOT / "core" / "primitives.py", ROOT / "__init__.py"  # the second lists jaxckpt's own names
    found = [
        (path.relative_to(ROOT).as_posix(), line, sorted(names & known))
        for path in sorted(ROOT.rglob("*.py"))
        for line, names in lists_of_names(path)
        if len(names & known) > 2 and "_compat" not in path.parts and path not in said
    ]
    assert found == []


def test_lists_of_primitives_are_found(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("A = {'sin', 'cos', 'add'}\nB = 'sin cos add'.split()\nC = {'sin': 1, 'cos': 2, 'add': 3}\n")
    assert list(lists_of_names(path)) == [(line, {"sin", "cos", "add"}) for line in (1, 2, 3)]


def test_every_name_is_one_of_jaxs_and_stands_in_one_row():
    names = [name for names, _ in primitives._ROWS for name in names.split()]
    assert len(names) == len(set(names)) == len(TABLE)
    assert set(names) - _compat.primitive_names() <= OLD | ONLY_NEW


def test_every_operation_of_the_benchmark_models_is_known():
    assert {"dot_general", "conv_general_dilated", "scan", "sort", "custom_jvp_call"} & set(operations())
    assert set(operations()) - set(TABLE) == set()


def test_no_derivative_reads_the_result_where_the_table_says_so():
    asked = 0
    for primitive, op in operations().items():
        if primitives.of(primitive).asks_result or op.bodies:
            continue
        eqn = op.equation
        assert not reads._find_own_reads(eqn.primitive, tuple(v.aval for v in eqn.invars), eqn.params), primitive
        asked += 1
    assert asked > 20
    tanh = operations()["tanh"].equation
    assert reads._find_own_reads(tanh.primitive, (tanh.invars[0].aval,), tanh.params)  # it would be found


LINEAR = {
    "add": lambda x: lax.add(x, x),
    "sub": lambda x: lax.sub(x, x),
    "neg": lax.neg,
    "cumsum": lax.cumsum,
    "rev": lambda x: lax.rev(x, (0,)),
    "slice": lambda x: lax.slice(x, (0, 1), (2, 3)),
    "transpose": lambda x: lax.transpose(x, (1, 0)),
    "reshape": lambda x: lax.reshape(x, (32,)),
    "squeeze": lambda x: lax.squeeze(x[:1], (0,)),
    "reduce_sum": lambda x: jnp.sum(x, 0),
    "broadcast_in_dim": lambda x: lax.broadcast(x, (3,)),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "copy": jnp.copy,
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_keeps_nothing_for_its_derivative(name):
    assert TABLE[name].linear and name in [op.primitive for op in trace(LINEAR[name], X).walk()]
    assert jaxckpt.residuals(LINEAR[name], X).kept_bytes == 0
    two, one = LINEAR[name](3 * X), LINEAR[name](X)
    assert jnp.allclose(two.astype(float), 3 * one.astype(float))


LINEAR_IN = {
    "mul": (lax.mul, (X, X)),
    "div": (lax.div, (X, X)),
    "dot_general": (lax.dot, (X, X.T)),
}


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.linear_in])
def test_what_is_linear_in_an_operand_is_so_with_the_others_fixed(name):
    fun, operands = LINEAR_IN[name]
    assert [op.primitive for op in trace(fun, *operands).walk()] == [name]
    for place in range(len(operands)):
        alone = lambda x, place=place: fun(*operands[:place], x, *operands[place + 1 :])
        is_linear = bool(jnp.allclose(alone(3 * operands[place]), 3 * alone(operands[place])))
        assert primitives.is_linear_in(name, place, X.dtype) == is_linear


def test_a_quotient_is_linear_where_it_is_not_rounded():
    assert primitives.is_linear_in("div", 0, X.dtype) and primitives.is_linear_in("mul", 0, jnp.dtype(int))
    assert not primitives.is_linear_in("div", 0, jnp.dtype(int))


def _kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...]


RUNS = {
    "scan": (lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0], 3),
    "while": (lambda x: lax.while_loop(lambda c: c[0, 0] > 0, jnp.sin, x), 1),  # nobody knows
    "cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), 1),
    "pallas_call": (pl.pallas_call(_kernel, out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype), grid=(2, 5)), 10),
}


@pytest.mark.parametrize("name", RUNS)
def test_how_often_an_operation_runs_its_programs(name):
    fun, times = RUNS[name]
    (op,) = (op for op in trace(fun, X).body.ops if op.primitive == name)
    assert primitives.of(name).runs(op.params) == times
    each = [sum(inner.flops for inner in body.ops) for body in op.bodies]
    assert op.flops == (max(each) if name == "cond" else times * sum(each))
    repeats = 1 if primitives.of(name).opaque else times
    assert {inner.repeats for body in op.bodies for inner in body.ops} == {repeats}


def test_what_lays_a_value_out_says_how():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    (op,) = trace(lambda x: lax.with_sharding_constraint(x, spread), X).walk()
    assert primitives.of(op.primitive).lays_out and op.params["sharding"] is not None


def test_rules_of_the_users_run_forward_or_backward():
    assert TABLE["custom_jvp_call"].forward_rule and not TABLE["custom_jvp_call"].backward_rule
    assert TABLE["custom_vjp_call"].backward_rule and not TABLE["custom_vjp_call"].forward_rule


def test_what_only_moves_data_has_no_flops_and_is_not_dear():
    for name, row in TABLE.items():
        if row.kernel is Kernel.AT_USES or row.result > Result.OTHER:
            assert row.flops is primitives.rules.free and not row.dear, name
        if row.collective:
            assert row.dear and row.kernel is Kernel.OWN, name


def test_an_unknown_primitive_is_what_the_defaults_say():
    row = primitives.of("of another package")
    assert row is UNKNOWN and row.kernel is Kernel.OWN and row.dear and row.asks_result and row.holds is Holds.PROGRAMS
    assert not (row.fused or row.linear or row.writes_over or row.opaque or row.collective)
    assert primitives.flops("of another package", [], [jax.typeof(X)], {}) == 32


@pytest.mark.parametrize(
    ("fun", "dear"),
    [
        (lambda x: lax.cumsum(x, 1), False),
        (lambda x: lax.cummax(x, 1), False),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"), False),
        (lambda x: lax.igamma(x, x), True),
        (lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + 2 * b, (0,)), False),
        (lambda x: lax.optimization_barrier(x), False),
        (lambda x: jnp.sin(x) + 1, False),
        (lambda x: x @ x.T, True),
    ],
)
def test_the_planner_and_the_scan_agree_on_what_is_dear(fun, dear):
    graph = trace(fun, X)
    assert any(is_dear(op) for op in graph.walk()) == dear
    assert any(not is_cheap(eqn) for eqn in graph.body.jaxpr.eqns) == dear


@pytest.mark.parametrize("name", ["scatter-mul", "scatter-min", "scatter-max"])
def test_a_scatter_costs_its_updates_and_not_its_operand(name):
    update = {"scatter-mul": "multiply", "scatter-min": "min", "scatter-max": "max"}[name]
    fun = lambda x, rows: getattr(x.at[jnp.array([1, 2])], update)(rows)
    big = jnp.ones((1000, 8))
    assert name in [op.primitive for op in trace(fun, big, X[:2]).walk()]
    assert count_flops(fun, big, X[:2]) < 100


def test_a_scan_with_room_for_the_results_of_its_matmuls_keeps_no_cumulative_sums():
    """Kept, they would take the room of as many matmuls again: a third forward run."""

    def loss(w, x):
        body = lambda carry, _: (jnp.tanh(lax.cumsum(jnp.sin(carry), 0)) @ w, None)
        return jnp.sum(jaxckpt.scan(body, x, None, length=64, schedule=jaxckpt.Slots(8))[0])

    w, x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    runs = gradient_executions(loss, w, x)
    assert runs["dot_general"] == (2 + 2) * 64  # forward, once again, and two for each in the backward pass
    assert runs["cumsum"] == (3 + 1) * 64
