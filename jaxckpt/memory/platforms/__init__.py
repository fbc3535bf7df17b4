"""Platforms: one file and one subclass of `Platform` for each. `PLATFORMS` has them by name; a target's name begins
with it.

To add a chip of a known platform, add a row to `jaxckpt.memory.chips.CHIPS`. To add a platform, add a file here and a
line below.
"""

from __future__ import annotations

from jaxckpt.core.liveness import FUSING
from jaxckpt.memory.platforms.base import Place, Platform
from jaxckpt.memory.platforms.cpu import Cpu
from jaxckpt.memory.platforms.cuda import Cuda
from jaxckpt.memory.platforms.tpu import Tpu

__all__ = ["PLATFORMS", "Place", "Platform", "add"]

PLATFORMS: dict[str, Platform] = {}
"""Every platform, by name."""


def add(platform: Platform) -> None:
    """Registers a platform: its name for `jaxckpt.Target`, and how its compiler fuses for estimates."""
    PLATFORMS[platform.name] = platform
    FUSING[platform.name] = platform.fusing


for _platform in (Cpu(), Cuda(), Tpu()):
    add(_platform)
