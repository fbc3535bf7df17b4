"""Pictures with matplotlib's objects, without pyplot, so that there is no global state and no display.

`*_figure` functions make a figure. `save_*` functions write it to a file, whole or not at all; the file's suffix
selects the format.
"""

from __future__ import annotations

import io
import itertools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxckpt._errors import ArgumentError, MissingPackageError, did_you_mean
from jaxckpt.core.files import write_whole
from jaxckpt.core.units import parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend
    from matplotlib.text import Annotation

    from jaxckpt.memory.compare import Comparison, Row
    from jaxckpt.memory.report import MemoryReport

INK, GREY, FAINT, FRONT = "#1f2933", "#7b8794", "#e4e7eb", "#0967d2"
# Okabe and Ito's palette, which is also for readers with colour blindness; without yellow, which is too light for
# lines.
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "jaxckpt",  # equal figures give equal files
}


def save_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Writes the picture of a comparison: peak against recomputation, with the Pareto front.

    Raises:
      ArgumentError: matplotlib writes no files with that suffix, or the folder does not exist.
      MissingPackageError: matplotlib is not installed.
    """
    save(path, lambda: comparison_figure(comparison))


def save_report(report: MemoryReport, path: str | os.PathLike[str]) -> None:
    """Writes the picture of a report: live bytes over the schedule, and the largest buffers at the peak. Raises as
    `save_comparison` does.
    """
    save(path, lambda: report_figure(report))


def save(path: str | os.PathLike[str], make: Callable[[], Figure]) -> None:
    """Writes the figure that `make` returns. Raises as `save_comparison` does, before it calls `make`."""
    suffix = check_suffix(path)
    write_whole(path, render(make(), suffix))


def check_suffix(path: str | os.PathLike[str]) -> str:
    """Returns the kind of picture for a file's name, such as "png". Raises as `save_comparison` does."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    suffix = pathlib.Path(path).suffix.lstrip(".").lower()
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if suffix not in known:
        raise ArgumentError(
            "plot",
            "a file name that ends as a kind of picture does, such as .png, .svg or .pdf",
            str(path),
            did_you_mean(suffix, known),
        )
    return suffix


def render(figure: Figure, suffix: str, *, outlines: bool = False) -> bytes:
    """Returns a figure as the content of a file.

    Args:
      figure: what to draw.
      suffix: "png", "svg", "pdf" ...
      outlines: whether letters in an SVG are outlines, which look the same without the font, or text, which can be
        searched.
    """
    import matplotlib

    buffer = io.BytesIO()
    undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix, {})
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "path" if outlines else "none"}):
        figure.savefig(buffer, format=suffix, metadata=undated)
    return buffer.getvalue()


