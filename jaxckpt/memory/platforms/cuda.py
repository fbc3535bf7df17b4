"""NVIDIA's GPUs. Their compiler runs on any machine. It needs a description of the GPU, which is made from the chip's
row.
"""

from __future__ import annotations

import pathlib
import re
import shutil
from typing import Any

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError
from jaxckpt.core.constants import MOST_DEVICES, OVERSTATED_BY_CUDA
from jaxckpt.core.liveness import Branches, Fusing
from jaxckpt.memory.chips import CHIPS, GPU_RULE, Chip
from jaxckpt.memory.platforms.base import Figures, Place, Platform, Stop
from jaxckpt.memory.platforms.installed import installed

_NAME = re.compile(r"([\w-]+?)(?:x(\d+))?")


class Cuda(Platform):
    """XLA for NVIDIA's GPUs."""

    name = "cuda"
    backend = "gpu"
    extra = "aot-cuda"
    local_extra = "cuda12"
    packages = "jax-cuda12-pjrt", "jax-cuda13-pjrt"
    overstated = OVERSTATED_BY_CUDA
    hidden_transfers = 0.0  # XLA's schedule ends 90% of their bytes right where they begin: see docs/actions.md
    # A scan's schedule is chosen before the chip is known: it is chosen for as many cores as an H100 has.
    fusing = Fusing(
        shares_zeros=True,
        accumulates=True,
        sinks_fills=True,
        branches=Branches.HANDED_ON if _compat.COPIES_BRANCHES else Branches.IN_PLACE,
        split_cores=CHIPS["h100"].gpu["cores"],
    )

    def parse(self, text: str) -> Place | None:
        """Returns the GPUs of one host: "h100", "h100x8"."""
        found = _NAME.fullmatch(text)
        if found is None or not 0 < (count := int(found[2] or 1)) <= MOST_DEVICES:
            return None
        return Place(found[1] + (f"x{count}" if count > 1 else ""), found[1], count)

    def missing(self) -> str:
        """Returns the plugin or the assembler. CUDA's libraries are needed only to run programs."""
        if _compat.cuda_plugin() is None:
            return "JAX's CUDA plugin"
        assembler = shutil.which("ptxas") or any(installed(f"nvidia.{module}") for module in ("cuda_nvcc", "cu13"))
        return "" if assembler else "NVIDIA's assembler ptxas"

    def devices(self, place: Place) -> tuple[Any, ...]:
        """Returns compile-only GPUs."""
        return _compat.cuda_topology(place.chip, target_config(CHIPS[place.chip]), place.count)

    def own_options(self, local: bool) -> dict[str, Any]:
        """Returns the option for default kernels if the GPU is not in this machine: XLA then looks for no device to
        tune kernels on.
        """
        return {} if local else _compat.untuned_options()

    def remedy(self, text: str, local: bool) -> dict[str, Any]:
        """Returns the options for matmuls without Triton where XLA finds no tiles for one of its default kernels."""
        return _compat.triton_free_options() if _compat.UNTILED in text and not local else {}

    def has_host_memory(self, local: bool) -> bool:
        """Returns whether the GPU is in this machine: JAX's compile-only GPUs have no memory kinds."""
        return local

    def stop(self, local: bool, devices: int) -> Stop | None:
        """Returns FILE if the GPU is not in this machine. On one that is here, a program may run."""
        return None if local else Stop.FILE

    def stopping_options(self, file: pathlib.Path) -> dict[str, str]:
        """Returns the option that makes XLA read a file between the assignment of buffers and the first kernel."""
        return _compat.stopping_options(file)

    def peak_bytes(self, figures: Figures, timeline: int | None) -> int:
        """Returns XLA's figure, or the sum if something is on the host: XLA then counts the host's temporaries as the
        device's.
        """
        return figures.given + figures.temp if figures.host else figures.peak


def target_config(chip: Chip) -> str:
    """Returns the description of a GPU for XLA: a text proto, GpuTargetConfigProto of xla/stream_executor.

    Values that are not in the table are the same for all GPUs of these three generations (CUDA programming guide,
    "Technical specifications per compute capability"). The exception is the version of cuDNN, which decides only what
    XLA may use of it.
    """
    if not chip.gpu:
        raise ArgumentError("gpu of a chip", GPU_RULE, chip.gpu)
    gpu, (major, minor) = chip.gpu, chip.gpu["capability"]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu["shared_block"] * 1024}
  shared_memory_per_core: {gpu["shared"] * 1024}
  core_count: {gpu["cores"]}
  fpus_per_core: {gpu["units"]}
  memory_bandwidth: {gpu["bandwidth"]}
  l2_cache_size: {int(gpu["l2"] * 2**20)}
  clock_rate_ghz: {gpu["clock"]}
  device_memory_size: {chip.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{gpu["name"]}"
"""
