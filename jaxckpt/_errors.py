"""The exceptions of jaxckpt, as a tree.

    JaxckptError
    ├── ArgumentError (ValueError)          an argument broke a rule: names the argument, the rule, what came, what to do
    ├── UnmatchedTagError (LookupError)     a tag glob of a strict policy matches nothing
    ├── StructureError (TypeError)          a layer of a sequence returned another structure than the next one takes
    ├── NotDifferentiableError (TypeError)  there is nothing to differentiate
    ├── ForwardModeError (TypeError)        a scan that has one reverse mode alone is differentiated forward, or twice in reverse
    ├── EffectsError (TypeError)            a checkpointed function has side effects that a recomputation would repeat
    ├── TargetError
    │   ├── UnknownTargetError (ValueError)     no such target; the nearest names are given
    │   ├── MissingTargetError (ImportError)    the target's compiler is not installed; the extra to install is given
    │   ├── DoesNotFitError (MemoryError)       the target's compiler gives up, for the program does not fit the device
    │   └── UnreadableDumpError (ValueError)    what the target's compiler wrote of its buffers is not of a known layout
    ├── MissingPackageError (ImportError)   an optional package is not installed; the extra to install is given
    ├── UnsupportedJaxError (ImportError)   the installed JAX (or Flax) lacks, or has changed, something private that jaxckpt needs
    ├── PlanMismatchError (ValueError)      a plan does not fit the function that it is applied to
    ├── InfeasibleBudgetError (ValueError)  no plan fits the budget; the least budget that does is given
    ├── VerificationError (AssertionError)  two functions that should agree do not
    └── FactoryError (ValueError)           the command line was given something that is not a model factory

Every one of them is also the built-in exception in brackets, so that code that catches that keeps working. All of them can be
pickled and copied.
"""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Iterable
from typing import Any


class JaxckptError(Exception):
    """The root of all errors that jaxckpt raises of its own.

    An error's figures are its attributes, so that a program need not read its text. A copy has the same attributes; so has an error that was
    pickled, but that an attribute which cannot be pickled, such as a function that an argument was, is its `repr` there.
    """

    def __copy__(self) -> JaxckptError:
        return _again(type(self), self.args, vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> JaxckptError:
        return self.__copy__()  # what the attributes hold is what came, and stays it

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, {name: _picklable(value) for name, value in vars(self).items()})


def _again(kind: type[JaxckptError], args: tuple[Any, ...], attributes: dict[str, Any]) -> JaxckptError:
    """Returns an error with these attributes; its own `__init__`, which would write the text anew, is not called."""
    error = BaseException.__new__(
        kind, *args
    )  # a MemoryError has a __new__ of its own, which its subclasses here cannot use
    super(JaxckptError, error).__init__(*args)  # the built-in exception's: an ImportError has its text from there
    vars(error).update(attributes)
    if "__notes__" in attributes:
        error.__notes__ = list(attributes["__notes__"])
    return error


def _picklable(value: Any) -> Any:
    try:
        pickle.dumps(value)
    except Exception:  # whatever a foreign class raises
        return repr(value)
    return value


class ArgumentError(JaxckptError, ValueError):
    """An argument broke a rule.

    Args:
      argument: the argument's name.
      rule: what it must be, as a phrase that follows "must be".
      got: what came; shown with `repr`.
      hint: what to do about it, a sentence.
    """

    def __init__(self, argument: str, rule: str, got: Any, hint: str = "") -> None:
        self.argument, self.rule, self.got, self.hint = argument, rule, got, hint
        super().__init__(f"{argument} must be {rule}; got {got!r}." + (f" {hint}" if hint else ""))


class UnmatchedTagError(JaxckptError, LookupError):
    """A tag glob of a strict policy matches no tag of the traced function."""


class StructureError(JaxckptError, TypeError):
    """A layer of a sequence returned a structure that the next one does not take."""


