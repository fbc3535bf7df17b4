"""What an action is asked, and an action that is added by one file: `half.py` beside this one."""

import copy
import json
import pickle
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Action,
    ArgumentError,
    EffectsError,
    Plan,
    PlanMismatchError,
    Policy,
    Region,
    compress,
    shard,
    tag,
)
from jaxckpt.actions import KINDS, Cost, action_from, given
from jaxckpt.core.plan import Loop
from jaxckpt.schedules import checkpointed
from tests.actions.half import HALF, Half, half_is_known
from tests.helpers import executions

__all__ = ["half_is_known"]
W = jax.random.normal(jax.random.key(0), (32, 64)) / 6
X = jax.random.normal(jax.random.key(1), (128, 32))
WIDE = 128 * 64 * 4
"""Bytes of a hidden value."""


def loss(w, x):
    for _ in range(3):
        x = jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x
    return jnp.sum(x**2)


def scanned(w, x):
    def body(x, _):
        return jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x, None

    return jnp.sum(jax.lax.scan(body, x, None, length=5)[0] ** 2)


def branched(w, x):
    wide = lambda x: jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T
    x = jax.lax.cond(jnp.sum(x) > 0, wide, lambda x: 2 * x, x)
    return jnp.sum(jax.lax.cond(jnp.sum(x) > 1e9, lambda x: 3 * x, wide, x) ** 2)


def called(w, x):
    step = jax.jit(lambda x: jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x)
    return jnp.sum(step(step(x)) ** 2)


def nested(w, x):
    def outer(x, _):
        y = tag(jnp.tanh(x @ w), "hidden") @ w.T
        inner = lambda z, _: (tag(jnp.tanh(z @ w), "hidden") @ w.T + z, None)
        return jax.lax.scan(inner, y, None, length=2)[0], None

    return jnp.sum(jax.lax.scan(outer, x, None, length=3)[0] ** 2)


HIDDEN = {loss: 3, scanned: 5, branched: 2, called: 2, nested: 9}
"""How many hidden values each function computes."""


@pytest.mark.parametrize("fun", HIDDEN, ids=lambda fun: fun.__name__)
def test_a_value_is_kept_as_the_action_says_wherever_it_is_made(fun):
    saved = jaxckpt.checkpoint(fun, policy=Policy({"hidden": SAVE}))
    halved = jaxckpt.checkpoint(fun, policy=Policy({"hidden": HALF}))
    whole, half = jaxckpt.residuals(saved, W, X), jaxckpt.residuals(halved, W, X)
    others = whole.kept_bytes - HIDDEN[fun] * WIDE
    assert half.kept_bytes - others == HIDDEN[fun] * WIDE // 2
    assert {r.dtype for r in half.residuals if r.name == "hidden"} == {jnp.dtype("bfloat16")}
    count = lambda f: jaxckpt.count_flops(jax.grad(f), W, X)
    assert 0 <= count(halved) - count(saved) <= 16  # the index of a branch is held within bounds once more
    assert count(halved) < count(jaxckpt.checkpoint(fun, policy="nothing"))


@pytest.mark.parametrize("fun", HIDDEN, ids=lambda fun: fun.__name__)
def test_the_forward_pass_is_exact_and_gradients_are_within_the_error(fun):
    halved = jaxckpt.checkpoint(fun, policy=Policy({"hidden": HALF}))
    (value, gradient), (expected, exact) = (jax.value_and_grad(f)(W, X) for f in (halved, fun))
    assert value == expected
    scale = float(jnp.max(jnp.abs(exact)))
    difference = float(jnp.max(jnp.abs(gradient - exact))) / scale
    assert 0 < difference < 8 * HALF.error(X.dtype)


def test_the_operation_that_makes_the_value_is_not_run_again():
    for policy, tanh in (({"hidden": HALF}, 3), ({"hidden": SAVE}, 3), ({}, 6)):
        step = jax.grad(jaxckpt.checkpoint(loss, policy=Policy(policy, default=RECOMPUTE)))
        assert executions(step, W, X)["tanh"] == tanh


