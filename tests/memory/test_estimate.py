"""estimate_memory_savings: the closed form, and that compiled chains have what it says."""

import numpy as np
import pytest

import jaxckpt
from benchmarks import estimates
from jaxckpt import ArgumentError


def test_it_is_a_triple_that_falls_and_rises_with_the_segment():
    without, with_, percent = jaxckpt.estimate_memory_savings(100, 1024, segment_size=10)
    assert percent == pytest.approx(100 * (1 - with_ / without))
    curve = [jaxckpt.estimate_memory_savings(100, 1024, size)[1] for size in (1, 2, 5, 10, 20, 50, 100)]
    assert min(curve) == curve[3]
    assert curve[0] > 4 * curve[3] and curve[-1] > 4 * curve[3]
    assert jaxckpt.estimate_memory_savings(100, "1KiB", "sqrt") == jaxckpt.estimate_memory_savings(100, 1024, 10)
    assert jaxckpt.estimate_memory_savings(100, 1024, 10).savings_percent >= 80


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_short_chains(layers):
    without, with_, percent = jaxckpt.estimate_memory_savings(layers, 10)
    assert 0 <= with_ <= without
    assert 0 <= percent <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 10), "num_layers must be an int >= 0; got -1"),
        ((2.5, 10), "num_layers must be an int >= 0; got 2.5"),
        ((2, "much"), "activation_bytes must be a number of bytes"),
        ((2, 10, 0), "segment_size must be an int of at least 1"),
        ((2, 10, 2.5), "segment_size must be an int of at least 1"),
    ],
)
def test_arguments_that_are_none(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        jaxckpt.estimate_memory_savings(*arguments)


def test_whole_numbers_of_numpy_are_whole_numbers():
    numpys = jaxckpt.estimate_memory_savings(np.int64(10), np.int32(1024), np.int16(2))
    assert numpys == jaxckpt.estimate_memory_savings(10, 1024, 2)


@pytest.mark.compile
@pytest.mark.parametrize("segment", [2, "sqrt"])
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda)])
def test_compiled_chains_have_what_it_says(target, segment):
    (case,) = estimates.run(target, 16, (segment,))
    assert abs(case.error) <= 0.05
    assert case.saved > 0.3  # it would be 0 if checkpointing did nothing
