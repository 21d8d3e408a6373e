"""Converts each row of the tables of published measurements to a job, plans and measured values, for the scores in
score.py. If a row cannot be predicted, the result is the reason instead.

A source may not state all choices (micro-batch size, virtual stages, recompute). Then a case has one plan for each
possible combination, and score.py assumes the fastest of these plans that fits.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from meshwright.catalog import read as catalog
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.planner.cost.cost_context import RuntimeModel
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes, sizes_from_catalog
from meshwright.planner.inputs.cluster_syntax import parse_cluster, parse_link
from meshwright.planner.validation.frameworks import (
    Framework,
    FrameworkKernels,
    framework_model_spec,
    identify_framework,
)
from meshwright.planner.validation.memory_meters import MemoryMeter, memory_meter
from meshwright.planner.validation.tables import MeasurementRow
from meshwright.spec.cluster import Cluster
from meshwright.spec.constraints import plan_violations
from meshwright.spec.enums import Recompute
from meshwright.spec.job import Job
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.workload import OptimizerConfig, Workload

GIB = 2**30
EFA_LINK = "efa-p5"

VOCABULARY_SIZES = (
    ("bert", 30522),
    ("gpt", 50257),
    ("llama-2", 32000),
    ("llama 2", 32000),
    ("llama-3", 128256),
    ("llama 3", 128256),
)


class BenchmarkCase(NamedTuple):
    """A row with its job, and the plans that the measured run may have used. If the source states the complete plan,
    there is one plan. `practice` is the runtime of the measurement. `seconds` per step and `memory` in bytes are None
    if they were not measured. `meter` is the meaning of `memory`."""

    row: MeasurementRow
    job: Job
    practice: RuntimeModel
    plans: tuple[Plan, ...]
    seconds: float | None
    meter: MemoryMeter | None
    memory: float | None

    @property
    def ran(self) -> bool:
        """Returns whether the measured training step succeeded (and did not run out of memory)."""
        return self.row.text("status") == "ok"


def benchmark_case(row: MeasurementRow) -> BenchmarkCase | str:
    """Returns the case of a row, or the reason why the row cannot be predicted."""
    system = identify_framework(row)
    reason = _unsupported_reason(row, system)
    if reason:
        return reason
    try:
        sizes = case_sizes(row, system)
        cluster = case_cluster(row)
        job = Job(
            model=_case_model_spec(row.text("model"), sizes, system.kernels),
            cluster=cluster,
            workload=case_workload(row),
        )
        plans = tuple(plan for plan in case_plans(row, system) if not any(plan_violations(job, plan)))
    except (InputError, ValueError, ArithmeticError) as error:
        return f"Meshwright cannot run this plan: {str(error).splitlines()[0][:90]}"
    if not plans:
        return "Meshwright has no legal plan with these degrees"
    meter = memory_meter(row)
    memory = row.number("mem_gb")
    seconds = row.number("step_time_s")
    if seconds is None and (rate := row.number("tokens_per_s_per_gpu")) is not None:
        seconds = job.workload.tokens / (rate * cluster.devices)
    return BenchmarkCase(row, job, system.practice, plans, seconds, meter, memory * GIB if memory and meter else None)


def _unsupported_reason(row: MeasurementRow, system: Framework) -> str:
    """Returns the reason why `row` cannot be predicted, or '' if it can."""
    task = row.text("task")
    if row.text("status") == "analytic":
        return "a formula, no measurement"
    if re.search("lora|layer micro", task):
        return "adapters or single layers are not modelled"
    if "8bit" in row.text("optimizer").lower() or row.text("offload") not in ("", "none"):
        return "offload and 8-bit states are not modelled"
    if re.search("padded|optimizer in backward|paged|in-backward|in_bwd", row.text("notes")):
        return "padded batches or an optimizer inside backward are not modelled"
    if "ddp" in system.name.lower() and row.count("seq") > 128 and "bert" in row.text("model").lower():
        return "sequences are binned by length: tokens are not stated"
    if any(not row.states(name) for name in ("layers", "hidden", "heads", "seq", "gpus")) or not vocabulary_size(row):
        return "the source does not state the model"
    if not row.states("global_batch") and not row.states("micro_batch"):
        return "the source states no batch"
    if not row.states("global_batch") and row.states("step_time_s"):
        return "the source states no batch"
    if "ragged" in row.text("notes") and not row.states("micro_batch"):
        return "the source states no batch"
    return ""


def case_sizes(row: MeasurementRow, system: Framework) -> ArchitectureSizes:
    """Returns the architecture that the columns of `row` state. For a model with experts, the sizes are those of the
    catalog model with the same layers, hidden size, heads and number of experts. Raises InputError if the catalog has
    no such model."""
    step = system.kernels.vocabulary * row.count("tp")
    shape = {name: row.count(name) for name in ("layers", "hidden", "heads", "seq")}
    shape["vocab"] = -(-vocabulary_size(row) // step) * step
    shape["kv_heads"] = row.count("kv_heads", shape["heads"])
    experts = row.count("experts", 0)
    if experts > 1:
        return _expert_sizes(shape, experts)
    bert = "bert" in row.text("model").lower()
    mlp = row.text("mlp_type") or "swiglu"
    tied = row.text("tied") == "1" and not ("nanotron" in system.name and row.count("pp") > 1)
    given: dict[str, Any] = {**shape, "ffn": row.count("ffn", 4 * shape["hidden"]), "tied_embeddings": tied}
    if bert:
        return ArchitectureSizes(
            kind="bert", mlp="gelu", norm="ln", linear_bias=True, pos="learned", types=2, embedding_norm=True, **given
        )
    if mlp == "swiglu" and not system.bias:
        return ArchitectureSizes(kind="decoder", mlp="swiglu", norm="rms", pos="rope", **given)
    given |= {
        "mlp": mlp,
        "linear_bias": system.bias,
        "qkv_bias": system.bias,
        "pos": "learned" if system.learned else "rope",
    }
    return ArchitectureSizes(kind="decoder", norm="ln", **given)


def vocabulary_size(row: MeasurementRow) -> int:
    """Returns the vocabulary size that the row states. If the row states none, returns the size that is common for
    models of this name (VOCABULARY_SIZES), or 0 for other models."""
    name = row.text("model").lower()
    return row.count("vocab", 0) or next((size for word, size in VOCABULARY_SIZES if word in name), 0)


def _expert_sizes(shape: dict[str, int], experts: int) -> ArchitectureSizes:
    for known in catalog.models().values():
        if all(known.get(name) == str(shape[name]) for name in ("layers", "hidden", "heads")) and known.get(
            "experts"
        ) == str(experts):
            return sizes_from_catalog(known).but(seq=shape["seq"])
    raise InputError(Message("experts of this shape are not in the catalog"))


@lru_cache(maxsize=512)
def _case_model_spec(name: str, sizes: ArchitectureSizes, kernels: FrameworkKernels) -> ModelSpec:
    return framework_model_spec(name, sizes, kernels)


def case_cluster(row: MeasurementRow) -> Cluster:
    """Returns the cluster that the row states. If the row states no network, or a network without a rate, the network
    is the catalog's default for the device. Raises InputError if the device is not in the catalog, or if the number of
    devices is not a multiple of the devices per node."""
    per_node = min(row.count("gpus_per_node", 8), row.count("gpus"))
    nodes, rest = divmod(row.count("gpus"), per_node)
    if rest:
        raise InputError(
            Message(
                "{count} devices are not a multiple of {per_node} devices per node",
                count=row.count("gpus"),
                per_node=per_node,
            )
        )
    return _build_cluster(nodes, per_node, device_name(row), case_network(row))


@lru_cache(maxsize=256)
def _build_cluster(nodes: int, devices: int, device: str, network: str) -> Cluster:
    cluster = parse_cluster(f"{nodes}x{devices}:{device}")
    return cluster.but(network=parse_link(network, devices)) if network else cluster


def device_name(row: MeasurementRow) -> str:
    """Returns the catalog name of the row's device. For example, `A100` with 80 GB is a100-80gb. If a device has only
    one memory size, its catalog name does not contain the size. Raises InputError for an unknown device."""
    name, memory = row.text("gpu").lower().rstrip("?").replace(" ", "-"), row.text("gpu_mem_gb").split(".")[0]
    rows = catalog.devices()
    for word in (f"{name}-{memory}gb", name, name.replace("rtx", "rtx-"), f"rtx-{name}"):
        if (found := catalog.find_entry(rows, word)) is not None:
            return str(found["name"])
    raise InputError(Message("device {name} with {memory} GB is not in the catalog", name=name, memory=memory))


def case_network(row: MeasurementRow) -> str:
    """Returns the network of the row in the notation of `--cluster`. For example, `4x Omni-Path 100Gb/s per node` is
    4x100Gb. A rate in the row may be per node or per device. Returns '' if the row states no network."""
    text = row.text("inter_link")
    if "EFA" in text:
        return EFA_LINK if "3200" in text else "efa-p4d"
    rate = re.search(r"(\d+)\s*Gb(?:/s|ps)", text)
    if rate is None:
        return ""
    ports = re.search(r"(\d+)x", text)
    if "measured per node" in text or "single NIC" in text or (ports is None and "per GPU" not in text):
        return f"1x{rate[1]}Gb"
    return f"{ports[1]}x{rate[1]}Gb" if ports else f"{rate[1]}Gb"


def case_workload(row: MeasurementRow) -> Workload:
    """Returns the workload that a row states: sequence length, batch and precision, with the default optimizer. The
    precision of an fp8 row is bf16, because its 8-bit products are a property of the runtime (`identify_framework`).
    Gradients have the compute dtype unless `identify_framework` says otherwise, whatever this project's default is. If
    the row states no global batch, the batch is micro-batch size x dp x pp."""
    precision = {"fp8": "bf16"}.get(row.text("prec_class"), row.text("prec_class"))
    batch = row.count("global_batch", 0) or row.count("micro_batch") * row.count("dp") * max(row.count("pp"), 1)
    reduce = precision if precision in ("bf16", "fp16") else None
    return Workload(
        sequence=row.count("seq"),
        batch=batch,
        precision=precision,  # type: ignore[arg-type]
        reduce=reduce,  # type: ignore[arg-type]
        optimizer=OptimizerConfig(),
    )


def case_plans(row: MeasurementRow, system: Framework) -> list[Plan]:
    """Returns every plan that the measured run may have used. For a choice that the row does not state, there is a plan
    for each usual value."""
    batch = case_workload(row).batch
    dp, pp, tp = row.count("dp"), row.count("pp"), row.count("tp")
    micro = (
        [row.count("micro_batch")]
        if row.states("micro_batch")
        else [size for size in (1, 2, 4, 8, 16) if batch % (dp * size) == 0]
    )
    if pp == 1 and not row.states("micro_batch") and system.name != "Megatron-Core":
        # Gradients are accumulated only if the whole batch does not fit.
        micro = [batch // dp // parts for parts in (1, 2, 4, 8, 16, 32) if batch // dp % parts == 0]
    if (count := row.flags.get("num-virtual-stages-per-pipeline-rank")) is not None:
        return [case_plan(row, system, (dp, pp, tp), (size, int(count), row.text("activation_ckpt"))) for size in micro]
    if (each := row.flags.get("num-layers-per-virtual-pipeline-stage")) is not None:
        virtual = [row.count("layers") // pp // int(each)]
        return [
            case_plan(row, system, (dp, pp, tp), (size, stages, row.text("activation_ckpt")))
            for size in micro
            for stages in virtual
        ]
    # Rows that quote the command-line options state all of them, so other options have their defaults.
    unknown = system.name == "Megatron-Core" and not row.states("vpp") and not row.flags
    virtual = [1, 2, 3, 4, 6, 8] if unknown else [row.count("vpp")]
    stated = row.text("activation_ckpt")
    again = [stated] if stated else ["none", "selective", "full"]
    return [
        case_plan(row, system, (dp, pp, tp), (size, stages if pp > 1 else 1, ckpt))
        for size, stages, ckpt in product(micro, virtual, again)
    ]


def case_plan(
    row: MeasurementRow, system: Framework, degrees: tuple[int, int, int], choices: tuple[int, int, str]
) -> Plan:
    """Returns one plan of a row. `degrees` is (dp, pp, tp), `choices` is (micro-batch size, virtual stages, recompute
    as in the row)."""
    (dp, pp, tp), (micro_batch, virtual, ckpt) = degrees, choices
    zero = row.count("zero_stage", 0)
    shard = min(row.count("hsdp", dp), dp) if zero else 1
    recompute = {"full": Recompute.full, "selective": Recompute.attn if system.selective == "core" else Recompute.none}
    return Plan(
        dp_replicate=dp // shard,
        dp_shard=shard,
        tp=tp,
        sequence_parallel=tp > 1 and row.text("sp") == "1",
        pp=pp,
        cp=row.count("cp"),
        ep=row.count("ep"),
        zero=zero,
        micro_batch=micro_batch,
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        layers_per_stage=nanotron_stage_split(row, pp) if system.balanced and pp > 1 else (),
        recompute=recompute.get(ckpt, Recompute.none),
        compile=system.kernels.compiled,
    )


def nanotron_stage_split(row: MeasurementRow, pp: int) -> tuple[int, ...]:
    """Returns the number of blocks of each stage by nanotron's rule. Stage i (from 1 to pp) ends with the layer at
    which the cumulative cost exceeds i / pp of the total cost. The costs are those of nanotron's Llama: matrix products
    for a block, the vocabulary product for the head, and 0 for the embedding."""
    layers, hidden = row.count("layers"), row.count("hidden")
    block = hidden * (4 * hidden + 3 * row.count("ffn"))
    total = layers * block + hidden * row.count("vocab")
    found, stage, passed = [0] * pp, 0, 0.0
    for _ in range(layers):
        found[stage] += 1
        passed += block
        if passed > total * (stage + 1) / pp:
            stage = min(stage + 1, pp - 1)
    return tuple(found) if min(found) else fill_empty_stages(found)


def fill_empty_stages(found: list[int]) -> tuple[int, ...]:
    """Changes the numbers of blocks `found` so that every stage has at least one block, as this project requires. If
    the last stage has only the head, one block moves to it from the previous stage. Raises InputError if another stage
    has no block."""
    if found[-1] == 0 and found[-2] > 1:
        found = [*found[:-2], found[-2] - 1, 1]
    if not min(found):
        raise InputError(Message("stages without a block"))
    return tuple(found)
