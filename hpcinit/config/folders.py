"""Finds the folders with YAML files, and the default cluster.

The folders are ./conf, $HPCINIT_CONF, ~/.config/hpcinit, and the package's own. If several contain the same file, the
first folder wins. The default cluster is $HPCINIT_CLUSTER, or else the cluster in settings.yaml in one of the user's
folders, or else this machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from hpcinit.base import quoting, safe_files
from hpcinit.base.errors import ConfigError
from hpcinit.base.text import home
from hpcinit.config.schema import MISSING

MOST_PROBLEMS = 3  # further problems are only counted
SETTINGS = "settings"  # settings.yaml is not a config, but contains the default cluster


def folder() -> Path:
    """Return the package's own folder of configs: inside the installed package, or beside it in a checkout."""
    inside = Path(__file__).parent.parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent.parent / "conf"


def user_folders() -> list[Path]:
    """Return the existing folders with the user's own YAML files, in the order in which they are searched.

    Raise ConfigError if HPCINIT_CONF is not a folder, if other users can write to one of the folders, or if the current
    folder was deleted.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was deleted: cd to a folder that exists") from None
    named = os.environ.get("HPCINIT_CONF")
    places = [Path("conf"), Path(named) if named else None, home() / ".config/hpcinit"]
    found = [place.absolute() for place in places if place is not None and place.is_dir()]
    if named and not Path(named).is_dir():
        raise ConfigError(f"HPCINIT_CONF is {named!r}, expected a folder that exists")
    chosen = Path(named).absolute() if named else None
    if problems := [
        problem for place in found for problem in _problems(place, chosen is not None and place.samefile(chosen))
    ]:
        raise ConfigError(*problems)
    return found


@cache
def _problems(place: Path, named: bool) -> tuple[str, ...]:
    """Return why the YAML files in `place` can't be trusted, or () if they can.

    This matters because a job runs cluster.setup from these files as shell commands of this user.

    named: whether HPCINIT_CONF names the folder. Then its owner and group are trusted too, because a site's folder
    often belongs to a software account.
    """
    if place.samefile(folder()):  # the Python code in this folder is already running
        return ()
    owners = (place.stat().st_uid,) if named else ()
    advice = f"if you trust these users, set HPCINIT_CONF={quoting.shell(str(place))}"
    found = []
    for path in _below(place):
        with suppress(OSError):  # a broken link
            found.append(safe_files.path_ownership_problems(path, advice, owners=owners, named=named))
    first, *more = [problem for problem in found if problem] or [""]
    if len(more) > MOST_PROBLEMS:
        rest = f"and {len(more) - MOST_PROBLEMS} more in {place}: chmod -R go-w {quoting.shell(str(place))}; {advice}"
        more = [*more[:MOST_PROBLEMS], rest]
    return tuple(problem for problem in (first, *more) if problem)


def _below(place: Path) -> Iterator[Path]:
    """Yield the folder `place`, and all folders and YAML files below it. Follow links, as Hydra does."""
    seen = set()
    for top, names, files in os.walk(place, followlinks=True):
        real = os.path.realpath(top)
        if real in seen:
            names.clear()
            continue
        seen.add(real)
        yield Path(top)
        yield from (Path(top, file) for file in files if file.endswith((".yaml", ".yml")))


def choices(group: str) -> list[str]:
    """Return the names of the YAML files in a config group, without .yaml.

    For the group '', return the names of the primary configs.
    """
    found = {path.stem for place in [*user_folders(), folder()] for path in (place / group).glob("*.yaml")}
    return sorted(found - {SETTINGS} if not group else found)


def find(config: str) -> str:
    """Return the path of a config's file, relative to the current folder if possible.

    If the config 'cluster/mini' has no file, return 'cluster/mini.yaml'.
    """
    for place in [*user_folders(), folder()]:
        if (path := place / f"{config}.yaml").is_file():
            return shown(path)
    return f"{config}.yaml"


def shown(path: str | Path) -> str:
    """Return the path for a message. A path inside the current folder is made relative to that folder."""
    here = Path.cwd()
    return str(Path(path).relative_to(here) if Path(path).is_relative_to(here) else path)


CLUSTER_VARIABLE = "HPCINIT_CLUSTER"
LOCAL_CLUSTER = "local"


def default_cluster() -> tuple[str, str]:
    """Return the default cluster and the variable or file that sets it. Return ('', '') if none is set.

    Raise ConfigError if the file can't be read or if user_folders() raises it.
    """
    if name := os.environ.get(CLUSTER_VARIABLE):
        return name, CLUSTER_VARIABLE
    for place in user_folders():
        path = place / f"{SETTINGS}.yaml"
        if path.is_file():
            return _read(path), str(path)
    return "", ""


def settings_file() -> Path:
    """Return the path of the user's own settings file."""
    return home() / ".config/hpcinit" / f"{SETTINGS}.yaml"


def write_default_cluster(name: str) -> Path:
    """Write `name` to the user's settings file as the default cluster. Return the file's path.

    Raise OSError if the file can't be written.
    """
    path = settings_file()
    safe_files.make_folders(path.parent)
    safe_files.write_atomically(path, f"# The cluster of `hpcinit submit` without cluster=...\ncluster: {name}\n")
    return path


def no_cluster_refusal() -> str:
    """Return the error message for a request without a cluster on a machine with sbatch.

    Return '' if there is no sbatch: the job then runs on this machine.
    """
    if shutil.which("sbatch") is None:
        return ""
    known = ", ".join(choices("cluster"))
    return (
        f"no cluster is chosen, and sbatch is on PATH: add cluster=NAME, one of: {known}; cluster=local runs the job "
        f"on this machine. To set a default: export {CLUSTER_VARIABLE}=NAME, or `cluster: NAME` in {settings_file()}. "
        "To add a new cluster: hpcinit discover"
    )


def _read(path: Path) -> str:
    import yaml  # noqa: PLC0415 - completion lists the choices without it

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if isinstance(content, dict) and content.keys() == {"cluster"} and isinstance(content["cluster"], str):
        return content["cluster"]
    raise ConfigError(f"{path} contains {content!r}, expected one line: cluster: NAME")


def chosen_cluster(overrides: Sequence[str]) -> str:
    """Return the cluster that the overrides choose, or the default cluster. Raise ConfigError if there is neither."""
    given = [word.partition("=")[2] for word in overrides if word.startswith("cluster=")]
    name = given[-1] if given else cluster_choice(required=True)
    if name == MISSING:
        raise ConfigError(no_cluster_refusal())
    return name


def cluster_choice(required: bool) -> str:
    """Return the default cluster, or 'local' if there is none.

    required: without a default on a machine with Slurm, return '???', which Hydra reports as a missing choice.
    """
    name, _ = default_cluster()
    return name or (MISSING if required and no_cluster_refusal() else LOCAL_CLUSTER)
