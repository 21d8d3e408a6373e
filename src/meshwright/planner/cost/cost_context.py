"""Defines the inputs of the cost model that all plans of a job share.

`RuntimeModel` describes properties of the runtime that are not in the plan: bytes, kernels, overlap. The default is
this project's runtime; planner/validation describes other runtimes. Efficiencies are not part of it, because they are
properties of a device.

`CostContext` has the job's precision recipe, one device, the links, and the layers in forward order. On heterogeneous
groups, a plan with equal ranks runs at the speed of the slowest device and must fit in the smallest memory. So the
device of the context has the minimum of each property over the groups, and `notes` states this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.planner.cost import constants
from meshwright.planner.cost.links import UNCOMPRESSED, CompressionRatio, LinkModel, link_model
from meshwright.planner.cost.plan_grid import TpEpShape
from meshwright.spec.cluster import Cluster, Device
from meshwright.spec.job import Job
from meshwright.spec.layout import align_numel
from meshwright.spec.model import LayerSpec, ParameterSpec
from meshwright.spec.precision import Recipe


class RuntimeModel(NamedTuple):
    """Properties of a runtime. A value of 0 or '' means that the precision recipe determines the property."""

    master: int = -1
    """Bytes of a main weight that is stored in addition to the weight in the compute dtype; -1 means the bytes of the
    recipe."""
    gradient: int = 0
    """Bytes of an element of a stored gradient."""
    bucketed: int = 0
    """Bytes per element of a second copy of the gradients at ZeRO 0, in separate buckets."""
    reduced: int = 0
    """Bytes of a gradient element in transit between ranks."""
    products: str = ""
    """Precision of the blocks' matrix products."""
    attention: float = 1.0
    """Rate of the attention kernel relative to FlashAttention-2, if the device has a faster kernel."""
    repeated_products: float = 0.0
    """Fraction of a block's forward matrix products that backward recomputes even if the plan has no recompute for the
    block."""
    repeated_rest: float = 0.0
    """Fraction of a block's other forward operations that backward recomputes even if the plan has no recompute for the
    block."""
    reduce_hidden: bool = True
    """Whether the gradient reduction overlaps with the last backward."""
    gather_hidden: bool = False
    """Whether the all-gather of weights at ZeRO 1 and 2 overlaps with the next forward."""
    tensor_hidden: float = 0.0
    """Fraction of tensor-parallel traffic that is split into chunks and overlaps with matrix products."""
    launch: float = 1.0
    """Host seconds per kernel divided by those of eager PyTorch. The value is below 1 if CUDA graphs or one compiled
    call launch many kernels."""
    gathered: bool = False
    """Whether sequence parallelism saves the gathered input for backward. Otherwise backward gathers it a second
    time."""


MESHWRIGHT_RUNTIME = RuntimeModel()


BLOCK, EMBEDDING, HEAD = "block", "embedding", "head"

EXACT_GRAD_BYTES = 8
"""Bytes of a gradient element that is stored as an integer."""


class LayerRun(NamedTuple):
    """Consecutive equal layers, as ranks store them: a layer run.

    `own` omits a weight that another layer run has. `copy` marks the replica of a tied vocabulary on the last stage.
    `own_bucket` marks a layer with a separate parameter group.
    """

    layer: LayerSpec
    own: tuple[ParameterSpec, ...]
    first_block: int
    own_bucket: bool = False
    copy: bool = False

    @property
    def is_block(self) -> bool:
        """Returns whether the layer is a transformer block."""
        return self.layer.name == BLOCK

    def raw(self, cut: TpEpShape) -> int:
        """Returns the elements of one layer on one tensor rank, without expert-parallel weights."""
        return sum(cut.numel(parameter) for parameter in self.own if not cut.splits_experts(parameter))

    def aligned(self, cut: TpEpShape) -> int:
        """Returns the padded elements of one layer on one tensor rank, without expert-parallel weights ([Note: flat
        layout])."""
        return sum(align_numel(cut.numel(parameter)) for parameter in self.own if not cut.splits_experts(parameter))

    def experts(self, cut: TpEpShape) -> int:
        """Returns the padded elements of the layer's experts if their data-parallel groups differ from those of the
        dense weights, else 0."""
        return sum(align_numel(cut.numel(parameter)) for parameter in self.own if cut.splits_experts(parameter))

    def largest(self, cut: TpEpShape) -> int:
        """Returns the elements of the largest tensor on one tensor rank. Autograd computes its full gradient before
        adding it to the sum."""
        return max(map(cut.numel, self.layer.parameters), default=0)


