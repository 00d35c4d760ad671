"""Every config key is declared here, once: its type, default, unit, bounds, sbatch option and what it means.

The classes are plain dataclasses because Hydra fills them in. No code changes one afterwards. A key that the job needs
has a field of the same name in `records/spec.py`, and `job_spec.py` copies it; its default is declared there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from hpcinit.deepspeed.deepspeed_config import OFFLOAD, OPTIMIZERS
from hpcinit.records import spec, wrappers
from hpcinit.records.layout import CP_KINDS
from hpcinit.records.node_records import EXPIRY_H, LIMIT
from hpcinit.records.startup_timeout import CHECKPOINT_S, COLLECTIVE_S
from hpcinit.records.stop_reasons import SIGNALS, Stopping

# OmegaConf 2.3 evaluates the annotations and does not know `X | None` before Python 3.10's types.UnionType;
# Optional[] works everywhere.
# ruff: noqa: UP045


VALUE = "a value, or null"  # instead of '' for a text that becomes an option or a path


def key(
    help: str,
    default: Any = None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: Collection[str | None] = (),
    filled: str = "",
    sbatch: str = "",
    owns: str = "",
) -> Any:
    """Declare a key. `--help`, the reference page, the checks and the messages are made from this declaration.

    The unit is the end of the key's name: _s, _min, _h, _gb, _mb. least, above, most: bounds of a number; null is
    always allowed where the type is Optional. filled: what is expected instead of ''. sbatch: the option that takes the
    value as it is. owns: further options of sbatch and srun that hpcinit derives from this key.
    """
    about = {
        "help": help,
        **{"least": least, "above": above, "most": most, "choices": choices},
        **{"filled": filled, "sbatch": sbatch, "owns": owns},
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


@dataclass
class Partition:
    nodes: Optional[int] = key("nodes in the partition: a request for more is refused before the queue")
    time_min: Optional[int] = key("longest time limit in minutes")
    gpus_per_node: Optional[int] = key("GPUs of a node; 0: it has none; null: as cluster.gpus_per_node")
    gpu_type: Optional[str] = key("GPU type, as Slurm calls it; null: as cluster.gpu_type")
    cpus_per_node: Optional[int] = key("cores that Slurm counts on a node; null: as cluster.cpus_per_node")
    mem_gb: Optional[float] = key("memory that jobs may use on a node, in GB of 2^30 bytes as sbatch counts it")


@dataclass
class SiteContainer:
    """How containers run at a site."""

    runtime: Optional[str] = key(
        "pyxis (srun's --container-* options), apptainer or singularity; null: no containers",
        choices=("pyxis", "apptainer", "singularity"),
    )
    mounts: list[str] = key("folders of the node that every container sees: SRC:DST or SRC:DST:ro", [])
    options: dict[str, Any] = key("options of pyxis without container-, or of apptainer exec: {rocm: true}", {})


@dataclass
class Cluster:
    """A site. All that is known of one stands in conf/cluster/NAME.yaml, nothing of it in Python."""

    name: str = key("how messages call it", MISSING, filled="a name")
    engine: str = key("slurm, or local: this machine plays the nodes", "slurm", choices=("slurm", "local"))
    partition: Optional[str] = key("default partition; null: Slurm's own default")
    partitions: dict[str, Partition] = key("what is known of each partition", {})
    account: Optional[str] = key("default account")
    qos: Optional[str] = key("default quality of service")
    needs: list[str] = key("keys that every user must give here: account, qos, partition", [])
    time_min: int = key("default time limit in minutes", 60, least=1)
    gpus_per_node: int = key("GPUs of a node; 0: none", 0, least=0, owns="gpus-per-node")
    gpu_mem_gb: Optional[float] = key(
        "memory of a GPU; null: not known, and `hpcinit plan` cannot say whether it fits", above=0
    )
    gpu_type: Optional[str] = key("GPU type where the site asks for one, as in --gpus-per-node=a100:4")
    gpu_flag: Optional[str] = key(
        "how to ask for GPUs: gpus-per-node or gres; null: not at all",
        "gpus-per-node",
        choices=("gpus-per-node", "gres"),
        owns="gres",
    )
    cpus_per_node: Optional[int] = key("cores that Slurm counts on a node, shared out among its ranks", least=1)
    mem_gb: Optional[float] = key("memory to ask for per node; 0: all of it; null: no --mem flag", least=0)
    mem_gb_per_rank: float = key("memory a rank needs at least; the local engine counts with it", 0.5, least=0)
    exclusive: bool = key("whole nodes only", False, owns="exclusive")
    cpu_bind: Optional[str] = key("default of launch.cpu_bind, as in mask_cpu:fe,fe00: one mask per rank of a node")
    python: Optional[str] = key("Python on the compute nodes; null: the one that submits")
    interface: Optional[str] = key("network interface for NCCL and gloo, as in ib0")
    host_template: str = key("what nodes are called on the fast network: {host}-ib0, or a suffix", "")
    module_purge: bool = key("begin with `module purge`", False)
    module_paths: list[str] = key("folders of modules, for `module use`", [])
    modules: list[str] = key("modules to load, in this order", [])
    venv: Optional[str] = key("virtual environment to activate; its Python runs the ranks", filled=VALUE)
    conda: Optional[str] = key(
        "conda environment to activate, its name or folder; its Python runs the ranks", filled=VALUE
    )
    setup: list[str] = key("shell lines after modules and environment, before the ranks start; shell by design", [])
    container: SiteContainer = field(default_factory=SiteContainer)
    scratch: Optional[str] = key("large shared folder, perhaps purged; the job has it as SCRATCH", filled=VALUE)
    cache: Optional[str] = key(
        "shared folder for what is downloaded once: HF_HOME and TORCH_HOME lie in it", filled=VALUE
    )
    local_disk: Optional[str] = key(
        "folder on the node's own disk, for caches of a job; null: TMPDIR or /tmp", filled=VALUE
    )
    env: dict[str, str] = key("environment variables of the job", {})
    timeout_base_s: Optional[float] = key(
        "start-up timeout: base; `hpcinit timeouts fit` proposes one; null: 300", above=0
    )
    timeout_per_node_s: Optional[float] = key("start-up timeout: added per node, from the same; null: 3.5", least=0)
    timeout_max_s: Optional[float] = key("start-up timeout: at most; null: 3600", above=0)
    submit_patience_s: float = key("how long submitting waits for a controller that does not answer", 300.0)
    submit_confirm: bool = key("stay 7 s and look again: a controller killed in 5 s forgets a job it has taken", False)
    sbatch: dict[str, Any] = key("further sbatch options, long names: {reservation: x}", {})
    srun: dict[str, Any] = key("further srun options, long names", {})
    max_array_size: Optional[int] = key(
        "Slurm's MaxArraySize: an array's indices are smaller; null: not known", least=1
    )
    accounting: Optional[bool] = key("whether Slurm keeps accounts (sacct, QOS); null: not known")
    preemption: Optional[str] = key("Slurm's PreemptMode, as in OFF or REQUEUE; null: not known")
    topology: Optional[str] = key("Slurm's TopologyPlugin, as in topology/tree; null: not known")
    pyxis: bool = key("srun knows --container-image (NVIDIA's pyxis)", False)
    slurm: Optional[str] = key("version of Slurm that was seen, as in 22.05.8; null: not known")


@dataclass
class Parallel:
    """How the ranks are divided; one degree may be -1: what is left over.

    Ranks count through tp first, then cp, dp_shard, dp_replicate and pp: a tensor parallel group is neighbours.
    """

    pp: int = key("pipeline parallel degree", 1)
    dp_replicate: int = key("data parallel degree, parameters replicated", -1)
    dp_shard: int = key("data parallel degree, parameters sharded", 1)
    cp: int = key("context (sequence) parallel degree", 1)
    tp: int = key("tensor parallel degree", 1)
    ep: int = key("expert parallel degree: a part of the data parallel ranks, no factor of its own", 1)
    cp_kind: str = key(
        "context parallelism by all-to-all over the heads, or around a ring: ulysses or ring",
        "ulysses",
        choices=CP_KINDS,
    )
    tp_across_nodes: bool = key("let tensor parallel groups span nodes", False)
    wrap: str = key(
        f"what run.wrap makes of the model: {wrappers.described()}",
        spec.Training.wrap,
        choices=wrappers.WRAPPERS.keys(),
    )


@dataclass
class Batch:
    """Samples of a step: global = micro x accumulation x data parallel size. Give two, one or none."""

    micro: Optional[int] = key("samples of one forward pass of a rank")
    accumulation: Optional[int] = key("forward passes of a step")
    # `global` is the word for it, and no attribute that can be written in Python: hence neither in init nor in repr.
    __annotations__["global"] = Optional[int]
    vars()["global"] = field(
        default=None,
        init=False,
        repr=False,
        compare=False,
        metadata=key("samples of a step over all ranks").metadata,
    )

    @property
    def total(self) -> Optional[int]:
        """The key `global`."""
        value: Optional[int] = getattr(self, "global")
        return value


@dataclass
class Precision:
    """What numbers a model is trained with."""

    param: str = key("parameters in forward and backward: fp32, bf16 or fp16", spec.Precision.param, choices=spec.PARAM)
    reduce: str = key(
        "gradients while they are summed over ranks: fp32 or bf16", spec.Precision.reduce, choices=spec.REDUCE
    )


@dataclass
class Model:
    """What is known of the model before it exists, for `hpcinit plan` and for what must divide its heads."""

    params: Optional[float] = key("number of parameters, as in 7e9", least=1)
    layers: Optional[int] = key("number of layers", least=1)
    hidden: Optional[int] = key("hidden size", least=1)
    heads: Optional[int] = key("attention heads", least=1)
    sequence: Optional[int] = key("tokens of a sample", least=1)


@dataclass
class DeepSpeed:
    """Options of parallel.wrap=deepspeed, from which the ds_config is made. One field for each of facts' Options."""

    zero_stage: int = key("ZeRO stage, 0 to 3", 0)
    offload_param: str = key("where parameters wait: none, cpu or nvme; stage 3 only", "none", choices=OFFLOAD)
    offload_optimizer: str = key(
        "where optimizer states live: none, cpu or nvme; from stage 1 on", "none", choices=OFFLOAD
    )
    nvme_path: str = key("folder on the node's disk for nvme", "")
    hpz: int = key("ranks of ZeRO++'s second, smaller partition of the parameters; 1: none", 1)
    overlap_comm: Optional[bool] = key("reduce gradients while the backward pass runs; null: DeepSpeed's default")
    gradient_clipping: float = key("largest norm of the gradients; 0: no clipping", "${gradient_clip}")
    autotp: bool = key("DeepSpeed splits the model over parallel.tp", True)
    mpu: bool = key("the program hands DeepSpeed an mpu that knows the groups", False)
    deepcompile: bool = key("DeepCompile, stages 1 to 3", False)
    universal_checkpoint: bool = key(
        "your own engine.load_checkpoint reads universal ones; run.load does as needed", False
    )
    optimizer: str = key(
        "none: the program's own; adamw, torch_adamw (nothing is compiled) or muon", "none", choices=OPTIMIZERS
    )
    optimizer_params: dict[str, Any] = key("its parameters, as in {lr: 1e-4}", {})
    ds_config: dict[str, Any] = key("keys of DeepSpeed's own, which win over all of the above", {})


