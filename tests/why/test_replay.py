"""`hpcinit why --replay`: a hang of the dumps happens again with gloo, and ends when the verdict's call is repaired."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.why import flight_recorder, hang_verdict, replay, why_command
from hpcinit.why.replay import Replay
from hpcinit.why.replay_program import MOST_CALLS, NotReplayable, Program
from tests import json_documents
from tests.waiting import until
from tests.why import gloo_model, hang_dumps, hang_scenarios
from tests.why.hang_dumps import DEVICE_STUCK, MISMATCH, NO_DUMP, NOT_CALLED, PEER_LOST

# `HPCINIT_HANGS=1000 pytest tests/why/test_replay.py` tries that many training runs of each kind on the model of gloo,
# and `python -m benchmarks.replays` tries 200 with gloo.
CASES = int(os.environ.get("HPCINIT_HANGS", "30"))
RECORDED = Path(__file__).parents[1] / "data/flight"
RUNS = Path(__file__).parents[1] / "corpus/cases"
FOUR = list(range(4))

Dumps = Mapping[int, Mapping[str, Any]]


def programs(program: Program) -> list[dict[str, Any]]:
    return [program.document(repaired=False), program.document(repaired=True)][: 1 + bool(program.blamed)]


def modeled(dumps: Dumps, change: Callable[[hang_verdict.Search], None] = lambda search: None) -> Replay:
    """Return the result with the model of gloo. change: changes the verdict."""
    search = hang_verdict.search(dumps)
    change(search)
    try:
        program = Program(search)
        return replay.judge(program, [gloo_model.run(one) for one in programs(program)])
    except NotReplayable as error:
        return Replay(str(error))


def is_proven(found: Replay) -> bool:
    return bool(found.same_call and found.finished)


def recorded(name: str, ranks: int) -> dict[int, Mapping[str, Any]]:
    return {rank: flight_recorder.load((RECORDED / f"{name}{rank}").read_bytes()) for rank in range(ranks)}


@pytest.mark.ranks
def test_recorded_dumps() -> None:
    """The hangs that torch recorded happen again with gloo at the same call, and end when it is repaired."""
    run = flight_recorder.read_folder(RUNS / "r-hang-then-canceled/hang-0001/flight")
    for dumps, rank, call in (
        (
            recorded("gloo-2.13.rank_", 2),
            1,
            "all_reduce number 3 of the default group (rank 0 waits, rank 1 never called)",
        ),
        (recorded("gloo-2.13-groups.rank_", 4), 3, "number 3 of group tp1 (2) (rank 2 waits, rank 3 never called)"),
        (recorded("gloo-2.13-groups-json_", 4), 3, "number 3 of group tp1 (2) (rank 2 waits, rank 3 never called)"),
        (run, 2, "all_reduce number 5 of the default group (ranks 0-1 wait, rank 2 never called)"),
    ):
        found = replay.replay(dumps)
        assert is_proven(found) and found.ranks == len(dumps), found.text
        assert call in found.blocked_at[0] and call in found.text
        assert found.text.endswith(f"with the calls of rank {rank} added, the replay finished")


@pytest.mark.ranks
def test_real_gloo_does_what_the_model_does() -> None:
    """Programs with groups, messages, batches, devices and different calls: gloo blocks where the model does."""
    jobs = [scenario()[0].dumps() for scenario in hang_scenarios.SCENARIOS[:3] + hang_scenarios.SCENARIOS[8:11]]
    jobs += [hang_dumps.dumps(hang_dumps.training(3, kinds=[kind])) for kind in (MISMATCH, NO_DUMP)]
    every = [one for dumps in jobs for one in programs(Program(hang_verdict.search(dumps)))]
    for program, result in zip(every, replay.run(every, sys.executable), strict=True):
        assert result == gloo_model.run(program)


def test_scenarios() -> None:
    """Hangs in the form of NCCL's recorder are proven, also those with two causes and with calls in different orders."""
    for scenario in hang_scenarios.SCENARIOS:
        job, expected = scenario()
        found = modeled(job.dumps())
        assert is_proven(found), (scenario.__name__, found.text)
        stuck = any(kind == DEVICE_STUCK for _, kind in expected)
        assert any("a device that is stuck" in line for line in found.not_replayed) == stuck


