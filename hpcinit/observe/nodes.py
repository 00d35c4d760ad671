"""`hpcinit nodes [--json] [--add NODE --why TEXT] [--forget NODE]`: the nodes that have failed, per cluster."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hpcinit.facts import bad_nodes, nodelist
from hpcinit.facts.bad_nodes import ADDED, EXPIRY_H, FORGOTTEN, LIMIT, NodeFailure, Standing
from hpcinit.facts.errors import RequestError


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.why and not options.add:
        raise RequestError(f"--why {options.why!r} stands alone, expected --add NODE --why TEXT")
    if options.limit < 1 or options.expiry_h <= 0:
        raise RequestError(
            f"--limit is {options.limit} and --expiry-h {options.expiry_h:g}, expected 1 or more, and more than 0"
        )
    tables = _tables(options.cluster)
    if options.add:
        _add(nodelist.expand(options.add), options.why, options.cluster, tables)
    elif options.forget:
        _forget(nodelist.expand(options.forget), options.cluster, tables)
    else:
        _show(options, tables)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit nodes", description="Nodes that have failed, and are left out.")
    parser.add_argument("--cluster", metavar="NAME", help="its name; all of them without it")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"as your bad_nodes.limit has it (default {LIMIT})")
    parser.add_argument(
        "--expiry-h", type=float, default=EXPIRY_H, help=f"as your bad_nodes.expiry_h has it (default {EXPIRY_H:g})"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per node, for programs")
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--add", metavar="NODE", help="leave it out from now on until it expires, or several: n[3-5]")
    change.add_argument("--forget", metavar="NODE", help="what it has done no longer counts")
    parser.add_argument("--why", default="", metavar="TEXT", help="of a node that is added")
    return parser


def _tables(cluster: str | None) -> dict[str, Path]:
    """The files there are, by cluster; or that of one cluster, there or not."""
    if cluster:
        return {cluster: bad_nodes.file(os.environ, cluster)}
    return {path.stem: path for path in sorted(bad_nodes.folder(os.environ).glob("*.jsonl"))}


def _add(hosts: Sequence[str], why: str, cluster: str | None, tables: dict[str, Path]) -> None:
    if len(tables) != 1:
        known = ", ".join(tables) or "none"
        raise RequestError(f"which cluster's nodes? The tables that there are: {known}; give --cluster NAME")
    [(name, path)] = tables.items()
    now = time.time()
    # A key of its own each time: one that was taken back can be added again.
    bad_nodes.append(path, [NodeFailure(now, host, ADDED, job=f"{now}", about=why) for host in hosts])
    print(f"{','.join(hosts)} of {name}: left out of submissions; hpcinit nodes --forget takes it back")


def _forget(hosts: Sequence[str], cluster: str | None, tables: dict[str, Path]) -> None:
    done: list[str] = []
    for path in tables.values():
        known = {one.host for one in bad_nodes.read(path)}
        mine = [host for host in hosts if host in known]
        bad_nodes.append(path, [NodeFailure(time.time(), host, FORGOTTEN) for host in mine])
        done += mine
    if missing := [host for host in hosts if host not in done]:
        where = f"of cluster {cluster}" if cluster else f"in {bad_nodes.folder(os.environ)}"
        raise RequestError(f"no failure of {', '.join(missing)} is known {where}: hpcinit nodes shows those that are")
    print(f"{','.join(dict.fromkeys(done))}: what was until now no longer counts")


def _show(options: argparse.Namespace, tables: dict[str, Path]) -> None:
    now, shown = time.time(), False
    for cluster, path in tables.items():
        for one in bad_nodes.standings(bad_nodes.read(path), now, options.expiry_h):
            shown, bad = True, one.is_bad(options.limit)
            if options.json:
                failures = [asdict(failure) for failure in one.failures]
                print(json.dumps({"cluster": cluster, "host": one.host, "excluded": bad, "failures": failures}))
            else:
                print("\n".join(_lines(cluster, one, bad, options.expiry_h)))
    if not shown and not options.json:
        print(f"no node has failed in the last {options.expiry_h:g} h, as far as runs were looked at")


def _lines(cluster: str, one: Standing, bad: bool, expiry_h: float) -> list[str]:
    lines = [f"{one.host} of {cluster}: {one.words(expiry_h)}{'  (left out of submissions)' * bad}"]
    for failure in one.failures:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(failure.time))
        job = [f"job {failure.job}, {failure.run}"] if failure.run else []
        lines.append("  " + "  ".join([when, failure.kind, *job, failure.about]).rstrip())
    return lines
