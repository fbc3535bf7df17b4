"""Scans run in runs and segments: values, gradients, what is kept and how often the body runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import OFFLOAD, SAVE, PlanMismatchError, compress
from jaxckpt.core.graph import trace
from jaxckpt.core.lift import count_flops
from jaxckpt.core.plan import Loop, Plan
from jaxckpt.schedules import checkpointed, in_turn

LENGTH, WIDTH = 12, 16


def loss(ws, x, reverse=False):
    def body(c, w):
        c = jnp.tanh(c @ w)
        return c, jnp.sum(c)

    x, ys = jax.lax.scan(body, x, ws, reverse=reverse)
    return jnp.sum(x**2) + jnp.sum(ys * jnp.arange(LENGTH))


def arguments():
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (LENGTH, WIDTH, WIDTH)) / 4, jax.random.normal(keys[1], (64, WIDTH))


def looped(reverse, *runs):
    args = arguments()
    graph = trace(lambda *a: loss(*a, reverse), *args)
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    return Plan((), graph.fingerprint, loops=(Loop(place, in_turn(*runs)),)), graph, place


def body_value(graph, place, primitive):
    return next(op.outputs[0] for op in graph.ops[place].bodies[0].ops if op.primitive == primitive)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "runs",
    [
        (checkpointed(12),),
        (checkpointed(12, (4,)),),
        (checkpointed(12, (5,)),),
        (checkpointed(12, (6, 2)),),
        (checkpointed(11, (4, 3)), checkpointed(1)),
        (checkpointed(3), checkpointed(5, (2,)), checkpointed(4, (4,))),
        (checkpointed(5), checkpointed(7, remat=False)),
        (checkpointed(8, (3,), remat=False), checkpointed(4, (), remat=False)),
    ],
)
def test_a_loop_has_the_scan_s_values_and_gradients(runs, reverse):
    """In float64: some gradients are small differences of large terms, and how they round differs from CPU to CPU."""
    with jax.enable_x64(True):
        plan, *_ = looped(reverse, *runs)
        args = arguments()
        assert args[0].dtype == np.float64
        planned = plan.apply(lambda *a: loss(*a, reverse))
        value, gradient = jax.jit(jax.value_and_grad(planned, argnums=(0, 1)))(*args)
        expected, wanted = jax.value_and_grad(lambda *a: loss(*a, reverse), argnums=(0, 1))(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for a, b in zip(gradient, wanted):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def flops(plan, reverse=False):
    return count_flops(jax.grad(plan.apply(lambda *a: loss(*a, reverse))), *arguments())


def test_segments_run_the_body_once_more_and_kept_matmuls_do_not_run_again():
    matmul = 2 * 64 * WIDTH * WIDTH
    bare, *_ = looped(False, checkpointed(12))
    graph = trace(loss, *arguments())
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    dot = body_value(graph, place, "dot_general")
    plain = count_flops(jax.grad(loss), *arguments())
    assert flops(bare) - plain >= 12 * matmul
    kept, *_ = looped(False, checkpointed(12, (), {dot: SAVE}))
    assert flops(kept) - plain < matmul
    half, *_ = looped(False, checkpointed(6, (), {dot: SAVE}), checkpointed(6))
    assert 6 * matmul <= flops(half) - plain < 7 * matmul
    nested, *_ = looped(False, checkpointed(12, (4,)))
    assert flops(nested) - flops(bare) >= 11 * matmul


def test_iterations_that_are_left_as_they_stand_do_not_run_again():
    matmul = 2 * 64 * WIDTH * WIDTH
    plain = count_flops(jax.grad(loss), *arguments())
    stands, *_ = looped(False, checkpointed(12, remat=False))
    assert flops(stands) - plain < matmul
    half, *_ = looped(False, checkpointed(5), checkpointed(7, remat=False))
    assert 5 * matmul <= flops(half) - plain < 6 * matmul
    segments, *_ = looped(False, checkpointed(12, (4,), remat=False))
    once, *_ = looped(False, checkpointed(12))
    assert flops(segments) == pytest.approx(flops(once), abs=matmul), (
        "a segment that stands as it is runs once more, not twice"
    )


def test_segments_keep_their_carries_and_no_others():
    segmented, *_ = looped(False, checkpointed(12, (4,)))
    each, *_ = looped(False, checkpointed(12))
    carry = 64 * WIDTH * 4

    def kept(plan):
        return jaxckpt.residuals(lambda ws, x: plan.apply(lambda *a: loss(*a, False))(ws, x), *arguments()).kept_bytes

    assert kept(each) - kept(segmented) == (12 - 3) * carry, "weights in another shape are no other buffer"


def of_carry(action, lengths=(), saved=""):
    """Returns (plan, graph) of the scan whose carry is kept by an action; beside it the results of a primitive."""
    graph = trace(loss, *arguments())
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    actions = {body_value(graph, place, saved): SAVE} if saved else {}
    carry = graph.ops[place].bodies[0].inputs[0]
    schedule = checkpointed(LENGTH, lengths, actions, carries={carry: action})
    return Plan((), graph.fingerprint, loops=(Loop(place, schedule),)), graph


@pytest.mark.parametrize(
    ("lengths", "saved"), [((), ""), ((), "dot_general"), ((4,), ""), ((5,), "dot_general"), ((6, 2), "")]
)
def test_carries_are_kept_in_another_form(lengths, saved):
    """As `jaxckpt.scan` keeps them: the forward pass is exact, and what runs again starts from what is restored."""
    action = compress("bfloat16")
    plan, graph = of_carry(action, lengths, saved)
    (ws, x), planned = arguments(), plan.apply(loss)
    value, gradient = jax.jit(jax.value_and_grad(planned, argnums=(0, 1)))(ws, x)
    exact, wanted = jax.value_and_grad(loss, argnums=(0, 1))(ws, x)
    assert float(value) == pytest.approx(float(exact), rel=1e-6)
    errors = [np.linalg.norm(np.asarray(a - b)) / np.linalg.norm(np.asarray(b)) for a, b in zip(gradient, wanted)]
    assert errors[0] > 1e-4 and max(errors) < 3e-2, "bfloat16 rounds to 2^-8"
    carry = 64 * WIDTH * 4
    kept = lambda plan: jaxckpt.residuals(plan.apply(loss), ws, x).kept_bytes
    saves, _ = of_carry(SAVE, lengths, saved)
    starts = -(-LENGTH // lengths[0]) if lengths else LENGTH
    assert kept(saves) - kept(plan) == pytest.approx(starts * carry // 2, abs=carry), (
        "half, but for the scan's own input"
    )
    assert Plan.from_json(plan.to_json()) == plan != saves
    if lengths:
        assert f"in segments of {lengths[0]} (compress('bfloat16') their carries)" in str(plan)
        assert "their carries" in plan.describe(graph)


@pytest.mark.cuda
@pytest.mark.parametrize("lengths", [(), (4,)])
def test_carries_on_the_host_leave_the_device(lengths):
    struct = jax.ShapeDtypeStruct
    args = struct((LENGTH, 256, 256), jnp.float32), struct((2048, 256), jnp.float32)
    graph = trace(loss, *args)
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    carry, found = graph.ops[place].bodies[0].inputs[0], {}
    for action in SAVE, OFFLOAD, compress("int8") | OFFLOAD:
        schedule = checkpointed(LENGTH, lengths, carries={carry: action})
        plan = Plan((), graph.fingerprint, loops=(Loop(place, schedule),))
        found[action] = jaxckpt.measure(
            jax.value_and_grad(plan.apply(loss)), *args, target="cuda:h100", generate_code=False
        )
    size, starts = 2048 * 256 * 4, 3 if lengths else LENGTH
    saved, moved, both = found.values()
    assert saved.host_bytes == 0 and moved.host_bytes == starts * size
    assert starts * size // 4 <= both.host_bytes <= starts * size * 0.26 + 4096, "and scales"
    assert saved.peak_bytes - moved.peak_bytes >= (starts - 2) * size


def test_what_is_no_carry_has_no_action_at_the_start_of_a_segment():
    graph = trace(loss, *arguments())
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    body = graph.ops[place].bodies[0]
    for index in body.inputs[1], body.ops[0].outputs[0]:
        plan = Plan((), graph.fingerprint, loops=(Loop(place, checkpointed(12, (4,), carries={index: OFFLOAD})),))
        with pytest.raises(PlanMismatchError, match=r"at the start of a segment .* a carry; got value"):
            plan.check(graph)


def test_a_loop_goes_through_json_and_prints():
    graph = trace(loss, *arguments())
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    dot = body_value(graph, place, "dot_general")
    plan = Plan(
        (), graph.fingerprint, loops=(Loop(place, in_turn(checkpointed(8, (4,), {dot: SAVE}), checkpointed(4))),)
    )
    assert Plan.from_json(plan.to_json()) == plan
    text = plan.describe(graph)
    assert "8 iterations, in segments of 4" in text and "dot_general" in text
    assert (
        "8 iterations, in segments of 4, each keeps 1 value while its segment runs again, then 4 iterations, each"
        in str(plan)
    )
    stands = Plan((), graph.fingerprint, loops=(Loop(place, in_turn(checkpointed(9), checkpointed(3, remat=False))),))
    assert (
        Plan.from_json(stands.to_json())
        == stands
        != Plan((), graph.fingerprint, loops=(Loop(place, in_turn(checkpointed(9), checkpointed(3))),))
    )
    assert "3 iterations: left to JAX" in stands.describe(graph)
    assert "9 iterations, each keeps its carry alone, then 3 iterations left to JAX" in str(stands)


@pytest.mark.parametrize(
    "change", [lambda p: (p, checkpointed(11)), lambda p: (p - 1, checkpointed(12)), lambda p: (p, checkpointed(13))]
)
def test_a_loop_that_is_no_scan_of_the_function_is_refused(change):
    _, graph, place = looped(False, checkpointed(12))
    op, run = change(place)
    with pytest.raises(PlanMismatchError):
        plan = Plan((), graph.fingerprint, loops=(Loop(op, run),))
        plan.apply(lambda *a: loss(*a, False))(*arguments())


def test_a_run_without_iterations_is_refused():
    with pytest.raises(PlanMismatchError):
        checkpointed(0)
    with pytest.raises(PlanMismatchError):
        checkpointed(3, (0,))


@pytest.mark.parametrize(("unroll", "wanted"), [(1, 1), (4, 4), (12, 1), (True, 1)])
def test_a_loop_s_iterations_are_unrolled_as_the_user_said(unroll, wanted):
    """But not all of them: what is no loop any more, XLA merges with the first run."""

    def unrolled(ws, x):
        return jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws, unroll=unroll)[0])

    args = arguments()
    graph = trace(unrolled, *args)
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    plan = Plan((), graph.fingerprint, loops=(Loop(place, checkpointed(LENGTH)),))
    planned = plan.apply(unrolled)
    assert [op.params["unroll"] for op in trace(planned, *args).walk() if op.primitive == "scan"] == [wanted]
    np.testing.assert_allclose(jax.grad(planned)(*args), jax.grad(unrolled)(*args), rtol=1e-4, atol=1e-5)
