"""Reads the source of a Python program before the job is queued, without running it.

The source shows syntax errors, and whether the program reads key=value.

A script that the ranks' Python cannot compile is refused. If the ranks' Python cannot be started on this machine, there
is only a warning, because its version may accept the script.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from hpcinit.base.text import expanded
from hpcinit.checks import environment, python_environment
from hpcinit.config import job_spec
from hpcinit.config.schema import Config

PYTHON = re.compile(r"python[\d.]*")
COMPILE_TIMEOUT_S = 5.0  # limit for the child process; a Python on a slow file system must not delay the submission
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python whose value is the next argument
# Names in a script that reads arguments such as nodes=2 itself.
READERS = {"argv", "from_cli", "parse_known_args", "REMAINDER"}


def source(config: Config) -> Path | None:
    """Return the source file of a Python program, or None for any other program.

    A Python program is a script, `python -u train.py`, or a module below the working folder.
    """
    job, workdir = config.job, job_spec.workdir(config)
    name = job.script
    if job.module:
        name = _module_file(job.module)
    elif job.command and PYTHON.fullmatch(Path(job.command).name):
        name = run_by_python(job.args)
    path = (workdir / (name or "")).absolute()
    return path if path.suffix == ".py" and path.is_file() else None


def _module_file(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def run_by_python(arguments: Sequence[str]) -> str:
    """Return the file of the script or module that Python runs with `arguments`. Return '' for -c and stdin."""
    rest = iter(arguments)
    for argument in rest:
        if argument in WITH_VALUE:
            next(rest, "")
        elif argument == "-m":
            return _module_file(next(rest, ""))
        elif argument in ("-c", "-"):
            return ""
        elif not argument.startswith("-"):
            return argument
    return ""


def reads_key_values(path: Path) -> bool:
    """Return whether the script reads key=value arguments.

    It does if it uses @hydra.main, OmegaConf.from_cli, sys.argv or something similar.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(map(_reads, ast.walk(tree)))


def _reads(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in READERS
    if isinstance(node, ast.alias):
        return node.name in READERS or node.name.partition(".")[0] == "hydra"
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] == "hydra"
    # parser.add_argument("overrides", nargs="*")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        return any(isinstance(one, ast.Constant) and not str(one.value).startswith("-") for one in node.args[:1])
    return False


def cannot_compile(config: Config) -> Iterator[str]:
    """Yield a message if the ranks' Python cannot compile the script."""
    name, error, certain = _syntax(config)
    if error and certain:
        yield f"{_python(config)} cannot compile {name!r}: {error}. Correct the script"


def may_not_compile(config: Config) -> Iterator[str]:
    """Yield a warning if this Python cannot compile the script and the ranks' Python cannot be started here."""
    name, error, certain = _syntax(config)
    if error and not certain:
        python = _python(config)
        why = "could not be started here" if "/" in python else "may have another version"
        yield (
            f"{name!r} does not compile with Python {sys.version_info[0]}.{sys.version_info[1]}: {error}. "
            f"The ranks' Python, {python}, {why}; check its version"
        )


def _syntax(config: Config) -> tuple[str, str, bool]:
    """Return the script's name, its syntax error or '', and whether the ranks' version of Python checked it.

    If the ranks' Python cannot be started here, this Python checks the script, although its version may differ.
    """
    path = source(config)
    if path is None:
        return "", "", True
    python = _python(config) if config.check_paths and not config.container.image else ""
    try:
        return path.name, *_compile(python if "/" in python else "", path, path.stat().st_mtime_ns)
    except OSError:  # the check of the program reports it
        return path.name, "", True


def _python(config: Config) -> str:
    """Return the Python that runs the program: `python` in `-- python train.py`, or else the environment's Python."""
    command = config.job.command
    if not command:
        return environment.python(config)
    return str((expanded(config.job.workdir or ".") / command).absolute()) if "/" in command else command


@cache
def _compile(python: str, path: Path, _mtime_ns: int) -> tuple[str, bool]:
    """Return the script's syntax error or '', and whether it was checked with the version of `python`.

    If `python` may have another version, it is started. If that fails, this Python checks the script.
    """
    python = str(Path(python).expanduser()) if python else ""
    if python == sys.executable or (python and _is_our_version(python)):
        return _syntax_error(str(path)), True
    if python and os.access(python, os.X_OK):
        command = [
            python,
            "-I",
            "-S",
            "-c",
            f"import sys, warnings\n\n{inspect.getsource(_syntax_error)}\nprint(_syntax_error(sys.argv[1]))",
            str(path),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S, check=True
            )
            return done.stdout.strip(), True
        except (OSError, ValueError, subprocess.SubprocessError):
            pass
    return _syntax_error(str(path)), False


def _syntax_error(path: str) -> str:
    """Return the script's syntax error, such as 'line 3: invalid syntax', or '' if this Python can compile it.

    Raise OSError if the script cannot be read. Other versions of Python also run the source of this function. It may
    use only the modules sys and warnings.
    """
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib would be another import
        text = file.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except ValueError as error:  # a NUL character, in Python 3.11
        return str(error)
    return ""


def _is_our_version(python: str) -> bool:
    """Return whether the environment of `python` contains only the Python version of this process."""
    versions = {folder.name for folder in python_environment.prefix_from(Path(python)).glob("lib/python3.*")}
    return versions == {f"python3.{sys.version_info.minor}"} and os.access(python, os.X_OK)
