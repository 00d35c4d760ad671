"""snapshot=git copies the checkout into the run folder, and the job runs from the copy."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, printed, scripts_of, submit

GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@x.invalid", "-c", "protocol.file.allow=always"]


def git(*words: str, at: Path | None = None) -> str:
    done = subprocess.run([*GIT, *words], cwd=at, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write(files: dict[str, str], at: Path) -> None:
    for name, text in files.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(text)


@pytest.fixture
def checkout(hpcinit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with one commit: a program and a module that it imports."""
    top = tmp_path / "project"
    top.mkdir()
    monkeypatch.chdir(top)
    write(
        {
            "train.py": "import part\nprint(part.TEXT)\n",
            "part.py": "TEXT = 'committed'\n",
            ".gitignore": "runs/\n*.o\n",
        },
        top,
    )
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    return top


def take(hpcinit: Run, *words: str) -> Path:
    """Return the code folder of a run on this machine."""
    program = [] if "--" in words else ["--", "train.py"]
    done = hpcinit("submit", "snapshot=git", "wait=true", *words, *program)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder_of(done) / "code"


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def recorded(code: Path) -> dict:
    return json.loads((code.parent / "provenance.json").read_text())["snapshot"]


def test_edited_and_untracked_files_are_copied(hpcinit: Run, checkout: Path) -> None:
    """Tracked files with their edits and untracked files are copied, ignored and deleted ones are not.

    The commit, the diff and a hash are recorded.
    """
    write({"gone.py": "", "kept.py": ""}, checkout)
    git("add", "."), git("commit", "-qm", "y")
    (checkout / "gone.py").unlink()
    write({"part.py": "TEXT = 'edited'\n", "new/deep.py": "", "junk.o": "x"}, checkout)
    code = take(hpcinit)
    assert tree(code) - {f"__pycache__/{p.name}" for p in code.glob("__pycache__/*")} == {
        ".gitignore", "kept.py", "new/deep.py", "part.py", "train.py",
    }  # fmt: skip
    assert printed(code.parent, 0) == "edited\n"
    said = recorded(code)
    assert (said["commit"], said["untracked"]) == (git("rev-parse", "HEAD"), ["new/deep.py"])
    assert (said["root"], said["workdir"], said["files"]) == (str(checkout), ".", 5)
    assert "-TEXT = 'committed'\n+TEXT = 'edited'\n" in (code.parent / "code.diff").read_text()
    assert code.stat().st_mode & 0o777 == 0o700


def test_the_hash_is_of_the_content(hpcinit: Run, checkout: Path) -> None:
    """Two snapshots of the same files have the same hash. An edit, a new name or an execute bit changes it."""
    hashes = [recorded(take(hpcinit))["sha256"] for _ in range(2)]
    (checkout / "part.py").chmod(0o755)
    hashes.append(recorded(take(hpcinit))["sha256"])
    write({"part.py": "TEXT = 1\n"}, checkout)
    hashes.append(recorded(take(hpcinit))["sha256"])
    (checkout / "x.txt").write_text("")
    hashes.append(recorded(take(hpcinit))["sha256"])
    assert hashes[0] == hashes[1] and len(set(hashes)) == 4


def test_names_modes_and_links(hpcinit: Run, checkout: Path, tmp_path: Path) -> None:
    """Names with blanks, newlines and other bytes, execute bits and links are copied.

    Links inside point into the snapshot, and all others to their old target.
    """
    odd = ["two words.py", "line\nbreak", "ümlaut", os.fsdecode(b"\xff\xfe"), "-dash", "a'b\"c"]
    write(dict.fromkeys(odd, "") | {"bin/run": "#!/bin/sh\necho ran\n", "data.o": "ignored"}, checkout)
    (checkout / "bin/run").chmod(0o755)
    (tmp_path / "outside").mkdir()
    links = {
        "bin/near": "../part.py", "bin/absolute": str(checkout / "part.py"), "far": "../outside", "away": "/etc/hostname",
        "ignored": "data.o", "dangling": "nowhere", "folder": "bin",
    }  # fmt: skip
    for name, leads in links.items():
        (checkout / name).symlink_to(leads)
    os.mkfifo(checkout / "pipe")
    code = take(hpcinit, "--", "bin/run")
    assert printed(code.parent, 0) == "ran\n"
    assert set(odd) <= {path.name for path in code.iterdir()}
    assert stat.S_IMODE((code / "bin/run").stat().st_mode) & 0o111 and not (code / "pipe").exists()
    assert {name: str((code / name).readlink()) for name in links} == {
        "bin/near": "../part.py", "bin/absolute": "../part.py", "far": str(tmp_path / "outside"), "away": "/etc/hostname",
        "ignored": str(checkout / "data.o"), "dangling": str(checkout / "nowhere"), "folder": "bin",
    }  # fmt: skip


