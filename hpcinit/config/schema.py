"""Declares every config key once: its type, default, unit, bounds, sbatch option and help text.

The classes are plain dataclasses because Hydra fills them in. No code changes them afterwards. A key that the job needs
has a field of the same name in `records/spec.py`, which also declares its default. `job_spec.py` copies the value.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional

from hpcinit.base.config_key import key
from hpcinit.deepspeed.deepspeed_keys import DeepSpeed
from hpcinit.records import spec, starts, wrappers
from hpcinit.records.layout import CP_KINDS
from hpcinit.records.node_records import EXPIRY_H, LIMIT
from hpcinit.records.startup_timeout import CHECKPOINT_S, COLLECTIVE_NCCL_S, COLLECTIVE_OTHER_S
from hpcinit.records.stop_reasons import SIGNALS, Stopping

if TYPE_CHECKING:
    from hpcinit.engine import Engine

# No `from __future__ import annotations` here: OmegaConf would compile each annotation, 2 ms in each submission.
# Annotations are Optional[X], because OmegaConf 2.3 does not support `X | None`.
# ruff: noqa: UP045


MISSING: Any = "???"  # omegaconf.MISSING: a key that has to be set
VALUE = "a value, or null"  # what a message expects instead of '' for an option or a path


@dataclass
class Partition:
    nodes: Optional[int] = key("nodes in the partition; larger requests are refused before submission")
    time_min: Optional[int] = key("longest time limit in minutes")
    time_min_by_nodes: dict[int, int] = key(
        "longest time limit by nodes; {91: 120}: 120 minutes for up to 91 nodes", {}
    )
    node_min: Optional[int] = key("maximum of nodes x time limit of a job, in node-minutes")
    gpus_per_node: Optional[int] = key("GPUs per node; 0: none; null: cluster.gpus_per_node")
    gpu_type: Optional[str] = key("GPU type, as Slurm calls it; null: cluster.gpu_type")
    cpus_per_node: Optional[int] = key("cores that Slurm counts on a node; null: cluster.cpus_per_node")
    mem_gb: Optional[float] = key("memory of a node that jobs may use, in GB of 2^30 bytes, as sbatch counts it")
    whole_nodes: Optional[bool] = key("the partition allocates only whole nodes; null: cluster.whole_nodes")


@dataclass
class Qos:
    nodes: Optional[int] = key("maximum nodes of a job; null: the partition's limit")
    time_min: Optional[int] = key(
        "longest time limit in minutes, may exceed the partition's; null: the partition's limit"
    )


@dataclass
class SiteContainer:
    """Settings for containers that apply to all jobs on the cluster."""

    runtime: Optional[str] = key(
        "pyxis (srun's --container-* options), apptainer or singularity; null: no containers",
        choices=("pyxis", "apptainer", "singularity"),
    )
    mounts: list[str] = key("folders mounted into every container: SRC:DST or SRC:DST:ro", [])
    options: dict[str, Any] = key("options of pyxis (without container-) or of apptainer exec, as in {rocm: true}", {})


@dataclass
class Cluster:
    """The settings of a cluster, from conf/cluster/NAME.yaml. No Python code depends on a particular cluster."""

    name: str = key("name of the cluster in messages", MISSING, filled="a name")
    untested: bool = key("this file was never tested at its site; each submission prints a warning", False)
    engine: str = key("slurm, or local: run on this machine without Slurm", "slurm", choices=("slurm", "local"))
    clusters: Optional[str] = key(
        "another cluster of the same slurmdbd, for sbatch --clusters; null: the one in SLURM_CONF",
        filled="a name, or null",
        owns="clusters",
    )
    partition: Optional[str] = key("default partition; null: Slurm's own default")
    partitions: dict[str, Partition] = key("limits and hardware of each partition", {})
    account: Optional[str] = key("default account")
    qos: Optional[str] = key("default quality of service")
    qoses: dict[str, Qos] = key("limits of each QOS; they replace the limits of the partition", {})
    needs: list[str] = key("what every user must set: account, qos, partition, modules, nccl_plugin", [])
    time_min: int = key("default time limit in minutes", 60, least=1)
    gpus_per_node: int = key("GPUs of a node; 0: none", 0, least=0)
    gpu_mem_gb: Optional[float] = key(
        "memory of a GPU; null: unknown, so `hpcinit plan` cannot check whether the model fits", above=0
    )
    gpu_type: Optional[str] = key("GPU type, if the site requires it in the request, as in --gpus-per-node=a100:4")
    gpu_flag: Optional[str] = key(
        "option that requests GPUs: gpus-per-node or gres; null: none",
        "gpus-per-node",
        choices=("gpus-per-node", "gres"),
        owns="gres",
    )
    cpus_per_node: Optional[int] = key(
        "cores of a node, as Slurm counts them; a job that uses half of the GPUs requests half of the cores", least=1
    )
    mem_gb: Optional[float] = key(
        "memory of a node; a job that uses half of the GPUs requests half; 0: all of it; null: no --mem option", least=0
    )
    mem_gb_per_rank: float = key("minimum memory of a rank, used by the local engine", 0.5, least=0)
    whole_nodes: bool = key("the site allocates only whole nodes: request all GPUs, cores and memory of a node", False)
    exclusive: bool = key("request whole nodes with --exclusive", False, owns="exclusive")
    cpu_bind: Optional[str] = key("default of launch.cpu_bind, as in mask_cpu:fe,fe00 with one mask per rank of a node")
    python: Optional[str] = key("Python on the compute nodes; null: the Python that runs hpcinit")
    interface: Optional[str] = key("network interface for NCCL and gloo, as in ib0")
    host_template: str = key("host names on the fast network, as in {host}-ib0, or a suffix", "")
    module_purge: bool = key("run `module purge` first", False)
    module_paths: list[str] = key("module folders, for `module use`", [])
    modules: list[Any] = key("modules to load, in this order", [])
    venv: Optional[str] = key("virtual environment to activate; its Python runs the ranks", filled=VALUE)
    conda: Optional[str] = key(
        "conda environment to activate (name or folder); its Python runs the ranks", filled=VALUE
    )
    setup: list[Any] = key("shell lines to run after modules and environment, before the ranks start", [])
    container: SiteContainer = field(default_factory=SiteContainer)
    scratch: Optional[str] = key(
        "large shared folder that the site may purge; the job's SCRATCH is set to it", filled=VALUE
    )
    cache: Optional[str] = key(
        "shared folder for downloads; HF_HOME and TORCH_HOME are set to folders in it", filled=VALUE
    )
    local_disk: Optional[str] = key(
        "folder on the node's own disk, for caches of the job; null: TMPDIR or /tmp", filled=VALUE
    )
    env: dict[str, Any] = key("environment variables of the job", {})
    timeout_base_s: Optional[float] = key("start-up timeout: base; null: 300", above=0)
    timeout_per_node_s: Optional[float] = key("start-up timeout: added per node; null: 3.5", least=0)
    timeout_max_s: Optional[float] = key("start-up timeout: maximum; null: 3600", above=0)
    submit_patience_s: float = key("how long a submission waits for a controller that does not answer", 300.0)
    submit_confirm: bool = key(
        "check after 7 s that the job exists, because a killed controller loses the jobs of its last 5 s", False
    )
    sbatch: dict[str, Any] = key("more sbatch options by their long names, as in {reservation: x}", {})
    srun: dict[str, Any] = key("more srun options by their long names", {})
    max_array_size: Optional[int] = key("Slurm's MaxArraySize: array indices must be smaller; null: unknown", least=1)
    accounting: Optional[bool] = key("whether Slurm has accounting (sacct, QOS); null: unknown")
    preemption: Optional[str] = key("Slurm's PreemptMode, as in OFF or REQUEUE; null: unknown")
    topology: Optional[str] = key("Slurm's TopologyPlugin, as in topology/tree; null: unknown")
    pyxis: bool = key("srun has --container-image (NVIDIA's pyxis)", False)
    slurm: Optional[str] = key("version of Slurm, as in 22.05.8; null: unknown")


@dataclass
class Parallel:
    """The degrees of parallelism. One degree may be -1: hpcinit computes it from the number of ranks.

    Ranks are numbered along tp first, then along cp, dp_shard, dp_replicate and pp. A tensor parallel group therefore
    consists of consecutive ranks.
    """

    pp: int = key("pipeline parallel degree", 1)
    dp_replicate: int = key("data parallel degree, parameters replicated", -1)
    dp_shard: int = key("data parallel degree, parameters sharded", 1)
    cp: int = key("context (sequence) parallel degree", 1)
    tp: int = key("tensor parallel degree", 1)
    ep: int = key("expert parallel degree; uses the data parallel ranks and adds no ranks", 1)
    cp_kind: str = key(
        "method of context parallelism: ulysses (all-to-all over heads) or ring",
        "ulysses",
        choices=CP_KINDS,
    )
    tp_across_nodes: bool = key("let tensor parallel groups span nodes", False)
    wrap: str = key(
        f"wrapper that run.wrap applies to the model: {', '.join(wrappers.WRAPPERS)}; fsdp with dp_replicate is HSDP",
        spec.Training.wrap,
        choices=wrappers.WRAPPERS.keys(),
    )


# The key is `global`, which a class statement does not accept as an attribute name, so it is in neither init nor repr.
_GLOBAL = field(
    default=None,
    init=False,
    repr=False,
    compare=False,
    metadata=key("samples per training step, counted over all ranks").metadata,
)
_GlobalBatch: Any = dataclass(
    type("_GlobalBatch", (), {"__annotations__": {"global": Optional[int]}, "global": _GLOBAL})
)


@dataclass
class Batch(_GlobalBatch):  # type: ignore[misc]
    """The batch sizes: global = micro x accumulation x data parallel size. Set at most two of the three keys."""

    micro: Optional[int] = key("samples per forward pass of a rank")
    accumulation: Optional[int] = key("forward passes per step")

    @property
    def total(self) -> Optional[int]:
        """Return the value of the key `global`, which is a keyword in Python."""
        value: Optional[int] = getattr(self, "global")
        return value


@dataclass
class Precision:
    """The number formats used in training."""

    param: str = key(
        "format of parameters in forward and backward: fp32, bf16 or fp16", spec.Precision.param, choices=spec.PARAM
    )
    reduce: str = key(
        "format in which gradients are summed over ranks: fp32 or bf16", spec.Precision.reduce, choices=spec.REDUCE
    )


@dataclass
class Model:
    """The model's sizes, for `hpcinit plan` and for checks of the parallel degrees."""

    params: Optional[float] = key("number of parameters, as in 7e9", least=1)
    layers: Optional[int] = key("number of layers", least=1)
    hidden: Optional[int] = key("hidden size", least=1)
    heads: Optional[int] = key("attention heads", least=1)
    sequence: Optional[int] = key("tokens per sample", least=1)


