"""Checkpoints: loaded by other numbers of ranks, incomplete ones, and on a full disk."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcinit.base.errors import CheckpointError, RequestError
from hpcinit.records import causes
from hpcinit.train.checkpoint import checkpoint_folder
from hpcinit.train.checkpoint import checkpoint_folder as of_steps
from hpcinit.train.checkpoint import owner as owners
from hpcinit.train.checkpoint.checkpoint_folder import Description, File
from tests.runtime import checkpointing
from tests.runtime.spawned import ranks, without_gloos_line
from tests.test_train_gpt import python

TOLERANCE = 1e-5  # for losses between 3 and 4, summed in another order: about 40 ulp
NAMES = list(checkpointing.cases())
DEEPSPEEDS = ["zero 1", "zero 3"]
DAILY = ("ddp", "hsdp 2x2", *DEEPSPEEDS)  # one of each format, on 4 and 2 ranks; the others with --all
MARKS = dict.fromkeys(DEEPSPEEDS, pytest.mark.deepspeed) | {
    name: pytest.mark.more for name in NAMES if name not in DAILY
}
BY_NAME = [pytest.param(name, marks=MARKS.get(name, ())) for name in NAMES]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[int, Any]:
    """Number of ranks -> the output of checkpointing.py: 8 ranks on 2 nodes for one case, then 4, then 2 on one node."""
    folder = tmp_path_factory.mktemp("resumed")
    old = pytestconfig.getoption("--deepspeed")
    every = pytestconfig.getoption("--all")
    names = DEEPSPEEDS if old else NAMES if every else DAILY
    found = {}
    for nodes, per_node in ((2, 4), (2, 2), (1, 2)) if every and not old else ((2, 2), (1, 2)):
        size = nodes * per_node
        request = f"cluster=local launch=fork wait=true nodes={nodes} ranks_per_node={per_node}"
        words = [
            "-m",
            "hpcinit.submit",
            *request.split(),
            "launch.preload=[torch,deepspeed,torch._inductor.compile_fx]",
        ]
        program = ["--", checkpointing.__file__, str(folder / "checkpoints"), str(folder / f"{size}.json"), *names]
        done = python(folder, *words, *program, timeout_s=280)
        assert done.returncode == 0, done.stdout + done.stderr
        found[size] = json.loads((folder / f"{size}.json").read_text())
    return found


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", BY_NAME)
def test_continues_with_the_same_losses(curves: dict[int, Any], name: str) -> None:
    """A checkpoint of 4 ranks (8 with a mesh of three dimensions) continues on as many and on half of them as without a
    stop, in every format and with other layouts."""
    written = curves[max(checkpointing.cases()[name])][name]
    assert written["before"][0] - written["after"][-1] > 1, "it learns, so that an unloaded model would show"
    for size in checkpointing.cases()[name]:
        assert difference(curves[size][name]["again"], written["after"]) < TOLERANCE, size


def test_the_tolerance_is_tight(curves: dict[int, Any]) -> None:
    """Without the optimizer's state the losses exceed the tolerance a thousand times."""
    assert difference(curves[4]["ddp"]["without the optimizer"], curves[4]["ddp"]["after"]) > 1000 * TOLERANCE


@pytest.mark.parametrize("name", BY_NAME)
def test_loaded_values(curves: dict[int, Any], name: str) -> None:
    """load() restores step, samples and the program's values, and the loader's position for the same number of shares."""
    shares = {size: layout.over(size).data_parallel for size, (layout, _) in checkpointing.cases()[name].items()}
    for size, number in shares.items():
        assert curves[size][name]["loaded"] == [4, 64, [0, 1, 2], number == shares[max(shares)]], size


def begin(folder: Path, step: int, job: str = "") -> of_steps.Unfinished:
    return of_steps.begin(folder, step, owners.of_this_process(job))


def publish(unfinished: of_steps.Unfinished, step: int) -> Path:
    files = of_steps.files_of(unfinished.path, of_steps.matching(unfinished.path, "dcp/*"), rank=0)
    description = Description(step, 8 * step, "torch", 2, {"tp": 1}, 2, 0, save=unfinished.save, files=files)
    return of_steps.publish(unfinished, description)


def whole(folder: Path, step: int, content: bytes = b"weights") -> Path:
    unfinished = begin(folder, step)
    of_steps.write(unfinished.path / "dcp/file", content)
    return publish(unfinished, step)


def left_in(folder: Path) -> list[str]:
    """Return the folder's content after all background removals."""
    assert checkpoint_folder.wait_for_removals(60)
    return sorted(path.name for path in folder.iterdir())


