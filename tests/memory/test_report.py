import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, DoesNotFitError, TargetError, UnreadableDumpError
from jaxckpt.memory import report as module
from jaxckpt.memory.report import MemoryReport, measure
from jaxckpt.memory.targets import Target, compiler_options
from tests.memory import chain

MIB = 2**20
CUDA = pytest.param("cuda:h100", marks=pytest.mark.cuda)
TPU = pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu)


# ----------------------------------------------------------------------------------------------------- peak, by backend


@pytest.mark.parametrize(
    ("target", "plain", "segments", "whole"),
    [
        ("cpu", 33.0, 22.5, 33.0),
        pytest.param("cuda:h100", 96.5, 30.5, 97.0, marks=pytest.mark.cuda),
        pytest.param("tpu:v5e:2x2", 41.0, 28.25, 41.0, marks=pytest.mark.tpu),
    ],
)
def test_checkpointing_in_segments_lowers_the_peak_and_one_checkpoint_around_everything_does_not(
    target, plain, segments, whole
):
    # XLA:GPU splits these small float32 matmuls four ways, which is why it needs more.
    assert chain.report(target).peak_bytes == pytest.approx(plain * MIB, rel=0.02)
    assert chain.report(target, 4).peak_bytes == pytest.approx(segments * MIB, rel=0.02)
    assert chain.report(target, chain.LAYERS).peak_bytes == pytest.approx(whole * MIB, rel=0.02)


@pytest.mark.parametrize("target", ["cpu", CUDA, TPU])
def test_the_parts_add_up_to_the_peak(target):
    for segment in (0, 4):
        report = chain.report(target, segment)
        assert report.argument_bytes == chain.WEIGHTS + chain.ACTIVATION
        assert report.output_bytes == pytest.approx(chain.WEIGHTS, rel=1e-3)
        parts = report.argument_bytes + report.output_bytes + report.temp_bytes - report.alias_bytes
        assert report.peak_bytes == pytest.approx(parts, rel=1e-3)
        assert report.host_bytes == 0


def test_on_the_cpu_the_peak_has_the_temporaries_that_xlas_own_figure_leaves_out():
    report = chain.report("cpu")
    stats = jax.jit(chain.step()).lower(*chain.arguments()).compile().memory_analysis()
    assert stats.peak_memory_in_bytes < report.argument_bytes + report.output_bytes + MIB
    assert report.peak_bytes - stats.peak_memory_in_bytes == pytest.approx(report.temp_bytes, rel=1e-3)


@pytest.mark.parametrize("target", [CUDA, TPU])
def test_elsewhere_it_is_xlas_own_figure(target):
    resolved = Target(target)
    sharding = SingleDeviceSharding(resolved.devices[0])
    ws, x = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), chain.arguments())
    stats = (
        jax.jit(chain.step()).trace(ws, x).lower(lowering_platforms=(resolved.platform,)).compile().memory_analysis()
    )
    assert chain.report(target).peak_bytes == stats.peak_memory_in_bytes


