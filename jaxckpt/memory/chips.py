"""The chips that can be compiled for: their memory and their rates.

All rates are peak rates of dense operations on one device, from the makers' data sheets. They are for roofline models;
no program reaches them.

- "float32" is the rate of a float32 matmul as XLA runs it by default (`jax.default_matmul_precision` unset): TF32 on
  NVIDIA GPUs since Ampere, one bfloat16 pass on TPUs, true float32 on the CPU.
- If the chip has no unit for a type, the rate is that of the type that XLA converts it to: float16 for float8 on an
  A100, bfloat16 for float8 and float16 on these TPUs.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxckpt._errors import ArgumentError
from jaxckpt.core.constants import CPU_BANDWIDTH, CPU_CORE_RATE
from jaxckpt.core.units import as_number

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device: an entry of the table.

    A TPU's compiler knows its chips by name. So a row for TPUs must have the name of one that it knows, such as "v5e";
    the figures are free.

    Attributes:
      platform: name of its platform: see `jaxckpt.memory.platforms`.
      kind: a pattern that matches JAX's `device_kind` of such a device.
      memory_bytes: bytes of main memory that a program can use.
      flops: FLOP/s of dense matmuls by name of dtype. A multiply and an add are two operations, for int8 too.
      bandwidth: bytes/s of the main memory.
      host_bandwidth: bytes/s of the link to the host, in one direction.
      link_bandwidth: bytes/s of the links to other devices along one axis of a mesh, in one direction.
      gpu: the properties of this GPU for the compiler, `GPU_PROPERTIES`; empty for others.
      slice: for the compiler, the smallest slice of TPUs that has whole hosts, "2x2".
      clock: Hz of the cycles that its compiler counts; 0 if the compiler counts none.

    Raises:
      ArgumentError: a figure is no number above 0, `flops` lacks float32, or `gpu` has other names.
    """

    platform: str
    kind: str
    memory_bytes: int
    flops: Mapping[str, float]
    bandwidth: float
    host_bandwidth: float
    link_bandwidth: float
    gpu: Mapping[str, Any] = field(default_factory=dict)
    slice: str = ""
    clock: float = 0.0

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bandwidth", "host_bandwidth", "link_bandwidth"):
            _check(f"{name} of a chip", "a number above 0", getattr(self, name))
        rates = self.flops if isinstance(self.flops, Mapping) else {}
        if "float32" not in rates:
            rule = "a mapping from a dtype's name to FLOP/s, with float32"
            raise ArgumentError("flops of a chip", rule, self.flops)
        for name, rate in rates.items():
            _check(f"flops[{name!r}] of a chip", "a number above 0", rate)
        if not isinstance(self.gpu, Mapping) or (self.gpu and set(self.gpu) != set(GPU_PROPERTIES)):
            raise ArgumentError("gpu of a chip", GPU_RULE, self.gpu)


GPU_PROPERTIES = ("name", "capability", "cores", "units", "shared", "shared_block", "l2", "clock", "bandwidth")
"""Names of the properties of a GPU for the compiler: its name, compute capability, multiprocessors, float32 units in
each, KiB of shared memory of each and of a block at most, MiB of L2, GHz of the boost clock, bytes/s of the memory.
"""


GPU_RULE = f"a mapping with {', '.join(GPU_PROPERTIES)}, and no other name"


def _check(name: str, rule: str, value: Any) -> None:
    number = as_number(value)
    if number is None or not 0 < number < math.inf:
        raise ArgumentError(name, rule, value)


class Chips(dict[str, Chip]):
    """Name of the chip in targets' names -> its row.

    Raises, where a row is added:
      ArgumentError: the name is not what a target's name can have, or the row is no `Chip`.
    """

    def __setitem__(self, name: str, row: Chip) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
            rule = "a chip's name in lower case: letters, digits, - and _, as after the colon of a target's name"
            raise ArgumentError("name", rule, name)
        if not isinstance(row, Chip):
            raise ArgumentError("row", "a jaxckpt.memory.chips.Chip", row)
        super().__setitem__(name, row)


def _tera(
    float32: float, bfloat16: float, float16: float, int8: float, float8: float, **others: float
) -> Mapping[str, float]:
    rates = {
        "float32": float32,
        "bfloat16": bfloat16,
        "float16": float16,
        "int8": int8,
        "float8_e4m3fn": float8,
        "float8_e5m2": float8,
    }
    return MappingProxyType({name: rate * 1e12 for name, rate in (rates | others).items()})


