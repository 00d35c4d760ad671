"""What a user types for an environment variable or a program's argument arrives character by character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hpcinit.checks import all_checks
from hpcinit.config import compose, hydra_compose, request
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

    chosen = [] if any(word.startswith("cluster=") for word in line) else ["cluster=local"]
    assert compose.main([*line, *chosen], lambda _: None, task) == 0
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
def test_a_table(extra: list[str]) -> None:
    """Each variable of a table gets its text, and the table does not replace other variables."""
    [one] = made(["+job.env.Z=1.0", "+job.env={A: 1.10, B: 1_000, C: True, D: 'a b', E: 'x${nodes}'}", *extra])
    assert one.config.job.env == {"Z": "1.0", "A": "1.10", "B": "1_000", "C": "True", "D": "a b", "E": "x1"}
    [one] = made(["+deepspeed.ds_config={a: 1}", "parallel=zero1", *extra])
    assert one.document["deepspeed"]["ds_config"] == {"a": 1}


@pytest.mark.parametrize("extra", [[], ["+w=1"]])  # without Hydra, and with it
def test_keys_of_hpcinit(extra: list[str]) -> None:
    """A program gets the text of keys of hpcinit as well."""
    [one] = made(["gradient_clip=1.50", "nodes=1", "mem_gb=8", "wait=TRUE", *extra])
    assert program(one, "${gradient_clip}", "${mem_gb}", "${wait}", "${nodes}") == ["1.50", "8", "TRUE", "1"]


def test_lines_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules and setup lines are what the user typed, in YAML too."""
    monkeypatch.chdir(tmp_path)
    [one] = made(["cluster=local", "modules=[1.10,gcc/1.10]", "setup=[true,1_000]"])
    assert (one.config.cluster.modules, one.config.cluster.setup) == (["1.10", "gcc/1.10"], ["true", "1_000"])
    write(tmp_path / "conf/cluster/ours.yaml", "defaults: [local, _self_]\nmodules: [2024, 1.10]\nsetup: [true]\n")
    [one] = made(["cluster=ours"])
    assert (one.config.cluster.modules, one.config.cluster.setup) == (["2024", "1.10"], ["true"])
    assert not problems(one)


KEPT = {"B": "false", "C": "true", "I": "3", "D": "0.5", "Q": "'1.10'", "R": "'${gradient_clip}'", "O": '"010"'}
CHANGED = {
    **{"A": "010", "V": "1.10", "F": "off", "T": "True", "Y": "yes", "S": "1:30", "X": "1e3"},
    **{"H": "0x10", "U": "1_000", "P": "+5"},
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def table(values: Mapping[str, str]) -> str:
    return "env: {" + ", ".join(f"{name}: {text}" for name, text in values.items()) + "}\n"


def listed(values: Mapping[str, str]) -> str:
    return "args: [" + ", ".join(values.values()) + "]\n"


def problems(one: request.Request) -> list[str]:
    return [problem for problem in all_checks.problems(one.config) if problem.startswith(("job.env", "job.args"))]


# where a file may be, how its path is shown, what is above `env` in it, and what selects it
PLACES = {
    "job": ("conf/job/mine.yaml", "name: x\ncommand: 'true'\n", ["job=mine"], {}),
    "not a group": ("conf/job/base.yaml", "name: x\ncommand: 'true'\n", ["job=mine"], {}),
    "other folder": ("site/job/mine.yaml", "name: x\ncommand: 'true'\n", ["job=mine"], {"HPCINIT_CONF": "site"}),
    "config dir": ("more/job/mine.yaml", "name: x\ncommand: 'true'\n", ["--config-dir=more", "job=mine"], {}),
    "hydra.main": ("conf/job/mine.yaml", "name: x\ncommand: 'true'\n", ["job=mine", "hydra.job.chdir=false"], {}),
    "search path": (
        "more/job/mine.yaml",
        "name: x\ncommand: 'true'\n",
        ["job=mine", "hydra.searchpath=[file://more]"],
        {},
    ),
    "package": ("conf/experiment/mine.yaml", "# @package job\nname: x\n", ["+experiment=mine"], {}),
    "sweep": ("conf/job/mine.yaml", "name: x\ncommand: 'true'\n", ["-m", "job=mine", "+job.env.Z=1,2,3"], {}),
}


@pytest.mark.parametrize("place", PLACES)
def test_in_yaml(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In YAML, a variable or argument is what the file has, also if YAML reads another value. null is refused."""
    path, start, line, variables = PLACES[place]
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if place == "not a group":
        write(tmp_path / "conf/job/mine.yaml", "defaults: [base]\n")
    write(tmp_path / path, start + table(KEPT) + listed(KEPT))
    for one in made(line):
        env = {name: text.strip("\"'") for name, text in KEPT.items()} | {"R": "0.0"}
        assert {name: one.config.job.env[name] for name in env} == env
        assert one.config.job.args == list(env.values())
        assert one.document["job"]["args"] == one.config.job.args
        assert not problems(one)
    write(tmp_path / path, start + table(CHANGED) + listed(CHANGED))
    for one in made(line):
        assert {name: one.document["job"]["env"][name] for name in CHANGED} == CHANGED
        assert {name: one.config.job.env[name] for name in CHANGED} == CHANGED
        assert one.config.job.args == list(CHANGED.values()) == one.document["job"]["args"]
        assert not problems(one)
    write(tmp_path / path, start + table({"N": "null"}) + listed({"N": "~"}))
    for one in made(line):
        assert problems(one) == [
            "job.env.N is null, expected text in quotes",
            "job.args has None, expected a list of strings; quote an item that contains brackets or ': '",
        ]


def test_of_two_files_the_one_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of another file or of the command line replaces the text, and a table that env refers to keeps its text."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "conf/cluster/mine.yaml", "defaults: [local]\nenv: {A: 1.10, B: 010, C: off, D: 1.10}\n")
    replaced = "# @package _global_\ncluster: {env: {A: '2', B: 1}}\njob: {env: '${cluster.env}'}\n"
    write(tmp_path / "conf/experiment/mine.yaml", replaced)
    [one] = made(["+experiment=mine", "cluster.env.C=OFF", "cluster=mine"])
    assert [one.config.cluster.env[name] for name in "ABCD"] == ["2", "1", "OFF", "1.10"]
    assert one.config.job.env == one.config.cluster.env


def test_plain_and_hydra_give_the_same() -> None:
    """The text of a value does not depend on whether Hydra composes the config."""
    line = ["gradient_clip=1.50", "comment='a b'", "wait=True", "cluster=local", "partition=null"]
    [one] = made(line)
    found: list[request.Request] = []
    hydra_compose.main(line, found.append, lambda _: 0)
    assert dict(found[0].typed) == dict(one.typed)
    assert (found[0].config, found[0].document) == (one.config, one.document)
