"""Plans with stretches in tiles: below what the dearest stretch needs at once."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import InfeasibleBudgetError, Plan, PlanMismatchError
from jaxckpt.core.graph import trace
from jaxckpt.core.plan import _digest
from jaxckpt.core.regions import TiledStretch
from jaxckpt.core.tiling.stretches import tiled
from jaxckpt.planner import model, refusal
from jaxckpt.planner.problems import problem_of

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("shared_answers")]

F = jnp.float32
WORDS, WIDTH, TOKENS, BATCH = 4096, 64, 64, 8


def language(p, x, y):
    """Two MLP blocks, causal attention, and a head whose logits are most of what is needed at once."""
    h = p["emb"][x]
    for block in p["blocks"]:
        h = h + jax.nn.gelu(h @ block["up"]) @ block["down"]
        scores = jnp.einsum("btd,bsd->bts", h @ block["q"], h)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e30)
        h = h + jax.nn.softmax(scores) @ h
    logits = h @ p["emb"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1))


def arguments(make=jax.ShapeDtypeStruct):
    block = {"up": make((WIDTH, 2 * WIDTH), F), "down": make((2 * WIDTH, WIDTH), F), "q": make((WIDTH, WIDTH), F)}
    tokens = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)
    return {"emb": make((WORDS, WIDTH), F), "blocks": [block, block]}, tokens, tokens


def real(key=0):
    keys = iter(jax.random.split(jax.random.key(key), 20))
    params, x, y = arguments(lambda shape, dtype: jax.random.normal(next(keys), shape, dtype) * 0.1)
    return params, *(jax.random.randint(next(keys), t.shape, 0, WORDS) for t in (x, y))


def same(fun, other, args):
    one, two = (jax.jit(jax.value_and_grad(each))(*args) for each in (fun, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), one, two)


@pytest.fixture(scope="module")
def problem():
    return problem_of(language, *arguments(), target="cuda:h100", tile=True)


@pytest.fixture(scope="module")
def least():
    with pytest.raises(InfeasibleBudgetError) as caught:
        jaxckpt.plan(language, *arguments(), target="cuda:h100", budget="20%")
    return caught.value.least_bytes


@pytest.fixture(scope="module")
def half(problem, least):
    """A plan for half of what the leanest plan without tiles needs besides the arguments."""
    assert problem.unplanned
    return problem.plan(problem.argument_bytes + (least - problem.argument_bytes) // 2)


def test_a_budget_below_every_plan_without_tiles_has_one_with_tiles(problem, least, half):
    assert half.tiles and half.measured_bytes <= half.budget < 0.8 * least
    step = jax.value_and_grad(half.apply(language))
    report = jaxckpt.measure(step, *arguments(), target="cuda:h100", generate_code=False)
    assert report.peak_bytes == half.measured_bytes
    assert half.unplanned_bytes == problem.unplanned.peak_bytes
    same(language, half.apply(language), real())


def test_stretches_beside_the_tiles_are_not_analysed_again(problem, half, monkeypatch):
    analysed = []
    look = model.candidates_of
    monkeypatch.setattr(model, "candidates_of", lambda *args, **kw: analysed.append(args) or look(*args, **kw))
    tiles = (dataclasses.replace(half.tiles[0], tiles=2),)
    made, again = problem.tiled._make(tiles), len(analysed)
    alone = problem_of(tiled(language, tiles), *arguments(), target="cuda:h100")
    assert len(analysed) - again == alone.model.distinct > 2 * again
    assert made.model.chain == alone.model.chain


def test_a_frontier_has_plans_with_tiles_too(half, least):
    budgets = half.budget, int(1.1 * least)
    found = jaxckpt.frontier(language, *arguments(), budgets=budgets, target="cuda:h100", tile=True)
    tiled, whole = (point.plan for point in found.points)
    assert tiled.tiles and tiled.measured_bytes <= half.budget
    assert whole.overhead <= tiled.overhead
    (point,) = jaxckpt.frontier(language, *arguments(), budgets=budgets[:1], target="cuda:h100").points
    assert point.plan is None and point.why


def test_the_head_costs_hardly_a_flop(problem, half):
    flops = lambda fun: trace(jax.value_and_grad(fun), *arguments()).flops
    assert half.report.flops == pytest.approx(flops(half.apply(language)), rel=1e-6)
    whole = dataclasses.replace(half, regions=(), loops=())
    assert flops(whole.apply(language)) < 1.01 * flops(language)
    head = max(half.tiles, key=lambda tile: tile.stop)
    assert head.stop == len(problem.graph.ops) and head.tiles > 1


def test_a_head_that_stands_out_is_tiled_alone(problem):
    """At a budget that asks for tiles, and leaves room for what the blocks keep: no block is tiled, and a person who
    tiles the head by hand and plans the rest for the same bytes computes no less.
    """
    plan = problem.plan("40%")
    (head,) = plan.tiles
    assert head.stop == len(problem.graph.ops) and plan.measured_bytes <= plan.budget

    def by_hand(p, x, y):
        h = p["emb"][x]
        for block in p["blocks"]:
            h = h + jax.nn.gelu(h @ block["up"]) @ block["down"]
            scores = jnp.einsum("btd,bsd->bts", h @ block["q"], h)
            h = h + jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e30)) @ h
        loss = lambda h, y: -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(h @ p["emb"].T), y[..., None], -1))
        return jaxckpt.tile(loss, in_axes=0, tiles=head.tiles)(h, y) / y.size

    same(language, by_hand, real())
    person = jaxckpt.plan(by_hand, *arguments(), target="cuda:h100", budget=plan.measured_bytes)
    flops = lambda fun: trace(jax.value_and_grad(fun), *arguments()).flops
    assert flops(plan.apply(language)) <= 1.001 * flops(person.apply(by_hand))


def test_it_is_saved_shown_and_held_against_the_function(half, tmp_path):
    half.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == half and loaded.tiles == half.tiles and hash(loaded) == hash(half)
    tile = half.tiles[0]
    assert f"ops {tile.start}..{tile.stop} in {tile.tiles} tiles" in str(half)
    assert f"ops {tile.start}..{tile.stop} in {tile.tiles} tiles along axis" in half.describe(
        trace(language, *arguments())
    )
    same(language, loaded.apply(language), real(1))
    other = [jax.ShapeDtypeStruct((1, 8), jnp.int32)] * 2
    with pytest.raises(PlanMismatchError, match="made for another function"):
        jax.eval_shape(half.apply(language), arguments()[0], *other)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"stop": 10_000}, "operations to 10000"),
        ({"value": 0}, "do not read"),
        ({"axis": 9}, "axis 9"),
        ({"tiles": 10_000}, "10000 tiles"),
        ({"parts": 7}, "tiles in 7 parts"),
        ({"start": 0}, "cannot be tiled|do not read"),
    ],
)
def test_tiles_that_are_not_of_the_function_are_refused(half, change, what):
    wrong = dataclasses.replace(half, tiles=(dataclasses.replace(half.tiles[0], **change),), regions=(), report=None)
    with pytest.raises(PlanMismatchError, match=what):
        jax.eval_shape(wrong.apply(language), *arguments())


@pytest.mark.parametrize(
    "tiles",
    [
        [{"start": 3, "stop": 3}],
        [{"start": 0, "stop": 2, "tiles": 0}],
        [{"start": 0, "stop": 2, "parts": 0}],
        [7],
        None,
    ],
)
def test_tiles_in_a_file_that_are_none_are_refused(half, tiles):
    raw = json.loads(half.to_json())
    whole = {"value": 1, "axis": 0, "tiles": 2}
    raw["tiles"] = tiles if tiles is None else [{**whole, **each} if isinstance(each, dict) else each for each in tiles]
    raw.pop("digest")
    with pytest.raises(PlanMismatchError):
        Plan.from_json(json.dumps({**raw, "digest": _digest(raw)}))
    assert TiledStretch(0, 1, **whole).tiles == 2


def test_the_tiles_of_a_later_round_are_of_the_function_with_the_earlier_ones():
    """The tiled function has one constant where the function has two, so its values have other numbers."""
    table = jnp.linspace(0.5, 1.5, 32).reshape(8, 4)
    scaled = jax.jit(lambda x: x * table)

    def fun(w, x):
        return jnp.sum(jnp.tanh(scaled(jnp.tanh(scaled(x) @ w)) @ w) ** 2)

    args = jnp.ones((4, 4)) * 0.3, jnp.linspace(-1, 1, 32).reshape(8, 4)
    graph = trace(fun, *args)
    stop = len(graph.ops)
    last = next(i for i, op in enumerate(graph.ops) if op.primitive == "tanh") + 1
    first = TiledStretch(last, stop, graph.ops[last - 1].outputs[0], 0, 4)
    within = Plan((), graph.fingerprint, tiles=(first,)).tiled_graph(graph)
    assert [value.kind for value in graph.values].count("constant") == 2
    x = [value.index for value in within.values if value.kind == "argument"][1]
    second = TiledStretch(0, last, x, 0, 2, round=1)
    plan = Plan((), graph.fingerprint, tiles=(first, second))
    assert sum(op.primitive == "scan" for op in plan.tiled_graph(graph).walk()) >= 2
    same(fun, plan.apply(fun), args)
    with pytest.raises(PlanMismatchError, match="disjoint"):
        jax.eval_shape(dataclasses.replace(plan, tiles=(first, first)).apply(fun), *args)
    with pytest.raises(PlanMismatchError, match="order of their rounds"):
        dataclasses.replace(plan, tiles=(second, first))


def test_tiles_of_what_couples_or_has_effects_and_of_another_version_are_refused():
    def coupled(w, x):
        return jnp.sum(jnp.sort(jnp.tanh(x @ w), axis=0) ** 2)

    def printed(w, x):
        jax.debug.print("{}", w[0, 0])
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    args = jnp.ones((4, 4)), jnp.ones((8, 4))
    for fun, what in ((coupled, "cannot be tiled"), (printed, "side effects")):
        graph = trace(fun, *args)
        plan = Plan((), graph.fingerprint, tiles=(TiledStretch(0, len(graph.ops), 1, 0, 2),))
        for use in (plan.check, plan.describe, lambda graph: jax.eval_shape(plan.apply(fun), *args)):
            with pytest.raises(PlanMismatchError, match=what):
                use(graph)
    fun = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)
    graph = trace(fun, *args)
    plan = Plan((), graph.fingerprint, tiles=(TiledStretch(0, len(graph.ops), 1, 0, 2),), tiled_fingerprint="other")
    with pytest.raises(PlanMismatchError, match="another version"):
        jax.eval_shape(plan.apply(fun), *args)


def test_what_is_not_verified_counts_its_recomputation(problem, half):
    predicted = problem.plan(half.budget * 9 // 10, verify=False)
    assert predicted.tiles and predicted.regions and predicted.report.flops is None
    assert predicted.overhead == pytest.approx(half.overhead, abs=0.1) and predicted.overhead > 0.02


def test_what_couples_is_named_where_nothing_goes_through():
    """Sorted along both axes: neither goes through."""

    def loss(w, x):
        h = jnp.sort(x @ w, axis=0)
        h = jnp.sort(h, axis=1)
        return jnp.sum(jnp.tanh(h) ** 2)

    args = jax.ShapeDtypeStruct((32, 2048), F), jax.ShapeDtypeStruct((1024, 32), F)
    with pytest.raises(
        InfeasibleBudgetError, match=r"No axis goes .*: sort at test_tiles.py:\d+ \S+ runs along"
    ) as caught:
        jaxckpt.plan(loss, *args, target="cuda:h100", budget="30%", tile=True)
    assert caught.value.least_bytes > caught.value.budget_bytes


def test_without_the_option_nothing_is_tiled_and_with_it_nothing_that_fits(problem, least):
    with pytest.raises(InfeasibleBudgetError):
        jaxckpt.plan(language, *arguments(), target="cuda:h100", budget=least - 1)
    assert problem.plan("100%").tiles == ()
    with pytest.raises(jaxckpt.ArgumentError, match="tile"):
        jaxckpt.plan(language, *arguments(), target="cuda:h100", budget="50%", tile=8)


def test_the_peak_falls_and_the_time_grows_with_less_budget(problem, least, half):
    lower = problem.plan(problem.argument_bytes + (least - problem.argument_bytes) // 3)
    assert lower.measured_bytes <= lower.budget < half.measured_bytes
    assert lower.overhead >= half.overhead - 1e-3


def test_arguments_that_are_no_arrays_checkpoints_and_autocheckpoint():
    def loss(p, x, y, options):
        checked = jax.checkpoint(lambda p, x, y: language(p, x, y) * options["scale"])
        return checked(p, x, y) if options["name"] == "scaled" else None

    args = (*arguments(), {"name": "scaled", "scale": 2.0})
    whole = problem_of(loss, *args, target="cuda:h100", respect_checkpoints=False, tile=True)
    found = whole.plan("35%")
    assert found.tiles and found.measured_bytes <= found.budget and not found.respect_checkpoints
    values = (*real(), {"name": "scaled", "scale": 2.0})
    held = lambda fun: lambda *args: fun(*args, values[-1])
    same(held(loss), held(found.apply(loss)), values[:-1])
    auto = jaxckpt.autocheckpoint(language, budget="35%", target="cuda:h100", tile=True)
    assert auto.plan(*arguments()).tiles
    same(language, auto, real(2))


def _looped(w, x):
    count = jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1, 0)
    return jnp.sum(jax.nn.softmax(jnp.tanh(x @ w) * count, -1) ** 2)


def _scanned(w, x):
    x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w[:, :32]), None), x, None, length=4)
    return -jnp.mean(jax.nn.log_softmax(x @ w)[:, 0])


@jax.custom_vjp
def _clip(x):
    return x


_clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


def _clipped(w, x):
    return jnp.sum(_clip(jax.nn.softmax(_clip(x @ w), -1)) ** 2)


def _normed(w, x):
    h = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = h - h.mean((1, 2), keepdims=True)
    return jnp.mean(jax.nn.relu(h * jax.lax.rsqrt((h**2).mean((1, 2), keepdims=True) + 1e-5)) ** 2)


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (_looped, [(32, 4096), (256, 32)]),
        (_scanned, [(32, 4096), (512, 32)]),
        (_clipped, [(32, 4096), (512, 32)]),
        (_normed, [(3, 3, 4, 64), (8, 32, 32, 4)]),
    ],
)
def test_functions_with_loops_rules_and_norms_of_each_example(fun, shapes):
    args = [jax.random.normal(jax.random.key(i), shape) * 0.2 for i, shape in enumerate(shapes)]
    with pytest.raises(InfeasibleBudgetError):
        jaxckpt.plan(fun, *args, target="cpu", budget="30%")
    plan = jaxckpt.plan(fun, *args, target="cpu", budget="30%", tile=True)
    assert plan.tiles and plan.measured_bytes <= plan.budget
    same(fun, plan.apply(fun), args)


def test_no_more_tiles_than_the_budget_asks_for():
    """What a tile needs is seen when it is compiled: at first the chain takes it to be more."""
    w, x = [jnp.ones((8, 8)) / 10, jnp.ones((8, 512)) / 10], jnp.ones((256, 8)) / 3
    loss = lambda w, x: -jnp.mean(jax.nn.log_softmax(jnp.tanh(x @ w[0]) @ w[1]))
    problem = problem_of(loss, w, x, target="cpu", tile=True)
    tiles = {}
    for share in (40, 20, 10):
        plan = problem.plan(problem.unplanned.peak_bytes * share // 100)
        assert plan.measured_bytes <= plan.budget
        (tile,) = plan.tiles
        tiles[share] = tile.tiles
        fewer = jaxckpt.measure(
            jax.value_and_grad(tiled(loss, [dataclasses.replace(tile, tiles=tile.tiles // 2)])), w, x
        )
        assert fewer.peak_bytes > plan.budget, "half as many would do"
    assert tiles[40] < tiles[20] < tiles[10]


def _sharded(p, x, y):
    h = x + jax.nn.gelu(x @ p["in"]) @ p["out"]
    logits = (h @ p["head"]).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], -1))


def _shapes(layout):
    shape = lambda size, dtype=jnp.float32: jax.ShapeDtypeStruct(size, dtype, sharding=layout)
    weights = {"in": shape((64, 256)), "out": shape((256, 64)), "head": shape((64, 4096))}
    return weights, shape((8192, 64)), shape((8192,), jnp.int32)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("cuda:h100x4", marks=pytest.mark.cuda),
        pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu),
    ],
)
def test_what_is_sharded_is_tiled_within_the_shards(target):
    """Weights and tokens over four devices, as of fully sharded data parallel."""
    mesh = jaxckpt.Target(target).mesh((4,), ("d",))
    args = _shapes(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    plain = problem_of(_sharded, *args, target=target)
    with pytest.raises(InfeasibleBudgetError):
        plain.plan("40%")
    plan = jaxckpt.plan(_sharded, *args, budget="40%", target=target, tile=True)
    assert plan.tiles and all(tile.parts == 4 for tile in plan.tiles)
    assert plan.measured_bytes <= plan.budget == int(0.4 * plain.unplanned.peak_bytes)
    # Weights are gathered, and tokens, which are larger, are not.
    gathers = [each.sent_bytes for each in plan.measured.collectives if each.kind != "all-reduce"]
    assert max(gathers) <= 4 * args[0]["head"].size < 4 * args[1].size * 3 / 4
    real = jax.tree.map(
        lambda leaf: (
            jax.random.normal(jax.random.key(leaf.size), leaf.shape) / 8
            if leaf.dtype == jnp.float32
            else jnp.arange(leaf.size) % 4096
        ),
        args,
    )
    same(_sharded, Plan.from_json(plan.to_json()).apply(_sharded), real)  # the program does not depend on the mesh


def test_a_function_that_tiles_itself_is_one_program_over_any_mesh():
    """What a planner for many devices traces is what its user traces on one."""
    tiled_by_hand = jaxckpt.tile(_sharded, in_axes=(None, 0, 0), tiles=8)
    rows = jaxckpt.tile(lambda w, x: jnp.tanh(x @ w) @ w.T, in_axes=(None, 0), tiles=8)
    both = lambda p, x, y: tiled_by_hand(p, x, y) + jnp.sum(rows(p["head"], x) ** 2)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = _shapes(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    traced, plain = jax.jit(both).trace(*sharded), jax.jit(both).trace(*_shapes(None))
    assert "scan" in str(plain.jaxpr) and str(traced.jaxpr) == str(plain.jaxpr)


def test_an_infeasible_budget_names_microbatches_and_the_line_of_what_is_in_tiles():
    error = InfeasibleBudgetError("No.", least_bytes=7, budget_bytes=3, stretch="all")
    said = lambda *tiles: str(refusal.no_plan_with_tiles(error, tiles, [], 9))
    assert said(TiledStretch(0, 9, 0, 0, 4)) == "No. That is with the whole function in 4 microbatches."
    assert said(TiledStretch(2, 9, 0, 0, 4)) == "No. That is with operations 2–9 in 4 tiles."
    graph = trace(language, *arguments())
    tile = TiledStretch(0, len(graph.ops), graph.body.inputs[-1], 0, 4)
    without = [op for op in trace(tiled(language, (tile,)), *arguments()).ops if op.bodies and not op.source]
    assert without and all("test_tiles.py" in refusal._source(op) for op in without)


def test_the_second_axis_of_a_batch_is_tiled_where_the_first_has_few_rows():
    """Arguments that are no activations come first, and no axis of theirs divides the logits."""

    def head(w, b, x, y, mask):
        logits = jax.nn.log_softmax(x @ w + b)
        return -jnp.sum(jnp.take_along_axis(logits, y[..., None], -1)[..., 0] * mask) / mask.sum()

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, F)
    args = shape(32, 20_000), shape(20_000), shape(2, 64, 32), jax.ShapeDtypeStruct((2, 64), jnp.int32), shape(2, 64)
    by_hand = jaxckpt.tile(head, in_axes=(None, None, 1, 1, 1), tiles=8)
    peaks = [
        jaxckpt.measure(jax.value_and_grad(fun), *args, target="cuda:h100", generate_code=False).peak_bytes
        for fun in (head, by_hand)
    ]
    assert peaks[1] < peaks[0] / 2
    found = jaxckpt.plan(head, *args, budget=peaks[1], target="cuda:h100", tile=True)
    assert found.measured_bytes <= peaks[1]
    assert [tile.axis for tile in found.tiles] == [1]
    assert found.tiles[0].value in {2, 3, 4}, "of one of them, the others are tiled with it"


@pytest.mark.cuda
def test_all_that_has_the_axis_is_tiled_with_the_value_that_it_is_followed_from():
    """Edges of a graph have two ends and what they carry: rows of one end alone would be gathered all at once."""
    nodes, edges, width = 500, 8192, 32

    def message(w, x, edge, source, target):
        h = jnp.concatenate([x[source], x[target], edge], -1)
        return jax.ops.segment_sum(jax.nn.silu(h @ w[0]) @ w[1], target, nodes)

    def make(message):
        def loss(ws, x, edge, source, target):
            for w in ws:
                x = x + jnp.tanh(message(w, x, edge, source, target))
            return jnp.mean(x**2)

        return loss

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, F)
    ends = jax.ShapeDtypeStruct((edges,), jnp.int32)
    weights = [(shape(3 * width, 4 * width), shape(4 * width, width))] * 2
    args = weights, shape(nodes, width), shape(edges, width), ends, ends
    by_hand = make(jaxckpt.tile(message, in_axes=(None, None, 0, 0, 0), tiles=8))
    peak = lambda fun: (
        jaxckpt.measure(jax.value_and_grad(fun), *args, target="cuda:h100", generate_code=False).peak_bytes
    )
    least = peak(by_hand)
    assert least < 0.4 * peak(make(message))
    found = jaxckpt.plan(make(message), *args, budget=least, target="cuda:h100", tile=True)
    assert found.measured_bytes <= least


@pytest.mark.parametrize(("batch", "runs"), [(32, 1), (128, 8)])
def test_few_rows_of_large_weights_are_made_before_the_tiles(batch, runs):
    """As the embeddings of a diffusion's times: each tile would read the weights again, and hold gradients of them."""

    def loss(weights, x, times):
        embedding = jnp.tanh(times @ weights)
        return jnp.mean(jnp.sin(x * embedding[:, None, :]) ** 2)

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, F)
    problem = problem_of(loss, shape(64, 32), shape(batch, 16, 32), shape(batch, 64), target="cpu", tile=True)
    x = next(value.index for value in problem.graph.values if value.shape == (batch, 16, 32))
    tiled = problem.tiled.with_tiles((TiledStretch(0, len(problem.graph.ops), x, 0, 8),))
    assert {op.repeats for op in tiled.graph.walk() if op.primitive == "sin"} == {8}
    assert {op.repeats for op in tiled.graph.walk() if op.primitive == "tanh"} == {runs}


def test_an_axis_that_spares_nothing_does_not_hide_what_couples():
    """A weight's axis goes through, since the sum over it is complete before all that takes memory."""
    batch = 4

    def loss(weights, x, times):
        x = jnp.sin(x * (times @ weights)[:, None, :])
        return jnp.mean(jnp.sin(x - x.sum((1, 2), keepdims=True)) ** 2)

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, F)
    args = shape(64, 128), shape(batch, 256, 128), shape(batch, 64)
    problem = problem_of(loss, *args, target="cpu", tile=True)
    with pytest.raises(InfeasibleBudgetError, match=r"in 4 microbatches\..*couple the rows.*sub at test_tiles\.py"):
        problem.plan(problem.argument_bytes + 1000)
