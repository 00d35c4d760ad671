"""docs/administrators.md lists each Slurm command, each other program and each place outside of the run folder.

Wrappers of Slurm's commands record the calls of a command and of its job. strace records what both write, and which
other programs they start or try to start.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpcinit.cli.commands import COMMANDS
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
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
STRACE = ("strace", "-ff", "-qq", "-y", "-s", "4096", "-e", f"trace={CHANGES},chdir,fchdir,execve")
ALL_ITS_PROCESSES = (*STRACE, "-f", "--seccomp-bpf")
DONE = re.compile(r"^(\w+)\((.*)\) += \d+(?:<.*>)?$")
EXECUTED = re.compile(r'^execve\("([^"]*)"')  # also if it failed: the program may exist on other machines
# The test's own programs, the users' programs of the scenarios, and Python, which runs hpcinit.
OWN_PROGRAMS = re.compile(rf"strace|grep|true|python[\d.]*|{'|'.join(SLURM)}")
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


# The programs of hpcinit.Executor and of a drill.
FUNCTION = """
import hpcinit

executor = hpcinit.Executor("../FOLDER/%j", cluster="mini")
executor.update_parameters(nodes=1, tasks_per_node=1, check_paths=False, **CLUSTER)
assert executor.submit(sum, [1, 2]).result() == 3
"""
RESUMES = """
import json, os, pathlib, signal, sys, time

saved, stop = pathlib.Path("saved.json"), []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "weight": 1.0}
while state["step"] < 12:
    time.sleep(0.2)
    state = {"step": state["step"] + 1, "weight": state["weight"] * 0.9}
    print(f"step {state['step']} loss {state['weight']:.6f}", flush=True)
    if state["step"] % 4 == 0 or stop:
        new = saved.with_suffix(".new")
        new.write_text(json.dumps(state))
        os.replace(new, saved)
    if stop:
        sys.exit(0)
