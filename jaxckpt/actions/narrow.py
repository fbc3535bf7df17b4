"""Keep integers in fewer bits, where the program shows that they fit: `compress("narrow")`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxckpt._errors import ArgumentError, nearest
from jaxckpt.actions.base import Action, Array, Cost, device_share

DTYPES = tuple(f"{sign}int{bits}" for bits in (8, 16, 32) for sign in ("u", ""))
"""What integers are kept as, the narrowest first, and of equal ones the unsigned first."""


@dataclass(frozen=True, eq=False, repr=False)
class Narrow(Action):
    """Keeps integers in a dtype of fewer bits that holds all that they can be.

    Attributes:
      dtype: what is kept; None if it is to be found for each value.
    """

    dtype: str | None = None

    kind = "narrow"
    example = 'compress("narrow")'
    listed = False
    changes = True

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            hint = nearest(str(self.dtype), DTYPES)
            raise ArgumentError("dtype", f"one of {', '.join(DTYPES)}, or None", self.dtype, hint)

    def given(self, value: Array) -> Action | None:
        """Returns the action with the narrowest dtype that holds the value's integers; None if that is the value's own.

        The dtype that it has already does not count: a plan can be for a program with other numbers in it.
        """
        interval = getattr(value, "interval", None)
        if interval is None or not value.shape or not jnp.issubdtype(value.dtype, jnp.integer):
            return None
        fits = (name for name in DTYPES if _holds(name, interval))
        found = next((name for name in fits if np.dtype(name).itemsize < value.dtype.itemsize), None)
        return None if found is None else Narrow(found)

    def admits(self, value: Array) -> bool:
        """Returns whether the value has integers that fit; of one of which nothing is known, whether it is wider."""
        if self.dtype is not None and getattr(value, "interval", None) is None:
            integer = jnp.issubdtype(value.dtype, jnp.integer)
            return bool(value.shape) and integer and np.dtype(self.dtype).itemsize < value.dtype.itemsize
        return self.given(value) is not None

    def device_bytes(self, value: Array) -> int:
        """Returns the bytes of the narrower integers."""
        return math.ceil(math.prod(value.shape) * np.dtype(self._dtype).itemsize * device_share(value))

    def cost(self, value: Array) -> Cost:
        """Returns that the value is read, and what is stored written and read."""
        return Cost(memory_bytes=value.bytes + 2.0 * self.device_bytes(value))

    def encode(self, x: Any) -> Any:
        """Returns the narrower integers."""
        return x.astype(self._dtype)

    def decode(self, stored: Any, like: Any) -> Any:
        """Returns the integers in the dtype of `like`."""
        return stored.astype(like.dtype)

    def error(self, dtype: Any) -> float:
        """Returns 0: it is exact."""
        return 0.0

    @property
    def _dtype(self) -> str:
        if self.dtype is None:
            raise ValueError("compress('narrow') has a dtype for a value alone: see Narrow.given")
        return self.dtype

    def parameters(self) -> dict[str, Any]:
        """Returns the dtype, where it is set."""
        return {} if self.dtype is None else {"dtype": self.dtype}

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return f"compress('narrow'){'' if self.dtype is None else f' as {self.dtype}'}"


def _holds(name: str, interval: tuple[int, int]) -> bool:
    limits = np.iinfo(name)
    return bool(limits.min <= interval[0] and interval[1] <= limits.max)
