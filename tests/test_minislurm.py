"""The tests' Slurm is real, supports what the other tests need, and leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.minislurm import MiniSlurm, MiniSlurmError, names, sweep
from tests.minislurm.network import free_network, link_name
from tests.minislurm.plugin import require_slurm
from tests.minislurm.processes import members

pytestmark = pytest.mark.slurm
ME = f"self-{os.getpid()}"  # names of this file's own clusters start like this


def eventually(holds: Callable[[], object], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)


def job(slurm: MiniSlurm, number: str) -> dict[str, str]:
    words = slurm.run("scontrol", "--oneliner", "show", "job", number).split()
    return dict(word.partition("=")[::2] for word in words)


def sbatch(slurm: MiniSlurm, script: str, *options: str) -> str:
    return slurm.run("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script).strip()


def assert_nothing_left(cluster: MiniSlurm) -> None:
    assert members(cluster.name) == {}
    assert not cluster.directory.exists()
    assert not Path("/sys/class/net", link_name(cluster.name)).exists()
    assert cluster.name not in Path("/proc/self/mountinfo").read_text()


# --- it is a cluster


def test_every_node_is_idle(slurm: MiniSlurm) -> None:
    """A running cluster has its four nodes ready for jobs."""
    assert slurm.node_states() == {"n1": "idle", "n2": "idle", "n3": "idle", "n4": "idle"}


def test_nodes_differ_in_host_name_and_address(slurm: MiniSlurm) -> None:
    """Four tasks on four nodes see four host names, each with a different address."""
    seen = slurm.run("srun", "-N4", "--label", "sh", "-c", "echo $(uname -n) $(getent hosts $(uname -n))")
    assert sorted(line.split() for line in seen.splitlines()) == [
        [f"{rank}:", node, slurm.address(node), node] for rank, node in enumerate(slurm.nodes)
    ]
    own = slurm.run("srun", "-N4", "sh", "-c", "ip -4 -oneline address show eth0")
    assert {line.split()[3].partition("/")[0] for line in own.splitlines()} == {
        slurm.address(node) for node in slurm.nodes
    }


def test_nodes_reach_each_other(slurm: MiniSlurm) -> None:
    """A node can connect to another node's port by its name."""
    listen = "import socket; s = socket.create_server(('n1', 4321)); s.accept()[0].sendall(b'hello')"
    call = (
        "import socket, time\n"
        "while True:\n"
        "    try: print(socket.create_connection(('n1', 4321)).recv(5).decode()); break\n"
        "    except ConnectionRefusedError: time.sleep(0.05)"
    )
    server = subprocess.Popen(slurm.inside("n1", [sys.executable, "-c", listen]))
    assert slurm.run("srun", "-w", "n2", sys.executable, "-c", call) == "hello\n"
    assert server.wait(10) == 0


def test_slurm_sets_the_visible_gpus(slurm: MiniSlurm) -> None:
    """--gpus-per-node makes Slurm set CUDA_VISIBLE_DEVICES in every task; without it there is none."""
    show = ["sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-none}"]
    assert slurm.run("srun", "-N2", "--gpus-per-node=3", *show).split() == ["0,1,2", "0,1,2"]
    assert slurm.run("srun", "-N1", *show).split() == ["none"]


def test_options_reach_slurm_conf() -> None:
    """A test changes single lines of slurm.conf; everything else stays."""
    with MiniSlurm(nodes=1, gpus=0, name=f"{ME}-options", options={"MaxArraySize": "11"}) as cluster:
        assert "MaxArraySize            = 11" in cluster.run("scontrol", "show", "config")
        with pytest.raises(MiniSlurmError, match="Invalid job array specification"):
            sbatch(cluster, "true", "--array=0-11")


def test_the_partition_high_preempts_main_by_requeue(idle_slurm: MiniSlurm) -> None:
    """A job in `high` that needs the nodes of a job in `main` requeues that one."""
    low = sbatch(idle_slurm, "sleep 100", "-N4", "--exclusive")
    eventually(lambda: job(idle_slurm, low)["JobState"] == "RUNNING")
    high = sbatch(idle_slurm, "sleep 100", "-N4", "--exclusive", "--partition=high")
    eventually(lambda: job(idle_slurm, high)["JobState"] == "RUNNING")
    assert (job(idle_slurm, low)["JobState"], job(idle_slurm, low)["Restarts"]) == ("PENDING", "1")


def test_accounting() -> None:
    """With accounting, sacct shows a finished job."""
    require_slurm(accounting=True)
    with MiniSlurm(nodes=1, gpus=0, accounting=True, name=f"{ME}-accounting") as cluster:
        number = sbatch(cluster, "exit 7")
        ask = ["sacct", "-X", "--noheader", "--parsable2", "--format=State,ExitCode", "--jobs", number]
        eventually(lambda: cluster.run(*ask) == "FAILED|7:0\n")
    assert_nothing_left(cluster)