TEARING = {
    "has no checkpoint.json": lambda step: (step / "checkpoint.json").unlink(),
    "checkpoint.json cannot be read (Expecting value": lambda step: (step / "checkpoint.json").write_text(""),
    "its format is 1, but this version of hpcinit can read only format 2": lambda step: (
        step / "checkpoint.json"
    ).write_text('{"format": 1}'),
    "checkpoint.json cannot be read ('files')": lambda step: (step / "checkpoint.json").write_text('{"format": 2}'),
    "dcp/file cannot be read (No such file": lambda step: (step / "dcp/file").unlink(),
    "dcp/file has 3 bytes, expected 7": lambda step: (step / "dcp/file").write_bytes(b"wei"),
}


@pytest.mark.parametrize("messages", TEARING)
def test_an_incomplete_step_is_skipped(tmp_path: Path, messages: str) -> None:
    """The latest complete step is found, with a message about a later incomplete one, which can be saved again."""
    whole(tmp_path, 9)
    TEARING[messages](whole(tmp_path, 10))
    lines: list[str] = []
    found = of_steps.newest(tmp_path, lines.append)
    assert found is not None and (found[0].name, found[1].samples) == ("step-00000009", 72)
    assert len(lines) == 1 and messages in lines[0] and "step-00000010 is skipped" in lines[0]
    begin(tmp_path, 10)
    assert (tmp_path / "step-00000010").is_dir(), "it stays until another one is complete"
    whole(tmp_path, 10)
    assert of_steps.newest(tmp_path, lines.append) == (
        tmp_path / "step-00000010",
        of_steps.describe(tmp_path / "step-00000010"),
    )
    assert len(lines) == 1


def test_nothing_to_load(tmp_path: Path) -> None:
    """A folder that is missing, is empty or contains only an unfinished step has no checkpoint."""
    assert of_steps.newest(tmp_path / "none", print) is None
    begin(tmp_path, 3)
    assert of_steps.newest(tmp_path, print) is None


def test_remains_of_an_attempt_are_removed(tmp_path: Path) -> None:
    """A file that a killed attempt left in the unfinished folder is not part of the next attempt's step."""
    (begin(tmp_path, 3).path / "old").write_text("half")
    assert sorted(path.name for path in whole(tmp_path, 3).iterdir()) == ["checkpoint.json", "dcp"]
    assert left_in(tmp_path) == [".owner.json", "step-00000003"]


def test_an_existing_step_is_not_replaced(tmp_path: Path) -> None:
    """Saving an existing step or a negative step is an error."""
    whole(tmp_path, 3)
    with pytest.raises(RequestError, match="step-00000003 already exists: load it"):
        begin(tmp_path, 3)
    with pytest.raises(RequestError, match="checkpoint is -1, expected 0 or more"):
        begin(tmp_path, -1)


def test_keep_counts_complete_steps(tmp_path: Path) -> None:
    """keep=2 keeps the two newest complete steps; older incomplete ones are removed and do not count."""
    for step in (1, 2, 3, 4, 100_000_000):
        whole(tmp_path, step)
    for step in (2, 4):
        (of_steps.describe(tmp_path / of_steps.name(step)), (tmp_path / of_steps.name(step) / "dcp/file").unlink())
    of_steps.prune(tmp_path, 2)
    assert left_in(tmp_path) == [".owner.json", "step-00000003", "step-00000004", "step-100000000"]
    of_steps.prune(tmp_path, 5)
    assert len(left_in(tmp_path)) == 4


def test_a_folder_that_nodes_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another rank wrote and rank 0 does not see is an error, and no step is published."""
    monkeypatch.setattr(of_steps, "VISIBLE_S", 0.1)
    unfinished = begin(tmp_path, 3)
    description = Description(3, 24, "torch", 2, {}, 2, 0, files={"dcp/__1_0.distcp": File(5, 0, 1)})
    with pytest.raises(
        CheckpointError, match=r"1 of 1 written files in .*, such as dcp/__1_0.distcp: .* that all nodes share"
    ):
        of_steps.publish(unfinished, description)
    assert of_steps.newest(tmp_path, print) is None


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 6 MB."""
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
        from hpcinit.train import checkpoint
        from hpcinit.train.checkpoint import checkpoint_folder
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
            messages = json.loads((step / "checkpoint.json").read_text())
            for name, checksum in checkpoint_folder.checksums(step, messages["files"]).items():
                messages["files"][name]["checksum"] = checksum
            (step / "checkpoint.json").write_text(json.dumps(messages))
        def names(folder):
            assert checkpoint_folder.wait_for_removals(60)
            torch.distributed.barrier()
            seen = sorted(path.name for path in folder.iterdir() if path.name != ".owner.json")
            torch.distributed.barrier()
            return seen
