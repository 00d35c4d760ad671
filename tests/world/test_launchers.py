"""One launcher is chosen, every value is read from it, and contradicting variables are reported."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcinit.base.errors import WorldError
from hpcinit.world import ENV_WORLD, World, exports, launchers
from hpcinit.world.launchers import mpi
from hpcinit.world.launchers.slurm_step import Process
from tests.records.recordings import shapes
from tests.skip_or_fail import skip_or_fail

# Two ranks each of `mpirun -np 2`, `mpiexec.hydra -np 2` (Debian 12's openmpi-bin and mpich) and
# `horovodrun -np 2 --gloo`: what env printed. The lists are in the order of the reported ranks.
RECORDED = json.loads((Path(__file__).parents[1] / "data/launchers.json").read_text())
OPENMPI, HYDRA, HOROVOD = (RECORDED[name] for name in ("openmpi 4.1.4", "hydra 4.0.2", "horovodrun 0.28.1"))

TORCHRUN = {  # worker 3 of 4 on the second of two nodes, torch 2.13
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip
STALE = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "old", "MASTER_PORT": "29500"}


def step(shape: str = "block", rank: int = 2) -> dict[str, str]:
    """The recorded environment of a Slurm task; block is 2 x 2 ranks on n1 and n2."""
    return dict(next(s for s in shapes() if str(s) == f"22.05.8-{shape}").tasks[rank].env)


def refusal(env: dict[str, str], started_by: str | None = None) -> str:
    with pytest.raises(WorldError) as caught:
        launchers.read(env, started_by)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "recorded"),
    [("openmpi", OPENMPI), ("mpich", HYDRA), ("horovod", HOROVOD)],
    ids=["openmpi", "hydra", "horovod"],
)
def test_recorded_launchers(name: str, recorded: list[dict[str, str]]) -> None:
    """Two ranks on one machine are ranks 0 and 1 of 2, use loopback, and agree on job and ports."""
    worlds = [launchers.read(env) for env in recorded]
    assert [(w.launcher, w.rank, w.local_rank) for w in worlds] == [(name, 0, 0), (name, 1, 1)]
    for world in worlds:
        assert (world.world_size, world.local_world_size, world.node_rank, world.nodes) == (2, 2, 0, 1)
        assert (world.master_addr, world.master_known, world.warnings) == ("127.0.0.1", True, ())
    assert len({(w.job, w.master_ports) for w in worlds}) == 1


def test_torchrun() -> None:
    """All values are torchrun's, the job's name includes its restart count, and the nodes are counted."""
    world = launchers.read(TORCHRUN)
    assert world == World("torchrun", 3, 4, 1, 2, 1, (), "n1", (29400,), "abc.1", node_count=2, ranks_here=(2, 3))


def test_two_torchruns_without_an_id() -> None:
    """torchrun calls every run without --rdzv-id 'none': the address and port of its store distinguish two runs."""
    nameless = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
    assert launchers.read(nameless).job == "none-n1-29400.1"
    assert launchers.read(nameless | {"MASTER_PORT": "29401"}).job == "none-n1-29401.1"
    assert launchers.read(nameless | {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}).job == "none-n1-29400.1"


def test_ranks_without_a_job() -> None:
    """With SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS alone, several ranks are refused: each would be a world of one."""
    only = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}
    assert refusal(only) == (
        "SLURM_PROCID is 1, SLURM_LOCALID is 1, SLURM_NTASKS is 2, but SLURM_JOB_ID is not set, so hpcinit cannot find "
        "the nodes. Start the ranks with srun and keep its variables. Or set RANK=$SLURM_PROCID "
        "LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=HOST MASTER_PORT=PORT. For a single process, "
        "set HPCINIT_STARTED_BY=single"
    )
    assert launchers.read(only | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).world_size == 1
    assert launchers.read(only | {"HPCINIT_STARTED_BY": "single"}).world_size == 1
    assert launchers.read(only | TORCHRUN).world_size == 4


def test_single() -> None:
    """An environment without any launcher's variables is a single process."""
    world = launchers.read({})
    assert (world.launcher, world.rank, world.world_size, world.master_addr) == ("single", 0, 1, "127.0.0.1")
    assert world.warnings == ()


# --- contradictions