# --- faults


def test_network_down_and_up(slurm: MiniSlurm) -> None:
    """Connections to a disconnected node time out without a refusal; later the node works again."""
    slurm.network_down("n3")
    with pytest.raises(TimeoutError):
        socket.create_connection((slurm.address("n3"), 6818), timeout=1)
    slurm.network_up("n3")
    assert slurm.run("srun", "-w", "n3", "uname", "-n") == "n3\n"


def test_a_node_without_network_is_down_and_comes_back() -> None:
    """The controller marks an unresponsive node as down after SlurmdTimeout, and as idle soon after its return."""
    quick = {"SlurmdTimeout": "5", "MessageTimeout": "2"}
    with MiniSlurm(nodes=2, name=f"{ME}-silent", options=quick) as cluster:
        cluster.network_down("n2")
        eventually(lambda: cluster.node_states()["n2"] == "down*", 60)
        cluster.network_up("n2")
        eventually(lambda: cluster.node_states()["n2"] == "idle", 40)  # the controller would ask after 50 s


def test_kill_node_and_start_node(idle_slurm: MiniSlurm) -> None:
    """All that runs in a killed node is gone, nothing elsewhere is; given up, it is down, and its job has failed;
    started again, it takes jobs."""
    number = sbatch(idle_slurm, "srun sleep 100", "-N2", "-w", "n2,n3", "--no-requeue")
    eventually(lambda: len(idle_slurm.pids("n3")) > 3)
    others = set(idle_slurm.pids("n1"))
    idle_slurm.kill_node("n3")
    assert len(idle_slurm.pids("n3")) == 1  # the process that keeps the namespaces
    assert set(idle_slurm.pids("n1")) == others
    idle_slurm.give_up("n3")
    assert idle_slurm.node_states()["n3"].rstrip("*") == "down"
    eventually(lambda: job(idle_slurm, number)["JobState"] == "NODE_FAIL")
    idle_slurm.start_node("n3")
    idle_slurm.cancel_all()
    assert idle_slurm.run("srun", "-w", "n3", "uname", "-n") == "n3\n"


def test_paused_controller_says_nothing_until_it_is_resumed(slurm: MiniSlurm) -> None:
    """A paused controller accepts connections but does not reply; after resuming it does."""
    slurm.pause_controller()
    try:
        with pytest.raises(MiniSlurmError, match="no answer within 1 s"):
            slurm.run("squeue", timeout_s=1)
    finally:
        slurm.resume_controller()
    slurm.run("squeue")


def test_stopped_controller_refuses_and_a_started_one_knows_the_jobs(idle_slurm: MiniSlurm) -> None:
    """A job survives its controller, and the next controller has it."""
    number = sbatch(idle_slurm, "sleep 100")
    eventually(lambda: job(idle_slurm, number)["JobState"] == "RUNNING")
    idle_slurm.stop_controller()
    assert not idle_slurm.answers()
    idle_slurm.start_controller()
    assert job(idle_slurm, number)["JobState"] == "RUNNING"


def test_unknown_node(slurm: MiniSlurm) -> None:
    """The error for a node that does not exist lists those that do."""
    with pytest.raises(
        MiniSlurmError, match=r"no node 'n9' in cluster 'pytest-\d+': it has ctl, n1, n2, n3, n4, switch"
    ):
        slurm.network_down("n9")


# --- up, down, and side by side


def test_two_clusters_side_by_side(slurm: MiniSlurm) -> None:
    """Two clusters have nodes of the same names and are independent."""
    with MiniSlurm(nodes=2, gpus=1, name=f"{ME}-other") as other:
        assert other.run("srun", "-N2", "uname", "-n").split() in (["n1", "n2"], ["n2", "n1"])
        assert other.address("n1") != slurm.address("n1")
        with pytest.raises(MiniSlurmError, match="Invalid node name specified"):
            other.run("srun", "-w", "n3", "true")
        slurm.run("srun", "-N3", "true")
    slurm.run("srun", "-N3", "true")


def test_nothing_is_left_after_down() -> None:
    """down() also ends jobs and processes that left their session, and leaves no process, link, mount or file."""
    cluster = MiniSlurm(nodes=2, name=f"{ME}-down").up()
    sbatch(cluster, "setsid sleep 1000 & srun sleep 1000", "-N2")
    eventually(lambda: len(members(cluster.name)) > 12)
    cluster.down()
    assert_nothing_left(cluster)
    cluster.down()  # again, with no effect


