"""Gradient checkpointing for JAX and Flax: fit a training step into the memory you have, and prove it with the
compiler.
"""

from jaxckpt import _quiet as _quiet  # imports jax, before anything else does

# isort: split
from jaxckpt import _compat as _compat
from jaxckpt import policies, schedules
from jaxckpt._errors import (
    ArgumentError,
    DoesNotFitError,
    EffectsError,
    FactoryError,
    ForwardModeError,
    InfeasibleBudgetError,
    JaxckptError,
    MissingPackageError,
    MissingTargetError,
    NotDifferentiableError,
    PlanMismatchError,
    StateLostError,
    StructureError,
    TargetError,
    TilingError,
    UnknownTargetError,
    UnmatchedTagError,
    UnreadableDumpError,
    UnsupportedJaxError,
    VerificationError,
)
from jaxckpt.actions import OFFLOAD, RECOMPUTE, SAVE, Action, compress, shard
from jaxckpt.core.bare import without_checkpoints
from jaxckpt.core.graph import Graph
from jaxckpt.core.lift import count_flops, trace
from jaxckpt.core.plan import MemoryEstimate, Plan, PlanReport
from jaxckpt.core.regions import Loop, RecomputedStretch, Region, TiledStretch
from jaxckpt.memory.compare import Comparison, compare
from jaxckpt.memory.estimate import estimate_memory_savings
from jaxckpt.memory.report import MemoryReport, measure
from jaxckpt.memory.residuals import Residual, ResidualReport, residuals
from jaxckpt.memory.targets import Target, compiler_options, targets
from jaxckpt.memory.verify import Verification, verify
from jaxckpt.planner.adaptive import adaptive
from jaxckpt.planner.auto import autocheckpoint
from jaxckpt.planner.frontier import Frontier, frontier
from jaxckpt.planner.problems import plan
from jaxckpt.policies import Policy, intensity_above, larger_than, op, where
from jaxckpt.schedules import Slots
from jaxckpt.show import looks as _looks  # noqa: F401 (has reports print as tables, and draw themselves)
from jaxckpt.transforms.checkpoint import checkpoint, tag
from jaxckpt.transforms.scan import scan
from jaxckpt.transforms.sequential import checkpoint_sequential
from jaxckpt.transforms.tile import tile

_compat.start_within(_quiet.quiet)

__version__ = "0.2.0"

__all__ = [
    "OFFLOAD",
    "RECOMPUTE",
    "SAVE",
    "Action",
    "ArgumentError",
    "Comparison",
    "DoesNotFitError",
    "EffectsError",
    "FactoryError",
    "ForwardModeError",
    "Frontier",
    "Graph",
    "InfeasibleBudgetError",
    "JaxckptError",
    "Loop",
    "MemoryEstimate",
    "MemoryReport",
    "MissingPackageError",
    "MissingTargetError",
    "NotDifferentiableError",
    "Plan",
    "PlanMismatchError",
    "PlanReport",
    "Policy",
    "RecomputedStretch",
    "Region",
    "Residual",
    "ResidualReport",
    "Slots",
    "StateLostError",
    "StructureError",
    "Target",
    "TargetError",
    "TiledStretch",
    "TilingError",
    "UnknownTargetError",
    "UnmatchedTagError",
    "UnreadableDumpError",
    "UnsupportedJaxError",
    "Verification",
    "VerificationError",
    "adaptive",
    "autocheckpoint",
    "checkpoint",
    "checkpoint_sequential",
    "compare",
    "compiler_options",
    "compress",
    "count_flops",
    "estimate_memory_savings",
    "frontier",
    "intensity_above",
    "larger_than",
    "measure",
    "op",
    "plan",
    "policies",
    "residuals",
    "scan",
    "schedules",
    "shard",
    "tag",
    "targets",
    "tile",
    "trace",
    "verify",
    "where",
    "without_checkpoints",
]


def __getattr__(name: str) -> object:
    """Imports `jaxckpt.flax` when it is first asked for: flax is an extra."""
    if name == "flax":
        import importlib

        return importlib.import_module("jaxckpt.flax")
    raise AttributeError(f"module 'jaxckpt' has no attribute {name!r}")
