"""launch.env_to_local on the real Slurm: ranks run from their node's own disk, and nothing stays there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests import environments, waiting
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, job_id_of, submit

until = partial(waiting.until, timeout_s=90)

PROGRAM = """
import json, os, subprocess, sys, time
import inside
about = {"prefix": sys.prefix, "inside": inside.__file__, "node": os.environ["SLURMD_NODENAME"]}
about["command"] = subprocess.check_output(["prefix"], text=True).strip()
print("about:", json.dumps(about), flush=True)
EVAL
"""


@dataclass(frozen=True)
class Site:
    """A cluster whose nodes have a disk of their own at one path, and an environment."""

    hpcinit: Run
    slurm: MiniSlurm
    disk: Path
    venv: Path

    def submit(self, end: str, *words: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
        """A program that tells where it runs from and then does `end`."""
        Path("program.py").write_text(PROGRAM.replace("EVAL", end))
        os.environ["PATH"] = f"{self.venv}/bin:{os.environ['PATH']}"
        return submit(self.hpcinit, self.slurm, f"cluster.venv={self.venv}", f"cluster.local_disk={self.disk}",
            "cluster.cpus_per_node=null", "ranks_per_node=1", "launch.env_to_local=true", "job=program", "job.script=program.py",
            f"wait={wait}".lower(), *words)  # fmt: skip

    def left(self, node: str) -> list[str]:
        """The copies on the disk of a node; the caches of killed ranks are not meant."""
        own = self.disk / f"hpcinit-{os.geteuid()}"
        return subprocess.check_output(
            self.slurm.inside(node, ["sh", "-c", f"ls -A {own} | grep environment || true"]), text=True
        ).split()


@pytest.fixture
def site(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    disk = tmp_path / "disk"
    disk.mkdir()
    for node in idle_slurm.nodes:
        subprocess.run(idle_slurm.inside(node, ["mount", "-t", "tmpfs", "none", str(disk)]), check=True)
    yield Site(hpcinit, idle_slurm, disk, environments.make(tmp_path / "venv"))
    idle_slurm.cancel_all()
    for node in idle_slurm.nodes:
        subprocess.run(idle_slurm.inside(node, ["umount", "--lazy", str(disk)]), check=True)


def told(folder: Path) -> list[dict[str, str]]:
    logs = [path.read_text().splitlines() for path in sorted(folder.glob("logs/rank-*.log"))]
    return [json.loads(line[7:]) for lines in logs for line in lines if line.startswith("about: ")]


def test_ranks_run_from_their_nodes_own_disk(site: Site) -> None:
    """Python, packages and commands of every rank; in the end the copies are gone, and what a killed job left as well."""
    left = f"{site.disk}/hpcinit-{os.geteuid()}/environment-1.0"
    make = f"mkdir -m 700 {Path(left).parent} && mkdir {left} && touch {left}/in-use"
    subprocess.run(site.slurm.inside("n1", ["sh", "-c", make]), check=True)
    done = site.submit("", "nodes=2", "ranks_per_node=2")
    assert done.returncode == 0, done.stdout + done.stderr
    place = f"{site.disk}/hpcinit-{os.geteuid()}/environment-{job_id_of(done)}.0/environment"
    ranks = told(folder_of(done))
    assert [rank["node"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
    assert {(rank["prefix"], rank["command"]) for rank in ranks} == {(place, place)}
    assert all(rank["inside"].startswith(place) for rank in ranks)
    assert " MB on 2 node(s) in " in (folder_of(done) / "logs/job.log").read_text()
    assert site.left("n1") == site.left("n2") == []


@pytest.mark.parametrize("words", [["launch=fork", "launch.preload=[inside]"], ["spares=1", "restart.on=[failure]"]])
def test_a_rank_that_fails(site: Site, words: list[str]) -> None:
    """Its status is the job's, and its node is cleared; with a spare node, that one has a copy too."""
    spare = "spares=1" in words
    end = "sys.exit(3)" if not spare else "os.environ['SLURMD_NODENAME'] == 'n1' and os.kill(os.getpid(), 9)"
    done = site.submit(end, "nodes=1", *words)
    assert done.returncode == (0 if spare else 3), done.stdout + done.stderr
    ranks = told(folder_of(done))
    assert [rank["node"] for rank in ranks] == ["n1", "n2"][: 2 if spare else 1]
    assert all(rank["inside"].startswith(str(site.disk)) for rank in ranks)
    assert site.left("n1") == site.left("n2") == []


def test_torchruns_agent(site: Site) -> None:
    """It and what it starts, a second time too, run from the copy."""
    end = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and sys.exit(4)"
    done = site.submit(end, "launch=torchrun", "launch.max_restarts=1", "nodes=1")
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = told(folder_of(done))
    assert len(ranks) == 2 and all(rank["inside"].startswith(str(site.disk)) for rank in ranks)
    assert site.left("n1") == []


def test_a_job_that_is_cancelled(site: Site) -> None:
    """The copy goes after the ranks that use it, not before."""
    end = (
        "import signal\ndef save(*_):\n    time.sleep(2); import inside.late; print('saved', flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, save); print('waits', flush=True); time.sleep(300)"
    )
    (next(site.venv.glob("lib/python*/site-packages")) / "inside/late.py").write_text("")
    done = site.submit(end, "nodes=1", wait=False)
    log = folder_of(done) / "logs/rank-0.log"
    until(lambda: log.exists() and "waits" in log.read_text())
    assert site.left("n1") != []
    site.slurm.run("scancel", job_id_of(done))
    until(lambda: "saved" in log.read_text().splitlines() and site.left("n1") == [])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nodes=2", "cluster.local_disk=shared"], "another node made it, so this is no disk of the node's own"),
        (["nodes=1", "cluster.setup=['sbcast() { return 7; }']"], "sbcast failed with status 7"),
        (
            ["nodes=1", "cluster.setup=['rm cache/hpcinit/environments/*.tar']"],
            "cannot be read: submitting again makes",
        ),
        # The job runs as root, which may give the archive to another user, as if that one had put it there.
        (
            ["nodes=1", "cluster.setup=['chown games cache/hpcinit/environments/*.tar']"],
            ".tar can be written by another user (owner games, mode 600), expected yours alone",
        ),
    ],
)
def test_what_a_node_cannot_take(site: Site, words: list[str], why: str) -> None:
    """The ranks run from where the environment is, and the job's log says why; nothing is left on the nodes."""
    (shared := Path("shared").absolute()).mkdir()
    done = site.submit(
        "", *(word.replace("shared", str(shared)) for word in words), f"cluster.cache={Path.cwd()}/cache"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {rank["prefix"] for rank in told(folder_of(done))} == {str(site.venv)}
    (warning,) = [line for line in (folder_of(done) / "logs/job.log").read_text().splitlines() if "warning" in line]
    assert why in warning and warning.endswith(f"; the ranks run from {site.venv}")
    assert site.left("n1") == [] and not list(shared.glob("*/environment*"))
