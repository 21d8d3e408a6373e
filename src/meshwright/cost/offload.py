"""What waits in host memory or in files, and what its way costs. A device has its link to the host for itself, both directions at once;
hosts share memory, and the disk of a node is shared by its devices. The traffic of data ranks goes over the same link to the network: what
comes from the host has what that leaves of the time to hide in.

    optimizer        master weights and states; gradients go down, the host updates, weights come up: not hidden
    optimizer-files  the same on disk: all of it is read and written in each update, while the host updates what was read before
    parameters       weights, or at ZeRO 3 their shards; each layer comes up before it runs, forward and backward, beside what runs
    activations      what blocks keep goes down in forward and comes up in backward, beside what runs; two blocks of it stay

Of what waits in files SLOTS windows of WINDOW elements are in memory ([Note: windows] in parallel/offload/away.py).
Sources: Ren et al., ZeRO-Offload, arXiv 2101.06840, sections 3 and 4; Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 5.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.cost import constants
from meshwright.cost.box import Array, Box, lift
from meshwright.cost.hiding import beside
from meshwright.cost.setting import Setting
from meshwright.spec.plan import Offload


class Away(NamedTuple):
    """Which choices along f keep what elsewhere, 0 or 1 over AXES."""

    optimizer: Array
    optimizer_files: Array
    parameters: Array
    activations: Array


def away(box: Box) -> Away:
    return Away(*(lift([float(what in choice) for choice in box.offload], "f") for what in Offload))


def gone(box: Box) -> tuple[Array, Array, Array]:
    """Which choices along f keep parameters, gradients and the optimizer off the device; gradients never are."""
    where = away(box)
    return where.parameters, lift(0.0, ""), where.optimizer + where.optimizer_files


def passing(setting: Setting, box: Box, weights: Array, kept: Array, before: Array, behind: Array) -> Array:
    """Seconds a micro-batch that `weights` bytes, needed forward and backward, and `kept` bytes of activations add to what runs beside them."""
    bandwidth = setting.host_bandwidth
    if not bandwidth or not any(box.offload):
        return lift(0.0, "")
    where = away(box)
    down, up = where.activations * kept / bandwidth, (where.activations * kept + where.parameters * weights) / bandwidth
    return beside(down + where.parameters * weights / bandwidth, before) + beside(up, behind)


def kept_of_optimizer(setting: Setting) -> float:
    """Bytes for each element that the optimizer keeps: its states, and a float32 weight where there is one."""
    recipe = setting.recipe
    return recipe.master + setting.job.workload.optimizer.states * recipe.state_size


def windows(setting: Setting, box: Box, largest: Array, elements: Array) -> Array:
    """Bytes of the slots that what waits in files passes by, of `elements` on a rank in units of at most `largest`."""
    if not any(Offload.optimizer_files in choice for choice in box.offload):
        return lift(0.0, "")
    each = np.minimum(largest, constants.WINDOW)
    return away(box).optimizer_files * np.minimum(constants.SLOTS * each, elements) * kept_of_optimizer(setting)


def update(setting: Setting, box: Box, elements: Array, on_device: Array) -> tuple[Array, Array]:
    """Seconds of the update on the device and of the update elsewhere, `elements` of one rank."""
    where = away(box)
    if not any(box.offload):
        return on_device, 0.0 * on_device
    seconds = 0.0 * on_device
    over_link = np.zeros(1)
    if setting.host_bandwidth:
        rate = constants.HOST_UPDATE / setting.devices_per_node
        over_link = elements * (2.0 * setting.recipe.size / setting.host_bandwidth + 1.0 / rate)
        seconds = where.optimizer * over_link
    if setting.storage_bandwidth:
        both_ways = 2.0 * elements * kept_of_optimizer(setting) / setting.storage_bandwidth
        on_host = on_device if setting.on_host else over_link
        seconds = seconds + where.optimizer_files * np.maximum(both_ways, on_host)
    return on_device * (1.0 - where.optimizer - where.optimizer_files), seconds
