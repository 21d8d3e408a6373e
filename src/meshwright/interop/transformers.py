"""transformers: `TrainingArguments` as a JSON file, `DistributedConfig` for tensor parallelism, and the launch line.

Sources, at version 5.23 of huggingface/transformers: src/transformers/training_args.py,
src/transformers/distributed/configuration_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.formats import torchrun_line, write_json
from meshwright.interop.hf_arguments import (
    FSDP1_STAGES,
    TRAINER_DEFAULTS,
    TRAINER_NUMERICS,
    adjust_schedule,
    hf_keys,
    set_autocast_reduction,
)
from meshwright.interop.settings import ALL_STATES, Settings
from meshwright.interop.system import ABSENT, ANY, Key, PlanSpaceLimit, System, read_only, write_only
from meshwright.spec.enums import Recompute


def _adjust(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets the ZeRO stage and the offload, which depend on several keys. Raises InputError if DeepSpeed shards the
    model, because these arguments do not state how."""
    if stated := keys.get("deepspeed", keys.get("--deepspeed")):
        raise InputError(
            Message(
                "deepspeed={file}: DeepSpeed shards the model as this file says: name {file} together with the "
                "arguments",
                file=stated,
            )
        )
    fsdp = keys.get("fsdp", keys.get("--fsdp"))
    zero = 0
    if fsdp and fsdp != "":
        words = str(fsdp).split() if isinstance(fsdp, str) else list(fsdp) if isinstance(fsdp, tuple) else []
        reshard = keys.get("fsdp_config.reshard_after_forward", True)
        zero = next((FSDP1_STAGES[word] for word in words if word in FSDP1_STAGES), 3 if reshard else 2)
        offloads = keys.get("fsdp_config.cpu_offload") or "offload" in words
        if offloads and zero == 3:
            settings["offload"] = tuple(map(str, ALL_STATES))
    shard = keys.get("fsdp_size", 1)
    if "tp_size" in keys or "fsdp_size" in keys:
        settings["dp_shard"] = shard
        zero = 3 if shard > 1 else 0
        if keys.get("fsdp_cpu_offload") and zero:
            settings["offload"] = tuple(map(str, ALL_STATES))
        if not zero:
            settings["dp"] = settings.pop("dp_replicate", 1)
    settings["zero"] = zero
    if not zero:
        set_autocast_reduction(settings)
    adjust_schedule(settings, keys)


def _fsdp(name: str, value: Any) -> Key:
    """Returns a row that is written with FSDP of the Trainer, and that is read in `_adjust`."""
    return write_only(
        name,
        "zero",
        lambda s: (value(s) if callable(value) else value) if s["zero"] and s["tp"] == 1 else ABSENT,
        also=("--fsdp",) if name == "fsdp" else (),
    )


def _native(name: str, setting: str) -> Key:
    """Returns the key of a field of DistributedConfig. An export writes it only with tensor parallelism."""
    return Key(
        name,
        setting,
        write=lambda s: s["dp_shard" if setting == "dp_shard" else setting] if s["tp"] > 1 else ABSENT,
        read=lambda v, k: {} if v is None or setting == "dp_shard" else {setting: v},
    )


NATIVE = (
    _native("tp_size", "tp"),
    _native("fsdp_size", "dp_shard"),
    _native("dp_replicate_size", "dp_replicate"),
    write_only("fsdp_cpu_offload", "offload", lambda s: True if s["tp"] > 1 and s["offload"] else ABSENT),
)
KEYS = (
    *(key._replace(also=(*key.also, *(f"--{name}" for name in (key.name, *key.also)))) for key in hf_keys("")),
    _fsdp("fsdp", True),
    _fsdp("fsdp_config.reshard_after_forward", lambda s: s["zero"] == 3),
    _fsdp("fsdp_config.cpu_offload", lambda s: bool(s["offload"])),
    read_only(
        "fsdp_config.activation_checkpointing", "recompute", lambda v, k: {"recompute": "full"} if v is True else {}
    ),
    *NATIVE,
)
DEGREES = dict.fromkeys(("micro_batch", "compile", "dp_shard"), ANY) | {"recompute": (Recompute.none, Recompute.full)}
OFFLOADS = {"zero": (3,), "offload": (ALL_STATES,)}
LIMITS = (
    PlanSpaceLimit("FSDP2 of the Trainer", {**DEGREES, "zero": (3, 2)}),
    PlanSpaceLimit("FSDP2 with offload to CPU", {**DEGREES, **OFFLOADS}),
    PlanSpaceLimit("DDP", {**DEGREES, "zero": (0,)}),
    PlanSpaceLimit(
        "DistributedConfig",
        {**DEGREES, "zero": (3, 0), "tp": (2, 4, 8), "dp_replicate": ANY},
        lambda plan: "" if plan.zero == 0 or plan.dp_shard > 1 else "fsdp_size 1",
    ),
)


def write(keys: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """Returns training_args.json, distributed_config.json if the plan has tensor parallelism, and the launch script."""
    native = {key.name for key in NATIVE}
    arguments = {name: value for name, value in keys.items() if name not in native and name not in SCRIPT_KEYS}
    script = {name: keys[name] for name in SCRIPT_KEYS if name in keys}
    distributed = {name: value for name, value in keys.items() if name in native}
    words = " ".join(f"--{name} {value}" for name, value in script.items())
    launch = torchrun_line(settings, f"train.py training_args.json {words}\n")
    files = {"training_args.json": write_json({"output_dir": "output", **arguments}), "launch.sh": launch}
    return files | ({"distributed_config.json": write_json(distributed)} if distributed else {})


SCRIPT_KEYS = ("model_name_or_path", "block_size")
"""Keys of the script, which are not fields of TrainingArguments."""

TRANSFORMERS = System(
    name="transformers",
    title="transformers",
    repository="huggingface/transformers",
    version="5.23",
    keys=KEYS,
    limits=LIMITS,
    write=write,
    framework="Hugging Face",
    workload={"precision": ("bf16", "fp16", "tf32", "fp32"), "optimizer": ("adamw",), "decayed": ("matrices",)},
    numerics=TRAINER_NUMERICS,
    open_arguments=True,
    defaults=TRAINER_DEFAULTS,
    adjust=_adjust,
)
