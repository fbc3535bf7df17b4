"""adaptive: a step that runs out of memory is planned again tighter, and goes on with the state that it had."""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler

import jaxckpt
from jaxckpt import adaptive, autocheckpoint
from jaxckpt.memory.report import measure
from jaxckpt.planner.shortage import is_out_of_memory, missing_bytes
from tests.helpers import gradient_executions

LAYERS, WIDTH, ROWS = 8, 16, 256
X = jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


def start():
    """The state before training; each time new arrays, for steps donate them."""
    return [jnp.eye(WIDTH) * 0.8 + 0.01 * (i + 1) for i in range(LAYERS)]


def loss_of(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def planned_loss(**settings):
    return autocheckpoint(loss_of, **{"budget": "100%"} | settings)


def training_step(loss):
    @functools.partial(jax.jit, donate_argnums=0, compiler_options=jaxckpt.compiler_options())
    def train(ws, x):
        value, grads = jax.value_and_grad(loss)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.5 * g, ws, grads), value

    return train


def losses(step, count=5, state=None):
    state, seen = start() if state is None else state, []
    for _ in range(count):
        state, value = step(state, X)
        seen.append(float(value))
    return seen


@pytest.fixture(scope="module")
def expected():
    """The losses of the run that never fails, without any plan."""
    return losses(training_step(loss_of))


def exhausted(text="Out of memory while trying to allocate 4096 bytes."):
    return jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}")


class Flaky:
    """A jitted step that raises at some of its calls, before it starts or after it has run."""

    def __init__(self, step, before=(), after=(), error=exhausted):
        self.step, self.before, self.after, self.error, self.calls = step, before, after, error, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls in self.before:
            self.step.lower(*args)  # it is traced, as far as it comes
            raise self.error()
        out = self.step(*args)
        if self.calls in self.after:
            raise self.error()
        return out


def events(caplog):
    return [record.message for record in caplog.records if record.name == "jaxckpt" and record.levelname == "WARNING"]


def test_a_program_too_large_for_the_compiler_is_planned_again_until_it_compiles(monkeypatch, caplog, expected):
    """The compiler refuses `train` above a capacity, and says by how much, as a TPU's does."""
    loss = planned_loss()
    before = loss.plan(start(), X).measured_bytes
    real, refused = compiler.compile_or_get_cached, []
    capacity = int(0.7 * before)

    def compile_within(backend, module, *args, **kwargs):
        compiled = real(backend, module, *args, **kwargs)
        if "train" in str(module.operation.attributes["sym_name"]):
            stats = compiled.get_compiled_memory_stats()
            given = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
            if (peak := given + stats.temp_size_in_bytes) > capacity:
                refused.append(peak)
                raise exhausted(f"Ran out of memory in memory space hbm. Used {peak} of {capacity} hbm.")
        return compiled

    monkeypatch.setattr(compiler, "compile_or_get_cached", compile_within)
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        np.testing.assert_allclose(losses(adaptive(training_step(loss))), expected, rtol=1e-6)
    after = loss.plan(start(), X)
    assert 1 <= len(refused) <= 4 and after.measured_bytes < before
    assert measure(jax.value_and_grad(after.apply(loss_of)), start(), X).peak_bytes == after.measured_bytes
    assert len(events(caplog)) == len(refused)
    assert "train: It ran out of memory, with" in caplog.text and "loss_of peaked at" in caplog.text


def test_the_third_step_fails_and_the_run_goes_on_with_its_state(caplog, expected):
    loss = planned_loss()
    before = loss.plan(start(), X)
    again = gradient_executions(loss, start(), X)["tanh"]
    step = Flaky(training_step(loss), before={3})
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert losses(adaptive(step)) == pytest.approx(expected, rel=1e-6)
    after = loss.plan(start(), X)
    assert step.calls == 6 and after.measured_bytes <= 7 / 8 * before.measured_bytes
    assert gradient_executions(loss, start(), X)["tanh"] > again  # what the step runs now is the tighter plan
    assert len(events(caplog)) == 1


