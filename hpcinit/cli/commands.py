"""Defines the table of commands, from which `hpcinit --help` and the man page are made, in this order.

Each module has a function main(argv), and a function parser() that returns the parser of the command's options. Only
`run` has no options and no parser().
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    module: str  # has main(argv)
    about: str
    group: str  # heading in `hpcinit --help`
    examples: str = ""  # the examples of submit are in conf/hydra/help


SUBMIT = "submit a job"
WATCH = "follow a run"
FIND_OUT = "find out what went wrong"
CLUSTER = "describe and prepare a cluster"
INSIDE = "inside a job"

ABOUT = "submit PyTorch jobs to a Slurm cluster and initialize their process groups"
EXAMPLES = {
    "hpcinit submit cluster=local": "a smoke test on this machine",
    "hpcinit submit cluster=x nodes=8 -- train.py": "your script on 8 nodes, one rank per GPU",
    "hpcinit why train-0001": "what failed first in that run, and what to do",
}
# The options of every command.
OPTIONS = {
    "hpcinit COMMAND --help": "options and examples of the command",
    "--json": "print JSON for programs",
    "-q, --quiet": "print the shortest answer, and only errors to stderr",
    "-v, --verbose": "also print each command of Slurm and git with its duration to stderr",
}

COMMANDS = {
    "submit": Command(
        "hpcinit.submit.submit_command",
        "check a request, write its batch script and submit it",
        SUBMIT,
    ),
    "plan": Command(
        "hpcinit.submit.plan_command",
        "estimate the GPU memory per rank, and whether it fits",
        SUBMIT,
        """
  hpcinit plan cluster=x nodes=8 parallel=zero3 model.params=7e9
  hpcinit plan cluster=x nodes=8 parallel=fsdp model.params=7e9 --json""",
    ),
    "render": Command(
        "hpcinit.submit.compare",
        "print a run's batch script, or the differences between two runs",
        SUBMIT,
        """
  hpcinit render train-0001                  the script, rendered again
  hpcinit render train-0001 train-0002       a diff of config and script
  hpcinit render train-0001 nodes=8          a diff: what nodes=8 would change""",
    ),
    "export": Command(
        "hpcinit.submit.export_command",
        "print a plain batch script that runs without hpcinit",
        SUBMIT,
        """
  hpcinit export train-0001 > job.sbatch     a script for this run, without hpcinit
  hpcinit export cluster=x nodes=2 -- train.py --lr 1e-3 > job.sbatch""",
    ),
    "resubmit": Command(
        "hpcinit.submit.resubmit",
        "submit a run's request again",
        SUBMIT,
        """
  hpcinit resubmit train-0001
  hpcinit resubmit train-0001 time_min=120
  hpcinit resubmit --fresh-code train-0001    with snapshot=git: copy the current checkout""",
    ),
    "drill": Command(
        "hpcinit.drill.drill_command",
        "check that a program resumes correctly after an interruption",
        SUBMIT,
        """
  hpcinit drill -- train.py                  interrupt it in six ways, on this machine
  hpcinit drill ranks_per_node=2 --steps 60 -- train.py
  hpcinit drill drill.pattern='it=(?P<step>\\d+) L=(?P<loss>\\S+)' -- train.py""",
    ),
    "status": Command(
        "hpcinit.observe.status",
        "show the state of runs",
        WATCH,
        """
  hpcinit status                    a line for each run in ./runs
  hpcinit status train-0001         one run, by its name, job id or path
  hpcinit status sweep-0001 --sort loss --top 1    the run of a sweep with the smallest loss; --reverse: the largest
  hpcinit status --json             one JSON object per line, for programs""",
    ),
    "watch": Command(
        "hpcinit.observe.watch",
        "show the state of runs until all have ended",
        WATCH,
        """
  hpcinit watch                     all runs in ./runs that have not ended
  hpcinit watch train-0001          exits with the run's exit status
  hpcinit watch --json              one JSON object for each change""",
    ),
    "logs": Command(
        "hpcinit.observe.logs",
        "print the output of a run's ranks",
        WATCH,
        """
  hpcinit logs train-0001           rank 0
  hpcinit logs --rank 0,4-7 train-0001
  hpcinit logs --all train-0001     every rank, each line starts with its rank
  hpcinit logs -f train-0001        follow until the run has ended
  hpcinit logs --job train-0001     the log of the batch script and of Slurm""",
    ),
    "cancel": Command(
        "hpcinit.observe.cancel",
        "cancel a run",
        WATCH,
        """
  hpcinit cancel train-0001
  hpcinit cancel 4242               by its job id
  hpcinit cancel --save train-0001  lets the program save first, if it calls run.should_stop()""",
    ),
    "clean": Command(
        "hpcinit.observe.clean",
        "remove finished runs",
        WATCH,
        """
  hpcinit clean                     list the finished runs in ./runs, ask, and remove them
  hpcinit clean --older-than 30 --state FAILED,CANCELLED
  hpcinit clean train-0001 --yes    without a confirmation
  hpcinit clean --outside           the same for what hpcinit wrote outside of run folders
  hpcinit clean --all               both: the finished runs, and files outside of run folders""",
    ),
    "why": Command(
        "hpcinit.why.why_command",
        "show what failed first in a run, and what to do",
        FIND_OUT,
        """
  hpcinit why train-0001            the first failure, its cause, what to do, how many secondary errors
  hpcinit why 4242 --json           by its job id, for programs""",
    ),
    "stacks": Command(
        "hpcinit.observe.stacks",
        "show where every rank is now, unusual ones first",
        FIND_OUT,
        """
  hpcinit stacks train-0001         each stack once, with the ranks that have it; from three samples within a second
  hpcinit stacks train-0001 --rank 3,8-11    only these ranks, with all frames
  hpcinit stacks 4242 --json        by its job id, for programs""",
    ),
    "exec": Command(
        "hpcinit.submit.exec_command",
        "run a command on a node of a run, in the environment of its ranks",
        FIND_OUT,
        """
  hpcinit exec train-0001 -- nvidia-smi          on the node of rank 0
  hpcinit exec train-0001 --rank 37 -- sh -c 'py-spy dump --pid $HPCINIT_RANK_PID'
  hpcinit exec train-0001 --node n09 -- df -h""",
    ),
    "shell": Command(
        "hpcinit.submit.shell_command",
        "open a shell on a node of a run, in the environment of its ranks",
        FIND_OUT,
        """
  hpcinit shell train-0001           on the node of rank 0
  hpcinit shell train-0001 --rank 37
  hpcinit shell train-0001 --node n09""",
    ),
    "report": Command(
        "hpcinit.report.report_command",
        "show where the charged time went, what to change, and which ranks started slowly",
        FIND_OUT,
        """
  hpcinit report train-0001
  hpcinit report train-0001 --svg ledger.svg
  hpcinit report --since 30d              all runs of the last 30 days
  hpcinit report 123456                   a job that hpcinit did not submit, or a folder with its logs
  hpcinit report train-0001 --json        for programs; --csv for a table""",
    ),
    "doctor": Command(
        "hpcinit.doctor.doctor_command",
        "check the installation, the configuration and the nodes",
        FIND_OUT,
        """
  hpcinit doctor                    versions, Slurm, config, folders, clocks, environment
  hpcinit doctor cluster=x          the same with the settings of cluster=x
  hpcinit doctor cluster=x nodes=4  also checks nodes in a job: devices, names, links, disks, clocks
  hpcinit doctor cluster=x nodes=4 --remember    also exclude faulty nodes from submissions
  hpcinit doctor --run doctor-0001  the result of an earlier check; --json for programs""",
    ),
    "nodes": Command(
        "hpcinit.why.nodes_command",
        "list nodes that failed and are excluded from submissions",
        FIND_OUT,
        """
  hpcinit nodes                     each node with its failures
  hpcinit nodes cluster=x           the nodes of one cluster, with the settings of cluster=x
  hpcinit nodes --forget n3         clear the failures of n3 after its repair
  hpcinit nodes --cluster x --add n3 --why 'slow network'""",
    ),
    "discover": Command(
        "hpcinit.discover.discover_command",
        "write a cluster file for this cluster, from what Slurm reports",
        CLUSTER,
        """
  hpcinit discover --name x         writes conf/cluster/x.yaml, for cluster=x
  hpcinit discover --name x --default    also makes x the default cluster of hpcinit submit
  hpcinit discover --print          prints the file and writes nothing
  hpcinit discover --name x --diff  shows what has changed; exit status 1 if anything has""",
    ),
    "timeouts": Command(
        "hpcinit.submit.timeouts_command",
        "show the start-up timeout",
        CLUSTER,
        """
  hpcinit timeouts cluster=x        the timeout formula, and its result for 1 to 16384 nodes""",
    ),
    "build-ops": Command(
        "hpcinit.build_ops",
        "compile DeepSpeed's ops once, before the ranks need them",
        CLUSTER,
        """
  hpcinit build-ops parallel=zero3_offload deepspeed.optimizer=adamw
  hpcinit build-ops --ops cpu_adam""",
    ),
    "run": Command(
        "hpcinit.run",
        "start a program as a rank",
        INSIDE,
        """
  srun python -m hpcinit.run train.py --lr 3e-4
  srun python -m hpcinit.run -m package.train""",
    ),
    "world": Command(
        "hpcinit.world.__main__",
        "print this process's rank and world as JSON",
        INSIDE,
        """
  srun -n 2 python -m hpcinit.world""",
    ),
}
