"""What the batch script does before the ranks start: modules, environment, variables, the user's own lines."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from hpcinit.config.schema import Cluster, Config
from hpcinit.facts import runfolder, scratch
from hpcinit.facts.quoting import shell
from hpcinit.submission import secrets, shell_blocks
from hpcinit.submission.run_path import RunPath

# A batch script's bash is no login shell; most sites hand the function `module` down all the same, as BASH_FUNC_module.
HAVE_MODULES = "type module > /dev/null 2>&1 || . /etc/profile"


INTERFACE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def names(config: Config) -> list[str]:
    """The variables that the config sets, sorted."""
    return sorted(
        {*config.cluster.env, *config.job.env, *config.secrets, *(INTERFACE if config.cluster.interface else ())}
    )


def lines(config: Config, run: RunPath) -> Iterator[str]:
    """Yield the lines, with a comment for each block that has any."""
    cluster = config.cluster
    blocks = {
        "The network interface and the folders of the cluster.": [*_interface(cluster), *_folders(cluster)],
        "Modules and the environment of Python.": [*_modules(cluster), *_environment(cluster)],
        "Variables of cluster.env and job.env.": _variables({**cluster.env, **config.job.env}, run.own_env),
        "Secrets, read from files when the job starts.": secrets.lines(config.secrets),
        "cluster.setup, shell by design.": cluster.setup,
    }
    for about, block in blocks.items():
        if found := list(block):
            yield from ("", f"# {about}", *found)


def _interface(cluster: Cluster) -> Iterator[str]:
    if cluster.interface:
        yield from (f"export {name}={shell(cluster.interface)}" for name in INTERFACE)


def _variables(env: Mapping[str, str], own: Container[str]) -> Iterator[str]:
    """Set the variables of cluster.env and job.env. own: a task of an array reads those from its own file."""
    sourced = False
    for name, value in env.items():
        if name not in own:
            yield f"export {name}={shell(value)}"
        elif not sourced:
            yield from shell_blocks.block("trusted")
            yield f'hpcinit_source "${runfolder.ENV_FOLDER}/{runfolder.ENV}"'
            sourced = True


def _folders(cluster: Cluster) -> Iterator[str]:
    """What the user's own environment says of them wins."""
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
    if cluster.modules:  # in one call, as it is typed: modules know each other's order
        load = " ".join(shell(name) for name in cluster.modules)
        yield f"module load {load} || {_end('cluster.modules: `module load` failed')}"


def _environment(cluster: Cluster) -> Iterator[str]:
    if cluster.venv:
        activate = shell(f"{cluster.venv}/bin/activate")
        yield f". {activate} || {_end('cluster.venv cannot be activated')}"
    if cluster.conda:
        yield 'eval "$(conda shell.bash hook)"'
        yield f"conda activate {shell(cluster.conda)} || {_end('cluster.conda cannot be activated')}"


def _end(why: str) -> str:
    return "{ echo " + shell(f"hpcinit: error: {why}") + ' "on $(hostname)" >&2; exit 1; }'
