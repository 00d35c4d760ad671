"""The secret of ranks that no submission started, and what another user can do without it."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hpcinit.base import safe_files
from hpcinit.rendezvous import nonce
from hpcinit.world import World, ports
from tests.minislurm import MiniSlurm
from tests.rendezvous.test_rendezvous import HERE, free_ports
from tests.rendezvous.test_rendezvous_attacks import IMPOSTOR, ROOT, another_process, needs_root
from tests.test_sbatch import finish, start

NAME = ".hpcinit-77.0.0.nonce"


def world(rank: int = 0, nodes: int = 2) -> World:
    return World("slurm", rank, 2, 0, 1, rank % nodes, ("a", "b")[:nodes], "a", (20_000,), "77.0.0")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a new working folder and cache, in a process without a secret."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(nonce.ENV_NONCE, "")
    return tmp_path


def test_ranks_agree_on_one_secret_however_they_start(places: Path) -> None:
    """Of 12 processes that start at the same moment one creates the secret, and all read it."""
    code = (
        "import sys, time; from tests.rendezvous.test_nonce import world; from hpcinit.rendezvous import nonce\n"
        "print('ready', flush=True); sys.stdin.readline(); print(nonce.find(world(int(sys.argv[1]) % 2), None).text)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        for n in range(12)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    found = {process.communicate(timeout=150)[0] for process in started}
    assert len(found) == 1 and len(found.pop().strip()) == 32
    (file,) = Path.cwd().iterdir()
    assert file.name == NAME and file.stat().st_mode & 0o777 == 0o600


def test_the_file_goes_and_the_secret_stays_in_the_environment() -> None:
    """Rank 0 removes the file, but its later child processes still have the secret."""
    found = nonce.find(world(), None)
    assert len(found.text) == 32 and os.environ[nonce.ENV_NONCE] == found.text and Path(NAME).exists()
    found.remove()
    assert not list(Path.cwd().iterdir()) and nonce.find(world(), None).text == found.text


def test_a_given_secret_is_used_and_no_file_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """HPCINIT_NONCE, as the scripts in sbatch/ set it, is the secret."""
    monkeypatch.setenv(nonce.ENV_NONCE, "given")
    assert nonce.find(world(), None).text == "given" and not list(Path.cwd().iterdir())


def _as_nobody(code: str) -> None:
    nobody = pwd.getpwnam("nobody")
    script = f"import os\nos.setgid({nobody.pw_gid})\nos.setuid({nobody.pw_uid})\n{code}"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


@needs_root
def test_a_file_of_another_user_is_not_used(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that another user can write, that user's file is ignored and the next folder is used."""
    with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:  # other users cannot read pytest's folders
        Path(open_to_all).chmod(0o1777)
        monkeypatch.chdir(open_to_all)
        path, text = str(Path(NAME).absolute()), f"{nonce.HEAD}{'0' * 32}\n".encode()
        _as_nobody(f"os.write(os.open({path!r}, os.O_WRONLY | os.O_CREAT, 0o600), {text!r})")
        assert Path(path).stat().st_uid == pwd.getpwnam("nobody").pw_uid
        found = nonce.find(world(), None).text
        assert found not in ("", "0" * 32) and (places / "cache/hpcinit" / NAME).exists()
        monkeypatch.chdir(places)


@pytest.mark.parametrize("how", ["readable", "link", "content", "folder", "fifo"])
def test_a_file_that_others_could_know_is_not_used(places: Path, how: str) -> None:
    """A file that others can read, a symbolic link and an unrelated file are not accepted as the secret."""
    other = places / "other"
    other.write_text(f"{nonce.HEAD}{'0' * 32}\n")
    other.chmod(0o644 if how == "readable" else 0o600)
    if how == "link":
        Path(NAME).symlink_to(other)
    elif how == "folder":
        Path(NAME).mkdir()
    elif how == "fifo":
        os.mkfifo(NAME, 0o600)
    else:
        if how == "content":
            other.write_text("0" * 32 + "\n")
        other.rename(NAME)
    assert nonce.find(world(), None).text not in ("", "0" * 32)
    assert (places / "cache/hpcinit" / NAME).exists()


