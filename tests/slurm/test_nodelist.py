"""Nodelists expand as scontrol expands them; text that it would repair silently is refused with the column."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcinit.base.errors import HpcinitError
from hpcinit.nodelist import MAX_HOSTS, NodelistError, compress, expand, expand_counts, first
from hpcinit.slurm import nodelist
from tests.slurm.record_nodelists import MINIMAL_CONF

RECORDED = [json.loads(path.read_text()) for path in sorted(Path(__file__).parents[1].glob("data/nodelists-*.json"))]
recorded = pytest.mark.parametrize("record", RECORDED, ids=[f"scontrol-{r['scontrol']}" for r in RECORDED])


def refusal(text: str, read: Callable[[str], object] = expand) -> str:
    with pytest.raises(NodelistError) as caught:
        read(text)
    return str(caught.value)


# --- What scontrol answered ---------------------------------------------------------------------------------


def test_there_are_recordings_from_before_and_after_suffixes() -> None:
    """The data were recorded with Slurm 22.05, which refuses n[1-2]-ib, and with 26.05, which expands it."""
    assert [record["scontrol"] for record in RECORDED] == ["22.05.8", "26.05.3"]
    suffixed = [any(text.endswith("]-ib") for text, _ in record["expansions"]) for record in RECORDED]
    assert suffixed == [False, True]


@recorded
def test_expand_equals_scontrol(record: dict[str, Any]) -> None:
    """Thousands of generated nodelists expand to the recorded names, in the recorded order."""
    assert len(record["expansions"]) >= 2000
    ours = [[text, " ".join(expand(text))] for text, _ in record["expansions"]]
    assert ours == record["expansions"]


@recorded
def test_compress_equals_scontrol(record: dict[str, Any]) -> None:
    """`compress` prints what `scontrol show hostlist` printed."""
    assert len(record["compressions"]) >= 500
    ours = [[hosts, compress(hosts.split(" "))] for hosts, _ in record["compressions"]]
    assert ours == record["compressions"]


@recorded
def test_malformed_text_is_refused_where_scontrol_exits_zero(record: dict[str, Any]) -> None:
    """Every recorded malformed text is refused, although scontrol repaired some."""
    assert len(record["malformed"]) >= 70
    # '-n1' is an option to scontrol.
    assert [text for text, status, _ in record["malformed"] if status != 0] == ["-n1"]
    for text, _, _ in record["malformed"]:
        refusal(text)


def test_the_table_in_the_docstring_is_what_scontrol_did() -> None:
    """The repairs in the module's docstring are those recorded with 22.05."""
    answers = {text: " ".join(lines) for text, _, lines in RECORDED[0]["malformed"]}
    rows = re.findall(r"^ {4}(\S.*?) {3,}(\S.*?) {3,}error$", nodelist.__doc__ or "", re.MULTILINE)
    assert len(rows) == 7
    assert [(text, answers[text]) for text, _ in rows] == [
        (text, shown.replace(", ", " ").replace("nothing", "")) for text, shown in rows
    ]


