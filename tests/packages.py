"""The packages of hpcinit, from the lowest to the highest: what each contains and what it may import.

tests/test_imports.py checks the imports against this table, and docs/development/architecture.md contains it. After a change:

    python -m tests.packages
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent.parent / "docs/development/architecture.md"
BEGIN, END = "<!-- packages: begin, written by tests/packages.py -->", "<!-- packages: end -->"


class Package(NamedTuple):
    """imports: packages of hpcinit. others: third-party packages that its modules may import at all."""

    holds: str
    imports: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


BASE = ("base",)
LOGIN = ("base", "slurm", "records", "engine")  # what every package of the login node may use
JOB = ("base", "slurm", "records", "engine", "world")  # and every package of the job
PACKAGES = {
    "base": Package("errors, text, atomic files, quoting, console output, signals, child processes, versions", BASE),
    "slurm": Package(
        "everything that calls Slurm's commands or parses their output: the client, nodelists, jobs, "
        "exactly-once submission, sbatch's errors",
        ("base",),
    ),
    "records": Package(
        "the contract between login node and job: the run folder's files, spec, layout, batch, timeouts, wrappers, "
        "error records, timeline, heartbeats, hang reports",
        ("base", "slurm"),
    ),
    "engine": Package(
        "what differs between Slurm and the local machine: facts, submission, state and cancellation of a job; the jobs of "
        "`cluster=local`",
        ("base", "slurm", "records"),
        ("psutil",),
    ),
    "world": Package(
        "World, the launchers, host names, rank 0's address, network interfaces, ports, visible devices, fingerprints",
        LOGIN,
        ("psutil",),
    ),
    "node": Package(
        "one probe of a node and what its facts mean: for the doctor, and for the check before ranks start",
        JOB,
        ("psutil",),
    ),
    "deepspeed": Package("ds_config, version checks, op names: data and functions only", ("base", "records")),
    "config": Package(
        "the typed schema and its composition by Hydra",
        ("base", "records", "engine", "world", "deepspeed"),
        ("hydra", "hydra_plugins", "omegaconf", "yaml"),
    ),
    "observe": Package("status, watch, logs, cancel", LOGIN, ("rich",)),
    "checks": Package(
        "every check before the job is queued: a file for each subject, one list in `all_checks.py`",
        (*LOGIN, "world", "deepspeed", "config", "observe"),
        ("psutil",),
    ),
    "report": Package("where the charged time of runs went, and how their starts went", (*LOGIN, "observe")),
    "why": Package("evidence, diagnosis, hang verdicts, excluded nodes", (*LOGIN, "observe", "config"), ("rich",)),
    "after": Package("the end of a job, on the host of the batch script: restart, requeue, chain", LOGIN),
    "submit": Package(
        "batch script and its shell blocks, the submit transaction, run folder, code snapshot, chains, sweeps, plan, functions",
        (*LOGIN, "config", "checks", "observe", "why", "world"),
        ("submitit", "yaml", "rich"),
    ),
    "drill": Package(
        "`hpcinit drill`: starts, interrupts and restarts a program, and compares",
        (*LOGIN, "submit"),
        ("psutil",),
    ),
    "discover": Package("a cluster file from a live Slurm", (*LOGIN, "config"), ("yaml",)),
    "doctor": Package(
        "checks of the login node and of nodes",
        (*LOGIN, "node", "config", "checks", "deepspeed", "observe", "why", "submit"),
        ("rich",),
    ),
    "rendezvous": Package(
        "how the ranks find each other: server, client, protocol, roster, the secret",
        JOB,
    ),
    "runtime": Package(
        "inside a rank: its start and state, init, process group, devices, mesh, seeds, signals, stopping, heartbeats",
        (*JOB, "deepspeed", "rendezvous"),
        ("torch", "deepspeed", "numpy"),
    ),
    "train": Package(
        "the optional training layer: run.wrap() for each kind of parallelism, and checkpoints",
        (*JOB, "deepspeed", "rendezvous", "runtime"),
        ("torch", "deepspeed", "numpy", "safetensors", "peft"),
    ),
    "launch": Package(
        "starts ranks: the fork server and its children, the torchrun agent",
        (*JOB, "node", "deepspeed", "rendezvous", "runtime"),
        ("torch",),
    ),
    "jobs": Package(
        "programs that ship: smoke, measure, doctor, train_gpt, pickled functions, replays of hangs",
        (*JOB, "node"),
        ("torch", "submitit", "hydra", "cloudpickle"),
    ),
    "cli": Package(
        "the table of commands, completion, how every command ends", ("base", "config", "observe", "submit")
    ),
}
# A program that calls run.wrap() or run.save() needs the package train, and others never import it.
# Only in a hang, with hang.action=end, a rank needs the verdict on dumps.
IN_FUNCTIONS = {"runtime/runtime.py": ("train",), "runtime/lifecycle/flight_dump.py": ("why",)}


def table() -> str:
    """Return the table of PACKAGES as Markdown."""
    rows = ["| package | contains | may import |", "|---|---|---|"]
    for name, package in PACKAGES.items():
        below = ", ".join(one for one in package.imports if one != name) or "the standard library"
        if package.others:
            below += f"; {', '.join(package.others)}"
        rows.append(f"| `hpcinit/{name}/` | {package.holds} | {below} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the architecture page `text` with the table of today between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
