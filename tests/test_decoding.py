"""Text of other programs may contain any bytes, so hpcinit decodes it with replacement."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hpcinit"
STARTERS = {"run", "Popen", "check_output", "check_call", "call", "getoutput", "getstatusoutput"}
# Bytes that hpcinit wrote, or of a file whose wrong encoding is reported as an error.
STRICT = {
    "discover/cluster_file.py": "a user's YAML file; what is not UTF-8 is a RequestError",
}


def strict(source: str) -> Iterator[int]:
    """Return the lines that decode the output of a program, or bytes, and could raise UnicodeDecodeError."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = {word.arg for word in node.keywords}
        starts = node.func.attr in STARTERS and given & {"text", "universal_newlines", "encoding"}
        decodes = node.func.attr == "decode" and len(node.args) < 2
        if (starts or decodes) and "errors" not in given:
            yield node.lineno


def test_nothing_is_decoded_strictly() -> None:
    """Each call that decodes text sets `errors`."""
    found = {str(path.relative_to(PACKAGE)): list(strict(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines and name not in STRICT} == {}
    assert all(found[name] for name in STRICT), "an exception that is not needed any more"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("subprocess.run(['x'], text=True)", [1]),
        ("subprocess.Popen(['x'],\n universal_newlines=True)", [1]),
        ("out.decode()", [1]),
        ("out.decode('latin-1')", [1]),
        ("subprocess.run(['x'], text=True, errors='replace')", []),
        ("subprocess.run(['x'], capture_output=True)", []),
        ("out.decode(errors='replace')", []),
        ("out.decode('utf-8', 'replace')", []),
    ],
)
def test_what_counts_as_strict(source: str, lines: list[int]) -> None:
    """The check finds calls without `errors`."""
    assert list(strict(source)) == lines