@dataclass
class Comm:
    """Settings for initializing the process group."""

    backend: str = key(
        "nccl, gloo, cpu:gloo,cuda:nccl for tensors on both, or auto: nccl on GPUs and gloo on CPUs",
        spec.Comm.backend,
        choices=("auto", "nccl", "gloo", "cpu:gloo,cuda:nccl"),
    )
    ports: Any = key(
        "ports of rank 0's node for the rendezvous, torch's store and MASTER_PORT: a range, as in 20000-20100; 29500: "
        "this port for MASTER_PORT, and the next two ports; env: the job's own MASTER_ADDR and MASTER_PORT; null: "
        "hpcinit's choice"
    )
    deepspeed: bool = key("initialize DeepSpeed after torch; implied by parallel.wrap=deepspeed", False)
    timeout_base_s: Optional[float] = key("start-up timeout: base; null: cluster.timeout_base_s or 300", above=0)
    timeout_per_node_s: Optional[float] = key(
        "start-up timeout: added per node; null: cluster.timeout_per_node_s or 3.5", least=0
    )
    timeout_max_s: Optional[float] = key("start-up timeout: maximum; null: cluster.timeout_max_s or 3600", above=0)
    collective_timeout_s: Optional[float] = key(
        f"timeout of collectives during training; null: torch's own, {COLLECTIVE_NCCL_S:g} s with nccl, else "
        f"{COLLECTIVE_OTHER_S:g} s",
        above=0,
    )
    checkpoint_timeout_s: float = key(
        "how long ranks wait for each other during run.save and run.load", CHECKPOINT_S, above=0
    )
    device_id: str = key(
        "bind the process group to its device, so that NCCL starts immediately: never, auto or always",
        spec.Comm.device_id,
        choices=spec.DEVICE_ID,
    )