def test_a_stale_rank_in_a_slurm_step() -> None:
    """Stale variables of a reused shell are reported with both values, and Slurm's values are used."""
    world = launchers.read(step() | STALE)
    assert (world.rank, world.world_size, world.master_addr) == (2, 4, "n1")
    assert world.warnings == (
        "ignored variables of env: RANK is 7, SLURM_PROCID is 2; WORLD_SIZE is 8, SLURM_NTASKS is 4; LOCAL_RANK is 3, "
        "SLURM_LOCALID is 0. hpcinit uses the values of slurm",
        "ignored variables of torch: MASTER_ADDR is old, rank 0's host is n1; MASTER_PORT is 29500, the port is "
        f"{world.master_ports[0]}. hpcinit uses the values of slurm",
    )


def test_exports_of_hpcinit_are_not_contradictions() -> None:
    """Reading the environment again after hpcinit.run's exports gives no warning, even if rank 0's address changed."""
    for env in (step(), OPENMPI[1], HYDRA[1], HOROVOD[1], TORCHRUN, {}):
        world = launchers.read(env)
        moved = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"} if world.launcher == "slurm" else {}
        assert launchers.read(env | exports(world) | moved).warnings == ()


def test_exports_of_another_job_are_contradictions() -> None:
    """Variables that hpcinit exported in one step and another step inherited are ignored with a warning."""
    world = launchers.read(step("single_node", 3) | exports(launchers.read(step())))
    assert world.rank == 3 and [text.partition(":")[0] for text in world.warnings] == [
        "ignored variables of env", "ignored variables of torch"
    ]  # fmt: skip


def test_torchrun_inside_srun() -> None:
    """The step's tasks are torchrun's agents: torchrun's values are used and Slurm's are reported."""
    world = launchers.read(step() | TORCHRUN)
    assert (world.launcher, world.rank) == ("torchrun", 3)
    assert world.warnings == (
        "ignored variables of slurm: SLURM_PROCID is 2, RANK is 3; SLURM_LOCALID is 0, LOCAL_RANK is 1. hpcinit uses "
        "the values of torchrun",
    )


def test_srun_inside_torchrun() -> None:
    """If Slurm itself started this process, torchrun's variables can only be inherited."""
    env = step() | TORCHRUN
    world = launchers.read(env, process=Process(int(env["SLURM_TASK_PID"]), ""))
    assert (world.launcher, world.rank) == ("slurm", 2)
    assert world.warnings[0].startswith("ignored variables of env: RANK is 3, SLURM_PROCID is 2")


def test_mpirun_inside_an_allocation() -> None:
    """In a batch script of 8 tasks, mpirun's values are used and the script's rank 0 is reported."""
    world = launchers.read(step("batch_script", 0) | OPENMPI[1])
    assert (world.launcher, world.rank) == ("openmpi", 1)
    assert world.warnings == (
        "ignored variables of slurm: SLURM_PROCID is 0, OMPI_COMM_WORLD_RANK is 1; SLURM_NTASKS is 8, OMPI_COMM_WORLD_SIZE is 2; "
        "SLURM_LOCALID is 0, OMPI_COMM_WORLD_LOCAL_RANK is 1. hpcinit uses the values of openmpi",
    )


def test_stale_mpi_variables_in_a_slurm_step() -> None:
    """PMI_RANK without Hydra's local rank is srun's or stale: Slurm's rank is used and the difference reported."""
    world = launchers.read(step() | {"PMI_RANK": "0", "PMI_SIZE": "9", "PMIX_RANK": "5"})
    assert (world.launcher, world.rank) == ("slurm", 2)
    assert world.warnings == (
        "ignored variables of mpich: PMI_RANK is 0, SLURM_PROCID is 2; PMI_SIZE is 9, SLURM_NTASKS is 4. hpcinit uses the values of slurm",
        "ignored variables of PMIx: PMIX_RANK is 5, SLURM_PROCID is 2. hpcinit uses the values of slurm",
    )


def test_half_of_torchs_variables() -> None:
    """A RANK without WORLD_SIZE and MASTER_ADDR is a single process, and RANK is reported."""
    assert launchers.read({"RANK": "7"}).warnings == (
        "ignored variables of env: RANK is 7, rank is 0. hpcinit uses the values of single",
    )


