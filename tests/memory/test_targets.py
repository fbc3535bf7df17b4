import functools
import importlib.util
import os
import re
import subprocess
import sys
import textwrap

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, MissingTargetError, TargetError, UnknownTargetError
from jaxckpt._quiet import accelerator_visible
from jaxckpt.memory import targets as module
from jaxckpt.memory.chips import CHIPS
from jaxckpt.memory.platforms.cuda import target_config
from jaxckpt.memory.targets import Target, compiler_options, known, target_of, targets


@pytest.mark.parametrize(
    ("name", "canonical", "platform", "count"),
    [
        ("cuda:h100", "cuda:h100", "cuda", 1),
        (" CUDA:H100 ", "cuda:h100", "cuda", 1),
        ("cuda:h100x1", "cuda:h100", "cuda", 1),
        ("cuda:a100x16", "cuda:a100x16", "cuda", 16),
        ("tpu:v5e", "tpu:v5e:2x2", "tpu", 4),
        ("tpu:v5p:4x4x4", "tpu:v5p:4x4x4", "tpu", 64),
        ("tpu:v6e:2x4", "tpu:v6e:2x4", "tpu", 8),
    ],
)
def test_a_name_says_platform_and_number_of_devices(name, canonical, platform, count):
    target = Target(name)
    assert (target.name, target.platform, target.count, target.local) == (canonical, platform, count, False)
    assert target == Target(canonical)
    assert hash(target) == hash(Target(canonical))
    assert str(target) == canonical


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:h101", "there is no target 'cuda:h101'. Did you mean 'cuda:h100'"),
        ("h100", "there is no target 'h100'. Did you mean 'cuda:h100'?"),
        ("tpu:v5", "there is no target 'tpu:v5'. Did you mean 'tpu:v5"),
        ("cuda:v5e", "there is no target 'cuda:v5e'"),
        ("tpu:h100:2x2", "there is no target 'tpu:h100:2x2'"),
        ("cuda:h100x0", "there is no target 'cuda:h100x0'"),
        ("tpu:v5e:2", "there is no target 'tpu:v5e:2'"),
        ("tpu:v5e:0x2", "there is no target 'tpu:v5e:0x2'"),
        ("zzz", "There are 'cpu', 'cuda', 'cuda:h100'"),
        (7, "there is no target 7. There are 'cpu'"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(name, message):
    with pytest.raises(UnknownTargetError, match=message) as caught:
        Target(name)
    assert isinstance(caught.value, (ValueError, TargetError))
    if isinstance(name, str):
        with pytest.raises(UnknownTargetError):
            target_of(name)


@pytest.mark.parametrize("name", [name for name in known() if ":" in name])
def test_the_table_is_complete_and_plausible(name):
    target = Target(name)
    assert 10 * 2**30 < target.memory_bytes < 200 * 2**30
    assert target.flops["float32"] <= target.flops["bfloat16"] <= target.flops["int8"]
    assert set(target.flops) >= {"float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"}
    # A matmul of any chip here turns from memory to compute bound at some hundred FLOPs a byte.
    assert 100 < target.flops["bfloat16"] / target.bandwidth < 1000
    assert target.host_bandwidth < target.bandwidth / 10
    assert target.host_bandwidth < target.link_bandwidth < target.bandwidth


def test_the_cpu_has_the_memory_of_the_machine():
    with open("/proc/meminfo") as file:
        kilobytes = int(file.readline().split()[1])
    assert Target("cpu").memory_bytes == kilobytes * 1024
    assert Target("cpu").flops["float32"] > 1e9
    assert Target("cpu").local


def test_no_target_is_the_local_backend():
    local = target_of(None)
    assert local.local
    assert local.devices == tuple(jax.devices())
    assert target_of(local) is local
    assert target_of("cuda:h100") == Target("cuda:h100")


def test_compiler_options_are_for_the_cpu_of_old_versions_only():
    passes = "cse_barrier_expander,optimization-barrier-expander,small-while-loop-hoisting"
    expected = {"xla_disable_hlo_passes": passes}
    assert compiler_options("cpu") == (expected if _compat.JAX_VERSION < (0, 12) else {})
    for name in ("cuda:h100", "tpu:v5e:2x2"):
        assert compiler_options(name) == {}


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "kind", "count"), [("cuda:h100", "H100", 1), ("cuda:a100", "A100", 1), ("cuda:h200x8", "H200", 8)]
)
def test_gpus_that_are_not_here_can_be_made(name, kind, count):
    devices = Target(name).devices
    assert len(devices) == count
    assert all(kind in device.device_kind for device in devices)
    assert Target(name).devices is devices


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("tpu:v5e:2x2", "TPU v5 lite", 4),
        ("tpu:v5e:1x1", "TPU v5 lite", 1),
        ("tpu:v5p:4x4x4", "TPU v5", 64),
        ("tpu:v6e:2x2", "TPU v6 lite", 4),
        ("tpu:v4:2x2x1", "TPU v4", 4),
    ],
)
def test_tpus_that_are_not_here_can_be_made_and_match_their_entry(name, kind, count):
    devices = Target(name).devices
    assert len(devices) == count
    assert {device.device_kind for device in devices} == {kind}
    (entry,) = [chip for chip, c in CHIPS.items() if c.platform == "tpu" and re.search(c.kind, kind)]
    assert entry == name.split(":")[1]