def test_up_twice_is_up_once() -> None:
    """up() on a running cluster changes nothing."""
    with MiniSlurm(nodes=1, name=f"{ME}-twice") as cluster:
        before = members(cluster.name)
        cluster.up()
        assert members(cluster.name).keys() == before.keys()


def test_up_after_an_unclean_end() -> None:
    """After kill -9 of its maker, a cluster of the same name can start again."""
    name = f"{ME}-unclean"
    kill_self = f"""
import os, signal
from tests.minislurm import MiniSlurm
MiniSlurm(nodes=3, name={name!r}).up()
os.kill(os.getpid(), signal.SIGKILL)"""
    assert subprocess.run([sys.executable, "-c", kill_self], check=False).returncode == -signal.SIGKILL
    before = members(name)
    assert before, "the cluster outlives its maker"
    with MiniSlurm(nodes=2, name=name) as cluster:
        assert not before.keys() & members(name).keys()
        assert cluster.node_states() == {"n1": "idle", "n2": "idle"}
    assert_nothing_left(cluster)


def test_sweep_takes_down_what_has_no_owner_any_more(slurm: MiniSlurm) -> None:
    """sweep() ends only clusters whose maker has died."""
    orphan = MiniSlurm(nodes=1, name=f"{ME}-orphan").up()
    file = orphan.directory / "minislurm.json"
    file.write_text(json.dumps(orphan.state | {"owner": [os.getpid(), 1]}))  # another start time than this process's
    sweep()  # or that of another worker, which starts now
    assert orphan.name not in names()
    assert slurm.name in names() and slurm.answers()
    assert_nothing_left(orphan)


def test_a_cluster_of_a_living_process_is_not_taken_down_by_another(slurm: MiniSlurm) -> None:
    """down() from another process names the process that owns the cluster, and does nothing."""
    command = [sys.executable, "-m", "tests.minislurm", "down", "--name", slurm.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"minislurm: cluster '{slurm.name}' belongs to process {os.getpid()}, which still runs\n"
    assert slurm.answers()


def shell(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.minislurm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_from_the_shell() -> None:
    """The cluster of the command line keeps running, prints how to use it, and ends with `down`."""
    name = f"{ME}-shell"
    conf = f"/var/lib/minislurm/{name}/etc/slurm.conf"
    assert shell("up", "--nodes=2", "--gpus=0", "--name", name).splitlines()[-2:] == [
        f"# Stop it: python -m tests.minislurm down --name {name}",
        f"export SLURM_CONF={conf}",
    ]
    assert f"{name}: up, SLURM_CONF={conf}" in shell("status")
    env = os.environ | {"SLURM_CONF": conf}
    ran = subprocess.run(["srun", "-N2", "uname", "-n"], capture_output=True, text=True, env=env, check=True)
    assert sorted(ran.stdout.split()) == ["n1", "n2"]
    shell("down", "--name", name)
    assert_nothing_left(MiniSlurm(name=name))


# --- error messages


def test_a_failed_up_quotes_the_daemons_log_and_leaves_nothing() -> None:
    """A daemon that does not start is named with the end of its log."""
    cluster = MiniSlurm(nodes=1, name=f"{ME}-broken", options={"SelectType": "select/nonsense"})
    with pytest.raises(MiniSlurmError) as error:
        cluster.up()
    assert str(error.value).startswith("slurmctld ended as soon as it was started\n"), error.value
    assert f"{cluster.directory}/log/slurmctld.log ends with:\n" in str(error.value)
    assert "select/nonsense" in str(error.value)
    assert_nothing_left(cluster)


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    """A folder with other files is refused by name and not changed."""
    (tmp_path / "precious").touch()
    cluster = MiniSlurm(nodes=1, name=f"{ME}-folder", directory=tmp_path)
    with pytest.raises(MiniSlurmError, match="is not a cluster's folder"):
        cluster.up()
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "Up per"}, "bad cluster name 'Up per'"),
        ({"nodes": 0}, "0 nodes: expected 1 to 1000"),
        ({"nodes": 2000}, "2000 nodes: expected 1 to 1000"),
        ({"directory": Path("/tmp") / ("x" * 90)}, "too long, the path of a socket"),
    ],
)
def test_what_cannot_be_is_refused_at_once(wrong: dict, message: str) -> None:
    """An impossible cluster is refused when the object is made."""
    with pytest.raises(MiniSlurmError, match=message):
        MiniSlurm(**wrong)


def test_a_subnet_is_used_once(slurm: MiniSlurm) -> None:
    """The subnet of a running cluster is not used again, not even for the same name."""
    assert free_network(slurm.name).subnet != slurm.state["subnet"]
