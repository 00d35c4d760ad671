"""Checks of a config: each wrong request gives one message with the key to change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hpcinit.base import versions
from hpcinit.checks import all_checks
from hpcinit.config.compose import compose
from hpcinit.config.folders import folder
from hpcinit.deepspeed.deepspeed_config import options
from hpcinit.records.spec import Precision
from hpcinit.submit.job_environment import make_spec

ACROSS = ("parallel.tp_across_nodes=true", "parallel.dp_replicate=-1")


def found(*overrides: str) -> list[str]:
    return all_checks.problems(compose(overrides))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_shipped_choices_are_valid() -> None:
    """A plain request on a shipped cluster has no problems."""
    assert found() == [] and found("cluster=mini", "nodes=4") == [] and found("cluster=example") == []


@pytest.mark.parametrize("choice", sorted(path.stem for path in (folder() / "parallel").glob("*.yaml")))
def test_every_shipped_parallelism_is_valid(choice: str) -> None:
    """Each choice of `parallel` has no problems or warnings on two nodes of eight ranks, and uses all sixteen ranks."""
    config = compose(["cluster=mini", "nodes=2", f"parallel={choice}"])
    assert all_checks.problems(config) == [] and all_checks.warnings(config) == []
    spec = make_spec(config, Path.cwd())
    assert math.prod(spec.layout.degrees().values()) == spec.world_size == 16
    assert spec.comm.deepspeed == (spec.training.wrap == "deepspeed") == choice.startswith("zero")
    assert options(spec.training.deepspeed).zero_stage == int(choice[4] if choice.startswith("zero") else 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nodes=0"], "nodes is 0, expected 1 or more"),
        (["nodes=-1"], "nodes is -1, expected 1 or more"),
        (["ranks_per_node=0"], "ranks_per_node is 0, expected 1 or more"),
        (["time_min=0"], "time_min is 0, expected 1 or more"),
        (["mem_gb=-1"], "mem_gb is -1, expected 0 or more"),
        (["cluster.engine=pbs"], "cluster.engine is 'pbs', expected one of: slurm, local"),
        (["cluster.gpu_flag=gpus"], "cluster.gpu_flag is 'gpus', expected one of: gpus-per-node, gres, null"),
        (["comm.backend=mpi"], "comm.backend is 'mpi', expected one of: auto, nccl, gloo, cpu:gloo,cuda:nccl"),
        (["launch.kind=mpi"], "launch.kind is 'mpi', expected one of: srun, fork, torchrun"),
        (["launch=fork", "launch.preload=[torch,my-model]"], "launch.preload has 'my-model', expected the name of a module"),
        (["launch=fork", "launch.max_restarts=3"], "launch.max_restarts is 3, but launch.kind is fork, expected torchrun: set launch=torchrun, or restart.max_restarts instead"),
        (["launch.max_restarts=-1"], "launch.max_restarts is -1, expected 0 or more"),
        (["launch=fork", "launch.gpu_bind=closest"], "launch.gpu_bind is 'closest', expected one of: none, single, per_task, map_gpu, null. With launch.kind=fork"),
        (["launch=torchrun", "launch.cpu_bind=sockets"], "launch.cpu_bind is 'sockets', expected one of: "),
        (["comm.device_id=maybe"], "comm.device_id is 'maybe', expected one of: never, auto, always"),
        (["seed_by=node"], "seed_by is 'node', expected one of: same, rank, data"),
        (["name='../x'"], "name is '../x', expected letters"),
        (["name='%x'"], "name is '%x', expected letters"),
        (["+cluster.env.A-B=1"], "cluster.env has 'A-B', expected a name of letters"),
        (["comment='a\nb'"], "comment is 'a\\nb': it contains the control character '\\n'"),
        (["+cluster.env.A='x\0y'"], "contains the control character '\\x00'"),
        (["comment='a\u2028b'"], "contains the control character '\\u2028'"),
        (["comment='a\x85b'"], "contains the control character '\\x85'"),
        (['comment="it\'s"'], "contains an unbalanced '"),
        (["partition='a\"'"], 'contains an unbalanced "'),
        (["runs_dir='a\nb'"], "runs_dir is 'a\\nb'"),
        (["job.args=['a\0b']"], "job.args contains a NUL"),
        (["+cluster.sbatch.nodes=3"], "cluster.sbatch.nodes: use nodes instead"),
        (["+cluster.sbatch.output=x"], "cluster.sbatch.output: use runs_dir instead"),
        (["cluster=mini", "+cluster.srun.kill-on-bad-exit=0"], "use launch.kill_on_bad_exit instead"),
        (["+cluster.sbatch.parsable=true"], "cluster.sbatch.parsable: hpcinit sets it itself"),
        (["+cluster.sbatch.signal=USR1@60"], "cluster.sbatch.signal: use stop.signal instead"),
        (["+cluster.sbatch.wait=true"], "cluster.sbatch.wait: use wait=true, which waits until the job ends"),
        (["cluster=mini", "+cluster.srun.wait=3"], "cluster.srun.wait: use launch.wait_s instead"),
        (["+cluster.sbatch.array=0-3"], "cluster.sbatch.array: hpcinit submits sweeps as arrays: give a key several values and --multirun"),
        (["+cluster.sbatch.export=NONE"], "cluster.sbatch.export: the job needs its whole environment; set a variable with job.env"),
        (["cluster=mini", "+cluster.srun.export=ALL"], "cluster.srun.export: the job needs its whole environment"),
        (["+cluster.sbatch.wrap=id"], "cluster.sbatch.wrap: hpcinit writes the script; the program goes after --"),
        (["+cluster.sbatch.test-only=true"], "cluster.sbatch.test-only: did you mean validate=...? validate=true does this before each"),
        (["+cluster.sbatch.help=true"], "cluster.sbatch.help: with this option, Slurm prints text instead of starting a job"),
        (["+cluster.sbatch.cluster=b"], "cluster.sbatch.cluster: use cluster.clusters instead"),
        (["+cluster.sbatch.tasks-per-node=2"], "cluster.sbatch.tasks-per-node: use ranks_per_node instead"),
        (["+cluster.sbatch.depend=afterok:1"], "cluster.sbatch.depend: use dependency instead"),
        (["+cluster.sbatch.arr=0-3"], "cluster.sbatch.arr: hpcinit submits sweeps as arrays"),
        (["+cluster.sbatch.tasks=2"], "cluster.sbatch.tasks: use ranks_per_node instead"),
        (["+cluster.sbatch.job=x"], "cluster.sbatch.job: use name instead"),
        (["cluster=mini", "+cluster.srun.kill=0"], "cluster.srun.kill: use launch.kill_on_bad_exit"),
        (["cluster=mini", "+cluster.srun.container-im=x"], "cluster.srun.container-im: use container.image"),
        (["+cluster.sbatch.clusters=b"], "cluster.sbatch.clusters: use cluster.clusters instead"),
        (["cluster=mini", "cluster.clusters=all"], "cluster.clusters is 'all', expected the name of one cluster"),
        (["cluster.clusters=b"], "cluster.clusters is 'b', but cluster local has no Slurm"),
        (["+cluster.sbatch={--mail-type: x}"], "expected the long name of an option without its dashes"),
        (["+cluster.sbatch.x=1"], "expected the long name"),
        (["+cluster.sbatch.licenses=[a]"], "cluster.sbatch.licenses is ['a'], expected one value"),
        (["+cluster.srun.mpi=none"], "cluster local has no srun"),
        (["job.script=train.py"], "job has script and module, expected exactly one"),
        (["job=program"], "job has none of script, module, command, expected exactly one"),
        (["job.module=null", "job.script=nope.py"], "the program (job.script) is 'nope.py', expected a file"),
        (["job.workdir=/nowhere"], "job.workdir is '/nowhere', expected a folder that exists"),
        (["cluster=mini", "nodes=5"], "nodes=5, but partition 'main' of cluster mini allows at most 4"),
        (["cluster=mini", "time_min=61"], "time_min=61, but partition 'main' of cluster mini allows at most 60"),
        (["cluster=mini", "ranks_per_node=9"], "ranks_per_node=9, but a node of partition 'main' of cluster mini has 8 GPUs (cluster.gpus_per_node), and each rank needs one: set ranks_per_node=8 or less"),
        (["cluster=mini", "partition=null", "cluster.partition=main", "nodes=5"], "nodes=5, but partition 'main' of cluster mini allows at most 4: nodes=4 or less"),
        (["cluster=mini", "cluster.partitions.main.mem_gb=3.9", "mem_gb=4"], "mem_gb=4, but a node of partition 'main' of cluster mini has 3.9 GB for jobs: mem_gb=3.9 or less, or 0"),
        (["cluster=mini", "cluster.partitions.main.gpus_per_node=4"], "cluster.gpus_per_node=8, but a node of partition 'main' of cluster mini has 4 GPUs (gpus_per_node of the partition): set cluster.gpus_per_node=4"),
        (["cluster=mini", "cluster.partitions.main.gpus_per_node=0"], "has 0 GPUs (gpus_per_node of the partition): set cluster.gpus_per_node=0 cluster.gpu_flag=null"),
        (["cluster=mini", "cluster.partitions.main.gpu_type=h100", "cluster.gpu_type=a100"], "cluster.gpu_type is 'a100', but the GPUs of partition 'main' of cluster mini are of type 'h100': set cluster.gpu_type=h100"),
        (["cluster=mini", "cluster.partitions.main.cpus_per_node=8"], "8 ranks x 2 cores = 16 cores per node, but a node of partition 'main' of cluster mini has 8 (cpus_per_node): set cpus_per_rank=1 or less"),
        (["cluster=mini", "cluster.gpus_per_node=0", "ranks_per_node=17"], "17 ranks x 1 cores = 17 cores per node, but a node of partition 'main' of cluster mini has 16 (cpus_per_node): set ranks_per_node=16 or less"),
        (["cluster=mini", "cpus_per_rank=3"], "8 ranks x 3 cores = 24 cores per node, but a node of partition 'main' of cluster mini has 16 (cpus_per_node): set cpus_per_rank=2 or less"),
        (["nodes=2", "parallel.tp=4"], "tp 4 = 4 ranks, which does not divide 2 nodes x 1 rank = 2; nearest: tp 1"),
        (["nodes=4", "parallel.dp_replicate=2"], "dp_replicate 2 = 2 ranks, but 4 nodes x 1 rank = 4; dp_replicate 4; nodes=2"),
        (["parallel.tp=-1"], "parallel.dp_replicate and parallel.tp are -1"),
        (["parallel.tp=0"], "parallel.tp is 0, expected 1 or more, or -1"),
        (["cluster=mini", "nodes=3", "parallel.tp=8", "parallel.dp_replicate=4"], "dp_replicate 4 x tp 8 = 32 ranks, but 3 nodes x 8 ranks = 24; with tp 8: dp_replicate 3; nodes=4"),
        (["cluster=mini", "nodes=2", "parallel.tp=16"], "tp 16 does not divide the 8 ranks of a node, and tensor parallel groups must stay inside a node"),
        (["cluster=mini", "parallel.ep=3"], "parallel.ep is 3, expected a divisor of parallel.dp_replicate=8, because experts are sharded over these ranks: parallel.ep=2 or parallel.ep=4"),
        (["parallel.cp_kind=tree"], "parallel.cp_kind is 'tree', expected one of: ulysses, ring"),
        (["parallel.wrap=zero"], "parallel.wrap is 'zero', expected one of: ddp, fsdp, deepspeed, none"),
        (["precision.param=fp8"], "precision.param is 'fp8', expected one of: fp32, bf16, fp16"),
        (["precision.reduce=fp16"], "precision.reduce is 'fp16', expected one of: fp32, bf16"),
        (["activation_checkpointing=some"], "activation_checkpointing is 'some', expected one of: none, full"),
        (["gradient_clip=-1"], "gradient_clip is -1, expected 0 or more"),
        (["model.heads=0"], "model.heads is 0, expected 1 or more"),
        (["cluster.gpu_mem_gb=-1"], "cluster.gpu_mem_gb is -1, expected more than 0"),
        (["cluster.mem_gb_per_rank=-1"], "cluster.mem_gb_per_rank is -1, expected 0 or more"),
        (["mem_gb=inf"], "mem_gb is inf, expected a finite number"),
        (["model.params=nan"], "model.params is nan, expected a finite number"),
        (["cluster.gpu_mem_gb=0"], "cluster.gpu_mem_gb is 0, expected more than 0"),
        (["batch.micro=0"], "batch.micro is 0, expected 1 or more"),
        (["batch.global=0"], "batch.global is 0, expected 1 or more"),
        (["batch.accumulation=0"], "batch.accumulation is 0, expected 1 or more"),
        (["nodes=2", "batch.micro=3", "batch.global=7"], "batch.global 7 is not a multiple of micro 3 x data parallel 2 = 6; nearest values that work: batch.global=6 or 12"),
        (["nodes=8", "batch.global=63"], "batch.global 63 is not a multiple of accumulation 1 x data parallel 8 = 8; nearest values that work: batch.global=56 or 64"),
        (["nodes=8", "batch.micro=2", "batch.accumulation=2", "batch.global=40"], "micro 2 x accumulation 2 x data parallel 8 = 32: remove one of batch.micro, batch.accumulation and batch.global, or set batch.global=32"),
        (["nodes=4", "parallel.wrap=fsdp"], "parallel.wrap is fsdp with dp_replicate 4 and dp_shard 1: nothing would be sharded; use parallel=fsdp,"),
        (["nodes=4", "parallel=fsdp", "parallel.wrap=ddp"], "parallel.wrap is ddp with dp_shard 4, but DDP cannot shard: use parallel.wrap=fsdp"),
        (["nodes=4", "parallel=zero3", "parallel.dp_replicate=2"], "deepspeed with dp_replicate 2 and dp_shard 2: ZeRO shards over all data parallel ranks"),
        (["deepspeed.zero_stage=2"], "deepspeed.zero_stage is 2, but parallel.wrap is ddp: set parallel=zero2, or remove it"),
        (["+deepspeed.ds_config.steps_per_print=1"], "but parallel.wrap is ddp: set parallel.wrap=deepspeed, or remove it"),
        (["parallel=zero1", "deepspeed.zero_stage=9"], "deepspeed.zero_stage is 9, expected one of: 0, 1, 2, 3"),
        (["parallel=zero3", "deepspeed.offload_param=foo"], "deepspeed.offload_param is 'foo', expected one of: none, cpu, nvme"),
        (["parallel=zero3", "deepspeed.offload_optimizer=disk"], "deepspeed.offload_optimizer is 'disk', expected one of: none, cpu, nvme"),
        (["deepspeed.optimizer=sgd"], "deepspeed.optimizer is 'sgd', expected one of: none, adamw"),
        (["parallel=zero2", "deepspeed.offload_param=cpu"], "deepspeed.offload_param is cpu with deepspeed.zero_stage 2, but DeepSpeed supports that only in stage 3"),
        (["parallel=zero3", "nodes=4", "deepspeed.hpz=3"], "deepspeed.hpz is 3, expected a divisor of 4, the number of ranks"),
        (["parallel=zero1", "nodes=8", "batch.global=63"], "batch.global 63 is not a multiple"),
        (["cluster=mini", "parallel=tp", "parallel.tp=8", "model.heads=12"], "model.heads 12 is not a multiple of tp 8: parallel.tp=6 or parallel.tp=12"),
        (["cluster=mini", "parallel=ulysses", "parallel.cp=4", "parallel.tp=2", "model.heads=12"], "model.heads 12 / tp 2 = 6 is not a multiple of cp 4, and Ulysses divides the heads: parallel.cp=3 or parallel.cp=6, or parallel.cp_kind=ring"),
        (["nodes=2", "parallel=ulysses", "parallel.cp_kind=ring", "model.sequence=1022"], "model.sequence 1022 is not a multiple of cp 2 x 2 (ring): model.sequence=1020 or model.sequence=1024"),
        (["cluster.host_template='{node}-ib'"], "the host template '{node}-ib' is invalid, expected {host} once"),
        (["comm.timeout_base_s=0"], "comm.timeout_base_s is 0, expected more than 0"),
        (["comm.collective_timeout_s=-5"], "comm.collective_timeout_s is -5, expected more than 0"),
        (["comm.checkpoint_timeout_s=0"], "comm.checkpoint_timeout_s is 0, expected more than 0"),
        (["comm.timeout_per_node_s=-1"], "comm.timeout_per_node_s is -1, expected 0 or more"),
        (["seed=99999999999999999999"], "seed is 99999999999999999999, expected at most 9223372036854775807"),
        (["+cluster.sbatch.ntasks_per_node=9"], "cluster.sbatch has 'ntasks_per_node', expected the long name"),
    ],
)  # fmt: skip
def test_each_problem_is_one_message_with_the_key(overrides: list[str], message: str) -> None:
    """Each wrong request gives exactly one message, which names the key."""
    (problem,) = found(*overrides)
    assert message in problem


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("./nothere", "/mine/nothere does not exist"),
        (".", "/mine is a folder"),
        ("/etc", "/etc is a folder"),
        (
            "./plain",
            "/mine/plain is not executable; run chmod +x on it, or name its interpreter, as in: -- bash ./plain",
        ),
    ],
)
def test_a_command_that_is_not_executable(tmp_path: Path, command: str, why: str) -> None:
    """A command that is a path, relative to job.workdir, must be an executable file."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/plain").write_text("true\n")
    (problem,) = found("job=program", f"job.command={command}", "name=x", "job.workdir=mine")
    assert problem.startswith(f"job.command is {command!r}, expected an executable file: /") and problem.endswith(why)


