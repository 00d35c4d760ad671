"""Checkpoints: saved by some ranks, gone on from by others, torn, and on a full disk."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcinit.base.errors import CheckpointError, RequestError
from hpcinit.records import causes
from hpcinit.runtime.checkpoint import checkpoint_folder
from hpcinit.runtime.checkpoint import checkpoint_folder as of_steps
from hpcinit.runtime.checkpoint import owner as owners
from hpcinit.runtime.checkpoint.checkpoint_folder import Description, File
from tests.runtime import checkpointing
from tests.runtime.spawned import ranks, without_gloos_line
from tests.test_train_gpt import python

TOLERANCE = 1e-5  # of losses between 3 and 4, after sums in another order: about 40 units in the last place
NAMES = list(checkpointing.cases())
DEEPSPEEDS = ["zero 1", "zero 3"]
BY_NAME = [pytest.param(name, marks=pytest.mark.deepspeed if name in DEEPSPEEDS else ()) for name in NAMES]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[int, Any]:
    """Number of ranks -> what checkpointing.py wrote: first 8 ranks on 2 nodes, then 4, then 2."""
    folder = tmp_path_factory.mktemp("resumed")
    old = pytestconfig.getoption("--deepspeed")
    names = DEEPSPEEDS if old else NAMES
    found = {}
    for nodes, per_node in ((2, 4), (1, 2)) if old else ((2, 4), (1, 4), (1, 2)):
        size = nodes * per_node
        words = ["-m", "hpcinit.submit", "cluster=local", "wait=true", f"nodes={nodes}", f"ranks_per_node={per_node}"]
        program = ["--", checkpointing.__file__, str(folder / "checkpoints"), str(folder / f"{size}.json"), *names]
        done = python(folder, *words, *program, timeout_s=280)
        assert done.returncode == 0, done.stdout + done.stderr
        found[size] = json.loads((folder / f"{size}.json").read_text())
    return found


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", BY_NAME)
def test_goes_on_with_the_same_losses(curves: dict[int, Any], name: str) -> None:
    """What 8 ranks saved goes on with 8, 4 and 2 as if nobody had stopped, in every format and with other layouts."""
    written = curves[8][name]
    assert written["before"][0] - written["after"][-1] > 1, "it learns, so that an unloaded model would show"
    for size, found in curves.items():
        assert difference(found[name]["again"], written["after"]) < TOLERANCE, size


def test_the_tolerance_is_tight(curves: dict[int, Any]) -> None:
    """The same without the state of the optimizer is out of the tolerance a thousand times."""
    assert difference(curves[8]["ddp"]["without the optimizer"], curves[8]["ddp"]["after"]) > 1000 * TOLERANCE


@pytest.mark.parametrize("name", BY_NAME)
def test_what_came_back(curves: dict[int, Any], name: str) -> None:
    """Step, samples and the program's own values come back; the loader's place does among equally many shares."""
    for size, found in curves.items():
        assert found[name]["loaded"] == [4, 64, [0, 1, 2], size == 8], size


def begin(folder: Path, step: int, job: str = "") -> of_steps.Unfinished:
    return of_steps.begin(folder, step, owners.of_this_process(job, 3600))


def publish(unfinished: of_steps.Unfinished, step: int) -> Path:
    files = of_steps.files_of(unfinished.path, of_steps.matching(unfinished.path, "dcp/*"), rank=0)
    description = Description(step, 8 * step, "torch", 2, {"tp": 1}, 2, 0, save=unfinished.save, files=files)
    return of_steps.publish(unfinished, description)


def whole(folder: Path, step: int, content: bytes = b"weights") -> Path:
    unfinished = begin(folder, step)
    of_steps.write(unfinished.path / "dcp/file", content)
    return publish(unfinished, step)


def left_in(folder: Path) -> list[str]:
    """What is there once the removals in the background are done."""
    assert checkpoint_folder.wait_for_removals(60)
    return sorted(path.name for path in folder.iterdir())


TEARING = {
    "has no checkpoint.json": lambda step: (step / "checkpoint.json").unlink(),
    "checkpoint.json cannot be read (Expecting value": lambda step: (step / "checkpoint.json").write_text(""),
    "format 1, and this version of hpcinit reads format 2": lambda step: (step / "checkpoint.json").write_text(
        '{"format": 1}'
    ),
    "checkpoint.json cannot be read ('files')": lambda step: (step / "checkpoint.json").write_text('{"format": 2}'),
    "dcp/file cannot be read (No such file": lambda step: (step / "dcp/file").unlink(),
    "dcp/file has 3 bytes, and 7 were written": lambda step: (step / "dcp/file").write_bytes(b"wei"),
}


@pytest.mark.parametrize("said", TEARING)
def test_a_torn_step_is_skipped(tmp_path: Path, said: str) -> None:
    """The latest whole step is found, with one line that says what is wrong with a later one; it can be saved anew."""
    whole(tmp_path, 9)
    TEARING[said](whole(tmp_path, 10))
    lines: list[str] = []
    found = of_steps.newest(tmp_path, lines.append)
    assert found is not None and (found[0].name, found[1].samples) == ("step-00000009", 72)
    assert len(lines) == 1 and said in lines[0] and "step-00000010 is skipped" in lines[0]
    begin(tmp_path, 10)
    assert (tmp_path / "step-00000010").is_dir(), "it stays until another one is whole"
    whole(tmp_path, 10)
    assert of_steps.newest(tmp_path, lines.append) == (
        tmp_path / "step-00000010",
        of_steps.describe(tmp_path / "step-00000010"),
    )
    assert len(lines) == 1


def test_nothing_to_load(tmp_path: Path) -> None:
    """A folder that is not there, is empty or has an attempt alone has no step."""
    assert of_steps.newest(tmp_path / "none", print) is None
    begin(tmp_path, 3)
    assert of_steps.newest(tmp_path, print) is None


def test_what_an_attempt_left_is_removed(tmp_path: Path) -> None:
    """A file that a killed attempt left in the unfinished folder is not in the step that the next one saves."""
    (begin(tmp_path, 3).path / "old").write_text("half")
    assert sorted(path.name for path in whole(tmp_path, 3).iterdir()) == ["checkpoint.json", "dcp"]
    assert left_in(tmp_path) == [".owner.json", "step-00000003"]


def test_a_whole_step_is_not_replaced(tmp_path: Path) -> None:
    """Saving a step that is there already is refused, and so is one below 0."""
    whole(tmp_path, 3)
    with pytest.raises(RequestError, match="step-00000003 is there already: load it"):
        begin(tmp_path, 3)
    with pytest.raises(RequestError, match="step -1, expected 0 or more"):
        begin(tmp_path, -1)


def test_old_ones_go_after_the_new_one_is_whole(tmp_path: Path) -> None:
    """keep=2 leaves the two newest whole steps: a torn one does not count, and goes when it is older than they."""
    for step in (1, 2, 3, 4, 100_000_000):
        whole(tmp_path, step)
    for step in (2, 4):
        (of_steps.describe(tmp_path / of_steps.name(step)), (tmp_path / of_steps.name(step) / "dcp/file").unlink())
    of_steps.prune(tmp_path, 2)
    assert left_in(tmp_path) == [".owner.json", "step-00000003", "step-00000004", "step-100000000"]
    of_steps.prune(tmp_path, 5)
    assert len(left_in(tmp_path)) == 4


def test_a_folder_that_nodes_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another rank wrote and rank 0 does not see is an error, and no step."""
    monkeypatch.setattr(of_steps, "VISIBLE_S", 0.1)
    unfinished = begin(tmp_path, 3)
    description = Description(3, 24, "torch", 2, {}, 2, 0, files={"dcp/__1_0.distcp": File(5, 0, 1)})
    with pytest.raises(CheckpointError, match=r"1 of 1 files, as dcp/__1_0.distcp, .* a folder that all nodes share"):
        of_steps.publish(unfinished, description)
    assert of_steps.newest(tmp_path, print) is None


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