@pytest.mark.tpu
def test_libtpu_gets_its_variables_only_while_it_starts():
    assert Target("tpu:v5e:2x2").devices
    assert "TPU_ACCELERATOR_TYPE" not in os.environ
    assert "TPU_WORKER_HOSTNAMES" not in os.environ


@pytest.mark.tpu
def test_an_impossible_slice_is_an_error_with_the_reason():
    with pytest.raises(UnknownTargetError, match="libtpu makes no slice 'tpu:v5e:3x3'.*not divisible"):
        _ = Target("tpu:v5e:3x3").devices


@pytest.mark.cuda
def test_a_mesh_covers_all_devices():
    target = Target("cuda:h100x8")
    mesh = target.mesh((4, 2), ("data", "model"))
    assert mesh.shape == {"data": 4, "model": 2}
    assert set(mesh.devices.flat) == set(target.devices)
    with pytest.raises(
        ArgumentError, match=r"shape must be sizes for 1 axes whose product is the 8 devices of cuda:h100x8; got \(4,\)"
    ):
        target.mesh((4,), ("data",))


@pytest.mark.tpu
def test_an_axis_of_a_mesh_may_be_a_part_of_a_slices_axis():
    target = Target("tpu:v5p:4x4x4")
    mesh = target.mesh((2, 8, 4), ("data", "expert", "tensor"))
    assert mesh.devices.shape == (2, 8, 4) and set(mesh.devices.flat) == set(target.devices)


def test_the_description_of_a_gpu_has_the_figures_of_the_table():
    text = target_config(CHIPS["h100"])
    for line in (
        "core_count: 132",
        "shared_memory_per_block_optin: 232448",
        "device_memory_size: 84978434048",
        "major: 9 minor: 0",
    ):
        assert line in text
    assert "core_count: 108" in target_config(CHIPS["a100"])


@pytest.fixture
def nothing_installed(monkeypatch):
    """As if neither extra were installed."""
    real = importlib.util.find_spec
    hidden = ("libtpu", "jax_plugins", "nvidia")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name.split(".")[0] in hidden else real(name, *rest)
    )
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    # Meshes that other tests made have the devices that are remembered: these are there again afterwards.
    monkeypatch.setattr(module, "_devices", functools.cache(module._devices.__wrapped__))


@pytest.mark.parametrize(("name", "extra"), [("cuda:h100", "aot-cuda"), ("tpu:v5e:2x2", "aot-tpu")])
def test_a_missing_compiler_is_an_error_that_names_the_extra(nothing_installed, name, extra):
    with pytest.raises(
        MissingTargetError, match=rf'to compile for {name}, .* is needed: pip install "jaxckpt\[{extra}\]"'
    ) as caught:
        _ = Target(name).devices
    assert isinstance(caught.value, ImportError)


