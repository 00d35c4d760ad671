"""Lists settings that DeepSpeed silently ignores or handles wrongly, from release 0.18.5 on.

Each fact was verified in DeepSpeed's source, with the commit of a numbered pull request, or in the released packages
0.18.5, 0.19.6, 0.19.7 and 0.19.8. Settings that DeepSpeed refuses with a clear message are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcinit.base.versions import key

# hpcinit resets DeepSpeed's groups by names that older versions lack (runtime/deepspeed_setup.py).
OLDEST = "0.18.5"
UPDATE = f"pip install 'deepspeed>={OLDEST},<0.20'"

_TP = "tensor_parallel.autotp_size"
_DC = "compile.deepcompile"

# The first DeepSpeed that waits for all gathers in stage 3. Earlier versions wait only for the last one (#8539). On a
# GPU, this is enough, because a stream runs the gathers in order. gloo does not, so DeepSpeed could read parameters
# that had not arrived.
GATHERS_WAIT_SINCE = "0.19.8"
SEQUENTIAL = "stage3_allgather_sequential"  # since 0.18.5 (#7661), this key makes DeepSpeed wait for each gather

# The first DeepSpeed whose initialize() divides a model for AutoTP. Earlier versions expect a divided model, and report
# nothing if it is not divided: #7806
INITIALIZE_DIVIDES_SINCE = "0.18.6"

# The first DeepSpeed whose import does not initialize CUDA. In earlier versions, the import queries the device, which
# initializes CUDA, and a forked rank then cannot use it: #7252, #7918, #8078
IMPORT_LEAVES_CUDA_SINCE = "0.19.3"

# The first DeepSpeed that can move parameters and gradients to the CPU in stage 3 with any optimizer. Earlier versions
# always assert that the optimizer is FusedAdam (runtime/zero/stage3.py, offload_states).
MOVES_WITHOUT_FUSED_ADAM_SINCE = "0.19.0"

# The first tested DeepSpeed in which pinned memory works on a machine without an accelerator. 0.19.3 raises an error.
PINS_ON_CPU_SINCE = "0.19.6"

# The first DeepSpeed whose DeepCompile works with torch 2.9 and later. With earlier versions, the first step fails:
# DeepSpeed#7755, #7951
COMPILES_SINCE = "0.19.0"

# The keys that DeepSpeed 0.18.5 to 0.19.8 reads at the top level of a ds_config. It silently ignores all others. A test
# compares this list with the installed DeepSpeed.
_KEYS = """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_parallel_size data_types
    dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue elasticity
    expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
    gradient_predivide_factor graph_harvesting hybrid_engine log_level managed_gradient_accumulation memory_breakdown
    nebula optimizer pipeline prescale_gradients progressive_layer_drop quantize_training scheduler
    seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients steps_per_print
    tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
KEYS = frozenset(_KEYS.split())


def too_old(deepspeed: str) -> str:
    """Return a message if the DeepSpeed version is older than OLDEST, otherwise ''.

    Raise ValueError if `deepspeed` is not a version.
    """
    if key(deepspeed) >= key(OLDEST):
        return ""
    return (
        f"DeepSpeed {deepspeed} is installed, expected {OLDEST} or newer, because hpcinit cannot start an older one "
        "twice in one process"
    )


def tp_to_divide(config: Mapping[str, Any], deepspeed: str) -> int:
    """Return the number of parts into which deepspeed.tp_model_init() must split the model before initialize().

    Return 1 if the model is not split, or if initialize() splits it in this version of DeepSpeed.
    """
    size = int(at(config, _TP) or 1)
    return size if key(deepspeed) < key(INITIALIZE_DIVIDES_SINCE) else 1


def at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, config['a']['b'] for 'a.b', or None if there is no such key."""
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def stage(config: Mapping[str, Any]) -> int:
    return int(at(config, "zero_optimization.stage") or 0)


def _autotp(config: Mapping[str, Any]) -> bool:
    return int(at(config, "tensor_parallel.autotp_size") or 0) > 1


def check(config: Mapping[str, Any], deepspeed: str) -> list[str]:
    """Return a message for each setting that DeepSpeed would silently change, or that would cause an unclear error.

    config: the ds_config.
    deepspeed: DeepSpeed's version.

    Raise ValueError if the version is invalid.
    """
    found = []
    if _autotp(config) and not at(config, "bf16.enabled"):
        found.append(
            f"ds_config {_TP} {at(config, _TP)}: bf16.enabled is not true, but AutoTP needs it: set "
            "precision.param=bf16"
        )
    if not at(config, _DC):
        return found
    if stage(config) == 0:
        found.append(
            f"ds_config {_DC} True: ZeRO stage is 0, but DeepCompile needs stage 1 to 3; "
            "DeepSpeed would silently use torch.compile instead: choose a stage, or set compile=true"
        )
    if key(deepspeed) < key(COMPILES_SINCE):
        found.append(
            f"ds_config {_DC} True: DeepSpeed {deepspeed} is installed, expected {COMPILES_SINCE} or later; update "
            "DeepSpeed, or set deepspeed.deepcompile=false"
        )
    return found


def waiting(config: Mapping[str, Any], deepspeed: str, device: str) -> tuple[dict[str, Any], list[str]]:
    """Return a ds_config that avoids the wrong losses of DeepSpeed#8539, and notes for the user.

    This bug occurs in ZeRO stage 3 on CPUs. A value that the user set is kept, with a note if it causes wrong losses.

    device: the device type, 'cpu' or 'cuda'.
    """
    if device != "cpu" or stage(config) != 3 or key(deepspeed) >= key(GATHERS_WAIT_SINCE):
        return dict(config), []
    zero = config["zero_optimization"]
    notes = []
    if not zero.get(SEQUENTIAL, True):
        notes.append(
            f"ds_config.zero_optimization.{SEQUENTIAL} is False: DeepSpeed {deepspeed} on CPUs then gives wrong "
            "losses, because it reads parameters before they have arrived (DeepSpeed#8539, fixed in "
            f"{GATHERS_WAIT_SINCE}); remove the key, or update DeepSpeed"
        )
    return {**config, "zero_optimization": {SEQUENTIAL: True, **zero}}, notes


def unread(given: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each key in the user's ds_config that DeepSpeed ignores. It suggests similar keys."""
    return [
        f"ds_config.{name}: DeepSpeed has no such key and would silently ignore it{_near(name)}"
        for name in given
        if name not in KEYS
    ]


def _near(name: str) -> str:
    import difflib  # noqa: PLC0415 - needed only for a mistake

    close = difflib.get_close_matches(name, sorted(KEYS), n=3, cutoff=0.8)
    return f"; did you mean {' or '.join(close)}?" if close else ""