BEGIN = """
        import json, os, shutil, sys
        from pathlib import Path
        import torch, hpcinit
        from hpcinit.records.layout import Layout
        from hpcinit.records.spec import Training
        from hpcinit.runtime import checkpoint
        from hpcinit.runtime.checkpoint import checkpoint_folder
        from tests.runtime.checkpointing import Program, zero
        run, found, quoted = hpcinit.init(deepspeed=True), {}, []
        ddp, plain = Training("ddp"), Layout()
        def error(work):
            try:
                return repr(work())
            except hpcinit.HpcinitError as error:
                quoted.append(error.quoted)
                return f"{type(error).__name__}: {error}"
        def restamp(step):
            # Record the files as they are now, as if what a test made of them had been written.
            said = json.loads((step / "checkpoint.json").read_text())
            for name, checksum in checkpoint_folder.checksums(step, said["files"]).items():
                said["files"][name]["checksum"] = checksum
            (step / "checkpoint.json").write_text(json.dumps(said))
        def names(folder):
            assert checkpoint_folder.wait_for_removals(60)
            torch.distributed.barrier()
            seen = sorted(path.name for path in folder.iterdir() if path.name != ".owner.json")
            torch.distributed.barrier()
            return seen
"""


def two_ranks(code: str, folder: Path, **env: str) -> list[tuple[Any, str]]:
    """What `code` put into `found` on each of 2 ranks, and what each printed."""
    with ranks(BEGIN + code + "\n        print(json.dumps(found))\n", 2, folder, OMP_NUM_THREADS="1", **env) as started:
        ended = [rank.end() for rank in started]
    assert [status for status, _ in ended] == [0, 0], ended
    return [(json.loads(output.splitlines()[-1]), output) for _, output in ended]


