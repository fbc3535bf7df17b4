"""The variants of a model factory: ways to checkpoint it, their functions and their training step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxckpt import training
from jaxckpt._errors import ArgumentError, FactoryError, JaxckptError, NotDifferentiableError, did_you_mean
from jaxckpt.core.lift import is_module_class, trace
from jaxckpt.factories import Factory, call, parameters
from jaxckpt.memory.compare import check_differentiable
from jaxckpt.memory.gradient import StepMaker, came_for, suited
from jaxckpt.policies import PRESETS, Policy
from jaxckpt.transforms.checkpoint import checkpoint


def _around(fun: Any, policy: Policy | None) -> Any:
    """Returns a block with a checkpoint around it: a function, or a class of flax's modules."""
    if is_module_class(fun):
        import jaxckpt.flax

        return jaxckpt.flax.checkpoint(fun, policy=policy)
    return checkpoint(fun, policy=policy)


@dataclass(frozen=True)
class Variant:
    """A way to checkpoint a factory's function.

    Attributes:
      name: its name in tables.
      policy: the policy of its checkpoints; None keeps only their inputs.
      segment_size: blocks in a segment.
      where: "none", "blocks" (the factory puts checkpoints around its blocks) or "whole" (one checkpoint around the
        function).
      aliases: other names of the variant.
    """

    name: str
    policy: Policy | None = None
    segment_size: int | str = 1
    where: str = "blocks"
    aliases: tuple[str, ...] = ()


STANDARD: tuple[Variant, ...] = (
    Variant("none", where="none"),
    Variant("whole", where="whole"),
    Variant("nothing (segments:1)", PRESETS["nothing"], aliases=("nothing", "segments:1")),
    *(Variant(f"segments:{size}", segment_size=size) for size in (2, 4, "sqrt")),
    *(Variant(name, policy) for name, policy in PRESETS.items() if name not in ("nothing", "everything")),
    Variant("everything", PRESETS["everything"]),
)
"""The variants of every comparison, in the order of its table: no checkpoint, one checkpoint around everything,
segments of blocks that keep only their inputs, and each preset around each block."""


def variants_for(
    factory: Factory, added: Mapping[str, Policy] | None = None, chosen: Iterable[str] = ()
) -> tuple[Variant, ...]:
    """Returns the variants of a factory: the standard variants that its parameters allow, then those that the user
    adds.

    Args:
      factory: see `jaxckpt.factories`. Without the parameter `checkpoint`, only "none" and "whole" are possible.
        Without `segment_size`, a segment is one block.
      added: name -> policy. The policy is for each block, or for the whole function if the factory does not take
        `checkpoint`.
      chosen: names of the variants to return, in this order; all variants if it is empty.

    Raises:
      ArgumentError: there is no variant with a chosen name.
    """
    known = parameters(factory)
    blocks, segments = "checkpoint" in known or "*" in known, "segment_size" in known or "*" in known
    standard = [v for v in STANDARD if (blocks or v.where != "blocks") and (segments or v.segment_size == 1)]
    everywhere = "blocks" if blocks else "whole"
    own = [Variant(name, policy, where=everywhere) for name, policy in (added or {}).items()]
    offered = {name: variant for variant in (*standard, *own) for name in (variant.name, *variant.aliases)}
    picked = []
    for name in chosen:
        variant = offered.get(name) or (_segments(name) if segments and blocks else None)
        if variant is None:
            near = _lacking(factory, name) or did_you_mean(name, offered)
            raise ArgumentError("variants", "names of variants", name, near)
        picked.append(variant)
    if not picked:
        return (*standard, *own)
    return tuple(dict.fromkeys([*picked, *own]))


def _lacking(factory: Factory, name: str) -> str:
    """Returns sentences on a variant that a factory cannot have, because it lacks a parameter; "" for other names."""
    variant = next((v for v in STANDARD if name in (v.name, *v.aliases)), None) or _segments(name)
    if variant is None:
        return ""
    if why := without(factory):
        return f"There are {', '.join(repr(each.name) for each in STANDARD if each.where != 'blocks')}. {why}"
    hint = "A factory with that argument has segments of several blocks too."
    return f"{called(factory)} takes no argument `segment_size`. {hint}"


