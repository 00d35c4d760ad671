"""A FAKE nvidia-smi and dmesg, for machines without a GPU. They print what a file of tests/data/gpu contains.

Each file names the public output that its values are from. What the output does not show, such as UUIDs, is made up. The fakes answer a query as the commands do: the fields in
the order of the query, an error for a field that the driver does not know.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "data/gpu"
SOUND = {"gpus": [{"uuid": "GPU-fake", "pci.bus_id": "00000000:3B:00.0", "memory.used": 4, "memory.total": 81559}]}
SCRIPT = """#!{python} -IS
# FAKE: see tests/fake_gpu.py
import json, os, sys, time
cases = json.loads({cases!r})
case = cases.get(os.environ.get("SLURMD_NODENAME", ""), cases[""])
if os.path.basename(sys.argv[0]) == "dmesg":
    # The kernel writes the seconds since its start. The recorded lines have other times, so they happened a minute ago.
    for line in case.get("dmesg", []):
        print(f"[{{time.clock_gettime(time.CLOCK_BOOTTIME) - 60:.6f}}] {{line}}")
    sys.exit(0)
kind, _, text = sys.argv[1].removeprefix("--query-").partition("=")
fields = text.split(",")
for field in fields:
    if field in case.get("unknown_fields", []):
        print(f'Field "{{field}}" is not a valid field to query.')
        sys.exit(2)
for row in case.get("gpus" if kind == "gpu" else "processes", []):
    print(", ".join(str(row.get(field, "[N/A]")) for field in fields))
if kind == "gpu" and "message" in case:
    print(case["message"])
    sys.exit(case["status"])
"""


def read(name: str) -> dict[str, Any]:
    """Return the document of tests/data/gpu/NAME.yaml."""
    found: dict[str, Any] = yaml.safe_load((DATA / f"{name}.yaml").read_text())
    return found


def install(folder: Path, case: dict[str, Any], node: str = "") -> str:
    """Write the fakes into `folder`, and return a PATH with it first. With `node`, all other nodes are sound."""
    folder.mkdir(exist_ok=True)
    cases = {node: case, "": SOUND} if node else {"": case}
    for name in ("nvidia-smi", "dmesg"):
        command = folder / name
        command.write_text(SCRIPT.format(python=sys.executable, cases=json.dumps(cases)))
        command.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
