"""The documentation as a site: it builds without a warning, and what is made from the code is complete."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.generate import messages, pages
from hpcinit.config import keys
from hpcinit.config.compose import compose
from hpcinit.config.overrides import with_ids_as_text
from hpcinit.records import causes
from tests.leaving_out import leave_out

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^(?: {4}|\$ | {4}\$ )(hpcinit submit .*)$", re.MULTILINE)


class Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(page: Path) -> str:
    text = Text()
    text.feed(page.read_text())
    return "".join(text.words)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors and the list of pages are right; keys, messages, README and a cluster's file are in it."""
    try:
        import mkdocs  # noqa: F401
    except ImportError:
        leave_out("mkdocs is not installed: pip install 'hpcinit[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    assert "parallel.tp_across_nodes" in read(site / "reference/keys/index.html")
    assert "is not on PATH, and cluster" in read(site / "reference/messages/index.html")
    assert "make demo" in read(site / "index.html")
    assert "gpus_per_node" in (site / "source/conf/cluster/lumi_g.yaml").read_text()
    assert "L.Trainer(" in read(site / "your-script/index.html")  # the program that the tests run


def test_every_key_is_on_its_page() -> None:
    """The page of keys has each key that `hpcinit submit --help` lists."""
    listed = re.findall(r"^  ([a-z_.]+)=", keys.text(), re.MULTILINE)
    page = pages.keys()
    assert len(listed) > 100
    assert [key for key in listed if f"| `{key}` |" not in page] == []


def test_the_page_has_what_a_key_may_be() -> None:
    """Choices and bounds that the schema declares are in the row of their key."""
    page = pages.keys()
    assert re.search(r"^\| `nodes` \| `1` \| .* \(1 or more\) \|$", page, re.MULTILINE)
    assert re.search(r"^\| `chain` \| `1` \| .* \(1 to 100\) \|$", page, re.MULTILINE)
    assert re.search(r"^\| `excluded_nodes.expiry_h` \| .* \(more than 0\) \|$", page, re.MULTILINE)
    assert re.search(r"^\| `stop.signal` \| `null` \| .* \(`USR1`, .*, `null`\) \|$", page, re.MULTILINE)


def raised() -> Iterator[tuple[str, str]]:
    """(module, first words) of each raise of ours whose message is plain text or an f-string."""
    for path in sorted(messages.PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            text = node.exc.args[0]
            if isinstance(node.exc.func, ast.Name) and node.exc.func.id in messages.KINDS:
                pieces = text.values if isinstance(text, ast.JoinedStr) else [text]
                for piece in pieces:
                    if isinstance(piece, ast.Constant) and len(str(piece.value)) > messages.SHORTEST:
                        yield path.name, " ".join(str(piece.value).split())
                        break


def test_every_message_is_on_its_page() -> None:
    """Whatever the code raises with words of its own is found by those words; so is what `why` knows of others' errors."""
    page = pages.messages()
    those = list(raised())
    assert len(those) > 150
    assert "| `nan`, `NaN`, `FloatingPointError`, `loss is nan`, `loss is inf` |" in page
    assert all(f"| {do.replace('<', '&lt;')} |" in page for *_, do in (*causes.KINDS, *causes.SIGNALS.items()))
    assert [each for each in those if each[1].replace("`", "'") not in page.replace("&lt;", "<")] == []


# Those of first-hour.md are typed by tests/test_first_hour.py, mistakes and all.
@pytest.mark.parametrize(
    "page", sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs/first-hour.md"}), ids=lambda page: page.stem
)
def test_submissions_on_a_page_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `hpcinit submit ...` has keys that exist, and values of the right type."""
    monkeypatch.setenv("USER", "me")
    text = re.sub(r"\\\n\s+", "", page.read_text())
    for line in COMMAND.findall(text):
        words = shlex.split(line.split("  #")[0], comments=False)[2:]
        words = words[: words.index("--")] if "--" in words else words
        if "..." in words or "-m" in words or "[time_min=120" in line:
            continue  # what stands for more, sweeps (tests/submit/test_sweep.py)
        words = [re.sub(r"^cluster=(x|mycluster)$", "cluster=example", word) for word in words]
        names = {"job=pretrain": "job=smoke", "job=train": "job=smoke"}
        assert compose(with_ids_as_text([names.get(word, word) for word in words])), line
