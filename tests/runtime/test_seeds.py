"""Seeds of ranks, libraries and data loader workers, and determinism. torch runs in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.runtime.spawned import ranks


def python(code: str, tmp_path: Path, **env: str) -> Any:
    """Run `code` as a file; return its last line, parsed as JSON."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_seeds_of_ranks(tmp_path: Path) -> None:
    """'same' is the seed itself, 'rank' differs on every rank, and 'data' depends only on data_rank; other values are
    refused. No two of 1000 ranks agree even in 32 bits, and seed and rank are not added. Values never change."""
    found = python(
        """
        import json
        from hpcinit.base.errors import RequestError
        from hpcinit.runtime import seeds
        big = 2**63 - 1
        own = {seed: [seeds.of(seed, "rank", rank, 0) for rank in range(1000)] for seed in (0, 1, 2, big)}
        try:
            seeds.of(1, "node", 0, 0)
        except RequestError as error:
            refusal = str(error)
        print(json.dumps(dict(
            same=[seeds.of(seed, "same", 5, 2) == seed for seed in (0, 7, big)],
            data=[seeds.of(7, "data", rank, rank // 2) for rank in range(4)],
            plain=[seeds.of(7, "data", rank, rank) == seeds.of(7, "rank", rank, 9) for rank in range(4)],
            range=all(0 <= one < 2**63 for many in own.values() for one in many),
            note_lines=[len({one % 2**32 for one in many}) for many in own.values()],
            together=len({one for many in own.values() for one in many}),
            value=seeds.of(1, "rank", 1, 0), refusal=refusal)))
        """,
        tmp_path,
    )
    data = found.pop("data")
    assert data[0] == data[1] != data[2] == data[3]
    assert found == {
        "same": [True] * 3,
        "plain": [True] * 4,
        "range": True,
        "note_lines": [1000] * 4,
        "together": 4000,
        "value": VALUE,
        "refusal": "seed_by is 'node', expected one of: same, rank, data",
    }


VALUE = 1341732420335840300  # of(1, "rank", 1, 0): a run that is restarted with a newer hpcinit must get the same value


def test_seed_out_of_range(tmp_path: Path) -> None:
    """A seed outside of 0 to 2**63 - 1 is refused with a RequestError, by init() before it creates a group."""
    found = python(
        """
        import json
        import hpcinit
        from hpcinit.runtime import seeds
        refusals = []
        for seed in (-1, 2**63):
            for call in (hpcinit.init, lambda seed: seeds.of(seed, "same", 0, 0), lambda seed: seeds.seed_all(seed)):
                try:
                    call(seed=seed)
                except hpcinit.HpcinitError as error:
                    refusals.append(str(error))
        print(json.dumps(refusals))
        """,
        tmp_path,
    )
    assert found == [f"seed is {seed}, expected 0 to 2**63 - 1" for seed in (-1, 2**63) for _ in range(3)]


def test_all_libraries_are_seeded(tmp_path: Path) -> None:
    """Python, NumPy and torch repeat with the seed; NumPy uses a short seed unchanged, and all bits of a long one."""
    found = python(
        """
        import json, random, numpy, torch
        from hpcinit.runtime import seeds
        def draws(seed):
            seeds.seed_all(seed)
            return random.random(), numpy.random.rand(), torch.rand(1).item()
        numpy.random.seed(7)
        as_ever = numpy.random.rand()
        seven, again, long, longer = draws(7), draws(7), draws(7 + 2**32), draws(7 + 2**33)
        print(json.dumps([seven == again, seven[1] == as_ever, len({seven[1], long[1], longer[1]})]))
        """,
        tmp_path,
    )
    assert found == [True, True, 3]


LOADER = """
    import json, random, sys, numpy, torch
    from torch.utils.data import DataLoader
    from hpcinit.runtime import seeds

    class Noise:
        '''What a data set would draw to augment its sample: a number of each library.'''
        def __len__(self):
            return 4
        def __getitem__(self, index):
            generator = numpy.random.default_rng(torch.initial_seed())
            return [random.random(), numpy.random.rand(), torch.rand(1).item(), generator.random()]

    def epochs(data_rank, first=0, method="fork", options=True):
        '''Two epochs of a rank with that share of the data: for each the draws of two workers, in their order.'''
        seeds.seed_all(7)
        for epoch in range(first, 2):
            extra = seeds.loader_options(7, data_rank, epoch) if options else {}
            loader = DataLoader(Noise(), None, num_workers=2, multiprocessing_context=method, **extra)
            if options:
                torch.rand(data_rank + 1)  # what the rank drew before must not count
            yield [[float(number) for number in sample] for sample in loader]
"""