@pytest.mark.parametrize("kind", [NOT_CALLED, DEVICE_STUCK, MISMATCH, NO_DUMP, PEER_LOST])
def test_random_training_runs(kind: str) -> None:
    """The right verdict on a random training run is proven, and no verdict that blames a rank that only waits."""
    for seed in range(CASES):
        dumps = hang_dumps.dumps(hang_dumps.training(seed, kinds=[kind]))
        found = modeled(dumps)
        assert is_proven(found), (seed, found.text)
        search = hang_verdict.search(dumps)
        victims = search.verdict().victims
        if not victims:  # a device is stuck, and its rank alone waits
            continue

        def blame(search: hang_verdict.Search, victim: int = random.Random(seed).choice(victims)) -> None:
            verdict = search.verdict()
            [(_, operation)] = search.causes.items()
            search.causes = {victim: operation}
            wrong = replace(verdict, culprits=(replace(verdict.culprits[0], rank=victim, kind=NOT_CALLED),))
            search.verdict = lambda: wrong  # type: ignore[method-assign]

        assert not is_proven(modeled(dumps, blame)), seed


def test_a_verdict_without_one_of_two_ranks() -> None:
    """If two ranks cause a hang, a verdict that names one of them is not proven, because the other calls would end."""
    for seed in range(CASES):
        dumps = hang_dumps.dumps(hang_dumps.training(seed, faults=2, kinds=[NOT_CALLED]))
        if len(hang_verdict.verdict(dumps).culprits) < 2:
            continue

        def forget(search: hang_verdict.Search) -> None:
            verdict = search.verdict()
            half = replace(verdict, culprits=verdict.culprits[:1])
            search.verdict = lambda: half  # type: ignore[method-assign]

        assert is_proven(modeled(dumps)) and not is_proven(modeled(dumps, forget)), seed


def test_what_cannot_be_replayed() -> None:
    """A call that all ranks have made, ranks without a wait, and too many ranks or calls: the text gives the reason."""
    job = hang_scenarios.Job({"0": ("default_pg", FOUR)}, timed=False)
    job.all("0", "all_reduce", hang_scenarios.SCHEDULED)
    assert modeled(job.dumps()).text.startswith("all ranks have made the calls that do not finish: a device or a link")
    job = hang_scenarios.Job({"0": ("default_pg", FOUR)})
    job.all("0", "all_reduce")
    assert modeled(job.dumps()).text.startswith("the dumps do not list the ranks of any")
    job = hang_scenarios.Job({"0": ("default_pg", range(100))})
    job.all("0", "all_reduce", hang_scenarios.STARTED, but=[7])
    assert modeled(job.dumps()).text == "100 ranks are involved, but a replay can have at most 64"
    job = hang_scenarios.Job({"0": ("default_pg", FOUR)}, kept=4000)
    job.all("0", "all_reduce", hang_scenarios.SCHEDULED, but=[3], times=3000)
    assert modeled(job.dumps()).text == "the dumps contain 3000 unfinished calls, but a replay can have at most 2000"


def test_a_group_of_many_ranks() -> None:
    """Of 200 ranks only the group is replayed in which the others wait for the rank at fault."""
    job = hang_scenarios.Job({"0": ("default_pg", range(200)), "1": ("tp", range(8))})
    job.all("0", "all_reduce", times=5)
    job.all("1", "all_reduce", hang_scenarios.STARTED, but=[7])
    job.all("0", "all_reduce", hang_scenarios.STARTED, but=range(8))
    found = modeled(job.dumps())
    assert is_proven(found) and found.ranks == 8
    assert "the other 192 ranks, and calls that wait for an older one" in found.not_replayed


def test_overwritten_and_very_many_calls() -> None:
    """Finished calls that one recorder has overwritten, and those above the limit, are omitted, and the text reports it."""
    job = hang_scenarios.Job({"0": ("default_pg", FOUR), "1": ("tp", FOUR)}, kept=40)
    for rank in FOUR:
        job.call(rank, "0", "all_reduce", times=100)
        job.call(rank, "1", "all_reduce", times=rank * 5)
    job.all("0", "all_reduce", hang_scenarios.STARTED, but=[3])
    found = modeled(job.dumps())
    assert found.same_call is not None and any("overwritten" in line for line in found.not_replayed), found
    job = hang_scenarios.Job({"0": ("default_pg", FOUR)}, kept=9000)
    job.all("0", "all_reduce", times=6000)
    job.all("0", "all_reduce", hang_scenarios.STARTED, but=[3])
    found = modeled(job.dumps())
    assert is_proven(found) and found.calls < MOST_CALLS
    assert any(
        line.endswith("older finished calls, because a replay makes at most 20000") for line in found.not_replayed
    )


