"""A training step in less memory: flax nnx, optax's AdamW, dropout, donation.

jaxckpt plan FILE.py:make_step --budget 60%
python FILE.py
"""

import jax
import optax
from flax import nnx

import jaxckpt


class Block(nnx.Sequential):
    def __init__(self, rngs):
        up, down = nnx.Linear(128, 512, rngs=rngs), nnx.Linear(512, 128, rngs=rngs)
        super().__init__(nnx.LayerNorm(128, rngs=rngs), up, nnx.gelu, down, nnx.Dropout(0.1, rngs=rngs))

    def __call__(self, x):
        return x + super().__call__(x)


def loss(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def step_of(loss):  # takes the loss, returns the training step: a plan replaces the loss
    def step(model, optimizer, x, y):
        value, grads = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, grads)
        return value

    return nnx.jit(step, donate_argnums=(0, 1))


def make_step():  # returns the loss, the arguments of the training step, and what makes the step
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(*(Block(rngs) for _ in range(8)), nnx.Linear(128, 10, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (2048, 128))
    return loss, (model, optimizer, x, x[:, :10].argmax(1)), step_of


def main():
    plan = jaxckpt.plan(loss, *make_step()[1], budget="60%", step=step_of)
    for name, fun in {"as it is": loss, "planned": plan.apply(loss)}.items():
        args = make_step()[1]
        peak = jaxckpt.measure(step_of(fun), *args).peak_bytes
        step = step_of(fun).lower(*args).compile(compiler_options=jaxckpt.compiler_options())
        for i in range(20):
            value = step(*args)
            if i % 5 == 4:
                print(f"{name:8}  step {i + 1:2}  loss {value:.5f}  peak {peak / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
