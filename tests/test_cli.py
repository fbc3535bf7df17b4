"""The command line, end to end, on a small factory in a file of its own."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import jaxckpt
from jaxckpt import cli, factories
from jaxckpt.factories import load

FACTORY = '''
import jax, jax.numpy as jnp

def model(checkpoint=None, segment_size=1, *, real=False, layers=4, rows=1024):
    """Dense layers."""
    size = max(1, round(layers**0.5)) if segment_size == "sqrt" else segment_size
    def run(x, ws):
        for w in ws:
            x = jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, "mlp_up"))
        return x
    block = run if checkpoint is None else checkpoint(run)
    def loss(ws, x):
        for i in range(0, layers, size):
            x = block(x, ws[i : i + size])
        return jnp.mean(x**2)
    shapes = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * layers, jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    return loss, jax.tree.map(lambda s: jnp.full(s.shape, 0.1, s.dtype), shapes) if real else shapes

def bare():
    loss, args = model()
    return loss, args

def ignoring(checkpoint=None, segment_size=1):
    return model()

def own_default(checkpoint=jax.checkpoint):
    return model(checkpoint)

def lenient(rows: "int | str" = 8, width=8.0):
    return (lambda x: jnp.sum(jnp.sin(x))), (jnp.ones((3 if rows == "few" else rows, int(width))),)

def wrong():
    return 3

def failing():
    raise KeyError("mine")

def nothing():
    return (lambda x: x), (jax.ShapeDtypeStruct((3,), jnp.int32),)

not_a_function = 3
'''


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "model_file.py"
    path.write_text(FACTORY)
    return str(path)


def run(capsys, *argv):
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_compare_prints_every_variant_and_writes_all_files(factory, tmp_path, capsys):
    files = {kind: str(tmp_path / f"out.{kind}") for kind in ("json", "html", "png")}
    code, out, _ = run(
        capsys, "compare", f"{factory}:model", "--target", "cpu", "--policy", "mlp_*=save",
        "--json", files["json"], "--html", files["html"], "--plot", files["png"],
    )  # fmt: skip
    assert code == 0
    for variant in (
        "none",
        "whole",
        "segments:2",
        "segments:sqrt",
        "dots",
        "dots_no_batch",
        "hybrid",
        "everything",
        "mlp_*=save",
    ):
        assert variant in out, variant
    values = json.loads(pathlib.Path(files["json"]).read_text())
    peaks = {row["name"]: row["peak_bytes"] for row in values["variants"]}
    assert peaks["segments:2"] < peaks["none"]
    assert "mlp_*=save" in pathlib.Path(files["html"]).read_text()
    assert pathlib.Path(files["png"]).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {
        "model_file.py",
        "out.html",
        "out.json",
        "out.png",
    }


def test_a_factory_without_checkpoint_gets_none_and_whole(factory, capsys):
    code, out, _ = run(capsys, "compare", f"{factory}:bare", "--target", "cpu")
    assert code == 0
    assert re.findall(r"^\s+(none|whole|dots|segments\S*)", out, re.MULTILINE) == ["none", "whole"]
    assert "bare takes no argument `checkpoint`. A factory with that argument" in " ".join(out.split())
    out = run(capsys, "compare", f"{factory}:bare", "--target", "cpu", "--variants", "none,whole")[1]
    assert "checkpoint`" not in out


@pytest.mark.parametrize("optimizer", [(), ("--optimizer", "sgd")])
def test_a_checkpoint_that_changes_nothing_is_told(factory, capsys, optimizer):
    """Of a factory that takes `checkpoint` and does not call it, under the tables; where it is called, nothing is."""
    told = "ignoring takes `checkpoint`, which changes nothing"
    for command in (
        ("compare", f"{factory}:ignoring", "--variants", "dots"),
        ("compare", f"{factory}:ignoring", "--variants", "none,segments:2,whole"),
        ("measure", f"{factory}:ignoring", "--variant", "segments:2"),
        ("residuals", f"{factory}:ignoring", "--variant", "dots"),
    ):
        code, out, _ = run(capsys, *command, *(("--target", "cpu") if command[0] != "residuals" else ()), *optimizer)
        assert code == 0 and told in " ".join(out.split()), command
    for command in (
        ("compare", f"{factory}:ignoring", "--variants", "none,whole"),
        ("compare", f"{factory}:model", "--variants", "everything"),
        ("compare", f"{factory}:own_default", "--variants", "nothing"),
    ):
        code, out, _ = run(capsys, *command, "--target", "cpu", *optimizer)
        assert code == 0 and "changes nothing" not in out, command


def test_a_frontier_has_no_points_by_hand_of_a_checkpoint_that_changes_nothing(factory, capsys):
    code, out, _ = run(capsys, "plan", f"{factory}:ignoring", "--target", "cpu", "--frontier", "--no-verify")
    assert code == 0 and "which changes nothing" in out and "beside it" not in out


def test_chosen_variants_settings_and_time(factory, capsys):
    code, out, _ = run(
        capsys, "compare", f"{factory}:model", "--target", "cpu", "--variants", "none,segments:3", "--set", "layers=6", "--time"
    )  # fmt: skip
    assert code == 0
    assert "segments:3" in out and "dots" not in out
    assert "time" in out


def test_text_goes_to_a_setting_that_takes_it(factory, capsys):
    code, out, _ = run(capsys, "residuals", f"{factory}:lenient", "--set", "rows=few", "--set", "width=2")
    assert code == 0 and "3, 2]" in out
    assert "in 1 array\n" in out and "1 arrays" not in out


def test_measure_residuals_targets(factory, tmp_path, capsys):
    code, out, _ = run(capsys, "measure", f"{factory}:model", "--target", "cpu", "--variant", "segments:2")
    assert code == 0
    assert "peak" in out and "model_file.py" in out  # the largest buffers have source lines
    plain, kept = (
        run(capsys, "residuals", f"{factory}:model", "--variant", variant, "--json", str(tmp_path / "r.json"))
        and sum(r["bytes"] for r in json.loads((tmp_path / "r.json").read_text()) if not r["argument"])
        for variant in ("none", "segments:2")
    )
    assert kept < plain
    code, out, _ = run(capsys, "targets")
    assert code == 0 and "cuda:h100" in out and "tpu:v5e:2x2" in out


def test_plan_prints_the_plan_and_writes_all_files(factory, tmp_path, capsys):
    files = {kind: str(tmp_path / f"out.{kind}") for kind in ("json", "html", "png")}
    code, out, _ = run(
        capsys, "plan", f"{factory}:model", "--target", "cpu", "--budget", "70%", "--set", "layers=8", "--time", "--output",
        str(tmp_path / "plan.json"), "--json", files["json"], "--html", files["html"], "--plot", files["png"],
    )  # fmt: skip
    assert code == 0
    for words in (
        "peak without a plan",
        "budget",
        "peak, compiled",
        "peak, predicted",
        "recomputation",
        "time of a step",
        "keeps",
    ):
        assert words in out, words
    values = json.loads(pathlib.Path(files["json"]).read_text())
    plan, unplanned = values["plan"], values["unplanned"]
    assert plan["peak_bytes"] <= plan["budget_bytes"] == 7 * unplanned["peak_bytes"] // 10
    assert values["recompute"] == plan["flops"] / unplanned["flops"] - 1 > 0
    assert values["times"]["planned"] > 0 and values["times"]["on"] == "cpu"
    page = pathlib.Path(files["html"]).read_text()
    assert "keeps" in page and "data:image/svg+xml" in page
    assert '"name":"without a plan"' in page and '"name":"planned"' in page  # two timelines
    assert pathlib.Path(files["png"]).read_bytes().startswith(b"\x89PNG")
    # The file is what a training script loads.
    loss, args = load(f"{factory}:model")(layers=8)
    loaded = jaxckpt.Plan.load(tmp_path / "plan.json")
    assert jaxckpt.measure(jax.value_and_grad(loaded.apply(loss)), *args, target="cpu").peak_bytes == plan["peak_bytes"]


def test_plan_frontier_has_plans_and_what_is_placed_by_hand(factory, tmp_path, capsys):
    code, out, _ = run(
        capsys, "plan", f"{factory}:model", "--target", "cpu", "--frontier", "--set", "layers=6", "--json", str(tmp_path / "f.json")
    )  # fmt: skip
    assert code == 0
    found = json.loads((tmp_path / "f.json").read_text())["frontier"]
    assert [point["budget"] for point in found["points"]] == ["25%", "30%", "40%", "50%", "60%", "70%", "80%", "90%"]
    fitting = [point for point in found["points"] if point["fits"]]
    assert fitting and all(point["peak_bytes"] <= point["budget_bytes"] for point in fitting)
    assert all("least budget" in point["why"] for point in found["points"] if not point["fits"])
    names = {way["name"] for way in found["others"]}
    assert {"nothing (segments:1)", "segments:2", "dots"} <= names and "none" not in names
    assert "beside it" in out and "80%" in out


def test_plan_without_compiling_has_a_prediction_alone(factory, tmp_path, capsys, monkeypatch):
    def compiles(*args, **settings):
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr("jaxckpt.planner.measured.measure", compiles)
    monkeypatch.setattr("jaxckpt.planner.measured.measure_traced", compiles)
    code, out, _ = run(
        capsys, "plan", f"{factory}:model", "--target", "cuda:h100", "--budget", "500KiB", "--no-verify", "--set", "layers=8"
    )  # fmt: skip
    assert code == 0
    assert "peak, predicted" in out and "compiled" not in out and "without a plan" not in out


def test_a_step_that_fits_is_left_as_it_is(factory, capsys):
    code, out, _ = run(capsys, "plan", f"{factory}:model", "--target", "cpu", "--budget", "1GiB")
    assert code == 0
    assert "fits as it is" in out and "+0.0% of the step's" in out


@pytest.mark.cuda
def test_measure_on_a_gpu_that_is_not_here(factory, capsys):
    code, out, _ = run(capsys, "measure", f"{factory}:model", "--target", "cuda:h100")
    assert code == 0 and "cuda:h100" in out


@pytest.mark.tpu
def test_measure_without_code_on_a_tpu_that_is_not_here(factory, capsys):
    command = ("measure", f"{factory}:model", "--target", "tpu:v5e:2x2", "--set", "layers=40")
    code, out, _ = run(capsys, *command, "--no-code")
    assert code == 0 and "buffers assigned in" in out and "program" not in out
    peak = next(line for line in out.splitlines() if line.lstrip().startswith("peak"))
    code, out, _ = run(capsys, *command)
    assert code == 0 and "compiled in" in out and "program" in out and peak in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compare", "{}:modell"], "has no function 'modell'. Did you mean 'model'"),
        (["compare", "{}"], "FACTORY must be FILE.py:NAME or package.module:NAME"),
        (["compare", "{}"], "model_file.py:NAME. The file's functions are model, bare, ignoring"),
        (["plan", "{}:", "--budget", "60%"], "model_file.py:NAME. The file's functions are model, bare, ignoring"),
        (["plan", "no_such_file.py", "--budget", "60%"], "There is no file no_such_file.py."),
        (["plan", "models.lstm", "--budget", "60%"], "write models.lstm:NAME"),
        (["plan", "lstmm", "--budget", "60%"], "Did you mean 'lstm'"),
        (["compare", "{}:model", "--step", "{}"], "--step must be FILE.py:NAME or package.module:NAME"),
        (
            ["measure", "{}:bare", "--variant", "dots"],
            "There are 'none', 'whole'. bare takes no argument `checkpoint`.",
        ),
        (["compare", "{}:own_default", "--variants", "segments:3"], "own_default takes no argument `segment_size`."),
        (["compare", "no_such_file.py:model"], "no_such_file.py"),
        (["compare", "no.such.module:model"], "no.such.module"),
        (["compare", "{}:not_a_function"], "not_a_function"),
        (["compare", "{}:wrong"], "(fun, args)"),
        (["compare", "{}:nothing", "--target", "cpu"], "nothing to differentiate"),
        (["compare", "{}:model", "--target", "cuda:h10"], "cuda:h100"),
        (["compare", "{}:model", "--variants", "dot"], "Did you mean 'dots'"),
        (["compare", "{}:model", "--policy", "mlp_*=sove"], "Did you mean 'save'"),
        (["compare", "{}:model", "--target", "cpu", "--policy", "zzz*=save"], "matches no tag"),
        (["compare", "{}:model", "--set", "depth=3"], "depth"),
        (["compare", "{}:model", "--plot", "/no/such/folder/x.png"], "folder"),
        (["measure", "{}:model", "--variant", "segments:0"], "segments:0"),
        (["plan", "{}:model"], "--budget must be given, such as 4GiB or 60%"),
        (["plan", "{}:model", "--budget", "12 GB or so"], "budget must be a number of bytes above 0"),
        (["plan", "{}:model", "--budget", "140%"], "Without a plan it is 100%"),
        (["plan", "{}:model", "--budget", "0"], "Not even the arguments fit that"),
        (["plan", "{}:model", "--budget", "1KiB", "--target", "cpu"], "more than the arguments alone"),
        (["plan", "{}:model", "--budget", "80KiB", "--target", "cpu"], "least budget found to fit is"),
        (
            ["plan", "{}:model", "--budget", "device", "--target", "cpu"],
            "cpu, which does not say how much memory is free",
        ),
        (["plan", "{}:model", "--budget", "60%", "--solver", "chian", "--target", "cpu"], "Did you mean 'chain'"),
        (["plan", "{}:model", "--budget", "60%", "--costs", "guess", "--target", "cpu"], "costs must be"),
        (
            ["plan", "{}:model", "--budget", "60%", "--time", "--target", "cuda:h100"],
            "Only this machine can run the step",
        ),
        (["plan", "{}:nothing", "--budget", "60%", "--target", "cpu"], "nothing to differentiate"),
        (["plan", "{}:model", "--budget", "60%", "--output", "/no/such/folder/plan.json"], "folder"),
        (["plan", "{}:model", "--frontier", "--output", "plan.json"], "--output must be given with --budget"),
        (["plan", "{}:model", "--budget", "-5GiB"], "budget must be a number of bytes above 0"),
        (["plan", "{}:model", "--budget=-5GiB"], "budget must be a number of bytes above 0"),
        (["plan", "{}:model", "--budget", "-5"], "budget must be a number of bytes above 0"),
        (["measure", "{}:model", "--largest", "-3"], "--largest must be 1 or more; got -3."),
        (
            ["compare", "{}:model", "--set", "layers=abc"],
            "--set layers must be a whole number; got 'abc'. model has layers=4",
        ),
        (
            ["plan", "{}:bare", "--budget", "60%", "--set", "depth=3"],
            "bare takes no argument 'depth'. It has no arguments",
        ),
        (["plan", "{}:model", "--budget", "60%", "--set", "layer=3"], "Did you mean 'layers'?"),
    ],
)
def test_errors_are_one_line_and_exit_one(factory, capsys, argv, message):
    code, out, err = run(capsys, *(part.format(factory) for part in argv))
    assert code == 1, err
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("jaxckpt: error:")]
    assert len(lines) == 1 and "Traceback" not in err
    assert message in lines[0]


@pytest.mark.parametrize(
    "argv", [["init", "torch"], ["plan", "{}:model", "--budget", "60%", "--actions", "zip"],
             ["compare", "{}:model", "--optimizer", "zzz"]]
)  # fmt: skip
def test_errors_list_what_there_is_once(factory, capsys, argv):
    _, _, err = run(capsys, *(part.format(factory) for part in argv))
    listed = re.search(r"one of (\w+)", err)[1]
    assert len(re.findall(rf"\b{listed}\b", err)) == 1, err


@pytest.mark.parametrize("option", ["--output", "--json", "--html", "--plot"])
def test_a_file_that_cannot_be_written_is_told_before_any_work(factory, tmp_path, capsys, monkeypatch, option):
    monkeypatch.setattr(factories, "load", lambda *_: pytest.fail("the model is loaded"))
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for path in ("/proc/x.png", "/dev/null", tmp_path / "pipe.png", tmp_path / "folder.png", tmp_path / "no" / "x.png"):
        code, out, err = run(capsys, "plan", f"{factory}:model", "--budget", "60%", option, str(path))
        assert (code, out) == (1, "") and err.startswith(f"jaxckpt: error: {option} must be a")
        assert str(path) in err and ".jaxckpt" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.png", "model_file.py", "pipe.png"]


@pytest.mark.parametrize(
    ("command", "option"),
    [("plan", "--html"), ("plan", "--plot"), ("compare", "--html"), ("compare", "--plot"), ("measure", "--plot")],
)
def test_pictures_without_matplotlib_are_told_before_any_work(factory, capsys, monkeypatch, tmp_path, command, option):
    monkeypatch.setattr(factories, "load", lambda *_: pytest.fail("the model is loaded"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capsys, command, f"{factory}:model", option, str(tmp_path / "out.png"))
    assert (code, out) == (1, "") and "pip install 'jaxckpt[plot]'" in err


def test_the_page_of_measure_needs_no_matplotlib(factory, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "measure", f"{factory}:model", "--target", "cpu", "--html", str(tmp_path / "out.html"))
    assert code == 0, err
    assert '"name":"this program"' in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_every_help_fits_into_eighty_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main([*([] if command is None else [command]), "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("usage: jaxckpt") and "%%" not in text and "None" not in text
    wanted = {
        "plan": "25%, 30%",
        None: "residuals",
        "measure": "--no-code",
        "compare": "--variants",
        "residuals": "--all",
        "init": "haiku",
        "show": "PLAN.json",
        "diff": "B.json",
    }
    assert wanted.get(command, "can be compiled for") in text


DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 4)  # an error, once a backend has started

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def model():
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("devices"))
    x = jax.ShapeDtypeStruct((1024, 16), jnp.float32, sharding=rows)
    return (lambda w, x: jnp.mean(jnp.tanh(x @ w))), (jax.ShapeDtypeStruct((16, 16), jnp.float32), x)
"""
ALL_COMMANDS = """
import sys
from jaxckpt import cli
file = sys.argv[1]
for command in (["plan", "--budget", "device"], ["compare"], ["measure"], ["residuals"]):
    assert cli.main([*command, file + ":no_such_function"]) == 1  # the file is imported, and the command ends
    del sys.modules["sharded_file"]
sys.exit(cli.main(["measure", file + ":model"]))
"""


