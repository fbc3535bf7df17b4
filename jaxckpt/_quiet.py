"""Keeps messages of JAX's native libraries off standard error while they start, on a machine without an accelerator.

If the compilers for GPUs and TPUs are installed, and the machine has neither device, these libraries and JAX write
several times to standard error that there is no driver: when jax 0.10 is imported, when a backend is initialised, and
when a topology is made. A user who compiles for hardware that is not in the machine already knows this. Native code
writes to the file descriptor and not to `sys.stderr`, so the file descriptor is diverted. If jaxckpt is imported before
jax, this module keeps the import of jax quiet. After that, the package starts JAX's backends within `quiet`, whoever
asks for them.

If an accelerator is visible, nothing is diverted: then such a message says why the accelerator does not work.
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

# XLA reads this when it loads a plugin. With "3", it logs only fatal errors, also later when it compiles; otherwise, a
# program that is larger than the device logs many scheduler warnings. JAX sets it to "1" when it is imported. A user
# who sets "0" wants all messages.
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def accelerator_visible() -> bool:
    """Whether this machine has a GPU or a TPU, working or not."""
    return any(os.path.exists(device) for device in _DEVICES)


def tpu_visible() -> bool:
    """Whether this machine has a TPU, or a device that may be one."""
    return any(os.path.exists(device) for device in _TPUS)


class _Diversion(logging.Filter):
    """Diverts stderr while any thread of this process is inside `quiet`. There is one instance."""

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
            except OSError:  # there is no standard error, or no place to write: nothing can be diverted
                self.saved = None

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users:
                return
            _JAX_LOGGER.removeFilter(self)
            # JAX may have set its default in the meantime; it uses setdefault, which kept our value.
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
        # JAX logs the failure of a plugin as an error. It is diverted too: in a notebook, sys.stderr is not descriptor
        # 2.
        logger.debug("JAX logged: %s", record.getMessage(), exc_info=record.exc_info)
        return False

    @staticmethod
    def _flush() -> None:
        with contextlib.suppress(Exception):  # there may be no sys.stderr, or it may be closed
            sys.stderr.flush()


_JAX_LOGGER = logging.getLogger("jax._src.xla_bridge")
_diversion = _Diversion()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Diverts standard error to the logger "jaxckpt", at level DEBUG, while a native library starts.

    This takes a fraction of a second. In this time, what other threads write to standard error also goes to the logger.
    Exceptions are not changed. If an accelerator is visible, nothing is diverted. Several threads may be inside at the
    same time.
    """
    if accelerator_visible():
        yield
        return
    _diversion.enter()
    try:
        yield
    finally:
        _diversion.leave()


with quiet():  # jax 0.10 loads NVIDIA's libraries when it is imported
    import jax as jax