@dataclass
class Comm:
    """How the process group is brought up."""

    backend: str = key(
        "nccl, gloo, or auto: nccl on GPUs and gloo on CPUs", spec.Comm.backend, choices=("auto", "nccl", "gloo")
    )
    deepspeed: bool = key("initialise DeepSpeed too, after torch; parallel.wrap=deepspeed does so by itself", False)
    timeout_base_s: Optional[float] = key("start-up timeout: base; null: cluster.timeout_base_s, or else 300", above=0)
    timeout_per_node_s: Optional[float] = key("added per node; null: cluster.timeout_per_node_s, or else 3.5", least=0)
    timeout_max_s: Optional[float] = key("at most; null: cluster.timeout_max_s, or else 3600", above=0)
    collective_timeout_s: Optional[float] = key(
        "timeout of collectives once training runs; null: as start-up", COLLECTIVE_S, above=0
    )
    checkpoint_timeout_s: float = key(
        "how long ranks wait for each other while run.save or run.load works", CHECKPOINT_S, above=0
    )
    device_id: str = key(
        "bind the group to its device, so that NCCL starts at once: never, auto or always",
        spec.Comm.device_id,
        choices=spec.DEVICE_ID,
    )


@dataclass
class Job:
    """What the ranks run: exactly one of script, module and command."""

    name: str = key("short name, part of the job's and the folder's", MISSING)
    script: Optional[str] = key("a Python file")
    module: Optional[str] = key("a Python module, as in python -m")
    command: Optional[str] = key("any program, found on PATH")
    args: list[str] = key("its arguments", [])
    env: dict[str, str] = key("environment variables of this job", {})
    workdir: Optional[str] = key("where it runs; null: where it was submitted", owns="chdir")


