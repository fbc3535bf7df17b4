"""Whole numbers and bytes as people write them: "12GiB" to an int, an int to "12.0 GiB", `numpy.int64(3)` to 3."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from jaxckpt._errors import ArgumentError

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def as_int(value: Any) -> int | None:
    """Returns an int, of Python or NumPy, as one of Python; None for anything else, a bool too.

    >>> as_int(np.int64(3)), as_int(True), as_int(3.0)
    (3, None, None)
    """
    return int(value) if isinstance(value, (int, np.integer)) and not isinstance(value, bool) else None


def as_number(value: Any) -> float | None:
    """Returns a real number, of Python or NumPy, as one of Python; None for anything else, a bool too.

    >>> as_number(np.float32(0.5)), as_number(np.int64(3)), as_number(True)
    (0.5, 3, None)
    """
    if isinstance(value, (float, np.floating)):
        return float(value)
    return as_int(value)


def parse_bytes(text: str | int, argument: str = "bytes") -> int:
    """Returns a number of bytes, from an int or a string such as "1536", "1.5 KiB" or "2GB".

    Units: B, KB, MB, GB, TB, PB (powers of 1000) and KiB, MiB, GiB, TiB, PiB (powers of 1024), in any case.

    Args:
      text: what to parse.
      argument: the name that an error gives to what was parsed.

    Raises:
      ArgumentError: the text does not parse or the number is negative.

    >>> parse_bytes("1.5 KiB"), parse_bytes("2GB"), parse_bytes(7)
    (1536, 2000000000, 7)
    """
    if (count := as_int(text)) is not None and count >= 0:
        return count
    if isinstance(text, str) and (found := _NUMBER.fullmatch(text)) and found[2].lower() in _UNITS:
        unit = _UNITS[found[2].lower()]
        if unit > 1 or float(found[1]).is_integer():
            return round(float(found[1]) * unit)
    raise ArgumentError(argument, "a number of bytes, such as 1048576, '512MiB' or '2.5GB'", text)


def format_bytes(count: float) -> str:
    """Returns a number of bytes with a binary unit and one decimal: 1610612736 -> "1.5 GiB".

    >>> format_bytes(1610612736), format_bytes(12), format_bytes(-2048)
    ('1.5 GiB', '12 B', '-2.0 KiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """Returns a number of things in words; the plural takes an "s".

    >>> counted(1, "region"), counted(3, "region"), counted(0, "value")
    ('1 region', '3 regions', '0 values')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def added(planned: float | None, plain: float | None) -> float | None:
    """Returns the share that a planned step adds to the plain one; None where one of them is not known."""
    if planned is None or plain is None:
        return None
    return planned / plain - 1 if plain else 0.0
