"""Schedules of loops: which carries are kept, in what order iterations run again, how often. One file a family.

`jaxckpt/core/schedule.py` says what a schedule is.
"""

from jaxckpt.core.schedule import Iterations as Iterations
from jaxckpt.core.schedule import LoopCost as LoopCost
from jaxckpt.core.schedule import LoopSchedule as LoopSchedule
from jaxckpt.core.schedule import schedule_from as schedule_from
from jaxckpt.schedules.mixed import Mixed as Mixed
from jaxckpt.schedules.mixed import in_turn as in_turn
from jaxckpt.schedules.named import NAMES as NAMES
from jaxckpt.schedules.named import Description as Description
from jaxckpt.schedules.named import Schedule as Schedule
from jaxckpt.schedules.named import describe as describe
from jaxckpt.schedules.named import schedule_of as schedule_of
from jaxckpt.schedules.optimum import Binomial as Binomial
from jaxckpt.schedules.optimum import Move as Move
from jaxckpt.schedules.optimum import Places as Places
from jaxckpt.schedules.optimum import TurnCosts as TurnCosts
from jaxckpt.schedules.optimum import best_runs as best_runs
from jaxckpt.schedules.optimum import binomial as binomial
from jaxckpt.schedules.optimum import extra_iterations as extra_iterations
from jaxckpt.schedules.optimum import extra_steps as extra_steps
from jaxckpt.schedules.optimum import places as places
from jaxckpt.schedules.optimum import places_bytes as places_bytes
from jaxckpt.schedules.optimum import repetitions as repetitions
from jaxckpt.schedules.optimum import revolve as revolve
from jaxckpt.schedules.optimum import split as split
from jaxckpt.schedules.segments import Nested as Nested
from jaxckpt.schedules.segments import checkpointed as checkpointed
from jaxckpt.schedules.segments import log_lengths as log_lengths
from jaxckpt.schedules.segments import nearest_divisors as nearest_divisors
from jaxckpt.schedules.segments import nested as nested
from jaxckpt.schedules.segments import plain as plain
from jaxckpt.schedules.segments import segmented as segmented
from jaxckpt.schedules.segments import sqrt_size as sqrt_size
from jaxckpt.schedules.slots import Slots as Slots
from jaxckpt.schedules.two_levels import Transfer as Transfer
from jaxckpt.schedules.two_levels import TwoLevels as TwoLevels
from jaxckpt.schedules.two_levels import optimal_levels as optimal_levels
