"""The questions to Slurm. Each answer is text, kept under the command that gave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcinit.facts.errors import Failure
from hpcinit.slurm import client, scontrol

CONFIG = "scontrol show config"
PARTITIONS = "scontrol --all show partition"  # --all: hidden ones, and those of other groups
NODES = "scontrol --all show node"
SRUN = "srun --help"
USER = "sacctmgr --noheader --parsable2 show user where name={user} format=DefaultAccount"
ASSOCIATIONS = (
    "sacctmgr --noheader --parsable2 show assoc where user={user} cluster={cluster} "
    "format=Account,Partition,QOS,DefaultQOS"
)


@dataclass(frozen=True)
class Answers:
    """texts: by command; sacctmgr's are missing without accounting. silent: what sacctmgr said instead, or ''."""

    texts: Mapping[str, str]
    silent: str = ""

    def __getitem__(self, command: str) -> str:
        return self.texts[command]


def ask(user: str, env: Mapping[str, str]) -> Answers:
    """Five or six questions. Raises Failure where Slurm gives no answer; only sacctmgr may stay silent."""
    texts = {command: _run(command.split(), env) for command in (CONFIG, PARTITIONS, NODES, SRUN)}
    config = scontrol.config(texts[CONFIG])
    if not accounting(config):
        return Answers(texts)
    try:
        for template in (USER, ASSOCIATIONS):
            words = [word.format(user=user, cluster=config.get("ClusterName", "")) for word in template.split()]
            texts[template] = _run(words, env)
    except Failure as error:  # slurmdbd is away, or sacctmgr is not installed where users are
        return Answers(texts, str(error))
    return Answers(texts)


def accounting(config: Mapping[str, str]) -> bool:
    """22.05 says accounting_storage/none where there is none, 24.11 says (null)."""
    kind = scontrol.told(config.get("AccountingStorageType"))
    return kind is not None and not kind.endswith("/none")


def _run(command: list[str], env: Mapping[str, str]) -> str:
    try:
        done = client.run(command, env)
    except client.NotStarted as error:
        check = ", and discover asks Slurm itself: is this a login node, and is the slurm module loaded?"
        raise Failure(f"{error}{check if error.missing else ''}") from None
    except client.TimedOut as error:
        raise Failure(f"{error}: {client.CHECK}") from None
    if done.status != 0:
        raise Failure(f"{' '.join(command)!r} failed: {done.error}")
    return done.stdout