def test_a_file_makes_its_devices_before_a_command_uses_jax(tmp_path):
    file = tmp_path / "sharded_file.py"
    file.write_text(DEVICES)
    done = subprocess.run([sys.executable, "-c", ALL_COMMANDS, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no function 'no_such_function'") == 4, done.stderr
    assert re.search(r"arguments\s+17\.0 KiB", done.stdout), done.stdout  # of one device: 16 KiB of the rows, and w


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_error_and_files_are_written(factory, tmp_path, unbuffered):
    file = tmp_path / "residuals.json"
    command = [sys.executable, "-m", "jaxckpt.cli", "residuals", f"{factory}:model", "--json", str(file)]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, f"wrote {file}\n") and json.loads(file.read_text())


def test_wrong_usage_exits_two(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["compare"])
    assert caught.value.code == 2


def test_an_error_of_the_factorys_own_is_told_with_its_place(factory, capsys):
    code, _, err = run(capsys, "compare", f"{factory}:failing")
    assert code == 1
    assert "KeyError" in err and "mine" in err


def test_the_console_script_says_nothing_but_the_report(factory):
    """Also without JAX_PLATFORMS, with plugins of accelerators that are not here: standard error has the progress bar
    and no native noise.
    """
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxckpt.cli", "compare", f"{factory}:model", "--variants", "none,dots"],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "dots" in done.stdout
    assert not re.search(r"cuda|absl|TPU|Traceback|WARNING", done.stderr), done.stderr


def test_errors_of_a_strict_policy_advise_nothing_that_the_command_line_has_not(factory, capsys):
    for rule, hint in (("zzz*=save", "zzz"), ("op(dot_genral)=save", "Did you mean 'dot_general'")):
        assert cli.main(["compare", f"{factory}:model", "--target", "cpu", "--policy", rule]) == 1
        said = capsys.readouterr().err
        assert hint in said and "strict" not in said


LINEN = """
import flax.linen as nn, jax, jax.numpy as jnp

class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(16)(jnp.tanh(nn.Dense(64)(x)))

def by_hand(checkpoint=None):
    block = Block if checkpoint is None else checkpoint(Block)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(6):
                x = block()(x)
            return x

    x = jnp.ones((2048, 16))
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    return lambda params, x: jnp.mean(Net().apply(params, x) ** 2), (params, x)
"""


def test_variants_of_a_linen_class_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blocks.py").write_text(LINEN)
    rows_of = "none", "nothing", "dots"
    argv = ["compare", "blocks.py:by_hand", "--variants", ",".join(rows_of), "--target", "cpu", "--json", "out.json"]
    assert cli.main(argv) == 0, capsys.readouterr().err
    rows = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["variants"]}
    none, nothing, dots = (next(row for name, row in rows.items() if name.startswith(n)) for n in rows_of)
    assert nothing["peak_bytes"] < 0.6 * none["peak_bytes"]
    assert nothing["recompute_flops"] > dots["recompute_flops"] > 0 == none["recompute_flops"]


@pytest.mark.parametrize(
    ("argv", "hint"),
    [(["pln", "gpt2"], "Did you mean 'plan'?"), (["plan", "gpt2", "--budget", "1GiB", "--tagret=cpu"], "'--target'")],
)
def test_wrong_commands_and_options_name_the_nearest(argv, hint, capsys):
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert hint in capsys.readouterr().err
