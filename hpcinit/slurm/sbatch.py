"""Runs sbatch once, and decides from its reply whether a job may exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcinit.base import console
from hpcinit.base.errors import MaybeSubmitted, NotReached, SubmitError
from hpcinit.slurm import slurm_client

COMMAND = ("sbatch", "--parsable")
# With these errors, sbatch did not send the request, or the controller rejected it unread (slurm_errno.c). 'connect
# failure' is printed only before the request is sent (22.05: slurm_send_recv_controller_msg in slurm_protocol_api.c).
NOT_SENT = (
    "Unable to contact slurm controller (connect failure)",
    "Communication connection failure",
    "Connection refused",
    "No route to host",
    "Network is unreachable",
    "Slurm backup controller in standby mode",
    "Controller is in standby mode, try a different controller",
    "Rate limit exceeded",
    "can't be reached now, or it is an invalid entry for --cluster",
)
UNKNOWN_CLUSTER = "known by database"  # No cluster 'b' known by database.
# The controller may have accepted the job although sbatch failed. We saw this after a SIGSTOP or a kill of slurmctld.
LOST_CONTROLLER = (
    "Socket timed out",
    "Unable to contact slurm controller",  # (send failure), (receive failure), (shutdown failure)
    "Zero Bytes were transmitted",
    "Message send failure",
    "Message receive failure",
    "Communication shutdown failure",
    "Unexpected message received",
    "Unexpected missing socket error",  # in 24.11, if the controller is killed during the call
    "Connection reset by peer",
    "Connection timed out",
    "Broken pipe",
    "Transport endpoint is not connected",
    "Resource temporarily unavailable",
)


def sbatch(script: Path, env: Mapping[str, str], options: Sequence[str] = ()) -> tuple[str, Sequence[str]]:
    """Submit `script` with sbatch. Return the job id and the sbatch command.

    Raise the same errors as reply() and job_id().

    options: options for the command line. They override the script's #SBATCH lines.
    """
    command = [*COMMAND, *options, str(script)]
    return job_id(reply(command, env)), command


def reply(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Run sbatch and return what it printed.

    If the controller did not receive the request, raise NotReached with sbatch's own message. If a job may exist, raise
    MaybeSubmitted. For other failures, raise SubmitError.
    """
    try:
        call = slurm_client.start(command, env)
    except slurm_client.NotStarted as error:
        check = ": is this a login node, and is the slurm module loaded?" if error.missing else ""
        raise SubmitError(f"{error}{check}") from None
    try:
        output = call.output()
    except slurm_client.TimedOut as error:
        raise MaybeSubmitted(str(error)) from None
    except Exception as error:  # the request may have been sent
        raise MaybeSubmitted(f"the output of sbatch cannot be read: {type(error).__name__}: {error}") from error
    if output.status != 0:
        raise _kind_of(output.error, output.status)(output.error)
    if output.stderr.strip():  # the site's submit filter may print a note about a job that it accepts
        with suppress(OSError, ValueError):  # a closed terminal must not lose the job
            console.note(output.stderr.strip())
    return output.stdout


def job_id(text: str) -> str:
    """Read the job id from sbatch's output: '4242' or, in a federation, '4242;cluster'.

    Raise MaybeSubmitted for any other text.
    """
    # A site's wrapper may print a banner first; the id is the last line.
    last = text.strip().splitlines()[-1] if text.strip() else ""
    number = last.partition(";")[0]
    if not number.isdigit():
        raise MaybeSubmitted(f"sbatch --parsable printed {text!r}, expected a job id on the last line")
    return number


def _kind_of(message: str, status: int) -> type[SubmitError]:
    if UNKNOWN_CLUSTER in message:
        return SubmitError
    rest = message
    for sign in NOT_SENT:
        rest = rest.replace(sign, "")
    if status < 0 or any(sign in rest for sign in LOST_CONTROLLER):  # < 0: a signal ended it
        return MaybeSubmitted
    return SubmitError if rest == message else NotReached
