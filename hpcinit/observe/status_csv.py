"""`hpcinit status --csv`: prints one line per run or task, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from hpcinit.observe import overview, run_details
from hpcinit.observe.overview import Run

FIRST = ("run", "job_id", "state", "exit_status", "submitted")
LAST = ("step", "total", "result", "typed", "arguments")


def write(runs: Sequence[Run]) -> None:
    """Print one line per run or task to stdout. Each swept parameter and each reported value has a column."""
    rows, parameters, values = list[dict[str, Any]](), dict[str, None](), dict[str, None]()
    for run in overview.each_task(runs):
        [document] = run_details.documents(run)
        own, progress = document["parameters"], document["progress"]
        reported = progress.get("values", {})
        parameters |= dict.fromkeys(own)
        values |= dict.fromkeys(reported)
        at = document["submitted"]
        rows.append(
            {
                **reported,
                **{key: progress.get(key) for key in ("step", "total")},
                **own,
                **{key: document[key] for key in ("job_id", "state", "exit_status", "result")},
                "run": run.name,
                "submitted": datetime.fromtimestamp(at).isoformat(timespec="seconds") if at else "",
                "typed": shlex.join(document["typed"]),
                "arguments": shlex.join(document["arguments"]),
            }
        )
    writer = csv.DictWriter(sys.stdout, list(dict.fromkeys([*FIRST, *parameters, *values, *LAST])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