@dataclass
class Launch:
    """How the ranks are started on the nodes."""

    kind: str = key(
        "srun: a Slurm task per rank; fork: one per node, which imports once and forks; torchrun: an agent per node",
        spec.Launch.kind,
        choices=spec.LAUNCHES,
    )
    preload: list[str] = key("fork: modules that are imported once per node, DeepSpeed too where it is used", ["torch"])
    max_restarts: int = key(
        "torchrun: how often its agents start the ranks again before the step fails", spec.Launch.max_restarts, least=0
    )
    kill_on_bad_exit: bool = key(
        "end the step when one rank fails; srun's own default waits for ever",
        spec.Launch.kill_on_bad_exit,
        owns="kill-on-bad-exit",
    )
    wait_s: Optional[int] = key(
        "end the step this long after the first rank has ended; 0: never; null: the site's",
        spec.Launch.wait_s,
        least=0,
        owns="wait",
    )
    cpu_bind: Optional[str] = key(
        "srun --cpu-bind; null: the site's", "${cluster.cpu_bind}", filled=VALUE, owns="cpu-bind"
    )
    # Not none: with it, Slurm 22.05 sets no CUDA_VISIBLE_DEVICES at all, and on a shared node without device
    # constraints a rank sees other jobs' GPUs. --gpus-per-node alone binds nothing: a rank sees all of its node's.
    gpu_bind: Optional[str] = key(
        "srun --gpu-bind; null: every rank sees all GPUs that the job has on its node", filled=VALUE, owns="gpu-bind"
    )


