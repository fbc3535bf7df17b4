"""Tests run on the CPU, whatever else is there, unless JAX_PLATFORMS says otherwise; targets that are not installed are
skipped, loudly.

With JAXCKPT_REQUIRE_TARGETS=1 (continuous integration) a missing target is a failure, so that nothing passes by not
running.
"""

from __future__ import annotations

import gc
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# LLVM's optimisations come after XLA has scheduled a program and assigned its buffers: the bytes that are tested stay,
# and compiling takes a third less. It holds for the processes that tests start, too.
os.environ["JAXCKPT_CACHE_DIR"] = "off"
# What another run has compiled is compiled again, and nothing is written to the user's folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _COMPILED = tempfile.TemporaryDirectory(prefix="jaxckpt-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# What JAX compiles for this machine is compiled once in a run: workers, the processes that tests start, and files of
# tests, which `forget` separates, share it. What jaxckpt measures does not come from JAX's cache.

import jax
import pytest

TRACING = """
    compat/test_source.py memory/test_buffers.py memory/test_estimate.py memory/test_wire.py
    core/test_addresses.py core/test_emit.py core/test_files.py core/test_flops.py core/test_graph.py
    core/test_liveness.py core/test_plan.py core/test_primitives.py core/test_purity.py
    core/test_surgery.py core/test_typed.py core/test_units.py
    planner/solvers/test_optimal.py planner/solvers/test_registry.py planner/solvers/test_rules.py planner/solvers/test_staircase.py
    planner/test_budget.py planner/test_chain.py planner/test_costs.py planner/test_mincut.py planner/test_stages.py
    show/test_plans.py test_docs.py test_errors.py test_glossary.py test_imports.py test_policies.py test_public.py
    transforms/test_scan_bytes.py transforms/test_schedules.py
""".split()  # noqa: SIM905 (a list of files is easier to read so)
"""Files and folders of tests that trace, and compile nothing larger than single operations. All others are marked
`compile`.
"""

ONCE = """
    benchmarks core/test_constants.py flax/test_resnet50.py memory/test_compare.py planner/solvers planner/test_floor.py
    planner/test_guide.py planner/test_least_tiles.py planner/test_meshes.py
    pages planner/test_as_people_do.py planner/test_scale.py planner/test_tiles.py show test_cli.py test_docs.py test_glossary.py test_imports.py
    test_examples.py test_plan_files.py test_quiet.py test_templates.py test_training.py transforms/test_tile_random.py
""".split()  # noqa: SIM905
"""Files and folders of tests that are marked `once`: what they ask differs between no two versions of JAX or Python,
or is asked by other tests in a smaller form.
"""

FIRST = ["test_templates.py", "transforms/test_tile_random.py"]
"""Files of tests that take minutes each: they run first, so that no worker is left with one at the end."""

_CHECKED: dict[str, str | None] = {}


def _missing(name: str) -> str | None:
    """Why a target cannot be compiled for here, or None."""
    from jaxckpt._errors import MissingTargetError
    from jaxckpt.memory.targets import Target

    if name not in _CHECKED:
        try:
            assert Target(name).devices
            _CHECKED[name] = None
        except MissingTargetError as error:
            _CHECKED[name] = str(error)
    return _CHECKED[name]


HERE = pathlib.Path(__file__).parent


def _only_traces(path: pathlib.Path) -> bool:
    """Whether a file of tests is in the quick tier, but for tests that say otherwise themselves."""
    return _is_in(path, TRACING)


def _is_in(path: pathlib.Path, places: list[str]) -> bool:
    inside = path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else ""
    return any(inside == each or inside.startswith(f"{each}/") for each in places)


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Does not import files whose tests `-m "not compile..."` would all leave out."""
    chosen = config.option.markexpr or ""
    quick = chosen == "not compile" or chosen.startswith("not compile and ")
    if quick and " or " not in chosen and collection_path.suffix == ".py" and not collection_path.name.startswith("_"):
        return None if collection_path.name == "conftest.py" or _only_traces(collection_path) else True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts each test into its tier: `compile`, `target`, or neither, which is the quick one."""
    assert not (gone := [each for each in (*TRACING, *ONCE, *FIRST) if not (HERE / each).exists()]), (
        f"TRACING, ONCE or FIRST names {gone}; there is none."
    )
    items.sort(key=lambda item: not _is_in(item.path, FIRST))
    for item in items:
        if any(item.get_closest_marker(name) for name in ("cuda", "tpu", "gpu")):
            item.add_marker("target")
        if not _only_traces(item.path):
            item.add_marker("compile")
        if _is_in(item.path, ONCE):
            item.add_marker("once")


class _Named:
    """Names a failed test at once, so that a run that is cut off has said which failed."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when})")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Named(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker takes half of the tests in their order, so that tests of one file share what they cache, and then
    from the other's.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """Python looks for garbage less often, and not among what the imports made: that takes an eighth of the time."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    """JAX keeps what it has traced and compiled: some gigabytes over all tests."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of compilers' answers for this run of pytest, one for all of its workers."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "answers"


@pytest.fixture
def shared_answers(answers: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are not about compiling: a program that another such test has compiled is not compiled again."""
    monkeypatch.setenv("JAXCKPT_CACHE_DIR", str(answers))


@pytest.fixture
def optimised(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests whose programs run for seconds, here or in a process that they start: LLVM optimises them, as it does
    for users.
    """
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, target in (("cuda", "cuda:h100"), ("tpu", "tpu:v5e:2x2")):
        if item.get_closest_marker(marker) and (reason := _missing(target)):
            if os.environ.get("JAXCKPT_REQUIRE_TARGETS") == "1":
                pytest.fail(f"{target} must be tested here: {reason}")
            pytest.skip(reason)
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU and JAX_PLATFORMS=cuda")