def test_under_vmap_jit_forward_mode_and_second_derivatives():
    halved = jaxckpt.checkpoint(loss, policy=Policy({"hidden": HALF}))
    many = jnp.stack([X, 2 * X])
    each = jax.vmap(jax.jit(jax.grad(halved)), (None, 0))(W, many)
    for got, x in zip(each, many):
        assert jnp.allclose(got, jax.grad(loss)(W, x), rtol=0.05, atol=0.05 * float(jnp.max(jnp.abs(got))))
    value, tangent = jax.jvp(halved, (W, X), (W, X))
    exact = jax.jvp(loss, (W, X), (W, X))
    assert value == exact[0] and jnp.allclose(tangent, exact[1], rtol=0.02)
    hvp = lambda f: jax.jvp(jax.grad(f), (W, X), (W, X))[1]
    assert jnp.allclose(hvp(halved), hvp(loss), rtol=0.1, atol=0.1 * float(jnp.max(jnp.abs(hvp(loss)))))


def test_values_that_an_action_does_not_admit_are_saved():
    def fun(w, x):
        order = tag(jnp.argsort(x[:, 0]), "order")
        return jnp.sum(jnp.sin(x[order] @ w))

    policy = Policy({"order": HALF})
    (action,) = policy.decide(jaxckpt.trace(fun, W, X)).values()
    assert action == SAVE
    assert jax.grad(jaxckpt.checkpoint(fun, policy=policy))(W, X).shape == W.shape
    assert given(HALF, jaxckpt.trace(lambda x: x * 2j, X).values[-1]) == SAVE


def test_in_json_and_in_the_printed_plan():
    graph = jaxckpt.trace(loss, W, X)
    plan = Policy({"hidden": HALF}).plan(graph)
    again = Plan.from_json(plan.to_json())
    assert again == plan and set(again.regions[0].actions.values()) == {HALF}
    assert '"half"' in plan.to_json()
    text = plan.describe(graph)
    assert "3 × half hidden" in text and "keeps 3 values, 48.0 KiB" in text


def test_in_a_loop_of_a_plan():
    graph = jaxckpt.trace(scanned, W, X)
    (scan,) = (op for op in graph.ops if op.primitive == "scan")
    hidden = [value.index for value in graph.values if "hidden" in value.tags]
    plans = [
        Plan(
            (),
            graph.fingerprint,
            loops=(Loop(graph.ops.index(scan), checkpointed(5, (), dict.fromkeys(hidden, action))),),
        )
        for action in (SAVE, HALF)
    ]
    kept = [jaxckpt.residuals(plan.apply(scanned), W, X).kept_bytes for plan in plans]
    assert kept[0] - kept[1] == 5 * WIDE // 2


@pytest.mark.cuda
@pytest.mark.parametrize("fun", [loss, scanned], ids=lambda fun: fun.__name__)
def test_the_compiled_program_keeps_fewer_bytes(fun):
    """XLA would keep the wide value if it were free to fuse encoding with decoding."""
    w, x = jax.ShapeDtypeStruct((256, 2048), jnp.float32), jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    wide = 4096 * 2048 * 4
    layer = lambda w, x: jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x

    def unrolled(w, x, policy):
        for _ in range(8):
            x = jaxckpt.checkpoint(layer, policy=policy)(w, x)
        return jnp.sum(x**2)

    def looped(w, x, policy):
        step = jaxckpt.checkpoint(lambda x: layer(w, x), policy=policy, prevent_cse=False)
        return jnp.sum(jax.lax.scan(lambda x, _: (step(x), None), x, None, length=8)[0] ** 2)

    run = {loss: unrolled, scanned: looped}[fun]

    def peak(action):
        step = jax.value_and_grad(lambda w, x: run(w, x, Policy({"hidden": action})))
        return jaxckpt.measure(step, w, x, target="cuda:h100", generate_code=False).peak_bytes

    # eight halves less, but for what decoding needs at once
    assert peak(SAVE) - peak(HALF) > 2.5 * wide


