"""Records the origin of a run: versions, git commit, command line, and the names of the shell's variables.

It also reads these records.
"""

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

from hpcinit.base import console, safe_files, versions
from hpcinit.base.errors import RequestError
from hpcinit.config import compose, keys
from hpcinit.config.python_arguments import override_value
from hpcinit.config.request import Prepare, Request, Task
from hpcinit.observe import resubmitted
from hpcinit.records import run_folder

PACKAGES = ("hpcinit", "hydra-core", "omegaconf", "submitit", "torch", "deepspeed", "numpy")


class Provenance:
    """Collects the provenance of a submission. To save time, git runs in the background, and its output is read later.

    variables: the names of the shell's variables that the job gets, without values. See submit/shell_variables.py.
    """

    def __init__(self, workdir: Path, argv: Sequence[str]) -> None:
        self.argv, self.variables = list(argv), list[str]()
        self._workdir = workdir
        command = ["git", "-C", str(workdir), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        self._started = console.started(command)
        try:
            self._git: subprocess.Popen[str] | None = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                errors="replace",
            )  # fmt: skip
        except OSError:  # no git, or no permission to run it
            self._git = None

    def to_json(self, snapshot: Mapping[str, Any] | None = None) -> str:
        """Return the content of provenance.json: command, workdir, git_commit, python, versions, host and variables.

        git_commit is null without a repository. It ends in '-dirty' if there are uncommitted changes.

        snapshot: what is recorded about the code snapshot, if the run has one.
        """
        commit = ""
        if self._git is not None:
            try:
                commit = self._git.communicate(timeout=10)[0].strip()
                console.ended(["git"], time.monotonic() - self._started, self._git.returncode)
            except subprocess.TimeoutExpired:
                self._git.kill()
        document = {
            "command": self.argv,
            "workdir": str(self._workdir),
            "git_commit": commit or None,
            "python": platform.python_version(),
            "versions": _versions(),
            "host": platform.node(),
            "variables": self.variables,
            **({"snapshot": dict(snapshot)} if snapshot else {}),
        }
        return json.dumps(document, indent=2) + "\n"


def _versions() -> dict[str, str]:
    """Return the versions of the installed PACKAGES.

    They are read from folder names, because parsing the metadata would take 5 % of a submission's time.
    """
    found = versions.by_folder(tuple(sys.path))
    return {name: found[name] for name in PACKAGES if name in found}


# Turn a run's config.yaml into a request again, with overrides, through Hydra.


def read_recorded(run: Path) -> dict[str, Any]:
    """Return the run's config as plain dicts and lists. Raise RequestError if its config.yaml cannot be read."""
    try:
        document = yaml.safe_load(safe_files.read_text(run / run_folder.CONFIG))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise RequestError(f"cannot read {run / run_folder.CONFIG}: {reason}; expected the config of a run") from None
    if not isinstance(document, dict):
        raise RequestError(f"{run / run_folder.CONFIG} does not contain a config; was it edited?")
    return document


def recorded_provenance(run: Path) -> dict[str, Any]:
    """Return the content of the run's provenance.json. All tasks of a sweep share one file.

    Raise RequestError if it cannot be read.
    """
    path = (resubmitted.sweep_of(run) or run) / run_folder.PROVENANCE
    try:
        document: dict[str, Any] = safe_files.read_json(path)
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot read {path}: {error}; submit with hpcinit submit instead") from None
    return document


def workdir_of(run: Path, snapshot: bool) -> Path:
    """Return the folder in which the program of a run starts.

    snapshot: whether the program starts in the copy of that folder in the run's code snapshot.
    """
    known = recorded_provenance(run)
    if not snapshot:
        return Path(known["workdir"])
    code = known.get("snapshot") or {"workdir": "."}
    return run / run_folder.CODE / str(code["workdir"])


def recorded_request(document: dict[str, Any], overrides: Sequence[str], prepare: Prepare, task: Task) -> int:
    """Make a request from the config of an earlier run, and pass it to `prepare` and then to `task`.

    Return the exit status of `task`. Raise RequestError if an override selects another config file.

    document: the config of the earlier run.
    overrides: key=value settings that replace values in the config.
    """
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        if keys.is_group(key):
            raise RequestError(
                f"{override} would select another config file, but an existing run keeps its config files. Set single "
                f"keys, such as {key}.NAME=VALUE, or submit a new run with hpcinit submit"
            )
    own, others = _split_keys(document)
    # The arguments after -- never went through Hydra and may contain anything, even `${`.
    changed = any(override.startswith("job.args") for override in overrides)
    kept = {} if changed else {"args": list(document["job"]["args"])}
    own["job"] = {**document["job"], **({"args": []} if kept else {})}

    def prepared(request: Request) -> None:
        for key, value in kept.items():
            setattr(request.config.job, key, value)
            request.document["job"][key] = value
        for key in [key for key in request.unread if key in document]:
            del request.unread[key]  # the recorded arguments already contain the key's value
            if given := [one for one in overrides if f"{one.lstrip('+').partition('=')[0]}.".startswith(f"{key}.")]:
                request.unread[key] = (
                    f"{given[-1]} does not change the recorded arguments of the program; if the program gets "
                    f"{key} as an argument, type the program and its arguments again after --"
                )
        prepare(request)

    with tempfile.TemporaryDirectory(prefix="hpcinit-") as folder:
        text = yaml.safe_dump({"defaults": ["hpcinit_schema", "_self_"], **own}, sort_keys=False)
        (Path(folder) / "run.yaml").write_text(text)
        line = ["--config-dir", folder, "--config-name", "run", *others, *overrides]
        return compose.main(line, prepared, task)


def _split_keys(document: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the config without the user's own keys, and each of these keys as an override +KEY=VALUE."""
    own = {key: value for key, value in document.items() if keys.kind(key) is not None}
    return own, [f"+{key}={override_value(value)}" for key, value in document.items() if key not in own]


def recorded_lines(run: Path) -> Iterator[str]:
    yield from (run / run_folder.SCRIPT).read_text().splitlines()
