"""Make a minimal virtual environment that runs hpcinit and contains an additional package and command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def make(folder: Path) -> Path:
    """Create the environment. It uses hpcinit and its dependencies where they are, like editable installs."""
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
