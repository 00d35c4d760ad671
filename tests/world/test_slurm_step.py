"""Every recorded Slurm environment is read and compared with measured values."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcinit.base.errors import WorldError
from hpcinit.world import World, launchers
from hpcinit.world.launchers import slurm_step
from hpcinit.world.launchers.slurm_step import Process
from tests.records.recordings import Shape, Task, shapes

SHAPES = shapes()
RANKS = [shape for shape in SHAPES if shape.tasks[0].rank is not None]
NO_RANKS = {f"{shape.version}-{shape.name}": shape.tasks[0] for shape in SHAPES if shape.tasks[0].rank is None}
# Shapes whose environment does not show rank 0's host: no variable has the hosts in order.
UNKNOWN_MASTER = {
    "arbitrary_alone",
    "arbitrary_nodelist",
    "arbitrary_file_as_nodelist",
    "het_step_in_plain_job_reversed",
}


def environment(shape: Shape, task: Task, folder: Path) -> dict[str, str]:
    """Return the recorded variables, after writing the host file to the recorded place."""
    if "SLURM_HOSTFILE" not in task.env:
        return task.env
    (folder / "hosts").write_text(shape.hostfile)
    return task.env | {"SLURM_HOSTFILE": str(folder / "hosts")}


def of_step(task: Task) -> Process:
    """Return the process of a real task, as the kernel shows it."""
    return Process(0, f"{task.env['SLURM_JOB_ID']}.{task.env['SLURM_STEP_ID']}")


def test_the_recordings_are_there() -> None:
    """At least 80 shapes of two Slurm versions are compared, and every exception is one of them."""
    assert len(RANKS) >= 80 and {shape.version for shape in RANKS} >= {"22.05.8", "24.11.5"}
    assert {shape.name for shape in RANKS} >= UNKNOWN_MASTER


@pytest.mark.parametrize(("shape", "seen"), [(shape, seen) for shape in RANKS for seen in (False, True)], ids=str)
def test_every_rank_is_read_right(shape: Shape, seen: bool, tmp_path: Path) -> None:
    """Rank, sizes, local rank and own host match the measurement, from the environment alone and with the process."""
    for task in shape.tasks:
        world = launchers.read(environment(shape, task, tmp_path), process=of_step(task) if seen else Process())
        assert (world.launcher, world.warnings) == ("slurm", ())
        assert (world.rank, world.world_size) == (task.rank, task.world_size)
        assert (world.local_rank, world.local_world_size) == (task.local_rank, task.local_world_size)
        assert world.host == task.host
        assert set(world.hosts) == task.hosts and len(world.hosts) == len(task.hosts)


@pytest.mark.parametrize("shape", RANKS, ids=str)
def test_master_is_the_host_of_rank_0(shape: Shape, tmp_path: Path) -> None:
    """master_addr is rank 0's host if master_known is True, and always on rank 0 itself."""
    for task in shape.tasks:
        world = launchers.read(environment(shape, task, tmp_path), process=of_step(task))
        assert world.master_known == (shape.name not in UNKNOWN_MASTER)
        if world.master_known or task.rank == 0:
            assert world.master_addr == task.host_of_rank_0


@pytest.mark.parametrize("shape", RANKS, ids=str)
def test_all_ranks_agree(shape: Shape, tmp_path: Path) -> None:
    """All ranks of a launch compute the same job and ports, and the same hosts if master_known is True."""
    worlds = [launchers.read(environment(shape, t, tmp_path), process=of_step(t)) for t in shape.tasks]
    jobs = {task.env["SLURM_JOB_ID"] for task in shape.tasks}  # an array has several
    assert len({world.job for world in worlds}) == len({world.master_ports for world in worlds}) == len(jobs)
    if shape.name not in UNKNOWN_MASTER:
        assert len({world.hosts for world in worlds}) == 1


REFUSED = {
    "batch_script": "SLURM_STEP_ID is not set. The job has 8 tasks",
    "batch_script_het": "SLURM_STEP_ID is not set. The job has 5 tasks",
    "batch_script_het_one_each": "SLURM_STEP_ID is not set. The job has 2 tasks",
    "batch_script_nodes_only": "SLURM_STEP_ID is not set. The job has 2 nodes",
    "salloc_shell": "SLURM_STEP_ID is not set. The job has 4 tasks",
    "interactive_step": "SLURM_STEP_ID is 4294967290: an interactive shell of salloc. The job has 4 tasks",
    "nested_batch_script": "is inherited: Slurm started this process in step 39.batch. The job has 2 tasks",
    "nested_same_shape": "is inherited: Slurm started this process in step 7.batch. The job has 2 tasks",
    "nested_salloc": "is inherited: Slurm started this process in step 10.0 not in 11.0. The job has 2 tasks",
    "nested_salloc_same_shape": "is inherited: Slurm started this process in step 12.0 not in 13.0. The job has 2 tasks",
}
ALONE = {"batch_script_one_task", "batch_script_exclusive", "nested_one_task"}


