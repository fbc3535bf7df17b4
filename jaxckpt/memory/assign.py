"""Stop a compiler once it has assigned buffers: the memory of a program without the time for its code.

XLA schedules a program, assigns its buffers, and then generates code, which is not needed if the program does not run.
For a large program on a TPU that takes minutes, and all but a few seconds are for code; for a GPU it is half to four
fifths of the time, for the CPU four fifths. If the compiler has a folder for its dump, it writes the buffer assignment
there before it generates code. It has no option to stop then. There are three ways (`Stop` of
`jaxckpt.memory.platforms.base` names them):

- The compilers for the CPU and for TPUs look for a custom call's implementation when they generate code. The program
  gets a call that has none, at its end, and the compiler fails. The call has no operands and no result, and what reads
  the dump leaves it out.
- The compiler for GPUs reads a file between the two, if it is given one. It gets one that it cannot read, and fails.
- The compiler of a program for several TPUs runs in a separate process, on the same program and with the same options
  that JAX would give it in this process, and is killed when the dump is there.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import UnsupportedJaxError
from jaxckpt.memory.dump import ENDING, largest_dump
from jaxckpt.memory.platforms import PLATFORMS
from jaxckpt.memory.platforms.base import Stop
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


def assign(lowered: Any, options: Mapping[str, Any], target: Target) -> Assigned | None:
    """Returns the buffer assignment of a program; its code is not generated.

    Args:
      lowered: the program as `jax.stages.Lowered`.
      options: XLA's options for this program.
      target: the target that it is lowered for.

    Returns:
      None if the program must be compiled to the end: its platform's compiler cannot be stopped, or does not stop (see
      the log), or the program calls back into this process. If the compiler has to be killed, also if the program is
      small.

    Raises:
      RefusedError: the compiler refuses the program.
    """
    way = PLATFORMS[target.platform].stop(target.local, len(_compat.lowered_devices(lowered)))
    if way is None or (target.platform, way) in _going_on:
        return None
    with tempfile.TemporaryDirectory(prefix="jaxckpt-") as name:
        folder = pathlib.Path(name)
        (folder / "dump").mkdir()
        return _WAYS[way](folder, lowered, {**options, **_compat.dump_options(str(folder / "dump"))}, target)


_going_on: set[tuple[str, Stop]] = set()
"""The platforms whose compilers did not fail where they should, and at what."""


def _at_a_call(folder: pathlib.Path, lowered: Any, options: dict[str, Any], target: Target) -> Assigned | None:
    """Returns the assignment of a compiler that fails at a call that it does not know."""
    request = _request(lowered, options, target)
    if request is None:
        return None
    run = lambda: request.compile(target.devices, stops=True)
    return _failed(folder, run, Stop.CALL, _compat.UNKNOWN_CALL, {}, target)


def _at_a_file(folder: pathlib.Path, lowered: Any, options: dict[str, Any], target: Target) -> Assigned | None:
    """Returns the assignment of a compiler that fails at a file that it cannot read."""
    stopping = PLATFORMS[target.platform].stopping_options(folder / "stop")

    def run() -> None:
        with jax.default_device(target.devices[0]), _compat.no_persistent_cache:
            lowered.compile(compiler_options={**options, **stopping})

    return _failed(folder, run, Stop.FILE, str(folder / "stop"), stopping, target)


def _failed(
    folder: pathlib.Path, run: Callable[[], None], way: Stop, at: str, stopping: Mapping[str, str], target: Target
) -> Assigned | None:
    """Returns the assignment of a compiler that is made to fail.

    Args:
      folder: has the folder of the dump.
      run: runs the compiler.
      way: CALL or FILE.
      at: what the compiler's error has if it failed where it should.
      stopping: the options that make it fail.
      target: what it compiles for.
    """
    start = time.perf_counter()
    try:
        run()
        said = "it failed at nothing"
    except _compat.CompileError as error:
        seconds = time.perf_counter() - start
        found = largest_dump(folder / "dump")
        if _compat.is_stopped(error, at):
            return None if found is None else Assigned(found, seconds)
        refused = _compat.refused_option(error)
        unknown = refused is not None and refused.unknown and refused.name in stopping
        if not unknown and (found is None or _compat.is_out_of_memory(str(error))):
            raise RefusedError(str(error)) from error
        said = str(error)
    _going_on.add((target.platform, way))
    logger.warning("XLA for %s runs to the end, which takes longer: %s", target.platform, said)
    return None


def _request(lowered: Any, options: dict[str, Any], target: Target) -> _compat.CompileRequest | None:
    """Returns what the compiler is given; None if the program calls back into this process, or if JAX does not say."""
    try:
        with jax.default_device(target.devices[0]):
            return _compat.compile_request(lowered, options)
    except UnsupportedJaxError as error:
        logger.warning("the compiler runs to the end, which takes longer: %s", error)
        return None


def _killed(folder: pathlib.Path, lowered: Any, options: dict[str, Any], target: Target) -> Assigned | None:
    """Returns the assignment of a compiler that runs in another process, and is killed."""
    request = _request(lowered, options, target)
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


_WAYS = {Stop.CALL: _at_a_call, Stop.FILE: _at_a_file, Stop.KILL: _killed}


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