@pytest.mark.cuda
@pytest.mark.parametrize("action", [HALF, compress("int8")], ids=str)
def test_the_planner_takes_it_where_it_pays(action):
    shapes = [jax.ShapeDtypeStruct((512, 2048), jnp.float32)] * 6, jax.ShapeDtypeStruct((8192, 512), jnp.float32)

    def mlp(ws, x):
        for w in ws:
            x = jnp.sin(jnp.tanh(x @ w)) @ w.T + x
        return jnp.sum(x**2)

    plain = jaxckpt.plan(mlp, *shapes, budget="75%", target="cuda:h100")
    changed = jaxckpt.plan(mlp, *shapes, budget="75%", target="cuda:h100", actions=(RECOMPUTE, SAVE, action))
    used = {action for region in changed.regions for action in region.actions.values()}
    assert action in used
    assert changed.measured_bytes <= changed.budget and changed.overhead < plain.overhead
    assert Plan.from_json(changed.to_json()).regions == changed.regions


def test_actions_are_values():
    assert Action("save") is not None and Action("save") == SAVE and action_from("OFFLOAD") == OFFLOAD
    assert len({SAVE, OFFLOAD, RECOMPUTE, HALF, Half()}) == 4
    for action in (SAVE, OFFLOAD, RECOMPUTE, HALF):
        assert copy.deepcopy(action) == pickle.loads(pickle.dumps(action)) == action_from(action.to_json()) == action
    assert {"save", "offload", "recompute", "half"} <= set(KINDS)
    assert hash(Region(0, 1, {0: SAVE})) == hash(Region(0, 1, {0: SAVE}))


def test_what_is_no_action_is_refused():
    for wrong in ("halves", 3, None, {"kind": "save", "bits": 3}, {"kind": 7}):
        with pytest.raises(ArgumentError):
            action_from(wrong)
    with pytest.raises(ArgumentError, match="half"):
        action_from("hafl")
    with pytest.raises(ArgumentError, match="RECOMPUTE and SAVE"):
        jaxckpt.plan(loss, W, X, budget="80%", target="cpu", actions=(SAVE, HALF))
    with pytest.raises(ArgumentError, match="nothing would be freed"):
        jaxckpt.plan(loss, W, X, budget="80%", target="cpu", actions=(RECOMPUTE, SAVE, OFFLOAD))


def test_one_more_action_makes_no_plan_dearer():
    """The CPU's compiler of jax 0.10 widens bfloat16 in loops, which the model does not know."""

    def scanned(ws, x):
        block = lambda x, w: (jnp.tanh(x @ w) @ w.T, None)
        return jnp.mean(jax.lax.scan(block, x, ws)[0] ** 2)

    args = jnp.ones((6, 16, 64)) / 8, jnp.ones((512, 16))
    half = jaxckpt.measure(jax.value_and_grad(scanned), *args, target="cpu").peak_bytes // 2
    plans = [
        jaxckpt.plan(scanned, *args, budget=half, target="cpu", actions=actions)
        for actions in ((RECOMPUTE, SAVE), (RECOMPUTE, SAVE, HALF))
    ]
    assert all(plan.measured_bytes <= half for plan in plans)
    assert 0 < plans[1].overhead <= plans[0].overhead * 1.0001


def test_an_action_has_a_kind_of_its_own():
    class Nameless(Action):
        pass

    with pytest.raises(ArgumentError, match="kind must be set in the class of an action.*got '.*Nameless'"):
        Nameless()
    with pytest.raises(ArgumentError, match="kind must be a name of its own.*It is that of .*Save"):

        class Another(Action):
            kind = "save"

    assert type(action_from("save")) is type(SAVE)


def test_a_plan_with_an_action_that_is_not_defined_says_so():
    plan = Plan((Region(0, 1, {2: HALF}),), jaxckpt.trace(loss, W, X).fingerprint)
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    known = KINDS.pop("half")
    try:
        with pytest.raises(PlanMismatchError, match="of kinds that are defined.*'half'.*Import what defines it"):
            Plan.from_json(text)
    finally:
        KINDS["half"] = known


