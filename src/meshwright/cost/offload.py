"""What waits in host memory, and what its way costs. A device has its link to the host for itself, both directions at once; hosts share memory.
The traffic of data ranks goes over the same link to the network: what comes from the host has what that leaves of the time to hide in.

    optimizer     master weights and states; gradients go down, the host updates, weights come up: not hidden
    parameters    weights, or at ZeRO 3 their shards; each layer comes up before it runs, forward and backward, beside what runs
    activations   what blocks keep goes down in forward and comes up in backward, beside what runs; two blocks of it stay

Sources: Ren et al., ZeRO-Offload, arXiv 2101.06840, sections 3 and 4; Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 5.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.cost import constants
from meshwright.cost.box import Array, Box, lift
from meshwright.cost.hiding import beside
from meshwright.cost.setting import Setting
from meshwright.spec.plan import Offload


class Away(NamedTuple):
    """Which choices along f keep what on the host, 0 or 1 over AXES."""

    optimizer: Array
    parameters: Array
    activations: Array


def away(box: Box) -> Away:
    return Away(*(lift([float(what in choice) for choice in box.offload], "f") for what in Offload))


def passing(setting: Setting, box: Box, weights: Array, kept: Array, before: Array, behind: Array) -> Array:
    """Seconds a micro-batch that `weights` bytes, needed forward and backward, and `kept` bytes of activations add to what runs beside them."""
    bandwidth = setting.host_bandwidth
    if not bandwidth or not any(box.offload):
        return lift(0.0, "")
    where = away(box)
    down, up = where.activations * kept / bandwidth, (where.activations * kept + where.parameters * weights) / bandwidth
    return beside(down + where.parameters * weights / bandwidth, before) + beside(up, behind)


def update(setting: Setting, box: Box, elements: Array, on_device: Array) -> tuple[Array, Array]:
    """Seconds of the update on the device and of the update on the host, `elements` of one rank."""
    where = away(box)
    if not setting.host_bandwidth or not any(box.offload):
        return on_device, 0.0 * on_device
    rate = constants.HOST_UPDATE / setting.devices_per_node
    seconds = elements * (2.0 * setting.recipe.size / setting.host_bandwidth + 1.0 / rate)
    return on_device * (1.0 - where.optimizer), seconds * where.optimizer