def test_workers_differ_where_the_data_do(tmp_path: Path) -> None:
    """Every worker of every data rank and epoch draws different numbers, the same in every run, and a restart continues
    like an uninterrupted run. Without the options all data ranks draw equal numbers."""
    code = """
    if __name__ == "__main__":
        print(json.dumps(dict(
            zero=list(epochs(0)), one=list(epochs(1)), again=list(epochs(0)), late=list(epochs(0, first=1)),
            plain=[next(epochs(rank, options=False)) for rank in (0, 1)])))
    """
    found = python(LOADER + code, tmp_path)
    assert found["zero"] == found["again"] and found["zero"][1] == found["late"][0]
    assert found["plain"][0] == found["plain"][1]
    for library in range(4):
        # 2 data ranks x 2 epochs x 2 workers x 2 samples; default_rng starts again with each sample here.
        drawn = [sample[library] for rank in ("zero", "one") for epoch in found[rank] for sample in epoch]
        assert len(set(drawn)) == (16 if library < 3 else 8)


def test_spawned_workers_draw_the_same(tmp_path: Path) -> None:
    """Spawned workers draw the same numbers as forked ones."""
    code = """
    if __name__ == "__main__":
        print(json.dumps([list(epochs(0, first=1, method=method)) for method in ("fork", "spawn")]))
    """
    fork, spawn = python(LOADER + code, tmp_path)
    assert fork == spawn


def test_coordinates_match_torchs_mesh(tmp_path: Path) -> None:
    """The coordinates of each rank are those in the device mesh that hpcinit builds (torch's fake backend: the mesh is
    real, its groups are not)."""
    found = python(
        """
        import json, math, torch, torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from hpcinit.records.layout import Layout
        from hpcinit.runtime import mesh
        places = []
        for layout in (Layout(1, 6), Layout(2, 1, 3), Layout(1, 2, 2, 2, 3), Layout(2, 2, 2, 2, 2), Layout(3, 1, 1, 1, 2)):
            size = math.prod(layout.degrees().values())
            for rank in range(size):
                dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
                built = mesh.build_mesh(layout, torch.device("cpu"))
                place = layout.coordinate(rank)
                places.append([built.get_coordinate(), [place[name] for name in built.mesh_dim_names]])
                dist.destroy_process_group()
        print(json.dumps(places))
        """,
        tmp_path,
    )
    assert len(found) == 6 + 6 + 24 + 32 + 6
    assert all(theirs == ours for theirs, ours in found)


DETERMINISM = """
    import json, os, torch
    from hpcinit.runtime import seeds
    note_lines = seeds.make_deterministic()
    try:
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    cudnn = torch.backends.cudnn
    print(json.dumps([note_lines, refused.partition(',')[0], cudnn.deterministic, cudnn.benchmark, os.environ["CUBLAS_WORKSPACE_CONFIG"],
        os.environ["NCCL_ALGO"], torch.empty(2).isnan().all().item(), torch._inductor.config.deterministic]))
"""


def test_determinism(tmp_path: Path) -> None:
    """An operation without a deterministic form raises, new memory is filled, the libraries get their variables, and the
    notes contain each change and each setting that is too late."""
    note_lines, *state = python(DETERMINISM, tmp_path)
    assert state == ["put_ does not have a deterministic implementation", True, False, ":4096:8", "Ring", True, True]
    assert note_lines[2:] == [
        "CUBLAS_WORKSPACE_CONFIG=:4096:8",
        "NCCL_ALGO=Ring",
        "PYTHONHASHSEED is not set: the order of sets of strings differs between ranks and runs",
    ]


def test_determinism_and_the_users_variables(tmp_path: Path) -> None:
    """The user's variables are kept; a note names those that are not deterministic."""
    given = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "NCCL_ALGO": "Ring,CollnetChain", "PYTHONHASHSEED": "0"}
    note_lines, *state = python(DETERMINISM, tmp_path, **given)
    assert state[3:5] == [":0:0", "Ring,CollnetChain"]
    assert note_lines[2:] == ["CUBLAS_WORKSPACE_CONFIG=:0:0 (set by you) may not be deterministic; :4096:8 is"]


def test_a_sampler_divides_the_data(tmp_path: Path) -> None:
    """torch's DistributedSampler with `run.layout.data_parallel` and `run.data_rank` gives each sample to one share of
    the data, and ranks of one tensor parallel group the same samples."""
    code = """
        import json, hpcinit
        from torch.utils.data import DataLoader, DistributedSampler
        run = hpcinit.init(layout=hpcinit.Layout(dp_replicate=2, tp=2))
        data = list(range(20))
        sampler = DistributedSampler(data, num_replicas=run.layout.data_parallel, rank=run.data_rank, seed=run.seed)
        loader = DataLoader(data, batch_size=5, sampler=sampler, **run.loader_options())
        print(json.dumps([int(each) for batch in loader for each in batch]))
    """
    with ranks(code, 4, tmp_path, OMP_NUM_THREADS="1") as started:
        ended = [rank.end() for rank in started]
    assert [status for status, _ in ended] == [0] * 4, ended
    first, same, other, again = (json.loads(output.splitlines()[-1]) for _, output in ended)
    assert first == same and other == again and sorted(first + other) == list(range(20))
