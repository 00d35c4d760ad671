"""`python -m hpcinit.elastic SPEC`: runs torch's elastic agent of this node, which starts the node's ranks.

With launch=torchrun, Slurm runs this command once per node. See "torchrun's agents" in docs/decisions/.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpcinit.base.console import say
from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted
from hpcinit.cli.main import guarded
from hpcinit.launch.signal_monitor import SignalMonitor
from hpcinit.node import node_check
from hpcinit.records import run_folder
from hpcinit.records.spec import Spec
from hpcinit.records.startup_timeout import check_clock
from hpcinit.run import enter
from hpcinit.world import World, launchers


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or not argv[0].endswith(".json"):
        raise RequestError(f"expected one argument, a run folder's {run_folder.SPEC}: python -m hpcinit.elastic SPEC")
    if importlib.util.find_spec("torch") is None:
        raise RequestError(
            f"launch=torchrun needs torch, but {sys.executable} on {os.uname().nodename} does not have it"
        )
    from hpcinit.launch.torchrun import agent_signals  # noqa: PLC0415 - needs torch, so only after the check

    SignalMonitor()  # resumes the agent after a SIGSTOP; the monitor dies with this process
    signals = agent_signals.Signals()  # before torch starts threads, because they inherit the blocked signals
    path = Path(argv[0]).absolute()
    spec = enter(argv[0])
    check = node_check.start(spec, os.environ)
    if doubt := check_clock(os.environ, time.time()):
        say(doubt)
    agents = launchers.read(os.environ)
    _check_agent_count(spec, agents, path)
    from hpcinit.launch.torchrun import agent  # noqa: PLC0415 - imports torch
    from hpcinit.runtime import program  # noqa: PLC0415 - with the imports of the agent

    with program.recorded(agents):
        node_check.finish(check, path.parent)
    return agent.run(spec, path, agents, signals)


def _check_agent_count(spec: Spec, agents: World, path: Path) -> None:
    if agents.world_size != spec.nodes or agents.local_world_size != 1:
        script = path.parent / run_folder.SCRIPT
        raise RequestError(
            f"{agents.launcher} started {counted(agents.world_size, 'agent')} on {counted(agents.nodes, 'node')}, "
            f"expected {counted(spec.nodes, 'agent')}, one per node: submit {script}, which starts them correctly"
        )


if __name__ == "__main__":
    sys.exit(guarded("hpcinit.elastic", sys.argv[1:]))
