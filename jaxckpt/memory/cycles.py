"""What the compiler thinks that each kernel of a program takes, read from the compiled program.

XLA for TPUs has a cost model, and writes its answer beside each fusion once it has generated code: the field
"estimated_cycles" of the backend's configuration. XLA for GPUs and for the CPU writes none.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt._errors import DoesNotFitError
from jaxckpt.memory import cache as results
from jaxckpt.memory.report import compiled_for, devices_of, lowered_for, traced_for
from jaxckpt.memory.targets import Target, compiler_options

logger = logging.getLogger("jaxckpt")

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**63 - 1
"""What the compiler writes where its model does not know."""
_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"\bcalls=%?([\w.-]+)")
_PARAMETER = re.compile(r" parameter\(\d+\)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_KIND = {"reads": "cycles"}
"""Tells these results from those of `jaxckpt.measure` for the same program."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel of a compiled program.

    Attributes:
      cycles: of one run, as the compiler estimates them; None where it has no estimate.
      names: the names of the operations in it, as XLA has them ("jit(f)/scope/dot_general"); first the kernel's own.
    """

    cycles: int | None
    names: tuple[str, ...]


def kernels(text: str) -> list[CompiledKernel]:
    """Returns the kernels of a compiled program, those of a loop's body once.

    Args:
      text: of the program, as of `jax.stages.Compiled.as_text`.
    """
    inside: dict[str, list[tuple[list[str], list[str]]]] = {}  # computation -> (names, calls) of its lines
    found: list[tuple[str, int | None, tuple[list[str], list[str]]]] = []
    computation = ""
    for line in text.splitlines():
        line = line.strip()
        if start := _COMPUTATION.match(line):
            computation = start[1]
            continue
        if _PARAMETER.search(line):
            continue
        said = _NAME.findall(line), _CALLS.findall(line)
        inside.setdefault(computation, []).append(said)
        cycles = _CYCLES.search(line)
        estimate = int(cycles[1]) if cycles else _UNKNOWN
        found.append((computation, None if estimate == _UNKNOWN else estimate, said))
    fused = {call for lines in inside.values() for _, calls in lines for call in calls}

    def names(said: tuple[list[str], list[str]]) -> Iterator[str]:
        own, calls = said
        yield from own
        for call in calls:  # a fusion may hold fusions
            for each in inside.get(call, ()):
                yield from names(each)

    made = (
        CompiledKernel(cycles, tuple(dict.fromkeys(names(said)))) for place, cycles, said in found if place not in fused
    )
    return [kernel for kernel in made if kernel.cycles is not None or kernel.names]


def compiled_kernels(
    fun: Callable[..., Any],
    args: Sequence[Any],
    target: Target,
    cache: str | os.PathLike[str] | bool | None = None,
) -> list[CompiledKernel] | None:
    """Compiles a function to the end, and returns its kernels; None if the compiler refuses it. What was compiled once
    is read from the cache.

    Args:
      fun, args, cache: as of `jaxckpt.measure`.
      target: of a platform whose compiler writes estimates.
    """
    options = compiler_options(target)
    lowered = lowered_for(traced_for(fun, tuple(args), target), target)
    folder = results.folder_of(cache)
    path = None
    if folder is not None:
        path = results.entry(folder, lowered, target.name, devices_of(args, target), options | _KIND)
        if (stored := results.load(path, _KIND)) is not None and stored.dump is not None:
            return [CompiledKernel(cycles, tuple(names)) for cycles, names in json.loads(stored.dump)]
    try:
        compiled, _ = compiled_for(lowered, options, target)
    except (DoesNotFitError, jax.errors.JaxRuntimeError) as error:
        logger.warning(
            "the compiler for %s refuses a stretch; its operations take the seconds of the rates: %s",
            target.name,
            error,
        )
        return None
    found = kernels(compiled.as_text() or "")
    if path is not None:
        results.store(path, results.Answer(_KIND, json.dumps([(each.cycles, each.names) for each in found]).encode()))
    return found
