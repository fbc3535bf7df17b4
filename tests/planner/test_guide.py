"""The guide's code runs, from top to bottom, as it stands."""

import pathlib
import re

import pytest

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "planner.md"


def test_the_guides_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(block, names)
    shown = capsys.readouterr().out
    assert "Plan on cuda:h100 for" in shown and "80%" in shown
    assert (tmp_path / "plan.json").exists() and len(list((tmp_path / "plans").iterdir())) == 1
    value, _ = names["step"](*names["args"])
    assert float(value) == pytest.approx(float(names["loss"](*names["args"])), rel=1e-5)