@dataclass(frozen=True)
class CostContext:
    """The inputs of the cost model for one job. `entries` are the layer runs in forward order; the replica of a tied
    vocabulary is last."""

    job: Job
    recipe: Recipe
    device: Device
    fabric: LinkModel
    entries: tuple[LayerRun, ...]
    notes: tuple[str, ...]
    practice: RuntimeModel = MESHWRIGHT_RUNTIME

    @cached_property
    def imbalance(self) -> float:
        """Returns the tokens of the expert rank with the most tokens divided by the mean over ranks, at most the
        capacity factor."""
        return min(constants.EXPERT_IMBALANCE, self.job.workload.expert_capacity or constants.EXPERT_IMBALANCE)

    @cached_property
    def on_host(self) -> bool:
        """Returns whether ranks are CPU processes, with gloo instead of NCCL and without a caching allocator."""
        return self.device.name.lower().startswith("cpu")

    @cached_property
    def shares_memory(self) -> bool:
        """Returns whether all ranks are processes of one host, so that they read each other's buffers."""
        return self.on_host and sum(group.nodes for group in self.job.cluster.groups) == 1

    @cached_property
    def wire(self) -> CompressionRatio:
        """Returns the compression ratio of gradients between nodes. With low-rank compression, a matrix is sent as two
        factors, and all other data with a fixed number of bytes per element."""
        compression, size = self.job.workload.compression, self.gradient
        if compression is None:
            return UNCOMPRESSED
        if compression.kind != "low-rank":
            return CompressionRatio(compression.bytes_per_element / size, compression.bytes_per_element / size, True)
        shapes = [(parameter.shape, layer.repeat) for layer in self.job.model.layers for parameter in layer.parameters]
        whole = sum(prod(shape) * times for shape, times in shapes)
        left = sum(
            min(prod(shape), compression.rank * (shape[0] + prod(shape[1:])) if len(shape) > 1 else prod(shape)) * times
            for shape, times in shapes
        )
        return CompressionRatio(2.0 * left / whole, left / whole)

    @cached_property
    def head(self) -> LayerRun | None:
        """Returns the layer run of the layer that computes the loss, or None if there is none."""
        return next((entry for entry in self.entries if entry.layer.name == HEAD), None)

    def recomputed_uncompiled(self, entry: LayerRun, cut: TpEpShape, stages: bool) -> int:
        """Returns the elements of the largest gradient of a layer that exists separately before it is accumulated.

        With several stages on CPUs, matrix products add to the accumulated gradient in place. Source:
        runtime/weight_gradients.py.
        """
        largest = entry.largest(cut)
        in_place = (
            stages
            and self.on_host
            and self.gradient == self.recipe.size >= 4
            and largest >= constants.MIN_IN_PLACE_ELEMENTS
        )
        return 0 if in_place else largest

    @property
    def gradient(self) -> int:
        """Returns the bytes of one element of a stored gradient."""
        return self.practice.gradient or self.recipe.gradient_size

    @cached_property
    def host_bandwidth(self) -> float:
        """Returns the bytes/s between a device and its host in one direction, or 0 without a host link."""
        return self.job.cluster.host_bandwidth

    @cached_property
    def storage_bandwidth(self) -> float:
        """Returns the bytes/s between a device and the disk of its node, or 0 without a disk."""
        return self.job.cluster.storage_bandwidth

    @cached_property
    def host_memory(self) -> float:
        """Returns the bytes that each device can offload to its host."""
        taken = 1.0 if self.on_host else constants.PINNED_MEMORY_OVERHEAD
        return min(group.host_memory / group.devices for group in self.job.cluster.groups) / taken

    @cached_property
    def host_update(self) -> float:
        """Returns the parameters per second that the host of the slowest group updates for each device. A measured
        value takes precedence."""
        return min(
            (group.host_update or constants.CPU_UPDATE_PARAMS_PER_SECOND) / group.devices
            for group in self.job.cluster.groups
        )

    @property
    def devices_per_node(self) -> int:
        """Returns the number of devices of the largest node."""
        return max(group.devices for group in self.job.cluster.groups)

    @property
    def blocks(self) -> int:
        """Returns the number of blocks of the model, at least 1."""
        return max(self.job.model.blocks, 1)

    @property
    def rate(self) -> float:
        """Returns the nominal FLOP/s of matrix products at the job's precision."""
        return self.device.peak[self.recipe.rate]


