"""Models the memory and time of the optimizer: bytes of its states, transient bytes of an update, and seconds of Muon's
matrix products. memory.py and dp_comm.py use these values.

- States: the number of states of the optimizer, in the dtype of the recipe. An 8-bit state has one byte per weight,
  plus the weight's part of a scale that several weights share. Some states have other shapes than the weights (Muon's
  matrices, Adafactor's factors); for them the result is the mean per weight over the model.
- Transient bytes of an update: a gradient is converted if its stored dtype is not the dtype of the update. States and
  weights that are stored with fewer bytes are converted too. A CPU converts chunk by chunk. An accelerator, or an
  update of full tensors, converts a whole parameter group.
- Matrix products of Muon: five iterations of 4 m^2 n + 2 m^3 FLOPs for a matrix of m x n with m <= n. Each full tensor
  is updated on one owner rank (runtime/optim/full_tensor.py). Tensors differ in size, so the rank with the highest
  memory needs somewhat more than the mean.

Two options of the workload add bytes:

- Gradient compression has an error-feedback residual (runtime/comm/compression.py): one element for each element that a
  rank sends to other hosts. For an all-reduce of ZeRO 0 and for a reduce-scatter, the residual has 1 / (ranks per host)
  of the elements of the buffer. For an all-reduce over replicas, the residual has the elements of the shard. Within one
  host there is no residual.
- DiLoCo has the initial weights and the outer momentum (runtime/zero/diloco.py): two elements in the optimizer's dtype
  for each element that a rank updates.

Sources: Jordan et al., Muon, 2024; Shazeer and Stern, Adafactor, arXiv 1804.04235; Dettmers et al., 8-bit Optimizers,
arXiv 2110.02861.
"""

from __future__ import annotations

import numpy as np

from meshwright.planner.cost.compute import sustained_flops
from meshwright.planner.cost.cost_context import CostContext
from meshwright.planner.cost.plan_grid import Array, PlanGrid, broadcast_to_axis

UPDATE_ELEMENT_BYTES = 4
"""Bytes per element of float32, the dtype of updates in a low-precision recipe."""

SHARED_UPDATE_BUFFERS = 3
"""Number of permanent buffers for full tensors (gradients and weights) in the shared memory of a host."""

FULL_TENSOR_BUFFERS = 8
"""Number of buffers for full tensors of an update: sent, received, assembled, and in the optimizer's layout, each for
gradients and for weights."""

NEWTON_SCHULZ_ITERATIONS = 5
"""Number of Newton-Schulz iterations in an update of Muon."""

NON_ELEMENTWISE_OPTIMIZERS = ("muon", "adafactor")
"""Optimizers with states whose shapes differ from those of the weights."""


def optimizer_state_bytes(setting: CostContext) -> float:
    """Returns the bytes of all optimizer states per weight, as a mean over the weights of the model."""
    rule, size = setting.job.workload.optimizer, setting.recipe.state_size
    if rule.name not in NON_ELEMENTWISE_OPTIMIZERS:
        return float(rule.states * rule.state_bytes(size))
    counted = [
        (entry.layer.repeat * each.numel, rule.elements(each.shape, entry.is_block))
        for entry in setting.entries
        if not entry.copy
        for each in entry.own
        if not each.frozen
    ]
    return size * sum(count * elements for count, elements in counted) / max(sum(count for count, _ in counted), 1)


def update_temp_bytes(setting: CostContext) -> float:
    """Returns the transient bytes per weight during an update, for dtype conversions."""
    recipe, rule = setting.recipe, setting.job.workload.optimizer
    lower = recipe.size < UPDATE_ELEMENT_BYTES
    # Gradients that are not stored in float32 are converted to float32 for the update.
    gradient = UPDATE_ELEMENT_BYTES if lower != (recipe.reduced > 0) else 0
    widened = rule.states * UPDATE_ELEMENT_BYTES if recipe.rounds or rule.state else 0
    return gradient + widened + (UPDATE_ELEMENT_BYTES if recipe.rounds else 0)


