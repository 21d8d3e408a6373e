"""Computes the seconds of one layer's forward and backward on one rank: compute, and tensor-parallel communication. The
cost model (cost_model.py) adds up the layers of each rank.

- Matrix product of a weight: max(FLOPs / rate, bytes / bandwidth) + ramp, where
  rate = peak * efficiency * sustained.
- Attention: FLOPs / (rate * attention efficiency). Fused attention pads heads to multiples of ATTENTION_HEAD_STEP.
- All other operations: bytes / bandwidth. A compiled block moves fewer bytes (`LayerSpec.fused_moved`).
- Launch: on an accelerator, the sum is at least the host time to launch kernels and collectives. A CPU launches and
  computes with the same cores, so the launch time is added. It is also added to the forward of layers with experts if
  the host waits for the number of tokens of each expert (`RuntimeModel.routing_waits`): the kernels of the next layers
  are then not launched ahead. Backward knows these numbers. The host launches a compiled block in less time
  (COMPILED_LAUNCH_FRACTION). On a CPU, only compiled blocks of several tensor ranks are faster (CPU_COMPILED_FRACTION).

Tensor parallelism divides the FLOPs of the weights that it shards. It divides element-wise work in proportion to the
sharded fraction of the saved activations. Sources of the formulas: Calculon (SC23), autoparallel's roofline. For the
sources of the constants see constants.py.

The rate of a matrix product depends on the shape of the product. Let the product have m x n outputs and inner dimension
k, and let the device have p processors. The library divides the outputs into tiles of rows x columns outputs. The
device computes p tiles at a time (a wave), so the last wave may be partly empty (wave quantisation). Small tiles reach
a smaller fraction of the rate. The time with a tile of MATMUL_TILES is

    waves = ceil(ceil(m / rows) ceil(n / columns) / p)
    time = waves x 2 rows columns k p / (rate x fraction of the tile)

The model uses the fastest tile. If there are fewer tiles than processors, the library divides the inner dimension
instead (split-k). The time is at least the time to move the operands through memory. Each product also has a fixed time
to start and end. The inner dimension is computed in steps of TILE_DEPTH_BYTES, or of ALIGNED_BYTES on devices without
bf16. A product whose inputs or outputs on a tensor rank are no multiple of ALIGNED_BYTES runs slower
(MISALIGNED_MATMUL_FRACTION).

In forward, m x n is tokens x outputs and k is inputs. In backward there are two products: tokens x inputs with inner
dimension outputs, and outputs x inputs with inner dimension tokens. Source of the formulas: NVIDIA, Matrix
Multiplication Background User's Guide, sections 3 and 4. Source of the tiles (those of CUTLASS) and their fractions:
figure 6 of this guide.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshwright.planner.cost import constants
from meshwright.planner.cost.cost_context import BLOCK, EMBEDDING, HEAD, CostContext
from meshwright.planner.cost.float8 import MAGNITUDE_BYTES, float8_weights, scale_exchanges
from meshwright.planner.cost.links import collective_rates, ranks_by_tier
from meshwright.planner.cost.overlap import overlapped
from meshwright.planner.cost.plan_grid import Array, TpEpShape
from meshwright.spec.layout import MIN_TENSOR_CHUNK_BYTES
from meshwright.spec.model import LayerSpec, ParameterSpec

if TYPE_CHECKING:
    from meshwright.planner.cost.cost_context import CostContext


def sustained_flops(setting: CostContext, precision: str) -> float:
    """Returns the FLOP/s of large matrix products on a warm device during training. This is the product of the nominal
    rate, the efficiency of large products, and the fraction that remains under power and clock limits."""
    device = setting.device
    peak = device.peak.get(precision) or setting.rate
    return peak * device.efficiency * device.sustained.get(precision, constants.SUSTAINED_MATMUL_FRACTION)


def matmul_seconds(setting: CostContext, parts: MatmulShapes, tokens: Array, lower: Array) -> tuple[Array, Array]:
    """Returns the seconds of all matrix products of a layer in forward and in backward, over axes (b) of GRID_AXES.
    `tokens` is the tokens of a micro-batch (b). `lower` is the result of `lower_precision_products`."""
    rate: Any = sustained_flops(setting, setting.recipe.rate)
    if lower.any():
        rate = lower * sustained_flops(setting, setting.practice.products) + (1.0 - lower) * rate
        rate = rate[:, None]
    size = setting.recipe.size
    flops = parts.flops[:, None] * tokens
    ramp = parts.products[:, None] * constants.MATMUL_RAMP_SECONDS
    if setting.on_host or not setting.device.processors:
        bandwidth = setting.device.bandwidth * constants.MEMORY_BANDWIDTH_EFFICIENCY
        move = size * (parts.weights[:, None] + (parts.outputs + parts.inputs)[:, None] * tokens) / bandwidth
        forward = (np.maximum(flops / rate, move) + ramp).sum(axis=0)
        return forward, constants.BACKWARD_FORWARD_RATIO * forward
    rates: Array = rate * _aligned_fraction(parts, size)[:, None]
    outputs, inputs = parts.outputs[:, None] + 0 * tokens, parts.inputs[:, None] + 0 * tokens
    rows = tokens + 0 * outputs
    forward = _tiled_matmul_seconds(setting, (rows, outputs, inputs), flops, rates, size)
    before = _tiled_matmul_seconds(setting, (rows, inputs, outputs), flops, rates, size)
    weights = _tiled_matmul_seconds(setting, (outputs, inputs, rows), flops, rates, size)
    return (forward + ramp).sum(axis=0), (before + weights + 2 * ramp).sum(axis=0)


def _tiled_matmul_seconds(
    setting: CostContext, shape: tuple[Array, Array, Array], flops: Array, rate: Array, size: int
) -> Array:
    """Returns the seconds of products over (weights, b). `shape` is the arrays m, n and k of the module docstring. If a
    dimension is 0, the shape is unknown and only the FLOPs determine the time."""
    m, n, k = shape
    processors = setting.device.processors
    step = (constants.TILE_DEPTH_BYTES if "bf16" in setting.device.peak else constants.ALIGNED_BYTES) // size
    depth = np.ceil(k / step) * step
    best = np.full(flops.shape, np.inf)
    for rows, columns, share in constants.MATMUL_TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        turns = np.where(
            tiles >= processors,
            np.ceil(tiles / processors),
            np.maximum(tiles / processors, constants.SPLIT_K_WAVE_FRACTION),
        )
        best = np.minimum(best, turns * (2.0 * rows * columns * processors / share) * depth)
    moved = size * (m * n + m * k + n * k) / (setting.device.bandwidth * constants.MEMORY_BANDWIDTH_EFFICIENCY)
    return np.where(best > 0, np.maximum(np.maximum(best, flops) / rate, moved), flops / rate)


def _aligned_fraction(parts: MatmulShapes, size: int) -> Array:
    """Returns the fraction of the rate that each product reaches for the alignment of its rows. `size` is the bytes of
    an element."""
    step = constants.ALIGNED_BYTES // size
    aligned = (parts.outputs % step == 0) & (parts.inputs % step == 0)
    return np.where(aligned, 1.0, constants.MISALIGNED_MATMUL_FRACTION)


def _attention_padding(layer: LayerSpec, heads: int, size: int) -> float:
    """Returns the time of the attention core divided by its time without padding of the heads. The result is 1 if the
    number of heads is not known (0)."""
    width = layer.query_width / heads if heads else 0.0
    if not width:
        return 1.0
    if layer.context_moved:  # two products, each with rows of the width of a head
        return 1.0 if width % (constants.ALIGNED_BYTES // size) == 0 else 1.0 / constants.MISALIGNED_MATMUL_FRACTION
    return ceil(width / constants.ATTENTION_HEAD_STEP) * constants.ATTENTION_HEAD_STEP / width


class LayerTimes(NamedTuple):
    """The seconds of one layer of each layer run (cost_context.py), over (layer run, b, s).

    `tensor_forward` and `tensor_backward` are tensor-parallel communication. `attention` is the part of `forward` in
    the attention core. `weights` is the deferrable part of `backward`: the weight gradients of the two-dimensional
    weights of blocks. `derived` is the time of selective recompute.
    """

    forward: Array
    backward: Array
    tensor_forward: Array
    tensor_backward: Array
    attention: Array
    weights: Array
    derived: Array


class MatmulShapes(NamedTuple):
    """The matrix weights of a layer on one tensor rank, as arrays over the weights: FLOPs per token, elements, outputs,
    inputs, and number of products."""

    flops: Array
    weights: Array
    outputs: Array
    inputs: Array
    products: Array


def matmul_shapes(layer: LayerSpec, cut: TpEpShape) -> MatmulShapes:
    """Returns the matrix products of a layer. The FLOPs of the layer are divided among its weights in proportion to
    their size. Stacked experts count as separate products. Routing is assumed to be balanced.

    LoRA adapters on frozen weights do not count as products. Their memory traffic is part of `layer.moved`
    (planner/inputs/job.py).
    """
    weights = _matmul_weights(layer)
    whole = sum(weight.numel for weight in weights)
    rows = []
    for weight in weights:
        degree = cut.expert_tp if cut.splits_experts(weight) else cut.tp
        share = weight.used_numel(degree) / weight.numel
        accumulation = cut.ep if cut.splits_experts(weight) else 1
        busy = share * degree / cut.tp
        plane = [size * (share if weight.split == axis else 1.0) for axis, size in enumerate(weight.shape)][-2:]
        rows.append(
            (
                layer.flops * weight.numel / whole * busy,
                weight.numel * share / accumulation,
                *(plane if len(weight.shape) < 4 else (0.0, 0.0)),
                max(weight.experts // accumulation, 1),
            )
        )
    return MatmulShapes(*np.array(rows, dtype=float).reshape(-1, 5).T)


def _matmul_weights(layer: LayerSpec) -> list[ParameterSpec]:
    weights = [parameter for parameter in layer.parameters if len(parameter.shape) >= 2] if layer.flops else []
    return [weight for weight in weights if weight.frozen] or weights


def lower_precision_products(setting: CostContext, layer: LayerSpec) -> Array:
    """Returns 1 for each weight of `matmul_shapes` whose products have the precision `RuntimeModel.products`, else 0.
    This runtime multiplies in float8 only weights that are linear layers."""
    weights = _matmul_weights(layer)
    if layer.name != BLOCK or not setting.practice.products:
        return np.zeros(len(weights))
    own = {weight.name for weight in float8_weights(setting, layer)}
    return np.array([1.0 * (weight.name in own or not setting.recipe.products) for weight in weights])


def layer_times(
    setting: CostContext, cut: TpEpShape, stride: int, compiled: bool, tokens: Array, sequence_parallel: Array
) -> LayerTimes:
    """Returns the seconds of each layer on one rank. `tokens` is the tokens of a micro-batch (b), `sequence_parallel`
    the choices of sequence parallelism (s). `stride` is the distance between neighbouring tensor ranks. `compiled`:
    whether blocks are compiled."""
    rows = []
    for entry in setting.entries:
        if entry.copy:
            rows.append(np.zeros((7, len(tokens), len(sequence_parallel))))
            continue
        is_compiled = compiled and entry.is_block
        *computing, attention, weights, derived = _compute_seconds(
            setting, entry.layer, cut, tokens, sequence_parallel, fused=is_compiled and not setting.on_host
        )
        *exchange, behind = _tp_comm_seconds(setting, entry.layer, (cut.tp, stride), tokens, sequence_parallel)
        exchange[1] = exchange[1] + overlapped(behind, weights)
        launching = _launch_seconds(setting, entry.layer, cut, sequence_parallel, is_compiled)
        forward = computing[0]
        if setting.on_host:
            gain = constants.CPU_COMPILED_FRACTION if is_compiled and cut.tp > 1 and not entry.layer.routed else 1.0
            computing = [gain * (seconds + host) for seconds, host in zip(computing, launching, strict=True)]
        else:
            computing = [
                np.maximum(each, host - wait) for each, host, wait in zip(computing, launching, exchange, strict=True)
            ]
            if entry.layer.routed and setting.practice.routing_waits:
                computing[0] = forward + launching[0]
        part = entry.layer.derived_moved / entry.layer.moved if entry.layer.moved else 0.0
        derived = derived + part * launching[0] if setting.on_host else np.maximum(derived, part * launching[0])
        rows.append(np.stack([*computing, *exchange, attention, weights, derived]))
    return LayerTimes(*np.stack(rows, axis=1))


def _compute_seconds(
    setting: CostContext, layer: LayerSpec, cut: TpEpShape, tokens: Array, sequence_parallel: Array, fused: bool
) -> tuple[Array, ...]:
    """Returns five arrays of seconds over axes (b, s) of GRID_AXES, without communication and launches: forward,
    backward, the attention core in forward, the deferrable weight gradients in backward, and selective recompute.
    `fused`: whether one kernel computes several operations of the layer."""
    tp, device, size, practice = cut.tp, setting.device, setting.recipe.size, setting.practice
    bandwidth = device.bandwidth * constants.MEMORY_BANDWIDTH_EFFICIENCY
    parts = matmul_shapes(layer, cut)
    context = setting.job.workload.sequence
    lower = lower_precision_products(setting, layer)
    forward_products, backward_products = matmul_seconds(setting, parts, tokens, lower)
    frozen = any(parameter.frozen for parameter in layer.parameters)
    if frozen:  # backward of frozen weights computes only the gradients of inputs
        backward_products = backward_products / 2.0
    rate = sustained_flops(setting, setting.recipe.rate) * device.attention * practice.attention
    if device.processors and not setting.on_host:
        rate /= _attention_padding(layer, setting.job.model.divisible.get("heads", 0), size)
    attention = layer.attention_flops / tp * context * tokens / rate
    scores = layer.context_moved / tp * context * tokens * (size / bandwidth)
    each = tokens[:, None] * local_fraction(layer, size, tp, sequence_parallel) * (size / bandwidth)
    moved = layer.moved - layer.fused_moved * fused
    rest = moved * each + scores[:, None]
    forward = (forward_products + attention)[:, None] + rest
    accumulation = (
        parts.weights.sum() * constants.GRAD_ACCUMULATION_PASSES * setting.gradient / bandwidth * (not frozen)
    )
    backward = (
        (backward_products + constants.ATTENTION_BACKWARD_RATIO * attention)[:, None]
        + constants.BACKWARD_FORWARD_RATIO * rest
        + accumulation
    )
    if lower.any():
        casts = constants.FP8_CAST_PASSES * size / bandwidth * tokens[:, None]
        forward, backward = (
            forward + (lower * parts.inputs).sum() * casts,
            backward + (lower * (parts.inputs + parts.outputs)).sum() * casts,
        )
    packed = sum(cut.numel(weight) for weight in layer.parameters if weight.bits is not None)
    if packed:  # each product converts its weight to the compute dtype, in forward and in backward
        unpacking = packed * (constants.UNPACK_BYTES + constants.UNPACK_PASSES * size) / bandwidth
        forward, backward = forward + unpacking, backward + unpacking
    if layer.name == BLOCK:
        backward = backward + practice.repeated[0] * forward_products[:, None] + practice.repeated[1] * rest
    core = np.broadcast_to((attention + scores)[:, None], forward.shape)
    plain = sum(weight.numel for weight in layer.parameters if len(weight.shape) == 2) * (layer.name == BLOCK)
    share = plain / max(sum(weight.numel for weight in layer.parameters if len(weight.shape) >= 2), 1)
    weights = np.broadcast_to((share * (not frozen) * (backward_products / 2.0 + accumulation))[:, None], forward.shape)
    return forward, backward, core, weights, layer.derived_moved * (moved / (layer.moved or 1.0)) * each


def _launch_seconds(
    setting: CostContext, layer: LayerSpec, cut: TpEpShape, sequence_parallel: Array, compiled: bool
) -> tuple[Array, Array]:
    """Returns the seconds in which the host launches the kernels and collectives of a layer, in forward and in
    backward, over axes (s) of GRID_AXES. Expert layers are launched eagerly also in compiled blocks."""
    count = 1 + matmul_shapes(layer, cut).products.sum()
    if setting.on_host:
        kernels = count * constants.CPU_KERNELS_PER_MATRIX * cpu_op_seconds(setting) + 0.0 * sequence_parallel
        return kernels, constants.BACKWARD_FORWARD_RATIO * kernels
    kernels = count * constants.KERNELS_PER_MATRIX * constants.KERNEL_LAUNCH_SECONDS + 0.0 * sequence_parallel
    kernels = kernels * (constants.COMPILED_LAUNCH_FRACTION if compiled and not layer.routed else 1.0)
    calls = (
        constants.TP_ALL_REDUCES_PER_BLOCK
        * constants.COLLECTIVE_LAUNCH_SECONDS
        * float(cut.tp > 1 and layer.name == BLOCK)
    )
    forward, backward = (kernels + calls * np.where(sequence_parallel, turns, 1.0) for turns in (2.0, 3.0))
    return setting.practice.launch * forward, setting.practice.launch * (
        backward + (constants.BACKWARD_FORWARD_RATIO - 1.0) * kernels
    )


def cpu_op_seconds(setting: CostContext) -> float:
    """Returns the seconds of one operation on a CPU: the measured value (`Device.launch`), or CPU_OP_SECONDS if it was
    not measured. Calibration divides the measured value by the fraction of a processor that a rank gets."""
    return setting.device.launch or constants.CPU_OP_SECONDS


def local_fraction(layer: LayerSpec, size: int, tp: int, sequence_parallel: Array) -> Array:
    """Returns the fraction of a layer's element-wise work on one tensor rank, over axes (s) of GRID_AXES. The fraction
    is estimated from the saved activations."""
    split = layer.saved_split * size + layer.fixed_split
    whole = layer.saved_whole * size + layer.fixed_whole
    total = split + whole
    if not total:
        split, whole, total = float(layer.name == HEAD), float(layer.name != HEAD), 1.0
    divided = sequence_parallel & (layer.name == BLOCK)
    return (split / tp + whole / np.where(divided, tp, 1)) / total


def _tp_comm_seconds(
    setting: CostContext, layer: LayerSpec, tensor: tuple[int, int], tokens: Array, sequence_parallel: Array
) -> tuple[Array, Array, Array]:
    """Returns the exposed seconds of tensor-parallel collectives in forward and in backward, and the seconds of those
    that overlap with weight gradients, over axes (b, s) of GRID_AXES. `tensor` is the number of tensor ranks, and the
    distance between neighbouring tensor ranks. Sequence parallelism replaces an all-reduce by an all-gather and a
    reduce-scatter. Each row-parallel convolution sums its output once; blocks without them sum the hidden state
    TP_ALL_REDUCES_PER_BLOCK times. The runtime overlaps the collectives with products, except in float8
    (`_chunk_gain`)."""
    shape = (len(tokens), len(sequence_parallel))
    none = np.zeros(shape)
    tp, stride = tensor
    if tp == 1 or not any(parameter.split is not None for parameter in layer.parameters):
        return none, none, none
    ranks = collective_rates(setting.fabric, tp, stride)
    convolutions = sum(len(parameter.shape) == 4 and parameter.split == 1 for parameter in layer.parameters)
    width = layer.output if convolutions else setting.job.model.hidden
    state = (tokens * (width * setting.recipe.size))[:, None]
    total = np.where(sequence_parallel, 2.0 * ranks.gather(state), ranks.reduce(state))
    gather = np.where(sequence_parallel, ranks.gather(state), 0.0)
    if layer.name == BLOCK:
        hidden = setting.practice.tensor_hidden
        sums = convolutions or constants.TP_ALL_REDUCES_PER_BLOCK
        seen = sums * (1.0 - hidden * (1.0 - constants.OVERLAP_SLOWDOWN))
        behind = np.where(sequence_parallel, ranks.gather(state) + gather, total) * setting.practice.dgrad_hidden
        one, other = (ranks.reduce(count * MAGNITUDE_BYTES, count) for count in scale_exchanges(setting, layer))
        forward, backward = seen * total + one, seen * (total + gather - behind) + other
        overlaps = not (convolutions or float8_weights(setting, layer) or shares_memory(setting, tp, stride))
        if setting.tensor_chunks > 1 and overlaps:
            gains = _chunk_gain(setting, layer, tensor, tokens, state)
            forward, backward = (
                seconds - np.where(sequence_parallel, *gain[::-1])
                for seconds, gain in zip((forward, backward), gains, strict=True)
            )
        return forward, backward, seen * behind
    if layer.name == EMBEDDING:
        return ranks.reduce(state) + none, gather + none, none
    if layer.name == HEAD:
        loss = constants.VOCAB_LOSS_ALL_REDUCES * ranks.reduce((tokens * constants.LOSS_ELEMENT_BYTES)[:, None])
        return loss + gather, ranks.reduce(state) + none, none
    return total, total, none


def shares_memory(setting: CostContext, ranks: int, stride: int) -> bool:
    """Returns whether `ranks` ranks at distance `stride` are CPU processes, some of which share memory. Their
    communication occupies the processors that compute."""
    return setting.on_host and ranks_by_tier(setting.fabric, ranks, stride)[0] > 1


def product_seconds(setting: CostContext, numel: float, tokens: Array) -> Array:
    """Returns the seconds of matrix products of `tokens` tokens with `numel` elements of weights inside of a block, at
    the rate of large products."""
    rate = sustained_flops(setting, setting.practice.products or setting.recipe.rate)
    return tokens * (2.0 * numel) / rate


def _chunk_gain(
    setting: CostContext, layer: LayerSpec, tensor: tuple[int, int], tokens: Array, state: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Returns the seconds that products hide of a block's collectives over tensor ranks (tensor_parallel/chunks.py),
    over axes (b, 1) of GRID_AXES: in forward and in backward, each without and with sequence parallelism. `state` is
    the bytes of the hidden state.

    A region gathers its input during the products of its column layers, and sums its output during the products of its
    row layer. Backward sums the gradient of the input during the products of the column layers for input and weights.
    `edge` is the fraction of the last chunk. Its sum in forward is exposed, and its product does not overlap with its
    gather. Each additional product takes MATMUL_RAMP_SECONDS. Chunks have at least MIN_TENSOR_CHUNK_BYTES. The value is
    negative if the additional messages and products take longer than the products hide.
    """
    tp, stride = tensor
    ranks = collective_rates(setting.fabric, tp, stride)
    least = MIN_TENSOR_CHUNK_BYTES["gloo" if setting.on_host else "nccl"]
    chunks = np.clip(state // least, 1, setting.tensor_chunks)
    edge = 1.0 / np.maximum(2.0 * chunks - 2.0, 1.0)
    arriving = 1.0 - edge * (tp - 1) / tp
    reduce, gather = ranks.reduce(state, chunks), ranks.gather(state, chunks)
    forward = backward = [0.0 * state, 0.0 * state]
    ramp, more = constants.MATMUL_RAMP_SECONDS, chunks - 1.0
    gathered = np.where(more > 0, chunks * min(tp - 1, 2), 0.0)
    for columns, row, trained, count in _region_numels(layer)[: constants.TP_ALL_REDUCES_PER_BLOCK]:
        column, last = (product_seconds(setting, numel / tp, tokens)[:, None] for numel in (columns, row))
        behind = (1.0 - edge) * column + product_seconds(setting, trained / tp, tokens)[:, None]
        in_forward = [
            ranks.reduce(state) - edge * reduce - (1.0 - edge) * overlapped(reduce, last) - ramp * more,
            2.0 * ranks.gather(state)
            - (edge * gather + (1.0 - edge) * overlapped(gather, last) + overlapped(gather, arriving * column))
            - ramp * (more + gathered * count),
        ]
        in_backward = [
            ranks.reduce(state) - overlapped(reduce, behind) - ramp * more * count,
            3.0 * ranks.gather(state)
            - (overlapped(gather, arriving * last) + overlapped(ranks.gather(state) + gather, behind))
            - ramp * (gathered + more * count),
        ]
        forward = [total + gain for total, gain in zip(forward, in_forward, strict=True)]
        backward = [total + gain for total, gain in zip(backward, in_backward, strict=True)]
    return (forward[0], forward[1]), (backward[0], backward[1])


def _region_numels(layer: LayerSpec) -> list[tuple[float, float, float, int]]:
    """Returns for each region of a block the elements of its column layers, of its row layer, and of the column layers
    that are trained, and the number of column layers. A row layer ends a region."""
    found, columns, trained, count = [], 0.0, 0.0, 0
    for weight in layer.parameters:
        if len(weight.shape) == 2 and weight.split == 0:
            columns, trained = columns + weight.numel, trained + weight.numel * (not weight.frozen)
            count += 1
        elif len(weight.shape) == 2 and weight.split == 1:
            found.append((columns, float(weight.numel), trained, count))
            columns, trained, count = 0.0, 0.0, 0
    return found
