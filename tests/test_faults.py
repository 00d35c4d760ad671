"""Start-ups that fail, on a real Slurm: which rank is reported as the cause, and on which ranks.

The assertions show what every rank printed. The measured times are in docs/development/startup-faults.md. A test of how a failure is found
sets what would end the start-up next (LATER) far beyond its own limit (LIMIT_S), so no number of seconds is asserted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.records import timeline
from hpcinit.world import ports
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit

# idle_slurm cancels what a test leaves behind when it fails: it would keep the nodes for minutes.
pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("idle_slurm")]

# 20 s for a start-up on four nodes. srun does not end the other ranks, so that each can report what it saw.
PATIENT = ["nodes=4", "ranks_per_node=1", "wait=true", "comm.timeout_base_s=20", "comm.timeout_per_node_s=0",
           "launch.kill_on_bad_exit=false", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null"]  # fmt: skip

# Two ranks on each of two nodes, forked by a fork server, so that the rank at fault shares its node. The other faults do
# not depend on what started a rank; all were tried this way too (docs/reference/launching.md).
FORKED = ["launch=fork", "nodes=2", "ranks_per_node=2"]

LIMIT_S = 150  # of a submission with its job
LATER = "comm.timeout_base_s=600"  # the timeout of the start-up, if nothing else ends it

BRING_UP = "import hpcinit\nwith hpcinit.session() as run:\n    print('up', run.rank)\n"


def start(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, before: str, *overrides: str) -> tuple[int, list[str]]:
    """Run `before` and then a start-up on four nodes. Return the exit status and the log of each rank."""
    (tmp_path / "code.py").write_text("import os, signal, time\nrank = int(os.environ['RANK'])\n" + before + BRING_UP)
    done = submit(hpcinit, slurm, *PATIENT, *overrides, "--", "code.py", timeout=LIMIT_S)
    logs = [folder_of(done) / f"logs/rank-{rank}.log" for rank in range(4)]
    return done.returncode, [log.read_text() if log.exists() else "" for log in logs]


def python_that(tmp_path: Path, first: str) -> str:
    """Return a Python that first runs shell lines, for faults before hpcinit starts."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/bash\n{first}\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return f"cluster.python={path}"


NEVER = {
    "alone": ([], "rank 3 never connected (no rank connected from n4)"),
    "two on a node": (["nodes=2", "ranks_per_node=2"], "rank 3 on n2 never connected"),
}


@pytest.mark.parametrize("case", ["alone", pytest.param("two on a node", marks=pytest.mark.more)])
def test_a_rank_that_never_starts(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, case: str) -> None:
    """All other ranks report a rank whose interpreter does not start, with its host, at the timeout."""
    stuck = python_that(tmp_path, '[ "$SLURM_PROCID" = 3 ] && exec sleep 600')
    overrides, missing = NEVER[case]
    status, logs = start(hpcinit, slurm, tmp_path, "", stuck, "launch.wait_s=3", *overrides)
    assert status != 0
    for log in logs[:3]:
        assert f"1 of 4 ranks are missing: {missing}" in log
    assert re.search(rf"waiting, \d+ s left: 1 of 4 ranks are missing: {re.escape(missing)}", logs[0])


@pytest.mark.parametrize(("overrides", "host"), [([], "n3"), pytest.param(FORKED, "n2", marks=pytest.mark.more)])
def test_a_rank_killed_while_importing(
    hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, overrides: list[str], host: str
) -> None:
    """After kill -9 of a rank before init, the others fail long before the timeout and name it."""
    killed = "if rank == 2:\n    time.sleep(1); os.kill(os.getpid(), 9)\n"
    status, logs = start(hpcinit, slurm, tmp_path, killed, LATER, *overrides)
    assert status != 0
    for rank in (0, 1, 3):
        assert f"rank 2 on {host} (pid " in logs[rank] and "died during start-up, after phase 'started'" in logs[rank]


