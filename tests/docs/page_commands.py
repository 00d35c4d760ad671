"""Find the commands on the pages for users, and write the files that they name."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

from tests.test_replayed_pages import PAGES as REPLAYED

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/reference").glob("*.md")))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
PROGRAMS = (
    r"\$EDITOR|apptainer|cat|cd|chmod|conda|cp|echo|eval|export|git|horovodrun|hpcinit|kill|ls|make|mkdir|module|mpirun|mv|pip|python3?|"
    "rm|sacct|sacctmgr|salloc|sbatch|scancel|scontrol|sinfo|source|squeue|srun|ssh|tar|torchrun|umask|uv|wandb"
)
# A program may follow a parenthesis, variables and a folder: (umask, A=1 python, a=$(python, venv/bin/pip
COMMAND = re.compile(rf"\(?(?:\w+=\$\(|\w+=\S* )*(?:[\w./$]*/)?(?:{PROGRAMS})(?= |$)")
MARK = re.compile(r" # (?:.*; )?(?:needs \w.*|on [A-Z]\w+)$")
TRAIN = """
import os, pathlib, sys
print("trained", sys.argv[1:])
if run := os.environ.get("HPCINIT_RUN"):
    pathlib.Path(run, "result.json").write_text('{"value": 0.25}')
"""
JOB = "name: train\nscript: train.py\n"
FAILED = "Traceback (most recent call last):\nValueError: 17\n"
WRITTEN = {
    **dict.fromkeys(("train.py", "eval.py", "loop.py", "package/__init__.py", "package/train.py"), TRAIN),
    **dict.fromkeys((".hf_token", "train.sif"), "a-token\n"),
    **dict.fromkeys(("slurm-123.out", "logs/rank-0.log"), FAILED),
    **dict.fromkeys(("conf/job/train.yaml", "conf/job/pretrain.yaml"), JOB),
    "sleep.py": "import time\nprint('sleeps', flush=True)\ntime.sleep(600)\n",
    "wrapper.sh": '#!/bin/sh\nexec python "$@"\n',
    "shared/venv/bin/python": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n',
}


def commands(name: str, text: str) -> list[str]:
    """Return the commands in a page's indented lines and shell blocks. Blocks of other languages have none."""

    def indented(block: re.Match[str]) -> str:
        language, lines = block.groups()
        shell = language in ("bash", "text") or (language == "console" and Path(name).stem not in REPLAYED)
        return textwrap.indent(lines, "    ") if shell and not lines.startswith("#!") else ""

    text = re.sub(r"^```(\w*)\n(.*?)^```$", indented, re.sub(r"\\\n +", "", text), flags=re.MULTILINE | re.DOTALL)
    return [line for line in re.findall(r"^ {4,}(?:\$ )?(.*)$", text, re.MULTILINE) if COMMAND.match(line)]


def write_files(folder: Path) -> None:
    """Write the files that the commands name. The dumps and the run that hung were recorded, except loss and accuracy."""
    programs = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", "".join(PAGES.values()), re.DOTALL)
    for name, text in (dict(programs) | WRITTEN).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o700 if text.startswith("#!") else 0o600)
    for number in (0, 1):
        (folder / "dumps").mkdir(exist_ok=True)
        shutil.copy(ROOT / f"tests/data/flight/gloo-2.13.rank_{number}", folder / f"dumps/trace_rank_{number}")
    for name in ("hang-0001", "plain-0001"):
        shutil.copytree(ROOT / "tests/corpus/cases/r-hang-then-canceled/hang-0001", folder / "runs" / name)
        progress = folder / "runs" / name / "progress.json"
        progress.write_text(progress.read_text().replace('"values": {}', '"values": {"loss": 0.5, "accuracy": 0.5}'))
    (folder / "conf/cluster").mkdir()
