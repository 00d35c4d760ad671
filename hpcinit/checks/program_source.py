"""Reads the source of a Python program before the job is queued, without running it.

The source shows syntax errors, whether the program reads key=value, and whether it calls hpcinit. Without hpcinit, some
settings have no effect.

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
from itertools import islice
from pathlib import Path

from hpcinit.base.text import expanded
from hpcinit.checks import environment, python_environment
from hpcinit.config import job_spec
from hpcinit.config.schema import Config
from hpcinit.records import program_use

PYTHON = re.compile(r"python[\d.]*")
COMPILE_TIMEOUT_S = 5.0  # limit for the child process; a Python on a slow file system must not delay the submission
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python whose value is the next argument
MOST_FILES = 500  # with more modules of the program, there is no warning about unused settings
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
        name = _run_by_python(job.args)
    path = (workdir / (name or "")).absolute()
    return path if path.suffix == ".py" and path.is_file() else None


def _module_file(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _run_by_python(arguments: Sequence[str]) -> str:
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
    """Return the script's name, its syntax error or '', and whether the ranks' Python certainly finds the same error.

    That is uncertain if their Python cannot be started here, because it may have another version.
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
    """Return the Python that runs the program: `python` in `-- python train.py`, otherwise the environment's."""
    command = config.job.command
    if not command:
        return environment.python(config)
    return str((expanded(config.job.workdir or ".") / command).absolute()) if "/" in command else command


@cache
def _compile(python: str, path: Path, _mtime_ns: int) -> tuple[str, bool]:
    """Return why the script cannot be compiled (or ''), and whether that is certain for the version of `python`.

    `python` is started only if its version might differ from this Python's.
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
    """Return why this Python cannot compile the script, as in 'line 3: invalid syntax', or '' if it can.

    Raise OSError if the script cannot be read. hpcinit also runs the source of this function alone in another Python 3,
    where only the modules sys and warnings are imported.
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


def unused_settings(config: Config) -> Iterator[str]:
    """Yield a warning about the settings that have no effect because the program does not use hpcinit.

    It is not an error, because the program might call hpcinit through an installed package.
    """
    path = source(config)
    workdir = job_spec.workdir(config)
    if path is None or _may_use_hpcinit(path, workdir):
        return
    spec = job_spec.make(config, str(workdir), path.name)
    settings = [*program_use.of_spec(spec, program_use.NOTHING).no_effect]
    if "seed" in settings and str(config.seed) in config.job.args:  # -- train.py --seed '${seed}'
        settings.remove("seed")
    if settings:
        yield (
            f"{path.name} and the modules beside it do not import hpcinit: {', '.join(settings)} will have no effect. "
            "Call hpcinit.init() and run.wrap() in the program (docs/your-script.md), or omit these settings"
        )


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
            if b"hpcinit" in content:
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