def test_a_step_compiled_before_it_was_made_adaptive_is_traced_again_to_see_what_it_calls(expected):
    loss = planned_loss()
    jitted = training_step(loss)
    losses(jitted, 1)
    before = loss.plan(start(), X).measured_bytes
    calls = []

    def step(ws, x):
        calls.append(len(calls))
        if len(calls) <= 2:
            raise exhausted()
        return jitted(ws, x)

    # The first run says nothing of what is in it. Nor does the second, which raises before it is traced.
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        adaptive(step)(start(), X)
    assert "No function of jaxckpt.autocheckpoint runs in step" in "\n".join(raised.value.__notes__)
    calls.clear()
    calls.append("one failure, then it is traced")
    assert losses(adaptive(step)) == pytest.approx(expected, rel=1e-6)
    assert loss.plan(start(), X).measured_bytes == before  # nothing was known to be planned again, and it went


def test_consumed_buffers_are_an_error_that_says_so_and_the_loop_resumes(caplog, expected):
    loss = planned_loss()
    before = loss.plan(start(), X).measured_bytes
    step = adaptive(Flaky(training_step(loss), after={3}))
    state, saved, seen, lost = start(), None, [], []
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        while len(seen) < 5:
            saved = [np.array(w) for w in state]  # a view would keep JAX from donating the buffer
            try:
                state, value = step(state, X)
            except jaxckpt.StateLostError as error:
                lost.append(error)
                state = jax.device_put(saved)
            else:
                seen.append(float(value))
    assert seen == pytest.approx(expected, rel=1e-6)
    assert loss.plan(start(), X).measured_bytes < before and len(events(caplog)) == 1
    (error,) = lost
    assert (error.lost[0], len(error.lost)) == ("args[0][0]", LAYERS)
    assert "and 5 more" in str(error) and "Resume from the last checkpoint" in str(error)
    assert is_out_of_memory(error.__cause__) and isinstance(error, MemoryError)
    assert pickle.loads(pickle.dumps(error)).lost == error.lost


@pytest.fixture
def late(monkeypatch):
    """A device that runs behind Python: the first wait for new weights raises. Returns the errors that
    are still to come.
    """
    ready, errors = jax.block_until_ready, [exhausted()]

    def wait(results):
        ready(results)
        if errors and any(leaf.shape == (WIDTH, WIDTH) for leaf in jax.tree.leaves(results)):
            raise errors.pop()
        return results

    monkeypatch.setattr(jax, "block_until_ready", wait)
    return errors


@pytest.mark.parametrize("donated", [True, False])
def test_an_error_that_the_runtime_raises_later_is_waited_for(late, expected, donated):
    """The step has returned by then: what it donated is gone, and what it did not donate is there to run it again."""
    loss = planned_loss()
    before, state = loss.plan(start(), X).measured_bytes, start()
    train = training_step(loss)
    step = adaptive(train if donated else jax.jit(train.__wrapped__, compiler_options=jaxckpt.compiler_options()))
    if donated:
        with pytest.raises(jaxckpt.StateLostError) as caught:
            step(state, X)
        assert len(caught.value.lost) == LAYERS and all(w.is_deleted() for w in state)
        state = start()
    assert losses(step, state=state) == pytest.approx(expected, rel=1e-6)
    assert not late and loss.plan(start(), X).measured_bytes < before


def test_without_waiting_an_error_that_comes_later_is_not_seen(late):
    loss = planned_loss()
    before = loss.plan(start(), X)
    adaptive(training_step(loss), wait=False)(start(), X)
    assert late and loss.plan(start(), X) is before


def test_other_errors_pass_as_they_are_and_change_nothing():
    loss = planned_loss()
    before = loss.plan(start(), X)
    for error in (jax.errors.JaxRuntimeError("INTERNAL: else"), ValueError("RESOURCE_EXHAUSTED of the user's own")):
        step = adaptive(Flaky(training_step(loss), before={1, 2}, error=lambda error=error: error))
        with pytest.raises(type(error)) as raised:
            step(start(), X)
        assert raised.value is error and not hasattr(error, "__notes__")
    assert loss.plan(start(), X) is before


