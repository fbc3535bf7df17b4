"""Keeps the start of JAX's native libraries quiet on a machine without an accelerator.

With the compilers for GPU and TPU installed and neither in the machine, those libraries and JAX tell standard error, several times over,
that there is no driver: when jax 0.10 is imported, when a backend is initialised, when a topology is made. That is no news to somebody who
compiles for a device that is not there. Native code writes to the file descriptor, past `sys.stderr`, so that is what is diverted. This
module is imported before jax where jaxckpt is and keeps that import quiet; the package then has JAX's backends start within `quiet`, whoever
asks for them.

Where an accelerator is visible nothing is diverted: there, such a message is the reason why it does not work.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

logger = logging.getLogger("jaxckpt")

# NVIDIA (also in containers, also in WSL), Google, AMD: what jax._src.hardware_utils looks for.
_TPUS = ("/dev/accel0", "/dev/vfio/0")
_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", *_TPUS, "/dev/kfd")

# XLA reads this when a plugin is loaded and leaves out what is less than fatal, also later, when it compiles: without it a program that is
# larger than the device brings lines of scheduler warnings. JAX sets it to "1" when it is imported; a user who sets "0" wants to see all.
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def accelerator_visible() -> bool:
    """Whether this machine has a GPU or a TPU, working or not."""
    return any(os.path.exists(device) for device in _DEVICES)


def tpu_visible() -> bool:
    """Whether this machine has a TPU, or a device that may be one."""
    return any(os.path.exists(device) for device in _TPUS)


class _Diversion(logging.Filter):
    """What stderr is diverted to while anybody in this process is inside `quiet`; there is one instance."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.users = threading.Lock(), 0
        self.saved: int | None = None
        self.captured: IO[bytes] | None = None
        self.level: str | None = None

    def enter(self) -> None:
        with self.lock:
            self.users += 1
            if self.users > 1:
                return
            _JAX_LOGGER.addFilter(self)
            self.level = os.environ.get(_LOG_LEVEL)
            if self.level != "0":
                os.environ[_LOG_LEVEL] = "3"
            self._flush()
            try:
                self.captured = tempfile.TemporaryFile()  # noqa: SIM115 (closed in leave)
                self.saved = os.dup(2)
                os.dup2(self.captured.fileno(), 2)
            except OSError:  # no standard error, or nowhere to write: then it cannot be diverted
                self.saved = None

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users:
                return
            _JAX_LOGGER.removeFilter(self)
            # JAX may have set its default meanwhile, with setdefault, which found ours.
            os.environ[_LOG_LEVEL] = self.level or "1"
            text = ""
            if self.saved is not None:
                self._flush()
                os.dup2(self.saved, 2)
                os.close(self.saved)
                self.saved = None
            if self.captured is not None:
                self.captured.seek(0)
                text = self.captured.read().decode(errors="replace").strip()
                self.captured.close()
                self.captured = None
        if text:
            logger.debug("the native libraries wrote:\n%s", text)

    def filter(self, record: logging.LogRecord) -> bool:
        # JAX logs a plugin's failure as an error. Its text goes where the rest goes; in a notebook sys.stderr is not the descriptor 2.
        logger.debug("JAX logged: %s", record.getMessage(), exc_info=record.exc_info)
        return False

    @staticmethod
    def _flush() -> None:
        with contextlib.suppress(Exception):  # there may be none, or a closed one
            sys.stderr.flush()


_JAX_LOGGER = logging.getLogger("jax._src.xla_bridge")
_diversion = _Diversion()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Diverts standard error to the logger "jaxckpt", at level DEBUG, while a native library starts.

    For fractions of a second: what other threads write to standard error meanwhile goes to the logger too. Exceptions pass as they are.
    Does nothing where an accelerator is visible. Threads may be inside at the same time.
    """
    if accelerator_visible():
        yield
        return
    _diversion.enter()
    try:
        yield
    finally:
        _diversion.leave()


with quiet():  # jax 0.10 loads NVIDIA's libraries as it is imported
    import jax as jax
