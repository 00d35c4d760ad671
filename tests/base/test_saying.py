"""What the processes of a job say on stderr."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAYS = "from hpcinit.base.console import say; say('error: n2: rank 3: Killed'); say('two\\nlines')"


def writes(*command: str) -> list[bytes]:
    """What `command` writes to stderr, call by call: a pipe with O_DIRECT keeps each write(2) apart, pipe(2)."""
    read, write = os.pipe2(os.O_DIRECT)
    try:
        subprocess.run([sys.executable, *command], stderr=write, check=False, timeout=60)
    finally:
        os.close(write)
    with os.fdopen(read, "rb", buffering=0) as pipe:
        return list(iter(lambda: pipe.read(4096), b""))


@pytest.mark.parametrize("buffering", [[], ["-u"]])
def test_a_message_is_one_write(buffering: list[str]) -> None:
    """Text and end of line together, so that a process that writes to the same log comes before or after."""
    assert writes(*buffering, "-c", SAYS) == [b"hpcinit: error: n2: rank 3: Killed\n", b"hpcinit: two\nlines\n"]


def test_an_error_of_a_job_is_one_write() -> None:
    """What ends a task before its program runs, from the one place where errors become messages."""
    (said,) = writes("-u", "-m", "hpcinit.run", "-m")
    assert said.startswith(b"hpcinit: error: -m names no module") and said.endswith(b"\n")


def test_a_log_that_takes_nothing_ends_nobody() -> None:
    """A closed stderr, or a full disk below it, is no reason to end."""
    code = "import sys; from hpcinit.base.console import say\n{before}\nsay('x'); print('went on')"
    for before in ("sys.stderr = None", "sys.stderr.close()", "sys.stderr = open('/dev/full', 'w', buffering=1)"):
        done = subprocess.run(
            [sys.executable, "-c", code.format(before=before)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout == "went on\n", before