def test_where_nothing_tighter_is_feasible_the_first_error_says_what_was_tried(caplog):
    loss = planned_loss()
    before = loss.plan(start(), X).measured_bytes
    always = Flaky(training_step(loss), before=range(1, 100))
    with caplog.at_level(logging.WARNING, "jaxckpt"), pytest.raises(jax.errors.JaxRuntimeError) as raised:
        adaptive(always, tries=30)(start(), X)
    notes = "\n".join(raised.value.__notes__)
    assert "tried Flaky again" in notes and "No tighter plan is feasible" in notes and "planned within" in notes
    assert 2 <= always.calls < 30
    assert isinstance(raised.value.__cause__, jaxckpt.InfeasibleBudgetError)
    assert loss.plan(start(), X).measured_bytes == before  # the next call finds the plans that it had


def test_tries_are_bounded():
    loss = planned_loss()
    always = Flaky(training_step(loss), before=range(1, 100))
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        adaptive(tries=1)(always)(start(), X)
    assert always.calls == 2 and "try 1 of 1" in raised.value.__notes__[0]


def test_a_budget_of_the_caller_that_cannot_be_met_is_the_callers_error():
    with pytest.raises(jaxckpt.InfeasibleBudgetError):
        adaptive(training_step(planned_loss(budget="1KiB")))(start(), X)


def test_an_eager_loss_is_planned_again_too():
    loss = planned_loss()
    before = loss.plan(start(), X).measured_bytes

    class Eager:
        calls = 0

        def __call__(self, ws, x):
            out = jax.value_and_grad(loss)(ws, x)
            self.calls += 1
            if self.calls == 1:
                raise exhausted()
            return out

    value, grads = adaptive(Eager())(start(), X)
    wanted = jax.value_and_grad(loss_of)(start(), X)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    for a, b in zip(grads, wanted[1]):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert loss.plan(start(), X).measured_bytes < before


def test_a_flax_train_state_with_optax_goes_on(expected):
    optax = pytest.importorskip("optax")
    state_of = pytest.importorskip("flax.training.train_state").TrainState
    loss = planned_loss()

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, x):
        value, grads = jax.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads=grads), value

    state = state_of.create(apply_fn=loss_of, params=start(), tx=optax.sgd(0.5))
    assert losses(adaptive(Flaky(train, before={3})), state=state) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("jitted", [True, False])
def test_nnx_modules_hold_what_they_held_when_the_step_runs_again(jitted):
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")

    def run(failing):
        model = nnx.Sequential(*(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(3)))
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
        loss = autocheckpoint(lambda model, x: jnp.mean(model(x) ** 2), budget="100%", step=nnx.value_and_grad)

        def train(model, optimizer, x):
            value, grads = nnx.value_and_grad(loss)(model, x)
            optimizer.update(model, grads)
            return value

        # It fails after the modules have changed: they must not change twice.
        step = adaptive(Flaky(nnx.jit(train) if jitted else train, after={2} if failing else ()))
        return [float(step(model, optimizer, X)) for _ in range(3)], int(optimizer.step[...])

    values, steps = run(failing=True)
    wanted, _ = run(failing=False)
    assert values == pytest.approx(wanted, rel=1e-5) and steps == 3


SHARDED = """
import functools, json
import jax, jax.numpy as jnp, jaxckpt
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.linspace(-1, 1, 4096).reshape(256, 16), NamedSharding(mesh, P("data")))
start = lambda: jax.device_put([jnp.eye(16) * 0.8 + 0.01 * i for i in range(8)], NamedSharding(mesh, P()))

def loss_of(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

loss = jaxckpt.autocheckpoint(loss_of, budget="100%")

@functools.partial(jax.jit, donate_argnums=0)
def train(ws, x):
    value, grads = jax.value_and_grad(loss)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.5 * g, ws, grads), value

def flaky(ws, x, calls=[]):
    calls.append(1)
    if len(calls) == 3:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    return train(ws, x)

before = loss.plan(start(), x).measured_bytes
found = []
for step in (jax.jit(lambda ws, x: train.__wrapped__(ws, x)), jaxckpt.adaptive(flaky)):
    state, values = start(), []
    for _ in range(5):
        state, value = step(state, x)
        values.append(float(value))
    found.append(values)
assert state[0].sharding.num_devices == 2
print(json.dumps([found, before, loss.plan(start(), x).measured_bytes]))
"""


