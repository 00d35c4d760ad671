"""The descriptions of public clusters in conf/cluster/, as text: their blocks, and what their comments say. For tests."""

from __future__ import annotations

import re

from hpcinit.config.compose import folder

OURS = {"example", "local", "mini"}  # no public clusters
FILES = sorted(path for path in (folder() / "cluster").glob("*.yaml") if path.stem not in OURS)
NAMES = [path.stem for path in FILES]
# What a request needs at any of them, so that it has no problem.
ASKED = ["nodes=2", "account=proj01", "qos=normal"]

KINDS = ("source", "quoted", "unverified")  # how well a block of keys is known
KEY = re.compile(r"[a-z]\w*:")
SOURCE = re.compile(r"# (?:source|quoted): https?://\S+$")
UNVERIFIED = re.compile(r"# unverified: \S")
CHECKED = re.compile(r"^# checked: (\d{4}-\d\d-\d\d)", re.MULTILINE)
TO_FILL_IN = re.compile(r"[.]{3}|\b(?:PROJECT|FILE|ABCD)\b")
OVERRIDE = re.compile(r"\+?(?:cluster|container|account|qos|partition)[\w.-]*=\S+")


def blocks(text: str) -> list[str]:
    """What stands between blank lines and sets a key."""
    parts = re.split(r"\n\s*\n", text)
    return [part for part in parts if any(KEY.match(line) for line in part.splitlines())]


def unsourced(text: str) -> list[str]:
    """The blocks that say neither where they are from nor that this is not known. The name is nobody's fact."""
    found = []
    for block in blocks(text):
        lines = block.splitlines()
        only_name = [line.partition(":")[0] for line in lines if KEY.match(line)] == ["name"]
        if not only_name and not (SOURCE.match(lines[0]) or UNVERIFIED.match(lines[0])):
            found.append(block)
    return found


def advice(text: str) -> list[str]:
    """The overrides that comments tell users to type, as the shell hands them on; not those with a word to fill in."""
    comments = " ".join(line[2:] for line in text.splitlines() if line.startswith("# ") and "://" not in line)
    words = (word.rstrip("),;:.`").lstrip("(`").strip("'") for word in comments.split())
    return [word for word in words if OVERRIDE.fullmatch(word) and not TO_FILL_IN.search(word)]
