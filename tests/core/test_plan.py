"""Plan: JSON both ways, files whole or not at all, and a plan that does not fit says so."""

import json
import os

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import OFFLOAD, SAVE, Plan, PlanMismatchError, Region
from tests.helpers import assert_trees_close, executions, kept_shapes

X = jnp.linspace(0.0, 1.0, 24).reshape(4, 6)
WS = [jnp.eye(6) * (1 + i) / 4 for i in range(4)]


def chain(x, ws):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x.sum()


GRAPH = jaxckpt.trace(chain, X, WS)
PLAIN = Plan((), GRAPH.fingerprint)


def halves(**actions):
    return Plan((Region(0, 4, actions.get("first", {})), Region(4, 8, actions.get("second", {}))), GRAPH.fingerprint)


def test_json_both_ways():
    nested = Region(
        0, 8, {GRAPH.ops[3].outputs[0]: SAVE}, (Region(0, 4, {GRAPH.ops[0].outputs[0]: OFFLOAD}), Region(4, 8))
    )
    plan = Plan((nested,), GRAPH.fingerprint, prevent_cse=False, notes=("all",))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.regions[0].regions[0].actions[GRAPH.ops[0].outputs[0]] is OFFLOAD


def test_save_and_load(tmp_path):
    halves().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == halves()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    PLAIN.save(path)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        halves().save(path)
    monkeypatch.undo()
    assert Plan.load(path) == PLAIN
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("fingerprint", "print"),
        lambda text: text.replace('"stop": 4', '"stop": "x"'),
        lambda text: text.replace('"start": 4', '"start": 3'),
        lambda text: text.replace('"save"', '"sove"'),
        lambda text: json.dumps([text]),
        lambda text: text.replace('"format": 2', '"format": 99'),
        lambda text: "",
    ],
)
def test_a_file_cut_short_or_edited_is_an_error(tmp_path, spoil):
    text = spoil(halves(first={GRAPH.ops[0].outputs[0]: SAVE}).to_json())
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanMismatchError, match="Plan anew|in order"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("fun", "args"),
    [(chain, (X[:2], WS)), (chain, (X, WS[:3])), (lambda x, ws: chain(x, ws) * 2, (X, WS))],
    ids=["shape", "depth", "function"],
)
def test_a_plan_for_something_else_is_an_error_that_says_what_differs(fun, args):
    with pytest.raises(PlanMismatchError, match="made for another function, or other shapes") as caught:
        halves().apply(fun)(*args)
    assert GRAPH.fingerprint in str(caught.value)
    assert "float32[" in str(caught.value)


def test_apply_keeps_what_the_plan_says_and_recomputes_the_rest():
    second = GRAPH.ops[2].outputs[0]  # the second matmul
    reference = jax.value_and_grad(chain)(X, WS)
    plain = kept_shapes(chain, X, WS)[(4, 6)]
    half = range(plain // 2, plain // 2 + 2)
    for plan, kept, extra_matmuls in [
        (PLAIN, [plain], 0),
        (halves(), [1], 4),  # what stands between the halves
        (halves(first={second: SAVE}), [2], 3),
        (Plan((Region(0, 4),), GRAPH.fingerprint), half, 2),
        (Plan((Region(0, 8, {}, (Region(0, 4), Region(4, 8))),), GRAPH.fingerprint), [0], 4 + 4),
    ]:
        planned = plan.apply(chain)
        assert_trees_close(jax.value_and_grad(planned)(X, WS), reference)
        assert_trees_close(jax.jit(jax.value_and_grad(planned))(X, WS), reference)
        assert kept_shapes(planned, X, WS)[(4, 6)] in kept, plan
        matmuls = executions(jax.grad(planned, argnums=(0, 1)), X, WS)["dot_general"]
        # a matmul at a region's end is not computed again: no derivative needs its result
        assert 12 + extra_matmuls - len(plan.regions) - 1 <= matmuls <= 12 + extra_matmuls, plan


def test_apply_under_vmap_and_with_other_structures():
    def fun(tree, *, scale):
        return {"out": [chain(tree["x"], tree["ws"]) * scale, None]}

    args = ({"x": X, "ws": WS},)
    graph = jaxckpt.trace(fun, *args, scale=2.0)
    plan = Plan((Region(0, 4), Region(4, 6)), graph.fingerprint)
    out = plan.apply(fun)(*args, scale=2.0)
    assert_trees_close(out, fun(*args, scale=2.0))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), args[0])
    batched = jax.vmap(lambda tree: plan.apply(fun)(tree, scale=2.0)["out"][0])(stacked)
    assert_trees_close(batched, jnp.stack([out["out"][0]] * 2))


