"""snapshot=git: what a checkout looks like in the run folder, and that the job runs from there."""

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
from tests.submitting import folder_of, printed, submit

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
    """A repository with one commit: a program, and what it imports."""
    top = tmp_path / "project"
    top.mkdir()
    monkeypatch.chdir(top)
    write(
        {
            "train.py": "import part\nprint(part.SAYS)\n",
            "part.py": "SAYS = 'committed'\n",
            ".gitignore": "runs/\n*.o\n",
        },
        top,
    )
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    return top


def take(hpcinit: Run, *words: str) -> Path:
    """The code folder of a run on this machine."""
    program = [] if "--" in words else ["--", "train.py"]
    done = hpcinit("submit", "snapshot=git", "wait=true", *words, *program)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder_of(done) / "code"


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def recorded(code: Path) -> dict:
    return json.loads((code.parent / "provenance.json").read_text())["snapshot"]


def test_committed_edited_and_untracked_work_is_there(hpcinit: Run, checkout: Path) -> None:
    """Tracked files as they lie on the disk, and untracked ones, but neither ignored nor deleted ones; commit, diff and
    a hash are recorded."""
    write({"gone.py": "", "kept.py": ""}, checkout)
    git("add", "."), git("commit", "-qm", "y")
    (checkout / "gone.py").unlink()
    write({"part.py": "SAYS = 'edited'\n", "new/deep.py": "", "junk.o": "x"}, checkout)
    code = take(hpcinit)
    assert tree(code) - {f"__pycache__/{p.name}" for p in code.glob("__pycache__/*")} == {
        ".gitignore", "kept.py", "new/deep.py", "part.py", "train.py",
    }  # fmt: skip
    assert printed(code.parent, 0) == "edited\n"
    said = recorded(code)
    assert (said["commit"], said["untracked"]) == (git("rev-parse", "HEAD"), ["new/deep.py"])
    assert (said["root"], said["workdir"], said["files"]) == (str(checkout), ".", 5)
    assert "-SAYS = 'committed'\n+SAYS = 'edited'\n" in (code.parent / "code.diff").read_text()
    assert code.stat().st_mode & 0o777 == 0o700


def test_the_hash_is_of_the_content(hpcinit: Run, checkout: Path) -> None:
    """Two snapshots of the same files have the same hash; an edit, a name or an execute bit makes another."""
    hashes = [recorded(take(hpcinit))["sha256"] for _ in range(2)]
    (checkout / "part.py").chmod(0o755)
    hashes.append(recorded(take(hpcinit))["sha256"])
    write({"part.py": "SAYS = 1\n"}, checkout)
    hashes.append(recorded(take(hpcinit))["sha256"])
    (checkout / "x.txt").write_text("")
    hashes.append(recorded(take(hpcinit))["sha256"])
    assert hashes[0] == hashes[1] and len(set(hashes)) == 4


def test_names_modes_and_links(hpcinit: Run, checkout: Path, tmp_path: Path) -> None:
    """Blanks, newlines and bytes that are no text in names; execute bits; links inside lead into the snapshot, and all
    others to where they led."""
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
    """A submodule's files are there, edited and untracked ones too, and those of a repository inside that is none; one
    that is not checked out is nothing."""
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
    """A repository without commits has a snapshot too; its commit is null."""
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
    """A package of the checkout that is installed as editable, by a .pth file or by setuptools' finder, comes from the
    snapshot in the job; and so does one on a PYTHONPATH of the user's."""
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


# As setuptools 64 and later write it for `pip install -e`: packages are found by a table, not on the path.
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
    """More than snapshot_max_mb is refused with the largest files; snapshot_exclude leaves out tracked ones too."""
    for name, size in (("data/a.bin", 3), ("data/b.bin", 2), ("deep/data/c.txt", 1), ("x/keep.bin", 1)):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes(b"x" * size * 10**6)
    git("add", "."), git("commit", "-qm", "data")
    done = hpcinit("submit", "snapshot=git", "snapshot_max_mb=2.5", "--", "train.py")
    assert (done.returncode, done.stdout) == (2, "") and not (checkout / "runs").exists()
    assert done.stderr.splitlines()[:3] == [
        "hpcinit: error: snapshot=git: 7 files of 7.0 MB, more than snapshot_max_mb=2.5; the largest:",
        "       3.0 MB  'data/a.bin'",
        "       2.0 MB  'data/b.bin'",
    ]
    assert "put what is data into .gitignore or into snapshot_exclude=[...], or raise" in done.stderr
    cases = {
        "data": {"x/keep.bin"}, "/data": {"x/keep.bin", "deep/data/c.txt"}, "*.bin": {"deep/data/c.txt"},
        "data/*.bin": {"x/keep.bin", "deep/data/c.txt"}, "deep/data/": {"data/a.bin", "data/b.bin", "x/keep.bin"},
    }  # fmt: skip
    for pattern, left in cases.items():
        code = take(hpcinit, f"snapshot_exclude=['{pattern}']")
        assert {name for name in tree(code) if "/" in name and "__pycache__" not in name} == left, pattern


