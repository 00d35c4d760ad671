"""Implements `hpcinit nodes`: shows and changes which nodes are excluded because they failed.

hpcinit nodes [cluster=x ...] [--json] [--add NODE --why TEXT] [--forget NODE]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpcinit.base import console, json_output
from hpcinit.base.console import plain
from hpcinit.base.errors import RequestError
from hpcinit.records import node_records
from hpcinit.records.node_records import ADDED, FORGOTTEN, NodeFailure, NodeHistory
from hpcinit.slurm import nodelist


@dataclass(frozen=True)
class Limits:
    """The settings that decide whether a node of a cluster is excluded.

    limit, expiry_h: excluded_nodes.limit and excluded_nodes.expiry_h.
    """

    cluster: str
    limit: int
    expiry_h: float


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    if odd := [one for one in options.overrides if "=" not in one]:
        raise RequestError(
            f"{odd[0]!r} is not an override, expected KEY=VALUE, such as cluster=x or excluded_nodes.limit=3"
        )
    if options.why and not options.add:
        raise RequestError(f"--why {options.why!r} needs --add: --add NODE --why TEXT")
    limits = _limits(options)
    tables = _tables(limits.cluster)
    if options.add:
        _add(nodelist.expand(options.add), options, tables)
    elif options.forget:
        _forget(nodelist.expand(options.forget), limits.cluster, tables, options.json)
    else:
        _show(options.json, limits, tables)
    return 0


def _limits(options: argparse.Namespace) -> Limits:
    """Return the limits, with the cluster '' for all clusters. Raise ConfigError for a wrong override."""
    one_cluster = any(one.startswith("cluster=") for one in options.overrides)
    if not one_cluster and (options.add or options.forget):
        return Limits(options.cluster or "", 1, 1.0)  # --add and --forget use no limit
    limits = _configured(options.overrides)
    return replace(limits, cluster=options.cluster or (limits.cluster if one_cluster else ""))


def parser() -> argparse.ArgumentParser:
    about = "Show which nodes failed, and which of them are excluded from submissions."
    parser = argparse.ArgumentParser(prog="hpcinit nodes", description=about)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="use the limits of a submission with these overrides, such as cluster=x",
    )
    parser.add_argument("--cluster", metavar="NAME", help="only this cluster (default: all clusters)")
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--add", metavar="NODE", help="temporarily exclude a node, or several (n[3-5]), from submissions"
    )
    change.add_argument("--forget", metavar="NODE", help="clear the failure history of this node")
    parser.add_argument("--why", default="", metavar="TEXT", help="the reason for --add")
    return console.add_verbosity_options(parser, "one JSON object per node, for programs")


def _tables(cluster: str) -> dict[str, Path]:
    """Return the file with failed nodes of each cluster.

    If `cluster` is given, return only its file, which may not exist yet.
    """
    if cluster:
        return {cluster: node_records.file(os.environ, cluster)}
    return {path.stem: path for path in sorted(node_records.folder(os.environ).glob("*.jsonl"))}


def _add(hosts: Sequence[str], options: argparse.Namespace, tables: dict[str, Path]) -> None:
    if len(tables) != 1:
        known = ", ".join(tables) or "none"
        raise RequestError(f"no cluster given, expected --cluster NAME; clusters with records: {known}")
    [(name, path)] = tables.items()
    now = time.time()
    # The time makes each key unique, so that a node can be added again after --forget.
    node_records.append(path, [NodeFailure(now, host, ADDED, job=f"{now}", about=options.why) for host in hosts])
    line = f"{','.join(hosts)} of {name}: excluded from submissions; to undo: hpcinit nodes --forget NODE"
    _print_change([(name, host) for host in hosts], True, line, options.json)


def _forget(hosts: Sequence[str], cluster: str, tables: dict[str, Path], as_json: bool) -> None:
    done: list[tuple[str, str]] = []
    for name, path in tables.items():
        known = {one.host for one in node_records.read(path)}
        mine = [host for host in hosts if host in known]
        node_records.append(path, [NodeFailure(time.time(), host, FORGOTTEN) for host in mine])
        done += [(name, host) for host in mine]
    cleared = list(dict.fromkeys(host for _, host in done))
    if missing := [host for host in hosts if host not in cleared]:
        where = f"for cluster {cluster}" if cluster else f"in {node_records.folder(os.environ)}"
        raise RequestError(f"no failure of {', '.join(missing)} is recorded {where}; to list all: hpcinit nodes")
    _print_change(done, False, f"{','.join(cleared)}: failure history cleared", as_json)


def _print_change(nodes: Sequence[tuple[str, str]], excluded: bool, line: str, as_json: bool) -> None:
    """Print that nodes are now excluded, or no longer excluded.

    nodes: pairs (cluster, host).
    """
    if as_json:
        for cluster, host in nodes:
            print(_json(cluster, host, excluded))
    elif not console.quiet():
        print(line)


def _json(
    cluster: str, host: str, excluded: bool, until: float | None = None, failures: Sequence[NodeFailure] = ()
) -> str:
    fields = {"cluster": cluster, "host": host, "excluded": excluded, "until": until}
    known = [{"job_id" if key == "job" else key: value for key, value in asdict(one).items()} for one in failures]
    return json_output.line("nodes", {**fields, "failures": known})


def _show(as_json: bool, limits: Limits, tables: dict[str, Path]) -> None:
    now, shown = time.time(), False
    for cluster, path in tables.items():
        for one in node_records.node_states(node_records.read(path), now, limits.expiry_h):
            shown, until = True, one.until(limits.limit, limits.expiry_h)
            bad = until is not None
            if as_json:
                print(_json(cluster, one.host, bad, until, one.failures))
            elif console.quiet():
                print(*([one.host] if bad else []), sep="\n", end="\n" if bad else "")
            else:
                print(plain("\n".join(_lines(cluster, one, until, limits.expiry_h))))
    if not shown and not as_json and not console.quiet():
        print(f"no node failure is recorded for the last {limits.expiry_h:g} h")


def _lines(cluster: str, one: NodeHistory, until: float | None, expiry_h: float) -> list[str]:
    out = f"  (excluded from submissions until {_when(until)})" if until is not None else ""
    lines = [f"{one.host} of {cluster}: {one.summary(expiry_h, why=False)}{out}"]
    for failure in one.failures:
        when = _when(failure.time)
        job = [f"job {failure.job}, {failure.run}"] if failure.run else []
        lines.append("  " + "  ".join([when, failure.kind, *job, failure.about]).rstrip())
    return lines


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _configured(overrides: Sequence[str]) -> Limits:
    """Return the limits of a submission with these overrides. Raise ConfigError if one is wrong."""
    from hpcinit.config.compose import compose  # noqa: PLC0415 - only if limits are needed: Hydra is slow to import

    config = compose(overrides)
    return Limits(config.cluster.name, config.excluded_nodes.limit, config.excluded_nodes.expiry_h)
