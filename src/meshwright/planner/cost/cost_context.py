"""Defines the facts that all plans of a job share in the cost model.

`RuntimeModel` describes the runtime that runs a plan, beyond what the plan says. The default is this project's runtime;
`validation` describes others. The facts are bytes, kernels and orders, never efficiencies: the rate that a device
reaches is a fact of the device.

`CostContext` holds the job's precision recipe, the device that every rank can count on, the links, and the layers in
forward order. On heterogeneous groups an even plan runs at the speed of the slowest device and must fit the smallest
memory. The context combines these into one device, and `notes` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from meshwright.core.errors import InputError
from meshwright.planner.cost import constants
from meshwright.planner.cost.links import UNCOMPRESSED, CompressionRatio, LinkModel, link_model
from meshwright.planner.cost.plan_grid import TpEpShape
from meshwright.spec.cluster import Cluster, Device
from meshwright.spec.job import Job
from meshwright.spec.layout import align_numel
from meshwright.spec.model import LayerSpec, ParameterSpec
from meshwright.spec.precision import Recipe


class RuntimeModel(NamedTuple):
    """`0` or an empty word: as the precision recipe says."""

    master: int = -1
    """Bytes of a main weight in addition to the compute dtype; -1: those of the recipe."""
    gradient: int = 0
    """Bytes of a held gradient."""
    bucketed: int = 0
    """Bytes of a second copy of the gradients at ZeRO 0, in buckets of their own."""
    reduced: int = 0
    """Bytes of a gradient element on its way between ranks."""
    products: str = ""
    """Precision of the blocks' matrix products."""
    attention: float = 1.0
    """Rate of the attention kernel over that of FlashAttention-2, where the device knows a faster one."""
    repeated_products: float = 0.0
    """Fraction of a block's forward matrix products that backward recomputes although the plan does not recompute the
    block."""
    repeated_rest: float = 0.0
    """The same of its other operations."""
    reduce_hidden: bool = True
    """Whether the gradient reduction overlaps with the last backward."""
    gather_hidden: bool = False
    """Whether the all-gather of weights of ZeRO 1 and 2 overlaps with the next forward."""
    tensor_hidden: float = 0.0
    """Fraction of tensor-parallel traffic that is chunked and overlaps with matrix products."""
    launch: float = 1.0
    """Host seconds a kernel over those of eager PyTorch: less where graphs or one compiled call launch many."""
    gathered: bool = False
    """Sequence parallelism keeps what it gathered for backward; else it gathers again."""


MESHWRIGHT_RUNTIME = RuntimeModel()


BLOCK, EMBEDDING, HEAD = "block", "embedding", "head"

EXACT_GRAD_BYTES = 8
"""Bytes of a gradient that is an integer."""


