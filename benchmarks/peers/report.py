"""The tables and the picture of the results."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.frameworks import PACKAGES
from benchmarks.peers.rows import Row, disagreements
from benchmarks.peers.tasks import TASKS
from jaxckpt.core.units import format_bytes
from jaxckpt.show.table import markdown

NAME = "peers"
COLOURS = {
    "jax": "black",
    "jaxckpt": "tab:blue",
    "linen": "tab:green",
    "nnx": "tab:olive",
    "equinox": "tab:orange",
    "haiku": "tab:purple",
    "keras": "tab:red",
    "torch": "tab:brown",
}
MARKERS = "osD^vPX*<>"
SHORT = [
    ("GPT", "jax", "jax.checkpoint, nothing", "`jax.checkpoint`; others on JAX alike"),
    ("GPT", "jax", "jax.checkpoint, dots", "`jax.checkpoint`, `dots_saveable`"),
    ("GPT", "jax", "jax.checkpoint, dots_no_batch", "`jax.checkpoint`, `dots_with_no_batch_dims_saveable`"),
    ("GPT", "linen", "nn.remat_scan", "flax `nn.remat_scan`"),
    ("GPT", "torch", "checkpoint", "PyTorch `checkpoint`"),
    ("GPT", "torch", "selective contexts: matmuls", "PyTorch selective contexts, matmuls kept"),
    ("GPT", "torch", "activation_memory_budget, 0.5", "PyTorch `activation_memory_budget`, 0.5"),
    ("GPT", "jaxckpt", "jaxckpt.plan, 60%", "`jaxckpt.plan`, 60%"),
    ("GPT", "jaxckpt", "jaxckpt.plan, peak of jax.checkpoint", "`jaxckpt.plan`, the peak of `jax.checkpoint`"),
    ("GPT", "jaxckpt", "jaxckpt.checkpoint, Policy: matmuls in bfloat16", "jaxckpt, matmuls kept as bfloat16"),
    ("LSTM", "jax", "jax.checkpoint, nothing", "`jax.checkpoint`; flax, equinox and haiku alike"),
    ("LSTM", "equinox", "equinox's checkpointed scan, 6", "equinox's checkpointed scan, 6 checkpoints"),
    ("LSTM", "torch", "checkpoint_sequential, sqrt", "PyTorch `checkpoint_sequential`, 6 segments"),
    ("LSTM", "jaxckpt", "jaxckpt.scan, Slots(6)", "`jaxckpt.scan`, `Slots(6)`"),
]
"""Rows of the README's table: task, framework, variant, and what they are called there."""


def ordered(data: Mapping[str, Any]) -> list[Row]:
    """Returns the saved rows, in the order of tasks and frameworks."""
    found = [Row(**each | {"lines": tuple(each["lines"])}) for each in data["rows"]]
    tasks, frameworks = list(TASKS), list(PACKAGES)
    return sorted(found, key=lambda row: (tasks.index(row.task), frameworks.index(row.framework)))


def table(rows: Sequence[Row]) -> str:
    """Returns the table of one model."""
    cells = [
        [
            row.framework,
            row.variant,
            format_bytes(row.bytes),
            f"{row.share:.0%}",
            f"{row.matmuls}" + (f" (+{row.more})" if row.more else ""),
            f"{row.time:.2f}",
            str(len(row.lines)),
        ]
        for row in rows
        if not row.error
    ]
    return markdown(["framework", "checkpoints", "memory", "of plain", "matmuls", "time", "lines"], cells)


def short(rows: Sequence[Row]) -> str:
    """Returns the README's table."""
    known = {(row.task, row.framework, row.variant): row for row in rows}
    cells = []
    for *where, label in SHORT:
        row = known[tuple(where)]
        again = f"{row.more} of {row.matmuls - row.more}"
        size = f"{format_bytes(row.bytes)}, {row.share:.0%}"
        cells.append([row.task, label, size, again, f"{row.time:.2f}", str(len(row.lines))])
    return markdown(["", "checkpoints", "memory", "matmuls run again", "time", "lines"], cells)


def text(about: str, data: Mapping[str, Any]) -> str:
    """Returns the report as Markdown."""
    rows = ordered(data)
    parts = ["# Checkpointing in other libraries, side by side", about.partition("own.\n\n")[2].strip()]
    parts += [f"- {line}" for line in disagreements(rows)]
    parts.append(f"![Matmuls against memory, a panel for each model]({NAME}.png)")
    for task, make in TASKS.items():
        mine = [row for row in rows if row.task == task]
        parts += [f"## {task}", (make.__doc__ or "").strip(), table(mine)]
    parts += ["## Checks", *_checks(rows, data["resident"])]
    parts += ["## What a user writes", "\n".join(_written(rows))]
    if left_out := _left_out(rows):
        parts += ["## Not measured", "\n".join(left_out)]
    measured = {row.framework for row in rows}
    absent = ", ".join(f"{name} ({why})" for name, why in data.get("absent", {}).items() if name not in measured)
    versions = ", ".join(f"{package} {version}" for package, version in sorted(data["versions"].items()))
    parts.append(f"{f'Not installed, so left out: {absent}. ' if absent else ''}Versions: {versions}.")
    return "\n\n".join(parts)