"""


class Done(NamedTuple):
    """What a scenario did. Each item is (where, what); where: login or job.

    calls: commands of Slurm. changes: paths. programs: names of other programs.
    """

    calls: set[tuple[str, str]]
    changes: set[tuple[str, str]]
    programs: set[tuple[str, str]]


@dataclass
class Recorder:
    """A folder in which hpcinit runs with wrappers of Slurm's commands, and a Python under strace.

    slurm: the cluster; None for a scenario without one.
    commands: the commands of hpcinit that ran, each with the commands of Slurm that it called.
    """

    slurm: MiniSlurm | None
    folder: Path
    tmp: str  # TMPDIR, with a short name: Python makes sockets in it, whose path has at most 107 characters
    commands: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("bin", "work", "home", "traces"):
            (self.folder / name).mkdir()
        (self.folder / "calls").touch()
        for name in SLURM:
            record = (
                f'printf "%s %s\\n" "${{SLURM_JOB_ID:+job}}" "{name} ${{*//[[:space:]]/ }}" >> "{self.folder}/calls"'
            )
            self.write(
                f"bin/{name}", f'#!/bin/bash\n{record}\nexec "{installed(name) if self.slurm else "false"}" "$@"\n'
            )
        # hpcinit.after is a child of the batch script, which is traced already.
        own = "if grep -q 'TracerPid:.*[1-9]' /proc/$$/status; then trace=(); fi"
        trace = f'trace=({" ".join(ALL_ITS_PROCESSES)} -o "{self.folder}/traces/job")'
        self.write("bin/python", f'#!/bin/bash\n{trace}\n{own}\nexec "${{trace[@]}}" "{sys.executable}" "$@"\n')
        # The batch script traces itself, and waits until strace is there.
        shell = f'{" ".join(STRACE)} -f -o "{self.folder}/traces/job.shell" -p $$ &\n'
        self.write("attach.sh", f"{shell}until grep -q 'TracerPid:.*[1-9]' /proc/$$/status; do sleep 0.1; done\n")
        self.write("work/train.py", TRAIN)
        self.write("work/fail.py", "raise SystemExit(3)\n")
        self.write("work/resumes.py", RESUMES)
        cluster = {"cluster.gpus_per_node": 0, "cluster.python": f"{self.folder}/bin/python"}
        self.write("work/function.py", FUNCTION.replace("CLUSTER", repr(cluster)))

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def hpcinit(self, *words: str) -> str:
        """Run the command under strace, and return what it printed."""
        before = len(self._calls())
        printed = self.python("-m", "hpcinit", *words)
        if not words[0].startswith("-"):
            new = self._calls()[before:]
            self.commands.setdefault(words[0], set()).update(call for where, call in new if where == "login")
        return printed

    def _calls(self) -> list[tuple[str, str]]:
        """Return each call of a command of Slurm, as (where, call)."""
        lines = [line.split(" ", 1) for line in (self.folder / "calls").read_text().splitlines()]
        return [(where or "login", plain(CALL.findall(call)[0])) for where, call in lines]

    def python(self, *words: str) -> str:
        """Run Python under strace in the working folder, and return what it printed."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "SLURM_", "HPCINIT_"))}
        path = f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "HOME": f"{self.folder}/home", "TMPDIR": self.tmp, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*ALL_ITS_PROCESSES, "-o", f"{self.folder}/traces/login", sys.executable, *words],
            cwd=self.folder / "work", env=kept | (self.slurm.env if self.slurm else {}) | own,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def submit(self, *words: str) -> Path:
        """Submit a job whose shell and ranks are traced, and return its run folder."""
        options = ("cluster=mini", "ranks_per_node=1", "gpus_per_node=0", "check_paths=false")
        traced = (f"cluster.python={self.folder}/bin/python", f'cluster.setup=[". {self.folder}/attach.sh"]')
        return folder_in(self.hpcinit("submit", *options, *traced, *words))

    def ended(self, folder: Path, state: str) -> None:
        assert self.slurm is not None
        assert finish(self.slurm, job_of(folder), 200) == state, (folder / "logs/job.log").read_text()

    def done(self) -> Done:
        """Return what was recorded, with the page's names of places."""
        changes, programs = set(), set()
        for trace in (self.folder / "traces").iterdir():
            where = trace.name.partition(".")[0]
            changes |= {
                (where, place) for path in changed(trace, f"{self.folder}/work") if (place := self._place(path))
            }
            programs |= {(where, name) for name in executed(trace) if not OWN_PROGRAMS.fullmatch(name)}
        return Done(set(self._calls()), changes, programs)

    def _place(self, path: str) -> str:
        """Return a path as the page has it: ~ for the home, TMPDIR; '' for a file of this test or in a run folder."""
        work = str(self.folder / "work")
        if path.startswith((f"{work}/runs/", f"{self.folder}/traces/", f"{self.folder}/calls", *NO_FILE)):
            return ""
        for folder, name in (
            (f"{self.folder}/FOLDER", "FOLDER"),
            (work, "."),
            (f"{self.folder}/home", "~"),
            (self.tmp, "TMPDIR"),
        ):
            path = re.sub(rf"^{re.escape(folder)}(?=/|$)", name, path)
        return path


def folder_in(printed: str) -> Path:
    """Return the run folder that `hpcinit submit` printed."""
    assert "run folder: " in printed, printed
    return Path(printed.partition("run folder: ")[2].partition("\n")[0])


def executed(trace: Path) -> set[str]:
    """Return the names of the programs that a process started or tried to start."""
    found = map(EXECUTED.match, trace.read_text(errors="replace").splitlines())
    return {Path(each[1]).name for each in found if each}


def changed(trace: Path, folder: str) -> set[str]:
    """Return the paths that a process, which started in `folder`, changed as strace recorded it."""
    paths = set()
    for line in trace.read_text(errors="replace").splitlines():
        if not (done := DONE.match(line)):
            continue
        call, arguments = done.groups()
        named = [path_of(at or folder, name) for at, name in ARGUMENT.findall(arguments) if at or name]
        named = named[1:] if call.startswith("symlink") else named  # the first is what the link contains
        if call in ("chdir", "fchdir"):
            folder = (named or [folder])[0]
        elif call != "execve" and (call != "openat" or OPEN_TO_WRITE.search(arguments)):
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


