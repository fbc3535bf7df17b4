"""Check whether a module is installed, without importing it."""

from __future__ import annotations

import importlib.util


def installed(module: str) -> bool:
    """Returns whether a module can be imported. Imports only its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package
        return False
