"""Tiles of an axis that several devices hold: each device computes its part of every tile, and nothing is gathered."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt

TOKENS, WIDTH, WORDS, TILES = 32768, 256, 4096, 8
FOUR = [
    pytest.param("cuda:h100x4", marks=pytest.mark.cuda),
    pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu),
]


def head(w, x, labels):
    logits = (x @ w).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1))


def rows(w, x, labels):
    return jnp.mean(mlp(w, x) ** 2)


def mlp(w, x):
    return jax.nn.gelu(x @ w) @ w.T


def tiled_rows(**how):
    tiled = jaxckpt.tile(mlp, in_axes=(None, 0), tiles=TILES, **how)
    return lambda w, x, labels: jnp.mean(tiled(w, x) ** 2)


KINDS = {
    "a loss": (head, functools.partial(jaxckpt.tile, head, in_axes=(None, 0, 0), tiles=TILES)),
    "rows": (rows, tiled_rows),
}


def measured(fun, target):
    """Returns the report of the value and gradients, the tokens sharded over four devices, the weights on each."""
    mesh = jaxckpt.Target(target).mesh((4,), ("d",))
    shape = lambda size, dtype, *spec: jax.ShapeDtypeStruct(
        size, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    args = (
        shape((WIDTH, WORDS), jnp.float32),
        shape((TOKENS, WIDTH), jnp.float32, "d"),
        shape((TOKENS,), jnp.int32, "d"),
    )
    return jaxckpt.measure(jax.value_and_grad(fun, (0, 1)), *args, target=target, generate_code=False)


def gathered(report):
    """Returns the bytes that the program sends but for sums."""
    return sum(each.sent_bytes * each.runs for each in report.collectives if each.kind != "all-reduce")


@pytest.mark.parametrize("target", FOUR)
@pytest.mark.parametrize("kind", KINDS)
def test_each_device_computes_its_part_of_every_tile(kind, target):
    plain, tiled = KINDS[kind]
    whole, parts = measured(plain, target), measured(tiled(), target)
    assert parts.peak_bytes < 0.6 * whole.peak_bytes
    assert gathered(parts) <= gathered(whole) + 2**16
    consecutive = measured(tiled(parts=1), target)
    # Without parts the tokens are gathered, which is what the parts are for.
    assert gathered(consecutive) > gathered(parts) + TOKENS * WIDTH and consecutive.peak_bytes > parts.peak_bytes


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.transforms.test_tile_sharded import head, mlp
import jaxckpt

keys = jax.random.split(jax.random.key(0), 3)
w, x = jax.random.normal(keys[0], (16, 64)), jax.random.normal(keys[1], (512, 16))
labels = jax.random.randint(keys[2], (512,), 0, 64)
mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda value, *spec: jax.device_put(value, NamedSharding(mesh, P(*spec)))
sharded = put(w), put(x, "d"), put(labels, "d")
assert len(sharded[1].sharding.device_set) == 8
of = lambda tiled: lambda w, x, labels: jnp.sum(jnp.sin(tiled(w, x))) + jnp.mean(labels)
for tiles in (4, 7):
    for plain, tiled in (
        (head, jaxckpt.tile(head, in_axes=(None, 0, 0), tiles=tiles)),
        (of(mlp), of(jaxckpt.tile(mlp, in_axes=(None, 0), tiles=tiles))),
    ):
        step = lambda fun: jax.jit(jax.value_and_grad(fun, (0, 1)))
        expected, found = step(plain)(w, x, labels), step(tiled)(*sharded)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4 * float(np.max(np.abs(b))))
        assert found[1][1].sharding.is_equivalent_to(sharded[1].sharding, 2), found[1][1].sharding
mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(mesh):
    explicit = jax.jit(jax.value_and_grad(jaxckpt.tile(head, in_axes=(None, 0, 0), tiles=4), (0, 1)))
    found = explicit(put(w), put(x, "d"), put(labels, "d"))
for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.value_and_grad(head, (0, 1))(w, x, labels)), strict=True):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4 * float(np.max(np.abs(b))))
print("equal")
"""


def test_on_eight_devices_values_and_gradients_are_those_of_one():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment, stdout=subprocess.PIPE)
    assert done.stdout.decode() == "equal\n"


def test_what_jax_cannot_take_apart_over_explicit_axes_is_said_of_the_argument():
    """A process of its own has the devices. JAX before 0.12 splits no dimension that an explicit axis shards."""
    program = """
        import jax, jax.numpy as jnp, jaxckpt
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
        jax.set_mesh(mesh)
        x = jax.device_put(jnp.ones((48, 4)), NamedSharding(mesh, P("d")))
        w = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P()))
        tiled = jaxckpt.tile(lambda w, x: jnp.tanh(x @ w), in_axes=(None, 0), tiles=4)
        try:
            print("rows", tiled(w, x).shape)
        except jaxckpt.ArgumentError as error:
            print("refused", "args must be arrays that no explicit axis" in str(error), "AxisType.Auto" in str(error))
        try:
            jaxckpt.tile(lambda x: x - x.mean(0), in_axes=0, tiles=4)(x)
        except jaxckpt.TilingError as error:
            print("couples")
    """
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, **flags}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first in ("rows (48, 4)", "refused True True") and second == "couples"
