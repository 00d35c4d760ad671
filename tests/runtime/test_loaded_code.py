"""Whether the program's own code uses a name: in a caller, in a function of a caller, or in a loaded module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CALL = "    run.should_stop()\n"
ASK = "from hpcinit.runtime.lifecycle import stopping\nprint(stopping.program_uses('should_stop'))\n"


@pytest.mark.parametrize(
    ("main", "module", "found"),
    [
        (f"{ASK}def train(run):\n{CALL}", "", True),
        (f"class Trainer:\n  def train(self, run):\n{CALL}{ASK}", "", True),
        (f"import trainer\n{ASK}", f"def train(run):\n  for step in range(3):\n{CALL}", True),
        (f"import trainer\n{ASK}", f"class Trainer:\n  def train(self, run):\n{CALL}", True),
        (f"import trainer\n{ASK}", "def train(run):\n  run.progress(1, 2)\n", False),
        (f"import json, torch\n{ASK}", "", False),
    ],
)
def test_code_that_uses_a_name(tmp_path: Path, main: str, module: str, found: bool) -> None:
    (tmp_path / "main.py").write_text(main)
    (tmp_path / "trainer.py").write_text(module)
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{found}\n"


def test_a_pickled_function(tmp_path: Path) -> None:
    """A function that was pickled has its own globals: another function there counts."""
    ask = ASK.replace("\n", "\n    ").rstrip()
    program = f"import cloudpickle, sys\ndef steps(run):\n{CALL}def train():\n    {ask}\n    return steps\n"
    (tmp_path / "main.py").write_text(f"{program}sys.stdout.buffer.write(cloudpickle.dumps(train))\n")
    pickled = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, check=True).stdout
    load = "import pickle, sys; pickle.load(sys.stdin.buffer)()"
    done = subprocess.run([sys.executable, "-c", load], cwd=tmp_path, input=pickled, capture_output=True, check=True)
    assert done.stdout == b"True\n"
