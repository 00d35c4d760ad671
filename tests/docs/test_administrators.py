"""docs/administrators.md lists each call of Slurm and each place outside of the run folder that hpcinit changes.

Wrappers of Slurm's commands record the calls of a command and of its job, and strace records what both write.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.minislurm import MiniSlurm
from tests.skip_or_fail import installed
from tests.submit.test_restart import finish
from tests.submitting import job_of
from tests.waiting import until

PAGE = (Path(__file__).parents[2] / "docs/administrators.md").read_text()
SLURM = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
CALL = re.compile(
    rf"\b(?:{'|'.join(SLURM)})\b(?: --all| --oneliner)*(?: show \w+| requeue| --test-only| --help| --overlap)?"
)
CHANGES = "openat,creat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat"
# -ff: a file for each process, so that no call is in two parts.
STRACE = ("strace", "-ff", "-qq", "-y", "-s", "4096", "-e", f"trace={CHANGES},chdir,fchdir")
ALL_ITS_PROCESSES = (*STRACE, "-f", "--seccomp-bpf")
DONE = re.compile(r"^(\w+)\((.*)\) += \d+(?:<.*>)?$")
OPEN_TO_WRITE = re.compile("O_WRONLY|O_RDWR|O_CREAT")
ARGUMENT = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>(?:, )?)?(?:"([^"]*)")?')
NO_FILE = ("/dev/null", "/dev/tty", "/dev/pts", "/proc/")
TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
import hpcinit

run = hpcinit.init(backend="gloo")
training = run.wrap(torch.nn.Linear(2, 2), optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
data = torch.utils.data.DataLoader(torch.ones(40, 2), num_workers=1, multiprocessing_context="fork")
for step, batch in enumerate(data):
    training.backward(training(batch).sum())
    training.step()
    run.progress(step, 40)
    if run.should_stop():
        break
    if "hang" in sys.argv and step == 30 and run.rank:
        time.sleep(600)
run.save(training, os.environ["HPCINIT_RUN"] + "/checkpoints", step)
"""


class Done(NamedTuple):
    """What a scenario did. calls: (where, command); where: login or job. changes: (where, path)."""

    calls: set[tuple[str, str]]
    changes: set[tuple[str, str]]


@dataclass
class Recorder:
    """A folder in which hpcinit runs with wrappers of Slurm's commands, and a Python under strace."""

    slurm: MiniSlurm
    folder: Path
    tmp: str  # TMPDIR, with a short name: Python makes sockets in it, whose path has at most 107 characters

    def __post_init__(self) -> None:
        for name in ("bin", "work", "home", "traces"):
            (self.folder / name).mkdir()
        (self.folder / "calls").touch()
        for name in SLURM:
            record = (
                f'printf "%s %s\\n" "${{SLURM_JOB_ID:+job}}" "{name} ${{*//[[:space:]]/ }}" >> "{self.folder}/calls"'
            )
            self._write(f"bin/{name}", f'#!/bin/bash\n{record}\nexec "{installed(name)}" "$@"\n')
        # hpcinit.after is a child of the batch script, which is traced already.
        own = "if grep -q 'TracerPid:.*[1-9]' /proc/$$/status; then trace=(); fi"
        trace = f'trace=({" ".join(ALL_ITS_PROCESSES)} -o "{self.folder}/traces/job")'
        self._write("bin/python", f'#!/bin/bash\n{trace}\n{own}\nexec "${{trace[@]}}" "{sys.executable}" "$@"\n')
        # The batch script traces itself, and waits until strace is there.
        shell = f'{" ".join(STRACE)} -f -o "{self.folder}/traces/job.shell" -p $$ &\n'
        self._write("attach.sh", f"{shell}until grep -q 'TracerPid:.*[1-9]' /proc/$$/status; do sleep 0.1; done\n")
        self._write("work/train.py", TRAIN)
        self._write("work/fail.py", "raise SystemExit(3)\n")

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def hpcinit(self, *words: str) -> str:
        """Run the command under strace, and return what it printed."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "SLURM_", "HPCINIT_"))}
        path = f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "HOME": f"{self.folder}/home", "TMPDIR": self.tmp}
        done = subprocess.run(
            [*ALL_ITS_PROCESSES, "-o", f"{self.folder}/traces/login", sys.executable, "-m", "hpcinit", *words],
            cwd=self.folder / "work", env=kept | self.slurm.env | own | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def submit(self, *words: str) -> Path:
        """Submit a job whose shell and ranks are traced, and return its run folder."""
        options = ("cluster=mini", "ranks_per_node=1", "gpus_per_node=0", "check_paths=false")
        traced = (f"cluster.python={self.folder}/bin/python", f'cluster.setup=[". {self.folder}/attach.sh"]')
        printed = self.hpcinit("submit", *options, *traced, *words)
        assert "run folder: " in printed, printed
        return Path(printed.partition("run folder: ")[2].partition("\n")[0])

    def ended(self, folder: Path, state: str) -> None:
        assert finish(self.slurm, job_of(folder), 200) == state, (folder / "logs/job.log").read_text()

    def done(self) -> Done:
        """Return what was recorded, with the page's names of places."""
        lines = [line.split(" ", 1) for line in (self.folder / "calls").read_text().splitlines()]
        changes = set()
        for trace in (self.folder / "traces").iterdir():
            where = trace.name.partition(".")[0]
            changes |= {
                (where, place) for path in changed(trace, f"{self.folder}/work") if (place := self._place(path))
            }
        return Done({(where or "login", plain(CALL.findall(call)[0])) for where, call in lines}, changes)

    def _place(self, path: str) -> str:
        """Return a path as the page has it: ~ for the home, TMPDIR; '' for a file of this test or in a run folder."""
        work = str(self.folder / "work")
        if path.startswith((f"{work}/runs/", f"{self.folder}/traces/", f"{self.folder}/calls", *NO_FILE)):
            return ""
        for folder, name in ((work, "."), (f"{self.folder}/home", "~"), (self.tmp, "TMPDIR")):
            path = re.sub(rf"^{re.escape(folder)}(?=/|$)", name, path)
        return path