def without(factory: Factory) -> str:
    """Returns a sentence on a factory that has no variants with checkpoints around its blocks; "" for others."""
    if {"checkpoint", "*"} & parameters(factory):
        return ""
    hint = "A factory with that argument, a transform that it puts around each block, has the other variants too."
    return f"{called(factory)} takes no argument `checkpoint`. {hint}"


def called(factory: Factory) -> str:
    """Returns what a factory is called in messages."""
    return getattr(factory, "__name__", repr(factory))


def _segments(name: str) -> Variant | None:
    """Returns the variant for a name such as "segments:7", or None for other names."""
    head, _, size = name.partition(":")
    return Variant(name, segment_size=int(size)) if head == "segments" and size.isdecimal() and int(size) else None


@dataclass(frozen=True)
class Built:
    """The variants of a factory.

    Attributes:
      functions: name of a variant -> its function.
      args: of the training steps of all variants.
      step: makes the training step of a function; None for its value and gradient.
      factory: what made them.
      variants: all of them.
      plain: returns the function of the variant "none", which need not be one of them.
    """

    functions: Mapping[str, Callable[..., Any]]
    args: tuple[Any, ...]
    step: StepMaker | None
    factory: Factory
    variants: tuple[Variant, ...]
    plain: Callable[[], Callable[..., Any]]

    @property
    def step_or_gradient(self) -> StepMaker:
        """The maker of the step: `jax.value_and_grad` where the factory has none."""
        return jax.value_and_grad if self.step is None else self.step

    def suited_step(self, name: str) -> StepMaker:
        """Returns the maker of the step that suits a variant's arguments: see `suited`."""
        return suited(self.step_or_gradient, self.functions[name], self.args)

    def made_step(self, name: str) -> Callable[..., Any]:
        """Returns the training step of a variant."""
        return self.suited_step(name)(self.functions[name])

    def note(self) -> str:
        """Returns a sentence if the factory takes a `checkpoint` that changes nothing; otherwise ""."""
        blocks = [variant.name for variant in self.variants if variant.where == "blocks"]
        if not blocks or _default(self.factory, "checkpoint") is not None:
            return ""
        plain = self._fingerprint(self.plain())
        if any(self._fingerprint(self.functions[name]) != plain for name in blocks):
            return ""
        return (
            f"{called(self.factory)} takes `checkpoint`, which changes nothing: with it "
            f"({', '.join(blocks[:3])}{' ...' if len(blocks) > 3 else ''}) and without it (none) the program is the "
            f"same. Put it around each block: block = checkpoint(block)."
        )

    def _fingerprint(self, fun: Callable[..., Any]) -> str:
        """Returns the fingerprint of a function's program; if there is a training step, of that."""
        traced = fun if self.step is None else suited(self.step, fun, self.args)(fun)
        return trace(traced, *self.args).fingerprint

    def trained(self, step: StepMaker | None, optimizer: str | None) -> Built:
        """Returns this with another training step.

        Args:
          step: the maker of the step. The factory's arguments must be those of its steps.
          optimizer: the name of an optimizer, whose state goes among the arguments: see `training.optimised`.

        Raises:
          ArgumentError: both are given, or the factory has a step of its own beside the optimizer.
        """
        if optimizer is None:
            return self if step is None else replace(self, step=step)
        if step is not None or self.step is not None:
            hint = "The step that is there has its own update."
            raise ArgumentError(
                "--optimizer", "for a factory without a training step, and without --step", optimizer, hint
            )
        maker, args = training.optimised(optimizer, self.args)
        return replace(self, args=args, step=maker)

    def check(self, name: str) -> None:
        """Raises an error where there is no gradient, or a training step that returns no state.

        Args:
          name: what to call the factory in messages.
        """
        for fun in self.functions.values():
            try:
                if self.step is None:
                    check_differentiable(name, fun, self.args)
                else:
                    training.check_step(name, self.step, fun, self.args)
            except NotDifferentiableError as error:
                if self.step is not None:
                    raise
                hint = "If it is a training step, give the loss inside of it: return (fun, args, step)."
                raise NotDifferentiableError(f"{error} {hint}") from error
            except JaxckptError:
                raise
            except Exception as error:
                error.add_note(came_for(self.step_or_gradient, fun, self.args, error))
                raise


