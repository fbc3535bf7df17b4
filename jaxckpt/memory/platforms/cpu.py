"""The CPU of this machine."""

from __future__ import annotations

import os
from typing import Any

from jaxckpt import _compat
from jaxckpt.core.constants import SLOTS_SLOWER
from jaxckpt.core.liveness import Branches, Fusing
from jaxckpt.memory import chips
from jaxckpt.memory.chips import Chip
from jaxckpt.memory.platforms.base import Devices, Figures, Place, Platform, Stop


class Cpu(Platform):
    """XLA for the CPU of this machine."""

    name = "cpu"
    backend = "cpu"
    fusing = Fusing(
        stores_shared=True,
        delays=False,
        sinks_fills=True,
        widens_floats=True,
        branches=Branches.NO_FLAG if _compat.COPIES_BRANCHES else Branches.IN_PLACE,
        host_is_apart=False,
        draws=3,
    )
    host_is_apart = False
    slots_slower = SLOTS_SLOWER

    def parse(self, text: str) -> Place | None:
        """Returns None: the only CPU is that of this machine."""
        return None

    def missing(self) -> str:
        """Returns "": JAX has its compiler."""
        return ""

    def devices(self, place: Place) -> tuple[Any, ...]:
        """Returns the local devices."""
        return self.local_devices()

    def local_chip(self, devices: Devices) -> Chip | None:
        """Returns the row of this machine's CPU."""
        return chips.cpu()

    def local_memory(self, devices: Devices) -> int | None:
        """Returns None: the memory is shared with all other programs of the machine."""
        return None

    def options(self) -> dict[str, str]:
        """Returns the options that prevent XLA from merging the recomputation with the forward pass."""
        return _compat.checkpoint_options("cpu")

    def stop(self, local: bool, devices: int) -> Stop | None:
        """Returns CALL for a program of one device, None for others: see `Tpu.stop`."""
        return Stop.CALL if devices == 1 else None

    def machine(self) -> Any:
        """Returns the number of cores, because XLA splits work by it."""
        return os.cpu_count()

    def peak_bytes(self, figures: Figures, timeline: int | None) -> int:
        """Returns the sum, because XLA's figure has no temporaries on the CPU."""
        return figures.given + figures.temp
