"""Record when each Python starts: just before the first line of the module that it runs (on PYTHONPATH)."""

# ruff: noqa: PTH118, PTH123 - every Python of the job imports this, and pathlib is slow

import os
import time

if "LEDGER_TRUTH" in os.environ:
    try:
        with open(os.path.join(os.environ["LEDGER_TRUTH"], "pythons.txt"), "a") as _file:
            _file.write(f"{os.getpid()} {time.time()!r}\n")
    except OSError:
        pass
