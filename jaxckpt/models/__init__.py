"""Flax models as factories: `name(checkpoint=None, segment_size=1, ..., real=False) -> (loss, args)`.

One model a file; `common.py` puts `checkpoint` around segments of blocks, `data.py` brings real data. The command line
knows the models by the names of the table NAMES: `jaxckpt plan gpt2 --budget 60%`.

These files are programs like those of users: they import nothing of jaxckpt but its errors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxckpt._errors import MissingPackageError

NAMES: Mapping[str, str] = {
    "gpt2": "gpt:gpt2",
    "gpt2_scan": "gpt:gpt2_scan",
    "gpt_small": "gpt:small",
    "deep": "gpt:deep",
    "deep_scan": "gpt:deep_scan",
    "moe": "moe:moe",
    "moe_small": "moe:small",
    "resnet50": "resnet:resnet50",
    "resnet_small": "resnet:small",
    "unet": "unet:unet",
    "unet_small": "unet:small",
    "lstm": "lstm:lstm",
    "lstm_small": "lstm:small",
    "llama70b": "llama:llama70b",
    "llama_small": "llama:small",
    "moe671b": "pod:moe671b",
    "moe671b_small": "pod:small",
    "chain": "chain:chain",
    "wide": "chain:wide",
}
"""Name of a model -> its file here and its function."""


def factory(name: str) -> Callable[..., Any]:
    """Returns the factory of a model.

    Args:
      name: one of NAMES.

    Raises:
      MissingPackageError: flax, or what else the model needs, is not installed.

    >>> loss, args = factory("gpt_small")()
    >>> args[1].shape
    (8, 128)
    """
    file, _, function = NAMES[name].partition(":")
    try:
        module = importlib.import_module(f"{__name__}.{file}")
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing == "jaxckpt":
            raise
        raise MissingPackageError(
            f"The model {name} needs {missing}, which is not installed. Install it with: pip install 'jaxckpt[flax]' "
            f"(from a clone: pip install -e '.[flax]')."
        ) from error
    found: Callable[..., Any] = getattr(module, function)
    return found
