"""Plan: JSON both ways, files whole or not at all, and a plan that does not fit says so."""

import copy
import dataclasses
import json
import os
import pickle
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import OFFLOAD, SAVE, MemoryEstimate, Plan, PlanMismatchError, Region
from jaxckpt.core import plan as plan_module
from jaxckpt.core.outline import region_line
from jaxckpt.core.plan import Loop, PlanReport
from jaxckpt.schedules import Mixed, checkpointed, in_turn
from jaxckpt.show.tree import plan_lines
from tests.helpers import assert_trees_close, executions, kept_bytes, kept_shapes

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
        lambda text: text.replace(f'"format": {plan_module.FORMAT}', '"format": 99'),
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


def test_a_planners_plan_says_which_arguments_are_others_than_its_own():
    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2)

    w, x = jnp.ones((64, 256)), jnp.ones((512, 64))
    made = jaxckpt.plan(loss, w, x, budget="100%", target="cpu")
    loaded = Plan.from_json(made.to_json())
    assert loaded == made and loaded.arguments == ("args[0]: float32[64, 256]", "args[1]: float32[512, 64]")
    for plan in (made, loaded):
        with pytest.raises(PlanMismatchError) as raised:
            jax.eval_shape(plan.apply(loss), w, x[:300])
        said = "Other arguments came: args[1]: float32[300, 64] (the plan's: float32[512, 64]). Make a plan"
        assert said in str(raised.value) and "args[0]" not in str(raised.value)
        with pytest.raises(
            PlanMismatchError, match="The arguments are those of the plan, so the program itself differs"
        ):
            jax.eval_shape(plan.apply(lambda w, x: loss(w, x) ** 2), w, x)
    with pytest.raises(PlanMismatchError, match=r"3 arrays \(the plan's: 2\)"):
        jax.eval_shape(loaded.apply(lambda w, x, y: loss(w, x + y)), w, x, x)


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
    flat = lambda function: lambda x, ws: jnp.sum(function({"x": x, "ws": ws}, scale=2.0)["out"][0])
    mapped = lambda function: lambda x, ws: jnp.sum(jax.vmap(flat(function))(x, ws))
    for ways, values in ((flat, (X, WS)), (mapped, (stacked["x"], stacked["ws"]))):
        plain, planned = ways(fun), ways(plan.apply(fun))
        assert kept_bytes(planned, *values) < 0.7 * kept_bytes(plain, *values)


def test_plans_print():
    plan = halves(first={GRAPH.ops[2].outputs[0]: SAVE})
    text = plan.describe(GRAPH)
    assert "2 regions, 96 B kept" in text
    assert "keeps 1 value, 96 B" in text and "keeps what goes in and out" in text
    assert "float32[4, 6]" in text
    assert "test_plan.py" in text
    assert "ops 0..4" in str(plan)


def test_the_tree_counts_what_is_kept_from_the_forward_to_the_backward_pass():
    """Not what nested regions keep while the one around them runs again; and every value has a line."""
    inner, outer = GRAPH.ops[2].outputs[0], GRAPH.ops[5].outputs[0]
    nested = Region(0, 4, regions=(Region(0, 3, {inner: SAVE}),))
    text = Plan((nested, Region(4, 8, {outer: SAVE})), GRAPH.fingerprint).describe(GRAPH)
    assert f"3 regions, {GRAPH.values[outer].bytes} B kept" in text and "runs again as" in text
    graph = jaxckpt.trace(lambda x: sum(jnp.tanh(x[:size]).sum() for size in range(1, 9)), jnp.ones(9))
    kept = {op.outputs[0]: SAVE for op in graph.ops if op.primitive == "tanh"}
    plan = Plan((Region(0, len(graph.ops), kept),), graph.fingerprint)
    assert plan.describe(graph).count(" tanh ") == 8 and "\n".join(plan_lines(plan, graph)).count(" tanh ") == 6


