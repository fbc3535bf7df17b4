"""What does a scan's gradient cost in time and in memory, schedule by schedule?

    pip install equinox matplotlib                   # equinox is only needed for the comparison
    python -m benchmarks.scan                        # about an hour on a quiet machine; writes results/scan.*
    python -m benchmarks.scan --lengths 1024 --steps lstm --rounds 3 --no-save

What an earlier run has saved is not measured again, unless `--anew` is given.

Three steps: an MLP block, an LSTM, and one whose work is tiny. For each, in one process and interleaved round by round:
`lax.scan`, `lax.scan` of `jax.checkpoint`, scans nested by hand, equinox's checkpointed scan, and `jaxckpt.scan` with
`Slots(n)`. Time is that of the value and all gradients; bytes are the compiled temporaries; steps are counted as they
run, in a program of their own.

The question is what a given memory buys. So for each level that equinox or a nest reaches, the table has the `Slots(n)`
that takes no more temporaries than that and, among those, the fewest steps; the ratio is the median over rounds of the
two times in the same round.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import reporting
from jaxckpt.core.units import format_bytes
from jaxckpt.schedules import Slots
from jaxckpt.show.table import markdown
from jaxckpt.transforms.scan import scan

STEPS = ("mlp", "lstm", "tiny")
LENGTHS = (100, 1024, 10007)
CHECKPOINTS = (8, 16, 32, 64, 128)
SLOTS = (*range(2, 16, 2), *range(16, 32, 4), *range(32, 64, 8), *range(64, 160, 16), *range(160, 257, 32))
SLOTS += (512, 1024, 2048, 4096)
ROUNDS, LONG_ROUNDS = 7, 3
"""Rounds; where a run takes some ten seconds, at lengths from 10,000 on, fewer."""

Run = Callable[..., Any]


@dataclass(frozen=True)
class Problem:
    """A step, what it starts from, and what is differentiated."""

    name: str
    step: Callable[[Any, Any, Any], Any]
    weights: Any
    init: Any
    xs: Any

    @property
    def carry_bytes(self) -> int:
        """Bytes of one carry."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.init))


def problem(name: str, length: int, batch: int | None = None) -> Problem:
    """Returns one of the three problems; random numbers, the same each time. A batch of one row takes the same steps,
    only faster.
    """
    keys = iter(jax.random.split(jax.random.key(0), 8))
    draw = lambda *shape, scale=0.05: jax.random.normal(next(keys), shape) * scale
    batch, width = batch or (64 if name == "mlp" else 32), 128
    if name == "mlp":
        weights = {"up": draw(width, 4 * width), "bias": draw(4 * width), "down": draw(4 * width, width)}
        return Problem(name, _mlp, weights, draw(batch, width, scale=1.0), None)
    if name == "lstm":
        weights = {"x": draw(width, 4 * width), "h": draw(width, 4 * width), "bias": draw(4 * width)}
        init = (jnp.zeros((batch, width)), jnp.zeros((batch, width)))
        return Problem(name, _lstm, weights, init, draw(length, batch, width, scale=1.0))
    return Problem(name, _tiny, {"rate": jnp.float32(0.3)}, draw(2 * batch, scale=1.0), None)


def _mlp(weights: Any, h: Any, x: Any) -> Any:
    return h + 0.1 * jnp.tanh(h @ weights["up"] + weights["bias"]) @ weights["down"]