@dataclass
class Job:
    """The program that the ranks run. Set exactly one of script, module and command."""

    name: str = key("short name, used in the names of the job and the run folder", MISSING)
    script: Optional[str] = key("a Python file")
    module: Optional[str] = key("a Python module, as in python -m")
    command: Optional[str] = key("any program on PATH")
    args: list[Any] = key("arguments of the program", [])
    check_script: bool = key("refuse a shell script that starts ranks itself (srun, torchrun, mpirun and others)", True)
    env: dict[str, Any] = key("environment variables of this job", {})
    workdir: Optional[str] = key("working folder; null: the folder from which you submit", owns="chdir")


@dataclass
class Launch:
    """Settings for starting the ranks on the nodes."""

    kind: str = key(
        "srun: one task per rank; fork: one task per node imports once and forks; torchrun: one agent per node",
        spec.Launch.kind,
        choices=starts.STARTS.keys(),
    )
    preload: list[str] = key("fork: modules to import once per node; DeepSpeed is added if the job uses it", ["torch"])
    max_restarts: int = key(
        "torchrun: how often its agents restart the ranks before the step fails", spec.Launch.max_restarts, least=0
    )
    kill_on_bad_exit: bool = key(
        "end the step when one rank fails; srun's own default is to wait forever",
        spec.Launch.kill_on_bad_exit,
        owns="kill-on-bad-exit",
    )
    wait_s: Optional[int] = key(
        "end the step this long after the first rank exits; 0: never; null: the site's default",
        spec.Launch.wait_s,
        least=0,
        owns="wait",
    )
    cpu_bind: Optional[str] = key(
        "srun --cpu-bind; null: the site's default", "${cluster.cpu_bind}", filled=VALUE, owns="cpu-bind"
    )
    # The default is not `none`: with it, Slurm 22.05 sets no CUDA_VISIBLE_DEVICES, and on a shared node without device
    # constraints a rank sees other jobs' GPUs. --gpus-per-node alone binds nothing: a rank sees all GPUs of the job.
    gpu_bind: Optional[str] = key(
        "srun --gpu-bind; null: every rank sees all GPUs of the job on its node", filled=VALUE, owns="gpu-bind"
    )


