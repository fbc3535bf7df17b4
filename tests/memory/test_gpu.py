"""On a GPU of this machine, with JAX_PLATFORMS=cuda: what is measured without a device holds on one; a plan runs where
the step does not; transforms, actions, schedules and tiles compute what JAX computes.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxckpt
from benchmarks import gpu
from jaxckpt import OFFLOAD, RECOMPUTE, SAVE, Policy, Slots, compress, tag
from jaxckpt.cli import main
from jaxckpt.memory.chips import CHIPS
from jaxckpt.memory.targets import target_of
from jaxckpt.models import gpt, resnet, unet

pytestmark = pytest.mark.gpu

ROOT = pathlib.Path(__file__).parents[2]
LAYERS, ROWS, WIDTH = 8, 4096, 256
UP = LAYERS * ROWS * 4 * WIDTH * 4  # bytes of all that is called "up"


@pytest.fixture(autouse=True)
def exact():
    """Matmuls of float32 are not rounded to TensorFloat-32."""
    with jax.default_matmul_precision("highest"):
        yield


def needs_compiler():
    """The name of this machine's GPU as a target that need not be here."""
    named = gpu.chip()
    if named.local:
        pytest.skip(f"no compiler for {jax.devices()[0].device_kind} as one that is elsewhere")
    return named.name


def layers(policy, scanned=True):
    layer = jaxckpt.checkpoint(lambda x, w: x + jnp.sin(tag(x @ w[0], "up")) @ w[1], policy=policy)

    def loss(ws, x):
        if scanned:
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, ws)
        else:
            for each in zip(*ws):
                x = layer(x, each)
        return jnp.sum(x**2)

    return loss


def stack():
    keys = jax.random.split(jax.random.key(0), 3)
    ws = (
        0.05 * jax.random.normal(keys[0], (LAYERS, WIDTH, 4 * WIDTH)),
        0.05 * jax.random.normal(keys[1], (LAYERS, 4 * WIDTH, WIDTH)),
    )
    return ws, 0.1 * jax.random.normal(keys[2], (ROWS, WIDTH))


def assert_like(actual, expected, rtol=1e-4):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= rtol * max(np.abs(b).max(), 1e-6)


# ----------------------------------------------------------------------------------------------------------- the target


def test_the_device_is_known():
    target = target_of()
    assert target.name == "cuda" and target.local and target.count == len(jax.devices())
    row = CHIPS[needs_compiler().partition(":")[2]]
    assert target.flops == row.flops and target.bandwidth == row.bandwidth
    # An allocator takes a share of the memory: 75% by default.
    assert 0.1 * row.memory_bytes < target.memory_bytes <= 1.02 * row.memory_bytes
    assert "yes" in next(line for line in str(jaxckpt.targets()).splitlines() if line.startswith("cuda "))


MODELS = {
    "gpt": functools.partial(gpt.small, width=256, tokens=256, batch=16),
    "gpt, bfloat16": functools.partial(gpt.small, width=256, tokens=256, batch=16, dtype=jnp.bfloat16),
    "resnet": functools.partial(resnet.small, batch=64),
    "unet": unet.small,
}


@pytest.mark.parametrize("model", MODELS)
def test_bytes_without_a_device_are_those_on_the_device(model):
    """XLA chooses kernels by timing them here, and by rule there: what its libraries use besides may differ."""
    loss, args = MODELS[model]()
    away = jaxckpt.measure(jax.value_and_grad(loss), *args, target=needs_compiler(), generate_code=False)
    here = jaxckpt.measure(jax.value_and_grad(loss), *args)
    assert here.target == "cuda"
    assert here.peak_bytes == pytest.approx(away.peak_bytes, rel=0.05)
    assert (here.argument_bytes, here.output_bytes) == (away.argument_bytes, away.output_bytes)


# ------------------------------------------------------------------------------------------------------- plans that run

RUN = """
import json, sys
import jax
import jaxckpt
from jaxckpt.models import gpt

path, = sys.argv[1:]
loss, args = gpt.small(width=512, tokens=512, batch=32, layers=8, real=True)
fun = jaxckpt.Plan.load(path).apply(loss) if path else loss
value, _ = jax.block_until_ready(jax.jit(jax.value_and_grad(fun))(*args))
stats = jax.local_devices()[0].memory_stats()
print(json.dumps({"loss": float(value), "peak": stats["peak_bytes_in_use"], "limit": stats["bytes_limit"]}))
"""