def _checks(rows: Sequence[Row], resident: Mapping[str, int | None]) -> list[str]:
    """Returns what the report says of how far its figures agree with one another."""
    good = [row for row in rows if not row.error]
    off = lambda row, name, first: abs(getattr(row, name) / getattr(first, name) - 1)
    firsts = {row.task: row for row in reversed(good)}
    worst = {name: max((off(row, name, firsts[row.task]) for row in good), default=0.0) for name in ("loss", "norm")}
    both = [row for row in good if row.compiled_matmuls is not None]
    same = sum(row.compiled_matmuls == row.matmuls for row in both)
    said = [
        f"Of all rows, values agree within {worst['loss']:.0e} and the norms of the gradients within "
        f"{worst['norm']:.0e}. In {same} of {len(both)} programs on JAX without loops, the compiled program has as many "
        "matmuls as the jaxpr.",
        "The resident memory of a process, which only builds and runs that row, rises in a step by:",
    ]
    known = {f"{row.framework}, {row.task}, {row.variant}": row.bytes for row in good}
    cells = [
        [where, format_bytes(known[where]), format_bytes(rises), f"{rises / known[where] - 1:+.0%}"]
        for where, rises in resident.items()
        if where in known and rises is not None
    ]
    return [*said, markdown(["row", "memory as above", "resident memory", "difference"], cells)]


def _written(rows: Sequence[Row]) -> list[str]:
    """Returns each variant's lines; variants with the same lines are together."""
    found: dict[tuple[str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        if row.lines:
            found.setdefault((row.framework, row.lines), []).append(row)
    return [
        f"- {_several(framework, same)}: {'; '.join(f'`{line}`' for line in lines)}"
        for (framework, lines), same in found.items()
    ]


def _left_out(rows: Sequence[Row]) -> list[str]:
    """Returns what has no figures, and why."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.error:
            found.setdefault((row.framework, row.error), []).append(row)
    return [f"- {_several(framework, same)}: {error}" for (framework, error), same in found.items()]


def _several(framework: str, rows: Sequence[Row]) -> str:
    variants = " / ".join(dict.fromkeys(row.variant for row in rows))
    return f"{framework}, {variants} ({', '.join(dict.fromkeys(row.task for row in rows))})"


def picture(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws matmuls against memory, as shares of those without checkpoints, a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if not row.error and row.variant != row.against]
    names = sorted(
        {(row.framework, row.variant): None for row in shown}, key=lambda name: list(PACKAGES).index(name[0])
    )
    of = {framework: [variant for each, variant in names if each == framework] for framework, _ in names}
    filled = ("jaxckpt", "torch")
    rings = [framework for framework in of if framework not in filled]  # in one place they are rings around each other
    figure, axes = plt.subplots(2, 2, figsize=(14, 8.5))
    for task, axis in zip(TASKS, axes.flat):
        for row in shown:
            if row.task == task:
                axis.plot(
                    100 * row.share,
                    100 * row.more / (row.matmuls - row.more),
                    MARKERS[of[row.framework].index(row.variant) % len(MARKERS)],
                    color=COLOURS[row.framework],
                    markersize=8 + (0 if row.framework in filled else 2.5 * rings.index(row.framework)),
                    markerfacecolor=COLOURS[row.framework] if row.framework in filled else "none",
                    alpha=0.85,
                )
        axis.axvline(100, color="gray", linewidth=0.8, linestyle=":")
        axis.set_title(task)
        axis.margins(y=0.12)
        axis.set_xlim(left=0)
        axis.set_xlabel("memory, % of the same framework without checkpoints")
        axis.set_ylabel("matmuls run again, %")
        axis.grid(alpha=0.3)
    handles = [
        plt.Line2D(
            [],
            [],
            linestyle="",
            marker=MARKERS[of[framework].index(variant) % len(MARKERS)],
            color=COLOURS[framework],
            markerfacecolor=COLOURS[framework] if framework in filled else "none",
            label=variant if framework in variant else f"{framework}: {variant}",
        )
        for framework, variant in names
    ]
    figure.tight_layout(rect=(0, 0, 0.72, 1))
    figure.legend(handles=handles, loc="center right", fontsize=9, frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
