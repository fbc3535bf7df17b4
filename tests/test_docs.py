"""The documents: lines of prose that fit, links that lead somewhere."""

import pathlib
import re

import pytest

import jaxckpt

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
LONGEST = 120


def prose(text: str) -> list[str]:
    """Returns the lines outside of tables and code blocks."""
    lines, code = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            code = not code
        elif not code and not line.startswith(("|", "    ")):
            lines.append(line)
    return lines


def too_long(text: str) -> list[str]:
    """Returns the lines of prose that are too long and can be broken."""
    return [line for line in prose(text) if len(line) > LONGEST and " " in line.strip()]


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = [line.lstrip("#").strip() for line in prose(text) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_within_120_columns(page):
    assert too_long(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


CODE = [*PAGES, *(ROOT / "docs").rglob("*.ipynb"), *(ROOT / "jaxckpt" / "templates").glob("*.py")]
CODE += (ROOT / "examples").glob("*.py")
OPTIONS_IN_A_MAKER = re.compile(r"return \S*jit\(.*compiler_options")
STEP_RUN_WITHOUT_OPTIONS = re.compile(r"step_of\(\w+\.apply\(\w+\)\)+(\(|$)", re.MULTILINE)
COMPILED = ".compile(compiler_options=jaxckpt.compiler_options())"


@pytest.mark.parametrize("page", CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_step_is_made_without_compiler_options_and_compiled_with_them(page):
    """In the maker, options of this machine's CPU would be refused by a plan for a GPU; without them, the CPU of jax
    before 0.12 undoes the plan.
    """
    text = page.read_text()
    assert not OPTIONS_IN_A_MAKER.search(text) and not STEP_RUN_WITHOUT_OPTIONS.search(text)
    makes = re.search(r"def \w*step_of\(", text) and re.search(r"plan\(.*step=\w*step_of", text)
    assert not makes or COMPILED in text


def test_a_step_that_is_compiled_otherwise_is_found():
    assert OPTIONS_IN_A_MAKER.search("return nnx.jit(step, donate_argnums=0, compiler_options=options)")
    assert STEP_RUN_WITHOUT_OPTIONS.search("train = step_of(plan.apply(loss))\n")
    assert STEP_RUN_WITHOUT_OPTIONS.search("x = my_step_of(plan.apply(loss))(state)")
    assert not STEP_RUN_WITHOUT_OPTIONS.search(f"step_of(plan.apply(loss)).lower(state){COMPILED}")


def test_only_tables_code_and_single_words_may_be_longer():
    words, word = "word " * 30, "w" * 130
    assert too_long(f"{words}\n\n- {words}") == [words, f"- {words}"]
    assert too_long(f"| {words} |\n```\n{words}\n```\n\n    {words}\n\n{word}") == []


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.[jm]*")), ids=lambda path: path.name)
def test_results_name_no_folder_of_the_machine_that_made_them(path):
    assert re.findall(r"(?<![\w.])/(?:root|home|work|tmp|Users)/\S*", path.read_text()) == []


def test_the_reference_has_every_public_name():
    """Errors are there by their module; `Action` is one of `jaxckpt.actions`."""
    text = "".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    errors = {name for name, value in vars(jaxckpt).items() if isinstance(value, type) and issubclass(value, Exception)}
    listed = set(re.findall(r"jaxckpt\.(\w+)$", text, re.MULTILINE))
    assert set(jaxckpt.__all__) - errors - listed <= {"policies", "schedules", "Action"}
