"""Which run is meant: by its folder, by the last part of its name, or by its job id."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcinit.facts import runfolder
from hpcinit.facts.errors import RequestError
from hpcinit.observe import state, sweep

if TYPE_CHECKING:
    import argparse


def runs(runs_dir: Path) -> list[Path]:
    """All submitted runs below `runs_dir`, the last submitted last."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(runs_dir):
            with contextlib.suppress(OSError):
                found.append((os.stat(f"{entry.path}/{runfolder.SUBMISSION}").st_mtime_ns, entry.path))  # noqa: PTH116
    return [Path(path) for _, path in sorted(found)]


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Give a command that means runs its --runs-dir."""
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the runs are; default: runs")


def find(word: str, runs_dir: Path = Path("runs")) -> Path:
    """The run folder that `word` means. Raises RequestError with what there is."""
    for path in (Path(word), runs_dir / word) if word else ():
        # A task of a sweep has its script with the others.
        if any((path / name).is_file() for name in (runfolder.SCRIPT, runfolder.SPEC, runfolder.SWEEP)):
            return path
    known = runs(runs_dir)
    for path in known if word else ():
        with contextlib.suppress(RequestError):
            if word in (*state.jobs(state.submission(path)), state.last_job(path)):
                return sweep.of_job(word, path) or path
            if task := sweep.of_job(word, path):
                return task
    last = ", ".join(path.name for path in known[-5:]) or "none"
    what = f"no run {word!r}: neither a run folder nor a job id" if word else "which run? Name one, or its job id"
    raise RequestError(f"{what}; the last in {runs_dir.absolute()}: {last}")


def means_all(words: Sequence[str]) -> bool:
    return list(words) in ([], ["all"])


def meant(words: Sequence[str], runs_dir: Path) -> list[Path]:
    """The run folders that are meant: all of them by no word or 'all'. Raises RequestError where there is none."""
    paths = runs(runs_dir) if means_all(words) else [find(word, runs_dir) for word in words]
    if not paths:
        raise RequestError(f"no runs in {runs_dir.absolute()}; --runs-dir names another folder")
    return paths
