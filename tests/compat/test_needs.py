"""A JAX, or a Flax, that lacks anything of the table, or has it in another form, is an ImportError that says so."""

import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import pytest

import jaxckpt
from jaxckpt import JaxckptError, UnsupportedJaxError
from jaxckpt._compat import needs
from tests.compat import lacking

ROOT = pathlib.Path(__file__).parents[2]
CASES = [
    pytest.param(need, what, id=f"{need.symbol}: {what}")
    for need in needs.NEEDS
    if not need.late and need.since <= needs.VERSION
    for what in lacking.ways(need)
]


def imports(package):
    """What came of importing jaxckpt with a package that lacks one thing after another."""
    paths = os.pathsep.join([str(ROOT), str(pathlib.Path(jaxckpt.__file__).parents[1])])
    command = [sys.executable, "-m", "tests.compat.lacking", package]
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def jax_imports():
    return imports("jax")


@pytest.fixture(scope="module")
def flax_imports():
    pytest.importorskip("flax")
    return imports("flax")


def assert_says(found, need, package, installed, known):
    assert found is not None, "imported all the same"
    assert {"UnsupportedJaxError", "JaxckptError", "ImportError"} <= set(found["kinds"]), found
    assert found["symbol"] == need.symbol
    for part in (need.symbol, need.why, f"{package} {installed}", *known):
        assert part in found["text"]


@pytest.mark.parametrize(("need", "what"), CASES)
def test_a_jax_that_lacks_it_is_an_import_error_that_names_it(need, what, jax_imports):
    assert_says(jax_imports[f"{need.symbol}: {what}"], need, "jax", jax.__version__, needs.KNOWN)


def test_a_jax_that_lacks_nothing_is_imported(jax_imports):
    assert jax_imports["nothing"] is None
    assert len(jax_imports) == len(CASES) + 1


def test_a_flax_that_lacks_something_is_an_import_error_that_names_it(flax_imports):
    import flax

    from jaxckpt._compat.flax import KNOWN, NEEDS

    assert flax_imports.pop("nothing") is None
    cases = {f"{need.symbol}: {what}": need for need in NEEDS for what in lacking.ways(need)}
    assert flax_imports.keys() == cases.keys()
    for case, need in cases.items():
        assert_says(flax_imports[case], need, "flax", flax.__version__, KNOWN)


@pytest.mark.parametrize("need", [need for need in needs.NEEDS if need.late], ids=lambda need: need.symbol)
@pytest.mark.parametrize("what", ["all", "its parameters"])
def test_what_is_looked_up_at_first_use_is_the_same_error_then(need, what):
    needs.get(need.symbol)
    with lacking.changed(need.symbol, lacking.ways(need)[what]), pytest.raises(UnsupportedJaxError) as raised:
        needs.get(need.symbol)
    assert raised.value.symbol == need.symbol


def test_devices_that_are_not_here_are_the_same_error_then():
    from jaxckpt._compat import targets

    with lacking.changed("jax.experimental.topologies.get_topology_desc", None):
        with pytest.raises(UnsupportedJaxError, match="compile for devices that are not here"):
            targets.tpu_topology("v5e:2x2", shared=True)


def test_what_came_later_is_not_asked_of_older_versions(monkeypatch):
    monkeypatch.setattr(needs, "VERSION", (0, 10, 2))
    needs.probe([needs.Need("jax.not_there", "try", since=(0, 12))])
    with pytest.raises(UnsupportedJaxError):
        needs.probe([needs.Need("jax.not_there", "try")])


def test_the_error_says_rule_what_came_and_what_to_do_and_has_each_as_an_attribute():
    with pytest.raises(UnsupportedJaxError) as raised:
        needs.probe([needs.Need("jax.not_there", "try it")])
    error = raised.value
    assert isinstance(error, JaxckptError) and isinstance(error, ImportError)
    assert (error.symbol, error.why, error.package, error.installed) == (
        "jax.not_there",
        "try it",
        "jax",
        jax.__version__,
    )
    assert error.known == needs.KNOWN
    assert str(error) == (
        f"jaxckpt needs jax.not_there to try it. jax {jax.__version__} is installed, and it has no such name. "
        "Install a version of jax that jaxckpt is known to work with: 0.10.2 or 0.12.0.1."
    )


def test_the_installed_jax_is_one_that_is_known_to_work_or_newer():
    least = tuple(int(part) for part in needs.KNOWN[0].split("."))
    assert least <= needs.VERSION


def test_the_probe_takes_less_than_20_ms():
    def seconds():
        start = time.perf_counter()
        needs.probe()
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.02
