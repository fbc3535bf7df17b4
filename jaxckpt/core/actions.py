"""What may become of a value between its computation in the forward pass and its use in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from jaxckpt._errors import ArgumentError, did_you_mean

KINDS = ("recompute", "save", "offload")


@dataclass(frozen=True)
class Action:
    """One thing that may become of an intermediate value.

    Attributes:
      kind: "recompute", "save" or "offload".
    """

    kind: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError("kind", f"one of {', '.join(KINDS)}", self.kind, did_you_mean(str(self.kind), KINDS))

    def __repr__(self) -> str:
        return self.kind.upper()

    def to_json(self) -> str:
        """Returns the action as a JSON value; `action_from` reads it back."""
        return self.kind


RECOMPUTE = Action("recompute")
"""Drop the value after the forward pass, compute it again when the backward pass needs it."""

SAVE = Action("save")
"""Keep the value in device memory from the forward to the backward pass."""

OFFLOAD = Action("offload")
"""Move the value to host memory in the forward pass, fetch it back for the backward pass."""

ACTIONS = {action.kind: action for action in (RECOMPUTE, SAVE, OFFLOAD)}


def action_from(value: Action | str, argument: str = "action") -> Action:
    """Returns an action from itself or from its name ("save"), in any case.

    Raises:
      ArgumentError: there is no such action.

    >>> action_from("save")
    SAVE
    """
    if isinstance(value, Action):
        return value
    if isinstance(value, str) and value.strip().lower() in ACTIONS:
        return ACTIONS[value.strip().lower()]
    raise ArgumentError(argument, f"an action, one of {', '.join(ACTIONS)}", value, did_you_mean(str(value), ACTIONS))
