"""How far does the peak of a stretch fall in tiles? Peak and FLOPs against the number of tiles, on three targets.

    python -m benchmarks.tiles                          # writes benchmarks/results/tiles.md and tiles.json
    python -m benchmarks.tiles head --targets cuda:h100 --tiles 1 8 32

Three stretches: a language model's head with its loss (gradients are computed in the forward pass), two MLPs over
tokens, and attention over queries with a causal mask (both run each tile again). What is measured is the value and the
gradients in all arguments, compiled. FLOPs are of the traced program. With one tile the function is left as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import track

import jaxckpt
from benchmarks.reporting import save
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.targets import start_backend

TARGETS = ("cpu", "cuda:h100", "tpu:v5e:2x2")
TILES = (1, 2, 4, 8, 16, 32)
BFLOAT16 = jnp.bfloat16


@dataclass(frozen=True)
class Stretch:
    """A function to be tiled.

    Attributes:
      title: what it is, with sizes.
      fun: returns a scalar loss of `of`, a function as tiled or as it is, and arguments.
      of: the function.
      in_axes, out_axes: as of `jaxckpt.tile`.
      args: shapes.
    """

    title: str
    fun: Callable[..., Any]
    of: Callable[..., Any]
    in_axes: tuple[int | None, ...]
    out_axes: int
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """One stretch in so many tiles on a target: peak in bytes, FLOPs of the traced step."""

    stretch: str
    target: str
    tiles: int
    peak_bytes: int
    flops: int


def head(w: Any, x: Any, labels: Any) -> Any:
    """A language model's head: the mean cross entropy."""
    losses = jnp.take_along_axis(jax.nn.log_softmax((x @ w).astype(jnp.float32)), labels[:, None], -1)
    return -jnp.mean(losses)


def mlps(weights: Any, x: Any) -> Any:
    """Residual MLPs over tokens."""
    for up, down in weights:
        x = x + jax.nn.gelu(x @ up) @ down
    return x


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1).astype(q.dtype), v)


def _squares(fun: Callable[..., Any], *args: Any) -> Any:
    return jnp.sum(jnp.square(fun(*args).astype(jnp.float32)))


def _shape(*sizes: int, dtype: Any = BFLOAT16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def stretches(tokens: int = 8192, words: int = 128256) -> dict[str, Stretch]:
    """Returns the stretches by name; smaller ones for fewer tokens and words."""
    of_head = _shape(768, words), _shape(tokens, 768), _shape(tokens, dtype=jnp.int32)
    layers = tuple((_shape(1024, 4096), _shape(4096, 1024)) for _ in range(2))
    heads = (_shape(2, tokens // 4, 12, 64),) * 3
    return {
        "head": Stretch(
            f"head: {tokens:,} tokens of 768, {words:,} words",
            lambda fun, *args: fun(*args),
            head,
            (None, 0, 0),
            0,
            of_head,
        ),
        "mlp": Stretch(
            f"two MLPs: {4 * tokens:,} tokens of 1,024, hidden 4,096",
            _squares,
            mlps,
            (None, 0),
            0,
            (layers, _shape(4 * tokens, 1024)),
        ),
        "attention": Stretch(
            f"attention over queries: 2 x {tokens // 4:,} tokens, 12 heads of 64",
            _squares,
            attention,
            (1, None, None),
            1,
            heads,
        ),
    }


def measured(name: str, stretch: Stretch, target: str, tiles: int) -> Row:
    """Compiles the value and gradients of a stretch in so many tiles."""
    of = stretch.of
    if tiles > 1:
        of = jaxckpt.tile(of, in_axes=stretch.in_axes, tiles=tiles, out_axes=stretch.out_axes)
    smooth = [i for i, arg in enumerate(stretch.args) if jnp.issubdtype(jax.tree.leaves(arg)[0].dtype, jnp.inexact)]
    step = jax.value_and_grad(lambda *args: stretch.fun(of, *args), tuple(smooth))
    report = jaxckpt.measure(step, *stretch.args, target=target, generate_code=False)
    return Row(name, target, tiles, report.peak_bytes, jaxckpt.count_flops(step, *stretch.args))


def table(found: dict[str, Stretch], rows: list[Row]) -> str:
    """Returns the table in Markdown."""
    tiles = sorted({row.tiles for row in rows})
    lines = ["# Peak against the number of tiles", "", "Value and gradients in all arguments, bfloat16 parameters.", ""]
    lines += [f"| | target | {' | '.join(f'{n} tiles' if n > 1 else 'as it is' for n in tiles)} | FLOPs |"]
    lines += ["|---|---|" + "---:|" * (len(tiles) + 1)]
    for name, target in dict.fromkeys((row.stretch, row.target) for row in rows):
        own = {row.tiles: row for row in rows if (row.stretch, row.target) == (name, target)}
        more = own[tiles[-1]].flops / own[tiles[0]].flops - 1
        cells = [format_bytes(own[n].peak_bytes) for n in tiles]
        lines.append(f"| {found[name].title} | {target} | {' | '.join(cells)} | {more:+.1%} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the measurements and writes the table."""
    found = stretches()
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("stretches", nargs="*", default=list(found), help=f"of {', '.join(found)}")
    arguments.add_argument("--targets", nargs="+", default=list(TARGETS))
    arguments.add_argument("--tiles", nargs="+", type=int, default=list(TILES))
    arguments.add_argument("--no-save", action="store_true", help="only print")
    options = arguments.parse_args()
    start_backend()
    cases = [(name, target, n) for name in options.stretches for target in options.targets for n in options.tiles]
    rows = [measured(name, found[name], target, n) for name, target, n in track(cases, description="compiling")]
    text = table(found, rows)
    if not options.no_save:
        save("tiles", text, [asdict(row) for row in rows])
    print(text)


if __name__ == "__main__":
    main()
