"""Variables that protect a run: where a hang leaves its traces, and caches that no other job shares.

They are set only where the user has not, before torch first looks at them, and each is named in one line.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from hpcinit.records import scratch

ENV_SET = "HPCINIT_SAFEGUARDS"  # "JOB NAME NAME...": what was set here, so that a job within this job knows
FLIGHT = "flight"  # in the run folder: flight/JOB.rank_N, for `torchfrtrace FOLDER/flight --prefix JOB.rank_`


@dataclass(frozen=True)
class _Variable:
    """also: other names under which a user may have decided the same, such as one of an earlier torch."""

    name: str
    value: str
    also: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        return {self.name, *self.also}


def _recorder(dumps: str) -> list[_Variable]:
    """torch's flight recorder. Left alone it writes to one place for all jobs, in the shared home:
    ~/.cache/torch/comm_lib_trace_rank_N. It makes no folder that it is given."""
    found = [
        # torch's default as long as there is one ("a temporary option", says ProcessGroupNCCL.hpp): a rank whose
        # collective failed ends, rather than train on with what it has.
        _Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", also=("NCCL_ASYNC_ERROR_HANDLING",)),
        _Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        _Variable("TORCH_FR_BUFFER_SIZE", "2000", also=("TORCH_NCCL_TRACE_BUFFER_SIZE",)),
    ]
    if dumps:
        found.append(_Variable("TORCH_FR_DUMP_TEMP_FILE", dumps, also=("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",)))
    return found


def _caches(folder: Path) -> list[_Variable]:
    """A build that was killed leaves a lock for which every later one waits without end
    (https://github.com/microsoft/DeepSpeed/issues/5205), and a home on NFS makes ranks race."""
    return [
        _Variable("TORCH_EXTENSIONS_DIR", f"{folder}/torch_extensions"),
        _Variable("TRITON_CACHE_DIR", f"{folder}/triton", also=("TRITON_HOME",)),
        _Variable("TORCHINDUCTOR_CACHE_DIR", f"{folder}/inductor"),
    ]


CACHE_ROOM = 64 * 2**20  # bytes free on the disk of the caches: what a few compiled kernels need
CACHES = tuple(variable.name for variable in _caches(Path()))


def safeguards(env: Mapping[str, str], caches: Path | None, dumps: str) -> dict[str, str]:
    """The variables to add to `env`, and none that it has already, under this or another of its names.

    caches: a private folder on this node's disk, None if there is none. dumps: the flight recorder's files without the
    rank at their end, '' if they have no place.
    """
    found = {}
    for variable in _recorder(dumps) + (_caches(caches) if caches else []):
        if not variable.names & env.keys():
            found[variable.name] = variable.value
    return found


_applied = False


def apply(environ: MutableMapping[str, str], folder: Path | None, job: str) -> tuple[str, ...]:
    """Add the safeguards to `environ` and return their names; () if this process or this job has done so before.

    Call it before a process group is made and before anything is compiled: torch reads each variable at its first use.
    What was set for another job, around this one, is set anew. A disk that is full or not ours is no error: what needs
    it is left out, and describe() says so.

    folder: the run folder, None without a submission. job: World.job, which names this start and no other, so that a
    restart finds neither the locks nor the half-built files of the start before.
    """
    global _applied  # noqa: PLW0603 - what is set for a process is set once, whoever asks: hpcinit.run or init
    before, *names = environ.get(ENV_SET, "").split(" ")
    if _applied or before == scratch.folder_name(job):
        return ()
    _applied = True
    for name in names:
        environ.pop(name, None)
    added = safeguards(environ, _cache_folder(environ, job), _dumps(environ, folder, job))
    environ.update(added)
    environ[ENV_SET] = " ".join((scratch.folder_name(job), *added))
    return tuple(added)


def _cache_folder(environ: Mapping[str, str], job: str) -> Path | None:
    if all(name in environ for name in CACHES):
        return None
    try:
        if mine := scratch.base(environ):  # what killed jobs have left there may be what fills the disk
            scratch.sweep(mine)
        parent = scratch.base(environ, CACHE_ROOM)
        return scratch.take(parent, job) if parent else None
    except OSError:
        return None


def _dumps(environ: Mapping[str, str], folder: Path | None, job: str) -> str:
    parent = folder or scratch.base(environ)
    if parent is None:
        return ""
    try:
        (parent / FLIGHT).mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return ""
    return f"{parent / FLIGHT / scratch.folder_name(job)}.rank_"


def describe(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The one line for the log, '' if nothing was set. It shows what was set, and nothing that was given."""
    if not names:
        return ""
    line = "set for this run, where you had not: " + " ".join(f"{name}={environ[name]}" for name in names)
    if not any(name in environ for name in CACHES):
        line += (
            "; caches of compiled code stay shared: no folder in TMPDIR, /tmp or /var/tmp is private, executable and "
            f"has {CACHE_ROOM >> 20} MB free"
        )
    return line
