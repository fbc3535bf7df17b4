"""Keep a value in device memory from the forward to the backward pass."""

from __future__ import annotations

from jaxckpt.actions.base import Action


class Save(Action):
    """Keeps the value as it is; see `SAVE`."""

    kind = "save"
    example = "SAVE"


SAVE: Action = Save()
"""Keep the value in device memory from the forward to the backward pass."""
