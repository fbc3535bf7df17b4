"""Gradient checkpointing for JAX and Flax: fit a training step into the memory you have, and prove it with the compiler."""

from jaxckpt import policies as policies
from jaxckpt._errors import (
    ArgumentError,
    EffectsError,
    FactoryError,
    InfeasibleBudgetError,
    JaxckptError,
    MissingTargetError,
    NotDifferentiableError,
    PlanMismatchError,
    StructureError,
    TargetError,
    UnknownTargetError,
    UnmatchedTagError,
    VerificationError,
)
from jaxckpt.core.actions import OFFLOAD, RECOMPUTE, SAVE, Action
from jaxckpt.core.graph import Graph, count_flops, trace
from jaxckpt.core.plan import Plan, Region
from jaxckpt.policies import Policy, intensity_above, larger_than, op, where
from jaxckpt.memory.residuals import Residual, ResidualReport, residuals
from jaxckpt.transforms.checkpoint import checkpoint, tag
from jaxckpt.transforms.sequential import checkpoint_sequential

__version__ = "0.1.0"
