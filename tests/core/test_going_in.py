"""What goes into a region is kept by an action: gradients, bytes, and what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import OFFLOAD, SAVE, Plan, PlanMismatchError, Region, compress
from jaxckpt.show.tree import plan_lines

ROWS, WIDTH, BLOCKS = 64, 16, 4


def block(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w.T)


def loss(ws, x):
    for w in ws:
        x = block(x, w)
    return jnp.sum(x**2)


def arguments(rows=ROWS, width=WIDTH):
    keys = jax.random.split(jax.random.key(0), BLOCKS + 1)
    ws = [jax.random.normal(key, (width, 2 * width)) / width for key in keys[1:]]
    return ws, jax.random.normal(keys[0], (rows, width))


def of_inputs(args, action, checkpoint_of=block):
    """Returns (plan, graph) with a region for each block, that keeps what goes into all but the first by an action."""
    graph = jaxckpt.trace(loss, *args)
    sums = [place for place, op in enumerate(graph.ops) if op.primitive == "add"]
    ends = [0, *(place + 1 for place in sums)]
    regions = [Region(0, ends[1], tied=True)]
    for start, stop in itertools.pairwise(ends[1:]):
        actions = {} if action is None else {graph.ops[start - 1].outputs[0]: action}
        regions.append(Region(start, stop, actions, tied=True))
    return Plan(regions, graph.fingerprint), graph


def test_gradients_come_from_what_is_restored():
    args = arguments()
    plan, graph = of_inputs(args, compress("bfloat16"))
    value, gradient = jax.jit(jax.value_and_grad(plan.apply(loss), argnums=(0, 1)))(*args)
    exact, wanted = jax.value_and_grad(loss, argnums=(0, 1))(*args)
    assert float(value) == pytest.approx(float(exact), rel=1e-6)
    errors = [
        np.linalg.norm(np.asarray(a - b)) / np.linalg.norm(np.asarray(b))
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted))
    ]
    assert errors[0] < 1e-2 and min(errors[1:-1]) > 1e-4 and max(errors) < 1e-2, "of all weights but the first"
    assert Plan.from_json(plan.to_json()) == plan != of_inputs(args, None)[0]
    assert "keeps 1 value (compress('bfloat16') 1 value)" in str(plan)
    assert f"{BLOCKS - 1} times" in "\n".join(plan_lines(plan, graph)), "equal blocks are told once"


def test_less_is_kept():
    args = arguments()
    kept = [
        jaxckpt.residuals(of_inputs(args, a)[0].apply(loss), *args).kept_bytes for a in (None, compress("bfloat16"))
    ]
    assert kept[0] - kept[1] == (BLOCKS - 1) * ROWS * WIDTH * 4 // 2


@pytest.mark.cuda
@pytest.mark.parametrize("action", [OFFLOAD, compress("int8")], ids=str)
def test_the_device_holds_less(action):
    """Compiled: as with a policy that names the input in each block."""
    rows, width = 8192, 256
    args = jax.eval_shape(lambda: arguments(rows, width))
    found = {}
    for each in (None, action):
        planned = of_inputs(args, each)[0].apply(loss)
        found[each] = jaxckpt.measure(jax.value_and_grad(planned), *args, target="cuda:h100", generate_code=False)
    size = rows * width * 4
    assert found[None].host_bytes == 0
    assert found[action].host_bytes == ((BLOCKS - 1) * size if action is OFFLOAD else 0)
    assert found[None].peak_bytes - found[action].peak_bytes > 0.9 * size


@pytest.mark.parametrize("twice", [False, True])
def test_a_value_that_its_own_region_saves_may_be_kept_otherwise_by_the_next(twice):
    args = arguments()
    plan, graph = of_inputs(args, compress("bfloat16"))
    first, second, *rest = plan.regions
    (index,) = second.actions
    plan = Plan((Region(0, first.stop, {index: SAVE} if twice else {}), second, *rest), graph.fingerprint)
    value, gradient = jax.value_and_grad(plan.apply(loss))(*args)
    exact, wanted = jax.value_and_grad(loss)(*args)
    assert float(value) == pytest.approx(float(exact), rel=1e-6)
    for a, b in zip(gradient, wanted):
        assert np.linalg.norm(np.asarray(a - b)) < 1e-2 * np.linalg.norm(np.asarray(b))


def test_what_cannot_be_kept_so_is_refused():
    args = arguments()
    plan, graph = of_inputs(args, OFFLOAD)
    _, second, *_ = plan.regions
    (index,) = second.actions
    for regions in (
        (Region(second.start, second.stop, {index: SAVE}),),
        (Region(plan.regions[2].start, plan.regions[2].stop, {index: OFFLOAD}),),
        (Region(second.start, plan.regions[2].stop, {index: OFFLOAD}, (second,)),),
    ):
        with pytest.raises(PlanMismatchError, match="that the region .* makes and that can be kept; got value"):
            Plan(regions, graph.fingerprint).check(graph)
