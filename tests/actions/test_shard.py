"""`jaxckpt.shard`: kept values distributed over devices that all have them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import OFFLOAD, RECOMPUTE, SAVE, ArgumentError, Policy, Target, compress, shard, tag
from jaxckpt.actions import action_from, given
from jaxckpt.core.graph import Value

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jaxckpt
from jaxckpt import SAVE, RECOMPUTE, OFFLOAD, Policy, compress, shard, tag

W = jax.random.normal(jax.random.key(0), (64, 512)) / 8
X = jax.random.normal(jax.random.key(1), (514, 64))

def layer(w, x):
    return jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x

def scanned(w, x, wrap):
    return jnp.sum(jax.lax.scan(lambda x, _: (wrap(layer)(w, x), None), x, None, length=6)[0] ** 2)

def looped(w, x, wrap):
    loop = lambda w, x: jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, length=6)[0]
    return jnp.sum(wrap(loop)(w, x) ** 2)

kind = sys.argv[1]
types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
actions = {"saved": SAVE, "rows": shard("model" if kind != "auto" else P(("data", "model"))), "columns": shard(P(None, "model")),
           "half": compress("bfloat16") | shard(P(None, "model")), "away": shard(P(None, "model")) | OFFLOAD}

def measure(fun, action):
    wrap = lambda f: jaxckpt.checkpoint(f, policy=Policy({"hidden": action}), prevent_cse=fun is not scanned)
    if kind in ("inside", "outside"):
        where = wrap if kind == "inside" else lambda f: f
        inner = lambda w, x: jax.lax.psum(fun(w, x, where), "data")
        step = jax.shard_map(inner, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        step = wrap(step) if kind == "outside" else step
    else:
        step = lambda w, x: fun(w, x, wrap)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    w = jax.device_put(W, NamedSharding(mesh, P()))
    step = jax.jit(jax.grad(step))
    exact = jax.jit(jax.grad(lambda w, x: fun(w, x, lambda f: f)))(W, X)
    error = jnp.max(jnp.abs(jax.device_get(step(w, x)) - exact)) / jnp.max(jnp.abs(exact))
    return float(error), step.lower(w, x).compile(jaxckpt.compiler_options()).memory_analysis().temp_size_in_bytes

with jax.set_mesh(mesh):
    out = {f.__name__: {name: measure(f, a) for name, a in actions.items()} for f in (scanned, looped)}
print(json.dumps(out))
"""


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["auto", "explicit", "inside", "outside"])
def test_gradients_are_equal_and_each_device_keeps_its_part(kind: str) -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], check=True, env=environment, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    row = 514 // 2 * 512 * 4  # a hidden value, of one device
    for name, each in found.items():
        for action, (error, _) in each.items():
            assert error < (5e-3 if action == "half" else 2e-5), (name, action)
    # A checkpoint around a whole loop restores all iterations at once, when the backward pass reaches it.
    saved = found["scanned"]["saved"][1]
    for action, (_, temporary) in found["scanned"].items():
        # Of four devices each keeps a quarter; one value is there whole while it is used.
        assert action == "saved" or saved - temporary > 0.95 * (6 * 0.75 - 0.75) * row, action


def value(shape, dtype="float32"):
    return Value(0, shape, jnp.dtype(dtype), int(np.prod(shape)) * jnp.dtype(dtype).itemsize)


def loss(w, x):
    return jnp.sum(jnp.sin(tag(jnp.tanh(x @ w), "hidden")))


ONES = jnp.ones((4, 6)), jnp.ones((2, 4))


def gradient(action, w=ONES[0], x=ONES[1]):
    return jax.grad(jaxckpt.checkpoint(loss, policy=Policy({"hidden": action})))(w, x)


def test_it_is_a_value_with_bytes_of_the_mesh_in_scope():
    action = shard(P(None, "model"))
    assert action == shard((None, "model")) == shard([None, ["model"]]) != shard("model")
    assert action_from(action.to_json()) == action and eval(repr(action), {"shard": shard, "P": P}) == action
    assert shard(P(("data", "model"))).to_json() == {"kind": "shard", "spec": [["data", "model"]]}
    assert action.error("float32") == 0 and "planner" in action.refusal(Target("cpu"))
    wide = value((64, 258))
    assert action.device_bytes(wide) == wide.bytes  # nobody knows the mesh
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 4), ("data", "model"))):
        assert action.device_bytes(wide) == 64 * 65 * 4  # padded
        assert action.cost(wide).link_bytes == wide.bytes - 64 * 65 * 4
        assert shard(P(("data", "model"))).device_bytes(wide) == wide.bytes // 8
        both = compress("bfloat16") | action
        assert both.device_bytes(wide) == 64 * 65 * 2 and (both | OFFLOAD).host_bytes(wide) == 64 * 65 * 2
        assert given(action, value((64,))) == SAVE == given(action, value((0, 4)))
        assert given(action, value((3, 4), "int32")) == action


