"""What a barrier in front of a region costs: the chain says what the trace of the step says."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt.core.graph import trace
from jaxckpt.planner import barriers
from jaxckpt.planner.chain import Keep, cost
from jaxckpt.planner.costs import Time
from jaxckpt.planner.problems import problem_of
from tests.helpers import assert_trees_close

X = jax.ShapeDtypeStruct((16, 32, 32, 64), jnp.float32)
W = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)


def norm(x):
    x = x - x.mean((0, 1, 2))
    return x * jax.lax.rsqrt(jnp.square(x).mean((0, 1, 2)) + 1e-5)


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def last(ws, x):
    """Residual blocks that end with the activation, as of ResNet."""
    for first, second in ws:
        x = jax.nn.relu(x + norm(conv(jax.nn.relu(norm(conv(x, first))), second)))
    return jnp.mean(jnp.square(x))


def first(ws, x):
    """Residual blocks that begin with the norm and the activation."""
    for one, other in ws:
        x = x + conv(jax.nn.relu(norm(conv(jax.nn.relu(norm(x)), one))), other)
    return jnp.mean(jnp.square(x))


def matmuls(ws, x):
    """Blocks in which a matmul reads what goes in, and what comes back."""
    for one, other in ws:
        x = jnp.tanh(x @ one) @ other
    return jnp.mean(jnp.square(x))


def analysed(fun, layers=4):
    if fun is matmuls:
        w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        return problem_of(fun, [(w, w)] * layers, jax.ShapeDtypeStruct((4096, 256), jnp.float32), target="cuda:h100")
    return problem_of(fun, [(W, W)] * layers, X, target="cuda:h100")


def solutions(chain):
    """Yields solutions of few and of many regions, which keep little and much."""
    for width in (1, 2):
        for place in (0, -1):
            found, start = [], 0
            while start < chain.length:
                stop = min(start + width, chain.length - 1) if start < chain.length - 1 else chain.length
                if not chain.segment(start, stop).candidates:
                    stop = start + 1
                candidates = chain.segment(start, stop).candidates
                found.append(Keep(start, stop, place % len(candidates)))
                start = stop
            yield tuple(found)


def errors(problem, chain):
    """Returns by which part of the step the chain is off for solutions."""
    step = problem.plain.time.effort
    return [(problem.effort(each) - cost(chain, each).time) / step for each in solutions(chain)]


@pytest.mark.parametrize("fun", [last, first])
def test_the_chain_knows_what_barriers_make_the_compiler_write(fun, monkeypatch):
    problem = analysed(fun)
    known = errors(problem, problem.model.chain)
    monkeypatch.setattr(barriers.Barriers, "time", lambda *_: Time())
    unknown = errors(problem, analysed(fun).model.chain)
    assert max(map(abs, known)) < 0.01 < max(unknown)
    assert all(abs(one) < 0.65 * abs(other) for one, other in zip(known, unknown)), (known, unknown)


def test_a_barrier_adds_nothing_where_matmuls_read_what_crosses_it(monkeypatch):
    chain = analysed(matmuls).model.chain
    monkeypatch.setattr(barriers.Barriers, "time", lambda *_: Time())
    assert chain.segments == analysed(matmuls).model.chain.segments


def test_a_value_is_written_once_and_each_region_writes_its_part_of_the_cotangent():
    def fun(x, w):
        a = jnp.tanh(x)
        b = jnp.sin(a) @ w
        return jnp.sum(jnp.cos(a) * b)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    graph = trace(fun, x, x)
    made = {op.primitive: (place, op.outputs[0]) for place, op in enumerate(graph.ops)}
    (_, a), (dot, _) = made["tanh"], made["dot_general"]
    places = [0, 1, dot + 1, len(graph.ops)]  # a is made in stage 0, and used in the other two
    second, third = Time(2.0, 2.0), Time(3.0, 3.0)
    found = barriers.Barriers(graph, places, {a: Time(1.0, 1.0)}.get)
    assert found.time(1, 2, [a], {a: second}, lambda stage: ()) == Time(3.0, 3.0)
    assert found.time(2, 3, [a], {a: third}, lambda stage: ()) == third
    assert found.time(1, 3, [a], {a: second}, lambda stage: ()) == Time(3.0, 3.0)
    # Stage 0 reads the cotangent whole: without barriers the sum is written as well, and its parts are not.
    assert found.time(1, 3, [a], {a: second}, lambda stage: [a]) == Time(1.0, 1.0)
    assert found.time(1, 2, [a], {a: second}, lambda stage: [a]) == Time(3.0, 3.0)
    assert found.time(1, 3, [a], {}, lambda stage: ()) == Time(1.0, 1.0)


def tagged_early(ws, x):
    """All weights are tagged before the first layer."""
    return tanh_layers([jaxckpt.tag(w, "weight") for w in ws], x)


def tagged_after(ws, x):
    """The weight of each layer is tagged while the layer before it is the last that was computed."""
    for w in ws:
        x = jnp.tanh(x @ jaxckpt.tag(w, "weight"))
    return jnp.sum(x)


def tagged_later(ws, x):
    """A value is tagged far behind the operation that makes it."""
    first = jnp.tanh(x @ ws[0])
    x = jnp.tanh(first @ ws[1])
    first = jaxckpt.tag(first, "first")
    for w in ws[2:]:
        x = jnp.tanh(x @ w)
    return jnp.sum(x * first)


def untagged_later(ws, x):
    first = jnp.tanh(x @ ws[0])
    x = first
    for w in ws[1:]:
        x = jnp.tanh(x @ w)
    return jnp.sum(x * first)


def tanh_layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


@pytest.mark.parametrize(
    ("tagged", "plain"),
    [(tagged_early, tanh_layers), (tagged_after, tanh_layers), (tagged_later, untagged_later)],
)
def test_a_tag_far_from_what_makes_or_reads_its_value_changes_no_plan(tagged, plain):
    ws = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6
    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    found, expected = (problem_of(fun, ws, x, target="cpu").model.chain for fun in (tagged, plain))
    assert found.segments == expected.segments
    plans = [jaxckpt.plan(fun, ws, x, budget="90%", target="cpu") for fun in (tagged, plain)]
    assert plans[0].measured_bytes == plans[1].measured_bytes < plans[0].unplanned_bytes
    assert plans[0].report.seconds == plans[1].report.seconds


@pytest.mark.parametrize("read", [True, False])
def test_a_tag_that_only_results_read_or_nothing_is_planned_around(read):
    def fun(ws, x):
        y = tanh_layers(ws, x)
        named = jaxckpt.tag(ws[0], "weight")
        return y, named if read else y

    ws = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6
    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    step = functools.partial(jax.value_and_grad, has_aux=True)
    plan = jaxckpt.plan(fun, ws, x, budget="90%", target="cpu", step=step)
    assert plan.measured_bytes < plan.unplanned_bytes


@pytest.mark.parametrize("keys", ["folded in", "split", "typed"])
def test_random_numbers_are_drawn_where_they_are_used(keys):
    """XLA for the CPU draws those of all blocks at first, where their keys wait for nothing. A person puts each block's
    key behind a barrier with what goes into the block.
    """

    def block(x, w, key):
        h = jax.nn.relu(x @ w[0])
        return x + jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0) @ w[1]

    def dropout(wrap, barrier, ws, x, key):
        own = jax.random.split(key, len(ws)) if keys == "split" else None
        for place, w in enumerate(ws):
            k = jax.random.fold_in(key, place) if own is None else own[place]
            if barrier:
                x, k = jax.lax.optimization_barrier((x, k))
            x = wrap(block)(x, w, k)
        return jnp.mean(x**2)

    key = jax.random.key(0) if keys == "typed" else jax.random.PRNGKey(0)
    wide, narrow = jax.random.split(jax.random.key(1))
    w = jax.random.normal(wide, (64, 256)) / 8, jax.random.normal(narrow, (256, 64)) / 16
    args = [w] * 6, jax.random.normal(narrow, (1024, 64)), key
    plain = functools.partial(dropout, lambda f: f, False)
    by_hand = {
        barrier: jaxckpt.measure(
            jax.value_and_grad(functools.partial(dropout, jax.checkpoint, barrier)),
            *args,
            target="cpu",
            generate_code=False,
        ).peak_bytes
        for barrier in (True, False)
    }
    assert by_hand[False] > 1.5 * by_hand[True], "else the test asks nothing"
    found = jaxckpt.plan(plain, *args, budget=int(1.02 * by_hand[True]), target="cpu")
    assert found.measured_bytes <= found.budget and found.regions
    assert_trees_close(jax.jit(jax.grad(found.apply(plain)))(*args), jax.jit(jax.grad(plain))(*args))
