"""When a verdict is certain: the rule in ranking.py, and logs that the readers do not understand."""

from __future__ import annotations

import pytest

from hpcinit.why import diagnosis, foreign_job, ranking
from hpcinit.why.evidence import Verdict
from hpcinit.why.log_lines import Log
from tests.why.unread_logs import LOGS

TRACE = '1: Traceback (most recent call last):\n1:   File "train.py", line 9, in <module>\n1:     main()\n'
STEPS = "0: world size 2\n0: step 1 loss 2\n1: step 1 loss 2\n"
EXITED = "srun: error: n1: task 1: Exited with exit code 1\n"


def verdict(text: str) -> Verdict:
    return diagnosis.diagnose(foreign_job.gather([Log(text)]).evidence)


@pytest.mark.parametrize(("text", "ranks", "kinds"), [one[1:] for one in LOGS], ids=[one[0] for one in LOGS])
def test_no_certainty_about_a_log_that_is_not_understood(text: str, ranks: set[int], kinds: set[str]) -> None:
    """The first failure has a shape that no reader knows. A wrong verdict shows what is missing to be certain."""
    found = verdict(text)
    right = {found.rank} <= {None, *ranks} and found.kind in {*kinds, "unknown"}
    assert right or (not found.certain and found.headline.startswith("probably ") and found.doubt)


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        (f"{STEPS}{TRACE}1: KeyError: 'ids'\n{EXITED}", ""),
        (f"{STEPS}{TRACE}1: KeyError: 'ids'\n", ""),  # its last output
        (f"{STEPS}{TRACE}1: KeyError: 'ids'\n1: saved all\n", "exit status"),
        (f"{STEPS}0: fatal: slot 7\n{TRACE}1: KeyError: 'ids'\n{EXITED}", "fatal: slot 7"),
        (f"{STEPS}0: leaving\n{TRACE}1: KeyError: 'ids'\n{EXITED}", "leaving"),
        (f"{STEPS}{TRACE}1: RuntimeError: a peer is gone\n{EXITED}", "other ranks"),
        (f"{STEPS}{TRACE}1: RuntimeError: CUDA error: unspecified launch failure\n{EXITED}", "several causes"),
        (EXITED.replace("1: E", "0: E") + f"{STEPS}{TRACE}1: KeyError: 'ids'\n{EXITED}", "why rank 0 on n1 ended"),
    ],
)
def test_what_makes_an_error_in_a_log_certain(text: str, doubt: str) -> None:
    """An uncaught error whose rank the launcher lists, or whose process printed nothing later, without any rival."""
    found = verdict(text)
    assert (found.kind == "program" or doubt == "several causes") and found.rank == 1
    assert found.certain == (not doubt) and doubt in found.doubt, found
    assert found.headline.startswith("probably rank 1" if doubt else "rank 1")


def test_the_table_has_the_conditions() -> None:
    """The docstring of ranking.py names the conditions of each grade, in their order."""
    *_, table = (ranking.__doc__ or "").partition("A verdict is certain")
    for grade, needs in ranking.NEEDS.items():
        rows = [line for line in table.splitlines() if line.startswith("| ") and grade.name in line]
        names = [need.__name__.strip("_").upper() for need in needs]
        assert rows and all(name in rows[-1] for name in names), grade


@pytest.mark.parametrize("start", ["slurmstepd: ", "slurmstepd-n1: ", "[2026-11-28T01:05:37.021] "])
def test_the_end_by_slurm_is_certain(start: str) -> None:
    """slurmstepd of Slurm 22.05, 24.11 and 26.05 reports a time limit."""
    reported = "CANCELLED AT 2026-11-28T01:05:37 DUE TO TIME LIMIT ***\n"
    found = verdict(
        f"0: up\n0: {start}error: *** STEP 3.0 ON n1 {reported}{start}error: *** JOB 3 ON n1 {reported}"
        "srun: got SIGCONT\nsrun: error: n1: task 0: Terminated\nsrun: Terminating StepId=3.0\n"
    )
    assert found.kind == "time-limit" and found.certain, found
