"""What tests of measurement share."""

import pytest

from jaxckpt.memory import report as module


@pytest.fixture
def compiles(monkeypatch):
    """The compilations of this process, as they come: arguments of `report._compile`."""
    count = []
    compile_ = module._compile
    monkeypatch.setattr(module, "_compile", lambda *args: (count.append(args), compile_(*args))[1])
    return count
