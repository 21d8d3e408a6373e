"""Models the memory and the transfer time of offloaded states, gradients, weights and activations, for memory.py and
cost_model.py.

The transfer rate of a device is its rate while all devices of the node transfer. Devices of a node share the host
memory and the disk. Data-parallel communication and host transfers use the same link. Host transfers can therefore
overlap only with compute during which there is no data-parallel communication.

The offload choices are:

- optimizer: main weights and states. After backward, a pipeline of chunks copies gradients to the host, updates on the
  CPU, and copies weights back ([Note: after the norm]).
- optimizer-disk: main weights and states in files. Each update reads and writes all states; the CPU updates one chunk
  while it reads the next chunk.
- gradients: accumulated gradient shards of ZeRO 2 and 3. The gradients of each micro-batch are copied to the host
  during backward, and the CPU accumulates them.
- parameters: weight shards of ZeRO 3. The shard of a layer is fetched before the layer runs, in forward and in
  backward, overlapped with compute.
- parameters-disk: weight shards in files, fetched through host memory. The update writes the shards, and also reads
  them if there are no separate main weights.
- activations: saved activations are copied to the host in forward and fetched in backward, overlapped with compute. The
  activations of two blocks stay on the device.
- activations-disk: saved activations in files, through host memory.

A plan may offload only a fraction of the states or weights. Resident states are updated on the device while the disk
reads and writes. The offloaded fraction of the weights is equal in all layers. If states are offloaded too, those of
the offloaded weights are offloaded first.

If states are in files, SWAP_BUFFERS chunks are in memory at a time ([Note: windows] in runtime/offload/swapper.py).

[Note: after the norm] No update begins before every gradient of the step is complete. All ranks skip a step if its
gradient is not finite, and clipping uses the global norm. To undo an earlier update, a rank would need a second copy of
the states. So no part of a CPU update overlaps with the backward of the same step. The delayed update of ZeRO-Offload
would overlap, but it changes the results.

Sources: Ren et al., ZeRO-Offload, arXiv 2101.06840, sections 3 and 4; Rajbhandari et al., ZeRO-Infinity, arXiv
2104.07857, section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import constants
from meshwright.planner.cost.cost_context import CostContext
from meshwright.planner.cost.overlap import concurrent_seconds, overlapped
from meshwright.planner.cost.plan_grid import Array, PlanGrid, broadcast_to_axis
from meshwright.spec.enums import OPTIMIZER_OFFLOADS, PARAMETER_OFFLOADS, Offload


class OffloadFractions(NamedTuple):
    """The offloaded fraction of each kind of memory, over GRID_AXES. The arrays vary along f. For gradients and
    activations the fraction is 0 or 1."""

    optimizer: Array
    optimizer_files: Array
    gradients: Array
    parameters: Array
    parameters_files: Array
    activations: Array
    activations_files: Array

    @property
    def offloaded(self) -> tuple[Array, Array, Array]:
        """Returns the offloaded fractions of parameters, gradients and optimizer states, in host memory and in files
        together."""
        return self.parameters + self.parameters_files, self.gradients, self.optimizer + self.optimizer_files


def offload_fractions(box: PlanGrid) -> OffloadFractions:
    """Returns the offloaded fraction of each kind of memory for the offload choices of `box`."""
    shares = box.offload_share, box.weights_share
    if any(isinstance(share, np.ndarray) for share in shares):
        return _fractions(box.offload, *shares)
    return _cached_fractions(box.offload, *shares)


def _fractions(
    choices: tuple[tuple[Offload, ...], ...], states: Array | float, weights: Array | float
) -> OffloadFractions:
    share = {**dict.fromkeys(OPTIMIZER_OFFLOADS, states), **dict.fromkeys(PARAMETER_OFFLOADS, weights)}
    return OffloadFractions(
        *(share.get(what, 1.0) * broadcast_to_axis([what in choice for choice in choices], "f") for what in Offload)
    )


_cached_fractions: Callable[..., OffloadFractions] = lru_cache(maxsize=1 << 10)(_fractions)


def offload_wait_seconds(
    setting: CostContext, box: PlanGrid, weights: Array, summed: Array, activations: Array, before: Array, behind: Array
) -> Array:
    """Returns the seconds that offload adds to a micro-batch. Transfers can overlap with `before` seconds of forward
    compute and with `behind` seconds of backward compute.

    In forward, `weights` bytes of weight shards are copied to the device and `activations` bytes to the host. In
    backward, the same weight shards and activations are copied to the device, and `summed` gradient elements to the
    host.
    """
    if not any(box.offload):
        return broadcast_to_axis(0.0, "")
    where, link, read = offload_fractions(box), setting.host_bandwidth or np.inf, disk_seconds_per_byte(setting)
    coming = where.parameters * weights / link + where.parameters_files * weights * read
    rest = where.activations * activations / link + where.activations_files * activations * read
    down = (
        where.gradients
        * summed
        * (setting.gradient / link + 1.0 / (constants.CPU_ADDS_PER_UPDATE * setting.host_update))
    )
    return overlapped(rest + coming, before) + overlapped(rest + coming + down, behind)


def disk_seconds_per_byte(setting: CostContext) -> float:
    """Returns the seconds per byte of a transfer between a device and a file. The data passes through host memory."""
    over_link = 0.0 if setting.on_host or not setting.host_bandwidth else 1.0 / setting.host_bandwidth
    return over_link + (1.0 / setting.storage_bandwidth if setting.storage_bandwidth else 0.0)


def optimizer_bytes_per_param(setting: CostContext) -> float:
    """Returns the bytes of optimizer states per element, plus the bytes of a main weight if the recipe has main
    weights."""
    recipe = setting.recipe
    return recipe.master + setting.job.workload.optimizer.states * recipe.state_size


def swap_buffer_bytes(
    setting: CostContext, box: PlanGrid, largest: Array, states_offloaded: Array, weights_offloaded: Array
) -> Array:
    """Returns the bytes of all staging buffers of a rank whose parameter groups have at most `largest` elements.

    The buffers are chunks for states and weights in files, one buffer into which weight shards are fetched, and buffers
    for gradients that are copied to the host. A CPU rank also has a buffer from which it writes activations.

    Some elements have both states and weights offloaded, and others only one of them. A chunk contains elements of only
    one of these two types. If the elements of each type fit in one chunk, both types use the same buffers.
    `states_offloaded` and `weights_offloaded` are the numbers of offloaded elements.
    """
    if not any(box.offload):
        return broadcast_to_axis(0.0, "")
    where, size = offload_fractions(box), setting.recipe.size
    of_states, of_weights = where.optimizer + where.optimizer_files, where.parameters + where.parameters_files
    wholly = np.where(of_states * of_weights > 0, np.minimum(of_states, of_weights), 0.0)
    partly = np.where((of_states > 0) | (where.parameters_files > 0), np.maximum(of_states, of_weights) - wholly, 0.0)
    turns = constants.SWAP_BUFFERS / (1.0 + (wholly * partly > 0))
    full = largest * np.maximum(wholly, partly) > constants.CHUNK_ELEMENTS

    def slots(share: Array, waiting: Array) -> Array:
        here = wholly + partly * (share > wholly)
        return np.minimum(
            np.where(full, constants.SWAP_BUFFERS * constants.CHUNK_ELEMENTS, turns * here * largest) * (share > 0),
            waiting,
        )

    states, weights = slots(of_states, states_offloaded), slots(of_weights, weights_offloaded)
    by_windows = (of_states > 0) | (not setting.recipe.master)
    coming = where.parameters_files + where.parameters * (1.0 - setting.on_host)
    pieces = where.activations_files * (constants.BOUNCE_BUFFER_BYTES * setting.on_host)
    return (
        states * ((where.optimizer_files > 0) * optimizer_bytes_per_param(setting))
        + weights * ((where.parameters_files > 0) * by_windows * size)
        + coming * largest * size
        + pieces
        + where.gradients * (constants.MAX_INFLIGHT_REDUCE * largest * setting.gradient)
    )


def offloaded_update_seconds(
    setting: CostContext, box: PlanGrid, elements: Array, on_device: Array
) -> tuple[Array, Array]:
    """Returns the seconds of the update on the device, and the seconds of the update on the host with its transfers.
    One rank updates `elements` elements. `on_device` is the seconds in which the device would update all elements."""
    where = offload_fractions(box)
    if not any(box.offload):
        return on_device, 0.0 * on_device
    there, waiting = (
        where.optimizer + where.optimizer_files,
        where.parameters + where.parameters_files * (not setting.on_host),
    )
    seconds = 0.0 * on_device
    over_link = np.zeros(1)
    if setting.host_bandwidth:
        link = setting.host_bandwidth
        over_link = elements * concurrent_seconds(
            1.0 / setting.host_update, setting.gradient / link, setting.recipe.size / link
        )
        seconds = where.optimizer * over_link
    if setting.storage_bandwidth:
        both_ways = 2.0 * elements * optimizer_bytes_per_param(setting) / setting.storage_bandwidth
        # Without a link to the host, nothing is known about its update: it is no faster than that of the device.
        on_host = over_link if setting.host_bandwidth and not setting.on_host else on_device
        files, staying = where.optimizer_files, (where.optimizer_files > 0) * (1.0 - where.optimizer_files) * on_device
        seconds = seconds + np.maximum(files * both_ways, files * on_host + staying) - staying
        ways = 1.0 if setting.recipe.master else 2.0
        seconds = seconds + where.parameters_files * ways * elements * setting.recipe.size / setting.storage_bandwidth
    if setting.host_bandwidth:
        down = np.maximum(waiting - there, 0.0) * setting.recipe.size
        seconds = (
            seconds + elements * (down + where.gradients * (1.0 - there) * setting.gradient) / setting.host_bandwidth
        )
    return on_device * (1.0 - there), seconds
