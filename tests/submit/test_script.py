"""The rendered batch script, compared completely with golden files.

HPCINIT_WRITE_GOLDEN=1 pytest tests/submit/test_script.py writes them again; read the diff before you commit.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.after import __main__ as after
from hpcinit.base.quoting import Raw
from hpcinit.config import hetjob, job_spec
from hpcinit.config.compose import compose
from hpcinit.records import run_folder
from hpcinit.records.spec import load
from hpcinit.submit import array, script, shell_blocks, transaction
from hpcinit.submit.job_environment import make_spec
from tests.skip_or_fail import installed

GOLDEN = Path(__file__).parent.parent / "golden"
FOLDER, WORKDIR = Path("/shared/me/runs/x-0001"), Path("/shared/me/project")
PYTHON = "cluster.python=/shared/me/venv/bin/python"
SUBMITTER = "/shared/me/hpcinit/bin/python"

CASES = {
    "local": ["cluster=local", "nodes=2", "ranks_per_node=2"],
    "fork": ["cluster=mini", "nodes=2", "ranks_per_node=4", "launch=fork", "launch.cpu_bind=cores"],
    "torchrun": ["cluster=mini", "nodes=2", "ranks_per_node=4", "launch=torchrun", "launch.gpu_bind='map_gpu:0,1,2,3'"],
    "survives": ["cluster=mini", "nodes=2", "ranks_per_node=2", "spare_nodes=1", "chain=3", "restart.max_restarts=2", "restart.on=[node_fail,hang]"],
    "hetjob": [
        "cluster=mini", "nodes=2", "ranks_per_node=1", "gpus_per_node=2", "cpus_per_rank=2", "mem_gb=2",
        "hetjob=[{nodes: 1, ranks_per_node: 3, gpus_per_node: 0, cpus_per_rank: 1, mem_gb: 1, partition: high}]",
    ],
    "worlds": [
        "cluster=mini", "nodes=2", "ranks_per_node=1", "hetjob=[{nodes: 1, partition: high}]", "worlds=each",
    ],
    "array": ["cluster=mini", "nodes=2", "ranks_per_node=2", "+job.env.LR=1", "sweep.at_once=4"],
    "everything": [
        "cluster=example", "nodes=3", "ranks_per_node=2", "cpus_per_rank=7", "time_min=90", "account=proj-1",
        "qos=long", "mem_gb=0.5", "comment='a blank, a # and $HOME'", "cluster.exclusive=true",
        "cluster.gpu_flag=gres", "cluster.gpu_type=a100", "cluster.interface=ib0", "+job.env.GREETING='hello world'",
        "launch.cpu_bind=cores", "launch.gpu_bind=closest", "launch.wait_s=null", "launch.kill_on_bad_exit=false",
        "stop.signal=USR2", "stop.signal_before_s=120", "+cluster.sbatch.requeue=true", "+cluster.sbatch.mail-user=null",
    ],
}  # fmt: skip


def with_submitter(text: str) -> str:
    """Return the script as if hpcinit ran with SUBMITTER."""
    return text.replace(sys.executable, SUBMITTER)


def render(*overrides: str, folder: Path = FOLDER) -> str:
    return with_submitter(script.render(compose([*overrides, PYTHON]), folder, WORKDIR))


def render_case(name: str) -> str:
    if name != "array":
        return render(*CASES[name])
    configs = [compose([*CASES[name], f"job.env.LR={number}", PYTHON]) for number in range(3)]
    return with_submitter(array.render(configs, [1000, 1001, 1002], FOLDER, WORKDIR, 1000))


@pytest.mark.parametrize("name", CASES)
def test_script_equals_the_golden_file(name: str) -> None:
    """The complete script of a typical request is the reviewed one."""
    text, path = render_case(name), GOLDEN / f"{name}.sh"
    if os.environ.get("HPCINIT_WRITE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()


def test_no_golden_script_is_left_over() -> None:
    """Each golden file is of a case that differs in kind from the others."""
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(CASES)


def test_restarts_and_chains_add_few_lines() -> None:
    """Restarts, spare nodes and chains are decided in Python: the script has few lines more."""
    plain = CASES["survives"][:3]
    assert len(render(*CASES["survives"]).splitlines()) - len(render(*plain).splitlines()) <= 35


@pytest.mark.parametrize("name", ["fork", "worlds"])
def test_a_dry_run_shows_every_file_that_the_job_reads(name: str, tmp_path: Path) -> None:
    """The files of the run folder follow as comments, as they will be apart from the secret."""
    config = compose([*CASES[name], PYTHON, f"runs_dir={tmp_path}"])
    text, files = transaction.dry_run(config, [])
    first, *others = hetjob.worlds(config)
    expected = {"spec.json": first} | {f"component-{at}/spec.json": each for at, each in enumerate(others, 1)}
    assert {path: json.loads(content) for path, content in files.items()} == {
        path: json.loads(make_spec(each, Path.cwd()).to_json()) | {"nonce": "random"} for path, each in expected.items()
    }
    shown = script.with_files(text, files)
    assert subprocess.run(["bash", "-n"], input=shown, text=True, capture_output=True, check=True).stderr == ""
    comments = re.match(
        r"\n# End of the script\..*\n# spec.json:\n((?:# \|.*\n)+)((?:#.*\n)*)$", shown.removeprefix(text)
    )
    assert comments and re.sub("^# \\| ", "", comments[1], flags=re.MULTILINE) == files["spec.json"]
    differs = '# component-1/spec.json, where it differs from spec.json:\n# | -  "nodes": 2,\n# | +  "nodes": 1,\n'
    assert comments[2].startswith(differs if others else "") and bool(comments[2]) == bool(others)


def test_a_line_of_a_file_does_not_end_the_comment() -> None:
    """A value with a line break or a control character stays in the comments that follow the script."""
    shown = script.with_files("true\n", {"0/settings": "export A='1\rtouch x\x1b\n#SBATCH --nodes=9\n'\n"})
    assert all(line.startswith("# ") for line in shown.splitlines()[2:]) and "\x1b" not in shown


def test_the_script_shows_what_runs_and_how() -> None:
    """Comments have the program, the settings of spec.json that are not the default, and what masks and --no-kill do."""
    text = render(
        "cluster=lumi_g", "account=a", "cluster.modules=[aws]", "nodes=2", "batch.micro=4", "job.args=[--lr,1e-4]"
    )
    assert "# Start the ranks. Each one runs: python -m hpcinit.jobs.smoke --lr 1e-4\n" in text
    [settings] = re.findall(r"differ from the defaults:\n((?:#   .*\n)+)", text)
    assert {"layout.dp_replicate=16", "batch.micro=4"} == set(settings.replace("#", "").split())
    assert "# --cpu-bind has a mask" in text
    survives = render(*CASES["survives"])
    assert survives.partition("\n#SBATCH --no-kill\n")[0].splitlines()[-1].startswith("# --no-kill: the job continues")
    assert "# --cpu-bind" not in survives
    fork = render("cluster=mini", "launch=fork", "launch.cpu_bind='mask_cpu:3,c'")
    assert "# launch.cpu_bind in spec.json has a mask" in fork and "# --cpu-bind has" not in fork
    warm = render("cluster=mini", "nodes=2", "launch=fork", "spare_nodes=1", "restart.warm=true")
    assert "\n# --no-kill: if a node fails, the tasks" in warm and "--no-kill" in warm.partition("\n  srun ")[2]


def test_the_script_shows_the_check_of_each_node() -> None:
    """A comment has what the node check reads, and that it only reports. It is absent if no check runs."""
    reads, ends, faulty = (
        "It reads /proc, /sys and the free space of disks",
        "and ends and removes nothing",
        "faulty node",
    )
    text = render("cluster=mini")
    assert reads in text and ends in text and faulty not in text
    assert faulty in render("cluster=mini", "check_node.action=replace", "spare_nodes=1")
    assert reads not in render("cluster=mini", "check_node.action=off") + render("cluster=local")


@pytest.mark.parametrize("name", CASES)
def test_script_is_valid_bash(name: str) -> None:
    """bash parses every golden script."""
    subprocess.run(["bash", "-n", GOLDEN / f"{name}.sh"], check=True)


def test_local_and_slurm_differ_in_the_launcher_only() -> None:
    """On cluster=local only the launcher differs, and the script needs neither sbatch nor a requeue."""
    same = ["nodes=2", "ranks_per_node=2", "cluster.gpus_per_node=0", "cluster.gpu_flag=null"]
    slurm = render("cluster=local", *same, "cluster.engine=slurm")
    local = render("cluster=local", *same)
    ours = "/shared/me/venv/bin/python -m hpcinit.engine.local_step --"
    unlimited = {"hpcinit_unlimited": "1"}
    pythons = Raw(f"(/shared/me/venv/bin/python {SUBMITTER})")
    after = {"hpcinit_pythons": pythons, "hpcinit_policy": Raw("(max_restarts=0)")}
    check = re.findall("^# The first task of each node.*|^# nvidia-smi.*", slurm, re.MULTILINE)
    blocks = [
        check,
        [*shell_blocks.block("in_a_job"), ""],
        [*shell_blocks.block("after", after), ""],
        ["", *shell_blocks.block("restarted", unlimited)],
        ["hpcinit_after $?"],
    ]
    for lines in blocks:
        text = "".join(f"{line}\n" for line in lines)
        assert text in slurm and text not in local
        slurm = slurm.replace(text, "")
    ours_at = local.index(ours)
    assert joined(local[:ours_at]) + joined(local[ours_at:]).replace(ours, "srun --") == joined(slurm) and ours in local


def joined(text: str) -> str:
    """Return the text with the lines of a command joined."""
    return re.sub(r" \\\n +", " ", text)


@pytest.mark.parametrize("path", sorted(shell_blocks.LIB.glob("*.sh")), ids=lambda path: path.stem)
def test_shellcheck_accepts_each_block(path: Path) -> None:
    """shellcheck accepts each block, and the script uses it."""
    subprocess.run([installed("shellcheck"), path], check=True)
    assert f'"{path.stem}"' in "".join(file.read_text() for file in shell_blocks.LIB.parent.glob("*.py"))


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_accepts_each_script(name: str, tmp_path: Path) -> None:
    """shellcheck accepts a script of each kind, and every variable in it is set."""
    text = GOLDEN.joinpath(f"{name}.sh").read_text()
    (tmp_path / "job.sh").write_text(text)
    subprocess.run([installed("shellcheck"), "--exclude=SC2034,SC1090,SC1091,SC2016", tmp_path / "job.sh"], check=True)
    assigned = set(re.findall(r"\b(hpcinit_\w+)(?:=|\+=|:=|\(\))", text)) | set(re.findall(r"\{(hpcinit_\w+):=", text))
    assigned |= {name for names in re.findall(r"\bread -r ([\w ]+)", text) for name in names.split()}
    assert set(re.findall(r"\$\{?(hpcinit_\w+)", text)) <= assigned


def test_a_block_needs_exactly_its_variables() -> None:
    """A missing value and a superfluous one are errors. Text is quoted, Raw is not."""
    with pytest.raises(ValueError, match=r"lib/restarted\.sh needs a value for hpcinit_unlimited"):
        shell_blocks.block("restarted")
    with pytest.raises(ValueError, match=r"lib/token\.sh has no variable x"):
        shell_blocks.block("token", {"x": 1})
    assert shell_blocks.block("record", {"hpcinit_job": "a b"})[2].startswith("hpcinit_job='a b' # ")
    assert shell_blocks.block("record", {"hpcinit_job": Raw('"$a"')})[2].startswith('hpcinit_job="$a" # ')


def test_names_in_the_blocks_are_those_of_python() -> None:
    """File names and values are the same in the blocks and in Python."""
    text = {path.stem: path.read_text() for path in shell_blocks.LIB.glob("*.sh")}
    assert f"/{run_folder.CHAIN}" in text["chain"] and f"/{run_folder.EXIT}" in text["record"]
    assert f"/{run_folder.JOB_LOG}" in text["after"] and f"/{run_folder.STOPPED}" in text["after"]
    decisions = re.findall(r"^    (\w+)\) ", text["after"], re.MULTILINE)
    assert decisions == [after.AGAIN, after.REQUEUED, after.CONTINUE]
    assert f"hpcinit_decide {after.RESTARTED})" in text["restarted"] and f" {after.START}:*" in text["restarted"]
    assert f"exit {run_folder.ENDED_EARLY}" in text["record"]


def test_one_task_per_node_has_the_cores_of_its_ranks() -> None:
    """launch=fork and launch=torchrun start one task per node, with the cores of all its ranks if known."""
    words = ("cluster=mini", "nodes=2", "ranks_per_node=4", "launch.kill_on_bad_exit=false")
    for kind, module in (("fork", "fork"), ("torchrun", "elastic")):
        step = render(*words, f"launch={kind}", "cpus_per_rank=3").partition("\nsrun ")[2]
        step = joined(step).rstrip()
        assert "--ntasks=2 --ntasks-per-node=1 --cpus-per-task=12 --export=ALL" in step
        assert "--kill-on-bad-exit=0" in step
        assert f"-m hpcinit.{module} {FOLDER}/spec.json\n" in step and "--output" not in step
    assert "--cpus-per-task" not in render(*words, "launch=fork", "cluster.cpus_per_node=null")


def test_the_fork_server_binds_its_ranks() -> None:
    """With one task per node, srun binds nothing, and the job gets the masks of the ranks."""
    config = compose(
        ["cluster=mini", "launch=fork", "launch.cpu_bind='mask_cpu:3,c'", "launch.gpu_bind='map_gpu:0,1'", PYTHON]
    )
    text, launch = script.render(config, FOLDER, WORKDIR), job_spec.launch(config)
    assert "--cpu-bind=none" in text and "gpu-bind" not in text
    assert (launch.kind, launch.cpu_bind, launch.gpu_bind, launch.cpus) == ("fork", "mask_cpu:3,c", "map_gpu:0,1", 2)


def test_what_is_imported_before_the_fork(tmp_path: Path) -> None:
    """The fork server imports torch, DeepSpeed if used, and the modules of launch.preload."""
    assert job_spec.launch(compose(["launch=fork"])).preload == ("torch",)
    words = ["launch=fork", "parallel=zero3", "launch.preload=[torch,transformers]"]
    assert job_spec.launch(compose(words)).preload == ("torch", "transformers", "deepspeed")
    spec = make_spec(compose(words), WORKDIR)
    (saved := tmp_path / "spec.json").write_text(spec.to_json())
    assert load(saved) == spec


def test_directives_come_before_any_command() -> None:
    """No directive follows a command, because sbatch would ignore it silently."""
    lines = render(*CASES["everything"]).splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(directives) < min(commands)


def test_none_and_false_drop_an_option() -> None:
    """null and false omit an option. submitit itself would render =None and =False."""
    text = render("+cluster.sbatch.reservation=null", "+cluster.sbatch.requeue=false", "+cluster.sbatch.hold=true")
    assert "reservation" not in text and "requeue" not in text
    assert "#SBATCH --hold\n" in text


def test_no_wckey_and_no_signal_by_default() -> None:
    """submitit's --wckey=submitit fails on sites without wckeys, and its --signal kills programs that do not handle it."""
    assert "wckey" not in render() and "signal" not in render()
    assert "#SBATCH --wckey=mine\n" in render("+cluster.sbatch.wckey=mine")


