"""`say()` prints whole lines to stderr."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TWO_MESSAGES = "from hpcinit.base.console import say; say('error: n2: rank 3: Killed'); say('two\\nlines')"


def writes_of(*command: str) -> list[bytes]:
    """Return what `command` writes to stderr, call by call: a pipe with O_DIRECT preserves each write(2)."""
    read, write = os.pipe2(os.O_DIRECT)
    try:
        subprocess.run([sys.executable, *command], stderr=write, check=False, timeout=60)
    finally:
        os.close(write)
    with os.fdopen(read, "rb", buffering=0) as pipe:
        return list(iter(lambda: pipe.read(4096), b""))


@pytest.mark.parametrize("buffering", [[], ["-u"]])
def test_a_message_is_one_write(buffering: list[str]) -> None:
    """Text and end of line are one write, so no other process can write between them."""
    assert writes_of(*buffering, "-c", TWO_MESSAGES) == [
        b"hpcinit: error: n2: rank 3: Killed\n",
        b"hpcinit: two\nlines\n",
    ]


def test_an_error_of_a_job_is_one_write() -> None:
    """An error before the program starts is one write too."""
    (line,) = writes_of("-u", "-m", "hpcinit.run", "-m")
    assert line.startswith(b"hpcinit: error: -m without a module") and line.endswith(b"\n")


def test_an_unwritable_log_does_not_end_a_process() -> None:
    """A closed stderr, or a full disk under it, does not end the process."""
    code = "import sys; from hpcinit.base.console import say\n{before}\nsay('x'); print('continued')"
    for before in ("sys.stderr = None", "sys.stderr.close()", "sys.stderr = open('/dev/full', 'w', buffering=1)"):
        done = subprocess.run(
            [sys.executable, "-c", code.format(before=before)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout == "continued\n", before
