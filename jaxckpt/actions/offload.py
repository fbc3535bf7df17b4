"""Move a value to host memory in the forward pass, and fetch it back for the backward pass."""

from __future__ import annotations

from typing import Any

from jaxckpt.actions.base import Action, Array, Cost


class Offload(Action):
    """The value is kept in the host's memory; see `OFFLOAD`."""

    kind = "offload"
    on_host = True

    def cost(self, value: Array) -> Cost:
        """Returns the way to the host and back."""
        return Cost(host_bytes=2 * value.bytes)

    def refusal(self, target: Any) -> str:
        """A CPU has no other memory."""
        return "The host's memory is the CPU's own." if target.platform == "cpu" else ""


OFFLOAD: Action = Offload()
"""Move the value to host memory in the forward pass, fetch it back for the backward pass."""
