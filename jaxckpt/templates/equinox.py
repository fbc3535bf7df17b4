"""A training step in less memory: equinox, optax's AdamW, dropout, donation.

jaxckpt plan FILE.py:make_step --budget 60%
python FILE.py

For a model with state, such as BatchNorm's: "Models with state" of the equinox page of jaxckpt's docs.
"""

import equinox as eqx
import jax
import optax
from equinox import nn

import jaxckpt


class Block(nn.Sequential):
    def __call__(self, x, *, key):
        return x + super().__call__(x, key=key)


optimizer = optax.adamw(1e-3)


def loss(model, x, y, key):
    logits = jax.vmap(lambda x, key: model(x, key=key))(x, jax.random.split(key, len(x)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def step_of(loss):  # takes the loss, returns the training step: a plan replaces the loss
    def step(batch, model, state):  # the batch first: filter_jit donates all but the first argument
        value, grads = eqx.filter_value_and_grad(loss)(model, *batch)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    return eqx.filter_jit(step, donate="all-except-first")


def make_step():  # returns the loss, the arguments of the training step, and what makes the step
    last, *keys = jax.random.split(jax.random.key(0), 9)
    blocks = [Block([nn.LayerNorm(128), nn.MLP(128, 128, 512, 1, jax.nn.gelu, key=k), nn.Dropout(0.1)]) for k in keys]
    model = nn.Sequential([*blocks, nn.Linear(128, 10, key=last)])
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x = jax.random.normal(jax.random.key(1), (2048, 128))
    return loss, ((x, x[:, :10].argmax(1), jax.random.key(2)), model, state), step_of


def main():
    plan = jaxckpt.plan(loss, *make_step()[1], budget="60%", step=step_of)
    for name, fun in {"as it is": loss, "planned": plan.apply(loss)}.items():
        (x, y, key), model, state = make_step()[1]
        peak = jaxckpt.measure(step_of(fun), (x, y, key), model, state).peak_bytes
        step = step_of(fun).lower((x, y, key), model, state).compile(compiler_options=jaxckpt.compiler_options())
        for i in range(20):
            model, state, value = step((x, y, jax.random.fold_in(key, i)), model, state)
            if i % 5 == 4:
                print(f"{name:8}  step {i + 1:2}  loss {value:.5f}  peak {peak / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