def test_percent_signs_in_paths_are_not_patterns() -> None:
    """A % in the run folder's path is doubled because Slurm would read it as a file name pattern."""
    text = render(folder=Path("/shared/50%_done/x-0001"))
    assert "--output=/shared/50%%_done/x-0001/logs/job.log" in text
    assert "--output=/shared/50%%_done/x-0001/logs/rank-%t.log" in text
    assert "hpcinit.run /shared/50%_done/x-0001/spec.json" in text


def test_memory_has_slurms_spellings() -> None:
    """0 GB means all memory of the node, whole gigabytes end in G and fractions in M."""
    for gb, flag in (("0", "--mem=0\n"), ("3", "--mem=3G\n"), ("1.5", "--mem=1536M\n")):
        assert flag in render(f"mem_gb={gb}")
    assert "--mem" not in render()


@pytest.mark.parametrize(("numbers", "size"), [([3, 4], 1000), ([2017, 2018], 1000), ([17], 10)])
def test_a_task_has_its_own_paths(tmp_path: Path, numbers: list[int], size: int) -> None:
    """sbatch gets a pattern and bash the number of the task, whatever characters the folder's name contains."""
    sweep, index = tmp_path / 'it\'s 50% "$HOME" `x`', numbers[-1] % size
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text('#!/bin/sh\nprintf "%s\\n" "$HPCINIT_RUN" "$@"\n')
    (tmp_path / "bin/srun").chmod(0o755)
    (sweep / str(numbers[-1])).mkdir(parents=True)
    container = ["cluster.container.runtime=apptainer", "container.image=/x.sif", "container.mounts=['/a b:/c']"]
    configs = [compose(["cluster=mini", "nodes=2", *container, PYTHON]) for _ in numbers]
    text = array.render(configs, numbers, sweep, WORKDIR, size)
    (output,) = re.findall("^#SBATCH --output=(.*)$", text, re.MULTILINE)
    digits = len(str(size)) - 1
    task = f"%{digits}a" if numbers[0] >= size else "%a"
    folder = str(sweep).replace("%", "%%")
    block = str(numbers[0] // size or "")
    assert shlex.split(output) == [f"{folder}/{block}{task}/logs/job.log"]
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "4"}
    done = subprocess.run(
        ["bash", "-c", text], env={**env, "SLURM_ARRAY_TASK_ID": str(index)}, capture_output=True, text=True, check=True
    )
    run, *words = done.stdout.splitlines()
    assert run == f"{sweep}/{numbers[-1]}" and words[-1] == f"{run}/spec.json"
    assert f"--output={folder}/{numbers[-1]}/logs/rank-%t.log" in words
    assert f"{WORKDIR}:{WORKDIR},{run}:{run},/a b:/c" in " ".join(words)
    assert json.loads((Path(run) / "exit.json").read_text())["job"] == f"4_{index}"
