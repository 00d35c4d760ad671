"""What a run was made of (versions, git commit, command line), written at submission and read again."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpcinit.base import console, versions
from hpcinit.base.errors import RequestError
from hpcinit.config import compose, keys
from hpcinit.config.compose import Prepare, Request, Task
from hpcinit.records import run_folder

PACKAGES = ("hpcinit", "hydra-core", "omegaconf", "submitit", "torch", "deepspeed", "numpy")


class Provenance:
    """Starts git at once and reads its answer when it is needed: a second process costs no waiting."""

    def __init__(self, workdir: Path, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._workdir = workdir
        command = ["git", "-C", str(workdir), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        self._started = console.started(command)
        try:
            self._git: subprocess.Popen[str] | None = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                errors="replace",
            )  # fmt: skip
        except OSError:  # no git, or none that we may run
            self._git = None

    def to_json(self, snapshot: Mapping[str, Any] | None = None) -> str:
        """{command, workdir, git_commit (null: no repository; '-dirty': uncommitted changes), versions, host}.

        snapshot: what is said of the copy that the run runs from, if there is one.
        """
        commit = ""
        if self._git is not None:
            try:
                commit = self._git.communicate(timeout=10)[0].strip()
                console.ended(["git"], time.monotonic() - self._started, self._git.returncode)
            except subprocess.TimeoutExpired:
                self._git.kill()
        document = {
            "command": self._argv,
            "workdir": str(self._workdir),
            "git_commit": commit or None,
            "python": platform.python_version(),
            "versions": _versions(),
            "host": platform.node(),
            **({"snapshot": dict(snapshot)} if snapshot else {}),
        }
        return json.dumps(document, indent=2) + "\n"


def _versions() -> dict[str, str]:
    """Those of PACKAGES that are installed. By the names of folders: to parse metadata is 5 % of a submission."""
    found = versions.by_folder(tuple(sys.path))
    return {name: found[name] for name in PACKAGES if name in found}


# A run's own config.yaml as a request once more, with overrides; through Hydra, as every request.


def read_recorded(run: Path) -> dict[str, Any]:
    """The run's config as plain containers. Raises RequestError."""
    try:
        document = yaml.safe_load((run / run_folder.CONFIG).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise RequestError(f"{run / run_folder.CONFIG} cannot be read: {said}; expected the config of a run") from None
    if not isinstance(document, dict):
        raise RequestError(f"{run / run_folder.CONFIG} holds no config; was it edited?")
    return document


def recorded_provenance(run: Path) -> dict[str, Any]:
    """What is known of where the run was submitted. Raises RequestError."""
    try:
        document: dict[str, Any] = json.loads((run / run_folder.PROVENANCE).read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{run / run_folder.PROVENANCE} cannot be read: {error}; submit anew instead") from None
    return document


def recorded_request(document: dict[str, Any], overrides: Sequence[str], prepare: Prepare, task: Task) -> int:
    """compose.main for a config that is resolved already. Raises RequestError for an override that chooses a file."""
    for word in overrides:
        key = word.lstrip("+").partition("=")[0]
        if keys.is_group(key):
            raise RequestError(
                f"{word}: chooses a file, and a run's config is one that has been put together already; give the keys "
                f"that are to differ, as in {key}.NAME=VALUE, or submit anew"
            )
    own, others = _divided(document)
    # What stood behind -- never went through Hydra, and may hold anything, `${` too.
    kept = {} if any(word.startswith("job.args") for word in overrides) else {"args": list(document["job"]["args"])}
    own["job"] = {**document["job"], **({"args": []} if kept else {})}

    def prepared(request: Request) -> None:
        for key, value in kept.items():
            setattr(request.config.job, key, value)
            request.document["job"][key] = value
        prepare(request)

    with tempfile.TemporaryDirectory(prefix="hpcinit-") as folder:
        text = yaml.safe_dump({"defaults": ["hpcinit_schema", "_self_"], **own}, sort_keys=False)
        (Path(folder) / "run.yaml").write_text(text)
        line = ["--config-dir", folder, "--config-name", "run", *others, *overrides]
        return compose.main(line, prepared, task)


def _divided(document: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keys of the schema, and words that add the user's own."""
    own = {key: value for key, value in document.items() if keys.kind(key) is not None}
    return own, [f"+{key}={_word(value)}" for key, value in document.items() if key not in own]


def _word(value: Any) -> str:
    """A value in the words of Hydra's command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_word(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_word, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)


def recorded_lines(run: Path) -> Iterator[str]:
    yield from (run / run_folder.SCRIPT).read_text().splitlines()
