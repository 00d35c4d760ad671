"""The questions to Slurm. Each answer is text, kept under the command that gave it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from hpcinit.facts import slurm_client, slurm_records
from hpcinit.facts.errors import Failure

ANSWER_S = 60  # longer than Slurm's MessageTimeout (10 s); 10,000 nodes are some 10 MB of text
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
    config = slurm_records.config(texts[CONFIG])
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
    kind = slurm_records.told(config.get("AccountingStorageType"))
    return kind is not None and not kind.endswith("/none")


def _run(command: list[str], env: Mapping[str, str]) -> str:
    said = " ".join(command)
    try:
        done = slurm_client.run(command, ANSWER_S, {**env, "LC_ALL": "C.UTF-8"})
    except FileNotFoundError:
        raise Failure(
            f"{command[0]} is not on PATH, and discover asks Slurm itself: is this a login node, and is the slurm "
            "module loaded?"
        ) from None
    except OSError as error:
        raise Failure(f"cannot run {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"{said!r} did not answer in {ANSWER_S} s: is SLURM_CONF right, is the controller up?") from None
    if done.returncode != 0:
        words = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}, and no word"
        raise Failure(f"{said!r} failed: {words}")
    return done.stdout
