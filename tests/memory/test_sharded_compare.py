"""compare for several devices: figures are of one device, and there is no estimate, which would be of all."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt


@pytest.mark.cuda
def test_sharded_arguments_have_peaks_of_one_device_and_no_estimate():
    target = jaxckpt.Target("cuda:h100x2")
    mesh = target.mesh((2,), ("data",))
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    whole = jax.ShapeDtypeStruct((262_144, 64), jnp.float32)
    split = jax.ShapeDtypeStruct((262_144, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    one = jaxckpt.compare({"none": loss}, w, whole, target="cuda:h100")["none"]
    two = jaxckpt.compare({"none": loss}, w, split, target=target)
    assert two["none"].peak_bytes < 0.8 * one.peak_bytes
    assert one.estimate_bytes == pytest.approx(one.peak_bytes, rel=0.1)
    assert two["none"].estimate_bytes is None and two["none"].estimate_error is None
    assert "none" in str(two) and two.to_json()["variants"][0]["estimate_error"] is None
