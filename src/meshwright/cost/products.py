"""Seconds of matrix products by their shape: what a device reaches depends on how many tiles a product has for its processors.

A product of m x n outputs is cut into tiles; p processors take p tiles at a time, so that the last turn may run half empty (wave
quantisation), and a small product takes small tiles, which reach less of the peak. For each of TILES

    time = ceil(m / rows) ceil(n / columns) / p, rounded up, x (2 rows columns k p-th of the rate x the tile's share)

and the library takes the best. Where even small tiles leave processors idle, the inner dimension is cut instead (split-k). Never less than
the operands take to move through memory, and every product pays a start and an end.

Forward multiplies tokens x outputs over inputs; backward tokens x inputs over outputs, and outputs x inputs over tokens.
Source of the form: NVIDIA, Matrix Multiplication Background User's Guide, sections 3 and 4; tiles of CUTLASS and their shares there, figure 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost import constants
from meshwright.cost.box import Array

if TYPE_CHECKING:
    from meshwright.cost.compute import Matrices
    from meshwright.cost.setting import Setting


def sustained(setting: Setting, precision: str) -> float:
    """FLOP/s of large matrix products in a warm device that trains: as sold, less what any product loses, less clocks under power."""
    device = setting.device
    peak = device.peak.get(precision) or setting.rate
    return peak * device.efficiency * device.sustained.get(precision, constants.SUSTAINED)


def products(setting: Setting, parts: Matrices, tokens: Array, inside: bool) -> tuple[Array, Array]:
    """Forward and backward of all products of a layer, (b)."""
    precision = setting.practice.products if inside and setting.practice.products else setting.recipe.rate
    rate = sustained(setting, precision)
    size = setting.recipe.size
    flops = parts.flops[:, None] * tokens
    ramp = parts.products[:, None] * constants.KERNEL_RAMP
    if setting.on_host or not setting.device.processors:
        bandwidth = setting.device.bandwidth * constants.MEMORY_SHARE
        move = size * (parts.weights[:, None] + (parts.outputs + parts.inputs)[:, None] * tokens) / bandwidth
        forward = (np.maximum(flops / rate, move) + ramp).sum(axis=0)
        return forward, constants.BACKWARD * forward
    outputs, inputs = parts.outputs[:, None] + 0 * tokens, parts.inputs[:, None] + 0 * tokens
    rows = tokens + 0 * outputs
    forward = _one(setting, (rows, outputs, inputs), flops, rate, size)
    before = _one(setting, (rows, inputs, outputs), flops, rate, size)
    weights = _one(setting, (outputs, inputs, rows), flops, rate, size)
    return (forward + ramp).sum(axis=0), (before + weights + 2 * ramp).sum(axis=0)


def _one(setting: Setting, shape: tuple[Array, Array, Array], flops: Array, rate: float, size: int) -> Array:
    """Seconds of products of `shape` (m, n, k), each (weights, b). A shape of 0 is not known: it is as large as its FLOPs."""
    m, n, k = shape
    processors = setting.device.processors
    best = np.full(flops.shape, np.inf)
    for rows, columns, share in constants.TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        turns = np.where(tiles >= processors, np.ceil(tiles / processors), np.maximum(tiles / processors, constants.SPLIT_SHARE))
        best = np.minimum(best, turns * (2.0 * rows * columns * processors / share) * k)
    moved = size * (m * n + m * k + n * k) / (setting.device.bandwidth * constants.MEMORY_SHARE)
    return np.where(best > 0, np.maximum(np.maximum(best, flops) / rate, moved), flops / rate)
