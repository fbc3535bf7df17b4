"""Running out of memory: whether an error says so, and how many bytes were missing.

The texts are those of XLA's allocators and compilers, which have no other way to tell the figures:

- a TPU's compiler: "Ran out of memory in memory space hbm. Used 23.99G of 15.48G hbm. Exceeded hbm capacity by 8.51G."
- a TPU's runtime: "Attempting to allocate 768.00M. That was not possible. There are 603.40M free."
- a GPU's: "Out of memory while trying to allocate 21474836480 bytes.", or "... allocate 20.00GiB."
- the CPU's: "Out of memory allocating 281474976710656 bytes."
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from jaxckpt.core.units import parse_bytes

_SIZE = r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B|\s*bytes)?"
_OVER = re.compile(rf"Used\s+{_SIZE} of {_SIZE}", re.IGNORECASE)
_ASKED = re.compile(rf"(?:allocate|allocating|reserve|allocate request for)\s+{_SIZE}", re.IGNORECASE)
_FREE = re.compile(rf"There (?:are|is) {_SIZE} free", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error is JAX's or XLA's own that memory ran out, at compile or at run time."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def missing_bytes(text: str, devices: Sequence[Any] = ()) -> int | None:
    """Returns the bytes that were missing, from the text of an error; None if it names too few figures.

    Args:
      text: the error's.
      devices: those that it ran on. Where the text names only what was asked for, they say what is free.

    >>> missing_bytes("Used 24.00G of 16.00G hbm.") == 8 * 2**30
    True
    >>> missing_bytes("Attempting to allocate 768.00M. That was not possible. There are 512.00M free.") == 256 * 2**20
    True
    >>> missing_bytes("Out of memory allocating 1000 bytes.") is None
    True
    """
    if found := _OVER.search(text):
        return _positive(_bytes(*found.groups()[:2]) - _bytes(*found.groups()[2:]))
    asked = _ASKED.search(text)
    if asked is None:
        return None
    wanted = _bytes(*asked.groups())
    if free := _FREE.search(text):
        return _positive(wanted - _bytes(*free.groups()))
    left = [_free_bytes(device) for device in devices]
    known = [size for size in left if size is not None]
    return _positive(wanted - min(known)) if known else None


def _bytes(number: str, prefix: str) -> int:
    return parse_bytes(f"{number}{prefix}{'iB' if prefix else ''}")


def _positive(count: int) -> int | None:
    return count if count > 0 else None


def _free_bytes(device: Any) -> int | None:
    stats = device.memory_stats() or {}
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)) if "bytes_limit" in stats else None
