"""`jaxckpt show` and `jaxckpt diff`: plans from their files."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import cli, factories
from jaxckpt.commands import saved

FILE = """
import jax, jax.numpy as jnp

def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

def model(layers=8):
    return loss, ([jax.ShapeDtypeStruct((16, 16), jnp.float32)] * layers, jax.ShapeDtypeStruct((1024, 16), jnp.float32))
"""


def run(capsys, *argv):
    code = cli.main(list(map(str, argv)))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    (folder / "plan_files_model.py").write_text(FILE)
    command = ["plan", f"{folder}/plan_files_model.py:model", "--target", "cpu"]
    assert (
        cli.main([*command, "--budget", "75%", "--output", str(folder / "a.json"), "--plot", str(folder / "a.svg")])
        == 0
    )
    assert cli.main([*command, "--budget", "60%", "--output", str(folder / "b.json")]) == 0
    assert cli.main([*command, "--budget", "75%", "--set", "layers=6", "--output", str(folder / "c.json")]) == 0
    return folder


def test_show_prints_what_plan_printed_and_draws(files, capsys, tmp_path):
    _, planned, _ = run(capsys, "plan", files / "plan_files_model.py:model", "--target", "cpu", "--budget", "60%")
    page, picture = tmp_path / "b.html", tmp_path / "b.png"
    code, out, _ = run(capsys, "show", files / "b.json", "--html", page, "--plot", picture)
    assert code == 0 and out == planned
    assert "keeps" in out and "peak, compiled" in out
    assert "What is kept where" in page.read_text() and picture.read_bytes().startswith(b"\x89PNG")


def test_the_file_has_the_frontier_that_was_made(files, capsys):
    plan, view = saved.read(files / "a.json")
    assert plan == jaxckpt.Plan.load(files / "a.json") and plan.report is not None
    assert view.frontier is not None and len(view.frontier.points) == 8
    assert any(point.flops for point in view.frontier.points)
    assert saved.read(files / "b.json")[1].frontier is None
    assert run(capsys, "show", files / "a.json")[0] == 0


def test_a_plan_that_was_saved_alone_is_shown_with_its_model_or_without(files, capsys, tmp_path):
    path = tmp_path / "alone.json"
    jaxckpt.Plan.load(files / "b.json").save(path)
    code, out, _ = run(capsys, "show", path)
    assert (
        code == 0 and ": keeps " in out and "Give the model too" in out and out.startswith(f"Plan in {path} on cpu\n")
    )
    code, out, _ = run(capsys, "show", path, files / "plan_files_model.py:model")
    assert code == 0 and "In the order in which it runs" in out and "py:model on cpu\n" in out
    code, out, err = run(capsys, "show", path, files / "plan_files_model.py:model", "--set", "layers=6")
    assert (code, out) == (1, "") and "Make a plan for this function" in err


def test_diff_has_figures_and_regions(files, capsys, tmp_path):
    code, out, _ = run(capsys, "diff", files / "a.json", files / "b.json", "--json", tmp_path / "d.json")
    first, second = (jaxckpt.Plan.load(files / name) for name in ("a.json", "b.json"))
    assert code == 0 and "peak, compiled" in out and "FLOPs of the planned step" in out
    assert any(line.startswith("+") for line in out.splitlines())
    found = json.loads((tmp_path / "d.json").read_text())
    assert (found["same"], found["same_program"]) == (False, True)
    assert found["first"]["plan"]["peak_bytes"] == first.measured_bytes
    assert found["second"]["plan"]["peak_bytes"] == second.measured_bytes
    lines = {name: set(saved.regions_of(plan).values()) for name, plan in (("first", first), ("second", second))}
    assert found["only_in_first"] and set(found["only_in_first"]) <= lines["first"]
    assert found["only_in_second"] and set(found["only_in_second"]) <= lines["second"]


def test_diff_of_plans_that_were_saved_alone_names_values_with_the_model(files, capsys, tmp_path):
    for name in ("a.json", "b.json"):
        jaxckpt.Plan.load(files / name).save(tmp_path / name)
    plans = tmp_path / "a.json", tmp_path / "b.json"
    code, out, _ = run(capsys, "diff", *plans)
    assert code == 0 and ": keeps " in out and "Give the model too" in out
    code, out, _ = run(capsys, "diff", *plans, files / "plan_files_model.py:model")
    assert code == 0 and "float32[1024, 16]" in out and "plan_files_model.py:6 (loss)" in out
    assert (
        out.split("--- a.json")[1] == run(capsys, "diff", files / "a.json", files / "b.json")[1].split("--- a.json")[1]
    )
    code, _, err = run(capsys, "diff", *plans, files / "plan_files_model.py:model", "--set", "layers=6")
    assert code == 1 and "Make a plan for this function" in err


def test_diff_of_plans_for_two_targets_names_both_and_subtracts_no_times(files, capsys, tmp_path):
    plan = jaxckpt.Plan.load(files / "b.json")
    replace(plan.report, target="cuda:h100").plan.save(tmp_path / "h100.json")
    out = run(capsys, "diff", files / "a.json", tmp_path / "h100.json")[1]
    assert re.search(r"^ target +cpu +cuda:h100$", out, re.MULTILINE)
    assert re.search(r"^ time .*%$", out, re.MULTILINE) and " points" not in out
    out = run(capsys, "diff", files / "a.json", files / "b.json")[1]
    assert re.search(r"^ target +cpu +cpu +the same$", out, re.MULTILINE) and " points" in out


def test_diff_of_the_same_and_of_other_programs(files, capsys):
    code, out, _ = run(capsys, "diff", files / "a.json", files / "a.json")
    assert code == 0 and "Both plans do the same." in out and "the same" in out
    code, out, _ = run(capsys, "diff", files / "a.json", files / "c.json")
    assert code == 0 and "for different programs" in out


def test_diff_says_whose_model_was_given_whatever_the_plans_are(files, capsys):
    model = files / "plan_files_model.py:model"
    code, out, _ = run(capsys, "diff", files / "a.json", files / "c.json", model, "--set", "layers=6")
    assert code == 0 and "is the program of c.json." in out
    assert run(capsys, "diff", files / "a.json", files / "a.json", model)[0] == 0
    for second in ("a.json", "c.json"):
        code, _, err = run(capsys, "diff", files / "a.json", files / second, model, "--set", "layers=5")
        assert code == 1 and "Make a plan for this function" in err


@pytest.mark.parametrize("command", ["show", "diff"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON", "must be one that Plan.save wrote"),
        ("{cut short", "does not parse"),
        ("{}", "must be one that Plan.save wrote"),
        (b"\xff\xfe", "it is no text"),
        ("older", "is of format 1; this version reads format"),
        ("edited", "its digest says that it was edited"),
        (None, "must be a file that `jaxckpt plan --output` or Plan.save wrote"),
    ],
)
def test_files_that_are_no_plans(files, capsys, tmp_path, command, text, message):
    path = tmp_path / "plan.json"
    raw = json.loads((files / "a.json").read_text())
    if text == "older":
        text = json.dumps({**raw, "format": 1})
    if text == "edited":
        text = json.dumps({**raw, "view": None})
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = run(capsys, command, *([path] if command == "show" else [path, files / "a.json"]))
    assert (code, out) == (1, "") and message in err and len(err.splitlines()) == 1
    assert "plan.json" in err


def test_pages_and_pictures_go_where_they_can_be(files, capsys, tmp_path):
    for option in ("--html", "--plot"):
        code, out, err = run(capsys, "show", files / "a.json", option, "/no/such/folder/x.png")
        assert (code, out) == (1, "") and "folder" in err
    path = tmp_path / "bare.json"
    jaxckpt.Plan((), jaxckpt.trace(lambda x: x, jnp.ones(3)).fingerprint).save(path)
    code, _, err = run(capsys, "show", path, "--plot", tmp_path / "x.png")
    assert code == 1 and "--plot must be for a plan with figures" in err


def test_a_file_with_a_view_is_a_plan_like_any(files):
    loaded = jaxckpt.Plan.load(files / "b.json")
    loss, args = factories.make(factories.load(f"{files}/plan_files_model.py:model"))
    assert "view" in json.loads((files / "b.json").read_text())
    step = jax.value_and_grad(loaded.apply(loss))
    assert jaxckpt.measure(step, *args, target="cpu").peak_bytes == loaded.measured_bytes <= loaded.budget
