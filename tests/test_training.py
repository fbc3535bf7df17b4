"""Training steps of one's own in the command line: a factory with a step, `--step`, `--optimizer`, models by name."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxckpt
from jaxckpt import ArgumentError, MissingPackageError, cli, factories, models, training, variants

FILE = """
import jax, jax.numpy as jnp, optax
print("a file of the user's prints")

def loss(ws, x):
    print("a loss prints")
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

def model(layers=12, rows=1024):
    return loss, ([jax.ShapeDtypeStruct((16, 16), jnp.float32)] * layers, jax.ShapeDtypeStruct((rows, 16), jnp.float32))

optimizer = optax.adamw(1e-3)

def step_of(loss, donate=(0, 1)):
    def step(ws, state, x):
        value, grads = jax.value_and_grad(loss)(ws, x)
        updates, state = optimizer.update(grads, state, ws)
        return optax.apply_updates(ws, updates), state, value
    return jax.jit(step, donate_argnums=donate)

def make_step():
    loss, (ws, x) = model()
    return loss, (ws, jax.eval_shape(optimizer.init, ws), x), step_of

def keeps_arguments():
    loss, args, _ = make_step()
    return loss, args, lambda loss: step_of(loss, ())

def args_of_the_step():
    loss, args, _ = make_step()
    return loss, args

def stateless():
    loss, args, _ = make_step()
    return loss, args, lambda loss: lambda ws, state, x: step_of(loss)(ws, state, x)[2]

def no_step():
    loss, args, _ = make_step()
    return loss, args, lambda loss: 3

def a_step_alone():
    loss, args, _ = make_step()
    return step_of(loss), args

def no_arguments():
    return loss, ()

def leaves():
    raise SystemExit(3)

number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_train.py"
    path.write_text(FILE)
    before = list(sys.path), set(sys.modules)
    yield str(path)
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        if name.endswith("my_train"):
            del sys.modules[name]


def run(capsys, *argv):
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def planned(capsys, tmp_path, *argv):
    """Returns the figures of `jaxckpt plan` for the CPU, and what it printed."""
    output = str(tmp_path / "figures.json")
    code, out, err = run(capsys, "plan", *argv, "--target", "cpu", "--json", output)
    assert code == 0, err
    return json.loads((tmp_path / "figures.json").read_text()), out, err


def test_a_training_step_is_planned_whole_with_its_state_and_donation(file, tmp_path, capsys):
    saved = str(tmp_path / "plan.json")
    figures, out, _ = planned(capsys, tmp_path, f"{file}:make_step", "--budget", "70%", "--output", saved)
    made = factories.call(factories.load(f"{file}:make_step"))
    plan = jaxckpt.Plan.load(saved)
    step = made.step(plan.apply(made.fun))
    report = jaxckpt.measure(step, *made.args, target="cpu")
    assert report.peak_bytes == figures["plan"]["peak_bytes"] <= figures["plan"]["budget_bytes"]
    # Parameters and both moments are written in place, and so is the count.
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made.args[:2]))
    assert figures["plan"]["donated_bytes"] == report.alias_bytes == plan.report.donated_bytes == state
    assert "donated" in out and "of arguments, which results are written to" in out
    unplanned = jaxckpt.measure(made.step(made.fun), *made.args, target="cpu")
    assert figures["unplanned"]["peak_bytes"] == unplanned.peak_bytes > report.peak_bytes


def test_a_step_that_donates_nothing_needs_more_and_is_told(file, tmp_path, capsys):
    donated, given, _ = planned(capsys, tmp_path, f"{file}:make_step", "--budget", "1GiB")
    plain, out, _ = planned(capsys, tmp_path, f"{file}:keeps_arguments", "--budget", "1GiB")
    assert plain["plan"]["donated_bytes"] == 0 and "which results are written to" not in out
    assert plain["plan"]["donatable_bytes"] == donated["plan"]["donated_bytes"]
    assert "not donated" in out and "of arguments that the step replaces: jax.jit(step, donate_argnums=...)" in out
    assert donated["plan"]["donatable_bytes"] == 0 and "not donated" not in given
    assert plain["plan"]["peak_bytes"] >= donated["plan"]["peak_bytes"] + donated["plan"]["donated_bytes"] // 2


def test_a_step_may_be_named_apart_from_the_factory(file, tmp_path, capsys):
    whole, *_ = planned(capsys, tmp_path, f"{file}:make_step", "--budget", "80%")
    apart, *_ = planned(capsys, tmp_path, f"{file}:args_of_the_step", "--step", f"{file}:step_of", "--budget", "80%")
    assert apart["plan"] == whole["plan"]


def test_an_optimizer_by_name_counts_what_the_hand_written_step_counts(file, tmp_path, capsys):
    whole, *_ = planned(capsys, tmp_path, f"{file}:make_step", "--budget", "80%")
    named, *_ = planned(capsys, tmp_path, f"{file}:model", "--optimizer", "adamw", "--budget", "80%")
    assert named["plan"]["donated_bytes"] == whole["plan"]["donated_bytes"]
    assert named["plan"]["peak_bytes"] == pytest.approx(whole["plan"]["peak_bytes"], rel=0.02)


def test_what_a_file_prints_is_not_in_the_report(file, tmp_path, capsys):
    for command in (
        ["plan", f"{file}:model", "--budget", "80%"],
        ["compare", f"{file}:model"],
        ["measure", f"{file}:model"],
    ):
        code, out, err = run(capsys, *command, "--target", "cpu")
        assert code == 0
        assert "a loss prints" not in out and "user's prints" not in out and "a loss prints" in err