def build(
    factory: Factory, variants: Iterable[Variant], *, real: bool = False, settings: Mapping[str, Any] | None = None
) -> Built:
    """Returns the functions of a factory's variants, with the arguments and the training step of all of them.

    Args:
      factory: see `jaxckpt.factories`.
      variants: the variants to build.
      real: whether to ask the factory for arrays, if it takes `real`.
      settings: other keyword arguments for the factory.

    Raises:
      FactoryError: as for `call`; or two variants take arguments of different shapes.
      ArgumentError: `settings` has `checkpoint` or `segment_size`, or a string for a parameter that is a number.
    """
    settings = dict(settings or {})
    for key in ("checkpoint", "segment_size"):
        if key in settings:
            raise ArgumentError(
                "set", f"without {key!r}, which is what the variants vary", settings[key], "Choose variants instead."
            )
    _check_settings(factory, settings)
    known = parameters(factory)
    functions: dict[str, Callable[..., Any]] = {}
    args: tuple[Any, ...] = ()
    step: StepMaker | None = None
    shapes: Any = None
    chosen = tuple(variants)
    unset = {"checkpoint": None} if "checkpoint" in known and _default(factory, "checkpoint") is None else {}
    for variant in chosen:
        more: dict[str, Any] = {}
        if variant.where == "blocks":
            more["checkpoint"] = functools.partial(_around, policy=variant.policy)
            if "segment_size" in known or variant.segment_size != 1:
                more["segment_size"] = variant.segment_size
        else:
            more |= unset
        if real and "real" in known and not functions:  # once: all variants have the same arguments
            more["real"] = True
        made = call(factory, **{**settings, **more})
        fun, its_args = made.fun, made.args
        if variant.where == "whole":
            fun = checkpoint(fun, policy=variant.policy)
        its_shapes = _shapes(its_args)
        if not functions:
            args, shapes, step = its_args, its_shapes, made.step
        elif its_shapes != shapes:
            raise FactoryError(
                f"{getattr(factory, '__name__', factory)} must return arguments of the same structure and shapes "
                f"for every `checkpoint`. "
                f"They differ between {next(iter(functions))!r} and {variant.name!r}. If they are a module's "
                f"parameters, the transform "
                "has renamed submodules, as flax.linen.remat does. Use jaxckpt.flax.checkpoint, which keeps the names."
            )
        functions[variant.name] = fun

    def plain() -> Callable[..., Any]:
        return functions["none"] if "none" in functions else call(factory, **{**settings, **unset}).fun

    return Built(functions, args, step, factory, chosen, plain)


def _default(factory: Callable[..., Any], name: str) -> Any:
    """Returns the default of a factory's parameter, or None if there is no default."""
    parameter = inspect.signature(factory).parameters.get(name)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def _check_settings(factory: Factory, settings: Mapping[str, Any]) -> None:
    """Raises ArgumentError for a string if the parameter's default is a number and its annotation allows no string."""
    taken = inspect.signature(factory).parameters
    for key, value in settings.items():
        default = taken[key].default if key in taken else None
        if (
            isinstance(value, str)
            and isinstance(default, (bool, int, float))
            and "str" not in str(taken[key].annotation)
        ):
            kind = {bool: "True or False", int: "a whole number", float: "a number"}[type(default)]
            hint = f"{getattr(factory, '__name__', 'The factory')} has {key}={default!r} by default."
            raise ArgumentError(f"--set {key}", kind, value, hint)


def _shapes(args: Any) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return tree, [(getattr(leaf, "shape", ()), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves]
