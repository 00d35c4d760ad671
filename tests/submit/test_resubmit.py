"""`hpcinit resubmit` and `hpcinit render`: a run's request once more, and what two runs differ in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_snapshot import checkout as checkout  # noqa: PLC0414 - a fixture
from tests.submit.test_snapshot import recorded, write
from tests.submitting import folder_of, printed, submit


def config(folder: Path) -> dict:
    return yaml.safe_load((folder / "config.yaml").read_text())


def test_the_same_request_again(hpcinit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another folder too: a new run folder beside the old one, the same config, arguments and own keys, and the
    same working folder."""
    words = ["nodes=2", "+mine={a: [1, two]}", "+job.env.A='it is'", "wait=true", "name=x"]
    first = folder_of(hpcinit("submit", *words, "--", "sh", "-c", 'echo "$A" "$1"; pwd', "-", "${c} 'd'"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = hpcinit("resubmit", str(first))
    assert done.returncode == 0, done.stdout + done.stderr
    second = folder_of(done)
    assert second == first.parent / "x-0002" and config(second) == config(first)
    assert printed(second, 1) == printed(first, 1) == f"it is ${{c}} 'd'\n{tmp_path}\n"
    provenance = json.loads((second / "provenance.json").read_text())
    assert provenance["command"] == ["hpcinit", "resubmit", str(first)] and provenance["workdir"] == str(tmp_path)
    assert (
        json.loads((second / "spec.json").read_text())["nonce"]
        != json.loads((first / "spec.json").read_text())["nonce"]
    )


def test_with_other_values(hpcinit: Run) -> None:
    """Overrides change what they name and nothing else; what is wrong with them is said as for submit."""
    first = folder_of(hpcinit("submit", "wait=true", "name=x", "--", "true"))
    second = folder_of(hpcinit("resubmit", "x-0001", "nodes=2", "seed=7", "job.args=[a]"))
    before, after = config(first), config(second)
    assert (after.pop("nodes"), after.pop("seed"), after["job"].pop("args")) == (2, 7, ["a"])
    assert (before.pop("nodes"), before.pop("seed"), before["job"].pop("args")) == (1, 0, [])
    assert before == after


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope-0001"], "no run 'nope-0001': neither a run folder nor a job id"),
        (
            ["x-0001", "cluster=mini"],
            "cluster=mini: chooses a file, and a run's config is one that has been put together",
        ),
        (["x-0001", "nodes=abc"], "nodes=abc: expected a whole number"),
        (["x-0001", "nodess=2"], "nodess"),
        (["x-0001", "nodes=0"], "nodes is 0, expected 1 or more"),
        (["torn-0001"], "config.yaml cannot be read: "),
        (["empty-0001"], "config.yaml holds no config; was it edited?"),
        (["bare-0001"], "provenance.json cannot be read: "),
        (["moved-0001"], "cannot enter /nowhere/at/all, where moved-0001 ran: No such file or directory; submit anew"),
    ],
)
def test_what_cannot_be_submitted_again(hpcinit: Run, tmp_path: Path, words: list[str], message: str) -> None:
    """Each reason is said with exit status 2, and no folder is made."""
    import shutil

    first = folder_of(hpcinit("submit", "wait=true", "name=x", "--", "true"))
    for name in ("torn", "empty", "bare", "moved"):
        shutil.copytree(first, tmp_path / f"runs/{name}-0001")
    write(
        {
            "torn-0001/config.yaml": "a: [",
            "empty-0001/config.yaml": "",
            "moved-0001/provenance.json": '{"workdir": "/nowhere/at/all"}',
        },
        tmp_path / "runs",
    )
    (tmp_path / "runs/bare-0001/provenance.json").unlink()
    done = hpcinit("resubmit", *words)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr, done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 5


def test_the_same_snapshot_or_a_fresh_one(hpcinit: Run, checkout: Path) -> None:
    """A run from a snapshot is submitted again from the same files, whatever became of the checkout; --fresh-code takes
    it as it is now; files that the job changed are refused."""
    first = folder_of(hpcinit("submit", "snapshot=git", "wait=true", "name=x", "--", "train.py"))
    write({"part.py": "SAYS = 'later'\n"}, checkout)
    done = hpcinit("resubmit", "x-0001")
    assert done.returncode == 0, done.stderr
    again = folder_of(done)
    fresh = folder_of(hpcinit("resubmit", "--fresh-code", "x-0001"))
    assert [printed(run, 0) for run in (first, again, fresh)] == ["committed\n", "committed\n", "later\n"]
    assert recorded(again / "code") == {**recorded(first / "code"), "from": str(first / "code")}
    write({"part.py": "SAYS = 'torn'\n"}, first / "code")
    done = hpcinit("resubmit", "x-0001")
    assert done.returncode == 1 and "are not those that were submitted (sha256 " in done.stderr
    assert "--fresh-code takes the checkout as it is now; nothing was submitted" in done.stderr
    assert sorted(path.name for path in (checkout / "runs").iterdir()) == ["x-0001", "x-0002", "x-0003"]


