"""The compiler that is stopped once buffers are assigned must say of memory what it says when it goes on to the end."""

import logging
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import _compat
from jaxckpt.memory import assign, cache
from jaxckpt.memory import report as module
from jaxckpt.memory.platforms import tpu
from jaxckpt.memory.report import measure
from jaxckpt.memory.targets import Target

TPU = "tpu:v5e:2x2"
X = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
pytestmark = pytest.mark.tpu


def loss(x):
    for _ in range(6):
        x = jnp.sin(x @ x)
    return jnp.sum(x)


def chain():
    return jax.value_and_grad(jax.checkpoint(loss)), X


def donated():
    return jax.jit(lambda x, y: (x + jax.grad(loss)(y), y), donate_argnums=0), X, X


def scan():
    def body(carry, x):
        return jnp.tanh(carry @ x), carry.sum()

    return lambda x, xs: jax.lax.scan(jax.checkpoint(body), x, xs), X, jax.ShapeDtypeStruct((7, *X.shape), X.dtype)


def on_chip():
    return lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((256, 256), jnp.float32)


def _sharded():
    sharding = NamedSharding(Target(TPU).mesh((2, 2), ("data", "model")), P("data", "model"))
    return jax.value_and_grad(loss), jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)


def _in_host_memory():
    sharding = SingleDeviceSharding(Target(TPU).devices[0], memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)
    return lambda x, y: jnp.sin(jax.device_put(x, jax.memory.Space.Device) @ y) @ y, x, X


def offloaded():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device", offload_dst="pinned_host"
    )

    def body(x, w):
        return jnp.sin(jax.ad_checkpoint.checkpoint_name(x, "x") @ w), None

    def loss(x, ws):
        return jnp.sum(jax.lax.scan(jax.checkpoint(body, policy=policy), x, ws)[0])

    return jax.value_and_grad(loss), X, jax.ShapeDtypeStruct((5, *X.shape), X.dtype)


def switches():
    """Branches in which what was computed before them ends at different moments; unrolled, and with a gradient."""

    def loss(x, i):
        for k in range(6):
            x = jax.lax.switch((i + k) % 3, [lambda x: x, lambda x: jnp.tanh(x @ x), lambda x: jnp.tanh(x).T @ x], x)
        return x.sum()

    return jax.value_and_grad(loss), X, jax.ShapeDtypeStruct((), jnp.int32)


def switches_in_a_loop():
    def step(k, x):
        inner = [lambda x: x.sum() * x, lambda x: x @ x, lambda x: jnp.sort(x)]
        return jax.lax.switch(k % 2, [lambda x: jnp.tanh(x).T @ x, lambda x: jax.lax.switch(k % 3, inner, x)], x)

    return lambda x: jax.lax.fori_loop(0, 9, step, x), X


@pytest.fixture
def no_size_is_small(monkeypatch):
    monkeypatch.setattr(assign, "SMALL", 0)


def wide():
    """A program that is not small."""

    def loss(xs):
        return sum(jnp.sum(jnp.sin(x @ x) * i) for i, x in enumerate(xs))

    return jax.value_and_grad(loss), [X] * 60


# ------------------------------------------------------------------------------------------------------ what it says


@pytest.mark.parametrize(
    "make", [chain, donated, scan, on_chip, _sharded, _in_host_memory, offloaded, switches, switches_in_a_loop]
)
def test_all_figures_of_memory_are_those_of_the_whole_compilation(make, no_size_is_small, compiles):
    fun, *args = make()
    stopped = measure(fun, *args, target=TPU, generate_code=False)
    assert not compiles, "compiled in this process"
    assert stopped.code_bytes is None
    assert stopped.flops is None
    whole = measure(fun, *args, target=TPU)
    assert len(compiles) == 1
    assert whole.code_bytes > 0
    assert stopped.stopped and not whole.stopped
    left_out = {"code_bytes", "flops", "compile_seconds", "stopped"}
    ours, theirs = ({k: v for k, v in report.to_json().items() if k not in left_out} for report in (stopped, whole))
    assert ours == theirs
    assert stopped.timeline() == whole.timeline()
    assert stopped.collectives == whole.collectives
    assert stopped.largest(5) == whole.largest(5)
    assert "program" not in str(stopped) and "buffers assigned in" in str(stopped)
    assert "program" in str(whole) and "compiled in" in str(whole)


def test_checkpoints_are_in_the_program_that_is_compiled_there(no_size_is_small):
    def peak(wrap):
        def loss(x, w):
            for _ in range(8):
                x = wrap(lambda x: jnp.sin(jnp.sin(x @ w) @ w))(x)
            return jnp.sum(x)

        x = jax.ShapeDtypeStruct((32768, 1024), jnp.float32)
        return measure(jax.value_and_grad(loss), x, X, target=TPU, generate_code=False).peak_bytes

    assert peak(jax.checkpoint) < 0.75 * peak(lambda fun: fun)


