"""Defines the common form of a training configuration: one flat mapping of settings by name. `settings_of` makes it of
a plan, a workload and the sizes of a model; `plan_of`, `workload_of` and `sizes_of` are the inverse.

The mapping has plain values only. Derived settings, such as the number of accumulation steps, are computed here once
for all systems, because systems differ in which of these numbers they write:

- nodes, devices_per_node, world: machines, devices of a machine, all devices;
- dp, dp_replicate, dp_shard: replicas, shard groups, ranks of a shard group (at ZeRO 0: dp and 1);
- micro_batch, accumulation, local_batch, batch: sequences of a micro-batch, micro-batches of a replica per step,
  sequences of a replica per step, sequences of all replicas per step;
- min_lr: the last learning rate;
- untied: whether embedding and head are separate weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from meshwright.core.codec import validate_data
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.planner.inputs.job import MAX_DEFAULT_SEQUENCE
from meshwright.spec.enums import Offload
from meshwright.spec.plan import Plan
from meshwright.spec.precision import recipe
from meshwright.spec.workload import OPTIMIZERS_BY_FIELD, OptimizerConfig, Workload

Settings = dict[str, Any]

PLAN_FIELDS = (
    "dp_replicate",
    "dp_shard",
    "tp",
    "sequence_parallel",
    "pp",
    "cp",
    "ep",
    "zero",
    "micro_batch",
    "recompute",
    "recompute_layers",
    "recompute_rest",
    "offload",
    "offload_share",
    "weights_share",
    "offload_layers",
    "schedule",
    "virtual_stages",
    "layers_per_stage",
    "context",
    "ulysses",
    "axes",
    "compile",
)
"""The fields of a plan that systems can express. No system expresses the others, except the bucket size, which only
affects speed."""
WORKLOAD_FIELDS = ("sequence", "batch", "steps", "precision", "reduce", "seed", "expert_capacity", "expert_bias_rate")
OPTIMIZER_FIELDS = {"optimizer": "name", "decay": "schedule", "decayed": "decay"} | {
    name: name for name in ("lr", "eps", "weight_decay", "momentum", "warmup", "clip", "cooldown", "final_lr")
}
"""Settings of the optimizer, with the fields of `OptimizerConfig`."""
NATIVE_REDUCE = {"fp8": "bf16", "bf16-pure": "bf16", "tf32": "fp32"} | {
    name: name for name in ("bf16", "fp16", "fp32", "fp64")
}
"""The dtype of gradients that other systems have with a precision unless their settings say otherwise: that of the
compute dtype. Meshwright's own default is `Recipe.gradient_size`."""
ALL_STATES = (Offload.optimizer, Offload.gradients, Offload.parameters)
"""What the CPU offload of FSDP2 moves to the host."""
SIZE_FIELDS = {"model_layers": "layers", "model_sequence": "seq"} | {
    name: name
    for name in (
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "mlp",
        "norm",
        "pos",
        "rope_base",
        "linear_bias",
        "qkv_bias",
        "qk_norm",
        "experts",
        "top_k",
        "moe_ffn",
        "shared_experts",
    )
}
"""Settings of the model, with the fields of `ArchitectureSizes`."""


_INTEGERS = (
    "nodes devices_per_node world dp dp_replicate dp_shard tp pp cp ep zero micro_batch accumulation local_batch batch "
    "sequence steps seed model_layers model_sequence hidden heads kv_heads ffn vocab experts top_k moe_ffn "
    "recompute_layers virtual_stages ulysses"
)
INTEGER_SETTINGS = frozenset(_INTEGERS.split())
TEXT_SETTINGS = frozenset(["model", "name", "flavor"])


def settings_of(
    plan: Plan, workload: Workload, sizes: ArchitectureSizes | None, nodes: int = 1, model: str = ""
) -> Settings:
    """Returns the settings of a plan for a workload. `sizes` are the sizes of the model, if they are known. `model` is
    its name."""
    found: Settings = {name: _plain(getattr(plan, name)) for name in PLAN_FIELDS}
    found |= {name: getattr(workload, name) for name in WORKLOAD_FIELDS}
    optimizer = workload.optimizer
    found |= {name: getattr(optimizer, field) for name, field in OPTIMIZER_FIELDS.items()}
    nodes = nodes if plan.world % nodes == 0 else 1
    accumulation = plan.micro_batches(workload.batch)
    found |= {
        "model": model or None,
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "reduce": workload.reduce or default_reduce(workload.precision),
        "nodes": nodes,
        "devices_per_node": plan.world // nodes,
        "world": plan.world,
        "dp": plan.dp,
        "expert_tp": plan.expert_tp,
        "accumulation": accumulation,
        "local_batch": accumulation * plan.micro_batch,
        "beta1": optimizer.betas[0],
        "beta2": optimizer.betas[1],
        "min_lr": float(f"{optimizer.lr * (1.0 if optimizer.schedule == 'constant' else optimizer.final_lr):.10g}"),
    }
    if sizes is not None:
        found |= {name: getattr(sizes, field) for name, field in SIZE_FIELDS.items()}
        found["untied"] = not sizes.tied_embeddings
    return found


