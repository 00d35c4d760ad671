"""The setup of a job before its ranks start: modules, an environment, folders, a container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import skip_or_fail
from tests.submit.test_script import render
from tests.submitting import folder_of, printed, submit

LINE_BREAK = " \\\n    "  # in the srun command of a script
TELL = "import json, os, sys; print(json.dumps([sys.prefix, dict(os.environ)]))"
# A typical module: it sets a variable, and requires another module.
COMPILER = "#%Module\nsetenv COMPILER gcc-13\n"
CUDA = "#%Module\nprereq gcc\nsetenv CUDA_HOME /sw/cuda\n"
# A stand-in for conda, which cannot be installed here. It has one environment.
CONDA = """#!/bin/sh
[ "$*" = "shell.bash hook" ] || exit 9
echo 'conda() { [ "$*" = "activate mine" ] && export CONDA_DEFAULT_ENV=mine PATH="{bin}:$PATH"; }'
"""
# A stand-in for a container runtime, because none works here. It prints its arguments and runs the
# command outside of any container.
APPTAINER = """#!/bin/sh
for argument in "$@"; do echo "called with $argument" >&2; done
while [ "$1" != train.sif ]; do shift; done; shift; exec "$@"
"""


def show_environment(
    hpcinit: Run, *words: str, python: str = sys.executable, **options: dict[str, str]
) -> tuple[str, dict[str, str]]:
    """Return (sys.prefix, environment) of the only rank of such a job on cluster=local."""
    done = hpcinit("submit", "wait=true", *words, "--", python, "-c", TELL, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    prefix, env = json.loads(printed(folder_of(done), 0).splitlines()[-1])
    return prefix, env


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """Return a folder with the modules gcc and cuda."""
    if not Path("/etc/profile.d/modules.sh").exists():
        skip_or_fail("no environment modules here: Debian's package environment-modules")
    for name, text in (("gcc", COMPILER), ("cuda", CUDA)):
        program(tmp_path / f"modules/{name}/1.0", text)
    return tmp_path / "modules"


def test_modules_are_loaded_in_their_order(hpcinit: Run, modules: Path) -> None:
    """A real `module load` of two modules, the second of which needs the first."""
    _, env = show_environment(hpcinit, f"cluster.module_paths=[{modules}]", "cluster.modules=[gcc,cuda]")
    assert (env["COMPILER"], env["CUDA_HOME"]) == ("gcc-13", "/sw/cuda")


def test_a_module_that_cannot_be_loaded_ends_the_job_before_any_rank(hpcinit: Run, modules: Path) -> None:
    """The job's log shows the module system's message, the key and the host, and no rank has started."""
    words = [f"cluster.module_paths=[{modules}]", "cluster.modules=[gcc,nothing]"]
    done = hpcinit("submit", "wait=true", *words, "--", sys.executable, "-c", TELL)
    assert done.returncode == 1
    log = (folder_of(done) / "logs/job.log").read_text()
    assert f"hpcinit: error: cluster.modules: `module load` failed on {os.uname().nodename}" in log and "nothing" in log
    assert not list(folder_of(done).glob("logs/rank-*"))


def test_a_virtual_environments_python_runs_the_ranks(hpcinit: Run, tmp_path: Path) -> None:
    """The environment is activated: programs in its bin/ are found first."""
    venv = tmp_path / "my venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text("\n".join(place for place in sys.path if place))
    done = hpcinit("submit", "wait=true", f"cluster.venv='{venv}'", "--", "-m", "hpcinit.jobs.smoke")
    assert done.returncode == 0, done.stdout + (folder_of(done) / "logs/rank-0.log").read_text()
    prefix, env = show_environment(hpcinit, f"cluster.venv='{venv}'", python="python")
    assert (prefix, env["VIRTUAL_ENV"]) == (str(venv), str(venv))


def test_a_conda_environment_is_activated(hpcinit: Run, tmp_path: Path) -> None:
    """conda's own hook activates it (a stand-in for conda), and an unknown environment ends the job."""
    conda = program(tmp_path / "bin/conda", CONDA.replace("{bin}", str(Path(sys.executable).parent)))
    env = {"PATH": f"{conda.parent}:{os.environ['PATH']}"}
    assert show_environment(hpcinit, "cluster.conda=mine", env=env)[1]["CONDA_DEFAULT_ENV"] == "mine"
    # The local engine uses the activated Python as well, so the test runs the script directly.
    script = tmp_path / "job.sh"
    (tmp_path / "run").mkdir()
    script.write_text(render("cluster=local", "cluster.conda=other", folder=tmp_path / "run"))
    done = subprocess.run(["bash", script], env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "hpcinit: error: cluster.conda cannot be activated on" in done.stderr


def test_folders_of_the_site_reach_the_job(hpcinit: Run, tmp_path: Path) -> None:
    """SCRATCH, HF_HOME and TORCH_HOME are set unless the user sets them. Caches of the job are on the node's disk."""
    (tmp_path / "disk").mkdir()
    words = ["cluster.scratch=/scratch/me", "cluster.cache='/work space'", f"cluster.local_disk={tmp_path / 'disk'}"]
    _, env = show_environment(hpcinit, *words, env={"TORCH_HOME": "/mine"})
    assert (env["SCRATCH"], env["HF_HOME"], env["TORCH_HOME"]) == ("/scratch/me", "/work space/huggingface", "/mine")
    assert env["TRITON_CACHE_DIR"].startswith(f"{tmp_path / 'disk'}/hpcinit-{os.geteuid()}/")


def test_apptainer_runs_each_rank_in_the_image(hpcinit: Run, tmp_path: Path) -> None:
    """A stand-in shows the arguments: GPUs, working and run folder, mounts of site and user, the image."""
    program(tmp_path / "bin/apptainer", APPTAINER)
    (tmp_path / "train.sif").touch()
    words = [
        "cluster.container.runtime=apptainer", "container.image=train.sif", "cluster.gpus_per_node=1",
        "cluster.container.mounts=['/scratch:/scratch']", "container.mounts=['/data:/data:ro']",
        "+container.options.cleanenv=false", "+cluster.container.options.no-home=true",
    ]  # fmt: skip
    path = {"PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = hpcinit("submit", "wait=true", *words, "--", sys.executable, "-c", TELL, env=path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = folder_of(done)
    called = [
        line.removeprefix("called with ")
        for line in (folder / "logs/rank-0.log").read_text().splitlines()
        if line.startswith("called with ")
    ]
    mounts = f"{tmp_path}:{tmp_path},{folder}:{folder},/scratch:/scratch,/data:/data:ro"
    own = ["python", "-u", "-m", "hpcinit.run", str(folder / "spec.json")]
    assert called == ["exec", "--nv", f"--pwd={tmp_path}", f"--bind={mounts}", "--no-home", "train.sif", *own]


def test_rocm_replaces_nv() -> None:
    """--nv only warns on a node with AMD GPUs. If the site sets rocm, it is omitted."""
    words = ["cluster.gpus_per_node=8", "cluster.container.runtime=singularity", "container.image=x.sif"]
    assert " singularity exec --nv " in render(*words)
    text = render(*words, "+cluster.container.options.rocm=true").replace(LINE_BREAK, " ")
    assert "--nv" not in text and "--rocm x.sif python -u -m hpcinit.run" in text


def test_pyxis_needs_only_srun_options() -> None:
    """srun gets the image, the mounts and the variables that override the image's own. Python is the image's."""
    words = [
        "cluster=mini", "cluster.container.runtime=pyxis", "cluster.interface=hsn0", "container.image='nvcr.io#nvidia/pytorch:25.01-py3'", "container.python=python3",
        "+cluster.env.NCCL_DEBUG=WARN", "+job.env.A=b", "+container.options.writable=true",
        "+container.options.no-container-mount-home=true",
    ]  # fmt: skip
    text = render(*words).replace(LINE_BREAK, " ")
    for word in (
        "'--container-image=nvcr.io#nvidia/pytorch:25.01-py3'",
        "--container-mounts=/shared/me/project:/shared/me/project,/shared/me/runs/x-0001:/shared/me/runs/x-0001",
        "--container-env=A,GLOO_SOCKET_IFNAME,NCCL_DEBUG,NCCL_SOCKET_IFNAME,OMP_NUM_THREADS",
        "--container-writable",
        "--no-container-mount-home python3 -u -m hpcinit.run",
    ):
        assert f" {word}" in text


@pytest.mark.slurm
def test_modules_on_the_real_slurm(hpcinit: Run, slurm: MiniSlurm, modules: Path) -> None:
    """On two nodes every rank has the modules' variables."""
    words = ["nodes=2", "ranks_per_node=1", f"cluster.module_paths=[{modules}]", "cluster.modules=[gcc,cuda]"]
    done = submit(hpcinit, slurm, "wait=true", *words, "--", sys.executable, "-c", TELL)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert json.loads(printed(folder_of(done), rank).splitlines()[-1])[1]["CUDA_HOME"] == "/sw/cuda"


@pytest.mark.slurm
def test_the_recipe_that_copies_the_environment(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The lines in docs/reference/environment-copy.md start the ranks from a copy of the environment on the node's disk."""
    venv = tmp_path / "venv"
    site = venv / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    site.mkdir(parents=True)
    (site / "more.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (venv / "bin").mkdir()
    (venv / "bin/python").symlink_to(Path(sys.executable).resolve())
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    subprocess.run(["tar", "-C", venv, "-cf", tmp_path / "venv.tar", "."], check=True)
    page = (Path(__file__).parent.parent.parent / "docs/reference/environment-copy.md").read_text()
    block = page.partition("# conf/cluster/NAME.yaml\n")[2].partition("```")[0]
    recipe = yaml.safe_load(block.replace("/shared/me", str(tmp_path)).replace("/tmp/venv", f"{tmp_path}/copy"))
    assert recipe["python"] == "python" and len(recipe["setup"]) == 4
    words = [f"cluster.python={recipe['python']}", f"cluster.setup={json.dumps(recipe['setup'])}", "ranks_per_node=2"]
    done = submit(hpcinit, idle_slurm, *words, "wait=true", "--", "python", "-c", TELL)
    assert done.returncode == 0, done.stdout + done.stderr
    prefix, _ = json.loads(printed(folder_of(done), 1))
    assert Path(prefix).parent == tmp_path and Path(prefix).name.startswith("copy-"), prefix
