"""What each action keeps of a value, compiled: 16 MLP layers (2048 x 1024, four times as wide, bfloat16), scanned and
unrolled, of which "up" is saved, compressed, offloaded, or both; and the masks of as many layers with relu and dropout.

    python -m benchmarks.actions            # all
    python -m benchmarks.actions --masks    # the masks alone; the other figures stay as they are

No accelerator is needed: the programs are compiled for an H100 and for a TPU v5e. Results: results/actions.md, with the
raw figures in results/actions.json.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

import jaxckpt
from jaxckpt import OFFLOAD, RECOMPUTE, SAVE, Action, Policy, compress, tag
from jaxckpt.actions.base import StoredArray
from jaxckpt.core.files import write_whole

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
MASKS: dict[str, Action] = {"recomputed": RECOMPUTE, "saved": SAVE, "bits": compress("bits")}
MASK = StoredArray((ROWS, 4 * WIDTH), jnp.dtype(bool), ROWS * 4 * WIDTH)
OTHERS = tuple(f"{LAYERS},{sizes}]" for sizes in (f"{WIDTH},{4 * WIDTH}", f"{4 * WIDTH},{WIDTH}", f"{ROWS},{WIDTH}"))
"""What else a scan has of each layer: weights, their gradients, the carry."""
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


def masked_loss(ws: Any, x: Any, key: Any, policy: Policy) -> Any:
    """Returns the loss of 16 layers with relu and dropout; "mask" says which values of "up" go on."""

    def layer(x: Any, per: Any) -> Any:
        (up, down), key = per
        hidden = x @ up
        mask = tag((hidden > 0) & jax.random.bernoulli(key, 0.9, hidden.shape), "mask")
        return x + jnp.where(mask, hidden / 0.9, 0) @ down, None

    checkpointed = jaxckpt.checkpoint(layer, policy=policy, prevent_cse=False)
    x, _ = jax.lax.scan(checkpointed, x, (ws, jax.random.split(key, LAYERS)))
    return jnp.sum(x.astype(jnp.float32) ** 2)


def kept(report: jaxckpt.MemoryReport) -> int:
    """Returns the bytes of the buffers at the peak that hold a value, or its scales, of all layers of a scan: in the
    device's main memory, and in a TPU's memory on the chip.
    """
    at = report.timeline().peak_position
    on_device = (space.lifetimes for space in report.spaces() if "host" not in space.name)
    there = [life.buffer for life in itertools.chain(*on_device) if life.first <= at <= life.last]
    stacked = (b for b in there if f"[{LAYERS}," in b.shape and b.shape.partition("[")[2] not in OTHERS)
    return sum(b.bytes for b in stacked if b.bytes >= LAYERS * ROWS)


def arguments(scanned: bool) -> tuple[Any, Any]:
    """Returns the shapes of weights and input."""
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    ws = struct(LAYERS, WIDTH, 4 * WIDTH), struct(LAYERS, 4 * WIDTH, WIDTH)
    return ws if scanned else tuple([struct(*w.shape[1:])] * LAYERS for w in ws), struct(ROWS, WIDTH)


@functools.cache
def forward_bytes(action: Action, target: str) -> int:
    """Returns the bytes on the device of what the forward pass of unrolled layers returns for the backward pass,
    compiled by itself. In the whole step, kept values lie in buffers of gradients that are not computed yet.
    """

    def forward(*args: Any) -> list[Any]:
        _, pullback = jax.vjp(functools.partial(loss, policy=Policy({"up": action}), scanned=False), *args)
        given = jax.tree.leaves(args)
        return [x for x in jax.tree.leaves(pullback) if not any(x is each for each in given)]

    return jaxckpt.measure(forward, *arguments(scanned=False), target=target, generate_code=False).output_bytes


def measured(action: Action, target: str, scanned: bool) -> dict[str, int]:
    """Returns the compiled bytes of one action."""
    step = jax.value_and_grad(functools.partial(loss, policy=Policy({"up": action}), scanned=scanned))
    report = jaxckpt.measure(step, *arguments(scanned), target=target, generate_code=False)
    each = {"device": action.device_bytes(UP), "host": action.host_bytes(UP)}
    return {
        "peak": report.peak_bytes,
        "kept": kept(report) if scanned else forward_bytes(action, target) - forward_bytes(RECOMPUTE, target),
        "host": report.host_bytes,
        "expected_kept": LAYERS * each["device"],
        "expected_host": LAYERS * each["host"],
    }


def measured_masks(action: Action, target: str) -> dict[str, int]:
    """Returns the compiled bytes of the layers with masks, of which one action keeps the masks."""
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    args = (struct(LAYERS, WIDTH, 4 * WIDTH), struct(LAYERS, 4 * WIDTH, WIDTH)), struct(ROWS, WIDTH)
    key = jax.eval_shape(lambda: jax.random.key(0))
    step = jax.value_and_grad(functools.partial(masked_loss, policy=Policy({"mask": action})))
    report = jaxckpt.measure(step, *args, key, target=target, generate_code=False)
    return {
        "peak": report.peak_bytes,
        "kept": kept(report),
        "host": report.host_bytes,
        "expected_kept": LAYERS * action.device_bytes(MASK),
        "expected_host": 0,
    }


def table(results: dict[str, dict[str, dict[str, int]]]) -> str:
    """Returns the results as Markdown."""
    lines = [
        "# What each action keeps",
        "",
        f'Value and gradient of {LAYERS} MLP layers ({ROWS} x {WIDTH}, hidden {4 * WIDTH}, bfloat16). "up", the value',
        "before the gelu, is kept by each action. Bytes in MiB, read from the compiled program. Expected: what the form",
        "needs, with float32 scales for each 128 numbers. A TPU holds scales, and saved masks, on the chip; these",
        "are counted. In unrolled layers the peak is where the gradients are, when most of what is kept has gone, or lies",
        "in the memory of gradients that are not yet computed. So what is kept is read from the forward pass, compiled by",
        'itself: what it returns, less what it returns if "up" is recomputed. Masks are of 16 layers with relu and',
        "dropout. Command: `python -m benchmarks.actions`.",
        "",
    ]
    for title, rows in results.items():
        subject = "masks are" if title.endswith("masks") else '"up" is'
        lines += [f"## {title}", ""]
        lines += [
            f"| {subject} | peak | kept on the device | expected | on the host | expected |",
            "|---" + "|---:" * 5 + "|",
        ]
        for name, row in rows.items():
            own = f"{row['kept'] / MIB:.1f} | {row['expected_kept'] / MIB:.1f}"
            host = f"{row['host'] / MIB:.1f} | {row['expected_host'] / MIB:.1f}"
            lines.append(f"| {name} | {row['peak'] / MIB:.0f} | {own} | {host} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", action="store_true", help="measure the masks alone")
    masks_alone = parser.parse_args().masks
    stored = RESULTS / "actions.json"
    results: dict[str, dict[str, dict[str, int]]] = json.loads(stored.read_text()) if masks_alone else {}
    kinds: dict[str, tuple[dict[str, Action], Any]] = {
        "scanned": (ACTIONS, functools.partial(measured, scanned=True)),
        "unrolled": (ACTIONS, functools.partial(measured, scanned=False)),
        "masks": (MASKS, measured_masks),
    }
    for target in TARGETS:
        for kind, (actions, measure) in kinds.items():
            if masks_alone and kind != "masks":
                continue
            title = f"{target}, {kind}"
            results[title] = {}
            for name, action in actions.items():
                results[title][name] = measure(action, target)
                print(title, name, results[title][name], flush=True)
                write_whole(stored, json.dumps(results, indent=1) + "\n")
                write_whole(RESULTS / "actions.md", table(results))


if __name__ == "__main__":
    main()
