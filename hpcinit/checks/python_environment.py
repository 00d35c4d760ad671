"""Checks, before the job is queued, that the ranks' Python exists and has hpcinit and torch. No Python is started."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcinit.base.text import expanded, home
from hpcinit.config.schema import Cluster, Config

SITE_PACKAGES = (
    "lib/python3*/site-packages",
    "lib64/python3*/site-packages",
    "lib/python3*/dist-packages",  # Debian's
    "local/lib/python3*/dist-packages",
)
# Files that make a package importable: the package or module itself, or the record of an editable install.
INSTALLED = ("{0}/__init__.py", "{0}.py", "{0}-*.dist-info", "{0}-*.egg-info", "{0}.egg-link")
NEEDS_TORCH = re.compile(
    r"^\s*(?:import|from)\s+(?:torch|hpcinit|deepspeed|lightning|pytorch_lightning)\b", re.MULTILINE
)
CHECKOUT = Path(__file__).parents[2]


def problems(config: Config, env: Mapping[str, str]) -> Iterator[str]:
    """Yield a message if the environment or its Python does not exist, or lacks hpcinit or torch.

    Nothing is imported.
    """
    cluster = config.cluster
    if config.container.image:
        return
    if found := list(_missing(cluster, env)):
        yield from found
    elif prefix := ranks_prefix(cluster, env):
        yield from _packages(config, env, prefix)
    elif not cluster.conda and not cluster.python:
        yield from _own_torch(config, env)


def ranks_prefix(cluster: Cluster, env: Mapping[str, str]) -> Path | None:
    """Return the top folder of the ranks' environment. Return None if there is none, or if its folder is unknown."""
    if cluster.python and "/" in cluster.python:
        return prefix_from(expanded(cluster.python))
    if cluster.venv:
        return expanded(cluster.venv)
    return conda_prefix(cluster.conda, env) if cluster.conda else None


def is_folder(environment: str) -> bool:
    """Return whether `environment` (the value of cluster.conda) is a folder instead of a name."""
    return "/" in environment


def conda_prefix(environment: str, env: Mapping[str, str]) -> Path | None:
    """Return the folder of a conda environment, or None if only its name is given and its folder is unknown."""
    if is_folder(environment):
        return expanded(environment)
    try:  # conda and mamba write the folder of each new environment there
        known = (home() / ".conda/environments.txt").read_text(errors="replace").splitlines()
    except OSError:
        known = []
    root = [Path(env["CONDA_EXE"]).parents[1]] if env.get("CONDA_EXE") else []
    likely = [*(one / "envs" / environment for one in (*root, home() / ".conda")), *map(Path, known)]
    if environment == "base":
        likely = root
    return next((one for one in likely if environment in (one.name, "base") and (one / "bin/python").exists()), None)


def conda_setup(environment: str) -> str:
    """Return a cluster.setup=[...] that activates a conda environment even if no conda command is on PATH."""
    return f'\'cluster.setup=[". ~/miniconda3/etc/profile.d/conda.sh", "conda activate {environment}"]\''


def _missing(cluster: Cluster, env: Mapping[str, str]) -> Iterator[str]:
    """Yield a message if the environment, the conda command or Python does not exist."""
    loads = bool(cluster.modules or cluster.setup)  # modules may add commands, and setup may change PATH
    places = []
    if cluster.venv:
        yield from _no_python("cluster.venv", cluster.venv, "a virtual environment")
        places = [expanded(cluster.venv) / "bin"]
    elif cluster.conda and is_folder(cluster.conda):
        yield from _no_python("cluster.conda", cluster.conda, "the folder of a conda environment")
        places = [expanded(cluster.conda) / "bin"]
    elif cluster.conda and not cluster.modules and not shutil.which("conda", path=env.get("PATH")):
        prefix = conda_prefix(cluster.conda, env) or f"/path/of/{cluster.conda}"
        yield (
            f"cluster.conda is {cluster.conda!r}, but there is no command conda on PATH: set cluster.conda to the "
            f"environment's folder, cluster.conda={prefix}, or load conda's module with cluster.modules, or replace "
            f"cluster.conda with {conda_setup(cluster.conda)}"
        )
        return
    name = cluster.python
    if not name:
        return
    if "/" in name:
        if not (Path(name).is_file() and os.access(name, os.X_OK)):
            yield f"cluster.python is {name!r}, expected a program that you can execute{elsewhere(Path(name))}"
    elif not loads and not (cluster.conda and not places):
        path = os.pathsep.join([*map(str, places), env.get("PATH", "")])
        if not shutil.which(name, path=path):
            yield f"cluster.python is {name!r}, which is not on PATH{elsewhere(Path(name))}"


def _no_python(key: str, folder: str, expected: str) -> Iterator[str]:
    python = expanded(folder) / "bin/python"
    if not os.access(python, os.X_OK):
        yield f"{key} is {folder!r}, expected {expected}: there is no {python}{elsewhere(python)}"


def elsewhere(path: Path) -> str:
    return f"; if {path} exists only on the compute nodes, set check_paths=false"


