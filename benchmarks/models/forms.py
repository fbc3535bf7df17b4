"""One language model in five forms: what a plan is may not depend on how a loop over layers is written.

    jaxckpt plan benchmarks/models/forms.py:scanned --target cuda:h100 --budget 60%

Eight blocks with attention and an MLP, 512 wide, on 8 sequences of 512 tokens for each device: unrolled; as one scan;
as a scan of scans; as one scan in a `jax.shard_map` over 8 devices, each of which holds an eighth of the weights and
gathers a block's when it comes to it (S. Rajbhandari et al., "ZeRO", 2020); and with a cond in each block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.models import mixed
from jaxckpt.models import common

BLOCKS, OUTER, DEVICES = 8, 4, 8
SIZE = mixed.Size(
    blocks=BLOCKS,
    width=512,
    batch=8,
    tokens=512,
    inner=4,
    heads=8,
    gated=False,
    activation="gelu",
    mean=True,
    vocabulary=4_096,
)


def _block(w: Any, x: jax.Array) -> jax.Array:
    return mixed.block(w, x, SIZE)


def _unrolled(weights: Any, x: jax.Array) -> jax.Array:
    for number in range(BLOCKS):
        x = _block(jax.tree.map(lambda w, number=number: w[number], weights), x)
    return x


def _scanned(weights: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (_block(w, x), None), x, weights)[0]


def _nested(weights: Any, x: jax.Array) -> jax.Array:
    grouped = jax.tree.map(lambda w: w.reshape(OUTER, BLOCKS // OUTER, *w.shape[1:]), weights)
    return lax.scan(lambda x, ws: (_scanned(ws, x), None), x, grouped)[0]


def _gathered(weights: Any, x: jax.Array) -> jax.Array:
    whole = lambda ws: jax.tree.map(lambda w: lax.all_gather(w, "d", tiled=True) if w.ndim else w, ws)
    return lax.scan(lambda x, w: (_block(whole(w), x), None), x, weights)[0]


def _in_branches(weights: Any, x: jax.Array) -> jax.Array:
    for number in range(BLOCKS):
        w = jax.tree.map(lambda w, number=number: w[number], weights)
        x = lax.cond(w["gain"] > 0, lambda x, w=w: _block(w, x), lambda x: x, x)
    return x


def _loss(run: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        x = run(parameters["blocks"], parameters["embedding"][tokens[..., :-1]])
        logits = jax.nn.log_softmax(x @ parameters["embedding"].T)
        return -jnp.take_along_axis(logits, tokens[..., 1:, None], -1).mean()

    return loss


def _arguments(devices: int = 1) -> tuple[Any, ...]:
    stacked = {
        name: jax.ShapeDtypeStruct((BLOCKS, *leaf.shape), leaf.dtype) for name, leaf in mixed.shapes(SIZE).items()
    }
    table = jax.ShapeDtypeStruct((SIZE.vocabulary, SIZE.width), jnp.float32)
    tokens = jax.ShapeDtypeStruct((devices * SIZE.batch, SIZE.tokens + 1), jnp.int32)
    return {"blocks": stacked, "embedding": table}, tokens


def unrolled() -> common.Model:
    """The blocks one after the other."""
    return _loss(_unrolled), _arguments()


def scanned() -> common.Model:
    """The blocks as a scan."""
    return _loss(_scanned), _arguments()


def nested() -> common.Model:
    """The blocks as a scan over scans of two."""
    return _loss(_nested), _arguments()


def branches() -> common.Model:
    """Each block in a branch of a cond."""
    return _loss(_in_branches), _arguments()


def gathered() -> common.Model:
    """The blocks as a scan in a `jax.shard_map` over an abstract mesh of 8 devices, the weights of each gathered."""
    mesh = jax.sharding.AbstractMesh((DEVICES,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    local = lambda parameters, tokens: lax.pmean(_loss(_gathered)(parameters, tokens), "d")
    parameters, tokens = _arguments(DEVICES)
    blocks = {name: P(None, "d") if len(leaf.shape) > 1 else P() for name, leaf in parameters["blocks"].items()}
    specs = {"blocks": blocks, "embedding": P()}, P("d")
    place = lambda leaf, spec: leaf.update(sharding=jax.sharding.NamedSharding(mesh, spec))
    args = jax.tree.map(place, (parameters, tokens), specs)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()), args


FORMS: Mapping[str, Callable[[], common.Model]] = {
    "unrolled": unrolled,
    "a scan": scanned,
    "a scan of scans": nested,
    "a scan in a shard_map": gathered,
    "a cond in each block": branches,
}
