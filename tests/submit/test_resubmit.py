"""`hpcinit resubmit` submits a run again, and `hpcinit render` shows differences between runs."""

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
    """From any folder, resubmit makes a new run folder with the same config, arguments, own keys and working folder."""
    words = ["nodes=2", "+mine={a: [1, two], b: 'C:\\\\x'}", "+far=inf", "+job.env.A='it is'", "wait=true", "name=x"]
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
    """Overrides change only the named keys, and errors in them are reported as for submit."""
    first = folder_of(hpcinit("submit", "wait=true", "name=x", "--", "true"))
    second = folder_of(hpcinit("resubmit", "x-0001", "nodes=2", "seed=7", "job.args=[a]"))
    before, after = config(first), config(second)
    assert (after.pop("nodes"), after.pop("seed"), after["job"].pop("args")) == (2, 7, ["a"])
    assert (before.pop("nodes"), before.pop("seed"), before["job"].pop("args")) == (1, 0, [])
    assert before == after


def test_the_users_own_key_in_the_recorded_arguments(hpcinit: Run) -> None:
    """A key that the program got as an argument causes no warning. A changed one does, unless the arguments change too."""
    first = hpcinit("submit", "+lr=0.1", "wait=true", "name=x", "--", "echo", "${lr}")
    assert first.returncode == 0, first.stderr
    again = hpcinit("resubmit", "x-0001")
    assert again.returncode == 0 and "lr" not in again.stderr, again.stderr
    changed = hpcinit("resubmit", "x-0001", "lr=0.2", "again=true")
    assert "lr=0.2 does not change the recorded arguments of the program; if" in changed.stderr
    given = hpcinit("resubmit", "x-0001", "lr=0.3", "again=true", "--", "echo", "${lr}")
    assert given.returncode == 0 and "do not change" not in given.stderr, given.stderr
    assert printed(folder_of(given), 0) == "0.3\n"


def test_another_program(hpcinit: Run, tmp_path: Path) -> None:
    """A program after -- replaces the old one with all its arguments, and nothing else."""
    first = folder_of(
        hpcinit("submit", "nodes=2", "wait=true", "name=x", "--", "sh", "-c", "echo $1", "-", "old", "more")
    )
    done = hpcinit("resubmit", "x-0001", "seed=7", "--", "sh", "-c", "echo $1 $2", "-", "new", "--lr=1e-3")
    assert done.returncode == 0, done.stderr
    second = folder_of(done)
    assert printed(first, 1) == "old\n" and printed(second, 1) == "new --lr=1e-3\n"
    before, after = config(first), config(second)
    assert after["job"].pop("args") == ["-c", "echo $1 $2", "-", "new", "--lr=1e-3"] and after.pop("seed") == 7
    assert before["job"].pop("args") and before.pop("seed") == 0 and before == after
    (tmp_path / "train.py").write_text("import sys; print(*sys.argv[1:])\n")
    third = folder_of(hpcinit("resubmit", "x-0001", "--", "train.py", "--lr", "1e-3"))
    assert printed(third, 0) == "--lr 1e-3\n" and config(third)["job"]["command"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x-0001", "--"], "no program after --, expected one: hpcinit resubmit RUN -- train.py"),
        (["x-0001", "--", "--lr", "3"], "expected the program first: hpcinit resubmit RUN -- train.py --lr 3"),
        (["nope-0001"], "no run 'nope-0001': no run folder or job has this name"),
        (
            ["x-0001", "cluster=mini"],
            "cluster=mini would select another config file, but an existing run keeps its config files",
        ),
        (["x-0001", "nodes=abc"], "nodes=abc: expected a whole number"),
        (["x-0001", "nodess=2"], "nodess"),
        (["x-0001", "nodes=0"], "nodes is 0, expected 1 or more"),
        (["torn-0001"], "torn-0001/config.yaml: "),
        (["empty-0001"], "config.yaml does not contain a config; was it edited?"),
        (["bare-0001"], "bare-0001/provenance.json: "),
        (
            ["moved-0001"],
            "cannot enter /nowhere/at/all, where moved-0001 ran: No such file or directory; submit a new run",
        ),
    ],
)
def test_what_cannot_be_submitted_again(hpcinit: Run, tmp_path: Path, words: list[str], message: str) -> None:
    """Each reason is reported with exit status 2, and no folder is made."""
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
    assert len(list((tmp_path / "runs").glob("[!.]*"))) == 5