@pytest.mark.slurm
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_expand_equals_the_scontrol_of_this_machine(data: st.DataObject, tmp_path: Path) -> None:
    """Any valid nodelist expands as the installed scontrol expands it."""
    conf = tmp_path / "slurm.conf"
    conf.write_text(MINIMAL_CONF)
    text = data.draw(nodelists(suffix=False))
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={**os.environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expand(text) == done.stdout.splitlines()


# --- What hypothesis writes ---------------------------------------------------------------------------------

# A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

LITERAL = st.from_regex(r"\A[A-Za-z0-9._][A-Za-z0-9._-]{0,5}\Z").filter(lambda text: not text[-1:].isdigit())
HOST = st.one_of(
    st.from_regex(r"\A[A-Za-z0-9._][A-Za-z0-9._-]{0,8}\Z"),
    st.builds("{}{}".format, st.sampled_from(["n", "n0", "gpu-", ""]), st.integers(0, 12)),
    st.builds("{}{:03d}".format, st.sampled_from(["n", "n-"]), st.integers(96, 103)),
    st.from_regex(r"\An[0-9]{1,25}\Z"),
)


@st.composite
def spans(draw: st.DrawFn) -> str:
    low, more = draw(st.integers(0, 10**6)), draw(st.integers(0, 5))
    padding = draw(st.integers(0, 8))
    return draw(st.sampled_from([f"{low:0{padding}d}", f"{low:0{padding}d}-{low + more}"]))


@st.composite
def elements(draw: st.DrawFn, suffix: bool) -> str:
    brackets = draw(st.lists(st.lists(spans(), min_size=1, max_size=3), max_size=3))
    literals = [draw(LITERAL), *(draw(st.one_of(st.just(""), LITERAL)) for _ in brackets)]
    if brackets and not suffix:
        literals[-1] = ""
    tails = [*("[" + ",".join(ranges) + "]" for ranges in brackets), ""]
    return "".join(literal + tail for literal, tail in zip(literals, tails, strict=True))


def nodelists(suffix: bool = True) -> st.SearchStrategy[str]:
    return st.lists(elements(suffix), min_size=1, max_size=3).map(",".join)


@unhurried
@given(nodelists())
def test_first_is_the_first_of_expand(text: str) -> None:
    """`first` gives the same name as `expand(text)[0]`."""
    assert first(text) == expand(text)[0]


@unhurried
@given(nodelists(), nodelists())
def test_a_comma_concatenates(one: str, other: str) -> None:
    """The hosts of "a,b" are those of "a" and then those of "b"."""
    assert expand(f"{one},{other}") == expand(one) + expand(other)


@unhurried
@given(elements(suffix=False))
def test_a_suffix_is_appended_to_every_host(text: str) -> None:
    """`n[1-2]-ib` gives the hosts of `n[1-2]`, each followed by -ib."""
    assert expand(text + "-ib") == [host + "-ib" for host in expand(text)]


@unhurried
@given(st.lists(HOST, min_size=1, max_size=30))
def test_expand_undoes_compress(hosts: list[str]) -> None:
    """A list of hosts survives `compress` and `expand` in its order and with its duplicates."""
    assert expand(compress(hosts)) == hosts


@unhurried
@given(st.lists(st.integers(0, 300), min_size=1, max_size=30))
def test_expand_counts_undoes_the_folding(counts: list[int]) -> None:
    """Counts written one by one, or folded as Slurm folds them, give the same numbers."""
    folded, index = [], 0
    while index < len(counts):
        run = next((i for i, c in enumerate(counts[index:]) if c != counts[index]), len(counts) - index)
        folded.append(f"{counts[index]}(x{run})" if run > 1 else f"{counts[index]}")
        index += run
    assert expand_counts(",".join(folded)) == expand_counts(",".join(map(str, counts))) == counts


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.text(max_size=100), st.text("n1-0[],x ()\n", max_size=60)))
def test_any_text_is_read_or_refused_with_a_column_inside_it(text: str) -> None:
    """Any text gives clean host names, or a NodelistError whose caret points into the text."""
    try:
        hosts = expand(text)
    except NodelistError as error:
        assert_points_into(text, str(error))
        assert refusal(text, first) == str(error)
    else:
        assert hosts
        assert all(re.fullmatch(r"[A-Za-z0-9._][A-Za-z0-9._-]*", host) for host in hosts)


def assert_points_into(text: str, message: str) -> None:
    if not text:
        assert message == "the nodelist is empty, expected names such as 'n[1-3],m7'"
        return
    says, line, caret = message.split("\n")
    found = re.search(r" at column ([0-9]+) of the nodelist '", says)
    assert found
    assert 1 <= int(found[1]) <= len(text)
    under, character = line[len(caret) - 1], text[int(found[1]) - 1]
    assert under == (character if " " <= character <= "~" else "?")


# --- Error messages ----------------------------------------------------------------------------------------

