"""FSDP2: a short training script with `fully_shard`. Its settings are constants at the top, which are read back.

Source: torch/distributed/fsdp/_fully_shard of pytorch/pytorch, version 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from meshwright.core.messages import Message
from meshwright.interop.formats import torchrun_line
from meshwright.interop.settings import ALL_STATES, Settings
from meshwright.interop.system import ANY, Key, NumericsNote, PlanSpaceLimit, System, remark
from meshwright.spec.enums import Recompute

TORCH_DEFAULTS: Settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01} | {
    "clip": None,
    "warmup": 0,
}
BOOL = {False: False, True: True}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
KEYS = (
    Key("MODEL", "model"),
    Key("DP_REPLICATE", "dp_replicate"),
    Key("DP_SHARD", "dp_shard"),
    Key("RESHARD_AFTER_FORWARD", "zero", {3: True, 2: False}, default=True, always=True),
    Key("CPU_OFFLOAD", "offload", {(): False, tuple(map(str, ALL_STATES)): True}),
    Key("RECOMPUTE", "recompute", {"none": False, "full": True}),
    Key("COMPILE", "compile", BOOL),
    Key("PARAM_DTYPE", "precision", DTYPES),
    Key("REDUCE_DTYPE", "reduce", DTYPES),
    Key("MICRO_BATCH", "micro_batch"),
    Key("ACCUMULATION", "accumulation"),
    Key("SEQUENCE", "sequence"),
    Key("STEPS", "steps"),
    Key("WARMUP", "warmup"),
    Key("LR", "lr"),
    Key("MIN_LR", "min_lr"),
    Key("BETAS", "beta1", write=lambda s: (s["beta1"], s["beta2"]), read=lambda v, k: {"beta1": v[0], "beta2": v[1]}),
    Key("EPS", "eps"),
    Key("WEIGHT_DECAY", "weight_decay"),
    Key("DECAY", "decayed", {"matrices": "matrices", "all": "all"}, default="all", always=True),
    Key("CLIP", "clip", write=lambda s: s["clip"], read=lambda v, k: {"clip": v}),
    Key("SEED", "seed"),
)
DEGREES = dict.fromkeys(("dp_replicate", "dp_shard", "micro_batch", "compile"), ANY) | {
    "recompute": (Recompute.none, Recompute.full)
}
LIMITS = (
    PlanSpaceLimit("fully_shard", {**DEGREES, "zero": (3, 2)}),
    PlanSpaceLimit("fully_shard with CPUOffloadPolicy", {**DEGREES, "zero": (3,), "offload": (ALL_STATES,)}),
)


def write(keys: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """Returns the script and the launch line."""
    body = files("meshwright.interop").joinpath("fsdp2_script.txt").read_text(encoding="utf-8")
    constants = "\n".join(f"{name} = {value!r}" for name, value in keys.items())
    return {
        "train.py": body.replace("# CONSTANTS", constants),
        "launch.sh": torchrun_line(settings, "train.py\n"),
    }


def _adjust(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets what a script has without constants: the defaults of torch.optim.AdamW (torch/optim/adamw.py:37), a constant
    learning rate and no clipping."""
    settings["optimizer"] = "adamw"
    for name, value in TORCH_DEFAULTS.items():
        settings.setdefault(name, value)
    settings["decay"] = "cosine" if "MIN_LR" in keys else "constant"
    if "MIN_LR" not in keys:
        remark(settings, Message("no file has a scheduler: the job has a constant learning rate"))


FSDP2 = System(
    name="fsdp2",
    title="FSDP2",
    repository="pytorch/pytorch",
    version="torch 2.13",
    keys=KEYS,
    limits=LIMITS,
    write=write,
    framework="plain",
    workload={"precision": tuple(DTYPES), "optimizer": ("adamw",), "decay": ("cosine",)},
    numerics=(
        NumericsNote(
            Message(
                "fully_shard averages gradients over the ranks; the script divides the loss by the number of labels of "
                "the whole batch and multiplies it by the number of ranks, so that the loss is the mean over all labels"
            ),
            "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:812",
        ),
        NumericsNote(
            Message("weights and states are float32; gradients are reduced in REDUCE_DTYPE"),
            "torch/distributed/fsdp/_fully_shard/_fsdp_api.py:33",
        ),
    ),
    adjust=_adjust,
)
