"""The documentation site builds without a warning, and its generated pages are complete."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from docs.generate import messages, pages
from hpcinit.config import keys
from hpcinit.config.compose import compose
from hpcinit.config.overrides import with_quoted_lists
from hpcinit.records import causes
from tests.skip_or_fail import skip_or_fail

ROOT = Path(__file__).parents[2]


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
    """Links, anchors and the list of pages are correct; keys, messages, README and cluster files are on the site."""
    try:
        import mkdocs  # noqa: F401
    except ImportError:
        skip_or_fail("mkdocs is not installed: pip install 'hpcinit[docs]'")
    # Not --quiet: mkdocs then counts no warnings, and --strict never fails.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    assert "parallel.tp_across_nodes" in read(site / "reference/keys/index.html")
    assert "is not on PATH, but cluster" in read(site / "reference/messages/index.html")
    assert "make demo" in read(site / "index.html")
    assert "gpus_per_node" in (site / "source/conf/cluster/lumi_g.yaml").read_text()
    assert "backend: str | None = None" in read(site / "reference/api/index.html")  # a signature


def test_the_page_about_moving_has_the_diff_of_the_example() -> None:
    """The diff in docs/moving.md is examples/moved/moved.diff."""
    [shown] = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/moving.md").read_text(), re.DOTALL)
    assert shown == (ROOT / "examples/moved/moved.diff").read_text()


def test_no_page_includes_another_file() -> None:
    """Pages read the same in the repository and on the site."""
    assert [page.name for page in (ROOT / "docs").rglob("*.md") if "--8<--" in page.read_text()] == []


def test_every_key_is_on_its_page() -> None:
    """The page of keys has each key that `hpcinit submit --help all` lists."""
    listed = re.findall(r"^  ([a-z_.]+)=", keys.help_text(every=True), re.MULTILINE)
    page = pages.keys()
    assert len(listed) > 100
    assert [key for key in listed if f"| `{key}` |" not in page] == []


def test_the_page_has_choices_and_bounds() -> None:
    """Choices and bounds that the schema declares are in the row of their key."""
    page = pages.keys()
    assert re.search(r"^\| `nodes` \| `1` \| .* \(1 or more\) \|$", page, re.MULTILINE)
    assert re.search(r"^\| `chain` \| `1` \| .* \(1 to 100\) \|$", page, re.MULTILINE)
    assert re.search(r"^\| `excluded_nodes.expiry_h` \| .* \(more than 0\) \|$", page, re.MULTILINE)
    assert re.search(r"^\| `stop.signal` \| `null` \| .* \(`USR1`, .*, `null`\) \|$", page, re.MULTILINE)


def raised() -> Iterator[tuple[str, str]]:
    """Yield (module, start of the message) of each raise in hpcinit whose message is plain text or an f-string."""
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
    """The page has every message that hpcinit raises, and every error of other programs that `why` recognizes."""
    page = pages.messages()
    those = list(raised())
    assert len(those) > 150
    assert "| `nan`, `NaN`, `FloatingPointError`, `loss is nan`, `loss is inf` |" in page
    assert all(f"| {do.replace('<', '&lt;')} |" in page for *_, do in (*causes.KINDS, *causes.SIGNALS.items()))
    assert [each for each in those if each[1].replace("`", "'") not in page.replace("&lt;", "<")] == []


def test_the_grammar_of_overrides_is_understood() -> None:
    """Each override in the table of docs/configuration.md is accepted."""
    table = (ROOT / "docs/configuration.md").read_text().partition("| you type | effect |")[2].partition("\n\n")[0]
    typed = [
        span for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for span in re.findall(r"`([^`]+)`", row)
    ]
    assert len(typed) == 12
    for text in typed:
        [word] = shlex.split(re.sub(r"^cluster=mycluster$", "cluster=example", text))
        added = ["++cluster.sbatch.hint=nomultithread"] if word.startswith("~") else []
        assert compose(with_quoted_lists(["cluster=example", *added, word])), text