REFUSED = {
    "n[1-3],m[7-x]": "bad range '7-x' at column 10",
    "n[]": "bad range '' at column 3",
    "n[1,]": "bad range '' at column 5",
    "n[1,,2]": "bad range '' at column 5",
    "n[1-]": "bad range '1-' at column 3",
    "n[-1]": "bad range '-1' at column 3",
    "n[1-2-3]": "bad range '1-2-3' at column 3",
    "n[ 1-2]": "bad range ' 1-2' at column 3",
    "n[0x1-2]": "bad range '0x1-2' at column 3",
    "n[1\u0663]": "bad range '1?' at column 3",  # a digit, but not one of Slurm's
    "n[4,3-1]": "backward range '3-1' at column 5",
    "n[02-01]": "backward range '02-01' at column 3",
    "n[1-12345678901234567890]": "more than 19 digits in the range '1-12345678901234567890' at column 3",
    "n[": "'[' without ']' at column 2",
    "a,n[1-2": "'[' without ']' at column 4",
    "r[1-2]n[3": "'[' without ']' at column 8",
    "n]": "']' without '[' at column 2",
    "n[1-2]]": "']' without '[' at column 7",
    "n[[1]]": "'[' inside '[' at column 3",
    "n[1-2,m[3]": "'[' inside '[' at column 8",
    ",n1": "no name next to the comma at column 1",
    "n1,,n2": "no name next to the comma at column 4",
    "n[1-2],": "no name next to the comma at column 7",
    ",": "no name next to the comma at column 1",
    "n1 n2": "unexpected character ' ' at column 3",
    " n1": "unexpected character ' ' at column 1",
    "n1\n": "unexpected character '\\n' at column 3",
    "n\x1b[2J": "unexpected character '\\x1b' at column 2",
    "\u00e9[1-2]": "unexpected character '\\xe9' at column 1",
    "n$(id)": "unexpected character '$' at column 2",
    "n1,-n2": "unexpected character '-' at column 4",
    "(null)": "no host (Slurm has not assigned nodes yet) at column 1",
    "None assigned": "no host (Slurm has not assigned nodes yet) at column 1",
    "n[0-99999999]": "more hosts than 262,144 (4 x Slurm's largest cluster) at column 1",
    "m,a[0-9999]b[0-9999]": "more hosts than 262,144 (4 x Slurm's largest cluster) at column 3",
    "n" * 256: "a name that can exceed 255 characters at column 1",
    "n" + "[1]" * 100: "a name that can exceed 255 characters at column 1",
}


@pytest.mark.parametrize(("text", "says"), REFUSED.items(), ids=ascii)
def test_refused(text: str, says: str) -> None:
    """What is wrong and where, in one line, the same from `expand` and from `first`."""
    message = refusal(text)
    assert message.startswith(f"{says} of the nodelist '")
    assert_points_into(text, message)
    assert refusal(text, first) == message


def test_an_error_shows_the_text_with_a_caret() -> None:
    """The second line is the text, the third points at the column."""
    assert refusal("n[1-3],m[7-x]") == (
        "bad range '7-x' at column 10 of the nodelist 'n[1-3],m[7-x]'\n"
        "  n[1-3],m[7-x]\n"
        "           ^"
    )  # fmt: skip


def test_an_error_in_a_long_text_shows_its_neighbourhood() -> None:
    """A text of a megabyte gives a message of three short lines, with the column of the whole text."""
    message = refusal("n1," * 80_000 + "n[1-y]," + "n1," * 80_000)
    says, line, caret = message.split("\n")
    assert says.startswith("bad range '1-y' at column 240003 of the nodelist '...1,n1,n1,")
    assert line[len(caret) - 1 :].startswith("1-y],n1,")
    assert line.endswith("...")
    assert len(message) < 400


def test_an_error_cannot_move_the_cursor() -> None:
    """Escape sequences and newlines of the text do not reach the terminal."""
    message = refusal("n[\x1b[31m\r\n]")
    assert message.isascii()
    assert message.count("\n") == 2
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", message)


