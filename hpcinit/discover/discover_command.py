"""`hpcinit discover [--name x]`: ask Slurm what this cluster is, and write conf/cluster/x.yaml."""

from __future__ import annotations

import argparse
import datetime
import grp
import json
import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hpcinit.base import console
from hpcinit.base.errors import RequestError
from hpcinit.config import folders
from hpcinit.discover import cluster_file, live_site
from hpcinit.discover.cluster_file import Document
from hpcinit.discover.live_site import Site, User


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    user = _who()
    seen = live_site.read_site(live_site.query_site(user.name, os.environ), user)
    if options.json:
        print(json.dumps(_to_json(seen)))
        return 0
    name = options.name if options.name is not None else options.output.stem if options.output else seen.cluster
    path = cluster_file.cluster_file_path(name) if options.output is None else options.output
    if options.print:
        print(_render(_new(seen, name), seen), end="")
        return 0
    text = cluster_file.read_cluster_file(path)
    try:
        if options.diff:
            return _diff(path, text, seen)
        if text is None:
            _shadows(name, options.output)
            return _write(path, _render(_new(seen, name), seen), seen)
        return _again(path, cluster_file.parse_document(text), seen, options.force)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit discover", description="Ask Slurm what this cluster is, and write conf/cluster/NAME.yaml."
    )
    parser.add_argument("--name", help="what to call it, as in cluster=NAME; default: Slurm's ClusterName")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: conf/cluster/NAME.yaml")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--print", action="store_true", help="print a new description and write nothing")
    what.add_argument("--diff", action="store_true", help="what has changed since; exit status 1 if anything has")
    parser.add_argument("--force", action="store_true", help="do not ask before a file is changed")
    return console.add_verbosity_options(parser, "print what was seen, for programs, and write nothing", what)


def _who() -> User:
    groups = set()
    for number in {os.getgid(), os.getegid(), *os.getgroups()}:
        try:
            groups.add(grp.getgrgid(number).gr_name)
        except KeyError:  # a group without a name cannot stand in AllowGroups
            continue
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = str(os.geteuid())
    return User(name, os.geteuid(), frozenset(groups))


def _new(seen: Site, name: str) -> Document:
    cluster_file.cluster_file_path(name)
    return cluster_file.first_document(cluster_file.site_choices(seen, name))


def _facts(before: Document, seen: Site) -> list[cluster_file.Entry]:
    wanted = before.own.get("partition")
    return cluster_file.site_facts(seen, wanted if isinstance(wanted, str) else None)


def _render(before: Document, seen: Site) -> str:
    today = datetime.date.today().isoformat()
    heading = f"Slurm {seen.slurm} of cluster {seen.cluster}, asked {today} by {seen.user.name}"
    return cluster_file.render_document(before, _facts(before, seen), cluster_file.facts_comment(heading))


def _diff(path: Path, text: str | None, seen: Site) -> int:
    if text is None:
        raise RequestError("there is no such file; without --diff it is written")
    before = cluster_file.parse_document(text)
    lines = cluster_file.document_difference(before, _facts(before, seen))
    _gone(before, seen)
    if lines:
        print(f"--- {path}\n+++ Slurm {seen.slurm} of cluster {seen.cluster}", *lines, sep="\n")
    else:
        print(f"{path}: nothing has changed")
    return 1 if lines else 0


def _shadows(name: str, output: Path | None) -> None:
    """A word where cluster=NAME meant another file so far."""
    other = folders.find(f"cluster/{name}")
    if output is None and Path(other).is_file():
        console.note(f"cluster={name} was {other} so far; here it is the new file from now on")


def _again(path: Path, before: Document, seen: Site, force: bool) -> int:
    """The file exists: shows what would change, asks, and changes discover's part only."""
    after = _render(before, seen)
    lines = cluster_file.document_difference(before, _facts(before, seen))
    if lines:
        print(f"{path} would change:", *(f"  {line}" for line in lines), sep="\n")
    elif before.body and not before.edited:
        print(f"{path}: nothing has changed")
        return 0
    if before.edited:
        console.note("discover's part of it was edited by hand; what was changed there is lost")
    if not force and not _agreed(path):
        return 1
    return _write(path, after, seen)


def _agreed(path: Path) -> bool:
    if not sys.stdin.isatty():
        raise RequestError("exists, and there is no terminal to ask at: --force changes it, --diff shows what differs")
    print(f"change {path}? [y/N] ", end="", flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not agreed:
        print("left as it was")
    return agreed


def _write(path: Path, text: str, seen: Site) -> int:
    cluster_file.write_cluster_file(path, text)
    left_out = [each.name for each in seen.partitions if each.refused]
    also = f"; left out, not for {seen.user.name}: {', '.join(left_out)}" if left_out else ""
    print(path if console.quiet() else f"{path}: {len(seen.usable)} partitions of Slurm {seen.slurm}{also}")
    if not console.quiet() and Path(folders.find(f"cluster/{path.stem}")).absolute() == path.absolute():
        print(f"try it:  hpcinit submit cluster={path.stem} nodes=2 wait=true")
    _gone(cluster_file.parse_document(text), seen)
    return 0


def _gone(now: Document, seen: Site) -> None:
    """A partition that the user has chosen and that Slurm does not have any more is worth a word, and stays."""
    chosen = now.own.get("partition")
    if chosen is not None and chosen not in {each.name for each in seen.usable}:
        names = ", ".join(each.name for each in seen.usable)
        console.note(f"partition is {chosen!r}, but Slurm has: {names}")


def _to_json(seen: Site) -> dict[str, object]:
    document = asdict(seen)
    document["user"] = {key: sorted(v) if isinstance(v, frozenset) else v for key, v in document["user"].items()}
    for each, record in zip(seen.partitions, document["partitions"], strict=True):
        record["kinds"] = [{**kind._asdict(), "nodes": count} for kind, count in each.kinds]
    return document
