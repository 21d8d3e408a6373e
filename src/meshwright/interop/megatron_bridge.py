"""Megatron-Bridge (NeMo): YAML overrides of its `ConfigContainer`, with the launch line of `run_recipe.py`.

The table is that of Megatron-LM under other names, because Megatron-Bridge configures Megatron-Core. Source, at commit
067f987df of NVIDIA-NeMo/Megatron-Bridge: src/megatron/bridge/training/config.py, mixed_precision.py and
scripts/training/run_recipe.py. Keys of NeMo 1 (`model.micro_batch_size`, `trainer.devices`) are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.messages import Message
from meshwright.interop.formats import torchrun_line, write_yaml
from meshwright.interop.megatron import MEGATRON
from meshwright.interop.settings import Settings
from meshwright.interop.system import ABSENT, Key, NumericsNote, OneOf, read_only, readings, write_only

NAMES = {
    "--tensor-model-parallel-size": "model.tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "model.pipeline_model_parallel_size",
    "--pipeline-model-parallel-layout": "model.pipeline_model_parallel_layout",
    "--context-parallel-size": "model.context_parallel_size",
    "--cp-comm-type": "model.cp_comm_type",
    "--hierarchical-context-parallel-sizes": "model.hierarchical_context_parallel_sizes",
    "--expert-model-parallel-size": "model.expert_model_parallel_size",
    "--expert-tensor-parallel-size": "model.expert_tensor_parallel_size",
    "--sequence-parallel": "model.sequence_parallel",
    "--use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "--use-megatron-fsdp": "dist.use_megatron_fsdp",
    "--data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "--num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "--overlap-grad-reduce": "ddp.overlap_grad_reduce",
    "--overlap-param-gather": "ddp.overlap_param_gather",
    "--use-tp-pp-dp-mapping": "dist.use_tp_pp_dp_mapping",
    "--recompute-granularity": "model.recompute_granularity",
    "--recompute-modules": "model.recompute_modules",
    "--recompute-method": "model.recompute_method",
    "--recompute-num-layers": "model.recompute_num_layers",
    "--optimizer-cpu-offload": "optimizer.optimizer_cpu_offload",
    "--optimizer-offload-fraction": "optimizer.optimizer_offload_fraction",
    "--use-precision-aware-optimizer": "optimizer.use_precision_aware_optimizer",
    "--micro-batch-size": "train.micro_batch_size",
    "--global-batch-size": "train.global_batch_size",
    "--seq-length": "dataset.seq_length",
    "--train-iters": "train.train_iters",
    "--lr": "optimizer.lr",
    "--min-lr": "optimizer.min_lr",
    "--lr-decay-style": "scheduler.lr_decay_style",
    "--lr-warmup-iters": "scheduler.lr_warmup_iters",
    "--lr-wsd-decay-style": "scheduler.lr_wsd_decay_style",
    "--lr-wsd-decay-iters": "scheduler.lr_wsd_decay_iters",
    "--optimizer": "optimizer.optimizer",
    "--adam-beta1": "optimizer.adam_beta1",
    "--adam-beta2": "optimizer.adam_beta2",
    "--adam-eps": "optimizer.adam_eps",
    "--weight-decay": "optimizer.weight_decay",
    "--clip-grad": "optimizer.clip_grad",
    "--seed": "rng.seed",
}
"""The options of Megatron-LM, with the keys of Megatron-Bridge."""
OTHER_SPELLINGS = {
    "train.micro_batch_size": ("model.micro_batch_size",),
    "train.global_batch_size": ("model.global_batch_size",),
    "dataset.seq_length": ("model.seq_length", "model.encoder_seq_length"),
    "train.train_iters": ("trainer.max_steps",),
    "optimizer.lr": ("optimizer.finetune_lr", "model.optim.lr"),
}
NO_DEFAULT = (
    *("--attention-dropout", "--adam-beta1", "--adam-beta2", "--adam-eps", "--weight-decay", "--seed"),
    *("--lr-decay-style", "--lr-warmup-iters", "--min-lr"),
)
"""Options whose defaults belong to Megatron-LM: the recipe determines the value if the key is absent."""


def _options(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys as options of Megatron-LM. A key that is false or null is an absent option."""
    return {
        option: keys[name]
        for option, name in NAMES.items()
        if name in keys and keys[name] is not False and keys[name] is not None
    }