@pytest.mark.tpu
def test_a_small_programs_temporaries_are_on_the_chip_and_a_larger_ones_in_hbm():
    small = chain.report("tpu:v5e:2x2")
    assert small.on_chip_bytes == pytest.approx(small.temp_bytes, rel=0.01)
    assert small.main_memory_bytes == pytest.approx(small.argument_bytes + small.output_bytes, rel=0.01)
    x, w = jax.ShapeDtypeStruct((64 * 1024, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    # 128 MiB in bfloat16, and the vector memory has 128 for all.
    large = measure(lambda x, w: jnp.sum(jnp.sin(x @ w) @ w), x, w, target="tpu:v5e:2x2")
    assert large.on_chip_bytes == 0
    assert large.main_memory_bytes == large.peak_bytes > 380 * MIB


@pytest.mark.cuda
def test_each_gpu_is_compiled_for_as_itself():
    # The A100's matmuls of this size are split otherwise than the H100's.
    assert (
        measure(chain.step(), *chain.arguments(), target="cuda:a100").peak_bytes != chain.report("cuda:h100").peak_bytes
    )


# ------------------------------------------------------------------------------------------- the CPU's compiler options


def test_the_default_options_are_what_checkpointing_needs():
    # On jax 0.10 the bare compiler merges the recomputation with the first computation.
    bare, default = chain.report("cpu", 4, bare=True).peak_bytes, chain.report("cpu", 4).peak_bytes
    plain = chain.report("cpu").peak_bytes
    assert default < 0.75 * plain
    if compiler_options("cpu"):
        assert bare > 0.95 * plain
    else:
        assert bare == default


RESIDENT = r"""
import re, sys
import jax, jax.numpy as jnp
import jaxckpt

LAYERS, BATCH, WIDTH, SEGMENT = 48, 16384, 128, 7  # 8 MiB a layer
wrap = (lambda f: f) if sys.argv[1] == "plain" else jax.checkpoint

@wrap
def block(x, ws):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x

def loss(ws, x):
    for i in range(0, LAYERS, SEGMENT):
        x = block(x, ws[i : i + SEGMENT])
    return jnp.sum(x * x)

ws = [jnp.eye(WIDTH) * 0.9] * LAYERS
x = jax.block_until_ready(jnp.ones((BATCH, WIDTH)))
step = jax.jit(jax.value_and_grad(loss), compiler_options=jaxckpt.compiler_options()).lower(ws, x).compile()
# Of this program alone; ru_maxrss starts with what the parent had.
resident = lambda: 1024 * int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1])
before = resident()
value, gradients = jax.block_until_ready(step(ws, x))
print(resident() - before, float(value), float(sum(jnp.sum(g * g) for g in gradients)))
"""


def test_the_memory_of_a_process_that_runs_the_step_falls():
    def run(variant: str) -> list[float]:
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", RESIDENT, variant], env=environment, capture_output=True, text=True, check=True
        )
        return [float(word) for word in done.stdout.split()]

    (plain, *plain_values), (checkpointed, *values) = run("plain"), run("checkpoint")
    assert plain > 48 * 8 * MIB  # all activations
    assert checkpointed < 0.4 * plain
    np.testing.assert_allclose(values, plain_values, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize("target", ["cpu", CUDA, TPU])
def test_all_kinds_of_arguments(target):
    def fun(tree, nothing, scalar, key, table):
        noise = jax.random.normal(key, tree["a"].shape)
        return tree["a"] * scalar + noise + tree["b"][0] + table, nothing

    tree = {"a": jnp.ones((128, 256)), "b": (jax.ShapeDtypeStruct((256,), jnp.float32), None)}
    report = measure(fun, tree, None, 2.0, jax.random.key(0), np.ones((256,), np.float32), target=target)
    least = (128 * 256 + 256 + 256) * 4
    assert least <= report.argument_bytes <= least + 2048  # a TPU pads the scalar and the key
    assert report.output_bytes == 128 * 256 * 4


@pytest.mark.parametrize("target", ["cpu", CUDA])
def test_no_arguments_and_closed_over_arrays(target):
    table = jnp.ones((512, 512)) * jnp.arange(512)
    assert measure(lambda: jnp.ones((512, 512)) * 2, target=target).output_bytes == MIB
    assert (
        measure(lambda x: x @ table, jax.ShapeDtypeStruct((4, 512), jnp.float32), target=target).output_bytes
        == 4 * 512 * 4
    )


@pytest.mark.cuda
def test_tracing_may_compute_even_where_the_device_cannot():
    def fun(x):
        with jax.ensure_compile_time_eval():
            n = int(jnp.sum(jnp.arange(4)))
        return jnp.concatenate([x] * n)

    assert measure(fun, jax.ShapeDtypeStruct((256,), jnp.float32), target="cuda:h100").output_bytes == 6 * 1024


@pytest.mark.parametrize("target", ["cpu", CUDA, TPU])
def test_what_jit_was_told_holds(target):
    @functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
    def fun(x, mode):
        assert mode in ("double", "triple"), "a static argument stays itself"
        return x * (2 if mode == "double" else 3)

    report = measure(fun, jax.ShapeDtypeStruct((1024, 1024), jnp.float32), "double", target=target)
    assert report.alias_bytes == report.argument_bytes == report.output_bytes == 4 * MIB
    assert report.peak_bytes == 4 * MIB
    undonated = measure(lambda x: x * 2, jax.ShapeDtypeStruct((1024, 1024), jnp.float32), target=target)
    assert (undonated.alias_bytes, undonated.peak_bytes) == (0, 8 * MIB)


def test_nothing_is_run_and_nothing_is_donated():
    x = jnp.ones((16,))

    def fun(x):
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return x + 1

    measure(jax.jit(fun, donate_argnums=0), x)
    assert not x.is_deleted()


# ------------------------------------------------------------------------------------------------------ several devices


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("cuda:h100x8", (4, 2), marks=pytest.mark.cuda),
        pytest.param("tpu:v5p:2x2x1", (2, 2), marks=pytest.mark.tpu),
    ],
)
def test_sharded_arguments_are_counted_for_one_device(name, shape):
    target = Target(name)
    auto = (AxisType.Auto, AxisType.Auto)
    mesh = target.mesh(shape, ("data", "model"))
    meshes = {"its own": mesh, "abstract": AbstractMesh(shape, ("data", "model"), axis_types=auto)}
    whole = 2048 * 1024 * 4
    reports = {}
    for kind, m in meshes.items():
        x = jax.ShapeDtypeStruct((2048, 1024), jnp.float32, sharding=NamedSharding(m, P("data", None)))
        w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=NamedSharding(m, P(None, "model")))
        bias = jax.ShapeDtypeStruct((1024,), jnp.float32)  # nowhere in particular: over the mesh of the others
        reports[kind] = measure(lambda x, w, b: jnp.tanh(x @ w) + b, x, w, bias, target=target)
    for report in reports.values():
        assert report.argument_bytes == pytest.approx(whole / shape[0] + 1024 * 1024 * 4 / shape[1] + 4096, abs=4096)
        assert report.output_bytes == whole / (shape[0] * shape[1])
        assert report.target == name
    assert reports["its own"].peak_bytes == reports["abstract"].peak_bytes