def test_empty_values() -> None:
    """An empty variable is shown as ''."""
    assert launchers.read({"RANK": ""}).warnings == (
        "ignored variables of env: RANK is '', rank is 0. hpcinit uses the values of single",
    )
    (warning,) = launchers.read(step() | {"MASTER_ADDR": "", "MASTER_PORT": ""}).warnings
    assert "MASTER_ADDR is '', rank 0's host is n1; MASTER_PORT is ''," in warning
    assert "but rank '' of 2 according to mpich (" in refusal(OPENMPI[0] | HYDRA[1] | {"PMI_RANK": ""})


def test_complete_variables_without_a_launcher() -> None:
    """torch's variables are used if they are complete and no launcher is visible; a child of a rank of hpcinit, which
    inherits them, is a single process."""
    world = launchers.read(STALE)
    assert (world.launcher, world.rank, world.world_size, world.local_rank, world.warnings) == ("env", 7, 8, 3, ())
    assert launchers.read(STALE | {"HPCINIT_STARTED_BY": "single"}).world_size == 1
    assert launchers.read(STALE | {ENV_WORLD: "old"}).world_size == 1
    assert launchers.read(STALE | {"WORLD_SIZE": "1", "RANK": "0"}).launcher == "single"
    without = {name: value for name, value in STALE.items() if name != "LOCAL_RANK"}
    assert refusal(without) == (
        "RANK is 7 and WORLD_SIZE is 8, but LOCAL_RANK is not set. Set it to this rank's index among the ranks that "
        "share the node's devices (0 if the rank sees only its own device)"
    )
    assert refusal(STALE | {"RANK": "8"}) == "rank is 8, expected 0 to 7 (world_size is 8)"


@pytest.mark.parametrize(("env", "name"), [(step("one_task", 0), "slurm")])
def test_ranks_without_a_launcher(env: dict[str, str], name: str) -> None:
    """Inside a Slurm step with one task, a complete set of torch's variables may be stale or intended: it is refused."""
    assert refusal(env | STALE) == (
        f"RANK is 7 and WORLD_SIZE is 8, but {name} started only 1 rank. If your own launcher set RANK and WORLD_SIZE, "
        f"set HPCINIT_STARTED_BY=env. Otherwise, unset both, or set HPCINIT_STARTED_BY={name} to ignore them"
    )
    assert launchers.read(env | STALE, "env").rank == 7
    assert launchers.read(env | STALE, name).world_size == 1


def test_srun_of_one_task_inside_a_rank() -> None:
    """A one-task step that a rank of a larger world started is a world of one rank: the larger world's variables are stale."""
    env = step("one_task", 0) | STALE
    assert launchers.read(env, process=Process(int(env["SLURM_TASK_PID"]))).world_size == 1
    assert launchers.read(env | {"HPCINIT_WORLD": "1.0.0"}).world_size == 1


def test_two_mpis() -> None:
    """Open MPI and Hydra in one environment with different ranks are refused: neither is certainly the inner one."""
    assert refusal(OPENMPI[0] | HYDRA[1]) == (
        "this process is rank 0 of 2 according to openmpi, but rank 1 of 2 according to mpich (PMI_RANK, PMI_SIZE). "
        "Choose the launcher that started the ranks: set HPCINIT_STARTED_BY=openmpi or HPCINIT_STARTED_BY=mpich"
    )
    assert launchers.read(OPENMPI[1] | HYDRA[1]).rank == 1
    daemon = step() | {"PMI_RANK": "1", "PMI_SIZE": "2"}  # set by srun for mpirun's daemon
    assert launchers.read(daemon | OPENMPI[0]).rank == 0
    assert (
        launchers.read(OPENMPI[0] | HYDRA[1], "mpich")
        .warnings[0]
        .startswith("ignored variables of openmpi: OMPI_COMM_WORLD_RANK is 0, PMI_RANK is 1")
    )


# --- HPCINIT_STARTED_BY and started_by=


def test_the_argument_overrides_the_variable() -> None:
    """The argument overrides the variable, the variable overrides detection, and contradictions are still reported."""
    env = step() | TORCHRUN
    assert launchers.read(env | {"HPCINIT_STARTED_BY": "slurm"}).rank == 2
    assert launchers.read(env | {"HPCINIT_STARTED_BY": "slurm"}, "torchrun").rank == 3
    alone = launchers.read(env, "single")
    assert alone.world_size == 1 and "SLURM_PROCID is 2, rank is 0" in alone.warnings[0]


def test_a_batch_script_can_be_a_single_process() -> None:
    """The advice of the error about a missing srun works."""
    assert launchers.read(step("batch_script", 0) | {"HPCINIT_STARTED_BY": "single"}).world_size == 1


