"""`hpcinit discover` on a real Slurm."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hpcinit.discover import cluster_file
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.other_user import User
from tests.skip_or_fail import skip_or_fail
from tests.submitting import folder_of, printed

pytestmark = pytest.mark.slurm
NOBODY = User(65534, 65534, (), Path("/"), "nobody")
# An ordinary user cannot enter the test's folder.
AT_ROOT = (
    f"import os, sys; os.chdir('/'); sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "from hpcinit.cli.main import main"
)


@pytest.fixture(scope="module")
def with_accounting() -> Iterator[MiniSlurm]:
    require_slurm(accounting=True)
    with MiniSlurm(nodes=2, accounting=True, name=f"discover-{os.getpid()}") as cluster:
        yield cluster


@pytest.fixture(params=["without accounting", "with accounting"])
def cluster(request: pytest.FixtureRequest) -> MiniSlurm:
    name = "slurm" if request.param == "without accounting" else "with_accounting"
    found: MiniSlurm = request.getfixturevalue(name)
    return found


@pytest.fixture
def described(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> Path:
    """Return conf/cluster/x.yaml, newly written."""
    done = hpcinit("discover", "--name", "x", env=slurm.env)
    assert (done.returncode, done.stderr) == (0, "")
    return tmp_path / "conf/cluster/x.yaml"


def changed_limit(slurm: MiniSlurm, limit: str) -> None:
    slurm.run("scontrol", "update", "PartitionName=high", f"MaxTime={limit}")


def test_a_job_runs_by_what_was_discovered(hpcinit: Run, cluster: MiniSlurm, tmp_path: Path) -> None:
    """A real job runs with the file that discover writes, with and without accounting."""
    done = hpcinit("discover", "--name", "found", env=cluster.env)
    assert done.stdout.splitlines() == [
        f"wrote conf/cluster/found.yaml: 2 partitions (Slurm {cluster.version()})",
        "check the file, then run a short test:  hpcinit submit cluster=found nodes=2 wait=true",
    ]
    text = (tmp_path / "conf/cluster/found.yaml").read_text()
    values = yaml.safe_load(text)
    nodes = len(cluster.nodes)
    limits = {"nodes": nodes, "time_min": 60, "gpus_per_node": 8, "cpus_per_node": 16, "mem_gb": 3.9}
    assert values["partitions"] == {"main": limits, "high": limits}
    accounting = cluster.shape.accounting
    assert values["accounting"] is accounting and values["account"] == ("root" if accounting else None)
    assert f"Slurm {cluster.version()} of cluster {cluster.name}, queried " in text
    arguments = ["cluster=found", "nodes=2", "ranks_per_node=1", "wait=true", "--", "hostname"]
    ran = hpcinit("submit", *arguments, env=cluster.env)
    assert ran.returncode == 0, ran.stderr
    assert {printed(folder_of(ran), rank).strip() for rank in (0, 1)} == {"n1", "n2"}
    script = (folder_of(ran) / "job.sh").read_text()
    assert "--partition=main" in script and ("--account=root" in script) is accounting


def test_it_can_become_the_default_cluster(hpcinit: Run, slurm: MiniSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """discover prints how to make the cluster the default, and --default does it: submit then needs no cluster=..."""
    monkeypatch.delenv("HPCINIT_CLUSTER")
    first = hpcinit("discover", "--name", "x", env=slurm.env)
    assert first.stdout.splitlines()[-1] == "make it the default with:  export HPCINIT_CLUSTER=x"
    assert "no cluster is chosen" in hpcinit("submit", "dry_run=true", "--", "true", env=slurm.env).stderr
    again = hpcinit("discover", "--name", "x", "--force", "--default", env=slurm.env)
    assert again.returncode == 0 and "settings.yaml: the default cluster is x" in again.stderr
    done = hpcinit("submit", "ranks_per_node=1", "wait=true", "--", "hostname", env=slurm.env)
    assert done.returncode == 0 and " on x: hostname, 1 node x 1 rank" in done.stdout, done.stderr


def test_discovered_limits_are_checked(hpcinit: Run, slurm: MiniSlurm, described: Path) -> None:
    """More nodes or time than Slurm allows is refused before the job is queued."""
    done = hpcinit("submit", "cluster=x", "nodes=5", "time_min=61", "dry_run=true", env=slurm.env)
    assert done.returncode == 2
    assert "nodes=5, but partition 'main' of cluster x allows at most 4" in done.stderr
    assert "time_min=61" in done.stderr


def test_the_name_is_slurms_own(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Without --name the file and the cluster have the name of Slurm's ClusterName."""
    hpcinit("discover", env=slurm.env)
    path = tmp_path / f"conf/cluster/{slurm.name}.yaml"
    assert yaml.safe_load(path.read_text())["name"] == slurm.name
    assert hpcinit("submit", f"cluster={slurm.name}", "dry_run=true", env=slurm.env).returncode == 0