def spans(title: str, names: list[str]) -> list[str]:
    """Return the quoted texts in these rows of a table of the page."""
    return [span for name in names for span in rows(PAGE, title).get(name, [])]


def not_listed(done: Done, login: tuple[str, ...], job: tuple[str, ...], page: str = PAGE) -> list[tuple[str, str]]:
    """Return what the page does not list for these commands, and for jobs with these features."""
    calls = {"login": rows(page, "command"), "job": rows(page, "in a job")}
    places = rows(page, "by")
    programs = rows(page, "started by")
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
    for where, program in done.programs:
        missing += [(where, program)] * all(program not in programs.get(name, []) for name in known[where])
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


def without_slurm(record: Recorder) -> None:
    name = folder_in(record.hpcinit("submit", *LOCAL, "wait=true", "--", "true")).name
    assert record.hpcinit("submit", "cluster=mini", "nodes=1", "dry_run=true", "--", "train.py").startswith("#!")
    for words in (f"render {name}", f"render {name} time_min=9", "export cluster=mini nodes=1 -- train.py"):
        assert "#" in record.hpcinit(*words.split()), words
    for words in ("plan cluster=mini parallel=zero3 model.params=7e9", "timeouts cluster=mini", "world", "run fail.py"):
        record.hpcinit(*words.split())
    record.hpcinit("build-ops", "parallel=ddp")  # with DeepSpeed, it compiles for minutes
    record.hpcinit("--shell-completion", "install=bash")
    record.hpcinit("-sc", "query=bash")
    record.hpcinit("clean", "--outside")  # without --yes: it may find files of other tests


def drill(record: Recorder) -> None:
    printed = record.hpcinit("drill", "ranks_per_node=1", "--", "resumes.py")
    assert "resumes" in printed, printed


def replay(record: Recorder) -> None:
    run = "r-hang-then-canceled/hang-0001"
    shutil.copytree(Path(__file__).parents[1] / "corpus/cases" / run, record.folder / "work/runs/hang-0001")
    printed = record.hpcinit("why", "hang-0001", "--replay")
    assert "the replay finished" in printed, printed


def failed_job(record: Recorder) -> None:
    record.ended(record.submit("nodes=1", "--", "fail.py"), "FAILED")


def canceled_job(record: Recorder) -> None:
    folder = record.submit("nodes=2", "hang.after_s=3", "--", "train.py", "hang")
    until(lambda: any(folder.glob("hang/*/report.txt")), 120)
    for words in ("why NAME", "stacks NAME", "exec NAME -- true", "shell NAME", "cancel --save NAME", "cancel NAME"):
        record.hpcinit(*words.replace("NAME", folder.name).split())


def chain(record: Recorder) -> None:
    record.ended(record.submit("nodes=1", "chain=2", "--", "true"), "COMPLETED")


def restart(record: Recorder) -> None:
    folder = record.submit("nodes=1", "restart.max_restarts=1", "restart.on=[failure]", "--", "fail.py")
    record.ended(folder, "FAILED")


def spare_node(record: Recorder) -> None:
    folder = record.submit("nodes=1", "spare_nodes=1", "restart.on=[failure]", "--", "fail.py")
    record.ended(folder, "FAILED")
    assert "restarting the ranks in the same job" in (folder / "logs/job.log").read_text()


def warm_restart(record: Recorder) -> None:
    words = ("launch=fork", "restart.warm=true", "restart.on=[failure]", "spare_nodes=1")
    record.ended(record.submit("nodes=1", *words, "--", "fail.py"), "FAILED")


def torchrun(record: Recorder) -> None:
    record.submit("nodes=2", "launch=torchrun", "wait=true", "--", "train.py")


def sweep(record: Recorder) -> None:
    """A sweep of jobs with a tracker and a secret, and a second submission of one task."""
    secret = record.folder / "home/token"
    secret.touch(mode=0o600)
    secret.write_text("hf_0123456789abcdefghijklmnopqrstuvwx\n")
    words = ("tracker=wandb", f"+secrets.HF_TOKEN={secret}", "--multirun", "+job.env.LR=1,2")
    sweep = record.submit("nodes=1", *words, "wait=true", "--", "true")
    task = f"{sweep.name}/0" if (sweep / "0").is_dir() else sweep.name
    again = record.hpcinit("resubmit", task)
    assert "run folder: " in again, again


