"""Tests run on the CPU, whatever else is there, unless JAX_PLATFORMS says otherwise; targets that are not installed are skipped, loudly.

With JAXCKPT_REQUIRE_TARGETS=1 (continuous integration) a missing target is a failure, so that nothing passes by not running.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

_CHECKED: dict[str, str | None] = {}


def _missing(name: str) -> str | None:
    """Why a target cannot be compiled for here, or None."""
    from jaxckpt._errors import MissingTargetError
    from jaxckpt.memory.targets import Target

    if name not in _CHECKED:
        try:
            assert Target(name).devices
            _CHECKED[name] = None
        except MissingTargetError as error:
            _CHECKED[name] = str(error)
    return _CHECKED[name]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, target in (("cuda", "cuda:h100"), ("tpu", "tpu:v5e:2x2")):
        if item.get_closest_marker(marker) and (reason := _missing(target)):
            if os.environ.get("JAXCKPT_REQUIRE_TARGETS") == "1":
                pytest.fail(f"{target} must be tested here: {reason}")
            pytest.skip(reason)
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU and JAX_PLATFORMS=cuda")
