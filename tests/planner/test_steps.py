"""Training steps in the forms that people write them: methods, wrappers, mapped over devices, with shardings given to
`jax.jit`. Each is planned within its budget, trains as without the plan, and needs what its report says.
"""

import functools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxckpt
from tests.helpers import assert_trees_close

pytestmark = pytest.mark.usefixtures("shared_answers")
OPTIMIZER = optax.adam(1e-3)


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def update(loss, ws, state, x):
    value, gradients = jax.value_and_grad(loss)(ws, x)
    updates, state = OPTIMIZER.update(gradients, state, ws)
    return optax.apply_updates(ws, updates), state, value


class Trainer:
    """Its step is a jitted method."""

    def __init__(self, loss):
        self.loss = loss

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
    def step(self, ws, state, x):
        return update(self.loss, ws, state, x)


def jitted(loss, donated=(0, 1)):
    return jax.jit(functools.partial(update, loss), donate_argnums=donated)


FORMS = {
    "jitted": jitted,
    "a jitted method": lambda loss: Trainer(loss).step,
    "a wrapper": lambda loss: lambda *args: jitted(loss)(*args),
    "a partial": lambda loss: functools.partial(jitted(loss)),
    "plain": lambda loss: functools.partial(update, loss),
    "jitted twice": lambda loss: jax.jit(lambda *args: jitted(loss)(*args)),
}


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("form", FORMS)
def test_steps_of_any_form_are_planned_with_what_they_donate(form):
    ws = [0.1 * jax.random.normal(key, (128, 128)) for key in jax.random.split(jax.random.key(0), 8)]
    args = ws, OPTIMIZER.init(ws), jnp.linspace(-1, 1, 2048 * 128).reshape(2048, 128)
    copies = lambda: jax.tree.map(jnp.copy, args)
    plan = jaxckpt.plan(loss, *args, budget="70%", step=FORMS[form])
    assert plan.regions and plan.measured_bytes <= plan.budget < plan.unplanned_bytes
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(args[:2]))
    donates = form not in ("plain", "jitted twice")
    assert plan.report.donated_bytes == (state if donates else 0)
    assert plan.report.donatable_bytes == (0 if donates else state)
    assert_trees_close(FORMS[form](plan.apply(loss))(*copies()), FORMS[form](loss)(*copies()), rtol=1e-4, atol=1e-6)
    given = copies()
    FORMS[form](plan.apply(loss))(*given)
    assert jax.tree.leaves(given[0])[0].is_deleted() == donates, "what is counted is what happens"


def test_a_gradient_is_no_next_value():
    """That of the batch has its shape, and is computed of it element by element."""
    apart = lambda ws, x: jnp.mean((loss(ws, x) - x) ** 2)
    ws = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    both = lambda fun: jax.jit(jax.value_and_grad(fun, argnums=(0, 1)))
    plan = jaxckpt.plan(apart, ws, jax.ShapeDtypeStruct((1024, 64), jnp.float32), budget="90%", step=both)
    assert plan.report.donatable_bytes == 0


OVER_DEVICES = """
import json
import re
import sys

import jax
import jax.numpy as jnp
import jaxckpt
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

form, placed = sys.argv[1:]
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))
ws = [0.2 * jax.random.normal(key, (64, 64)) for key in jax.random.split(jax.random.key(0), 8)]
x = jnp.linspace(-1, 1, 8192 * 64).reshape(8192, 64)


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def gathered(ws, x):
    for w in ws:
        x = jnp.tanh(x @ jax.lax.all_gather(w, "d", tiled=True))
    return jax.lax.pmean(jnp.mean(x**2), "d")


def mapped(body, specs=P(), out=P(), typed=True):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs, P("d")), out_specs=out, check_vma=typed))


def mean_of_losses(loss):
    return mapped(jax.value_and_grad(lambda *args: jax.lax.pmean(loss(*args), "d")))


def mean_of_gradients(loss):
    own = lambda ws: jax.tree.map(lambda w: jax.lax.pcast(w, "d", to="varying"), ws)
    return mapped(lambda ws, x: jax.lax.pmean(jax.value_and_grad(loss)(own(ws), x), "d"))


def without_types(loss):
    return mapped(lambda ws, x: jax.lax.pmean(jax.value_and_grad(loss)(ws, x), "d"), typed=False)


def fully_sharded(loss):
    return mapped(lambda ws, x: jax.value_and_grad(loss)(ws, x), P("d"), (P(), P("d")))


def shardings_given(loss):
    return jax.jit(jax.value_and_grad(loss), in_shardings=(whole, rows))


fun, step = (gathered if form == "fully_sharded" else loss), globals()[form]
laid = rows if form == "fully_sharded" else whole
args = (ws, x) if placed == "unplaced" else (jax.device_put(ws, laid), jax.device_put(x, rows))
plan = jaxckpt.plan(fun, *args, budget="75%", step=step)
compiled = step(plan.apply(fun)).lower(*args).compile(compiler_options=jaxckpt.compiler_options())
said = compiled.memory_analysis()
own = said.argument_size_in_bytes + said.output_size_in_bytes + said.temp_size_in_bytes - said.alias_size_in_bytes
for ours, plain in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(step(fun)(*args)), strict=True):
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-7)
try:
    jaxckpt.plan(fun, *args, budget=1000, step=step)
except jaxckpt.InfeasibleBudgetError as error:
    too_low = str(error)
assert "In the order in which it runs" in plan.describe(), "where a trace of the loss alone has no axis names"
kept = [float(size) for size in re.findall(r"([0-9.]+) KiB  tanh +float32\\[", plan.describe())]
assert max(kept, default=0.0) <= 8192 * 64 * 4 / 4 / 1024, "bytes of one device"
print(json.dumps([plan.budget, plan.measured_bytes, own, plan.unplanned_bytes, len(plan.regions),
                  said.argument_size_in_bytes, plan.report.donatable_bytes, too_low]))
"""


