"""No rank outlives the agent that started it, however that one ends."""

from __future__ import annotations

import os

from hpcinit.facts import parent_death

ENV_PARENT = "HPCINIT_PARENT"  # process id of an agent, in the environment of its ranks


def die_with_parent() -> None:
    """SIGKILL for this process when the parent that ENV_PARENT names dies. Without the variable nothing.

    Not SIGTERM: with run.should_stop() a rank takes that for a wish to save, and with its peers gone it never comes to
    it. What this process starts is not meant: the variable is taken out.
    """
    parent = os.environ.pop(ENV_PARENT, "")
    if parent.isdigit():
        parent_death.die_with(int(parent))
