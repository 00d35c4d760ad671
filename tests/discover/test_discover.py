"""`hpcinit discover` as its users run it, on a real Slurm."""

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
from tests.leaving_out import leave_out
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.submitting import folder_of, printed

pytestmark = pytest.mark.slurm
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
# A user without rights cannot be in the test's folder.
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
    """conf/cluster/x.yaml, just written."""
    done = hpcinit("discover", "--name", "x", env=slurm.env)
    assert (done.returncode, done.stderr) == (0, "")
    return tmp_path / "conf/cluster/x.yaml"


def changed_limit(slurm: MiniSlurm, limit: str) -> None:
    slurm.run("scontrol", "update", "PartitionName=high", f"MaxTime={limit}")


def test_a_job_runs_by_what_was_discovered(hpcinit: Run, cluster: MiniSlurm, tmp_path: Path) -> None:
    """The file that discover writes is a cluster that a real job is submitted by, with accounting and without."""
    done = hpcinit("discover", "--name", "found", env=cluster.env)
    assert done.stdout.splitlines() == [
        f"conf/cluster/found.yaml: 2 partitions of Slurm {cluster.version()}",
        "try it:  hpcinit submit cluster=found nodes=2 wait=true",
    ]
    text = (tmp_path / "conf/cluster/found.yaml").read_text()
    values = yaml.safe_load(text)
    nodes = len(cluster.nodes)
    limits = {"nodes": nodes, "time_min": 60, "gpus_per_node": 8, "cpus_per_node": 16, "mem_gb": 3.9}
    assert values["partitions"] == {"main": limits, "high": limits}
    accounting = cluster.shape.accounting
    assert values["accounting"] is accounting and values["account"] == ("root" if accounting else None)
    assert f"Slurm {cluster.version()} of cluster {cluster.name}, asked " in text
    words = ["cluster=found", "nodes=2", "ranks_per_node=1", "wait=true", "--", "hostname"]
    ran = hpcinit("submit", *words, env=cluster.env)
    assert ran.returncode == 0, ran.stderr
    assert {printed(folder_of(ran), rank).strip() for rank in (0, 1)} == {"n1", "n2"}
    script = (folder_of(ran) / "job.sh").read_text()
    assert "--partition=main" in script and ("--account=root" in script) is accounting


def test_its_limits_are_held(hpcinit: Run, slurm: MiniSlurm, described: Path) -> None:
    """More nodes or time than Slurm has is refused before the queue, by the discovered numbers."""
    done = hpcinit("submit", "cluster=x", "nodes=5", "time_min=61", "dry_run=true", env=slurm.env)
    assert done.returncode == 2
    assert "nodes=5, but partition 'main' of cluster x has at most 4" in done.stderr
    assert "time_min=61" in done.stderr