def test_print_and_json_write_nothing(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """--print shows the file and --json everything found; neither writes a file."""
    shown = yaml.safe_load(hpcinit("discover", "--print", env=slurm.env).stdout)
    seen = json.loads(hpcinit("discover", "--json", env=slurm.env).stdout)
    assert shown["name"] == seen["cluster"] == slurm.name
    assert [(each["name"], each["kinds"][0]["gpus"]) for each in seen["partitions"]] == [("main", 8), ("high", 8)]
    assert seen["partitions"][0]["kinds"][0]["nodes"] == 4 and seen["user"]["name"] == "root"
    assert list(tmp_path.iterdir()) == []


def test_output_names_another_place(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """--output names the file; its folder is created, and the cluster has the file's name."""
    done = hpcinit("discover", "--output", "new/site.yaml", env=slurm.env)
    assert done.returncode == 0 and yaml.safe_load((tmp_path / "new/site.yaml").read_text())["name"] == "site"


def test_diff_shows_what_has_changed(hpcinit: Run, idle_slurm: MiniSlurm, described: Path) -> None:
    """--diff exits with 0 if nothing differs, else with 1 and each difference, and writes nothing."""
    text = described.read_text()
    same = hpcinit("discover", "--name", "x", "--diff", env=idle_slurm.env)
    assert (same.returncode, same.stdout, same.stderr) == (0, "conf/cluster/x.yaml: nothing has changed\n", "")
    changed_limit(idle_slurm, "30")
    try:
        done = hpcinit("discover", "--name", "x", "--diff", env=idle_slurm.env)
    finally:
        changed_limit(idle_slurm, "60")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "--- conf/cluster/x.yaml",
        f"+++ Slurm {idle_slurm.version()} of cluster {idle_slurm.name}",
        "-partitions.high.time_min: 60",
        "+partitions.high.time_min: 30",
    ]
    assert described.read_text() == text


def test_diff_without_a_file(hpcinit: Run, slurm: MiniSlurm) -> None:
    """--diff without a file exits with status 2 and names the file."""
    done = hpcinit("discover", "--name", "y", "--diff", env=slurm.env)
    assert done.returncode == 2
    assert (
        "conf/cluster/y.yaml: there is no cluster file to compare with; run hpcinit discover without --diff to create it"
        in done.stderr
    )


def test_a_file_is_not_changed_unasked(hpcinit: Run, slurm: MiniSlurm, described: Path) -> None:
    """Without a terminal an existing file is not changed, and the message names --force."""
    same = hpcinit("discover", "--name", "x", env=slurm.env)
    assert (same.returncode, same.stdout) == (0, "conf/cluster/x.yaml: nothing has changed\n")
    described.write_text(described.read_text().replace("max_array_size: 1001", "max_array_size: 7"))
    text = described.read_text()
    done = hpcinit("discover", "--name", "x", env=slurm.env)
    assert done.returncode == 2 and described.read_text() == text
    assert (
        "conf/cluster/x.yaml: the file exists, and there is no terminal to ask before changing it: add --force"
        in done.stderr
    )
    assert "  -max_array_size: 7\n  +max_array_size: 1001\n" in done.stdout


def test_force_keeps_what_is_the_users(hpcinit: Run, slurm: MiniSlurm, described: Path) -> None:
    """After an update the file still has its setup, env, comments and the user's values; a link stays a link."""
    mine = "# ours\nsetup: [module load x]\nenv: {A: '1'}\ngpus_per_node: 4  # half of them\n"
    described.write_text(mine + described.read_text().replace("partition: main", "partition: gone"))
    described.chmod(0o640)
    real = described.rename(described.with_name("real.yaml"))
    described.symlink_to("real.yaml")
    done = hpcinit("discover", "--name", "x", "--force", env=slurm.env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "partition is 'gone', but Slurm has only: main, high\n"
    assert described.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    text = real.read_text()
    assert text.startswith(mine) and "# gpus_per_node: your value is used; Slurm reports 8\n" in text
    values = yaml.safe_load(text)
    assert (values["gpus_per_node"], values["partition"], values["cpus_per_node"]) == (4, "gone", 16)
    assert sorted(path.name for path in described.parent.iterdir()) == ["real.yaml", "x.yaml"]


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 1), ("", 1)])
def test_a_terminal_is_asked(slurm: MiniSlurm, described: Path, answer: str, status: int) -> None:
    """At a terminal the question is [y/N], and only a yes changes the file."""
    described.write_text(described.read_text().replace("accounting: false", "accounting: true"))
    before = described.read_text()
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    command = [sys.executable, "-m", "hpcinit", "discover", "--name", "x"]
    done = subprocess.run(
        command, stdin=theirs, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **slurm.env}
    )
    os.close(ours)
    os.close(theirs)
    assert done.returncode == status and "change conf/cluster/x.yaml? [y/N]" in done.stdout
    assert (described.read_text() == before) is (status == 1)


