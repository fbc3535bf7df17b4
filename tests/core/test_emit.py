"""Random nested plans over random programs keep and compute again what the same checkpoints do that are put by hand.

A program is a tree of statements; scans and branches hold blocks of their own. Each block has random regions, nested
ones among them, and each region names some of its values. The plan says so by places and indices, `by_hand` by
`jax.checkpoint` around the statements themselves.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxckpt
from jaxckpt import SAVE, Plan, Region, tag
from jaxckpt.core.graph import Body, Graph, trace
from tests.fuzz import cases as fuzz
from tests.fuzz.checks import _of_arrays, _part
from tests.fuzz.compare import Differentiated, compare
from tests.helpers import gradient_executions, kept_bytes

ROWS, WIDTH, ITERATIONS = 3, 4, 3
OPERATIONS: dict[str, Callable[..., Any]] = {
    "matmul": lambda w, a, b: a @ w,
    "sin": lambda w, a, b: jnp.sin(a),
    "cos": lambda w, a, b: jnp.cos(a) + b,
    "mul": lambda w, a, b: a * b,
    "sum": lambda w, a, b: a + jnp.sum(b * b, axis=-1, keepdims=True),
}
"""Operations whose derivatives do not read their own results: where they do, jaxckpt computes less again than a
checkpoint by hand.
"""
COUNTED = ("dot_general", "sin", "cos", "mul", "reduce_sum")


@dataclass(frozen=True)
class Stretch:
    """Statements start..stop of a block as a region.

    Attributes:
      kept: statements in it, by name, whose results it keeps.
      inner: regions nested in it.
    """

    start: int
    stop: int
    kept: tuple[str, ...]
    inner: tuple[Stretch, ...] = ()


@dataclass(frozen=True)
class Statement:
    """An operation on two earlier values of its block, or a scan or a branch with blocks in it."""

    name: str
    kind: str
    operands: tuple[int, int]
    blocks: tuple[Block, ...] = ()

    @property
    def read(self) -> tuple[int, ...]:
        """The values that it reads."""
        return self.operands[: 1 if self.kind in ("matmul", "sin", "scan") else 2]


@dataclass(frozen=True)
class Block:
    """Statements; value 0 is the block's argument, value i + 1 the result of statement i, and the last is the
    block's.
    """

    statements: tuple[Statement, ...]
    regions: tuple[Stretch, ...]


def draw(rng: random.Random, depth: int = 2, name: str = "v") -> Block:
    """Returns a random block with loops and branches `depth` deep."""
    kinds = [rng.choice(list(OPERATIONS)) for _ in range(rng.randint(3, 6) if depth == 2 else rng.randint(2, 4))]
    if depth:
        kinds.insert(rng.randint(1, len(kinds)), rng.choice(("scan", "cond")))
    statements = []
    for i, kind in enumerate(kinds):
        count = {"scan": 1, "cond": 2}.get(kind, 0)
        blocks = tuple(draw(rng, depth - 1, f"{name}_{i}{'ab'[n]}") for n in range(count))
        statements.append(Statement(f"{name}_{i}", kind, (i, rng.randint(0, i)), blocks))
    names = [statement.name for statement in statements]
    return Block(tuple(statements), _stretches(rng, names, 0, len(names), depth=2))


def _stretches(rng: random.Random, names: Sequence[str], start: int, stop: int, depth: int) -> tuple[Stretch, ...]:
    """Returns random disjoint regions within start..stop, with regions nested `depth` deep in them."""
    found, at = [], start
    while at < stop:
        end = rng.randint(at + 1, stop)
        if rng.random() < 0.75:
            kept = tuple(name for name in names[at:end] if rng.random() < 0.4)
            inner = _stretches(rng, names, at, end, depth - 1) if depth > 1 and rng.random() < 0.5 else ()
            found.append(Stretch(at, end, kept, inner))
        at = end
    return tuple(found)


# ------------------------------------------------------------------------------------------------ the program, two ways


def run(block: Block, w: Any, x: Any, checkpointed: bool, call: Any = lambda fun: fun) -> Any:
    """Runs a block; `checkpointed` with its regions as checkpoints that are put by hand, `call` around each
    operation.
    """

    def statements(start: int, stop: int, values: dict[int, Any], regions: Sequence[Stretch]) -> dict[int, Any]:
        at = start
        for region in regions if checkpointed else ():
            values = plainly(at, region.start, values)
            values = values | checkpoint(region)(
                {i: values[i] for i in read(region.start, region.stop) if i <= region.start}
            )
            at = region.stop
        return plainly(at, stop, values)

    def checkpoint(region: Stretch) -> Callable[..., Any]:
        made = range(region.start + 1, region.stop + 1)
        needed = {*read(region.stop, len(block.statements)), len(block.statements)}

        def inside(values: dict[int, Any]) -> dict[int, Any]:
            values = statements(region.start, region.stop, values, region.inner)
            return {i: values[i] for i in made if i in needed}

        return jax.checkpoint(inside, policy=jax.checkpoint_policies.save_only_these_names(*region.kept))

    def read(start: int, stop: int) -> set[int]:
        return {i for statement in block.statements[start:stop] for i in statement.read}

    def plainly(start: int, stop: int, values: dict[int, Any]) -> dict[int, Any]:
        values = dict(values)
        for i in range(start, stop):
            statement = block.statements[i]
            a, b = (values.get(place) for place in statement.operands)
            values[i + 1] = tag(_result(statement, w, a, b, checkpointed, call), statement.name)
        return values

    return statements(0, len(block.statements), {0: x}, block.regions)[len(block.statements)]


def _result(statement: Statement, w: Any, a: Any, b: Any, checkpointed: bool, call: Any) -> Any:
    blocks = [functools.partial(run, block, w, checkpointed=checkpointed, call=call) for block in statement.blocks]
    if statement.kind == "scan":
        return lax.scan(lambda c, _: (0.5 * blocks[0](c) + c, None), a, None, length=ITERATIONS)[0]
    if statement.kind == "cond":
        return lax.cond(jnp.sum(b) > 0, *blocks, a)
    return call(OPERATIONS[statement.kind])(w, a, b)


def function(block: Block, checkpointed: bool = False, call: Any = lambda fun: fun) -> Callable[..., Any]:
    return lambda w, x: jnp.sum(jnp.sin(run(block, w, x, checkpointed, call)))


W = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 2
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def plan_of(block: Block, graph: Graph) -> Plan:
    """Returns the plan with the regions of all blocks."""
    values = {label: value.index for value in graph.values for label in value.tags}
    return Plan(tuple(_regions(block, graph.body, (), values)), graph.fingerprint)


def _regions(block: Block, body: Body, address: Any, values: Mapping[str, int]) -> Iterator[Region]:
    made = {index: place for place, op in enumerate(body.ops) for index in op.outputs}
    ends = [0, *(made[values[statement.name]] + 1 for statement in block.statements)]

    def region(stretch: Stretch) -> Region:
        actions = {values[name]: SAVE for name in stretch.kept}
        inner = tuple(map(region, stretch.inner))
        return Region(ends[stretch.start], ends[stretch.stop], actions, inner, body=address)

    yield from map(region, block.regions)
    for statement in block.statements:
        if not statement.blocks:
            continue
        op = body.ops[made[values[statement.name]]]
        # `lax.cond` takes the branch for false first.
        for place, inner in enumerate(reversed(statement.blocks)):
            yield from _regions(inner, op.bodies[place], (*address, (op.index, place)), values)


def kept(fun: Callable[..., Any]) -> Counter:
    """Returns shapes and types of what differentiation keeps besides arguments."""
    return Counter((r.shape, str(r.dtype)) for r in jaxckpt.residuals(fun, W, X).residuals if not r.argument)


@functools.cache
def drawn(number: int) -> tuple[Block, Plan]:
    block = draw(random.Random(number))
    return block, plan_of(block, trace(function(block), W, X))


NUMBERS = range(20)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_random_nested_plan_keeps_and_computes_again_what_checkpoints_by_hand_do(number: int) -> None:
    block, plan = drawn(number)
    planned, by_hand = plan.apply(function(block)), function(block, checkpointed=True)
    # A value that two checkpoints by hand name, one within the other, may be kept twice; a plan's is kept once.
    assert kept(planned) == kept(by_hand) or (kept(planned) < kept(by_hand) and any(map(_named_twice, plan.regions)))
    again, expected = gradient_executions(planned, W, X), gradient_executions(by_hand, W, X)
    assert {name: again[name] for name in COUNTED} == {name: expected[name] for name in COUNTED}
    compare("gradients stay", Differentiated(function(block), (W, X)), planned, (W, X), "walk")


def test_the_random_plans_are_of_all_kinds_and_change_what_is_kept() -> None:
    """Without regions, or without their actions, the programs keep something else."""
    fewer = saved = 0
    regions: list[Region] = []
    for number in NUMBERS:
        block, plan = drawn(number)
        nothing = Plan(tuple(_without_actions(region) for region in plan.regions), plan.fingerprint)
        whole, planned, dropped = (
            kept_bytes(fun, W, X)
            for fun in (function(block), plan.apply(function(block)), nothing.apply(function(block)))
        )
        fewer += planned < whole
        saved += planned > dropped
        regions += plan.regions
    assert fewer >= 0.6 * len(NUMBERS)
    assert saved >= 0.6 * len(NUMBERS)
    assert {len(region.body) for region in regions} == {0, 1, 2}
    assert any(inner.actions for region in regions for inner in region.regions)
    kinds = {statement.kind for number in NUMBERS for statement in drawn(number)[0].statements}
    assert kinds == {*OPERATIONS, "scan", "cond"}


def _named_twice(region: Region, outside: frozenset[int] = frozenset()) -> bool:
    inside = outside | frozenset(region.actions)
    return bool(outside & set(region.actions)) or any(_named_twice(inner, inside) for inner in region.regions)


def _without_actions(region: Region) -> Region:
    return Region(region.start, region.stop, {}, tuple(map(_without_actions, region.regions)), body=region.body)


# ------------------------------------------------------------------------------ programs of the fuzzer, with everything


def _random_regions(rng: random.Random, graph: Graph, body: Body, start: int, stop: int, depth: int) -> list[Region]:
    """Returns regions that cover the operations start..stop of a body, and keep some of the values made there."""
    cuts = sorted({start, stop, *(rng.randint(start, stop) for _ in range(rng.randint(0, 3)))})
    found = []
    for begin, end in itertools.pairwise(cuts):
        made = [index for op in body.ops[begin:end] for index in op.outputs if graph.values[index].addressable]
        actions = {index: SAVE for index in made if rng.random() < 0.3}
        inner = _random_regions(rng, graph, body, begin, end, depth - 1) if depth > 1 else []
        found.append(Region(begin, end, actions, tuple(inner)))
    return found


FUZZ_SEED = 7
FUZZED = [index for index in range(60) if fuzz.kind_at(FUZZ_SEED, index) == "checkpoint"][:10]


@pytest.mark.parametrize("index", FUZZED)
def test_under_a_random_nested_plan_a_program_of_the_fuzzer_keeps_what_crosses_and_what_is_named(index: int) -> None:
    fun, *args = _of_arrays(*fuzz.make(FUZZ_SEED, index).program.load())
    graph = trace(fun, *args)
    regions = _random_regions(random.Random(index), graph, graph.body, 0, len(graph.ops), depth=2)
    planned = Plan(tuple(regions), graph.fingerprint).apply(fun)
    compare("results and gradients stay", Differentiated(fun, tuple(args)), planned, tuple(args), "walk")
    maker = {
        value: number for number, r in enumerate(regions) for op in graph.ops[r.start : r.stop] for value in op.outputs
    }
    crossing = {
        value
        for number, r in enumerate(regions)
        for op in graph.ops[r.start : r.stop]
        for value in _read(op)
        if maker.get(value, number) != number
    }
    named = {value for r in regions for value in r.actions}
    allowed = [graph.values[index] for index in named | crossing]
    shapes = {(value.shape, _part(value.dtype)) for value in allowed}
    found = [r for r in jaxckpt.residuals(planned, *map(jnp.asarray, args)).residuals if not r.argument]
    for residual in found:  # of a loop, all iterations are one array
        assert any((residual.shape[i:], residual.dtype) in shapes for i in range(4)), residual
    assert sum(residual.bytes for residual in found) <= sum(value.kept_bytes for value in allowed)


def _read(op: Any) -> set[int]:
    return {*op.inputs, *(index for body in op.bodies for inner in body.ops for index in _read(inner))}


def test_a_region_reads_its_block_s_part_of_stacked_weights():
    """And waits for the gradients of that part, not for as many of all blocks' weights as there are blocks."""

    def loss(ws, x):
        for number in range(6):
            x = jnp.tanh(x @ ws[number])
        return jnp.sum(x**2)

    ws, x = jax.random.normal(jax.random.key(0), (6, 8, 8)), jnp.ones((16, 8))
    graph = trace(loss, ws, x)
    assert len(graph.body.views) == 12  # a slice and a squeeze each
    ends = [place for place, op in enumerate(graph.ops) if op.primitive == "tanh"]
    regions = tuple(Region(a + 1, b + 1, {}, tied=True) for a, b in zip([-1, *ends], ends))
    planned = Plan(regions, graph.fingerprint).apply(loss)
    text = str(jax.make_jaxpr(jax.grad(planned))(ws, x))
    held = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert held and not any("6,8,8" in line for line in held)
    for got, want in zip(jax.grad(planned)(ws, x), jax.grad(loss)(ws, x)):
        assert jnp.allclose(got, want, rtol=1e-5)
    kept = jaxckpt.residuals(planned, ws, x).residuals
    assert sum(each.bytes for each in kept if not each.argument) <= (7 * 16 * 8 + 6 * 8 * 8) * 4
