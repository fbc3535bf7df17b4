"""Tables, pictures, pages: the figures are in them, and a file is written whole or not at all."""

import io
import os
import re

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import jaxckpt
from jaxckpt import ArgumentError
from jaxckpt.core.files import write_whole
from jaxckpt.show import html, plot, table


def loss(x):
    return jnp.sum(jnp.tanh(jnp.sin(x) @ x))


REPORT = jaxckpt.measure(jax.value_and_grad(loss), jax.ShapeDtypeStruct((256, 256), jnp.float32), target="cpu")


def test_a_report_as_text_and_page_has_its_figures():
    text = table.to_text(table.report_view(REPORT, "the title"))
    assert "the title" in text
    assert jaxckpt.core.units.format_bytes(REPORT.peak_bytes) in text
    buffers = table.to_text(table.buffers_view(REPORT, 3))
    assert "test_show." in buffers
    page = html.report_page(REPORT, "a <title> & more")
    assert "a &lt;title&gt; &amp; more" in page and "<script src" not in page


def test_printed_residuals_have_equal_arrays_in_one_row_and_a_total():
    def layers(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(jnp.sin(x))

    report = jaxckpt.residuals(layers, [jnp.ones((128, 128))] * 12, jnp.ones((8, 128)))
    lines = str(report).splitlines()
    kept = [r for r in report.residuals if not r.argument]
    tanh = sum(r.name == "tanh" for r in kept)  # how many of them JAX keeps differs between its versions
    assert tanh > 8 and any(
        line.strip().startswith(f"{4 * tanh}.0 KiB  {tanh} × float32[8, 128]  tanh") for line in lines
    )
    assert lines[-2].strip() == f"{report.kept_bytes / 1024:.1f} KiB  kept for the backward pass, in {len(kept)} arrays"
    assert lines[-1].strip() == "772.0 KiB  in 13 arguments besides, in memory anyway" and len(lines) == 5
    assert (
        str(jaxckpt.residuals(lambda x: 2.0 * x, jnp.ones(3))).strip() == "0 B  kept for the backward pass, in 0 arrays"
    )


def test_source_lines_have_no_folders_where_people_read_them(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    report = jaxckpt.residuals(loss, jnp.ones((256, 256)))
    folder = os.path.dirname(__file__)
    assert any(each.source.startswith(folder) for each in report.residuals), "data has the whole path"
    buffers = table.buffers_view(REPORT, 3)
    for shown in (str(report), table.to_text(table.residuals_view(report)), table.to_text(buffers)):
        assert "test_show.py:" in shown and folder not in shown
    assert folder not in html.buffers_of(REPORT)


@pytest.mark.parametrize("width", [80, 120])
def test_long_lines_of_a_tree_are_whole_in_a_file_and_behind_its_branches_in_a_terminal(width):
    lines = ["├─ " + "a_long_name/" * 20 + ": keeps 2 values, 1.5 MiB", "│     1.5 MiB  " + "word " * 40, "└─ short"]
    shown = table.to_text(table.titled("A plan", table.figures_table([]), tree=lines), width).splitlines()
    assert shown[-3:] == [line.rstrip() for line in lines]
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, force_terminal=True, color_system=None)
    console.print(table.titled("A plan", table.figures_table([]), tree=lines))
    found = [line.rstrip() for line in buffer.getvalue().splitlines()]
    tree = found[next(i for i, line in enumerate(found) if line.startswith("├─")) :]
    at = next(i for i, line in enumerate(tree) if "MiB  word" in line)
    assert at > 2 and len(tree) > at + 2 and max(map(len, tree)) <= width
    assert all(line.startswith("│  ") for line in tree[1:at])
    assert all(re.match(r"│ {14}word", line) for line in tree[at + 1 : -1]) and tree[-1] == "└─ short"
    assert "".join(line[3:] for line in tree[:at]).replace(" ", "") == lines[0][3:].replace(" ", "")


def test_residuals_as_a_table():
    report = jaxckpt.residuals(loss, jnp.ones((256, 256)))
    text = table.to_text(table.residuals_view(report, 1))
    assert "256.0 KiB" in text


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_timeline_is_drawn(suffix):
    data = plot.render(plot.timelines_figure({"none": REPORT}), plot.check_suffix(f"x{suffix}"))
    assert len(data) > 2000


def test_an_unknown_kind_of_picture_is_an_error():
    with pytest.raises(ArgumentError, match="png"):
        plot.check_suffix("x.bmp")


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(ArgumentError, match="path must be a file in a folder that exists"):
        write_whole(tmp_path / "no" / "file", "x")


def test_a_report_draws_its_timeline_and_its_largest_buffers(tmp_path):
    REPORT.plot(tmp_path / "report.svg")
    text = (tmp_path / "report.svg").read_text()
    assert text.startswith("<?xml") and len(text) > 10_000
    figure = plot.report_figure(REPORT)
    above, below = figure.axes
    assert max(above.lines[0].get_ydata()) == pytest.approx(max(REPORT.timeline().live_bytes) / 2**20, rel=0.01)
    assert below.get_yticklabels()[0].get_text().endswith("f32[256,256]")
    assert any("test_show.py" in note.get_text() for note in below.texts)
