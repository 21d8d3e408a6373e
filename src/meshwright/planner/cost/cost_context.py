"""Defines the inputs of the cost model that all plans of a job share. Every formula of planner/cost reads them.

`RuntimeModel` describes properties of the runtime that are not in the plan: bytes, kernels, overlap. The default is
this project's runtime; planner/validation describes other runtimes. Efficiencies are properties of a device, so they
are in `Device`.

`CostContext` has the job's precision recipe, one device, the links, and the layers in forward order. Equal layers that
follow each other form a layer run (`LayerRun`), and many arrays have an axis of layer runs. On heterogeneous groups, a
plan with equal ranks runs at the speed of the slowest device and must fit in the smallest memory. The device of the
context is therefore the slowest device, with the minimum memory and memory bandwidth of all groups. `notes` informs the
user about this.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.planner.cost import constants
from meshwright.planner.cost.links import UNCOMPRESSED, CompressionRatio, LinkModel, link_model
from meshwright.planner.cost.plan_grid import TpEpShape
from meshwright.spec.cluster import Cluster, Device
from meshwright.spec.job import Job
from meshwright.spec.layout import MAX_TENSOR_CHUNKS, align_numel
from meshwright.spec.model import LayerSpec, ParameterSpec
from meshwright.spec.precision import Recipe


class UpdateMessages(StrEnum):
    """The collectives of ZeRO 1 around the update."""

    layers = "one for each parameter group"
    whole = "one for all weights, and one all-reduce of all gradients if it follows backward"
    owners = "all-reduces of gradients, and one broadcast by each rank that owns weights; a weight has one owner"


class RuntimeModel(NamedTuple):
    """Properties of a runtime. If `gradient` or `reduced` is 0, or `products` is '', the precision recipe determines
    the property."""

    master: int = -1
    """Bytes of a main weight that is stored in addition to the weight in the compute dtype; -1 means the bytes of the
    recipe."""
    gradient: int = 0
    """Bytes of an element of a stored gradient."""
    bucketed: int = 0
    """Bytes per element of a second copy of the gradients at ZeRO 0, in separate buckets. Only several data ranks have
    buckets."""
    fleeting: bool = False
    """Whether a step with one micro-batch creates a gradient only when backward reaches its layer, and frees it after
    the update. Otherwise gradients have permanent buffers."""
    reduced: int = 0
    """Bytes of a gradient element in transit between ranks."""
    products: str = ""
    """Precision of the blocks' matrix products."""
    attention: float = 1.0
    """Rate of the attention kernel relative to FlashAttention-2, if the device has a faster kernel."""
    repeated: tuple[float, float] = (0.0, 0.0)
    """Fractions of a block's forward that backward recomputes even if the plan has no recompute for the block: of the
    matrix products, and of the other operations."""
    reduce_hidden: bool = True
    """Whether the gradient reduction overlaps with the last backward."""
    replicas_hidden: bool = False
    """Whether the all-reduce over the replicas of a shard group overlaps with backward. Otherwise it follows the last
    backward."""
    gather_hidden: bool = False
    """Whether the all-gather of weights at ZeRO 1 and 2 overlaps with the next forward."""
    messages: UpdateMessages = UpdateMessages.layers
    """The collectives of ZeRO 1 around the update."""
    once_per_step: bool = False
    """Whether ZeRO 2 and 3 with a pipeline reduce gradients once per step, and ZeRO 3 also gathers weights once per
    step. Each rank then stores the full gradients, and at ZeRO 3 the full weights, until the last backward."""
    tensor_hidden: float = 0.0
    """Fraction of tensor-parallel traffic that is split into chunks and overlaps with matrix products."""
    tensor_chunks: int | None = 1
    """Maximum number of chunks in which tensor ranks exchange a hidden state, each during the product of another one.
    1: nothing overlaps. None: MAX_TENSOR_CHUNKS on CPU ranks, 1 on accelerators, where the gain is not measured."""
    dgrad_hidden: bool = False
    """Whether backward overlaps the reduction of input gradients over tensor ranks with weight gradients, and with
    sequence parallelism also the second gather of inputs."""
    launch: float = 1.0
    """Host seconds per kernel divided by those of eager PyTorch. The value is below 1 if CUDA graphs or one compiled
    call launch many kernels."""
    node_copies: bool = False
    """Whether the dispatch to experts sends a token once to each node that has some of its experts, and distributes it
    there over the links inside the node. Otherwise each expert gets its own copy over the network."""
    routing_waits: bool = True
    """Whether the host waits in the forward of each layer with experts until it knows the tokens of each expert."""
    dispatch_hidden: float | None = 0.0
    """Fraction of the dispatch to experts that overlaps with the compute of another micro-batch. None: the dispatch
    overlaps with shared experts."""