def test_the_same_snapshot_or_a_fresh_one(hpcinit: Run, checkout: Path) -> None:
    """A run from a snapshot is submitted again from the same files, and --fresh-code uses the current checkout.

    Files that the job changed are refused.
    """
    first = folder_of(hpcinit("submit", "snapshot=git", "wait=true", "name=x", "--", "train.py"))
    write({"part.py": "TEXT = 'later'\n"}, checkout)
    done = hpcinit("resubmit", "x-0001")
    assert done.returncode == 0, done.stderr
    again = folder_of(done)
    fresh = folder_of(hpcinit("resubmit", "--fresh-code", "x-0001"))
    assert [printed(run, 0) for run in (first, again, fresh)] == ["committed\n", "committed\n", "later\n"]
    assert recorded(again / "code") == {**recorded(first / "code"), "from": str(first / "code")}
    write({"part.py": "TEXT = 'torn'\n"}, first / "code")
    done = hpcinit("resubmit", "x-0001")
    assert done.returncode == 1 and "have changed since the run was submitted (sha256 " in done.stderr
    assert "--fresh-code submits the changed files; nothing was submitted" in done.stderr
    assert sorted(path.name for path in (checkout / "runs").glob("[!.]*")) == ["x-0001", "x-0002", "x-0003"]


def test_variables_of_another_shell_are_named(hpcinit: Run) -> None:
    """Only names are recorded, and resubmit prints those that differ, without the session's and the config's."""
    session = {"SSH_TTY": "/dev/pts/9", "TMUX": "x", "SLURM_JOB_ID": "7", "XDG_SESSION_ID": "4", "WANDB_API_KEY": "k3y"}
    shell = {**session, "FAIL_ABOVE": "a-value-of-mine", "KEPT": "1"}
    words = ["wait=true", "name=x", "+job.env.GIVEN=2", "--", "sh", "-c", "echo $KEPT"]
    first = folder_of(hpcinit("submit", *words, env={**shell, "GIVEN": "1"}))
    recorded = json.loads((first / "provenance.json").read_text())["variables"]
    assert {"FAIL_ABOVE", "KEPT", "PATH"} <= set(recorded) and not set(session) & set(recorded)
    kept = [path.read_text(errors="replace") for path in first.rglob("*.json")]
    assert not any("a-value-of-mine" in text for text in kept)
    same = hpcinit("resubmit", "x-0001", env={"KEPT": "2", "FAIL_ABOVE": "4"})
    assert same.returncode == 0 and "this shell" not in same.stderr, same.stderr
    other = hpcinit("resubmit", "x-0001", env={"NEW_HERE": "1", "SSH_CLIENT": "me"})
    assert other.returncode == 0
    assert (
        "hpcinit: this shell differs from the one that submitted x-0001: FAIL_ABOVE, KEPT were set then, but not now, and "
        "NEW_HERE was not set then. If the program reads one of them, the result may differ; to repeat the run: export "
        "FAIL_ABOVE=VALUE or add +job.env.FAIL_ABOVE=VALUE\n" in other.stderr
    ), other.stderr
    given = hpcinit("resubmit", "x-0001", "+job.env.FAIL_ABOVE=3", "+job.env.KEPT=1")
    assert given.returncode == 0 and "this shell" not in given.stderr, given.stderr


@pytest.mark.slurm
def test_an_unfinished_run_needs_again(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """While a run is pending or running, resubmit requires again=true. Its dependencies are dropped, with a note."""
    slurm = idle_slurm
    before = submit(hpcinit, slurm, "ranks_per_node=1", "name=before", "--", "sleep", "300")
    submit(hpcinit, slurm, "ranks_per_node=1", "name=x", "dependency=afterany:before-0001", "--", "true")
    done = hpcinit("resubmit", "x-0001", env=slurm.env)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "x-0001 is still PENDING as job " in done.stderr and "to submit it a second time add again=true" in done.stderr
    )
    done = hpcinit("resubmit", "x-0001", "again=true", env=slurm.env)
    assert (
        done.returncode == 0
        and "hpcinit: the new run does not use dependency=afterany:before-0001 of x-0001; to wait for a job, add dependency=... again\n"
        in done.stderr
    )
    assert "dependency" not in (folder_of(done) / "job.sh").read_text() and before.returncode == 0


