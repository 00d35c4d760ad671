"""The keys of a ds_config that DeepSpeed reads, as data, and those of a user's that it does not.

What 0.18.5 and 0.19.8 look up at the top, and the fields of their DeepSpeedZeroConfig, whose extra fields are errors:
tests/facts/test_deepspeed_keys.py asks the installed one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_TOP = """
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
_ZERO = """
    allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients cpu_offload
    cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
    gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear
    mics_hierarchical_params_gather mics_shard_size model_persistence_threshold module_granularity_threshold
    offload_optimizer offload_param overlap_comm override_module_apply param_persistence_threshold parameter_alignment
    pipeline_loading_checkpoint prefetch_bucket_size reduce_bucket_size reduce_scatter round_robin_gradients
    save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
    stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size use_all_reduce_for_fetch_params
    use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights zeropp_loco_param
"""


TOP, ZERO = frozenset(_TOP.split()), frozenset(_ZERO.split())


def unread(given: Mapping[str, Any]) -> list[str]:
    """One sentence for each key of a user's own ds_config that DeepSpeed does not know, with those it may stand for."""
    found = [
        f"ds_config.{name}: DeepSpeed reads no such key, and passes over it in silence{_near(name, TOP)}"
        for name in given
        if name not in TOP
    ]
    zero = given.get("zero_optimization")
    if isinstance(zero, Mapping):
        found += [
            f"ds_config.zero_optimization.{name}: DeepSpeed knows no such key there, and ends the job over it"
            f"{_near(name, ZERO)}"
            for name in zero
            if name not in ZERO
        ]
    return found


def _near(name: str, known: Collection[str]) -> str:
    import difflib  # noqa: PLC0415 - for a mistake only

    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.8)
    return f"; did you mean {' or '.join(close)}?" if close else ""