def comparison_figure(comparison: Comparison, *, title: bool = True) -> Figure:
    """Returns the figure of peak memory against recomputation, with or without a title.

    Filled points are the Pareto front, with its staircase. The band at the bottom is the arguments, which no checkpoint
    makes smaller.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    rows = list(comparison)
    unit, divisor = unit_of(max(row.peak_bytes for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.8), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        if title:
            add_title(axes, f"Memory against recomputation on {comparison.target}")
        axes.set_xlabel("recomputed FLOPs, in % of the leanest variant's step")
        axes.set_ylabel(f"compiled peak ({unit})")
        axes.grid(color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)

        top = max(row.peak_bytes for row in rows) / divisor
        right = max(max(row.recompute for row in rows) * 100, 1.0)
        axes.set_xlim(-0.06 * right, 1.22 * right)
        axes.set_ylim(0, 1.14 * top)
        corners = _staircase(axes, comparison, divisor, 1.22 * right)
        _floor(axes, comparison, divisor, unit)
        legend = axes.legend(loc="upper right", frameon=False, handlelength=1.6)
        for row in rows:
            axes.plot(
                100 * row.recompute,
                row.peak_bytes / divisor,
                "o",
                markersize=7.5,
                markerfacecolor=FRONT if row.on_front else "white",
                markeredgecolor=FRONT if row.on_front else GREY,
                markeredgewidth=1.4,
                zorder=4,
            )
        _label(figure, axes, legend, rows, divisor, corners)
    return figure


def _staircase(axes: Axes, comparison: Comparison, divisor: float, right: float) -> list[tuple[float, float]]:
    """Draws the Pareto front and returns its corners."""
    corners: list[tuple[float, float]] = []
    for row in sorted(comparison.pareto(), key=lambda row: row.recompute_flops):
        x, y = 100 * row.recompute, row.peak_bytes / divisor
        corners += [(x, corners[-1][1]), (x, y)] if corners else [(x, y)]
    corners.append((right, corners[-1][1]))
    axes.plot(*zip(*corners), color=FRONT, alpha=0.55, linewidth=1.4, label="Pareto front", zorder=3)
    return corners


def _floor(axes: Axes, comparison: Comparison, divisor: float, unit: str) -> None:
    given = comparison.baseline.report.argument_bytes / divisor
    axes.axhspan(0, given, color="#d2d8de", alpha=0.6, linewidth=0, zorder=1, label=f"arguments, {given:.3g} {unit}")


def _label(
    figure: Figure,
    axes: Axes,
    legend: Legend,
    rows: Sequence[Row],
    divisor: float,
    lines: Sequence[tuple[float, float]],
) -> None:
    """Writes the name of each point at the nearest place where it covers no point, no line and no other name.

    Points at the same place get one label.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # fixes the layout, because everything below is measured in it
    renderer = canvas.get_renderer()
    inside = axes.get_window_extent(renderer)
    scale = figure.dpi / 72
    to_pixels, to_data = axes.transData.transform, axes.transData.inverted().transform
    points = [to_pixels((100 * row.recompute, row.peak_bytes / divisor)) for row in rows]
    taken = [Bbox.from_bounds(x - 5 * scale, y - 5 * scale, 10 * scale, 10 * scale) for x, y in points]
    taken += [Bbox([to_pixels(a), to_pixels(b)]).padded(scale) for a, b in itertools.pairwise(lines)]
    taken.append(legend.get_window_extent(renderer))
    # First the front, because readers look for it. Then from the top to the bottom.
    order = sorted(range(len(rows)), key=lambda i: (not rows[i].on_front, -points[i][1], rows[i].recompute))
    labelled: set[int] = set()
    for i in order:
        if i in labelled:
            continue
        x, y = points[i]
        here = [j for j in order if max(abs(points[j][0] - x), abs(points[j][1] - y)) < 4 * scale and j not in labelled]
        labelled.update(here)
        name = ", ".join(rows[j].name for j in sorted(here))
        text = axes.text(0, 0, name, fontsize=8.5, color=FRONT if rows[i].on_front else INK, transform=None, zorder=5)
        at_origin = text.get_window_extent(renderer)
        size = (at_origin.width, at_origin.height)
        places = [(reach, Bbox.from_bounds(x + dx, y + dy, *size)) for reach, dx, dy in _places(*size, scale)]
        free = (
            (reach, box)
            for reach, box in places
            if inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if not any(box.padded(1.5 * scale).overlaps(other) for other in taken)
        )
        reach, box = next(free, places[0])  # if no place is free, the first place
        taken.append(box)
        text.set_transform(axes.transData)
        left, base = to_data((box.x0 - at_origin.x0, box.y0 - at_origin.y0))
        text.set_position((left, base))
        if reach > 12 * scale:
            ends = zip(to_data((x, y)), to_data((min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1))))
            axes.plot(*ends, color=GREY, linewidth=0.6, zorder=2)


def part_labels(figure: Figure, labels: Sequence[Annotation]) -> None:
    """Moves labels of points to where they cover no line, no point, no legend and no other label, as far as there is
    room. Their positions are offsets in points.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    if not labels:
        return
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # fixes the layout, because everything below is measured in it
    renderer, scale = canvas.get_renderer(), figure.dpi / 72
    taken: dict[Any, list[Bbox]] = {}
    for panel in figure.axes:
        legend = panel.get_legend()
        taken[panel] = [] if legend is None else [legend.get_window_extent(renderer)]
        for line in panel.lines:
            # Along a line, a box every few pixels; around a marker, a larger one.
            corners = line.get_transform().transform(line.get_xydata())
            round_ = 4 if line.get_marker() not in ("None", "", None) else 1
            taken[panel] += [Bbox.from_bounds(x, y, 0, 0).padded(round_ * scale) for x, y in corners]
            if line.get_linestyle() not in ("None", "", " "):
                for (x0, y0), (x1, y1) in itertools.pairwise(corners):
                    steps = max(int(max(abs(x1 - x0), abs(y1 - y0)) / (4 * scale)), 1)
                    along = [(x0 + (x1 - x0) * k / steps, y0 + (y1 - y0) * k / steps) for k in range(steps + 1)]
                    taken[panel] += [Bbox.from_bounds(x, y, 0, 0).padded(scale) for x, y in along]
    for label in labels:
        axes: Any = label.axes
        inside, size = axes.get_window_extent(renderer), label.get_window_extent(renderer)
        places = [(4.0, 4.0), *((dx / scale, dy / scale) for _, dx, dy in _places(size.width, size.height, scale))]
        best = places[0]
        for offset in places:
            label.set_position(offset)
            box = label.get_window_extent(renderer)
            within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if within and not any(box.overlaps(other) for other in taken[axes]):
                best = offset
                break
        label.set_position(best)
        taken[axes].append(label.get_window_extent(renderer))


def _places(width: float, height: float, scale: float) -> list[tuple[float, float, float]]:
    """Returns (distance, dx, dy) from a point to the lower left corner of its label, the nearest first."""
    places = []
    for step in range(1, 9):
        gap = (3 + 5 * step) * scale
        for dx, dy in (
            (gap, -height / 2),
            (gap * 0.7, gap * 0.6),
            (gap, -gap * 0.7 - height),
            (-width / 2, gap),
            (-width / 2, -gap - height),
            (-width - gap, -height / 2),
            (-width - gap, gap * 0.7),
            (-width - gap, -gap * 0.7 - height),
        ):
            places.append((gap, dx, dy))
    return places


def timelines_figure(reports: Mapping[str, MemoryReport], *, title: bool = True) -> Figure:
    """Returns the figure of live bytes over the compiled schedule: a line for each report, with its peak.

    Programs differ in length, so each goes from 0 to 100% of its own schedule. Equal programs share a line. The legend
    has the compiler's peaks, which count padding and holes between buffers. The lines do not count them.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    targets = sorted({report.target for report in reports.values()})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.2), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        if title:
            add_title(axes, f"Live bytes over the step on {', '.join(targets)}")
        draw_timelines(axes, reports)
    return figure


