"""The scripts that answer questions: their tables have what was compiled, on models small enough for a test."""

import functools
import json

import pytest

import jaxckpt
from benchmarks import estimates, reporting, segments
from jaxckpt.models import chain

SMALL = functools.partial(chain.chain, layers=12, width=64, batch=8192)


def test_segments_are_told_with_peak_estimate_closed_form_and_time(monkeypatch):
    monkeypatch.setattr(segments, "TARGET", "cpu")
    monkeypatch.setitem(segments.SMALL, "chain", functools.partial(chain.chain, layers=12, width=16, batch=64))
    memory, timed = segments.run("chain", SMALL, (0, 3, "sqrt"), time=True)
    closed_form = segments.chain_peak(12, 4 * 64 * 8192, memory)
    for row in memory:
        segment = row.name if row.name == "sqrt" else int(row.name)
        assert closed_form(segment) == pytest.approx(row.peak_bytes, rel=0.02)
    assert memory["3"].peak_bytes < 0.7 * memory["0"].peak_bytes
    lines = segments.table(memory, timed, closed_form).splitlines()
    assert lines[0].count("|") == lines[2].count("|") == 10
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["0", "3", "sqrt"]
    assert lines[2].endswith("| 1.00 |")


def test_a_wide_model_says_why_its_memory_does_not_fall(monkeypatch):
    monkeypatch.setattr(segments, "TARGET", "cpu")
    memory, timed = segments.run(
        "wide", functools.partial(chain.wide, layers=3, width=512, batch=8), (0, 1), time=False
    )
    assert timed is None
    assert memory["1"].peak_bytes > 0.95 * memory["0"].peak_bytes
    assert memory.advice().startswith("Activations are ") and "checkpointing can save at most" in memory.advice()


def test_the_error_of_an_estimate_is_the_worse_one_and_the_table_says_the_worst():
    cases = [
        estimates.Case("cpu", 8, 2, 900, 600, (900, 901), (600, 606)),
        estimates.Case("cpu", 8, 4, 900, 600, (900, 900), (480, 500)),
    ]
    assert cases[0].error == pytest.approx(600 / 606 - 1)
    assert cases[1].error == pytest.approx(0.25)
    assert cases[1].saved == pytest.approx(4 / 9)
    text = estimates.report(cases)
    assert "Worst error: +25.0% (cpu, 8 layers, segments of 4)." in text
    assert "segments of 4 save 44.4% of activation memory" in text


def test_results_say_where_they_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    reporting.save("answer", "| a |\n", {"a": 1})
    saved = json.loads((tmp_path / "answer.json").read_text())
    assert saved["results"] == {"a": 1}
    assert saved["environment"]["jaxckpt"] == jaxckpt.__version__
    text = (tmp_path / "answer.md").read_text()
    assert text.startswith("| a |") and f"{saved['environment']['cores']} cores" in text and "jax " in text
