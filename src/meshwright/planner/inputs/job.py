"""Reads the user's job to a `JobFile` (`read_job`) and converts it to the `Job` that is planned (`resolve_job`). All
commands and `mw.load` use it.

The sources of a job are, in ascending precedence: defaults, the job file, `--set section.key=value`, and options of the
command. Missing values are filled in. The default precision is the fastest precision that all devices support; if
several are equally fast, it is the first of bf16, fp16, fp32. The default sequence length is the model's number of
positions, but at most 4,096 tokens, and at most 256 on CPUs. An error message names the file and the path of the
invalid value.

`parse_lora` parses `--lora rank=8,alpha=16,target=q_proj+v_proj` to the section `workload.lora` of a job, and
`parse_preference` parses `--preference dpo,beta=0.1` to the section `workload.preference`. `add_lora` adds the LoRA
adapters to a model spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from meshwright.catalog import read as catalog
from meshwright.core.codec import OneLine, StrictModel, parse_text, read_text_file, validate_data
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.hub_cache import hub_snapshot, is_hub_name
from meshwright.core.messages import Message
from meshwright.core.quantities import Bytes
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.planner.inputs.cluster_parser import cluster_from_data, read_cluster
from meshwright.planner.inputs.model_parser import model_title, path_from_job_file, read_sizes, spec_of_source
from meshwright.planner.inputs.plans import pins_from_plan, read_plan, validate_pins
from meshwright.spec.cluster import Cluster, ClusterRates
from meshwright.spec.job import Job, RunConfig
from meshwright.spec.layout import NF4_BITS, NF4_BLOCK_NUMEL
from meshwright.spec.model import LayerSpec, ModelSpec, ParameterSpec, TpRule
from meshwright.spec.plan import Plan
from meshwright.spec.workload import DataConfig, LoraConfig, PreferenceConfig, Workload

PRECISIONS = ("bf16", "fp16", "fp32")
MAX_DEFAULT_SEQUENCE = 4096
"""The default sequence length is the context of the model, but at most this many tokens on accelerators."""
UNKNOWN_CONTEXT = 2048
"""The sequence length of a model whose context is unknown or unlimited, in tokens."""


class ModelChoice(StrictModel):
    """The model of a job: at most one of `name` (catalog), `path` (folder or architecture file) and `module` (a
    function, `package.module:function`). `sizes` replaces some of the model's sizes. `rules` are tensor-parallel rules
    for blocks whose structure is not recognized."""

    name: OneLine = Field(
        default="", description="name in the catalog or in the local cache of the Hugging Face hub; a size such as 200b"
    )
    path: OneLine = Field(default="", description="folder with a Hugging Face config.json, or architecture file")
    module: OneLine = Field(default="", description="function that builds the model, package.module:function")
    sizes: dict[str, int | float | str | bool] = Field(
        default_factory=dict, description="sizes of the architecture that replace those of the model"
    )
    rules: tuple[TpRule, ...] = Field(
        default=(), description="tensor-parallel rules for blocks whose structure is not recognized"
    )

    @model_validator(mode="after")
    def _one(self) -> ModelChoice:
        given = [field for field in ("name", "path", "module") if getattr(self, field)]
        if len(given) > 1:
            raise ValueError(
                Message(
                    "the model is named twice, by {given} and by {given_2}; keep one", given=given[0], given_2=given[1]
                )
            )
        return self

    @property
    def source(self) -> str:
        """Returns the value of `--model` for this model, or for a name of the Hugging Face hub the folder in the local
        cache. The default is llama-tiny."""
        snapshot = hub_snapshot(self.name, "models") if is_hub_name(self.name) else None
        return str(snapshot) if snapshot else self.name or self.path or self.module or "llama-tiny"


class ClusterChoice(StrictModel):
    """The cluster of a job: a `name` as for `--cluster`, a file at `path`, or a complete description in `groups` and
    `network`."""

    name: OneLine = Field(
        default="local", description="cluster as for --cluster: local, local:4, a catalog name, or NODESxDEVICES:device"
    )
    path: OneLine = Field(default="", description="cluster file")
    groups: tuple[dict[str, Any], ...] = Field(default=(), description="groups of nodes, as in a cluster file")
    network: dict[str, Any] | None = Field(
        default=None, description="network between nodes, as in a cluster file; null: that of the named cluster"
    )
    tiers: tuple[dict[str, Any], ...] = Field(
        default=(), description="networks between racks, pods or sites, as in a cluster file"
    )
    memory: Bytes | None = Field(
        default=None, description="bytes of memory of every device; null: the memory of the cluster description"
    )
    budget: Bytes | None = Field(
        default=None, gt=0, description="bytes of device memory that a rank may use; null: nearly all"
    )
    rates: ClusterRates = Field(default=ClusterRates(), description="rates that replace those of equal nodes")
    failures_per_device_hour: float = Field(
        default=0.0, ge=0, description="failures of a device per hour, for simulate --days; 0: that of the cluster"
    )
    local_ranks: SkipJsonSchema[int] = Field(
        default=0, exclude=True, description="not serialized: the chosen number of ranks of `local`, 0: the default"
    )

    @property
    def is_open_local(self) -> bool:
        """Returns whether the cluster is this machine with any number of ranks."""
        return self.name == "local" and not self.path and not self.groups


class JobFile(StrictModel):
    """The sections of a job file."""

    model: ModelChoice = ModelChoice()
    workload: Workload = Workload()
    data: DataConfig = DataConfig()
    cluster: ClusterChoice = ClusterChoice()
    plan: dict[str, Any] = Field(default_factory=dict, description="fixed fields of the plan, or the name of the plan")
    run: RunConfig = RunConfig()
    described: SkipJsonSchema[ModelSpec | str | None] = Field(
        default=None,
        exclude=True,
        description="not serialized: the traced description of a model without closed formulas, or why tracing failed",
    )

    def given_plan(self) -> Plan | None:
        """Returns the plan if the job file names a complete plan, else None."""
        devices = lambda: resolve_cluster(self.cluster).devices
        return read_plan(str(self.plan["name"]), devices) if "name" in self.plan else None


def read_job(
    path: str | Path | None = None, overrides: Iterable[str] = (), options: Mapping[str, Any] | None = None
) -> JobFile:
    """Reads the job file at `path`, or the default job if `path` is None. Then applies `overrides` (the values of
    `--set`) and `options` (the values of other command options, by dotted field name). If both set a field, the value
    in `options` counts. Raises InputError if the file or an override is invalid.

    >>> read_job(None, ["workload.steps=50"]).workload.steps
    50
    """
    where = f"{path}: $" if path else "$"
    if path and not Path(path).exists() and catalog.find_entry(catalog.models(), str(path)):
        raise InputError(
            Message("job {path!r} does not exist; that is a model: write --model {path_2}", path=str(path), path_2=path)
        )
    data: Any = parse_text(read_text_file(path, "job"), str(path)) if path else {}
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise InputError(
            Message(
                "{path}: a job is sections such as 'model: {{name: llama-tiny}}', got {name}",
                path=path,
                name=type(data).__name__,
            )
        )
    if path and isinstance(model := data.get("model"), dict) and isinstance(model.get("path"), str):
        data["model"] = model | {"path": path_from_job_file(path, model["path"])}
    given = list((options or {}).items())
    # Options are applied before --set and again after it. The first time, an option that chooses another cluster
    # removes the cluster fields of the file. The second time, the option overrides --set, but the other cluster fields
    # that --set has set remain.
    for name, value in given:
        set_dotted_field(data, name, value)
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals or "." not in name:
            raise InputError(
                Message(
                    "--set {override!r} is not section.key=value; write it like --set workload.steps=50",
                    override=override,
                )
            )
        set_dotted_field(data, name.strip(), parse_text(value, f"--set {name}") if value.strip() else None)
    for name, value in given:
        set_dotted_field(data, name, value)
    for section in ("model", "cluster"):
        if isinstance(data.get(section), str):
            data[section] = {"name": data[section]}
    if isinstance(data.get("plan"), str):
        data["plan"] = {} if data["plan"] == "auto" else {"name": data["plan"]}
    return validate_data(JobFile, data, where)


def set_dotted_field(data: dict[str, Any], name: str, value: Any) -> None:
    """Sets the dotted field `name` of `data` to `value`. If this chooses another model, the previous `name`, `path` or
    `module` is removed. If it chooses another cluster or plan, all fields of the previous cluster or plan are
    removed."""
    *sections, key = name.split(".")
    for section in sections:
        inner = data.get(section)
        if isinstance(inner, str):
            inner = {"name": inner}
        data[section] = data = dict(inner) if isinstance(inner, dict) else {}
    if sections == ["model"] and key in ("name", "path", "module"):
        for other in ("name", "path", "module"):
            data.pop(other, None)
    is_choice = (sections == ["cluster"] and key in ("name", "path")) or (sections == ["plan"] and key == "name")
    if is_choice and data.get(key) != value:
        data.clear()
    data[key] = value


def resolve_job(file: JobFile) -> Job:
    """Returns the complete job: the layers of the model, the devices of the cluster, a workload without missing values,
    and the pins.

    Raises: InputError if a part of the job is invalid, or if model, cluster and workload do not match.
    """
    source = file.model.source
    sizes = None if file.described else resolve_sizes(file.model)
    model = file.described or spec_of_source(model_title(source), source, sizes or resolve_sizes(file.model))
    if isinstance(model, str):
        raise InputError(model)
    if file.workload.lora is not None:
        model = add_lora(model, file.workload.lora)
    cluster = resolve_cluster(file.cluster)
    # A traced model is planned with the length with which it was traced.
    context = (sizes.seq or UNKNOWN_CONTEXT) if sizes is not None else file.workload.sequence
    workload = fill_workload(file.workload, model, cluster, context)
    check_precision(workload, cluster)
    pins = {**workload.fixed, **resolve_pins(file)}
    return Job(model=model, cluster=cluster, workload=workload, pins=pins)


def load_job(path: str | Path) -> Job:
    """Returns the complete job of the job file at `path`."""
    return resolve_job(read_job(path))


def resolve_sizes(choice: ModelChoice) -> ArchitectureSizes:
    """Returns the sizes of the chosen model, changed by the section `model.sizes` of the job."""
    sizes = read_sizes(choice.source)
    return sizes.changed(choice.sizes, "$.model.sizes") if choice.sizes else sizes


def known_sizes(file: JobFile) -> ArchitectureSizes | None:
    """Returns the sizes of the job's model, or None if the model is traced because it has no closed formulas."""
    return None if file.described is not None or file.model.module else resolve_sizes(file.model)


