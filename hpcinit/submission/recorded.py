"""A run's own config.yaml as a request once more, with overrides; through Hydra, as every request."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpcinit.config import compose, keys
from hpcinit.config.compose import Prepare, Request, Task
from hpcinit.facts import runfolder
from hpcinit.facts.errors import RequestError


def read(run: Path) -> dict[str, Any]:
    """The run's config as plain containers. Raises RequestError."""
    try:
        document = yaml.safe_load((run / runfolder.CONFIG).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise RequestError(f"{run / runfolder.CONFIG} cannot be read: {said}; expected the config of a run") from None
    if not isinstance(document, dict):
        raise RequestError(f"{run / runfolder.CONFIG} holds no config; was it edited?")
    return document


def provenance(run: Path) -> dict[str, Any]:
    """What is known of where the run was submitted. Raises RequestError."""
    try:
        document: dict[str, Any] = json.loads((run / runfolder.PROVENANCE).read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{run / runfolder.PROVENANCE} cannot be read: {error}; submit anew instead") from None
    return document


def request(document: dict[str, Any], overrides: Sequence[str], prepare: Prepare, task: Task) -> int:
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


def lines(run: Path) -> Iterator[str]:
    yield from (run / runfolder.SCRIPT).read_text().splitlines()
