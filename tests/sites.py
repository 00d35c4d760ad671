"""Reads the files of public clusters in conf/cluster/ as text, for tests: their blocks of keys and their comments."""

from __future__ import annotations

import re

from hpcinit.config.folders import folder

OURS = {"example", "local", "mini"}  # not public clusters
FILES = sorted(path for path in (folder() / "cluster").glob("*.yaml") if path.stem not in OURS)
NAMES = [path.stem for path in FILES]


def asked(name: str) -> list[str]:
    """Return the keys with which a request for this cluster has no problems."""
    found = [f"cluster={name}", "nodes=2", "account=proj01", "qos=normal"]
    needs = re.search(r"^needs: \[(.*)\]", (folder() / f"cluster/{name}.yaml").read_text(), re.MULTILINE)
    if needs and "nccl_plugin" in needs[1]:
        found.append("+cluster.srun.environment=plugin.toml")
    return [*found, "cluster.modules=[plugin]"] if needs and "modules" in needs[1] else found


KINDS = ("source", "quoted", "unverified")  # how reliable a block of keys is
KEY = re.compile(r"[a-z]\w*:")
SOURCE = re.compile(r"# (?:source|quoted): https?://\S+$")
UNVERIFIED = re.compile(r"# unverified: \S")
# The date of the sources, or that they have none, and the date on which they were read.
SOURCES = re.compile(
    r"^# sources: (?:.* as of (\d{4}-\d\d-\d\d)|web pages without a date), read (\d{4}-\d\d-\d\d)$", re.MULTILINE
)
PLACEHOLDER = re.compile(r"[.]{3}|\b(?:PROJECT|FILE|ABCD)\b")
OVERRIDE = re.compile(r"\+?(?:cluster|container|account|qos|partition)[\w.-]*=\S+")


def blocks(text: str) -> list[str]:
    """Return the parts between blank lines that set a key."""
    parts = re.split(r"\n\s*\n", text)
    return [part for part in parts if any(KEY.match(line) for line in part.splitlines())]


def unsourced(text: str) -> list[str]:
    """Return the blocks without a source and without 'unverified'. A block with only the name needs none."""
    found = []
    for block in blocks(text):
        lines = block.splitlines()
        only_name = {line.partition(":")[0] for line in lines if KEY.match(line)} <= {"name", "untested"}
        if not only_name and not (SOURCE.match(lines[0]) or UNVERIFIED.match(lines[0])):
            found.append(block)
    return found


def advice(text: str) -> list[str]:
    """Return the overrides that comments suggest, without the shell's quotes and without those with placeholders."""
    comments = " ".join(line[2:] for line in text.splitlines() if line.startswith("# ") and "://" not in line)
    found = (each.rstrip("),;:.`").lstrip("(`").strip("'") for each in comments.split())
    return [each for each in found if OVERRIDE.fullmatch(each) and not PLACEHOLDER.search(each)]