@pytest.mark.cuda
def test_an_array_sharded_over_this_machine_is_moved_to_the_target():
    local = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    x = jax.device_put(jnp.ones((256, 256)), NamedSharding(local, P("data")))
    committed = jax.device_put(jnp.ones((256, 256)), jax.devices()[0])
    assert measure(jnp.dot, x, committed, target="cuda:h100").argument_bytes == 2 * 256 * 256 * 4
    with pytest.raises(
        ArgumentError, match="sharded over the 8 devices of the target cuda:h100x8; got a mesh of 1 device"
    ):
        measure(jnp.dot, x, committed, target="cuda:h100x8")


@pytest.mark.cuda
def test_a_program_without_shardings_is_for_one_of_the_devices():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    assert measure(jnp.sin, x, target="cuda:h100x8").argument_bytes == 256 * 256 * 4


# ---------------------------------------------------------------------------------------------------------- host memory

ROWS, UP = 1024, 2048


def offloading(policy):
    def layer(x, w_up, w_down):
        return x + jax.nn.gelu(jax.ad_checkpoint.checkpoint_name(x @ w_up, "up")) @ w_down

    def loss(ws, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jax.checkpoint(layer, policy=policy)(x, *w), None), x, ws)[0] ** 2)

    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return jax.value_and_grad(loss), (spec(16, 128, UP), spec(16, UP, 128)), spec(ROWS, 128)


