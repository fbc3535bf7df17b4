"""A compiler that is stopped once it has assigned buffers: the memory of a large program for a TPU in seconds, not minutes.

XLA for TPU schedules a program, assigns its buffers and only then generates code; of the minutes that a large program takes, all but a few
seconds are the last. Where nothing is to run, they are for nothing. The compiler knows no option to stop there, but with a folder to dump
to it writes the buffer assignment before it goes on: so it runs in a process of its own, on the same program with the same options as JAX
would hand to it in this one, and is killed when that file is there.

    python -m jaxckpt.memory.assign FOLDER TARGET

is that process; `assign` starts it. It ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxckpt import _compat
from jaxckpt._errors import UnsupportedJaxError
from jaxckpt.memory.platforms import PLATFORMS
from jaxckpt.memory.targets import Target, target_of

logger = logging.getLogger("jaxckpt")

SMALL = 8 * 1024
"""Programs of fewer bytes, as MLIR's bytecode (some 25 operations), compile to the end in about the time another process takes to start."""

INTERVAL = 0.02
"""Seconds between two looks into the folder."""

_REFUSED = "refused"


@dataclass(frozen=True)
class Assigned:
    """What a compiler said before it was stopped.

    Attributes:
      dump: the scheduled program with its buffer assignment, as XLA dumps it.
      seconds: from the start of the compiler's process until then.
    """

    dump: bytes
    seconds: float


class RefusedError(Exception):
    """The compiler's error; its text is JAX's."""


def stops(target: Target) -> bool:
    """Whether the compiler for a target can be stopped: a TPU's that is not here."""
    return PLATFORMS[target.platform].stops(target.local)


def assign(lowered: Any, options: Mapping[str, Any], target: Target) -> Assigned | None:
    """Returns the buffer assignment of a program without having its code generated.

    Args:
      lowered: the program as `jax.stages.Lowered`.
      options: XLA's options for this program.
      target: one whose compiler `stops`.

    Returns:
      None where the program is better compiled in this process: it is small, or calls back into this process, or the other one does not
      work, which the log tells.

    Raises:
      RefusedError: the compiler refuses the program.
    """
    with tempfile.TemporaryDirectory(prefix="jaxckpt-") as name:
        folder = pathlib.Path(name)
        try:
            request = _compat.compile_request(lowered, {**options, **_compat.dump_options(str(folder / "dump"))})
        except UnsupportedJaxError as error:
            logger.warning("the compiler goes on to the end, which takes longer: %s", error)
            return None
        if request is None or len(request.module) < SMALL:
            return None
        request.write(folder)
        start = time.perf_counter()
        try:
            ended = _run(folder, target, request.name)
        except OSError:
            logger.warning("cannot start another process to compile in", exc_info=True)
            return None
        seconds = time.perf_counter() - start
        if (refused := folder / _REFUSED).exists():
            raise RefusedError(refused.read_text())
        found = _dumped(folder, request.name, "after_optimizations.hlo.pb")
        if ended or not found:
            logger.warning("the compiler ended in another process: %s", (folder / "log").read_text(errors="replace"))
            return None
        return Assigned(pathlib.Path(found[0]).read_bytes(), seconds)


def _run(folder: pathlib.Path, target: Target, name: str) -> bool:
    """Runs the compiler until it has assigned buffers; returns whether it ended before, and failed."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    # -P: no file that happens to lie in the working directory takes the place of a module.
    command = [sys.executable, "-P", "-m", "jaxckpt.memory.assign", str(folder), target.name]
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log) as process,
    ):
        try:
            # The file with the assignment is whole when the one after it is there.
            while process.poll() is None and not _dumped(folder, name, "after_buffer_assignment.hlo.pb"):
                time.sleep(INTERVAL)
            return bool(process.returncode)
        finally:
            process.kill()
            process.wait()


def _dumped(folder: pathlib.Path, name: str, what: str) -> list[str]:
    """Returns the dumps of the program of this name; the compiler may dump helpers beside it."""
    return glob.glob(f"{glob.escape(str(folder / 'dump'))}/*.{glob.escape(name)}.*{what}")


def main(folder: pathlib.Path, target: str) -> None:
    """Compiles what `assign` wrote to a folder."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request = _compat.CompileRequest.read(folder)
    try:
        request.compile(target_of(target).devices)
    except _compat.CompileError as error:
        part = folder / f"{_REFUSED}.part"
        part.write_text(str(error))
        part.rename(folder / _REFUSED)


def _end_with_parent() -> None:
    with contextlib.suppress(OSError):
        sys.stdin.buffer.read()  # until the parent closes its end, or dies
    os._exit(1)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
