"""The public names are these, each with a docstring; errors are what they say they are."""

import builtins
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import jaxckpt
from jaxckpt import _errors

ROOT = pathlib.Path(jaxckpt.__file__).parent

NAMES = """
    Action ArgumentError Comparison DoesNotFitError EffectsError FactoryError ForwardModeError Frontier Graph InfeasibleBudgetError
    JaxckptError Loop MemoryEstimate MemoryReport MissingPackageError MissingTargetError NotDifferentiableError OFFLOAD Plan
    PlanMismatchError PlanReport Policy RECOMPUTE RecomputedStretch Region Residual ResidualReport SAVE Slots
    StateLostError StructureError Target TargetError
    TiledStretch UnknownTargetError
    TilingError UnmatchedTagError UnreadableDumpError UnsupportedJaxError Verification VerificationError
    adaptive autocheckpoint checkpoint checkpoint_sequential compare compiler_options compress
    count_flops estimate_memory_savings frontier intensity_above larger_than measure op plan policies residuals scan schedules shard tag
    targets tile trace verify where without_checkpoints
""".split()  # noqa: SIM905


def test_the_public_names_are_these():
    modules = {"actions", "core", "memory", "transforms", "flax", "show", "cli", "planner", "factories"}
    modules |= {"models", "variants", "training", "commands", "templates"}
    assert sorted(n for n in vars(jaxckpt) if not n.startswith("_") and n not in modules) == sorted(NAMES)
    assert sorted(jaxckpt.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_docstring(name):
    found = getattr(jaxckpt, name)
    assert isinstance(found, jaxckpt.Action) or len(inspect.getdoc(found) or "") > 20


def test_no_public_function_bears_the_name_of_a_module_at_the_top():
    assert not {path.stem for path in ROOT.glob("*.py")} & (set(NAMES) - {"policies"})


def test_errors_are_also_the_builtin_that_they_name():
    tree = _errors.__doc__
    for line in re.findall(r"(\w+Error) \((\w+)\)", tree):
        assert issubclass(getattr(_errors, line[0]), getattr(builtins, line[1]))
    named = set(re.findall(r"(\w+Error)", tree))
    defined = {n for n, c in vars(_errors).items() if inspect.isclass(c) and issubclass(c, Exception)}
    assert defined <= named
    assert all(issubclass(getattr(_errors, n), jaxckpt.JaxckptError) for n in defined)


@pytest.mark.parametrize("statement", ["import jaxckpt", "import jaxckpt.cli"])
def test_importing_starts_no_backend_and_says_nothing(statement):
    code = f"{statement}\nfrom jax._src import xla_bridge\nassert not xla_bridge._backends, xla_bridge._backends"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_typed_marker_is_there():
    assert (ROOT / "py.typed").exists()
