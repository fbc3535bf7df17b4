"""Plans of programs over four devices, on meshes whose axes are explicit or not, inside of jax.shard_map and around
it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json
import sys

import jax
import jax.numpy as jnp
import jaxckpt
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

kind, where = sys.argv[1:]
axis = AxisType.Auto if kind == "auto" else AxisType.Explicit
mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(axis, axis))
if kind == "set_mesh":
    jax.set_mesh(mesh)
both = P(("d", "m"))
put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
w = put(jax.random.normal(jax.random.key(0), (32, 32)) / 6, P())
x = put(jax.random.normal(jax.random.key(1), (4096, 32)), both)


def chain(w, x):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return x


def mean(w, x):
    return jnp.mean(chain(w, x) ** 2)


def over_devices(fun, *specs, out):
    return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=out)


def before(w, x):
    return mean(w, over_devices(jnp.sin, both, out=both)(x))


def after(w, x):
    return jnp.mean(over_devices(jnp.sin, both, out=both)(chain(w, x)))


def jitted(w, x):
    return jax.jit(before)(w, x)


def planned(fun):
    plan = jaxckpt.plan(fun, w, x, budget="80%")
    assert plan.regions or plan.loops
    assert plan.measured_bytes <= plan.budget < plan.unplanned_bytes
    return plan.apply(fun)


def automatic(fun):
    return jaxckpt.autocheckpoint(fun, budget="80%")


def inside(wrap):
    local = wrap(mean)
    return over_devices(lambda w, x: jax.lax.pmean(local(w, x), ("d", "m")), P(), both, out=P())


def cases():
    if where == "inside":
        yield "inside", inside(lambda fun: fun), inside(automatic)
        return
    for fun in (mean, before, after, jitted):
        for wrap in (planned, automatic):
            yield f"{fun.__name__} {wrap.__name__}", fun, wrap(fun)


step = lambda fun: jax.jit(jax.value_and_grad(fun, argnums=(0, 1)))
found = []
for name, plain, ours in cases():
    expected, got = (jax.tree.leaves(step(fun)(w, x)) for fun in (plain, ours))
    for a, b in zip(expected, got):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), name
    flops = [jaxckpt.count_flops(step(fun), w, x) for fun in (plain, ours)]
    found.append([name, flops])
print(json.dumps(found))
"""


def run(kind: str, where: str) -> list[Any]:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, kind, where]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["auto", "explicit", "set_mesh"])
def test_plans_keep_the_layout_that_is_part_of_an_arguments_type(kind: str) -> None:
    found = run(kind, "around")
    assert len(found) == 8
    for name, (plain, ours) in found:
        assert ours > plain, name


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_what_is_planned_within_shard_map_recomputes_and_equals_the_plain_function(kind: str) -> None:
    ((_, (plain, ours)),) = run(kind, "inside")
    assert ours > plain
