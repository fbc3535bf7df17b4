"""The exceptions of jaxckpt, as a tree::

    JaxckptError
    ├── ArgumentError (ValueError)          an argument broke a rule: the argument, the rule, what came, what to do
    ├── UnmatchedTagError (LookupError)     a tag glob of a strict policy matches nothing
    ├── StructureError (TypeError)          a layer returned a structure that the next layer does not take
    ├── NotDifferentiableError (TypeError)  there is nothing to differentiate
    ├── ForwardModeError (TypeError)        a scan with only one reverse mode is differentiated in another way
    ├── EffectsError (TypeError)            a checkpointed or tiled function has side effects that would repeat
    ├── TilingError (ValueError)            an operation couples the rows along the axis that a function is tiled along
    ├── TargetError
    │   ├── UnknownTargetError (ValueError)     no such target; the nearest names are given
    │   ├── MissingTargetError (ImportError)    the target's compiler is not installed; the extra to install is given
    │   ├── DoesNotFitError (MemoryError)       the program does not fit the target's device
    │   └── UnreadableDumpError (ValueError)    the compiler's dump of its buffers cannot be read
    ├── MissingPackageError (ImportError)   an optional package is not installed; the extra to install is given
    ├── UnsupportedJaxError (ImportError)   a private part of JAX or Flax is missing or has changed
    ├── PlanMismatchError (ValueError)      a plan does not fit the function that it is applied to, or is not valid
    ├── InfeasibleBudgetError (ValueError)  no plan fits the budget; the least that one needs is given, if known
    ├── StateLostError (MemoryError)        a step ran out of memory after its donated arguments were consumed
    ├── VerificationError (AssertionError)  two functions that should agree differ
    └── FactoryError (ValueError)           the argument of the command line is not a model factory

Each of them is also the built-in exception in brackets, so code that catches the built-in exception keeps working. All
of them can be pickled and copied.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar


class JaxckptError(Exception):
    """The root of all errors that jaxckpt defines.

    The figures of an error are attributes, so that a program does not have to read its text. A copy has the same
    attributes. A pickled error has them too; an attribute that cannot be pickled, such as a function, is replaced by
    its `repr`.
    """

    def __copy__(self) -> JaxckptError:
        return _again(type(self), self.args, vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> JaxckptError:
        return self.__copy__()  # the values of the attributes are not copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, {name: _picklable(value) for name, value in vars(self).items()})


def _again(kind: type[JaxckptError], args: tuple[Any, ...], attributes: dict[str, Any]) -> JaxckptError:
    """Returns an error with these attributes, without calling its `__init__`, which would make the text again."""
    error = BaseException.__new__(kind, *args)  # MemoryError has its own __new__, which its subclasses here cannot use
    super(JaxckptError, error).__init__(*args)  # of the built-in exception: ImportError sets its text there
    vars(error).update(attributes)
    if "__notes__" in attributes:
        error.__notes__ = list(attributes["__notes__"])
    return error


def _picklable(value: Any) -> Any:
    try:
        pickle.dumps(value)
    except Exception:  # a class of the user may raise anything
        return repr(value)
    return value


class InWords(str):
    """What came for an argument, described: `ArgumentError` shows it without quotes."""

    def __repr__(self) -> str:
        return str(self)


class ArgumentError(JaxckptError, ValueError):
    """An argument broke a rule.

    Args:
      argument: the argument's name.
      rule: what it must be, as a phrase after "must be".
      got: what came; shown with `repr`. `InWords`, where that would be no help.
      hint: a sentence that says what to do.
    """

    def __init__(self, argument: str, rule: str, got: Any, hint: str = "") -> None:
        self.argument, self.rule, self.got, self.hint = argument, rule, got, hint
        super().__init__(f"{argument} must be {rule}; got {_shown(got)}." + (f" {hint}" if hint else ""))


def _shown(got: Any) -> str:
    """Returns what came as `repr` shows it: of a long one, such as of a model's state, the type and the beginning."""
    text = repr(got)
    return text if len(text) <= _LONG else f"{type(got).__name__}: {' '.join(text[:_LONG].split())[: _LONG // 2]}..."


