"""Checks that the program exists, and that it is not a launcher such as torchrun, which starts ranks itself.

A shell script that calls a launcher is refused too.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from hpcinit.base.text import expanded
from hpcinit.checks.program_source import PYTHON
from hpcinit.config.resources import ranks_per_node
from hpcinit.config.schema import Config

OF_SLURM = ("srun", "sbatch", "salloc")  # srun in a step waits forever for cores that the step itself uses
OF_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "horovodrun")
OF_TORCH = ("torchrun", "deepspeed", "accelerate")
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
SHEBANG = re.compile(rb"#!\s*\S*/(?:env\s+(?:-S\s+)?)?(?:\S*/)?(?:sh|bash|dash|zsh|ksh)\b")
LARGEST = 2**20  # bytes; a larger file is not a script
# '  time srun ...', 'x=1 torchrun ...', 'then mpirun ...', 'a && "$env/bin/torchrun" ...': the start of a command
START = (
    r"(?:^|[;&|({!]|\$\(|\b(?:then|do|else|exec|time|nohup|env|command|eval)\b)\s*"
    r"(?:\w+=\S*\s+)*[\"']?(?:[\w.${}~/-]*/)?"
)
LAUNCHER = re.compile(
    START + rf"(?:(?P<name>srun|torchrun|deepspeed|accelerate\s+launch|{'|'.join(map(re.escape, OF_MPI))})"
    rf"|python[\d.]*\s+(?:-\w\s+)*-m\s+(?P<module>{'|'.join(map(re.escape, MODULES))}))[\"']?(?=\s|$)"
)
# With these options, the launchers of all nodes start one training run together.
OF_SEVERAL_NODES = re.compile(r"--(nnodes|num[-_]machines|num[-_]nodes|hostfile|node[-_]rank)\b")


def problems(config: Config) -> Iterator[str]:
    """Yield a message for each problem with the program, such as a missing file or a launcher."""
    job = config.job
    given = [name for name in ("script", "module", "command") if getattr(job, name)]
    if len(given) != 1:
        yield (
            f"job has {' and '.join(given) or 'none of script, module, command'}, expected exactly one: set "
            "job=NAME, or put the program after --, as in: hpcinit submit nodes=2 -- train.py"
        )
        return
    workdir = expanded(job.workdir or ".")
    if not workdir.is_dir():
        yield f"job.workdir is {str(workdir)!r}, expected a folder that exists"
    elif job.script and not (workdir / job.script).is_file():
        path = (workdir / job.script).absolute()
        yield f"the program (job.script) is {job.script!r}, expected a file: {path} does not exist{_close(path)}"
    elif job.command:
        yield from _command(job.command, workdir)
        if not config.container.image:  # the file may be in the image
            yield from _for_python(job.command, job.args, workdir)
    yield from _nested_launcher(config)
    if workdir.is_dir():
        yield from _shell_script(config, workdir)


def _close(path: Path) -> str:
    """Return a suggestion such as '; did you mean train.py?' if the folder has a file with a similar name, or ''."""
    near = difflib.get_close_matches(path.name, [one.name for one in path.parent.glob("*.py")], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _for_python(command: str, args: Sequence[str], workdir: Path) -> Iterator[str]:
    """Yield a message if Python's first argument is a missing file, as in `-- python trian.py`.

    An absolute path is skipped, because the file may exist only on the nodes.
    """
    first = str(next(iter(args), ""))
    path = (workdir / first).absolute()
    if PYTHON.fullmatch(Path(command).name) and first.endswith(".py") and not (first[0] == "/" or path.is_file()):
        yield f"job.args has {first!r}, expected a file: {path} does not exist{_close(path)}"


def _command(command: str, workdir: Path) -> Iterator[str]:
    """Yield a message if `command` is a path that can't be run.

    A bare name isn't checked, because the nodes' PATH may differ from ours.
    """
    path = workdir / command
    if "/" not in command and command not in {".", ".."}:
        if path.is_file() and shutil.which(command) is None:
            how = f"./{command}" if os.access(path, os.X_OK) else f"bash {command}"
            yield f"job.command is {command!r}, which is not on PATH; to run {path.absolute()}: -- {how}"
        return
    if not path.exists():
        why = "does not exist"
    elif path.is_dir():
        why = "is a folder"
    elif not os.access(path, os.X_OK):
        why = f"is not executable; run chmod +x on it, or name its interpreter, as in: -- bash {command}"
    else:
        return
    yield f"job.command is {command!r}, expected an executable file: {path.absolute()} {why}"


def _nested_launcher(config: Config) -> Iterator[str]:
    """Yield a message if the program is a launcher, because every rank would then start more ranks."""
    job = config.job
    given, starter, args = _starter(job.command, job.module, list(job.args))
    ranks = ranks_per_node(config)
    if not starter or (starter not in OF_SLURM and _fits(config, " ".join(args))):
        return
    agents = "" if starter in OF_SLURM + OF_MPI else "; to use torchrun's agents: launch=torchrun"
    what = (
        "would wait forever for nodes that the job already uses"
        if starter in OF_SLURM
        else "would be a separate training run"
    )
    yield (
        f"{given}: it starts its own ranks, but hpcinit already starts one process per rank "
        f"({config.nodes} node{'s' * (config.nodes != 1)} x {ranks}), so every rank {what}. "
        f"Submit the program itself: {_program(args)}{agents}"
    )


def _starter(command: str | None, module: str | None, args: Sequence[str]) -> tuple[str, str, Sequence[str]]:
    """Return the program as the user gave it, the launcher's name (or ''), and the launcher's arguments."""
    name = PurePath(command or "").name
    if PYTHON.fullmatch(name) and "-m" in args[:2]:
        at = args.index("-m") + 1
        module, args = "".join(args[at : at + 1]), args[at + 1 :]
        return f"job.command is '{name} -m {module}'", MODULES.get(module, ""), args
    if module:
        return f"job.module is {module!r}", MODULES.get(module, ""), args
    known = name in OF_SLURM + OF_MPI + OF_TORCH and not (name == "accelerate" and args[:1] != ["launch"])
    return f"job.command is {name!r}", name if known else "", args


def _fits(config: Config, command: str) -> bool:
    """Return whether a launcher is allowed in `command`.

    A launcher is allowed in a job with one rank. With one rank per node, it is allowed if its arguments describe the
    other nodes.
    """
    ranks = ranks_per_node(config)
    return config.nodes * ranks == 1 or (ranks == 1 and OF_SEVERAL_NODES.search(command) is not None)


def _program(*commands: Sequence[str]) -> str:
    """Return what to type to submit the Python script itself, as in '-- train.py --lr 3'.

    commands: command lines; the first one that contains a Python script is used.
    """
    for arguments in commands:
        at = next((at for at, argument in enumerate(arguments) if argument.endswith(".py")), None)
        if at is not None:
            program = [part for part in arguments[at:] if part not in {"&", "||", "&&", ";"}]
            return f"-- {' '.join(map(_quoted, program))}"
    return "-- train.py"


def _quoted(argument: str) -> str:
    return argument if "$" in argument and " " not in argument else shlex.quote(argument)


@dataclass(frozen=True)
class ScriptLine:
    """A line of a shell script.

    launcher: the command in this line that starts ranks.
    """

    number: int
    text: str
    launcher: str

    @property
    def words(self) -> Sequence[str]:
        """Return the line, split into arguments as by a shell, or () if its quotes are invalid."""
        try:
            return shlex.split(self.text)
        except ValueError:
            return ()


def _shell_script(config: Config, workdir: Path) -> Iterator[str]:
    """Yield a message if the job runs a batch script, or a shell script that starts ranks itself."""
    job = config.job
    if not job.check_script or not (source := shell_script(job.command, list(job.args), workdir)):
        return
    name, text = source
    launches = list(launchers(text))
    if (directive := first_directive(text)) is not None:
        yield (
            f"{name} is a batch script: line {directive.number} is '{directive.text}'. Expected the program that runs "
            "on every rank: hpcinit starts the whole file once per rank, and Slurm ignores its #SBATCH lines. "
            f"Submit the program itself, as in: {_program(*(one.words for one in launches))}, and set nodes, time_min "
            "and so on before --"
        )
        return
    ranks = ranks_per_node(config)
    for found in launches:
        of_slurm = found.launcher == "srun"
        if of_slurm and "--overlap" in found.text:
            continue
        if not of_slurm and _fits(config, found.text):
            continue
        effect = (
            "would wait forever for resources that the step already uses"
            if of_slurm
            else "would start a separate training run"
        )
        yield (
            f"{name} starts ranks itself, with {found.launcher} in line {found.number}: '{_short(found.text)}'. "
            f"hpcinit already starts the script once per rank, {config.nodes} "
            f"node{'s' * (config.nodes != 1)} x {ranks}, and each copy {effect}. "
            f"Submit the program itself, as in: {_program(found.words)}. If the job does not run this line, add "
            "job.check_script=false"
        )
        return


def first_directive(text: str) -> ScriptLine | None:
    """Return the first #SBATCH line, or None. Stop reading at the first command, as sbatch does."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            return ScriptLine(number, line.strip(), "")
        if line.strip() and not line.lstrip().startswith("#"):
            break
    return None


