"""A policy keeps what it names, in the compiled program too: under vmap, and with either implementation of
jax.checkpoint.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxckpt
from jaxckpt import OFFLOAD, SAVE, Policy, compress, tag

LAYERS, BATCH, WIDTH, EXAMPLES = 8, 64, 128, 4
UP = LAYERS * EXAMPLES * BATCH * 4 * WIDTH * 4  # bytes of all that is called "up"


@contextlib.contextmanager
def remat3(on):
    old = jax.config.jax_remat3  # type: ignore[attr-defined]
    jax.config.update("jax_remat3", on)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", old)


def loss(policy, vmapped):
    """A scan over MLPs, of one example under vmap or of all at once."""

    @functools.partial(jaxckpt.checkpoint, policy=policy, prevent_cse=False)
    def layer(x, up, down):
        return x + jnp.sin(tag(x @ up, "up")) @ down

    def stack(ups, downs, x):
        return lax.scan(lambda c, w: (layer(c, *w), None), x, (ups, downs))[0].sum()

    if vmapped:
        return lambda ups, downs, x: jax.vmap(stack, in_axes=(None, None, 0))(ups, downs, x).sum()
    return lambda ups, downs, x: stack(ups, downs, x.reshape(-1, WIDTH))


ARGS = [
    jax.ShapeDtypeStruct(shape, jnp.float32)
    for shape in ((LAYERS, WIDTH, 4 * WIDTH), (LAYERS, 4 * WIDTH, WIDTH), (EXAMPLES, BATCH, WIDTH))
]


def report(policy, vmapped, target):
    return jaxckpt.measure(jax.value_and_grad(loss(policy, vmapped)), *ARGS, target=target, generate_code=False)


@pytest.mark.cuda
@pytest.mark.parametrize("vmapped", [False, True], ids=["plain", "vmapped"])
@pytest.mark.parametrize("new", [False, True], ids=["remat2", "remat3"])
def test_the_h100_peak_grows_by_what_is_kept(new, vmapped):
    with remat3(new):
        nothing, kept = (report(p, vmapped, "cuda:h100").peak_bytes for p in ("nothing", Policy({"up": SAVE})))
    assert kept - nothing == pytest.approx(UP, rel=0.15)


@pytest.mark.cuda
@pytest.mark.parametrize("new", [False, True], ids=["remat2", "remat3"])
def test_what_is_offloaded_goes_to_the_host(new):
    with remat3(new):
        nothing, kept, away = (
            report(p, False, "cuda:h100") for p in ("nothing", Policy({"up": SAVE}), Policy({"up": OFFLOAD}))
        )
    assert nothing.host_bytes == kept.host_bytes == 0
    assert away.host_bytes == pytest.approx(UP, rel=0.01)
    assert away.peak_bytes < nothing.peak_bytes + 0.35 * (kept.peak_bytes - nothing.peak_bytes)


@pytest.mark.parametrize("new", [False, True], ids=["remat2", "remat3"])
def test_what_is_compressed_is_kept_so(new):
    shapes = [jnp.ones(arg.shape) for arg in ARGS]
    with remat3(new):
        nothing, small = (
            jaxckpt.residuals(loss(policy, False), *shapes).kept_bytes
            for policy in ("nothing", Policy({"up": compress("int8")}))
        )
    assert small - nothing == pytest.approx(UP * (1 / 4 + 1 / 128), rel=0.01)


@pytest.mark.tpu
def test_the_tpu_peak_grows_by_what_is_kept():
    nothing, kept = (report(p, True, "tpu:v5e:2x2").peak_bytes for p in ("nothing", Policy({"up": SAVE})))
    assert kept - nothing == pytest.approx(UP, rel=0.2)


@pytest.mark.parametrize("vmapped", [False, True], ids=["plain", "vmapped"])
def test_the_cpu_peak_grows_by_what_is_kept(vmapped):
    nothing, kept = (report(p, vmapped, "cpu").peak_bytes for p in ("nothing", Policy({"up": SAVE})))
    assert kept - nothing == pytest.approx(UP, rel=0.15)
