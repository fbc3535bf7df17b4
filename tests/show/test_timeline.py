"""The interactive timeline: what it draws adds up to the report's timeline, and a browser draws all of it."""

from __future__ import annotations

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import ArgumentError, TargetError
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.buffers import Assignment, Buffer, Lifetime
from jaxckpt.memory.report import MemoryReport, measure
from jaxckpt.show import timeline
from tests.browser import document
from tests.memory import dumps

TARGETS = ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda), pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu)]
X = jax.ShapeDtypeStruct((512, 512), jnp.float32)


def drawn(space, length):
    """Adds up what is drawn at each position, of the data alone."""
    live = [0] * length
    for first, last, size, *_ in space["bands"]:
        for position in range(first, last + 1):
            live[position] += size
    for small in space["small"]:
        changes = [*small["changes"], [length, 0]]
        for (first, size), (end, _) in itertools.pairwise(changes):
            for position in range(first, end):
                live[position] += size
    return tuple(live)


def check(report: MemoryReport) -> dict:
    """Asserts that what is drawn of a report is its timeline, and returns the program's data."""
    (program,) = timeline.timeline_data({"it": report})["programs"]
    line = report.timeline()
    assert drawn(program["spaces"][0], len(line.labels)) == line.live_bytes
    assert program["spaces"][0]["peak"] == line.peak_bytes
    assert program["spaces"][0]["at"] == line.peak_position
    assert program["peak"] == report.peak_bytes
    return program


def _while(x):
    return jax.lax.while_loop(lambda c: c[1].sum() < 9, lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[1])), (0, x))