def resolve_cluster(choice: ClusterChoice) -> Cluster:
    """Returns the cluster of a job file. Memory, budget, rates and failure rate of the job file replace its own."""
    if choice.groups:
        cluster = cluster_from_data(choice.model_dump(exclude={"path", "memory", "budget", "rates"}), "$.cluster")
    else:
        cluster = read_cluster(choice.path or (f"local:{choice.local_ranks}" if choice.local_ranks else choice.name))
        cluster = cluster.but(name=choice.name) if choice.local_ranks else cluster
    cluster = (cluster.with_memory(choice.memory) if choice.memory else cluster).with_rates(choice.rates)
    cluster = cluster.but(budget=choice.budget) if choice.budget else cluster
    rate = choice.failures_per_device_hour
    return cluster.but(failures_per_device_hour=rate) if rate else cluster


def resolve_pins(file: JobFile) -> dict[str, Any]:
    """Returns the plan fields that the job file pins, by name. A plan name pins all fields. Raises InputError if the
    file has both a plan name and pins."""
    plan = file.given_plan()
    others = {name: value for name, value in file.plan.items() if name != "name"}
    if plan is not None and others:
        raise InputError(
            Message(
                "$.plan: pins ({others}) conflict with the name {name!r}, which sets every field: leave the pins out",
                others=", ".join(others),
                name=file.plan["name"],
            )
        )
    return pins_from_plan(plan) if plan is not None else validate_pins(others, "$.plan")


