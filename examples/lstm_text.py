"""Train an LSTM on text, 4,096 characters a sequence, in the memory of a few dozen of its states.

    python examples/lstm_text.py                  # without and with jaxckpt, each in its own process; a few minutes
    python examples/lstm_text.py --schedule sqrt  # one of them, in this process

The text is that of Python's standard library, which every machine has. Backpropagation goes through all 4,096
iterations. `lax.scan` keeps what every iteration computed. `jaxckpt.scan` keeps some of the carries and runs iterations
again. Losses and parameters are the same; the peak of the process's resident memory is different.
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import subprocess
import sys
import sysconfig
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxckpt

SCHEDULES = {"none": "none", "sqrt": "sqrt", "slots": jaxckpt.Slots(24)}


def read_text(limit: int = 1 << 20) -> np.ndarray:
    """Returns the first bytes of the standard library's modules, in alphabetical order."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    return np.frombuffer(text[:limit], np.uint8)


def init_params(width: int) -> dict[str, jax.Array]:
    """Returns the parameters: an embedding of 256 bytes, an LSTM, a projection back."""
    keys = jax.random.split(jax.random.key(0), 4)
    scale = width**-0.5
    return {
        "embedding": jax.random.normal(keys[0], (256, width)) * 0.1,
        "inputs": jax.random.normal(keys[1], (width, 4 * width)) * scale,
        "hidden": jax.random.normal(keys[2], (width, 4 * width)) * scale,
        "bias": jnp.zeros(4 * width).at[width : 2 * width].set(1.0),  # remember, at first
        "output": jax.random.normal(keys[3], (width, 256)) * scale,
    }


def loss_of(params: dict[str, jax.Array], batch: jax.Array, schedule: Any) -> jax.Array:
    """Returns the loss, in nats a character, of a batch of shape (steps + 1, sequences)."""

    def step(carry: Any, pair: Any) -> Any:
        (hidden, cell, total), (now, following) = carry, pair
        gates = params["embedding"][now] @ params["inputs"] + hidden @ params["hidden"] + params["bias"]
        write, forget, candidate, read = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(write) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(read) * jnp.tanh(cell)
        logits = hidden @ params["output"]
        total += optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()
        return (hidden, cell, total), None

    steps, sequences = batch.shape[0] - 1, batch.shape[1]
    start = jnp.zeros((sequences, params["hidden"].shape[0]))
    (_, _, total), _ = jaxckpt.scan(step, (start, start, 0.0), (batch[:-1], batch[1:]), schedule=schedule)
    return total / steps


def train(schedule: Any, *, updates: int, steps: int, sequences: int, width: int) -> list[float]:
    """Returns the loss before each update."""
    text, draw = read_text(), np.random.default_rng(0)
    params = init_params(width)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    state = optimiser.init(params)

    @jax.jit
    def update(params: Any, state: Any, batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch, schedule)
        changes, state = optimiser.update(grads, state)
        return optax.apply_updates(params, changes), state, loss

    losses = []
    for _ in range(updates):
        starts = draw.integers(0, len(text) - steps - 1, sequences)
        batch = np.stack([text[start : start + steps + 1] for start in starts], axis=1).astype(np.int32)
        params, state, loss = update(params, state, jnp.asarray(batch))
        losses.append(float(loss))
    return losses


def resident_mib() -> float:
    """Returns the peak of this process's resident memory, in MiB."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # on Linux, getrusage also counts the memory of the parent process
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=SCHEDULES, help="run only this schedule, in this process")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4096, help="characters in a sequence")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    if options.schedule is None:
        sizes = [f"--{name}={getattr(options, name)}" for name in ("updates", "steps", "sequences", "width")]
        for schedule in SCHEDULES:
            subprocess.run([sys.executable, __file__, "--schedule", schedule, *sizes], check=True)
        return
    jax.block_until_ready(jnp.ones(8) @ jnp.ones(8))  # so that JAX's own memory is in the figure below
    before, start = resident_mib(), time.perf_counter()
    losses = train(
        SCHEDULES[options.schedule],
        updates=options.updates,
        steps=options.steps,
        sequences=options.sequences,
        width=options.width,
    )
    seconds = time.perf_counter() - start
    print(
        f"{options.schedule:6s} loss {losses[0]:.4f} -> {losses[-1]:.4f} nats a character, {seconds:.0f} s with "
        f"compiling, "
        f"peak resident memory {resident_mib():.0f} MiB, {resident_mib() - before:.0f} MiB of it for training",
        flush=True,
    )


if __name__ == "__main__":
    main()
