"""Check a shell script that the job runs: it must neither be a batch script nor start ranks itself."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from hpcinit.base.text import expanded
from hpcinit.config.resources import ranks_per_node
from hpcinit.config.schema import Config

SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
SHEBANG = re.compile(rb"#!\s*\S*/(?:env\s+(?:-S\s+)?)?(?:\S*/)?(?:sh|bash|dash|zsh|ksh)\b")
LARGEST = 2**20  # bytes; a larger file is not a script
# '  time srun ...', 'x=1 torchrun ...', 'then mpirun ...', 'a && "$env/bin/torchrun" ...': the start of a command
START = (
    r"(?:^|[;&|({!]|\$\(|\b(?:then|do|else|exec|time|nohup|env|command|eval)\b)\s*"
    r"(?:\w+=\S*\s+)*[\"']?(?:[\w.${}~/-]*/)?"
)
LAUNCHER = re.compile(
    START + r"(?:(?P<name>srun|torchrun|mpirun|mpiexec(?:\.hydra)?|horovodrun|deepspeed|accelerate\s+launch)"
    r"|python[\d.]*\s+(?:-\w\s+)*-m\s+(?P<module>torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch"
    r"|deepspeed\.launcher\.runner))[\"']?(?=\s|$)"
)
# With these options torchrun and others know of the other nodes, and one process per node forms one training run.
OF_SEVERAL_NODES = re.compile(r"--(?:nnodes|num[-_]machines|num[-_]nodes|hostfile|node[-_]rank)\b")


@dataclass(frozen=True)
class Found:
    """A line of the script. launcher: the command in it that starts ranks."""

    number: int
    text: str
    launcher: str


def shell_script_problems(config: Config) -> Iterator[str]:
    """Yield a message for a batch script, or else for the first line that starts ranks."""
    job = config.job
    if not job.check_script or not (source := _source(job.command, list(job.args), expanded(job.workdir or "."))):
        return
    name, text = source
    launches = list(launchers(text))
    if (directive := first_directive(text)) is not None:
        yield (
            f"{name} is a batch script: line {directive.number} is '{directive.text}'. Expected the program that runs "
            "on every rank: hpcinit starts the whole file once per rank, and Slurm ignores its #SBATCH lines. "
            f"Submit the program itself, {_program(launches)}, and set nodes, time_min and so on before --"
        )
        return
    ranks = ranks_per_node(config)
    for found in launches:
        of_slurm = found.launcher == "srun"
        if of_slurm and "--overlap" in found.text:
            continue
        if not of_slurm and (config.nodes * ranks == 1 or (ranks == 1 and OF_SEVERAL_NODES.search(found.text))):
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
            f"Submit the program itself, {_program([found])}. If the job does not run this line: job.check_script=false"
        )
        return


def first_directive(text: str) -> Found | None:
    """Return the first #SBATCH line before the first command, where sbatch stops reading."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            return Found(number, line.strip(), "")
        if line.strip() and not line.lstrip().startswith("#"):
            break
    return None


def launchers(text: str) -> Iterator[Found]:
    """Yield the lines that call a launcher, each with its continuation lines."""
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        whole = line
        while whole.endswith("\\") and (following := next(lines, None)):
            whole = whole[:-1] + " " + following[1].strip()
        if whole.lstrip().startswith(("#", "echo ", "printf ")):
            continue
        if found := LAUNCHER.search(whole):
            launcher = found["name"] or f"python -m {found['module']}"
            yield Found(number, " ".join(whole.split()), " ".join(launcher.split()))


def _source(command: str | None, args: Sequence[str], workdir: Path) -> tuple[str, str] | None:
    """Return the name and the text of the shell script that the job runs, or None for another program."""
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
    """Return the content of a script, or None for a file that is missing, unreadable, large or binary."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return None
        text = path.read_bytes()
    except OSError:
        return None
    return None if b"\0" in text else text


def _program(launches: Sequence[Found]) -> str:
    """Return 'as in: -- train.py --lr 3', with the program that the first of these lines starts."""
    for found in launches:
        try:
            arguments = shlex.split(found.text)
        except ValueError:
            continue
        at = next((at for at, argument in enumerate(arguments) if argument.endswith(".py")), None)
        if at is not None:
            rest = (part for part in arguments[at:])
            program = [part for part in rest if part not in {"&", "||", "&&", ";"}]
            return f"as in: -- {' '.join(_shown(part) for part in program)}"
    return "as in: -- train.py"


def _shown(argument: str) -> str:
    return argument if "$" in argument and " " not in argument else shlex.quote(argument)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