def test_a_file_in_the_current_folder_that_is_not_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-- go.sh` for a file in the current folder is an error that suggests ./go.sh, unless go.sh is on PATH."""
    monkeypatch.chdir(tmp_path)
    go = ("job=program", "job.command=go.sh", "name=x")
    Path("go.sh").touch()
    assert found(*go) == [f"job.command is 'go.sh', which is not on PATH; to run {tmp_path}/go.sh: -- bash go.sh"]
    Path("go.sh").chmod(0o755)
    assert found(*go)[0].endswith("/go.sh: -- ./go.sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found(*go) == []


def test_commands_that_are_accepted(tmp_path: Path) -> None:
    """An executable file is accepted, and so is any bare name, because the PATH of the nodes may differ."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/go").write_text("true\n")
    (tmp_path / "work/go").chmod(0o755)
    for command in ("./go", str(tmp_path / "work/go"), "of-the-nodes-only"):
        assert found("job=program", f"job.command={command}", "name=x", "job.workdir=work") == []


LAUNCHERS = [
    (
        "torchrun",
        "--nproc-per-node,2,train.py,--lr,3",
        2,
        "job.command is 'torchrun'",
        "-- train.py --lr 3; to use torchrun's agents: launch=torchrun",
    ),
    (
        "torchrun",
        "--nproc-per-node,2,train.py",
        1,
        "job.command is 'torchrun'",
        "separate training run. Submit the program itself",
    ),
    (
        "accelerate",
        "launch,train.py",
        2,
        "job.command is 'accelerate'",
        "-- train.py; to use torchrun's agents: launch=torchrun",
    ),
    (
        "python3",
        "-m,torch.distributed.run,-m,pkg",
        2,
        "job.command is 'python3 -m torch.distributed.run'",
        "-- train.py",
    ),
    ("/usr/bin/mpirun", "-n,4,python,a.py", 1, "job.command is 'mpirun'", "itself: -- a.py"),
    ("srun", "python,a.py", 1, "job.command is 'srun'", "would wait forever for nodes that the job already uses"),
]


@pytest.mark.parametrize(("command", "args", "ranks", "start", "advice"), LAUNCHERS)
def test_a_launcher_as_the_program(command: str, args: str, ranks: int, start: str, advice: str) -> None:
    """torchrun, srun or mpirun as the program is an error, because each rank would start a separate training run."""
    options = (f"job.command={command}", f"job.args=[{args}]", "name=x", "nodes=2", f"ranks_per_node={ranks}")
    problems = [problem for problem in found("job=program", *options) if "does not exist" not in problem]
    assert len(problems) == 1 and problems[0].startswith(start) and advice in problems[0]
    assert f"2 nodes x {ranks}" in problems[0]


def test_launchers_that_are_accepted() -> None:
    """A single rank may be torchrun, and so may one rank per node with --nnodes; `accelerate env` is not a launcher."""
    torchrun = ("job=program", "job.command=torchrun", "name=x", "ranks_per_node=1")
    assert found(*torchrun, "job.args=[--nproc-per-node,2,train.py]") == []
    assert found(*torchrun, "nodes=2", "job.args=['--nnodes=2',train.py]") == []
    assert found("job=program", "job.command=accelerate", "job.args=[env]", "name=x", "nodes=2") == []


def test_a_file_for_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-- python trian.py` gives the same error as `-- trian.py`; an absolute path may exist only on the nodes."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    python = ("job=program", "job.command=python3.11", "name=x")
    (problem,) = found(*python, "job.args=[trian.py]")
    assert problem.startswith("job.args has 'trian.py', expected a file: /") and problem.endswith(
        "did you mean train.py?"
    )
    for args in ("train.py", "/opt/nowhere.py", "-c,x.py"):
        assert found(*python, f"job.args=[{args}]") == []


