"""Another user of the machine cannot make hpcinit run their program as you. Two real users try. It needs root."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hpcinit.base import safe_files
from hpcinit.base.errors import SpecError
from hpcinit.records.spec import load
from hpcinit.submit import folder
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import installed, skip_or_fail
from tests.submitting import folder_of, job_id_of, submit
from tests.waiting import until

# Every Debian has these accounts. Each has a private group with the same name.
MALLORY, ALICE = "games", "backup"
PROJECT = 100  # the group 'users', of which both are members here


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that every user can enter, unlike pytest's own, as the working folder."""
    if os.geteuid() != 0:
        skip_or_fail("only root can act as two other users")
    path = Path(tempfile.mkdtemp(prefix="hpcinit-owners-"))
    path.chmod(0o755)
    monkeypatch.chdir(path)
    yield path
    shutil.rmtree(path)


# Python may be below /root, which other users cannot read: here they may read all files, and write only their own.
READ_ALL = "-all,+dac_read_search"


def as_user(name: str, command: Sequence[str | Path], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    account = pwd.getpwnam(name)
    (home := cwd / f"home-{name}").mkdir(exist_ok=True)
    os.chown(home, account.pw_uid, account.pw_gid)
    ids = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", f"--groups={PROJECT}"]
    rights = [f"--inh-caps={READ_ALL}", f"--ambient-caps={READ_ALL}"]
    return subprocess.run(
        [installed("setpriv"), *ids, *rights, *command], cwd=cwd, umask=0o002, env={**os.environ, "HOME": str(home), **env},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def own(name: str, *paths: Path, group: int | None = None, mode: int | None = None) -> None:
    account = pwd.getpwnam(name)
    for path in paths:
        os.chown(path, account.pw_uid, account.pw_gid if group is None else group)
        if mode is not None:
            path.chmod(mode)


def swap(run: Path, program: str, name: str = MALLORY) -> subprocess.CompletedProcess[str]:
    """Attack: a user who may rename in runs_dir replaces `run` with another run folder."""
    spec = {**json.loads((run / "spec.json").read_text()), "workdir": str(run.parent.parent)}
    spec["program"] = {"kind": "command", "target": "sh", "args": ["-c", program]}
    code = (
        "import os, sys, pathlib\nrun, text = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "run.rename(run.with_name('away'))\nrun.mkdir(0o755)\n(run / 'logs').mkdir(0o777)\n(run / 'logs').chmod(0o777)\n"
        "(run / 'spec.json').write_text(text)\n"
        "run.chmod(0o777)\n"
    )
    command = [sys.executable, "-c", code, str(run), json.dumps(spec)]
    return as_user(name, command, run.parent.parent)


# --- the run folder


def test_a_program_in_a_swapped_run_folder_does_not_run(place: Path) -> None:
    """Alice's group can write the parent of her run folder, and Mallory swaps it. Alice's rank refuses his spec."""
    runs = place / "runs"
    runs.mkdir()
    own(ALICE, runs, group=PROJECT, mode=0o700)
    own(ALICE, place)
    submitted = as_user(
        ALICE,
        [sys.executable, "-m", "hpcinit", "submit", "ranks_per_node=1", "wait=true", "--", "true"],
        place,
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    run = folder_of(submitted)
    runs.chmod(0o770)
    assert swap(run, f"id -un > {place}/ran").returncode == 0
    done = as_user(ALICE, [sys.executable, "-m", "hpcinit.run", str(run / "spec.json")], place)
    assert not (place / "ran").exists(), (place / "ran").read_text()
    assert done.returncode == 2
    assert (
        f"{run}/spec.json belongs to {MALLORY} (mode 0664), expected {ALICE} or root: its owner could run any program "
        "as you; submit again" in done.stderr
    )


def test_a_runs_dir_that_others_can_write_is_refused_before_the_queue(place: Path) -> None:
    """The message names the folder, its owner and its mode, and the command that repairs it works."""
    runs = place / "runs"
    runs.mkdir()
    own(ALICE, runs, group=PROJECT, mode=0o770)
    own(ALICE, place)
    words = [sys.executable, "-m", "hpcinit", "submit", "ranks_per_node=1", "wait=true", "--", "true"]
    done = as_user(ALICE, words, place)
    assert done.returncode == 2 and not list(runs.iterdir())
    assert (
        f"runs_dir: {runs} belongs to {ALICE} (mode 0770) and group users can write to it, so they could run any "
        f"program as you; chmod g-w {runs}, or chmod +t {runs} if others need to create files there" in done.stderr
    )
    for repair in ("chmod +t", "chmod g-w,-t"):
        assert as_user(ALICE, ["sh", "-c", f"{repair} {runs}"], place).returncode == 0
        done = as_user(ALICE, [*words[:-2], "again=true", *words[-2:]], place)
        assert done.returncode == 0, done.stderr
    own(MALLORY, runs, mode=0o777)
    done = as_user(ALICE, words, place)
    assert done.returncode == 2 and f"choose your own folder: runs_dir={runs}/{ALICE}" in done.stderr


def test_the_sticky_bit_keeps_a_shared_runs_dir_safe(place: Path) -> None:
    """With chmod +t Mallory can create folders beside Alice's, and cannot rename hers."""
    runs = place / "runs"
    runs.mkdir()
    own(ALICE, runs, group=PROJECT, mode=0o1770)
    run = runs / "x-0001"
    run.mkdir()
    (run / "spec.json").write_text("{}")
    own(ALICE, run, mode=0o755)
    done = swap_only_rename(run)
    assert done.returncode == 1 and "PermissionError" in done.stderr


def swap_only_rename(run: Path) -> subprocess.CompletedProcess[str]:
    return as_user(
        MALLORY, [sys.executable, "-c", f"import os; os.rename({str(run)!r}, '{run}-away')"], run.parent.parent
    )


def test_umask_002_with_a_private_group_is_allowed(place: Path) -> None:
    """Modes 0664 and 0775 are accepted if the group has this user's name and no other members."""
    (place / "conf/cluster").mkdir(parents=True)
    (place / "conf/cluster/here.yaml").write_text("defaults: [local]\nname: here\n")
    (place / "runs").mkdir()
    own(ALICE, place, place / "conf", place / "conf/cluster", place / "runs", mode=0o775)
    own(ALICE, place / "conf/cluster/here.yaml", mode=0o664)
    words = ["ranks_per_node=1", "cluster=here", "wait=true", "--", "true"]
    done = as_user(ALICE, [sys.executable, "-m", "hpcinit", "submit", *words], place)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_a_submission_creates_is_private(hpcinit: Run, tmp_path: Path, umask: int) -> None:
    """Other users can never write runs_dir, whatever the umask, and cannot read the submission's files."""
    before = os.umask(umask)
    try:
        done = hpcinit("submit", "ranks_per_node=1", "runs_dir=deep/runs", "wait=true", "--", "true")
    finally:
        os.umask(before)
    run = folder_of(done)
    assert [path.stat().st_mode & 0o777 for path in (run.parent, run.parent.parent)] == [0o755 & ~umask] * 2
    names = ("spec.json", "job.sh", "config.yaml", "provenance.json", "submission.json")
    assert {name: (run / name).stat().st_mode & 0o777 for name in names} == dict.fromkeys(names, 0o600)


@pytest.mark.slurm
def test_a_swapped_run_folder_on_slurm(idle_slurm: MiniSlurm, hpcinit: Run, place: Path) -> None:
    """Mallory swaps the folder of root's queued job after its runs_dir became writable.

    The ranks refuse it and the job reports why.
    """
    words = ["ranks_per_node=1", "+cluster.sbatch.hold=true", f"runs_dir={place}/runs", "--", "true"]
    done = submit(hpcinit, idle_slurm, *words)
    run, job = folder_of(done), job_id_of(done)
    run.parent.chmod(0o777)
    assert swap(run, f"id -un > {place}/ran").returncode == 0
    idle_slurm.run("scontrol", "release", job)
    until(lambda: "RUNNING" not in (found := state(idle_slurm, job)) and "PENDING" not in found)
    assert not (place / "ran").exists(), (place / "ran").read_text()
    assert f"belongs to {MALLORY}" in (run / "logs/rank-0.log").read_text()


def state(slurm: MiniSlurm, job: str) -> str:
    return slurm.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")


# --- config folders


def write_conf(place: Path) -> tuple[Path, Path]:
    conf = place / "conf"
    (conf / "cluster").mkdir(parents=True)
    file = conf / "cluster/mine.yaml"
    file.write_text(f"defaults: [local]\nname: mine\nsetup: ['id -un > {place}/ran']\n")
    return conf, file


@pytest.mark.parametrize(
    ("owner", "mode", "said"),
    [
        (MALLORY, 0o644, "belongs to games (mode 0644), expected backup or root: its owner could run any program as you; "
            "if you trust these users, set HPCINIT_CONF="),
        (ALICE, 0o664, "belongs to backup (mode 0664) and group users can write to it, so they could run any program as "
            "you; chmod g-w "),
        (ALICE, 0o666, "belongs to backup (mode 0666) and every user can write to it, so they could run any program as "
            "you; chmod go-w "),
    ],
)  # fmt: skip
def test_config_that_another_user_can_write_is_refused(place: Path, owner: str, mode: int, said: str) -> None:
    """cluster.setup in ./conf is shell code, so config that others could write is not read."""
    conf, file = write_conf(place)
    own(ALICE, place, conf, conf / "cluster")
    own(owner, file, group=PROJECT, mode=mode)
    words = [sys.executable, "-m", "hpcinit", "submit", "ranks_per_node=1", "wait=true", "cluster=mine", "--", "true"]
    done = as_user(ALICE, words, place)
    assert not (place / "ran").exists()
    assert done.returncode == 2 and f"{file} {said}" in done.stderr, done.stderr


def test_a_folder_that_is_named_is_trusted_with_its_owner_and_group(place: Path) -> None:
    """HPCINIT_CONF=DIR may belong to the account that installs a site's software, but not to any user."""
    conf, file = write_conf(place)
    own(ALICE, place)
    own(MALLORY, conf, conf / "cluster", group=PROJECT, mode=0o775)
    own(MALLORY, file, group=PROJECT, mode=0o664)
    words = [sys.executable, "-m", "hpcinit", "submit", "ranks_per_node=1", "wait=true", "cluster=mine", "--", "true"]
    done = as_user(ALICE, words, place, HPCINIT_CONF=str(conf))
    assert done.returncode == 0 and (place / "ran").read_text() == f"{ALICE}\n", done.stderr
    file.chmod(0o666)
    done = as_user(ALICE, words, place, HPCINIT_CONF=str(conf))
    assert done.returncode == 2 and "every user can write to it" in done.stderr


# --- one file


def test_which_files_are_trusted(place: Path) -> None:
    """Root's files and your own are trusted.

    Those of others and of a shared group are not. An ACL counts as a group.
    """
    file = place / "spec.json"
    file.write_text("{}")

    def said(uid: int, gid: int, mode: int) -> str:
        os.chown(file, uid, gid)
        file.chmod(mode)
        return safe_files.path_ownership_problems(file, "submit again")

    assert said(0, 0, 0o644) == said(0, 0, 0o600) == said(0, PROJECT, 0o644) == ""
    assert said(0, 0, 0o664) == "", "root's own group"
    assert f"{file} belongs to user 4242 (mode 0600), expected root or root" in said(4242, 0, 0o600)
    assert "group users can write to it" in said(0, PROJECT, 0o664)
    assert "group 4242 can write to it" in said(0, 4242, 0o660)
    assert "every user can write to it" in said(0, 0, 0o602)
    if shutil.which("setfacl"):
        said(0, 0, 0o664)
        subprocess.run(["setfacl", "-m", f"u:{MALLORY}:rw", file], check=True)
        assert "group root can write to it" in safe_files.path_ownership_problems(file, "submit again")


PYTHON_RULE = """
import pathlib, sys
from hpcinit.base import safe_files
for path in map(pathlib.Path, sys.argv[1:]):
    print(path.name, "no" if safe_files.path_ownership_problems(path, "") else "yes")
"""


def test_which_owners_and_modes_are_trusted(place: Path) -> None:
    """Your own files and root's are trusted, unless another user or a shared group can write them."""
    me, other = pwd.getpwnam(ALICE), pwd.getpwnam(MALLORY)
    files = {  # owner, group, mode, whether it is trusted
        "mine": (me.pw_uid, me.pw_gid, 0o600, "yes"),
        "mine-others-read": (me.pw_uid, PROJECT, 0o644, "yes"),
        "mine-program": (me.pw_uid, me.pw_gid, 0o755, "yes"),
        "mine-set-group": (me.pw_uid, me.pw_gid, 0o2644, "yes"),
        "root": (0, 0, 0o644, "yes"),
        "mine-group-writes": (me.pw_uid, PROJECT, 0o664, "no"),
        "mine-group-only-writes": (me.pw_uid, PROJECT, 0o620, "no"),
        "mine-all-write": (me.pw_uid, me.pw_gid, 0o646, "no"),
        "mine-all-only-write": (me.pw_uid, me.pw_gid, 0o602, "no"),
        "root-group-writes": (0, 0, 0o664, "no"),
        "other": (other.pw_uid, other.pw_gid, 0o644, "no"),
        "other-private": (other.pw_uid, me.pw_gid, 0o600, "no"),
        "mine-private-group-writes": (me.pw_uid, me.pw_gid, 0o664, "yes"),
    }
    for name, (owner, group, mode, _) in files.items():
        (place / name).touch()
        os.chown(place / name, owner, group)
        (place / name).chmod(mode)
    command = [sys.executable, "-c", PYTHON_RULE, *(str(place / name) for name in files)]
    found = dict(line.split() for line in as_user(ALICE, command, place).stdout.splitlines())
    assert found == {name: trusted for name, (_, _, _, trusted) in files.items()}


def test_a_rank_refuses_a_spec_and_a_reader_shows_it(place: Path) -> None:
    """You may read a colleague's run, but not execute it."""
    run = folder.claim(place / "runs", "x")
    (run / "spec.json").write_text("{}")
    own(MALLORY, run / "spec.json", mode=0o644)
    with pytest.raises(SpecError, match="belongs to games"):
        load(run / "spec.json")
    with pytest.raises(SpecError, match="does not have format 1"):
        load(run / "spec.json", to_run=False)


def test_a_folder_of_another_user_is_not_run(hpcinit: Run, place: Path) -> None:
    """A rank, the local engine and resubmit refuse another user's run folder or script and name the owner."""
    done = hpcinit("submit", "ranks_per_node=1", f"runs_dir={place}/runs", "wait=true", "--", "true")
    run = folder_of(done)

    def said(*words: str) -> str:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, input="go\n", check=False)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stdout + done.stderr

    own(MALLORY, run, mode=0o755)
    assert f"{run} belongs to {MALLORY} (mode 0755), expected root" in said("hpcinit.run", f"{run}/spec.json")
    assert f"{run} belongs to {MALLORY}" in said("hpcinit.engine.local_job", str(run), "5")
    assert json.loads((run / "local.json").read_text())["state"] == "FAILED"
    assert f"{run} belongs to {MALLORY}" in said("hpcinit", "resubmit", str(run))
    own("root", run)
    own(MALLORY, run / "job.sh")
    assert f"{run}/job.sh belongs to {MALLORY}" in said("hpcinit.engine.local_job", str(run), "5")
