"""Outside of `_compat` nothing private of JAX or Flax is used; inside, nothing that the tables do not declare."""

import ast
import pathlib
import re

import pytest

import jaxckpt
from jaxckpt._compat import needs

ROOT = pathlib.Path(jaxckpt.__file__).parent
COMPAT = ROOT / "_compat"

PUBLIC = re.compile(
    r"jax(\.(numpy|random|tree|tree_util|lax|nn|sharding|ad_checkpoint|custom_derivatives|dtypes|errors|typing|stages|memory))?"
    r"|flax(\.(errors|linen|nnx|core|training\.train_state))?"
)
"""Modules of JAX and Flax that may be used anywhere, by their public names."""

SEMI_PRIVATE = ("jax.core", "jax.extend", "jax.interpreters", "jax.experimental", "jax._src", "jax.config.jax_")
"""What is not: private, or with names that come and go."""

FOREIGN = (
    "manual_axis_type",
    "to_tangent_aval",
    "to_ct_aval",
    "_impl",
    "method_handler_wrapped",
    "memory_analysis",
    "user_frames",
)
"""Attributes of objects of JAX's and Flax's that are not public."""

OPTION = re.compile(r"xla_\w+")


def sources(folder, leave_out=()):
    return [path for path in sorted(folder.rglob("*.py")) if not any(part in path.parents for part in leave_out)]


def dotted(node):
    """ "a.b.c" of an expression of names and attributes, or "" """
    if isinstance(node, ast.Name):
        return node.id
    owner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner else ""


def imported(tree):
    """What names in a file are of JAX or Flax: name -> dotted name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                found[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return {name: whole for name, whole in found.items() if whole.partition(".")[0] in ("jax", "jaxlib", "flax")}


def used(tree):
    """Yields the dotted names of all that a file uses of JAX and Flax, the longest that are written."""
    names = imported(tree)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
            first, _, rest = dotted(node).partition(".")
            if first in names:
                yield f"{names[first]}.{rest}".rstrip(".")
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.partition(".")[0] in ("jax", "jaxlib", "flax")
        ):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] in ("jax", "jaxlib", "flax"))


def is_private(name):
    return name.startswith(("jaxlib", *SEMI_PRIVATE)) or any(
        part.startswith("_") and not part.startswith("__") for part in name.split(".")
    )


def problems(tree):
    """Returns what a file outside of `_compat` must not use."""
    found = [name for name in used(tree) if is_private(name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and re.match(r"(jax|flax)\b", node.module):
            found += [] if PUBLIC.fullmatch(node.module) else [node.module]
        elif isinstance(node, ast.Import):
            named = [each.name for each in node.names if re.match(r"(jax|flax)(\.|$)", each.name)]
            found += [name for name in named if not PUBLIC.fullmatch(name)]
        elif isinstance(node, ast.Attribute) and (
            node.attr in FOREIGN or ast.unparse(node).endswith(".primitive.name")
        ):
            found.append(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OPTION.fullmatch(node.value):
            found.append(node.value)
        elif isinstance(node, ast.Compare) and "__name__" in ast.unparse(node) and "type(" in ast.unparse(node):
            found.append(ast.unparse(node))  # a class that is told by its name, since it is private
    return found


@pytest.mark.parametrize("path", sources(ROOT, [COMPAT]), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_compat_uses_what_is_private(path):
    assert problems(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        "from jax._src import core",
        "import jax._src.core as c",
        "import jax\njax.core.Tracer",
        "from jax import core",
        "from jax.core import ShapedArray",
        "import jax.extend.core",
        "from jax.interpreters import ad",
        "from jax.experimental import topologies",
        "import jax\njax.interpreters.ad",
        "import jaxlib",
        "from jax import lax\nlax._where",
        "import jax\njax.config.jax_remat3",
        "aval.manual_axis_type",
        "aval.to_ct_aval()",
        "eqn.primitive.name",
        "from flax.core import lift\nlift.pack",
        "from flax.linen import module",
        "from flax.nnx import graphlib",
        "import flax\nflax.linen._x",
        "options = {'xla_dump_to': 1}",
        "type(x).__name__ == 'Ref'",
    ],
)
def test_the_walk_finds(line):
    found = problems(ast.parse(line))
    if line.startswith("from flax"):
        found = found or [name for name in used(ast.parse(line)) if not public_of_flax(name)]
    assert found


def public_of_flax(name):
    """Whether Flax exports a name: what it documents is in `flax.linen`, `flax.nnx`, `flax.core`, and is no module."""
    import importlib

    import flax.core
    import flax.linen
    import flax.nnx

    module, _, last = name.rpartition(".")
    if not PUBLIC.fullmatch(module):
        return False
    found = getattr(importlib.import_module(module), last, None)
    return found is not None and not isinstance(found, type(flax))


@pytest.mark.parametrize("path", sources(ROOT / "flax"), ids=lambda path: path.name)
def test_flax_is_used_by_names_that_it_exports(path):
    pytest.importorskip("flax")
    names = {".".join(name.split(".")[:3]) for name in used(ast.parse(path.read_text())) if name.startswith("flax.")}
    assert {name for name in names - {"flax.linen", "flax.nnx", "flax.core"} if not public_of_flax(name)} == set()


# ----------------------------------------------------------------------------------------------------- and inside of it


def declared():
    from jaxckpt._compat.flax import NEEDS as FLAX

    return {f"{need.symbol}{rest}" for need in (*needs.NEEDS, *FLAX) for rest in ("", *(f".{a}" for a in need.has))}


@pytest.mark.parametrize("path", sources(COMPAT), ids=lambda path: path.name)
def test_compat_uses_nothing_private_that_no_table_declares(path):
    known = declared()
    modules = {name.rpartition(".")[0] for name in known} | {"jax._src.lib.mlir", "flax.config", "flax.nnx.graphlib"}
    names = {name for name in used(ast.parse(path.read_text())) if is_private(name) or name.startswith("flax.")}
    stray = set()
    for name in names:
        # `module.symbol`, a symbol's attribute, or a module on the way to one.
        ways = {name, *(name.rsplit(".", count)[0] for count in (1, 2))}
        if not (ways & known or any(f"{module}.".startswith(f"{name}.") for module in modules)):
            stray.add(name)
    assert stray == set()


def test_every_entry_of_the_tables_is_used():
    """An entry that nothing needs would turn a JAX away for nothing."""
    from jaxckpt._compat.flax import NEEDS as FLAX

    texts = "\n".join(path.read_text() for path in sources(ROOT) if path.name != "needs.py")
    texts = re.sub(r"(?ms)^NEEDS: .*?^def ", "", texts)
    used = set(re.findall(r"\w+(?:-add)?", texts))
    for need in (*needs.NEEDS, *FLAX):
        names = {need.name or need.symbol.rpartition(".")[2]}
        assert names <= used or (need.has and used.issuperset(need.has)), need.symbol
