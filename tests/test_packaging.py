"""The files for a release: recipes of other package managers, the man page, the workflows, and `make release-check`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from docs.generate import man
from hpcinit.cli.commands import COMMANDS
from tests.release import archives

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = {  # with every Python; the lines for Python 3.14 ask for pre-releases, which the recipes cannot have
    canonicalize_name(need.name): need.specifier
    for need in map(Requirement, PROJECT["dependencies"])
    if need.marker is None
}
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_the_man_page_is_that_of_the_table_of_commands() -> None:
    """packaging/hpcinit.1 is what docs.generate.man prints, and names each command."""
    page = man.page()
    assert (ROOT / "packaging/hpcinit.1").read_text() == page, "python -m docs.generate.man > packaging/hpcinit.1"
    listed = {line.removeprefix(".B ").replace("\\-", "-") for line in page.splitlines() if line.startswith(".B ")}
    assert COMMANDS.keys() <= listed


def test_roff_prints_text_unchanged() -> None:
    """A backslash, a quote, a hyphen and a dot at the start of a line are characters of the text, not requests."""
    assert man._text(".x 'a\\b' --c ~") == "\\&.x \\(aqa\\eb\\(aq \\-\\-c \\(ti"


def test_the_recipes_have_the_dependencies_of_the_package() -> None:
    """conda-forge's recipe has the same packages and bounds, Spack's the same lower bounds, EasyBuild's allowed versions."""
    recipe = yaml.safe_load((ROOT / "packaging/conda-forge/recipe.yaml").read_text())
    lines = [line for line in recipe["requirements"]["run"] if not line.startswith("python ")]
    assert {name: SpecifierSet(bounds) for name, _, bounds in (line.partition(" ") for line in lines)} == NEEDED
    spack = (ROOT / "packaging/spack/package.py").read_text()
    compile(spack, "package.py", "exec")
    lowest = {
        name: version
        for name, version in re.findall(r'depends_on\("py-([\w-]+)@([\d.]+):[\d.]*"\)', spack)
        if name in NEEDED
    }
    assert lowest == {
        name: next(each.version for each in bounds if each.operator == ">=") for name, bounds in NEEDED.items()
    }
    tree = ast.parse(next((ROOT / "packaging/easybuild").glob("*.eb")).read_text())
    names = {each.targets[0].id: each.value for each in tree.body if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)}  # fmt: skip
    listed = {
        canonicalize_name(one.elts[0].value): one.elts[1].value
        for key in ("dependencies", "exts_list")
        for one in names[key].elts  # type: ignore[attr-defined]
        if isinstance(one.elts[0], ast.Constant)
    }
    assert {name for name in NEEDED if not (name in listed and listed[name] in NEEDED[name])} == set()


def test_the_citation_and_the_package_agree() -> None:
    """CITATION.cff has the fields that its format requires, and the name and license of the package."""
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= found.keys()
    assert (found["title"], found["license"]) == (PROJECT["name"], PROJECT["license"])
    assert set(found["keywords"]) <= set(PROJECT["keywords"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_pinned_and_has_no_permissions_by_default(path: Path) -> None:
    """Each action is a full commit with its version beside it, each image has a version, and jobs list what they may do."""
    text = path.read_text()
    found = yaml.safe_load(text)
    assert found["permissions"] == {} and all(job["permissions"] for job in found["jobs"].values())
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name) for name, _ in used)
    assert all(re.fullmatch(r"  # v\d+\.\d+\.\d+", version) for _, version in used)
    assert all(re.fullmatch(r"[\w./-]+:[\d.]+", image) for image in re.findall(r"image: (\S+)", text))
    for target in re.findall(r"\bmake ((?:lint|test|release)[\w-]*)", text):
        assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False).returncode == 0, (
            target
        )