def test_an_action_that_gives_back_something_else_is_refused():
    class Wrong(Action):
        kind = "wrong"
        changes = True

        def encode(self, x):
            return x

        def decode(self, stored, like):
            return stored[:1]

    try:
        with pytest.raises(ArgumentError, match=r"decode must be a function that returns float32\[128, 64\]"):
            jax.grad(jaxckpt.checkpoint(loss, policy=Policy({"hidden": Wrong()})))(W, X)
    finally:
        del KINDS["wrong"]


def test_what_is_kept_of_a_value_is_counted_unless_an_action_says_otherwise(monkeypatch):
    monkeypatch.setattr("jaxckpt.actions.base.KINDS", dict(KINDS))

    class Narrow(Action):
        kind = "narrow16"
        changes = True

        def encode(self, x):
            return x.astype(jnp.float16)

        def decode(self, stored, like):
            return stored.astype(like.dtype)

    value = jaxckpt.trace(jnp.tanh, X).values[-1]
    assert Narrow().device_bytes(value) == value.bytes // 2 and Narrow().host_bytes(value) == 0
    assert (Narrow() | OFFLOAD).host_bytes(value) == value.bytes // 2


@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("cost", None, "actions whose `cost` returns a Cost; Wrong's did not; got None"),
        ("device_bytes", "5", "`device_bytes` returns a whole number of at least 0; Wrong's did not; got '5'"),
        ("host_bytes", -5, "`host_bytes` returns a whole number of at least 0; Wrong's did not; got -5"),
        ("device_bytes", float("nan"), "`device_bytes` returns a whole number of at least 0"),
    ],
)
def test_what_an_action_says_is_checked(method, returned, message, monkeypatch):
    monkeypatch.setattr("jaxckpt.actions.base.KINDS", dict(KINDS))
    wrong = type("Wrong", (Action,), {"kind": "wrong", method: lambda self, value: returned})
    with pytest.raises(ArgumentError, match=re.escape(message)):
        jaxckpt.plan(loss, W, X, budget="60%", target="cpu", actions=(RECOMPUTE, SAVE, wrong()), verify=False)


@pytest.mark.parametrize("amount", [-1.0, float("nan"), float("inf"), "3", None])
def test_a_cost_is_a_finite_number(amount):
    with pytest.raises(ArgumentError, match="memory_bytes must be a finite number of at least 0"):
        Cost(memory_bytes=amount)


def test_the_kind_of_an_action_is_a_str():
    with pytest.raises(ArgumentError, match="kind must be a str in the class of an action"):
        type("Wrong", (Action,), {"kind": 5})


@pytest.mark.parametrize("kept", [None, "text", ("text", 1.0)])
def test_an_action_that_encodes_no_arrays_is_refused(kept):
    class Wrong(Action):
        kind = "wrong"
        changes = True

        def encode(self, x):
            return kept

        def decode(self, stored, like):
            return jnp.zeros(like.shape, like.dtype)

    try:
        with pytest.raises(ArgumentError, match="encode must be a function that returns arrays, as WRONG keeps them"):
            jax.grad(jaxckpt.checkpoint(loss, policy=Policy({"hidden": Wrong()})))(W, X)
    finally:
        del KINDS["wrong"]


ASIDE = []


def test_an_action_that_puts_a_value_aside_is_refused():
    """It would keep nothing, and decode would give every value the last one's gradient."""

    class Aside(Action):
        kind = "aside"
        changes = True

        def encode(self, x):
            ASIDE.append(x)
            return x

        def decode(self, stored, like):
            return ASIDE[-1]

    try:
        with pytest.raises(EffectsError, match=r"encode \(of ASIDE\) must not put traced values.* into ASIDE\[0\]"):
            jax.grad(jaxckpt.checkpoint(loss, policy=Policy({"hidden": Aside()})))(W, X)
    finally:
        del KINDS["aside"]
        ASIDE.clear()


