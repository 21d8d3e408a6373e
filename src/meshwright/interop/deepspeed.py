"""DeepSpeed: `ds_config.json` with the arguments of a Hugging Face script and the launcher line.

Sources, at version 0.19.8 of deepspeedai/DeepSpeed: deepspeed/runtime/config.py, deepspeed/runtime/constants.py,
deepspeed/runtime/zero/config.py, deepspeed/runtime/tensor_parallel/config.py, deepspeed/runtime/pipe/engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.formats import argument_words, split_options, write_json
from meshwright.interop.hf_arguments import READ_DECAYS, TRAINER_DEFAULTS, adjust_schedule, hf_keys, report_warmup
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
    remark,
    remark_value,
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
    stage = keys.get("zero_optimization.stage", 0)
    if isinstance(stage, int) and stage not in range(4):
        raise InputError(Message("zero_optimization.stage is 0 to 3, not {stage}", stage=stage))
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
    _set_optimizer(settings, keys)
    _set_schedule(settings, keys)


def _is_trainer(keys: Mapping[str, Any]) -> bool:
    """Returns whether the options are those of the Trainer of transformers."""
    return bool({"--per_device_train_batch_size", "--lr_scheduler_type", "--max_steps", "--bf16"} & keys.keys())


def _set_optimizer(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets the defaults of the section `optimizer`. Adam is AdamW unless adam_w_mode is false (engine.py:2490), and the
    defaults are those of deepspeed/ops/adam/fused_adam.py:76. Parameters without groups of a script decay all
    (engine.py:659, src/transformers/integrations/deepspeed.py:577). Without this section, the optimizer is that of the
    Trainer or of the script. "auto" is the value of the Trainer (`trainer_config_process` of
    src/transformers/integrations/deepspeed.py)."""
    if settings.get("optimizer") == "adam" and keys.get("optimizer.params.adam_w_mode", True):
        settings["optimizer"] = "adamw"
    if settings.get("optimizer") == "sgd" and settings.get("momentum", 0.0) > 0:
        settings["optimizer"] = "sgd-momentum"
    if "optimizer.type" in keys:
        filled = _is_trainer(keys) and keys.get("optimizer.params.lr") == "auto"
        settings.setdefault("lr", TRAINER_DEFAULTS["lr"] if filled else 1e-3)
        settings["decayed"] = "all"
        if keys.get("optimizer.params.torch_adam") and not {WEIGHT_DECAY, "--weight_decay"} & keys.keys():
            settings["weight_decay"] = 0.01 if settings.get("optimizer") == "adamw" else 0.0
    elif _is_trainer(keys):
        for name in ("optimizer", "lr", "decayed"):
            settings.setdefault(name, TRAINER_DEFAULTS[name])
    if not _is_trainer(keys):  # the defaults of the Trainer do not hold
        options = {} if "optimizer.type" in keys else SCRIPT_OPTIONS
        for name, option in {"seed": "--seed", **options}.items():
            if option not in keys:
                settings.pop(name, None)


