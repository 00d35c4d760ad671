"""Each of many submissions makes exactly one job while the controller is killed repeatedly.

`make test-exactly-once` makes 200 submissions with 50 kills; without HPCINIT_EXACTLY_ONCE there are fewer.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from hpcinit.base.errors import MaybeSubmitted
from hpcinit.slurm import exactly_once, tokens
from tests.conftest import Run
from tests.minislurm import MiniSlurm, MiniSlurmError
from tests.minislurm.plugin import require_slurm
from tests.submitting import folder_of, submit
from tests.waiting import until

SUBMISSIONS, KILLS = (int(number) for number in os.environ.get("HPCINIT_EXACTLY_ONCE", "40,10").split(","))
BY_COMMAND_LINE = 10  # one in this many submissions is a whole `hpcinit submit`
AT_ONCE = 16
PATIENCE_S = 900
STOPPED = "2 calls of sbatch may each have created a job, but Slurm shows no such job"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[MiniSlurm]:
    require_slurm()
    with MiniSlurm(nodes=1, gpus=8, name=f"exactly-{os.getpid()}") as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        yield cluster


@pytest.mark.slurm
@pytest.mark.timeout(1800)
def test_as_many_jobs_as_submissions(cluster: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """While slurmctld gets SIGKILL repeatedly, each submission makes one job, and its id is the returned one."""
    began = time.monotonic()
    started, named, stopped = 0, {}, []

    def by_command_line(number: int) -> None:
        options = ["+cluster.sbatch.begin=now+2hours", "cluster.submit_confirm=true", f"seed={number}"]
        patience = f"cluster.submit_patience_s={PATIENCE_S}"
        done = submit(hpcinit, cluster, *options, patience, "--", "true", timeout=PATIENCE_S)
        if STOPPED in done.stderr:
            raise MaybeSubmitted(done.stderr)
        record = json.loads((folder_of(done) / "submission.json").read_text())
        named[record["token"]] = record["job_id"]

    def by_function(number: int) -> None:
        folder = tmp_path / f"run-{number}"
        folder.mkdir(exist_ok=True)
        (folder / "job.sh").write_text("#!/bin/bash\n#SBATCH --begin=now+2hours\nsleep 60\n")
        token = tokens.new()
        named[token], _ = exactly_once.submit(folder / "job.sh", os.environ, token, patience_s=PATIENCE_S, confirm=True)

    def one(number: int) -> None:
        """Submit; if hpcinit stops after two lost attempts, check as the user would, and submit again."""
        nonlocal started
        started += 1
        while True:
            try:
                return (by_function if number % BY_COMMAND_LINE else by_command_line)(number)
            except MaybeSubmitted as error:
                assert STOPPED in str(error)
                [token] = re.findall(r"grep -F hpcinit=(\S+)", str(error))
                stopped.append(token)
                assert token not in [found for *_, found in reply_of(cluster)]

    def kill_again_and_again() -> None:
        chance = random.Random(5)
        for number in range(KILLS):
            while started < number * SUBMISSIONS / KILLS:
                time.sleep(0.05)
            time.sleep(chance.uniform(0, 2))
            cluster.kill_controller()
            time.sleep(chance.uniform(0, 1))
            cluster.start_controller()

    killer = threading.Thread(target=kill_again_and_again)
    killer.start()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(SUBMISSIONS)))
    killer.join()
    jobs = queued(cluster)
    cancelled = [line for line in jobs if line[1] == "CANCELLED"]
    alive = [line for line in jobs if line[1] != "CANCELLED"]
    print(f"{SUBMISSIONS} submissions, {KILLS} kills, {time.monotonic() - began:.0f} s: {len(alive)} jobs, of "
          f"{len({token for *_, token in alive})} tokens; surplus ones cancelled: {len(cancelled)}; "
          f"stopped after two attempts and submitted again: {len(stopped)}")  # fmt: skip
    assert [token for token, count in Counter(token for *_, token in alive).items() if count > 1] == []
    assert {token: job_id for job_id, _, token in alive} == named
    assert len(named) == SUBMISSIONS


def reply_of(cluster: MiniSlurm) -> list[tuple[str, str, str]]:
    """Query the jobs until the controller replies."""
    answers: list[list[tuple[str, str, str]]] = []

    def query() -> bool:
        with suppress(MiniSlurmError):  # the controller was killed again
            answers.append(queued(cluster))
        return bool(answers)

    until(query, 60)
    return answers[0]


def queued(cluster: MiniSlurm) -> list[tuple[str, str, str]]:
    """Return (id, state, token) of every job."""
    lines = cluster.run("squeue", "--noheader", "--states=all", "--format=%i|%T|%k").splitlines()
    return [
        (job_id, state, comment.partition("hpcinit=")[2]) for job_id, state, comment in (x.split("|") for x in lines)
    ]