def function(record: Recorder) -> None:
    printed = record.python("function.py")
    assert "Error" not in printed, printed


def after_the_run(record: Recorder) -> None:
    name = record.submit("nodes=1", "wait=true", "--", "true").name
    for words in ("status", f"watch {name}", f"logs {name}", f"report {name}", f"why {name}", "clean --yes"):
        record.hpcinit(*words.split())


def accounting(record: Recorder) -> None:
    """The same commands on a cluster with Slurm accounting, for a run that squeue no longer lists."""
    folder = record.submit("nodes=1", "wait=true", "--", "fail.py")
    (folder / "exit.json").unlink()  # so that the commands query Slurm
    job = job_of(folder)
    assert record.slurm is not None
    until(lambda: not record.slurm.run("squeue", "--noheader", "--states=all"), 200)
    for words in (
        "status",
        "watch NAME",
        "why NAME",
        "report NAME",
        "stacks NAME",
        "cancel NAME",
        "clean",
        f"report {job}",
    ):
        record.hpcinit(*words.replace("NAME", folder.name).split())
    assert "here.yaml" in record.hpcinit("discover", "--name", "here")


def refused(record: Recorder) -> None:
    words = ("cluster=mini", "ranks_per_node=1", "gpus_per_node=0", "cluster.partitions.main.nodes=null", "nodes=99")
    assert "sbatch" in record.hpcinit("submit", *words, "--", "train.py")
    assert ("login", "sinfo") in record.done().calls


def excluded(record: Recorder) -> None:
    for _ in range(2):
        record.hpcinit("nodes", "--cluster", "mini", "--add", "n4", "--why", "slow")
    record.hpcinit("submit", "cluster=mini", "nodes=1", "ranks_per_node=1", "--", "true")


def doctor(record: Recorder) -> None:
    record.hpcinit("doctor", "cluster=mini")
    record.write("bin/nvidia-smi", "#!/bin/sh\nexit 9\n")  # then the check in the job also starts dmesg
    assert "n1" in record.hpcinit("doctor", "cluster=mini", "nodes=1", f"cluster.python={record.folder}/bin/python")
    assert {("job", "nvidia-smi"), ("job", "dmesg")} <= record.done().programs


def discover(record: Recorder) -> None:
    assert "here.yaml" in record.hpcinit("discover", "--name", "here")


LOCAL = ("cluster=local", "nodes=1", "ranks_per_node=1")
JOB, TORCH, FAILS = ("every job",), "a program that uses torch", "a rank that fails"


class Scenario(NamedTuple):
    """A scenario, with the rows of the page that apply to its commands and to its jobs.

    slurm: whether it needs a cluster. Without one, a job is a child of its command, so its rows are in `login`.
    """

    run: Callable[[Recorder], None]
    login: tuple[str, ...]
    job: tuple[str, ...] = ()
    slurm: bool = True


FIRST = Scenario(plain_job, ("submit", "submit wait=true"), (*JOB, TORCH))
LIGHT = Scenario(
    without_slurm,
    (
        "submit",
        "render",
        "export",
        "plan",
        "timeouts",
        "world",
        "run",
        "build-ops",
        "clean",
        "submit cluster=local",
        *JOB,
    ),
    slurm=False,
)
MORE = [
    Scenario(drill, ("drill", *JOB), slurm=False),
    Scenario(replay, ("why", "why --replay", TORCH), slurm=False),
    Scenario(failed_job, ("submit",), (*JOB, FAILS)),
    Scenario(canceled_job, ("submit", "why", "stacks", "exec", "shell", "cancel"), (*JOB, TORCH, FAILS)),
    Scenario(chain, ("submit",), JOB),
    Scenario(restart, ("submit",), (*JOB, FAILS, "restart.max_restarts")),
    Scenario(spare_node, ("submit",), (*JOB, FAILS, "spare_nodes")),
    Scenario(warm_restart, ("submit",), (*JOB, FAILS, "spare_nodes", TORCH)),
    Scenario(torchrun, ("submit", "submit wait=true"), (*JOB, TORCH)),
    Scenario(sweep, ("submit", "submit wait=true", "resubmit"), JOB),
    Scenario(function, ("submit", "hpcinit.Executor(FOLDER)"), (*JOB, "hpcinit.Executor(FOLDER)")),
    Scenario(after_the_run, ("submit", "submit wait=true", "watch", "status", "logs", "report", "why", "clean"), JOB),
    Scenario(refused, ("submit",)),
    Scenario(excluded, ("submit", "nodes"), JOB),
    Scenario(doctor, ("submit", "doctor"), JOB),
    Scenario(discover, ("discover",)),
]
WITH_ACCOUNTING = Scenario(
    accounting,
    ("submit", "submit wait=true", "status", "watch", "why", "report", "stacks", "cancel", "clean", "discover"),
    (*JOB, FAILS),
)


