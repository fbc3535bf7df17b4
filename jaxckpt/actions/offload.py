"""Move a value to host memory in the forward pass, and move it back for the backward pass."""

from __future__ import annotations

from typing import Any

from jaxckpt.actions.base import Action, Array, Cost


class Offload(Action):
    """Keeps the value in host memory; see `OFFLOAD`."""

    kind = "offload"
    on_host = True

    def cost(self, value: Array) -> Cost:
        """Returns the bytes to the host and back."""
        return Cost(host_bytes=2 * value.bytes)

    def refusal(self, target: Any) -> str:
        """Returns the same for all targets: the planner counts only device memory."""
        return (
            "The planner has no budget for host memory yet. "
            "A Policy can move values there: jaxckpt.checkpoint(policy=...)."
        )


OFFLOAD: Action = Offload()
"""Move the value to host memory in the forward pass, and move it back for the backward pass."""
