"""What tests of measurement share."""

import pytest

from jaxckpt.memory import assign
from jaxckpt.memory import report as module


@pytest.fixture
def compiles(monkeypatch):
    """The compilations of this process, as they come: arguments of `report.compiled_for`."""
    count = []
    compile_ = module.compiled_for
    monkeypatch.setattr(module, "compiled_for", lambda *args: (count.append(args), compile_(*args))[1])
    return count


@pytest.fixture
def compiler_runs(monkeypatch, compiles):
    """The runs of compilers in this process, to the end or until they were stopped."""
    assign = module._assign

    def stopped(*args):
        report, dump = assign(*args)
        if report is not None:
            compiles.append(args)
        return report, dump

    monkeypatch.setattr(module, "_assign", stopped)
    return compiles


@pytest.fixture
def stops(monkeypatch):
    """Returns a function. For a way of stopping a compiler, it returns a list that gets two things of each later run:
    whether the compiler was stopped, and the endings of the files in its dump.
    """

    def of(way):
        runs = []
        run = assign._WAYS[way]

        def noted(folder, *given):
            found = run(folder, *given)
            runs.append((found is not None, {path.suffix for path in (folder / "dump").iterdir()}))
            return found

        monkeypatch.setitem(assign._WAYS, way, noted)
        return runs

    return of
