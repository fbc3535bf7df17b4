"""Stop a compiler once it has assigned buffers: the memory of a program without the time for its code.

XLA schedules a program, assigns its buffers, and then generates code, which is not needed if the program does not run.
For a large program on a TPU that takes minutes, and all but a few seconds are for code; for a GPU it is half to four
fifths of the time. If the compiler has a folder for its dump, it writes the buffer assignment there before it generates
code. It has no option to stop then. There are two ways:

- The compiler for GPUs reads a file between the two, if it is given one. It gets one that it cannot read, and fails.
- The compiler for TPUs runs in a separate process, on the same program and with the same options that JAX would give it
  in this process, and is killed when the dump is there.

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

import jax

from jaxckpt import _compat
from jaxckpt._errors import UnsupportedJaxError
from jaxckpt.memory.dump import ENDING, largest_dump
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
      seconds: from the start of the compiler, or of its process, until it was stopped.
    """

    dump: bytes
    seconds: float


class RefusedError(Exception):
    """The compiler's error, with JAX's text."""


def stops(target: Target) -> bool:
    """Returns whether the compiler for a target can be stopped: that of a GPU or a TPU that is not in this machine."""
    return PLATFORMS[target.platform].stops(target.local)


def assign(lowered: Any, options: Mapping[str, Any], target: Target) -> Assigned | None:
    """Returns the buffer assignment of a program; its code is not generated.

    Args:
      lowered: the program as `jax.stages.Lowered`.
      options: XLA's options for this program.
      target: a target for which `stops` is true.

    Returns:
      None if the program must be compiled to the end: the compiler does not stop (see the log) or it refuses the
      program. If it has to be killed, also if the program is small, or calls back into this process.

    Raises:
      RefusedError: the compiler, which had to be killed, refuses the program.
    """
    with tempfile.TemporaryDirectory(prefix="jaxckpt-") as name:
        folder = pathlib.Path(name)
        (folder / "dump").mkdir()
        options = {**options, **_compat.dump_options(str(folder / "dump"))}
        stopping = PLATFORMS[target.platform].stopping_options(folder / "stop")
        if stopping is None:
            return _killed(folder, lowered, options, target)
        return _failed(folder, lowered, options, stopping, target)


_going_on: set[str] = set()
"""The platforms whose compilers did not fail where they should."""


def _failed(
    folder: pathlib.Path, lowered: Any, options: dict[str, Any], stopping: dict[str, str], target: Target
) -> Assigned | None:
    """Returns the assignment of a compiler that the options `stopping` make fail."""
    if target.platform in _going_on:
        return None
    start = time.perf_counter()
    try:
        with jax.default_device(target.devices[0]), _compat.no_persistent_cache:
            lowered.compile(compiler_options={**options, **stopping})
        said = "it failed at nothing"
    except _compat.CompileError as error:
        seconds = time.perf_counter() - start
        found = largest_dump(folder / "dump")
        if _compat.is_stopped(error, folder / "stop"):
            return None if found is None else Assigned(found, seconds)
        refused = _compat.refused_option(error)
        unknown = refused is not None and refused.unknown and refused.name in stopping
        if not unknown and found is None:
            return None  # compiled to the end, it fails with JAX's error
        said = str(error)
    _going_on.add(target.platform)
    logger.warning("XLA for %s runs to the end, which takes longer: %s", target.platform, said)
    return None


def _killed(folder: pathlib.Path, lowered: Any, options: dict[str, Any], target: Target) -> Assigned | None:
    """Returns the assignment of a compiler that runs in another process, and is killed."""
    try:
        with jax.default_device(target.devices[0]):
            request = _compat.compile_request(lowered, options)
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
    found = _dumps_of(folder, request.name, ENDING)
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
            while process.poll() is None and not _dumps_of(folder, name, "after_buffer_assignment.hlo.pb"):
                time.sleep(INTERVAL)
            return bool(process.returncode)
        finally:
            process.kill()
            process.wait()


def _dumps_of(folder: pathlib.Path, name: str, ending: str) -> list[str]:
    """Returns the files of the program of this name. The compiler may also dump helper programs."""
    return glob.glob(f"{glob.escape(str(folder / 'dump'))}/*.{glob.escape(name)}.*{ending}")


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