@pytest.mark.slurm  # as the clusters, it needs root and the right to mount
def test_a_full_disk(small: Path, tmp_path: Path) -> None:
    """On a full disk every rank raises, in both formats, and says how much is free and what is left to load; nothing
    stays of the step, the one before can be loaded, and with room again the next
    can be saved; only then keep=1 takes the one before."""
    code = """
        for name, training in {"ddp": ddp, "zero 1": zero(1), "zero 3": zero(3)}.items():
            folder, ballast = Path(os.environ["SMALL"], name), Path(os.environ["SMALL"], "ballast")
            program = Program(run, plain, training)
            program.steps(1)
            program.save(folder, 1)
            if run.rank == 0:
                try:
                    with ballast.open("wb", buffering=0) as stream:
                        while True:
                            stream.write(bytes(4096))
                except OSError:
                    os.truncate(ballast, ballast.stat().st_size - 100_000)  # enough to begin with
            torch.distributed.barrier()
            refused = [error(lambda: program.save(folder, 2, keep=1)), names(folder)]
            if run.rank == 0:
                ballast.unlink()
            torch.distributed.barrier()
            old = Program(run, plain, training)
            loaded = [old.load(folder).step, old.save(folder, 3, keep=1).name]
            torch.distributed.barrier()
            found[name] = [refused, loaded, names(folder), quoted[-1]]
            torch.distributed.barrier()
            if run.rank == 0:
                shutil.rmtree(folder)
            torch.distributed.barrier()
    """
    for found, output in two_ranks(code, tmp_path, SMALL=str(small)):
        print(found)
        assert set(found) == {"ddp", "zero 1", "zero 3"}
        for name, ((refused, after), loaded, at_last, quoted) in found.items():
            assert causes.kind(quoted)[0] == "disk", "what `hpcinit why` reads of it, on the rank that did not fail too"
            assert refused.startswith(f"CheckpointError: step 2 was not saved in {small / name}: rank "), output
            assert refused.endswith("; 0.0 GB are free there; step-00000001 is the newest")
            assert after == ["step-00000001"]
            assert loaded == [1, "step-00000003"]
            assert at_last == ["step-00000003"]


