"""Text in a key's value is never executed: it arrives unchanged, or it is refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpcinit.checks import all_checks
from hpcinit.config.compose import compose
from hpcinit.config.schema import Config
from hpcinit.submit import script
from tests.minislurm import MiniSlurm

# These keys are shell code, or checks restrict them to a few values. All other keys accept any text.
BY_DESIGN = {"cluster.setup"}
CANARY = "canary"
HOSTILE = [
    "$(touch canary)", "`touch canary`", "; touch canary", "' ; touch canary ; '", '" ; touch canary ; "', "\\",
    "&& touch canary", "| touch canary", "> canary", "\n touch canary", "\r\ntouch canary", "a # b", "#", "a\\'b", "%j%u",
    "${x:=$(touch canary)}", "$((a[$(touch canary)]))", "<(touch canary)", "!touch", "~", "*", "--wrap=touch canary",
    "\0touch canary", "''", "'x'", '"x"', "\\$(touch canary)", "a : b", " hetjob ", "\u2028touch canary", "{touch,canary}",
]  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.sampled_from("ab $`'\"\\;&|<>()#\n%*{}=~!\0é"), max_size=12),
    st.tuples(st.sampled_from(HOSTILE), st.sampled_from(HOSTILE)).map("".join),
)


def keys(kind: Any = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Return every key of the schema that accepts text, and its kind: text, list or dict. New keys are included."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        name, hint = f"{prefix}{item.name}", hints[item.name]
        inner = [part for part in get_args(hint) if part is not type(None)]
        if hasattr(hint, "__dataclass_fields__"):
            yield from keys(hint, f"{name}.")
        elif name in BY_DESIGN:
            continue
        elif hint is str or (inner == [str] and get_origin(hint) is not list):
            yield name, "text"
        elif get_origin(hint) is list and inner[0] in (str, Any):
            yield name, "list"
        elif get_origin(hint) is dict and inner[1] in (str, Any):
            yield name, "dict"


KEYS = sorted(keys())


def with_text(key: str, how: str, text: str) -> Config:
    config = compose(["cluster=mini", "job=smoke", "check_paths=false"])
    *groups, last = key.split(".")
    place: Any = config
    for group in groups:
        place = getattr(place, group)
    given = {"text": text, "list": [text], "dict": {"x-y" if last in ("sbatch", "srun", "options") else "XY": text}}
    setattr(place, last, given[how])
    if key.startswith(("container.", "cluster.container.")):
        config.cluster.container.runtime = config.cluster.container.runtime or "apptainer"
        config.container.image = config.container.image or "docker://x"
    if key in {"job.script", "job.command"}:
        config.job.module = None
    return config


def rendered(config: Config, folder: Path) -> str | None:
    """Return the script, or None if the request is refused, on the same path as `hpcinit submit`."""
    return None if all_checks.problems(config) else script.render(config, folder, folder)


def test_every_text_of_the_schema_is_tried() -> None:
    """The keys are those of the schema and include those that reach the script."""
    names = {key for key, _ in KEYS}
    assert {"partition", "comment", "cluster.sbatch", "cluster.env", "cluster.modules", "secrets", "job.env"} <= names
    assert len(names) > 50


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(KEYS), TEXTS)
@example(("comment", "text"), "a\\b")
def test_bash_does_not_run_the_text(tmp_path_factory: pytest.TempPathFactory, key: tuple[str, str], text: str) -> None:
    """bash runs the script, with stand-ins for the launchers, and no text makes it do anything else."""
    folder = tmp_path_factory.mktemp("hostile")
    if (made := rendered(with_text(*key, text), folder)) is None:
        return
    (folder / "job.sh").write_text(made)
    (folder / "bin").mkdir()
    for name in ("srun", "apptainer", "conda"):
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "logs").mkdir()
    env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "HOME": str(folder)}
    before = {path.name for path in folder.iterdir()}
    done = subprocess.run(["bash", "job.sh"], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert "syntax error" not in done.stderr and "unexpected EOF" not in done.stderr
    assert {path.name for path in folder.iterdir()} - before <= {"exit.json"}, (key, text)
    assert not Path(CANARY).exists()


PLAIN = ["comment", "account", "qos"]


@pytest.mark.slurm
def test_slurm_stores_the_text_unchanged(idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """On the real Slurm, a directive's value is exactly the given text, and the job changes no file."""
    env, stored = {**os.environ, **idle_slurm.env}, []
    texts = [*HOSTILE, "a\\b", "x\\", "\\\\", "it is 5% # \\' é"]
    for number, text in enumerate(texts):
        config = with_text("comment", "text", text)
        config.cluster.sbatch = {"hold": number % 8 > 0}
        if (made := rendered(config, tmp_path)) is None:
            continue
        (tmp_path / "job.sh").write_text(made)
        done = subprocess.run(
            ["sbatch", "--parsable", "job.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (text, done.stderr)
        stored.append((done.stdout.strip(), text))
    assert len(stored) > 20
    for job, text in stored:
        shown = idle_slurm.run("scontrol", "--oneliner", "show", "job", job)
        assert f" Comment={text} " in shown, text
    assert not list(tmp_path.rglob(CANARY))
