"""Two process groups that save into one folder, and checkpoint files that were changed after the save."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.train.checkpoint import checkpoint_folder as of_steps
from hpcinit.train.checkpoint import owner as owners
from tests.runtime.spawned import ranks
from tests.runtime.test_checkpoint import BEGIN, begin, left_in, publish, two_ranks, whole

PATIENCE_S = 240  # four ranks that import torch at the same time, on a busy machine
# The groups synchronize: rank 0 of each touches a file, and waits for a file of the other group.
GATES = """
        import time
        from hpcinit.train.checkpoint import checkpoint_folder as of_steps, owner as owners
        marks, first = Path(os.environ["MARKS"]), os.environ["GROUP"] == "first"
        def at(mark):
            if run.rank == 0:
                (marks / mark).touch()
        def until(mark):
            limit = time.monotonic() + 100
            while not (marks / mark).exists():
                assert time.monotonic() < limit, mark
                time.sleep(0.05)
        def paused(module, name, call, mark, other):
            # On rank 0, the call number `call` of the function stops before its result is used.
            real, calls = getattr(module, name), []
            def function(*args):
                calls.append(args)
                if len(calls) == call and name == "publish":
                    at(mark), until(other)
                    return real(*args)
                result = real(*args)
                if len(calls) == call and name == "claim":
                    at(mark), until(other)
                return result
            setattr(module, name, function)
            return lambda: setattr(module, name, real)
        def weights(program):
            return sum(float(each.detach().double().sum()) for each in program.wrapped.model.parameters())
        def save(folder, step, job):
            messages = error(lambda: program.save(folder, step, job=job, extra=[job, weights(program)]))
            torch.distributed.barrier()
            return messages
        def load(folder, job):
            other = Program(run, plain, ddp)
            loaded = checkpoint.load(other.wrapped, folder, layout=other.layout, job=job)
            return [loaded.step, *loaded.extra[:1], loaded.extra[1] == weights(other)]
        program = Program(run, plain, ddp)
        program.steps(1 if first else 2)
        top = Path(os.environ["FOLDER"])
"""


def two_groups(code: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run `code` in both groups at the same time, with 2 ranks each; return the content of rank 0's `found`."""
    (folder / "marks").mkdir()
    env = {"OMP_NUM_THREADS": "1", "MARKS": str(folder / "marks"), "FOLDER": str(folder / "checkpoints")}
    text = BEGIN.replace("deepspeed=True", "") + GATES + code + "\n        print(json.dumps(found))\n"
    for group in ("first", "second"):
        (folder / group).mkdir()
    with (
        ranks(text, 2, folder / "first", GROUP="first", **env) as one,
        ranks(text, 2, folder / "second", GROUP="second", **env) as other,
    ):
        for rank in (*one, *other):
            rank.process.wait(PATIENCE_S)
        ended = [rank.end() for rank in (*one, *other)]
    assert [status for status, _ in ended] == [0] * 4, "\n".join(output for _, output in ended)
    found = [json.loads(output.splitlines()[-1]) for _, output in ended]
    assert found[0].keys() == found[1].keys()
    return found[0], found[2]


def test_two_jobs_and_one_folder(tmp_path: Path) -> None:
    """The second job takes the folder over: the first job's current step is not published or mixed with the second's,
    and every further save of the first raises an error that names the second."""
    code = """
        folder = top
        if first:
            found["1"] = save(folder, 1, "41.0.0")
            back = paused(of_steps, "publish", 1, "first wrote 5", "second saved 5")
            found["5"] = save(folder, 5, "41.0.0")
            back()
            found["6"] = save(folder, 6, "41.0.0")
            at("first is through")
        else:
            until("first wrote 5")
            found["loaded"] = load(folder, "42.0.0")
            found["5"] = save(folder, 5, "42.0.0")
            at("second saved 5")
            until("first is through")
            found["7"] = save(folder, 7, "42.0.0")
            found["at last"] = [load(folder, "42.0.0"), names(folder)]
    """
    first, second = two_groups(code, tmp_path)
    folder = tmp_path / "checkpoints"
    for step in ("5", "6"):
        assert first[step].startswith(
            f"RequestError: job 42 (restart 0, step 0) on {os.uname().nodename} has taken over"
        )
        assert "from job 41 (restart 0, step 0)" in first[step] and "only one job can save" in first[step]
    assert second["loaded"] == [1, "41.0.0", True]
    assert "PosixPath" in second["5"] and "PosixPath" in second["7"]
    assert second["at last"] == [[7, "42.0.0", True], ["step-00000001", "step-00000005", "step-00000007"]]
    owner = of_steps.describe(folder / "step-00000005").owner
    assert owner is not None and owner.job == "42.0.0"
    assert "job 42 (restart 0, step 0) on" in (tmp_path / "second/rank-0.log").read_text()
    assert "takes over" in (tmp_path / "second/rank-0.log").read_text()


