"""A running cluster, found by its name and folder: settings for clients, and faults for tests."""

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.minislurm.daemons import daemon_pid, entered, launch, listens, until, wait_started, with_log
from tests.minislurm.errors import MiniSlurmError
from tests.minislurm.network import Network
from tests.minislurm.processes import command_name, kill_all, members, send
from tests.minislurm.shell import run


class RunningCluster:
    """A running cluster, whichever process started it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory

    # --- what a client needs

    @property
    def conf(self) -> Path:
        return self.directory / "etc/slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """Return the variables that a client needs: `os.environ | cluster.env`."""
        return {"SLURM_CONF": str(self.conf)}

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.state["shape"]["nodes"] + 1)]

    def address(self, node: str) -> str:
        """Return the address of a node, of the controller (`ctl`), or of this machine (`login`)."""
        return Network(self.state["subnet"]).address(node)

    def version(self) -> str:
        """Return Slurm's version, for example '22.05.8'."""
        return run(["slurmctld", "-V"]).split()[-1]

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """Run a command on this machine, the login node, and return its output. Errors quote its output."""
        return run(command, env=self.env, timeout_s=timeout_s)

    def inside(self, node: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` inside a node, without Slurm: `inside("n2", ["ip", "address"])`."""
        return entered(self._holder(node), command)

    # --- waiting

    def answers(self) -> bool:
        """Return whether the controller runs and accepts connections."""
        return self._controller_pid() is not None and listens(self.address("ctl"), 6817)

    def node_states(self) -> dict[str, str]:
        """Return {'n1': 'idle', 'n2': 'down*', ...} as sinfo prints it; a '*' marks an unresponsive node."""
        lines = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_idle(self, timeout_s: float = 180) -> None:
        """Wait until no job runs and every node is idle."""
        states: dict[str, str] = {}

        def idle() -> bool:
            try:
                states.update(self.node_states())
            except MiniSlurmError:
                self._check_slurmctld()  # that of 26.05 accepts connections before it reads its configuration
                raise
            return set(states.values()) == {"idle"}

        def complaint() -> str:
            late = [node for node, state in states.items() if state != "idle"]
            seen = ", ".join(f"{node} is {states[node]}" for node in late[:8])
            return with_log(f"cluster {self.name!r}: {len(late)} nodes not idle: {seen}", self.log(late[0]))

        until(idle, complaint, timeout_s)

    def cancel_all(self) -> None:
        """Cancel every job and wait for idle nodes, for the next test."""
        jobs = self.run("squeue", "--noheader", "--format=%A").split()
        if jobs:
            self.run("scancel", *jobs)
        self.wait_idle()

    # --- nodes

    def network_down(self, node: str) -> None:
        """Disconnect a node: connections to it get no reply, not even a refusal. Its processes continue."""
        run(self.inside(node, ["ip", "link", "set", "eth0", "down"]))

    def network_up(self, node: str) -> None:
        run(self.inside(node, ["ip", "link", "set", "eth0", "up"]))
        # The controller polls a node that is down only every 50 s; on SIGHUP slurmd reports to it.
        if pid := daemon_pid(self.directory / f"run/{node}.pid", self.name):
            send(pid, signal.SIGHUP, self.name)

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once, slurmd and its steps first, so that none of them reports anything."""
        kill_all(self.name, node=node, spare=[self._holder(node)])

    def give_up(self, node: str) -> None:
        """Make the controller mark an unresponsive node as down now, instead of after SlurmdTimeout.

        That takes 30 s on an idle cluster (two missed pings, then 10 s), and took 5 minutes in a session of hundreds of
        jobs. Use it only in tests that do not test this delay.
        """
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=Not responding")

    def start_node(self, node: str) -> None:
        """Start slurmd in a node, if it does not run there."""
        if daemon_pid(self.directory / f"run/{node}.pid", self.name) is None:
            wait_started(self._launch_slurmd(node), f"slurmd of {node}", self.log(node))

    def pids(self, node: str) -> list[int]:
        """Return all processes of a node: slurmd, steps, tasks, and the sleep that keeps its namespaces."""
        return [pid for pid, where in members(self.name).items() if where == node]

    # --- the controller

    def pause_controller(self) -> None:
        """Stop the controller's process: it accepts connections but does not reply, as if overloaded."""
        send(self._controller(), signal.SIGSTOP, self.name)

    def resume_controller(self) -> None:
        send(self._controller(), signal.SIGCONT, self.name)

    def stop_controller(self) -> None:
        """Terminate the controller, if it runs, so that it saves its state. Jobs continue."""
        pid = self._controller_pid()
        if pid is None:
            return
        send(pid, signal.SIGCONT, self.name)
        send(pid, signal.SIGTERM, self.name)
        until(
            lambda: self._controller_pid() is None,
            lambda: with_log(f"slurmctld ({pid}) does not end on SIGTERM", self.log("slurmctld")),
        )

    def kill_controller(self) -> None:
        """Send SIGKILL to the controller: it forgets everything since it last saved its state. Jobs continue."""
        pid = self._controller()
        send(pid, signal.SIGKILL, self.name)
        until(lambda: self._controller_pid() is None, lambda: f"slurmctld ({pid}) does not end on SIGKILL")

    def start_controller(self) -> None:
        """Start the controller with its saved state, if it does not run, and wait until it accepts connections."""
        log = self.log("slurmctld")
        if self._controller_pid() is None:
            # -i: after kill -9, slurmctld 26.05 ends if a file of its state was not written yet.
            wait_started(launch(self._holder("ctl"), ["slurmctld", "-i"], self.directory, log), "slurmctld", log)

        def ready() -> bool:
            if self.answers():
                return True
            self._check_slurmctld()
            return False

        until(ready, lambda: with_log("slurmctld does not listen on port 6817", log))

    # --- inside

    def _check_slurmctld(self) -> None:
        """Raise MiniSlurmError if the controller has ended."""
        # It forks twice, so one look may miss both a parent that exited and a child that is not listed yet.
        if not self._has_slurmctld() and not self._has_slurmctld():
            raise MiniSlurmError(with_log("slurmctld ended as soon as it was started", self.log("slurmctld")))

    @property
    def state(self) -> dict[str, Any]:
        """Return what the process that started the cluster wrote into its folder."""
        try:
            return json.loads((self.directory / "minislurm.json").read_text())
        except FileNotFoundError:
            raise MiniSlurmError(f"cluster {self.name!r} is not up: no {self.directory}") from None

    def log(self, daemon: str) -> Path:
        """Return the log of n1, n2, ..., slurmctld, slurmdbd, mariadb or munged."""
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
            raise MiniSlurmError(with_log(f"{self.name!r}: slurmctld does not run", self.log("slurmctld")))
        return pid

    def _launch_slurmd(self, node: str) -> "subprocess.Popen[bytes]":
        return launch(self._holder(node), ["slurmd", "-N", node], self.directory, self.log(node))
