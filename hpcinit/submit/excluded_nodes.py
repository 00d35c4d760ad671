"""Nodes that have failed too often are left out of what is submitted: sbatch --exclude, beside the user's own.

Why so: docs/decisions/0020-bad-nodes.md.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpcinit.base.errors import NodelistError
from hpcinit.base.text import expanded
from hpcinit.config import partition
from hpcinit.config.compose import Request
from hpcinit.config.schema import Config
from hpcinit.records import node_records
from hpcinit.records.node_records import NodeHistory
from hpcinit.why.node_exclusion import look


@dataclass(frozen=True)
class Exclusion:
    """hosts: for --exclude, the user's own too; None: as the user has it. said: a line for each node, or why not."""

    hosts: str | None
    said: Sequence[str] = ()


def excluded(requests: Sequence[Request]) -> tuple[Sequence[Request], list[str]]:
    """The requests, each without the nodes that are bad for it; and what the user is told, each line once."""
    changed, said, tables = [], [], dict[tuple[str, ...], list[NodeHistory]]()
    for request in requests:
        config = request.config
        if config.cluster.engine != "slurm" or not config.excluded_nodes.exclude:
            changed.append(request)
            continue
        place = (config.cluster.name, config.runs_dir, str(config.excluded_nodes.expiry_h))
        if place not in tables:
            tables[place], troubles = _table(config)
            said += troubles
        found = decide(config, tables[place])
        said += found.said
        changed.append(request if found.hosts is None else replace(request, config=_with(config, found.hosts)))
    return changed, list(dict.fromkeys(said))


def _with(config: Config, hosts: str) -> Config:
    sbatch = {**config.cluster.sbatch, "exclude": hosts}
    return replace(config, cluster=replace(config.cluster, sbatch=sbatch))


def _table(config: Config) -> tuple[list[NodeHistory], list[str]]:
    """Of the cluster, with what the runs since have left; a dry run writes nothing. Never fails a submission."""
    path, now, expiry_h = (
        node_records.file(os.environ, config.cluster.name),
        time.time(),
        config.excluded_nodes.expiry_h,
    )
    known, troubles = node_records.read(path), []
    new = node_records.new_record(look(expanded(config.runs_dir), config.cluster.name, now, expiry_h), known)
    if new and not config.dry_run:
        try:
            node_records.append(path, new)
        except OSError as error:
            troubles.append(f"hpcinit: warning: failures of nodes are not kept, {path}: {error.strerror}")
    table = node_records.node_states([*known, *new], now, expiry_h)
    if strange := _strange([one.host for one in table if one.is_bad(config.excluded_nodes.limit)]):
        names = ",".join(sorted(strange))
        troubles.append(
            f"hpcinit: warning: {names} failed, and Slurm has no node of that name: not excluded; hpcinit nodes "
            f"--forget {names} ends this warning"
        )
    return [one for one in table if one.host not in strange], troubles


def _strange(hosts: Sequence[str]) -> set[str]:
    """Those that Slurm does not know, for which sbatch would refuse the job: a node that is gone, or named otherwise by
    its own kernel, as torchrun's ranks know it. None where Slurm is not there to be asked."""
    if not hosts:
        return set()
    from hpcinit.slurm import slurm_client  # noqa: PLC0415 - only for failed nodes

    # --all: without it a node that is in hidden partitions only is 'not found'.
    try:
        done = slurm_client.run(["scontrol", "--all", "show", "node", ",".join(hosts)])
    except slurm_client.Unreachable:
        return set()
    return set(hosts) & set(re.findall(r"Node (\S+) not found", done.stdout + done.stderr))


def decide(config: Config, table: Sequence[NodeHistory]) -> Exclusion:
    """table: the worst first. As many of the bad as the partition, where its size is known, can do without."""
    bad = [one for one in table if one.is_bad(config.excluded_nodes.limit)]
    if not bad:
        return Exclusion(None)
    expiry_h, sbatch = config.excluded_nodes.expiry_h, config.cluster.sbatch
    own, asked = str(sbatch.get("exclude") or ""), _hosts(str(sbatch.get("nodelist") or ""))
    mine, said = _hosts(own), list[str]()
    out: list[str] = []
    if "/" in own:  # a file's name, to sbatch
        names = ",".join(one.host for one in bad)
        return Exclusion(None, [f"hpcinit: warning: {names} failed, and only what {own} has is excluded"])
    most = partition.known(config).nodes
    room = len(bad) if most is None else most - config.nodes - config.spare_nodes - len(mine)
    for one in (one for one in bad if one.host not in mine):
        about = f"{one.host} ({one.words(expiry_h)})"
        if one.host in asked:
            said.append(f"hpcinit: warning: {about} is bad, and cluster.sbatch.nodelist asks for it: not excluded")
        elif len(out) >= room:
            said.append(
                f"hpcinit: warning: {about} is bad, and not excluded: of the {most} nodes in the partition "
                f"{config.nodes + config.spare_nodes} are asked for and {len(mine) + len(out)} excluded"
            )
        else:
            out.append(one.host)
            said.append(f"excluded: {about}; hpcinit nodes --forget {one.host} takes it back")
    if not out:
        return Exclusion(None, said)
    from hpcinit.slurm import nodelist  # noqa: PLC0415 - where there are such nodes

    return Exclusion(",".join([*([own] if own else []), nodelist.compress(sorted(out))]), said)


def _hosts(text: str) -> list[str]:
    """Of an option's value; none where it is empty, a file's name or nothing that we can read: sbatch will say."""
    from hpcinit.slurm import nodelist  # noqa: PLC0415

    try:
        return nodelist.expand(text) if text and "/" not in text else []
    except NodelistError:
        return []