PROGRAMS = {
    "loop and its transpose": (jax.value_and_grad(dumps.loss), dumps.arguments()),
    "while": (_while, (X,)),
    "donated": (jax.jit(lambda x, y: (x + y, (x @ y).sum()), donate_argnums=0), (X, X)),
    "constants": (lambda x: x @ jnp.arange(512.0 * 512).reshape(512, 512).at[0].set(3.0), (X,)),
    "nothing": (lambda x: (), (X,)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["loop and its transpose", "while", "donated"])
def test_what_is_drawn_adds_up_to_the_timeline(target, name):
    fun, args = PROGRAMS[name]
    report = measure(fun, *args, target=target)
    program = check(report)
    kinds = {timeline.KINDS[row[3]] for row in program["spaces"][0]["bands"]}
    if name == "loop and its transpose":
        assert {"argument", "output", "temporary"} <= kinds
        assert report.timeline().peak_bytes == pytest.approx(report.peak_bytes, rel=0.01)
    if name == "donated":  # the sum is in the place of the first argument, and drawn once
        assert sum(row[2] == X.size * 4 and row[3] < 3 for row in program["spaces"][0]["bands"]) == 2


@pytest.mark.parametrize("name", ["constants", "nothing"])
def test_programs_of_constants_and_of_nothing_are_drawn(name):
    fun, args = PROGRAMS[name]
    program = check(measure(fun, *args, target="cpu"))
    assert (program["peak"] > 0) == (name == "constants")


@pytest.mark.tpu
def test_the_other_memories_are_drawn_apart():
    report = measure(jax.value_and_grad(dumps.loss), *dumps.arguments(), target="tpu:v5e:2x2")
    program = check(report)
    assert report.on_chip_bytes > 0
    main = next(space for space in program["spaces"] if space["name"] == "main memory")
    assert main["peak"] == report.main_memory_bytes
    assert max(drawn(main, len(program["labels"]))) == main["peak"]


@pytest.mark.tpu
def test_values_in_host_memory_are_drawn_apart():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(x):
        body = jax.checkpoint(lambda x: jnp.sin(jaxckpt.tag(x @ x, "kept")), policy=policy)
        return body(body(x)).sum()

    report = measure(jax.grad(loss), jax.ShapeDtypeStruct((512, 512), jnp.float32), target="tpu:v5e:2x2")
    program = check(report)
    assert report.host_bytes > 0
    host = next(space for space in program["spaces"] if space["name"] == "host memory")
    assert 0 < host["peak"] <= report.host_bytes
    assert max(drawn(host, len(program["labels"]))) == host["peak"]


# ------------------------------------------------------------------------------------------------ programs made by hand


def made(sizes, length=50, name="t", source="/a/file.py:3", standing=1000):
    """A report whose buffer i is live from step i on, for three steps."""
    whole = Buffer("p", standing, "u8[1]", "x", "", "argument")
    buffer = lambda i, size: Buffer(f"{name}{i}", size, f"u8[{size}]", f"jit(f)/{name}", source, "temporary")
    lives = tuple(Lifetime(i % (length - 3), i % (length - 3) + 3, buffer(i, size)) for i, size in enumerate(sizes))
    labels = tuple(f"op{i}" for i in range(length))
    assignment = Assignment((whole,), lives, (), labels, 0, standing, 0, 0, 0, 0)
    peak = assignment.timeline.peak_bytes
    return MemoryReport("cpu", peak, standing, 0, peak - standing, 0, 0, 0, peak, 0, None, 0.0, assignment)


def test_small_buffers_are_one_band_and_none_is_lost():
    report = made([10**6] * 30 + [10, 100, 0] * 4000)
    (program,) = timeline.timeline_data({"it": report})["programs"]
    (space,) = program["spaces"]
    assert drawn(space, 50) == report.timeline().live_bytes
    assert len(space["bands"]) == 30
    assert {timeline.KINDS[small["kind"]]: small["count"] for small in space["small"]} == {
        "argument": 1,
        "temporary": 8000,
    }
    assert space["below"] == 1000
    assert space["count"] == 1 + 30 + 12000


def test_of_very_many_buffers_the_largest_are_drawn_alone():
    report = made([1000 + i for i in range(50_000)], length=20_000)
    data = timeline.timeline_data({"it": report})
    (space,) = data["programs"][0]["spaces"]
    assert len(space["bands"]) == timeline.MOST
    assert min(row[2] for row in space["bands"]) >= space["below"]
    assert drawn(space, 20_000) == report.timeline().live_bytes
    assert len(json.dumps(data)) < 2_000_000


def test_names_cannot_end_the_data():
    report = made([10], name="</script><script>alert(1)</script>&lt;")
    text = timeline.timeline_fragment({"<b>&</b>": report})
    data = re.search(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)[1]
    assert "<" not in data and json.loads(data) == json.loads(json.dumps(timeline.timeline_data({"<b>&</b>": report})))
    assert "alert(1)" not in text.replace(data, "")
    assert text.count("</script>") == 2


def test_a_report_writes_its_page(tmp_path):
    report = made([10, 20])
    report.to_html(tmp_path / "page.html", {"other": made([30])})
    page = (tmp_path / "page.html").read_text()
    assert format_bytes(report.peak_bytes) in page and '"other"' in page
    assert not re.search(r"""(src|href)=|@import|url\(|fetch\(|XMLHttp|https?://""", page)
    for beside in ({"x": 3}, {3: report}, [report], {"this program": report}):
        with pytest.raises(ArgumentError, match="beside must be"):
            report.to_html(tmp_path / "no.html", beside)
    assert not (tmp_path / "no.html").exists()


def test_without_a_buffer_assignment_there_is_no_timeline(tmp_path):
    report = MemoryReport("cpu", 1, 1, 0, 0, 0, 0, 0, 1, 0, None, 0.0)
    with pytest.raises(TargetError, match="no buffer assignment"):
        report.to_html(tmp_path / "page.html")


# -------------------------------------------------------------------------------------------------------- in a browser


def rendered(page: str, tmp_path, script: str = "") -> str:
    """What a browser makes of a page, after a script has run in it."""
    path = tmp_path / "page.html"
    path.write_text(page)
    return document(path, f"{{{script}}}")


FIGURE = re.compile(
    r'<figure data-name="(.*?)" data-bands="(\d+)" data-peak="(\d+)" data-top="(\d+)" data-steps="(\d+)">'
)


def page_of(tmp_path, report, beside=None):
    report.to_html(tmp_path / "made.html", beside)
    return (tmp_path / "made.html").read_text()


def test_a_browser_stacks_all_bands_up_to_the_peak(tmp_path):
    loop = measure(jax.value_and_grad(dumps.loss), *dumps.arguments(), target="cpu")
    many = made([4000 + 7 * i for i in range(600)] + [1] * 99, length=300)
    dom = rendered(page_of(tmp_path, loop, {"many & <b>": many}), tmp_path)
    assert 'class="jaxckpt-timeline" data-ready="1"' in dom
    figures = FIGURE.findall(dom)
    assert [name.replace("&lt;", "<").replace("&gt;", ">") for name, *_ in figures] == [
        "this program",
        "many &amp; <b>",
    ]
    data = timeline.timeline_data({"loop": loop, "many": many})["programs"]
    for report, program, (_, bands, peak, top, steps) in zip((loop, many), data, figures):
        (space,) = program["spaces"]
        assert int(bands) == len(space["bands"]) + len(space["small"])
        assert int(peak) == int(top) == report.timeline().peak_bytes  # what the script stacked, and what Python said
        assert int(steps) == len(report.timeline().labels)
        assert f'<b class="peak">{format_bytes(report.timeline().peak_bytes)}</b>' in dom


POINT = """
const root = document.querySelector(".jaxckpt-timeline"), canvas = root.querySelector("canvas"), box = canvas.getBoundingClientRect();
const at = { clientX: box.left + 74 + (box.width - 88) * .5,
  clientY: box.top + 26 + (box.height - 72) * (1 - .5 / 1.06), pointerId: 1, bubbles: true };
"""


def test_hover_shows_a_buffer_and_click_pins_it_with_its_line(tmp_path):
    """A temporary of 3,000 bytes stands on 1,000 bytes of arguments, and the pointer is at half of the peak."""
    page = page_of(tmp_path, made([3000], length=4, standing=1000))
    move = f'{POINT} canvas.dispatchEvent(new PointerEvent("pointermove", at));'
    dom = rendered(page, tmp_path, move)
    tip = re.search(r'<div class="tip".*?>(.*?)</div></div>', dom, re.DOTALL)[0]
    assert (
        "jit(f)/t" in tip
        and "u8[3000] · 2.9 KiB · temporary" in tip
        and "file.py:3" in tip
        and "/a/" not in tip
        and "whole program" in tip
    )
    click = (
        f'{POINT} for (const kind of ["pointerdown", "pointerup"]) canvas.dispatchEvent(new PointerEvent(kind, at));'
    )
    dom = rendered(page, tmp_path, click)
    assert 'data-source="/a/file.py:3"' in dom and "1 buffer drawn of this line, 2.9 KiB at the peak" in dom
    assert '<p class="soft">Nothing is pinned' not in dom


def test_keys_reach_every_buffer_and_the_switch_hides_a_program(tmp_path):
    page = page_of(tmp_path, made([3000], length=4), {"other": made([2000], length=4)})
    keys = """
    const root = document.querySelector(".jaxckpt-timeline"), canvas = root.querySelector("canvas");
    const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    ["ArrowUp", "ArrowUp", "Enter"].forEach(press);
    document.title = `${root.querySelector(".said").textContent} | ${root.querySelector(".detail").dataset.source}`;
    root.querySelectorAll(".programs button")[1].click();
    """
    dom = rendered(page, tmp_path, keys)
    title = re.search(r"<title>(.*?)</title>", dom)[1]
    assert "jit(f)/t, u8[3000], 2.9 KiB, file.py:3" in title and title.endswith("| /a/file.py:3")
    assert [name for name, *_ in FIGURE.findall(dom)] == ["this program"]


def test_the_page_of_a_plan_draws_the_step_with_it_beside_the_one_without(tmp_path):
    ws, x = [jnp.ones((64, 256)) / 64] * 8, jnp.ones((1024, 64))
    loss = lambda ws, x: sum(jnp.sum(x := jnp.tanh(jnp.tanh(x @ w) @ w.T)) for w in ws)
    plan = jaxckpt.plan(loss, ws, x, budget="60%", target="cpu")
    plan.report.to_html(tmp_path / "plan.html")
    peaks = {name: int(top) for name, _, _, top, _ in FIGURE.findall(document(tmp_path / "plan.html"))}
    assert list(peaks) == ["without a plan", "planned"]
    assert peaks["planned"] == pytest.approx(plan.measured_bytes, rel=0.01)
    assert peaks["without a plan"] == pytest.approx(plan.unplanned_bytes, rel=0.01)


def test_the_page_of_a_comparison_draws_the_front(tmp_path):
    x, wrap = jnp.ones((512, 512)), jaxckpt.checkpoint
    chain = lambda wrap: (
        lambda x: functools.reduce(lambda x, _: wrap(lambda x: jnp.tanh(jnp.sin(x) @ x))(x), range(6), x).sum()
    )
    found = jaxckpt.compare({"none": chain(lambda f: f), "each": chain(wrap)}, x, target="cpu")
    found.to_html(tmp_path / "compare.html")
    tops = {name: int(top) for name, _, _, top, _ in FIGURE.findall(document(tmp_path / "compare.html"))}
    assert tops == {row.name: row.report.timeline().peak_bytes for row in found if row.on_front}
    assert set(tops) == {"none", "each"}
