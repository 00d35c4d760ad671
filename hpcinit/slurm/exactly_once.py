"""Submits exactly one job per request. sbatch is called again only if the previous call certainly created no job.

Reasons and limits: docs/decisions/0015-submit-exactly-once.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpcinit.base.errors import INTERRUPTED, MaybeSubmitted, NotReached, SubmitError
from hpcinit.slurm import slurm_client, tokens
from hpcinit.slurm.queue import Job
from hpcinit.slurm.sbatch import COMMAND, sbatch

PATIENCE_S = 300.0  # how long to wait for the controller, whose restart takes seconds to minutes
# If sbatch times out, its request may still wait in the controller's socket. The controller accepts connections in
# order, but serves each in a separate thread. A later query may overtake the request, so a job counts as missing only
# after two queries this far apart.
SETTLE_S = 5.0
# slurmctld writes an accepted job to disk within 5 s (SAVE_MAX_WAIT in state_save.c). If it is killed before then, the
# job is lost although sbatch has already printed its id.
SAVED_S = 7.0
# After this many attempts that may have made a job, hpcinit does not try again. If Slurm shows no job, the user has to
# check, because another attempt might make a second job.
MOST_ACCEPTED = 2
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 10.0)  # between two attempts; the last pause repeats
BESIDE_S = 600.0  # the longest that sbatch, squeue, scontrol and sacct may take in total after patience_s
TICK_S = 0.2  # how often to check for Ctrl-C

Attempt = Callable[[Path, Mapping[str, str], Sequence[str]], tuple[str, Sequence[str]]]  # as sbatch()


def longest_s(patience_s: float, jobs: int) -> float:
    """Return how many seconds it can take at most to submit `jobs` jobs, one after the other.

    patience_s: how long each submission waits for a controller that is down.
    """
    return jobs * (patience_s + BESIDE_S)


def submit(
    script: Path,
    env: Mapping[str, str],
    token: str,
    options: Sequence[str] = (),
    *,
    comment: str | None = None,
    patience_s: float = PATIENCE_S,
    confirm: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
    show: Callable[[str], None] = lambda message: None,
    started: Callable[[], str] = lambda: "",
    attempt: Attempt = sbatch,
) -> tuple[str, Sequence[str]]:
    """Submit `script` with sbatch so that there is exactly one job. Return the job id and the sbatch command.

    token: identifies the job. It is added to the job's comment, after the user's own `comment`.
    options: additional options on sbatch's command line.
    patience_s: how long to wait for a controller that is down.
    confirm: whether to check after SAVED_S seconds that the controller still has the job. After an error, this is
        always checked.
    interrupted: a function that returns whether the user pressed Ctrl-C.
    show: a function that prints why the submission is waiting.
    started: a function that returns the job id that the batch script recorded when it started, or ''.
    attempt: a function that calls sbatch once.

    Raise MaybeSubmitted if a job may exist, and SubmitError if no job exists. After Ctrl-C, raise KeyboardInterrupt if
    no job exists. An unexpected error also results in MaybeSubmitted.
    """
    named = [f"--comment={f'{comment} ' if comment else ''}{tokens.MARK}{token}", *options]
    # `options` are for chains, in which several jobs run the same script.
    submission = _Submission(
        script, env, token, named, patience_s, interrupted, show, started, attempt, alone=not options
    )
    try:
        return submission.run(confirm), submission.command
    except SubmitError:
        raise
    except Exception as error:
        raise unexpected(error, token, submission.printed) from error


def unexpected(error: BaseException, token: str, printed: Sequence[str] = ()) -> MaybeSubmitted:
    """Return the MaybeSubmitted to raise instead of `error`, which occurred after sbatch had started.

    printed: the job ids that sbatch printed.
    """
    return MaybeSubmitted(f"{type(error).__name__}: {error}\n{_check_first(token, printed)}")


def _check_first(token: str, printed: Sequence[str]) -> str:
    """Return a text for error messages: that the job may exist, and how to check that.

    printed: the job ids that sbatch printed.
    """
    printed = list(dict.fromkeys(printed))  # a controller that forgot job 8 gives that id to the next job
    ids = f" (sbatch printed {' and '.join(printed)})" if printed else ""
    squeue, scontrol = (" ".join(slurm_client.addressed([name])) for name in ("squeue", "scontrol"))
    commands = [
        f"{squeue} --all --me --states=all --format '%i %T %k' | grep -F {tokens.MARK}{token}",
        *(f"{scontrol} show job {job_id}" for job_id in printed),
    ]
    return (
        f"the job may exist anyway{ids}; the run folder was kept. Before you submit again, check with\n  "
        + "\n  ".join(commands)
    )


@dataclass
class _Submission:
    """The calls of sbatch for one request. The first fields are the arguments of submit()."""

    script: Path
    env: Mapping[str, str]
    token: str
    options: Sequence[str]
    patience_s: float
    interrupted: Callable[[], bool]
    show: Callable[[str], None]
    started: Callable[[], str]
    attempt: Attempt
    alone: bool  # whether no other job runs the script
    command: Sequence[str] = ()
    give_up_at: float | None = None  # monotonic time, set at the first error
    error: str = ""  # the last error of sbatch
    unclear: bool = False  # whether an attempt may have made a job that no query has found
    attempts: int = 0
    accepted: int = 0  # attempts that may have made a job, found or not
    printed: list[str] = field(default_factory=list)  # ids that sbatch printed

    def run(self, confirm: bool) -> str:
        while True:
            job_id = self._submit() or (self._look() if self.unclear else None)
            if job_id and (self.error or confirm):
                job_id = self._kept(job_id)
            if job_id:
                return job_id
            if self.accepted >= MOST_ACCEPTED:
                raise self._gave_up(
                    f"{self.accepted} calls of sbatch may each have created a job, but Slurm shows no such job"
                )
            self._pause("trying sbatch again")

    def _submit(self) -> str | None:
        self.attempts += 1
        try:
            job_id, self.command = self.attempt(self.script, self.env, self.options)
            self.accepted += 1
            self.printed.append(job_id)
            return job_id
        except NotReached as error:
            self._failed(str(error))
        except MaybeSubmitted as error:
            self._failed(str(error))
            self.accepted += 1
            self.unclear = True
        except SubmitError as error:  # a job of the first attempt may fill a limit, so that Slurm refuses this one
            if not self.accepted:
                raise
            self._failed(str(error))
            jobs = self._find(self.printed)
            if jobs:
                return self._only(jobs)
            raise self._gave_up("Slurm refused the job when sbatch was called again") from None
        return None

    def _failed(self, message: str) -> None:
        self.error = message
        if self.give_up_at is None:
            self.give_up_at = time.monotonic() + self.patience_s

    def _look(self) -> str | None:
        """Look for a job that an attempt made although sbatch failed.

        Return its id, or None if there certainly is no such job.
        """
        absent_at: float | None = None
        number = 0
        while True:
            if absent_at is None:
                self.show(f"{self._last_line()}; checking whether the controller has the job")
            jobs = self._find(())
            clock = time.monotonic()
            if jobs:
                return self._only(jobs)
            if jobs is None:
                absent_at = None
                self._pause("waiting for the controller, to check whether it has the job", number)
                number += 1
            elif absent_at is None:
                absent_at = clock
                self._rest(SETTLE_S, "the job is not in the queue so far; checking again")
            else:
                self.unclear = False
                return None

    def _find(self, known: Sequence[str]) -> list[Job] | None:
        return tokens.find(self.env, self.token, self.script, known, self.alone, self.started)

    def _kept(self, job_id: str) -> str | None:
        """Wait until the controller has saved the job `job_id` to disk. Return the id of the job to keep.

        If the controller accepted the request twice, the id may be that of the other job. If the controller has lost
        the job, return None.
        """
        try:
            self._rest(SAVED_S, f"job {job_id} is in the queue; waiting until the controller has saved it")
            number = 0
            while (jobs := self._find([job_id])) is None:
                self._failed(self.error or "squeue got no reply")
                self._pause(
                    f"job {job_id} was submitted; waiting for the controller, to check whether the job exists", number
                )
                number += 1
        except (KeyboardInterrupt, SubmitError):  # Ctrl-C, or patience_s is over; the last query found it
            return job_id
        if jobs:
            return self._only(jobs)
        self._failed(f"the controller was killed before it saved job {job_id}, so the job is lost")
        return None

    def _only(self, jobs: Sequence[Job]) -> str:
        """Return the job to keep, and cancel the other jobs of the same request.

        Keep the running job, or else the oldest.
        """
        first, *others = sorted(jobs, key=lambda job: (job.state == "PENDING", int(job.base_id)))
        if others:
            surplus = [job.base_id for job in others]
            with suppress(slurm_client.Unreachable):
                slurm_client.run(["scancel", *surplus], self.env)
            self.show(f"the controller accepted the request twice; canceled the surplus job {' '.join(surplus)}")
        self.command = self.command or (*COMMAND, *self.options, str(self.script))
        return first.base_id

    def _pause(self, why: str, number: int | None = None) -> None:
        number = self.attempts - 1 if number is None else number
        self._rest(PAUSES_S[min(number, len(PAUSES_S) - 1)], f"{self._last_line()}; {why}; press Ctrl-C to give up")

    def _last_line(self) -> str:
        return self.error.splitlines()[-1] if self.error else "no reply"

    def _rest(self, seconds: float, message: str) -> None:
        """Wait `seconds`, unless the user presses Ctrl-C or the time `patience_s` is over.

        In these two cases, raise MaybeSubmitted if an earlier sbatch may have made a job. Otherwise, raise
        KeyboardInterrupt or SubmitError.
        """
        until = time.monotonic() + seconds
        while (clock := time.monotonic()) < until:
            if self.interrupted():
                raise self._gave_up("interrupted") if self.accepted else KeyboardInterrupt
            if self.give_up_at is not None and clock > self.give_up_at:
                raise self._gave_up(
                    f"the controller did not accept the job within {self.patience_s:g} s (cluster.submit_patience_s)"
                )
            self.show(message)
            time.sleep(min(TICK_S, until - clock))

    def _gave_up(self, why: str) -> SubmitError:
        if not self.accepted:
            return SubmitError(f"{self.error}\n{why}")
        error = MaybeSubmitted(f"{self.error}\n{why}; {_check_first(self.token, self.printed)}")
        if why == "interrupted":
            error.exit_status = INTERRUPTED
        return error
