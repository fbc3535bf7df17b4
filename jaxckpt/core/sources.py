"""Source lines as people read them."""

from __future__ import annotations

import pathlib


def short_source(source: str) -> str:
    """Returns a source line without the folders of its file.

    >>> short_source("/home/me/models/mlp.py:12 (loss)"), short_source("mlp.py:3"), short_source("")
    ('mlp.py:12 (loss)', 'mlp.py:3', '')
    """
    return pathlib.PurePath(source).name