def changed(trace: Path, folder: str) -> set[str]:
    """Return the paths that a process, which started in `folder`, changed as strace recorded it."""
    paths = set()
    for line in trace.read_text(errors="replace").splitlines():
        if not (done := DONE.match(line)):
            continue
        call, arguments = done.groups()
        named = [path_of(at or folder, name) for at, name in ARGUMENT.findall(arguments) if at or name]
        if call in ("chdir", "fchdir"):
            folder = (named or [folder])[0]
        elif call != "openat" or OPEN_TO_WRITE.search(arguments):
            paths.update(named)
    return paths


def path_of(folder: str, name: str) -> str:
    return os.path.normpath(os.path.join(folder, name))  # noqa: PTH118 - without following links


def plain(call: str) -> str:
    """Return a call without the options that do not change what it does."""
    return re.sub(" --(all|oneliner)", "", call)


def rows(page: str, title: str) -> dict[str, list[str]]:
    """Return the quoted texts in the second column of a table, for each first column. Rows with the same one are one."""
    table = page.partition(f"| {title} |")[2].partition("\n\n")[0]
    found: dict[str, list[str]] = {}
    for first, second in re.findall(r"^\| ([^|]*) \| ([^|]*) \|", table, re.MULTILINE):
        names = re.findall("`([^`]+)`", first) or [first]
        for name in names:
            found.setdefault(name, []).extend(re.findall("`([^`]+)`", second))
    return found


def not_listed(done: Done, login: tuple[str, ...], job: tuple[str, ...], page: str = PAGE) -> list[tuple[str, str]]:
    """Return what the page does not list for these commands, and for jobs with these features."""
    calls = {"login": rows(page, "command"), "job": rows(page, "in a job")}
    places = rows(page, "by")
    known = {"login": login, "job": job}
    missing = []
    for where, call in done.calls:
        listed = [
            plain(each) for name in known[where] for span in calls[where].get(name, []) for each in CALL.findall(span)
        ]
        missing += [(where, call)] * (call not in listed)
    for where, path in done.changes:
        patterns = [pattern(place) for name in known[where] for place in places.get(name, [])]
        missing += [(where, path)] * (not any(re.fullmatch(each, path) for each in patterns))
    return sorted(missing)


def pattern(place: str) -> str:
    """Return a pattern for a place of the page, what is in it, and the folders that contain it."""
    text = re.escape(place.replace("UID", str(os.geteuid())))
    text = re.sub("RANDOM|JOB|HOST|NAME", r"[\\w.-]+", text)
    parts = text.split("/")
    above = "|".join("/".join(parts[:end]) for end in range(2, len(parts)))
    return f"(?:{text})(?:/.*)?" + (f"|{above}" if place.startswith((".", "~", "TMPDIR")) and above else "")


def plain_job(record: Recorder) -> None:
    folder = record.submit("nodes=2", "wait=true", "--", "train.py")
    assert json.loads((folder / "exit.json").read_text())["exit_status"] == 0, (folder / "logs/rank-0.log").read_text()