def build_cost_context(job: Job, practice: RuntimeModel = MESHWRIGHT_RUNTIME) -> CostContext:
    """Builds the context of a job.

    Raises:
        InputError: no device of the cluster computes at the job's precision.
    """
    recipe = job.workload.recipe
    practice = practice._replace(gradient=EXACT_GRAD_BYTES, reduced=EXACT_GRAD_BYTES) if recipe.exact else practice
    recipe = recipe if practice.master < 0 else recipe.but(master=practice.master)
    practice = practice._replace(
        products=practice.products or recipe.products, reduced=practice.reduced or recipe.reduced
    )
    device, notes = slowest_device(job.cluster, recipe.rates)
    return CostContext(job, recipe, device, link_model(job.cluster), layer_runs(job.model.layers), notes, practice)


def slowest_device(cluster: Cluster, rates_needed: tuple[str, ...]) -> tuple[Device, tuple[str, ...]]:
    """Returns one device with the minimum of each property over the groups, and a note if the groups differ."""
    devices = [group.device for group in cluster.groups]
    for device in devices:
        for precision in rates_needed:
            if not device.peak.get(precision):
                known = ", ".join(name for name, rate in device.peak.items() if rate)
                raise InputError(
                    Message(
                        "device {device} has no rate for precision {precision}; it has {known}",
                        device=device.name,
                        precision=precision,
                        known=known,
                    )
                )
    if all(device == devices[0] for device in devices):
        return devices[0], ()
    rates = [device.peak[rates_needed[0]] * device.efficiency for device in devices]
    slow = devices[rates.index(min(rates))]
    names = " + ".join(dict.fromkeys(device.name for device in devices))
    even = slow.but(
        name=slow.name,
        memory=min(device.memory for device in devices),
        bandwidth=min(device.bandwidth for device in devices),
        context=max(device.context for device in devices),
    )
    return even, (
        Message(
            "heterogeneous devices ({names}): every rank is modeled as the slowest ({slow}) with the smallest memory",
            names=names,
            slow=slow.name,
        ),
    )


def layer_runs(layers: tuple[LayerSpec, ...]) -> tuple[LayerRun, ...]:
    """Returns the layers as ranks store them. See [Note: flat layout] for the tied vocabulary."""
    tied = {layer.tied for layer in layers if layer.tied is not None}
    result: list[LayerRun] = []
    block = 0
    for layer in layers:
        own = layer.parameters[1:] if layer.tied is not None else layer.parameters
        result.append(LayerRun(layer, own, block, own_bucket=layer.name in tied))
        block += layer.repeat if layer.name == BLOCK else 0
    for layer in layers:
        if layer.name in tied:
            copied = LayerSpec(name=layer.name, parameters=layer.parameters)
            result.append(LayerRun(copied, layer.parameters, block, own_bucket=True, copy=True))
    return tuple(result)
