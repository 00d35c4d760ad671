"""docs/uninstall.md lists what hpcinit writes, and what removes it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parent.parent / "docs/uninstall.md").read_text()
PLACES = re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE)
COMMANDS = re.findall(r"^    (.*?)(?:  +# .*)?$", PAGE, re.MULTILINE)


def left(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_dir()}


def test_the_commands_remove_what_hpcinit_wrote(tmp_path: Path) -> None:
    """The first command removes a run. The second one lists all that is left, except the user's files and the numbers
    of the runs, which another command removes.

    The second command only lists here: it would also remove caches of other tests in /tmp. tests/observe/test_clean_outside.py
    has the removal.
    """
    for name in ("tmp", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "work/train.py").write_text("print()\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    env = {name: value for name, value in env.items() if not name.startswith(("XDG_", "SLURM_"))}

    def shell(line: str) -> str:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path / "work", env=env, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    clean, outside, _, _, numbers, pip = COMMANDS
    shell("hpcinit submit cluster=local ranks_per_node=1 wait=true -- train.py")
    shell("hpcinit nodes --cluster local --add n3 --why slow")
    assert (tmp_path / "work/runs/train-0001/job.sh").exists()
    shell(clean)
    listed = [Path(json.loads(line)["path"]) for line in shell(outside.replace("--yes", "--json")).splitlines()]
    elsewhere = {path for path in left(tmp_path) if not any(path.is_relative_to(place) for place in listed)}
    assert elsewhere <= {tmp_path / "work/train.py", tmp_path / "work/runs/.train-0001.number"}
    shell(numbers)
    assert not (left(tmp_path) & elsewhere) - {tmp_path / "work/train.py"}
    assert pip == "pip uninstall hpcinit" and "./runs/.NAME-0001.number" in PLACES
