"""`jaxckpt init`: the files that it writes train within the budget, with the losses of the step without a plan."""

import importlib.util
import os
import re
import sys

import pytest

from jaxckpt import cli, factories
from jaxckpt.commands.init import FRAMEWORKS, template

PACKAGES = {"linen": "flax", "nnx": "flax", "equinox": "equinox", "haiku": "haiku", "keras": "keras"}


@pytest.fixture
def clean_imports():
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("train_"):
            del sys.modules[name]


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_template_trains_within_its_budget_with_the_same_losses(
    framework, tmp_path, capsys, monkeypatch, clean_imports
):
    if importlib.util.find_spec(PACKAGES[framework]) is None:
        pytest.skip(f"{framework} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", framework]) == 0
    assert f"jaxckpt plan train_{framework}.py:make_step" in capsys.readouterr().out
    factories.load(f"train_{framework}.py:main")()
    rows = re.findall(r"(as it is|planned) +step +(\d+) +loss (\S+) +peak (\S+) MiB", capsys.readouterr().out)
    assert [int(row[1]) for row in rows] == [5, 10, 15, 20] * 2
    losses = [float(row[2]) for row in rows]
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-4) and losses[3] < losses[0]
    before, planned = float(rows[0][3]), float(rows[-1][3])
    assert planned <= 0.6 * before + 0.05


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_template_is_short_and_names_its_file(framework, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", framework, "mine.py"]) == 0
    text = (tmp_path / "mine.py").read_text()
    assert "jaxckpt plan mine.py:make_step" in text and "FILE.py" not in text
    training = text[text.index("\nimport jaxckpt\n") + 16 : text.index("def main")].splitlines()
    assert len([line for line in training if line.strip() and not line.strip().startswith("#")]) <= 20
    compile(text, "mine.py", "exec")


def test_nothing_is_overwritten(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("mine")
    assert cli.main(["init", "nnx", str(path)]) == 1
    assert "a file that does not exist yet" in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["flex"], "FRAMEWORK must be one of linen, nnx, equinox, haiku, keras; got 'flex'"),
        (["linen", "train.txt"], "must be a Python file"),
        (["linen", "no_such_folder/train.py"], "folder"),
    ],
)
def test_errors(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", *argv]) == 1
    assert message in capsys.readouterr().err and not os.listdir(tmp_path)


def test_a_file_alone_is_of_linen(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "mine.py"]) == 0
    assert (tmp_path / "mine.py").read_text() == template("linen").replace("FILE.py", "mine.py")