def test_the_empty_text_is_refused() -> None:
    """There is no column to point at in the empty text."""
    assert refusal("") == refusal("", first) == "the nodelist is empty, expected names such as 'n[1-3],m7'"


def test_the_error_is_a_value_error_and_one_of_ours() -> None:
    """Callers may catch NodelistError, ValueError or HpcinitError."""
    assert issubclass(NodelistError, ValueError)
    assert issubclass(NodelistError, HpcinitError)


COUNTS_REFUSED = {
    "": "bad count '', expected N or N(xREPEAT), at column 1",
    "4(x2),x": "bad count 'x', expected N or N(xREPEAT), at column 7",
    "4(x0)": "bad count '4(x0)', expected N or N(xREPEAT), at column 1",
    "4(2)": "bad count '4(2)', expected N or N(xREPEAT), at column 1",
    "4(x2": "bad count '4(x2', expected N or N(xREPEAT), at column 1",
    "4,,3": "bad count '', expected N or N(xREPEAT), at column 3",
    "4, 3": "bad count ' 3', expected N or N(xREPEAT), at column 3",
    "-1": "bad count '-1', expected N or N(xREPEAT), at column 1",
    "\u0664": "bad count '?', expected N or N(xREPEAT), at column 1",
    "2,1(x262144)": "more nodes than 262,144 (4 x Slurm's largest cluster) at column 3",
}


@pytest.mark.parametrize(("text", "says"), COUNTS_REFUSED.items(), ids=ascii)
def test_counts_refused(text: str, says: str) -> None:
    """Counts are refused with their column as names are."""
    message = refusal(text, expand_counts)
    assert message.startswith(f"{says} of the tasks-per-node list '")


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4(x2),3", [4, 4, 3]), ("8", [8]), ("1(x3)", [1, 1, 1]), ("0", [0]), ("3,2(x2),1", [3, 2, 2, 1])],
)
def test_counts(text: str, counts: list[int]) -> None:
    """SLURM_TASKS_PER_NODE gives one number per node."""
    assert expand_counts(text) == counts


# --- Size and time ------------------------------------------------------------------------------------------


def test_the_limit_itself_is_allowed() -> None:
    """MAX_HOSTS hosts expand, one more is refused, wherever the hosts are written."""
    assert len(expand(f"n[1-{MAX_HOSTS}]")) == len(expand("n[1-256]m[1-1024]")) == MAX_HOSTS
    for text in [f"n[0-{MAX_HOSTS}]", f"x,n[1-{MAX_HOSTS}]", f"n[1-{MAX_HOSTS},7]"]:
        assert refusal(text).startswith("more hosts than 262,144")


@pytest.mark.parametrize("read", [expand, first])
@pytest.mark.parametrize(
    "text",
    [
        "n[0-99999999]",
        "n[0-9999999999999999999]",
        "a[0-9999]b[0-9999]",
        "n[1-200000],m[1-200000]",
        "[0-9999999999999999999]" * 8,
        "n" * 200 + "[0-9999999999999999999]",
    ],
)
def test_absurd_ranges_cost_no_memory(text: str, read: Callable[[str], object]) -> None:
    """A range that no cluster has is refused before any name is made."""
    tracemalloc.start()
    try:
        refusal(text, read)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_first_does_not_expand() -> None:
    """`first` of the longest list allowed takes little memory, and less than a millisecond."""
    text = f"n[1-{MAX_HOSTS}]"
    tracemalloc.start()
    try:
        assert first(text) == "n1"
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        first(text)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.001


@pytest.mark.parametrize("text", ["[" * 50_000, "n[1-2" * 20_000, "-" * 100_000, "a" * 100_000, "n[" + "1" * 100_000])
def test_refusing_takes_linear_time(text: str) -> None:
    """No text makes the regular expressions backtrack."""
    start = time.perf_counter()
    refusal(text)
    assert time.perf_counter() - start < 1


def test_no_hosts_compress_to_nothing() -> None:
    """The empty list has a short form too, though no nodelist reads back as it."""
    assert compress([]) == ""
