"""One rank of a check: `python -m tests.gpu.rank '{"function": "module:name", "args": {...}, "folder": "..."}'`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path


def main(argument: str) -> None:
    """Call the function and write its result to FOLDER/results/rank-N.json, atomically."""
    asked = json.loads(argument)
    module, _, name = asked["function"].partition(":")
    result = getattr(importlib.import_module(module), name)(**asked["args"])
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
    path = Path(asked["folder"]) / f"results/rank-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(result, default=str))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main(sys.argv[1])
