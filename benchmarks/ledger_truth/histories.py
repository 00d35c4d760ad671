"""Generated jobs that hpcinit did not submit: logs, checkpoint files and records of a FAKE sacct, with the truth."""

from __future__ import annotations

import concurrent.futures
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.ledger_truth import rows
from benchmarks.ledger_truth.formats import FORMATS, Format, Line, Shape, is_bar, loss_at

EPOCH = datetime(2026, 9, 1).timestamp()
ENDS = ("failed", "timeout", "preempted", "node failure", "hang, timed out", "hang, canceled", "hang, time limit",
        "killed in a save")  # fmt: skip
STATES = {
    "completed": "COMPLETED", "failed": "FAILED", "timeout": "TIMEOUT", "preempted": "PREEMPTED",
    "node failure": "NODE_FAIL", "hang, timed out": "FAILED", "hang, canceled": "CANCELLED by 1000",
    "hang, time limit": "TIMEOUT", "killed in a save": "FAILED",
}  # fmt: skip

FAKE_SACCT = '''#!{python}
"""A FAKE sacct: it answers from the file in FAKE_SACCT. Jobs of other ids are old jobs of the same user."""
import json, os, sys
options, given = {{}}, sys.argv[1:]
for at, one in enumerate(given):
    name, _, value = one.partition("=")
    options[name] = value or (given[at + 1] if at + 1 < len(given) else "")
data = json.load(open(os.environ["FAKE_SACCT"]))
wanted = options.get("--jobs") or options.get("-j") or ""
fields = [each.partition("%")[0] for each in (options.get("--format") or options.get("-o") or "JobID,State").split(",")]
every = any(name in options for name in ("--duplicates", "-D"))
for job in [each for each in wanted.split(",") if each] or list(data["jobs"]):
    records = data["jobs"].get(job.partition(".")[0])
    if records is None and job.isdigit() and int(job) < data["newest"]:
        records = [data["old"] | {{"JobID": job, "JobIDRaw": job}}]
    for record in (records or []) if every else (records or [])[-1:]:
        print("|".join(str(record.get(name, "")) for name in fields))
'''
FAKE_OTHER = "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n"


@dataclass
class Attempt:
    """One start: its times, its true seconds by row, and its steps with their duration."""

    job: str
    submit: float
    start: float
    end: float = 0
    how: str = "completed"
    rows: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[int, float]] = field(default_factory=list)

    def add(self, row: str, seconds: float) -> None:
        self.rows[row] = self.rows.get(row, 0.0) + seconds


@dataclass
class History:
    """A case while it is made. files: of each path below the folder its last modification."""

    drawn: random.Random
    form: Format
    lines: dict[str, list[Line]] = field(default_factory=dict)
    files: dict[str, float] = field(default_factory=dict)
    folders: dict[int, list[str]] = field(default_factory=dict)
    saved: int = 0
    keep: int = 0

    def write(self, job: str, lines: Sequence[Line]) -> None:
        self.lines.setdefault(job, []).extend(lines)

    def checkpoint(self, began: float, ended: float, step: int) -> None:
        paths = self.form.files(step)
        for number, path in enumerate(paths):
            self.files[path] = began + (ended - began) * (number + 1) / len(paths)
        self.folders.setdefault(step, paths)
        self.saved = step
        if self.keep and not self.form.keeps_one:
            for old in sorted(self.folders)[: -self.keep]:
                for path in self.folders.pop(old):
                    if not path.endswith("/latest"):
                        self.files.pop(path, None)


@dataclass(frozen=True)
class Pace:
    """How long things take in this history."""

    step_s: float
    save_every: int
    save_s: float
    eval_every: int
    eval_s: float
    start_s: float
    import_s: float
    init_s: float
    load_s: float
    first_s: float


def _uniform_log(drawn: random.Random, low: float, high: float) -> float:
    return math.exp(drawn.uniform(math.log(low), math.log(high)))


