"""An action of a user's, whole in one file: values of four bytes and more are kept as bfloat16."""

import jax.numpy as jnp
import pytest

from jaxckpt.actions import KINDS, Action, Cost


class Half(Action):
    kind = "half"
    changes = True

    def admits(self, value):
        return jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize > 2

    def device_bytes(self, value):
        return value.bytes * 2 // value.dtype.itemsize

    def cost(self, value):
        return Cost(memory_bytes=2 * value.bytes)

    def encode(self, x):
        return x.astype(jnp.bfloat16)

    def decode(self, stored, like):
        return stored.astype(like.dtype)

    def error(self, dtype):
        return 2.0**-8


HALF = Half()


del KINDS["half"]  # other tests look at the actions that jaxckpt has


@pytest.fixture(autouse=True)
def half_is_known():
    """For a module that imports it: its tests run with the action known."""
    KINDS["half"] = Half
    yield
    KINDS.pop("half", None)
