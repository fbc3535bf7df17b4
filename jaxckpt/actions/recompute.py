"""Drop a value after the forward pass, and compute it again when the backward pass needs it."""

from __future__ import annotations

from jaxckpt.actions.base import Action


class Recompute(Action):
    """Drops the value; see `RECOMPUTE`."""

    kind = "recompute"
    example = "RECOMPUTE"
    keeps = False


RECOMPUTE: Action = Recompute()
"""Drop the value after the forward pass, and compute it again when the backward pass needs it."""