"""


def two_ranks(code: str, folder: Path, **env: str) -> list[tuple[Any, str]]:
    """Run `code` on 2 ranks; return the content of `found` and the output of each."""
    with ranks(BEGIN + code + "\n        print(json.dumps(found))\n", 2, folder, OMP_NUM_THREADS="1", **env) as started:
        ended = [rank.end() for rank in started]
    assert [status for status, _ in ended] == [0, 0], ended
    return [(json.loads(output.splitlines()[-1]), output) for _, output in ended]


@pytest.mark.slurm  # like the clusters, it needs root and permission to mount
def test_a_full_disk(small: Path, tmp_path: Path) -> None:
    """On a full disk every rank raises an error with the free space and the newest checkpoint, in both formats.

    Nothing remains of the step, and the one before can be loaded. With free space the next step is saved, and only then
    does keep=1 remove the one before.
    """
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
                    os.truncate(ballast, ballast.stat().st_size - 100_000)  # enough for the start
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
            assert refused.startswith(f"CheckpointError: cannot save step 2 in {small / name}: rank "), output
            assert refused.endswith("; 0.0 GB are free on this disk; step-00000001 is the newest checkpoint")
            assert after == ["step-00000001"]
            assert loaded == [1, "step-00000003"]
            assert at_last == ["step-00000003"]


def test_refusals(tmp_path: Path) -> None:
    """Every rank raises the same error, whichever rank it concerns, and existing checkpoints are unchanged."""
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
        messages = folder / "3/step-00000001/checkpoint.json"
        written = json.loads(messages.read_text())
        for broken in sorted(messages.parent.glob("deepspeed/*optim_states.pt"))[:1]:
            torch.distributed.barrier()
            if run.rank == 0:
                broken.write_bytes(bytes(broken.stat().st_size))
                messages.write_text(json.dumps(written | {"world_size": 4}))
                restamp(messages.parent)
            torch.distributed.barrier()
        place = folder / "step-00000001/loader/data-00001.pt"
        torch.distributed.barrier()
        if run.rank == 0:
            place.write_bytes(bytes(place.stat().st_size))
            restamp(place.parents[1])
        torch.distributed.barrier()
        found["loader's file"] = error(lambda: Program(run, plain, ddp).load(folder))
        found["converter"] = error(lambda: Program(run, plain, zero(3)).load(folder / "3"))
        found["names"] = [names(folder), names(messages.parent)]
    """
    (zero, printed), (one, _) = two_ranks(code, tmp_path, FOLDER=str(tmp_path / "checkpoints"))
    print(json.dumps(zero, indent=1))
    assert zero == one
    expected = {
        "nothing": "None",
        "twice": "RequestError: {folder}/step-00000001 already exists, written by process ",
        "keep": "RequestError: keep is 0, expected 1 or more",
        "loader": "RequestError: loader is a list, which cannot save its position",
        "extra": "RequestError: extra contains an object that is not a number, string, list, dict or tensor",
        "one rank": "CheckpointError: cannot save step 2 in {folder}: rank 1 on ",
        "within": "RequestError: save() during gradient accumulation",
        "another model": "CheckpointError: {folder}/step-00000001 does not match this model and optimizer: rank 0: ",
        "torch's": "RequestError: {folder}/step-00000001 was saved with parallel.wrap=ddp or fsdp, but this run has deepspeed",
        "deepspeed's": "RequestError: {folder}/3/step-00000001 was saved with parallel.wrap=deepspeed, but this run has ddp",
        "stage": "RequestError: the checkpoint of step 1 has deepspeed.zero_stage 3, but this run has 1",
        "loader's file": "CheckpointError: rank 1 on ",
        "converter": "CheckpointError: rank 0 on ",
    }
    for name, begin in expected.items():
        assert zero[name].startswith(begin.format(folder=tmp_path / "checkpoints")), (name, zero[name])
    assert "OSError: no state" in zero["one rank"] and zero["one rank"].endswith(
        "; step-00000001 is the newest checkpoint"
    )
    assert "GLOBAL pathlib.PosixPath was not an allowed global" in zero["extra"]
    assert "ds_to_universal failed with exit status 1 for " in zero["converter"]
    assert zero["names"][0] == ["3", "step-00000001"]
    assert "universal" not in " ".join(zero["names"][1])
    assert "step-00000001 was saved by 4 ranks: converting it once, to load it on 2 ranks" in printed


@pytest.mark.deepspeed
def test_random_numbers_continue(tmp_path: Path) -> None:
    """With dropout the losses are bit-identical to an uninterrupted run; with another layout the generators are seeded
    from seed, step and rank, with a message."""
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
            messages = folder / "step-00000002/checkpoint.json"
            written = json.loads(messages.read_text())
            torch.distributed.barrier()
            for change in ({"layout": written["layout"] | {"ep": 2}}, {"step": 3}, {"files": {}}):
                if run.rank == 0:
                    messages.write_text(json.dumps(written | {"layout": written["layout"] | {"ep": 2}} | change))
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
    was = "step-00000002 has random generator states for dp_replicate 2 x ep 2, not for dp_replicate 2"
    assert f"{was}: seeding the generators from seed 0, step 2 and seed_by=rank" in printed
    assert "step-00000002 has no random generator states: seeding the generators" in printed


def test_the_runs_own_save_and_load(tmp_path: Path) -> None:
    """`run.save` and `run.load` in one process: the step, the weights and the program's own values are restored."""
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
