"""Explains why sbatch refused a script: which #SBATCH lines caused it, and which config key sets each of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

# Limits on the number of jobs in the queue. For each: whose limit it is, and the command that shows it. sbatch
# prints these names (slurm_protocol_defs.c, job_reason_string; 22.05 to 24.11). No line of the script causes them.
COUNTS = {
    "AssocMaxSubmitJobLimit": (
        "your account limits how many jobs each of its users",
        "sacctmgr show assoc user=$USER format=account,maxsubmit",
    ),
    "AssocGrpSubmitJobsLimit": (
        "your account limits how many jobs all of its users together",
        "sacctmgr show assoc format=account,user,grpsubmit",
    ),
    "QOSMaxSubmitJobPerUserLimit": (
        "the qos limits how many jobs each user",
        "sacctmgr show qos format=name,maxsubmitpu",
    ),
    "QOSMaxSubmitJobPerAccountLimit": (
        "the qos limits how many jobs each account",
        "sacctmgr show qos format=name,maxsubmitpa",
    ),
    "QOSGrpSubmitJobsLimit": (
        "the qos limits how many jobs all of its users together",
        "sacctmgr show qos format=name,grpsubmit",
    ),
}
# Parts of sbatch's messages, and the options that each part can be about, the most likely option first. The first part
# that matches decides: after 'Memory specification can not be satisfied', sbatch also prints 'Requested node
# configuration is not available'.
# Texts of Slurm 22.05 to 24.11 (slurm_errno.c, opt.c), provoked on 22.05.8: tests/submit/test_sbatch_errors.py.
SIZE = ("nodes", "ntasks-per-node", "cpus-per-task")
GPUS = ("gpus-per-node", "gres", "gpus", "gpus-per-task")
MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
SIGNS: tuple[tuple[str, Sequence[str]], ...] = (
    ("account/partition combination", ("account", "partition")),
    ("wallduration", ("time", "qos", "account")),  # QOSMaxWallDurationPerJobLimit
    ("nodeperjob", ("nodes", "qos", "account")),
    ("cpuperjob", ("cpus-per-task", "ntasks-per-node", "nodes", "qos", "account")),
    ("gresperjob", (*GPUS, "nodes", "qos", "account")),
    ("accounting/qos policy", ("qos", "account", *SIZE, "time")),
    ("memory specification", MEMORY),
    ("memory required by task", MEMORY),
    ("cpu count per node", ("cpus-per-task", "ntasks-per-node", "mincpus")),
    ("more processors requested", ("cpus-per-task", "ntasks-per-node", "nodes")),
    ("temporary disk specification", ("tmp",)),
    ("socket, core and/or thread", ("sockets-per-node", "cores-per-socket", "threads-per-core", "extra-node-info")),
    ("generic resource", GPUS),
    ("gpu:", GPUS),
    ("node configuration", (*GPUS, *MEMORY, *SIZE, "constraint", "exclude", "nodelist", "exclusive", "mincpus", "tmp")),
    ("node name", ("nodelist", "exclude")),
    ("node count", ("nodes", "nodelist")),
    ("number of nodes", ("nodes", "nodelist")),
    ("time limit", ("time", "time-min")),
    ("partition", ("partition",)),
    ("account", ("account",)),
    ("qos", ("qos",)),
    ("wckey", ("wckey",)),
    ("feature", ("constraint", "prefer")),
    ("constraint", ("constraint", "prefer")),
    ("reservation", ("reservation",)),
    ("dependency", ("dependency",)),
    ("license", ("licenses",)),
    ("environment file", ("export-file",)),
)  # fmt: skip


def explain(message: str, script: str, key: Callable[[str], str]) -> str:
    """Explain sbatch's error `message`: return the #SBATCH lines or the limit that caused it, or '' if unknown.

    key: a function that returns the config key that sets an sbatch option.
    """
    for reason, (whose, shown) in COUNTS.items():
        if reason in message:
            return (
                f"{whose} may have in the queue; each task of an array counts. See the limit: `{shown}`; your jobs: "
                "`squeue --all --me --array`. Submit again when some have ended, or submit fewer at once\n"
            )
    named = re.findall(
        r"--([a-z][a-z-]+)", message
    )  # "Invalid --begin specification", "unrecognized option '--frob=1'"
    found = list(_lines(script, named, key))
    if found:
        return _quoted(found)
    options = next((options for sign, options in SIGNS if sign in message.lower()), ())
    found = list(_lines(script, options, key))
    if found:
        return _quoted(found)
    if options:
        return f"no #SBATCH line sets --{options[0]}: set it with {key(options[0])}=...\n"
    return ""


def _lines(script: str, options: Sequence[str], key: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """Yield (line, key) for each #SBATCH line that sets one of these options."""
    for option in dict.fromkeys(options):
        pattern = re.compile(rf"#SBATCH --{re.escape(option)}(=.*)?")
        for line in script.splitlines():
            if pattern.fullmatch(line):
                yield line, key(option)


def _quoted(found: Sequence[tuple[str, str]]) -> str:
    width = max(len(line) for line, _ in found)
    head = "caused by this line of the script" if len(found) == 1 else "caused by one or more of these lines"
    return "\n".join([f"{head}:", *(f"  {line:{width}}  set by {key}" for line, key in found)]) + "\n"
