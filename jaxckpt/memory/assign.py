"""Stop a TPU's compiler once it has assigned buffers: the memory of a large program in seconds instead of minutes.

XLA for TPUs schedules a program, assigns its buffers, and then generates code. For a large program this takes minutes,
and all but a few seconds are for generating code, which is not needed if the program does not run. The compiler has no
option to stop before that. But if it has a folder for its dump, it writes the buffer assignment there before it
generates code. So it runs in a separate process, on the same program and with the same options that JAX would give it
in this process, and is killed when that file is there.

    python -m jaxckpt.memory.assign FOLDER TARGET

is that process. `assign` starts it, and it ends when the process that started it ends.
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
"""A program with fewer bytes of MLIR bytecode (about 25 operations) compiles to the end in the time that another
process needs to start.
"""

INTERVAL = 0.02
"""Seconds between two checks of the folder."""

_REFUSED = "refused"


@dataclass(frozen=True)
class Assigned:
    """The result of a compiler that was stopped.

    Attributes:
      dump: the scheduled program with its buffer assignment, as XLA dumps it.
      seconds: from the start of the compiler's process until it was stopped.
    """

    dump: bytes
    seconds: float


class RefusedError(Exception):
    """The compiler's error, with JAX's text."""


def stops(target: Target) -> bool:
    """Returns whether the compiler for a target can be stopped: that of a TPU that is not in this machine."""
    return PLATFORMS[target.platform].stops(target.local)


def assign(lowered: Any, options: Mapping[str, Any], target: Target) -> Assigned | None:
    """Returns the buffer assignment of a program; its code is not generated.

    Args:
      lowered: the program as `jax.stages.Lowered`.
      options: XLA's options for this program.
      target: a target for which `stops` is true.

    Returns:
      None if the program must be compiled in this process: it is small, it calls back into this process, or the other
      process does not work (see the log).

    Raises:
      RefusedError: the compiler refuses the program.
    """
    with tempfile.TemporaryDirectory(prefix="jaxckpt-") as name:
        folder = pathlib.Path(name)
        try:
            request = _compat.compile_request(lowered, {**options, **_compat.dump_options(str(folder / "dump"))})
        except UnsupportedJaxError as error:
            logger.warning("the compiler runs to the end, which takes longer: %s", error)
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
    """Runs the compiler until it has assigned buffers. Returns whether it ended before that with an error."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    # -P: a file in the working directory must not replace a module.
    command = [sys.executable, "-P", "-m", "jaxckpt.memory.assign", str(folder), target.name]
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log) as process,
    ):
        try:
            # The file with the assignment is complete when the next file exists.
            while process.poll() is None and not _dumped(folder, name, "after_buffer_assignment.hlo.pb"):
                time.sleep(INTERVAL)
            return bool(process.returncode)
        finally:
            process.kill()
            process.wait()


def _dumped(folder: pathlib.Path, name: str, what: str) -> list[str]:
    """Returns the dumps of the program of this name. The compiler may also dump helper programs."""
    return glob.glob(f"{glob.escape(str(folder / 'dump'))}/*.{glob.escape(name)}.*{what}")


def main(folder: pathlib.Path, target: str) -> None:
    """Compiles the program that `assign` wrote to a folder."""
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
        sys.stdin.buffer.read()  # returns when the parent closes its end, or ends
    os._exit(1)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
