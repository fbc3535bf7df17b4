"""Scans whose carries lie over several devices: the results are lax.scan's, and so are the layouts; each device keeps
its share.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.memory.report import measure
from jaxckpt.memory.targets import Target
from jaxckpt.schedules import Slots
from jaxckpt.transforms.scan import scan

PROGRAM = """
import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt import Slots, scan

SCHEDULES = ("none", "every", "sqrt", "log", 7, (3, 15), Slots(5), Slots(60))
keys = jax.random.split(jax.random.key(0), 3)
w, h, xs = (jax.random.normal(key, shape) * 0.3 for key, shape in zip(keys, [(16, 16), (8, 16), (45, 8, 16)]))


def loss(run, reduce):
    def fun(w, h, xs):
        def step(carry, x):
            h, count = carry
            h = jnp.tanh(h @ w + x)
            h = h + 0.1 * reduce(h)
            return (h, count + 1), h * 2

        (h, _), ys = run(step, (h, 0), xs)
        return jnp.sum(h**2) + jnp.mean(ys)

    return fun


def layouts(mesh, reduce, wrap):
    def gradients(run):
        return jax.jit(jax.value_and_grad(wrap(loss(run, reduce)), argnums=(0, 1, 2)))(*args)

    specs = P(), P("b"), P(None, "b")
    args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((w, h, xs), specs)]
    expected = gradients(jax.lax.scan)
    for schedule in SCHEDULES:
        found = gradients(lambda *args: scan(*args, schedule=schedule))
        pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(found)))
        error = max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)
        yield str(schedule), error, all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)


def manual(fun):
    body = lambda *args: jax.lax.psum(fun(*args), "b")
    return jax.shard_map(body, mesh=mesh, in_specs=(P(), P("b"), P(None, "b")), out_specs=P())


kind = sys.argv[1]
mesh = jax.make_mesh((4,), ("b",), axis_types=(AxisType.Explicit if kind == "explicit" else AxisType.Auto,))
if kind == "explicit":
    jax.set_mesh(mesh)
if kind == "shard_map":
    print(json.dumps(list(layouts(mesh, lambda h: jax.lax.pmean(h, "b"), manual))))
else:
    print(json.dumps(list(layouts(mesh, lambda h: jnp.mean(h, 0, keepdims=True), lambda fun: fun))))
"""


@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map"])
def test_gradients_and_layouts_over_four_devices_are_those_of_lax_scan(kind: str) -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, kind]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    assert len(found) == 8
    for schedule, error, same_layout in found:
        assert error < 1e-5, schedule
        assert same_layout, schedule


@pytest.mark.tpu
@pytest.mark.parametrize("schedule", ["every", "sqrt", Slots(12)])
def test_each_device_keeps_its_share_of_the_carries(schedule: Any) -> None:
    target = Target("tpu:v5e:2x2")
    mesh = target.mesh((4,), ("b",))

    def loss(weights: Any, h: Any, xs: Any) -> Any:
        return jnp.sum(scan(lambda c, x: (jnp.tanh(c @ weights + x), None), h, xs, schedule=schedule)[0])

    batch, width, length = 2**18, 128, 100  # too large for the memory on the chip, where a quarter might go otherwise

    def beyond_arguments(spec: P) -> int:
        shapes = ((width, width), P()), ((batch, width), spec), ((length, width), P())
        args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p)) for s, p in shapes]
        report = measure(jax.grad(loss, argnums=(0, 1)), *args, target=target, generate_code=False)
        assert report.on_chip_bytes == 0
        return report.peak_bytes - report.argument_bytes

    whole, spread = beyond_arguments(P()), beyond_arguments(P("b"))
    assert 0.8 * whole / 4 <= spread <= 1.02 * whole / 4
    carry = batch * width * 2  # XLA keeps what goes into a matmul of a TPU in bfloat16
    kept = {"every": length, "sqrt": 10}.get(schedule, 12)
    assert kept * carry <= whole <= (2 * length * carry if schedule == "every" else length * carry)