def test_a_plan_made_ahead_for_sharded_arguments_is_made_again_for_them():
    """Within the step's trace no sharding can be seen; the new plan's bytes are those of one device all the same."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (plain, failing), before, after = json.loads(done.stdout)
    assert failing == pytest.approx(plain, rel=1e-6)
    one = sum(w.nbytes for w in start()) + X.nbytes // 2
    assert one < after < before < one + X.nbytes * LAYERS


def test_a_stored_plan_that_ran_out_of_memory_is_replaced(tmp_path, expected):
    loss = planned_loss(path=tmp_path)
    before = loss.plan(start(), X).measured_bytes
    assert losses(adaptive(Flaky(training_step(loss), before={2}))) == pytest.approx(expected, rel=1e-6)
    (file,) = tmp_path.glob("*.json")
    assert jaxckpt.Plan.load(file).measured_bytes < before
    assert planned_loss(path=tmp_path).plan(start(), X).measured_bytes < before


def test_arguments_of_the_step_are_counted_once_in_what_the_device_has_free(monkeypatch):
    """In a trace the loss sees no arrays; what the step was given is on the device all the same."""
    from jaxckpt.planner import planned_calls

    asked = []

    def budget_bytes(budget, *, resident, **_):
        asked.append(resident)
        return 2**20

    monkeypatch.setattr(planned_calls, "budget_bytes", budget_bytes)
    arguments = sum(leaf.nbytes for leaf in [*start(), X])
    training_step(planned_loss(budget="device"))(start(), X)
    adaptive(training_step(planned_loss(budget="device")))(start(), X)
    assert asked == [0, arguments]


def test_what_the_device_has_free_is_an_error_on_the_cpu():
    with pytest.raises(jaxckpt.ArgumentError, match="does not say how much memory is free"):
        adaptive(training_step(planned_loss(budget="device")))(start(), X)


def test_bad_input():
    for settings, name in (({"tries": 0}, "tries"), ({"tries": True}, "tries"), ({"wait": 1}, "wait")):
        with pytest.raises(jaxckpt.ArgumentError, match=f"{name} must be"):
            adaptive(loss_of, **settings)
    with pytest.raises(jaxckpt.ArgumentError, match="step must be a function"):
        adaptive(3)


class Stats:
    def __init__(self, **stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


@pytest.mark.parametrize(
    ("text", "devices", "missing"),
    [
        ("Used 23.50G of 15.50G hbm. Exceeded hbm capacity by 8.00G.", [], 8 * 2**30),
        (
            "Attempting to reserve 9.5G at the bottom of memory. That was not possible. There are 7G free",
            [],
            2.5 * 2**30,
        ),
        ("Out of memory while trying to allocate 4096 bytes.", [Stats(bytes_limit=5000, bytes_in_use=3000)], 2096),
        ("Out of memory while trying to allocate 1.50GiB.", [Stats(bytes_limit=2**30)], 2**29),
        ("Failed to allocate request for 2.0KiB (2048B) on device ordinal 0", [Stats(bytes_limit=1024)], 1024),
        ("Out of memory while trying to allocate 4096 bytes.", [Stats(bytes_limit=5000)], None),  # it is scattered
        ("Out of memory while trying to allocate 4096 bytes.", [Stats()], None),
        ("no figures", [Stats(bytes_limit=1)], None),
    ],
)
def test_what_errors_say_is_missing(text, devices, missing):
    assert missing_bytes(f"RESOURCE_EXHAUSTED: {text}", devices) == missing


def test_the_cpu_raises_what_is_looked_for():
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jnp.zeros(2**46) + 1
    assert is_out_of_memory(raised.value)
