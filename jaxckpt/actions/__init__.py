"""Actions: what may become of a value between the forward and the backward pass. One file for each; `base.py` defines
them.
"""

from jaxckpt.actions.base import KINDS as KINDS
from jaxckpt.actions.base import Action as Action
from jaxckpt.actions.base import Array as Array
from jaxckpt.actions.base import Cost as Cost
from jaxckpt.actions.base import action_from as action_from
from jaxckpt.actions.base import asked_of as asked_of

# isort: split
# The imports are in the order in which messages list the actions.
from jaxckpt.actions.recompute import RECOMPUTE as RECOMPUTE

# isort: split
from jaxckpt.actions.save import SAVE as SAVE

# isort: split
from jaxckpt.actions.offload import OFFLOAD as OFFLOAD

# isort: split
from jaxckpt.actions.compress import compress as compress

# isort: split
from jaxckpt.actions.shard import shard as shard


def given(action: Action, value: Array) -> Action:
    """Returns the action if it admits the value, and SAVE otherwise; of a composition the parts that admit it."""
    return action.given(value) or SAVE
