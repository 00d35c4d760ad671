"""Where the description is written, and that it is written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from hpcinit.facts import quoting
from hpcinit.facts.errors import Failure, RequestError


def named(name: str) -> Path:
    """./conf/cluster/NAME.yaml, which cluster=NAME finds first. Raises RequestError for what is no name."""
    if not quoting.PLAIN_NAME.fullmatch(name):
        raise RequestError(
            f"--name is {name!r} (default: Slurm's ClusterName), expected letters, digits, '.', '_' and '-': it "
            "becomes a file's name and the word in cluster=NAME"
        )
    return Path("conf/cluster") / f"{name}.yaml"


def read(path: Path) -> str | None:
    """None where there is no such file."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None


def write(path: Path, text: str) -> None:
    """Through a file beside it that takes its place. A link stays one; a mode stays what it was. Raises Failure."""
    target = path.resolve()
    part = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(part).chmod(_mode(target))
        Path(part).replace(target)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}; what was there is untouched") from None
    finally:
        with suppress(OSError):
            if part:
                Path(part).unlink()


def _mode(target: Path) -> int:
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
