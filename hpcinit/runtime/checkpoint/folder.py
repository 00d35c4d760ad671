"""A folder of checkpoints: FOLDER/step-00000042 is there whole, or it is not loaded.

A step is written into FOLDER/.step-00000042.tmp and renamed when every file has reached the disk. checkpoint.json is
written last and lists all files with their sizes: it shows a copy that was cut short, and files that a purge took.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcinit.facts.errors import CheckpointError, RequestError

METADATA = "checkpoint.json"
FORMAT = 1
VISIBLE_S = 60.0  # NFS keeps what it knows of a folder for up to a minute (acdirmax)
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Description:
    """What checkpoint.json says. samples: seen by all ranks together. zero_stage: None without DeepSpeed.

    data_parallel: shares of the data, each with its own place in it. files: relative path -> bytes.
    """

    step: int
    samples: int
    wrap: str
    world_size: int
    layout: Mapping[str, int]
    data_parallel: int
    seed: int
    zero_stage: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)


def name(step: int) -> str:
    """Raises RequestError for a step below 0."""
    if step < 0:
        raise RequestError(f"a checkpoint of step {step}, expected 0 or more")
    return f"step-{step:08d}"


def unfinished(folder: Path, step: int) -> Path:
    """Where the step is written. Raises RequestError for a step below 0."""
    return folder / f".{name(step)}.tmp"


def begin(folder: Path, step: int) -> None:
    """An empty folder to write into. Raises RequestError if the step is there already, OSError."""
    final, temporary = folder / name(step), unfinished(folder, step)
    if final.exists() and problem(final) is None:
        raise RequestError(
            f"{final} is there already: load it and go on from there, or save into another folder (or remove it)"
        )
    if temporary.exists():
        shutil.rmtree(temporary)  # of an attempt that ended while it wrote
    temporary.mkdir(parents=True)


def publish(temporary: Path, description: Description) -> Path:
    """The written folder under its name. Raises CheckpointError if a file of another node is not seen here, OSError."""
    _see(temporary, description.files)
    document = {"format": FORMAT, **asdict(description)}
    write(temporary / METADATA, (json.dumps(document, indent=1) + "\n").encode())
    for inner, _, _ in os.walk(temporary):
        sync(Path(inner))
    final = temporary.parent / name(description.step)
    if final.exists():
        remove(final)  # a torn one: begin() has looked
    temporary.rename(final)
    sync(final.parent)
    return final


def newest(folder: Path, say: Callable[[str], None]) -> tuple[Path, Description] | None:
    """The latest step that is whole; one line for each later one that is not."""
    for path in _steps(folder):
        wrong = problem(path)
        if wrong is None:
            return path, describe(path)
        say(f"checkpoint {path} is skipped: {wrong}")
    return None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest whole ones, and what is older than those. Raises OSError."""
    whole = [path for path in _steps(folder) if problem(path) is None]
    if len(whole) > keep:
        last = whole[keep - 1].name
        for path in _steps(folder):
            if _number(path) < _number(folder / last):
                remove(path)


def problem(path: Path) -> str | None:
    """Why the checkpoint in `path` cannot be used, None if it is whole."""
    try:
        description = describe(path)
    except FileNotFoundError:
        return f"it has no {METADATA}, which is written last"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"its {METADATA} cannot be read ({error})"
    for relative, size in description.files.items():
        try:
            found = (path / relative).stat().st_size
        except OSError as error:
            return f"{relative} cannot be read ({error.strerror})"
        if found != size:
            return f"{relative} has {found} bytes, and {size} were written"
    return None


def describe(path: Path) -> Description:
    """Raises OSError, ValueError, TypeError or KeyError for what is no description."""
    document: dict[str, Any] = json.loads((path / METADATA).read_text())
    if (made := document.pop("format")) != FORMAT:
        raise ValueError(f"format {made}, and this version of hpcinit reads format {FORMAT}")
    return Description(**document)


def write(path: Path, content: bytes) -> None:
    """Raises OSError. On the disk when it returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """What was written to a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Under another name first, so that half of it never bears the name of the whole."""
    going = path.with_name(f".{path.name}.gone")
    shutil.rmtree(going, ignore_errors=True)
    path.rename(going)
    shutil.rmtree(going)


def sizes(folder: Path, *patterns: str) -> dict[str, int]:
    """Relative path -> bytes of the files in `folder` that match a glob pattern."""
    found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def _see(folder: Path, files: Mapping[str, int]) -> None:
    limit = time.monotonic() + VISIBLE_S
    while missing := [each for each, size in files.items() if not _has(folder / each, size)]:
        if time.monotonic() > limit:
            raise CheckpointError(
                f"{len(missing)} of {len(files)} files, as {missing[0]}, were written and are not seen in {folder} by "
                "rank 0: checkpoints need a folder that all nodes share"
            )
        time.sleep(0.5)


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _steps(folder: Path) -> list[Path]:
    """Newest first."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