def test_an_unknown_launcher() -> None:
    """The message lists the names and where the unknown one can be set."""
    assert refusal({}, "mpi") == (
        "launcher 'mpi' is unknown, expected one of: torchrun, horovod, openmpi, mpich, slurm, env, single (from "
        "started_by= or HPCINIT_STARTED_BY)"
    )


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        (
            "torchrun",
            "MASTER_ADDR is not set, expected rank 0's host: torchrun sets it for every worker; start the ranks",
        ),
        (
            "env",
            "MASTER_ADDR is not set, expected rank 0's host: with the launcher 'env' you must set RANK, WORLD_SIZE, LOCAL_RANK",
        ),
        (
            "openmpi",
            "OMPI_COMM_WORLD_RANK is not set, expected a number: mpirun sets it for every rank; start the ranks",
        ),
        (
            "mpich",
            "PMI_RANK is not set, expected a number: mpiexec sets it for every rank; start the ranks with mpiexec",
        ),
        ("horovod", "HOROVOD_RANK is not set, expected a number: horovodrun sets it for every rank; start the ranks"),
        (
            "slurm",
            "SLURM_JOB_ID is not set, expected a job id, which Slurm sets for every task: start the ranks with srun, "
            "because sbatch and salloc alone start none (or do not set HPCINIT_STARTED_BY=slurm)",
        ),
    ],
)
def test_a_named_launcher_that_is_absent(launcher: str, message: str) -> None:
    """Naming a launcher whose variables are absent is an error that names the first one."""
    assert refusal({}, launcher).startswith(message)


# --- rank 0's host with MPI and Horovod


def two_nodes(env: dict[str, str], size: str, rank: str) -> dict[str, str]:
    """Return the variables of the same launcher with four ranks, two of them here."""
    return env | {size: "4", rank: "2"} | ({"PMIX_RANK": "2"} if "PMIX_RANK" in env else {})


def test_mpi_on_two_nodes_guesses_rank_0s_host() -> None:
    """mpirun's own address is the guess, rank 0 uses its own name, and master_known is False for both."""
    env = two_nodes(OPENMPI[0], "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    world = launchers.read(env)
    address = env["OMPI_MCA_orte_hnp_uri"].partition("tcp://")[2].partition(",")[0]
    assert (world.master_addr, world.master_known, world.node_rank) == (address, False, 1)
    assert launchers.read(env | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "m[3-4]"}).master_addr == "m3"
    first = launchers.read(env | {"OMPI_COMM_WORLD_RANK": "0"})
    assert (first.master_addr, first.master_known) == (env["PMIX_HOSTNAME"], False)


def test_a_given_master_is_known() -> None:
    """MASTER_ADDR and MASTER_PORT are used if the launcher has none; hpcinit's own export of a guess remains a guess."""
    env = two_nodes(OPENMPI[0], "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    world = launchers.read(env | {"MASTER_ADDR": "m9", "MASTER_PORT": "21000"})
    assert (world.master_addr, world.master_ports, world.master_known, world.warnings) == ("m9", (21000,), True, ())
    guess = launchers.read(env)
    assert launchers.read(env | exports(guess)).master_known is False


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            two_nodes(OPENMPI[0], "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK") | {"OMPI_MCA_orte_hnp_uri": ""},
            "mpirun started 4 ranks, 2 of them on this node, but does not set rank 0's host: set it for all ranks "
            "(mpirun -x MASTER_ADDR=...), or start the ranks with srun",
        ),
        (
            two_nodes(HYDRA[0], "PMI_SIZE", "PMI_RANK"),
            "mpiexec started 4 ranks, 2 of them on this node, but does not set rank 0's host: set it for all ranks "
            "(mpiexec -genv MASTER_ADDR ...), or start the ranks with srun",
        ),
        (
            two_nodes(HOROVOD[0], "HOROVOD_SIZE", "HOROVOD_RANK") | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": ""},
            "horovodrun started 4 ranks, 2 of them on this node, but HOROVOD_GLOO_RENDEZVOUS_ADDR is not set: set "
            "MASTER_ADDR to rank 0's host for all ranks",
        ),
        (
            {"PMIX_RANK": "1"},
            "PMIX_RANK is '1', but no variable contains the number of ranks: start the ranks with srun, Open MPI's mpirun "
            "or torchrun. For a single process, set HPCINIT_STARTED_BY=single",
        ),
    ],
)  # fmt: skip
def test_rank_0s_host_is_unknown(env: dict[str, str], message: str) -> None:
    """If rank 0's host is unknown, the message shows how to set it."""
    assert refusal(env) == message