def marked(scenarios: list[Scenario], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(each, marks=marks, id=each.run.__name__) for each in scenarios]


def check(scenario: Scenario, slurm: MiniSlurm | None, folder: Path) -> None:
    """Run the scenario, and compare what it did with the page."""
    assert shutil.which("strace"), "strace is not installed: make slurm"
    with tempfile.TemporaryDirectory() as tmp:
        record = Recorder(slurm, folder, tmp)
        scenario.run(record)
        done = record.done()
    ran = {*record.commands, "submit"}  # the doctor and the executor submit jobs, too
    assert ran == {"submit", *(name for name in scenario.login if name in COMMANDS)}
    unlisted = set()
    for command, calls in record.commands.items():
        own = [name for name in scenario.login if name.split()[0] == command]
        own += ["submit"] * (command == "doctor") + ["status"] * (command == "watch" or "submit wait=true" in own)
        listed = {plain(call) for span in spans("command", own) for call in CALL.findall(span)}
        unlisted.update((command, call) for call in calls - listed)
    assert not unlisted, unlisted
    missing = not_listed(done, scenario.login, scenario.job)
    assert not missing, "\n".join(map(str, missing))
    if ("job", "srun") in done.calls:
        cut = re.sub(r"^\| every job \|.*\n", "", PAGE, flags=re.MULTILINE)
        assert ("job", "srun") in not_listed(done, scenario.login, scenario.job, cut), "a page without the row fails"


@pytest.mark.slurm
@pytest.mark.timeout(500)
@pytest.mark.parametrize("scenario", marked([FIRST]) + marked([each for each in MORE if each.slurm], pytest.mark.more))
def test_the_page_lists_every_call_and_every_place(idle_slurm: MiniSlurm, tmp_path: Path, scenario: Scenario) -> None:
    """A scenario on a real Slurm calls, starts and changes only what the page lists for its commands and features."""
    check(scenario, idle_slurm, tmp_path)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "scenario", marked([LIGHT]) + marked([each for each in MORE if not each.slurm], pytest.mark.more)
)
def test_the_page_lists_what_happens_without_slurm(tmp_path: Path, scenario: Scenario) -> None:
    """Commands that need no cluster call no command of Slurm, and start and change only what the page lists."""
    check(scenario, None, tmp_path)


@pytest.mark.slurm
@pytest.mark.more
@pytest.mark.timeout(500)
def test_the_page_is_right_with_accounting(tmp_path: Path) -> None:
    """On a cluster with Slurm accounting, the commands call and change only what the page lists, too."""
    require_slurm(accounting=True)
    with MiniSlurm(nodes=2, gpus=0, accounting=True, name=f"admin-{os.getpid()}", options={"MinJobAge": "2"}) as slurm:
        check(WITH_ACCOUNTING, slurm, tmp_path)


def test_every_command_is_recorded() -> None:
    """Each command of hpcinit is in a scenario, and in a table of the page."""
    scenarios = (FIRST, LIGHT, WITH_ACCOUNTING, *MORE)
    assert set(COMMANDS) <= {name for each in scenarios for name in each.login}
    assert set(COMMANDS) <= set(rows(PAGE, "command"))