def _lstm(weights: Any, carry: Any, x: Any) -> Any:
    h, c = carry
    i, f, g, o = jnp.split(x @ weights["x"] + h @ weights["h"] + weights["bias"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _tiny(weights: Any, h: Any, x: Any) -> Any:
    return h + 0.01 * jnp.sin(weights["rate"] * h)


# ---------------------------------------------------------------------------------------------------------- contestants


def by_hand(segments: tuple[int, ...]) -> Run:
    """Returns a scan nested by hand: so many segments, of so many segments, ..., each under jax.checkpoint; left-over
    steps come last.
    """

    def run(f: Callable, init: Any, xs: Any, length: int) -> Any:
        def nest(carry: Any, rows: Any, count: int, levels: tuple[int, ...]) -> Any:
            if not levels:
                return lax.scan(f, carry, rows, length=count)[0]
            size = count // levels[0]
            main = size * levels[0]
            first = jax.tree.map(lambda x: x[:main].reshape(levels[0], size, *x.shape[1:]), rows)
            inner = jax.checkpoint(lambda c, r: (nest(c, r, size, levels[1:]), None), prevent_cse=False)
            carry = lax.scan(inner, carry, first, length=levels[0])[0]
            if main == count:
                return carry
            return lax.scan(f, carry, jax.tree.map(lambda x: x[main:], rows), length=count - main)[0]

        return nest(init, xs, length, segments), None

    return run


def nests(length: int) -> list[tuple[int, ...]]:
    """Returns how one would nest by hand: two levels around the square root, three around the cube root."""
    root, cube = round(length**0.5), round(length ** (1 / 3))
    return [(root,), (2 * root,), (4 * root,), (cube, cube), (2 * cube, cube)]


def contestants(length: int) -> dict[str, Run]:
    """Returns name -> run(f, init, xs, length) of everything but `Slots`."""
    import equinox.internal as eqxi

    found: dict[str, Run] = {
        "lax.scan": lambda f, init, xs, length: lax.scan(f, init, xs, length=length),
        "checkpointed steps": lambda f, init, xs, length: lax.scan(
            jax.checkpoint(f, prevent_cse=False), init, xs, length=length
        ),
    }
    found |= {f"nest {' x '.join(map(str, levels))}": by_hand(levels) for levels in nests(length)}
    for count in CHECKPOINTS:
        if count < length:
            found[f"equinox {count}"] = functools.partial(_equinox, eqxi, count)
    return found


def _equinox(eqxi: Any, count: int, f: Callable, init: Any, xs: Any, length: int) -> Any:
    return eqxi.scan(f, init, xs, length=length, kind="checkpointed", checkpoints=count)


def slotted(count: int) -> Run:
    """Returns `jaxckpt.scan` with so many slots."""
    return lambda f, init, xs, length: scan(f, init, xs, length, schedule=Slots(count))


# ---------------------------------------------------------------------------------------------------------- measurement


@dataclass
class Entry:
    """One contestant on one problem."""

    name: str
    temp_bytes: int
    steps: int
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds, the median over rounds."""
        return statistics.median(self.seconds) if self.seconds else float("nan")


def gradient(this: Problem, length: int, run: Run, tick: Callable[[], None] | None = None) -> Any:
    """Compiles the value and gradients; `tick` is called each time that the step runs."""

    def loss(weights: Any, init: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            carry = this.step(weights, carry, x)
            if tick is not None:
                jax.debug.callback(lambda _: tick(), jax.tree.leaves(carry)[0].ravel()[0])
            return carry, None

        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(run(body, init, xs, length)[0]))

    which = (0, 1) if this.xs is None else (0, 1, 2)
    return jax.jit(jax.value_and_grad(loss, argnums=which)).lower(this.weights, this.init, this.xs).compile()


def count(this: Problem, length: int, run: Run) -> int:
    """Returns how often the step runs in the value and gradient."""
    seen = [0]

    def tick() -> None:
        seen[0] += 1

    jax.block_until_ready(gradient(this, length, run, tick)(this.weights, this.init, this.xs))
    jax.effects_barrier()
    return seen[0]


def measure(name: str, length: int, rounds: int) -> tuple[list[Entry], list[Entry]]:
    """Returns the contestants and the slots that are compared with them, timed."""
    this, narrow = problem(name, length), problem(name, length, batch=1)
    say(f"{name}, {length} steps")
    programs: dict[str, Any] = {}
    runs = contestants(length) | {f"Slots({n})": slotted(n) for n in SLOTS if n <= length}

    def compiled(label: str) -> Entry:
        programs[label] = gradient(this, length, runs[label])
        entry = Entry(label, programs[label].memory_analysis().temp_size_in_bytes, count(narrow, length, runs[label]))
        say(f"  {label}: {format_bytes(entry.temp_bytes)}, {entry.steps:,} steps")
        return entry

    rivals = [compiled(label) for label in contestants(length)]
    ours = [compiled(label) for label in runs if label.startswith("Slots")]
    chosen = {match.name: match for rival in rivals if (match := fitting(rival, ours))}
    expected: Any = None
    for entry in [*rivals, *chosen.values()]:
        result = programs[entry.name](this.weights, this.init, this.xs)
        expected = result if expected is None else expected
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(result)):
            error = float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(a)), 1e-6))
            assert error < 1e-3, f"{entry.name} disagrees with lax.scan by {error:.1e}"
    for entry in chosen.values():  # how many steps are in a run depends on what a step keeps, so on the batch
        entry.steps = count(this, length, runs[entry.name])
    for done in range(rounds):
        say(f"  round {done + 1} of {rounds}")
        for entry in [*rivals, *chosen.values()]:
            start = time.perf_counter()
            jax.block_until_ready(programs[entry.name](this.weights, this.init, this.xs))
            entry.seconds.append(time.perf_counter() - start)
    return rivals, list(chosen.values())


def fitting(rival: Entry, ours: list[Entry]) -> Entry | None:
    """Returns the slots that take no more temporaries than a rival and, among those, the fewest steps and then the
    fewest bytes.
    """
    return min(
        (e for e in ours if e.temp_bytes <= rival.temp_bytes), key=lambda e: (e.steps, e.temp_bytes), default=None
    )


def compile_seconds(length: int, repeats: int = 7) -> float:
    """Returns the median time to trace and compile the LSTM's gradient with `Slots(32)`."""
    this, taken = problem("lstm", 100), []
    for _ in range(repeats):
        jax.clear_caches()
        start = time.perf_counter()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (this.weights, this.init))
        rows = jax.ShapeDtypeStruct((length, *this.xs.shape[1:]), jnp.float32)

        def loss(weights: Any, init: Any, xs: Any, length: int = length) -> Any:
            out = slotted(32)(lambda c, x: (_lstm(weights, c, x), None), init, xs, length)
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(out[0]))

        jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*shapes, rows).compile()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------------- report


