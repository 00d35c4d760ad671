"""The file that discover writes: whose lines are whose."""

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


def again(text: str) -> str:
    return cluster_file.render_document(cluster_file.parse_document(text), FACTS, "now")


def test_a_new_file_says_what_was_seen() -> None:
    """Read as YAML the file has each choice and each fact, once."""
    assert yaml.safe_load(NEW) == {**{e.key: e.value for e in cluster_file.site_choices(SITE, "x")}, **VALUES}
    assert cluster_file.document_difference(cluster_file.parse_document(NEW), FACTS) == []


def test_only_the_heading_changes_where_nothing_has() -> None:
    """Written again from the same facts, the file differs in its date alone."""
    changed = [(a, b) for a, b in zip(NEW.splitlines(), again(NEW).splitlines(), strict=True) if a != b]
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
    """Whatever stands around discover's part is there afterwards, byte for byte."""
    part = NEW[NEW.index(cluster_file.BEGIN) :]
    first, last = "\n".join(before), "\n".join(word for word in after if word not in before)
    first += "\n" * bool(first)
    text = again(first + part + last)
    assert text.startswith(first + cluster_file.BEGIN) and text.endswith("\n" + last)


@pytest.mark.parametrize("key", ["gpus_per_node", "cpus_per_node", "topology", "slurm"])
def test_a_key_of_the_users_wins(key: str) -> None:
    """A key that stands outside is left out inside, where a comment says what Slurm says; --diff shows it too."""
    text = again(f"{key}: 77\n{NEW}".replace(f"\n{key}: ", "\n# was: "))
    assert yaml.safe_load(text)[key] == 77
    assert f"# {key}: yours wins; Slurm says {cluster_file.scalar(VALUES[key])}\n" in text
    said = cluster_file.document_difference(cluster_file.parse_document(text), FACTS)
    assert said == [f"-{key}: 77  # yours, and stays", f"+{key}: {cluster_file.scalar(VALUES[key])}"]


def test_partitions_of_the_users_win() -> None:
    """A file written by hand keeps its partitions, and says no second time what Slurm says as well."""
    text = again("name: x\npyxis: false\npartitions:\n  main: {nodes: 2}\n")
    assert yaml.safe_load(text)["partitions"] == {"main": {"nodes": 2}}
    assert "# partitions: yours wins; `hpcinit discover --diff` shows what Slurm says\n" in text
    assert "# pyxis: yours says the same\n" in text
    said = cluster_file.document_difference(cluster_file.parse_document(text), FACTS)
    assert said[0].startswith("+partitions.chem") or said[0].startswith("+partitions.cpu")
    assert "-partitions.main.nodes: 2  # yours, and stays" in said and "+partitions.main.nodes: 20" in said


def test_a_file_without_a_last_newline() -> None:
    """Discover's part begins on a line of its own."""
    assert again("name: x").startswith(f"name: x\n{cluster_file.BEGIN} ")


def test_an_edit_in_discovers_part_is_noticed() -> None:
    """The part carries a checksum of itself."""
    assert not cluster_file.parse_document(NEW).edited
    assert cluster_file.parse_document(NEW.replace("max_array_size: 501", "max_array_size: 500")).edited


def test_changes_are_named_key_by_key() -> None:
    """A value that is not Slurm's any more is one line with what the file says and one with what Slurm says."""
    old = NEW.replace("max_array_size: 501", "max_array_size: 11").replace("  high:", "  gone:")
    said = cluster_file.document_difference(cluster_file.parse_document(old), FACTS)
    assert said[-2:] == ["-max_array_size: 11", "+max_array_size: 501"]
    assert "-partitions.gone.nodes: 20" in said and "+partitions.high.nodes: 20" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (cluster_file.BEGIN + " x\na: 1\n", "are not there once each"),
        (cluster_file.END + "\na: 1\n", "are not there once each"),
        (NEW + NEW, "are not there once each"),
        (NEW.replace(cluster_file.END, "") + cluster_file.BEGIN, "are not there once each"),
        ("a: [1\n", "not YAML outside of discover's part: "),
        ("- a\n", "list outside of discover's part, expected keys and values"),
        (NEW.replace("\npyxis:", "\n- pyxis:"), "not YAML in discover's part: "),
        ("{name: x}\n", "would change their meaning"),
        ("setup: |\n  line\nname: &a [x,\n  y]\npartition: *b\n", "not YAML outside"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_written_again(text: str, words: str) -> None:
    """Marks that do not match and text that is no mapping are refused, with what to do."""
    with pytest.raises(RequestError) as error:
        again(text)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.5, "on", "1:30", "a: b", "# x", "", "null", "é", "x" * 300, "1e5", "0x1f", "inf"]
)
def test_a_value_stays_on_its_line(value: object) -> None:
    """Any value of Slurm's is one line of YAML that means it, to PyYAML and to OmegaConf, which differ over 1e5."""
    text = f"k: {cluster_file.scalar(value)}"
    assert len(text.splitlines()) == 1
    assert yaml.safe_load(text) == OmegaConf.create(text) == {"k": value}


@given(st.text())
def test_a_comment_stays_a_comment(text: str) -> None:
    """Whatever a node, a reason or an error is called, its comment is one line."""
    assert len(f"# {cluster_file.facts_comment(text)}".splitlines()) == 1


def test_a_document_is_empty_by_default() -> None:
    """A file that is empty has nothing of the user's."""
    assert cluster_file.parse_document("") == Document() and cluster_file.parse_document("").all == {}
