"""What may become of a value between forward and backward pass: one file an action; `base.py` says what an action is."""

from jaxckpt.actions.base import KINDS as KINDS
from jaxckpt.actions.base import Action as Action
from jaxckpt.actions.base import Array as Array
from jaxckpt.actions.base import Cost as Cost
from jaxckpt.actions.base import action_from as action_from

# isort: split
# In the order in which messages list them.
from jaxckpt.actions.recompute import RECOMPUTE as RECOMPUTE

# isort: split
from jaxckpt.actions.save import SAVE as SAVE

# isort: split
from jaxckpt.actions.offload import OFFLOAD as OFFLOAD


def given(action: Action, value: Array) -> Action:
    """Returns the action that a value gets: SAVE where the one that it was given cannot be given to it."""
    return action if action.admits(value) else SAVE