def ratio(rival: Entry, ours: Entry) -> float:
    """Returns the median over rounds of our time by theirs."""
    return statistics.median(a / b for a, b in zip(ours.seconds, rival.seconds))


def table(length: int, rivals: list[Entry], ours: list[Entry]) -> str:
    """Returns the comparison at each rival's memory as a table in Markdown."""
    header = ["", "temporaries", "steps", "ms", "jaxckpt", "temporaries", "steps", "ms", "time ratio"]
    rows = []
    for rival in rivals:
        cells = [rival.name, format_bytes(rival.temp_bytes), f"{rival.steps:,}", f"{1e3 * rival.median:.1f}"]
        match = fitting(rival, ours)
        if match is None:
            cells += ["none fits", "", "", "", ""]
        else:
            cells += [
                match.name,
                format_bytes(match.temp_bytes),
                f"{match.steps:,}",
                f"{1e3 * match.median:.1f}",
                f"{ratio(rival, match):.2f}",
            ]
        rows.append(cells)
    return markdown(header, rows)


def picture(results: list[tuple[str, int, list[Entry], list[Entry]]], path: Any) -> None:
    """Draws time over temporaries, a panel for each problem."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    names = list(dict.fromkeys(name for name, *_ in results))
    lengths = list(dict.fromkeys(length for _, length, *_ in results))
    figure, axes = plt.subplots(len(names), len(lengths), figsize=(4.6 * len(lengths), 3.5 * len(names)), squeeze=False)
    for name, length, rivals, ours in results:
        axis = axes[names.index(name)][lengths.index(length)]
        kinds = {
            "equinox": ([e for e in rivals if e.name.startswith("equinox")], "o-", "tab:orange"),
            "nested by hand": ([e for e in rivals if e.name.startswith("nest")], "s", "tab:green"),
            "lax.scan, steps checkpointed": ([e for e in rivals if e.name == "checkpointed steps"], "^", "tab:gray"),
            "lax.scan": ([e for e in rivals if e.name == "lax.scan"], "v", "black"),
            "jaxckpt, Slots(n)": (ours, "D-", "tab:blue"),
        }
        for label, (entries, marker, colour) in kinds.items():
            entries = sorted(entries, key=lambda e: e.temp_bytes)
            axis.plot(
                [e.temp_bytes / 2**20 for e in entries],
                [1e3 * e.median for e in entries],
                marker,
                color=colour,
                label=label,
                markersize=5,
            )
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_ylim(bottom=0)
        axis.set_title(f"{name}, {length:,} steps")
        axis.set_xlabel("compiled temporaries, MiB")
        axis.set_ylabel("value and gradients, ms")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", default=STEPS, choices=STEPS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS} by default, {LONG_ROUNDS} at lengths from 10,000 on")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--anew", action="store_true", help="measure again what an earlier run has saved")
    options = parser.parse_args()

    saved = {} if options.anew or options.no_save else _read()
    for name in options.steps:
        for length in options.lengths:
            if (name, length) not in saved:
                saved[name, length] = measure(
                    name, length, options.rounds or (ROUNDS if length < 10_000 else LONG_ROUNDS)
                )
                if not options.no_save:
                    _write(saved)
    chosen = {(name, length): saved[name, length] for name in options.steps for length in options.lengths}
    print(_text(chosen if options.no_save else saved))
    short, long = compile_seconds(100), compile_seconds(100_000)
    compiling = (
        f"`Slots(32)` of the LSTM: {short:.2f} s at 100 steps, {long:.2f} s at 100,000, a ratio of {long / short:.2f}."
    )
    print(f"\n{compiling}")
    if not options.no_save:
        _write(saved, compiling)


Results = dict[tuple[str, int], tuple[list[Entry], list[Entry]]]


def _text(results: Results, compiling: str | None = None) -> str:
    """Returns all tables in Markdown."""
    text = [
        "# Scans: time and memory of the gradient",
        "",
        *(part.replace("\n", " ") for part in __doc__.split("\n\n")[3:5]),
    ]
    for (name, length), (rivals, ours) in results.items():
        carry = problem(name, 1).carry_bytes
        text += ["", f"## {name}, {length:,} steps, a carry of {format_bytes(carry)}", "", table(length, rivals, ours)]
    return "\n".join([*text, "", "## Compile time", "", compiling] if compiling else text)


def _read() -> Results:
    """Returns what an earlier run with this version of JAX has saved."""
    path = reporting.RESULTS / "scan.json"
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    if saved["environment"]["jax"] != jax.__version__:
        return {}
    entries = lambda rows: [Entry(**row) for row in rows]
    return {(one["step"], one["length"]): (entries(one["rivals"]), entries(one["slots"])) for one in saved["results"]}


def _write(results: Results, compiling: str | None = None) -> None:
    """Saves tables, figures and picture."""
    order = [(name, length) for name in STEPS for length in sorted({length for _, length in results})]
    results = {key: results[key] for key in order if key in results}
    rows = [
        {"step": name, "length": length, "rivals": [asdict(e) for e in rivals], "slots": [asdict(e) for e in ours]}
        for (name, length), (rivals, ours) in results.items()
    ]
    reporting.save("scan", _text(results, compiling), rows)
    picture([(name, length, *each) for (name, length), each in results.items()], reporting.RESULTS / "scan.png")


if __name__ == "__main__":
    main()