# GPUs. Rates, bandwidths and PCIe are from NVIDIA's data sheets, without sparsity, for SXM parts: "NVIDIA A100 Tensor
# Core GPU" (2021), "NVIDIA H100 Tensor Core GPU" (2023) and the H100 white paper, "NVIDIA H200 Tensor Core GPU" (2024),
# "NVIDIA HGX B200" and "NVIDIA DGX B200" (2025; an eighth of a board of eight), "NVIDIA GB200 NVL72" (2025; a 72nd of
# the rack). For PCIe and NVLink: half of the figure for both directions. The host link of a GB200 is NVLink-C2C: 900
# GB/s in both directions, which the two GPUs of a board share. Usable memory is what the CUDA driver reports. It is a
# little less than the 80, 141, 180 and 186 GB of the product (H200: 139.8 GiB as frameworks print it). For the
# compiler: multiprocessors, float32 units in each, L2 and boost clock are from the white papers. Shared memory of a
# multiprocessor, and the most that one block can opt in to, are from the table "Technical specifications per compute
# capability" in the CUDA programming guide. NVIDIA publishes no such figures for Blackwell: its multiprocessors, L2,
# clock, memory and bandwidth are what the driver reports, from XLA (xla/backends/gpu/target_config/specs, b200.txtpb
# and gb200.txtpb).
_HOPPER = {
    "capability": (9, 0),
    "cores": 132,
    "units": 128,
    "shared": 228,
    "shared_block": 227,
    "l2": 50,
    "clock": 1.98,
}
_BLACKWELL = {"capability": (10, 0), "units": 128, "shared": 228, "shared_block": 227}
_AMPERE = {"capability": (8, 0), "cores": 108, "units": 64, "shared": 164, "shared_block": 163, "l2": 40, "clock": 1.41}
# TPUs. Rates and HBM bandwidth are from Google's pages "TPU v4", "v5e", "v5p" and "v6e" (cloud.google.com/tpu/docs).
# Usable memory is what libtpu reports when a program does not fit ("exceeds available HBM (15.75G)"). Google publishes
# no rate of the host link. The book "How to Scale Your Model" (Austin et al., 2025) assumes a PCIe link of generation 3
# x16, and for v6e one like generation 4. The rate of a link between chips is from the same book; an axis of a mesh has
# two such links. The clocks of v4, v5e and v5p are those that the peak rates imply: a matrix unit has 128 x 128 cells;
# v4 and v5p have eight of them, v5e four. By the compiler's cycles a large matmul then runs at 90 to 98% of the peak
# rate. The clock of v6e is taken to be v5p's; there it runs at 85 to 110%.
CHIPS = Chips({
    "h100": Chip(
        "cuda", r"H100", 84_978_434_048, _tera(494.7, 989.4, 989.4, 1978.9, 1978.9, float64=66.9), 3.35e12, 64e9, 450e9,
        gpu=_HOPPER | {"name": "NVIDIA H100 80GB HBM3", "bandwidth": 3_352_320_000_000},
    ),
    "h200": Chip(
        "cuda", r"H200", int(139.8 * GIB), _tera(494.7, 989.4, 989.4, 1978.9, 1978.9, float64=66.9), 4.8e12, 64e9, 450e9,
        gpu=_HOPPER | {"name": "NVIDIA H200", "bandwidth": 4_800_000_000_000},
    ),
    "b200": Chip(
        "cuda", r"\bB200", 191_514_411_008, _tera(1125, 2250, 2250, 4500, 4500, float64=37), 8e12, 64e9, 900e9,
        gpu=_BLACKWELL | {"name": "NVIDIA B200", "bandwidth": 7_672_320_000_000, "cores": 148, "l2": 126.5, "clock": 1.965},
    ),
    "gb200": Chip(
        "cuda", r"\bGB200", 197_897_748_480, _tera(1250, 2500, 2500, 5000, 5000, float64=40), 8e12, 225e9, 900e9,
        gpu=_BLACKWELL | {"name": "NVIDIA GB200", "bandwidth": 7_928_064_000_000, "cores": 152, "l2": 129.25, "clock": 2.062},
    ),
    "a100": Chip(
        "cuda", r"A100", 85_100_068_864, _tera(156, 312, 312, 624, 312, float64=19.5), 2.039e12, 32e9, 300e9,
        gpu=_AMPERE | {"name": "NVIDIA A100-SXM4-80GB", "bandwidth": 2_039_040_000_000},
    ),
    "v5e": Chip(
        "tpu", r"TPU v5 ?(lite|e)$", int(15.75 * GIB), _tera(197, 197, 197, 393, 197), 8.19e11, 16e9, 9e10,
        slice="2x2", clock=1.5e9,
    ),
    "v5p": Chip(
        "tpu", r"TPU v5p?$", int(95.74 * GIB), _tera(459, 459, 459, 918, 459), 2.765e12, 16e9, 1.8e11,
        slice="2x2x1", clock=1.75e9,
    ),
    "v6e": Chip(
        "tpu", r"TPU v6 ?(lite|e)$", int(31.25 * GIB), _tera(918, 918, 918, 1836, 918), 1.64e12, 32e9, 1.8e11,
        slice="2x2", clock=1.75e9,
    ),
    "v4": Chip(
        "tpu", r"TPU v4$", int(30.75 * GIB), _tera(275, 275, 275, 275, 275), 1.228e12, 16e9, 9e10,
        slice="2x2x1", clock=1.05e9,
    ),
})  # fmt: skip
"""The rows. A program may add its own: see `Chips`."""


@functools.cache
def cpu() -> Chip:
    """Returns the row of this machine's CPU. Memory is that of the operating system; rates are an estimate."""
    cores = os.cpu_count() or 1
    rate = cores * CPU_CORE_RATE / 1e12
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # XLA for the CPU computes narrow types in float32. Host memory is the CPU's memory.
    return Chip(
        "cpu",
        "cpu",
        memory,
        _tera(rate, rate, rate, rate, rate, float64=rate / 2),
        CPU_BANDWIDTH,
        CPU_BANDWIDTH,
        CPU_BANDWIDTH,
    )
