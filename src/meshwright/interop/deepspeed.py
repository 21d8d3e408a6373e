"""DeepSpeed: `ds_config.json` with the arguments of a Hugging Face script and the launcher line.

Sources, at version 0.19.8 of deepspeedai/DeepSpeed: deepspeed/runtime/config.py, deepspeed/runtime/constants.py,
deepspeed/runtime/zero/config.py, deepspeed/runtime/tensor_parallel/config.py, deepspeed/runtime/pipe/engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.messages import Message
from meshwright.interop.formats import argument_words, split_options, write_json
from meshwright.interop.hf_arguments import hf_keys
from meshwright.interop.settings import Settings
from meshwright.interop.system import (
    ABSENT,
    ANY,
    Key,
    NumericsNote,
    OneOf,
    PlanSpaceLimit,
    System,
    read_nothing,
    read_only,
    write_only,
)
from meshwright.spec.enums import ContextParallelMethod, Offload, Recompute

OFFLOADED_STATES = {1: ("optimizer",), 2: ("optimizer", "gradients"), 3: ("optimizer", "gradients")}
"""What `offload_optimizer` offloads at each ZeRO stage: from ZeRO 2 on, gradients go to the host with the states."""


def _offload_device(settings: Settings, part: str) -> Any:
    """Returns the device of `offload_optimizer` (part optimizer) or `offload_param` (part parameters)."""
    for what in settings["offload"]:
        if what.removesuffix("-disk") == part:
            return "nvme" if what.endswith("-disk") else "cpu"
    return ABSENT


def _adjust(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets the offloads, whose meaning depends on the ZeRO stage, and the learning rate of the scheduler."""
    zero, found = settings.get("zero", 0), []
    disk = {"cpu": "", "nvme": "-disk"}
    states = keys.get("zero_optimization.offload_optimizer.device", "none")
    if keys.get("zero_optimization.cpu_offload") is True or (keys.get("--offload") is True and zero):
        states = "cpu"
    weights = keys.get("zero_optimization.offload_param.device", "none")
    if states in disk and zero:
        found += [f"optimizer{disk[states]}", *OFFLOADED_STATES[zero][1:]]
    if weights in disk and zero == 3:
        found += [f"parameters{disk[weights]}"]
    settings["offload"] = tuple(found)
    ratio = keys.get("zero_optimization.offload_optimizer.ratio")
    if isinstance(ratio, float) and states in disk and zero == 3:
        settings["offload_share"] = round(ratio * 100)
    if "zero_optimization.mics_shard_size" in keys and keys["zero_optimization.mics_shard_size"] > 0:
        settings["dp_shard"] = keys["zero_optimization.mics_shard_size"]
    if settings.get("cp", 1) > 1:
        settings["context"] = "ulysses"
    if settings.get("decay") == "constant":
        settings.pop("min_lr", None)