def fill_workload(workload: Workload, model: ModelSpec, cluster: Cluster, context: int) -> Workload:
    """Returns `workload` with missing values filled in: the precision from the devices, the sequence length from the
    usual length `context` of the model.

    Raises: InputError if the user set a sequence length above the model's number of positions.
    """
    changes: dict[str, Any] = {}
    if "precision" not in workload.model_fields_set:
        changes["precision"] = default_precision(cluster)
    longest = model.context
    if "sequence" not in workload.model_fields_set:
        changes["sequence"] = default_sequence(min(context, longest or context), cluster)
    elif longest and workload.sequence > longest:
        raise InputError(
            Message(
                "sequence {sequence} is longer than the {longest} positions that the model has",
                sequence=workload.sequence,
                longest=longest,
            )
        )
    return workload.but(**changes) if changes else workload


def default_sequence(context: int, cluster: Cluster) -> int:
    """Returns the default sequence length in tokens on `cluster` of a model whose usual length is `context`.

    >>> default_sequence(8192, read_cluster("1x8:h100")), default_sequence(8192, read_cluster("1x4:cpu"))
    (4096, 256)
    """
    usual = Workload.model_fields["sequence"].default
    on_cpu = all(group.device.name.startswith("cpu") for group in cluster.groups)
    return min(context, usual if on_cpu else MAX_DEFAULT_SEQUENCE)