def _build(folder: Path, change: dict[str, str | None]) -> archives.Build:
    """Return archives as a build makes them, from a repository of a few files. change: in both archives; None: missing."""
    source = folder / "source"
    names = [*archives.IN_SDIST, "hpcinit/a.py", "hydra_plugins/b.py", "conf/c.yaml", "sbatch/d.sbatch"]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    for command in (["init", "-q"], ["add", "--force", "--all"]):
        subprocess.run(["git", *command], cwd=source, check=True)
    texts = {name: name for name in names} | {"PKG-INFO": ""}
    texts = {name: text for name, text in (texts | change).items() if text is not None}
    sdist, wheel = folder / "hpcinit-1.tar.gz", folder / "hpcinit-1-py3-none-any.whl"
    with tarfile.open(sdist, "w:gz") as archive:
        for name, text in texts.items():
            (folder / "file").write_text(text)
            archive.add(folder / "file", f"hpcinit-1/{name}")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in texts.items():
            top, _, rest = name.partition("/")
            if rest and top in archives.IN_WHEEL:
                archive.writestr(f"{archives.IN_WHEEL[top]}/{rest}", text)
        archive.writestr("hpcinit-1.data/data/share/man/man1/hpcinit.1", archives.MAN_PAGE)
        archive.writestr("hpcinit-1.dist-info/licenses/LICENSE", "LICENSE")
        for name in archives.GENERATED:
            archive.writestr(f"hpcinit-1.dist-info/{name}", "")
    return archives.Build(source, sdist, wheel)


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ({}, []),
        ({"conf/c.yaml": None}, ["{}: conf/c.yaml is missing", "{}: hpcinit/conf/c.yaml is missing"]),
        ({"hpcinit/a.py": "x"}, ["{}: hpcinit/a.py is not as in git", "{}: hpcinit/a.py is not as in git"]),
        ({"hpcinit/.env": "x"}, ["{}: hpcinit/.env is not expected: not in git, or not in a folder that is released"] * 2),
        ({"runs/x": "x"}, ["{}: runs/x is not expected: not in git, or not in a folder that is released"]),
    ],
    ids=["as in git", "missing", "changed", "untracked", "another folder"],
)  # fmt: skip
def test_a_wrong_file_of_an_archive_is_named(
    tmp_path: Path, change: dict[str, str | None], problems: list[str]
) -> None:
    """A file that is missing, changed or unexpected in the sdist or the wheel is a problem with the archive's name."""
    made = _build(tmp_path, change)
    names = [made.sdist.name, made.wheel.name]
    assert list(archives.wrong_files(made)) == [text.format(name) for text, name in zip(problems, names, strict=False)]


def test_a_difference_of_two_builds_is_named(tmp_path: Path) -> None:
    """Two builds that are not the same bytes are a problem that names the files."""
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    one, other = _build(tmp_path / "1", {}), _build(tmp_path / "2", {"conf/c.yaml": "x"})
    found = list(archives.different(one, other))
    assert found[0].startswith(f"{one.sdist.name} differs in the second build: conf/c.yaml")
    assert found[1] == f"{one.wheel.name} differs in the second build: hpcinit/conf/c.yaml"
    assert list(archives.different(one, one)) == []


def test_a_tag_needs_addresses_a_changelog_and_its_version(tmp_path: Path) -> None:
    """For a commit with a tag, the version, the addresses, CHANGELOG.md and CITATION.cff must be those of the release."""
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## Unreleased\n")
    (tmp_path / "CITATION.cff").write_text("title: hpcinit\n")
    found = list(archives._wrong_for_a_tag("1.2.dev3", {"Source, x"}, tmp_path, "v1.2.0"))
    assert [text.partition(" ")[0] for text in found] == ["the", "the", "CHANGELOG.md", "CITATION.cff"]
    assert "expected v1.2.dev3" in found[0] and "Changelog, Documentation, Issues" in found[1]
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.0\n")
    (tmp_path / "CITATION.cff").write_text("version: 1.2.0\n")
    urls = {f"{name}, x" for name in ("Source", "Documentation", "Issues", "Changelog")}
    assert list(archives._wrong_for_a_tag("1.2.0", urls, tmp_path, "v1.2.0")) == []
