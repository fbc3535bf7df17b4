"""Plans that were returned for a problem, kept beside the compilers' results: more memory never costs more, in a later
call and in another process either.

What is kept is a solution, not what the compiler said of it: that is in the compilers' results. A solution that is
found here is traced and compiled as any other, and where that has become another plan, it counts as what it is now.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt._errors import ArgumentError
from jaxckpt.core.constants import REMEMBERED
from jaxckpt.core.files import read_whole, write_whole
from jaxckpt.memory.cache import PLANS_SUFFIX, surroundings
from jaxckpt.planner.chain import Chain, Drop, Keep, Solution, covers

logger = logging.getLogger("jaxckpt")


@dataclass(frozen=True)
class Found:
    """A plan that was returned.

    Attributes:
      budget: bytes that were asked for; the leanest plan of a search that found none needs more.
      compiled: bytes of its compiled peak.
      effort: what it adds to the step without a plan.
      solution: the chain's.
      by_hand: whether the plan is as people write it.
    """

    budget: int
    compiled: int
    effort: float
    solution: Solution
    by_hand: bool


class Remembered:
    """The plans that were returned for one problem.

    Args:
      folder: of compilers' results; None for none, and then nothing is remembered.
      chain: the problem's; solutions count its candidates.
      facts: what tells the problem from others, beside its chain and the versions of compilers.
    """

    def __init__(self, folder: pathlib.Path | None, chain: Chain, facts: Sequence[str]) -> None:
        self._chain = chain
        self._path = None if folder is None else folder / f"{_digest(chain, facts)[:40]}{PLANS_SUFFIX}"

    def plans(self) -> list[Found]:
        """Returns the plans; none where there is no readable file."""
        if self._path is None:
            return []
        try:
            raw = json.loads(read_whole(self._path))
            found = list(map(_found, raw))
        except (OSError, ArgumentError):
            return []
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            logger.warning("%s does not have plans that were made before; it is not read: %s", self._path, error)
            return []
        return [each for each in found if covers(self._chain, each.solution)]

    def add(self, found: Found) -> None:
        """Keeps a plan, as the last one of at most `REMEMBERED`. If it cannot be written, only the log says so."""
        if self._path is None:
            return
        others = [each for each in self.plans() if each.budget != found.budget]
        raw = [{**vars(each), "solution": list(_raw(each.solution))} for each in [*others, found][-REMEMBERED:]]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(raw))
        except (OSError, ArgumentError) as error:
            logger.info("the plan could not be kept in %s: %s", self._path, error)


def _raw(solution: Solution) -> Iterator[list[Any]]:
    for item in solution:
        what = [item.candidate, item.left] if isinstance(item, Keep) else [list(_raw(item.again))]
        yield [item.start, item.stop, *what]


def _found(raw: Mapping[str, Any]) -> Found:
    budget, compiled, effort, by_hand = (raw[name] for name in ("budget", "compiled", "effort", "by_hand"))
    solution = tuple(map(_item, raw["solution"]))
    return Found(int(budget), int(compiled), float(effort), solution, bool(by_hand))


def _item(raw: Any) -> Keep | Drop:
    start, stop, *what = raw
    if len(what) == 1:
        return Drop(int(start), int(stop), tuple(map(_item, what[0])))
    candidate, left = what
    return Keep(int(start), int(stop), int(candidate), bool(left))


def _digest(chain: Chain, facts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for fact in (*facts, *surroundings().values(), *map(repr, chain.carried)):
        digest.update(f"{fact}\0".encode())
    for place, segment in sorted(chain.segments.items()):
        ways = [(each.kept, each.work, f"{each.time:.6e}", each.host) for each in segment.candidates]
        digest.update(f"{place}{segment.forward_work}{segment.gradient}{ways}\0".encode())
    return digest.hexdigest()
