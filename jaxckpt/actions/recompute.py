"""Drop a value after the forward pass, compute it again when the backward pass needs it."""

from __future__ import annotations

from jaxckpt.actions.base import Action


class Recompute(Action):
    """The value is dropped; see `RECOMPUTE`."""

    kind = "recompute"
    keeps = False


RECOMPUTE: Action = Recompute()
"""Drop the value after the forward pass, compute it again when the backward pass needs it."""