def process_of(task: Task) -> Process:
    """Return the process as the kernel shows it. salloc runs in the step from which it was called."""
    number = int(task.env["SLURM_JOB_ID"])
    return Process(0, f"{number - 1}.0" if task.shape.startswith("nested_salloc") else f"{number}.batch")


def test_every_recording_without_a_rank_is_expected() -> None:
    """Each recorded process that is not a rank is in exactly one of these tables."""
    names = {task.shape for task in NO_RANKS.values()}
    assert names == {*REFUSED, *ALONE}


@pytest.mark.parametrize("name", [name for name, task in NO_RANKS.items() if task.shape in REFUSED])
def test_no_rank_is_no_hang(name: str) -> None:
    """Batch scripts and salloc shells, nested ones too, get the advice to use srun."""
    with pytest.raises(WorldError) as caught:
        launchers.read(NO_RANKS[name].env, process=process_of(NO_RANKS[name]))
    doubt, _, tasks = REFUSED[NO_RANKS[name].shape].partition(". The job has ")
    assert f"but the job has {tasks}: " in str(caught.value) and doubt in str(caught.value)
    assert (
        "start the ranks with srun, because sbatch and salloc alone start none. For a single process, set HPCINIT_STARTED_BY=single"
        in str(caught.value)
    )


@pytest.mark.parametrize("name", [name for name, task in NO_RANKS.items() if task.shape in ALONE])
def test_a_job_of_one_task_needs_no_srun(name: str) -> None:
    """In a batch script with one task, or one node without a number of tasks, the process is a world of one rank."""
    world = launchers.read(NO_RANKS[name].env, process=process_of(NO_RANKS[name]))
    assert (world.rank, world.world_size, world.hosts, world.master_addr) == (0, 1, ("n1",), "127.0.0.1")
    assert world.job.endswith(".batch.0")


@pytest.mark.parametrize("name", [name for name, task in NO_RANKS.items() if "SLURM_STEP_ID" in task.env])
def test_the_process_beats_inherited_variables(name: str) -> None:
    """If slurmstepd is visible, every leaked step is detected."""
    env = NO_RANKS[name].env | {"SLURM_UMASK": "0022", "SLURM_NTASKS": "2"}
    with pytest.raises(
        WorldError, match=r"is inherited: Slurm started this process in step \d+\.batch, a batch script,|429"
    ):
        launchers.read(env, process=Process(0, f"{env['SLURM_JOB_ID']}.batch"))


def block() -> dict[str, str]:
    """Return the variables of rank 2 of 4 on two nodes."""
    return dict(next(shape for shape in RANKS if str(shape) == "22.05.8-block").tasks[2].env)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "1"}, "Slurm's variables are from different steps: SLURM_GTIDS is '2,3', so local rank 0 should be rank 2, but SLURM_PROCID is 1"),
        ({"SLURM_LOCALID": "2"}, "so local rank 2 should be rank absent, but SLURM_PROCID is 2"),
        ({"SLURM_GTIDS": "2,x"}, "SLURM_GTIDS is '2,x'"),
        ({"SLURM_NODEID": "7"}, "SLURM_NODEID is 7, but the step has 2 hosts (n1,n2): start the ranks with srun"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set, expected the step's host names"),
        ({"SLURM_PROCID": "two"}, "SLURM_PROCID is 'two', expected a number: start the ranks with srun, because sbatch and salloc alone"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "'[' without ']' at column 2"),
    ],
)  # fmt: skip
def test_variables_of_different_steps(changes: dict[str, str], message: str) -> None:
    """Contradicting variables of a step are an error that shows their values."""
    with pytest.raises((WorldError, ValueError)) as caught:
        launchers.read(block() | changes)
    assert message in str(caught.value)


def test_a_restart_is_another_job() -> None:
    """A requeued job keeps its id; the restart count changes its name and its ports."""
    env = block()
    assert slurm_step.identity(env) == "6.0.0"
    again = env | {"SLURM_RESTART_COUNT": "1"}
    assert slurm_step.identity(again) == "6.0.1"
    assert launchers.read(env).master_ports != launchers.read(again).master_ports