def test_a_line_on_a_region_says_what_is_kept_and_by_which_action():
    assert region_line(Region(0, 4, {2: SAVE})) == "ops 0..4: keeps 1 value"
    both = Region(0, 4, {2: SAVE, 3: OFFLOAD})
    assert region_line(both) == "ops 0..4: keeps 2 values (offload 1 value, save 1 value)"
    left = Region(0, 4, checkpoint=False, body=((3, 0), (1, 1)))
    assert region_line(left) == "ops 0..4 inside of operation 3, 1 (body 1): left to JAX"


def test_regions_must_be_in_order_and_inside():
    with pytest.raises(PlanMismatchError, match=r"disjoint and in order.* got 3\.\.8 where 4 was reached"):
        Plan((Region(0, 4), Region(3, 8)), "")
    with pytest.raises(PlanMismatchError, match=r"begin at 2 or later, and end by 4; got 0\.\.3"):
        Region(2, 4, {}, (Region(0, 3),))


# --------------------------------------------------------------------------------------------------------- tied regions


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
    assert "left to JAX" in loose.describe(graph)


# ------------------------------------------------------------------------------------ plans that are not what they were

FIRST = GRAPH.ops[0].outputs[0]
NESTED = Region(0, 8, {GRAPH.ops[3].outputs[0]: SAVE}, (Region(0, 4, {FIRST: OFFLOAD}), Region(4, 8)), tied=True)
BARE = Plan((NESTED,), GRAPH.fingerprint, False, ("all",))
FULL = PlanReport(
    BARE, budget=1000, asked="50%", target="cpu", predicted=MemoryEstimate(4, 3, 2, 1), measured_bytes=900,
    unplanned_bytes=2000, overhead=0.25, flops=1100, seconds=1.1, unplanned_flops=1000, unplanned_seconds=1.0,
    times=(0.5, 0.25), timed_on="cpu", donated_bytes=3, donatable_bytes=4, host_bytes=5, measured_host_bytes=6,
    host_seconds=0.5, host_share=0.25,
    host_waits=0.125,
    costs="compiler",
    compiler_options=(("xla_some_passes", "off"),),
).plan  # fmt: skip


