"""Excludes nodes that have failed too often, by adding them to the value of sbatch's --exclude.

The reasons are in docs/decisions/0020-excluded-nodes.md.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpcinit.base.errors import NodelistError
from hpcinit.base.text import expanded
from hpcinit.config import resources
from hpcinit.config.request import Request
from hpcinit.config.schema import Config
from hpcinit.records import node_records
from hpcinit.records.node_records import NodeHistory
from hpcinit.why.node_exclusion import look


@dataclass(frozen=True)
class Exclusion:
    """The nodes that a submission excludes.

    hosts: the value for sbatch's --exclude, including the nodes that the user excludes. None: leave the option
        unchanged.
    notes: one line for each node that has failed.
    """

    hosts: str | None
    notes: Sequence[str] = ()


def excluded(requests: Sequence[Request]) -> tuple[Sequence[Request], list[str]]:
    """Add --exclude for the failed nodes to each request.

    Return the requests and the notes for the user, each note once.
    """
    changed, notes, tables = [], [], dict[tuple[str, ...], list[NodeHistory]]()
    for request in requests:
        config = request.config
        if not config.engine.other_machines or not config.excluded_nodes.exclude:
            changed.append(request)
            continue
        place = (config.cluster.name, config.runs_dir, str(config.excluded_nodes.expiry_h))
        if place not in tables:
            tables[place], warnings = _table(config)
            notes += warnings
        found = decide(config, tables[place])
        notes += found.notes
        changed.append(request if found.hosts is None else replace(request, config=_with(config, found.hosts)))
    return changed, list(dict.fromkeys(notes))


def _with(config: Config, hosts: str) -> Config:
    sbatch = {**config.cluster.sbatch, "exclude": hosts}
    return replace(config, cluster=replace(config.cluster, sbatch=sbatch))


def _table(config: Config) -> tuple[list[NodeHistory], list[str]]:
    """Return the histories of the cluster's failed nodes, and warnings for the user.

    Add failures in recent runs to the cluster's file of node failures, except in a dry run. If that file can't be
    written, return a warning instead of raising an error.
    """
    path, now, expiry_h = (
        node_records.file(os.environ, config.cluster.name),
        time.time(),
        config.excluded_nodes.expiry_h,
    )
    known, warnings = node_records.read(path), []
    new = node_records.new_record(look(expanded(config.runs_dir), config.cluster.name, now, expiry_h), known)
    if new and not config.dry_run:
        try:
            node_records.append(path, new)
        except OSError as error:
            warnings.append(f"hpcinit: warning: cannot record node failures in {path}: {error.strerror}")
    table = node_records.node_states([*known, *new], now, expiry_h)
    bad = [one.host for one in table if one.is_bad(config.excluded_nodes.limit)]
    if unknown := _unknown_nodes(bad, config.cluster.clusters):
        names = ",".join(sorted(unknown))
        warnings.append(
            f"hpcinit: warning: {names} failed but is not excluded: Slurm has no node of that name; to end this "
            f"warning: hpcinit nodes --forget {names}"
        )
    return [one for one in table if one.host not in unknown], warnings


def _unknown_nodes(hosts: Sequence[str], clusters: str | None) -> set[str]:
    """Return the hosts that Slurm does not know. If --exclude contained one of them, sbatch would refuse the job.

    The site may have removed the node. With launch=torchrun, the ranks may also have recorded a host name that differs
    from Slurm's node name. Return an empty set if this machine has no Slurm.

    clusters: the value of the config key cluster.clusters.
    """
    if not hosts:
        return set()
    from hpcinit.slurm import slurm_client  # noqa: PLC0415 - only for failed nodes

    # Without --all, Slurm reports 'not found' for a node that is only in hidden partitions.
    try:
        with slurm_client.on_cluster(clusters):
            done = slurm_client.run(["scontrol", "--all", "show", "node", ",".join(hosts)])
    except slurm_client.Unreachable:
        return set()
    return set(hosts) & set(re.findall(r"Node (\S+) not found", done.stdout + done.stderr))


def decide(config: Config, table: Sequence[NodeHistory]) -> Exclusion:
    """Decide which failed nodes to exclude, so that the partition keeps enough nodes for the job.

    table: the nodes that have failed, worst first.
    """
    bad = [one for one in table if one.is_bad(config.excluded_nodes.limit)]
    if not bad:
        return Exclusion(None)
    expiry_h, sbatch = config.excluded_nodes.expiry_h, config.cluster.sbatch
    own, requested = str(sbatch.get("exclude") or ""), _hosts(str(sbatch.get("nodelist") or ""))
    own_hosts, notes = _hosts(own), list[str]()
    excluded_hosts: list[str] = []
    if "/" in own:  # sbatch reads it as the name of a file
        names = ",".join(one.host for one in bad)
        return Exclusion(
            None,
            [
                f"hpcinit: warning: {names} failed but is not excluded, because cluster.sbatch.exclude is the file "
                f"{own}: add {names} to the file"
            ],
        )
    most = resources.partition(config).nodes
    available = len(bad) if most is None else most - config.nodes - config.spare_nodes - len(own_hosts)
    for one in (one for one in bad if one.host not in own_hosts):
        about = f"{one.host} ({one.summary(expiry_h)})"
        if one.host in requested:
            notes.append(f"hpcinit: warning: {about} is not excluded: cluster.sbatch.nodelist requests it")
        elif len(excluded_hosts) >= available:
            notes.append(
                f"hpcinit: warning: {about} is not excluded: of the {most} nodes of the partition, the job requests "
                f"{config.nodes + config.spare_nodes}, and {len(own_hosts) + len(excluded_hosts)} are already excluded"
            )
        else:
            excluded_hosts.append(one.host)
            notes.append(f"excluded: {about}; to use it again: hpcinit nodes --forget {one.host}")
    if not excluded_hosts:
        return Exclusion(None, notes)
    from hpcinit.slurm import nodelist  # noqa: PLC0415 - only for failed nodes

    return Exclusion(",".join([*([own] if own else []), nodelist.compress(sorted(excluded_hosts))]), notes)


def _hosts(text: str) -> list[str]:
    """Return the hosts in an option's value.

    Return [] if the value is the name of a file, or if it is invalid. sbatch reports an invalid value.
    """
    from hpcinit.slurm import nodelist  # noqa: PLC0415

    try:
        return nodelist.expand(text) if text and "/" not in text else []
    except NodelistError:
        return []
