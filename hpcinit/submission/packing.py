"""launch.env_to_local on the login node: the environment as one archive, made once until what is installed changes.

Not conda-pack or venv-pack: docs/decisions, "The environment on the node's own disk".
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tarfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hpcinit.config import environments
from hpcinit.config.schema import Config
from hpcinit.facts import ownership, telling
from hpcinit.facts.errors import NOTHING_SUBMITTED, SubmitError
from hpcinit.facts.user_paths import expanded

TELL_S = 10.0  # between two lines about an archive that is being made
KEPT_S = 30 * 86400.0  # an older archive of the same environment that nobody has submitted with for as long goes
KEY = environments.KEY


def archive(config: Config) -> Path:
    """Where the archive of the config's environment is, or will be. The name says what is installed."""
    prefix = _prefix(config)
    cache_folder = config.cluster.cache or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(cache_folder).absolute() / "hpcinit/environments" / f"{_family(prefix)}-{_installed(prefix)}.tar"


def ready(config: Config) -> None:
    """Make the archive if it is not there. Raises SubmitError; then there is none."""
    path, prefix = archive(config), _prefix(config)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        ownership.make_folders(path.parent)
        # The nodes unpack it and run its Python: nobody else may have put it there.
        own = [path] if path.exists() else []
        for place in (path.parent.parent, path.parent, *own):
            if said := ownership.of_path(place, "cluster.cache=FOLDER names a place of your own"):
                raise SubmitError(f"{KEY}: {said}", NOTHING_SUBMITTED)
        if own:
            if path.stat().st_uid == os.geteuid():
                path.chmod(0o600)  # the batch script knows no private groups, and refuses what any group can write
            os.utime(path)  # in use
            return
        _remove_old(path.parent, _family(prefix))
        try:
            partial.touch(0o600)
            _write(partial, prefix)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        raise SubmitError(
            f"{KEY}: cannot pack {prefix} into {path.parent}:{where} {error.strerror or error}; nothing was submitted; "
            f"cluster.cache=FOLDER names another place, {KEY}=false does without"
        ) from None
    telling.message(f"kept as {path}")


def _prefix(config: Config) -> Path:
    interpreter = environments.packed(config)
    prefix = environments.prefix(interpreter)
    if prefix is None:  # `hpcinit render` of a run whose environment is gone
        raise SubmitError(f"{KEY}: {interpreter} belongs to no environment (any more), expected a virtual or conda one")
    return prefix


def _family(prefix: Path) -> str:
    """The archives of one environment have it in common: 'venv-1f2e3d4c'."""
    name = re.sub(r"[^\w.+-]", "-", prefix.name).strip(".") or "environment"
    return f"{name}-{hashlib.sha256(os.fsencode(prefix)).hexdigest()[:8]}"


@cache
def _installed(prefix: Path) -> str:
    """A hash of what the installers write down, and of the names, sizes and times in bin and site-packages.

    Some hundred calls and not a walk over each file, for a slow file system's sake: a change deep inside of a package,
    made by hand, goes unseen.
    """
    digest = hashlib.sha256()
    sites = sorted(prefix.glob("lib/python*/site-packages"))
    for folder in (prefix, prefix / "bin", prefix / "conda-meta", *sites):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            _note(digest, path)
            if path.suffix == ".dist-info":
                _note(digest, path / "RECORD")
    return digest.hexdigest()[:16]


def _note(digest: hashlib._Hash, path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    # A folder above has a new time with each file of ours that Python compiles: what is in it is noted itself.
    when = 0 if path.name in {"__pycache__", "bin", "lib", "conda-meta"} else found.st_mtime_ns
    digest.update(os.fsencode(f"{path}\0{when}\0{found.st_size}\0"))


def _write(path: Path, prefix: Path) -> None:
    """Uncompressed: nodes unpack at the speed of their disks, and sbcast compresses where the site wants it."""
    begin = told = time.monotonic()
    # GNU's format has times in whole seconds, which is what Python compares with those in its compiled files.
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        members = list(_members(tar, prefix))
        size = sum(member.size for member in members)
        telling.message(
            f"packing {prefix} for {KEY}, once until it changes: {len(members):,} files, {size / 1e9:.2f} GB"
        )
        telling.message(f"not packed, but used from where it is: {'; '.join(_outside(prefix))}")
        _room(path.parent, size + 1024 * len(members))
        done = 0
        for member in members:
            if member.isreg():
                with (prefix / member.name).open("rb") as file:
                    tar.addfile(member, file)
            else:
                tar.addfile(member)
            done += member.size
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                telling.message(f"{done / 1e9:.2f} of {size / 1e9:.2f} GB packed in {told - begin:.0f} s")
    telling.message(f"packed in {time.monotonic() - begin:.0f} s, {path.stat().st_size / 1e9:.2f} GB")


def _members(tar: tarfile.TarFile, prefix: Path) -> Iterator[tarfile.TarInfo]:
    """All that is in `prefix`, with names and links relative to it. Links that lead out of it stay as they are."""
    for folder, names, files in os.walk(prefix):
        names.sort()
        for name in (*names, *sorted(files)):
            path = Path(folder, name)
            member = tar.gettarinfo(path, str(path.relative_to(prefix)))
            if member is None:  # a socket
                continue
            if member.issym() and Path(member.linkname).is_relative_to(prefix):
                member.linkname = os.path.relpath(member.linkname, folder)
            yield member


def _outside(prefix: Path) -> Sequence[str]:
    """What the environment uses and the archive does not hold, in words."""
    found = []
    config = prefix / "pyvenv.cfg"
    if config.is_file():
        values = dict(re.findall(r"^([\w-]+) *= *(.*?) *$", config.read_text(), re.MULTILINE))
        found.append(f"Python itself and its standard library ({values.get('home', '?')})")
        if values.get("include-system-site-packages") == "true":
            found.append("the packages of that Python")
    editable: set[str] = set()
    for site in prefix.glob("lib/python*/site-packages"):
        for pth in site.glob("*.pth"):
            editable |= {line for line in pth.read_text(errors="replace").splitlines() if line.startswith("/")}
        for file in site.glob("*.dist-info/direct_url.json"):
            known = json.loads(file.read_text())
            if known.get("dir_info", {}).get("editable"):
                editable.add(unquote(urlsplit(known["url"]).path))
    return [*found, *sorted(editable), "the working folder"]


def _room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB needed")


def _remove_old(folder: Path, family: str) -> None:
    """Archives that were left by what was installed before, unless a job that waits may still need them."""
    for path in folder.glob(f"{family}-*.tar"):
        if time.time() - path.stat().st_mtime > KEPT_S:
            path.unlink(missing_ok=True)