MESHWRIGHT_RUNTIME = RuntimeModel(gather_hidden=True, tensor_chunks=None, dispatch_hidden=None)


BLOCK, EMBEDDING, HEAD = "block", "embedding", "head"

EXACT_GRAD_BYTES = 8
"""Bytes of a gradient element that is stored as an integer."""


class LayerRun(NamedTuple):
    """A layer run: equal layers that follow each other. A rank stores some or all layers of a run.

    `own` is the parameters of one layer, except a tied weight that belongs to another layer run. `first_block` is the
    number of blocks before the run. `copy`: whether the run is the replica of a tied vocabulary on the last stage.
    `own_bucket`: whether the layer has a separate parameter group. `size`: the bytes of the compute dtype; the numbers
    of stored elements count a parameter in fewer bits as elements of this dtype.
    """

    layer: LayerSpec
    own: tuple[ParameterSpec, ...]
    first_block: int
    own_bucket: bool = False
    copy: bool = False
    size: int = 4

    @property
    def is_block(self) -> bool:
        """Returns whether the layer is a transformer block."""
        return self.layer.name == BLOCK

    def raw(self, cut: TpEpShape) -> int:
        """Returns the elements of one layer on one tensor rank, without padding and without expert-parallel weights."""
        return sum(self._stored(cut, parameter) for parameter in self.own if not cut.splits_experts(parameter))

    def aligned(self, cut: TpEpShape) -> int:
        """Returns the padded elements of one layer on one tensor rank, without expert-parallel weights ([Note: flat
        layout])."""
        return sum(
            align_numel(self._stored(cut, parameter)) for parameter in self.own if not cut.splits_experts(parameter)
        )

    def experts(self, cut: TpEpShape) -> int:
        """Returns the padded elements of the expert weights of one layer on one rank, or 0 without expert
        parallelism."""
        return sum(align_numel(cut.numel(parameter)) for parameter in self.own if cut.splits_experts(parameter))

    def _stored(self, cut: TpEpShape, parameter: ParameterSpec) -> int:
        return parameter.stored_numel(cut.numel(parameter), self.size)

    def largest(self, cut: TpEpShape) -> int:
        """Returns the elements of the largest weight of a layer on one tensor rank. Autograd computes the full gradient
        of a weight before it adds the gradient to the accumulated gradient. A weight in fewer bits is converted to the
        compute dtype for each product."""
        return max(map(cut.numel, self.layer.parameters), default=0)


