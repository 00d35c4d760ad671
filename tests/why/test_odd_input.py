"""Files of other programs and users: no number or text in them makes `hpcinit why` slow, large, or misleading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcinit.base.console import plain_lines
from hpcinit.base.failure_kinds import GPU, NOT_A_NUMBER, PROGRAM
from hpcinit.records import causes, job_log
from hpcinit.why import diagnosis, flight_recorder, foreign_job, hang_verdict
from hpcinit.why.log_lines import Log
from tests.conftest import Run
from tests.corpus.generate import long_log

HUGE = "9" * 30
ERROR = ["3: Traceback (most recent call last):", '3:   File "a.py", line 7, in step', "3: ValueError: bad sample 17"]


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: n1: tasks 0-4000000000: Killed",
        f"srun: error: n1: task {HUGE}: Killed",
        f"world size: {HUGE}",
        f"{HUGE}: hello",
        f"[rank{HUGE}]: hello",
        f"[Rank {HUGE}] Watchdog caught collective operation timeout",
        f"  exitcode  : -{HUGE} (pid: 1)",
        f"[launch.py:1] exits with return code = -{'9' * 8}",
        f"hpcinit: component 1, ranks from {HUGE}: n1",
        "3:   host : n1\n3:   rank : 9999999 (local_rank: 0)\n3:   exitcode : -99999 (pid: 1)",
    ],
)
def test_a_number_that_no_job_has(line: str) -> None:
    """It is no rank, no size of the world and no exit status, and the error beside it is the verdict."""
    text = "\n".join([*ERROR, line])
    verdict = diagnosis.diagnose(foreign_job.gather([Log(text)]).evidence)
    assert "ValueError: bad sample 17" in verdict.headline
    assert verdict.rank in (3, None)
    job_log.read(line)


@pytest.mark.parametrize("ranks", ["[999999999999, 5]", [10**12, 5], "[-1, 0]", HUGE])
def test_ranks_of_a_group_that_no_job_has(ranks: object) -> None:
    """Such a list of members counts as missing."""
    entry = {
        "profiling_name": "nccl:send 0->999999999999",
        "process_group": ["0", "x"],
        "p2p_seq_id": 1,
        "is_p2p": True,
    }
    dump = {"entries": [entry | {"state": "scheduled"}], "pg_config": {"0": {"ranks": ranks, "desc": "x"}}}
    loaded = flight_recorder.load(json.dumps(dump).encode())
    assert all(one.rank < 10**6 for one in hang_verdict.verdict({0: loaded, 1: loaded}).culprits)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("KeyError: 'Xid'", PROGRAM),
        ("KeyError: 'nan'", PROGRAM),
        ("KeyError: nan", PROGRAM),
        ("ValueError: backend 'NCCL error' unknown", PROGRAM),
        ("AssertionError: expected 'No space left on device' in the fixture", PROGRAM),
        ("ValueError: loss is nan", NOT_A_NUMBER),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", GPU),
    ],
)
def test_a_value_in_a_message_is_no_cause(error: str, kind: str) -> None:
    """Text in quotes does not decide the kind of a failure."""
    assert causes.kind(error)[0] == kind


def test_text_of_files_on_a_terminal() -> None:
    """Characters that change the direction of text, end a line or control the terminal are written as their codes."""
    assert plain_lines(["a\u202eb", "c\nd\u2028e\x1b[2J"]) == "a\\u202eb\nc\\x0ad\\u2028e\\x1b[2J"


def test_a_traceback_among_many_lines_of_srun() -> None:
    """The label of srun -l counts although most lines are srun's own, which have none."""
    lines = [*ERROR, *(f"srun: error: n{number}: task {number}: Exited with exit code 1" for number in range(64))]
    verdict = diagnosis.diagnose(foreign_job.gather([Log("\n".join(lines))]).evidence)
    assert verdict.headline.startswith("probably rank 3 on n3 failed first: ValueError: bad sample 17")


@pytest.mark.parametrize("error_at", [0.3, 1.0])
def test_an_error_anywhere_in_a_large_log(hpcinit: Run, tmp_path: Path, error_at: float) -> None:
    """A log of 20 MB is searched completely, and the answer shows how much of it was not read."""
    long_log(tmp_path, 20, ERROR, error_at)
    text = hpcinit("why", str(tmp_path / "train.log")).stdout
    assert text.startswith("probably rank 3 failed first: ValueError: bad sample 17"), text
    assert "MB of the logs: hpcinit only searched them" in text