def _scheduler(settings: Settings) -> str:
    """Returns the scheduler with the decay of the learning rate. DeepSpeed has no warmup-stable-decay."""
    return {"linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}.get(settings["decay"], "WarmupLR")


DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
NO_PRECISION = dict.fromkeys(("fp32", "bf16", "fp16", "tf32"), OneOf(ABSENT, False))
JSON_KEYS = (
    Key("train_batch_size", "batch"),
    Key("train_micro_batch_size_per_gpu", "micro_batch"),
    Key("gradient_accumulation_steps", "accumulation"),
    Key("gradient_clipping", "clip", write=lambda s: s["clip"] or 0.0, read=lambda v, k: {"clip": v or None}),
    Key("bf16.enabled", "precision", NO_PRECISION | {"bf16": True}, also=("bfloat16.enabled",)),
    Key("fp16.enabled", "precision", NO_PRECISION | {"fp16": True}),
    Key("communication_data_type", "reduce", DTYPES),
    Key("data_types.grad_accum_dtype", "reduce", DTYPES),
    Key("zero_optimization.stage", "zero", default=0, always=True, also=("--zero_stage", "--zero-stage")),
    write_only("zero_optimization.offload_optimizer.device", "offload", lambda s: _offload_device(s, "optimizer")),
    write_only(
        "zero_optimization.offload_optimizer.ratio",
        "offload_share",
        lambda s: s["offload_share"] / 100 if s["offload_share"] < 100 else ABSENT,
    ),
    write_only("zero_optimization.offload_param.device", "offload", lambda s: _offload_device(s, "parameters")),
    read_only("zero_optimization.cpu_offload", "offload", read_nothing),
    read_only("--offload", "offload", read_nothing),
    write_only(
        "zero_optimization.mics_shard_size",
        "dp_shard",
        lambda s: s["dp_shard"] if s["zero"] == 3 and s["dp_replicate"] > 1 else ABSENT,
    ),
    Key("zero_optimization.overlap_comm", "zero", {0: ABSENT} | dict.fromkeys((1, 2, 3), OneOf(True, False, ABSENT))),
    Key("tensor_parallel.autotp_size", "tp", default=1),
    Key("sequence_parallel_size", "cp", default=1),
    Key("pipeline.stages", "pp", default=1),
    Key(
        "pipeline.activation_checkpoint_interval",
        "recompute",
        write=lambda s: 1 if s["pp"] > 1 and s["recompute"] == "full" else ABSENT,
        read=lambda v, k: {"recompute": "full"} if v else {},
    ),
    Key(
        "optimizer.type",
        "optimizer",
        {"adamw": OneOf("AdamW", "FusedAdam", "CPUAdam"), "adam": "Adam", "sgd": "SGD", "muon": "Muon"},
    ),
    Key("optimizer.params.lr", "lr"),
    Key(
        "optimizer.params.betas",
        "beta1",
        write=lambda s: (s["beta1"], s["beta2"]) if s["optimizer"] in ("adamw", "adam") else ABSENT,
        read=lambda v, k: {"beta1": v[0], "beta2": v[1]} if isinstance(v, tuple) else {},
    ),
    Key("optimizer.params.eps", "eps", write=lambda s: s["eps"] if s["optimizer"] in ("adamw", "adam") else ABSENT),
    Key("optimizer.params.weight_decay", "weight_decay"),
    Key(
        "scheduler.type",
        "decay",
        write=_scheduler,
        read=lambda v, k: {"decay": {"WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}.get(v, "constant")},
    ),
    Key("scheduler.params.warmup_num_steps", "warmup"),
    Key(
        "scheduler.params.warmup_max_lr",
        "lr",
        write=lambda s: s["lr"] if _scheduler(s) != "WarmupCosineLR" else ABSENT,
        read=lambda v, k: {} if "optimizer.params.lr" in k else {"lr": v},
    ),
    read_only("scheduler.params.warmup_min_lr", "lr", read_nothing),
    Key(
        "scheduler.params.total_num_steps",
        "steps",
        write=lambda s: ABSENT if _scheduler(s) == "WarmupLR" else s["steps"],
    ),
    Key(
        "scheduler.params.cos_min_ratio",
        "final_lr",
        write=lambda s: s["final_lr"] if s["decay"] == "cosine" else ABSENT,
    ),
)

DEGREES = dict.fromkeys(("micro_batch", "dp_shard", "compile"), ANY) | {"recompute": (Recompute.none, Recompute.full)}
STATES = ((), (Offload.optimizer,), (Offload.optimizer_disk,))
STATES_GRADIENTS = ((), (Offload.optimizer, Offload.gradients), (Offload.optimizer_disk, Offload.gradients))
WEIGHTS = ((), (Offload.parameters,), (Offload.parameters_disk,))
CONTEXT = {"cp": ANY, "context": (ContextParallelMethod.ulysses,)}
LIMITS = (
    PlanSpaceLimit("ZeRO 0", {**DEGREES, "zero": (0,), "tp": ANY}),
    PlanSpaceLimit("ZeRO 1", {**DEGREES, "zero": (1,), "tp": ANY, "offload": STATES}),
    PlanSpaceLimit("ZeRO 2", {**DEGREES, "zero": (2,), "tp": ANY, "offload": STATES_GRADIENTS}),
    PlanSpaceLimit(
        "ZeRO 3",
        {
            **DEGREES,
            "zero": (3,),
            "dp_replicate": ANY,
            "offload": tuple(
                tuple(sorted((*states, *weights), key=list(Offload).index))
                for states in STATES_GRADIENTS
                for weights in WEIGHTS
            ),
            "offload_share": ANY,
        },
        lambda plan: (
            Message("MiCS (dp_replicate above 1) has no offload") if plan.dp_replicate > 1 and plan.offload else ""
        ),
    ),
    PlanSpaceLimit("Ulysses with ZeRO", {**DEGREES, **CONTEXT, "zero": (3, 2, 1)}),
    PlanSpaceLimit("the pipeline", {**DEGREES, "pp": ANY, "zero": (1, 0)}),
)


def write(keys: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """Returns ds_config.json and the launch script."""
    config, arguments = split_options(keys)
    lines = [
        f"deepspeed --num_nodes {settings['nodes']} --num_gpus {settings['devices_per_node']} train.py \\",
        "    --deepspeed ds_config.json \\",
        *(f"    {word} \\" for word in argument_words(arguments)),
    ]
    return {"ds_config.json": write_json(config), "launch.sh": "\n".join(lines).removesuffix(" \\") + "\n"}


DEEPSPEED = System(
    name="deepspeed",
    title="DeepSpeed",
    repository="deepspeedai/DeepSpeed",
    version="0.19",
    keys=JSON_KEYS
    + tuple(key for key in hf_keys("--") if key.setting not in ("decay", "final_lr"))
    + (read_only("--deepspeed", "engine", read_nothing, also=("--deepspeed_config",)),),
    limits=LIMITS,
    write=write,
    framework="Hugging Face",
    workload={
        "precision": ("bf16", "fp16", "fp32"),
        "optimizer": ("adamw", "adam", "sgd", "muon"),
        "decay": ("linear", "cosine", "constant"),
    },
    numerics=(
        NumericsNote(
            Message(
                "the loss that the script returns is divided by gradient_accumulation_steps, and gradients are "
                "averaged over replicas: a mean of means, which differs from the mean over all labels if micro-batches "
                "have unequal numbers of labels"
            ),
            "deepspeed/runtime/engine.py:3413",
        ),
        NumericsNote(
            Message(
                "gradients are accumulated and reduced in the dtype of the model unless data_types.grad_accum_dtype "
                "and communication_data_type are set"
            ),
            "deepspeed/runtime/engine.py:1719",
        ),
        NumericsNote(
            Message("weight decay applies to all parameters unless the script passes parameter groups"),
            "deepspeed/runtime/engine.py:2476",
        ),
    ),
    renamed={"zero_allow_untested_optimizer_legacy": "zero_allow_untested_optimizer"},
    open_arguments=True,
    adjust=_adjust,
)
