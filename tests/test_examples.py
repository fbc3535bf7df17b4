"""The examples: equal losses without and with a plan, in less memory; runs that go on; flags that are wrong.

Each example is called in this process. `comparison` starts processes; here it calls the example's `main` instead.
"""

from __future__ import annotations

import functools
import importlib
import json
import pathlib
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

import jaxckpt

pytest.importorskip("sklearn")

ROOT = pathlib.Path(__file__).parent.parent
NAMES = ("common", "comparison", "gpt_text", "gpt_compressed", "lstm_text", "resnet_digits", "unet_scenes")
TINY = {
    "gpt_text": "--layers 2 --width 16 --heads 2 --tokens 32 --batch 8 --budget 70%",
    "lstm_text": "--length 64 --sequences 4 --width 16 --budget 60%",
    "resnet_digits": "--blocks 2 --width 8 --batch 64 --budget 80%",
    "unet_scenes": "--size 32 --levels 1 --width 8 --batch 2 --budget 80%",
}
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def examples():
    """The modules of the folder, by name."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(ROOT / "examples"))
        for name in NAMES:
            sys.modules.pop(name, None)


def run(module, argv, report):
    """The losses of a run in this process."""
    module.main([*argv, "--report", str(report)])
    return json.loads(report.read_text())["losses"]


@pytest.fixture
def quick_plans(monkeypatch):
    """To confirm a plan takes up to nine compilations. Tests that measure what comes out need none of them."""
    monkeypatch.setattr(jaxckpt, "plan", functools.partial(jaxckpt.plan, verify=False))


@pytest.mark.parametrize("name", TINY)
def test_a_plan_changes_the_memory_and_not_the_losses(name, examples, tmp_path, quick_plans, shared_answers):
    module, flags, file = getattr(examples, name), TINY[name].split(), tmp_path / "plan.json"
    expected = run(module, [*flags, "--steps", "3", "--budget", "none"], tmp_path / "plain.json")
    losses = run(module, [*flags, "--steps", "3", "--plan", str(file)], tmp_path / "planned.json")
    assert losses == pytest.approx(expected, rel=1e-5) and len(set(losses)) == 3

    loss, args, step_of = module.make_step(module.PARSER.parse_args(flags))
    planned = jaxckpt.Plan.load(file).apply(loss)
    before, after = (jaxckpt.measure(step_of(fun), *args).peak_bytes for fun in (loss, planned))
    assert after < 0.9 * before


def test_a_module_of_nnx_and_its_statistics_go_on_where_they_were(examples, tmp_path):
    flags = [*TINY["resnet_digits"].split(), "--budget=none", "--save-every=2"]
    save = [*flags, "--save", str(tmp_path / "run")]
    first = run(examples.resnet_digits, [*save, "--steps=3"], tmp_path / "first.json")
    losses = run(examples.resnet_digits, [*save, "--steps=5"], tmp_path / "second.json")
    assert losses[:3] == first
    assert losses == pytest.approx(
        run(examples.resnet_digits, [*flags, "--steps=5"], tmp_path / "whole.json"), rel=1e-6
    )
    ends = [json.loads((tmp_path / f"{name}.json").read_text())["figures"] for name in ("second", "whole")]
    assert ends[0] == ends[1]  # of the running statistics


def test_a_run_that_is_killed_goes_on_with_the_same_losses(examples, tmp_path):
    flags = [*TINY["gpt_text"].split()[:-2], "--budget=none", "--steps=400", "--save-every=7"]
    save = ["--save", str(tmp_path / "run")]
    command = [sys.executable, str(ROOT / "examples" / "gpt_text.py"), *flags, *save]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as started:
        for line in started.stderr:
            if line.startswith("step 40 of"):
                started.kill()
                break
    assert started.wait() == -9
    with np.load(tmp_path / "run" / "checkpoint.npz") as stored:
        stopped = stored["losses"].tolist()
    assert 35 <= len(stopped) < 400 and len(stopped) % 7 == 0

    losses = run(examples.gpt_text, [*flags, *save], tmp_path / "resumed.json")
    expected = run(examples.gpt_text, flags, tmp_path / "whole.json")
    assert losses[: len(stopped)] == stopped
    assert losses == pytest.approx(expected, rel=1e-6) and losses[-1] < losses[0] - 0.5


def test_a_checkpoint_file_of_other_flags_is_refused(examples, tmp_path):
    flags = [*TINY["lstm_text"].split(), "--budget", "none", "--steps", "1", "--save", str(tmp_path)]
    examples.lstm_text.main(flags)
    with pytest.raises(SystemExit, match=r"--save must be the folder of a run with the same flags.*Give other flags"):
        examples.lstm_text.main([*flags, "--seed", "1"])


@pytest.mark.parametrize("content", [lambda whole: whole[: len(whole) // 2], lambda whole: b""])
def test_a_checkpoint_file_that_is_cut_short_is_named(examples, tmp_path, content):
    flags = [*TINY["lstm_text"].split(), "--budget", "none", "--steps", "1", "--save", str(tmp_path)]
    state, file = {"w": np.ones((64, 64), np.float32)}, tmp_path / "checkpoint.npz"
    unmade = examples.common.Run(examples.lstm_text.PARSER.parse_args(flags), jax.jit(lambda state: state), state)
    unmade.save(state)
    assert np.array_equal(unmade.restore({"w": np.zeros((64, 64), np.float32)})["w"], state["w"])
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(SystemExit, match=rf"--save must be .* {re.escape(str(file))} is not: .*Remove the file"):
        unmade.restore(state)


def test_a_plan_of_another_program_is_refused(examples, tmp_path, quick_plans, capsys):
    flags = [*TINY["lstm_text"].split(), "--steps", "1", "--plan", str(tmp_path / "plan.json")]
    examples.lstm_text.main(flags)
    with pytest.raises(jaxckpt.PlanMismatchError, match="made for another function, or other shapes"):
        examples.lstm_text.main([*flags, "--width", "24"])
    assert re.search(
        r"Takes the plan in .*plan.json, made for [\d.]+ MiB; --budget 60% has no", capsys.readouterr().err
    )


def test_eight_devices_and_microbatches_compute_the_same(examples, tmp_path):
    flags = [*TINY["gpt_text"].split()[:-2], "--accumulate=2", "--steps=3", "--batch=16", "--budget=none"]
    code = """
