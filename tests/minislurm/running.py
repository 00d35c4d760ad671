"""A cluster that is up, known by its name and its folder: what clients need, and the faults of tests."""

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.minislurm.daemons import daemon_pid, entered, launch, listens, told, until, wait_started
from tests.minislurm.errors import MiniSlurmError
from tests.minislurm.network import Network
from tests.minislurm.processes import command_name, kill_all, members, send
from tests.minislurm.shell import run


class RunningCluster:
    """Everything that works on a cluster that is up, whoever brought it up."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory

    # --- what a client needs

    @property
    def conf(self) -> Path:
        return self.directory / "etc/slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """What a client's environment needs in addition: `os.environ | cluster.env`."""
        return {"SLURM_CONF": str(self.conf)}

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.state["shape"]["nodes"] + 1)]

    def address(self, node: str) -> str:
        """The address of a node, of `ctl`, or of this machine as the nodes see it: `login`."""
        return Network(self.state["subnet"]).address(node)

    def version(self) -> str:
        """Slurm's own: '22.05.8'."""
        return run(["slurmctld", "-V"]).split()[-1]

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """What a command prints that runs on this machine, the login node; an error quotes what it said."""
        return run(command, env=self.env, timeout_s=timeout_s)

    def inside(self, node: str, command: Sequence[str]) -> list[str]:
        """The command as it is run inside a node, beside Slurm: `inside("n2", ["ip", "address"])`."""
        return entered(self._holder(node), command)

    # --- waiting

    def answers(self) -> bool:
        """Whether the controller is there and takes connections."""
        return self._controller_pid() is not None and listens(self.address("ctl"), 6817)

    def node_states(self) -> dict[str, str]:
        """{'n1': 'idle', 'n2': 'down*', ...}: as sinfo says it, a '*' marks a node that does not answer."""
        lines = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_idle(self, timeout_s: float = 180) -> None:
        """Waits until no job runs and every node is ready for one."""
        states: dict[str, str] = {}

        def idle() -> bool:
            states.update(self.node_states())
            return set(states.values()) == {"idle"}

        def complaint() -> str:
            late = [node for node, state in states.items() if state != "idle"]
            seen = ", ".join(f"{node} is {states[node]}" for node in late[:8])
            return told(f"cluster {self.name!r}: {len(late)} nodes not idle: {seen}", self.log(late[0]))

        until(idle, complaint, timeout_s)

    def cancel_all(self) -> None:
        """Cancels every job and waits for idle nodes: what one test owes to the next."""
        jobs = self.run("squeue", "--noheader", "--format=%A").split()
        if jobs:
            self.run("scancel", *jobs)
        self.wait_idle()

    # --- nodes

    def network_down(self, node: str) -> None:
        """Cuts a node off: nobody gets an answer from it, not even a refusal. Its processes go on."""
        run(self.inside(node, ["ip", "link", "set", "eth0", "down"]))

    def network_up(self, node: str) -> None:
        run(self.inside(node, ["ip", "link", "set", "eth0", "up"]))
        # The controller asks a node that is down only once in 50 s; on SIGHUP slurmd reports by itself.
        if pid := daemon_pid(self.directory / f"run/{node}.pid", self.name):
            send(pid, signal.SIGHUP, self.name)

    def kill_node(self, node: str) -> None:
        """Ends all that runs in a node at once, slurmd and its steps first: none of them reports anything."""
        kill_all(self.name, node=node, spare=[self._holder(node)])

    def give_up(self, node: str) -> None:
        """Has the controller take a silent node for lost now; by itself it does after SlurmdTimeout and its own pace.

        That takes 30 s where nothing else goes on (two missed pings, then 10 s), and was seen to take 5 minutes in a
        session of hundreds of jobs: only for tests whose claim begins when the node is given up.
        """
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=Not responding")

    def start_node(self, node: str) -> None:
        """Starts slurmd in a node, if it does not run there."""
        if daemon_pid(self.directory / f"run/{node}.pid", self.name) is None:
            wait_started(self._launch_slurmd(node), f"slurmd of {node}", self.log(node))

    def pids(self, node: str) -> list[int]:
        """All that runs in a node: slurmd, steps, tasks, and the sleep that holds its namespaces."""
        return [pid for pid, where in members(self.name).items() if where == node]

    # --- the controller

    def pause_controller(self) -> None:
        """The controller is there, takes connections, and says nothing, like one that is overloaded."""
        send(self._controller(), signal.SIGSTOP, self.name)

    def resume_controller(self) -> None:
        send(self._controller(), signal.SIGCONT, self.name)

    def stop_controller(self) -> None:
        """Ends the controller in an orderly way; jobs go on. Nothing to do if it does not run."""
        pid = self._controller_pid()
        if pid is None:
            return
        send(pid, signal.SIGCONT, self.name)
        send(pid, signal.SIGTERM, self.name)
        until(
            lambda: self._controller_pid() is None,
            lambda: told(f"slurmctld ({pid}) does not end on SIGTERM", self.log("slurmctld")),
        )

    def kill_controller(self) -> None:
        """SIGKILL: the controller saves nothing, and forgets what it took since it saved last. Jobs go on."""
        pid = self._controller()
        send(pid, signal.SIGKILL, self.name)
        until(lambda: self._controller_pid() is None, lambda: f"slurmctld ({pid}) does not end on SIGKILL")

    def start_controller(self) -> None:
        """Starts the controller with the state it left, if it does not run; returns when it can be asked."""
        log = self.log("slurmctld")
        if self._controller_pid() is None:
            wait_started(launch(self._holder("ctl"), ["slurmctld"], self.directory, log), "slurmctld", log)

        def ready() -> bool:
            if self.answers():
                return True
            # Twice: it forks twice, and one look can fall between a parent that left and a child not listed.
            if not self._has_slurmctld() and not self._has_slurmctld():
                raise MiniSlurmError(told("slurmctld ended as soon as it was started", log))
            return False

        until(ready, lambda: told("slurmctld does not listen on port 6817", log))

    # --- inside

    @property
    def state(self) -> dict[str, Any]:
        """What the cluster's maker left in its folder."""
        try:
            return json.loads((self.directory / "minislurm.json").read_text())
        except FileNotFoundError:
            raise MiniSlurmError(f"cluster {self.name!r} is not up: no {self.directory}") from None

    def log(self, daemon: str) -> Path:
        """n1, n2, ..., slurmctld, slurmdbd, mariadb, munged."""
        return self.directory / f"log/{daemon}.log"

    def _holder(self, node: str) -> int:
        holders = json.loads((self.directory / "run/holders.json").read_text())
        if node not in holders:
            raise MiniSlurmError(f"no node {node!r} in cluster {self.name!r}: it has {', '.join(holders)}")
        return holders[node]

    def _has_slurmctld(self) -> bool:
        return "slurmctld" in map(command_name, self.pids("ctl"))

    def _controller_pid(self) -> int | None:
        return daemon_pid(self.directory / "run/slurmctld.pid", self.name)

    def _controller(self) -> int:
        pid = self._controller_pid()
        if pid is None:
            raise MiniSlurmError(told(f"{self.name!r}: slurmctld does not run", self.log("slurmctld")))
        return pid

    def _launch_slurmd(self, node: str) -> "subprocess.Popen[bytes]":
        return launch(self._holder(node), ["slurmd", "-N", node], self.directory, self.log(node))