@pytest.mark.cuda
def test_what_is_offloaded_is_in_the_hosts_bytes_and_not_in_the_peak():
    import jax.ad_checkpoint

    saved = jax.checkpoint_policies.save_only_these_names("up")
    offloaded = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["up"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    nothing, keep, host = (measure(*offloading(policy), target="cuda:h100") for policy in (None, saved, offloaded))
    up = 16 * ROWS * UP * 2
    assert (nothing.host_bytes, keep.host_bytes, host.host_bytes) == (0, 0, up)
    assert keep.peak_bytes - nothing.peak_bytes > 0.9 * up
    # The host has more than the device's own temporaries here, and XLA's figure would be the host's.
    assert host.peak_bytes < nothing.peak_bytes + 0.2 * up
    assert host.timeline().peak_bytes == pytest.approx(host.peak_bytes, rel=0.01)
    assert "in host memory" in str(host)


@pytest.mark.tpu
def test_an_argument_in_host_memory_is_the_hosts():
    sharding = SingleDeviceSharding(Target("tpu:v5e").devices[0], memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)
    report = measure(lambda x: jnp.sin(jax.device_put(x, jax.memory.Space.Device)), x, target="tpu:v5e")
    assert (report.host_bytes, report.argument_bytes) == (4 * MIB, 0)
    assert 4 * MIB <= report.peak_bytes <= 8 * MIB


@pytest.mark.cuda
def test_an_argument_in_host_memory_of_a_gpu_that_is_not_here_is_counted_as_on_it_and_the_log_says_so(caplog):
    sharding = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")
    report = measure(jnp.sin, jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding), target="cuda:h100")
    assert report.argument_bytes == 4 * MIB
    assert "have no host memory: an argument in pinned_host counts as on the device" in caplog.text


# --------------------------------------------------------------------------------------------------- what a report says


def test_flops_are_the_compilers_where_it_counts():
    x = jax.ShapeDtypeStruct((128, 256), jnp.float32)
    report = measure(lambda x: x @ x.T, x, target="cpu")
    assert report.flops == pytest.approx(2 * 128 * 128 * 256, rel=0.05)
    assert report.compile_seconds > 0


@pytest.mark.cuda
def test_a_gpu_that_is_not_here_counts_no_flops():
    report = chain.report("cuda:h100")
    assert report.flops is None
    assert "FLOPs" not in str(report)


def test_it_prints_and_goes_to_json():
    report = chain.report("cpu")
    text = str(report)
    assert text.startswith("cpu, one device\n")
    for target, where in (("cuda:h100x8", "per"), ("cuda:h100", "one"), ("a_platform_that_was_added", "one")):
        assert str(dataclasses.replace(report, target=target)).startswith(f"{target}, {where} device\n")
    for part in ("peak         33.0 MiB", "arguments     8.5 MiB", "temporaries  16.5 MiB", "compiled in"):
        assert part in text
    assert "_assignment" not in repr(report)
    values = json.loads(json.dumps(report.to_json()))
    assert values["peak_bytes"] == report.peak_bytes
    assert values["target"] == "cpu"
    page = report._repr_html_()
    assert page.startswith("<table>")
    assert "33.0 MiB" in page


def test_advice_says_when_checkpointing_can_do_little():
    x, w = jax.ShapeDtypeStruct((64, 2048), jnp.float32), jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    wide = measure(jax.value_and_grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), w, x, target="cpu")
    share = wide.temp_bytes / wide.peak_bytes
    assert share < 0.2
    advice = wide.advice()
    assert advice.startswith(f"Activations are {share:.0%} of the peak: checkpointing can save at most ")
    assert advice in str(wide)
    assert chain.report("cpu").advice() is None


@pytest.mark.parametrize(("temp", "speaks"), [(199, True), (200, False), (0, True)])
def test_advice_begins_below_a_fifth(temp, speaks):
    report = MemoryReport("cpu", 1000, 500, 500 - temp, temp, 0, 0, 0, 1000, 0, None, 0.0)
    assert (report.advice() is not None) == speaks


# --------------------------------------------------------------------------------------------------------------- errors


def test_what_cannot_be_called_is_an_error():
    with pytest.raises(ArgumentError, match="fun must be a function; got 3"):
        measure(3)


@pytest.mark.tpu
def test_a_program_that_does_not_fit_is_an_error_with_both_sizes():
    x = jax.ShapeDtypeStruct((32 * 1024, 1024, 1024), jnp.float32)
    with pytest.raises(DoesNotFitError, match=r"does not fit tpu:v5e:2x2: RESOURCE_EXHAUSTED.*256.00G") as caught:
        measure(lambda x: x + 1, x, target="tpu:v5e")
    assert caught.value.needed_bytes == 256 * 2**30
    assert caught.value.memory_bytes == Target("tpu:v5e").memory_bytes == int(15.75 * 2**30)
    assert isinstance(caught.value, MemoryError)


