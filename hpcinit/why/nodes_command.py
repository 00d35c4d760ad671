"""`hpcinit nodes [cluster=x ...] [--json] [--add NODE --why TEXT] [--forget NODE]`: nodes that have failed."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpcinit.base import console
from hpcinit.base.console import plain
from hpcinit.base.errors import RequestError
from hpcinit.records import node_records
from hpcinit.records.node_records import ADDED, FORGOTTEN, NodeFailure, NodeHistory
from hpcinit.slurm import nodelist


@dataclass(frozen=True)
class Limits:
    """What a submission would go by: the cluster's name, excluded_nodes.limit and excluded_nodes.expiry_h."""

    cluster: str
    limit: int
    expiry_h: float


def nodes_main(argv: Sequence[str], configured: Callable[[Sequence[str]], Limits]) -> int:
    """configured: the limits of a submission with these overrides; it is asked where they matter."""
    options = console.parse_arguments(nodes_parser(), list(argv))
    if odd := [word for word in options.overrides if "=" not in word]:
        raise RequestError(f"{odd[0]!r} is no override, expected cluster=x, excluded_nodes.limit=3 and the like")
    if options.why and not options.add:
        raise RequestError(f"--why {options.why!r} stands alone, expected --add NODE --why TEXT")
    limits = _limits(options, configured)
    tables = _tables(limits.cluster)
    if options.add:
        _add(nodelist.expand(options.add), options, tables)
    elif options.forget:
        _forget(nodelist.expand(options.forget), limits.cluster, tables, options.json)
    else:
        _show(options.json, limits, tables)
    return 0


def _limits(options: argparse.Namespace, configured: Callable[[Sequence[str]], Limits]) -> Limits:
    """cluster: '' for all. Raises RequestError, and what `configured` raises."""
    asked = any(word.startswith("cluster=") for word in options.overrides)
    if asked or not (options.add or options.forget):
        limits = configured(options.overrides)
        limits = replace(limits, cluster=options.cluster or (limits.cluster if asked else ""))
    else:
        limits = Limits(options.cluster or "", 1, 1.0)  # nothing is counted
    limit = limits.limit if options.limit is None else options.limit
    expiry_h = limits.expiry_h if options.expiry_h is None else options.expiry_h
    if limit < 1 or expiry_h <= 0:
        raise RequestError(f"--limit is {limit} and --expiry-h {expiry_h:g}, expected 1 or more, and more than 0")
    return replace(limits, limit=limit, expiry_h=expiry_h)


def nodes_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit nodes", description="Nodes that have failed, and are left out.")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as of a submission: cluster=x; its limits hold"
    )
    parser.add_argument("--cluster", metavar="NAME", help="its name; all of them without it")
    parser.add_argument("--limit", type=int, help="in the place of your config's excluded_nodes.limit")
    parser.add_argument("--expiry-h", type=float, help="in the place of your config's excluded_nodes.expiry_h")
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--add", metavar="NODE", help="leave it out from now on until it expires, or several: n[3-5]")
    change.add_argument("--forget", metavar="NODE", help="what it has done no longer counts")
    parser.add_argument("--why", default="", metavar="TEXT", help="of a node that is added")
    return console.add_verbosity_options(parser, "one JSON object per node, for programs")


def _tables(cluster: str) -> dict[str, Path]:
    """The files there are, by cluster; or that of one cluster, there or not."""
    if cluster:
        return {cluster: node_records.file(os.environ, cluster)}
    return {path.stem: path for path in sorted(node_records.folder(os.environ).glob("*.jsonl"))}


def _add(hosts: Sequence[str], options: argparse.Namespace, tables: dict[str, Path]) -> None:
    if len(tables) != 1:
        known = ", ".join(tables) or "none"
        raise RequestError(f"which cluster's nodes? The tables that there are: {known}; give --cluster NAME")
    [(name, path)] = tables.items()
    now = time.time()
    # A key of its own each time: one that was taken back can be added again.
    node_records.append(path, [NodeFailure(now, host, ADDED, job=f"{now}", about=options.why) for host in hosts])
    said = f"{','.join(hosts)} of {name}: left out of submissions; hpcinit nodes --forget takes it back"
    _changed([(name, host) for host in hosts], True, said, options.json)


def _forget(hosts: Sequence[str], cluster: str, tables: dict[str, Path], as_json: bool) -> None:
    done: list[tuple[str, str]] = []
    for name, path in tables.items():
        known = {one.host for one in node_records.read(path)}
        mine = [host for host in hosts if host in known]
        node_records.append(path, [NodeFailure(time.time(), host, FORGOTTEN) for host in mine])
        done += [(name, host) for host in mine]
    forgotten = list(dict.fromkeys(host for _, host in done))
    if missing := [host for host in hosts if host not in forgotten]:
        where = f"of cluster {cluster}" if cluster else f"in {node_records.folder(os.environ)}"
        raise RequestError(f"no failure of {', '.join(missing)} is known {where}: hpcinit nodes shows those that are")
    _changed(done, False, f"{','.join(forgotten)}: what was until now no longer counts", as_json)


def _changed(nodes: Sequence[tuple[str, str]], excluded: bool, said: str, as_json: bool) -> None:
    """nodes: cluster and host of each."""
    if as_json:
        for cluster, host in nodes:
            print(json.dumps({"cluster": cluster, "host": host, "excluded": excluded}))
    elif not console.quiet():
        print(said)


def _show(as_json: bool, limits: Limits, tables: dict[str, Path]) -> None:
    now, shown = time.time(), False
    for cluster, path in tables.items():
        for one in node_records.node_states(node_records.read(path), now, limits.expiry_h):
            shown, until = True, one.until(limits.limit, limits.expiry_h)
            bad = until is not None
            if as_json:
                failures = [asdict(failure) for failure in one.failures]
                told = {"cluster": cluster, "host": one.host, "excluded": bad, "until": until}
                print(json.dumps({**told, "failures": failures}))
            elif console.quiet():
                print(*([one.host] if bad else []), sep="\n", end="\n" if bad else "")
            else:
                print(plain("\n".join(_lines(cluster, one, until, limits.expiry_h))))
    if not shown and not as_json and not console.quiet():
        print(f"no node has failed in the last {limits.expiry_h:g} h, as far as runs were looked at")


def _lines(cluster: str, one: NodeHistory, until: float | None, expiry_h: float) -> list[str]:
    out = f"  (left out of submissions until {_when(until)})" if until is not None else ""
    lines = [f"{one.host} of {cluster}: {one.words(expiry_h, why=False)}{out}"]
    for failure in one.failures:
        when = _when(failure.time)
        job = [f"job {failure.job}, {failure.run}"] if failure.run else []
        lines.append("  " + "  ".join([when, failure.kind, *job, failure.about]).rstrip())
    return lines


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


# `hpcinit nodes [cluster=x ...]`: with the limits that a submission with the same words would have.

parser = nodes_parser


def main(argv: Sequence[str]) -> int:
    return nodes_main(argv, _configured)


def _configured(overrides: Sequence[str]) -> Limits:
    """Raises ConfigError."""
    from hpcinit.config.compose import compose  # noqa: PLC0415 - where limits are asked for: Hydra takes its time

    config = compose(overrides)
    return Limits(config.cluster.name, config.excluded_nodes.limit, config.excluded_nodes.expiry_h)