@pytest.mark.parametrize("placed", ["placed", "unplaced"])
@pytest.mark.parametrize(
    "form", ["mean_of_losses", "mean_of_gradients", "without_types", "fully_sharded", "shardings_given"]
)
def test_steps_that_say_themselves_how_arrays_lie_are_planned_for_one_device(form, placed):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", OVER_DEVICES, form, placed]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    budget, measured, own, unplanned, regions, arguments, donatable, too_low = json.loads(done.stdout)
    assert regions and measured == own <= budget < unplanned
    assert donatable is None, "not known of several devices"
    assert f"arguments alone, {jaxckpt.core.units.format_bytes(arguments)}" in too_low, "those of one device"


IN_A_FILE = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def gathered(ws, x):
    for w in ws:
        x = jnp.tanh(x @ jax.lax.all_gather(w, "d", tiled=True))
    return jnp.mean(x**2)


def whole(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def mapped(loss):
    return jax.jit(jax.shard_map(
        lambda ws, x: jax.lax.pmean(jax.value_and_grad(loss)(ws, x), "d"),
        mesh=mesh, in_specs=(P("d"), P("d")), out_specs=(P(), P("d")), check_vma=False))


def given(loss):
    rows = jax.sharding.NamedSharding(mesh, P("d"))
    return jax.jit(jax.value_and_grad(loss), in_shardings=(rows, rows))


def shapes():
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return [of(64, 64)] * 8, of(8192, 64)


def make_mapped():
    return gathered, shapes(), mapped


def make_given():
    return whole, shapes(), given


def make_replicated():
    return whole, shapes(), lambda loss: jax.jit(jax.value_and_grad(loss), in_shardings=jax.NamedSharding(mesh, P()))


def make_scattered():
    rows = jax.NamedSharding(mesh, P("d"))
    return whole, shapes(), lambda loss: jax.jit(jax.grad(loss), out_shardings=rows)
"""
OTHER_LAYOUTS = """
from jaxckpt import cli
assert cli.main(["plan", "divided.py:make_given", "--budget", "60%", "--output", "plan.json"]) == 0
assert cli.main(["show", "plan.json", "divided.py:make_replicated"]) == 0
assert cli.main(["plan", "divided.py:make_scattered", "--budget", "100%"]) == 0
"""
COMMANDS = """
import sys
from jaxckpt import cli
file, factory = sys.argv[1:]
assert cli.main(["plan", f"{file}:{factory}", "--budget", "60%", "--output", "plan.json"]) == 0
print("SHOWN")
assert cli.main(["show", "plan.json", f"{file}:{factory}"]) == 0
print("LISTED")
assert cli.main(["residuals", f"{file}:{factory}"]) == 0
"""


@pytest.mark.parametrize("factory", ["make_mapped", "make_given"])
def test_commands_show_the_plan_of_a_divided_step_again_with_the_same_bytes(factory, tmp_path):
    """`show` and `residuals` trace the loss where its step calls it: within the mapped function, or over devices."""
    (tmp_path / "divided.py").write_text(IN_A_FILE)
    command = [sys.executable, "-c", COMMANDS, "divided.py", factory]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    planned, rest = done.stdout.split("SHOWN")
    shown, listed = rest.split("LISTED")
    trees = [re.findall(r"([0-9.]+ [KM]iB)  (?:[0-9]+ × )?tanh", text) for text in (planned, shown)]
    assert trees[0] == trees[1] and trees[0], "bytes of one device, both times"
    assert ("float32[2048, 64]" in listed) == (factory == "make_mapped")
    assert ("bytes of whole arrays" in listed) == (factory == "make_given")


def test_arguments_that_lie_otherwise_or_nowhere_are_told(tmp_path):
    (tmp_path / "divided.py").write_text(IN_A_FILE)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", OTHER_LAYOUTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    other = "the arguments of divided.py:make_replicated take 2.1 MiB on a device, those of the plan's step 544.0 KiB"
    assert other in done.stderr
    assert done.stderr.count("the step lays its results out over 4 devices, and no argument says how it lies") == 1


SMALL = """
import jax
import jax.numpy as jnp
import jaxckpt
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("d")))
params = [{"q": of(64, 64), "k": of(64, 64), "v": of(64, 64), "o": of(64, 64), "up": of(64, 256), "down": of(256, 64)}] * 2


def block(p, x):
    heads = lambda w: (x @ w).reshape(16, 64, 4, 16)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads(p["q"]), heads(p["k"])) / 4, -1)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, heads(p["v"])).reshape(16, 64, 64) @ p["o"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def loss(params, x):
    for p in params:
        x = block(p, x)
    return jnp.mean(x**2)


plan = jaxckpt.plan(loss, params, of(16, 64, 64), budget="75%")
print(plan.report.prediction_error, plan.measured_bytes / plan.budget, plan.overhead)
"""


def test_small_arrays_of_a_divided_step_are_counted_as_the_compiler_divides_them():
    """Queries, keys and values have 65,536 elements here: when they were taken for whole on every device, the plan took
    11 to 12% more time; it takes 2 to 3%.
    """
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SMALL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    error, used, overhead = map(float, done.stdout.split())
    assert abs(error) < 0.1 and used > 0.9 and overhead < 0.05, done.stdout
