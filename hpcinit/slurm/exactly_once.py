"""One request, one job: sbatch is called again only when it is certain that the attempt before made none.

Why it is done so, and what remains: docs/decisions/0015-submit-exactly-once.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcinit.base.errors import INTERRUPTED, MaybeSubmitted, NotReached, SubmitError
from hpcinit.slurm import slurm_client, tokens
from hpcinit.slurm.queue import Job
from hpcinit.slurm.sbatch import COMMAND, sbatch

PATIENCE_S = 300.0  # for the controller; a restart takes seconds to minutes
# A request that sbatch gave up on waits in the controller's socket, and is served when the controller goes on: before
# the question that was asked after it (connections are taken in order), but each by a thread of its own. So 'not there'
# counts when it has been said twice, this far apart.
SETTLE_S = 5.0
# slurmctld writes its jobs to disk up to 5 s after it has taken one (SAVE_MAX_WAIT in state_save.c); killed before, it
# forgets a job whose id sbatch has printed already.
SAVED_S = 7.0
# Attempts that may each have made a job. If Slurm shows no job after two of them, a third would hardly help, and may be
# one more job: a person has to look.
MOST_ACCEPTED = 2
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 10.0)  # between two attempts; the last one again and again
BESIDE_S = 600.0  # what sbatch, squeue, scontrol and sacct may take in all once patience is over
TICK_S = 0.2  # how soon Ctrl-C is seen


def longest_s(patience_s: float, jobs: int) -> float:
    """Return a bound of the time that so many submissions may take, one after the other."""
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
) -> tuple[str, Sequence[str]]:
    """Submit `script` with sbatch, exactly once; return the job id and the command.

    token: in the job's comment, behind the user's own `comment`; search for it to find the job. options: further
    options on sbatch's command line. patience_s: how long the controller may be down. confirm: check again after
    SAVED_S whether the controller still has the job, which is done after any trouble anyway. interrupted: whether
    Ctrl-C was pressed. show: displays what the submission waits for. started: returns the id of the job that started
    `script`, from its own record, or ''.

    Raise SubmitError if there is no job, MaybeSubmitted if there may be one, also after any error that is not expected
    here, and KeyboardInterrupt if there is none.
    """
    submission = _Submission(script, env, token, options, comment, patience_s, interrupted, show, started)
    try:
        return submission.run(confirm), submission.command
    except SubmitError:
        raise
    except Exception as error:
        raise unexpected(error, token, submission.printed) from error


def unexpected(error: BaseException, token: str, printed: Sequence[str] = ()) -> MaybeSubmitted:
    """Return what to raise instead of `error`, which occurred after sbatch was started. printed: ids from sbatch."""
    return MaybeSubmitted(f"{type(error).__name__}: {error}\n{_check_first(token, printed)}")


def _check_first(token: str, printed: Sequence[str]) -> str:
    """Return the end of a message: that the job may exist, and how to find out. printed: ids that sbatch printed."""
    printed = list(dict.fromkeys(printed))  # a controller that forgot job 8 gives that id to the next job
    ids = f" (sbatch printed {' and '.join(printed)})" if printed else ""
    commands = [
        f"squeue --all --me --states=all --format '%i %T %k' | grep -F {tokens.MARK}{token}",
        *(f"scontrol show job {job_id}" for job_id in printed),
    ]
    return (
        f"the job may exist all the same{ids}; the run folder was kept. Check before you submit again, with\n  "
        + "\n  ".join(commands)
    )


class _Submission:
    def __init__(
        self,
        script: Path,
        env: Mapping[str, str],
        token: str,
        options: Sequence[str],
        comment: str | None,
        patience_s: float,
        interrupted: Callable[[], bool],
        show: Callable[[str], None],
        started: Callable[[], str],
    ) -> None:
        self.command: Sequence[str] = ()
        self._show, self._started = show, started
        self._script, self._env, self._token = script, env, token
        self._words = [f"--comment={f'{comment} ' if comment else ''}{tokens.MARK}{token}", *options]
        self._alone = not options  # else other jobs may run the script: those of a chain
        self._patience_s, self._interrupted = patience_s, interrupted
        self._given_up_at: float | None = None  # on the clock, once there is trouble
        self._trouble = ""  # what sbatch said last
        self._unclear = False  # whether an attempt may have made a job that nobody has seen
        self._attempts = 0
        self._accepted = 0  # attempts that may have made a job, whatever was found of it later
        self.printed: list[str] = []  # ids that sbatch printed

    def run(self, confirm: bool) -> str:
        while True:
            job_id = self._submit() or (self._look() if self._unclear else None)
            if job_id and (self._trouble or confirm):
                job_id = self._kept(job_id)
            if job_id:
                return job_id
            if self._accepted >= MOST_ACCEPTED:
                raise self._gave_up(f"{self._accepted} attempts may each have made a job, and Slurm shows none of them")
            self._pause("sbatch is tried again")

    def _submit(self) -> str | None:
        self._attempts += 1
        try:
            job_id, self.command = sbatch(self._script, self._env, self._words)
            self._accepted += 1
            self.printed.append(job_id)
            return job_id
        except NotReached as error:
            self._in_trouble(str(error))
        except MaybeSubmitted as error:
            self._in_trouble(str(error))
            self._accepted += 1
            self._unclear = True
        except SubmitError as error:  # refused, perhaps because a job of the first attempt fills a limit by now
            if not self._accepted:
                raise
            self._in_trouble(str(error))
            jobs = self._find(self.printed)
            if jobs:
                return self._only(jobs)
            raise self._gave_up("a second attempt was refused") from None
        return None

    def _in_trouble(self, words: str) -> None:
        self._trouble = words
        if self._given_up_at is None:
            self._given_up_at = time.monotonic() + self._patience_s

    def _look(self) -> str | None:
        """The job that an attempt made although sbatch failed; None once it is certain that there is none."""
        absent_at: float | None = None
        number = 0
        while True:
            if absent_at is None:
                self._show(f"{self._last_words()}; asking the controller whether the job is there")
            jobs = self._find(())
            clock = time.monotonic()
            if jobs:
                return self._only(jobs)
            if jobs is None:
                absent_at = None
                self._pause("waiting for the controller, to ask whether the job is there", number)
                number += 1
            elif absent_at is None:
                absent_at = clock
                self._rest(SETTLE_S, "the job is not in the queue so far; looking once more")
            else:
                self._unclear = False
                return None

    def _find(self, known: Sequence[str]) -> list[Job] | None:
        return tokens.find(self._env, self._token, self._script, known, self._alone, self._started)

    def _kept(self, job_id: str) -> str | None:
        """`job_id`, or the job in its place, once the controller has had time to save it; None if it forgot it."""
        try:
            self._rest(SAVED_S, f"job {job_id} is there; looking once more, whether the controller keeps it")
            number = 0
            while (jobs := self._find([job_id])) is None:
                self._in_trouble(self._trouble or "squeue got no answer")
                self._pause(f"job {job_id} is there; waiting for the controller, to ask whether it keeps it", number)
                number += 1
        except (KeyboardInterrupt, SubmitError):  # Ctrl-C, or no more patience: the job was there when we looked last
            return job_id
        if jobs:
            return self._only(jobs)
        self._in_trouble(f"the controller has forgotten job {job_id}: it was killed before it had saved it")
        return None

    def _only(self, jobs: Sequence[Job]) -> str:
        """Of several jobs of one request the one that runs, else the oldest; the others are cancelled."""
        first, *others = sorted(jobs, key=lambda job: (job.state == "PENDING", int(job.base_id)))
        if others:
            surplus = [job.base_id for job in others]
            with suppress(slurm_client.Unreachable):
                slurm_client.run(["scancel", *surplus], self._env)
            self._show(f"the controller took the request late: job {' '.join(surplus)} of it is cancelled")
        self.command = self.command or (*COMMAND, *self._words, str(self._script))
        return first.base_id

    def _pause(self, why: str, number: int | None = None) -> None:
        number = self._attempts - 1 if number is None else number
        self._rest(PAUSES_S[min(number, len(PAUSES_S) - 1)], f"{self._last_words()}; {why}, Ctrl-C gives up")

    def _last_words(self) -> str:
        return self._trouble.splitlines()[-1] if self._trouble else "no answer"

    def _rest(self, seconds: float, message: str) -> None:
        """Wait. Raises what is known when Ctrl-C has come or when patience is over."""
        until = time.monotonic() + seconds
        while (clock := time.monotonic()) < until:
            if self._interrupted():
                raise self._gave_up("interrupted") if self._accepted else KeyboardInterrupt
            if self._given_up_at is not None and clock > self._given_up_at:
                raise self._gave_up(
                    f"the controller did not take the job in {self._patience_s:g} s (cluster.submit_patience_s)"
                )
            self._show(message)
            time.sleep(min(TICK_S, until - clock))

    def _gave_up(self, why: str) -> SubmitError:
        if not self._accepted:
            return SubmitError(f"{self._trouble}\n{why}")
        error = MaybeSubmitted(f"{self._trouble}\n{why}; {_check_first(self._token, self.printed)}")
        if why == "interrupted":
            error.exit_status = INTERRUPTED
        return error
