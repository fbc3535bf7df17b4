"""The compiler for the CPU that fails at an unknown call must say of memory what it says when it goes on to the end."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt import _compat
from jaxckpt.factories import load, make
from jaxckpt.memory import assign, cache
from jaxckpt.memory.platforms.base import Stop
from jaxckpt.memory.platforms.cpu import Cpu
from jaxckpt.memory.report import measure
from tests.memory.test_assign_tpu import (
    X,
    chain,
    donated,
    on_chip,
    scan,
    switches,
    switches_in_a_loop,
    wide,
)


def _branches():
    return lambda x, y: jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(x) @ y, lambda: x), X, X


def _odd():
    """Sizes that are no multiples of the alignment, numbers of one byte, results without computation, no bytes."""

    def fun(x, flags):
        table = jnp.asarray(np.arange(3 * 37).reshape(3, 37) % 11)
        bits = jax.random.bits(jax.random.key(0), (x.shape[0],))
        return jnp.sort(x, 0)[:5], jnp.cumsum(x, 1), flags[::-1], table, x[:0], 1.0, x.sum() + bits.sum() + flags.sum()

    return fun, jax.ShapeDtypeStruct((37, 53), jnp.float32), jax.ShapeDtypeStruct((101,), jnp.bool_)


def _nothing():
    return lambda x: x, X


def _model(factory, checkpoint):
    def made():
        loss, args = make(load(f"benchmarks.models.mixed:{factory}"), checkpoint=checkpoint)
        return jax.value_and_grad(loss), *args

    return made


PROGRAMS = {
    **{each.__name__: each for each in (chain, donated, scan, on_chip, switches, switches_in_a_loop, wide)},
    **{each.__name__: each for each in (_branches, _odd, _nothing)},
    "loops": _model("loops", None),
    "second derivatives": _model("second", None),
    "tied weights, checkpoints": _model("tied", jax.checkpoint),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_figures_of_memory_are_those_of_the_whole_compilation(name, compiles, stops):
    runs = stops(Stop.CALL)
    fun, *args = PROGRAMS[name]()
    stopped = measure(fun, *args, target="cpu", generate_code=False)
    assert stopped.stopped and not compiles, "compiled to the end"
    ((is_stopped, endings),) = runs
    assert is_stopped and ".pb" in endings and not endings & {".o", ".ll"}, "made code"
    whole = measure(fun, *args, target="cpu")
    assert len(compiles) == 1
    alike = {"compile_seconds": 0.0, "stopped": False, "flops": None}
    assert dataclasses.replace(stopped, **alike) == dataclasses.replace(whole, **alike)
    assert (stopped.timeline(), stopped.largest(5)) == (whole.timeline(), whole.largest(5))
    assert "buffers assigned in" in str(stopped) and "compiled in" in str(whole)


def test_what_calls_back_into_this_process_is_compiled_to_the_end(compiles):
    def fun(x):
        jax.debug.callback(lambda x: None, jnp.sum(x))
        return jnp.sin(x)

    assert not measure(fun, X, target="cpu", generate_code=False).stopped
    assert len(compiles) == 1


def test_a_program_for_several_devices_is_compiled_to_the_end():
    assert Cpu().stop(True, 1) is Stop.CALL
    assert Cpu().stop(True, 8) is None


@pytest.mark.parametrize("how", ["goes on", "says something else"])
def test_a_compiler_that_does_not_stop_goes_to_the_end_and_the_log_says_so_once(how, monkeypatch, compiles, caplog):
    if how == "says something else":
        monkeypatch.setattr(_compat, "is_stopped", lambda error, at: False)
    else:
        compile_ = _compat.CompileRequest.compile
        monkeypatch.setattr(_compat.CompileRequest, "compile", lambda self, devices, stops: compile_(self, devices))
    monkeypatch.setattr(assign, "_going_on", set())
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        reports = [measure(*chain(), target="cpu", generate_code=False) for _ in range(2)]
    assert reports[0] == dataclasses.replace(reports[1], compile_seconds=reports[0].compile_seconds)
    assert len(compiles) == 2
    assert caplog.text.count("runs to the end") == 1


def test_a_stored_answer_without_code_serves_only_those_who_want_none(compiles, monkeypatch, tmp_path):
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    stopped = measure(*on_chip(), target="cpu", generate_code=False)
    assert measure(*on_chip(), target="cpu", generate_code=False) == stopped and not compiles
    whole = measure(*on_chip(), target="cpu")
    assert len(compiles) == 1 and whole.flops
    assert measure(*on_chip(), target="cpu", generate_code=False) == measure(*on_chip(), target="cpu") == whole
    assert len(compiles) == 1
