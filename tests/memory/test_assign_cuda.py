"""The compiler for GPUs that fails once buffers are assigned must say of memory what it says when it goes on to the
end.
"""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import _compat
from jaxckpt.memory import assign, report
from jaxckpt.memory.platforms import cuda
from jaxckpt.memory.platforms.base import Stop
from jaxckpt.memory.report import measure
from jaxckpt.memory.targets import Target
from tests.memory.test_assign_tpu import (
    X,
    chain,
    donated,
    loss,
    offloaded,
    on_chip,
    scan,
    switches,
    switches_in_a_loop,
    wide,
)

pytestmark = pytest.mark.cuda


def _branches():
    return lambda x, y: jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(x) @ y, lambda: x), X, X


def _library():
    """Kernels of libraries, a sort, a long constant, random bits, and results without any of them."""

    def fun(x):
        table = jnp.asarray(np.arange(3 * 5000).reshape(3, 5000) % 11)
        noise = jax.random.normal(jax.random.key(0), x.shape)
        return jnp.linalg.cholesky(x @ x.T + noise), jnp.sort(x, 0), jax.lax.top_k(x, 8), jnp.fft.fft(x), table, 1.0

    return fun, X


def _convolution():
    images = jax.ShapeDtypeStruct((8, 32, 32, 64), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)

    def loss(kernel, images):
        for _ in range(3):
            images = jnp.tanh(
                jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        return images.sum(dtype=jnp.float32)

    return jax.value_and_grad(loss), kernel, images


def _over_gpus():
    sharding = NamedSharding(Target("cuda:h100x8").mesh((4, 2), ("data", "model")), P("data", "model"))
    return jax.value_and_grad(loss), jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)


@pytest.fixture
def without_code(stops):
    """The figures of programs as `measure` gives them without code; asserts that XLA was stopped, and made no code."""
    runs = stops(Stop.FILE)

    def measured(fun, *args, target):
        runs.clear()
        report = measure(fun, *args, target=target, generate_code=False)
        ((is_stopped, endings),) = runs
        assert is_stopped and ".pb" in endings and not endings & {".ptx", ".ll"}
        return report

    return measured


@pytest.mark.parametrize(
    "make",
    [
        chain,
        donated,
        scan,
        on_chip,
        wide,
        offloaded,
        switches,
        switches_in_a_loop,
        _branches,
        _library,
        _convolution,
        _over_gpus,
    ],
)
def test_all_figures_of_a_gpu_are_those_of_the_whole_compilation(make, without_code, compiles):
    target = "cuda:h100x8" if make is _over_gpus else "cuda:h100"
    fun, *args = make()
    stopped = without_code(fun, *args, target=target)
    assert not compiles, "compiled to the end"
    whole = measure(fun, *args, target=target, generate_code=True)
    assert len(compiles) == 1
    assert "buffers assigned in" in str(stopped) and "compiled in" in str(whole)
    alike = {"compile_seconds": 0.0, "stopped": False}
    assert stopped.stopped and dataclasses.replace(stopped, **alike) == dataclasses.replace(whole, **alike)
    assert stopped.host_bytes or stopped.peak_bytes == max(stopped.timeline().live_bytes) > 0
    assert (stopped.timeline(), stopped.largest(5)) == (whole.timeline(), whole.largest(5))
    assert stopped.collectives == whole.collectives and bool(whole.collectives) == (make is _over_gpus)


def test_an_option_of_the_users_that_is_wrong_is_told_as_by_the_whole_compilation(without_code):
    with pytest.raises(jaxckpt.ArgumentError, match="xla_no_such_option"):
        measure(*chain(), target="cuda:h100", compiler_options={"xla_no_such_option": 1}, generate_code=False)
    assert without_code(*chain(), target="cuda:h100").peak_bytes, "the next program stops again"


@pytest.mark.parametrize("how", ["goes on", "knows no such option", "says something else"])
def test_a_compiler_that_does_not_stop_goes_to_the_end_and_the_log_says_so_once(how, monkeypatch, compiles, caplog):
    if how == "says something else":
        monkeypatch.setattr(_compat, "is_stopped", lambda error, file: False)
    else:
        options = {} if how == "goes on" else {"xla_no_such_option_of_ours": "x"}
        monkeypatch.setattr(cuda.Cuda, "stopping_options", lambda self, file: options)
    monkeypatch.setattr(assign, "_going_on", set())
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        reports = [measure(*chain(), target="cuda:h100", generate_code=False) for _ in range(2)]
    assert reports[0] == dataclasses.replace(reports[1], compile_seconds=reports[0].compile_seconds)
    assert len(compiles) == 2
    assert caplog.text.count("runs to the end") == 1


def _attention(tokens):
    def attended(x, w):
        heads = (x @ w).reshape(4, tokens, 2, 32)
        shares = jax.nn.softmax(jnp.einsum("bthd,buhd->bhtu", heads, heads))
        return x + jnp.einsum("bhtu,buhd->bthd", shares, heads).reshape(4, tokens, 64) @ w

    def loss(ws, x):
        for w in ws:
            x = attended(x, w)
        return jnp.sum(x**2)

    return loss, [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4, jax.ShapeDtypeStruct((4, tokens, 64), jnp.float32)


def test_attention_over_197_tokens_is_measured_and_planned(monkeypatch, caplog):
    """Such as that of every vision transformer: XLA of jax 0.10 finds no tiles for its default kernels without a GPU to
    tune them on.
    """
    monkeypatch.setattr(report, "_REMEDIES", {})
    loss, *args = _attention(197)
    with caplog.at_level(logging.INFO, "jaxckpt"):
        stopped, whole = (
            measure(jax.value_and_grad(loss), *args, target="cuda:h100", generate_code=code, cache=False)
            for code in (False, True)
        )
    assert stopped.stopped and not whole.stopped and stopped.peak_bytes == whole.peak_bytes
    assert caplog.text.count("it is tried again") <= 1, "programs of the same arguments are compiled alike at once"
    own = {"xla_gpu_enable_triton_gemm": True}
    if "it is tried again" in caplog.text:
        with pytest.raises(jax.errors.JaxRuntimeError, match="tile sizes"):
            measure(jax.value_and_grad(loss), *args, target="cuda:h100", compiler_options=own, cache=False)
    plan = jaxckpt.plan(loss, *args, budget="85%", target="cuda:h100", cache=False)
    assert plan.regions and plan.measured_bytes <= plan.budget < plan.unplanned_bytes
    step = jax.value_and_grad(plan.apply(loss))
    assert measure(step, *args, target="cuda:h100", cache=False).peak_bytes == plan.measured_bytes