def test_run_folders_are_left_out(hpcinit: Run, checkout: Path) -> None:
    """Runs that git does not ignore, wherever they lie in the checkout, are no part of a later snapshot."""
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
            "snapshot=git: {here} is in no git repository; git init makes one, snapshot=none runs from",
        ),
        (
            "echo x.py > .gitignore; touch x.py",
            ["--", "x.py"],
            "job runs 'x.py', which the snapshot would not have: git ignores",
        ),
        ("true", ["snapshot_exclude=[train.py]"], "job runs 'train.py', which the snapshot would not have"),
        ("rm .git/HEAD; mkdir .git/HEAD", [], "snapshot=git: "),
        ("echo junk > .git/index", [], "snapshot=git: git ls-files in {here}: "),
    ],
)
def test_no_snapshot_can_be_made(hpcinit: Run, checkout: Path, make: str, words: list[str], message: str) -> None:
    """Each reason is said, with exit status 2, and leaves nothing."""
    subprocess.run(["sh", "-c", make], check=True)
    words = words if "--" in words else [*words, "--", "train.py"]
    done = hpcinit("submit", "snapshot=git", *words)
    assert (done.returncode, done.stdout) == (2, "") and not (checkout / "runs").exists()
    assert message.format(here=checkout) in done.stderr and "Traceback" not in done.stderr


def test_without_git(hpcinit: Run, checkout: Path) -> None:
    """Where there is no git the message says so, and what goes without."""
    done = hpcinit("submit", "snapshot=git", "--", "train.py", env={"PATH": "/nowhere"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "snapshot=git: git is not on PATH; load its module, or say snapshot=none" in done.stderr


def test_a_failed_submission_leaves_nothing(hpcinit: Run, checkout: Path, tmp_path: Path) -> None:
    """A file that cannot be copied, and a refusal of sbatch's, leave no run folder."""
    if os.geteuid() == 0:  # root reads anything: a file that grows out of a full disk is what fails instead
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


def test_pointers_of_git_lfs_are_told(hpcinit: Run, checkout: Path) -> None:
    """A file that git-lfs has not fetched is copied as the pointer that it is, with a warning."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
    write({"model.bin": pointer}, checkout)
    done = hpcinit("submit", "snapshot=git", "wait=true", "--", "train.py")
    assert (
        "warning: snapshot=git: 1 file is a pointer of Git LFS, as in the checkout; git lfs pull brings" in done.stderr
    )
    assert (folder_of(done) / "code/model.bin").read_text() == pointer


def test_from_a_hook_of_another_repository(hpcinit: Run, checkout: Path, tmp_path: Path) -> None:
    """GIT_DIR and GIT_INDEX_FILE of a hook that runs hpcinit do not make it another repository's snapshot."""
    (tmp_path / "other").mkdir()
    git("init", "-q", at=tmp_path / "other")
    env = {"GIT_DIR": str(tmp_path / "other/.git"), "GIT_INDEX_FILE": "nope"}
    done = hpcinit("submit", "snapshot=git", "wait=true", "--", "train.py", env=env)
    assert recorded(folder_of(done) / "code")["root"] == str(checkout)


def test_a_dry_run_prints_the_script_that_is_written(hpcinit: Run, checkout: Path) -> None:
    """With a snapshot too, dry_run is byte for byte what is submitted, and copies nothing."""
    words = ["submit", "snapshot=git", "--", "train.py"]
    text = hpcinit(*words[:2], "dry_run=true", *words[2:]).stdout
    assert not (checkout / "runs").exists()
    assert (folder_of(hpcinit(*words)) / "job.sh").read_text() == text


@pytest.mark.slurm
def test_editing_the_checkout_while_the_job_waits_changes_nothing(
    hpcinit: Run, idle_slurm: MiniSlurm, checkout: Path
) -> None:
    """Held in the queue, the checkout edited and then taken away, released: every rank runs what was submitted."""
    slurm = idle_slurm
    write({"part.py": "SAYS = 'as submitted'\n"}, checkout)
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=1", "snapshot=git", "+cluster.sbatch.hold=true",
                  f"runs_dir={checkout.parent}/out", "--", "train.py")  # fmt: skip
    folder = folder_of(done)
    write({"part.py": "SAYS = 'edited'\n", "train.py": "print('other')\n"}, checkout)
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
    """Submitted twice it is queued already, and no longer once a file has been edited: the copy's hash is in the request's."""
    words = ["snapshot=git", "+cluster.sbatch.hold=true", "--", "train.py"]
    submit(hpcinit, idle_slurm, *words)
    again = submit(hpcinit, idle_slurm, *words)
    assert again.returncode == 2 and "already queued as" in again.stderr
    write({"part.py": "SAYS = 'edited'\n"}, checkout)
    assert submit(hpcinit, idle_slurm, *words).returncode == 0
