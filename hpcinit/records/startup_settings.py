"""Records what hpcinit set at each start of the ranks: variables, timeouts, devices and the layout.

Rank 0 appends these lines to a file in the run folder, so that they don't fill the log. A process without a run folder
prints them if HPCINIT_VERBOSE=1.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from hpcinit.base import background_writer
from hpcinit.base.console import plain, say
from hpcinit.records import run_folder

ENV_VERBOSE = "HPCINIT_VERBOSE"


def record(folder: Path | None, job: str, lines: Sequence[str]) -> None:
    """Append `lines` to the settings file in `folder`. Without a folder, print them if HPCINIT_VERBOSE=1.

    job: World.job, for the heading above the lines.
    """
    if folder is None:
        for line in lines if os.environ.get(ENV_VERBOSE, "") not in ("", "0") else ():
            say(line)
        return
    path = folder / run_folder.STARTUP
    heading = f"# job {job}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
    text = plain("\n".join([heading, *lines, ""]))

    def append() -> None:
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(text)

    background_writer.later(f"{run_folder.STARTUP} ({lines[0].partition(':')[0]})", append)
