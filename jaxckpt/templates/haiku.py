"""A training step in less memory: haiku, optax's AdamW, dropout, donation.

jaxckpt plan FILE.py:make_step --budget 60%
python FILE.py

For a model with state, such as BatchNorm's: the haiku page of jaxckpt's docs.
"""

import haiku as hk
import jax
import optax

import jaxckpt


@hk.transform
def model(x):
    for _ in range(8):
        h = jax.nn.gelu(hk.Linear(512)(hk.LayerNorm(-1, True, True)(x)))
        x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(128)(h))
    return hk.Linear(10)(x)


optimizer = optax.adamw(1e-3)


def loss(params, x, y, key):
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, key, x), y).mean()


def step_of(loss):  # takes the loss, returns the training step: a plan replaces the loss
    def step(params, state, x, y, key):
        value, grads = jax.value_and_grad(loss)(params, x, y, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


def make_step():  # returns the loss, the arguments of the training step, and what makes the step
    x = jax.random.normal(jax.random.key(0), (2048, 128))
    params = model.init(jax.random.key(1), x)
    return loss, (params, optimizer.init(params), x, x[:, :10].argmax(1), jax.random.key(2)), step_of


def main():
    plan = jaxckpt.plan(loss, *make_step()[1], budget="60%", step=step_of)
    for name, fun in {"as it is": loss, "planned": plan.apply(loss)}.items():
        params, state, x, y, key = make_step()[1]
        peak = jaxckpt.measure(step_of(fun), params, state, x, y, key).peak_bytes
        step = step_of(fun).lower(params, state, x, y, key).compile(compiler_options=jaxckpt.compiler_options())
        for i in range(20):
            params, state, value = step(params, state, x, y, jax.random.fold_in(key, i))
            if i % 5 == 4:
                print(f"{name:8}  step {i + 1:2}  loss {value:.5f}  peak {peak / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