def test_without_a_buffer_assignment_the_figures_stay_and_the_rest_is_an_error(monkeypatch, caplog):
    monkeypatch.setattr(module, "read_dump", lambda *_: (_ for _ in ()).throw(UnreadableDumpError("of old")))
    report = measure(jnp.sin, jnp.ones((1024,)), target="cpu")
    assert report.peak_bytes == 8192
    assert "cannot read the buffer assignment" in caplog.text
    for ask in (report.timeline, report.largest):
        with pytest.raises(TargetError, match="gave no buffer assignment"):
            ask()


# ---------------------------------------------------------------------------------------------------- compilation cache


@pytest.mark.cuda
def test_the_users_compilation_cache_is_neither_used_nor_switched_off(tmp_path):
    # A cached program brings no buffer assignment, and JAX cannot read one back for a GPU that is not there.
    from jax.experimental.compilation_cache import compilation_cache

    names = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    try:
        for name, value in names.items():
            jax.config.update(name, value)
        for target in ("cpu", "cuda:h100"):
            for _ in range(2):
                report = measure(lambda x: jnp.sin(x @ x), jax.ShapeDtypeStruct((256, 256), jnp.float32), target=target)
                assert report.timeline().peak_bytes == pytest.approx(report.peak_bytes, rel=0.01)
        assert not list(tmp_path.iterdir())
        jax.jit(lambda x: jnp.cos(x) + 5).lower(jnp.ones(7)).compile()
        assert list(tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_threads_that_measure_at_once_leave_the_cache_as_it_was():
    from jax._src import compilation_cache as cache

    before = cache._cache_checked, cache._cache_used
    with _compat.no_persistent_cache:
        with _compat.no_persistent_cache:
            assert (cache._cache_checked, cache._cache_used) == (True, False)
        assert (cache._cache_checked, cache._cache_used) == (True, False)
    assert (cache._cache_checked, cache._cache_used) == before


def test_no_files_stay_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    measure(jnp.sin, jnp.ones(8), target="cpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.cuda
def test_a_mesh_of_other_devices_is_refused_and_one_of_the_targets_is_measured():
    """JAX compiles a program for the devices of its meshes: for the CPU, whose dump would be read as a GPU's."""
    target = Target("cuda:h100")

    def step(mesh):
        def loss(w, x):
            over = jax.shard_map(lambda w, x: jnp.tanh(x @ w), mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
            return jnp.sum(over(w, over(w, x)) ** 2)

        return jax.value_and_grad(loss)

    auto = (AxisType.Auto,)
    args = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    here = jax.make_mesh((1,), ("d",), axis_types=auto)
    for target_of in (target, "tpu:v5e:1x1"):
        with pytest.raises(ArgumentError, match=r"fun must be a function whose meshes .* got .*[cC][pP][uU].*\.mesh\("):
            measure(step(here), *args, target=target_of, generate_code=False)
    peaks = [
        measure(step(mesh), *args, target=target).peak_bytes
        for mesh in (target.mesh((1,), ("d",), auto), AbstractMesh((1,), ("d",), axis_types=auto))
    ]
    assert peaks[0] == peaks[1] > 2 * 4096 * 256 * 4


@pytest.mark.cuda
@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.debug.print("{}", x.sum()) or x,
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    ],
)
def test_a_function_that_calls_back_from_a_gpu_that_is_not_here_is_told_so(call):
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(
        ArgumentError, match=r"fun must be without calls back to the host, .* cuda:h100, .*debug\.print"
    ):
        measure(lambda x: jnp.sin(call(x)), x, target="cuda:h100")


@pytest.mark.cuda
def test_a_mesh_that_no_argument_lies_on_is_said():
    mesh = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))
    fun = jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    for target in ("cuda:h100x8", "cuda:h100"):  # whose compiler would say nothing
        for given in (fun, jax.value_and_grad(lambda x: jax.checkpoint(fun)(x).sum())):
            with pytest.raises(ArgumentError, match=r"args must be with the sharding of the function's mesh"):
                measure(given, x, target=target)
    placed = x.update(sharding=NamedSharding(mesh, P("d")))
    assert measure(fun, placed, target="cuda:h100x8").argument_bytes == 32 * 256 * 4
