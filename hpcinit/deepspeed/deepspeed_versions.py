"""What DeepSpeed silently does wrong or ignores, from release 0.18.5 on.

Each fact was read in DeepSpeed's source: `git tag --contains` of the commit that a link names, or the released packages
0.18.5, 0.19.6, 0.19.7 and 0.19.8 side by side. What DeepSpeed refuses with a clear message is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcinit.base.versions import key

_TP = "tensor_parallel.autotp_size"
_DC = "compile.deepcompile"

# ZeRO stage -> the first DeepSpeed whose engine.offload_states() does it: #6011, and #7421 for 1 and 2
STATES_MOVE_SINCE = {1: "0.17.6", 2: "0.17.6", 3: "0.15.2"}

# The first DeepSpeed that in stage 3 waits for all of several gathers, and not for the last alone: #8539. On a GPU the
# order of its stream made that enough; gloo has no order, and what was not there yet was read: memory of anything.
GATHERS_WAIT_SINCE = "0.19.8"
SEQUENTIAL = "stage3_allgather_sequential"  # of zero_optimization, since 0.18.5 (#7661): a way that waits for each

# The first DeepSpeed whose initialize() divides a model for AutoTP; before, it trains one that somebody else has
# divided, and says nothing if nobody has: #7806
INITIALIZE_DIVIDES_SINCE = "0.18.6"

# The first DeepSpeed whose import leaves CUDA alone. Before, ops and the check for Triton asked the device what it is,
# which starts CUDA, and a forked rank cannot start it again: #7252, #7918, #8078
IMPORT_LEAVES_CUDA_SINCE = "0.19.3"

# The first DeepSpeed whose DeepCompile works with torch 2.9 and later.
COMPILES_WITH_TORCH_2_9_SINCE = "0.19.0"

# The keys that DeepSpeed 0.18.5 to 0.19.8 looks up at the top of a ds_config; it ignores any other without a message.
# The test of this list queries the installed DeepSpeed.
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


def tp_to_divide(config: Mapping[str, Any], deepspeed: str) -> int:
    """Among how many ranks deepspeed.tp_model_init() has to divide the model before initialize(); 1 is not at all."""
    size = int(at(config, _TP) or 1)
    return size if key(deepspeed) < key(INITIALIZE_DIVIDES_SINCE) else 1


def states_can_move(zero_stage: int, deepspeed: str) -> bool:
    """Whether engine.offload_states() works; never in stage 0."""
    return zero_stage in STATES_MOVE_SINCE and key(deepspeed) >= key(STATES_MOVE_SINCE[zero_stage])


def at(config: Mapping[str, Any], path: str) -> Any:
    """config['a']['b'] for 'a.b'; None where there is no such key."""
    found: Any = config
    for word in path.split("."):
        found = found.get(word) if isinstance(found, Mapping) else None
    return found


def stage(config: Mapping[str, Any]) -> int:
    return int(at(config, "zero_optimization.stage") or 0)


def _autotp(config: Mapping[str, Any]) -> bool:
    return int(at(config, "tensor_parallel.autotp_size") or 0) > 1


def check(config: Mapping[str, Any], deepspeed: str, torch: str) -> list[str]:
    """Return what DeepSpeed would do other than requested, or fail at without a reason: one message each.

    What DeepSpeed itself refuses with a clear message is not checked here. deepspeed, torch: their versions, as
    installed() returns them. Raises ValueError for a text that is no version.
    """
    found = []
    if _autotp(config) and not at(config, "bf16.enabled"):
        found.append(
            f"ds_config {_TP} {at(config, _TP)}: bf16.enabled is not true, AutoTP needs it: precision.param=bf16"
        )
    if not at(config, _DC):
        return found
    if stage(config) == 0:
        found.append(
            f"ds_config {_DC} True: ZeRO stage is 0, and DeepCompile does stages 1 to 3; "
            "DeepSpeed would use torch.compile without saying so: choose a stage, or compile=true"
        )
    # deepspeed/compile/util.py asks for torch <= 2.9 and prepares nothing with a later one, 2.9.0+cu128 for example;
    # DeepCompile then fails in its first step. DeepSpeed#7755, #7951
    if key(deepspeed) < key(COMPILES_WITH_TORCH_2_9_SINCE) and key(torch) >= key("2.9"):
        found.append(
            f"ds_config {_DC} True: torch {torch} with DeepSpeed {deepspeed} is installed, expected DeepSpeed "
            f"{COMPILES_WITH_TORCH_2_9_SINCE} or later, or torch below 2.9; update DeepSpeed, or turn deepcompile off"
        )
    return found


def waiting(config: Mapping[str, Any], deepspeed: str, device: str) -> tuple[dict[str, Any], list[str]]:
    """The ds_config that gathers parameters rightly on this kind of device ("cpu", "cuda"), and a note if it does not.

    What the user said of that key stands.
    """
    if device != "cpu" or stage(config) != 3 or key(deepspeed) >= key(GATHERS_WAIT_SINCE):
        return dict(config), []
    zero = config["zero_optimization"]
    notes = []
    if not zero.get(SEQUENTIAL, True):
        notes.append(
            f"ds_config.zero_optimization.{SEQUENTIAL}: False, by your hand; DeepSpeed {deepspeed} on CPUs then reads "
            "parameters before they are there, and the losses are wrong (DeepSpeed#8539, mended in "
            f"{GATHERS_WAIT_SINCE}): leave the key out, or update DeepSpeed"
        )
    return {**config, "zero_optimization": {SEQUENTIAL: True, **zero}}, notes


def unread(given: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each key of a user's ds_config that DeepSpeed ignores, with the keys it may stand for."""
    return [
        f"ds_config.{name}: DeepSpeed reads no such key, and passes over it in silence{_near(name)}"
        for name in given
        if name not in KEYS
    ]


def _near(name: str) -> str:
    import difflib  # noqa: PLC0415 - for a mistake only

    close = difflib.get_close_matches(name, sorted(KEYS), n=3, cutoff=0.8)
    return f"; did you mean {' or '.join(close)}?" if close else ""
