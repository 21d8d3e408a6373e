"""accelerate: the YAML file of `accelerate launch` (FSDP version 2, ND-parallel), with the arguments of a Hugging Face
script.

Sources, at version 1.15 of huggingface/accelerate: src/accelerate/commands/config/config_args.py (keys),
src/accelerate/parallelism_config.py (which degrees go together), src/accelerate/utils/dataclasses.py (FSDP).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.formats import argument_words, split_options, write_yaml
from meshwright.interop.hf_arguments import (
    FSDP1_STAGES,
    TRAINER_DEFAULTS,
    TRAINER_NUMERICS,
    adjust_schedule,
    hf_keys,
    set_autocast_reduction,
)
from meshwright.interop.settings import ALL_STATES, Settings
from meshwright.interop.system import ABSENT, ANY, Key, PlanSpaceLimit, System, read_nothing, read_only, write_only
from meshwright.spec.enums import Recompute
from meshwright.spec.plan import Plan


def _adjust(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets the ZeRO stage and the offload, which depend on several keys."""
    kind = keys.get("distributed_type")
    if kind == "DEEPSPEED":
        raise InputError(
            Message(
                "distributed_type DEEPSPEED: give the JSON file of DeepSpeed (deepspeed_config_file) with --from "
                "deepspeed; the section deepspeed_config of accelerate is not read, so write it as such a file"
            )
        )
    if kind == "MEGATRON_LM":
        raise InputError(Message("distributed_type MEGATRON_LM: give the script of Megatron-LM instead of this file"))
    for name in ("bf16", "fp16"):
        if keys.get(f"--{name}") is True:  # the Trainer replaces mixed_precision (src/transformers/training_args.py)
            settings["precision"] = name
    zero = 0
    if kind == "FSDP":
        strategy = str(keys.get("fsdp_config.fsdp_sharding_strategy", "")).lower()
        reshard = keys.get("fsdp_config.fsdp_reshard_after_forward", True)
        zero = FSDP1_STAGES.get(strategy, 3) if strategy else 3 if reshard else 2
        if strategy.startswith("hybrid"):
            settings["dp_replicate"] = settings.get("nodes", 1)
    settings["zero"] = zero
    if not zero:
        set_autocast_reduction(settings)
    if keys.get("fsdp_config.fsdp_offload_params") and zero == 3:
        settings["offload"] = tuple(map(str, ALL_STATES))
    if keys.get("fsdp_config.fsdp_activation_checkpointing") and zero:
        settings["recompute"] = "full"
    if keys.get("parallelism_config.parallelism_config_dp_shard_size", 0) > 1 or settings.get("cp", 1) > 1:
        settings["dp_shard"] = keys.get("parallelism_config.parallelism_config_dp_shard_size", 1)
    elif "dp_replicate" in settings and not zero:
        del settings["dp_replicate"]
    adjust_schedule(settings, keys)
    _set_defaults(settings, keys)