def _set_schedule(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets the defaults of the section `scheduler` (deepspeed/runtime/lr_schedules.py:703 to 902), and reports what is
    lost: a logarithmic warmup, which is the default there, and other schedulers."""
    kind, start = keys.get("scheduler.type"), "scheduler.params."
    if kind is None:
        if _is_trainer(keys):
            adjust_schedule(settings, keys)
            given = READ_DECAYS.get(keys.get("--lr_scheduler_type", "linear"), "linear")
            settings |= {"decay": given, "final_lr": settings.get("final_lr", 0.0)}
            settings.setdefault("warmup", 0)
        else:
            settings |= {"decay": "constant", "warmup": 0}
            remark(settings, Message("no file has a scheduler: the job has a constant learning rate"))
        return
    if kind not in SCHEDULERS:
        remark_value(settings, "scheduler.type", kind)
        return
    settings["decay"] = SCHEDULERS[kind]
    if keys.get(start + "warmup_num_steps") is None:
        settings["warmup"] = 1000
    elif _is_trainer(keys):  # "auto" is the warmup of the Trainer
        report_warmup(settings, keys)
        settings.setdefault("warmup", TRAINER_DEFAULTS["warmup"])
    if kind == "WarmupDecayLR":
        settings["final_lr"] = 0.0
    elif kind == "WarmupCosineLR":
        settings.setdefault("final_lr", 1e-4)
    form = keys.get(start + "warmup_type", "log")
    if settings.get("warmup") and form != "linear":
        remark(
            settings,
            Message(
                "scheduler.params.warmup_type={form}: the warmup here is linear, its learning rates are lower",
                form=form,
            ),
        )
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        if keys.get(start + name) not in (None, "auto", 0):
            remark_value(settings, start + name, keys[start + name])


def _scheduler(settings: Settings) -> Any:
    """Returns the scheduler with the decay of the learning rate. DeepSpeed has no warmup-stable-decay, and it refuses a
    warmup of 0 steps: a constant rate without warmup needs no scheduler."""
    names = {ours: theirs for theirs, ours in SCHEDULERS.items()}
    name = names.get(settings["decay"], "WarmupLR")
    return ABSENT if name == "WarmupLR" and not settings["warmup"] else name


def _scheduled(value: Any) -> Any:
    """Returns how a parameter of the scheduler is written: not at all without a scheduler."""
    return lambda s: ABSENT if _scheduler(s) is ABSENT else value(s)


SCHEDULERS = {"WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "WarmupLR": "constant"}
WEIGHT_DECAY = "optimizer.params.weight_decay"
SCRIPT_OPTIONS = {"beta1": "--adam_beta1", "beta2": "--adam_beta2", "eps": "--adam_epsilon"} | {
    "weight_decay": "--weight_decay"
}


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
    Key(
        "zero_optimization.stage",
        "zero",
        {stage: stage for stage in range(4)},
        default=0,
        always=True,
        also=("--zero_stage", "--zero-stage"),
    ),
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
    Key(
        "optimizer.params.eps",
        "eps",
        default=1e-8,
        always=True,
        write=lambda s: s["eps"] if s["optimizer"] in ("adamw", "adam") else ABSENT,
    ),
    Key(WEIGHT_DECAY, "weight_decay", default=0.0, always=True),
    Key(
        "optimizer.params.adam_w_mode",
        "optimizer",
        write=lambda s: False if s["optimizer"] == "adam" else ABSENT,
        read=read_nothing,
    ),
    read_only("optimizer.params.momentum", "momentum"),
    read_only("optimizer.params.torch_adam", "optimizer", read_nothing),
    Key("scheduler.type", "decay", write=_scheduler, read=read_nothing),
    Key(
        "scheduler.params.warmup_num_steps",
        "warmup",
        write=_scheduled(lambda s: max(s["warmup"], 1)),
        read=lambda v, k: {"warmup": v} if isinstance(v, int) else {},
    ),
    write_only("scheduler.params.warmup_type", "warmup", _scheduled(lambda s: "linear")),
    Key(
        "scheduler.params.warmup_max_lr",
        "lr",
        write=_scheduled(lambda s: s["lr"] if _scheduler(s) != "WarmupCosineLR" else ABSENT),
        read=lambda v, k: {} if "optimizer.params.lr" in k else {"lr": v},
    ),
    read_only("scheduler.params.warmup_min_lr", "lr", read_nothing),
    read_only("scheduler.params.warmup_min_ratio", "lr", read_nothing),
    Key(
        "scheduler.params.total_num_steps",
        "steps",
        write=_scheduled(lambda s: ABSENT if _scheduler(s) == "WarmupLR" else s["steps"]),
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
    + tuple(
        key._replace(write=lambda settings: ABSENT) if key.setting in ("decay", "final_lr") else key
        for key in hf_keys("--")
    )
    + (read_only("--deepspeed", "engine", read_nothing, also=("--deepspeed_config",)),),
    limits=LIMITS,
    write=write,
    framework="Hugging Face",
    workload={
        "precision": ("bf16", "fp16", "fp32"),
        "optimizer": ("adamw", "adam", "sgd", "muon"),
        "decay": ("linear", "cosine", "constant"),
        "decayed": ("all",),
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
    defaults={"clip": 1.0},
    adjust=_adjust,
)
