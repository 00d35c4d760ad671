"""The device mesh of a layout. torch runs in separate processes."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tests.runtime.spawned import ranks
from tests.runtime.test_seeds import python

FAKE = """
import json, math, random, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from hpcinit.base.errors import RequestError
from hpcinit.records.layout import DIMENSIONS, Layout
from hpcinit.runtime import mesh
from tests.records.groups import group_members

def built(layout, rank):
    size = math.prod(layout.degrees().values())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return mesh.build_mesh(layout, torch.device("cpu"))
"""


def test_groups_match_the_arithmetic(tmp_path: Path) -> None:
    """Every group of torch's mesh, combinations included, has the ranks that the arithmetic gives, in 150 random layouts
    and on random ranks (torch's fake backend: the mesh is real, its groups carry nothing)."""
    found = python(
        FAKE
        + textwrap.dedent("""
        random.seed(4)
        wrong, names = [], set()
        for _ in range(150):
            degrees = [random.choice([1, 1, 2, 3, 4]) for _ in DIMENSIONS]
            taken = degrees[2] if degrees[2] > 1 else degrees[1]
            layout = Layout(*degrees, ep=random.choice([1, *(n for n in (2, 3, 4) if taken % n == 0)]))
            size = math.prod(degrees)
            rank = random.randrange(size)
            made = built(layout, rank)
            for name in mesh.NAMES:
                expected = next(list(each) for each in group_members(layout, name) if rank in each)
                ranks = dist.get_process_group_ranks(mesh.group(made, name))
                names |= {name} if len(ranks) > 1 else set()
                if (ranks, mesh.size(made, name), ranks[mesh.place(made, name)]) != (expected, len(expected), rank):
                    wrong.append([str(layout), rank, name, ranks, expected])
            dist.destroy_process_group()
        print(json.dumps([wrong, sorted(names) == sorted(mesh.NAMES)]))
        """),
        tmp_path,
    )
    assert found == [[], True]


def test_no_unnecessary_groups(tmp_path: Path) -> None:
    """Plain data parallelism creates no group besides the default one, nor does a combination that equals another.

    A combination can equal a dimension, another combination or the world (fake backend, torch's count of its groups).
    """
    found = python(
        FAKE
        + textwrap.dedent("""
        counts = []
        for layout in (Layout(1, 8), Layout(1, 1, 8), Layout(1, 4, 1, 1, 2), Layout(1, 2, 4), Layout(1, 2, 2, 2)):
            built(layout, 0)
            counts.append(len(dist.distributed_c10d._world.pg_map) - 1)
            dist.destroy_process_group()
        print(json.dumps(counts))
        """),
        tmp_path,
    )
    # Groups: dp_replicate, tp; then dp_replicate, dp_shard; then those, cp, dp and fsdp of 4 ranks (loss is the world).
    assert found == [0, 0, 2, 2, 5]


def test_parts_of_size_one(tmp_path: Path) -> None:
    """mesh_part() omits dimensions of size 1, also from a combination, and refuses an unknown name (fake backend)."""
    found = python(
        FAKE
        + textwrap.dedent("""
        made = built(Layout(1, 2, 2, 2, 1), 5)
        try:
            mesh.size(made, "rp")
        except RequestError as error:
            refusal = str(error)
        hsdp = mesh.mesh_part(made, "dp_replicate", "fsdp", "tp")
        print(json.dumps(dict(
            tp=[mesh.size(made, "tp"), mesh.mesh_part(made, "tp"), mesh.place(made, "tp")],
            hsdp=[hsdp.mesh_dim_names, list(hsdp.shape), hsdp.get_coordinate()],
            own=mesh.mesh_part(made, "loss").size(), places=[mesh.place(made, name) for name in ("dp", "fsdp", "loss")], refusal=refusal)))
        """),
        tmp_path,
    )
    assert found == {
        "tp": [1, None, 0],
        "hsdp": [["dp_replicate", "fsdp"], [2, 4], [1, 1]],
        "own": 8,
        "places": [2, 1, 5],
        "refusal": found["refusal"],
    }
    assert found["refusal"].startswith("unknown mesh dimension 'rp'; expected one of: pp, dp_replicate, dp_shard")


def test_every_name_has_a_mesh(tmp_path: Path) -> None:
    """Every dimension and combination exists in the mesh, with size 1 too, and `mesh[name]` has the group that the
    arithmetic gives, without a warning; sp is cp; an unknown name is a KeyError (fake backend)."""
    found = python(
        FAKE
        + textwrap.dedent("""
        import warnings
        warnings.simplefilter("error")
        wrong, unknown = [], []
        for layout in (Layout(1, 1), Layout(1, 1, 8), Layout(1, 2, 2, 2), Layout(2, 2, 2, ep=2), Layout(dp_replicate=4, ep=4), Layout(1, 1, 1, 1, 4)):
            made = built(layout, 0)
            assert layout.ep > 1 or made["pp", "dp_shard"].mesh_dim_names == ("pp", "dp_shard")
            assert [group.size() for group in made.get_all_groups()] == list(made.shape)
            for name in mesh.NAMES:
                expected = list(group_members(layout, name)[0])
                for group in (made[name].get_group(), made.get_group(name)):
                    ranks = dist.get_process_group_ranks(group)
                    if (ranks, made[name].size(), made[name].get_local_rank()) != (expected, len(expected), 0):
                        wrong.append([str(layout), name, ranks, expected])
            for ask in (made.__getitem__, made.get_group):
                try:
                    ask("rp")
                except KeyError as error:
                    unknown.append("rp" in str(error))
            dist.destroy_process_group()
        print(json.dumps([wrong, unknown]))
        """),
        tmp_path,
    )
    assert found == [[], [True] * 12]


def test_combinations_cause_no_warning(tmp_path: Path) -> None:
    """Every part of a mesh, also a flattened one together with others, has the same group each time and causes no
    warning of torch (fake backend)."""
    found = python(
        FAKE
        + textwrap.dedent("""
        import warnings
        made = built(Layout(1, 2, 2, 2, 2, ep=2), 5)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for names in (*((name,) for name in mesh.NAMES), ("dp_replicate", "fsdp"), ("dp", "cp", "tp")):
                first, again = mesh.mesh_part(made, *names), mesh.mesh_part(made, *names)
                assert first is None or [str(each.mesh_dim_names) for each in (first, again)] == [str(first.mesh_dim_names)] * 2
                assert first is None or first.get_all_groups() == again.get_all_groups(), names
            made["loss"]
        print(json.dumps([str(each.message) for each in seen]))
        """),
        tmp_path,
    )
    assert found == []


def test_real_groups_of_eight_ranks(tmp_path: Path) -> None:
    """On eight real ranks with gloo, a sum over each group is the sum of the ranks that the arithmetic gives."""
    code = """
        import json, torch, torch.distributed as dist, hpcinit
        from hpcinit.runtime import mesh
        from tests.records.groups import group_members
        layout = hpcinit.Layout(1, 2, 2, 1, 2, ep=2)
        run = hpcinit.init(layout=layout)
        sums = {}
        for name in ("dp_replicate", "dp_shard", "ep", "tp", "dp", "loss", "cp", "pp"):
            value = torch.tensor([float(2**run.rank)])
            dist.all_reduce(value, group=run.group(name))
            expected = next(sum(2**rank for rank in each) for each in group_members(layout, name) if run.rank in each)
            sums[name] = [int(value), expected]
        assert dist.get_process_group_ranks(run.group("cp")) == [run.rank]
        print(json.dumps(sums))
    """
    with ranks(code, 8, tmp_path, OMP_NUM_THREADS="1") as started:
        ended = [rank.end() for rank in started]
    assert [status for status, _ in ended] == [0] * 8, ended
    for _, output in ended:
        sums: dict[str, Any] = json.loads(output.splitlines()[-1])
        assert len(sums) == 8 and all(summed == expected for summed, expected in sums.values())


def test_slices_are_those_of_torchs_mesh(tmp_path: Path) -> None:
    """On four real ranks with gloo, `run.mesh` has the slices of torch's init_device_mesh with dimensions dp, sp and tp,
    whatever their sizes: by name, by a tuple, a slice of a slice, flattened by the program; and it sums over the same
    ranks."""
    code = """
        import json, torch, torch.distributed as dist, hpcinit
        from torch.distributed.device_mesh import init_device_mesh
        from hpcinit.runtime.mesh import build_mesh
        run = hpcinit.init()

        def seen(mesh):
            value = [torch.tensor([float(2**run.rank)]) for _ in mesh.mesh_dim_names]
            for each, group in zip(value, mesh.get_all_groups(), strict=True):
                dist.all_reduce(each, group=group)
            return [mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.get_coordinate(), [int(each) for each in value]]

        def slices(mesh):
            found = [seen(mesh[names]) for names in ("dp", "sp", "tp", ("dp", "sp"), ("sp", "tp"), ("dp", "tp"), ("dp", "sp", "tp"))]
            found += [seen(mesh["dp", "sp"]["sp"]), seen(mesh["dp", "sp"]._flatten("dp_sp")), seen(mesh["dp_sp"])]
            # torch 2.10 accepts a wrong order if dimensions have the size 1
            for wrong in (("sp", "dp"), "rp")[torch.__version__ < "2.11" :]:
                try:
                    mesh[wrong]
                except KeyError:
                    found.append("KeyError")
            return found

        wrong = []
        for dp, sp, tp in ((4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)):
            for layout in (hpcinit.Layout(dp_replicate=dp, cp=sp, tp=tp), hpcinit.Layout(dp_replicate=1, dp_shard=dp, cp=sp, tp=tp)):
                ours = slices(build_mesh(layout, run.device))
                torchs = slices(init_device_mesh("cpu", (dp, sp, tp), mesh_dim_names=("dp", "sp", "tp")))
                wrong += [[str(layout), *both] for both in zip(ours, torchs, strict=True) if both[0] != both[1]]
        print(json.dumps(wrong))
    """
    with ranks(code, 4, tmp_path, OMP_NUM_THREADS="1") as started:
        ended = [rank.end() for rank in started]
    assert [status for status, _ in ended] == [0] * 4, ended
    assert [json.loads(output.splitlines()[-1]) for _, output in ended] == [[]] * 4