def resolve_precision(file: JobFile) -> str:
    """Returns the precision of the job: the given precision, or the default for the devices of the cluster."""
    said = "precision" in file.workload.model_fields_set
    return file.workload.precision if said else default_precision(resolve_cluster(file.cluster))


def default_precision(cluster: Cluster) -> str:
    """Returns the precision with the highest rate on the slowest device of the cluster.

    >>> (default_precision(read_cluster("1x8:v100-32gb")), default_precision(read_cluster("1x8:h100")),
    ...     default_precision(read_cluster("1x4:cpu")))
    ('fp16', 'bf16', 'fp32')
    """
    return max(PRECISIONS, key=lambda name: min(group.device.peak.get(name, 0.0) for group in cluster.groups))


def check_precision(workload: Workload, cluster: Cluster) -> None:
    """Raises InputError if a device of the cluster has no FLOP/s rate for the precision of the workload."""
    for group in cluster.groups:
        for rate in workload.recipe.rates:
            if rate not in group.device.peak:
                known = ", ".join(group.device.peak)
                raise InputError(
                    Message(
                        "device {device!r} has no rate for {rate}; it has {known}; choose one with --precision",
                        device=group.device.name,
                        rate=rate,
                        known=known,
                    )
                )


LORA_KEYS: dict[str, Callable[[str], Any]] = {
    "rank": int,
    "alpha": float,
    "target": lambda text: [each for each in text.split("+") if each],
    "base": str,
}


def parse_lora(text: str) -> dict[str, Any]:
    """Parses the value of `--lora` to the fields of `LoraConfig`. Raises InputError for an unknown key or an invalid
    number.

    >>> parse_lora("rank=4,target=q_proj+v_proj")
    {'rank': 4, 'target': ['q_proj', 'v_proj']}
    """
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or name not in LORA_KEYS:
            raise InputError(
                Message(
                    "--lora {part!r} is not one of rank=8, alpha=16, target=q_proj+v_proj, base=nf4{hint}",
                    part=part,
                    hint=did_you_mean(name, LORA_KEYS),
                )
            )
        if name == "base" and value != "nf4":
            raise InputError(
                Message("--lora base={value!r} is not nf4: leave base out, or write base=nf4", value=value)
            )
        try:
            found[name] = LORA_KEYS[name](value)
        except ValueError:
            raise InputError(Message("--lora {name}={value!r} is not a number", name=name, value=value)) from None
    return found