def test_the_table_of_targets_says_what_to_install(nothing_installed):
    table = targets()
    states = {status.name: status for status in table}
    assert tuple(states) == known()
    assert states["cpu"].available
    assert not states["cuda:h100"].available
    assert "aot-cuda" in states["cuda:h100"].reason
    assert states["tpu:v5p:2x2x1"].memory_bytes == Target("tpu:v5p:2x2x1").memory_bytes
    lines = str(table).splitlines()
    assert len(lines) == len(table) + 1
    assert "cuda:h100" in str(table)
    assert "79.1 GiB" in str(table)


@pytest.mark.skipif(accelerator_visible(), reason="there is a device")
def test_a_local_device_that_is_not_there_is_an_error_with_the_way_out():
    with pytest.raises(
        MissingTargetError, match=r"no cuda device in this machine.*jaxckpt\[cuda12\].*name it: 'cuda:h100'"
    ):
        _ = Target("cuda").devices


def _run(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=variables, capture_output=True, text=True, check=False
    )


def test_importing_initialises_no_backend_and_imports_no_plugin():
    done = _run("""
        import sys, jaxckpt
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()
        assert not [name for name in sys.modules if name.startswith("jax_plugins.")]
        jaxckpt.Target("cuda:h100x8"), jaxckpt.Target("tpu:v5e")
        assert not xla_bridge.backends_are_initialized()
        assert not [name for name in sys.modules if name.startswith("jax_plugins.")]
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


MEASURE = """
    import jaxckpt, jax, jax.numpy as jnp
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    for target in (None, "cuda:h100", "tpu:v5e:2x2", "tpu:v4:2x2x1"):
        print(jaxckpt.measure(lambda x: jnp.sin(x @ x), x, target=target).argument_bytes)
    # Far larger than the device: XLA's scheduler would have a word to say about that.
    x = jax.ShapeDtypeStruct((32768, 1024, 1024), jnp.float32)
    print(jaxckpt.measure(lambda x: jnp.sin(x @ x) @ x, x, target="cuda:h100").argument_bytes)
"""


@pytest.mark.cuda
@pytest.mark.tpu
@pytest.mark.skipif(accelerator_visible(), reason="where there is a device, messages about it are let through")
@pytest.mark.parametrize("platforms", ["cpu", None])
def test_the_native_libraries_stay_silent(platforms):
    # Without JAX_PLATFORMS jax tries each plugin, fails, and says so; the CUDA plugin is then not registered.
    done = _run(MEASURE, JAX_PLATFORMS=platforms)
    assert done.stderr == ""
    assert done.stdout.split() == ["262144"] * 4 + [str(2**37)]
    assert done.returncode == 0


@pytest.mark.cuda
@pytest.mark.tpu
@pytest.mark.skipif(accelerator_visible(), reason="where there is a device, messages about it are let through")
def test_what_they_would_say_is_in_the_log():
    done = _run(
        "import logging; logging.basicConfig(level='DEBUG', filename='/dev/stdout')" + textwrap.dedent(MEASURE),
        JAX_PLATFORMS=None,
    )
    assert "jaxckpt" in done.stdout
    assert "Unable to load" in done.stdout


def test_a_checkpoint_inside_of_a_small_loop_compiles_with_the_options_of_the_cpu():
    """XLA makes one kernel of a loop over few bytes, and has no code for the checkpoint's barrier in there."""

    def body(carry, x):
        return carry, jax.checkpoint(lambda y: jnp.prod(y) * jnp.sin(y))(x)

    def loss(xs):
        return jnp.sum(jax.lax.scan(body, jnp.zeros(()), xs)[1])

    x = jnp.linspace(0.5, 1.5, 12).reshape(3, 4)
    step = jax.jit(jax.value_and_grad(loss), compiler_options=compiler_options("cpu") or None)
    expected, gradient = jax.value_and_grad(loss)(x)
    chex.assert_trees_all_close(step(x), (expected, gradient), rtol=1e-5)


def test_several_gpus_are_named_with_an_x():
    with pytest.raises(UnknownTargetError, match="Several GPUs are 'cuda:h100x8'"):
        Target("cuda:h100:8")