@pytest.mark.parametrize(("overrides", "host"), [([], "n2"), pytest.param(FORKED, "n1", marks=pytest.mark.more)])
def test_a_rank_whose_import_fails(
    hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, overrides: list[str], host: str
) -> None:
    """Every other rank shows the exception that a rank raised before init."""
    status, logs = start(
        hpcinit, slurm, tmp_path, "if rank == 1:\n    time.sleep(1)\n    import flash_attn_99\n", *overrides
    )
    assert status != 0
    for rank in (0, 2, 3):
        assert (
            f"rank 1 on {host}" in logs[rank] and "ModuleNotFoundError: No module named 'flash_attn_99'" in logs[rank]
        )


def test_an_import_that_fails_before_the_fork(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """If a module of launch.preload fails on one node, the ranks of the other node show its error. The ranks of the
    failed node are in the timeline with the events of their fork server, although none was forked."""
    (tmp_path / "heavy.py").write_text(
        "import os\nif os.environ['SLURM_NODEID'] == '1': raise OSError('no libcudart')\n"
    )
    status, logs = start(hpcinit, slurm, tmp_path, "", *FORKED, "launch.preload=[heavy]")
    error = "cannot import heavy, which launch.preload lists: OSError: no libcudart"
    assert status != 0 and f"hpcinit: error: {error}" in logs[2]
    for log in logs[:2]:
        assert "rank 2 on n2 (pid " in log and error in log
    (attempt,) = timeline.read(tmp_path / "runs/code-0001")
    assert [rank.furthest for rank in attempt.ranks][2:] == ["interpreter", "interpreter"]


def test_a_frozen_rank(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """A stopped rank is named at the timeout with its last event; before that, rank 0 reports that it waits for it."""
    freeze = "if rank == 3:\n    os.system('(sleep 40; kill -9 %d) >/dev/null 2>&1 &' % os.getpid()); os.kill(os.getpid(), 19)\n"
    status, logs = start(hpcinit, slurm, tmp_path, freeze)
    assert status != 0
    assert re.search(r"waiting, \d+ s left: 1 of 4 ranks are missing: rank 3 on n4", logs[0])
    for log in logs[:3]:
        assert "rank 3 on n4 (pid " in log and "s ago but got no further" in log


def test_a_node_that_loses_its_network(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """If a node loses its network during start-up, both sides report which rank they waited for."""
    # After the others have started to wait: their timeout must arrive before Slurm gives the node up.
    cut = "if rank == 3:\n    time.sleep(5); os.system('ip link set eth0 down'); time.sleep(1)\n"
    try:
        _, logs = start(hpcinit, slurm, tmp_path, cut, "comm.timeout_base_s=12", "+cluster.sbatch.no-requeue=true")
    finally:
        slurm.network_up("n4")
        slurm.wait_idle()
    for log in logs[:3]:
        assert "rank 3 on n4 (pid " in log and "s ago but got no further" in log
    assert "rank 0 on n1 does not respond any more to rank 3 on n4" in logs[3]


@pytest.mark.parametrize("silent", [True, pytest.param(False, marks=pytest.mark.more)])
def test_a_foreign_server_on_the_port(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, silent: bool) -> None:
    """Another program's server on the first port, silent or not, does not prevent the rendezvous."""
    done = submit(hpcinit, slurm, "wait=true", "ranks_per_node=1", "--", "true")
    # The next submission runs sbatch --test-only first, which uses a job id too.
    job = int(json.loads((folder_of(done) / "submission.json").read_text())["job_id"]) + 2
    port = ports.candidate_ports(f"{job}.0.0")[0]
    code = (
        "import socket, time\n"
        f"server = socket.create_server(('', {port})); print('ready', flush=True); kept = []\n"
        "while True:\n    kept.append(server.accept()[0])\n"
        + ("" if silent else "    kept[-1].sendall(b'HTTP/1.1 400 Bad Request\\r\\n\\r\\n')\n")
    )
    foreign = subprocess.Popen(slurm.inside("n1", [sys.executable, "-c", code]), stdout=subprocess.PIPE, text=True)
    try:
        assert foreign.stdout is not None and foreign.stdout.readline() == "ready\n"
        status, logs = start(hpcinit, slurm, tmp_path, "")
    finally:
        foreign.kill()
        foreign.wait()
    assert status == 0 and all(f"up {rank}" in log for rank, log in enumerate(logs))
    settings = next(tmp_path.glob("runs/*/startup.txt")).read_text()
    assert f"rank 0 at n1:{ports.candidate_ports(f'{job}.0.0')[1]}" in settings


def with_hosts(tmp_path: Path, rank: int, change: str) -> list[str]:
    """Return overrides for a submission in which one rank has an /etc/hosts filtered by `change`."""
    script = (
        f"if [ $SLURM_PROCID = {rank} ]; then exec unshare -m bash -c '\n"
        f'    {change} < /etc/hosts > "$TMPDIR/hosts"; mount --bind "$TMPDIR/hosts" /etc/hosts; exec "$0" "$@"\n'
        f'\' "{sys.executable}" "$@"; fi'
    )
    return [python_that(tmp_path, script), f"+cluster.env.TMPDIR={tmp_path}"]


@pytest.mark.more
def test_a_name_that_does_not_resolve(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """If a node cannot resolve rank 0's host name, the rank uses Slurm's address for it and reports that."""
    status, logs = start(hpcinit, slurm, tmp_path, "", *with_hosts(tmp_path, 2, "grep -w n3"))
    assert status == 0 and all(f"up {rank}" in log for rank, log in enumerate(logs))
    assert "n1 does not resolve on n3" in logs[2] and "using Slurm's address for it" in logs[2]
    assert "GLOO_SOCKET_IFNAME" not in "".join(logs)  # all of them resolve their own names


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        pytest.param(2, "grep -vw n3", "n3 does not resolve on n3 itself (", marks=pytest.mark.more),
        pytest.param(2, r'sed "s/.*\bn3$/127.0.1.1 n3/"', "n3 is 127.0.1.1 on n3 itself", marks=pytest.mark.more),
        # Both ranks of n1: they use the /etc/hosts of their fork server.
        (0, r'sed "s/.*\bn1$/127.0.1.1 n1/"', "n1 is 127.0.1.1 on n1 itself"),
    ],
)
def test_a_node_that_cannot_resolve_its_own_name(
    hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, rank: int, change: str, message: str
) -> None:
    """If gloo would listen on loopback, it gets the interface that reaches rank 0, and the group works."""
    two = FORKED if rank == 0 else []
    status, logs = start(hpcinit, slurm, tmp_path, "", *two, *with_hosts(tmp_path, rank, change))
    assert status == 0 and all(f"up {number}" in log for number, log in enumerate(logs)), "\n".join(logs)
    assert message in logs[rank] and "where no other node reaches it: hpcinit set GLOO_SOCKET_IFNAME=eth0" in logs[rank]


@pytest.mark.more
def test_a_wrong_host_template(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Every rank uses rank 0's host name instead, and reports in one line that the template is wrong."""
    status, logs = start(hpcinit, slurm, tmp_path, "", "cluster.host_template='{host}-ib0'")
    assert status == 0 and all(f"up {rank}" in log for rank, log in enumerate(logs)), "\n".join(logs)
    for number, log in enumerate(logs, 1):
        (line,) = [line for line in log.splitlines() if "ib0" in line]
        assert line.startswith(
            f"hpcinit: n1-ib0 (which cluster.host_template '{{host}}-ib0' makes of n1) does not resolve on n{number}: "
        )
        assert line.endswith("; hpcinit uses n1 instead: fix cluster.host_template, or remove it")


@pytest.mark.more
def test_a_missing_interface(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """The error names the interface, the key and the interfaces of the node."""
    status, logs = start(hpcinit, slurm, tmp_path, "", "cluster.interface=eth9", LATER)
    assert status != 0
    reason = (
        "Unable to find address for: eth9; check GLOO_SOCKET_IFNAME=eth9 (cluster.interface): this node has lo, eth0"
    )
    assert any(reason in log for log in logs), "\n".join(logs)


def test_rank_0_fails_before_the_others_connect(slurm: MiniSlurm, tmp_path: Path) -> None:
    """Without --kill-on-bad-exit, a rank that connects after rank 0 failed exits long before the timeout with rank 0's error."""
    (tmp_path / "code.py").write_text(BRING_UP)
    late = tmp_path / "late"
    late.write_text(
        '#!/bin/sh\ncode=nothere.py\n[ "$SLURM_PROCID" = 0 ] || { sleep 3; code=code.py; }\n'
        f'exec "{sys.executable}" -m hpcinit.run $code > "output-$SLURM_PROCID" 2>&1\n'
    )
    late.chmod(0o755)
    command = ["srun", "-N2", "-n2", "--kill-on-bad-exit=0", "./late"]
    env = {**os.environ, **slurm.env}  # the timeout of the start-up is 300 s by default
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=LIMIT_S, check=False)
    output = [(tmp_path / f"output-{rank}").read_text() for rank in range(2)]
    assert done.returncode != 0, output
    error = f"cannot read {tmp_path}/nothere.py: No such file or directory"
    late = "hpcinit: start-up failed; waiting up to 15 s to inform ranks that connect late"
    assert f"error: {error}" in output[0] and late in output[0]
    assert "rank 0 on n1 (pid " in output[1] and error in output[1]


def test_a_rank_of_the_previous_attempt(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """A process of the attempt before a requeue, with the same job and rank, cannot join the next attempt."""
    # Rank 3 first starts a process with the restart count of another attempt, which tries to join.
    stale = (
        "if rank == 3:\n    import subprocess, sys\n"
        "    env = {**os.environ, 'SLURM_RESTART_COUNT': '7'}\n"
        "    old = subprocess.Popen([sys.executable, '-m', 'hpcinit.run', 'code2.py'], env=env, stdout=open('stale.log', 'w'), stderr=subprocess.STDOUT)\n"
        "    time.sleep(4)\n"
    )
    (tmp_path / "code2.py").write_text(BRING_UP)
    status, logs = start(hpcinit, slurm, tmp_path, stale)
    assert status == 0 and all(f"up {rank}" in log for rank, log in enumerate(logs))
    assert "up" not in (tmp_path / "stale.log").read_text()


@pytest.mark.more
def test_a_second_process_that_claims_a_rank(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """If two processes claim a rank, the second is refused, and both are named."""
    twice = (
        "if rank == 3:\n    import subprocess, sys\n"
        "    done = subprocess.run([sys.executable, '-m', 'hpcinit.run', 'code2.py'], capture_output=True, text=True)\n"
        "    print(done.returncode, done.stderr)\n"
    )
    (tmp_path / "code2.py").write_text(BRING_UP)
    status, logs = start(hpcinit, slurm, tmp_path, twice)
    assert status == 0 and all(f"up {rank}" in log for rank, log in enumerate(logs))
    assert "two processes claim rank 3: pid " in logs[3] and "on n4" in logs[3] and "refused: two processes" in logs[0]


@pytest.mark.parametrize("knows_its_node", [True, pytest.param(False, marks=pytest.mark.more)])
def test_a_second_rank_0_on_another_node(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, knows_its_node: bool) -> None:
    """A process on another node with rank 0's variables exits at once, whether or not it has its node's name."""
    stray = {f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "NODEID", "GTIDS")}
    twice = (
        "if rank == 3:\n    import subprocess, sys\n"
        f"    env = os.environ | {stray!r}\n"
        + ("" if knows_its_node else "    del env['SLURMD_NODENAME']\n")
        + "    done = subprocess.run([sys.executable, '-m', 'hpcinit.run', 'code2.py'], capture_output=True, text=True, env=env)\n"
        "    print(done.returncode, done.stderr)\n"
    )
    (tmp_path / "code2.py").write_text(BRING_UP)
    status, logs = start(hpcinit, slurm, tmp_path, twice, LATER)
    assert status == 0 and all(f"up {rank}" in log for rank, log in enumerate(logs))
    assert "\nhpcinit: error: two processes claim rank 0: pid " in logs[3]
    assert " on n1, which was first" in logs[3] and " on n4; unset RANK" in logs[3]
