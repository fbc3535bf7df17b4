"""The command line, end to end, on a small factory in a file of its own."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxckpt import cli

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
    return loss, jax.tree.map(lambda s: jnp.full(s.shape, 0.1), shapes) if real else shapes

def bare():
    loss, args = model()
    return loss, args

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


def test_chosen_variants_settings_and_time(factory, capsys):
    code, out, _ = run(
        capsys, "compare", f"{factory}:model", "--target", "cpu", "--variants", "none,segments:3", "--set", "layers=6", "--time"
    )  # fmt: skip
    assert code == 0
    assert "segments:3" in out and "dots" not in out
    assert "time" in out


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


@pytest.mark.cuda
def test_measure_on_a_gpu_that_is_not_here(factory, capsys):
    code, out, _ = run(capsys, "measure", f"{factory}:model", "--target", "cuda:h100")
    assert code == 0 and "cuda:h100" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compare", "{}:modell"], "has no function 'modell'. Did you mean 'model'"),
        (["compare", "{}"], "FACTORY must be FILE.py:NAME or package.module:NAME"),
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
    ],
)
def test_errors_are_one_line_and_exit_one(factory, capsys, argv, message):
    code, out, err = run(capsys, *(part.format(factory) for part in argv))
    assert code == 1, err
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("jaxckpt: error:")]
    assert len(lines) == 1 and "Traceback" not in err
    assert message in lines[0]


def test_wrong_usage_exits_two(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["compare"])
    assert caught.value.code == 2


def test_an_error_of_the_factorys_own_is_told_with_its_place(factory, capsys):
    code, _, err = run(capsys, "compare", f"{factory}:failing")
    assert code == 1
    assert "KeyError" in err and "mine" in err


def test_the_console_script_says_nothing_but_the_report(factory):
    """Also without JAX_PLATFORMS, with plugins of accelerators that are not here: standard error has the progress bar and no native noise."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxckpt.cli", "compare", f"{factory}:model", "--variants", "none,dots"],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "dots" in done.stdout
    assert not re.search(r"cuda|absl|TPU|Traceback|WARNING", done.stderr), done.stderr
