"""GPT-2 at full size on the H100: what `jaxckpt compare` says is what bare JAX compiles to, and in the order and size
that are known.
"""

import functools
import itertools

import jax
import pytest
from jax.sharding import SingleDeviceSharding

import jaxckpt
from jaxckpt import variants
from jaxckpt.models import gpt

CHECKPOINTS = {
    "none": None,
    "nothing": jax.checkpoint,
    "dots_no_batch": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
}
# MiB on an H100, batch 8, 1,024 tokens, bfloat16 activations, float32 parameters, by rising peak.
KNOWN = {"nothing": 2906, "dots_no_batch": 3918, "dots": 6247, "none": 10003, "whole": 10047}


def bare(name):
    """The loss with checkpoints put in by JAX alone."""
    if name == "whole":
        return jax.checkpoint(gpt.gpt2()[0])
    return gpt.gpt2(checkpoint=CHECKPOINTS[name])[0]


def lowered(fun, args):
    return jax.jit(jax.value_and_grad(fun)).lower(*args)


def bare_peak(fun, args):
    """The compiler's own figure, none of our code in between but the device's description."""
    device = SingleDeviceSharding(jaxckpt.Target("cuda:h100").devices[0])
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), args)
    traced = jax.jit(jax.value_and_grad(fun)).trace(*placed).lower(lowering_platforms=("cuda",))
    return traced.compile(compiler_options={"xla_gpu_autotune_level": "0"}).memory_analysis().peak_memory_in_bytes


@pytest.mark.once
@pytest.mark.cuda
def test_compare_says_what_bare_jax_compiles_to_in_the_known_order_and_size():
    built = variants.build(gpt.gpt2, variants.variants_for(gpt.gpt2, {}, list(KNOWN)), real=False, settings={})
    functions, args = built.functions, built.args
    functions = {name.partition(" ")[0]: fun for name, fun in functions.items()}
    table = jaxckpt.compare(functions, *args, target="cuda:h100")
    peaks = {row.name: row.peak_bytes for row in table}
    for name, fun in functions.items():
        own = bare(name)
        if lowered(own, args).as_text() != lowered(fun, args).as_text():  # else they are one program
            assert peaks[name] == pytest.approx(bare_peak(own, args), rel=0.01), name
    assert peaks["nothing"] == pytest.approx(bare_peak(bare("nothing"), args), rel=0.01)
    for name, known in KNOWN.items():
        assert peaks[name] / 2**20 == pytest.approx(known, rel=0.08), name
    for less, more in itertools.pairwise(KNOWN):
        assert peaks[less] < peaks[more] * 1.001, (less, more)
