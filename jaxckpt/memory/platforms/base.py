"""The base class of platforms: the questions that the rest of the package asks about a platform of XLA."""

from __future__ import annotations

import abc
import enum
import pathlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt.core.constants import OVERSTATED
from jaxckpt.core.liveness import Fusing
from jaxckpt.memory.chips import CHIPS, Chip

Devices = Callable[[], Sequence[Any]]
"""Returns the devices of this machine; raises MissingTargetError if there are none."""


@dataclass(frozen=True)
class Place:
    """The devices of a target's name, which may be missing in this machine.

    Attributes:
      name: the part of the target's name after the platform and a colon, in normal form: "h100x8", "v5e:2x2".
      chip: the key of the chip's row in `jaxckpt.memory.chips.CHIPS`.
      count: number of devices.
    """

    name: str
    chip: str
    count: int


class Stop(enum.Enum):
    """How a compiler is stopped between the assignment of buffers and the generation of code.

    Attributes:
      CALL: it fails at a call that it does not know.
      FILE: it fails at a file that it cannot read.
      KILL: it runs in another process, which is killed.
    """

    CALL = "call"
    FILE = "file"
    KILL = "kill"


@dataclass(frozen=True)
class Figures:
    """What a compiler says of the memory of a program, in bytes of one device.

    Attributes:
      argument, output, temp: device memory for arguments, results and temporaries.
      alias: arguments that results are written to; `argument` and `output` both have them.
      peak: the most in use at once.
      host: host memory.
    """

    argument: int
    output: int
    temp: int
    alias: int
    peak: int
    host: int

    @property
    def given(self) -> int:
        """The bytes of arguments and results. Shared buffers count once."""
        return self.argument + self.output - self.alias


class Platform(abc.ABC):
    """One platform. `jaxckpt.memory.platforms.add` registers it. The methods here have the answers of most platforms.

    Attributes:
      name: the beginning of its targets' names.
      backend: its name in `jax.default_backend()`.
      lowering: its name in XLA.
      extra: the extra of jaxckpt that compiles for a device that is not in this machine.
      local_extra: the extra of jaxckpt that uses a device of this machine.
      packages: the packages that have its compiler, besides JAX's own. Their versions are in the key of stored results.
      variables: the environment's variables that its compiler reads, besides XLA_FLAGS. They are in that key, too.
      fusing: how its compiler fuses.
      needs_assignment: whether figures of memory depend on the buffer assignment that the compiler dumps.
      host_is_apart: whether host memory is another one than the device's.
      hidden_transfers: which part of the transfers between device and host its compiler runs beside other work outside
        of loops: 1 for all, 0 if the step waits for each of them there.
      code_in_memory: whether the code of a program is in the device's memory, too.
      overstated: by how much the estimate of a step with checkpoints as people write them may be above its compiled
        peak.
      slots_slower: by which share of a loop's time, forward and backward, it takes longer by `Slots` than a trace says;
        0 where that was not measured.
    """

    name: str
    backend: str
    extra: str = ""
    local_extra: str = ""
    packages: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    fusing: Fusing = Fusing()
    needs_assignment: bool = False
    host_is_apart: bool = True
    hidden_transfers: float = 1.0
    code_in_memory: bool = False
    overstated: float = OVERSTATED
    slots_slower: float = 0.0

    @property
    def lowering(self) -> str:  # noqa: D102 (an attribute, see the class)
        return self.name

    # ---------------------------------------------------------------------------------------------------------- devices

    @abc.abstractmethod
    def parse(self, text: str) -> Place | None:
        """Returns the devices for the part of a target's name after the platform, in lower case; None if it is not such
        a name.
        """

    def smallest(self, chip: str) -> str:
        """Returns the name, without the platform, of the smallest target with this chip."""
        return chip

    @abc.abstractmethod
    def missing(self) -> str:
        """Returns what must be installed to compile for a device that is not in this machine; "" if nothing is missing.
        Imports nothing of it.
        """

    @abc.abstractmethod
    def devices(self, place: Place) -> tuple[Any, ...]:
        """Returns compile-only devices.

        Raises:
          UnknownTargetError: the compiler knows no such devices.
          TargetError: the compiler does not start.
        """

    def local_devices(self) -> tuple[Any, ...]:
        """Returns the devices of this machine; raises RuntimeError if there are none."""
        return tuple(jax.devices(self.name))

    def local_chip(self, devices: Devices) -> Chip | None:
        """Returns the row for the devices of this machine, or None if there is none. Asks for the devices only if it
        needs them.
        """
        kind = devices()[0].device_kind
        rows = (chip for chip in CHIPS.values() if chip.platform == self.name)
        return next((chip for chip in rows if re.search(chip.kind, kind)), None)

    def local_memory(self, devices: Devices) -> int | None:
        """Returns the bytes that programs can use on a device of this machine; None if the device does not say."""
        return (devices()[0].memory_stats() or {}).get("bytes_limit")

    # -------------------------------------------------------------------------------------------------------- compiling

    def options(self) -> dict[str, str]:
        """Returns the compiler options that checkpointing needs."""
        return {}

    def own_options(self, local: bool) -> dict[str, Any]:
        """Returns compiler options that `measure` adds, unless the user sets them."""
        return {}

    def remedy(self, text: str, local: bool) -> dict[str, Any]:
        """Returns compiler options with which its compiler takes a program that it failed on; empty if there are none.

        Args:
          text: the compiler's error.
          local: whether the devices are in this machine.
        """
        return {}

    def has_host_memory(self, local: bool) -> bool:
        """Returns whether its devices can use host memory."""
        return True

    def stop(self, local: bool, devices: int) -> Stop | None:
        """Returns how its compiler is stopped once it has assigned buffers: see `jaxckpt.memory.assign`. None if it
        cannot be stopped.

        Args:
          local: whether the devices are in this machine.
          devices: for how many a program is compiled.
        """
        return None

    def stopping_options(self, file: pathlib.Path) -> dict[str, str]:
        """Returns the compiler options with which its compiler fails once it has assigned buffers, if it is stopped by
        `Stop.FILE`.

        Args:
          file: a name for a file of these options. The compiler's error has that name.
        """
        raise NotImplementedError

    def machine(self) -> Any:
        """Returns the properties of this machine that a compiled program depends on, as plain values. They are in the
        key of stored results.
        """
        return None

    def needed_bytes(self, text: str) -> int | None:
        """Returns the bytes that a program needs, from the compiler's message that it does not fit; None if the message
        does not say.
        """
        return None

    # ---------------------------------------------------------------------------------------------------------- reading

    def space(self, colour: int) -> int:
        """Returns the memory for a colour of XLA's buffers: 0 for main memory, other numbers for memories on the
        chip.
        """
        return 0

    def peak_bytes(self, figures: Figures, timeline: int | None) -> int:
        """Returns the peak of device memory.

        Args:
          figures: the compiler's.
          timeline: the peak of the buffer assignment; None if it could not be read.
        """
        return figures.peak

    def temp_bytes(self, figures: Figures, peak: int) -> int:
        """Returns the bytes at the peak that are neither arguments nor results."""
        return figures.temp
