"""TPUs. Their compiler, libtpu, runs on any machine and knows its chips."""

from __future__ import annotations

import math
import os
import re
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import TargetError, UnknownTargetError
from jaxckpt._quiet import tpu_visible
from jaxckpt.core.constants import MOST_DEVICES
from jaxckpt.core.liveness import Fusing
from jaxckpt.core.units import parse_bytes
from jaxckpt.memory.chips import CHIPS
from jaxckpt.memory.platforms.base import Figures, Place, Platform, Stop
from jaxckpt.memory.platforms.installed import installed

_NAME = re.compile(r"([\w-]+)(?::(\d+(?:x\d+){1,2}))?")
_NO_ROOM = re.compile(r"([\d.]+)([KMGT]?)\)? (?:exceeds available HBM \(|of )([\d.]+)([KMGT]?)")


class Tpu(Platform):
    """XLA for TPUs."""

    name = "tpu"
    backend = "tpu"
    extra = "aot-tpu"
    local_extra = "aot-tpu"
    packages = ("libtpu",)
    variables = "LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH"
    fusing = Fusing(copies_carries=True)
    needs_assignment = True
    code_in_memory = True
    # Those to the host. It fetches a value when the backward pass of its region begins: see `core/fetch.py`.
    hidden_transfers = 0.5

    def parse(self, text: str) -> Place | None:
        """Returns a slice such as "v5e:2x2"; "v5e" is the smallest slice, one host."""
        found = _NAME.fullmatch(text)
        if found is None or found[1] not in CHIPS:
            return None
        dimensions = found[2] or CHIPS[found[1]].slice
        if not dimensions:  # a chip of another platform
            return None
        count = math.prod(map(int, dimensions.split("x")))
        if not 0 < count <= MOST_DEVICES:  # libtpu divides by it
            return None
        return Place(f"{found[1]}:{dimensions}", found[1], count)

    def smallest(self, chip: str) -> str:
        """Returns the slice that is one host."""
        return f"{chip}:{CHIPS[chip].slice}"

    def missing(self) -> str:
        """Returns libtpu."""
        return "" if installed("libtpu") or os.environ.get("TPU_LIBRARY_PATH") else "libtpu"

    def devices(self, place: Place) -> tuple[Any, ...]:
        """Returns compile-only TPUs; raises as `Platform.devices` does."""
        # A host has four TPUs. By default, libtpu of jax 0.10 makes no slice that is less than a host. A v4 chip is two
        # devices by default; with the option "megacore" it is one, as in practice.
        options: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if place.count == 1 else {}
        if place.chip == "v4":
            options["chip_config_name"] = "megacore"
        try:
            return _compat.tpu_topology(place.name, shared=not tpu_visible(), **options)
        except jax.errors.JaxRuntimeError as error:
            kind = UnknownTargetError if str(error).startswith("INVALID_ARGUMENT") else TargetError
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise kind(f"libtpu makes no slice 'tpu:{place.name}': {reason}") from error

    def stop(self, local: bool, devices: int) -> Stop | None:
        """Returns CALL for a program of one device. XLA must know how a call is sharded, and there is no sharding for
        one without operands and results. So the compiler for several devices is killed, if this machine has no TPU:
        only one process can use a TPU.
        """
        if devices == 1:
            return Stop.CALL
        return None if local or tpu_visible() else Stop.KILL

    def needed_bytes(self, text: str) -> int | None:
        """Returns the figure in "256.00G exceeds available HBM (15.75G)" or "Used 256.00G of 15.75G"."""
        found = _NO_ROOM.search(text)
        return parse_bytes(f"{found[1]}{found[2]}iB" if found[2] else found[1]) if found else None

    def space(self, colour: int) -> int:
        """Returns the colour: all colours but 0 are on the chip."""
        return colour

    def peak_bytes(self, figures: Figures, timeline: int | None) -> int:
        """Returns XLA's figure, or the device's part of the buffer assignment if something is on the host."""
        if not figures.host:
            return figures.peak
        return figures.given + figures.temp if timeline is None else timeline

    def temp_bytes(self, figures: Figures, peak: int) -> int:
        """Returns the peak minus arguments and results: XLA's figure has no on-chip memory."""
        return peak - figures.given
