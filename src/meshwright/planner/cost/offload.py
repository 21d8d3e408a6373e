"""What waits in host memory or in files, and what its way costs. A device's rate to its host is what it has while its
neighbours copy too; hosts
share memory, and the disk of a node is shared by its devices. The traffic of data ranks goes over the same link to the
network: what comes from
the host has what that leaves of the time to hide in.

    optimizer        master weights and states; gradients go down, the host updates, weights come up, window by window
    beside each other, behind
                     backward ([Note: after the norm])
    optimizer-disk  the same on disk: all of it is read and written in each update, while the host updates what was read
    before
    a share of either: the rest stays and is updated where it is, while the disk reads and writes; of weights each
    layer's alike, whose states are
                     the first that wait
    gradients        sums of the shards of ZeRO 2 and 3: each micro-batch's go down beside backward, later ones are
    added there by the host
    parameters       shards of the weights (ZeRO 3); each layer's comes up before it runs, forward and backward, beside
    what runs
    parameters-disk the same out of files, by the host's memory; the update writes them, and reads them first where they
    are what is updated
    activations      what blocks keep goes down in forward and comes up in backward, beside what runs; two blocks of it
    stay
    activations-disk the same through the host's memory to a disk, written and read

Of what waits in files SLOTS windows of WINDOW elements are in memory ([Note: windows] in runtime/offload/swapper.py).
[Note: after the norm] No update begins before every gradient of the step is there: all ranks skip a step alike whose
gradient is not finite, and
what is clipped is clipped by the norm of the whole. A unit that was updated before could not be taken back without a
copy of its states. So
nothing of an update on the host is hidden by its own backward; ZeRO-Offload's delayed update is another result.
Sources: Ren et al., ZeRO-Offload, arXiv 2101.06840, sections 3 and 4; Rajbhandari et al., ZeRO-Infinity, arXiv
2104.07857, section 5.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import constants
from meshwright.planner.cost.cost_context import CostContext
from meshwright.planner.cost.overlap import concurrent_seconds, overlapped
from meshwright.planner.cost.plan_grid import Array, PlanGrid, broadcast_to_axis
from meshwright.spec.enums import OPTIMIZER_OFFLOADS, PARAMETER_OFFLOADS, Offload


class OffloadFractions(NamedTuple):
    """Which choices along f keep what elsewhere, 0 or 1 over AXES; of the optimizer, and of the weights, the share that
    waits there."""

    optimizer: Array
    optimizer_files: Array
    gradients: Array
    parameters: Array
    parameters_files: Array
    activations: Array
    activations_files: Array

    @property
    def offloaded(self) -> tuple[Array, Array, Array]:
        """Which keep parameters, gradients and the optimizer off the device."""
        return self.parameters + self.parameters_files, self.gradients, self.optimizer + self.optimizer_files


def offload_fractions(box: PlanGrid) -> OffloadFractions:
    share = {
        **dict.fromkeys(OPTIMIZER_OFFLOADS, box.offload_share),
        **dict.fromkeys(PARAMETER_OFFLOADS, box.weights_share),
    }
    return OffloadFractions(
        *(share.get(what, 1.0) * broadcast_to_axis([what in choice for choice in box.offload], "f") for what in Offload)
    )


def offload_wait_seconds(
    setting: CostContext, box: PlanGrid, weights: Array, summed: Array, activations: Array, before: Array, behind: Array
) -> Array:
    """Seconds a micro-batch that `weights` bytes of shards, needed forward and backward, `summed` elements of
    gradients, and `activations` bytes of activations
    add to what runs beside them."""
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
    """Seconds of a byte between a device and a file, by the host's memory."""
    over_link = 0.0 if setting.on_host or not setting.host_bandwidth else 1.0 / setting.host_bandwidth
    return over_link + (1.0 / setting.storage_bandwidth if setting.storage_bandwidth else 0.0)


def optimizer_bytes_per_param(setting: CostContext) -> float:
    """Bytes for each element that the optimizer keeps: its states, and a float32 weight where there is one."""
    recipe = setting.recipe
    return recipe.master + setting.job.workload.optimizer.states * recipe.state_size


def swap_buffer_bytes(
    setting: CostContext, box: PlanGrid, largest: Array, states_offloaded: Array, weights_offloaded: Array
) -> Array:
    """Bytes of the slots that what waits in files passes by, of so many elements on a rank in units of at most
    `largest`, of the buffer that shards of
    weights come up in, of what cores write activations by, and of gradients that go down.

    What waits of a unit in part, and as a whole, has windows of its own, and slots by turns where it is as short as
    one."""
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
    """Seconds of the update on the device and of the update elsewhere, `elements` of one rank."""
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
        on_host = on_device if setting.on_host else over_link
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
