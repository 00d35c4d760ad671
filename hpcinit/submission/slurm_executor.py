"""submitit's SlurmExecutor as renderer and submitter, without its pickles. The only file that knows submitit.

What is overridden, and why (submitit 1.5.4): docs/decisions/0004-submitit-as-renderer.md.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

from hpcinit.facts import telling
from hpcinit.facts.errors import MaybeSubmitted, NotReached, SubmitError

# sbatch itself retries a full queue 15 times with growing sleeps, 120 s in all (sbatch.c: MAX_RETRIES).
SBATCH_PATIENCE_S = 180


class ScriptExecutor(SlurmExecutor):
    """Renders one batch script and submits it; what runs in it is a shell command, not a pickle."""

    @classmethod
    def affinity(cls) -> int:
        """Rendering needs no Slurm on this machine; submitit's own answer asks for srun."""
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text: str = _make_sbatch_string(command=command, folder=self.folder, use_srun=False, **self.parameters)
        return "\n".join(line for line in text.split("\n") if not line.endswith(_DROPPED))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        """'4242' or, in a federation, '4242;cluster' (sbatch --parsable). Raises SubmitError for other text."""
        text = string if isinstance(string, str) else string.decode(errors="replace")
        # A site's wrapper may print a banner first; the id is the last line.
        last = text.strip().splitlines()[-1] if text.strip() else ""
        job_id = last.partition(";")[0]
        if not job_id.isdigit():
            raise MaybeSubmitted(f"sbatch --parsable printed {text!r}, expected a job id as its last line")
        return job_id


# submitit always writes --signal=USR2@90, which kills every program that does not handle USR2; it is
# rendered with this value, which is then dropped, where no signal is asked for.
_DROPPED = "=hpcinit-drops-this-line"


def render(folder: Path, command: str, parameters: Mapping[str, Any]) -> str:
    """The batch script. parameters: submitit's, further sbatch options under additional_parameters."""
    executor = ScriptExecutor(folder)
    extra = {"signal": "hpcinit-drops-this-line", **parameters["additional_parameters"]}
    executor.parameters.update({**parameters, "wckey": None, "additional_parameters": extra})
    return executor._make_submission_file_text(command, uid="")


def sbatch(script: Path, env: Mapping[str, str], options: Sequence[str] = ()) -> tuple[str, Sequence[str]]:
    """Submit `script`; the job id and the command used. options: words that beat the script's #SBATCH lines.

    In a session of its own, so that Ctrl-C in the terminal cannot end it half-way. Raises SubmitError with sbatch's
    own words: NotReached where there is no job because nobody heard, MaybeSubmitted where there may be one.
    """
    executor = ScriptExecutor(script.parent)
    *words, path = executor._make_submission_command(script)
    command = [*words, *options, path]
    try:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # a site's job_submit.lua may print in any encoding
            start_new_session=True,
        )
    except FileNotFoundError:
        raise SubmitError("sbatch is not on PATH: is this a login node, and is the slurm module loaded?") from None
    except OSError as error:
        raise SubmitError(f"cannot run sbatch: {error.strerror}") from None
    out, err = _output(process)
    if process.returncode != 0:
        words_said = err.strip() or out.strip() or f"exit status {process.returncode}, and no word"
        raise _kind_of(words_said, process.returncode)(words_said)
    if err.strip():  # what the site's submit filter says of a job that it takes
        with suppress(OSError, ValueError):  # a closed terminal loses no job
            telling.note(err.strip())
    return executor._get_job_id_from_submission_command(out), command


def _output(sbatch: subprocess.Popen[str]) -> tuple[str, str]:
    """Return stdout and stderr of sbatch at its end. Raises MaybeSubmitted for any trouble: the request may be sent."""
    with sbatch:
        try:
            return sbatch.communicate(timeout=SBATCH_PATIENCE_S)
        except subprocess.TimeoutExpired:
            sbatch.kill()
            raise MaybeSubmitted(f"sbatch did not answer in {SBATCH_PATIENCE_S} s") from None
        except Exception as error:
            sbatch.kill()
            raise MaybeSubmitted(f"the answer of sbatch cannot be read: {type(error).__name__}: {error}") from error


# The request was not sent, or was sent back as it was (slurm_protocol_api.c of 22.05: slurm_send_recv_controller_msg
# ends with 'connect failure' only before it sends; slurm_errno.c). Rate limit: since 23.02.
NOT_SENT = (
    "Unable to contact slurm controller (connect failure)",
    "Communication connection failure",
    "Connection refused",
    "No route to host",
    "Network is unreachable",
    "Slurm backup controller in standby mode",
    "Controller is in standby mode, try a different controller",
    "Rate limit exceeded",
)
# The controller may have taken the job although sbatch failed (seen with slurmctld stopped by SIGSTOP, and killed).
LOST_CONTROLLER = (
    "Socket timed out",
    "Unable to contact slurm controller",  # (send failure), (receive failure), (shutdown failure)
    "Zero Bytes were transmitted",
    "Message send failure",
    "Message receive failure",
    "Communication shutdown failure",
    "Unexpected message received",
    "Unexpected missing socket error",  # 24.11, of a controller killed in the call
    "Connection reset by peer",
    "Connection timed out",
    "Broken pipe",
    "Transport endpoint is not connected",
    "Resource temporarily unavailable",
)


def _kind_of(words: str, status: int) -> type[SubmitError]:
    rest = words
    for sign in NOT_SENT:
        rest = rest.replace(sign, "")
    if status < 0 or any(sign in rest for sign in LOST_CONTROLLER):  # < 0: a signal ended it
        return MaybeSubmitted
    return SubmitError if rest == words else NotReached
