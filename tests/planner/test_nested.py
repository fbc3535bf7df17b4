"""What is planned inside of a loop's body: loops in it, and blocks one after the other."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import Plan
from jaxckpt.core.graph import trace
from jaxckpt.core.outline import iterations_around
from jaxckpt.core.regions import Loop
from jaxckpt.core.units import format_bytes
from jaxckpt.planner.chain import Keep
from jaxckpt.planner.frontier import cost_of
from jaxckpt.planner.problems import problem_of
from jaxckpt.planner.scans import InnerRegions
from jaxckpt.schedules import checkpointed
from tests.helpers import assert_trees_close

OUTER, INNER, WIDTH, ROWS = 4, 3, 32, 2048
WS = {
    "up": jax.random.normal(jax.random.key(0), (OUTER, INNER, WIDTH, 4 * WIDTH)) / 8,
    "down": jax.random.normal(jax.random.key(1), (OUTER, INNER, 4 * WIDTH, WIDTH)) / 16,
}
X = jax.random.normal(jax.random.key(2), (ROWS, WIDTH))


def block(x, w):
    return x + jnp.tanh(jnp.sin(x @ w["up"])) @ w["down"]


def scan_of_scans(wrap):
    def outer(x, ws):
        return jax.lax.scan(lambda x, w: (wrap(block)(x, w), None), x, ws)[0], None

    return lambda ws, x: jnp.mean(jax.lax.scan(outer, x, ws)[0] ** 2)


def scan_of_blocks(wrap):
    def outer(x, ws):
        for number in range(INNER):
            x = wrap(block)(x, jax.tree.map(lambda w, number=number: w[number], ws))
        return x, None

    return lambda ws, x: jnp.mean(jax.lax.scan(outer, x, ws)[0] ** 2)


@pytest.mark.compile
@pytest.mark.parametrize("model", [scan_of_scans, scan_of_blocks], ids=lambda model: model.__name__)
def test_a_plan_fits_where_a_checkpoint_around_each_inner_block_does_at_no_more_work(model):
    loss, by_hand = model(lambda block: block), model(jax.checkpoint)
    step = jax.value_and_grad
    peak, plain = (jaxckpt.measure(step(fun), WS, X, target="cpu").peak_bytes for fun in (by_hand, loss))
    plan = jaxckpt.plan(loss, WS, X, budget=peak, target="cpu")
    assert plan.measured_bytes <= peak < 0.7 * plain
    planned, hand = (cost_of(step(fun), (WS, X), "cpu")[0] for fun in (plan.apply(loss), by_hand))
    assert planned <= hand
    assert_trees_close(jax.grad(plan.apply(loss))(WS, X), jax.grad(loss)(WS, X), rtol=1e-4, atol=1e-6)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.describe(trace(loss, WS, X))


@pytest.mark.compile
def test_what_an_inner_loop_keeps_is_chosen_by_the_budget():
    loss = scan_of_scans(lambda block: block)
    problem = problem_of(loss, WS, X, target="cpu")
    plain = jaxckpt.count_flops(jax.value_and_grad(loss), WS, X)
    more, inside = [], []
    for budget in ("85%", "60%", "30%"):
        plan = problem.plan(budget)
        assert plan.measured_bytes <= plan.budget
        more.append(jaxckpt.count_flops(jax.value_and_grad(plan.apply(loss)), WS, X) / plain - 1)
        inside += [loop.body for loop in plan.loops if loop.body]
    assert 0 <= more[0] < 0.02 and more[0] <= more[1] <= more[2] < 0.4
    assert inside and all(len(address) == 1 for address in inside)


def shared(w, x):
    """A scan over four blocks that all iterations run with the same weights, which are larger than the carry."""

    def body(x, _):
        for _ in range(4):
            x = jnp.tanh(jnp.sin(x @ w) @ w)
        return x, None

    return jnp.sum(jax.lax.scan(body, x, None, length=16)[0] ** 2)


def test_what_all_iterations_read_is_not_kept_for_each():
    """JAX keeps what the chain says that it keeps, of every plan of the body, and the weights once."""
    w, x = jnp.eye(128) / 2, jnp.ones((4, 128))
    problem = problem_of(shared, w, x, target="cpu")
    chain = problem.model.chain
    candidates = [chain.segment(s, s + 1).candidates for s in range(chain.length)]
    (stage,) = (s for s, each in enumerate(candidates) if any(isinstance(one.how, InnerRegions) for one in each))
    for number in (n for n, each in enumerate(candidates[stage]) if isinstance(each.how, InnerRegions)):
        others = [Keep(s, s + 1, 0) for s in range(chain.length) if s != stage]
        solution = tuple(sorted([*others, Keep(stage, stage + 1, number)], key=lambda item: item.start))
        kept = jaxckpt.residuals(problem.model.plan(solution).apply(shared), w, x).residuals
        assert sum(each.bytes for each in kept if not each.argument) <= 1.3 * candidates[stage][number].kept + w.nbytes


SIZE, CHANNELS = 48, 16
PAIRS = jax.random.normal(jax.random.key(4), (SIZE, SIZE, CHANNELS))
PAIR_WS = {
    name: jax.random.normal(jax.random.key(number), (6, CHANNELS, width)) / 8
    for number, (name, width) in enumerate(
        {"q": 16, "k": 16, "v": 16, "a": 16, "b": 16, "up": 256, "down": 256}.items()
    )
}


def attend(w, z):
    q, k = ((z @ w[name]).reshape(SIZE, SIZE, 4, 4) for name in ("q", "k"))
    scores = jax.nn.softmax(jnp.einsum("iqhd,ikhd->ihqk", q, k))
    return jnp.einsum("ihqk,ikc->iqc", scores, z @ w["v"])


def multiply(w, z):
    return jnp.einsum("ikc,jkc->ijc", jax.nn.sigmoid(z @ w["a"]), jnp.tanh(z @ w["b"])) / SIZE


def widen(w, z):
    return jax.nn.gelu(z @ w["up"]) @ w["down"].T / 4


def pairs(each=lambda body: body, part=lambda part: part):
    """A scan whose body has three unlike parts, each of which needs far more for its backward pass than the carry."""

    def body(z, w):
        for fun in (attend, multiply, widen):
            z = z + part(fun)(w, z)
        return z, None

    return lambda ws, z: jnp.mean(jax.lax.scan(each(body), z, ws)[0] ** 2)


@pytest.mark.cuda
@pytest.mark.parametrize("again", [False, True], ids=["parts", "parts of iterations that run again"])
def test_a_plan_fits_where_checkpoints_around_the_parts_of_a_body_do_at_hardly_more_work(again):
    in_scan = functools.partial(jax.checkpoint, prevent_cse=False)
    by_hand = pairs(in_scan, jax.checkpoint) if again else pairs(part=in_scan)
    step, args = jax.value_and_grad, (PAIR_WS, PAIRS)
    measure = functools.partial(jaxckpt.measure, target="cuda:h100", generate_code=False)
    peak, each = (measure(step(fun), *args).peak_bytes for fun in (by_hand, pairs(in_scan)))
    plan = jaxckpt.plan(pairs(), *args, budget=peak, target="cuda:h100")
    most = 0.8 if jax.__version_info__ < (0, 11) else 1.0  # of later ones, by hand too, the parts do not need less
    assert plan.measured_bytes <= peak and (not again or peak < most * each)
    planned, hand = (cost_of(step(fun), args, "cuda:h100") for fun in (plan.apply(pairs()), by_hand))
    assert planned[0] <= 1.05 * hand[0] and planned[1] <= (1.02 if again else 1.0) * hand[1]
    kept = jaxckpt.residuals(plan.apply(pairs()), *args).residuals
    most = sum(each.bytes for each in kept if not each.argument)
    assert most <= (1.01 if again else 3.01) * 7 * PAIRS.nbytes  # the carries; and what goes into each part
    assert_trees_close(jax.grad(plan.apply(pairs()))(*args), jax.grad(pairs())(*args), rtol=1e-3, atol=1e-4)
    assert Plan.from_json(plan.to_json()) == plan and plan.describe(trace(pairs(), *args))


@pytest.mark.cuda
def test_what_an_iteration_keeps_that_runs_again_is_told_once():
    in_scan = functools.partial(jax.checkpoint, prevent_cse=False)
    by_hand = jaxckpt.measure(
        jax.value_and_grad(pairs(in_scan, jax.checkpoint)), PAIR_WS, PAIRS, target="cuda:h100", generate_code=False
    )
    plan = jaxckpt.plan(pairs(), PAIR_WS, PAIRS, budget=by_hand.peak_bytes, target="cuda:h100")
    inside = [region for region in plan.regions if region.body]
    assert len(inside) > 1 and any(not loop.body for loop in plan.loops)
    kept = [region for region in inside if region.actions]
    assert kept
    values = trace(pairs(), PAIR_WS, PAIRS).values
    for region in kept:
        size = format_bytes(sum(values[index].bytes for index in region.actions))
        assert f"({size} of an iteration that runs again, from " in str(plan)


def test_iterations_around_a_body_are_those_of_planned_loops_that_run_again():
    graph = trace(pairs(), PAIR_WS, PAIRS)
    (scan,) = (place for place, op in enumerate(graph.ops) if op.primitive == "scan")
    inside = ((graph.ops[scan].index, 0),)
    again, left = (Loop(scan, checkpointed(6, (), {}, remat=remat)) for remat in (True, False))
    assert iterations_around(inside, [again], graph) == 6
    assert iterations_around(inside, [left], graph) == iterations_around(inside, [], graph) == 1
    assert iterations_around((), [again], graph) == 1


SHOWN = {
    "a column of the carry": lambda c, d, w: c[:, 0],
    "a row of the carry": lambda c, d, w: c[0],
    "a row of the weights": lambda c, d, w: w[0],
    "a row of a row": lambda c, d, w: c[:2][0],
    "two of them, and one computed": lambda c, d, w: (c[0], w[0], d.sum()),
}


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_a_body_inside_may_return_what_it_only_shows(shown, target):
    def inner(c, w):
        d = jnp.sin(c @ w["up"]) @ w["down"] + c
        return d, shown(c, d, w["up"])

    def outer(c, ws):
        c = jax.lax.cond(jnp.sum(c) > 0, lambda c: (jnp.tanh(c @ c.T @ c / ROWS), c[0]), lambda c: (c, c[1]), c)[0]
        c, ys = jax.lax.scan(inner, c, ws)
        return jnp.tanh(c), ys

    def loss(ws, x):
        c, ys = jax.lax.scan(outer, x, ws)
        return jnp.mean(c**2) + sum(jnp.mean(y) for y in jax.tree.leaves(ys))

    found = jaxckpt.plan(loss, WS, X, budget="70%", target=target)
    assert found.measured_bytes <= found.budget
    assert_trees_close(
        jax.jit(jax.grad(found.apply(loss)))(WS, X), jax.jit(jax.grad(loss))(WS, X), rtol=1e-4, atol=1e-6
    )
