"""What is printed and drawn of plans and frontiers: all of what is kept, what comes again told once, pictures that hold
every point.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.path import Path

from jaxckpt.actions import OFFLOAD, SAVE
from jaxckpt.core.graph import trace
from jaxckpt.core.plan import Loop, MemoryEstimate, Plan, PlanReport, Region
from jaxckpt.planner.frontier import Frontier, Point, Way
from jaxckpt.schedules import checkpointed, in_turn
from jaxckpt.show import frontiers, plans, plot, table
from jaxckpt.show.tree import nothing, plan_lines
from jaxckpt.transforms.checkpoint import tag

MIB = 2**20
W, X = jnp.ones((64, 64)), jnp.ones((512, 64))


def model(w, x):
    for _ in range(6):
        x = jnp.tanh(tag(x @ w, "up"))
    return x.sum()


GRAPH = trace(model, W, X)


def made(op):
    return GRAPH.ops[op].outputs[0]


def text(regions, loops=(), graph=GRAPH):
    return "\n".join(plan_lines(Plan(tuple(regions), graph.fingerprint, loops=tuple(loops)), graph))


def test_equal_regions_are_told_once_with_how_often():
    shown = text([Region(2 * i, 2 * i + 2, {made(2 * i): SAVE}) for i in range(1, 5)])
    assert shown.count("keeps 1 value, 128.0 KiB each") == 1
    assert "4 times" in shown and "(operations 2–10)" in shown
    assert "up " in shown and "float32[512, 64]" in shown and "test_plans.py:" in shown
    assert shown.count("left to JAX") == 2  # the first layer and what follows the last


def test_a_pattern_that_comes_again_is_told_once():
    regions = []
    for start in (0, 4, 8):
        regions += [Region(start, start + 2, {made(start): SAVE}), Region(start + 2, start + 4)]
    shown = text(regions)
    assert "3 times, operations 0–12:" in shown
    assert shown.count("keeps what goes in and out") == 1 and shown.count("keeps 1 value") == 1


def test_regions_that_keep_different_values_are_not_told_as_one():
    shown = text([Region(0, 2, {made(0): SAVE}), Region(2, 4, {made(3): SAVE}), Region(4, 6, {made(4): OFFLOAD})])
    assert "times" not in shown
    assert shown.count("keeps 1 value") == 3 and "offload up" in shown


def test_regions_within_regions_are_a_tree():
    shown = text([Region(0, 8, {}, (Region(0, 4, {made(0): SAVE, made(2): SAVE}), Region(4, 8)))])
    assert "runs again as" in shown and "2 × up" in shown
    assert shown.index("operations 0–8") < shown.index("runs again as") < shown.index("operations 4–8")


def test_small_values_are_added_up():
    def several(w, x):
        small = [jnp.sin(x[i]) for i in range(8)]
        return (x @ w).sum() + sum(jnp.dot(a, a) for a in small)

    graph = trace(several, W, X)
    kept = {op.outputs[0]: SAVE for op in graph.ops if op.primitive in ("sin", "dot_general") and op.outputs}
    kept = {i: action for i, action in kept.items() if graph.values[i].bytes > 4}
    shown = text([Region(0, len(graph.ops), kept)], graph=graph)
    assert "keeps 9 values, 130.0 KiB" in shown
    assert "2.0 KiB" in shown  # the eight small ones, on one line


def test_a_loop_is_told_by_its_runs():
    def scanned(w, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(tag(x @ w, "up")), None), x, length=10)[0].sum()

    graph = trace(scanned, W, X)
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    inner = graph.ops[place].bodies[0].ops[0].outputs[0]
    shown = text([], [Loop(place, in_turn(checkpointed(4, (), {inner: SAVE}), checkpointed(6, (3,))))], graph)
    assert "4 iterations: keeps 1 value, 128.0 KiB of each, and its carry" in shown
    assert "6 iterations, in segments of 3: keeps the carry" in shown
    assert "scan of" in shown
    shown = text([], [Loop(place, in_turn(checkpointed(4), checkpointed(6, remat=False)))], graph)
    assert "6 iterations: left to JAX, which keeps what derivatives need" in shown


def test_an_empty_plan_says_so():
    assert text([]) == "The plan has no regions and no loops: nothing is recomputed."
    empty = PlanReport(Plan((), "none"), budget=100).plan
    assert nothing(empty) == "The step fits as it is: nothing is recomputed."


def report(times=None, compiled=True):
    peak = 58 * MIB if compiled else None
    estimate = MemoryEstimate(60 * MIB, 10 * MIB, 30 * MIB, 20 * MIB)
    return PlanReport(
        Plan((Region(0, 6),), GRAPH.fingerprint),
        budget=64 * MIB,
        asked="64MiB",
        target="cpu",
        predicted=estimate,
        measured_bytes=peak,
        unplanned_bytes=100 * MIB if compiled else None,
        flops=1100,
        seconds=2.1,
        unplanned_flops=1000,
        unplanned_seconds=2.0,
        times=times,
        timed_on="cpu" if times else None,
    )


def test_the_figures_of_a_plan():
    cells = {what: (much, beside) for what, much, beside in plans.plan_cells(report((0.5, 0.25)))}
    assert cells["peak without a plan"][0] == "100.0 MiB"
    assert cells["budget"] == ("64.0 MiB", "64.0%")
    assert cells["peak, compiled"] == ("58.0 MiB", "58.0%")
    assert cells["peak, predicted"] == ("60.0 MiB", "+3.4% off")
    assert cells["recomputation"] == ("100 FLOPs", "+10.0% of the step's")
    assert cells["time by the target's rates"][1] == "+5.0%"
    assert cells["time of a step"][0] == "500 ms" and cells["time of a step"][1].startswith("2.00 × the 250 ms")
    shown = table.to_text(plans.plan_view(report(), GRAPH, "Plan for a model"))
    assert shown.startswith("Plan for a model") and "keeps what goes in and out" in shown


def test_options_that_the_compiler_needs_are_told_of_a_plan_that_does_something():
    options = (("xla_some_passes", "off"),)
    told = lambda report: [beside for what, _, beside in plans.plan_cells(report) if what == "compile with"]
    needing = dataclasses.replace(report(), compiler_options=options)
    assert told(needing) == [needing.options_line] and "jaxckpt.compiler_options()" in needing.options_line
    assert needing.options_line in str(needing.plan) and needing.options_line in needing._repr_html_()
    assert needing.to_json()["compiler_options"] == dict(options)
    assert not told(report()) and "compile with" not in str(report().plan)
    empty = PlanReport(Plan((), "x"), compiler_options=options)
    assert not told(empty) and "compile with" not in str(empty.plan)


def test_what_was_not_compiled_is_not_told():
    cells = {what for what, _, _ in plans.plan_cells(report(compiled=False))}
    assert "peak, predicted" in cells and not cells & {"peak, compiled", "peak without a plan", "time of a step"}


def test_a_report_prints_as_a_table_with_what_the_plan_holds():
    shown = str(report((0.5, 0.25)))
    assert shown.startswith(f"Plan on cpu for the program {GRAPH.fingerprint}")
    for line in (
        "peak without a plan",
        "58.0 MiB  58.0%",
        "100 FLOPs  +10.0% of the step's",
        "1 region: keep nothing",
    ):
        assert line in shown, line
    known = str(PlanReport(Plan((Region(0, 6, {made(0): SAVE, made(2): OFFLOAD}),), "x"), overhead=0.125))
    assert (
        "Plan for the program x\n" in known
        and "+12.5%" in known
        and "1 region: offload 1 value, save 1 value." in known
    )
    assert "fits as it is" in str(PlanReport(Plan((), "x")))


def test_a_report_is_a_table_in_a_notebook():
    found = report()._repr_html_()
    assert found.count("<table>") == 1 and "<td>58.0 MiB</td>" in found and "1 region" in found
    odd = PlanReport(Plan((), "<x>"), target="<cpu>")._repr_html_()
    assert "on &lt;cpu&gt; for the program &lt;x&gt;" in odd and "<cpu>" not in odd


def test_the_picture_of_a_report_has_every_peak_and_the_budget(tmp_path):
    figure = plans.plan_report_figure(report())
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "without a plan",
        "planned, predicted",
        "planned, compiled",
    ]
    bars = {(round(bar.get_y() + bar.get_height() / 2), bar.get_x()): bar.get_width() for bar in axes.patches}  # type: ignore[attr-defined]
    assert bars == {(0, 0): 100, (1, 0): 10, (1, 10): 30, (1, 40): 20, (2, 0): 58}, "the parts lie on the whole"
    assert axes.lines[0].get_xdata() == [64, 64] and axes.lines[0].get_label() == "budget"
    assert [note.get_text() for note in axes.texts][:3] == ["100.0 MiB", "60.0 MiB", "58.0 MiB"]
    report().plot(tmp_path / "plan.svg")
    assert "without a plan" in (tmp_path / "plan.svg").read_text()
    few = plans.plan_report_figure(report(compiled=False)).axes[0]
    assert [label.get_text() for label in few.get_yticklabels()] == ["planned, predicted"]
    assert not plans.plan_report_figure(PlanReport(Plan((), "x"))).axes[0].patches


@pytest.mark.parametrize("budget", [100, 101, 102, 104, 108, 112, 116])
def test_no_label_of_a_peak_lies_on_the_line_of_the_budget(budget):
    """The peaks are 100, 60 and 58 MiB; the budget is a little above one of them, or far from all."""
    for peak in (100, 60, 58):
        figure = plans.plan_report_figure(dataclasses.replace(report(), budget=budget * peak * MIB // 100))
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        (axes,) = figure.axes
        line, right = axes.transData.transform((budget * peak / 100, 0))[0], figure.bbox.x1
        boxes = [label.get_window_extent(canvas.get_renderer()) for label in axes.texts]
        assert len(boxes) >= 3 and not any(box.x0 <= line <= box.x1 for box in boxes)
        assert all(box.x1 <= right for box in boxes)


def some_frontier():
    def planned(share, compiled=True):
        report = PlanReport(
            Plan((), "x"),
            predicted=MemoryEstimate(share * MIB, 0, 0, 0),
            measured_bytes=share * MIB if compiled else None,
            flops=1000 + (100 - share),
            seconds=2.0 + (100 - share) / 100,
        )
        return Point(f"{share}%", share * MIB, report)

    points = (
        Point("10%", 10 * MIB, None, "The least budget found to fit is 29 MiB."),
        *(planned(s) for s in (30, 60, 90)),
    )
    others = (
        Way("each block", 55 * MIB, 1300, 2.6),
        Way("does not fit", None, 1000, 2.0),
        Way("huge", 900 * MIB, 1000, 2.0),
    )
    return Frontier("cpu", Way("as it is", 100 * MIB, 1000, 2.0), points, others)


def test_a_frontier_as_a_table():
    header, rows = frontiers.frontier_cells(some_frontier())
    assert {len(row) for row in rows} == {len(header)}
    assert rows[0][:2] == ["10%", "no plan fits"]
    assert rows[1][7] == "none"  # nothing by hand is as small
    assert rows[2][7:9] == ["each block", "+30.0%"]
    shown = str(some_frontier())
    assert "29 MiB" in shown and "100.0 MiB" in shown
    assert "each block" in some_frontier()._repr_html_()


def test_the_picture_has_every_point_that_is_no_more_than_a_third_above_the_step_as_it_is(tmp_path):
    frontier = some_frontier()
    figure = frontiers.frontier_figure(frontier, report(), measures=("flops", "seconds"))
    assert len(figure.axes) == 2
    (axes, _) = figure.axes
    lines = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
    assert lines["planner"][:, 1].tolist() == [30, 60, 90]
    assert lines["planner"][:, 0] == pytest.approx([7, 4, 1])
    assert lines["placed by hand"].tolist() == [[pytest.approx(30), 55]]
    assert lines["as it is"].tolist() == [[0, 100]]
    assert lines["this plan"].tolist() == [[pytest.approx(10), 58]]
    assert set(lines["budget"][:, 1]) == {64}
    frontier.plot(tmp_path / "frontier.svg")
    assert "planner" in (tmp_path / "frontier.svg").read_text()
    assert plot.render(figure, "png").startswith(b"\x89PNG")


@pytest.mark.parametrize("seconds", [1.5, 1.98])
def test_the_picture_shows_plans_that_take_less_time_than_the_step_as_it_is(seconds):
    faster = Point("80%", 80 * MIB, PlanReport(Plan((), "x"), measured_bytes=80 * MIB, flops=1000, seconds=seconds))
    frontier = Frontier(
        "cpu", Way("as it is", 100 * MIB, 1000, 2.0), (faster,), (Way("each block", 55 * MIB, 1300, 1.4),)
    )
    (axes,) = frontiers.frontier_figure(frontier).axes
    (left, right), shown = axes.get_xlim(), [x for line in axes.lines for x in line.get_xdata()]
    assert min(shown) == pytest.approx(-30) and max(shown) == 0
    assert min(shown) - left > 0.02 * (right - left) and right - max(shown) > 0.02 * (right - left)


def test_ways_by_hand_are_named_by_letters_with_a_key_and_neighbours_share_a_place():
    others = [Way(f"way {i}", (95 - 10 * i) * MIB, 1000 + 100 * i, 2.0) for i in range(4)]
    others += [Way("near the last", 64 * MIB, 1303, 2.0), Way("huge", 900 * MIB, 1000, 2.0)]
    frontier = Frontier("cpu", Way("as it is", 100 * MIB, 1000, 2.0), (), tuple(others))
    figure = frontiers.frontier_figure(frontier, measures=("flops", "seconds"))
    left, right = ([note.get_text() for note in axes.texts] for axes in figure.axes)
    assert left == ["a", "b", "c", "d, e"]
    assert right[-1].splitlines() == ["a  way 0", "b  way 1", "c  way 2", "d  way 3", "e  near the last"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_a_frontier_cuts_no_word(width):
    frontier = some_frontier()
    shown = table.to_text(frontiers.frontier_view(frontier), width)
    assert max(map(len, shown.splitlines())) <= width
    header, rows = frontiers.frontier_cells(frontier)
    words = shown.split()
    for cell in [*header, *itertools.chain(*rows)]:
        assert set(cell.split()) <= set(words), cell


def test_labels_of_crowded_points_cover_no_line_and_no_other_label():
    """Ways that lie on the planner's line, and near one another."""
    base = [(90, 2), (70, 15), (50, 40), (40, 90), (30, 200)]
    point = lambda peak, more: Point(
        f"{peak}%",
        peak * MIB,
        PlanReport(
            Plan((), "x"), budget=peak * MIB, measured_bytes=peak * MIB, flops=1000 + more, seconds=1 + more / 1000
        ),
    )
    beside = [(70, 16), (66, 20), (50, 42), (46, 55), (42, 80), (36, 130), (31, 200), (45, 210), (47, 220)]
    others = tuple(Way(f"way {i}", peak * MIB, 1000 + more, 1 + more / 1000) for i, (peak, more) in enumerate(beside))
    frontier = Frontier("cpu", Way("as it is", 100 * MIB, 1000, 1.0), tuple(point(*each) for each in base), others)
    figure = frontiers.frontier_figure(frontier)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    *labels, _ = axes.texts
    boxes = [label.get_window_extent(canvas.get_renderer()) for label in labels]
    assert len(boxes) > 6
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    line = next(line for line in axes.lines if line.get_label() == "planner")
    corners = Path(line.get_transform().transform(line.get_xydata()))
    assert not any(corners.intersects_bbox(box, filled=False) for box in boxes)


def test_pages_hold_all_of_it():
    page = plans.plan_page(report((0.5, 0.25)), GRAPH, "A <plan>", some_frontier())
    assert "A &lt;plan&gt;" in page and "keeps what goes in and out" in page and "each block" in page
    page = frontiers.frontier_page(some_frontier(), "Plans")
    assert "no plan fits" in page and page.count("<img") == 1