def places(value, path=()):
    """Yields the path of every value inside a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


EDITS = [1.5, -1, 10**9, True, "false", None, [], {}, [[]], "0"]


def test_a_file_with_any_value_edited_is_an_error_and_never_another_plan():
    text = FULL.to_json()
    assert Plan.from_json(text) == FULL and Plan.from_json(text).report == FULL.report
    count = 0
    for path in places(json.loads(text)):
        for edit in EDITS:
            raw = json.loads(text)
            inner = raw
            for key in path[:-1]:
                inner = inner[key]
            if inner[path[-1]] == edit and type(inner[path[-1]]) is type(edit):
                continue
            inner[path[-1]] = edit
            with pytest.raises(PlanMismatchError, match="Plan anew"):
                Plan.from_json(json.dumps(raw))
            count += 1
    assert count > 300


FREE = (
    *("fingerprint", "digest", "format"),
    *(
        "overhead",
        "seconds",
        "unplanned_seconds",
        "host_seconds",
        "host_waits",
        "host_share",
        "target",
        "asked",
        "timed_on",
    ),
)
"""Where some of the edits below have a type that a plan of another function could have."""


def test_types_are_strict_where_the_digest_fits_too():
    """A file written by another program with the right digest, and a plan made by hand."""
    text = FULL.to_json()
    for path in places(json.loads(text)):
        for edit in (1.5, -1, True, "false", "0"):
            raw = json.loads(text)
            inner = raw
            for key in path[:-1]:
                inner = inner[key]
            free = path[-1] in FREE or path[0] == "notes" or path[:-1] == ("report", "times")
            same = type(inner[path[-1]]) is type(edit) and not (edit == -1 and "regions" in path)
            if same or free:
                continue
            inner[path[-1]] = edit
            raw.pop("digest")
            raw["digest"] = plan_module._digest(raw)
            with pytest.raises(PlanMismatchError):
                Plan.from_json(json.dumps(raw))


# ---------------------------------------------------------------------------------- the recipe, and what is known of it


def test_plans_of_one_recipe_are_equal_whatever_their_reports_say():
    other = PlanReport(BARE, budget=5, measured_bytes=7).plan
    assert BARE == FULL == other and len({BARE, FULL, other}) == 1
    assert BARE.report is None and FULL.report != other.report
    assert (FULL.budget, FULL.measured_bytes, FULL.overhead) == (1000, 900, 0.25)
    assert BARE.budget is BARE.target is BARE.predicted is BARE.measured is BARE.unplanned_bytes is None
    assert BARE == dataclasses.replace(BARE, notes=()) != dataclasses.replace(BARE, prevent_cse=not BARE.prevent_cse)
    assert dataclasses.replace(BARE, respect_checkpoints=False) != BARE
    assert FULL.report == dataclasses.replace(FULL, notes=("other",)).report


def test_a_file_from_before_reports_named_the_compilers_options_has_none():
    raw = json.loads(FULL.to_json())
    del raw["report"]["compiler_options"], raw["digest"]
    before = Plan.from_json(plan_module.sealed(raw))
    assert before.report == dataclasses.replace(FULL.report, compiler_options=())
    assert "compile with" in str(FULL) and "compile with" not in str(before)


def test_a_report_holds_its_plan_and_a_plan_its_report():
    report = FULL.report
    assert report.plan == FULL and report.plan.report is report
    slower = dataclasses.replace(report, times=(0.75, 0.25))
    assert slower.plan.report is slower and slower.plan == FULL and report.times == (0.5, 0.25)
    assert (report.recompute, report.slowdown) == (pytest.approx(0.1), pytest.approx(0.1))
    assert report.prediction_error == pytest.approx(4 / 900 - 1)


def test_a_plan_changed_by_hand_has_no_report_any_more():
    changed = dataclasses.replace(FULL, regions=())
    assert changed.report is None and changed.measured_bytes is None
    assert dataclasses.replace(FULL).report is FULL.report


def test_a_report_goes_with_the_plan_through_pickle_copy_and_json(tmp_path):
    """A compiled plan too: but for what the compiler said in full, which a file does not hold."""
    planned = jaxckpt.plan(lambda ws, x: chain(x, ws), WS, X, budget="100%", target="cpu")
    assert planned.measured.peak_bytes == planned.measured_bytes
    planned.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").measured is None
    for plan in (FULL, planned):
        ways = [
            copy.copy,
            copy.deepcopy,
            lambda p: pickle.loads(pickle.dumps(p)),
            lambda p: Plan.from_json(p.to_json()),
        ]
        for again in (way(plan) for way in ways):
            assert again == plan and hash(again) == hash(plan) and again.report == plan.report
            assert again.report.plan == plan and str(again) == str(plan)
    assert pickle.loads(pickle.dumps(FULL.report)) == FULL.report
    assert Plan.from_json(BARE.to_json()).report is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Region(0.0, 4),
        lambda: Region(True, 4),
        lambda: Region(-1, 4),
        lambda: Region(0, 4, checkpoint="false"),
        lambda: Region(0, 4, tied=1),
        lambda: Region(0, 4, {"3": SAVE}),
        lambda: Region(0, 4, {3: "save"}),
        lambda: Region(0, 4, {}, ("x",)),
        lambda: checkpointed(1.0),
        lambda: checkpointed(2, (1.5,)),
        lambda: checkpointed(2, remat=None),
        lambda: Loop(0.5, checkpointed(2)),
        lambda: Loop(0, (3,)),
        lambda: Loop(0, None),
        lambda: Plan((3,), ""),
        lambda: Plan((), "", prevent_cse="no"),
        lambda: Plan((), "", notes="all"),
        lambda: Plan((), "", report=3),
        lambda: Plan((), "", tiled_fingerprint="0123"),
        lambda: Plan(np.float32(3), ""),
        lambda: Plan({Region(0, 1)}, ""),
        lambda: Region(np.arange(2), 4),
        lambda: Region(0, 4, {}, np.int32(1)),
        lambda: Loop(np.arange(2), checkpointed(2)),
    ],
)
def test_a_plan_of_other_types_cannot_be_made(make):
    with pytest.raises(PlanMismatchError, match="must"):
        make()


def looped(ws, x):
    @jax.custom_jvp
    def custom(x):
        return jnp.sin(jnp.sin(x))

    custom.defjvp(lambda p, t: (custom(*p), t[0]))
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None), custom(x), ws)
    return x.sum()


LOOPED = jaxckpt.trace(looped, jnp.ones((6, 4, 4)), jnp.ones((2, 4)))
SCAN = next(place for place, op in enumerate(LOOPED.ops) if op.primitive == "scan")
INSIDE = next(op.outputs[0] for op in LOOPED.ops[SCAN].bodies[0].ops if op.primitive == "tanh")
OUTSIDE = LOOPED.ops[SCAN].outputs[0]
HIDDEN = next(v.index for v in LOOPED.values if v.kind == "intermediate" and not v.addressable)


@pytest.mark.parametrize(
    ("regions", "loops"),
    [
        ([Region(0, 99)], []),
        ([Region(0, SCAN + 1, {10**6: SAVE})], []),
        ([Region(0, SCAN + 1, {0: SAVE})], []),  # an argument
        ([Region(0, SCAN, {OUTSIDE: SAVE})], []),
        ([Region(0, SCAN, {INSIDE: SAVE})], []),
        ([Region(0, SCAN + 1, {HIDDEN: SAVE})], []),
        ([Region(0, SCAN + 1, {}, (Region(0, SCAN, {OUTSIDE: SAVE}),))], []),
        ([], [Loop(99, checkpointed(6))]),
        ([], [Loop(SCAN - 1, checkpointed(6))]),
        ([], [Loop(SCAN, checkpointed(5))]),
        ([], [Loop(SCAN, Mixed(()))]),
        ([], [Loop(SCAN, checkpointed(6)), Loop(SCAN, checkpointed(6))]),
        ([], [Loop(SCAN, checkpointed(6, (), {OUTSIDE: SAVE}))]),
        ([], [Loop(SCAN, checkpointed(6, (), {10**6: SAVE}))]),
    ],
)
def test_a_plan_that_names_what_is_not_in_the_function_is_an_error_at_check_and_call(regions, loops):
    plan = Plan(tuple(regions), LOOPED.fingerprint, loops=tuple(loops))
    with pytest.raises(PlanMismatchError, match="Plan anew"):
        plan.check(LOOPED)
    with pytest.raises(PlanMismatchError, match="Plan anew"):
        Plan.from_json(plan.to_json()).apply(looped)(jnp.ones((6, 4, 4)), jnp.ones((2, 4)))


def test_plans_that_fit_pass_the_check():
    kept = Region(0, len(LOOPED.ops), {INSIDE: SAVE, OUTSIDE: SAVE})
    for plan in (
        Plan((kept,), LOOPED.fingerprint),
        Plan(
            (), LOOPED.fingerprint, loops=(Loop(SCAN, in_turn(checkpointed(4, (2,), {INSIDE: SAVE}), checkpointed(2))),)
        ),
    ):
        plan.check(LOOPED)
        args = jnp.ones((6, 4, 4)), jnp.ones((2, 4))
        assert_trees_close(jax.grad(plan.apply(looped))(*args), jax.grad(looped)(*args))
    everything = jaxckpt.Policy({}, default=SAVE)
    everything.plan(LOOPED).check(LOOPED)


@pytest.mark.parametrize("kind", ["binary", "pipe", "device", "deep", "number"])
def test_what_is_no_plan_is_an_error_at_once(tmp_path, kind):
    path = tmp_path / "plan.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes({"binary": bytes(range(256)), "deep": b"[" * 10**6, "number": b"3"}[kind])
    with pytest.raises(PlanMismatchError, match="Plan anew"):
        Plan.load(path)


def test_a_missing_file_and_a_folder_are_the_systems_errors(tmp_path):
    with pytest.raises(IsADirectoryError):
        Plan.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none")


# --------------------------------------------------------------------------------------------------- copies and pickles


def test_plans_are_copied_and_pickled_also_with_what_was_measured():
    measured = jaxckpt.measure(jax.grad(chain), X, WS, target="cpu")
    run = checkpointed(4, (2,), {3: SAVE, 5: OFFLOAD})
    bare = dataclasses.replace(BARE, loops=(Loop(3, in_turn(run, checkpointed(1, remat=False))),))
    plan = dataclasses.replace(FULL.report, plan=bare, measured=measured).plan
    for value in (NESTED, run, plan.loops[0], FULL, plan):
        for again in (copy.copy(value), copy.deepcopy(value), *(pickle.loads(pickle.dumps(value, p)) for p in (2, 5))):
            assert again == value and hash(again) == hash(value) and repr(again) == repr(value)
            assert type(again) is type(value)
    again = pickle.loads(pickle.dumps(plan))
    assert again.measured == measured and again.measured.timeline() == measured.timeline()
    with pytest.raises(TypeError):
        again.regions[0].actions[0] = SAVE
    kept = kept_shapes(halves(first={FIRST: SAVE}).apply(chain), X, WS)
    assert kept_shapes(pickle.loads(pickle.dumps(halves(first={FIRST: SAVE}))).apply(chain), X, WS) == kept


def test_equal_plans_have_equal_hashes_whatever_they_were_made_from():
    one = Region(0, 4, {1: SAVE, 2: OFFLOAD}, (Region(0, 2),))
    other = Region(np.int64(0), np.int32(4), {np.int64(2): OFFLOAD, 1: SAVE}, [Region(0, 2)])
    assert one == other and hash(one) == hash(other)
    plans = Plan((one,), "f", notes=("a",)), Plan([other], "f", notes=["a"])
    assert plans[0] == plans[1] and len(set(plans)) == 1
    assert plans[1].to_json() == plans[0].to_json()
    assert len({one, dataclasses.replace(one, tied=True), dataclasses.replace(one, checkpoint=False)}) == 3
    assert len({Loop(0, checkpointed(2)), Loop(np.int64(0), checkpointed(np.int32(2))), Loop(1, checkpointed(2))}) == 2


def test_one_of_a_thing_is_told_as_one():
    plan = Plan((Region(0, 8, {FIRST: SAVE}),), GRAPH.fingerprint)
    assert "1 region," in plan.describe(GRAPH) and "keeps 1 value " in f"{plan} "
    loops = Plan(
        (), LOOPED.fingerprint, loops=(Loop(SCAN, in_turn(checkpointed(5, (), {INSIDE: SAVE}), checkpointed(1))),)
    )
    for text in (str(loops), loops.describe(LOOPED)):
        assert "1 iteration" in text and "1 iterations" not in text and "5 iterations" in text
    assert "1 values" not in loops.describe(LOOPED)


def test_what_has_no_cotangent_gets_none_through_tied_regions():
    """A value carried along that nobody differentiates: its derivative is infinite here, and does not run."""

    def fun(w, x):
        seen = jnp.zeros_like(x)
        for _ in range(3):
            x = jnp.tanh(x @ w)
            seen = seen + jnp.sqrt(x * 0.0)
        return jnp.sum(x), seen

    w, x = jnp.eye(4) + 0.1, jnp.ones((3, 4))
    graph = jaxckpt.trace(fun, w, x)
    third = len(graph.ops) // 3
    cuts = [0, third, 2 * third, len(graph.ops)]
    plan = Plan(tuple(Region(a, b, tied=True) for a, b in pairwise(cuts)), graph.fingerprint)
    gradient = lambda f: jax.grad(lambda w, x: f(w, x)[0])
    actual, expected = gradient(plan.apply(fun)), gradient(fun)
    assert_trees_close(actual(w, x), expected(w, x))
    assert_trees_close(jax.jit(jax.vmap(actual, (None, 0)))(w, jnp.stack([x, x]))[1], expected(w, x))
    forward = [jax.jvp(lambda w: f(w, x)[0], (w,), (w,))[1] for f in (plan.apply(fun), fun)]
    assert_trees_close(*forward)