def _plain(value: Any) -> Any:
    """Returns enumeration members as strings."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return str(value) if isinstance(value, StrEnum) else value


def degrees_of(settings: Mapping[str, Any]) -> Settings:
    """Returns the settings with the number of devices, the data-parallel degrees and the batch filled in, as far as
    the other settings determine them.

    Raises: InputError if the settings contradict each other.
    """
    found = dict(settings)
    ranks = 1
    for axis in ("tp", "pp", "cp"):
        ranks *= found.get(axis, 1)
    equation = " * ".join(f"{axis}({found.get(axis, 1)})" for axis in ("tp", "pp", "cp"))
    if "world" not in found and "devices_per_node" in found:
        found["world"] = found["devices_per_node"] * found.get("nodes", 1)
    if "world" in found:
        if found["world"] % ranks:
            raise InputError(
                Message(
                    "{world} devices are not a multiple of {equation} = {ranks}; --devices gives another number",
                    world=found["world"],
                    equation=equation,
                    ranks=ranks,
                )
            )
        _agree(found, "dp", found["world"] // ranks, "world / (tp * pp * cp)")
    _fill_data_degrees(found)
    _fill_batch(found)
    found["world"] = ranks * found["dp"]
    return found


def _agree(found: Settings, name: str, value: int, source: str) -> None:
    """Sets a setting, or checks that it has this value already."""
    if found.get(name) not in (None, value):
        raise InputError(
            Message(
                "{name} is {given}, but {source} is {value}", name=name, given=found[name], source=source, value=value
            )
        )
    found[name] = value


def _fill_data_degrees(found: Settings) -> None:
    """Fills in dp, dp_replicate and dp_shard."""
    zero = found.get("zero", 0)
    replicate, shard = found.get("dp_replicate"), found.get("dp_shard")
    if replicate and shard and replicate > 0 and shard > 0:
        _agree(found, "dp", replicate * shard, "dp_replicate * dp_shard")
    if "dp" not in found:
        known = found.get("micro_batch", 0) * found.get("accumulation", 0)
        found["dp"] = found["batch"] // known if known and found.get("batch") else (replicate or 1) * (shard or 1)
        if not known and not shard:
            found.setdefault("remarks", []).append(
                Message("the number of devices is in no file: the smallest number is assumed; --devices sets it")
            )
    dp = found["dp"]
    if not zero:
        found["dp_replicate"], found["dp_shard"] = dp, 1
        return
    if shard and not replicate:
        replicate = dp // shard
    replicate = replicate or 1
    if dp % replicate:
        raise InputError(Message("dp({dp}) is not a multiple of dp_replicate({replicate})", dp=dp, replicate=replicate))
    found["dp_replicate"], found["dp_shard"] = replicate, dp // replicate


def _fill_batch(found: Settings) -> None:
    """Fills in micro_batch, accumulation, local_batch and batch."""
    dp = found["dp"]
    if "local_batch" in found:
        _agree(found, "batch", found["local_batch"] * dp, "the batch of a replica * dp")
    if "micro_batch" in found and "accumulation" in found:
        known = found["micro_batch"] * found["accumulation"] * dp
        _agree(
            found,
            "batch",
            known,
            f"micro_batch({found['micro_batch']}) * accumulation({found['accumulation']}) * dp({dp})",
        )
    elif "accumulation" in found and "batch" in found:
        found["micro_batch"] = max(found["batch"] // (dp * found["accumulation"]), 1)
    found.setdefault("micro_batch", 1)
    found.setdefault("batch", found["micro_batch"] * dp * found.get("accumulation", 1))
    if found["batch"] % (found["micro_batch"] * dp):
        raise InputError(
            Message(
                "batch {batch} is not a multiple of micro_batch({micro_batch}) * dp({dp}) = {product}",
                batch=found["batch"],
                micro_batch=found["micro_batch"],
                dp=dp,
                product=found["micro_batch"] * dp,
            )
        )
    found["accumulation"] = found["batch"] // (found["micro_batch"] * dp)


def plan_of(settings: Mapping[str, Any]) -> Plan:
    """Returns the plan of complete settings (`degrees_of`).

    Raises: InputError if the plan is invalid.
    """
    given = {name: settings[name] for name in PLAN_FIELDS if name in settings}
    if given.get("pp", 1) == 1:
        given |= {"schedule": Plan.model_fields["schedule"].default, "virtual_stages": 1, "layers_per_stage": ()}
    if given.get("tp", 1) == 1:
        given["sequence_parallel"] = False
    if given.get("cp", 1) == 1:
        given |= {"context": "ring", "ulysses": 0}
    blocks, stages = settings.get("model_layers"), given.get("layers_per_stage") or ()
    if blocks and stages and tuple(stages) == Plan().but(pp=len(stages)).stage_layers(blocks):
        given["layers_per_stage"] = ()
    return validate_data(Plan, given, "plan")


def default_reduce(precision: str) -> str:
    """Returns the dtype of gradients that a precision has unless the workload sets another.

    >>> default_reduce("bf16"), default_reduce("bf16-pure"), default_reduce("fp64")
    ('fp32', 'bf16', 'fp64')
    """
    return NATIVE_REDUCE[precision] if recipe(precision).reduced == 0 else "fp32"


def workload_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the workload as the section `workload` of a job file."""
    found = {name: settings[name] for name in WORKLOAD_FIELDS if settings.get(name) is not None}
    if "precision" in found:
        found.setdefault("reduce", NATIVE_REDUCE[found["precision"]])
    if found.get("reduce") == default_reduce(found.get("precision", "fp32")):
        del found["reduce"]
    optimizer = {field: settings[name] for name, field in OPTIMIZER_FIELDS.items() if name in settings}
    lr = optimizer.get("lr", OptimizerConfig().lr)
    if "min_lr" in settings and optimizer.get("schedule", "cosine") != "constant" and "final_lr" not in optimizer:
        optimizer["final_lr"] = min(settings["min_lr"] / lr, 1.0) if lr else 0.0
    if optimizer.get("schedule") == "constant":
        optimizer.pop("final_lr", None)
    if optimizer.get("schedule") != "warmup-stable-decay":
        optimizer.pop("cooldown", None)
    if "beta1" in settings or "beta2" in settings:
        default = OptimizerConfig().betas
        optimizer["betas"] = [settings.get("beta1", default[0]), settings.get("beta2", default[1])]
    chosen = optimizer.get("name", "adamw")
    for field, names in OPTIMIZERS_BY_FIELD.items():
        if chosen not in names:
            optimizer.pop(field, None)
    return {**found, **({"optimizer": optimizer} if optimizer else {})}


