"""The package: its dependencies, supported Pythons, and that its wheel is sufficient on a login node."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hpcinit.base.versions import TESTED
from tests.release import installed

ROOT = Path(__file__).parent.parent
LOWEST = [line for line in (ROOT / "tests/lowest.txt").read_text().splitlines() if not line.startswith("#")]
# With every Python; Python 3.14 alone needs pre-releases.
NEEDED = [each for each in map(Requirement, metadata.requires("hpcinit") or ()) if each.marker is None]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the sdist, as pip does, with this environment's packages.

    The oldest supported versions cannot build it: with them, pip downloads newer ones and builds from the checkout.
    """
    folder, source, apart = tmp_path_factory.mktemp("wheel"), ROOT, []
    if "lowest" not in sys.prefix:  # hatchling: packaging.licenses, from 24.2 on
        build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        source, apart = next(folder.glob("*.tar.gz")), ["--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *apart]
    done = subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_make_test_lowest_installs_the_lower_bounds() -> None:
    """Each dependency of a login node has a lower bound, which is the version in tests/lowest.txt."""
    bounds = {
        canonicalize_name(each.name): next(s.version for s in each.specifier if s.operator == ">=") for each in NEEDED
    }
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LOWEST)}
    assert bounds.keys() == pinned.keys()
    assert {name: Version(bounds[name]).release for name in bounds} == {
        name: Version(pinned[name]).release[: len(Version(bounds[name]).release)] for name in pinned
    }
    assert all(Version(pinned[name]) == Version(bounds[name]) for name in pinned)


def test_every_path_in_the_makefile_exists() -> None:
    """Each folder, file and module of tests and benchmarks that the Makefile names exists."""
    text = subprocess.run(["make", "-pn", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"(?<![\w/])(tests/[\w./-]*\w)", text))
    modules = set(re.findall(r"-m ((?:tests|benchmarks)[\w.]+)", text))
    assert {"tests/records", "tests/submit/test_script.py", "tests/config"} <= named and "tests.prose" in modules
    files = {name: [ROOT / name] for name in named}
    for name in modules:
        place = ROOT / name.replace(".", "/")
        files[name] = [place.with_suffix(".py"), place / "__main__.py"]
    assert [name for name, places in files.items() if not any(place.exists() for place in places)] == []


def test_the_tested_versions_are_the_same_everywhere() -> None:
    """pyproject.toml, the Makefile and the README agree with the table of tested torch and DeepSpeed versions.

    The upper bound is the first minor version after the newest.
    """
    torch, deepspeed = TESTED["torch"], TESTED["deepspeed"]
    project, make = (ROOT / "pyproject.toml").read_text(), (ROOT / "Makefile").read_text()
    below: dict[str, str] = {}
    for package, tested in TESTED.items():
        major, minor, *_ = Version(tested.newest).release
        below[package] = f"{major}.{minor + 1}"
        bound = re.search(rf'"{package}(>=\S+)"', project)
        assert bound and bound[1] == f">={tested.oldest.removesuffix('.0')},<{below[package]}"
    assert f"TORCH_VERSIONS ?= {torch.oldest} {torch.newest}\n" in make
    assert (
        f"DS18_VERSION := {deepspeed.oldest}\n" in make
        and f"'deepspeed>={deepspeed.oldest},<{below['deepspeed']}'" in make
    )
    text = " ".join((ROOT / "README.md").read_text().split())
    listed = re.findall(r"We test with Slurm .*?[0-9]\. ", text)[0].rpartition("torch ")[2]
    torchs, _, deepspeeds = listed.partition("DeepSpeed ")
    assert torch.oldest in torchs and torch.newest in torchs, listed
    assert deepspeed.oldest in deepspeeds and deepspeed.newest in deepspeeds, listed


def test_the_environment_has_versions_that_are_allowed() -> None:
    """The installed packages are within the bounds; in make test-lowest they are the lowest."""
    for need in NEEDED:
        assert need.specifier.contains(metadata.version(need.name), prereleases=True), need
    if "lowest" in sys.prefix:
        assert sorted(f"{need.name}=={metadata.version(need.name)}".lower() for need in NEEDED) == sorted(
            line.lower() for line in LOWEST
        )


def test_the_version_comes_from_git() -> None:
    """`hpcinit --version` prints a version, and the package is marked as typed."""
    done = subprocess.run([sys.executable, "-m", "hpcinit", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"hpcinit \d+\.\d+\S*\n", done.stdout) and Version(done.stdout.split()[1])
    assert (ROOT / "hpcinit/py.typed").is_file()


@pytest.mark.more  # installs from the package index
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", installed.other_pythons(), ids=lambda python: Path(python).parts[-3])
def test_a_wheel_works_with_other_pythons(python: str, wheel: Path, tmp_path: Path) -> None:
    """In an environment without torch, as on a login node, a dry run, a local job and the other commands work."""
    venv = tmp_path / "venv"
    installed.install(wheel, python, venv)
    installed.check_commands(venv, tmp_path)
