"""The reference pages are complete, and agree with the code."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import hpcinit
from docs.generate import pages
from hpcinit.records import run_folder
from tests.skip_or_fail import skip_or_fail

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"
INTERNAL = re.compile("^_|_files$|^refuse_")  # as in mkdocs.yml


def test_the_python_api_has_every_public_name() -> None:
    """The page has each name of hpcinit.__all__, and each class and function on it exists."""
    assert {name.removeprefix("hpcinit.") for name in pages.OBJECTS if "." in name} == set(hpcinit.__all__)
    assert all(f"::: {path}\n" in pages.api() for path in pages.OBJECTS.values())


def undocumented() -> Iterator[str]:
    """Yield parameters and attributes of public objects that have no description in a docstring."""
    try:
        import griffe
    except ImportError:
        skip_or_fail("griffe is not installed: pip install 'hpcinit[docs]'")
    package = griffe.load("hpcinit", search_paths=[ROOT], resolve_aliases=False)
    for path in pages.OBJECTS.values():
        target = package[path.removeprefix("hpcinit.")]
        members = (
            [each for name, each in target.members.items() if not INTERNAL.search(name)] if target.is_class else []
        )
        for each in [target, *members]:
            if each.is_alias:
                continue
            sections = each.docstring.parse("google") if each.docstring else []
            if each.is_attribute and not sections:
                if each.name not in described(target):
                    yield f"{path}.{each.name}"
            elif not sections:
                yield each.path
            elif each.is_function:
                names = {
                    item.name for section in sections if section.kind.value == "parameters" for item in section.value
                }
                given = {item.name.lstrip("*") for item in each.parameters if item.name not in {"self", "cls"}}
                yield from (f"{each.path}({name})" for name in sorted(given - {name.lstrip("*") for name in names}))


def described(target: object) -> set[str]:
    """Return the attributes that the docstring of a class lists in its section Attributes."""
    sections = target.docstring.parse("google") if target.docstring else []  # type: ignore[attr-defined]
    return {item.name for section in sections if section.kind.value == "attributes" for item in section.value}


def test_every_parameter_and_attribute_of_the_python_api_is_described() -> None:
    """Each parameter of a public function and each field of a public class has a description."""
    assert list(undocumented()) == []


def test_the_run_folder_page_has_every_file() -> None:
    """Each name of records/run_folder.py is on the page."""
    page = (REFERENCE / "run-folder.md").read_text().replace("rank-N", "rank-{rank}")
    names = [
        value for name, value in vars(run_folder).items()
        if name.isupper() and isinstance(value, str) and not name.startswith("ENV_") and value not in run_folder.REASONS
    ]  # fmt: skip
    assert len(names) > 20
    assert [name for name in names if f"`{name}" not in page and name != run_folder.SLURM] == []


def test_variables_on_their_page_exist_in_the_code() -> None:
    """Each HPCINIT_ variable of the page is one that hpcinit reads or sets."""
    source = "".join(path.read_text() for path in sorted((ROOT / "hpcinit").rglob("*.py")))
    named = re.findall(r"^\| `([A-Z_]+)`", (REFERENCE / "environment-variables.md").read_text(), re.MULTILINE)
    assert len(named) > 8 and [name for name in named if name.startswith("HPCINIT") and f'"{name}"' not in source] == []


def test_the_errors_page_quotes_real_messages() -> None:
    """Each text of the page is in hpcinit's source or among the errors of other programs that `why` recognizes."""
    rows = re.findall(r"^\| (`.*?) \|", (REFERENCE / "errors.md").read_text(), re.MULTILINE)
    sources = [path.read_text() for path in (ROOT / "hpcinit").rglob("*") if path.suffix in {".py", ".sh"}]
    texts = [each for text in sources for each in strings(text)] + sources
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(rows) == 20
    assert [text for text in quoted if not any(text in each for each in texts)] == []


def strings(source: str) -> Iterator[str]:
    """Yield the string constants of a Python source; f-strings with X for each value."""
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