def unstated_defaults(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that change the result and that the section `workload` of an import does not have, each with the
    value that it then has in the job. That of the sequence depends on the model and the devices."""
    given = workload.get("optimizer", {})
    name, schedule = given.get("name", OptimizerConfig().name), given.get("schedule", OptimizerConfig().schedule)
    idle = {field for field, names in OPTIMIZERS_BY_FIELD.items() if name not in names} | {"matrix_lr", "state"}
    idle |= {"final_lr"} if schedule == "constant" else set()
    idle |= {"cooldown"} if schedule != "warmup-stable-decay" else set()
    found = {
        f"optimizer.{field}": info.default
        for field, info in OptimizerConfig.model_fields.items()
        if field not in given and field not in idle
    }
    found |= {name: Workload.model_fields[name].default for name in ("steps", "seed") if name not in workload}
    unknown = {"precision": "of the devices", "sequence": f"of the model, at most {MAX_DEFAULT_SEQUENCE}"}
    return found | {name: text for name, text in unknown.items() if name not in workload}


def sizes_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of the model as the fields of an architecture file, or an empty mapping if the settings do not
    determine them."""
    if not {"model_layers", "hidden", "heads"} <= settings.keys():
        return {}
    found = {field: settings[name] for name, field in SIZE_FIELDS.items() if settings.get(name) is not None}
    if not found.get("ffn"):
        found["ffn"] = 4 * found["hidden"]
    if found.get("experts"):
        found.setdefault("moe_ffn", found["ffn"])
        found.setdefault("top_k", 1)
    found.setdefault("seq", settings.get("sequence", 1))
    found["tied_embeddings"] = not settings.get("untied", False)
    layers = tuple(found.get(name) for name in ("mlp", "norm", "pos"))
    kind = "llama" if layers == ("swiglu", "rms", "rope") else "decoder"
    if layers == ("gelu", "ln", "learned") and found.get("linear_bias") and not found.get("experts"):
        kind = "gpt2"
    return {"kind": kind, **found}