class LayerRun(NamedTuple):
    """A run of equal layers as ranks hold it: `own` without a weight that another entry holds.

    `copy` marks the last stage's own copy of a tied vocabulary; `own_bucket` a layer that is a flat unit by itself.
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
        """Elements of one layer on one tensor rank, without experts that other ranks share."""
        return sum(cut.numel(parameter) for parameter in self.own if not cut.splits_experts(parameter))

    def aligned(self, cut: TpEpShape) -> int:
        """The same with every tensor padded as in [Note: flat layout]."""
        return sum(align_numel(cut.numel(parameter)) for parameter in self.own if not cut.splits_experts(parameter))

    def experts(self, cut: TpEpShape) -> int:
        """Elements of its experts, where other ranks than those of the dense weights share them; padded too."""
        return sum(align_numel(cut.numel(parameter)) for parameter in self.own if cut.splits_experts(parameter))

    def largest(self, cut: TpEpShape) -> int:
        """Elements of the largest tensor on one tensor rank: autograd makes its gradient whole before it goes where it
        is summed."""
        return max(map(cut.numel, self.layer.parameters), default=0)


@dataclass(frozen=True)
class CostContext:
    """Made once per job; `entries` are in forward order, a tied copy last."""

    job: Job
    recipe: Recipe
    device: Device
    fabric: LinkModel
    entries: tuple[LayerRun, ...]
    notes: tuple[str, ...]
    practice: RuntimeModel = MESHWRIGHT_RUNTIME

    @cached_property
    def imbalance(self) -> float:
        """Tokens of the busiest expert rank over the mean; a capacity allows no more."""
        return min(constants.EXPERT_IMBALANCE, self.job.workload.expert_capacity or constants.EXPERT_IMBALANCE)

    @cached_property
    def on_host(self) -> bool:
        """Ranks are processes on CPUs: no caching allocator, gloo instead of NCCL."""
        return self.device.name.lower().startswith("cpu")

    @cached_property
    def shares_memory(self) -> bool:
        """All ranks are processes of one host and read each other's buffers instead of being sent them."""
        return self.on_host and sum(group.nodes for group in self.job.cluster.groups) == 1

    @cached_property
    def wire(self) -> CompressionRatio:
        """What compression leaves of gradients between nodes: of all matrices two thin factors, of all else its
        code."""
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
        """The layer that ends in the loss."""
        return next((entry for entry in self.entries if entry.layer.name == HEAD), None)

    def recomputed_uncompiled(self, entry: LayerRun, cut: TpEpShape, stages: bool) -> int:
        """Elements of the largest gradient that a layer makes before it goes where it is summed: in stages on cores
        products add to it. Source:
        runtime/wgrad/accumulation.py."""
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
        """Bytes of one element of a held gradient."""
        return self.practice.gradient or self.recipe.gradient_size

    @cached_property
    def host_bandwidth(self) -> float:
        """Bytes/s between a device and its host, one direction; 0 where nothing can wait there."""
        return self.job.cluster.host_bandwidth

    @cached_property
    def storage_bandwidth(self) -> float:
        """Bytes/s between a device and the disk of its node; 0 where there is none."""
        return self.job.cluster.storage_bandwidth

    @cached_property
    def host_memory(self) -> float:
        """Bytes that can wait on the host for each of its devices."""
        taken = 1.0 if self.on_host else constants.PINNED_MEMORY_OVERHEAD
        return min(group.host_memory / group.devices for group in self.job.cluster.groups) / taken

    @cached_property
    def host_update(self) -> float:
        """Parameters that the host of the slowest group updates in a second for one of its devices: as measured, else
        as ever."""
        return min(
            (group.host_update or constants.CPU_UPDATE_PARAMS_PER_SECOND) / group.devices
            for group in self.job.cluster.groups
        )

    @property
    def devices_per_node(self) -> int:
        """Returns the devices of the largest node."""
        return max(group.devices for group in self.job.cluster.groups)

    @property
    def blocks(self) -> int:
        """Returns the number of blocks of the model, at least 1."""
        return max(self.job.model.blocks, 1)

    @property
    def rate(self) -> float:
        """FLOP/s of matrix products at the job's precision, as sold."""
        return self.device.peak[self.recipe.rate]


def build_cost_context(job: Job, practice: RuntimeModel = MESHWRIGHT_RUNTIME) -> CostContext:
    """Raises InputError when no device of the cluster computes at the job's precision."""
    recipe = job.workload.recipe
    practice = practice._replace(gradient=EXACT_GRAD_BYTES, reduced=EXACT_GRAD_BYTES) if recipe.exact else practice
    recipe = recipe if practice.master < 0 else recipe.but(master=practice.master)
    practice = practice._replace(
        products=practice.products or recipe.products, reduced=practice.reduced or recipe.reduced
    )
    device, notes = slowest_device(job.cluster, recipe.rates)
    return CostContext(job, recipe, device, link_model(job.cluster), layer_runs(job.model.layers), notes, practice)


def slowest_device(cluster: Cluster, rates_needed: tuple[str, ...]) -> tuple[Device, tuple[str, ...]]:
    """One device with the least of everything that the groups have; the note that says it where they differ."""
    devices = [group.device for group in cluster.groups]
    for device in devices:
        for precision in rates_needed:
            if not device.peak.get(precision):
                known = ", ".join(name for name, rate in device.peak.items() if rate)
                raise InputError(f"device {device.name} has no rate for precision {precision}; it has {known}")
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
        f"heterogeneous devices ({names}): every rank is modeled as the slowest ({slow.name}) with the smallest memory",
    )


def layer_runs(layers: tuple[LayerSpec, ...]) -> tuple[LayerRun, ...]:
    """The layers as ranks hold them (see [Note: flat layout] for the tied vocabulary)."""
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
