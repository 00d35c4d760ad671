"""Renders the lines that the batch script runs before the ranks start.

These lines load modules, activate the environment, set variables, read secrets, and run the user's own lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpcinit.base import quoting
from hpcinit.base.quoting import shell
from hpcinit.base.text import expanded
from hpcinit.checks import python_environment
from hpcinit.config import job_spec
from hpcinit.config.schema import Cluster, Config
from hpcinit.records import scratch
from hpcinit.submit.run_path import RunPath

# `set -x`, bash -x and SHELLOPTS would print every value; {...} 2>/dev/null hides this line from the trace as well.
QUIET = "{ hpcinit_flags=$-; set +x; } 2>/dev/null"
AS_BEFORE = "case $hpcinit_flags in *x*) set -x ;; esac"


def secret_lines(secrets: Mapping[str, str]) -> list[str]:
    """Return shell lines that set and export each secret. The value is read from a file."""
    if not secrets:
        return []
    read = []
    for name, place in secrets.items():
        path = str(expanded(place).absolute())
        error = quoting.shell(f"secrets.{name}: cannot read {path} on this node")
        read.append(f'{name}="$(cat -- {quoting.shell(path)})" || {{ echo {error} >&2; exit 1; }}; export {name}')
    return [QUIET, *read, AS_BEFORE]


# The bash of a batch script is not a login shell, but most sites export the function `module` as BASH_FUNC_module.
HAVE_MODULES = "type module > /dev/null 2>&1 || . /etc/profile"
NO_CONDA = (
    "cluster.conda is the name of an environment, but there is no conda command: set cluster.conda to the "
    "environment's folder, or load conda's module with cluster.modules, or replace cluster.conda with "
)
INTERFACE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def setup_names(config: Config) -> list[str]:
    """Return the sorted names of the environment variables that the config sets."""
    return sorted(
        {*config.cluster.env, *config.job.env, *config.secrets, *(INTERFACE if config.cluster.interface else ())}
    )


# The traps record the number of a line and the start of its command. `why` compares both with the script, because bash
# numbers the lines inside an eval differently. Line 1 is bash's EXIT trap, which is not recorded. Failures inside a
# sourced file are not recorded either. There, BASH_SOURCE has several items.
NOTE_LINES = (
    "# Record the line that runs, and the first line that fails, for hpcinit why.",
    """trap '[ "$LINENO" -le 1 ] || hpcinit_line="$LINENO ${BASH_COMMAND%%[!a-zA-Z0-9_./=-]*}"' DEBUG""",
    """trap 'case ${#BASH_SOURCE[@]} in 1) : "${hpcinit_failed:=$? $hpcinit_line}" ;; esac' ERR""",
)
NOTE_NO_LINES = "trap - DEBUG ERR; hpcinit_line=''"


def setup_lines(config: Config, run: RunPath, noted: bool = False) -> Iterator[str]:
    """Yield the lines of the set-up, block by block. Each block that is not empty starts with a comment.

    noted: whether exit.json records which of the user's lines failed first, and which line ended the script.
    """
    cluster = config.cluster
    blocks = {
        "The network interface and the folders of the cluster.": [*_interface(cluster), *_folders(cluster)],
        "The ports of comm.ports.": _variables(job_spec.ports_variable(config), {}),
        "Modules and the environment of Python.": _noted([*_modules(cluster), *_environment(cluster)], noted),
        "Variables of cluster.env and job.env.": _variables({**cluster.env, **config.job.env}, run.own_env),
        "Secrets, read from files when the job starts.": secret_lines(config.secrets),
        "Shell lines of cluster.setup.": _noted(cluster.setup, noted),
    }
    for about, block in blocks.items():
        if found := list(block):
            yield from ("", f"# {about}", *found)


def _noted(lines: Sequence[str], noted: bool) -> Sequence[str]:
    return [*NOTE_LINES, *lines, NOTE_NO_LINES] if noted and lines else lines


def _interface(cluster: Cluster) -> Iterator[str]:
    if cluster.interface:
        yield from (f"export {name}={shell(cluster.interface)}" for name in INTERFACE)


def _variables(env: Mapping[str, str], own: Mapping[str, Mapping[int, str]]) -> Iterator[str]:
    """Yield shell lines that set the variables `env` of the config.

    own: variables that differ between tasks of an array. For each variable: its value for every task's index.
    """
    yield from (f"export {name}={shell(value)}" for name, value in env.items() if name not in own)
    if own:
        yield "case $SLURM_ARRAY_TASK_ID in"
        for index in next(iter(own.values())):
            values = " ".join(f"{name}={shell(values[index])}" for name, values in own.items())
            yield f"  {index}) export {values} ;;"
        yield "esac"


def _folders(cluster: Cluster) -> Iterator[str]:
    """Yield lines that set the variables for the cluster's folders. SCRATCH, HF_HOME and TORCH_HOME are kept if set."""
    if cluster.scratch:
        yield _unless_set("SCRATCH", cluster.scratch)
    if cluster.cache:
        yield _unless_set("HF_HOME", f"{cluster.cache}/huggingface")
        yield _unless_set("TORCH_HOME", f"{cluster.cache}/torch")
    if cluster.local_disk:
        yield f"export {scratch.ENV_LOCAL_DISK}={shell(cluster.local_disk)}"


def _unless_set(name: str, value: str) -> str:
    return f'[ -n "${{{name}:-}}" ] || export {name}={shell(value)}'


def _modules(cluster: Cluster) -> Iterator[str]:
    if not (cluster.module_purge or cluster.module_paths or cluster.modules):
        return
    yield HAVE_MODULES
    if cluster.module_purge:
        yield "module purge"
    for place in cluster.module_paths:
        yield f"module use {shell(place)}"
    if cluster.modules:  # in one call, so that the module system can order them
        load = " ".join(shell(name) for name in cluster.modules)
        yield f"module load {load} || {_end('cluster.modules: `module load` failed')}"


def _environment(cluster: Cluster) -> Iterator[str]:
    if cluster.venv:
        activate = shell(f"{cluster.venv}/bin/activate")
        yield f". {activate} || {_end('cluster.venv cannot be activated')}"
    if cluster.conda and python_environment.is_folder(cluster.conda):  # needs no conda command
        yield f"export CONDA_PREFIX={shell(cluster.conda)}"
        yield f'[ -x "$CONDA_PREFIX/bin/python" ] || {_end("cluster.conda: the folder has no bin/python")}'
        yield 'export PATH="$CONDA_PREFIX/bin:$PATH"'
        yield 'for script in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do [ ! -r "$script" ] || . "$script"; done'
    elif cluster.conda:
        missing = f"{NO_CONDA}{python_environment.conda_setup(cluster.conda)};"
        yield f"command -v conda > /dev/null || {_end(missing)}"
        yield 'eval "$(conda shell.bash hook)"'
        yield f"conda activate {shell(cluster.conda)} || {_end('cluster.conda cannot be activated')}"


def _end(why: str) -> str:
    return "{ echo " + shell(f"hpcinit: error: {why}") + ' "on $(hostname)" >&2; exit 1; }'
