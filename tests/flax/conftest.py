from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxckpt.flax import functional


@pytest.fixture(params=["once", "thrice"])
def traces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine as it is, and one that traces a function three times: state must change as if it were once."""
    if request.param == "thrice":
        engine = functional.checkpoint

        def tracing(fun: Any, **options: Any) -> Any:
            def call(*args: Any) -> Any:
                jax.eval_shape(fun, *args)
                jax.make_jaxpr(fun)(*args)
                return engine(fun, **options)(*args)

            return call

        monkeypatch.setattr(functional, "checkpoint", tracing)
    return request.param
