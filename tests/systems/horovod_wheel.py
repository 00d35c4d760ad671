"""python -m tests.systems.horovod_wheel: Horovod built against this torch, with Gloo and with Open MPI; prints the wheel.

Built once for a Python and a torch, into ~/.cache/hpcinit/horovod. Needs cmake, g++ and Open MPI's headers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpcinit.base.versions import installed

VERSION = "0.28.1"
# Its build sets C++14 (CMakeLists.txt), but the headers of torch 2.1 and later need C++17.
CXX = """#!/bin/sh
for option do
  shift
  case $option in -std=c++14 | -std=gnu++14) option=-std=gnu++17 ;; esac
  set -- "$@" "$option"
done
exec g++ "$@"
"""
INSTALL = "apt-get install cmake g++ libopenmpi-dev"
SETTINGS = {
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "MAKEFLAGS": f"-j{os.cpu_count()}",
}


def cached() -> Path:
    """Return the folder for the wheel of this Python and torch."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    made_of = f"{VERSION}-mpi-torch{installed('torch')}-{sys.implementation.cache_tag}"
    return base / "hpcinit" / "horovod" / made_of


def build(folder: Path) -> Path:
    """Build the wheel. Raise SystemExit with the end of the build's output if that fails."""
    if missing := [tool for tool in ("cmake", "g++") if not shutil.which(tool)]:
        raise SystemExit(f"Horovod is built by {' and '.join(missing)}, not found on PATH: {INSTALL}")
    began = time.monotonic()
    print(f"building Horovod {VERSION}, about 5 minutes on 2 cores", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        compiler, made = Path(temporary, "cxx17"), Path(temporary, "wheel")
        compiler.write_text(CXX)
        compiler.chmod(0o755)
        # cmake gets torch's compiler flags from the python on PATH.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
        done = subprocess.run(
            [*pip, "--verbose", "--wheel-dir", made, f"horovod=={VERSION}"],
            env={**os.environ, **SETTINGS, "CXX": str(compiler), "PATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(
                f"{done.stdout[-4000:]}\nHorovod {VERSION} : the build failed, see above. What it needs: {INSTALL}"
            )
        (wheel,) = made.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        part = shutil.copy(wheel, folder / "part")
        Path(part).rename(folder / wheel.name)
    print(f"built in {time.monotonic() - began:.0f} s: {folder / wheel.name}", file=sys.stderr)
    return folder / wheel.name


if __name__ == "__main__":
    found = sorted(cached().glob("*.whl"))
    print(found[0] if found else build(cached()))