def run(path, **environment):
    """Runs a step in a process of its own: what it says, or the error's text."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr


def test_a_plan_runs_in_memory_that_the_step_does_not_fit(tmp_path):
    """The plan is made without the device. The allocator's peak is what the compiler said, and a process that has the
    budget and a tenth trains with the plan and not without.
    """
    named = needs_compiler()
    loss, args = gpt.small(width=512, tokens=512, batch=32, layers=8)
    plan = jaxckpt.plan(loss, *args, budget="50%", target=named)
    plan.save(tmp_path / "plan.json")
    free = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    bare, planned = run("", **free), run(tmp_path / "plan.json", **free)
    assert planned["loss"] == pytest.approx(bare["loss"], rel=1e-5)
    assert planned["peak"] == pytest.approx(plan.measured_bytes, rel=0.05)
    assert bare["peak"] == pytest.approx(plan.unplanned_bytes, rel=0.05)
    whole = bare["limit"] / float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
    little = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{1.1 * plan.budget / whole:.5f}"}
    assert "RESOURCE_EXHAUSTED" in run("", **little)
    assert run(tmp_path / "plan.json", **little)["loss"] == planned["loss"]


@pytest.mark.parametrize("model", MODELS)
def test_plans_made_on_the_device_fit_and_compute_the_same(model):
    loss, args = MODELS[model](real=True)
    plan = jaxckpt.plan(loss, *args, budget="60%")
    assert plan.measured_bytes <= plan.budget < plan.unplanned_bytes
    assert jaxckpt.measure(jax.value_and_grad(plan.apply(loss)), *args).peak_bytes == plan.measured_bytes
    (value, grads), (expected, gradients) = (
        jax.jit(jax.value_and_grad(each))(*args) for each in (plan.apply(loss), loss)
    )
    rtol = 0.05 if "bfloat16" in model else 2e-3
    assert_like(value, expected, rtol)
    assert_like(grads, gradients, rtol)


def test_seconds_measured_on_the_device():
    loss, args = gpt.small(width=256, tokens=256, batch=16)
    plan = jaxckpt.plan(loss, *args, budget="60%", costs="measured")
    assert plan.measured_bytes <= plan.budget


def test_autocheckpoint_plans_by_itself():
    loss, args = gpt.small(width=256, tokens=256, batch=16, real=True)
    peak = jaxckpt.measure(jax.value_and_grad(loss), *args).peak_bytes
    under = jaxckpt.autocheckpoint(budget=int(0.6 * peak))(loss)
    assert_like(jax.jit(jax.grad(under))(*args), jax.jit(jax.grad(loss))(*args), 2e-3)
    assert jaxckpt.measure(jax.value_and_grad(under), *args).peak_bytes <= 0.6 * peak


def test_the_command_times_the_plan_here(capsys, tmp_path):
    assert main(["plan", "gpt_small", "--budget", "60%", "--time", "--output", str(tmp_path / "plan.json")]) == 0
    assert "run on cuda" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------- transforms


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("action", [SAVE, RECOMPUTE, OFFLOAD, compress("bits"), compress("int8") | OFFLOAD], ids=str)
def test_actions_compute_what_jax_computes(action, scanned):
    args = stack()
    plain = jax.jit(jax.value_and_grad(layers(None, scanned)))(*args)
    found = jax.jit(jax.value_and_grad(layers(Policy({"up": action}), scanned)))(*args)
    assert_like(found, plain, 1e-4 if "int8" not in str(action) else 2e-2)


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
def test_what_goes_to_the_host_leaves_the_device(scanned):
    ws, x = stack()
    none, saved, away = (
        jaxckpt.measure(jax.value_and_grad(layers(Policy({"up": action}), scanned)), ws, x)
        for action in (RECOMPUTE, SAVE, OFFLOAD)
    )
    assert saved.peak_bytes - none.peak_bytes > 0.8 * UP
    assert away.host_bytes == pytest.approx(UP, rel=0.01)
    assert away.peak_bytes <= none.peak_bytes + 3 * UP / LAYERS


def test_a_plan_may_move_values_to_the_host():
    ws, x = stack()
    loss = layers(Policy({"up": SAVE}), False)
    actions = (RECOMPUTE, SAVE, OFFLOAD)
    plan = jaxckpt.plan(loss, ws, x, budget="60%", actions=actions, respect_checkpoints=False)
    assert plan.measured_bytes <= plan.budget
    assert_like(jax.jit(jax.grad(plan.apply(loss)))(ws, x), jax.jit(jax.grad(loss))(ws, x))


SCHEDULES = ["every", "sqrt", 25, (20, 11), "log", Slots(6), Slots(4, host=8)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_scans_compute_what_lax_scan_computes(schedule):
    w = 0.1 * jax.random.normal(jax.random.key(0), (64, 64))
    xs = jax.random.normal(jax.random.key(1), (203, 16, 64))

    def loss(scan, w, xs):
        final, ys = scan(lambda c, x: ((c := jnp.tanh(c @ w + x)), c.sum()), jnp.zeros((16, 64)), xs)
        return jnp.sum(final**2) + jnp.mean(ys)

    fun = functools.partial(loss, functools.partial(jaxckpt.scan, schedule=schedule))
    plain = functools.partial(loss, lax.scan)
    found, expected = (jax.jit(jax.value_and_grad(each, (0, 1)))(w, xs) for each in (fun, plain))
    assert_like(found, expected)
    temporaries = [jaxckpt.measure(jax.value_and_grad(each, (0, 1)), w, xs).temp_bytes for each in (fun, plain)]
    assert temporaries[0] < temporaries[1]


def test_a_tiled_head_takes_a_tile():
    keys = jax.random.split(jax.random.key(0), 3)
    x, head = jax.random.normal(keys[0], (4096, 256)), 0.05 * jax.random.normal(keys[1], (256, 32_000))
    labels = jax.random.randint(keys[2], (4096,), 0, 32_000)

    def loss(x, head, labels):
        logits = x @ head
        picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, 1) - picked)

    tiled = jaxckpt.tile(loss, in_axes=(0, None, 0), tiles=16)
    found, expected = (jax.jit(jax.value_and_grad(each, (0, 1)))(x, head, labels) for each in (tiled, loss))
    assert_like(found, expected)
    peaks = [jaxckpt.measure(jax.value_and_grad(each, (0, 1)), x, head, labels).temp_bytes for each in (tiled, loss)]
    assert peaks[0] < peaks[1] / 4