def test_partitions_of_another_user(slurm: MiniSlurm) -> None:
    """An ordinary user's description contains hidden partitions, marked, but none of another group."""
    slurm.run("scontrol", "create", "PartitionName=staff", "Nodes=n1", "AllowGroups=root")
    slurm.run("scontrol", "create", "PartitionName=dark", "Nodes=n1", "Hidden=YES", "MaxTime=5")
    try:
        done = subprocess.run(
            NOBODY.command(sys.executable, "-c", f"{AT_ROOT}; sys.exit(main(['discover', '--print']))"),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, **slurm.env},
        )
    finally:
        slurm.run("scontrol", "delete", "PartitionName=staff")
        slurm.run("scontrol", "delete", "PartitionName=dark")
    if done.returncode == 127 and "shared libraries" in done.stderr:  # in the folder of make test-slurm24
        skip_or_fail("needs a Python that an ordinary user can start")
    text = done.stdout
    assert done.returncode == 0, done.stderr
    assert "# Not allowed for nobody: staff (AllowGroups=root)\n" in text and "  dark:  # hidden, " in text
    assert list(yaml.safe_load(text)["partitions"]) == ["main", "high", "dark"]


def test_no_slurm_on_path(hpcinit: Run, tmp_path: Path) -> None:
    """Without Slurm's commands the error names the missing one, and no file is written."""
    (tmp_path / "bin").mkdir()
    done = hpcinit("discover", "--name", "x", env={"PATH": str(tmp_path / "bin")})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "hpcinit: error: scontrol is not on PATH, but discover needs it: is this a login node, and is the slurm module "
        "loaded?\n"
    )
    assert not (tmp_path / "conf").exists()


def test_a_command_that_cannot_be_run(hpcinit: Run, tmp_path: Path) -> None:
    """A scontrol that cannot be started is named with the system's error."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text("no program")
    (tmp_path / "bin/scontrol").chmod(0o755)
    done = hpcinit("discover", env={"PATH": str(tmp_path / "bin")})
    assert (done.returncode, done.stderr) == (1, "hpcinit: error: cannot run scontrol: Exec format error\n")


def test_the_controller_is_down(hpcinit: Run, slurm: MiniSlurm, described: Path, tmp_path: Path) -> None:
    """Without a controller, Slurm's message is quoted and the file is not changed."""
    text = described.read_text()
    conf = tmp_path / "away.conf"
    conf.write_text(slurm.conf.read_text().replace(slurm.address("ctl"), "127.0.0.1") + "SlurmctldPort=9\n")
    done = hpcinit("discover", "--name", "x", "--force", env={"SLURM_CONF": str(conf)})
    assert done.returncode == 1 and described.read_text() == text
    assert "'scontrol show config' failed: " in done.stderr and "Unable to contact slurm controller" in done.stderr


