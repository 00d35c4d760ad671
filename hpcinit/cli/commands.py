"""The commands: where each is, what it is for, and examples. The order is that of `hpcinit --help`.

Each module has main(argv), and parser() with all options that it takes beside overrides (`run` has none of its own).
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    module: str  # whose main(argv) it is
    about: str
    group: str  # what a person is about
    examples: str = ""  # of submit: conf/hydra/help


SUBMIT = "submit a job"
WATCH = "see how it does"
FIND_OUT = "find out what went wrong"
CLUSTER = "know a cluster"
INSIDE = "inside a job"

COMMANDS = {
    "submit": Command(
        "hpcinit.submit.submit_command",
        "compose, check, render and submit a job",
        SUBMIT,
    ),
    "plan": Command(
        "hpcinit.submit.plan_command",
        "what each rank will hold, and whether it fits",
        SUBMIT,
        """
  hpcinit plan cluster=x nodes=8 parallel=zero3 model.params=7e9
  hpcinit plan cluster=x nodes=8 parallel=fsdp model.params=7e9 --json""",
    ),
    "render": Command(
        "hpcinit.submit.compare",
        "a run's script, and how two runs differ",
        SUBMIT,
        """
  hpcinit render train-0001                  the script as it would be now
  hpcinit render train-0001 train-0002       a diff of config and script
  hpcinit render train-0001 nodes=8          what nodes=8 would change""",
    ),
    "resubmit": Command(
        "hpcinit.submit.resubmit",
        "submit a run's request once more",
        SUBMIT,
        """
  hpcinit resubmit train-0001
  hpcinit resubmit train-0001 time_min=120
  hpcinit resubmit --fresh-code train-0001    snapshot=git: the checkout as it is now""",
    ),
    "status": Command(
        "hpcinit.observe.status",
        "how runs are doing",
        WATCH,
        """
  hpcinit status                    a line for each run in ./runs
  hpcinit status train-0001         one run; a job id or a path will do too
  hpcinit status --json             one JSON object per line, for programs""",
    ),
    "watch": Command(
        "hpcinit.observe.watch",
        "the same, until all runs are over",
        WATCH,
        """
  hpcinit watch                     all runs in ./runs that are not over
  hpcinit watch train-0001          exit status as the run's
  hpcinit watch --json              one JSON object for each change""",
    ),
    "logs": Command(
        "hpcinit.observe.logs",
        "what a run's ranks printed",
        WATCH,
        """
  hpcinit logs train-0001           rank 0
  hpcinit logs --rank 0,4-7 train-0001
  hpcinit logs --all train-0001     every rank, each line with its rank in front
  hpcinit logs -f train-0001        until the run is over
  hpcinit logs --job train-0001     what the batch script and Slurm itself said""",
    ),
    "cancel": Command(
        "hpcinit.observe.cancel",
        "end a run",
        WATCH,
        """
  hpcinit cancel train-0001
  hpcinit cancel 4242               by its job id
  hpcinit cancel --save train-0001  asks the training to save first: run.should_stop()""",
    ),
    "why": Command(
        "hpcinit.why.why_command",
        "what went wrong first in a run, and what to do",
        FIND_OUT,
        """
  hpcinit why train-0001            the first failure, its cause, what to do, how many secondary errors
  hpcinit why 4242 --json           by its job id, for programs""",
    ),
    "report": Command(
        "hpcinit.report.report_command",
        "how long each phase of a start took, and which ranks were slow",
        FIND_OUT,
        """
  hpcinit report train-0001         a table, and report.html in the run folder
  hpcinit report train-0001 --html start.html
  hpcinit report train-0001 --json  for programs""",
    ),
    "doctor": Command(
        "hpcinit.doctor.doctor_command",
        "is all well, here and on the nodes",
        FIND_OUT,
        """
  hpcinit doctor                    versions, Slurm, config, folders, clocks, environment
  hpcinit doctor cluster=x          the same with what cluster=x says
  hpcinit doctor cluster=x nodes=4  as a job: devices, names, links, disks, clocks of the nodes
  hpcinit doctor cluster=x nodes=4 --remember    and what is bad is left out of submissions
  hpcinit doctor --run doctor-0001  what an earlier one has found; --json for programs""",
    ),
    "nodes": Command(
        "hpcinit.why.nodes_command",
        "nodes that have failed, and are left out of submissions",
        FIND_OUT,
        """
  hpcinit nodes                     each, how often and of what
  hpcinit nodes cluster=x           of one cluster, with the limits that a submission to it has
  hpcinit nodes --forget n3         it is well again
  hpcinit nodes --cluster x --add n3 --why 'slow network'""",
    ),
    "discover": Command(
        "hpcinit.discover.discover_command",
        "ask Slurm what this cluster is, and describe it in conf/cluster",
        CLUSTER,
        """
  hpcinit discover --name x         writes conf/cluster/x.yaml, for cluster=x
  hpcinit discover --print          shows it, and writes nothing
  hpcinit discover --name x --diff  what has changed since; exit status 1 if anything has""",
    ),
    "timeouts": Command(
        "hpcinit.timeouts.timeouts_command",
        "how long a start-up may take, and what past runs say of it",
        CLUSTER,
        """
  hpcinit timeouts cluster=x        the timeout formula in force, from 1 to 16384 nodes
  hpcinit timeouts fit              from all runs in ./runs: a timeout formula for their cluster
  hpcinit timeouts fit train-0001 train-0002 --write    into the cluster's YAML""",
    ),
    "build-ops": Command(
        "hpcinit.build_ops",
        "compile DeepSpeed's ops once, before ranks need them",
        CLUSTER,
        """
  hpcinit build-ops parallel=zero3_offload deepspeed.optimizer=adamw
  hpcinit build-ops --ops cpu_adam""",
    ),
    "run": Command(
        "hpcinit.run",
        "become a rank and run a program",
        INSIDE,
        """
  srun python -m hpcinit.run train.py --lr 3e-4
  srun python -m hpcinit.run -m package.train""",
    ),
    "world": Command(
        "hpcinit.world.__main__",
        "which rank am I, as JSON",
        INSIDE,
        """
  srun -n 2 python -m hpcinit.world""",
    ),
}
