"""What tests of measurement share."""

import pytest

from jaxckpt.memory import report as module


@pytest.fixture
def compiles(monkeypatch):
    """The compilations of this process, as they come: arguments of `report.compiled_for`."""
    count = []
    compile_ = module.compiled_for
    monkeypatch.setattr(module, "compiled_for", lambda *args: (count.append(args), compile_(*args))[1])
    return count
