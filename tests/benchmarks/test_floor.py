"""The floor's benchmark: its models are what they are called, what is done by hand keeps less, and a plan that does not
match it is found.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import jax
import pytest

import jaxckpt
from benchmarks import floor, reporting
from benchmarks.models import forms, mixed
from jaxckpt.core.graph import trace
from jaxckpt.factories import make
from jaxckpt.memory.residuals import residuals
from tests.helpers import gradient_executions

SMALL = mixed.Size(
    blocks=4,
    width=16,
    batch=4,
    tokens=16,
    inner=2,
    heads=2,
    gated=True,
    activation="silu",
    mean=False,
    vocabulary=64,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Models of the same build, in sizes that run at once."""
    drawn = mixed.drawn
    sizes = [replace(SMALL, blocks=4 + seed, heads=2 * (seed % 2)) for seed in range(floor.SEEDS)]
    monkeypatch.setattr(mixed, "drawn", lambda seed: sizes[seed])
    return drawn


def _called(kind, args):
    """The arguments of a kind's loss; its step takes the optimizer's state too."""
    return (args[0], args[-1]) if kind in mixed.STEPS else args


@pytest.mark.parametrize("kind", mixed.KINDS)
def test_what_is_done_by_hand_keeps_less(kind):
    kept = {}
    for name, how in [("", {}), *floor.ways()]:
        loss, args = make(mixed.KINDS[kind], **how)
        kept[name] = residuals(loss, *_called(kind, args)).total_bytes
    assert kept["each block"] < 0.8 * kept[""]
    assert kept["nothing on each"] == kept["each block"]
    assert kept["nothing on each"] < kept["everything on each"]
    if kind != "second":  # there the inner gradient's backward pass decides what is kept
        assert kept["nothing on each"] < kept["dots_no_batch on each"] < kept["everything on each"]


@pytest.mark.parametrize("kind", mixed.KINDS)
def test_a_step_of_each_kind_can_be_differentiated_and_seeds_differ(kind):
    step = mixed.STEPS.get(kind, jax.value_and_grad)
    seen = set()
    for seed in range(floor.SEEDS):
        loss, args = make(floor.model(f"{kind}:{seed}")[0])
        jax.eval_shape(step(loss), *args)
        seen.add(trace(loss, *_called(kind, args)).fingerprint)
    assert len(seen) == floor.SEEDS


def test_sizes_are_the_same_for_the_same_seed(small):
    assert small(0) == small(0)
    assert len({str(small(seed)) for seed in range(floor.SEEDS)}) == floor.SEEDS


def test_a_row_is_filled_in_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    monkeypatch.setattr(floor, "PRESETS", ("nothing",))
    assert floor.main(["--models", "residual:0", "--target", "cpu"]) == 0
    first = json.loads((tmp_path / "floor-cpu.json").read_text())["results"]
    row = first["residual:0"]
    assert set(row["planned"]) == {"each block", "every two", "nothing on each"}
    for way, made in row["planned"].items():
        assert made["peak_bytes"] <= row["by hand"][way]["peak_bytes"] <= row["plain"]["peak_bytes"]
    assert row["least"]["fits"] and row["least"]["said"] <= min(each["peak_bytes"] for each in row["planned"].values())
    assert "Every plan fits" in (tmp_path / "floor-cpu.md").read_text()
    monkeypatch.setattr(floor, "measure", None)  # a row that is there is not made again
    monkeypatch.setattr(floor, "problem_of", None)
    assert floor.main(["--models", "residual:0", "--target", "cpu"]) == 0
    assert json.loads((tmp_path / "floor-cpu.json").read_text())["results"] == first
    capsys.readouterr()


ROW = {
    "plain": {"peak_bytes": 1000, "flops": 100_000, "seconds": 1.0},
    "by hand": {"each block": {"peak_bytes": 500, "flops": 130_000, "seconds": 1.3}},
    "planned": {"each block": {"peak_bytes": 500, "flops": 130_000, "seconds": 1.3}},
    "least": {"said": 400, "fits": True, "least_compiled": 400},
}
WRONG = {
    "more FLOPs": (("planned", "each block", "flops"), 130_200, "+0.20% flops"),
    "more seconds": (("planned", "each block", "seconds"), 1.302, "+0.20% seconds"),
    "a higher peak": (("planned", "each block", "peak_bytes"), 501, "peaks at 501 B"),
    "no plan": (("planned", "each block", "why"), "too little", "no plan fits 500 B: too little"),
    "the least has none": (("least", "fits"), False, "400 B, has no plan"),
    "below the least": (("least", "least_compiled"), 399, "needs 399 B, below the least"),
}


def test_a_plan_that_matches_is_no_finding():
    assert floor.failures("m", ROW) == []


@pytest.mark.parametrize("what", WRONG)
def test_a_plan_that_does_not_match_is_found(what):
    path, value, said = WRONG[what]
    row = copy.deepcopy(ROW)
    place = row
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (found,) = floor.failures("m", row)
    assert said in found and said in floor.report("cpu", {"m": row})


def test_all_forms_of_the_model_do_the_same_work():
    matmuls = {}
    for name, form in forms.FORMS.items():
        loss, args = form()
        if "shard_map" not in name:  # of that each device does a part
            matmuls[name] = gradient_executions(loss, *args)["dot_general"]
            assert jaxckpt.count_flops(loss, *args) > 0
    unrolled = matmuls.pop("unrolled")
    assert matmuls and set(matmuls.values()) == {unrolled}
