"""Asks `sbatch --test-only` whether Slurm would accept the job and when the job would start. Nothing is submitted.

Slurm computes the start time from the time limits of the running jobs. The job starts earlier if these jobs end
earlier. hpcinit's message mentions this.

sbatch prints its answer to stderr. A refusal starts with "allocation failure: ". The exit status of a refusal is 1 in
Slurm 22.05 and 24.11. In Slurm 26.05 it is 0, and sbatch accepts a job that can never start.

--test-only also refuses jobs that need nodes that are down, drained or reserved. sbatch itself accepts such jobs, and
they wait.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from hpcinit.base import console
from hpcinit.base.errors import NOTHING_SUBMITTED, SubmitError
from hpcinit.base.text import counted
from hpcinit.config.spellings import OWNED
from hpcinit.slurm import sbatch_errors, slurm_client
from hpcinit.slurm.sbatch import LOST_CONTROLLER, NOT_SENT

# The config keys of sbatch options, for messages about a refused script. They replace those that the schema declares.
KEYS = {
    "gpus-per-node": "gpus_per_node and cluster.gpu_type",
    "gres": "gpus_per_node and cluster.gpu_type",
    "cpus-per-task": "cpus_per_rank or cluster.cpus_per_node",
    "array": "the sweep",
    "exclude": "cluster.sbatch.exclude or the excluded nodes that `hpcinit nodes` lists",
}


def key_for(option: str) -> str:
    """Return the config key that sets an sbatch option.

    option: the long name without dashes.
    """
    return KEYS.get(option) or OWNED.get(option) or f"cluster.sbatch.{option}"


def refused(message: str, script: str, advice: str = "") -> SubmitError:
    """Return the error for a script that sbatch refused. It shows the lines at fault and their config keys.

    message: what sbatch printed.
    script: the text of the script.
    advice: what to type, or ''.
    """
    problem = f"{message}\n{sbatch_errors.explain(message, script, key_for)}{advice}".rstrip("\n")
    return SubmitError(problem, NOTHING_SUBMITTED, separator="; " if advice else "\n")


# sbatch: Job 5 to start at 2026-11-21T14:05:00 using 4 processors on nodes n[1-2] in partition main
# Slurm 26.05 has an 'a' before 'using'.
ANSWER = re.compile(r"Job \d+ to start at (\S+) (?:a )?using \d+ \w+ on nodes (\S+)")
REFUSED = "allocation failure: "
# No answer: the texts in slurm_errno.c for a controller that is unreachable, overloaded or starting.
NO_ANSWER = (
    *LOST_CONTROLLER,
    *NOT_SENT,
    *("emporarily un", "controller is not", "configuration source", "standby"),
)
# Slurm prints these texts both for nodes that are missing now and for nodes that don't exist at all.
MAYBE_LATER = ("node configuration is not available", "Required node not available", "nodes are busy", "DOWN, DRAINED")
LONGEST_NODES = 40  # longer lists are not shown
EARLIER = ", or earlier if running jobs end before their time limits"


def sbatch_test_only(script: Path, env: Mapping[str, str], options: Sequence[str] = ()) -> str:
    """Return a sentence such as 'Slurm expects to start the job by 14:05 (in 3 h) ...', or '' if Slurm does not answer.

    options: further arguments of sbatch.

    Raise SubmitError for a job that Slurm would never run.
    """
    command = ["sbatch", "--test-only", *options, str(script)]
    try:
        done = slurm_client.run(command, env)
    except slurm_client.Unreachable:
        return ""
    answer = done.stderr.strip() or done.stdout.strip()
    is_refusal = done.status != 0 or answer.startswith(REFUSED)
    answer = answer.replace(REFUSED, "")
    if not is_refusal:
        found = ANSWER.search(answer)
        return start_expectation(found[1], found[2], datetime.now()) if found else ""
    if done.status < 0 or not answer or any(sign in answer for sign in NO_ANSWER):
        return ""
    text = script.read_text(encoding="utf-8")
    if any(sign in answer for sign in MAYBE_LATER) and (missing := _missing_nodes(text, env)):
        console.warning(
            f"Slurm cannot start the job now: {answer.splitlines()[-1]}; {missing}, so the job will wait in the queue"
        )
        return ""
    raise refused(f"sbatch --test-only: {answer}", text, "to submit without this check: validate=false")


def start_expectation(start: str, nodes: str, now: datetime) -> str:
    """Return a sentence about when Slurm expects to start the job, or '' if `start` is not a time.

    start: Slurm's time, such as '2026-11-21T14:05:00', in this machine's time zone.
    nodes: the nodes on which Slurm would start the job.
    """
    try:
        at = datetime.fromisoformat(start)
    except ValueError:  # 'Unknown'
        return ""
    where = f" on {nodes}" if len(nodes) <= LONGEST_NODES else ""
    wait = at - now
    if wait < timedelta(minutes=1):
        return f"Slurm expects to start the job now{where}"
    day = "" if at.date() == now.date() else f"{at:%a %d %b} "
    return f"Slurm expects to start the job by {day}{at:%H:%M} (in {_roughly(wait)}){where}{EARLIER}"


def _roughly(wait: timedelta) -> str:
    minutes = round(wait.total_seconds() / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{round(minutes / 60)} h" if minutes < 48 * 60 else f"{round(minutes / 60 / 24)} days"


def _missing_nodes(script: str, env: Mapping[str, str]) -> str:
    """Return how many nodes are unavailable, or '' if there are none.

    An example is '2 of 4 nodes of partition main are down, drained or reserved'.
    """
    found = re.search(r"^#SBATCH --partition='?([\w.,+-]+)'?$", script, re.MULTILINE)
    command = ["sinfo", "--noheader", "--format=%D %T %P", *([f"--partition={found[1]}"] if found else [])]
    try:
        done = slurm_client.run(command, env)
    except slurm_client.Unreachable:
        return ""
    total = missing = 0
    lines = [fields for line in done.stdout.splitlines() if len(fields := line.split(maxsplit=2)) == 3]
    lines = [fields for fields in lines if fields[0].isdigit()]  # not 'CLUSTER: name'
    default = [line for line in lines if line[2].endswith("*")]  # main*
    for count, state, _ in lines if found or not default else default:
        total += int(count)
        # down* drained draining fail maint reserved unknown powered_down# inval; idle allocated mixed completing
        missing += int(count) * (not state.rstrip("*~#!%$@^-+").startswith(("idle", "alloc", "mix", "compl", "plan")))
    requested = re.search(r"^#SBATCH --nodes=(\d+)$", script, re.MULTILINE)
    if not missing or (requested and int(requested[1]) > total):
        return ""
    where = f" of partition {found[1]}" if found else ""
    return f"{missing} of {counted(total, 'node')}{where} are down, drained or reserved"