def test_a_race_for_one_step(tmp_path: Path) -> None:
    """The second job starts between the first one's last check and its rename: the step is the first job's, complete.

    The second job's save raises an error that names the first job.
    """
    code = """
        folder = top
        if first:
            # claim() is called when a save starts, before rank 0 looks for the files, and before the rename.
            back = paused(owners, "claim", 3, "first has looked", "second wrote 5")
            found["5"] = save(folder, 5, "41.0.0")
            back()
            at("first published")
            until("second is through")
            found["6"] = save(folder, 6, "41.0.0")
        else:
            until("first has looked")
            back = paused(of_steps, "publish", 1, "second wrote 5", "first published")
            found["5"] = save(folder, 5, "42.0.0")
            found["loaded"] = load(folder, "42.0.0")
            at("second is through")
    """
    first, second = two_groups(code, tmp_path)
    assert "PosixPath" in first["5"]
    assert "step-00000005 already exists, written by job 41 (restart 0, step 0) on" in second["5"]
    assert second["loaded"] == [5, "41.0.0", True]
    assert "job 42 (restart 0, step 0)" in first["6"] and "has taken over" in first["6"]
    assert left_in(tmp_path / "checkpoints") == [".owner.json", "step-00000005"]


def test_an_old_attempt_wakes_up(tmp_path: Path) -> None:
    """After a requeued job has loaded, the previous attempt publishes nothing and its unfinished step is removed; an
    evaluation that loads does not take the folder over."""
    code = """
        folder = top
        if first:
            found["1"] = save(folder, 1, "43.0.0")
            back = paused(of_steps, "publish", 1, "zombie wrote 5", "restart saved 3")
            found["5"] = save(folder, 5, "43.0.0")
            back()
            found["6"] = save(folder, 6, "43.0.0")
            at("zombie is through")
        else:
            until("zombie wrote 5")
            found["evaluated"] = load(folder, "99.0.0")
            found["left"] = [[path.name for path in folder.glob(".step*")] != [], owners.read(folder / ".owner.json").job]
            found["loaded"] = load(folder, "43.0.1")
            found["after"] = [names(folder), owners.read(folder / ".owner.json").job]
            found["3"] = save(folder, 3, "43.0.1")
            at("restart saved 3")
            until("zombie is through")
            found["late"] = save(folder, 4, "43.0.0")
            found["5"] = save(folder, 5, "43.0.1")
            found["at last"] = [load(folder, "43.0.1"), names(folder)]
    """
    first, second = two_groups(code, tmp_path)
    assert second["evaluated"] == second["loaded"] == [1, "43.0.0", True]
    assert second["left"] == [True, "43.0.0"]
    assert second["after"] == [["step-00000001"], "43.0.1"]
    for messages in (first["5"], first["6"], second["late"]):
        assert "RequestError: job 43 (restart 1, step 0) on" in messages and "has taken over" in messages
        assert "a later attempt of this job has started, so this attempt must exit" in messages
    assert "PosixPath" in second["3"] and "PosixPath" in second["5"]
    assert second["at last"] == [[5, "43.0.1", True], ["step-00000001", "step-00000003", "step-00000005"]]