def report_figure(report: MemoryReport, *, buffers: int = 8) -> Figure:
    """Returns the figure of one report: live bytes over the compiled schedule, and below it the largest buffers that
    are live at the peak.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    from jaxckpt.show.table import buffer_cells

    _, cells = buffer_cells(report, buffers)
    sizes = [parse_bytes(row[0]) for row in cells]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 6.4), dpi=150, layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=(3, 2))
        add_title(above, f"Live bytes over the step on {report.target}")
        draw_timelines(above, {"step": report})
        add_title(below, "Live at the peak, the largest")
        unit, divisor = unit_of(max(sizes, default=1))
        below.barh(range(len(cells)), [size / divisor for size in sizes], color=FRONT, height=0.62)
        below.set_yticks(
            range(len(cells)), [f"{count} × {array}" if count != "1" else array for _, count, _, array, *_ in cells]
        )
        below.invert_yaxis()
        below.set_xlabel(f"bytes ({unit})")
        below.set_xlim(0, 1.9 * max(sizes, default=1) / divisor)
        for place, (size, (_, _, kind, _, operation, source)) in enumerate(zip(sizes, cells)):
            words = f"{kind}: {operation}  {source}".rstrip()
            below.annotate(
                words[:64], (size / divisor, place), (4, 0), textcoords="offset points", va="center", fontsize=7.5
            )
    return figure


def draw_timelines(axes: Axes, reports: Mapping[str, MemoryReport]) -> None:
    """Draws live bytes over the compiled schedule: a line for each report; within the style of all pictures."""
    lines: dict[tuple[int, ...], list[str]] = {}
    for name, report in reports.items():
        lines.setdefault(report.timeline().live_bytes, []).append(name)
    top = max(report.peak_bytes for report in reports.values())
    unit, divisor = unit_of(top)
    axes.set_xlabel("position in the compiled schedule, in %")
    axes.set_ylabel(f"live ({unit})")
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 1.1 * top / divisor)
    for i, (live, names) in enumerate(lines.items()):
        report = reports[names[0]]
        colour, dashes = LINES[i % len(LINES)], ("-", "--", ":")[i // len(LINES) % 3]
        x = [100 * k / max(len(live) - 1, 1) for k in range(len(live))]
        y = [count / divisor for count in live]
        label = f"{', '.join(names)}: {report.peak_bytes / divisor:.3g} {unit}"
        axes.plot(x, y, linewidth=1.5, drawstyle="steps-post", label=label, color=colour, linestyle=dashes)
        if y:
            at = report.timeline().peak_position
            axes.plot(x[at], y[at], "o", color=colour, markersize=5, zorder=4)
    axes.legend(title="compiled peak", loc="best", frameon=True, framealpha=0.9, edgecolor=FAINT, fontsize=8.5)


def add_title(axes: Axes, text: str) -> None:
    """Puts a title above the left end of the axes."""
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", pad=12)


def unit_of(largest: float) -> tuple[str, float]:
    """Returns (name, bytes) of the unit for sizes up to `largest`."""
    for unit, size in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if largest >= size:
            return unit, size
    return "bytes", 1.0


def require_matplotlib() -> None:
    """Raises MissingPackageError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "Pictures need matplotlib, which is not installed. Install it with: pip install 'jaxckpt[plot]'."
        ) from error
