"""What every benchmark says about itself: hardware, versions, command; and where results go."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import shlex
import sys
from typing import Any

import jax

import jaxckpt
from jaxckpt.core.files import write_whole

RESULTS = pathlib.Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Returns what a figure depends on besides the program: processor, cores, versions, and the command that was
    run.
    """
    return {
        "command": f"python -m {_module()} {shlex.join(sys.argv[1:])}".rstrip(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "backend": jax.default_backend(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxckpt": jaxckpt.__version__,
    }


def processor() -> str:
    """Returns the processor's name as the system has it."""
    info = pathlib.Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def save(name: str, markdown: str, data: Any) -> None:
    """Writes `results/NAME.md` and `results/NAME.json`, the environment in both.

    Args:
      name: of the files.
      markdown: the report, without a word on where it was run.
      data: the same as plain values.
    """
    RESULTS.mkdir(exist_ok=True)
    about = environment()
    footer = (
        f"`{about['command']}` on {about['processor']}, {about['cores']} cores, backend {about['backend']}; jax "
        f"{about['jax']}, "
        f"Python {about['python']}, jaxckpt {about['jaxckpt']}."
    )
    write_whole(RESULTS / f"{name}.md", f"{markdown.rstrip()}\n\n{footer}\n")
    write_whole(RESULTS / f"{name}.json", json.dumps({"environment": about, "results": data}, indent=1) + "\n")


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else pathlib.Path(sys.argv[0]).stem
