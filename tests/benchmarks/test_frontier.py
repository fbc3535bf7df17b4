"""The planner's benchmarks: what is placed by hand is what one would place, rows resume, and verdicts count against the
planner too.
"""

from __future__ import annotations

import functools
import json

import jax
import pytest

from benchmarks import frontier, gpu, reporting
from jaxckpt.core.plan import MemoryEstimate, Plan, PlanReport
from jaxckpt.models import chain, gpt, lstm
from jaxckpt.planner.frontier import Frontier, Point, Way
from tests.helpers import gradient_executions, kept_bytes

SMALL = functools.partial(gpt.small, layers=4, width=32, heads=2, batch=2, tokens=32, vocabulary=64)
DENSE = functools.partial(chain.chain, layers=6, width=16, batch=4096)


def test_the_hand_made_ways_are_those_asked_for():
    names = [how.name for how in frontier.by_hand(functools.partial(gpt.small, layers=12))]
    assert len([name for name in names if name.startswith("each block, preset")]) == 3
    assert len([name for name in names if name.startswith("each block")]) == 4 + 3
    assert [name for name in names if name.startswith("every")] == [f"every {n} blocks" for n in (2, 3, 4, 6, "sqrt")]
    assert [name for name in names if name.startswith("first")] == [f"first {n} of 12 blocks" for n in (3, 6, 9, 11)]
    assert not [how for how in frontier.by_hand(lstm.small) if how.first is not None]  # a scan's body is there once


def test_the_first_blocks_alone_are_checkpointed():
    kept = {n: kept_bytes(*_flat(frontier.build(SMALL, frontier.ByHand("", first=n)))) for n in (1, 2, 3)}
    loss, args = SMALL()
    kept[0] = kept_bytes(loss, *args)
    kept[4] = kept_bytes(*_flat(SMALL(jax.checkpoint)))
    each = kept[0] - kept[1]
    assert each > 0
    for n in range(4):
        assert kept[n] - kept[n + 1] == pytest.approx(each, rel=0.05)
    matmuls = [
        gradient_executions(*_flat(frontier.build(SMALL, frontier.ByHand("", first=n))))["dot_general"] for n in (1, 2)
    ]
    assert matmuls[0] < matmuls[1]


def _flat(pair):
    return pair[0], *pair[1]


def test_rows_come_one_by_one_and_are_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    said: list[str] = []
    save = functools.partial(frontier.write, "small", "cpu")
    monkeypatch.setattr(frontier, "SEGMENTS", (2,))
    monkeypatch.setattr(frontier, "POLICIES", ("nothing_saveable", "dots_saveable"))
    monkeypatch.setattr(frontier, "BLOCK_PRESETS", ("hybrid",))
    frontier.run("small", DENSE, "cpu", ["70%", "1%"], {}, plan=False, save=save, say=said.append)
    by_hand = len(said)
    assert by_hand == 1 + 2 + 1 + 1 + 4
    rows = frontier.read("small", "cpu")
    frontier.run("small", DENSE, "cpu", ["70%", "1%"], rows, save=save, say=said.append)
    assert len(said) == by_hand + 2
    rows = frontier.read("small", "cpu")
    frontier.run("small", DENSE, "cpu", ["70%", "1%"], rows, save=save, say=said.append)
    assert len(said) == by_hand + 2

    planned = rows["planned"]["70%"]
    assert planned["peak_bytes"] <= planned["budget_bytes"] and planned["flops"] > rows["unplanned"]["flops"]
    assert not rows["planned"]["1%"]["fits"] and "arguments alone" in rows["planned"]["1%"]["why"]
    text = (tmp_path / "frontier-small-cpu.md").read_text()
    assert "| 70% |" in text and "no plan fits" in text and "first 3 of 6 blocks" in text
    assert (tmp_path / "frontier-small-cpu.svg").read_text().startswith("<?xml")
    assert json.loads((tmp_path / "frontier-small-cpu.json").read_text())["results"] == rows


def some(points, others):
    return Frontier("cpu", Way("as it is", 100, 1000, 10.0), tuple(points), tuple(others))


def planned(budget, peak, flops, seconds, predicted=None):
    estimate = MemoryEstimate(predicted or peak, 0, 0, 0)
    report = PlanReport(Plan((), ""), predicted=estimate, measured_bytes=peak, flops=flops, seconds=seconds)
    return Point(budget, budget, report)


def test_a_verdict_is_against_the_best_that_is_no_larger():
    others = [Way("small", 40, 1200, 12.0), Way("larger", 48, 1100, 11.5), Way("odd", 40, 1300, 11.0)]
    found = some([planned(50, 45, 1150, 11.2, predicted=54)], others)
    verdict = frontier.verdict(found, found.points[0])
    assert verdict.within and verdict.error == pytest.approx(0.2)
    assert verdict.best.name == "small"
    assert verdict.gains["flops"] == pytest.approx(0.25)  # 150 instead of 200
    assert verdict.gains["seconds"] == pytest.approx(-0.2)  # 1.2 instead of odd's 1.0
    assert verdict.gains_in_budget["flops"] == pytest.approx(-0.5)  # larger is within the budget


def test_the_summary_counts_what_falls_short():
    others = [Way("small", 40, 1200, 12.0)]
    points = [
        planned(50, 45, 1150, 11.0),
        planned(45, 46, 1300, 11.0),  # over its budget, and dearer
        planned(30, 29, 1500, 15.0),  # nothing by hand is so small
        Point(20, 20, None, "no plan"),
    ]
    lines = frontier.summary({("gpt", "cpu"): some(points, others)}).splitlines()
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[:4] == ["gpt", "cpu", "3 of 4", "2 of 3"]
    assert cells[6:] == ["2 of 3", "2 of 3", "3 of 3", "3 of 3", "2 of 3", "3 of 3", "2 of 2", "2 of 2"]


def test_the_summary_counts_budgets_beyond_another_whose_plan_costs_more():
    points = [planned(90, 90, 1100, 11.0), planned(50, 45, 1150, 10.0), planned(30, 29, 1100, 10.005)]
    lines = frontier.summary({("gpt", "cpu"): some(points, [])}).splitlines()
    for line in lines[2:]:
        assert [cell.strip() for cell in line.split("|")[1:-1]][-2:] == ["1 of 2", "1 of 2"]


def test_what_the_step_takes_by_itself_is_no_gain():
    found = some([planned(100, 100, 1000, 10.0)], [])
    assert frontier.verdict(found, found.points[0]).gains == {"flops": 0.0, "seconds": 0.0}


@pytest.mark.once
@pytest.mark.usefixtures("optimised")
def test_a_plan_runs_in_a_process_of_its_own_and_takes_what_it_was_compiled_to_take(tmp_path):
    wanted = [gpu.Case("gpt2"), gpu.Case("gpt2", "50%")]
    kept = []
    rows = gpu.prepare(wanted, gpu.chip(), str(tmp_path), lambda line: None)
    rows = gpu.run(rows, str(tmp_path), 1, 1, lambda line: None, lambda rows: kept.append(len(rows)))
    assert [row["case"]["budget"] for row in rows] == ["as it is", "50%"] and kept == [1, 2]
    assert rows[0]["ratio"] is None and 0 < rows[1]["ratio"] < 4
    for row in rows:
        assert row["peak_bytes"] == pytest.approx(row["compiled_bytes"], rel=0.25)
    assert rows[1]["peak_bytes"] < 0.75 * rows[0]["peak_bytes"]
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)
    assert "gpt2 as it is" in gpu.report(rows, 1)
