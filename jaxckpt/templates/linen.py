"""A training step in less memory: flax linen, a TrainState with optax's AdamW, dropout, donation.

jaxckpt plan FILE.py:make_step --budget 60%
python FILE.py
"""

import flax.linen as nn
import jax
import optax
from flax.training.train_state import TrainState

import jaxckpt


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(8):
            h = nn.gelu(nn.Dense(512)(nn.LayerNorm()(x)))
            x = x + nn.Dropout(0.1, deterministic=False)(nn.Dense(128)(h))
        return nn.Dense(10)(x)


def loss(params, x, y, key):
    logits = Model().apply({"params": params}, x, rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def step_of(loss):  # takes the loss, returns the training step: a plan replaces the loss
    def step(state, x, y, key):
        value, grads = jax.value_and_grad(loss)(state.params, x, y, key)
        return state.apply_gradients(grads=grads), value

    return jax.jit(step, donate_argnums=0)


def make_step():  # returns the loss, the arguments of the training step, and what makes the step
    x = jax.random.normal(jax.random.key(0), (2048, 128))
    params = Model().init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    return loss, (state, x, x[:, :10].argmax(1), jax.random.key(3)), step_of


def main():
    plan = jaxckpt.plan(loss, *make_step()[1], budget="60%", step=step_of)
    for name, fun in {"as it is": loss, "planned": plan.apply(loss)}.items():
        state, x, y, key = make_step()[1]
        peak = jaxckpt.measure(step_of(fun), state, x, y, key).peak_bytes
        step = step_of(fun).lower(state, x, y, key).compile(compiler_options=jaxckpt.compiler_options())
        for i in range(20):
            state, value = step(state, x, y, jax.random.fold_in(key, i))
            if i % 5 == 4:
                print(f"{name:8}  step {i + 1:2}  loss {value:.5f}  peak {peak / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