@dataclass
class Stop:
    """Settings of `run.should_stop()`: when it returns a reason, so that the program can save and exit."""

    margin_s: float = key(
        "time reserved before the time limit, in addition to twice the longest checkpoint so far",
        Stopping.margin_s,
        least=0,
    )
    every_steps: Optional[int] = key(
        "how often the ranks check whether to stop, in steps; null: so often that it costs under 1 % of the time",
        least=1,
    )
    signal: Optional[str] = key(
        "signal that Slurm sends to the ranks before the time limit, as in USR1; null: none",
        choices=SIGNALS,
        owns="signal",
    )
    signal_before_s: int = key("how long before the time limit Slurm sends stop.signal", 120, least=1)


@dataclass
class Restart:
    """Settings of automatic restarts. A restart uses the same run folder and resumes from the last checkpoint."""

    max_restarts: Optional[int] = key(
        "maximum restarts of a job; 0: never; null: the site's default for requeueing applies", least=0
    )
    on: list[str] = key(
        "restart after: preempted, node_fail, hang, time_limit (if saved in time), failure (other than exit status 2)",
        ["preempted", "node_fail", "hang"],
    )
    without_progress: Optional[int] = key(
        "give up after this many consecutive restarts without progress; null: unlimited", 2, least=1
    )
    warm: bool = key("launch=fork: when a rank fails, fork all ranks again in the same job, within seconds", False)