def test_no_shared_folder_is_a_warning(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file system in memory is visible to one node only: there is no secret, and rank 0 prints advice once."""
    memory = Path("/dev/shm") / f"hpcinit-test-{os.getpid()}"
    memory.mkdir()
    try:
        assert safe_files.file_system(memory) == "tmpfs"
        monkeypatch.chdir(memory)
        monkeypatch.setenv("XDG_CACHE_HOME", str(memory))
        assert [nonce.find(world(rank), None).text for rank in (0, 1)] == ["", ""]
        warning = capfd.readouterr().err
        assert warning.count("warning: the ranks of this job share no secret") == 1
        assert (
            "Another user on the job's nodes" in warning
            and "export HPCINIT_NONCE=$(cat /proc/sys/kernel/random/uuid)" in warning
        )
        assert len(nonce.find(world(nodes=1), None).text) == 32, "one node is enough"
    finally:
        monkeypatch.chdir("/")
        for file in sorted(memory.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        memory.rmdir()


def test_old_files_are_removed(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start in the folder removes files that killed ranks left there a day ago, and nothing else."""
    cache = places / "cache/hpcinit"
    cache.mkdir(parents=True)
    monkeypatch.setattr(nonce, "PRIVATE", set())
    for folder in (places / "work", cache):
        old, torn = folder / ".hpcinit-1.0.0.nonce", folder / ".hpcinit-1.0.0.nonce.n1.7"
        young, other = folder / ".hpcinit-2.0.0.nonce", folder / ".hpcinit-notes"
        for file in (old, torn, young, other):
            file.touch()
        for file in (old, torn, other):
            os.utime(file, (time.time() - 90_000,) * 2)
        monkeypatch.delenv(nonce.ENV_NONCE)
        nonce.find(world(), None).remove()
        assert [file.exists() for file in (old, torn, young, other)] == [False, False, True, True]


def test_the_file_of_a_killed_start_is_removed(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start in the folder removes the file of a rank that was killed, but not that of one that may be alive."""
    code = (
        "import time; from dataclasses import replace; from tests.rendezvous.test_nonce import world\n"
        "from hpcinit.rendezvous import nonce; nonce.find(replace(world(), job='76.0.0'), None)\n"
        "print('created', flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as process:
        created = process.stdout and process.stdout.readline()
        nonce.find(world(), None).remove()
        before = [path.name for path in Path.cwd().iterdir()]
        process.kill()
    assert created == b"created\n" and before == [".hpcinit-76.0.0.nonce"]
    elsewhere = Path(".hpcinit-75.0.0.nonce")
    head, _, creator = Path(before[0]).read_text().partition("\n")
    elsewhere.write_text(f"{head}\n{json.dumps(json.loads(creator) | {'host': 'n999'})}\n")
    elsewhere.chmod(0o600)
    monkeypatch.delenv(nonce.ENV_NONCE)
    nonce.find(world(), None)
    assert sorted(path.name for path in Path.cwd().iterdir()) == [elsewhere.name, NAME]


# --- on a cluster

PROGRAM = """
import hashlib, json, os, sys
print(json.dumps({"rank": int(os.environ["RANK"]), "secret": len(os.environ.get("HPCINIT_NONCE", "")),
    "same": hashlib.sha256(os.environ.get("HPCINIT_NONCE", "").encode()).hexdigest()}), flush=True)
"""
JOIN = """
import os, sys, time
sys.path.insert(0, {root!r})
from hpcinit.rendezvous import rendezvous_client, protocol
"load what this user may read and the other may not".encode("idna")
os.setgid({gid})
os.setuid({uid})
print("ready", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until:
    for port in {ports!r}:
        try:
            reply = rendezvous_client.connect({address!r}, port, rendezvous_client.JoinRequest(1, {key!r}, {job!r}, {{}}), 0.3)
            print("accepted", flush=True)
            time.sleep(60)
        except protocol.NotOurs as error:
            if "another secret" in str(error):
                print("refused", flush=True)
    time.sleep(0.02)
"""


@needs_root
@pytest.mark.slurm
def test_another_user_is_neither_rank_0_nor_rank_1_of_a_plain_srun(slurm: MiniSlurm, tmp_path: Path) -> None:
    """Another user knows job, step and restart of `srun python -m hpcinit.run`; that is not enough to be accepted.

    One process of the user `nobody` keeps connecting to rank 0 as rank 1, and another one acts as rank 0 on its first
    port and node.
    """
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\nuntil [ -e go ]; do sleep 0.1; done\n"
        f"srun -n2 -N2 --ntasks-per-node=1 bash -c '[ $SLURM_PROCID = 0 ] || sleep 4; "
        f'exec "{sys.executable}" -m hpcinit.run train.py\'\n'
    )
    number = start(slurm, tmp_path, "-N2", "--ntasks-per-node=1", "-w", "n1,n2", "job.sh")
    nobody, job = pwd.getpwnam("nobody"), f"{number}.0.0"
    key = hashlib.sha256(f"|{job}".encode()).hexdigest()
    candidates = ports.candidate_ports(job)
    address = _address(slurm, "n1")
    known = {
        "uid": nobody.pw_uid,
        "gid": nobody.pw_gid,
        "root": str(ROOT),
        "key": key,
        "job": f"{job}#0",
        "address": address,
    }
    holder = json.loads((slurm.directory / "run/holders.json").read_text())["n1"]
    on_node = ("nsenter", "-t", str(holder), "-n")
    with (
        another_process(IMPOSTOR.format(port=candidates[0], **known), *on_node) as rank_0,
        another_process(JOIN.format(ports=candidates[1:3], **known)) as rank_1,
    ):
        (tmp_path / "go").touch()
        done = finish(slurm, tmp_path, number)
        for process in (rank_0, rank_1):
            process.kill()
        assert rank_1.stdout is not None and rank_0.stdout is not None
        joined, accepted = rank_1.stdout.read(), rank_0.stdout.read()
    assert done.state == "COMPLETED", done.log
    assert "refused" in joined and "accepted" not in joined and "accepted" not in accepted
    reports = [json.loads(line) for line in done.log.splitlines() if line.startswith("{")]
    assert sorted(report["rank"] for report in reports) == [0, 1]
    assert {report["secret"] for report in reports} == {32} and len({report["same"] for report in reports}) == 1
    assert not list(tmp_path.glob(".hpcinit-*")), "rank 0 must remove the file"
    assert "with another secret" in done.log


def _address(slurm: MiniSlurm, node: str) -> str:
    lines = (slurm.directory / "etc/hosts").read_text().splitlines()
    return next(line.split()[0] for line in lines if node in line.split()[1:])


@pytest.mark.slurm
def test_the_scripts_make_a_secret_of_their_own(slurm: MiniSlurm, tmp_path: Path) -> None:
    """Ranks of a script in sbatch/ share a secret that is in no argument list, and each start has a different one."""
    (tmp_path / "train.py").write_text(PROGRAM)
    seen = []
    for _ in range(2):
        number = start(slurm, tmp_path, "--nodes=2", "--ntasks-per-node=1", str(ROOT / "sbatch/ddp.sbatch"), "train.py")
        done = finish(slurm, tmp_path, number)
        assert done.state == "COMPLETED", done.log
        reports = done.reports()
        assert [report["secret"] for report in reports] == [36, 36] and len({report["same"] for report in reports}) == 1
        seen.append(reports[0]["same"])
        (tmp_path / "job.log").unlink()
    assert seen[0] != seen[1] and not list(tmp_path.glob(".hpcinit-*"))


def test_the_file_is_gone_while_the_program_runs(places: Path) -> None:
    """Rank 0 removes the file as soon as all ranks have connected, not only when its program ends."""
    code = (
        "import os, time; time.sleep(2); print(sorted(os.listdir('.')), len(os.environ['HPCINIT_NONCE']), flush=True)"
    )
    Path("t.py").write_text(code)
    env = {**os.environ, "HPCINIT_STARTED_BY": "env", "WORLD_SIZE": "3", "MASTER_ADDR": HERE, "PYTHONPATH": str(ROOT)}
    env["MASTER_PORT"] = str(free_ports(1)[0])
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "hpcinit.run", "t.py"], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    done = [process.communicate(timeout=150) for process in started]
    assert [output for output, _ in done] == ["['t.py'] 32\n"] * 3, done
