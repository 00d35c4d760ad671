"""`hpcinit discover [--name x]`: queries Slurm and writes a description of this cluster to conf/cluster/x.yaml."""

from __future__ import annotations

import argparse
import datetime
import grp
import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hpcinit.base import console, json_output
from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted
from hpcinit.config import folders
from hpcinit.discover import cluster_file, live_site
from hpcinit.discover.cluster_file import Document
from hpcinit.discover.live_site import Site, User


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    options = console.parse_arguments(parser(), list(argv))
    user = _this_user()
    seen = live_site.read_site(live_site.query_site(user.name, os.environ), user)
    if options.json:
        print(json_output.line("discover", _to_json(seen)))
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
            status = _write(path, _render(_new(seen, name), seen), seen)
        else:
            status = _update(path, cluster_file.parse_document(text), seen, options.force)
        if status == 0:
            _default(path.stem, options.default, new=text is None)
        return status
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit discover",
        description="Query Slurm and write a description of this cluster to conf/cluster/NAME.yaml.",
    )
    parser.add_argument("--name", help="name of the cluster, as in cluster=NAME; default: Slurm's ClusterName")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: conf/cluster/NAME.yaml")
    parser.add_argument("--default", action="store_true", help="make it the default cluster of `hpcinit submit`")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--print", action="store_true", help="print a new description and write nothing")
    what.add_argument(
        "--diff", action="store_true", help="show the differences from the file; exit status 1 if there are any"
    )
    parser.add_argument("--force", action="store_true", help="change an existing file without asking")
    return console.add_verbosity_options(parser, "print all results as JSON for programs, and write nothing", what)


def _default(name: str, wanted: bool, new: bool) -> None:
    """With --default, make the cluster the user's default. Otherwise, after a first discovery, show how to do that."""
    chosen, source = folders.default_cluster()
    if not wanted:
        if new and not chosen and not console.quiet():
            print(f"make it the default with:  export {folders.CLUSTER_VARIABLE}={name}")
        return
    path = folders.write_default_cluster(name)
    console.note(f"{path}: the default cluster is {name}")
    if source and source != str(path) and chosen != name:
        console.warning(f"{source} sets the default cluster to {chosen}, and takes precedence over {path}")


def _this_user() -> User:
    groups = set()
    for number in {os.getgid(), os.getegid(), *os.getgroups()}:
        try:
            groups.add(grp.getgrgid(number).gr_name)
        except KeyError:  # a group without a name cannot be in AllowGroups
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
    heading = f"Slurm {seen.slurm} of cluster {seen.cluster}, queried {today} by {seen.user.name}"
    return cluster_file.render_document(before, _facts(before, seen), cluster_file.facts_comment(heading))


def _diff(path: Path, text: str | None, seen: Site) -> int:
    if text is None:
        raise RequestError("there is no cluster file to compare with; run hpcinit discover without --diff to create it")
    before = cluster_file.parse_document(text)
    lines = cluster_file.document_difference(before, _facts(before, seen))
    _gone(before, seen)
    if lines:
        print(f"--- {path}\n+++ Slurm {seen.slurm} of cluster {seen.cluster}", *lines, sep="\n")
    else:
        print(f"{path}: nothing has changed")
    return 1 if lines else 0


def _update(path: Path, before: Document, seen: Site, force: bool) -> int:
    """Show how an existing file would change, ask the user, and rewrite the lines of `hpcinit discover`."""
    after = _render(before, seen)
    lines = cluster_file.document_difference(before, _facts(before, seen))
    if lines:
        print(f"{path} would change:", *(f"  {line}" for line in lines), sep="\n")
    elif before.body:
        print(f"{path}: nothing has changed")
        return 0
    if not force and not _agreed(path):
        return 1
    return _write(path, after, seen)


def _agreed(path: Path) -> bool:
    if not sys.stdin.isatty():
        raise RequestError(
            "the file exists, and there is no terminal to ask before changing it: add --force to change it, or --diff "
            "to compare"
        )
    print(f"change {path}? [y/N] ", end="", flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not agreed:
        print("not changed")
    return agreed


def _write(path: Path, text: str, seen: Site) -> int:
    cluster_file.write_cluster_file(path, text)
    refused = [each.name for each in seen.partitions if each.refused]
    also = f"; skipped because {seen.user.name} may not use them: {', '.join(refused)}" if refused else ""
    partitions = counted(len(seen.usable), "partition")
    print(path if console.quiet() else f"wrote {path}: {partitions} (Slurm {seen.slurm}){also}")
    if not console.quiet() and Path(folders.find(f"cluster/{path.stem}")).absolute() == path.absolute():
        print(f"check the file, then run a short test:  hpcinit submit cluster={path.stem} nodes=2 wait=true")
    _gone(cluster_file.parse_document(text), seen)
    return 0


def _gone(now: Document, seen: Site) -> None:
    """Print a note if Slurm no longer has the partition that the user chose. The choice stays in the file."""
    chosen = now.own.get("partition")
    if chosen is not None and chosen not in {each.name for each in seen.usable}:
        names = ", ".join(each.name for each in seen.usable)
        console.note(f"partition is {chosen!r}, but Slurm has only: {names}")


def _to_json(seen: Site) -> dict[str, object]:
    document = asdict(seen)
    document["user"] = {key: sorted(v) if isinstance(v, frozenset) else v for key, v in document["user"].items()}
    for each, record in zip(seen.partitions, document["partitions"], strict=True):
        record["kinds"] = [{**kind._asdict(), "nodes": count} for kind, count in each.kinds]
    return document