def test_what_is_refused(tmp_path: Path) -> None:
    """Every rank raises the same, whichever of them it concerns, and what was there stays as it was."""
    code = """
        folder = Path(os.environ["FOLDER"])
        program = Program(run, plain, ddp)
        found["nothing"] = error(lambda: checkpoint.load(program.wrapped, folder, layout=program.layout))
        program.steps(1)
        program.save(folder, 1)
        found["twice"] = error(lambda: program.save(folder, 1))
        found["keep"] = error(lambda: program.save(folder, 2, keep=0))
        found["loader"] = error(lambda: program.save(folder, 2, loader=[1, 2]))
        found["extra"] = error(lambda: program.save(folder, 2, extra={"a": Path("b")}))
        class Bad:
            def state_dict(self):
                if run.rank == 1:
                    raise OSError("no state")
                return {}
            def load_state_dict(self, state_dict):
                raise AssertionError
        found["one rank"] = error(lambda: program.save(folder, 2, loader=Bad()))
        loss = program.wrapped(torch.zeros(8, 16, dtype=torch.long)).sum()
        program.wrapped.backward(loss)
        found["within"] = error(lambda: program.save(folder, 2))
        found["another model"] = error(lambda: Program(run, plain, ddp, width=16).load(folder))
        engine = Program(run, plain, zero(3))
        found["torch's"] = error(lambda: engine.load(folder))
        engine.steps(1)
        engine.save(folder / "3", 1)
        found["deepspeed's"] = error(lambda: program.load(folder / "3"))
        found["stage"] = error(lambda: Program(run, plain, zero(1)).load(folder / "3"))
        said = folder / "3/step-00000001/checkpoint.json"
        written = json.loads(said.read_text())
        for broken in sorted(said.parent.glob("deepspeed/*optim_states.pt"))[:1]:
            torch.distributed.barrier()
            if run.rank == 0:
                broken.write_bytes(bytes(broken.stat().st_size))
                said.write_text(json.dumps(written | {"world_size": 4}))
                restamp(said.parent)
            torch.distributed.barrier()
        place = folder / "step-00000001/loader/data-00001.pt"
        torch.distributed.barrier()
        if run.rank == 0:
            place.write_bytes(bytes(place.stat().st_size))
            restamp(place.parents[1])
        torch.distributed.barrier()
        found["loader's file"] = error(lambda: Program(run, plain, ddp).load(folder))
        found["converter"] = error(lambda: Program(run, plain, zero(3)).load(folder / "3"))
        found["names"] = [names(folder), names(said.parent)]
    """
    (zero, printed), (one, _) = two_ranks(code, tmp_path, FOLDER=str(tmp_path / "checkpoints"))
    print(json.dumps(zero, indent=1))
    assert zero == one
    expected = {
        "nothing": "None",
        "twice": "RequestError: {folder}/step-00000001 is there already, written by process ",
        "keep": "RequestError: keep is 0, expected 1 or more",
        "loader": "RequestError: loader is a list, which cannot tell its place",
        "extra": "RequestError: extra holds more than numbers, text, lists, dicts and tensors",
        "one rank": "CheckpointError: step 2 was not saved in {folder}: rank 1 on ",
        "within": "RequestError: save() within an accumulation",
        "another model": "CheckpointError: {folder}/step-00000001 does not fit this model and optimizer: rank 0: ",
        "torch's": "RequestError: {folder}/step-00000001 was written with parallel.wrap=ddp or fsdp, and this is deepspeed",
        "deepspeed's": "RequestError: {folder}/3/step-00000001 was written with parallel.wrap=deepspeed, and this is ddp",
        "stage": "RequestError: the checkpoint of step 1 was written with deepspeed.zero_stage 3, and it is 1",
        "loader's file": "CheckpointError: rank 1 on ",
        "converter": "CheckpointError: rank 0 on ",
    }
    for name, begin in expected.items():
        assert zero[name].startswith(begin.format(folder=tmp_path / "checkpoints")), (name, zero[name])
    assert "OSError: no state" in zero["one rank"] and zero["one rank"].endswith("; step-00000001 is the newest")
    assert "GLOBAL pathlib.PosixPath was not an allowed global" in zero["extra"]
    assert "ds_to_universal ended with 1 for " in zero["converter"]
    assert zero["names"][0] == ["3", "step-00000001"]
    assert "universal" not in " ".join(zero["names"][1])
    assert "step-00000001 was written by 4 ranks: made universal for 2, once" in printed


