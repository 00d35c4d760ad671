"""A training longer than the time limit: one run folder, several jobs of the same script, each after the one before.

Why so: docs/decisions/0017-chains.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcinit.config.schema import Config
from hpcinit.facts import runfolder
from hpcinit.facts.errors import SubmitError
from hpcinit.facts.stopping import NOT_RECORDED

# What the attempt before has left in exit.json decides. No record of its end: it was killed, or its first node lost.
# 143: it was told to end (128 + SIGTERM), by the time limit, for another job, by scancel. Where another node is lost
# the ranks on the others fail, and Slurm says why: 'srun: error: Node failure on n2', '*** JOB 15 ON n1 CANCELLED AT
# ... DUE TO NODE FAILURE'. A program that exits with 0 is done, unless stopped.json exists: it is there from the first
# run.should_stop() until the end of a program that did not stop, so that a record which cannot be written never looks
# like 'done'. It is removed after exit.json, for the same reason. A requeued job is no next link.
LINES = f"""\
hpcinit_before() {{ # one of a chain of jobs: what the one before has left decides
  local left job='' status='' log="${runfolder.ENV_FOLDER}/{runfolder.JOB_LOG}"
  left=$(cat "${runfolder.ENV_FOLDER}/{runfolder.EXIT}" 2>/dev/null) || return 0
  [[ $left =~ '"job": "'([0-9]+) ]] && job=${{BASH_REMATCH[1]}}
  [[ $left =~ '"exit_status": '([0-9]+) ]] && status=${{BASH_REMATCH[1]}}
  case $job:$status in
    "$SLURM_JOB_ID":*|*:|*:{runfolder.ENDED_EARLY}) return ;;
    *:0) if [ -e "${runfolder.ENV_FOLDER}/{runfolder.STOPPED}" ]; then
         ! grep -qs "{NOT_RECORDED}" "${runfolder.ENV_FOLDER}/{runfolder.STOPPED}" ||
           echo "hpcinit: warning: job $job of this chain stopped, {NOT_RECORDED}; was the disk full?"
         return 0
       fi
       echo "hpcinit: job $job of this chain has ended well: nothing is left to do for job $SLURM_JOB_ID" ;;
    *) sed -n "/^hpcinit: job $job of a chain begins$/,\\$p" "$log" | grep -qi 'node failure' && return
       echo "hpcinit: job $job of this chain has failed by itself ($status): job $SLURM_JOB_ID runs nothing" ;;
  esac
  echo "hpcinit: to run the script again by hand, take ${runfolder.ENV_FOLDER}/{runfolder.EXIT} away"
  exit "$status"
}}
hpcinit_before; rm -f "${runfolder.ENV_FOLDER}/{runfolder.EXIT}" "${runfolder.ENV_FOLDER}/{runfolder.STOPPED}"
echo "hpcinit: job $SLURM_JOB_ID of a chain begins"
hpcinit_from=$(wc -l < "${runfolder.ENV_FOLDER}/{runfolder.JOB_LOG}")
""".splitlines()
# srun ends with the highest status of all ranks, and where one fails it ends the others by SIGTERM: 143, as if Slurm
# had told the job to end. In the grace time of a preemption the ranks get SIGTERM, and this shell gets none.
OWN = f"""\
hpcinit_own() {{ # the ranks have ended with status $1: that of the first, where srun has ended the others for it
  local first
  [ "$1" -eq {runfolder.ENDED_EARLY} ] && ! hpcinit_preempted || return "$1"
  first=$(tail -n "+$((hpcinit_from + 1))" "${runfolder.ENV_FOLDER}/{runfolder.JOB_LOG}" |
    grep -m 1 '^srun: error: .*: tasks\\? \\|CANCELLED AT\\|Job step aborted\\|forcing job termination')
  case $first in
    "srun: error: "*": Exited with exit code "*) return "${{first##* }}" ;;
    "srun: error: "*": Terminated"|*"CANCELLED AT"*|*"Job step"*|*forcing*|'') return "$1" ;;
    *) return 1 ;; # a signal
  esac
}}
""".splitlines()


@dataclass(frozen=True)
class Links:
    """jobs: their ids. command: that submitted the first. missing: why there are fewer than were asked for, else ''."""

    jobs: Sequence[str]
    command: Sequence[str]
    missing: str = ""


def lines(links: int) -> list[str]:
    """What the script of a chain begins with; of a single job, nothing."""
    return [*LINES, *OWN] if links > 1 else []


def around(step: str, links: int) -> str:
    """The line `step`, that runs the ranks, with what follows it."""
    return f"{step}\nhpcinit_own $?" if links > 1 else step


def hand_over(submit: Callable[..., tuple[str, Sequence[str]]], config: Config) -> Links:
    """Submit the jobs of a run. submit: takes options of sbatch, returns job id and command.

    Raises SubmitError if there is not even a first. Where a later one fails, the jobs before it are kept.
    """
    job_id, command = submit()
    jobs = [job_id]
    while len(jobs) < config.chain:
        try:
            # On sbatch's command line, where it takes the place of the script's own: the first alone waits for others.
            job_id, _ = submit(f"--dependency=afterany:{jobs[-1]}" + ",singleton" * config.singleton)
        except (Exception, KeyboardInterrupt) as error:  # the jobs before this one exist, whatever has happened
            said = error.problem if isinstance(error, SubmitError) else str(error)
            return Links(jobs, command, _missing(said or "interrupted", jobs, config.chain))
        jobs.append(job_id)
    return Links(jobs, command)


def _missing(said: str, jobs: Sequence[str], asked: int) -> str:
    return (
        f"job {len(jobs) + 1} of a chain of {asked}: {said}\n"
        f"those before it stay in the queue ({', '.join(jobs)}): the run begins, with fewer jobs than were asked for; "
        "hpcinit cancel takes them away"
    )