@dataclass(frozen=True)
class CostContext:
    """The inputs of the cost model for one job.

    `fabric` is the links. `entries` are the layer runs in forward order; the replica of a tied vocabulary is last.
    `notes` are sentences for the user. `practice` is the runtime.
    """

    job: Job
    recipe: Recipe
    device: Device
    fabric: LinkModel
    entries: tuple[LayerRun, ...]
    notes: tuple[str, ...]
    practice: RuntimeModel = MESHWRIGHT_RUNTIME

    @cached_property
    def cache(self) -> dict[Any, Any]:
        """Returns a dict that is empty at first. Functions store results in it that many grids share. A key has the
        name of the function and the arguments on which the result depends."""
        return {}

    def trained(self, tp: int) -> float:
        """Returns the cached result of `ModelSpec.trained` for the compute dtype."""
        key = ("trained", tp)
        if key not in self.cache:
            self.cache[key] = self.job.model.trained(tp, self.recipe.size)
        return float(self.cache[key])

    @cached_property
    def imbalance(self) -> float:
        """Returns the number of tokens for which an expert rank has memory, divided by the mean over expert ranks. The
        capacity factor of the workload limits it."""
        return min(constants.EXPERT_IMBALANCE, self.job.workload.expert_capacity or constants.EXPERT_IMBALANCE)

    @cached_property
    def on_host(self) -> bool:
        """Returns whether ranks are CPU processes, with gloo instead of NCCL and without a caching allocator."""
        return self.device.name.lower().startswith("cpu")

    @cached_property
    def tensor_chunks(self) -> int:
        """Returns the maximum number of chunks of `RuntimeModel.tensor_chunks`."""
        chunks = self.practice.tensor_chunks
        return (MAX_TENSOR_CHUNKS if self.on_host else 1) if chunks is None else chunks

    @cached_property
    def shares_memory(self) -> bool:
        """Returns whether all ranks are CPU processes of one host, which read each other's buffers through shared
        memory."""
        return self.on_host and sum(group.nodes for group in self.job.cluster.groups) == 1

    @cached_property
    def wire(self) -> CompressionRatio:
        """Returns the compression ratio of gradients between nodes. Low-rank compression sends a matrix as two factors
        and other tensors uncompressed. Other compression sends a fixed number of bytes per element."""
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
        """Returns the layer run of the head, the layer that computes the loss, or None if the model has no head."""
        return next((entry for entry in self.entries if entry.layer.name == HEAD), None)

    def separate_wgrad_numel(self, entry: LayerRun, cut: TpEpShape, stages: bool) -> int:
        """Returns the elements of the largest weight gradient of an eager layer, if this gradient is computed in a
        separate buffer and then accumulated. Returns 0 if the matrix product adds it to the accumulated gradient in
        place. `stages`: whether the plan has several stages.

        Matrix products add in place if ranks are CPU processes, the plan has several stages, and the weight has at
        least MIN_IN_PLACE_ELEMENTS elements. In addition, stored gradients must have as many bytes per element as the
        compute dtype, at least 4. Source: runtime/weight_gradients.py.
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
        """Returns the bytes of data that each device can offload to its host. On accelerators, pinned memory allocates
        more than the size of the data, so this is less than the device's part of the host memory. The result is the
        minimum over the groups, and 0 if the host memory of a group is not known."""
        taken = 1.0 if self.on_host else constants.PINNED_MEMORY_OVERHEAD
        return min(group.host_memory / group.devices for group in self.job.cluster.groups) / taken

    @cached_property
    def host_update(self) -> float:
        """Returns the number of parameters per second that a host updates for each of its devices, in the slowest
        group. A measured rate takes precedence over the constant."""
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
    """Returns the context of a job for the runtime `practice`.

    Raises:
        InputError: a device of the cluster has no rate for a precision of the job's matrix products.
    """
    recipe = job.workload.recipe
    practice = practice._replace(gradient=EXACT_GRAD_BYTES, reduced=EXACT_GRAD_BYTES) if recipe.exact else practice
    recipe = recipe if practice.master < 0 else recipe.but(master=practice.master)
    practice = practice._replace(
        products=practice.products or recipe.products, reduced=practice.reduced or recipe.reduced
    )
    device, notes = slowest_device(job.cluster, recipe.rates)
    return CostContext(
        job, recipe, device, link_model(job.cluster), layer_runs(job.model.layers, recipe.size), notes, practice
    )


def slowest_device(cluster: Cluster, rates_needed: tuple[str, ...]) -> tuple[Device, tuple[str, ...]]:
    """Returns the slowest device of the cluster, and a note if devices differ. If they differ, the memory and the
    bandwidth are the minimum over the groups, and the memory of the driver context is the maximum.

    Raises: InputError if a device has no rate for a precision in `rates_needed`.
    """
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


def layer_runs(layers: tuple[LayerSpec, ...], size: int) -> tuple[LayerRun, ...]:
    """Returns the layer runs of a model in forward order. `size`: the bytes of the compute dtype. If the vocabulary is
    tied, its replica is the last run ([Note: flat layout] in spec/layout.py)."""
    tied = {layer.tied for layer in layers if layer.tied is not None}
    result: list[LayerRun] = []
    block = 0
    for layer in layers:
        own = layer.parameters[1:] if layer.tied is not None else layer.parameters
        result.append(LayerRun(layer, own, block, own_bucket=layer.name in tied, size=size))
        block += layer.repeat if layer.name == BLOCK else 0
    for layer in layers:
        if layer.name in tied:
            copied = LayerSpec(name=layer.name, parameters=layer.parameters)
            result.append(LayerRun(copied, layer.parameters, block, own_bucket=True, copy=True, size=size))
    return tuple(result)
