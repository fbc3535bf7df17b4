"""The CPU of this machine."""

from __future__ import annotations

import os
from typing import Any

from jaxckpt import _compat
from jaxckpt.core.liveness import Fusing
from jaxckpt.memory import chips
from jaxckpt.memory.chips import Chip
from jaxckpt.memory.platforms.base import Devices, Place, Platform, summed


class Cpu(Platform):
    """XLA for CPUs: always here, and nowhere else."""

    name = "cpu"
    backend = "cpu"
    fusing = Fusing(stores_shared=True)

    def parse(self, text: str) -> Place | None:
        """Returns None: there are no CPUs but this machine's."""
        return None

    def missing(self) -> str:
        """Returns "": JAX brings its compiler."""
        return ""

    def devices(self, place: Place) -> tuple[Any, ...]:
        """Returns the local ones."""
        return self.local_devices()

    def local_chip(self, devices: Devices) -> Chip | None:
        """Returns the row of this machine's CPU."""
        return chips.cpu()

    def local_memory(self, devices: Devices) -> int | None:
        """Returns None: memory is shared with everything else on the machine."""
        return None

    def options(self) -> dict[str, str]:
        """Returns what keeps XLA from merging the recomputation with the forward pass."""
        return _compat.checkpoint_options("cpu")

    def machine(self) -> Any:
        """Returns the number of cores, by which XLA splits work."""
        return os.cpu_count()

    def peak_bytes(self, stats: Any, host: int, timeline: int | None) -> int:
        """Returns the sum: XLA's own figure leaves temporaries out here."""
        return summed(stats)