VALUES = (None, 3, "x", [], {}, [[]], -1, 10**15, "7", True, "nccl:send 0->9", "nccl:recv 1<-1", ["5", "pp"], 0, 1)
RANKS = ("[0, 0, 1]", "[5, 4]", "[]", "x", "[0, 1, 2, 3, 400]")


def test_damaged_dumps() -> None:
    """Fields of other types, lost, doubled and shuffled calls, and wrong groups: each has a result, and no exception."""
    for seed in range(3 * CASES):
        rng = random.Random(seed)
        dumps = hang_dumps.dumps(hang_dumps.training(seed % 50, kinds=[NOT_CALLED, DEVICE_STUCK, MISMATCH, NO_DUMP]))
        for _ in range(rng.choice((1, 3, 20, 100))):
            dump = dumps[rng.choice(list(dumps))]
            if not (entries := dump["entries"]):
                continue
            entry, how = rng.choice(entries), rng.random()
            if how < 0.5:
                entry[rng.choice(list(entry))] = rng.choice(VALUES)
            elif how < 0.7:
                entries.remove(entry)
            elif how < 0.8:
                entries.insert(rng.randrange(len(entries)), dict(entry))
            elif how < 0.9:
                dump["pg_config"] = {"0": {"desc": "default_pg", "ranks": rng.choice(RANKS)}}
            else:
                rng.shuffle(entries)
        assert modeled(dumps).text


@pytest.mark.ranks
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`hpcinit why RUN --replay` prints the result below the verdict, and as JSON."""
    run = tmp_path / "hang-0001"
    shutil.copytree(RUNS / "r-hang-then-canceled/hang-0001", run)
    assert why_command.main([str(run), "--replay", "--quiet"]) == 0
    assert "blocked at the same call: all_reduce number 5" in capsys.readouterr().out.splitlines()[1]
    assert why_command.main([str(run / "flight"), "--replay", "--json"]) == 0
    [document] = json_documents.parse(capsys.readouterr().out, "why")
    assert document["replay"]["same_call"] and document["replay"]["finished"] and document["replay"]["ranks"] == 3
    (run / "flight").rename(tmp_path / "away")
    assert why_command.main([str(run), "--replay"]) == 0
    assert "not replayed: there is no dump of torch's flight recorder" in capsys.readouterr().out


def test_a_python_without_torch(tmp_path: Path) -> None:
    """The error names the Python, and the option that chooses another one."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    dumps = recorded("gloo-2.13.rank_", 2)
    with pytest.raises(RequestError, match=r"cannot use .*python \(No module named 'torch'\).*--python /path"):
        replay.replay(dumps, python=str(python))
    with pytest.raises(RequestError, match="No such file"):
        replay.replay(dumps, python=str(tmp_path / "none"))
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    program = {"groups": [], "steps": []}
    with pytest.raises(NotReplayable, match=r"did not end within 0\.1 s"):
        replay.run([program], str(python), 0.1)
    python.write_text("#!/bin/sh\ncat > out; echo broken >&2; exit 3\n")
    with pytest.raises(NotReplayable, match="exit status 3: broken"):
        replay.run([program], str(python))


ENDLESS = """
import json, sys
from hpcinit.why import replay
replay.run([json.loads(sys.argv[1])] * 1000, sys.executable)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left(tmp_path: Path, number: signal.Signals) -> None:
    """After Ctrl-C, SIGTERM and SIGKILL of the command no process of the replay runs; after Ctrl-C its folder is gone."""
    program = Program(hang_verdict.search(recorded("gloo-2.13-groups.rank_", 4))).document(repaired=False)
    command = [sys.executable, "-c", ENDLESS, json.dumps(program)]
    process = subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=RECORDED, stderr=subprocess.DEVNULL
    )
    until(lambda: len(working_below(tmp_path)) == 5, pause_s=0.01)
    process.send_signal(number)
    process.wait()
    assert number != signal.SIGINT or not list(tmp_path.iterdir())
    until(lambda: not working_below(tmp_path))


def working_below(folder: Path) -> list[str]:
    """Return the processes whose working folder is below `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "cwd").readlink()).startswith(str(folder)):
                found.append(process.name)
        except OSError:
            continue
    return found
