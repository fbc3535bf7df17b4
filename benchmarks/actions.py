"""What each action keeps of a value, compiled: 16 MLP layers (2048 x 1024, four times as wide, bfloat16), scanned and
unrolled, of which "up" is saved, compressed, offloaded, or both.

    python -m benchmarks.actions

No accelerator is needed: the programs are compiled for an H100 and for a TPU v5e. Results: results/actions.md, with the
raw figures in results/actions.json.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

import jaxckpt
from jaxckpt import OFFLOAD, RECOMPUTE, SAVE, Action, Policy, compress, tag
from jaxckpt.actions.base import StoredArray

LAYERS, ROWS, WIDTH = 16, 2048, 1024
UP = StoredArray((ROWS, 4 * WIDTH), jnp.dtype(jnp.bfloat16), ROWS * 4 * WIDTH * 2)
TARGETS = ("cuda:h100", "tpu:v5e:2x2")
ACTIONS: dict[str, Action] = {
    "recomputed": RECOMPUTE,
    "saved": SAVE,
    "float8": compress("float8_e4m3fn"),
    "int8": compress("int8"),
    "int4": compress("int4"),
    "offloaded": OFFLOAD,
    "int8, offloaded": compress("int8") | OFFLOAD,
}
RESULTS = pathlib.Path(__file__).parent / "results"
MIB = 2**20


def loss(ws: Any, x: Any, policy: Policy, scanned: bool) -> Any:
    """Returns the loss of 16 layers, each under a checkpoint."""

    def layer(x: Any, w: Any) -> Any:
        return x + jax.nn.gelu(tag(x @ w[0], "up")) @ w[1], None

    if scanned:
        x, _ = jax.lax.scan(jaxckpt.checkpoint(layer, policy=policy, prevent_cse=False), x, ws)
    else:
        for w in zip(*ws):
            x, _ = jaxckpt.checkpoint(layer, policy=policy)(x, w)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def kept(report: jaxckpt.MemoryReport) -> int:
    """Returns the bytes of the buffers at the peak that hold a value, or its scales, of all layers of a scan."""
    stacked = [b for b in report.largest(30) if f"[{LAYERS},{ROWS}," in b.shape and f",{WIDTH}]" not in b.shape]
    return sum(b.bytes for b in stacked)


def measured(action: Action, target: str, scanned: bool) -> dict[str, int]:
    """Returns the compiled bytes of one action."""
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    ws = struct(LAYERS, WIDTH, 4 * WIDTH), struct(LAYERS, 4 * WIDTH, WIDTH)
    args = ws if scanned else tuple([struct(*w.shape[1:])] * LAYERS for w in ws), struct(ROWS, WIDTH)
    step = jax.value_and_grad(functools.partial(loss, policy=Policy({"up": action}), scanned=scanned))
    report = jaxckpt.measure(step, *args, target=target, generate_code=False)
    each = {"device": action.device_bytes(UP), "host": action.host_bytes(UP)}
    return {
        "peak": report.peak_bytes,
        "kept": kept(report) if scanned else -1,
        "host": report.host_bytes,
        "expected_kept": LAYERS * each["device"],
        "expected_host": LAYERS * each["host"],
    }


def table(results: dict[str, dict[str, dict[str, int]]]) -> str:
    """Returns the results as Markdown."""
    lines = [
        "# What each action keeps",
        "",
        f'Value and gradient of {LAYERS} MLP layers ({ROWS} x {WIDTH}, hidden {4 * WIDTH}, bfloat16). "up", the value',
        "before the gelu, is kept by each action. Bytes in MiB, read from the compiled program. Expected: what the form",
        "needs, with float32 scales for each 128 numbers. A TPU holds the scales of the device on the chip, so they are",
        "not counted here; on its host rows of 32 scales are padded to 128. In unrolled layers the peak is where the",
        "gradients are, when most of what is kept has gone; and the compilers undo offloading there: they copy values to",
        "the host and back at once. Command: `python -m benchmarks.actions`.",
        "",
    ]
    for title, rows in results.items():
        scanned = title.endswith("scanned")
        lines += [f"## {title}", ""]
        extra = " kept on the device | expected |" if scanned else ""
        lines += [f'| "up" is | peak |{extra} on the host | expected |', "|---|---:|" + "---:|" * (4 if scanned else 2)]
        for name, row in rows.items():
            own = f" {row['kept'] / MIB:.1f} | {row['expected_kept'] / MIB:.1f} |" if scanned else ""
            host = f"{row['host'] / MIB:.1f} | {row['expected_host'] / MIB:.1f}"
            lines.append(f"| {name} | {row['peak'] / MIB:.0f} |{own} {host} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measures and writes the results."""
    results: dict[str, dict[str, dict[str, int]]] = {}
    for target in TARGETS:
        for scanned in (True, False):
            title = f"{target}, {'scanned' if scanned else 'unrolled'}"
            results[title] = {}
            for name, action in ACTIONS.items():
                results[title][name] = measured(action, target, scanned)
                print(title, name, results[title][name], flush=True)
                (RESULTS / "actions.json").write_text(json.dumps(results, indent=1) + "\n")
                (RESULTS / "actions.md").write_text(table(results))


if __name__ == "__main__":
    main()
