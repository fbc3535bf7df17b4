"""Pictures: what is in them, that labels are apart, and that a picture that fails leaves no file."""

import itertools
import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import jaxckpt
from jaxckpt.memory.compare import Comparison, _comparison
from jaxckpt.show import plot

MIB = 2**20


def comparison(*points: tuple[str, float, float]) -> Comparison:
    """A comparison of (name, peak in MiB, recomputation) without compiling anything."""
    report = lambda peak: SimpleNamespace(
        peak_bytes=int(peak * MIB), argument_bytes=MIB, target="cpu", advice=lambda: None
    )
    return _comparison(
        [(name, report(peak), int(peak * MIB), int(10**9 * (1 + more))) for name, peak, more in points], {}, "cpu"
    )


def boxes(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    renderer = canvas.get_renderer()
    legend = axes.get_legend().get_window_extent(renderer)
    return (
        {text.get_text(): text.get_window_extent(renderer) for text in axes.texts},
        legend,
        axes.get_window_extent(renderer),
    )


@pytest.mark.parametrize("seed", range(6))
def test_labels_are_inside_and_apart(seed):
    draw = random.Random(seed)
    points = [(f"segments:{i}", draw.uniform(5, 60), draw.choice([0, 0.1, 0.33, draw.random() / 2])) for i in range(11)]
    labels, legend, inside = boxes(plot.comparison_figure(comparison(*points)))
    assert sum(name.count("segments") for name in labels) == 11
    for (one, a), (two, b) in itertools.combinations(labels.items(), 2):
        assert not a.overlaps(b), (one, two)
    for name, box in labels.items():
        assert not box.overlaps(legend), name
        assert inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1, name


def test_points_in_one_place_have_one_label():
    labels, _, _ = boxes(plot.comparison_figure(comparison(("a", 10, 0), ("b", 10, 0), ("c", 5, 0.3))))
    assert set(labels) == {"a, b", "c"}


def test_points_on_the_front_are_filled_and_the_staircase_goes_through_them():
    figure = plot.comparison_figure(comparison(("a", 10, 0), ("b", 12, 0.2), ("c", 5, 0.3)))
    lines = figure.axes[0].get_lines()
    filled = [
        line.get_ydata()[0] for line in lines if line.get_marker() == "o" and line.get_markerfacecolor() != "white"
    ]
    assert sorted(map(float, filled)) == [5, 10]
    (front,) = [line for line in lines if line.get_label() == "Pareto front"]
    corners = [(round(float(x), 3), float(y)) for x, y in zip(front.get_xdata(), front.get_ydata())]
    assert corners[:3] == [(0, 10), (30, 10), (30, 5)]


def test_equal_programs_give_equal_pictures_and_share_a_line():
    step = jax.value_and_grad(lambda x: jnp.sum(jnp.tanh(x @ x) @ x))
    report = jaxckpt.measure(step, jax.ShapeDtypeStruct((64, 64), jnp.float32), target="cpu")
    figure = plot.timelines_figure({"one": report, "two": report})
    (label,) = figure.axes[0].get_legend().get_texts()
    assert label.get_text().startswith("one, two: ")
    assert plot.render(figure, "svg") == plot.render(plot.timelines_figure({"one": report, "two": report}), "svg")
    line = figure.axes[0].get_lines()[0]
    assert max(line.get_ydata()) * 1024 == report.timeline().peak_bytes


def test_a_picture_that_fails_leaves_no_file_and_keeps_the_old_one(tmp_path, monkeypatch):
    good = comparison(("a", 10, 0), ("b", 5, 0.3))
    plot.save_comparison(good, tmp_path / "out.png")
    before = (tmp_path / "out.png").read_bytes()

    def fail(*_, **__):
        raise RuntimeError("no font")

    monkeypatch.setattr(plot, "_label", fail)
    for path in (tmp_path / "out.png", tmp_path / "new.png"):
        with pytest.raises(RuntimeError, match="no font"):
            plot.save_comparison(good, path)
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]
    assert (tmp_path / "out.png").read_bytes() == before


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(jaxckpt.MissingPackageError, match=r"pip install 'jaxckpt\[plot\]'"):
        plot.comparison_figure(comparison(("a", 10, 0)))