@dataclass
class ExcludedNodes:
    """Settings for excluding failed nodes (NODE_FAIL, Xid, ECC, ...) from later submissions; see `hpcinit nodes`."""

    limit: int = key("exclude a node after this many failures", LIMIT, least=1)
    expiry_h: float = key("how long a failure counts", EXPIRY_H, above=0)
    exclude: bool = key("exclude nodes that have reached the limit; false: only count failures", True)


@dataclass
class Hang:
    """Settings of hang detection. If no rank finishes a step for too long, hpcinit writes all stacks and a report."""

    after_s: float = key(
        "report a hang after this long without a step, or 5 times the longest step if that is longer; in a save, after "
        "10 times hang.after_s, or comm.checkpoint_timeout_s if that is longer; 0: off",
        spec.Hang.after_s,
        least=0,
    )
    action: str = key(
        "report: write a report only; end: also end the ranks, with exit status 76",
        spec.Hang.action,
        choices=spec.HANG_ACTIONS,
    )


@dataclass
class NodeCheck:
    """Settings of the check of each node before its ranks start.

    It finds GPU memory in use and faulty GPUs, and measures the free disk space.
    """

    action: str = key(
        "report: print problems; replace: if a GPU is lost or in use by others, use a spare node instead, or exit if "
        "no spare node is left; off",
        spec.NodeCheck.action,
        choices=spec.NODE_CHECKS,
    )
    timeout_s: float = key(
        "how long the ranks wait for the check before they start without its result", spec.NodeCheck.timeout_s, above=0
    )


@dataclass
class Container:
    """Settings of the container image in which the ranks run. cluster.container describes how the site runs images."""

    image: Optional[str] = key(
        "train.sif, docker://..., or 'container.image=\"nvcr.io#nvidia/pytorch:YY.MM-py3\"' (# and : need the quotes)",
        filled=VALUE,
        owns="container-image",
    )
    python: str = key("Python inside the image, with torch and hpcinit", "python", filled=VALUE)
    mounts: list[str] = key("more folders to mount: SRC:DST or SRC:DST:ro", [], owns="container-mounts")
    options: dict[str, Any] = key("more options, in the form of cluster.container.options", {})


@dataclass
class Sweep:
    """Settings of the job arrays that --multirun submits."""

    at_once: Optional[int] = key("maximum number of tasks that run at the same time; null: unlimited", least=1)