@pytest.mark.deepspeed
def test_random_numbers_go_on(tmp_path: Path) -> None:
    """With dropout the losses are to the bit those of a run that went through; in another layout the generators are
    seeded by seed, step and rank, with a line that says so."""
    code = """
        from hpcinit.runtime import seeds
        from tests.runtime.checkpointing import Noisy
        def draws():
            return [torch.rand(()).item(), Noisy.share()]
        for name, training in {"ddp": ddp, "zero 1": zero(1)}.items():
            folder = Path(os.environ["FOLDER"], name)
            seeds.seed_all(seeds.of(5, "rank", run.rank, run.rank))
            one = Program(run, plain, training, kind=Noisy)
            one.steps(2)
            one.save(folder, 2)
            found[name] = {"through": one.steps(3)}
            for way in ("again", "seeded otherwise"):
                one = Program(run, plain, training, kind=Noisy)
                assert one.load(folder).random
                if way != "again":
                    seeds.seed_all(1)
                found[name][way] = one.steps(3)
            said = folder / "step-00000002/checkpoint.json"
            written = json.loads(said.read_text())
            torch.distributed.barrier()
            for change in ({"layout": written["layout"] | {"ep": 2}}, {"step": 3}, {"files": {}}):
                if run.rank == 0:
                    said.write_text(json.dumps(written | {"layout": written["layout"] | {"ep": 2}} | change))
                torch.distributed.barrier()
                found[name][str([*change])] = []
                for _ in range(2):
                    loaded = one.load(folder)
                    found[name][str([*change])].append([loaded.random, *draws()])
                torch.distributed.barrier()
    """
    (zero, printed), (one, _) = two_ranks(code, tmp_path, FOLDER=str(tmp_path / "checkpoints"))
    for name in ("ddp", "zero 1"):
        assert zero[name]["again"] == zero[name]["through"] != zero[name]["seeded otherwise"]
        anew = [found[name][change] for found in (zero, one) for change in ("['layout']", "['step']")]
        assert all(first == second and not first[0] for first, second in anew), "the same ones each time"
        assert len({tuple(first) for first, _ in anew}) == 4, "others at another step, and on another rank"
        assert zero[name]["['files']"] == zero[name]["['layout']"]
    was = "step-00000002 has states of random generators for dp_replicate 2 x ep 2, and this is dp_replicate 2"
    assert f"{was}: they are seeded anew, from seed 0, step 2 and seed_by=rank" in printed
    assert "step-00000002 has no states of random generators: they are seeded anew" in printed


def test_the_runs_own_save_and_load(tmp_path: Path) -> None:
    """`run.save` and `run.load` in one process: the step, the weights and the program's own values come back."""
    (tmp_path / "own.py").write_text("""
import hpcinit, torch
with hpcinit.session() as run:
    def wrapped():
        return run.wrap(torch.nn.Linear(3, 1), optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
    one = wrapped()
    assert run.load(one, "steps") is None
    one.backward(one(torch.ones(2, 3)).sum())
    assert one.step()
    print(run.save(one, "steps", 7, extra={"best": 0.5}, keep=2).name)
    other = wrapped()
    loaded = run.load(other, "steps")
    print(loaded.step, loaded.extra, all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters())))
""")
    done = python(tmp_path, "own.py")
    assert without_gloos_line(done.stdout).splitlines() == ["step-00000007", "7 {'best': 0.5} True"], done.stderr
