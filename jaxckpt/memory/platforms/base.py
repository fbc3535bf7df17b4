"""What differs between the platforms that XLA compiles for, as the questions that the rest of the package asks one."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt.core.liveness import Fusing
from jaxckpt.memory.chips import CHIPS, Chip

Devices = Callable[[], Sequence[Any]]
"""Returns the devices of this machine; raises MissingTargetError where there are none."""


@dataclass(frozen=True)
class Place:
    """The devices that a target's name asks for, which need not be here.

    Attributes:
      name: what stands after the platform's name and a colon, in its one form: "h100x8", "v5e:2x2".
      chip: the key of the chip's row in `jaxckpt.memory.chips.CHIPS`.
      count: how many devices.
    """

    name: str
    chip: str
    count: int


class Platform(abc.ABC):
    """One platform; `jaxckpt.memory.platforms.add` makes it known. What is not said here is as on most platforms.

    Attributes:
      name: what targets' names begin with.
      backend: what `jax.default_backend()` calls it.
      lowering: what XLA calls it.
      extra: the extra of jaxckpt to install to compile for a device that is not here.
      local_extra: the extra to install to use one that is.
      fusing: how its compiler fuses.
      needs_assignment: whether figures of memory depend on the buffer assignment that the compiler dumps.
      code_in_memory: whether a program lies in the device's memory, too.
    """

    name: str
    backend: str
    extra: str = ""
    local_extra: str = ""
    fusing: Fusing = Fusing()
    needs_assignment: bool = False
    code_in_memory: bool = False

    @property
    def lowering(self) -> str:  # noqa: D102 (an attribute, see the class)
        return self.name

    # ------------------------------------------------------------------------------------------------------------ devices

    @abc.abstractmethod
    def parse(self, text: str) -> Place | None:
        """Returns what a target's name says after the platform's, in lower case; None where it is no such name."""

    def smallest(self, chip: str) -> str:
        """Returns the name, after the platform's, of the smallest target with this chip."""
        return chip

    @abc.abstractmethod
    def missing(self) -> str:
        """Returns what has to be installed to compile for a device that is not here; "" where nothing is missing. Imports none of it."""

    @abc.abstractmethod
    def devices(self, place: Place) -> tuple[Any, ...]:
        """Returns compile-only devices.

        Raises:
          UnknownTargetError: the compiler knows no such devices.
          TargetError: the compiler does not start.
        """

    def local_devices(self) -> tuple[Any, ...]:
        """Returns the devices of this machine; raises RuntimeError where there are none."""
        return tuple(jax.devices(self.name))

    def local_chip(self, devices: Devices) -> Chip | None:
        """Returns the row of the devices of this machine, or None where there is none; asks for the devices only if it needs them."""
        kind = devices()[0].device_kind
        rows = (chip for chip in CHIPS.values() if chip.platform == self.name)
        return next((chip for chip in rows if re.search(chip.kind, kind)), None)

    def local_memory(self, devices: Devices) -> int | None:
        """Returns the bytes that a device of this machine lets programs use; None where it does not say."""
        return (devices()[0].memory_stats() or {}).get("bytes_limit")

    # ---------------------------------------------------------------------------------------------------------- compiling

    def options(self) -> dict[str, str]:
        """Returns the compiler options that checkpointing needs to hold."""
        return {}

    def own_options(self, local: bool) -> dict[str, Any]:
        """Returns compiler options that `measure` adds, unless the user sets them."""
        return {}

    def has_host_memory(self, local: bool) -> bool:
        """Whether its devices know of the host's memory."""
        return True

    def stops(self, local: bool) -> bool:
        """Whether its compiler can be stopped once it has assigned buffers, and is worth it: see `jaxckpt.memory.assign`."""
        return False

    def machine(self) -> Any:
        """Returns what of this machine a compiled program depends on, as plain values: a part of the key that measurements are stored by."""
        return None

    def needed_bytes(self, text: str) -> int | None:
        """Returns the bytes that a program needs, of the compiler's words that it does not fit; None where they do not say."""
        return None

    # ------------------------------------------------------------------------------------------------------------ reading

    def space(self, colour: int) -> int:
        """Returns the memory that buffers of a colour of XLA's are in: 0 for main memory, other numbers for memories on the chip."""
        return 0

    def peak_bytes(self, stats: Any, host: int, timeline: int | None) -> int:
        """Returns the peak of device memory.

        Args:
          stats: the compiler's figures, as of `jax.stages.Compiled.memory_analysis`.
          host: bytes in host memory.
          timeline: the peak of the buffer assignment; None where it could not be read.
        """
        return int(stats.peak_memory_in_bytes)

    def temp_bytes(self, stats: Any, peak: int) -> int:
        """Returns what is neither arguments nor results at the peak."""
        return int(stats.temp_size_in_bytes)


def summed(stats: Any) -> int:
    """Returns arguments, results and temporaries, what shares a buffer counted once."""
    given = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(given + stats.temp_size_in_bytes)