_LONG = 400
"""Characters of a text that is shown whole."""


class UnmatchedTagError(JaxckptError, LookupError):
    """A tag glob of a strict policy matches no tag of the traced function."""


class StructureError(JaxckptError, TypeError):
    """A layer of a sequence returned a structure that the next layer does not take."""


class NotDifferentiableError(JaxckptError, TypeError):
    """There is nothing to differentiate: no argument, or no output, of an inexact dtype."""


class ForwardModeError(JaxckptError, TypeError):
    """A function that has only one reverse mode is differentiated forward, or twice in reverse."""


class EffectsError(JaxckptError, TypeError):
    """A checkpointed or tiled function has side effects, which a recomputation or each tile would repeat."""


class TilingError(JaxckptError, ValueError):
    """A function cannot run tile by tile, because an operation couples the rows along the tiled axis.

    Args:
      operation: the name of JAX's primitive.
      line: "file.py:12 (function)" of the user's code that made it; "" if it is not known.
      reason: what the operation does, as a phrase after "it".
      hint: a sentence that says what to do.
    """

    def __init__(self, operation: str, line: str, reason: str, hint: str = "") -> None:
        self.operation, self.line, self.reason = operation, line, reason
        self.hint = hint or "Tile another axis, or leave this operation out of the tiled function."
        where = f"{operation} at {line}" if line else operation
        super().__init__(
            f"fun must be made of operations that run tile by tile, which do not couple the rows along the tiled axis; "
            f"{where} is not one of them: it {reason}. {self.hint}"
        )


class TargetError(JaxckptError):
    """Something is wrong with a compilation target."""


class UnknownTargetError(TargetError, ValueError):
    """There is no target with that name."""


class MissingTargetError(TargetError, ImportError):
    """The target is known, but its compiler is not installed."""


class DoesNotFitError(TargetError, MemoryError):
    """The target's compiler stopped because the program does not fit the device.

    Args:
      target: the target's name.
      needed_bytes: bytes that the program needs, from the compiler's message; None if the message does not say.
      memory_bytes: bytes of memory that the device has.
      message: the compiler's message.
    """

    def __init__(self, target: str, needed_bytes: int | None, memory_bytes: int, message: str) -> None:
        self.target, self.needed_bytes, self.memory_bytes = target, needed_bytes, memory_bytes
        super().__init__(f"The program does not fit {target}: {message}")


class UnreadableDumpError(TargetError, ValueError):
    """The compiler's dump of its buffers is incomplete, has an unknown layout, or contradicts the compiler's
    figures.
    """


class MissingPackageError(JaxckptError, ImportError):
    """An optional package is not installed."""


class UnsupportedJaxError(JaxckptError, ImportError):
    """A private part of JAX or Flax that jaxckpt needs is missing in the installed version, or has another form.

    Args:
      symbol: the part, such as "jax._src.core.DropVar".
      why: its purpose in jaxckpt, as a phrase after "to".
      found: what the installed version has instead, as a phrase after "it".
      package: name of the package.
      installed: the installed version.
      known: versions that jaxckpt is known to work with.
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
    """A plan was made for another function or for other shapes, or it, its file or a part of it is not valid."""


class InfeasibleBudgetError(JaxckptError, ValueError):
    """No plan, or no schedule of a scan, fits the budget.

    Args:
      text: the message.
      least_bytes: the least budget that was found, or is predicted, to fit. If the budget is less than the arguments,
        this is the size of the arguments; the least budget is larger, and not known yet. None if nothing is known.
      budget_bytes: the budget.
      stretch: the operations that need most memory at once, as in the text; None if the text names none.
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


class StateLostError(JaxckptError, MemoryError):
    """A step ran out of memory after the runtime had consumed donated arguments, so it cannot run again.

    Args:
      step: the step's name.
      lost: paths of the arguments that are gone, such as "args[0]['w']".
      planned: a sentence that says what is planned for the next call.
    """

    def __init__(self, step: str, lost: Sequence[str], planned: str) -> None:
        self.step, self.lost, self.planned = step, tuple(lost), planned
        some = ", ".join(self.lost[:3]) + (f" and {len(self.lost) - 3} more" if len(self.lost) > 3 else "")
        super().__init__(
            f"{step} must have its arguments to run again; it ran out of memory after the runtime had consumed those that "
            f"it donates: {some}. {planned} Resume from the last checkpoint: load the state, and call {step} with it."
        )