def launchers(text: str) -> Iterator[ScriptLine]:
    """Yield each line that calls a launcher. Continuation lines are joined to it."""
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        whole = line
        while whole.endswith("\\") and (following := next(lines, None)):
            whole = whole[:-1] + " " + following[1].strip()
        if whole.lstrip().startswith(("#", "echo ", "printf ")):
            continue
        if found := LAUNCHER.search(whole):
            launcher = found["name"] or f"python -m {found['module']}"
            yield ScriptLine(number, " ".join(whole.split()), " ".join(launcher.split()))


def shell_script(command: str | None, args: Sequence[str], workdir: Path) -> tuple[str, str] | None:
    """Return the name and the text of the shell script that the job runs, or None if it runs another program."""
    if not command:
        return None
    if PurePath(command).name in SHELLS:
        options = [argument for argument in args if argument.startswith("-")]
        rest = [argument for argument in args if not argument.startswith("-")]
        if not rest:
            return None
        if any(re.fullmatch(r"-[a-z]*c[a-z]*", option) for option in options):
            return f"the text after {PurePath(command).name} -c", rest[0]
        text = _read(workdir / rest[0])
        return (repr(rest[0]), text.decode(errors="replace")) if text is not None else None
    text = _read(workdir / command) if "/" in command else None
    is_shell = text is not None and (SHEBANG.match(text) or PurePath(command).suffix in (".sh", ".sbatch", ".slurm"))
    return (repr(command), text.decode(errors="replace")) if text is not None and is_shell else None


def _read(path: Path) -> bytes | None:
    """Return the content of a script, or None if it is missing, unreadable, too large or binary."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return None
        text = path.read_bytes()
    except OSError:
        return None
    return None if b"\0" in text else text


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