def test_horovod_without_a_rendezvous() -> None:
    """An incomplete address does not identify a run: the job's name is empty."""
    for lost in ("ADDR", "PORT"):
        env = {name: text for name, text in HOROVOD[0].items() if name != f"HOROVOD_GLOO_RENDEZVOUS_{lost}"}
        assert launchers.read(env).job == ""


def test_crays_names_of_the_local_rank() -> None:
    """PMI_LOCAL_RANK and PMI_LOCAL_SIZE are used like Hydra's variables."""
    world = launchers.read({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"})
    assert (world.launcher, world.local_rank, world.local_world_size) == ("mpich", 1, 2)


def test_two_mpiexecs_of_hydra(tmp_path: Path) -> None:
    """Ranks of different proxies of one mpiexec agree on job and ports; another mpiexec has different ones."""
    if not shutil.which("mpiexec.hydra"):
        skip_or_fail("needs mpiexec.hydra: apt-get install mpich")
    world = f'"{sys.executable}" -m hpcinit.world > $0-$PMI_RANK'
    # Two proxies, as on two nodes, and a shell in between, so that the ranks share no parent.
    one = ["mpiexec.hydra", "-launcher", "fork", "-hosts", f"{socket.gethostname()},localhost", "-ppn", "2", "-np", "4"]
    env = os.environ | {"MASTER_ADDR": "m1"}
    paths = [tmp_path / "first", tmp_path / "second"]
    processes = [subprocess.Popen([*one, "sh", "-c", f"{world}; true", str(path)], env=env) for path in paths]
    assert [process.wait(150) for process in processes] == [0, 0]
    worlds = [[json.loads(Path(f"{path}-{rank}").read_text()) for rank in range(4)] for path in paths]
    assert all((w["rank"], w["local_world_size"]) == (rank, 2) for job in worlds for rank, w in enumerate(job))
    named = [{(w["job"], *w["master_ports"]) for w in job} for job in worlds]
    assert [len(names) for names in named] == [1, 1] and not named[0] & named[1]


def test_no_visible_proxy(tmp_path: Path) -> None:
    """Without a proxy of Hydra above a process, or without /proc, the name is empty and nothing is raised."""
    assert mpi.control_port(os.getpid()) == "" and mpi.control_port(os.getpid(), tmp_path) == ""


# --- Horovod itself


def test_horovod_over_mpi_is_named() -> None:
    """`horovodrun --mpi` sets nothing of Horovod: MPI started the ranks, unless HPCINIT_STARTED_BY=horovod; then the
    launcher is Horovod, with MPI's values."""
    for recorded, name in ((OPENMPI, "openmpi"), (HYDRA, "mpich")):
        for env in recorded:
            plain, named = launchers.read(env), launchers.read(env | {"HPCINIT_STARTED_BY": "horovod"})
            assert (plain.launcher, named) == (name, replace(plain, launcher="horovod"))


def horovod(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, up: bool = True) -> None:
    fake = SimpleNamespace(is_initialized=lambda: up, rank=lambda: rank, size=lambda: size)
    monkeypatch.setitem(sys.modules, "horovod.torch", fake)


def test_initialized_horovod_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """hvd.rank() and hvd.size() are compared if Horovod is initialized in this process, with any launcher."""
    horovod(monkeypatch, 1, 2)
    assert launchers.read(HOROVOD[1]).rank == 1
    assert refusal(HOROVOD[0]) == (
        "Horovod is initialized as rank 1 of 2, but horovod started this process as rank 0 of 2: start the ranks with "
        "only one of the two launchers"
    )
    assert "Horovod is initialized as rank 1 of 2, but slurm started this process as rank 2 of 4" in refusal(step())


def test_horovod_that_is_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod without initialization is not queried, and it is never imported."""
    horovod(monkeypatch, 9, 9, up=False)
    assert launchers.read(HOROVOD[0]).rank == 0
    monkeypatch.delitem(sys.modules, "horovod.torch")
    launchers.read(HOROVOD[0])
    assert "horovod" not in sys.modules