def test_plans_print():
    plan = halves(first={GRAPH.ops[2].outputs[0]: SAVE})
    text = plan.describe(GRAPH)
    assert "2 regions, 96 B kept" in text
    assert "SAVE" in text
    assert "float32[4, 6]" in text
    assert "test_plan.py" in text
    assert "ops 0..4" in str(plan)


def test_regions_must_be_in_order_and_inside():
    with pytest.raises(PlanMismatchError, match="disjoint"):
        Plan((Region(0, 4), Region(3, 8)), "")
    with pytest.raises(PlanMismatchError, match="inside"):
        Region(2, 4, {}, (Region(0, 3),))


# ------------------------------------------------------------------------------------------------------------- tied regions


def test_a_tied_region_holds_its_cotangents_together_and_changes_no_value():
    def fun(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    args = jnp.eye(8), jnp.ones((4, 8))
    graph = jaxckpt.trace(fun, *args)
    half = len(graph.ops) // 2
    regions = Region(0, half, tied=True), Region(half, len(graph.ops), checkpoint=False, tied=True)
    plan = Plan(regions, graph.fingerprint)
    assert Plan.from_json(plan.to_json()) == plan
    gradient = jax.grad(plan.apply(fun), argnums=(0, 1))
    untied = Plan(tuple(Region(r.start, r.stop, checkpoint=r.checkpoint) for r in regions), graph.fingerprint)
    barriers = [
        executions(jax.grad(p.apply(fun), argnums=(0, 1)), *args)["optimization_barrier"] for p in (plan, untied)
    ]
    assert barriers[0] >= barriers[1] + 4  # one a region in the forward pass, and one in the backward pass
    assert_trees_close(gradient(*args), jax.grad(fun, argnums=(0, 1))(*args))


def test_what_is_not_differentiated_gets_no_cotangent_in_a_tied_region():
    """Frozen parameters and images cost no backward matmul; forward mode and second derivatives pass through."""

    def fun(w, frozen, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ frozen) @ w) ** 2)

    args = jnp.eye(8) + 0.1, jnp.eye(8) - 0.1, jnp.linspace(0.0, 1.0, 32).reshape(4, 8)
    graph = jaxckpt.trace(fun, *args)
    half = next(place for place, op in enumerate(graph.ops) if op.primitive == "tanh") + 1
    plan = Plan((Region(0, half, tied=True), Region(half, len(graph.ops), tied=True)), graph.fingerprint)
    untied = Plan(tuple(Region(r.start, r.stop) for r in plan.regions), graph.fingerprint)
    planned, loose = plan.apply(fun), untied.apply(fun)
    for argnums in (0, 1, (0, 1), (0, 1, 2)):
        dots = [executions(jax.grad(f, argnums=argnums), *args)["dot_general"] for f in (planned, loose)]
        assert dots[0] == dots[1]
    frozen = jaxckpt.count_flops(jax.grad(planned), *args)
    assert frozen < jaxckpt.count_flops(jax.grad(planned, argnums=(0, 1, 2)), *args)
    one = lambda f: lambda w: f(w, *args[1:])
    assert_trees_close(jax.jvp(one(planned), args[:1], args[:1]), jax.jvp(one(fun), args[:1], args[:1]))
    assert_trees_close(jax.hessian(one(planned))(args[0]), jax.hessian(one(fun))(args[0]))


def test_a_region_that_is_no_checkpoint_keeps_what_jax_keeps():
    def fun(x):
        return jnp.sum(jnp.sin(jnp.sin(x)))

    graph = jaxckpt.trace(fun, jnp.ones(100))
    loose = Plan((Region(0, len(graph.ops), checkpoint=False, tied=True),), graph.fingerprint)
    kept = jaxckpt.residuals(loose.apply(fun), jnp.ones(100)).kept_bytes
    assert kept == jaxckpt.residuals(fun, jnp.ones(100)).kept_bytes > 0
    assert "as they stand" in loose.describe(graph)