def test_the_installed_deepspeed_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the installed DeepSpeed does not support is an error. If none is installed, or the job uses another Python,
    a warning: only the job can check it. The versions are fakes."""
    have = {"deepspeed": "0.18.5"}
    monkeypatch.setattr(versions, "installed", lambda package: have[package])
    compiled = ["cluster=mini", "parallel=zero3", "deepspeed.deepcompile=true"]
    (problem,) = found(*compiled)
    assert "DeepSpeed 0.18.5 is installed, expected 0.19.0 or later" in problem
    elsewhere = [*compiled, "cluster.python=/opt/python", "check_paths=false"]
    assert found(*elsewhere) == [] and "DeepSpeed was not found here" in warned(*elsewhere)[-1]
    have["deepspeed"] = "0.19.0"
    assert found(*compiled) == []
    have["deepspeed"] = "0.17.6"
    (old,) = found("cluster=mini", "comm.deepspeed=true")
    assert old.startswith("DeepSpeed 0.17.6 is installed, expected 0.18.5 or newer, because hpcinit cannot start an")
    assert old in found("cluster=mini", "parallel=zero2") and found(*elsewhere) == found("cluster=mini") == []
    have["deepspeed"] = ""
    assert found(*compiled) == [] and "DeepSpeed was not found here" in warned(*compiled)[-1]


@pytest.mark.parametrize(("version", "wrong"), [("0.16.3", True), ("0.18.5", False), ("", False)])
@pytest.mark.parametrize("key", ["venv", "python"])
def test_a_deepspeed_that_is_too_old_in_the_ranks_environment(
    tmp_path: Path, key: str, version: str, wrong: bool
) -> None:
    """The version in cluster.venv or of cluster.python counts, not that of the Python that submits."""
    packages = tmp_path / "env/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "env/pyvenv.cfg").write_text("include-system-site-packages = false\n")
    if version:
        (packages / f"deepspeed-{version}.dist-info").mkdir()
    given = tmp_path / "env" if key == "venv" else tmp_path / "env/bin/python"
    config = compose([f"cluster.{key}={given}", "check_paths=false", "parallel=zero3"])
    assert any(f"DeepSpeed {version} is installed" in one for one in all_checks.problems(config)) == wrong


def warned(*overrides: str) -> list[str]:
    return all_checks.warnings(compose(overrides))


def test_warnings() -> None:
    """A ds_config that overrides an option, and a degree that run.wrap does not support, are warnings."""
    assert warned("parallel=zero1", "+deepspeed.ds_config.zero_optimization.stage=2") == [
        "ds_config.zero_optimization.stage: your value 2 overrides 1 from the deepspeed options"
    ]
    (pipeline,) = warned("nodes=2", "parallel.pp=2")
    assert "parallel.pp is 2, but run.wrap() does not implement it" in pipeline
    assert warned("nodes=2", "parallel.pp=2", "parallel.wrap=none") == warned() == []


def test_the_spec_contains_what_was_requested() -> None:
    """The spec contains batch, precision and options as given; gradient_clip applies to every wrapper."""
    requested = ["batch.global=64", "batch.micro=2", "precision.param=bf16", "compile=true", "gradient_clip=0.5"]
    spec = make_spec(compose(["nodes=4", "parallel=zero2", '+deepspeed.ds_config.a.b="it\'s"', *requested]), Path.cwd())
    assert spec.batch.over(spec.layout.data_parallel).equation() == "micro 2 x accumulation 8 x data parallel 4 = 64"
    training = spec.training
    assert (training.precision, training.compile, training.gradient_clip) == (Precision("bf16", "fp32"), True, 0.5)
    assert training.deepspeed["gradient_clipping"] == 0.5 and training.deepspeed["ds_config"] == {"a": {"b": "it's"}}


def test_all_problems_in_one_pass() -> None:
    """Problems of different kinds are reported together."""
    assert len(found("nodes=0", "name='a b'", "comment='a\nb'", "comm.backend=x")) == 4


def test_arguments_of_the_program_may_contain_anything() -> None:
    """job.args are not part of the script, so quotes and newlines in them are accepted."""
    assert found("job.args=['it\\'s', 'a\nb', '$(x)']") == []


def test_what_fits_the_partition_exactly() -> None:
    """A request for exactly the limits of the partition has no problems."""
    most = ["nodes=4", "time_min=60", "mem_gb=3.9", "cluster.partitions.main.mem_gb=3.9", "cpus_per_rank=2"]
    assert found("cluster=mini", *most, "cluster.partitions.main.gpus_per_node=8") == []


@pytest.mark.parametrize(
    "key",
    [
        "comm.checkpoint_timeout_s",
        "hang.after_s",
        "launch.wait_s",
        "stop.margin_s",
        "parallel.tp",
        "seed",
        "batch.micro",
    ],
)
def test_a_key_reaches_the_job_by_its_name(key: str) -> None:
    """A key is copied to the field of the Spec that has the same name."""
    spec: Any = make_spec(compose(["cluster=mini", "nodes=7", "ranks_per_node=1", f"{key}=7", *ACROSS]), Path.cwd())
    part, _, name = key.replace("parallel.", "layout.").rpartition(".")
    assert getattr(getattr(spec, part) if part else spec, name) == 7
