"""What the sdist and the wheel contain, compared with git's list of files and with a second build."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from trove_classifiers import classifiers

# Where git's folders are in the wheel.
IN_WHEEL = {"hpcinit": "hpcinit", "hydra_plugins": "hydra_plugins", "conf": "hpcinit/conf", "sbatch": "hpcinit/sbatch"}
MAN_PAGE = "packaging/hpcinit.1"
# The sdist has the same folders as they are in git, and these files. hatchling adds .gitignore.
IN_SDIST = (
    ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", MAN_PAGE, "README.md", "SECURITY.md",
    "pyproject.toml",
)  # fmt: skip
GENERATED = ("METADATA", "RECORD", "WHEEL", "entry_points.txt")  # in the wheel's .dist-info


@dataclass(frozen=True)
class Build:
    """The archives made from `source`, a clean clone."""

    source: Path
    sdist: Path
    wheel: Path


def build(folder: Path, checkout: Path, umask: int) -> Build:
    """Clone the last commit of `checkout` and build an sdist, and a wheel from it. umask: of both."""
    source, dist = folder / "source", folder / "dist"
    subprocess.run(["git", "clone", "--quiet", checkout, source], check=True, umask=umask)
    date = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=source, text=True).strip()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source]
    done = subprocess.run(
        command, env={**os.environ, "SOURCE_DATE_EPOCH": date}, capture_output=True, text=True, check=False, umask=umask
    )
    if done.returncode:
        raise SystemExit(f"the build failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return Build(source, next(dist.glob("*.tar.gz")), next(dist.glob("*.whl")))


def different(first: Build, second: Build) -> Iterator[str]:
    """Yield a problem for each archive that differs between two builds of the same commit, with the files that differ."""
    for one, other in ((first.sdist, second.sdist), (first.wheel, second.wheel)):
        if one.name != other.name:
            yield f"{one.name} is {other.name} in the second build"
        elif one.read_bytes() != other.read_bytes():
            found, again = contents(one), contents(other)
            names = [name for name in sorted({*found, *again}) if found.get(name) != again.get(name)]
            yield f"{one.name} differs in the second build: {', '.join(names) or 'times or modes only'}"


def contents(archive: Path) -> dict[str, bytes]:
    """Return the files of an sdist, without its first folder, or of a wheel."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    found = {}
    with tarfile.open(archive) as sdist:
        for member in sdist:
            if (file := sdist.extractfile(member)) is not None:
                found[member.name.partition("/")[2]] = file.read()
    return found


def wrong_files(build: Build) -> Iterator[str]:
    """Yield a problem for each file of the archives that is missing, unexpected or not as in git."""
    output = subprocess.check_output(["git", "ls-files", "-z"], cwd=build.source, text=True)
    tracked = output.rstrip("\0").split("\0")
    packaged = [name for name in tracked if name.partition("/")[0] in IN_WHEEL]
    text = {name: (build.source / name).read_bytes() for name in (*packaged, *IN_SDIST)}
    of_sdist: dict[str, bytes | None] = {**text, "PKG-INFO": None}
    yield from _compared(build.sdist.name, of_sdist, contents(build.sdist))
    name = "-".join(build.wheel.name.split("-")[:2])
    of_wheel: dict[str, bytes | None] = {f"{name}.dist-info/{each}": None for each in GENERATED}
    of_wheel[f"{name}.dist-info/licenses/LICENSE"] = text["LICENSE"]
    of_wheel[f"{name}.data/data/share/man/man1/{Path(MAN_PAGE).name}"] = text[MAN_PAGE]
    for each in packaged:
        top, _, rest = each.partition("/")
        of_wheel[f"{IN_WHEEL[top]}/{rest}"] = text[each]
    yield from _compared(build.wheel.name, of_wheel, contents(build.wheel))


def _compared(archive: str, expected: Mapping[str, bytes | None], found: Mapping[str, bytes]) -> Iterator[str]:
    """expected: the content of each file; None: any."""
    for name in sorted({*expected, *found}):
        if name not in found:
            yield f"{archive}: {name} is missing"
        elif name not in expected:
            yield f"{archive}: {name} is not expected: not in git, or not in a folder that is released"
        elif expected[name] not in (None, found[name]):
            yield f"{archive}: {name} is not as in git"


def wrong_metadata(build: Build, pythons: tuple[str, ...], tag: str) -> Iterator[str]:
    """Yield the problems of the wheel's metadata. pythons: the supported ones. tag: of the commit, or ''."""
    found = contents(build.wheel)
    about = email.message_from_bytes(next(text for name, text in found.items() if name.endswith("/METADATA")))
    for field in ("Summary", "Keywords", "Description-Content-Type", "Requires-Python"):
        if not about[field]:
            yield f"the metadata has no {field}: add it to pyproject.toml"
    if (found_license := (about["License-Expression"], about["License-File"])) != ("MIT", "LICENSE"):
        yield "the license is {} in the file {}, expected MIT in LICENSE".format(*found_license)
    listed = set(about.get_all("Classifier", []))
    if unknown := sorted(listed - classifiers):
        yield f"PyPI does not know the classifiers {', '.join(unknown)}"
    versions = tuple(sorted((name.rpartition(" ")[2] for name in listed if re.search(r":: 3\.\d+$", name)), key=_minor))
    if versions != pythons:
        yield f"the classifiers list Python {', '.join(versions)}, expected {', '.join(pythons)}"
    if not all(version in SpecifierSet(about["Requires-Python"]) for version in pythons):
        yield f"Requires-Python is {about['Requires-Python']}, expected a range with {', '.join(pythons)}"
    if tag:
        yield from _wrong_for_a_tag(about["Version"], set(about.get_all("Project-URL", [])), build.source, tag)


def _minor(version: str) -> int:
    return int(version.partition(".")[2])


def _wrong_for_a_tag(version: str, urls: set[str], source: Path, tag: str) -> Iterator[str]:
    """Yield what only a release needs."""
    if tag != f"v{version}":
        yield f"the version is {version}, but the tag is {tag}, expected v{version}"
    if missing := {"Source", "Documentation", "Issues", "Changelog"} - {url.partition(",")[0] for url in urls}:
        yield f"the metadata has no address for {', '.join(sorted(missing))}: add [project.urls] to pyproject.toml"
    if not re.search(rf"^## {re.escape(version)}\b", (source / "CHANGELOG.md").read_text(), re.MULTILINE):
        yield f"CHANGELOG.md has no heading '## {version}'"
    if not re.search(rf"^version: {re.escape(version)}$", (source / "CITATION.cff").read_text(), re.MULTILINE):
        yield f"CITATION.cff has no line 'version: {version}'"
