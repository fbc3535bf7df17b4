"""A training step in less memory: equinox, optax's AdamW, dropout, donation.

jaxckpt plan FILE.py:make_step --budget 60%
python FILE.py
"""

import equinox as eqx
import jax
import optax

import jaxckpt


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.norm, self.dropout = eqx.nn.LayerNorm(128), eqx.nn.Dropout(0.1)
        self.up, self.down = eqx.nn.Linear(128, 512, key=up), eqx.nn.Linear(512, 128, key=down)

    def __call__(self, x, key):
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norm(x)))), key=key)


class Model(eqx.Module):
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key):
        *keys, last = jax.random.split(key, 9)
        self.blocks, self.head = [Block(each) for each in keys], eqx.nn.Linear(128, 10, key=last)

    def __call__(self, x, key):
        for block, each in zip(self.blocks, jax.random.split(key, 8), strict=True):
            x = block(x, each)
        return self.head(x)


optimizer = optax.adamw(1e-3)


def loss(model, x, y, key):
    logits = jax.vmap(model)(x, jax.random.split(key, len(x)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def step_of(loss):  # takes the loss, returns the training step: a plan replaces the loss
    def step(batch, model, state):  # the batch first: filter_jit donates all but the first argument
        value, grads = eqx.filter_value_and_grad(loss)(model, *batch)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    return eqx.filter_jit(step, donate="all-except-first")


def make_step():  # returns the loss, the arguments of the training step, and what makes the step
    keys = jax.random.split(jax.random.key(0), 4)
    model = Model(keys[0])
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x, y = jax.random.normal(keys[1], (2048, 128)), jax.random.randint(keys[2], 2048, 0, 10)
    return loss, ((x, y, keys[3]), model, state), step_of


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