@dataclass
class Stop:
    """When `run.should_stop()` tells the ranks to save and end."""

    margin_s: float = key(
        "kept of the job's time for the last checkpoint, beside twice the longest so far", Stopping.margin_s, least=0
    )
    every_steps: Optional[int] = key(
        "how often ranks agree on it; null: as often as costs under 1 % of a step", least=1
    )
    signal: Optional[str] = key(
        "signal that Slurm sends the ranks before the time limit, as in USR1; null: none",
        choices=SIGNALS,
        owns="signal",
    )
    signal_before_s: int = key("how long before", 120, least=1)


@dataclass
class Restart:
    """Ends of an attempt that are answered with another, in the same run folder, from its checkpoint on."""

    max_restarts: Optional[int] = key(
        "restarts of a job, at most; 0: never; null: as the site's Slurm requeues by itself", least=0
    )
    on: list[str] = key(
        "which ends: preempted, node_fail, hang, time_limit (saved in time), failure (any other but status 2)",
        ["preempted", "node_fail", "hang"],
    )
    without_progress: Optional[int] = key(
        "end after so many in a row that came no further; null: do not look", 2, least=1
    )


@dataclass
class ExcludedNodes:
    """Nodes that have failed (NODE_FAIL, Xid, ECC, ...) are left out of what is submitted later: `hpcinit nodes`."""

    limit: int = key("failures of a node that are too many", LIMIT, least=1)
    expiry_h: float = key("hours for which a failure counts", EXPIRY_H, above=0)
    exclude: bool = key("leave such nodes out; false: they are counted all the same", True)


@dataclass
class Hang:
    """A training that takes no step leaves the stacks of its ranks, and a report of who waits for whom."""

    after_s: float = key(
        "silence that is a hang, at least, and 5 times the longest step so far; 10 times as long in a save; 0: never",
        spec.Hang.after_s,
        least=0,
    )
    action: str = key(
        "report, or end: the ranks end too, with exit status 76", spec.Hang.action, choices=spec.HANG_ACTIONS
    )


@dataclass
class Container:
    """An image that the ranks run in. cluster.container says how the site runs one."""

    image: Optional[str] = key(
        "train.sif, docker://..., or in quotes for # and :, 'container.image=\"nvcr.io#nvidia/pytorch:25.01-py3\"'",
        filled=VALUE,
        owns="container-image",
    )
    python: str = key("Python inside the image, with torch and hpcinit", "python", filled=VALUE)
    mounts: list[str] = key("further folders that it sees: SRC:DST or SRC:DST:ro", [], owns="container-mounts")
    options: dict[str, Any] = key("further options, as cluster.container.options", {})


@dataclass
class Sweep:
    """How the job arrays of a --multirun are submitted."""

    at_once: Optional[int] = key("how many tasks of a sweep may run at the same time; null: as many as fit", least=1)


