"""On the models of benchmarks/models: the same program, or the same peak and matmuls, as `jax.checkpoint` with JAX's
own policy.

Peaks are those of the H100 target. Where two programs lower to the same text they are the same, and nothing is
compiled. `python -m benchmarks.parity` does this for every model at full size; here depth is less, shapes are full
where that compiles in seconds.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import parity

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("jaxckpt.models.gpt:gpt2", {"layers": 2}),
    "gpt_scan": ("jaxckpt.models.gpt:gpt2_scan", {"layers": 4}),
    "resnet": ("jaxckpt.models.resnet:small", {"stages": (1, 1)}),
    "unet": ("jaxckpt.models.unet:small", {}),
    "lstm": ("jaxckpt.models.lstm:lstm", {}),
    "moe": ("jaxckpt.models.moe:small", {"layers": 2}),
    "chain": ("jaxckpt.models.chain:chain", {"layers": 8}),
}


PRESETS = {preset: policy for preset, policy in parity.COUNTERPARTS.items() if preset in ("dots", "dots_no_batch")}


@pytest.mark.cuda
@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_preset_has_the_peak_and_the_matmuls_of_its_counterpart(model, preset):
    spec, sizes = MODELS[model]
    row = parity.compare_with_jax(spec, tuple(sizes.items()), preset=preset, target="cuda:h100")
    assert row.matmuls == row.jax_matmuls > 0
    assert row.peak_bytes == pytest.approx(row.jax_peak_bytes, rel=0.01)


@pytest.mark.cuda
def test_presets_differ_from_one_another():
    """What the test above compares is no constant: the presets keep more and more."""
    spec, sizes = MODELS["gpt_scan"]
    peaks = [
        parity.compare_with_jax(spec, tuple(sizes.items()), preset=preset, target="cuda:h100").peak_bytes
        for preset in ("nothing", "dots_no_batch", "dots")
    ]
    assert peaks == sorted(peaks)
    assert peaks[-1] > 1.2 * peaks[0]


@pytest.mark.parametrize("preset", [None, "nothing", "everything"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_without_a_policy_or_with_a_trivial_one_the_program_is_that_of_jax_checkpoint(model, preset):
    spec, sizes = MODELS[model]
    own = parity.COUNTERPARTS.get(preset)
    assert parity.lowered(spec, sizes, parity.ours(preset)) == parity.lowered(spec, sizes, parity.jaxs(own))
