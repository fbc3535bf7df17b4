"""Backends, and devices that are not in this machine."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import xla_bridge

from jaxckpt._compat import needs


def start_within(context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Makes JAX's backends start within a context, whoever needs them first. After they have started, it has no effect.

    Up to jax 0.12 there is no hook. `jax.devices()`, a first computation and a compilation all call
    `xla_bridge.backends`, which is replaced until it has run.
    """
    if xla_bridge.backends_are_initialized():
        return
    start = xla_bridge.backends

    @functools.wraps(start)
    def backends() -> Any:
        try:
            with context():
                return start()
        finally:
            if xla_bridge.backends is backends:
                xla_bridge.backends = start

    xla_bridge.backends = backends


def cuda_topology(name: str, config: str, count: int) -> tuple[Any, ...]:
    """Returns `count` compile-only GPUs of the kind that the target configuration (a text proto) describes.

    JAX registers the function that makes topologies together with the backend. If CUDA's libraries are missing, jax
    0.10 and 0.12 register neither, although only running a program needs these libraries. Then the plugin is
    initialised without its check for the libraries, and the backend that it registers is removed, because nothing can
    run on it.
    """
    xla_bridge._discover_and_register_pjrt_plugins()
    if "cuda" not in xla_bridge._topology_factories:
        plugin = importlib.import_module(f"jax_plugins.{cuda_plugin()}")
        known = dict(xla_bridge._backend_factories)
        with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
            plugin.initialize()
        if "cuda" not in known:
            xla_bridge._backend_factories.pop("cuda", None)
    description = _topology(name, platform="cuda", target_config=config, topology=f"1x1x{count}")
    return tuple(description.devices)


def cuda_plugin() -> str | None:
    """Returns the name of the installed CUDA plugin of JAX in `jax_plugins`, or None; imports no plugin."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    return next(
        (name for name in ("xla_cuda13", "xla_cuda12") if importlib.util.find_spec(f"jax_plugins.{name}")), None
    )


def tpu_topology(name: str, *, shared: bool, **options: Any) -> tuple[Any, ...]:
    """Returns the compile-only TPUs of a slice such as "v5e:2x2".

    Args:
      shared: whether other processes may load libtpu at the same time.

    libtpu looks for its machine in these environment variables and, without them, in the network. It lets only one
    process load it, so that two processes do not use one TPU. Without a TPU, that would only prevent two processes from
    compiling at the same time. The variables are set only while libtpu loads.
    """
    variables = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
    if shared:
        variables["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    with _environment(variables):
        return tuple(_topology(name, platform="tpu", **options).devices)


def _topology(name: str, **options: Any) -> Any:
    return needs.get("jax.experimental.topologies.get_topology_desc")(name, **options)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, and removes them at the end."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