class NotDifferentiableError(JaxckptError, TypeError):
    """There is nothing to differentiate: no argument, or no output, of an inexact dtype."""


class ForwardModeError(JaxckptError, TypeError):
    """A function that can be differentiated in reverse alone, and once, is differentiated in another way."""


class EffectsError(JaxckptError, TypeError):
    """A checkpointed function has side effects that the recomputation would repeat."""


class TargetError(JaxckptError):
    """Something is wrong with a compilation target."""


class UnknownTargetError(TargetError, ValueError):
    """No target bears that name."""


class MissingTargetError(TargetError, ImportError):
    """The target is known, but what compiles for it is not installed."""


class DoesNotFitError(TargetError, MemoryError):
    """The target's compiler gives up, for the program does not fit the device.

    Args:
      target: the target's name.
      needed_bytes: what the compiler says that it needs; None where it does not say.
      memory_bytes: what the device has.
      message: the compiler's own words.
    """

    def __init__(self, target: str, needed_bytes: int | None, memory_bytes: int, message: str) -> None:
        self.target, self.needed_bytes, self.memory_bytes = target, needed_bytes, memory_bytes
        super().__init__(f"the program does not fit {target}: {message}")


class UnreadableDumpError(TargetError, ValueError):
    """What the target's compiler wrote of its buffers is cut short, of an unknown layout, or contradicts the compiler's own figures."""


class MissingPackageError(JaxckptError, ImportError):
    """An optional package is not installed."""


class UnsupportedJaxError(JaxckptError, ImportError):
    """The installed JAX (or Flax) lacks something private that jaxckpt needs, or has it in another form.

    Args:
      symbol: what is needed, such as "jax._src.core.DropVar".
      why: what jaxckpt needs it for, as a phrase that follows "to".
      found: what is there instead, as a phrase that follows "it".
      package: name of the package.
      installed: its installed version.
      known: its versions that jaxckpt is known to work with.
    """

    def __init__(
        self, symbol: str, why: str, found: str, *, package: str, installed: str, known: tuple[str, ...]
    ) -> None:
        self.symbol, self.why, self.found = symbol, why, found
        self.package, self.installed, self.known = package, installed, known
        super().__init__(
            f"jaxckpt needs {symbol} to {why}. {package} {installed} is installed, and it {found}. "
            f"Install a version of {package} that jaxckpt is known to work with: {' or '.join(known)}."
        )


class PlanMismatchError(JaxckptError, ValueError):
    """A plan was made for another function, or for other shapes."""


class InfeasibleBudgetError(JaxckptError, ValueError):
    """No plan, or no schedule of a scan, fits the budget.

    Args:
      text: what is said.
      least_bytes: the least budget that was found, or is predicted, to fit. Where the budget is less than the arguments alone, those: then
        more than that is needed, and how much more is not known yet. None where it is not known.
      budget_bytes: the budget.
      stretch: which operations need most at once, as the text has them; None where it names none.
    """

    def __init__(
        self,
        text: str,
        *,
        least_bytes: int | None = None,
        budget_bytes: int | None = None,
        stretch: str | None = None,
    ) -> None:
        self.least_bytes, self.budget_bytes, self.stretch = least_bytes, budget_bytes, stretch
        super().__init__(text)


class VerificationError(JaxckptError, AssertionError):
    """Two functions that should agree, in values or in gradients, do not."""


class FactoryError(JaxckptError, ValueError):
    """What the command line was pointed at is not a model factory."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a sentence that names the known names nearest to `name`, or lists all when none is near.

    >>> did_you_mean("dot", ["dots", "nothing"])
    "Did you mean 'dots'?"
    >>> did_you_mean("xyz", ["dots", "nothing"])
    "There are 'dots', 'nothing'."
    >>> did_you_mean("dot", [])
    'There is nothing to choose from.'
    """
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(repr(n) for n in near)}?"
    return f"There are {', '.join(repr(n) for n in known)}." if known else "There is nothing to choose from."
