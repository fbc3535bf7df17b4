"""The floor is found: where a person gets with a checkpoint around each block, a plan gets too, at no more work."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxckpt
from jaxckpt import InfeasibleBudgetError
from jaxckpt.core.graph import trace
from jaxckpt.planner import stages
from jaxckpt.planner.chain import Keep
from jaxckpt.planner.frontier import cost_of
from jaxckpt.planner.inside import whole
from jaxckpt.planner.model import BLOCK_PRESETS, LeanLoops
from jaxckpt.planner.problems import Problem, problem_of
from tests.helpers import chain_in_segments

WIDTH, ROWS, BLOCKS = 64, 2048, 6
BY_HAND = {"each": 1, "every two": 2}


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def residual(x, w):
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def unrolled(x, w):
    h = norm(x) @ w["up"]
    for _ in range(3):
        h = jnp.sin(h) * 1.1 + jnp.tanh(h)
    return x + h @ w["down"]


def cheap_loop(x, w):
    h = lax.fori_loop(0, 5, lambda i, h: jnp.sin(h) * 1.1 + jnp.tanh(h), norm(x) @ w["up"])
    return x + h @ w["down"]


def branches(x, w):
    x = lax.cond(w["flag"] > 0, lambda x: jnp.tanh(x @ w["up"]) @ w["down"], lambda x: jnp.sin(x), x) + x
    noise = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, lax.stop_gradient(x)))[1]
    return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w["square"]) + x, x + 0.1 * noise * x)


def head(x, p):
    logits = jax.nn.log_softmax(norm(x) @ p["head"])
    return -jnp.take_along_axis(logits, p["labels"][:, None], -1).mean()


RUNS = {"residual": residual, "unrolled": unrolled, "a loop": cheap_loop, "branches": branches}


def loss_of(run: Callable, wrap: Callable | None = None, every: int = 1) -> Callable:
    """Returns a loss whose blocks are checkpointed in groups, as people do it."""

    def several(x: Any, weights: Any) -> Any:
        for w in weights:
            x = run(x, w)
        return x

    grouped = several if wrap is None else wrap(several)

    def loss(blocks: Any, labels: Any, table: Any, x: Any) -> Any:
        for at in range(0, len(blocks), every):
            x = grouped(x, blocks[at : at + every])
        return head(x, {"head": table, "labels": labels})

    return loss


def arguments() -> tuple[Any, ...]:
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    w = {"up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH), "square": shape(WIDTH, WIDTH), "flag": shape()}
    labels = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    return [w] * BLOCKS, labels, shape(WIDTH, 256), shape(ROWS, WIDTH)


def step(fun: Callable) -> Callable:
    return jax.value_and_grad(fun, argnums=(0, 2))


@pytest.fixture(scope="module", params=RUNS)
def problem(request: pytest.FixtureRequest) -> tuple[Callable, Problem]:
    run = RUNS[request.param]
    return run, problem_of(loss_of(run), *arguments(), target="cpu", step=step)


def cost_by_hand(run: Callable, every: int) -> tuple[int, int, float]:
    """Returns (compiled peak, FLOPs, seconds) of checkpoints around the blocks."""
    made = step(loss_of(run, jax.checkpoint, every))
    peak = jaxckpt.measure(made, *arguments(), target="cpu", generate_code=False).peak_bytes
    return peak, *cost_of(made, arguments(), "cpu")


@pytest.mark.parametrize("every", BY_HAND.values(), ids=BY_HAND)
def test_a_plan_fits_where_a_person_gets_at_no_more_work(problem, every):
    run, analysed = problem
    peak, flops, _ = cost_by_hand(run, every)
    found = analysed.plan(peak)
    planned, _ = cost_of(step(found.apply(loss_of(run))), arguments(), "cpu")
    assert found.measured_bytes <= peak and planned <= flops


@pytest.mark.parametrize("preset", BLOCK_PRESETS)
def test_what_a_preset_keeps_of_each_block_is_one_of_the_ways_that_plans_are_held_against(preset):
    analysed = problem_of(loss_of(residual), *arguments(), target="cpu", step=step)
    made = [analysed.model.plan_by_hand(solution) for solution in analysed.by_hand]
    kept = lambda fun: sum(each.bytes for each in jaxckpt.residuals(fun, *arguments()).residuals if not each.argument)
    wanted = kept(loss_of(residual, functools.partial(jaxckpt.checkpoint, policy=preset)))
    ways = {kept(plan.apply(loss_of(residual))) for plan in made}
    assert wanted in ways and len(ways) >= 4


@pytest.mark.parametrize(
    ("run", "preset", "target"),
    [
        (residual, "dots", "cpu"),
        (residual, "hybrid", "cpu"),
        (residual, "nothing", "cuda:h100"),
        (branches, "dots_saveable", "cuda:h100"),
        pytest.param(
            branches,
            "dots",
            "cuda:h100",
            marks=pytest.mark.xfail(
                strict=True,
                reason="scans in blocks wait, so the preset takes 38.1 MB instead of 68.0: at that peak the plan takes "
                "13% less time and 2.7% more FLOPs",
            ),
        ),
        (branches, "everything", "cuda:h100"),
    ],
)
def test_a_plan_fits_where_a_preset_gets_at_no_more_work(run, preset, target):
    """What a preset keeps inside of branches, a plan can keep too; `dots_saveable` is JAX's own."""
    if preset == "dots_saveable":
        wrap = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    else:
        wrap = functools.partial(jaxckpt.checkpoint, policy=preset)
    wrapped, loss = loss_of(run, wrap), loss_of(run)
    peak = jaxckpt.measure(step(wrapped), *arguments(), target=target, generate_code=False).peak_bytes
    found = jaxckpt.plan(loss, *arguments(), budget=peak, target=target, step=step)
    flops, planned = (cost_of(step(fun), arguments(), target) for fun in (wrapped, found.apply(loss)))
    plain = cost_of(step(loss), arguments(), target)
    assert found.measured_bytes <= peak
    assert all(ours <= theirs + 1e-3 * whole for ours, theirs, whole in zip(planned, flops, plain))


