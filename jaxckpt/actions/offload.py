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
        """The planner counts device memory alone."""
        return "The planner has no budget of the host's memory yet; a Policy moves values there: jaxckpt.checkpoint(policy=...)."


OFFLOAD: Action = Offload()
"""Move the value to host memory in the forward pass, fetch it back for the backward pass."""