def _pace(drawn: random.Random, steps: int) -> Pace:
    return Pace(
        step_s=_uniform_log(drawn, 0.25, 8), save_every=max(10, steps // drawn.randint(3, 12)),
        save_s=_uniform_log(drawn, 1, 90), eval_every=drawn.choice([0, 0, max(10, steps // drawn.randint(2, 8))]),
        eval_s=_uniform_log(drawn, 5, 240), start_s=_uniform_log(drawn, 1, 40), import_s=_uniform_log(drawn, 4, 90),
        init_s=_uniform_log(drawn, 3, 120), load_s=_uniform_log(drawn, 3, 150),
        first_s=drawn.choice([0.0, 5.0, 60.0, 150.0]),
    )  # fmt: skip


def _run(history: History, attempt: Attempt, pace: Pace, first: int, last: int, total: int) -> None:
    """Simulate one start, which makes the steps from first to last and ends as in attempt.how."""
    drawn, form, job = history.drawn, history.form, attempt.job
    now = attempt.start
    for row, seconds in (("start", pace.start_s), ("imports", pace.import_s), ("init", pace.init_s)):
        took = seconds * drawn.uniform(0.8, 1.3)
        attempt.add(row, took)
        now += took
        if row != "start":
            history.write(job, form.imported(now) if row == "imports" else form.built(now))
    if first > 1:
        took = pace.load_s * drawn.uniform(0.8, 1.3)
        history.write(job, form.loading(now, now + took, first - 1))
        attempt.add("restore", took)
        now += took
    history.write(job, form.loop(now, first - 1))
    for step in range(first, last + 1):
        took = pace.step_s * math.exp(drawn.gauss(0, 0.03)) * (drawn.uniform(4, 15) if drawn.random() < 0.002 else 1)
        took += pace.first_s if step == first else 0
        now += took
        attempt.steps.append((step, took))
        history.write(job, form.step(now, step, took))
        if pace.eval_every and step % pace.eval_every == 0:
            took = pace.eval_s * drawn.uniform(0.9, 1.1)
            history.write(job, form.evaluating(now, now + took, step))
            attempt.add("evaluation", took)
            now += took
        if step % pace.save_every == 0 or (step == total and drawn.random() < 0.5):
            took = pace.save_s * drawn.uniform(0.8, 1.3) * (drawn.uniform(3, 8) if drawn.random() < 0.08 else 1)
            if attempt.how == "killed in a save" and step == last:
                history.write(job, form.saving(now, now + took, step)[:1])
                attempt.add("save", took * 0.6)
                now += took * 0.6
                break
            history.write(job, form.saving(now, now + took, step))
            history.checkpoint(now, now + took, step)
            attempt.add("save", took)
            now += took
    _end(history, attempt, pace, now)


def _end(history: History, attempt: Attempt, pace: Pace, now: float) -> None:
    """Simulate the end of a start, after its last step or save."""
    drawn, how, job = history.drawn, attempt.how, attempt.job
    usual = statistics.median(seconds for _, seconds in attempt.steps)
    cut = usual * drawn.uniform(0.1, 0.9)
    stamp = "%Y-%m-%dT%H:%M:%S"
    if how == "completed":
        history.write(job, history.form.finished(now))
        attempt.end = math.ceil(now + drawn.uniform(1, 60))
        attempt.add("end", attempt.end - now)
        return
    if how.startswith("hang"):
        last = "hang, timed out"
        silent = drawn.choice([600.0, 1800.0]) if how == last else _uniform_log(drawn, 600, 9000)
        if how == last:
            ms = int(1000 * silent)
            at = datetime.fromtimestamp(now + cut + silent).strftime("%m%d %H:%M:%S")
            history.write(job, [(now + cut + silent,
                f"[rank3]:[E{at}.123456789 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective "
                f"operation timeout: WorkNCCL(SeqNum=4711, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576, "
                f"Timeout(ms)={ms}) ran for {ms + 12} milliseconds before timing out.")])  # fmt: skip
        attempt.end = math.ceil(now + cut + silent + drawn.uniform(1, 30))
        attempt.add("hang", attempt.end - now)
    elif how == "node failure":
        attempt.end = math.ceil(now + cut + drawn.uniform(250, 340))
        silent = attempt.end - now
        attempt.add("hang" if silent > max(60, 10 * usual) else "end", silent)
    else:
        attempt.add("save" if how == "killed in a save" else "steps_repeated", cut)
        attempt.end = math.ceil(now + cut + (drawn.uniform(1, 45) if how == "failed" else drawn.uniform(0, 4)))
        attempt.add("end", attempt.end - now - cut)
    due = {
        "timeout": "DUE TO TIME LIMIT", "hang, time limit": "DUE TO TIME LIMIT", "preempted": "DUE TO PREEMPTION",
        "node failure": "DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "hang, canceled": "",
    }  # fmt: skip
    if how in due:
        at = datetime.fromtimestamp(attempt.end).strftime(stamp)
        text = f"slurmstepd: error: *** JOB {job} ON n1 CANCELLED AT {at} {due[how]}".rstrip() + " ***"
        history.write(job, [(attempt.end - 0.5, text)])
    elif how == "killed in a save":
        history.write(job, [(attempt.end - 0.5, "srun: error: n1: task 0: Killed")])
    else:
        error = ["Traceback (most recent call last):", '  File "train.py", line 212, in <module>', "    main()",
                 "RuntimeError: CUDA error: an illegal memory access was encountered"]  # fmt: skip
        if how == "failed":
            history.write(job, [(now + cut, text) for text in error])
        history.write(job, [(attempt.end - 0.5, "srun: error: n1: task 3: Exited with exit code 1")])


def _finish_truth(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Attribute the steps, and return the seconds by row."""
    last_kept: float = math.inf
    total = dict.fromkeys(rows.ROWS, 0.0)
    for attempt in reversed(attempts):
        usual = statistics.median(seconds for _, seconds in attempt.steps)
        over = max(0.0, attempt.steps[0][1] - usual)
        attempt.add("first_step", over)
        for number, (step, seconds) in enumerate(attempt.steps):
            attempt.add("steps_kept" if step <= last_kept else "steps_repeated", seconds - (over if number == 0 else 0))
        last_kept = min(last_kept, attempt.steps[0][0] - 1)
        for row, seconds in attempt.rows.items():
            total[row] += seconds
    return total


def _attempts(history: History, kind: str, job: int, pace: Pace, total: int, resumes: bool) -> list[Attempt]:
    drawn = history.drawn
    count = {"one": 1, "requeue": drawn.randint(2, 4), "chain": drawn.randint(2, 4)}[kind]
    cuts = sorted(drawn.sample(range(total // 8, total), count - 1))
    attempts: list[Attempt] = []
    submit: float = math.floor(EPOCH + drawn.uniform(0, 80 * 86400))
    for number in range(count):
        wait = _uniform_log(drawn, 125 if number and kind == "requeue" else 5, 9000)
        attempt = Attempt(str(job + (number if kind == "chain" else 0)), submit, math.floor(submit + wait))
        ends_early = number < count - 1 or drawn.random() < 0.35
        attempt.how = drawn.choice(ENDS) if ends_early else "completed"
        if number < count - 1 and kind == "requeue":
            attempt.how = drawn.choice(["preempted", "node failure", "preempted", "hang, timed out", "failed"])
        first = history.saved + 1 if resumes else 1
        last = cuts[number] if number < count - 1 else total
        if number == count - 1 and attempt.how != "completed":
            last = total - max(1, total // 10)
        last = max(last, first + 20)
        if attempt.how == "killed in a save":
            last = max(1, math.ceil(last / pace.save_every)) * pace.save_every
        _run(history, attempt, pace, first, last, max(total, last))
        attempts.append(attempt)
        submit = math.floor(attempt.end) if kind == "requeue" else attempt.submit
        if kind == "chain":  # the next one was submitted after the end
            submit = math.floor(attempt.end + drawn.uniform(1, 600))
    return attempts


def _records(attempts: Sequence[Attempt], nodes: int, requeued: bool) -> dict[str, Any]:
    """Return what the fake sacct knows."""
    jobs: dict[str, list[dict[str, Any]]] = {}
    text = "%Y-%m-%dT%H:%M:%S"
    tres = f"billing={nodes * 64},cpu={nodes * 64},gres/gpu={nodes * 8},mem={nodes * 500}G,node={nodes}"
    for number, each in enumerate(attempts):
        again = requeued and number < len(attempts) - 1 and each.how not in ("preempted", "node failure")
        times = {
            name: datetime.fromtimestamp(at).strftime(text)
            for name, at in (("Submit", each.submit), ("Start", each.start), ("End", each.end))
        }
        jobs.setdefault(each.job, []).append({
            "JobID": each.job, "JobIDRaw": each.job, "State": "REQUEUED" if again else STATES[each.how], **times,
            "Eligible": times["Submit"], "ElapsedRaw": int(each.end - each.start), "NNodes": nodes, "AllocTRES": tres,
            "ReqTRES": tres, "NodeList": f"n[1-{nodes}]" if nodes > 1 else "n1", "User": "me", "ExitCode": "0:0",
            "JobName": "train", "Partition": "gpu", "Cluster": "real", "AllocNodes": nodes,
        })  # fmt: skip
    old = {
        "State": "COMPLETED", "Submit": "2025-02-01T10:00:00", "Start": "2025-02-01T10:01:00",
        "End": "2025-02-01T10:31:00", "ElapsedRaw": 1800, "NNodes": 1, "NodeList": "n9", "User": "me",
        "AllocTRES": "billing=8,cpu=8,gres/gpu=1,node=1", "ReqTRES": "billing=8,cpu=8,gres/gpu=1,node=1",
        "ExitCode": "0:0", "JobName": "old", "Partition": "gpu",
    }  # fmt: skip
    return {"jobs": jobs, "old": old, "newest": max(int(each.job) for each in attempts) + 100}


def make(folder: Path, number: int, seed: int) -> Path:
    """Make one case: the job's folder, the fake records and the truth."""
    drawn = random.Random(f"{seed}/{number}")
    kind = drawn.choice(["one", "one", "requeue", "requeue", "chain"])
    steps = int(_uniform_log(drawn, 200, 4000))
    pace = _pace(drawn, steps)
    nodes = drawn.choice([1, 1, 2, 4, 8])
    log_every = max(1, round(steps / drawn.choice([20, 50, 100, 400])))
    shape = Shape(steps, nodes * 8, log_every, max(50, steps // 3), pace.step_s)
    form = FORMATS[number % len(FORMATS)](shape)
    history = History(drawn, form, keep=drawn.choice([0, 0, 2, 3]))
    resumes = drawn.random() < 0.9
    appended = drawn.random() < 0.6
    attempts = _attempts(history, kind, drawn.randint(20000, 900000), pace, steps, resumes)
    case = folder / f"history-{number:03}"
    shutil.rmtree(case, ignore_errors=True)
    _write_files(case / "job", history, attempts, kind == "requeue" and not appended)
    rows.write(case / "sacct.json", _records(attempts, nodes, kind == "requeue"))
    rows.write(case / "truth.json", {
        "charged_s": sum(each.end - each.start for each in attempts), "rows": _finish_truth(attempts),
        "queue_s": sum(each.start - each.submit for each in attempts),
        "allocations": [
            {"job": each.job, "start": each.start, "end": each.end, "elapsed": each.end - each.start, "how": each.how,
             "rows": each.rows}
            for each in attempts
        ],
    })  # fmt: skip
    by_job = kind != "chain" and drawn.random() < 0.5
    rows.write(case / "case.json", {
        "kind": kind, "format": form.name, "log": "appended" if appended else "truncated", "resumes": resumes,
        "log_every": log_every, "steps": steps, "pace": vars(pace), "ends": [each.how for each in attempts],
        "ask": attempts[0].job if by_job else "folder", "keep": history.keep, "fake": "sacct, squeue, scontrol",
    })  # fmt: skip
    return case


def _write_files(folder: Path, history: History, attempts: Sequence[Attempt], truncated: bool) -> None:
    folder.mkdir(parents=True)
    times: dict[Path, float] = {}
    for job, lines in history.lines.items():
        kept = sorted(lines, key=lambda line: line[0])
        if truncated:
            kept = [line for line in kept if line[0] >= attempts[-1].start]
        text = "".join(line if is_bar(line) else line + "\n" for _, line in kept)
        path = folder / f"slurm-{job}.out"
        path.write_text(text)
        times[path] = kept[-1][0]
    for name, at in history.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_content(path, history.form))
        times[path] = at
        for parent in path.relative_to(folder).parents:
            if parent != Path():
                times[folder / parent] = max(at, times.get(folder / parent, 0))
    (script := folder / "train.sh").write_text("#!/bin/bash\nsrun python train.py\n")
    times[script] = attempts[0].submit - 100
    times[folder] = max(times.values())
    for path, at in sorted(times.items(), key=lambda each: -len(each[0].parts)):
        os.utime(path, (at, at))


def _content(path: Path, form: Format) -> str:
    if path.name != "trainer_state.json":
        return "x" * 100
    step = int(path.parent.name.rpartition("-")[2])
    every = form.shape.log_every
    steps = range(every, step, every)
    history = [{"epoch": at / form.shape.per_epoch, "loss": loss_at(at), "step": at} for at in steps]
    state = {"global_step": step, "max_steps": form.shape.total, "logging_steps": every, "log_history": history}
    return json.dumps(state, indent=2)


def fake_tools(folder: Path) -> Path:
    """Write the fake commands of Slurm, and return their folder for PATH."""
    tools = folder / "fake-slurm"
    tools.mkdir(parents=True, exist_ok=True)
    texts = {"sacct": FAKE_SACCT.format(python=sys.executable)} | dict.fromkeys(("squeue", "scontrol"), FAKE_OTHER)
    for name, text in texts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return tools


def ask(case: Path, tools: Path) -> None:
    """Run `hpcinit report` on a case."""
    wanted = json.loads((case / "case.json").read_text())["ask"]
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "FAKE_SACCT": str(case / "sacct.json")}
    where, word = (case, "job") if wanted == "folder" else (case / "job", wanted)
    for options, name in ((["--json"], "report.json"), ([], "report.txt")):
        done = subprocess.run(
            [sys.executable, "-m", "hpcinit", "report", word, *options], cwd=where, env=env, capture_output=True,
            text=True, timeout=120, check=False,
        )  # fmt: skip
        (case / name).write_text(done.stdout or json.dumps({"error": done.stderr}))


def main(folder: Path, seed: int, count: int) -> int:
    """Make all cases, and ask for the report of each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows.write(folder / "seed.json", {"seed": seed})
    tools = fake_tools(folder)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        cases = [make(folder, number, seed) for number in range(count)]
        list(pool.map(lambda case: ask(case, tools), cases))
    return 0