def failed_job(record: Recorder) -> None:
    record.ended(record.submit("nodes=1", "--", "fail.py"), "FAILED")


def canceled_job(record: Recorder) -> None:
    folder = record.submit("nodes=2", "hang.after_s=3", "--", "train.py", "hang")
    until(lambda: any(folder.glob("hang/*/report.txt")), 120)
    record.hpcinit("why", folder.name)
    record.hpcinit("stacks", folder.name)
    record.hpcinit("exec", folder.name, "--", "true")
    record.hpcinit("cancel", folder.name)


def chain(record: Recorder) -> None:
    record.ended(record.submit("nodes=1", "chain=2", "--", "true"), "COMPLETED")


def restart(record: Recorder) -> None:
    folder = record.submit("nodes=1", "restart.max_restarts=1", "restart.on=[failure]", "--", "fail.py")
    record.ended(folder, "FAILED")


def spare_node(record: Recorder) -> None:
    folder = record.submit("nodes=1", "spare_nodes=1", "restart.on=[failure]", "--", "fail.py")
    record.ended(folder, "FAILED")
    assert "restarting the ranks in the same job" in (folder / "logs/job.log").read_text()


def after_the_run(record: Recorder) -> None:
    name = record.submit("nodes=1", "wait=true", "--", "true").name
    for words in ("status", f"watch {name}", f"logs {name}", f"report {name}", f"why {name}", "clean --yes"):
        record.hpcinit(*words.split())


def refused(record: Recorder) -> None:
    assert "error" in record.hpcinit("submit", "cluster=mini", "nodes=99", "ranks_per_node=1", "--", "train.py")
    assert record.hpcinit("submit", "cluster=mini", "nodes=1", "dry_run=true", "--", "train.py").startswith("#!")


def excluded(record: Recorder) -> None:
    for _ in range(2):
        record.hpcinit("nodes", "--cluster", "mini", "--add", "n4", "--why", "slow")
    record.hpcinit("submit", "cluster=mini", "nodes=1", "ranks_per_node=1", "--", "true")


def doctor(record: Recorder) -> None:
    record.hpcinit("doctor", "cluster=mini")
    assert "n1" in record.hpcinit("doctor", "cluster=mini", "nodes=1", f"cluster.python={record.folder}/bin/python")


def discover(record: Recorder) -> None:
    assert "here.yaml" in record.hpcinit("discover", "--name", "here")


def completion(record: Recorder) -> None:
    record.hpcinit("--shell-completion", "install=bash")
    record.hpcinit("-sc", "query=bash")


JOB = ("every job",)
SCENARIOS: list[tuple[Callable[[Recorder], None], tuple[str, ...], tuple[str, ...]]] = [
    (plain_job, ("submit", "submit wait=true"), (*JOB, "a program that uses torch")),
    (failed_job, ("submit",), (*JOB, "a rank that fails")),
    (
        canceled_job,
        ("submit", "why", "stacks", "exec", "cancel"),
        (*JOB, "a program that uses torch", "a rank that fails"),
    ),
    (chain, ("submit",), JOB),
    (restart, ("submit",), (*JOB, "a rank that fails", "restart.max_restarts")),
    (spare_node, ("submit",), (*JOB, "a rank that fails", "spare_nodes")),
    (after_the_run, ("submit", "submit wait=true", "watch", "status", "logs", "report", "why", "clean"), JOB),
    (refused, ("submit",), ()),
    (excluded, ("submit", "nodes"), JOB),
    (doctor, ("submit", "doctor"), JOB),
    (discover, ("discover",), ()),
    (completion, (), ()),
]


@pytest.mark.slurm
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("scenario", "login", "job"),
    [SCENARIOS[0], *(pytest.param(*each, marks=pytest.mark.more) for each in SCENARIOS[1:])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_page_lists_every_call_and_every_place(
    idle_slurm: MiniSlurm,
    tmp_path: Path,
    scenario: Callable[[Recorder], None],
    login: tuple[str, ...],
    job: tuple[str, ...],
) -> None:
    """A scenario on a real Slurm calls and changes only what the page lists for its commands and features."""
    assert shutil.which("strace"), "strace is not installed: make slurm"
    with tempfile.TemporaryDirectory() as tmp:
        record = Recorder(idle_slurm, tmp_path, tmp)
        scenario(record)
        done = record.done()
    assert not_listed(done, login, job) == []
    if ("job", "srun") in done.calls:
        cut = re.sub(r"^\| every job \|.*\n", "", PAGE, flags=re.MULTILINE)
        assert ("job", "srun") in not_listed(done, login, job, cut), "a page without the row fails"
