"""Sets environment variables that protect a run: a flight recorder for hangs, and kernel caches on the node's own disk.

The variables are set before torch reads them. Variables that the user has set stay unchanged. startup.txt in the run
folder lists the variables that hpcinit set.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from hpcinit.records import scratch

ENV_SET = "HPCINIT_SAFEGUARDS"  # "JOB NAME NAME...": the variables set for JOB. A job that starts inside JOB reads this
AMD_DEVICE = Path("/dev/kfd")  # the driver of AMD's GPUs
FLIGHT = "flight"  # in the run folder: files flight/JOB.rank_N, for `torchfrtrace FOLDER/flight --prefix JOB.rank_`


@dataclass(frozen=True)
class _Variable:
    """An environment variable to set.

    also: other names with the same effect, such as the name in an earlier torch.
    """

    name: str
    value: str
    also: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        return {self.name, *self.also}


def _recorder(dumps: str) -> list[_Variable]:
    """Return the variables of torch's flight recorder.

    dumps: the path of the files that the recorder writes. torch appends the rank. The folder must exist. With '', torch
        uses ~/.cache/torch/comm_lib_trace_rank_N, and each job of the user overwrites these files.
    """
    found = [
        # 3 is torch's current default ("a temporary option" in ProcessGroupNCCL.hpp): a rank whose collective failed
        # exits instead of continuing with wrong values.
        _Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", also=("NCCL_ASYNC_ERROR_HANDLING",)),
        # Without these two, no file shows in which collective NCCL timed out, and for which rank it waited.
        _Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        _Variable("TORCH_FR_BUFFER_SIZE", "2000", also=("TORCH_NCCL_TRACE_BUFFER_SIZE",)),
    ]
    if dumps:
        found.append(_Variable("TORCH_FR_DUMP_TEMP_FILE", dumps, also=("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",)))
    return found


def _pipe(folder: Path) -> _Variable:
    """Return the variable that makes torch create a pipe, FOLDER/flight_N.pipe, for each rank N.

    A rank dumps its flight recorder when a byte is written to its pipe. If torch can't create the pipe, the rank fails.
    The folder is therefore on the node's own disk.
    """
    return _Variable("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", f"{folder}/flight_")


def _caches(kept: Path) -> list[_Variable]:
    """Return the variables that move the kernel caches to the folder `kept`, which outlives the job.

    The default folders cause failures:
    - Triton's cache is in the home, where ranks of several nodes race over NFS.
    - Inductor's is /tmp/torchinductor_USER, which another user can create first.
    - MIOpen's is a database in the home. Its locks fail on Lustre.

    The cache of torch's C++ extensions is not moved: a compute node may have no compiler to build them again.
    """
    found = [
        _Variable("TRITON_CACHE_DIR", f"{kept}/triton", also=("TRITON_HOME",)),
        _Variable("TORCHINDUCTOR_CACHE_DIR", f"{kept}/inductor"),
    ]
    if AMD_DEVICE.exists():
        found += [_Variable(name, f"{kept}/miopen") for name in ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR")]
    return found


CACHE_ROOM = 64 * 2**20  # bytes that must be free on the disk of the caches: a few compiled kernels
CACHES = tuple(variable.name for variable in _caches(Path()))


def safeguards(env: Mapping[str, str], caches: tuple[Path, Path] | None, dumps: str) -> dict[str, str]:
    """Return the variables to set. Skip a variable that `env` already sets under its current or an older name.

    caches: two private folders on this node's disk, one for this job and one for all jobs, or None if there are none.
    dumps: the path of the flight recorder's files, to which torch appends the rank. '' if no folder is writable.
    """
    found = {}
    for variable in _recorder(dumps) + ([*_caches(caches[1]), _pipe(caches[0])] if caches else []):
        if not variable.names & env.keys():
            found[variable.name] = variable.value
    return found


_applied = False


def apply(environ: MutableMapping[str, str], folder: Path | None, job: str) -> tuple[str, ...]:
    """Add the safeguards to `environ` and return their names, or () if this process or job already has them.

    Call this before torch creates a process group or compiles anything, because torch reads each variable when it first
    needs it. In a job that was started inside another job, the outer job's safeguards are replaced. If the node has no
    private folder with free space, the caches are not moved, and describe() reports that.

    folder: the run folder, or None for a program that was not submitted.
    job: World.job. It differs between attempts, so a restart does not find locks or incomplete files of the previous
        attempt.
    """
    global _applied  # noqa: PLW0603 - once per process, for both callers: hpcinit.run and init
    before, *names = environ.get(ENV_SET, "").split(" ")
    if _applied or before == scratch.folder_name(job):
        return ()
    _applied = True
    for name in names:
        environ.pop(name, None)
    added = safeguards(environ, _cache_folders(environ, job), _dumps(environ, folder, job))
    environ.update(added)
    environ[ENV_SET] = " ".join((scratch.folder_name(job), *added))
    return tuple(added)


def _cache_folders(environ: Mapping[str, str], job: str) -> tuple[Path, Path] | None:
    if all(name in environ for name in CACHES):
        return None
    try:
        if mine := scratch.base(environ):  # leftovers of killed jobs may fill the disk
            scratch.sweep(mine)
        parent = scratch.base(environ, CACHE_ROOM)
        return (scratch.take(parent, job), scratch.kept(parent)) if parent else None
    except OSError:
        return None


def _dumps(environ: Mapping[str, str], folder: Path | None, job: str) -> str:
    parent = folder or scratch.base(environ)
    if parent is None:
        return ""
    try:
        if folder is None:
            scratch.take(parent, job)  # while this process runs, `clean --outside` sees that it uses `parent`
        (parent / FLIGHT).mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return ""
    return f"{parent / FLIGHT / scratch.folder_name(job)}.rank_"


def describe(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return text that lists the variables that hpcinit set, or '' if it set none.

    The user's variables are not listed.
    """
    if not names:
        return ""
    lines = ["defaults applied (set the variable yourself to override):", *(f"  {n}={environ[n]}" for n in names)]
    if not any(name in environ for name in CACHES):
        lines.append(
            "kernel caches stay in their default folders: none of TMPDIR, /tmp and /var/tmp has a private folder that "
            f"allows executables and has {CACHE_ROOM >> 20} MB free"
        )
    return "\n".join(lines)
