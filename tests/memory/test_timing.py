"""compare(time=True): runs are interleaved and compiled once, and the medians are what is compared."""

import jax
import jax.numpy as jnp
import pytest

from jaxckpt.memory import compare


class Step:
    """A jitted step, as far as a timing is concerned, that takes time by a clock of its own."""

    def __init__(self, name, durations, clock):
        self.name, self.durations, self.clock = name, iter(durations), clock

    def lower(self): ...

    def __call__(self, x):
        self.clock.log.append(self.name)
        self.clock.now += next(self.durations)
        return x


class Clock:
    def __init__(self):
        self.now, self.log = 0.0, []

    def perf_counter(self):
        return self.now


def test_runs_are_interleaved_and_a_slow_moment_does_not_count(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(compare, "clock", clock)
    forever = [1.0] * 100
    steps = {
        "a": Step("a", [50.0, 1.0, 30.0, *forever], clock),  # the first run is not timed; one later run is disturbed
        "b": Step("b", [50.0] + [2.0] * 100, clock),
    }
    told = []
    seconds = compare.time_steps(steps, (jnp.ones(3),), lambda done, what: told.append((done, what)))
    assert seconds == {"a": 1.0, "b": 2.0}
    assert clock.log[:2] == ["a", "b"] and clock.log[2:] == ["a", "b"] * ((len(clock.log) - 2) // 2)
    assert told == [(0, "timing a"), (1, "timing b")]


@pytest.mark.parametrize(("duration", "rounds"), [(0.001, compare.ROUNDS[-1]), (100.0, compare.ROUNDS[0]), (10.0, 6)])
def test_there_are_as_many_rounds_as_there_is_time_for(monkeypatch, duration, rounds):
    clock = Clock()
    monkeypatch.setattr(compare, "clock", clock)
    compare.time_steps({"a": Step("a", [duration] * 100, clock)}, (jnp.ones(3),), lambda *_: None)
    assert len(clock.log) == 1 + rounds


def test_a_timed_step_runs_with_what_the_backend_needs_for_checkpoints_to_hold(monkeypatch):
    seen = []
    jit = jax.jit
    monkeypatch.setattr(compare, "compiler_options", lambda: {"xla_cpu_enable_fast_math": False})
    monkeypatch.setattr(jax, "jit", lambda fun, **options: seen.append(options) or jit(fun))
    compare.time_steps({"a": lambda x: x + 1}, (jnp.ones(3),), lambda *_: None)
    assert seen == [{"compiler_options": {"xla_cpu_enable_fast_math": False}}]