@dataclass
class Config:
    """All config keys of `hpcinit submit`."""

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
    check_node: NodeCheck = field(default_factory=NodeCheck)
    name: str = key("name of the run", "${job.name}", sbatch="job-name")
    nodes: int = key("number of nodes", 1, least=1, sbatch="nodes")
    spare_nodes: int = key("spare nodes, requested in addition; ranks restart on one when a node fails", 0, least=0)
    ranks_per_node: Optional[int] = key(
        "ranks per node; null: one per requested GPU, or one per GPU of a node, or 1 without GPUs",
        least=1,
        sbatch="ntasks-per-node",
        owns="ntasks",
    )
    gpus_per_node: Optional[int] = key(
        "GPUs per node to request; null: one per rank, or all of a whole node", least=0, owns="gpus-per-node"
    )
    gpus: Optional[int] = key("GPUs to request on all nodes together; sets gpus_per_node", least=1, owns="gpus")
    cpus_per_rank: Optional[int] = key(
        "cores per rank; null: an equal share of the job's cores on a node", least=1, sbatch="cpus-per-task"
    )
    hetjob: list[dict[str, Any]] = key(
        "further components of a heterogeneous job, as in [{partition: cpu, nodes: 1}], with their own nodes, "
        "ranks_per_node, gpus_per_node, cpus_per_rank, mem_gb, partition, account, qos",
        [],
    )
    worlds: str = key(
        "worlds of a heterogeneous job; one: a single world with the ranks of all components; each: one per component",
        "one",
        choices=("one", "each"),
    )
    partition: Optional[str] = key("partition", "${cluster.partition}", filled=VALUE, sbatch="partition")
    account: Optional[str] = key("account", "${cluster.account}", filled=VALUE, sbatch="account")
    qos: Optional[str] = key("quality of service", "${cluster.qos}", filled=VALUE, sbatch="qos")
    time_min: int = key("time limit in minutes", "${cluster.time_min}", least=1, owns="time")
    mem_gb: Optional[float] = key(
        "memory per node; 0: all of it; null: the job's share of cluster.mem_gb", least=0, owns="mem"
    )
    comment: Optional[str] = key("sbatch --comment", filled=VALUE, sbatch="comment")
    dependency: Optional[str] = key(
        "when the job may start, as sbatch's --dependency: afterok:4242, afterany:train-0001 (a run), singleton",
        filled=VALUE,
        owns="dependency",
    )
    chain: int = key(
        "number of jobs that run one after another, for training longer than the time limit", 1, least=1, most=100
    )
    snapshot: str = key(
        "git: run from a copy of the checkout, including uncommitted changes; none: run the files in place",
        "none",
        choices=("none", "git"),
    )
    snapshot_exclude: list[str] = key("names, paths or patterns that the copy skips, as in data or *.bin", [])
    snapshot_max_mb: float = key("maximum size of the copy in megabytes", 100.0, above=0)
    seed: int = key("seed of Python, NumPy and torch", 0, least=0, most=2**63 - 1)
    seed_by: str = key(
        "same: one seed for all ranks; rank: one per rank; data: one per data parallel rank",
        spec.Spec.seed_by,
        choices=spec.SEED_BY,
    )
    deterministic: bool = key("use only deterministic algorithms: slower, and an error where torch has none", False)
    tracker: Optional[str] = key(
        "wandb or mlflow: in every attempt, rank 0 continues the same tracker run; null: neither",
        choices=spec.TRACKERS,
    )
    activation_checkpointing: str = key(
        "full: recompute each layer in the backward pass; or none", "none", choices=spec.CHECKPOINTING
    )
    compile: bool = key("compile the model with torch.compile", False)
    gradient_clip: float = key("maximum norm of the gradients, whatever the wrapper; 0: no clipping", 0.0, least=0)
    runs_dir: str = key(
        "folder for run folders; must be shared with the nodes", "runs", filled="a folder", owns="output error"
    )
    again: bool = key("submit although the same request is already in the queue", False)
    wait: bool = key("wait until the job ends, and exit with its exit status", False)
    check_paths: bool = key(
        "check that cluster.venv, cluster.python and container.image exist; false: if they exist only on the nodes",
        True,
    )
    validate: bool = key(
        "check the request with sbatch --test-only before submitting, and print the estimated start", True
    )
    secrets: dict[str, str] = key(
        "environment variables that the job reads from files of mode 0600, as in {HF_TOKEN: ~/.hf}", {}
    )
    secret_names: list[str] = key("more names of secrets, as in MY_*; a name with a leading - is not a secret", [])
    dry_run: bool = key("print the script that would be submitted, and submit nothing", False)

    @property
    def engine(self) -> "Engine":
        """Return the cluster's engine, or Slurm's if cluster.engine is invalid. A check reports that value."""
        from hpcinit.engine import ENGINES, SLURM  # noqa: PLC0415 - with Slurm's client, which completion does not need

        return ENGINES.get(self.cluster.engine, SLURM)
