"""What a user types for an environment variable or a program's argument arrives character by character."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcinit.config import checks, compose, hydra_compose, request
from hpcinit.submit import program_arguments

TEXTS = (
    "1.10",
    "1_000",
    "007",
    "true",
    "True",
    "off",
    "null",
    "NULL",
    "1e-3",
    "+5",
    "-0",
    "1.",
    ".5",
    "nan",
    "a b",
    "",
)


def made(line: Sequence[str]) -> list[request.Request]:
    found: list[request.Request] = []

    def task(requests: Sequence[request.Request]) -> int:
        found.extend(requests)
        return 0

    compose.main([*line, "cluster=local"], lambda _: None, task)
    return found


def program(one: request.Request, *words: str) -> list[str]:
    return program_arguments.interpolated(words, one, {"v", "w", "nodes", "gradient_clip", "mem_gb", "wait"})


def quoted(text: str) -> str:
    return f"'{text}'" if " " in text else text


@pytest.mark.parametrize("text", TEXTS)
def test_one_value(text: str) -> None:
    """A variable and an argument get the text of an override, also through a key that refers to it."""
    typed = quoted(text)
    [one] = made([f"+v={typed}", f"+job.env.V={typed}", "+job.env.W=x${v}", "+job.env.X=${v}", "+w=${v}"])
    assert one.config.job.env == {"V": text, "W": f"x{text}", "X": text} == one.document["job"]["env"]
    assert program(one, "--v", "${v}", "${w}") == ["--v", text, text]


@pytest.mark.parametrize("count", [2, 5])  # with three and more, combinations are variations of a first one
@pytest.mark.parametrize("form", ["{}", "choice({})"])
def test_a_sweep(form: str, count: int) -> None:
    """Each combination of a sweep gets the text of its element, also if two elements are the same number."""
    texts = ["1.10", "1.1", "true", "off", "007", "1_000"][:count]
    texts += ["null"] * (form == "{}")  # Hydra's choice() does not accept it
    values = form.format(",".join(texts))
    found = made(["-m", f"+v={values}", "+job.env.V=${v}", "+job.env.F=1.50", "job.args=['-${v}',1.20]"])
    assert [one.config.job.env for one in found] == [{"V": text, "F": "1.50"} for text in texts]
    assert [one.config.job.args for one in found] == [[f"-{text}", "1.20"] for text in texts]
    assert [program(one, "${v}") for one in found] == [[text] for text in texts]
    assert [one.combination for one in found] == [f"+v={text}" for text in texts]
    found = made(["-m", f"+job.env.V={values}"])
    assert [one.config.job.env["V"] for one in found] == texts


def test_a_range_and_lists() -> None:
    """Numbers that Hydra computes have Hydra's spelling, and lists of arguments may be swept."""
    found = made(["-m", "+job.env.V=range(1,3)", "job.args=[1.10,a],[2.0]"])
    assert [(one.config.job.env["V"], one.config.job.args) for one in found] == [
        *(("1", ["1.10", "a"]), ("1", ["2.0"]), ("2", ["1.10", "a"]), ("2", ["2.0"]))
    ]


@pytest.mark.parametrize("extra", [[], ["+w=1"]])  # without Hydra, and with it
def test_keys_of_hpcinit(extra: list[str]) -> None:
    """A program gets the text of keys of hpcinit as well."""
    [one] = made(["gradient_clip=1.50", "nodes=1", "mem_gb=8", "wait=TRUE", *extra])
    assert program(one, "${gradient_clip}", "${mem_gb}", "${wait}", "${nodes}") == ["1.50", "8", "TRUE", "1"]


@pytest.mark.parametrize("extra", [[], ["+w=1"]])
def test_in_yaml(extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In YAML, a bool is exported as true or false, and a number with a lost text is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/job").mkdir(parents=True)
    good = "name: x\ncommand: 'true'\nenv: {B: false, C: True, I: 3, Q: '1.10', R: '${gradient_clip}'}\n"
    (tmp_path / "conf/job/mine.yaml").write_text(good)
    [one] = made(["job=mine", *extra])
    assert one.config.job.env == {"B": "false", "C": "true", "I": "3", "Q": "1.10", "R": "0.0"}
    (tmp_path / "conf/job/mine.yaml").write_text("name: x\ncommand: 'true'\nenv: {F: 1.10, N: null}\n")
    [one] = made(["job=mine", *extra])
    text = "\n".join(checks.problems(one.config))
    assert "job.env.F is the number 1.1, expected text: YAML reads 1.10 as 1.1" in text
    assert 'quote it, as in "1.1", or type it at submission: +job.env.F=1.1' in text
    assert "job.env.N is null, expected text in quotes" in text


def test_plain_and_hydra_give_the_same() -> None:
    """The text of a value does not depend on whether Hydra composes the config."""
    line = ["gradient_clip=1.50", "comment='a b'", "wait=True", "cluster=local", "partition=null"]
    [one] = made(line)
    found: list[request.Request] = []
    hydra_compose.main(line, found.append, lambda _: 0)
    assert dict(found[0].typed) == dict(one.typed)
    assert (found[0].config, found[0].document) == (one.config, one.document)
