"""One platform a file, all of them subclasses of `Platform`. `PLATFORMS` has them by the names that targets' names begin with.

Another chip of a platform is a row of `jaxckpt.memory.chips.CHIPS`; another platform is a file like these and a line below.
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
    """Makes a platform known: to `jaxckpt.Target` by its name, and to estimates by how its compiler fuses."""
    PLATFORMS[platform.name] = platform
    FUSING[platform.name] = platform.fusing


for _platform in (Cpu(), Cuda(), Tpu()):
    add(_platform)
