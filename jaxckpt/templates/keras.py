"""A training step in less memory: keras on its JAX backend, optax's AdamW, dropout, donation.

jaxckpt plan FILE.py:make_step --budget 60%
python FILE.py
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import optax

import jaxckpt

keras.utils.set_random_seed(0)
inputs = x = keras.Input((128,))
for _ in range(8):
    h = keras.layers.Dense(512, activation="gelu")(keras.layers.LayerNormalization()(x))
    x = x + keras.layers.Dropout(0.1)(keras.layers.Dense(128)(h))
model = keras.Model(inputs, keras.layers.Dense(10)(x))
optimizer = optax.adamw(1e-3)


def loss(weights, others, x, y):  # others: the state of dropout, statistics
    logits, others = model.stateless_call(weights, others, x, training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), others


def step_of(loss):  # takes the loss, returns the training step: a plan replaces the loss
    def step(weights, others, state, x, y):
        (value, others), grads = jax.value_and_grad(loss, has_aux=True)(weights, others, x, y)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), others, state, value

    return jax.jit(step, donate_argnums=(0, 1, 2))


def make_step():  # returns the loss, the arguments of the training step, and what makes the step
    # "+ 0" copies the model's variables: the steps donate their arguments.
    weights, others = ([v.value + 0 for v in of] for of in (model.trainable_variables, model.non_trainable_variables))
    x = jax.random.normal(jax.random.key(0), (2048, 128))
    return loss, (weights, others, optimizer.init(weights), x, x[:, :10].argmax(1)), step_of


def main():
    plan = jaxckpt.plan(loss, *make_step()[1], budget="60%", step=step_of)
    for name, fun in {"as it is": loss, "planned": plan.apply(loss)}.items():
        weights, others, state, *batch = make_step()[1]
        peak = jaxckpt.measure(step_of(fun), weights, others, state, *batch).peak_bytes
        lowered = step_of(fun).lower(weights, others, state, *batch)
        step = lowered.compile(compiler_options=jaxckpt.compiler_options())
        for i in range(20):
            weights, others, state, value = step(weights, others, state, *batch)
            if i % 5 == 4:
                print(f"{name:8}  step {i + 1:2}  loss {value:.5f}  peak {peak / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
