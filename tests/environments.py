"""A virtual environment as small as one can be, that runs hpcinit and has a package and a command of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def make(folder: Path) -> Path:
    """hpcinit and all that it needs are editable installs of it, so to say: they stay where they are."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "elsewhere.pth").write_text(
        "\n".join([str(ROOT), *(p for p in sys.path if p.endswith("-packages"))]) + "\n"
    )
    (site / "inside").mkdir()
    (site / "inside/__init__.py").write_text("")
    (folder / "bin/prefix").write_text(f"#!{folder}/bin/python\nimport sys\nprint(sys.prefix)\n")
    (folder / "bin/prefix").chmod(0o755)
    return folder