def _set_defaults(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets the defaults of the script. Scripts without the Trainer have other option names and do not clip
    (examples/pytorch/language-modeling/run_clm_no_trainer.py of huggingface/transformers); which of their parameters
    decay depends on the names in the model. Without options, the script has all of these settings."""
    defaults = TRAINER_DEFAULTS
    if {"--max_train_steps", "--num_warmup_steps"} & keys.keys():
        defaults = {name: value for name, value in defaults.items() if name != "decayed"} | {"clip": None}
    elif not any(name.startswith("--") for name in keys):
        for name in ("beta1", "beta2", "eps", "weight_decay", "seed"):
            settings.pop(name, None)
        return
    for name, value in defaults.items():
        settings.setdefault(name, value)


def _fsdp(name: str, value: Any, at_stages: tuple[int, ...] = (2, 3)) -> Key:
    """Returns a row that writes a fixed value with FSDP, and that is read in `_adjust`."""
    return write_only(
        f"fsdp_config.{name}",
        "zero",
        lambda s: (value(s) if callable(value) else value) if s["zero"] in at_stages else ABSENT,
    )


def _degree(name: str, setting: str) -> Key:
    return Key(
        f"parallelism_config.parallelism_config_{name}_size",
        setting,
        write=lambda s: s[setting] if s["zero"] else ABSENT,
        read=lambda v, k: {setting: v} if setting != "dp_shard" else {},
    )


KEYS = (
    write_only("compute_environment", "engine", lambda s: "LOCAL_MACHINE"),
    write_only("distributed_type", "zero", lambda s: "FSDP" if s["zero"] else "MULTI_GPU"),
    Key("num_machines", "nodes"),
    Key("num_processes", "world"),
    Key("mixed_precision", "precision", {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}, default="no"),
    _fsdp("fsdp_version", 2),
    _fsdp("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    _fsdp("fsdp_state_dict_type", "SHARDED_STATE_DICT"),
    _fsdp("fsdp_reshard_after_forward", lambda s: s["zero"] == 3),
    _fsdp("fsdp_offload_params", lambda s: bool(s["offload"])),
    _fsdp("fsdp_activation_checkpointing", lambda s: s["recompute"] == "full"),
    read_only("fsdp_config.fsdp_sharding_strategy", "zero", read_nothing),
    _degree("dp_replicate", "dp_replicate"),
    _degree("dp_shard", "dp_shard"),
    _degree("tp", "tp"),
    _degree("cp", "cp"),
    Key("dynamo_config.dynamo_backend", "compile", {False: ABSENT, True: "INDUCTOR"}),
    Key(
        "--activation_checkpointing",
        "recompute",
        also=("--gradient_checkpointing",),
        write=lambda s: True if s["recompute"] == "full" and not s["zero"] else ABSENT,
        read=lambda v, k: {"recompute": "full"} if v else {},
    ),
    read_only("--bf16", "precision", read_nothing),
    read_only("--fp16", "precision", read_nothing),
    *(key for key in hf_keys("--") if key.setting not in ("precision", "recompute", "compile")),
)
DEGREES = dict.fromkeys(("micro_batch", "compile", "dp_shard"), ANY) | {"recompute": (Recompute.none, Recompute.full)}


def _fsdp_rule(plan: Plan) -> str:
    """Returns why accelerate refuses the degrees of an FSDP plan."""
    if plan.dp_shard * plan.cp == 1:
        return Message("FSDP2 needs at least two ranks in a shard group")
    if plan.dp_replicate > 1 and plan.dp_shard == 1:
        return Message("dp_replicate above 1 needs dp_shard above 1")
    return ""


FSDP = {**DEGREES, "zero": (3, 2), "dp_replicate": ANY, "tp": ANY, "cp": ANY}
LIMITS = (
    PlanSpaceLimit("FSDP2", FSDP, _fsdp_rule),
    PlanSpaceLimit("FSDP2 with offload to CPU", {**FSDP, "zero": (3,), "offload": (ALL_STATES,)}, _fsdp_rule),
    PlanSpaceLimit("DDP", {**DEGREES, "zero": (0,)}),
)


def write(keys: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """Returns accelerate.yaml and the launch script."""
    config, arguments = split_options(keys)
    lines = [
        "accelerate launch --config_file accelerate.yaml train.py",
        *(f"    {word}" for word in argument_words(arguments)),
    ]
    return {"accelerate.yaml": write_yaml(config), "launch.sh": " \\\n".join(lines) + "\n"}


ACCELERATE = System(
    name="accelerate",
    title="accelerate",
    repository="huggingface/accelerate",
    version="1.15",
    keys=KEYS,
    limits=LIMITS,
    write=write,
    framework="Hugging Face",
    workload={"precision": ("bf16", "fp16", "fp8", "fp32"), "optimizer": ("adamw",), "decayed": ("matrices",)},
    numerics=TRAINER_NUMERICS,
    open_arguments=True,
    adjust=_adjust,
)
