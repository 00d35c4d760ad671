"""`sbatch --test-only`: whether Slurm would take the job, and when it would start it. Nothing is submitted.

Seen with 22.05.8 and 24.11: the answer stands on stderr; a refusal is "allocation failure: ..." and exit status 1. The
check counts nodes that are down, drained or reserved as not there, although sbatch takes a job that waits for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from hpcinit.base import console
from hpcinit.base.errors import NOTHING_SUBMITTED, SubmitError
from hpcinit.config.slurm_options import OWNED
from hpcinit.slurm import sbatch_errors, slurm_client
from hpcinit.slurm.sbatch import LOST_CONTROLLER, NOT_SENT

# The config key that sets an option of sbatch, for messages about a script that sbatch refused.

# Keys that do not follow from the option's name, or of which there are two.
KEYS = {
    "gpus-per-node": "cluster.gpus_per_node and cluster.gpu_type",
    "gres": "cluster.gpus_per_node and cluster.gpu_type",
    "cpus-per-task": "cpus_per_rank or cluster.cpus_per_node",
    "dependency": "after, after_ok or singleton",
    "array": "the sweep",
    "exclude": "cluster.sbatch.exclude or by what `hpcinit nodes` shows",
}


def key_of(option: str) -> str:
    """Return the config key that sets `option` of sbatch."""
    return KEYS.get(option) or OWNED.get(option) or f"cluster.sbatch.{option}"


def refused(message: str, script: str, advice: str = "") -> SubmitError:
    """Return the error for a `script` that sbatch refused with `message`: its lines and keys, and what to do."""
    problem = f"{message}\n{sbatch_errors.explain(message, script, key_of)}{advice}".rstrip("\n")
    return SubmitError(problem, NOTHING_SUBMITTED, separator="; " if advice else "\n")


# sbatch: Job 5 to start at 2026-11-21T14:05:00 using 4 processors on nodes n[1-2] in partition main
ANSWER = re.compile(r"Job \d+ to start at (\S+) using \d+ \w+ on nodes (\S+)")
REFUSED = "allocation failure: "
# Not answers: slurm_errno.c's words for a controller that cannot be reached, is full or is only starting.
NO_ANSWER = (
    *LOST_CONTROLLER,
    *NOT_SENT,
    *("emporarily un", "controller is not", "configuration source", "standby"),
)
# Said where nodes are missing for now as well as where they are missing for ever.
MAYBE_LATER = ("node configuration is not available", "Required node not available", "nodes are busy", "DOWN, DRAINED")
LONGEST_NODES = 40  # longer lists are not shown


def sbatch_test_only(script: Path, env: Mapping[str, str], options: Sequence[str] = ()) -> str:
    """'Slurm expects a start at about 14:05 (in 3 h) on n[1-2]'; '' where Slurm gives no answer, or none for now.

    options: further words of sbatch's command line. Raises SubmitError for what Slurm would never run.
    """
    words = ["sbatch", "--test-only", *options, str(script)]
    try:
        done = slurm_client.run(words, env)
    except slurm_client.Unreachable:
        return ""
    said = (done.stderr.strip() or done.stdout.strip()).replace(REFUSED, "")
    if done.status == 0:
        found = ANSWER.search(said)
        return start_expectation(found[1], found[2], datetime.now()) if found else ""
    if done.status < 0 or not said or any(sign in said for sign in NO_ANSWER):
        return ""
    text = script.read_text(encoding="utf-8")
    if any(sign in said for sign in MAYBE_LATER) and (missing := _missing_nodes(text, env)):
        console.warning(
            f"Slurm could not start it now: {said.splitlines()[-1]}; {missing}, so the job is submitted to wait"
        )
        return ""
    raise refused(f"sbatch --test-only: {said}", text, "if Slurm would take it all the same: test_only=false")


def start_expectation(start: str, nodes: str, now: datetime) -> str:
    """One line from the time as Slurm writes it, '2026-11-21T14:05:00' in this machine's time zone."""
    try:
        at = datetime.fromisoformat(start)
    except ValueError:  # 'Unknown'
        return ""
    where = f" on {nodes}" if len(nodes) <= LONGEST_NODES else ""
    wait = at - now
    if wait < timedelta(minutes=1):
        return f"Slurm expects a start at once{where}"
    day = "" if at.date() == now.date() else f"{at:%a %d %b} "
    return f"Slurm expects a start at about {day}{at:%H:%M} (in {_roughly(wait)}){where}"


def _roughly(wait: timedelta) -> str:
    minutes = round(wait.total_seconds() / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{round(minutes / 60)} h" if minutes < 48 * 60 else f"{round(minutes / 60 / 24)} days"


def _missing_nodes(script: str, env: Mapping[str, str]) -> str:
    """'2 of 4 nodes of partition main are down, drained or reserved'; '' if none are, or if that cannot be told."""
    found = re.search(r"^#SBATCH --partition='?([\w.,+-]+)'?$", script, re.MULTILINE)
    words = ["sinfo", "--noheader", "--format=%D %T %P", *([f"--partition={found[1]}"] if found else [])]
    try:
        done = slurm_client.run(words, env)
    except slurm_client.Unreachable:
        return ""
    total = missing = 0
    lines = [words for line in done.stdout.splitlines() if len(words := line.split(maxsplit=2)) == 3]
    lines = [words for words in lines if words[0].isdigit()]  # not 'CLUSTER: name'
    default = [line for line in lines if line[2].endswith("*")]  # main*
    for count, state, _ in lines if found or not default else default:
        total += int(count)
        # down* drained draining fail maint reserved unknown powered_down# inval; idle allocated mixed completing
        missing += int(count) * (not state.rstrip("*~#!%$@^-+").startswith(("idle", "alloc", "mix", "compl", "plan")))
    asked = re.search(r"^#SBATCH --nodes=(\d+)$", script, re.MULTILINE)
    if not missing or (asked and int(asked[1]) > total):
        return ""
    where = f" of partition {found[1]}" if found else ""
    return f"{missing} of {total} nodes{where} are down, drained or reserved"
