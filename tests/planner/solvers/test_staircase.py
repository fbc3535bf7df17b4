"""Step functions: sums, envelopes and thinning against their definitions, point by point."""

import numpy as np
import pytest

from jaxckpt.planner.solvers.staircase import Staircase, envelope, joined, thin


def random_steps(rng, count):
    bytes_ = np.sort(rng.choice(10 * count, count, replace=False))
    return Staircase(bytes_, np.sort(rng.uniform(0, 1, count))[::-1])


@pytest.mark.parametrize("count", [1, 30, 9000])  # with 9,000 points the first sieve works too
def test_the_envelope_is_the_least_at_every_budget(count):
    rng = np.random.default_rng(count)
    bytes_, seconds = rng.integers(0, 3 * count, count), rng.uniform(0, 1, count)
    seconds -= bytes_ / count  # falling on the whole: many points lie on the envelope
    found = envelope(bytes_, seconds)
    assert found.least == bytes_.min()
    assert (np.diff(found.bytes) > 0).all() and (np.diff(found.seconds) < 0).all()
    for budget in rng.integers(found.least, 3 * count + 1, 200):
        assert found.at(int(budget)) == seconds[bytes_ <= budget].min()


def test_sums_of_rows_are_the_sums_at_every_budget():
    rng = np.random.default_rng(0)
    first = [random_steps(rng, int(n)) for n in rng.integers(1, 20, 12)]
    second = [random_steps(rng, int(n)) for n in rng.integers(1, 20, 12)]
    extra = rng.uniform(0, 1, 12)
    row, bytes_, seconds = joined(first, second, extra)
    for i in range(12):
        found = envelope(bytes_[row == i], seconds[row == i])
        assert found.least == max(first[i].least, second[i].least)
        for budget in range(found.least, 250):
            assert found.at(budget) == pytest.approx(first[i].at(budget) + second[i].at(budget) + extra[i])


@pytest.mark.parametrize("limit", [2, 3, 50, 499])
def test_thinning_keeps_both_ends_and_never_promises_more(limit):
    steps = random_steps(np.random.default_rng(1), 500)
    found = thin(steps, limit)
    assert len(found.bytes) == limit
    assert (found.bytes[[0, -1]] == steps.bytes[[0, -1]]).all()
    assert (found.at(steps.bytes) >= steps.seconds).all()
    assert set(zip(*found)) <= set(zip(*steps))


def test_thinning_leaves_out_what_hardly_matters():
    bytes_ = np.arange(100)
    seconds = np.where(bytes_ < 50, 10.0, 5.0) - bytes_ * 1e-6
    found = thin(Staircase(bytes_, seconds), 4)
    assert 50 in found.bytes
    assert np.abs(found.at(bytes_) - seconds).max() < 1e-4