def test_submodules_and_repositories_inside(hpcinit: Run, checkout: Path, tmp_path: Path) -> None:
    """Files of submodules and nested repositories are copied, edited and untracked ones too.

    A submodule that is not checked out is empty.
    """
    other = tmp_path / "other"
    other.mkdir()
    write({"lib.py": "", ".gitignore": "*.log\n"}, other)
    git("init", "-q", at=other), git("add", ".", at=other), git("commit", "-qm", "x", at=other)
    for name in ("sub", "bare"):
        git("submodule", "add", "-q", str(other), name)
    git("commit", "-qm", "subs")
    git("submodule", "deinit", "-f", "-q", "bare")
    write({"sub/lib.py": "edited = 1\n", "sub/more.py": "", "sub/x.log": ""}, checkout)
    git("init", "-q", "nested")
    write({"nested/inner.py": ""}, checkout)
    code = take(hpcinit)
    names = {name for name in tree(code) if "__pycache__" not in name}
    assert {name for name in names if "/" in name} == {"sub/lib.py", "sub/more.py", "sub/.gitignore", "nested/inner.py"}
    assert "+edited = 1" in (code.parent / "code.diff").read_text() and not list(code.rglob(".git"))


def test_before_the_first_commit(hpcinit: Run, tmp_path: Path) -> None:
    """A repository without commits can be copied, and its commit is null."""
    git("init", "-q")
    write({"train.py": "print('here')\n", ".gitignore": "home/\n"}, tmp_path)
    code = take(hpcinit)
    assert printed(code.parent, 0) == "here\n" and recorded(code)["commit"] is None
    assert recorded(code)["untracked"] == [".gitignore", "train.py"] and (code.parent / "code.diff").read_bytes() == b""


