"""NeMo Automodel: the YAML recipe, with its launch line.

Sources, at commit 36044ad3d of NVIDIA-NeMo/Automodel: nemo_automodel/components/distributed/config.py,
nemo_automodel/components/distributed/pipelining/config.py and the recipes in examples/llm_finetune.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.formats import torchrun_line, write_yaml
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
    write_only,
)
from meshwright.spec.enums import Recompute
from meshwright.spec.plan import Plan

MODEL = "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"
FSDP2_SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved": "interleaved1f1b"}
VIRTUAL_STAGES = {"interleaved": 2}
"""The number of stages on a rank that an import assumes for a schedule, 1 for all others."""


def _adjust(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets ZeRO, the data-parallel degrees and the batch of a pipeline, which depend on several keys."""
    strategy = keys.get("distributed.strategy", "fsdp2")
    if strategy == "megatron_fsdp":
        raise InputError(Message("distributed.strategy megatron_fsdp: only fsdp2 and ddp can be imported"))
    pp, reshard = settings.get("pp", 1), keys.get("distributed.reshard_after_forward")
    settings["zero"] = 0 if strategy == "ddp" else 2 if reshard is False or (reshard is None and pp > 1) else 3
    dp = keys.get("distributed.dp_size")
    if isinstance(dp, int) and "world" not in settings:
        settings["dp"] = dp
    local = keys.get("step_scheduler.local_batch_size", 1)
    settings["micro_batch"] = keys.get("distributed.pipeline.pp_microbatch_size", 1) if pp > 1 else local
    if pp > 1:
        settings["virtual_stages"] = VIRTUAL_STAGES.get(settings.get("schedule", ""), 1)
        if keys.get("distributed.pipeline.layers_per_stage"):
            settings.setdefault("remarks", []).append(
                Message(
                    "{key}={value}: the number of layers is in no file, {stages} stages a rank are assumed",
                    key="distributed.pipeline.layers_per_stage",
                    value=keys["distributed.pipeline.layers_per_stage"],
                    stages=settings["virtual_stages"],
                )
            )
    _set_schedule(settings, keys)