class VerificationError(JaxckptError, AssertionError):
    """Two functions that should agree, in values or in gradients, do not."""


class FactoryError(JaxckptError, ValueError):
    """The argument of the command line is not a model factory."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a sentence with the known names nearest to `name`; "" if none is near. For errors whose rule has all of
    them.

    >>> nearest("dot", ["dots", "nothing"]), nearest("xyz", ["dots", "nothing"])
    ("Did you mean 'dots'?", '')
    """
    known = list(known)
    begun = [each for each in known if name and each.startswith(str(name))]
    near = begun[:3] or difflib.get_close_matches(str(name), known, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


MANY = 40
"""Names that a message lists."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a sentence with the known names nearest to `name`, or with all known names if none is near.

    >>> did_you_mean("dot", ["dots", "nothing"])
    "Did you mean 'dots'?"
    >>> did_you_mean("xyz", ["dots", "nothing"])
    "There are 'dots', 'nothing'."
    >>> did_you_mean("dot", [])
    'There is nothing to choose from.'
    """
    known = list(known)
    if near := nearest(name, known):
        return near
    if not known:
        return "There is nothing to choose from."
    more = f" and {len(known) - MANY} more" if len(known) > MANY else ""
    return f"There are {', '.join(repr(n) for n in known[:MANY])}{more}."


def near_glob(glob: str, paths: Sequence[str]) -> str:
    """Returns a sentence with the glob nearest to one that matches none of the paths, or with the nearest paths.

    >>> near_glob("block/*", ["blocks", "blocks/0", "blocks/1"])
    "Did you mean 'blocks/*'?"
    >>> near_glob("Blok_0", ["Block_0", "Block_0/Dense_0"])
    "Did you mean 'Block_0'?"
    """
    parts = glob.split("/")
    mended = []
    for level, part in enumerate(parts):
        names = sorted({path.split("/")[level] for path in paths if path.count("/") >= level})
        near = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
        mended.append(part if not near or any(fnmatch.fnmatchcase(name, part) for name in names) else near[0])
    found = "/".join(mended)
    if found != glob and any(fnmatch.fnmatchcase(path, found) for path in paths):
        return f"Did you mean {found!r}?"
    return did_you_mean(glob, paths)


def check_flags(**flags: Any) -> None:
    """Raises `ArgumentError` for an argument that is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ArgumentError(name, "True or False", flag)


F = TypeVar("F", bound=Callable[..., Any])

_SEGMENTS = {
    "segment_size": "segment_size= counts the layers of a segment; 'sqrt' chooses it.",
    "schedule": "schedule=k keeps the carry of every k-th iteration; 'sqrt' chooses k.",
    "solver": "A plan chooses the segments of loops itself; leave it out.",
    "": "Segments are of sequences: checkpoint_sequential(layers, segment_size=k) and scan(..., schedule=k).",
}
_SLOTS = {
    "schedule": "Write schedule=Slots(n), which keeps n carries.",
    "solver": "A plan chooses the schedules of loops itself; leave it out.",
    "": "Slots are of loops: jaxckpt.scan(..., schedule=jaxckpt.Slots(n)).",
}
_BUDGET = {
    "budget": "Write budget=, such as '4GiB' or '60%'.",
    "": "A budget is what jaxckpt.plan and jaxckpt.autocheckpoint take: plan(loss, *args, budget='60%').",
}
_NAMES = {
    "policy": "Write policy=, such as Policy({'name': SAVE}), for values that jaxckpt.tag(x, 'name') has named.",
}

ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "use_reentrant": {"": "There is one implementation; leave it out."},
    "preserve_rng_state": {"": "A key of JAX draws the same numbers again; leave it out."},
    "context_fn": {"policy": "Say what is kept by policy=Policy({...})."},
    "determinism_check": {"": "jaxckpt.verify compares with the function without checkpoints."},
    "early_stop": {"": "The compiler leaves out what the backward pass does not read; leave it out."},
    **dict.fromkeys(("segments", "chunks", "segment_size", "segment_length", "num_segments", "schedule"), _SEGMENTS),
    **dict.fromkeys(("checkpoints", "num_checkpoints", "slots"), _SLOTS),
    **dict.fromkeys(("names", "save_names"), _NAMES),
    "offload": {
        "carry": "Write carry=OFFLOAD for the carries, policy=Policy({'name': OFFLOAD}) for values of an iteration.",
        "policy": "Write policy=Policy({'name': OFFLOAD}).",
        "actions": "Write actions=(RECOMPUTE, SAVE, OFFLOAD).",
    },
    "prevent_cse": {"": "jaxckpt decides it here; leave it out."},
    "_split_transpose": {"": "It is an option of lax.scan alone; leave it out."},
    "has_aux": {"step": "Write step=functools.partial(jax.value_and_grad, has_aux=True)."},
    "argnums": {"step": "Write step=functools.partial(jax.value_and_grad, argnums=...)."},
    "optimizer": {"step": "Put its update into the training step: step=step_of, and the step's arguments."},
    "loss": {"fun": "The loss is the first argument."},
    "donate_argnums": {"step": "Give them to jax.jit in the function that makes the step: step=."},
    "device": {"target": "Write target=, such as 'cuda:h100'."},
    **dict.fromkeys(("memory_budget", "activation_memory_budget", "max_memory", "fraction"), _BUDGET),
}
"""Argument of other libraries, or of another function here -> argument that the called function has -> what to write
there; the last, "", is for every function. The first that applies is told.
"""

_MISSING = {
    "budget": "Write budget='4GiB', '60%' of the peak without a plan, or 'device'.",
    "fun": "It takes the function and its arguments at once. jaxckpt.autocheckpoint(budget=...) is the decorator.",
}


def explains(fun: F) -> F:
    """Has a function's error about an argument that it does not have, or must have, say what to write."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fun(*args, **kwargs)
        except TypeError as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            found = _CALLED_WRONG.search(str(error))
            # Raised by the call itself, and not within the function: by this frame, or that of another such wrapper.
            frame = None if trace is None else trace.tb_frame
            ours = frame is not None and str(frame.f_globals.get("__name__")).startswith("jaxckpt.")
            if found is None or frame is None or not ours or frame.f_code.co_name != "call":
                raise
            raise TypeError(f"{error}. {hint}" if (hint := _hint(fun, found[1], found[2])) else str(error)) from None

    return call  # type: ignore[return-value]


def _hint(fun: Callable[..., Any], unknown: str | None, missing: str | None) -> str:
    """Returns what to write instead of an argument that a function does not have, or for one that it must have."""
    parameters = inspect.signature(fun).parameters
    named = [name for name, each in parameters.items() if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if unknown is None:
        return _MISSING.get(missing or "", "")
    takes_others = any(each.kind is each.VAR_POSITIONAL and name == "args" for name, each in parameters.items())
    by_position = "Arguments of the function come by position." if takes_others else ""
    told = [text for has, text in ELSEWHERE.get(unknown, {}).items() if not has or has in named]
    near = nearest(unknown, named) if len(unknown) > 2 else ""
    return (told or [near or by_position])[0]


_CALLED_WRONG = re.compile(
    r"unexpected keyword argument '(\w+)'|missing 1 required (?:keyword-only|positional) argument: '(\w+)'"
)


def refuse_call(others: Sequence[Any], argument: str, instead: str) -> None:
    """Raises `ArgumentError` for arguments after the function that is to be wrapped, as PyTorch takes them.

    Args:
      others: the arguments by position after the first one.
      argument: the name of the first one.
      instead: what to write.
    """
    if others:
        rule, got = "the only argument by position", InWords(f"{len(others)} more")
        hint = f"Write policy={others[0]!r}." if isinstance(others[0], str) else ""
        raise ArgumentError(argument, rule, got, hint or f"Call the function that is returned: {instead}.")