def test_from_a_folder_inside_and_a_worktree(hpcinit: Run, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted in a subfolder of a worktree, the job runs in the same subfolder of the snapshot."""
    write({"exp/a/go.py": "import os\nprint(os.getcwd())\n"}, checkout)
    git("add", "."), git("commit", "-qm", "x"), git("worktree", "add", "-q", "../tree")
    monkeypatch.chdir(checkout.parent / "tree/exp/a")
    code = take(hpcinit, "--", "go.py")
    assert printed(code.parent, 0) == f"{code}/exp/a\n" and recorded(code)["workdir"] == "exp/a"
    code = take(hpcinit, "--", str(checkout.parent / "tree/exp/a/go.py"))
    assert json.loads((code.parent / "spec.json").read_text())["program"]["target"] == f"{code}/exp/a/go.py"


@pytest.mark.parametrize("kind", ["path", "finder"])
def test_the_snapshots_packages_win(hpcinit: Run, checkout: Path, tmp_path: Path, kind: str) -> None:
    """A package of the checkout is imported from the snapshot, if it is installed as editable (.pth file or finder) or
    on PYTHONPATH.
    """
    write({"python/lib/pkg/__init__.py": "", "tools/mod.py": ""}, checkout)
    write({"train.py": "import pkg, mod\nprint(pkg.__file__, mod.__file__)\n"}, checkout)
    git("add", ".")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    ours = [entry for entry in sys.path if entry.endswith("site-packages")]
    lines = [str(Path(__file__).parents[2]), *ours]
    if kind == "path":
        lines.append(str(checkout / "python/lib"))
    else:
        write({"__editable___pkg_finder.py": FINDER.format(place=checkout / "python/lib/pkg")}, site)
        lines.append("import __editable___pkg_finder; __editable___pkg_finder.install()")
    (site / "x.pth").write_text("\n".join(lines) + "\n")
    env = {**os.environ, "PYTHONPATH": str(checkout / "tools")}
    command = [tmp_path / "venv/bin/python", "-m", "hpcinit", "submit", "snapshot=git", "wait=true", "--", "train.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    code = folder_of(done) / "code"
    assert printed(code.parent, 0) == f"{code}/python/lib/pkg/__init__.py {code}/tools/mod.py\n"


# setuptools 64 and later write this for `pip install -e`: packages are found by a table, not on the path.
FINDER = """
import sys
from importlib.util import spec_from_file_location
MAPPING = {{"pkg": {place!r}}}
MAPPING = {{name: str(place) for name, place in MAPPING.items()}}
class _EditableFinder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname in MAPPING:
            return spec_from_file_location(fullname, MAPPING[fullname] + "/__init__.py")
def install():
    sys.meta_path.append(_EditableFinder)
""".replace("{place!r}", "'{place}'")


def test_excludes_and_the_size_limit(hpcinit: Run, checkout: Path) -> None:
    """A snapshot above snapshot_max_mb is refused with the largest files. snapshot_exclude also excludes tracked files."""
    for name, size in (("data/a.bin", 3), ("data/b.bin", 2), ("deep/data/c.txt", 1), ("x/keep.bin", 1)):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes(b"x" * size * 10**6)
    git("add", "."), git("commit", "-qm", "data")
    done = hpcinit("submit", "snapshot=git", "snapshot_max_mb=2.5", "--", "train.py")
    assert (done.returncode, done.stdout) == (2, "") and not (checkout / "runs").exists()
    assert done.stderr.splitlines()[:3] == [
        "hpcinit: error: snapshot=git: 7 files with 7.0 MB in total, expected at most snapshot_max_mb=2.5; the largest:",
        "       3.0 MB  'data/a.bin'",
        "       2.0 MB  'data/b.bin'",
    ]
    assert "add data files to .gitignore or to snapshot_exclude=[...], or raise" in done.stderr
    cases = {
        "data": {"x/keep.bin"}, "/data": {"x/keep.bin", "deep/data/c.txt"}, "*.bin": {"deep/data/c.txt"},
        "data/*.bin": {"x/keep.bin", "deep/data/c.txt"}, "deep/data/": {"data/a.bin", "data/b.bin", "x/keep.bin"},
    }  # fmt: skip
    for pattern, left in cases.items():
        code = take(hpcinit, f"snapshot_exclude=['{pattern}']")
        assert {name for name in tree(code) if "/" in name and "__pycache__" not in name} == left, pattern


def test_run_folders_are_not_copied(hpcinit: Run, checkout: Path) -> None:
    """Runs in the checkout that git does not ignore are not part of a snapshot."""
    for place in ("mine", "."):
        take(hpcinit, f"runs_dir={place}")
        code = take(hpcinit, f"runs_dir={place}")
        assert {n for n in tree(code) if "__pycache__" not in n} == {".gitignore", "part.py", "train.py"}


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (
            "rm -rf .git",
            [],
            "snapshot=git: {here} is not in a git repository; create one with git init. To run the files in place, set",
        ),
        (
            "echo x.py > .gitignore; touch x.py",
            ["--", "x.py"],
            "the snapshot would not contain the program 'x.py': git or snapshot_exclude ignores",
        ),
        ("true", ["snapshot_exclude=[train.py]"], "the snapshot would not contain the program 'train.py'"),
        ("rm .git/HEAD; mkdir .git/HEAD", [], "snapshot=git: "),
        ("echo junk > .git/index", [], "snapshot=git: git ls-files failed in {here}: "),
    ],
)
def test_impossible_snapshots(hpcinit: Run, checkout: Path, make: str, words: list[str], message: str) -> None:
    """Each reason is reported with exit status 2, and no files remain."""
    subprocess.run(["sh", "-c", make], check=True)
    words = words if "--" in words else [*words, "--", "train.py"]
    done = hpcinit("submit", "snapshot=git", *words)
    assert (done.returncode, done.stdout) == (2, "") and not (checkout / "runs").exists()
    assert message.format(here=checkout) in done.stderr and "Traceback" not in done.stderr


def test_without_git(hpcinit: Run, checkout: Path) -> None:
    """Without git, the message reports it and names the alternative."""
    done = hpcinit("submit", "snapshot=git", "--", "train.py", env={"PATH": "/nowhere"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "snapshot=git: git is not on PATH; load its module, or use snapshot=none" in done.stderr


def test_a_failed_submission_leaves_nothing(hpcinit: Run, checkout: Path, tmp_path: Path) -> None:
    """After a file that cannot be copied, or a refusal by sbatch, no run folder remains."""
    if os.geteuid() == 0:  # root can read every file, so a file that does not fit on the disk fails instead
        place = tmp_path / "small"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place], check=True)
        (checkout / "big").write_bytes(b"x" * 30 * 10**6)
        done = hpcinit("submit", "snapshot=git", "snapshot_max_mb=99", f"runs_dir={place}/runs", "--", "train.py")
        left = list((place / "runs").iterdir())
        subprocess.run(["umount", place], check=True)
        assert (done.returncode, done.stdout, left) == (1, "", [])
        assert (
            "snapshot=git: cannot copy" in done.stderr
            and "No space left on device; nothing was submitted" in done.stderr
        )
    refusing = tmp_path / "bin/sbatch"
    write({"bin/sbatch": "#!/bin/sh\necho 'sbatch: error: no' >&2\nexit 1\n"}, tmp_path)
    refusing.chmod(0o755)
    env = {"PATH": f"{refusing.parent}:{os.environ['PATH']}"}
    done = hpcinit("submit", "cluster=mini", "snapshot=git", "--", "train.py", env=env)
    assert (done.returncode, list((checkout / "runs").iterdir())) == (1, [])


def test_from_a_hook_of_another_repository(hpcinit: Run, checkout: Path, tmp_path: Path) -> None:
    """GIT_DIR and GIT_INDEX_FILE of a hook do not change which repository is copied."""
    (tmp_path / "other").mkdir()
    git("init", "-q", at=tmp_path / "other")
    env = {"GIT_DIR": str(tmp_path / "other/.git"), "GIT_INDEX_FILE": "nope"}
    done = hpcinit("submit", "snapshot=git", "wait=true", "--", "train.py", env=env)
    assert recorded(folder_of(done) / "code")["root"] == str(checkout)


def test_a_dry_run_prints_the_script_that_is_written(hpcinit: Run, checkout: Path) -> None:
    """With a snapshot, the dry run prints the submitted script byte for byte, and copies nothing."""
    words = ["submit", "snapshot=git", "--", "train.py"]
    text = scripts_of(hpcinit(*words[:2], "dry_run=true", *words[2:]).stdout)
    assert not (checkout / "runs").exists()
    assert (folder_of(hpcinit(*words)) / "job.sh").read_text() == text


@pytest.mark.slurm
def test_editing_the_checkout_while_the_job_waits_changes_nothing(
    hpcinit: Run, idle_slurm: MiniSlurm, checkout: Path
) -> None:
    """While Slurm delays the job, the checkout is edited and removed.

    After the release every rank runs the submitted code.
    """
    slurm = idle_slurm
    write({"part.py": "TEXT = 'as submitted'\n"}, checkout)
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=1", "snapshot=git", "+cluster.sbatch.hold=true",
                  f"runs_dir={checkout.parent}/out", "--", "train.py")  # fmt: skip
    folder = folder_of(done)
    write({"part.py": "TEXT = 'edited'\n", "train.py": "print('other')\n"}, checkout)
    os.chdir(checkout.parent)
    shutil.rmtree(checkout)
    slurm.run("scontrol", "release", json.loads((folder / "submission.json").read_text())["job_id"])
    deadline = time.monotonic() + 60
    while not (folder / "exit.json").exists() or "exit_status" not in (folder / "exit.json").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert [printed(folder, rank) for rank in (0, 1)] == ["as submitted\n"] * 2


@pytest.mark.slurm
def test_the_same_request_of_other_code_is_another(hpcinit: Run, idle_slurm: MiniSlurm, checkout: Path) -> None:
    """A second submission is refused until a file was edited, because the hash of the code is part of the request."""
    words = ["snapshot=git", "+cluster.sbatch.hold=true", "--", "train.py"]
    submit(hpcinit, idle_slurm, *words)
    again = submit(hpcinit, idle_slurm, *words)
    assert again.returncode == 2 and "already queued as" in again.stderr
    write({"part.py": "TEXT = 'edited'\n"}, checkout)
    assert submit(hpcinit, idle_slurm, *words).returncode == 0
