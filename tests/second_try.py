"""Run pytest; with CI=true, run the tests that failed again at the end, one by one: `python -m tests.second_try ARGUMENTS`.

docs/decisions/0021-how-the-tests-run.md. The second run has the machine to itself, so a test whose timing suffered from the
other workers passes then. A test that always fails does not, and more than AT_MOST failures are not chance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")  # pytest's own record, in the folder of its configuration
AT_MOST = 10


def main(arguments: Sequence[str]) -> int:
    again = os.environ.get("CI") == "true"
    if again:
        FAILED.unlink(missing_ok=True)  # it keeps failures of earlier runs
    command = [sys.executable, "-m", "pytest", *arguments]
    status = subprocess.run(command, check=False).returncode
    failed = json.loads(FAILED.read_text()) if again and status == 1 else {}
    if not 0 < len(failed) <= AT_MOST:
        return status
    _section("SECOND TRIES, ONE BY ONE", failed)
    status = subprocess.run(
        [*command, "-n", "0", "--last-failed", "--last-failed-no-failures=none"], check=False
    ).returncode
    if status == 0:
        _section("PASSED THE SECOND TIME: each is a defect, of the test or of what it tests", failed)
    return status


def _section(title: str, lines: Sequence[str]) -> None:
    print(f"\n!!! {title}", *lines, sep="\n  ", flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