@pytest.mark.slurm
def test_a_run_that_goes_on_is_not_submitted_twice(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """While it runs, resubmit asks for again=true; its dependencies are left out, with a line."""
    slurm = idle_slurm
    before = submit(hpcinit, slurm, "ranks_per_node=1", "name=before", "--", "sleep", "300")
    submit(hpcinit, slurm, "ranks_per_node=1", "name=x", "after=before-0001", "--", "true")
    done = hpcinit("resubmit", "x-0001", env=slurm.env)
    assert (done.returncode, done.stdout) == (2, "")
    assert "x-0001 is PENDING as job " in done.stderr and "again=true submits it a second time" in done.stderr
    done = hpcinit("resubmit", "x-0001", "again=true", env=slurm.env)
    assert done.returncode == 0 and "hpcinit: after of x-0001 is left out; give it again to wait\n" in done.stderr
    assert "dependency" not in (folder_of(done) / "job.sh").read_text() and before.returncode == 0


def test_render_shows_the_script_and_what_differs(hpcinit: Run, tmp_path: Path) -> None:
    """Alone: the script as it would be now, byte for byte what was submitted. With another run or with key=value: a diff
    of config and script and exit status 1, or nothing and 0."""
    first = folder_of(hpcinit("submit", "wait=true", "name=x", "--", "true"))
    done = hpcinit("render", "x-0001")
    assert (done.returncode, done.stdout) == (0, (first / "job.sh").read_text().rstrip("\n") + "\n")
    assert done.stderr == f"hpcinit: {first}/job.sh: as it was submitted\n"
    hpcinit("resubmit", "x-0001"), hpcinit("resubmit", "x-0001", "nodes=2")
    same, other, now = hpcinit("render", "x-0001", "x-0002"), hpcinit("render", "x-0001", "x-0003"), None
    assert (same.returncode, same.stdout, same.stderr) == (0, "", "")
    assert other.returncode == 1 and other.stdout.startswith("--- x-0001/config.yaml\n+++ x-0003/config.yaml\n")
    assert "\n-nodes: 1\n+nodes: 2\n" in other.stdout and "\n-#SBATCH --nodes=1\n+#SBATCH --nodes=2\n" in other.stdout
    now = hpcinit("render", "x-0001", "nodes=2")
    assert now.returncode == 1 and "\n-#SBATCH --nodes=1\n+#SBATCH --nodes=2\n" in now.stdout
    assert "+++ x-0001 with nodes=2/job.sh\n" in now.stdout
    (first / "job.sh").write_text((first / "job.sh").read_text().replace("nodes=1", "nodes=3"))
    edited = hpcinit("render", "x-0001")
    assert edited.returncode == 1 and "lines differ from what was submitted" in edited.stderr
    assert "expected one other run, or key=value for this one" in hpcinit("render", "x-0001", "x-0002", "a=1").stderr


def test_render_of_a_snapshot(hpcinit: Run, checkout: Path) -> None:
    """A run from a snapshot renders to the very script that was submitted."""
    hpcinit("submit", "snapshot=git", "wait=true", "name=x", "--", "train.py")
    done = hpcinit("render", "x-0001")
    assert (done.returncode, "as it was submitted" in done.stderr) == (0, True), done.stdout + done.stderr


@pytest.mark.slurm
def test_of_a_sweep_only_what_failed(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """Of a sweep's tasks those that failed are submitted again, as one sweep; where none has, that is said."""
    slurm = idle_slurm
    words = ["--multirun", "seed=1,2,3", "ranks_per_node=1", "name=x", "wait=true", "--"]
    program = "grep -q '\"seed\": [23],' $HPCINIT_RUN/spec.json && test ! -e mended && exit 3; exit 0"
    first = submit(hpcinit, slurm, *words, "sh", "-c", program)
    assert first.returncode == 3, first.stdout + first.stderr
    Path("mended").touch()
    done = hpcinit("resubmit", "x-0001", env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed=2" in done.stdout and "seed=3" in done.stdout and "seed=1" not in done.stdout
    assert [config(Path(f"runs/x-0002/{number}"))["seed"] for number in (0, 1)] == [2, 3]
    recorded_command = json.loads(Path("runs/x-0002/provenance.json").read_text())["command"]
    assert recorded_command == ["hpcinit", "resubmit", "x-0001"]
    done = hpcinit("resubmit", "x-0002", env=slurm.env)
    assert (done.returncode, done.stdout) == (2, "")
    assert "x-0002: no task of this sweep has failed, there is nothing to submit again" in done.stderr