@pytest.mark.parametrize("every", [2, 3, 4])
def test_in_a_small_program_what_the_chain_misjudges_is_tried(every):
    """The compiler's peaks of a short chain come in steps, which its bytes do not follow: a plan for the peak of what a
    person writes does less work, and one for that plan's own peak exists.
    """
    by_hand, loss = chain_in_segments(jax.checkpoint, every), chain_in_segments(lambda block: block)
    args = [jnp.eye(64) * 0.9] * 8, jnp.ones((1024, 64))
    peak = jaxckpt.measure(jax.value_and_grad(by_hand), *args, target="cpu").peak_bytes
    found = jaxckpt.plan(loss, *args, budget=peak, target="cpu")
    flops, planned = (jaxckpt.count_flops(jax.value_and_grad(fun), *args) for fun in (by_hand, found.apply(loss)))
    assert planned < flops
    again = jaxckpt.plan(loss, *args, budget=found.measured_bytes, target="cpu")
    assert again.measured_bytes <= found.measured_bytes


@pytest.mark.parametrize(("size", "share"), [(60, "60%"), (400, "30%")])
def test_a_long_run_of_cheap_operations_is_cut(size, share):
    """XLA's CPU compiler does not fuse it, so what its backward pass reads lies in memory."""

    def loss(x):
        for _ in range(size // 2):
            x = jnp.tanh(x) * 1.01
        return jnp.sum(x)

    x = jnp.ones((256, 64))
    found = jaxckpt.plan(loss, x, budget=share, target="cpu")
    assert found.measured_bytes <= found.budget < found.unplanned_bytes
    np.testing.assert_allclose(jax.grad(found.apply(loss))(x), jax.grad(loss)(x), rtol=1e-5)


def test_what_is_said_to_be_the_least_fits_and_no_plan_is_below_it(problem):
    _, analysed = problem
    peaks = [analysed.plan(budget).measured_bytes for budget in ("90%", "75%")]
    with pytest.raises(InfeasibleBudgetError) as caught:
        analysed.plan(analysed.argument_bytes + 4096)
    least = caught.value.least_bytes
    assert least <= min(peaks)
    assert analysed.plan(least).measured_bytes <= least


def test_more_memory_never_costs_more(problem):
    _, analysed = problem
    budgets = [f"{share}%" for share in (100, 50, 95, 60, 85, 70, 35)]
    found = jaxckpt.planner.frontier.sweep(analysed, budgets).points
    points = [point for point in sorted(found, key=lambda point: point.budget_bytes) if point.plan is not None]
    flops = [point.flops for point in points]
    assert len(points) >= 3 and all(more <= less * 1.001 for less, more in itertools.pairwise(flops))
    assert flops[-1] < flops[0], "else nothing was planned"


def test_the_blocks_of_a_model_are_found_and_lie_where_least_crosses():
    graph = trace(loss_of(residual), *arguments())
    active = whole(graph, [v.index for v in graph.values if v.kind == "argument"]).active
    blocks = stages.repeats(graph)
    assert len(blocks) == BLOCKS + 1
    last = stages.last_uses(graph)
    texts = {stages.digest(graph, stages.stretch(graph, a, b, last), active, {}) for a, b in itertools.pairwise(blocks)}
    assert len(texts) <= 2, "all are equal, but for what the last one hands on"
    live = stages.crossing(graph)
    assert all(live[place] == ROWS * WIDTH * 4 for place in blocks[1:-1]), "the residual stream alone"


@pytest.mark.parametrize("fun", [lambda x: jnp.sum(jnp.sin(x) ** 2), lambda x: jnp.sum(jnp.tanh(x @ x) @ x.T)])
def test_a_function_without_repeats_has_no_blocks(fun):
    graph = trace(fun, jnp.ones((4, 4)))
    assert stages.repeats(graph) == []


def test_blocks_that_read_stacked_weights_are_equal():
    def stacked(ws, x):
        for i in range(len(ws)):
            x = x + jnp.tanh(jax.nn.gelu(x @ ws[i]) @ ws[i].T)
        return jnp.mean(x**2)

    blocks = stages.repeats(trace(stacked, jnp.ones((6, 8, 32)), jnp.ones((16, 8))))
    assert len(blocks) == 7 and len({later - place for place, later in itertools.pairwise(blocks)}) == 1


def two_kinds(ws, us, x, y):
    """An encoder, and a decoder all of whose blocks read what it returns."""
    for w in ws:
        x = x + jnp.tanh(jax.nn.gelu(x @ w) @ w.T)
    for u in us:
        y = y + jnp.tanh(jax.nn.softmax(y @ u) @ u.T)
        y = y + jax.nn.softmax(y @ x.T / 10) @ x
    return jnp.mean(y**2)


def test_each_kind_of_blocks_is_a_series():
    args = jnp.ones((4, 8, 32)), jnp.ones((5, 8, 16)), jnp.ones((16, 8)), jnp.ones((12, 8))
    graph = trace(two_kinds, *args)
    first, second = stages.series(graph)
    assert (len(first), len(second)) == (5, 6) and first[-1] <= second[0]
    assert stages.repeats(graph) == second, "that with the most operations"
    for blocks in (first, second):
        assert len({later - place for place, later in itertools.pairwise(blocks)}) == 1
    alone = trace(lambda us, x, y: two_kinds([], us, x, y), *args[1:])
    assert stages.series(alone) == [stages.repeats(alone)]


def test_all_kinds_of_blocks_are_checkpointed_as_people_do():
    """At the peak of a checkpoint around each block of the encoder and of the decoder, a plan computes no more."""
    rows, width = 1024, 64

    def by_hand(wrap):
        encode = wrap(lambda w, x: x + jnp.tanh(jax.nn.gelu(x @ w) @ w.T))

        def decode(u, x, y):
            y = y + jnp.tanh(jax.nn.softmax(y @ u) @ u.T)
            return y + jax.nn.softmax(y @ x.T / 10) @ x

        decode = wrap(decode)

        def loss(ws, us, x, y):
            for w in ws:
                x = encode(w, x)
            for u in us:
                y = decode(u, x, y)
            return jnp.mean(y**2)

        return loss

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    args = [shape(width, 4 * width)] * 5, [shape(width, width)] * 5, shape(rows, width), shape(rows, width)
    plain, checkpointed = by_hand(lambda block: block), by_hand(jax.checkpoint)
    budget = jaxckpt.measure(jax.value_and_grad(checkpointed), *args, target="cpu").peak_bytes
    analysed = problem_of(plain, *args, target="cpu")
    assert len(analysed.model.series) == 2
    plan = analysed.plan(budget)
    assert plan.regions and plan.measured_bytes <= budget < analysed.unplanned.peak_bytes
    flops = [jaxckpt.count_flops(jax.value_and_grad(fun), *args) for fun in (plan.apply(plain), checkpointed, plain)]
    assert flops[2] < flops[0] <= flops[1] * 1.001


def test_what_repeats_in_a_small_part_of_a_function_is_not_its_blocks():
    def with_tail(operations):
        def fun(*args):
            tail = loss_of(residual)(*args)
            for i in range(operations):  # of which no three stretches in a row are equal (Thue and Morse)
                tail = (jnp.sin, jnp.cos)[i.bit_count() % 2](tail)
            return tail

        return stages.repeats(trace(fun, *arguments()))

    assert len(with_tail(0)) == len(with_tail(20)) == BLOCKS + 1 and with_tail(1000) == []


def test_a_region_may_run_its_loops_one_iteration_at_a_time():
    """All iterations that run again live at once without it."""
    analysed = problem_of(loss_of(cheap_loop), *arguments(), target="cpu", step=step)
    chain = analysed.model.chain
    lean = [
        each.how
        for segment in chain.segments.values()
        for each in segment.candidates
        if isinstance(each.how, LeanLoops)
    ]
    assert lean
    flat = (each for each in analysed.model.by_hand() if all(isinstance(item, Keep) for item in each))
    best = min(flat, key=lambda s: functools.reduce(lambda a, i: a + chain.candidate(i).work, s, 0))
    plan = analysed.model.plan_by_hand(best)
    assert len(plan.loops) == BLOCKS
    jaxckpt.Plan.from_json(plan.to_json()).check(analysed.graph)
    peak, *_ = cost_by_hand(cheap_loop, 1)
    made = jaxckpt.measure(step(plan.apply(loss_of(cheap_loop))), *arguments(), target="cpu", generate_code=False)
    assert made.peak_bytes < 0.9 * peak