def test_the_name_is_slurms_own(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Without --name the file and the cluster are called as Slurm's ClusterName."""
    hpcinit("discover", env=slurm.env)
    path = tmp_path / f"conf/cluster/{slurm.name}.yaml"
    assert yaml.safe_load(path.read_text())["name"] == slurm.name
    assert hpcinit("submit", f"cluster={slurm.name}", "dry_run=true", env=slurm.env).returncode == 0


def test_print_and_json_write_nothing(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """--print shows the file, --json what was seen; no file comes of either."""
    shown = yaml.safe_load(hpcinit("discover", "--print", env=slurm.env).stdout)
    seen = json.loads(hpcinit("discover", "--json", env=slurm.env).stdout)
    assert shown["name"] == seen["cluster"] == slurm.name
    assert [(each["name"], each["kinds"][0]["gpus"]) for each in seen["partitions"]] == [("main", 8), ("high", 8)]
    assert seen["partitions"][0]["kinds"][0]["nodes"] == 4 and seen["user"]["name"] == "root"
    assert list(tmp_path.iterdir()) == []


def test_another_file_of_that_name_is_told(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Where cluster=NAME was a file elsewhere so far, a line says so; --output elsewhere changes nothing of that."""
    other = tmp_path / "home/.config/hpcinit/cluster/y.yaml"
    other.parent.mkdir(parents=True)
    other.write_text("name: y\n")
    elsewhere = hpcinit("discover", "--name", "y", "--output", "z/y.yaml", env=slurm.env)
    assert (elsewhere.returncode, elsewhere.stderr) == (0, "")
    done = hpcinit("discover", "--name", "y", env=slurm.env)
    assert done.returncode == 0
    assert (
        done.stderr == "cluster=y was home/.config/hpcinit/cluster/y.yaml so far; here it is the new file from now on\n"
    )


def test_output_names_another_place(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """--output is where it is written, its folder is made, and its name is the cluster's."""
    done = hpcinit("discover", "--output", "new/site.yaml", env=slurm.env)
    assert done.returncode == 0 and yaml.safe_load((tmp_path / "new/site.yaml").read_text())["name"] == "site"


def test_diff_shows_what_has_changed(hpcinit: Run, idle_slurm: MiniSlurm, described: Path) -> None:
    """--diff says so and is 0 while the file is right, names each change and is 1 afterwards, and writes nothing."""
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
    """There is nothing to compare with: exit status 2 and the name of the file."""
    done = hpcinit("discover", "--name", "y", "--diff", env=slurm.env)
    assert done.returncode == 2
    assert "conf/cluster/y.yaml: there is no such file; without --diff it is written" in done.stderr


def test_a_file_is_not_changed_unasked(hpcinit: Run, slurm: MiniSlurm, described: Path) -> None:
    """Without a terminal a file that differs is left alone, and --force is named; one that does not is left too."""
    same = hpcinit("discover", "--name", "x", env=slurm.env)
    assert (same.returncode, same.stdout) == (0, "conf/cluster/x.yaml: nothing has changed\n")
    described.write_text(described.read_text().replace("max_array_size: 1001", "max_array_size: 7"))
    text = described.read_text()
    done = hpcinit("discover", "--name", "x", env=slurm.env)
    assert done.returncode == 2 and described.read_text() == text
    assert "conf/cluster/x.yaml: exists, and there is no terminal to ask at: --force changes it" in done.stderr
    assert "  -max_array_size: 7\n  +max_array_size: 1001\n" in done.stdout
    assert "was edited by hand; what was changed there is lost" in done.stderr


def test_force_keeps_what_is_the_users(hpcinit: Run, slurm: MiniSlurm, described: Path) -> None:
    """Written again, the file has its setup, env, comments and own values still; a link stays a link."""
    mine = "# ours\nsetup: [module load x]\nenv: {A: '1'}\ngpus_per_node: 4  # half of them\n"
    described.write_text(mine + described.read_text().replace("partition: main", "partition: gone"))
    described.chmod(0o640)
    real = described.rename(described.with_name("real.yaml"))
    described.symlink_to("real.yaml")
    done = hpcinit("discover", "--name", "x", "--force", env=slurm.env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "partition is 'gone', but Slurm has: main, high\n"
    assert described.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    text = real.read_text()
    assert text.startswith(mine) and "# gpus_per_node: yours wins; Slurm says 8\n" in text
    values = yaml.safe_load(text)
    assert (values["gpus_per_node"], values["partition"], values["cpus_per_node"]) == (4, "gone", 16)
    assert sorted(path.name for path in described.parent.iterdir()) == ["real.yaml", "x.yaml"]


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 1), ("", 1)])
def test_a_terminal_is_asked(slurm: MiniSlurm, described: Path, answer: str, status: int) -> None:
    """At a terminal the question is [y/N]: only a yes changes the file."""
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


def test_another_user_sees_what_is_theirs(slurm: MiniSlurm) -> None:
    """An ordinary user's description has no partition of another group's, and has a hidden one, marked."""
    slurm.run("scontrol", "create", "PartitionName=staff", "Nodes=n1", "AllowGroups=root")
    slurm.run("scontrol", "create", "PartitionName=dark", "Nodes=n1", "Hidden=YES", "MaxTime=5")
    try:
        done = subprocess.run(
            [*AS_NOBODY, sys.executable, "-c", f"{AT_ROOT}; sys.exit(main(['discover', '--print']))"],
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
        leave_out("needs a Python that an ordinary user can start")
    text = done.stdout
    assert done.returncode == 0, done.stderr
    assert "# Not for nobody: staff (AllowGroups=root)\n" in text and "  dark:  # hidden, " in text
    assert list(yaml.safe_load(text)["partitions"]) == ["main", "high", "dark"]


def test_no_slurm_on_path(hpcinit: Run, tmp_path: Path) -> None:
    """Without Slurm's commands it says which one is missing and what to do, and writes nothing."""
    (tmp_path / "bin").mkdir()
    done = hpcinit("discover", "--name", "x", env={"PATH": str(tmp_path / "bin")})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "hpcinit: error: scontrol is not on PATH, and discover asks Slurm itself: is this a login node, and is the "
        "slurm module loaded?\n"
    )
    assert not (tmp_path / "conf").exists()


def test_a_command_that_cannot_be_run(hpcinit: Run, tmp_path: Path) -> None:
    """A scontrol that the system refuses to start is named with the system's words."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text("no program")
    (tmp_path / "bin/scontrol").chmod(0o755)
    done = hpcinit("discover", env={"PATH": str(tmp_path / "bin")})
    assert (done.returncode, done.stderr) == (1, "hpcinit: error: cannot run scontrol: Exec format error\n")


def test_the_controller_is_away(hpcinit: Run, slurm: MiniSlurm, described: Path, tmp_path: Path) -> None:
    """Where nobody listens, Slurm's own words are quoted and the file stays what it was."""
    text = described.read_text()
    conf = tmp_path / "away.conf"
    conf.write_text(slurm.conf.read_text().replace(slurm.address("ctl"), "127.0.0.1") + "SlurmctldPort=9\n")
    done = hpcinit("discover", "--name", "x", "--force", env={"SLURM_CONF": str(conf)})
    assert done.returncode == 1 and described.read_text() == text
    assert "'scontrol show config' failed: " in done.stderr and "Unable to contact slurm controller" in done.stderr


def test_no_answer_in_time(slurm: MiniSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that takes the connection and says nothing is not waited for without end."""
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
    """Where accounts are kept and sacctmgr is not installed, the rest is described, and the file says what is missing."""
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "srun"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    done = hpcinit("discover", "--print", env={**with_accounting.env, "PATH": str(tmp_path / "bin")})
    assert done.returncode == 0, done.stderr
    assert "account: null  # not known: sacctmgr is not on PATH" in done.stdout
    assert "accounting: true" in done.stdout


@pytest.mark.parametrize("name", ["a/b", "", "../x", "-x"])
def test_a_name_that_is_none(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, name: str) -> None:
    """What cannot be a file's name and a choice of cluster= is refused."""
    done = hpcinit("discover", f"--name={name}", env=slurm.env)
    assert done.returncode == 2 and f"--name is {name!r}" in done.stderr and list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """A path through a file is named with the system's word."""
    (tmp_path / "file").touch()
    done = hpcinit("discover", "--output", "file/x.yaml", env=slurm.env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hpcinit: error: file/x.yaml cannot be read: Not a directory\n"


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Where the new file cannot be written whole, the old one stays and no part of the new one is left."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "hpcinit", str(disk)], check=True)
    try:
        path = disk / "x.yaml"
        cluster_file.write_cluster_file(path, "name: x\n")
        with pytest.raises(Exception, match=r"cannot write .*x.yaml: No space left on device; what was there is unt"):
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


# An option of srun's as pyxis declares its own (slurm/spank.h: struct spank_option), in a plugin that does nothing else.
PLUGIN = """
struct spank_option {{ char *name, *arginfo, *usage; int has_arg, val; int (*callback)(int, const char *, int); }};
static int take(int value, const char *argument, int remote) {{ return 0; }}
const char plugin_name[] = "pyxis", plugin_type[] = "spank";
const unsigned int plugin_version = {version};
int slurm_spank_init(void *spank, int argc, char **argv) {{ return 0; }}
struct spank_option spank_options[] = {{ {{ "container-image", "[USER@][REGISTRY#]IMAGE", "[pyxis] the image", 1, 0, take }}, {{ 0 }} }};
"""


def test_pyxis_is_seen(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """A plugin that gives srun --container-image, as pyxis does, is found in what srun says of itself."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        leave_out("needs a C compiler for a plugin of srun's")
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
    """The two lines around discover's part mean nothing to YAML."""
    assert yaml.safe_load(f"{cluster_file.BEGIN} 1\na: 1\n{cluster_file.END}\n") == {"a": 1}
