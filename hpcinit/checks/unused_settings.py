"""Warns about settings that have no effect, because the program does not use hpcinit.

The program is a Python script, or a shell script that runs Python scripts. If hpcinit does not recognize a command of a
shell script, there is no warning, because this command might run a program that uses hpcinit.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path, PurePath

from hpcinit.checks import program_source, started_program
from hpcinit.config import job_spec
from hpcinit.config.schema import Config
from hpcinit.records import program_use

MOST_FILES = 500  # if the program has more modules, there is no warning
# Commands of a shell script that run no program of the user, and what may precede a command.
HARMLESS = {
    *("[", "[[", "]]", ":", "cat", "cp", "date", "done", "echo", "exit", "export", "false", "fi", "for", "hostname"),
    *("ln", "ls", "mkdir", "ml", "module", "mv", "nvidia-smi", "printf", "pwd", "rm", "set", "sleep", "test", "touch"),
    *("true", "ulimit", "uname", "unset", "wait"),
}
BEFORE = {"!", "{", "do", "elif", "else", "exec", "if", "nohup", "then", "time", "until", "while", "}"}
ASSIGNMENT = re.compile(r"\w+\+?=")
OPERATORS = "();<>|&"
CHANGED_BY_THE_SHELL = re.compile(r"[$*?~`\[{]")  # in a path: unknown before the script runs


def warnings(config: Config) -> Iterator[str]:
    """Yield a warning about the settings that have no effect because the program does not use hpcinit.

    It is not an error, because the program might call hpcinit through an installed package.
    """
    workdir = job_spec.workdir(config)
    path = program_source.source(config)
    script, paths = ("", [path]) if path else _python_files(config, workdir)
    if not paths or any(_may_use_hpcinit(each, workdir) for each in paths):
        return
    names = ", ".join(dict.fromkeys(each.name for each in paths))
    spec = job_spec.make(config, str(workdir), names)
    settings = [*program_use.of_spec(spec, program_use.NOTHING).no_effect]
    if "seed" in settings and str(config.seed) in config.job.args:  # -- train.py --seed '${seed}'
        settings.remove("seed")
    if settings:
        started = f" (started by {script})" if script else ""
        beside = "it" if len(paths) == 1 else "them"
        yield (
            f"{names}{started} and the modules beside {beside} do not import hpcinit: {', '.join(settings)} will have "
            "no effect. Call hpcinit.init() and run.wrap() in the program (docs/your-script.md), or omit these settings"
        )


def _python_files(config: Config, workdir: Path) -> tuple[str, list[Path]]:
    """Return the name of the job's shell script, and the Python files that it runs.

    Return no files if the job runs another program, or if it is unclear which files the script runs.
    """
    script = started_program.shell_script(config.job.command, list(config.job.args), workdir)
    if script is None:
        return "", []
    name, text = script
    # PYTHONPATH may contain modules of the program. A script with HPCINIT_RUN reads the settings itself.
    if "PYTHONPATH" in text or "hpcinit" in text.lower():
        return name, []
    paths = []
    for command in _commands(text):
        file = _python_file(command)
        if file is None:
            return name, []
        if file:
            paths.append(workdir / file)
    return name, paths if all(path.is_file() for path in paths) else []


def _commands(text: str) -> Iterator[list[str]]:
    """Yield each command of a shell script with its arguments, without redirections.

    A line that cannot be split reliably is yielded as one argument.
    """
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=OPERATORS)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quote that ends on another line
            words = [line]
        operators = [word for word in words if set(word) <= set(OPERATORS)]
        if any("<<" in each or {"<", "("} <= set(each) for each in operators):
            words = [line]  # the lines after << are text, and not commands
        command: list[str] = []
        rest = iter(words)
        for word in rest:
            if not set(word) <= set(OPERATORS):
                command.append(word)
            elif "<" in word or ">" in word:
                next(rest, "")  # the file
            else:
                yield command
                command = []
        yield command


def _python_file(command: Sequence[str]) -> str | None:
    """Return the Python file that a command runs, or '' if it runs no program. Return None if that is unclear."""
    words = list(command)
    while words and (words[0] in BEFORE or ASSIGNMENT.match(words[0])):
        words.pop(0)
    if any("`" in word or "$(" in word for word in command):
        return None
    if not words or words[0] in HARMLESS or words[:2] == ["conda", "activate"]:
        return ""
    if words[0] in (".", "source"):
        return "" if PurePath(words[-1]).name in ("activate", "conda.sh") else None
    is_python = program_source.PYTHON.fullmatch(PurePath(words[0]).name)
    file = program_source.run_by_python(words[1:]) if is_python else words[0]
    return None if not file.endswith(".py") or CHANGED_BY_THE_SHELL.search(file) else file


@cache
def _may_use_hpcinit(script: Path, workdir: Path) -> bool:
    """Return whether the script, or a module beside it that the script imports, mentions hpcinit.

    Also return True if a file cannot be read.
    """
    seen, new = set[Path](), {script}
    while new and len(seen) <= MOST_FILES:
        path = new.pop()
        seen.add(path)
        try:
            content = path.read_bytes()
            if b"hpcinit" in content.lower():  # HPCINIT_RUN as well
                return True
            names = _imported(ast.parse(content))
        except (OSError, SyntaxError, ValueError):
            return True
        for folder in {script.parent, workdir, path.parent}:
            for name in names:
                new |= {folder / f"{name}.py", *islice((folder / name).rglob("*.py"), MOST_FILES)} - seen
        new = {each for each in new if each.is_file()}
    return bool(new)


def _imported(tree: ast.AST) -> set[str]:
    """Return the top-level names of all imported modules: 'a' for `import a.b` and for `from .a import c`."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.partition(".")[0] for name in names}
    return found