def updates_in_chunks(setting: CostContext) -> bool:
    """Returns whether an update converts dtypes chunk by chunk and not for a whole parameter group."""
    return setting.on_host and not full_tensor_fraction(setting)


def full_tensor_bytes(setting: CostContext) -> float:
    """Returns the bytes of buffers for full tensors per element of the updated shard. An update of full tensors gathers
    them from other ranks and sends the results back."""
    return FULL_TENSOR_BUFFERS * setting.recipe.state_size * full_tensor_fraction(setting)


def shared_full_tensor_bytes(setting: CostContext) -> float:
    """Returns the bytes per weight of the permanent buffers for full tensors in shared memory, or 0 if ranks do not
    share memory."""
    return (
        SHARED_UPDATE_BUFFERS * setting.recipe.state_size * full_tensor_fraction(setting)
        if setting.shares_memory
        else 0.0
    )


def full_tensor_fraction(setting: CostContext) -> float:
    """Returns the fraction of the weights that the optimizer updates as full tensors: the matrices of blocks for Muon,
    all weights for Adafactor, and none for element-wise optimizers."""
    if setting.job.workload.optimizer.name != "muon":
        return float(setting.job.workload.optimizer.name in NON_ELEMENTWISE_OPTIMIZERS)
    sizes = [
        (entry.layer.repeat * each.numel, entry.is_block and len(each.shape) == 2)
        for entry in setting.entries
        for each in entry.own
    ]
    return sum(count for count, is_matrix in sizes if is_matrix) / max(sum(count for count, _ in sizes), 1)


def newton_schulz_seconds(setting: CostContext) -> float:
    """Returns the seconds of Muon's matrix products per weight that a rank updates, or 0 for other optimizers."""
    if setting.job.workload.optimizer.name != "muon":
        return 0.0
    flops, count = 0.0, 0
    for entry in setting.entries:
        for each in () if entry.copy else entry.own:
            count += entry.layer.repeat * each.numel
            if entry.is_block and len(each.shape) == 2 and not each.frozen:
                small, large = sorted(each.shape)
                flops += entry.layer.repeat * NEWTON_SCHULZ_ITERATIONS * (4.0 * small**2 * large + 2.0 * small**3)
    rate = "bf16" if setting.device.peak.get("bf16") else setting.recipe.rate
    return flops / max(count, 1) / sustained_flops(setting, rate)


def residual_bytes(setting: CostContext, box: PlanGrid, whole: Array, shard: Array) -> Array:
    """Returns the bytes of error-feedback residuals over GRID_AXES, or 0 without compression. `whole` is the elements
    of the full flat buffers, `shard` the elements of the local shard."""
    compression, links = setting.job.workload.compression, setting.fabric
    if compression is None:
        return 0.0 * whole
    stride, holders = box.strides["dp"], [each.holders for each in box.shards]
    replicas = [each.replicas for each in box.shards]
    concurrent = max(links.domain // stride, 1) if links.handed else 1
    scattered = [
        1 / min(concurrent, count) if count > 1 and links.domain % (count * stride) else 0.0 for count in holders
    ]
    separate = [max(concurrent // count, 1) for count in holders]
    summed = [
        1 / min(near, many) if many > 1 and links.domain % (many * count * stride) else 0.0
        for near, many, count in zip(separate, replicas, holders, strict=True)
    ]
    local = setting.job.workload.local is not None
    over_shards, over_copies = (
        broadcast_to_axis(np.array(scattered), "z") * whole,
        broadcast_to_axis(np.array(summed), "z") * shard,
    )
    return (
        over_shards + over_copies * (setting.recipe.state_size if local else setting.gradient) / setting.gradient
    ) * setting.gradient


def diloco_state_bytes(setting: CostContext, shard: Array) -> Array:
    """Returns the bytes that DiLoCo adds on a rank, over GRID_AXES, or 0 without DiLoCo. `shard` is the elements that
    the rank updates."""
    return shard * (2.0 * setting.recipe.state_size * (setting.job.workload.local is not None))
