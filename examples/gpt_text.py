"""Trains a GPT on the text of Python's standard library: flax linen, AdamW, dropout, a donated state.

python examples/gpt_text.py                                   # planned for 50% of the peak; two minutes on a CPU
python examples/gpt_text.py --budget none                     # the same losses without a plan
python examples/gpt_text.py --compare results                 # both; a table and a picture
python examples/gpt_text.py --save run                        # writes checkpoint files; a killed run goes on
python examples/gpt_text.py --devices 8 --layout sharded --accumulate 2 --bfloat16
python examples/gpt_text.py --layers 12 --width 768 --heads 12 --tokens 1024 --batch 32 --bfloat16     # on a GPU
python examples/gpt_text.py --budget none --compress int8     # activations are kept in 8 bits
jaxckpt plan examples/gpt_text.py:make_step --budget 50%
"""

from __future__ import annotations

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt
import jaxckpt.flax
from jaxckpt.models import data

PARSER = common.parser(__file__, __doc__, steps=200, budget="50%", layers=4, width=128, heads=4, tokens=128, batch=16)
PARSER.add_argument("--bfloat16", action="store_true", help="compute in bfloat16; parameters are in float32")
PARSER.add_argument("--accumulate", type=common.positive, default=1, metavar="N", help="microbatches of a step (1)")
PARSER.add_argument("--devices", type=common.positive, default=1, help="how many; on the CPU they are made (1)")
PARSER.add_argument("--layout", choices=["data", "sharded"], default="data", help="of the parameters on devices (data)")
FORMS = ["exact", "bfloat16", "float8_e4m3fn", "int8", "int4"]
PARSER.add_argument("--compress", choices=FORMS, help="how activations are kept for the backward pass, without a plan")


class Block(nn.Module):
    """Attention and an MLP. The tags are for `--compress`; a plan needs none."""

    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        x = jaxckpt.tag(x, "block_in")
        batch, tokens, width = x.shape
        h = nn.Dense(3 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        q, k, v = jnp.split(jaxckpt.tag(h, "qkv").reshape(batch, tokens, self.heads, -1), 3, axis=-1)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, tokens, width)
        h = nn.Dense(width, dtype=self.dtype)(jaxckpt.tag(h, "context"))
        x = x + nn.Dropout(0.1, deterministic=False)(h)
        h = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        h = nn.Dense(width, dtype=self.dtype)(nn.gelu(jaxckpt.tag(h, "up")))
        return x + nn.Dropout(0.1, deterministic=False)(h)


class GPT(nn.Module):
    """Bytes to logits of the next byte."""

    layers: int
    width: int
    heads: int
    dtype: jnp.dtype = jnp.float32
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, tokens):
        places = self.param("places", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = (nn.Embed(256, self.width)(tokens) + places).astype(self.dtype)
        for _ in range(self.layers):
            x = self.block(self.heads, self.dtype)(x)
        return nn.Dense(256, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)).astype(jnp.float32)


def compressed(form):
    """Returns the block that keeps its tagged values in this form, and runs everything else again."""
    action = jaxckpt.SAVE if form == "exact" else jaxckpt.compress(form)
    policy = jaxckpt.Policy(dict.fromkeys(("block_in", "qkv", "context", "up"), action))
    return jaxckpt.flax.checkpoint(Block, policy=policy)


def batch_of(options, number):
    """Returns (inputs, targets) of a step: microbatches first, sequences laid out over the devices."""
    batch = data.text_batch(options.batch, options.tokens, seed=options.seed, step=number)
    shape = options.accumulate, options.batch // options.accumulate, options.tokens
    return jax.device_put([tokens.reshape(shape) for tokens in batch], over(options, PartitionSpec(None, "devices")))


def over(options, spec):
    """Returns the sharding of this spec over `--devices`."""
    return NamedSharding(Mesh(common.with_devices(options.devices), ("devices",)), spec)


def make_step(options=None):
    """Returns the loss, the arguments of the training step, and what makes the step of the loss."""
    options = options or PARSER.parse_args([])
    common.with_devices(options.devices)  # before JAX is used
    model = GPT(
        options.layers,
        options.width,
        options.heads,
        jnp.bfloat16 if options.bfloat16 else jnp.float32,
        compressed(options.compress) if options.compress else Block,
    )

    def loss(params, inputs, targets, key):
        logits = model.apply({"params": params}, inputs, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def layout(leaf):  # "sharded": a part of each matrix, and of its moments, is on each device
        split = options.layout == "sharded" and leaf.ndim and leaf.shape[0] % options.devices == 0
        return over(options, PartitionSpec("devices") if split else PartitionSpec())

    def init(key):
        params = model.init({"params": key, "dropout": key}, jnp.zeros((1, options.tokens), int))["params"]
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        return TrainState.create(apply_fn=None, params=params, tx=optimizer).replace(step=jnp.array(0))

    key = jax.random.key(options.seed)
    layouts = jax.tree.map(layout, jax.eval_shape(init, key))
    state = jax.jit(init, out_shardings=layouts)(key)

    def step_of(loss):
        def step(state, inputs, targets):
            key = jax.random.fold_in(jax.random.key(options.seed), state.step)

            def add(total, batch):
                number, inputs, targets = batch
                found = jax.value_and_grad(loss)(state.params, inputs, targets, jax.random.fold_in(key, number))
                return jax.tree.map(jnp.add, total, found), None

            if options.accumulate == 1:
                value, grads = jax.value_and_grad(loss)(state.params, inputs[0], targets[0], key)
            else:
                zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
                total, _ = jax.lax.scan(add, zero, (jnp.arange(options.accumulate), inputs, targets))
                value, grads = jax.tree.map(lambda leaf: leaf / options.accumulate, total)
            return state.apply_gradients(grads=grads), value

        return jax.jit(step, donate_argnums=0, out_shardings=(layouts, None) if options.devices > 1 else None)

    return loss, (state, *batch_of(options, 0)), step_of


def check(options):
    """Returns what is wrong with the flags, or None."""
    if options.width % options.heads:
        return f"--width must be a multiple of --heads, {options.heads}; got {options.width}."
    if options.batch % (parts := options.accumulate * options.devices):
        return f"--batch must be a multiple of --accumulate times --devices, {parts}; got {options.batch}."
    if options.compress and options.budget != "none":
        return f"--compress needs --budget none: its policy says what is kept, and no plan; got {options.budget}."
    return None


def main(argv=None):
    options = common.parse(PARSER, argv, check)
    loss, (state, *batch), step_of = make_step(options)
    loss = common.planned(options, loss, state, *batch, step=step_of)
    run = common.Run(options, step_of(loss), state, *batch)
    state = run.restore(state)
    for number in run.steps():
        state, value = run.step(state, *batch_of(options, number))
        run.record(value, state)
    run.finish()


if __name__ == "__main__":
    main()
