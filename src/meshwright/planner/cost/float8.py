"""Computes the memory and time of the float8 casts of weights, and of the exchange of scales (runtime/float8.py).

A rank casts the weights of linear layers in blocks once in a step, and stores 1 byte per element until the last
backward. Each backward transposes the casts. At ZeRO 3, and if weights are offloaded, each pass casts the gathered
weights again. Ranks that divide a factor exchange its largest magnitude: a column layer in backward, a row layer in
forward, and every layer in both under context parallelism.
"""

from __future__ import annotations

from meshwright.planner.cost import constants
from meshwright.planner.cost.cost_context import BLOCK, CostContext
from meshwright.planner.cost.offload import offload_fractions
from meshwright.planner.cost.plan_grid import Array, PlanGrid, TpEpShape
from meshwright.spec.model import LayerSpec, ParameterSpec
from meshwright.spec.precision import FLOAT8_SIZE_MULTIPLE

MAGNITUDE_BYTES = 4
"""Bytes of the magnitude that the ranks exchange for a factor."""


def float8_weights(setting: CostContext, layer: LayerSpec) -> list[ParameterSpec]:
    """Returns the weights of the layer that this runtime multiplies in float8."""
    if not setting.recipe.products or layer.name != BLOCK:
        return []
    return [
        weight
        for weight in layer.parameters
        if len(weight.shape) == 2
        and not weight.experts
        and weight.bits is None
        and not any(size % FLOAT8_SIZE_MULTIPLE for size in weight.shape)
    ]


def cast_numel(setting: CostContext, layer: LayerSpec, cut: TpEpShape) -> int:
    """Returns the elements of the casts of one layer on one tensor rank."""
    return sum(cut.numel(weight) for weight in float8_weights(setting, layer))


def cast_bytes(box: PlanGrid, casts: Array) -> Array:
    """Returns the bytes of stored casts on each rank class. `casts` is the elements of its float8 weights."""
    return casts * _stores_casts(box)


def cast_seconds(setting: CostContext, box: PlanGrid, casts: Array) -> tuple[Array, Array]:
    """Returns the seconds of memory traffic for the casts: of each micro-batch, and once in a step. The kernels read
    the weight for its maximum, then read it and write the cast. A transposition reads and writes a cast."""
    size, stored = setting.recipe.size, _stores_casts(box)
    seconds = casts / (setting.device.bandwidth * constants.MEMORY_BANDWIDTH_EFFICIENCY)
    cast, transposed = size + 1, 2
    return seconds * (transposed + 2 * cast * (1 - stored)), seconds * (size + cast * stored)


def scale_exchanges(setting: CostContext, layer: LayerSpec) -> tuple[int, int]:
    """Returns how many factors of the layer are divided over tensor ranks, in forward and in backward."""
    splits = [weight.split for weight in float8_weights(setting, layer)]
    return splits.count(1), splits.count(0)


def _stores_casts(box: PlanGrid) -> Array:
    where = offload_fractions(box)
    return 1.0 * ((box.zero < 3) & (where.parameters + where.parameters_files == 0))
