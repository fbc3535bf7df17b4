"""Move a value to host memory in the forward pass, and move it back for the backward pass."""

from __future__ import annotations

from typing import Any

import jax

from jaxckpt.actions.base import Action, Array, Cost


class Offload(Action):
    """Keeps the value in host memory; see `OFFLOAD`."""

    kind = "offload"
    example = "OFFLOAD"
    on_host = True

    def admits(self, value: Array) -> bool:
        """Returns whether the value is an array of numbers: random keys stay where they are."""
        return not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)

    def cost(self, value: Array) -> Cost:
        """Returns the bytes to the host and back."""
        return Cost(host_bytes=2 * value.bytes)

    def refusal(self, target: Any) -> str:
        """Returns that a CPU has no other memory to move values to; "" for other targets."""
        if target.host_is_apart:
            return ""
        return "A CPU's memory is the host's memory: nothing would be freed. Leave it out, or plan for another target."


OFFLOAD: Action = Offload()
"""Move the value to host memory in the forward pass, and move it back for the backward pass."""
