"""Reads the world of ranks that mpirun (Open MPI), mpiexec (MPICH) or horovodrun started.

None of these launchers sets rank 0's host.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpcinit.base.errors import WorldError
from hpcinit.base.processes import PROC, command_lines
from hpcinit.slurm import nodelist
from hpcinit.world import World, number, ports
from hpcinit.world.launchers.slurm_step import UNKNOWN, Process


class Rank0Unnamed:
    """The base class for launchers that don't name rank 0's host.

    Rank 0's host is certain only if all ranks are on one node, or if the user sets MASTER_ADDR.

    DO: the advice in errors about a missing variable.
    LOST: the error message if no address of rank 0 is found, with placeholders {size} and {here}.
    """

    NAME: str
    VARIABLES: Mapping[str, str]
    DO: str
    LOST: str

    def _world(
        self,
        env: Mapping[str, str],
        names: Mapping[str, str],
        job: str,
        own: str,
        guess: str,
        node_rank: str = "",
        node_count: int = 0,
    ) -> World:
        """Return the world that the launcher's variables describe.

        names: the variable for each value.
        job: the unique name of this launch.
        own: this node's name.
        guess: an address that may be rank 0's.
        node_rank: the variable with the node's number, or '' if the launcher fills one node after the other.
        node_count: the number of nodes, or 0 if unknown.

        Raise WorldError if a value is missing, or if there is no address for the rendezvous.
        """
        rank, size, local_rank, here = (
            number(env, names[name], self.DO) for name in ("rank", "world_size", "local_rank", "local_world_size")
        )
        job_list = env.get("SLURM_JOB_NODELIST")
        guess = (own if rank == 0 else "") or (nodelist.first(job_list) if job_list else "") or guess
        given, one_node = env.get("MASTER_ADDR"), here == size
        # hpcinit.run may have exported its guess as MASTER_ADDR, so an equal value is still a guess.
        known = one_node or bool(given and given != guess)
        address = given or ("127.0.0.1" if one_node else guess)
        if not address:
            raise WorldError(self.LOST.format(size=size, here=here))
        return World(
            launcher=self.NAME,
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_world_size=here,
            node_rank=number(env, node_rank, self.DO) if node_rank else rank // max(here, 1),
            hosts=(),
            master_addr=address,
            master_ports=(number(env, "MASTER_PORT", self.DO),)
            if env.get("MASTER_PORT")
            else ports.candidate_ports(job),
            job=job,
            master_known=known,
            node_count=node_count,
        )


class OpenMpi(Rank0Unnamed):
    """Open MPI's launcher, mpirun.

    Variables: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html

    Recordings of Open MPI 4.1.4 (Debian 12) show the undocumented OMPI_MCA_orte_*.
    """

    NAME = "openmpi"
    VARIABLES: Mapping[str, str] = {
        "rank": "OMPI_COMM_WORLD_RANK",
        "world_size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    DO = "mpirun sets it for every rank; start the ranks with mpirun"
    LOST = (
        "mpirun started {size} ranks, {here} of them on this node, but does not set rank 0's host: set it for all "
        "ranks (mpirun -x MASTER_ADDR=...), or start the ranks with srun"
    )

    def present(self, env: Mapping[str, str]) -> bool:
        return "OMPI_COMM_WORLD_RANK" in env

    def read(self, env: Mapping[str, str], process: Process = UNKNOWN) -> World:
        # "1522139136.0;tcp://192.0.2.2,198.19.44.1:46631;tcp6://[fd00::2]:45453": the addresses of mpirun, which runs
        # on the first host if it runs in an allocation.
        mpirun = re.search(r"tcp://([0-9.]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
        nodes = env.get("OMPI_MCA_orte_num_nodes", "0")
        return self._world(
            env,
            self.VARIABLES,
            job=env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE", ""),
            own=env.get("PMIX_HOSTNAME", ""),
            guess=mpirun[1] if mpirun else "",
            # Open MPI does not number the nodes (OMPI_COMM_WORLD_NODE_RANK is a rank within the node). With its default
            # mapping (by slot), Open MPI fills the nodes in order.
            node_count=int(nodes) if nodes.isdigit() else 0,
        )


class Mpich(Rank0Unnamed):
    """Hydra, which is the launcher of MPICH, Intel MPI and MVAPICH, or another launcher that uses PMI.

    PMI defines PMI_RANK and PMI_SIZE. Hydra sets MPI_LOCALRANKID and MPI_LOCALNRANKS (recorded with 4.0.2, Debian 12).
    Cray's launcher calls the two local values PMI_LOCAL_RANK and PMI_LOCAL_SIZE.
    """

    NAME = "mpich"
    VARIABLES: Mapping[str, str] = {
        "rank": "PMI_RANK",
        "world_size": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",
        "local_world_size": "MPI_LOCALNRANKS",
    }
    OF_CRAY: Mapping[str, str] = {"local_rank": "PMI_LOCAL_RANK", "local_world_size": "PMI_LOCAL_SIZE"}
    DO = "mpiexec sets it for every rank; start the ranks with mpiexec"
    LOST = (
        "mpiexec started {size} ranks, {here} of them on this node, but does not set rank 0's host: set it for all "
        "ranks (mpiexec -genv MASTER_ADDR ...), or start the ranks with srun"
    )

    def present(self, env: Mapping[str, str]) -> bool:
        """Return whether mpiexec started this process.

        In a Slurm job, PMI_RANK and PMIX_RANK are no proof, because srun (--mpi=...) may have set them. The local rank
        must be set, too, which srun never does.
        """
        if "SLURM_JOB_ID" in env or "SLURM_JOBID" in env:
            local_rank = self.VARIABLES["local_rank"] in env or self.OF_CRAY["local_rank"] in env
            return "PMI_RANK" in env and local_rank
        return "PMI_RANK" in env or "PMIX_RANK" in env

    def read(self, env: Mapping[str, str], process: Process = UNKNOWN) -> World:
        if "PMI_RANK" not in env and "PMIX_RANK" in env:
            raise WorldError(
                f"PMIX_RANK is {env['PMIX_RANK']!r}, but no variable contains the number of ranks: start the ranks "
                "with srun, Open MPI's mpirun or torchrun. For a single process, set HPCINIT_STARTED_BY=single"
            )
        crays = {name: key for name, key in self.OF_CRAY.items() if self.VARIABLES[name] not in env and key in env}
        mpiexec = control_port(process.pid) if process.pid else ""
        return self._world(
            env,
            {**self.VARIABLES, **crays},
            # Several mpiexec may run in one Slurm job, or on the same nodes without a job.
            job=env.get("PMI_JOBID") or "-".join(filter(None, (env.get("SLURM_JOB_ID"), mpiexec))),
            own=env.get("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", ""),
            guess="",
        )


def control_port(pid: int, proc: Path = PROC) -> str:
    """Return the host and port, such as 'n1:35417', of the mpiexec that started process `pid`.

    The result serves as a job id, because Hydra (4.0.2) gives its ranks none. Return '' if no such mpiexec is visible
    (another launcher, a container). Each rank's parent is a proxy, which has the address as an option:

        /usr/bin/hydra_pmi_proxy --control-port n1:35417 --rmk user --launcher ssh ... --proxy-id 1
    """
    for line in command_lines(pid, proc):
        words = line.split("\0")
        if "pmi_proxy" in words[0] and "--control-port" in words[:-1]:
            return words[words.index("--control-port") + 1]
    return ""


class Horovod(Rank0Unnamed):
    """horovodrun with its own (Gloo) launcher, or an MPI job if HPCINIT_STARTED_BY names Horovod.

    Variables: horovod/runner/gloo_run.py, create_slot_env_vars and create_run_env_vars (0.28.1). `horovodrun --mpi`
    replaces itself with mpirun and sets none of them, so such a job looks like any other MPI job.
    """

    NAME = "horovod"
    VARIABLES: Mapping[str, str] = {
        "rank": "HOROVOD_RANK",
        "world_size": "HOROVOD_SIZE",
        "local_rank": "HOROVOD_LOCAL_RANK",
        "local_world_size": "HOROVOD_LOCAL_SIZE",
    }
    DO = "horovodrun sets it for every rank; start the ranks with horovodrun"
    LOST = (
        "horovodrun started {size} ranks, {here} of them on this node, but HOROVOD_GLOO_RENDEZVOUS_ADDR is not set: "
        "set MASTER_ADDR to rank 0's host for all ranks"
    )

    def present(self, env: Mapping[str, str]) -> bool:
        return "HOROVOD_RANK" in env

    def read(self, env: Mapping[str, str], process: Process = UNKNOWN) -> World:
        below = next((each for each in (openmpi, mpich) if each.present(env)), None)
        if below and not self.present(env):
            return replace(below.read(env, process), launcher=self.NAME)
        driver = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")  # the host of horovodrun, which may not be rank 0's host
        port = env.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
        # CROSS_SIZE is the number of nodes that have this local rank. For local rank 0, these are all nodes.
        counts = env.get("HOROVOD_LOCAL_RANK") == "0" and "HOROVOD_CROSS_SIZE" in env
        return self._world(
            env,
            self.VARIABLES,
            job=f"{driver}:{port}" if driver and port else "",
            own=env.get("HOROVOD_HOSTNAME", ""),
            guess=driver,
            # The index among the ranks with this local rank. If all nodes have equally many ranks, it is the node's
            # number.
            node_rank="HOROVOD_CROSS_RANK",
            node_count=number(env, "HOROVOD_CROSS_SIZE", self.DO) if counts else 0,
        )


openmpi, mpich, horovod = OpenMpi(), Mpich(), Horovod()


def check_horovod(world: World) -> None:
    """If this process has already initialized Horovod, raise WorldError if Horovod reports a different rank or size.

    This function never imports Horovod.
    """
    hvd = sys.modules.get("horovod.torch")
    if hvd is None or not hvd.is_initialized():
        return
    if (hvd.rank(), hvd.size()) != (world.rank, world.world_size):
        raise WorldError(
            f"Horovod is initialized as rank {hvd.rank()} of {hvd.size()}, but {world.launcher} started this process "
            f"as rank {world.rank} of {world.world_size}: start the ranks with only one of the two launchers"
        )
