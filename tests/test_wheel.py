"""The wheel contains everything that a login node needs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from hpcinit.config.folders import folder
from tests import sites

ROOT = Path(__file__).parent.parent


def test_wheel_submits_from_any_folder(tmp_path: Path) -> None:
    """A built wheel, unpacked away from the checkout, renders every cluster and has the sbatch scripts."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True)
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    assert {path.name for path in (site / "hpcinit/sbatch").iterdir()} == {
        path.name for path in (ROOT / "sbatch").iterdir()
    }
    blocks = "hpcinit/submit/lib"
    assert {path.name for path in (site / blocks).iterdir()} == {path.name for path in (ROOT / blocks).iterdir()}
    assert (site / "hydra_plugins/hpcinit_launcher.py").is_file()
    env = {**os.environ, "PYTHONPATH": str(site)}
    where = subprocess.run(
        [sys.executable, "-c", "import hpcinit; print(hpcinit.__file__)"],
        cwd=elsewhere, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(site))
    for path in (folder() / "cluster").glob("*.yaml"):
        done = subprocess.run(
            [sys.executable, "-m", "hpcinit.submit", *sites.asked(path.stem), "dry_run=true"],
            cwd=elsewhere, env={**env, "USER": "me"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and done.stdout.startswith("#!/bin/bash"), done.stderr
