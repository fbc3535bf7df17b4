"""The mixture of experts for a pod: the same values on every mesh, and a plan for many chips."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxckpt
from benchmarks import pod as benchmark
from jaxckpt.models import pod

PROGRAM = """
import jax
import numpy as np
from jaxckpt.models import pod
from tests.helpers import assert_trees_close

def found(*mesh):
    data, expert, tensor = mesh
    loss, args = pod.small(real=True, data=data, expert=expert, tensor=tensor, spare=4.0)
    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(*args))

one = found(1, 1, 1)
for mesh in (2, 2, 2), (1, 2, 4), (4, 2, 1):
    assert_trees_close(found(*mesh), one, rtol=1e-4, atol=1e-7)
print(one[0])
"""
"""There is room for every token in every expert: which tokens are dropped depends on how they are spread."""


@functools.cache
def value() -> str:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.once
def test_values_and_gradients_are_those_of_one_device():
    assert float(value()) > 0


@pytest.mark.once
def test_tokens_without_room_are_dropped():
    loss, args = pod.small(real=True, spare=0.5)
    assert abs(loss(*args) - float(value())) > 1e-6


@pytest.mark.once
def test_it_has_671_billion_parameters_and_a_device_its_part_of_them_and_of_the_moments():
    _, (params, *_) = pod.moe671b()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert round(count / 1e9) == 671
    local = lambda tree: sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    assert local(params) == pytest.approx(2 * count / 2048, rel=0.01)
    moments = jax.tree.leaves_with_path(pod.state(params))
    assert local([leaf for _, leaf in moments if leaf.ndim]) == pytest.approx(8 * count / 2048, rel=0.01)


@pytest.mark.tpu
@pytest.mark.once
def test_a_training_step_on_many_chips_is_planned_within_its_budget():
    sizes = {"dense": 1, "sparse": 6, "width": 1024, "heads": 16, "inner": 4096, "experts": 16, "expert_inner": 1024}
    sizes |= {
        "head": 64,
        "chosen": 4,
        "vocabulary": 4096,
        "batch": 32,
        "tokens": 1024,
        "data": 2,
        "expert": 2,
        "tensor": 4,
    }
    loss, (params, *batch) = pod.moe671b(**sizes)
    args = params, pod.state(params), *batch
    plan = jaxckpt.plan(loss, *args, budget="50%", target="tpu:v5e:4x4", step=pod.training)
    assert plan.measured_bytes <= plan.budget == plan.unplanned_bytes // 2
    assert all(region.body for region in plan.regions)
    compiled = jaxckpt.measure(pod.training(plan.apply(loss)), *args, target="tpu:v5e:4x4", generate_code=False)
    assert compiled.peak_bytes == plan.measured_bytes and compiled.alias_bytes > 0
    by_hand = pod.training(pod.moe671b(jax.checkpoint, **sizes)[0])
    flops = lambda step: jaxckpt.count_flops(step, *args)
    assert flops(pod.training(loss)) <= flops(pod.training(plan.apply(loss))) < flops(by_hand)


def test_the_benchmarks_table():
    row = {
        "chips": 2048, "asked": "40GiB", "budget_bytes": 40 * 2**30, "peak_bytes": 39 * 2**30, "predicted_bytes": 39 * 2**30,
        "unplanned_bytes": 400 * 2**30, "added": 0.06, "planning_seconds": 21.0, "compile_seconds": 6.0, "process_mib": 900.0,
    }  # fmt: skip
    text = benchmark.report([row, row | {"asked": None}])
    assert "| 2,048 | 400.0 GiB | 40.0 GiB | 39.0 GiB | 39.0 GiB | +6.0% | 6 s | 21 s | 0.9 GiB |" in text
    assert benchmark.figure([row, row | {"chips": 64}]).startswith(b"\x89PNG")