def _set_schedule(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets the defaults of the section lr_scheduler (nemo_automodel/components/optim/config.py, LRSchedulerConfig).
    Without the section the learning rate is constant."""
    if not any(name.startswith("lr_scheduler.") for name in keys):
        settings |= {"decay": "constant", "warmup": 0}
        return
    settings.setdefault("decay", "cosine")
    if "min_lr" not in settings:
        settings["final_lr"] = 0.01
    if "warmup" not in settings and "steps" in settings:
        settings["warmup"] = min(1000, settings["steps"] // 10)
    lr = settings.get("lr", 0.0)
    start = keys.get("lr_scheduler.init_lr", 0.1 * lr)
    if settings.get("warmup") and start:
        remark(
            settings,
            Message("lr_scheduler.init_lr={value}: the warmup here starts at lr / warmup", value=f"{start:.3g}"),
        )


def _strategy(name: str, value: Any) -> Key:
    return write_only(name, "zero", lambda s: value(s))


KEYS = (
    write_only("recipe", "engine", lambda s: "TrainFinetuneRecipeForNextTokenPrediction"),
    Key("step_scheduler.global_batch_size", "batch"),
    write_only(
        "step_scheduler.local_batch_size",
        "local_batch",
        lambda s: s["local_batch"] if s["pp"] > 1 else s["micro_batch"],
    ),
    Key("step_scheduler.max_steps", "steps"),
    write_only("rng._target_", "engine", lambda s: "nemo_automodel.components.training.rng.StatefulRNG"),
    Key("rng.seed", "seed"),
    write_only("model._target_", "engine", lambda s: MODEL),
    Key("model.pretrained_model_name_or_path", "model", also=("model.config.pretrained_model_name_or_path",)),
    Key(
        "model.torch_dtype",
        "precision",
        write=lambda s: "float32" if s["precision"] != "bf16-pure" else "bfloat16",
        read=lambda v, k: {"precision": "bf16-pure" if v in ("bf16", "bfloat16", "torch.bfloat16") else "bf16"},
    ),
    _strategy("distributed.strategy", lambda s: "fsdp2" if s["zero"] else "ddp"),
    write_only("distributed.dp_size", "dp", lambda s: s["dp"]),
    Key(
        "distributed.dp_replicate_size",
        "dp_replicate",
        write=lambda s: s["dp_replicate"] if s["zero"] and s["dp_replicate"] > 1 else ABSENT,
    ),
    Key("distributed.tp_size", "tp", default=1, always=True),
    Key("distributed.pp_size", "pp", default=1, always=True),
    Key("distributed.cp_size", "cp", default=1, always=True),
    Key("distributed.ep_size", "ep", default=1),
    Key("distributed.sequence_parallel", "sequence_parallel", {False: OneOf(ABSENT, False), True: True}),
    Key(
        "distributed.activation_checkpointing",
        "recompute",
        {"none": OneOf(ABSENT, False), "full": OneOf(True, "full"), "sac": "selective"},
    ),
    _strategy("distributed.reshard_after_forward", lambda s: s["zero"] == 3 if s["zero"] else ABSENT),
    Key("distributed.enable_compile", "compile", {False: OneOf(ABSENT, False), True: True}),
    Key(
        "distributed.pipeline.pp_schedule",
        "schedule",
        {ours: OneOf(theirs, ours, theirs.upper()) for ours, theirs in FSDP2_SCHEDULES.items()},
        default="1f1b",
    ),
    write_only(
        "distributed.pipeline.pp_microbatch_size", "micro_batch", lambda s: s["micro_batch"] if s["pp"] > 1 else ABSENT
    ),
    read_only("distributed.pipeline.layers_per_stage", "virtual_stages", read_nothing),
    Key(
        "packed_sequence.packed_sequence_size",
        "sequence",
        also=("dataset.seq_length", "dataset.seq_len"),
        read=lambda v, k: {"sequence": v} if v else {},
        write=lambda s: s["sequence"],
    ),
    Key(
        "optimizer._target_",
        "optimizer",
        {
            "adamw": OneOf("torch.optim.AdamW", "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"),
            "adam": "torch.optim.Adam",
            "sgd": "torch.optim.SGD",
        },
    ),
    Key("optimizer.lr", "lr"),
    Key(
        "optimizer.betas",
        "beta1",
        write=lambda s: (s["beta1"], s["beta2"]),
        read=lambda v, k: {"beta1": v[0], "beta2": v[1]} if isinstance(v, tuple) else {},
    ),
    Key("optimizer.eps", "eps"),
    Key("optimizer.weight_decay", "weight_decay"),
    Key(
        "lr_scheduler.lr_decay_style",
        "decay",
        {"cosine": "cosine", "linear": "linear", "constant": "constant", "warmup-stable-decay": "WSD"},
    ),
    Key("lr_scheduler.lr_warmup_steps", "warmup"),
    Key("lr_scheduler.min_lr", "min_lr"),
    read_only("lr_scheduler.init_lr", "lr", read_nothing),
    Key("clip_grad_norm.max_norm", "clip"),
)


def _fsdp_rule(plan: Plan) -> str:
    if plan.dp_shard * plan.cp == 1 and plan.pp * plan.tp == 1:
        return Message("FSDP2 needs at least two ranks in a shard group")
    return ""


DEGREES = dict.fromkeys(("micro_batch", "dp_shard"), ANY) | {
    "recompute": (Recompute.none, Recompute.full, Recompute.sac)
}
LIMITS = (
    PlanSpaceLimit(
        "FSDP2",
        {
            **DEGREES,
            **dict.fromkeys(("dp_replicate", "tp", "pp", "cp", "ep", "sequence_parallel", "compile"), ANY),
            "zero": (3, 2),
            "schedule": tuple(FSDP2_SCHEDULES),
            "virtual_stages": (1, 2),
        },
        _fsdp_rule,
    ),
    PlanSpaceLimit("DDP", {**DEGREES, "zero": (0,)}),
)


def write(keys: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """Returns recipe.yaml and the launch script."""
    launch = torchrun_line(settings, "nemo_automodel/recipes/llm/train_ft.py --config recipe.yaml\n")
    return {"recipe.yaml": write_yaml(keys), "launch.sh": launch}


AUTOMODEL = System(
    name="automodel",
    title="NeMo Automodel",
    repository="NVIDIA-NeMo/Automodel",
    version="0.7",
    keys=KEYS,
    limits=LIMITS,
    write=write,
    framework="plain",
    workload={
        "precision": ("bf16", "bf16-pure"),
        "reduce": ("fp32",),
        "optimizer": ("adamw", "adam", "sgd"),
        "decayed": ("all",),
    },
    numerics=(
        NumericsNote(
            Message("the loss is the sum over labels divided by the number of labels of the whole batch, as here"),
            "nemo_automodel/recipes/llm/train_ft.py:1154",
        ),
        NumericsNote(
            Message("FSDP2 reduces gradients in float32; with model.torch_dtype bfloat16, weights and states are bf16"),
            "nemo_automodel/components/distributed/config.py:258",
        ),
    ),
    defaults={"clip": 1.0, "decayed": "all", "optimizer": "adamw", "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    | {"weight_decay": 0.01},
    adjust=_adjust,
)