def test_an_action_is_written_as_json():
    @dataclass(frozen=True)
    class Odd(Action):
        what: object = None
        kind = "odd"
        changes = True

    try:
        every = (RECOMPUTE, SAVE, Odd(object()))
        asked = lambda: Policy({"hidden": every[2]}), lambda: jaxckpt.plan(loss, W, X, budget="60%", actions=every)
        for ask in asked:
            with pytest.raises(ArgumentError, match="an action whose parameters are JSON values; got .*not JSON seri"):
                ask()
        assert Policy({"hidden": Odd(3)})
        odd = Odd((np.int64(3), ("a", np.float32(0.5))))
        plain = Odd((3, ("a", 0.5)))
        read = action_from(json.loads(json.dumps(odd.to_json())))
        assert odd == plain == read and len({odd, plain, read}) == 1 and read.parameters()["what"] == (3, ("a", 0.5))
        plan = Plan((Region(0, 1, actions={0: odd}),), "0" * 64)
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    finally:
        del KINDS["odd"]


def test_a_composition_has_no_part_that_saves():
    with pytest.raises(ArgumentError, match="parts must be actions that change or move what is kept"):
        action_from({"kind": "composed", "parts": ["save", "offload"]})
    assert SAVE | OFFLOAD == OFFLOAD


@pytest.mark.parametrize("wrap", [jax.checkpoint, jaxckpt.checkpoint], ids=["jax", "jaxckpt"])
def test_a_value_inside_of_a_checkpoint_of_the_users(wrap):
    block = wrap(lambda w, x: jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x)
    fun = lambda w, x: jnp.sum(block(w, block(w, block(w, x))) ** 2)
    exact = jax.grad(loss)(W, X)
    found = {}
    for action in (SAVE, HALF, compress("int8") | OFFLOAD):
        kept = jaxckpt.checkpoint(fun, policy=Policy({"hidden": action}))
        assert float(jnp.max(jnp.abs(jax.grad(kept)(W, X) - exact))) < 0.01 * float(jnp.max(jnp.abs(exact)))
        count = executions(jax.grad(kept), W, X)
        found[action] = jaxckpt.residuals(kept, W, X).kept_bytes, count["tanh"], count["dot_general"]
    size, *runs = found[SAVE]
    assert size == 3 * WIDE and runs[0] == 3
    assert found[HALF] == (size // 2, *runs)
    assert found[compress("int8") | OFFLOAD] == (3 * (WIDE // 4 + 128 * 4), *runs)


def test_under_a_schedule_of_scan_and_never_silently_saved_in_slots():
    def run(x, **how):
        body = lambda x, _: (jnp.sin(tag(jnp.tanh(x @ W), "hidden")) @ W.T + x, None)
        return jnp.sum(jaxckpt.scan(body, x, None, length=6, **how)[0] ** 2)

    def kept(action):
        policy = Policy({"hidden": action})
        return jaxckpt.residuals(lambda x: run(x, schedule="every", policy=policy), X).kept_bytes

    assert kept(SAVE) - kept(HALF) == 6 * WIDE // 2
    segmented = jax.grad(lambda x: run(x, schedule=3, policy=Policy({"hidden": HALF})))(X)
    exact = jax.grad(lambda x: run(x, schedule="none"))(X)
    assert jnp.allclose(segmented, exact, rtol=0.05, atol=0.02 * float(jnp.max(jnp.abs(exact))))
    with pytest.raises(ArgumentError, match="without HALF where the schedule is Slots"):
        run(X, schedule=jaxckpt.Slots(3), policy=Policy({"hidden": HALF}))


def test_an_action_that_moves_values_as_they_are_is_offload_in_scans_too(monkeypatch):
    monkeypatch.setitem(KINDS, "away", None)  # so that the kind is taken away again
    del KINDS["away"]
    away = type("Away", (Action,), {"kind": "away", "on_host": True})()

    def moved(carry, schedule):
        body = lambda x, _: (jnp.sin(jnp.tanh(x @ W) @ W.T) + x, None)
        loss = lambda x: jnp.sum(jaxckpt.scan(body, x, None, length=12, schedule=schedule, carry=carry)[0])
        return str(jax.make_jaxpr(jax.grad(loss))(X)).count("<host>"), jax.grad(loss)(X)

    for schedule in ("every", 3, jaxckpt.Slots(4)):
        (count, gradient), (expected, exact), (none, _) = (moved(each, schedule) for each in (away, OFFLOAD, SAVE))
        assert count == expected > none == 0
        assert jnp.array_equal(gradient, exact)
    with pytest.raises(ArgumentError, match="carry must be SAVE where the schedule has host slots"):
        moved(away, jaxckpt.Slots(4, host=4))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("save", SAVE),
        (" OFFLOAD ", OFFLOAD),
        ("compress(int8)", compress("int8")),
        ("Compress( 'int8' )", compress("int8")),
        ("compress(int8) | offload", compress("int8") | OFFLOAD),
        ("save|offload", OFFLOAD),
    ],
)
def test_an_action_as_text(text, action):
    assert action_from(text) == action
    assert Policy({"hidden": text}) == Policy({"hidden": action})
    assert jaxckpt.policies.parse(f"hidden={text}, op(dot_general)=save").rules[0][1] == action


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("save(int8)", "with a parameter only if it has one; got 'save\\(int8\\)'"),
        ("int8", "one of recompute, save.* got 'int8'. Write compress\\('int8'\\)"),
        ("compres(int8)", "one of recompute, save.* got 'compres'. Did you mean 'compress'"),
        ("compress(int9)", "form must be one of .* got 'int9'"),
        ("compress(int8", "one of recompute, save"),
        ("|", "one of recompute, save"),
        ("offload | compress(int8)", "Write compress"),
    ],
)
def test_a_text_that_is_no_action_is_refused(text, message):
    with pytest.raises(ArgumentError, match=message):
        action_from(text)