def test_components_of_a_heterogeneous_job_differ() -> None:
    """Two components with the same job and step ids have different names."""
    jobs = {
        shape.name: launchers.read(shape.tasks[0].env).job for shape in RANKS if shape.name.startswith("het_component")
    }
    assert jobs == {"het_component_0": "29.0.0", "het_component_1": "31+1.0.0"}


def test_components_of_another_job_do_not_count() -> None:
    """A nested job's hosts are not ordered by inherited variables of a heterogeneous job."""
    task = next(shape for shape in RANKS if shape.name == "het_both_reversed_hosts").tasks[2]
    env = task.env | {"SLURM_JOB_ID": "99", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_GTIDS": "0"}
    assert launchers.read(env).hosts == ("n1", "n2", "n4")


def arbitrary(rank: int, **changes: str) -> World:
    env = next(shape for shape in RANKS if shape.name == "arbitrary").tasks[rank].env
    return launchers.read(env | changes)


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("n3\nn1\nn3\nn2\n", True),
        ("# rank 0 first\nn3 n1\nn3*1 n2\n", True),
        ("n[3,1]\nn3\nn2\n", True),
        ("n1\nn1\nn1\nn1\n", False),
        ("n3\nn2\nn3\nn1\n", False),
        ("n3\n", False),
        ("n[3\n", False),
        ("\xff", False),
        ("", False),
    ],
)
def test_the_host_file_must_be_the_one_that_placed_the_step(text: str, known: bool, tmp_path: Path) -> None:
    """A host file that cannot be read, or that contradicts the place of this rank, leaves master_known False."""
    (tmp_path / "hosts").write_bytes(text.encode("latin-1"))
    world = arbitrary(1, SLURM_HOSTFILE=str(tmp_path / "hosts"))
    assert world.master_known is known
    assert not known or world.master_addr == "n3"


def test_without_a_host_file_rank_0_still_knows_itself() -> None:
    """With --distribution=arbitrary rank 0 uses its own host; the others guess another host than their own."""
    worlds = [arbitrary(rank, SLURM_HOSTFILE="/nowhere") for rank in range(4)]
    assert [(world.master_addr, world.master_known) for world in worlds] == [
        ("n3", False), ("n2", False), ("n3", False), ("n1", False)
    ]  # fmt: skip


def test_of_two_hosts_the_other_is_the_master() -> None:
    """With two hosts no host file is needed: rank 0 is on this one or on the other one."""
    env = block() | {"SLURM_DISTRIBUTION": "arbitrary"}
    world = launchers.read(env)
    assert (world.master_addr, world.master_known) == ("n1", True)


def test_rank_0_on_a_later_node() -> None:
    """If SLURM_GTIDS has rank 0 on another node than the first, the order is unknown and rank 0 publishes its host."""
    env = block() | {
        "SLURM_STEP_NODELIST": "n[1-3]",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_STEP_TASKS_PER_NODE": "1,2,1",
    }
    first = launchers.read(env | {"SLURM_GTIDS": "0,1", "SLURM_PROCID": "0"})
    assert (first.master_addr, first.master_known, first.host) == ("n2", False, "n2")


def test_mpi_variables_of_srun_are_slurms() -> None:
    """--mpi=pmi2 and --mpi=pmix set PMI_* and PMIX_* in a Slurm step, and Slurm's values are used without a warning."""
    for name, variable in (("mpi_pmi2", "PMI_RANK"), ("mpi_pmix", "PMIX_RANK")):
        env = next(shape for shape in RANKS if shape.name == name).tasks[1].env
        assert env[variable] == "1"
        world = launchers.read(env)
        assert (world.launcher, world.rank, world.warnings) == ("slurm", 1, ())


def test_the_local_engine_is_read_as_slurm() -> None:
    """The variables of hpcinit's local engine are read as a step: four ranks on two loopback nodes."""
    from hpcinit.engine import local_step as local

    job = local.batch_variables(7, "x", 2, 2, "/tmp")
    worlds = [launchers.read(job | local.task_variables(job, 2, 2, rank)) for rank in range(4)]
    assert [(w.rank, w.local_rank, w.node_rank, w.host) for w in worlds] == [
        (0, 0, 0, "127.0.0.1"), (1, 1, 0, "127.0.0.1"), (2, 0, 1, "127.0.0.2"), (3, 1, 1, "127.0.0.2")
    ]  # fmt: skip
    with pytest.raises(WorldError, match=r"SLURM_STEP_ID is not set.*the job has 4 tasks: "):
        launchers.read(job)
    inside_a_real_step = Process(0, "4711.0")
    assert launchers.read(job | local.task_variables(job, 2, 2, 3), process=inside_a_real_step).rank == 3
