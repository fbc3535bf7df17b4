"""The frameworks, one in each file, and the packages that each needs.

A file `with_NAME` has `VARIANTS`, name -> `Variant`, of which "plain" has no checkpoints and comes first; and
`build(task, variant)`, which returns the figures of one variant: `Measured`.
"""

from collections.abc import Mapping

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "jax": ("jax",),
    "jaxckpt": ("jax",),
    "linen": ("flax", "jax"),
    "nnx": ("flax", "jax"),
    "equinox": ("equinox", "jax"),
    "haiku": ("dm-haiku", "jax"),
    "keras": ("keras", "jax"),
    "torch": ("torch",),
}
"""Framework -> packages as they are installed."""
