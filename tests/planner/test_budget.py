"""Budgets: what they come to in bytes, and what is none."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt._errors import ArgumentError, InfeasibleBudgetError
from jaxckpt.memory import targets
from jaxckpt.memory.targets import Target
from jaxckpt.planner.budget import budget_bytes, check_budget, normal, resident_bytes


def never():
    raise AssertionError("a compile that nobody needs")


@pytest.mark.parametrize(
    ("budget", "count"),
    [
        (1, 1),
        (np.int64(2**40), 2**40),
        ("12GiB", 12 * 2**30),
        ("12 gib", 12 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("7", 7),
    ],
)
def test_bytes_are_themselves_and_nothing_is_compiled_for_them(budget, count):
    got = budget_bytes(budget, unplanned=never, target="cpu")
    assert got == count and type(got) is int


@pytest.mark.parametrize(("budget", "count"), [("60%", 600), (" 12.5 %", 125), ("100%", 1000), (".5%", 5)])
def test_a_share_is_of_the_peak_without_checkpoints(budget, count):
    assert budget_bytes(budget, unplanned=lambda: 1000, target="cpu") == count


@pytest.mark.parametrize(
    "budget",
    [0, -1, "0", "0%", "-5%", "0GiB", "-1GiB", "12 GB or so", "", "  ", "%", "GiB", "nan%", "inf", "devices", "100.1%", "140%",
     True, False, None, 0.6, 4e9, float("nan"), b"4GiB", ["4GiB"], {"a": 1}, np.float32(1), jnp.ones(2)],
)  # fmt: skip
def test_what_is_no_budget_is_an_error_before_anything_is_compiled(budget):
    with pytest.raises(ArgumentError, match="budget must be") as caught:
        budget_bytes(budget, unplanned=never, target="cpu")
    assert caught.value.argument == "budget" and caught.value.got is budget
    with pytest.raises(ArgumentError):
        check_budget(budget)


def test_the_error_says_what_was_meant():
    with pytest.raises(ArgumentError, match="A share is text: '60%'"):
        check_budget(0.6)
    with pytest.raises(ArgumentError, match="at most 100%.*'140%'.*Without a plan it is 100%"):
        check_budget("140%")
    with pytest.raises(ArgumentError, match="'12GiB'.*'60%'.*'device'; got '12 GB or so'"):
        check_budget("12 GB or so")


def test_device_is_the_memory_of_one_that_is_not_here():
    assert budget_bytes("device", unplanned=never, target="cuda:h100") == Target("cuda:h100").memory_bytes
    assert budget_bytes(" DEVICE ", unplanned=never, target="tpu:v5e:2x2") == int(15.75 * 2**30)


def test_device_on_the_cpu_is_an_error_that_says_so():
    with pytest.raises(ArgumentError, match="cpu, which does not say how much memory is free.*'8GiB'"):
        budget_bytes("device", unplanned=never, target="cpu")


@dataclasses.dataclass
class Device:
    """A local accelerator, as far as its memory goes."""

    limit: int
    used: int
    device_kind: str = "NVIDIA H100"

    def memory_stats(self):
        return {"bytes_limit": self.limit, "bytes_in_use": self.used}


def test_device_is_what_is_free_on_the_fullest_local_device_and_arguments_there_are_not_counted_twice(monkeypatch):
    monkeypatch.setattr(targets, "_devices", lambda name, row: (Device(1000, 100), Device(1000, 300)))
    assert budget_bytes("device", unplanned=never, target="cuda") == 700
    assert budget_bytes("device", unplanned=never, target="cuda", resident=50) == 750


def test_a_full_device_is_an_error(monkeypatch):
    monkeypatch.setattr(targets, "_devices", lambda name, row: (Device(2**30, 2**30),))
    with pytest.raises(
        InfeasibleBudgetError, match=r"Nothing is free on cuda: 1\.0 GiB of 1\.0 GiB are in use"
    ) as caught:
        budget_bytes("device", unplanned=never, target="cuda")
    assert (caught.value.budget_bytes, caught.value.least_bytes) == (0, None)


def test_resident_bytes_are_those_of_arrays_on_the_device_each_once():
    import jax

    x, key = jnp.ones((8, 8)), jax.random.key(0)
    leaves = [x, {"again": (x,)}, np.ones(5), 3.0, jax.ShapeDtypeStruct((9,), jnp.float32), key]
    assert resident_bytes(leaves, "cpu") == 256
    assert resident_bytes(leaves, "cuda:h100") == 0


def test_equal_budgets_are_equal_text():
    assert normal("4GiB") == normal(4 * 2**30) == normal(" 4.0 gib")
    assert normal("60%") != normal("60.5%") and normal("device") == "device"