@pytest.mark.parametrize("spec", [3, None, (), P(), P(None), ("model", "model"), (("a", 3),), ({"a"},)])
def test_specs_that_are_none(spec):
    with pytest.raises(ArgumentError, match="spec must be a PartitionSpec that names a mesh axis"):
        shard(spec)


@pytest.mark.cuda
@pytest.mark.parametrize("before_the_tag", [True, False])
def test_what_is_restored_lies_as_a_constraint_beside_the_tag_says(before_the_tag: bool) -> None:
    """Else the compiler computes the rest of the block on all rows: it took as much as without the action."""
    mesh = Target("cuda:h100x8").mesh((2, 4), ("data", "model"))
    shaped = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    rows = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", None)))
    args = (
        (shaped(P(None, None, "model"), 12, 128, 512), shaped(P(None, "model"), 12, 512, 128)),
        shaped(P("data"), 8192, 128),
    )

    def temporaries(action):
        def block(x, w):
            x = tag(rows(x), "in") if before_the_tag else rows(tag(x, "in"))
            return rows(jnp.tanh(x + jnp.sin(rows(jax.nn.gelu(x @ w[0]) @ w[1])))), None

        body = jaxckpt.checkpoint(block, policy=Policy({"in": action}), prevent_cse=False)
        step = jax.value_and_grad(lambda ws, x: jnp.mean(jax.lax.scan(body, x, ws)[0] ** 2))
        with jax.set_mesh(mesh):
            return jaxckpt.measure(step, *args, target="cuda:h100x8", generate_code=False).temp_bytes

    inputs = 12 * 8192 // 2 * 128 * 4  # on one device
    assert temporaries(SAVE) - temporaries(shard(P(("data", "model")))) > 0.7 * (1 - 1 / 4) * inputs


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_the_arguments_alone_is_none_in_scope(kind: AxisType) -> None:
    mesh = jax.make_mesh((1,), ("model",), axis_types=(kind,))
    x = jax.device_put(ONES[1], NamedSharding(mesh, P()))
    with pytest.raises(ArgumentError, match="used where a mesh is in scope.*set_mesh"):
        gradient(shard("model"), x=x)


def test_meshes_that_do_not_fit():
    with pytest.raises(ArgumentError, match="used where a mesh is in scope.*set_mesh"):
        gradient(shard("model"))
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(gradient(shard("model")), jax.grad(loss)(jnp.ones((4, 6)), jnp.ones((2, 4))))
        with pytest.raises(ArgumentError, match="of axes that the mesh has: model; got 'modle'.*'model'"):
            gradient(shard("modle"))
        x = jax.device_put(jnp.ones((2, 4)), NamedSharding(mesh, P("model")))
        with pytest.raises(ArgumentError, match=r"over which float32\[2, 6\] is replicated.*distributed over 'model'"):
            gradient(shard(P(None, "model")), x=x)

    def inside(check, spec):
        run = lambda w, x: jax.lax.psum(gradient(shard("model"), w, x), "model")
        return jax.shard_map(run, mesh=mesh, in_specs=(P(), spec), out_specs=P(), check_vma=check)

    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    for check, spec, message in ((True, P("model"), "It varies over 'model'"), (False, P(), "check_vma=False")):
        with pytest.raises(ArgumentError, match=message):
            inside(check, spec)(jnp.ones((4, 6)), jnp.ones((2, 4)))


@pytest.mark.once
@pytest.mark.cuda
def test_eight_gpus_keep_an_eighth_each():
    target = Target("cuda:h100x8")
    mesh = target.mesh((8,), ("model",))
    place = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def peak(action):
        def step(w, x):
            body = lambda x, _: (jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x, None)
            wrapped = jaxckpt.checkpoint(body, policy=Policy({"hidden": action}), prevent_cse=False)
            return jnp.sum(jax.lax.scan(wrapped, x, None, length=16)[0].astype(jnp.float32))

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jaxckpt.measure(
                jax.grad(step), place((512, 4096)), place((4096, 512)), target=target, generate_code=False
            ).temp_bytes

    nothing, saved, parts = peak(RECOMPUTE), peak(SAVE), peak(shard(P(None, "model")))
    assert parts - nothing < 1.1 * (saved - nothing) / 8 + 4096 * 4096 * 2