def test_a_program_that_does_not_fit_is_refused_as_by_the_whole_compilation(no_size_is_small, compiles):
    x = jax.ShapeDtypeStruct((2**18, 2**18), jnp.float32)
    with pytest.raises(jaxckpt.DoesNotFitError) as stopped:
        measure(lambda x: x + 1, x, target=TPU, generate_code=False)
    assert not compiles
    with pytest.raises(jaxckpt.DoesNotFitError) as whole:
        measure(lambda x: x + 1, x, target=TPU)
    assert str(stopped.value) == str(whole.value)
    assert stopped.value.needed_bytes == whole.value.needed_bytes >= 256 * 2**30


# -------------------------------------------------------------------------------------------------- when it is stopped


def test_for_several_tpus_a_large_program_is_stopped_and_a_small_one_is_not(compiles):
    (fun, xs), (_, x) = wide(), _sharded()
    assert measure(fun, [x] * len(xs), target=TPU, generate_code=False).code_bytes is None
    assert not compiles
    assert measure(lambda x: jnp.sin(x) @ x, x, target=TPU, generate_code=False).code_bytes > 0
    assert len(compiles) == 1


def test_a_program_that_nearly_fills_the_tpu_goes_to_the_end_because_of_its_code(no_size_is_small, compiles):
    room = Target(TPU).memory_bytes
    for share, whole in ((0.7, False), (0.85, True)):
        x = jax.ShapeDtypeStruct((int(share * room / 2 / 4 / 1024), 1024), jnp.float32)
        report = measure(lambda x: x + 1, x, target=TPU, generate_code=False)
        assert report.peak_bytes == pytest.approx(share * room, rel=0.01)
        assert (report.code_bytes is not None) == bool(compiles) == whole


def test_tpus_that_are_here_belong_to_one_process(monkeypatch, no_size_is_small, compiles):
    monkeypatch.setattr(tpu, "tpu_visible", lambda: True)
    assert measure(*on_chip(), target=TPU, generate_code=False).code_bytes is None, "stopped in this process"
    assert not compiles
    assert measure(*_sharded(), target=TPU, generate_code=False).code_bytes > 0
    assert len(compiles) == 1


def test_what_calls_back_into_this_process_is_compiled_in_it():
    def fun(x):
        jax.debug.callback(lambda x: None, jnp.sum(x))
        return jnp.sin(x)

    lowered = jax.jit(fun).lower(X)
    assert _compat.compile_request(lowered, {}) is None


# --------------------------------------------------------------------------------------------------------- the process


@pytest.mark.parametrize("executable", ["/bin/false", "/nowhere/python"])
def test_where_no_process_can_be_had_the_program_is_compiled_in_this_one_and_the_log_says_so(
    executable, monkeypatch, no_size_is_small, compiles, caplog
):
    monkeypatch.setattr(sys, "executable", executable)
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        report = measure(*_sharded(), target=TPU, generate_code=False)
    assert report.code_bytes > 0
    assert len(compiles) == 1
    assert "process" in caplog.text


def test_it_leaves_no_process_and_no_folder(no_size_is_small, tmp_path, monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **named: (started.append(popen(*args, **named)), started[-1])[1]
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    measure(*_sharded(), target=TPU, generate_code=False)
    assert [process.returncode is not None for process in started] == [True]
    assert not os.listdir(tmp_path)


def test_it_is_gone_when_the_wait_is_interrupted(no_size_is_small, monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **named: (started.append(popen(*args, **named)), started[-1])[1]
    )

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(assign.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(*_sharded(), target=TPU, generate_code=False)
    assert [process.returncode is not None for process in started] == [True]


def test_it_ends_with_the_process_that_started_it(tmp_path):
    fun, x = _sharded()
    lowered = module.lowered_for(module.traced_for(fun, (x,), Target(TPU)), Target(TPU))
    with jax.default_device(Target(TPU).devices[0]):
        _compat.compile_request(lowered, {}).write(tmp_path)
    command = [sys.executable, "-m", "jaxckpt.memory.assign", str(tmp_path), TPU]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 1


def test_compilations_of_other_threads_go_on_while_a_request_is_made():
    lowered = jax.jit(jnp.sin).lower(1.0)
    values = []

    class Lowered:
        def compile(self, compiler_options):
            thread = threading.Thread(target=lambda: values.append(jax.jit(lambda x: jnp.cos(x) + 41.0)(0.0)))
            thread.start()
            thread.join()
            return lowered.compile(compiler_options=compiler_options)

    request = _compat.compile_request(Lowered(), {})
    assert request.name == "jit_sin"
    assert values == [42.0]
    assert lowered.compile()(0.0) == 0.0, "the compiler is JAX's own again"


# ----------------------------------------------------------------------------------------------------------- the cache


def test_an_answer_without_code_serves_only_those_who_want_none(no_size_is_small, compiles, monkeypatch, tmp_path):
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    stopped = measure(*on_chip(), target=TPU, generate_code=False)
    assert measure(*on_chip(), target=TPU, generate_code=False) == stopped
    assert not compiles
    whole = measure(*on_chip(), target=TPU)
    assert len(compiles) == 1
    assert whole.code_bytes > 0
    assert measure(*on_chip(), target=TPU, generate_code=False) == measure(*on_chip(), target=TPU) == whole
    assert len(compiles) == 1
