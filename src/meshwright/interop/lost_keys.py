"""Says what the loss of a key of another system means: nothing for the result (logging, saving, evaluation, buffers,
machines), or another result, with the remedy if there is one. A key that is in no list counts as one that can change
the result."""

from __future__ import annotations

import re

from meshwright.core.messages import Message

_SECTIONS = (
    "checkpoint. checkpoints. comm. debug. general. job. logger. logging. metrics. monitor_config. profiler. "
    "profiling. tpu_env"
)
HARMLESS_SECTIONS = tuple(_SECTIONS.split())
"""Sections of files about recording, saving and machines."""
_WORDS = (
    "adlr autoresume backend bucket buffer buffer_count buffers ckpt comet contiguous csv debug eval evaluation "
    "fusion hub ip log logger logging logs memory mlflow monitor nccl nsys nvtx overlap persistence pin port "
    "prefetch profile profiler progress project quiet rdzv report reuse safetensors save straggler tensorboard "
    "threads throughput timeout timers timing tpu tqdm trackio val validation verbose wandb workers"
)
HARMLESS_WORDS = frozenset(_WORDS.split())
"""Words in the names of keys about recording, saving, evaluation, buffers, kernels and machines."""
_KEYS = (
    "allgather_partitions bf16_full_eval compute_environment data_cache_path deepspeed_multinode_launcher "
    "distributed_backend do_eval do_predict do_train downcast_bf16 dump_state enable_cpu_affinity "
    "exit_duration_in_mins exit_signal_handler fsdp_cpu_ram_efficient_loading fsdp_sync_module_states "
    "fsdp_transformer_layer_cls_to_wrap fsdp_use_orig_params gpu_ids gradient_checkpointing_kwargs.use_reentrant "
    "group_name host hostfile machine_rank main_training_function manual_gc master_addr master_port "
    "metric_for_best_model no_async_tensor_model_parallel_allreduce node_rank nodefile num_machines output_dir "
    "overwrite_output_dir reduce_scatter remove_unused_columns round_robin_gradients run_name same_network "
    "stage3_gather_16bit_weights_on_model_save stage3_max_live_parameters steps_per_print sub_group_size "
    "transformer_impl use_cpu use_flash_attn use_legacy_prediction_loop use_mcore_models wall_clock_breakdown "
    "checkpoint_dir checkpointing_steps with_tracking zero3_init_flag zero3_save_16bit_model"
)
HARMLESS_KEYS = frozenset(_KEYS.split())
"""Further keys without effect on the result, without their sections."""
INITIAL_STATE = frozenset(["initial", "load", "pretrained", "resume"])
"""Words in the names of keys about the weights at the start."""
REMEDIES = (
    ({"epochs"}, Message("set the number of steps with --steps")),
    (
        {"initial_scale_power", "loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale"},
        Message("the loss scale adapts by itself here"),
    ),
    (INITIAL_STATE, Message("--resume-from FOLDER starts from such weights")),
    (
        {"data", "dataset", "datasets", "tokenizer", "vocab_file", "merge_file", "split"},
        Message("set data.source and data.tokenizer"),
    ),
    ({"rampup"}, Message("the batch is constant here: set workload.batch")),
    ({"decay", "lr", "warmup", "wd"}, Message("set workload.optimizer")),
)
"""Words in the names of keys that change the result, with what to do instead."""


def _words(key: str) -> set[str]:
    plain = key.lstrip("-").replace("-", "_").lower()
    return {*re.split(r"[_.]", plain), plain, plain.rpartition(".")[2]}


def is_harmless(key: str) -> bool:
    """Returns whether the result does not depend on `key`.

    >>> is_harmless("zero_optimization.reduce_bucket_size"), is_harmless("--rampup-batch-size"), is_harmless("--load")
    (True, False, False)
    """
    words = _words(key)
    if words & {*INITIAL_STATE, "fp8"}:
        return False
    return key.startswith(HARMLESS_SECTIONS) or bool(words & (HARMLESS_WORDS | HARMLESS_KEYS))


def lost_key(key: str) -> Message:
    """Returns the line of a key that has no equivalent, with the remedy."""
    words = _words(key)
    for names, remedy in REMEDIES:
        if words & names:
            return Message("{key}: no equivalent; {remedy}", key=key, remedy=remedy)
    return Message("{key}: no equivalent", key=key)