import sys; sys.path.insert(0, "examples")
import gpt_text
flags = sys.argv[1:]
_, (state, inputs, _), _ = gpt_text.make_step(gpt_text.PARSER.parse_args(flags))
share = lambda leaf: leaf.addressable_shards[0].data.size / leaf.size
import jax
moments = max(jax.tree.leaves(state.opt_state), key=lambda leaf: leaf.size)
print(share(max(jax.tree.leaves(state.params), key=lambda leaf: leaf.size)), share(moments), share(inputs))
gpt_text.main(flags)
"""
    report = tmp_path / "devices.json"
    command = [sys.executable, "-c", code, *flags, "--devices=8", "--layout=sharded", f"--report={report}"]
    printed = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert printed.splitlines()[0] == "0.125 0.125 0.125"
    expected = run(examples.gpt_text, flags, tmp_path / "one.json")
    assert json.loads(report.read_text())["losses"] == pytest.approx(expected, rel=1e-4)


def test_bfloat16_trains(examples, tmp_path):
    flags = [*TINY["gpt_text"].split(), "--steps=3", "--budget=none"]
    exact, rounded = (
        run(examples.gpt_text, [*flags, *more], tmp_path / "losses.json") for more in ([], ["--bfloat16"])
    )
    assert exact != rounded and rounded == pytest.approx(exact, rel=2e-2)


def test_compressed_activations_take_fewer_bytes_and_leave_the_forward_pass_exact(examples, tmp_path):
    kept, losses = {}, {}
    for form in examples.gpt_text.FORMS:
        flags = [
            *TINY["gpt_text"].split(),
            "--layers=1",
            "--width=128",
            "--budget=none",
            f"--compress={form}",
            "--steps=3",
        ]
        loss, (state, *batch), _ = examples.gpt_text.make_step(examples.gpt_text.PARSER.parse_args(flags))
        found = jaxckpt.residuals(loss, state.params, *(each[0] for each in batch), jax.random.key(0))
        names = "block_in", "qkv", "context", "up"
        kept[form] = sum(each.bytes for each in found.residuals if each.name in names and not each.argument)
        if form in ("exact", "int4"):
            losses[form] = run(examples.gpt_text, flags, tmp_path / "losses.json")
    numbers = 8 * 32 * 128 * (1 + 3 + 1 + 4)  # sequences, tokens, width, of the four values
    assert kept["exact"] == 4 * numbers and kept["bfloat16"] == 2 * numbers
    assert kept["float8_e4m3fn"] == kept["int8"] == numbers * (1 + 4 / 128)
    assert kept["int4"] == numbers * (0.5 + 4 / 128)
    assert losses["int4"][0] == pytest.approx(losses["exact"][0], rel=1e-6)
    assert losses["int4"][2] != losses["exact"][2]
    assert losses["int4"] == pytest.approx(losses["exact"], rel=1e-2)


def test_compare_writes_a_table_and_a_picture(examples, tmp_path, monkeypatch, capsys, shared_answers):
    pytest.importorskip("matplotlib")

    def here(command):
        try:
            examples.lstm_text.main(command[2:])
        except SystemExit as ended:
            return types.SimpleNamespace(returncode=ended.code or 0)
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(examples.comparison.subprocess, "run", here)
    with pytest.raises(SystemExit) as ended:
        examples.lstm_text.main([*TINY["lstm_text"].split(), "--steps", "3", "--compare", str(tmp_path)])
    assert ended.value.code == 0
    found = json.loads((tmp_path / "lstm_text.json").read_text())
    assert found["difference"] < 1e-5 and found["peak"][1] <= found["budget_bytes"] < found["peak"][0]
    assert [len(each["losses"]) for each in found["runs"]] == [3, 3] and found["time_ratio"] > 0
    page = (tmp_path / "lstm_text.md").read_text()
    assert examples.comparison.table(found) in page and "--length=64" in page
    assert (tmp_path / "lstm_text.png").read_bytes().startswith(b"\x89PNG")

    assert examples.comparison.failure(found) is None
    assert "differ by 1.0e-02, more than 0.0001" in examples.comparison.failure(found | {"difference": 0.01})
    assert examples.comparison.failure(found | {"difference": float("nan")})


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("gpt_text", "--steps 0", "argument --steps: must be a whole number of at least 1; got '0'"),
        ("gpt_text", "--width 1.5", "argument --width: must be a whole number of at least 1; got '1.5'"),
        ("gpt_text", "--accumulate 3", "--batch must be a multiple of --accumulate times --devices, 3; got 16"),
        ("gpt_text", "--heads 3", "--width must be a multiple of --heads, 3; got 128"),
        ("gpt_text", "--compress int7", "argument --compress: invalid choice: 'int7'"),
        ("gpt_text", "--compress int8", "--compress needs --budget none"),
        ("gpt_text", "--compare x --budget none", "--compare needs a --budget"),
        ("lstm_text", "--schedule sqrt", "--schedule needs --budget none"),
        ("unet_scenes", "--size 36", "--size must be a multiple of 2 to the power of --levels, 8"),
        ("unet_scenes", "--width 12", "--width must be a multiple of 8"),
    ],
)
def test_flags_that_are_wrong_are_errors_that_name_them(name, flags, message, examples, capsys):
    with pytest.raises(SystemExit) as ended:
        getattr(examples, name).main(flags.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(("budget", "message"), [("much", "--budget much: .*budget"), ("1%", "--budget 1%: ")])
def test_a_budget_that_cannot_be_is_an_error_of_one_line(budget, message, examples, shared_answers):
    with pytest.raises(SystemExit, match=message):
        examples.lstm_text.main([*TINY["lstm_text"].split(), "--budget", budget])


def test_the_page_has_the_figures_of_the_results(examples):
    text = (ROOT / "docs" / "examples.md").read_text()
    for name in TINY:
        found = json.loads((RESULTS / f"{name}.json").read_text())
        assert examples.comparison.row(name, found) in text
        assert found["difference"] < found["limit"] == 1e-4
    found = json.loads((RESULTS / "gpt_compressed.json").read_text())
    assert examples.gpt_compressed.table(found) in (ROOT / "docs" / "actions.md").read_text()
    assert re.search(r"gpt_compressed\.png", (ROOT / "docs" / "actions.md").read_text())