def test_no_answer_in_time(slurm: MiniSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query to a controller that does not reply times out."""
    from datetime import timedelta

    from hpcinit.base.errors import Failure
    from hpcinit.discover import live_site
    from hpcinit.slurm import slurm_client

    monkeypatch.setitem(slurm_client.TIMEOUTS, "scontrol", timedelta(seconds=0.5))
    slurm.pause_controller()
    try:
        with pytest.raises(Failure) as error:
            live_site.query_site("root", {**os.environ, **slurm.env})
    finally:
        slurm.resume_controller()
    assert str(error.value) == (
        "`scontrol show config` did not answer in 0.5 s: is SLURM_CONF right, is the controller up?"
    )


def test_without_sacctmgr(hpcinit: Run, with_accounting: MiniSlurm, tmp_path: Path) -> None:
    """Without sacctmgr the account is null with the reason in a comment; everything else is described."""
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "srun"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    done = hpcinit("discover", "--print", env={**with_accounting.env, "PATH": str(tmp_path / "bin")})
    assert done.returncode == 0, done.stderr
    assert "account: null  # unknown: sacctmgr is not on PATH" in done.stdout
    assert "accounting: true" in done.stdout


@pytest.mark.parametrize("name", ["a/b", "", "../x", "-x"])
def test_an_invalid_name(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, name: str) -> None:
    """A name that cannot be used as a file name and in cluster=NAME is refused."""
    done = hpcinit("discover", f"--name={name}", env=slurm.env)
    assert done.returncode == 2 and f"--name is {name!r}" in done.stderr and list(tmp_path.iterdir()) == []


def test_an_impossible_path(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """A path through a file is refused with the system's error."""
    (tmp_path / "file").touch()
    done = hpcinit("discover", "--output", "file/x.yaml", env=slurm.env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hpcinit: error: file/x.yaml cannot be read: Not a directory\n"


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """If the disk is full, the old file is kept and no temporary file remains."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "hpcinit", str(disk)], check=True)
    try:
        path = disk / "x.yaml"
        cluster_file.write_cluster_file(path, "name: x\n")
        with pytest.raises(Exception, match=r"cannot write .*x.yaml: No space left on device; the old file was not c"):
            cluster_file.write_cluster_file(path, "#" * 100_000)
        assert [each.name for each in disk.iterdir()] == ["x.yaml"] and path.read_text() == "name: x\n"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_that_is_not_text(hpcinit: Run, slurm: MiniSlurm, described: Path) -> None:
    """A file that is not UTF-8 is refused and kept."""
    described.write_bytes(b"name: \xff\n")
    done = hpcinit("discover", "--name", "x", "--force", env=slurm.env)
    assert done.returncode == 2 and "conf/cluster/x.yaml is not UTF-8 text" in done.stderr
    assert described.read_bytes() == b"name: \xff\n"


# A plugin that only adds an option to srun, as pyxis does (slurm/spank.h: struct spank_option).
PLUGIN = """
struct spank_option {{ char *name, *arginfo, *usage; int has_arg, val; int (*callback)(int, const char *, int); }};
static int take(int value, const char *argument, int remote) {{ return 0; }}
const char plugin_name[] = "pyxis", plugin_type[] = "spank";
const unsigned int plugin_version = {version};
int slurm_spank_init(void *spank, int argc, char **argv) {{ return 0; }}
struct spank_option spank_options[] = {{ {{ "container-image", "[USER@][REGISTRY#]IMAGE", "[pyxis] the image", 1, 0, take }}, {{ 0 }} }};
"""


def test_pyxis_is_detected(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """A plugin that adds --container-image to srun, as pyxis does, is found in the help of srun."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        skip_or_fail("needs a C compiler for a plugin of srun's")
    major, minor, micro = (int(part) for part in slurm.version().split("."))
    (tmp_path / "pyxis.c").write_text(PLUGIN.format(version=major << 16 | minor << 8 | micro))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "pyxis.so", "pyxis.c"], check=True, cwd=tmp_path)
    (tmp_path / "plugstack.conf").write_text(f"required {tmp_path}/pyxis.so\n")
    for file in slurm.conf.parent.iterdir():
        shutil.copy(file, tmp_path)
    with (tmp_path / "slurm.conf").open("a") as conf:
        conf.write(f"PlugStackConfig={tmp_path}/plugstack.conf\n")
    for env, there in ((slurm.env, False), ({"SLURM_CONF": str(tmp_path / "slurm.conf")}, True)):
        done = hpcinit("discover", "--print", env=env)
        assert yaml.safe_load(done.stdout)["pyxis"] is there, done.stderr


def test_marks_are_comments() -> None:
    """The two lines around discover's part are comments in YAML."""
    assert yaml.safe_load(f"{cluster_file.BEGIN} 1\na: 1\n{cluster_file.END}\n") == {"a": 1}