@pytest.mark.deepspeed
def test_content_that_changed_is_not_loaded(tmp_path: Path) -> None:
    """A file with a damaged page and a file of another save, both of the right size, are detected for every kind of
    file: the step before is loaded, with a message, and the step can be saved again."""
    code = """
        from datetime import timedelta
        from hpcinit.runtime import process_state
        from hpcinit.train.checkpoint import native_checkpoint, save_and_load
        def newest(folder):
            # What load() would load, without loading it.
            with native_checkpoint.patient(timedelta(minutes=2)):
                return save_and_load._newest(folder, "", timedelta(minutes=2))[1].step
        for name, training in {"ddp": ddp, "zero 1": zero(1)}.items():
            found[name] = {}
            program = Program(run, plain, training)
            top = Path(os.environ["FOLDER"], name)
            program.steps(1)
            program.save(top / "one", 1, extra="one")
            program.steps(1)
            program.save(top / "one", 2, extra="two")
            recorded = json.loads((top / "one/step-00000002/checkpoint.json").read_text())["files"]
            torch.distributed.barrier()
            for file in sorted(recorded):
                before, path = top / "one/step-00000001" / file, top / "one/step-00000002" / file
                content = path.read_bytes()
                changes = {"another save": before.read_bytes(), "a lost page": bytearray(content)}
                changes["a lost page"][len(content) // 2] ^= 1
                torch.distributed.barrier()
                for change, other in changes.items():
                    if len(other) != len(content) or other == content:
                        continue
                    if run.rank == 0:
                        path.write_bytes(other)
                    torch.distributed.barrier()
                    found[name][f"{file}: {change}"] = newest(top / "one")
                    process_state.state.damaged.clear()  # as a later process, which has not looked
                    torch.distributed.barrier()
                    if run.rank == 0:
                        path.write_bytes(content)
                    torch.distributed.barrier()
            found[name]["whole"] = program.load(top / "one").step
            torch.distributed.barrier()
            if run.rank == 0:
                path.write_bytes(changes["a lost page"])
            torch.distributed.barrier()
            found[name]["again"] = [program.load(top / "one").step, program.save(top / "one", 2).name]
            found[name]["again"] += [program.load(top / "one").step, names(top / "one")]
    """
    (zero, output), (one, _) = two_ranks(code, tmp_path, FOLDER=str(tmp_path / "checkpoints"))
    assert zero == one
    for name, model in {"ddp": "dcp/__0_0.distcp", "zero 1": "deepspeed/mp_rank_00_model_states.pt"}.items():
        steps = zero[name]
        assert steps.pop("whole") == 2
        assert steps.pop("again") == [1, "step-00000002", 2, ["step-00000001", "step-00000002"]]
        assert set(steps.values()) == {1}, steps
        assert {f"{model}: another save", f"{model}: a lost page", "random/rank-00001.pt: a lost page"} <= set(steps)
        assert {"extra.pt: another save", "loader/data-00001.pt: another save"} <= set(steps)
    wrong = "dcp/__0_0.distcp has a wrong checksum: it is damaged, or from another save"
    assert f"step-00000002 is skipped: {wrong}" in output


def owner(host: str, job: str) -> owners.Owner:
    return owners.Owner(host=host, pid=1, job=job, token="other", since=time.time())


def test_order_of_attempts() -> None:
    """A restart of the job is later than any step before it, and a step later than a restart inside the step before."""
    jobs = ["42.batch.0", "42.0.0", "42.0e1.0", "42.0e2.0", "42.1.0", "42.10.0", "42.0.1", "42.0.10"]
    attempts = [owner("n1", job=job).attempt for job in jobs]
    assert attempts == sorted(attempts) and len(set(attempts)) == len(jobs)
    one = owner("n1", job="42.0.0")
    assert one.is_same_job(dataclasses.replace(one, job="42.3.1"))
    assert not one.is_same_job(dataclasses.replace(one, cluster="other"))
    for other in ("43.0.0", "", "127.0.0.1:29500", "none-127.0.0.1-29500.0"):
        assert not one.is_same_job(dataclasses.replace(one, job=other))
    unknown = dataclasses.replace(one, job="127.0.0.1:29500")
    assert not unknown.is_same_job(unknown) and str(unknown) == "process 1 on n1"


def test_a_folder_given_back(tmp_path: Path) -> None:
    """A job that lost the folder can save again after .owner.json is removed; an invalid file is replaced."""
    whole(tmp_path, 1)
    other = owner("n2", job="42.0.0")
    owners.write(tmp_path / ".owner.json", other)
    with pytest.raises(
        RequestError, match=r"job 42 \(restart 0, step 0\) on n2 has taken over .* remove .*\.owner\.json"
    ):
        whole(tmp_path, 2)
    (tmp_path / ".owner.json").unlink()
    unfinished = begin(tmp_path, 2)
    of_steps.write(unfinished.path / "dcp/file", b"weights")
    (tmp_path / ".owner.json").write_text("half a fi")
    assert publish(unfinished, 2).name == "step-00000002"
    assert owners.read(tmp_path / ".owner.json") == unfinished.owner
