"""The file that discover writes: which lines are discover's, and which are the user's."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hpcinit.base.errors import RequestError
from hpcinit.discover import cluster_file, live_site
from hpcinit.discover.cluster_file import Document
from tests.discover.recorded import ANN, VERSIONS, answers

SITE = live_site.read_site(answers(VERSIONS[0]), ANN)
FACTS = cluster_file.site_facts(SITE, None)
NEW = cluster_file.render_document(cluster_file.first_document(cluster_file.site_choices(SITE, "x")), FACTS, "then")
VALUES = {entry.key: entry.value for entry in FACTS}


def updated(text: str) -> str:
    return cluster_file.render_document(cluster_file.parse_document(text), FACTS, "now")


def test_a_new_file() -> None:
    """A new file contains each choice and each fact once."""
    assert yaml.safe_load(NEW) == {**{e.key: e.value for e in cluster_file.site_choices(SITE, "x")}, **VALUES}
    assert cluster_file.document_difference(cluster_file.parse_document(NEW), FACTS) == []


def test_an_update_without_changes() -> None:
    """An update with the same facts changes only the heading with the date."""
    changed = [(a, b) for a, b in zip(NEW.splitlines(), updated(NEW).splitlines(), strict=True) if a != b]
    assert len(changed) == 1 and "then" in changed[0][0] and "now" in changed[0][1]


OWN_LINES = st.lists(
    st.sampled_from(
        [
            "",
            "# mine",
            "setup:\n  - module load x  # why",
            "env: {A: '1'}",
            "interface: ib0 # fast",
            "name: x",
            "  # in",
        ]
    ),
    unique=True,
)


@settings(deadline=None, max_examples=50)
@given(OWN_LINES, OWN_LINES)
def test_the_users_lines_stay_as_they_are(before: list[str], after: list[str]) -> None:
    """Any text around discover's part is unchanged after an update."""
    part = NEW[NEW.index(cluster_file.BEGIN) :]
    first, last = "\n".join(before), "\n".join(line for line in after if line not in before)
    first += "\n" * bool(first)
    text = updated(first + part + last)
    assert text.startswith(first + cluster_file.BEGIN) and text.endswith("\n" + last)


@pytest.mark.parametrize("key", ["gpus_per_node", "cpus_per_node", "topology", "slurm"])
def test_a_key_of_the_users_wins(key: str) -> None:
    """A key outside the part is omitted from it; a comment there and --diff show Slurm's value."""
    text = updated(f"{key}: 77\n{NEW}".replace(f"\n{key}: ", "\n# was: "))
    assert yaml.safe_load(text)[key] == 77
    assert f"# {key}: your value is used; Slurm reports {cluster_file.scalar(VALUES[key])}\n" in text
    lines = cluster_file.document_difference(cluster_file.parse_document(text), FACTS)
    assert lines == [f"-{key}: 77  # your value, not changed", f"+{key}: {cluster_file.scalar(VALUES[key])}"]


def test_partitions_of_the_users_win() -> None:
    """A manually written file keeps its partitions, and a key whose value equals Slurm's is not repeated."""
    text = updated("name: x\npyxis: false\npartitions:\n  main: {nodes: 2}\n")
    assert yaml.safe_load(text)["partitions"] == {"main": {"nodes": 2}}
    assert "# partitions: your value is used; see Slurm's value with `hpcinit discover --diff`\n" in text
    assert "# pyxis: your value is the same\n" in text
    lines = cluster_file.document_difference(cluster_file.parse_document(text), FACTS)
    assert lines[0].startswith("+partitions.chem") or lines[0].startswith("+partitions.cpu")
    assert "-partitions.main.nodes: 2  # your value, not changed" in lines and "+partitions.main.nodes: 20" in lines


def test_a_file_without_a_last_newline() -> None:
    """Discover's part starts on a new line."""
    assert updated("name: x").startswith(f"name: x\n{cluster_file.BEGIN}: ")


def test_changes_are_named_key_by_key() -> None:
    """A value that differs is shown in two lines: the file's and Slurm's."""
    old = NEW.replace("max_array_size: 501", "max_array_size: 11").replace("  high:", "  gone:")
    lines = cluster_file.document_difference(cluster_file.parse_document(old), FACTS)
    assert lines[-2:] == ["-max_array_size: 11", "+max_array_size: 501"]
    assert "-partitions.gone.nodes: 20" in lines and "+partitions.high.nodes: 20" in lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (cluster_file.BEGIN + " x\na: 1\n", "once each, in this order"),
        (cluster_file.END + "\na: 1\n", "once each, in this order"),
        (NEW + NEW, "once each, in this order"),
        (NEW.replace(cluster_file.END, "") + cluster_file.BEGIN, "once each, in this order"),
        ("a: [1\n", "the text outside the lines that hpcinit discover wrote is not YAML: "),
        ("- a\n", "the text outside the lines that hpcinit discover wrote is a list, expected lines of key: value"),
        (NEW.replace("\npyxis:", "\n- pyxis:"), "the text in the lines that hpcinit discover wrote is not YAML: "),
        ("{name: x}\n", "cannot add its lines to this file without changing other keys"),
        ("setup: |\n  line\nname: &a [x,\n  y]\npartition: *b\n", "is not YAML: "),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_updated(text: str, message: str) -> None:
    """Marks that do not match, and text that is not a mapping, are refused with advice."""
    with pytest.raises(RequestError) as error:
        updated(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.5, "on", "1:30", "a: b", "# x", "", "null", "é", "x" * 300, "1e5", "0x1f", "inf"]
)
def test_a_value_stays_on_its_line(value: object) -> None:
    """Any value is one line of YAML that PyYAML and OmegaConf read alike, although they differ for 1e5."""
    text = f"k: {cluster_file.scalar(value)}"
    assert len(text.splitlines()) == 1
    assert yaml.safe_load(text) == OmegaConf.create(text) == {"k": value}


@given(st.text())
def test_a_comment_stays_a_comment(text: str) -> None:
    """Any text becomes a comment of one line."""
    assert len(f"# {cluster_file.facts_comment(text)}".splitlines()) == 1


def test_an_empty_file() -> None:
    """An empty file gives an empty document."""
    assert cluster_file.parse_document("") == Document() and cluster_file.parse_document("").all == {}