def test_all_commands_take_a_training_step(file, capsys):
    code, out, _ = run(capsys, "compare", f"{file}:make_step", "--target", "cpu", "--variants", "none,whole")
    assert code == 0 and "whole" in out
    code, out, _ = run(capsys, "measure", f"{file}:make_step", "--target", "cpu")
    assert code == 0 and "arguments reused for outputs" in out
    code, kept, _ = run(capsys, "residuals", f"{file}:make_step")
    code, plain, _ = run(capsys, "residuals", f"{file}:model")
    arrays = lambda text: [line.split("(")[0].split() for line in text.splitlines() if "float32[1024, 16]" in line]
    assert code == 0 and arrays(kept) and len(arrays(kept)) == len(arrays(plain))


def test_a_step_that_donates_can_be_timed(file, tmp_path, capsys):
    figures, out, _ = planned(capsys, tmp_path, f"{file}:make_step", "--budget", "80%", "--time")
    assert figures["times"]["planned"] > 0 and "time of a step" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{}:stateless"], "the training step must return its new state"),
        (["{}:no_step"], "It returned no function but int: 3"),
        (["{}:a_step_alone"], "return (fun, args, step)"),
        (["{}:no_arguments"], "must return arguments, with the parameters in the first"),
        (["{}:leaves"], "it ended the program (sys.exit)"),
        (["{}:model", "--step", "{}:number"], "must be a function that takes the loss and returns the training step"),
        (["{}:model", "--step", "{}"], "--step must be FILE.py:NAME"),
        (["{}:model", "--optimizer", "adamW"], "or 'adamw'"),
        (["{}:make_step", "--optimizer", "adamw"], "--optimizer must be for a factory without a training step"),
        (["gpt3"], "Did you mean 'gpt2'"),
    ],
)
def test_errors_of_steps_are_one_line(file, capsys, argv, message):
    code, out, err = run(capsys, "plan", *(part.format(file) for part in argv), "--budget", "80%", "--target", "cpu")
    lines = [line for line in err.splitlines() if line.startswith("jaxckpt: error:")]
    assert (code, out, len(lines)) == (1, "", 1), err
    assert message in lines[0]


def test_a_file_that_ends_the_program_is_told(tmp_path, capsys):
    path = tmp_path / "script_of_mine.py"
    path.write_text("import sys\nsys.exit(0)\n")
    code, _, err = run(capsys, "plan", f"{path}:model", "--budget", "80%")
    assert code == 1 and "if __name__ == '__main__'" in err


# ------------------------------------------------------------------------------------------------- optimizers by name


@pytest.mark.parametrize("name", training.OPTIMIZERS)
def test_each_optimizer_makes_the_update_of_optax(name):
    loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["w"]) ** 2) * params["times"]
    params, x = {"w": jnp.ones((4, 4)) / 3, "times": 2}, jnp.ones((2, 4))
    maker, args = training.optimised(name, (params, x))
    new, state, value = maker(loss)(*jax.tree.map(jnp.copy, args))
    expected = getattr(optax, name)(training.LEARNING_RATE)
    grads = jax.grad(lambda w: loss({"w": w, "times": 2}, x))(params["w"])
    updates, _ = expected.update([grads], expected.init([params["w"]]), [params["w"]])
    assert jnp.allclose(new["w"], params["w"] + updates[0]) and new["times"] == 2
    assert jnp.allclose(value, loss(params, x)) and jax.tree.structure(state) == jax.tree.structure(args[1])


def test_the_state_of_sharded_shapes_is_sharded_as_they_are():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=sharding)}
    _, args = training.optimised("adamw", (params, jax.ShapeDtypeStruct((2, 4), jnp.float32)))
    moments = [leaf for leaf in jax.tree.leaves(args[1]) if leaf.shape == (4, 4)]
    assert len(moments) == 2 and all(leaf.sharding == sharding for leaf in moments)


def test_a_module_of_nnx_needs_a_step_of_its_own():
    from flax import nnx

    with pytest.raises(ArgumentError, match="jaxckpt init nnx"):
        training.optimised("adamw", (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((2, 2))))


def test_variants_of_a_step_are_measured_as_steps(file):
    factory = factories.load(f"{file}:make_step")
    built = variants.build(factory, variants.variants_for(factory))
    assert list(built.functions) == ["none", "whole"] and len(built.args) == 3
    assert jaxckpt.measure(built.made_step("none"), *built.args, target="cpu").alias_bytes > 0


# ----------------------------------------------------------------------------------------------------- models by name


@pytest.mark.parametrize("name", [name for name in models.NAMES if "671" not in name])
def test_each_name_is_a_factory(name):
    factory = models.factory(name)
    assert {"checkpoint", "real"} <= set(factories.parameters(factory))


def test_a_name_works_from_any_folder_and_needs_flax(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert factories.load("gpt_small") is models.factory("gpt_small")
    monkeypatch.delitem(sys.modules, "jaxckpt.models.gpt")
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.setitem(sys.modules, "flax.linen", None)
    with pytest.raises(MissingPackageError, match=r"gpt_small needs flax.*pip install 'jaxckpt\[flax\]'.*clone"):
        factories.load("gpt_small")
