"""Trains an LSTM on text, 4,096 characters a sequence, in the memory of a few dozen of its states: plain JAX, AdamW.

    python examples/lstm_text.py                                  # planned for 25% of the peak; minutes on a CPU
    python examples/lstm_text.py --budget none                    # the same losses without a plan
    python examples/lstm_text.py --compare results                # both; a table and a picture
    python examples/lstm_text.py --save run                       # writes checkpoint files; a killed run goes on
    python examples/lstm_text.py --budget none --schedule slots   # a schedule by hand, and no plan
    python examples/lstm_text.py --length 16384 --sequences 64 --width 1024 --steps 1000                   # on a GPU
    jaxckpt plan examples/lstm_text.py:make_step --budget 25%

The text is that of Python's standard library, which every machine has. Backpropagation goes through all 4,096
iterations. `lax.scan` keeps what every iteration computed. A plan, or a schedule of `jaxckpt.scan`, keeps some of the
carries and runs iterations again.
"""

from __future__ import annotations

import common
import jax
import jax.numpy as jnp
import optax

import jaxckpt
from jaxckpt.models import data

SCHEDULES = {"none": "none", "sqrt": "sqrt", "slots": jaxckpt.Slots(24)}
PARSER = common.parser(__file__, __doc__, steps=12, budget="25%", length=4096, sequences=16, width=256)
PARSER.add_argument("--schedule", choices=SCHEDULES, default="none", help="of the scan; none is lax.scan's (none)")
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def init(key, width):
    """Returns the parameters: an embedding of 256 bytes, an LSTM, a projection back."""
    keys = jax.random.split(key, 4)
    scale = width**-0.5
    return {
        "embedding": jax.random.normal(keys[0], (256, width)) * 0.1,
        "inputs": jax.random.normal(keys[1], (width, 4 * width)) * scale,
        "hidden": jax.random.normal(keys[2], (width, 4 * width)) * scale,
        "bias": jnp.zeros(4 * width).at[width : 2 * width].set(1.0),  # remember, at first
        "output": jax.random.normal(keys[3], (width, 256)) * scale,
    }


def batch_of(options, number):
    """Returns (inputs, targets) of a step, both (length, sequences)."""
    batch = data.text_batch(options.sequences, options.length, seed=options.seed, step=number)
    return jax.device_put([characters.T for characters in batch])


def step_of(loss):
    def step(params, moments, inputs, targets):
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return jax.jit(step, donate_argnums=(0, 1))


def make_step(options=None):
    """Returns the loss, the arguments of the training step, and what makes the step of the loss."""
    options = options or PARSER.parse_args([])

    def loss(params, inputs, targets):
        def iteration(carry, pair):
            (hidden, cell, total), (now, following) = carry, pair
            gates = params["embedding"][now] @ params["inputs"] + hidden @ params["hidden"] + params["bias"]
            write, forget, candidate, read = jnp.split(gates, 4, axis=-1)
            cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(write) * jnp.tanh(candidate)
            hidden = jax.nn.sigmoid(read) * jnp.tanh(cell)
            logits = hidden @ params["output"]
            total += optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()
            return (hidden, cell, total), None

        start = jnp.zeros((options.sequences, options.width))
        schedule = SCHEDULES[options.schedule]
        (_, _, total), _ = jaxckpt.scan(iteration, (start, start, 0.0), (inputs, targets), schedule=schedule)
        return total / options.length

    params = init(jax.random.key(options.seed), options.width)
    return loss, (params, OPTIMIZER.init(params), *batch_of(options, 0)), step_of


def check(options):
    """Returns what is wrong with the flags, or None."""
    if options.schedule != "none" and options.budget != "none":
        return f"--schedule needs --budget none, for a plan has a schedule of its own; got {options.budget}."
    return None


def main(argv=None):
    options = common.parse(PARSER, argv, check)
    loss, (params, moments, *batch), step_of = make_step(options)
    fun = common.planned(options, loss, params, moments, *batch, step=step_of)
    run = common.Run(options, step_of(fun), params, moments, *batch)
    params, moments = run.restore((params, moments))
    for number in run.steps():
        params, moments, value = run.step(params, moments, *batch_of(options, number))
        run.record(value, (params, moments))
    run.finish()


if __name__ == "__main__":
    main()