@pytest.mark.parametrize("name", ["a@b", "@", "jaxckpt@x", "a:b@{}"])
def test_any_tag_names_what_is_kept(name):
    fun = lambda w, x: jnp.sum(jnp.sin(tag(jnp.tanh(x @ w), name)))
    for action, size in ((SAVE, WIDE), (HALF, WIDE // 2)):
        checkpointed = jaxckpt.checkpoint(fun, policy=Policy([(jaxckpt.op("tanh"), action)]))
        assert jaxckpt.residuals(checkpointed, W, X).kept_bytes == size


@pytest.mark.parametrize("inside", [SAVE, HALF], ids=repr)
@pytest.mark.parametrize("outside", [SAVE, HALF, RECOMPUTE], ids=repr)
def test_a_checkpoint_around_one_that_keeps_otherwise(inside, outside):
    """The outer one decides on what is inside of the inner one anew, in loops and out of them."""
    block = lambda w, x: jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T
    inner = jaxckpt.checkpoint(block, policy=Policy({"hidden": inside}))

    def model(block):
        return lambda w, x: jnp.sum(
            jax.lax.scan(lambda x, _: (block(w, x) + x, None), jnp.sin(block(w, x)), None, length=3)[0] ** 2
        )

    outer = jaxckpt.checkpoint(model(inner), policy=Policy({"hidden": outside}))
    (value, gradient), (expected, exact) = (jax.value_and_grad(f)(W, X) for f in (outer, model(block)))
    assert value == expected
    assert float(jnp.max(jnp.abs(gradient - exact))) < 0.01 * float(jnp.max(jnp.abs(exact)))
    each = {SAVE: WIDE, HALF: WIDE // 2, RECOMPUTE: 0}[outside]
    assert jaxckpt.residuals(outer, W, X).kept_bytes == 4 * each


def test_no_second_derivative_passes_integers_that_are_kept_of_floats():
    class Bytes(Action):
        kind = "bytes"
        changes = True

        def admits(self, value):
            return value.dtype == jnp.float32

        def encode(self, x):
            scale = jnp.max(jnp.abs(x)) / 127
            return jnp.round(x / scale).astype(jnp.int8), scale

        def decode(self, stored, like):
            return stored[0].astype(like.dtype) * stored[1]

    try:
        wave = lambda x: jnp.sin(tag(3 * x, "h")).sum()
        kept, x = jaxckpt.checkpoint(wave, policy=Policy({"h": Bytes()})), jnp.linspace(0.1, 1.0, 8)
        expected = jax.grad(wave)(x)
        assert 0 < jnp.max(jnp.abs(jax.grad(kept)(x) - expected)) < 0.1
        twice = lambda x: jax.grad(lambda x: jax.grad(kept)(x).sum())(x)
        for second in (jax.hessian(kept), twice, jax.jit(twice)):
            with pytest.raises(jaxckpt.ForwardModeError, match="a second one was asked for"):
                second(x)
        half = jaxckpt.checkpoint(wave, policy=Policy({"h": HALF}))
        assert jnp.allclose(jax.hessian(half)(x), jax.hessian(wave)(x), atol=0.1), "floats pass it"
    finally:
        KINDS.pop("bytes")


def test_a_plan_may_name_what_is_saved_as_it_is():
    fun = lambda x: jnp.sin(jnp.sin(x).sum())
    x = jnp.ones((4, 8))
    graph = jaxckpt.trace(fun, x)
    for action in (compress("bfloat16"), compress("int8", block=32)):
        plan = Plan((Region(0, len(graph.ops), {graph.ops[1].outputs[0]: action}),), graph.fingerprint)
        assert "4 B" in str(plan.describe(graph))
        assert jnp.allclose(jax.grad(plan.apply(fun))(x), jax.grad(fun)(x))
    assert "nothing" in str(Plan((Region(2, 2, {}),), graph.fingerprint).describe(graph))


def test_the_error_of_an_action_that_says_none_is_that_of_a_sample():
    class Rounds(Half):
        kind = "rounds"
        error = Action.error

        def admits(self, value):
            return True

    class Signs(Action):
        kind = "signs"
        changes = True

        def encode(self, x):
            return {"sign": jnp.sign(x), "size": jnp.abs(x)}

        def decode(self, stored, like):
            return stored["sign"] * stored["size"]

    try:
        assert 2**-10 < Rounds().error(jnp.float32) < 2**-8 and Rounds().error(jnp.bfloat16) == 0
        assert Signs().error("float32") == Signs().error(jnp.bfloat16) == Signs().error(jnp.int32) == 0
        assert Signs().error(jax.random.key(0).dtype) == 0
        with pytest.raises(ArgumentError, match="both round values"):
            Rounds() | compress("int8")
        assert repr(Signs() | compress("int8")) == "SIGNS | compress('int8')"
        rounded = jaxckpt.checkpoint(loss, policy=Policy({"hidden": Rounds()}))
        (report,) = jaxckpt.verify(rounded, loss, W, X).per_action
        assert report.action == Rounds() and 0 < report.rel_error < 0.1
        exact = jaxckpt.checkpoint(loss, policy=Policy({"hidden": Signs()}))
        assert not jaxckpt.verify(exact, loss, W, X).per_action
    finally:
        for kind in ("rounds", "signs"):
            KINDS.pop(kind, None)


def test_what_jaxckpt_has_says_its_error_itself():
    """A sample would show none of a mesh, and numbers that a narrow form is not given."""
    exact = RECOMPUTE, SAVE, OFFLOAD, compress("bits"), action_from({"kind": "narrow", "dtype": "int8"}), shard("m")
    assert all(action.error(jnp.int32) == action.error(jnp.float32) == 0 for action in exact)
    assert compress("bfloat16").error(jnp.float32) > 0
    assert all("error" in vars(kind) for kind in KINDS.values() if kind.changes is True)


def test_an_action_of_a_file_that_nothing_defines_is_to_be_imported():
    with pytest.raises(ArgumentError, match="Import what defines the action 'levels' first"):
        action_from({"kind": "levels", "bits": 8})