def parse_preference(text: str) -> dict[str, Any]:
    """Parses the value of `--preference` to the fields of `PreferenceConfig`. Raises InputError for an unknown loss or
    key, or an invalid number.

    >>> parse_preference("dpo,beta=0.2")
    {'loss': 'dpo', 'beta': 0.2}
    """
    loss, *parts = (part.strip() for part in text.split(","))
    known = get_args(PreferenceConfig.model_fields["loss"].annotation)
    found: dict[str, Any] = {"loss": loss}
    for part in parts:
        name, _, value = part.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[""] = None
    if loss not in known or found.keys() - {"loss", "beta"}:
        raise InputError(
            Message(
                "--preference {text!r} is not dpo or orpo, nor dpo,beta=0.1{hint}",
                text=text,
                hint=did_you_mean(loss, known),
            )
        )
    return found


def add_lora(model: ModelSpec, lora: LoraConfig) -> ModelSpec:
    """Returns `model` with LoRA matrices A and B for each target matrix of its blocks. All weights of `model` are
    frozen. If `lora.target` is empty, all matrices of the blocks are targets. With `lora.base`, the matrices of the
    blocks are stored in 4 bits.

    LoRA adds memory traffic: A reads the layer's input a second time. To add B's output to the layer's output, both are
    read and the sum is written.

    Raises: InputError if no matrix of the blocks is a target, or if a weight of the blocks cannot be stored in 4 bits.
    """
    if lora.base:
        _check_quantizable(model)
    layers = tuple(_add_lora_to_layer(layer, lora) for layer in model.layers)
    found = model.but(layers=layers)
    if found.parameters == model.parameters:
        known = sorted(
            {
                _short_module_name(parameter.name)
                for layer in model.layers
                if layer.name == "block"
                for parameter in _weight_matrices(layer)
            }
        )
        raise InputError(
            Message(
                "lora.target {target} is not a layer of {model}; its blocks have {known}",
                target=", ".join(lora.target),
                model=model.name,
                known=", ".join(known) or "none",
            )
        )
    return found


def _check_quantizable(model: ModelSpec) -> None:
    for layer in model.layers:
        for parameter in layer.parameters if layer.name == "block" else ():
            *rows, inputs = parameter.shape
            if rows and (len(rows) > 1 or parameter.experts or inputs % NF4_BLOCK_NUMEL):
                raise InputError(
                    Message(
                        "lora.base nf4: {name} {shape} of {model} cannot be stored in 4 bits: it must be the weight of "
                        "a linear layer with a multiple of {block} inputs; leave base out",
                        name=parameter.name,
                        shape=list(parameter.shape),
                        model=model.name,
                        block=NF4_BLOCK_NUMEL,
                    )
                )


def _add_lora_to_layer(layer: LayerSpec, lora: LoraConfig) -> LayerSpec:
    more: list[ParameterSpec] = []
    for parameter in _weight_matrices(layer) if layer.name == "block" else ():
        if not lora.target or _short_module_name(parameter.name) in {
            target.rpartition(".")[2] for target in lora.target
        }:
            path, (out, into) = parameter.name.removesuffix(".weight"), parameter.shape
            more.append(
                ParameterSpec(
                    name=f"{path}.lora_A.default.weight",
                    shape=(lora.rank, into),
                    split=1 if parameter.split == 1 else None,
                )
            )
            parts = parameter.parts if parameter.split == 0 else ()
            split = 0 if parameter.split == 0 else None
            more.append(
                ParameterSpec(
                    name=f"{path}.lora_B.default.weight",
                    shape=(out, lora.rank),
                    split=split,
                    parts=parts,
                    ways=parameter.ways if split == 0 else (),
                )
            )
    moved = sum(each.shape[1] if ".lora_A." in each.name else 3 * each.shape[0] for each in more)
    packed = {each.name for each in _weight_matrices(layer)} if lora.base and layer.name == "block" else set()
    base = (each.but(frozen=True, bits=NF4_BITS if each.name in packed else None) for each in layer.parameters)
    return layer.but(parameters=(*base, *more), moved=layer.moved + moved)


def _weight_matrices(layer: LayerSpec) -> list[ParameterSpec]:
    return [
        parameter for parameter in layer.parameters if len(parameter.shape) == 2 and parameter.name.endswith(".weight")
    ]


def _short_module_name(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