def _own_torch(config: Config, env: Mapping[str, str]) -> Iterator[str]:
    """Yield a message if the ranks would use the Python that submits the job, and this Python has no torch."""
    cluster = config.cluster
    variable = {**cluster.env, **config.job.env}.get("PYTHONPATH", "")
    folders = [*map(Path, sys.path), *map(Path, str(variable).split(os.pathsep)), expanded(config.job.workdir or ".")]
    if cluster.setup or cluster.modules or not _needs_torch(config) or installed("torch", folders):
        return
    others = [env.get("VIRTUAL_ENV", ""), env.get("CONDA_PREFIX", ""), ".venv", "venv"]
    near = (Path(one).absolute() for one in others if one)
    with_torch = next((str(one) for one in near if installed("torch", search_path(one, env))), "/path/of/environment")
    yield (
        f"the ranks would run {sys.executable}, the Python that runs hpcinit, but torch is not installed there: set "
        f"cluster.venv={with_torch}, or run {sys.executable} -m pip install torch, or set check_paths=false if the job "
        "gets torch from another place"
    )


def _packages(config: Config, env: Mapping[str, str], prefix: Path) -> Iterator[str]:
    """Yield a message if the environment in `prefix` lacks hpcinit, or lacks torch although the program needs it."""
    cluster = config.cluster
    folders = search_path(prefix, env)
    if not folders:  # not the layout of an environment: a wrapper script, for example
        return
    variables = {**cluster.env, **config.job.env}
    for value in (variables.get("PYTHONPATH", ""), env.get("PYTHONPATH", "")):
        folders += [Path(one) for one in str(value).split(os.pathsep) if one]
    folders.append(expanded(config.job.workdir or "."))  # `python -m` imports from it too
    missing = []
    if not cluster.setup:  # cluster.setup may change PYTHONPATH
        missing += ["hpcinit"] * (not installed("hpcinit", folders))
        # Modules of a site may contain torch.
        missing += ["torch"] * (not cluster.modules and _needs_torch(config) and not installed("torch", folders))
    if missing:
        names = " and ".join(missing)
        checkout = CHECKOUT if (CHECKOUT / "pyproject.toml").is_file() else "/path/of/hpcinit"
        packages = " ".join(str(checkout) if name == "hpcinit" else name for name in missing)
        are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        named = {"python": cluster.python if "/" in (cluster.python or "") else None, "venv": cluster.venv}
        key, value = next(((key, value) for key, value in named.items() if value), ("conda", cluster.conda))
        python = value if key == "python" else f"{prefix}/bin/python"
        yield (
            f"cluster.{key} is {value!r}, but {names} {are} not installed there: run {python} -m pip install "
            f"{packages}, or set check_paths=false if the job gets {them} from another place"
        )


def _needs_torch(config: Config) -> bool:
    """Return whether the program certainly imports torch: a line of its file does, or it is part of hpcinit."""
    job = config.job
    if (job.module or "").startswith("hpcinit.jobs."):
        return True
    name = job.script or (f"{job.module.replace('.', '/')}.py" if job.module else "")
    try:
        text = (expanded(job.workdir or ".") / name).read_text(errors="replace") if name else ""
    except OSError:
        return False
    return NEEDS_TORCH.search(text) is not None


def search_path(prefix: Path, env: Mapping[str, str]) -> list[Path]:
    """Return the folders from which the Python in `prefix` imports, or [] if `prefix` is not an environment.

    The function only reads files. It does not start that Python.
    """
    found = _site_packages(prefix)
    if not found:
        return []
    settings = prefix / "pyvenv.cfg"
    virtual = (
        dict(re.findall(r"^(\S+)\s*=\s*(.*?)\s*$", settings.read_text(), re.MULTILINE)) if settings.is_file() else {}
    )
    if virtual.get("include-system-site-packages", "true") == "true":
        found += _site_packages(Path(env.get("PYTHONUSERBASE") or home() / ".local"))
        if virtual.get("home"):
            found += _site_packages(Path(virtual["home"]).parent)
    return [*found, *(folder for one in found for folder in _path_files(one))]


def _site_packages(prefix: Path) -> list[Path]:
    return [folder for pattern in SITE_PACKAGES for folder in prefix.glob(pattern)]


def _path_files(folder: Path) -> Iterator[Path]:
    """Yield the folders that the *.pth files in `folder` add to Python's search path."""
    for file in folder.glob("*.pth"):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        yield from (folder / line.strip() for line in lines if line.strip() and not line.startswith(("#", "import")))


def installed(package: str, folders: Sequence[Path]) -> bool:
    """Return whether one of the folders contains the package."""
    return any(next(folder.glob(form.format(package)), None) for folder in folders for form in INSTALLED)


def prefix_from(python: Path) -> Path:
    """Return the top folder of the environment or installation that `python` belongs to."""
    if (python.parent.parent / "pyvenv.cfg").is_file():
        return python.parent.parent
    return python.resolve().parent.parent
