"""No rank outlives the process that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

ENV_PARENT = "HPCINIT_PARENT"  # process id of an agent, in the environment of its ranks
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that this process gets when its parent dies; kept over exec


def die_with_parent() -> None:
    """SIGKILL for this process when the parent that ENV_PARENT names dies. Linux only; elsewhere nothing.

    Not SIGTERM: with run.should_stop() a rank takes that for a wish to save, and with its peers gone it never comes to
    it. What this process starts is not meant: the variable is taken out.
    """
    parent = os.environ.pop(ENV_PARENT, "")
    if not parent.isdigit():
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before prctl, which then says nothing of it
        os._exit(128 + signal.SIGKILL)