@dataclass
class Config:
    """Everything that `hpcinit submit` takes."""

    cluster: Cluster = field(default_factory=Cluster)
    parallel: Parallel = field(default_factory=Parallel)
    batch: Batch = field(default_factory=Batch)
    precision: Precision = field(default_factory=Precision)
    deepspeed: DeepSpeed = field(default_factory=DeepSpeed)
    model: Model = field(default_factory=Model)
    comm: Comm = field(default_factory=Comm)
    job: Job = field(default_factory=Job)
    launch: Launch = field(default_factory=Launch)
    sweep: Sweep = field(default_factory=Sweep)
    container: Container = field(default_factory=Container)
    stop: Stop = field(default_factory=Stop)
    hang: Hang = field(default_factory=Hang)
    restart: Restart = field(default_factory=Restart)
    excluded_nodes: ExcludedNodes = field(default_factory=ExcludedNodes)
    name: str = key("name of the run", "${job.name}", sbatch="job-name")
    nodes: int = key("number of nodes", 1, least=1, sbatch="nodes")
    spare_nodes: int = key(
        "further nodes of the job, in whose place the ranks begin again when one of theirs fails", 0, least=0
    )
    ranks_per_node: Optional[int] = key(
        "ranks on each node; null: the cluster's GPUs per node, or 1", least=1, sbatch="ntasks-per-node", owns="ntasks"
    )
    cpus_per_rank: Optional[int] = key(
        "cores per rank; null: the node's cores shared out", least=1, sbatch="cpus-per-task"
    )
    partition: Optional[str] = key("partition", "${cluster.partition}", filled=VALUE, sbatch="partition")
    account: Optional[str] = key("account", "${cluster.account}", filled=VALUE, sbatch="account")
    qos: Optional[str] = key("quality of service", "${cluster.qos}", filled=VALUE, sbatch="qos")
    time_min: int = key("time limit in minutes", "${cluster.time_min}", least=1, owns="time")
    mem_gb: Optional[float] = key("memory per node", "${cluster.mem_gb}", least=0, owns="mem")
    comment: Optional[str] = key("sbatch --comment", filled=VALUE, sbatch="comment")
    after: Any = key("start after these have ended: job ids, runs, or a list of them")
    after_ok: Any = key("start after these have ended well; never, if one fails")
    singleton: bool = key("start when no other job of this name runs", False)
    chain: int = key(
        "jobs for one run, each after the one before: a training longer than the time limit", 1, least=1, most=100
    )
    snapshot: str = key(
        "git: run from a copy of the checkout, uncommitted work included; none", "none", choices=("none", "git")
    )
    snapshot_exclude: list[str] = key("what the copy leaves out: names, paths or patterns as in data or *.bin", [])
    snapshot_max_mb: float = key("largest copy, in megabytes", 100.0, above=0)
    seed: int = key("seed of Python, NumPy and torch", 0, least=0, most=2**63 - 1)
    seed_by: str = key(
        "the same seed for all, or one by rank, or by data: other ranks, other samples",
        spec.Spec.seed_by,
        choices=spec.SEED_BY,
    )
    deterministic: bool = key("only deterministic algorithms: slower, and an error where torch has none", False)
    activation_checkpointing: str = key(
        "full: recompute each layer in the backward pass; none", "none", choices=spec.CHECKPOINTING
    )
    compile: bool = key("torch.compile the model", False)
    gradient_clip: float = key("largest norm of the gradients, whatever wraps the model; 0: no clipping", 0.0, least=0)
    runs_dir: str = key(
        "where run folders are made; must be shared with the nodes", "runs", filled="a folder", owns="output error"
    )
    again: bool = key("submit although the same request is in the queue already", False)
    wait: bool = key("follow the job to its end and return its exit status", False)
    check_paths: bool = key(
        "cluster.venv, cluster.python and container.image must be there; false: they are on the nodes only", True
    )
    test_only: bool = key(
        "ask Slurm itself before submitting, with sbatch --test-only, and show when it would start", True
    )
    secrets: dict[str, str] = key("variables that the job reads from files of mode 0600, as in {HF_TOKEN: ~/.hf}", {})
    secret_names: list[str] = key("further names of secrets, as in MY_*; with - in front: none after all", [])
    dry_run: bool = key("print the script that would be submitted, and submit nothing", False)
