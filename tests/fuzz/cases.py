"""Cases: a random program and what is done to it, both made from (seed, index) alone; and how a case fails."""

from __future__ import annotations

import dataclasses
import random
import re
import traceback
from dataclasses import dataclass
from typing import Any

from tests.fuzz.builder import TAGS, Style
from tests.fuzz.generate import generate
from tests.fuzz.policies import policy_text
from tests.fuzz.programs import HEADER, VOCABULARY, Program, statements_of


@dataclass(frozen=True)
class Case:
    """A program, and what is done to it.

    Attributes:
      seed, index: what it was made from.
      kind: "checkpoint", "scan", "plan" or "auto".
      program: the program.
      options: what is done to it: name -> Python expression.
    """

    seed: int
    index: int
    kind: str
    program: Program
    options: dict[str, str]

    @property
    def command(self) -> str:
        """The command that runs this case again."""
        return f"python -m tests.fuzz --case {self.seed}:{self.index}"

    def source(self) -> str:
        """Returns a Python program that shows what failed, as far as one call does."""
        lines = [
            HEADER,
            "SCAN = lax.scan"
            if self.kind != "scan"
            else f"SCAN = lambda *a, **k: jaxckpt.scan(*a, **k, {self._keywords()})",
        ]
        return "\n".join(lines) + "\n\n" + self.program.source() + f"# {self.kind}: {self._keywords()}\n"

    def _keywords(self) -> str:
        return ", ".join(f"{name}={text}" for name, text in self.options.items())

    def option(self, name: str) -> Any:
        """Returns an option's value."""
        return eval(self.options[name], dict(VOCABULARY))


KINDS = {"checkpoint": 5, "scan": 3, "plan": 3, "auto": 1}
"""How often each kind of case comes."""


def kind_at(seed: int, index: int) -> str:
    """Returns the kind of the case (seed, index)."""
    rng = random.Random(f"{seed}:{index}")
    return rng.choices(list(KINDS), list(KINDS.values()))[0]


def make(seed: int, index: int) -> Case:
    """Returns the case (seed, index)."""
    rng = random.Random(f"{seed}:{index}")
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    width, rows = rng.choice(((4, 3), (4, 3), (4, 3), (6, 2)))
    if kind in ("plan", "auto"):
        width, rows = rng.choice(((4, 3), (16, 8), (64, 32)))
    style = Style(
        width=width,
        rows=rows,
        statics="arguments" if kind in ("checkpoint", "scan") else "leaves",
        loss=kind in ("plan", "auto"),
    )
    if kind == "scan":
        style = dataclasses.replace(
            style, scans=(rng.choice((1, 1, 2)), rng.choice((3, 7, 12))), statics="none", statements=8
        )
    program = generate(rng, style)
    tags = sorted(
        {tag for tag in TAGS if f"tag($0, {tag!r})" in {statement.text for statement in statements_of(program.fun)}}
    )
    options: dict[str, str] = {"mode": repr(rng.choice(("walk",) * 38 + ("eager", "jit")))}
    if kind == "checkpoint":
        options["policy"] = policy_text(rng, tags) if rng.random() < 0.95 else "None"
        options["prevent_cse"] = repr(rng.random() < 0.8)
    elif kind == "scan":
        del options["mode"]
        options = (
            {"schedule": _schedule(rng)}
            if rng.random() < 0.85
            else {"budget": rng.choice(("'0.2KiB'", "'1KiB'", "'3KiB'", "'1MiB'"))}
        )
        if rng.random() < 0.25:
            options["policy"] = policy_text(rng, ())
    else:
        options["share"] = repr(round(rng.random(), 3))
        options["verify"] = repr(rng.random() < 0.06)
        options["twice"] = repr(rng.random() < 0.3)
    return Case(seed, index, kind, program, options)


def _schedule(rng: random.Random) -> str:
    slots = [f"Slots({n})" for n in (1, 2, 3, 5, 20)]
    nests = [str(rng.randint(1, 5)), f"({rng.randint(1, 4)}, {rng.randint(12, 14)})", "(2, 3, 4)"]
    return rng.choice(["'none'", "'every'", "'sqrt'", "'log'", *nests, *slots])


# ------------------------------------------------------------------------------------------------------------- failures


class Failed(AssertionError):
    """Something does not hold. `what` names the promise, in the same words for all programs."""

    def __init__(self, what: str, detail: str) -> None:
        self.what = what
        super().__init__(f"{what}: {detail}")


class Invalid(Exception):
    """The program itself, without jaxckpt, is none."""


def signature(error: BaseException) -> str:
    """Returns what failures of one cause have in common: the promise, or the exception and where in jaxckpt it was
    raised.
    """
    if isinstance(error, Failed):
        return error.what
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/jaxckpt/" in frame.filename and "/tests/" not in frame.filename
    ]
    place = f"{frames[-1].filename.rpartition('/jaxckpt/')[2]}:{frames[-1].name}" if frames else "outside of jaxckpt"
    words = re.sub(r"[0-9]+|\[.*?\]|\(.*?\)|'.*?'", "…", str(error).splitlines()[0] if str(error) else "")[:60]
    return f"{type(error).__name__} in {place}: {words}"
