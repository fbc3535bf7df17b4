"""The documentation site: `sphinx-build -W -c docs . build/site`. It needs no network.

The source folder is the repository, so that links between pages are the same on the site and on a repository's page.
"""

from __future__ import annotations

import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from sphinx.application import Sphinx

import jaxckpt

project = "jaxckpt"
author = "the jaxckpt authors"
copyright = author
release = version = jaxckpt.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
include_patterns = ["docs/**", "benchmarks/**.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = ["**/.ipynb_checkpoints"]
root_doc = "docs/index"
nb_execution_mode = "off"  # notebooks are stored with their outputs; the tests run them
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # a level of headings that is left out, in the changelog

html_theme = "furo"
html_title = f"jaxckpt {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_extra"]  # the site's own index.html leads to docs/index.html
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False

add_module_names = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
default_role = "code"  # docstrings quote code in single backticks, as Markdown does
napoleon_use_rtype = False
napoleon_use_ivar = True

FIRST = {
    "": ["guide", "planner", "examples", "pains", "scan", "tile", "coming_from"],
    "tutorials/": ["budget", "policy", "long_sequences"],
    "howto/": """training linen nnx ../equinox haiku keras rnn accumulation mixed_precision devices hosts orbax
        profiling""".split(),  # noqa: SIM905
    "api/": ["planning", "transforms", "policies", "measuring", "targets", "schedules", "flax", "errors"],
}
"""The pages of each folder of docs/, in the order in which one reads them. Whatever else is there follows."""
ELSEWHERE = {"index", "architecture", "testing", "gallery", "results", "equinox"}
"""Pages that index.md names itself, and not among the guides."""


def contents(folder: str) -> str:
    """Returns the lines of a folder's table of contents."""
    pages = [page for kind in ("*.md", "*.ipynb") for page in (HERE / folder).glob(kind)]
    rest = sorted({page.stem for page in pages} - set(FIRST[folder]) - ELSEWHERE)
    return "\n".join(folder + name for name in FIRST[folder] + rest).replace("howto/../", "")


def list_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Puts the pages of each folder into the tables of contents of index.md."""
    if name == root_doc:
        for folder in FIRST:
            source[0] = source[0].replace(f"@{folder or 'guides/'}@", contents(folder))


def setup(app: Sphinx) -> None:
    """Connects what Sphinx calls while it reads pages."""
    app.connect("source-read", list_pages)
