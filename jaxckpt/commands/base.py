"""What a command is, and the options that several commands have."""

from __future__ import annotations

import argparse
import ast
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt import factories, models, policies, training, variants
from jaxckpt._errors import ArgumentError
from jaxckpt.memory.cache import FOLDER, OFF
from jaxckpt.memory.gradient import StepMaker
from jaxckpt.memory.targets import target_of
from jaxckpt.policies import Policy

FACTORY = """\
FACTORY is FILE.py:NAME or package.module:NAME, a function that returns
(fun, args): a loss and the tuple of its arguments (arrays or
jax.ShapeDtypeStruct). Its first argument is differentiated. For a training
step of your own it returns (fun, args, step): step(fun) is the training step,
and args are the step's arguments (`jaxckpt init` writes such a file). The
function may take `checkpoint`, a transform of functions and of flax's classes
that it puts around each segment of `segment_size` blocks. Or FACTORY is the
name of a model of jaxckpt:
{models}.
"""
"""The argument of the commands that take a model. Lines here and below fit in 80 columns."""

FACTORY = FACTORY.format(models="\n".join(textwrap.wrap(", ".join(models.NAMES), 78)))


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
      help: what it does, in a sentence.
      options: adds its options to a parser.
      run: runs it.
      examples: lines for the end of its help.
      takes_factory: whether its help says what a FACTORY is.
    """

    help: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
    examples: str = ""
    takes_factory: bool = True


def add(parser: argparse.ArgumentParser, *names: str, help: str, **settings: Any) -> None:
    """Adds an option whose help is plain text."""
    parser.add_argument(*names, help=escaped(help), **settings)


def escaped(help: str) -> str:
    """Returns a help text as argparse takes it."""
    return help.replace("%", "%%")  # argparse formats the text


def factory_options(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Adds the model, which may be left out if it is `optional`, its settings and its training step."""
    nargs: dict[str, Any] = {"nargs": "?"} if optional else {}
    add(
        parser, "factory", metavar="FACTORY", help="FILE.py:NAME, package.module:NAME, or a model such as gpt2", **nargs
    )
    add(
        parser,
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword argument for the factory, such as layers=24",
    )
    add(
        parser,
        "--step",
        metavar="FILE.py:NAME",
        help="the function that makes the training step of the loss, step(loss); the factory's args are then those of "
        "the training step (default: what the factory returns as third, else value and gradient)",
    )
    add(
        parser,
        "--optimizer",
        metavar="NAME",
        help=f"train a loss with this optimizer of optax, its state counted and donated with the parameters: "
        f"{', '.join(training.OPTIMIZERS)}",
    )


def one_variant_options(parser: argparse.ArgumentParser) -> None:
    """Adds the model and one way to checkpoint it."""
    factory_options(parser)
    add(
        parser,
        "--variant",
        default="none",
        metavar="NAME",
        help="how to checkpoint the model: none (the default), whole, dots, segments:4 ...",
    )
    policy_option(parser, "checkpoint each block with this policy instead of --variant")


def target_option(parser: argparse.ArgumentParser) -> None:
    """Adds the target, and where its compiler's results are stored."""
    add(
        parser,
        "--target",
        metavar="TARGET",
        help="the hardware to compile for, such as cuda:h100 (see `jaxckpt targets`; default: this machine)",
    )
    add(
        parser,
        "--cache",
        metavar="FOLDER",
        help=f"where compilers' results are stored, so that no program is compiled twice; '{OFF}' for nowhere (default: "
        f"${FOLDER}, else this machine's folder for caches)",
    )


def policy_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds policies."""
    add(
        parser,
        "--policy",
        action="append",
        default=[],
        metavar="RULES",
        help=f"{what}: a preset ({', '.join(policies.PRESETS)}) or rules such as 'mlp_*=save, op(dot_general)=offload'",
    )


def file_options(parser: argparse.ArgumentParser, picture: str, page: str) -> None:
    """Adds the files that a command writes."""
    add(parser, "--plot", metavar="OUT.png", help=f"write a picture: {picture}; also .svg and .pdf")
    add(parser, "--json", metavar="OUT.json", help="write all figures as JSON")
    add(parser, "--html", metavar="OUT.html", help=f"write one self-contained page: {page}")


def policies_of(texts: Sequence[str]) -> dict[str, Policy]:
    """Returns the policies of --policy by their texts."""
    return {text: policies.parse(text) for text in texts}


def settings(texts: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of --set: Python literals as values, everything else as strings."""
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ArgumentError("--set", "KEY=VALUE, with a keyword argument's name", text)
        try:
            settings[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            settings[key.strip()] = value.strip()
    return settings


def load(options: argparse.Namespace) -> tuple[factories.Factory, StepMaker | None]:
    """Returns the factory and the maker of the training step of --step, if it is given.

    Raises:
      FactoryError: there is none of that name.
    """
    return factories.load(options.factory), None if options.step is None else factories.load_step(options.step)


def build(
    options: argparse.Namespace,
    loaded: tuple[factories.Factory, StepMaker | None],
    chosen: Iterable[variants.Variant],
    *,
    real: bool = False,
) -> variants.Built:
    """Returns variants of a model with the training step that is asked for.

    Args:
      options: those of `factory_options`.
      loaded: what `load` returned.
      chosen: the variants.
      real: whether the factory is asked for arrays.
    """
    factory, step = loaded
    built = variants.build(factory, chosen, real=real, settings=settings(options.set))
    return built.trained(step, options.optimizer)


def build_one(options: argparse.Namespace) -> tuple[str, variants.Built]:
    """Returns the variant of --variant or --policy: its name, and the model with it alone; checked."""
    if len(options.policy) > 1:
        raise ArgumentError(
            "--policy", "given once here", options.policy, "Put all rules into one policy, with commas between them."
        )
    loaded = load(options)
    target_of(getattr(options, "target", None))  # raises for an unknown target before the model is built
    added = policies_of(options.policy)
    (variant,) = variants.variants_for(loaded[0], added, list(added) or [options.variant])
    return variant.name, build(options, loaded, [variant])