def _renamed(key: Key) -> Key:
    """Returns a row of Megatron-LM under its name in Megatron-Bridge."""
    name, read = NAMES[key.name], key.read
    values = key.values and {
        ours: OneOf(*readings(theirs), False, None) if any(each is ABSENT for each in readings(theirs)) else theirs
        for ours, theirs in key.values.items()
    }
    return key._replace(
        name=name,
        values=values,
        also=OTHER_SPELLINGS.get(name, ()),
        default=None if key.name in NO_DEFAULT else key.default,
        read=(lambda value, keys: {} if value in (False, None) else read(value, _options(keys)))
        if read is not None
        else None,
    )


def _adjust(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets what depends on several keys, as in Megatron-LM."""
    stages = keys.get("model.virtual_pipeline_model_parallel_size")
    if stages and stages > 1:
        settings |= {"virtual_stages": stages, "schedule": "interleaved"}
    if settings.get("recompute") == "sac" and "model.recompute_modules" not in keys:
        settings["recompute"] = "attn"


PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": OneOf(
        "bf16_with_fp8_current_scaling_mixed",
        "bf16_with_fp8_delayed_scaling_mixed",
        "bf16_with_fp8_subchannel_scaling_mixed",
        "bf16_with_mxfp8_mixed",
    ),
}
KEYS = (
    *(_renamed(key) for key in MEGATRON.keys if key.name in NAMES),
    write_only(
        "model.virtual_pipeline_model_parallel_size",
        "virtual_stages",
        lambda s: s["virtual_stages"] if s["virtual_stages"] > 1 else ABSENT,
    ),
    Key("mixed_precision", "precision", PRECISIONS, also=("precision",)),
    Key("ddp.grad_reduce_in_fp32", "reduce", {"bf16": OneOf(False), "fp32": True, "fp16": False}),
    Key("model.seq_length", "sequence", write=lambda s: s["sequence"]),
    read_only("trainer.devices", "devices_per_node"),
    read_only("trainer.num_nodes", "nodes"),
)


def write(keys: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """Returns overrides.yaml and the launch script."""
    model = (settings.get("model") or "MODEL").replace("-", "_")
    script = f"scripts/training/run_recipe.py --recipe {model}_pretrain_config --config-file overrides.yaml\n"
    return {"overrides.yaml": write_yaml(keys), "launch.sh": torchrun_line(settings, script)}


MEGATRON_BRIDGE = MEGATRON._replace(
    name="megatron_bridge",
    title="Megatron-Bridge",
    repository="NVIDIA-NeMo/Megatron-Bridge",
    version="0.6",
    keys=KEYS,
    write=write,
    needs_sizes=False,
    workload={"precision": ("bf16", "fp8", "fp16"), "optimizer": ("adamw", "sgd-momentum", "muon")}
    | {"decayed": ("matrices",)},
    numerics=(
        MEGATRON.numerics[0]._replace(repository=MEGATRON.repository),
        NumericsNote(
            Message(
                "the preset of mixed_precision replaces ddp.grad_reduce_in_fp32: bf16_mixed accumulates and reduces "
                "gradients in float32, fp16_mixed in fp16"
            ),
            "src/megatron/bridge/training/mixed_precision.py:138",
        ),
    ),
    renamed={"model.activations_checkpoint_granularity": "model.recompute_granularity"},
    defaults={"decayed": "matrices"},
    adjust=_adjust,
)
"""Its profile in the planner is that of Megatron-Core."""