def test_render_shows_the_script_and_differences(hpcinit: Run, tmp_path: Path) -> None:
    """Without a second run or overrides, render prints the script as submitted, byte for byte.

    Otherwise it prints the differences in config and script with exit status 1, or nothing with 0.
    """
    first = folder_of(hpcinit("submit", "wait=true", "name=x", "--", "true"))
    done = hpcinit("render", "x-0001")
    assert (done.returncode, done.stdout) == (0, (first / "job.sh").read_text().rstrip("\n") + "\n")
    assert done.stderr == f"hpcinit: {first}/job.sh: identical to the submitted script\n"
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
    assert edited.returncode == 1 and " different from the submitted script" in edited.stderr
    assert (
        "expected either one other run, or key=value settings for this run"
        in hpcinit("render", "x-0001", "x-0002", "a=1").stderr
    )


def test_render_of_a_snapshot(hpcinit: Run, checkout: Path) -> None:
    """A run from a snapshot renders to the submitted script."""
    hpcinit("submit", "snapshot=git", "wait=true", "name=x", "--", "train.py")
    done = hpcinit("render", "x-0001")
    assert (done.returncode, "identical to the submitted script" in done.stderr) == (0, True), done.stdout + done.stderr


@pytest.mark.slurm
def test_one_task_of_a_sweep(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """resubmit and export accept one task of a sweep. Its second run is beside the sweep, with its own name."""
    env = idle_slurm.env
    words = ["--multirun", "seed=1,2", "ranks_per_node=1", "name=x", "wait=true", "--"]
    first = submit(hpcinit, idle_slurm, *words, "false")
    assert first.returncode == 1, first.stderr
    again = folder_of(hpcinit("resubmit", "x-0001/1", env=env))
    assert again == Path("runs/x-0002").absolute() and config(again)["seed"] == 2
    other = folder_of(hpcinit("resubmit", "x-0001/0", "--", "true", env=env))
    assert other == Path("runs/x-0003").absolute() and config(other)["seed"] == 1
    script = hpcinit("export", "x-0001/1", env=env)
    assert (script.returncode, script.stdout[:11]) == (0, "#!/bin/bash"), script.stderr


@pytest.mark.slurm
def test_only_the_failed_tasks_of_a_sweep(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """The failed tasks of a sweep are submitted again as one sweep. If no task failed, that is an error."""
    slurm = idle_slurm
    words = ["--multirun", "seed=1,2,3", "ranks_per_node=1", "name=x", "wait=true", "--"]
    program = 'grep -q \'"seed": [23],\' $HPCINIT_RUN/spec.json && test -n "$FAIL_ABOVE" && exit 3; exit 0'
    shell = {**slurm.env, "FAIL_ABOVE": "1"}
    first = hpcinit("submit", "cluster=mini", *words, "sh", "-c", program, env=shell)
    assert first.returncode == 3, first.stdout + first.stderr
    done = hpcinit("resubmit", "x-0001", env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    what = "this shell differs from the one that submitted x-0001: FAIL_ABOVE was set then, but not now. If the program"
    assert done.stderr.count(what) == 1, done.stderr
    assert "seed=2" in done.stdout and "seed=3" in done.stdout and "seed=1" not in done.stdout
    assert [config(Path(f"runs/x-0002/{number}"))["seed"] for number in (0, 1)] == [2, 3]
    recorded_command = json.loads(Path("runs/x-0002/provenance.json").read_text())["command"]
    assert recorded_command == ["hpcinit", "resubmit", "x-0001"]
    for name, what in (("x-0002", "x-0002 is a sweep"), ("x-0002/1", "x-0002/1 is a task of a sweep")):
        refused = hpcinit("render", name)
        assert refused.returncode == 2 and f"{what}, and all tasks of a sweep share a script: read " in refused.stderr
    done = hpcinit("resubmit", "x-0002", env=slurm.env)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no task of the sweep x-0002 has failed, so there is nothing to submit again" in done.stderr
