"""Seconds of one layer's forward and backward on one rank: what it computes, and what its tensor ranks exchange meanwhile.

    matrix product    max(FLOPs / (peak * efficiency * sustained), bytes / bandwidth) + ramp, each weight by itself
    attention         FLOPs / (the same rate * attention share)
    everything else   bytes / bandwidth
    floor             what the host needs to launch kernels and collectives; on a host device, which launches and computes, added

Tensor parallelism divides a layer's FLOPs by its split weights; its element-wise work by the share of what it keeps that is split.
Source of the form: Calculon (SC23), autoparallel's roofline; constants have theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.cost import constants
from meshwright.cost.box import Array, Cut
from meshwright.cost.collectives import group
from meshwright.cost.products import products, sustained
from meshwright.cost.setting import BLOCK, EMBEDDING, HEAD, Setting
from meshwright.spec.model import Layer


class Work(NamedTuple):
    """Seconds of one layer of each entry, arrays over (entry, b, s). `attention` is the part of forward that its core takes, `weights` the
    part of backward that can be put off: the gradients of plain matrices of blocks; `derived` what recompute by operation takes."""

    forward: Array
    backward: Array
    tensor_forward: Array
    tensor_backward: Array
    attention: Array
    weights: Array
    derived: Array


class Matrices(NamedTuple):
    """The weights of a layer that multiply, on one tensor rank: FLOPs per token, elements, outputs, inputs, products of each."""

    flops: Array
    weights: Array
    outputs: Array
    inputs: Array
    products: Array


def matrices(layer: Layer, cut: Cut, imbalance: float = constants.EXPERT_IMBALANCE) -> Matrices:
    """`layer.flops` shared among its weights by their size. Stacked experts are one product each; the busiest of their ranks counts.

    Adapters beside frozen weights are no products of note: what they move is in `layer.moved` (intake/adapters.py).
    """
    weights = [parameter for parameter in layer.parameters if len(parameter.shape) >= 2] if layer.flops else []
    weights = [weight for weight in weights if weight.frozen] or weights
    whole = sum(weight.numel for weight in weights)
    rows = []
    for weight in weights:
        degree = cut.expert_tensor if cut.apart(weight) else cut.tp
        share = weight.used_numel(degree) / weight.numel
        held = cut.ep if cut.apart(weight) else 1
        busy = share * degree / cut.tp * (imbalance if held > 1 else 1.0)
        plane = [size * (share if weight.split == axis else 1.0) for axis, size in enumerate(weight.shape)][-2:]
        rows.append(
            (
                layer.flops * weight.numel / whole * busy,
                weight.numel * share / held,
                *(plane if len(weight.shape) < 4 else (0.0, 0.0)),
                max(weight.experts // held, 1),
            )
        )
    return Matrices(*np.array(rows, dtype=float).reshape(-1, 5).T)


def work(setting: Setting, cut: Cut, stride: int, tokens: Array, sequence_parallel: Array) -> Work:
    """`tokens` of a micro-batch on one rank (b), `sequence_parallel` (s); tensor ranks are `stride` apart."""
    rows = []
    for entry in setting.entries:
        if entry.copy:
            rows.append(np.zeros((7, len(tokens), len(sequence_parallel))))
            continue
        *computing, attention, weights, derived = _compute(setting, entry.layer, cut, tokens, sequence_parallel)
        exchange = _exchange(setting, entry.layer, (cut.tp, stride), tokens, sequence_parallel)
        launching = _launching(setting, entry.layer, cut, sequence_parallel)
        if setting.on_host:
            computing = [seconds + host for seconds, host in zip(computing, launching, strict=True)]
        else:
            computing = [np.maximum(each, host - wait) for each, host, wait in zip(computing, launching, exchange, strict=True)]
        part = entry.layer.derived_moved / entry.layer.moved if entry.layer.moved else 0.0
        derived = derived + part * launching[0] if setting.on_host else np.maximum(derived, part * launching[0])
        rows.append(np.stack([*computing, *exchange, attention, weights, derived]))
    return Work(*np.stack(rows, axis=1))


def _compute(setting: Setting, layer: Layer, cut: Cut, tokens: Array, sequence_parallel: Array) -> tuple[Array, ...]:
    """Forward, backward, of forward the attention core, of backward the gradients of weights that can be put off, recompute by operation, (b, s)."""
    tp, device, size, practice = cut.tp, setting.device, setting.recipe.size, setting.practice
    bandwidth = device.bandwidth * constants.MEMORY_SHARE
    parts = matrices(layer, cut, setting.imbalance)
    context = setting.job.workload.sequence
    forward_products, backward_products = products(setting, parts, tokens, layer.name == BLOCK)
    frozen = any(parameter.frozen for parameter in layer.parameters)
    if frozen:  # gradients of inputs alone
        backward_products = backward_products / 2.0
    rate = sustained(setting, setting.recipe.rate) * device.attention * practice.attention
    attention = layer.attention_flops / tp * context * tokens / rate
    scores = layer.context_moved / tp * context * tokens * (size / bandwidth)
    each = tokens[:, None] * local_share(layer, size, tp, sequence_parallel) * (size / bandwidth)
    rest = layer.moved * each + scores[:, None]
    forward = (forward_products + attention)[:, None] + rest
    held = parts.weights.sum() * constants.ACCUMULATION_PASSES * setting.gradient / bandwidth * (not frozen)
    backward = (backward_products + constants.ATTENTION_BACKWARD * attention)[:, None] + constants.BACKWARD * rest + held
    if practice.products and layer.name == BLOCK:
        casts = constants.CAST_PASSES * size / bandwidth * tokens[:, None]
        forward, backward = forward + parts.inputs.sum() * casts, backward + (parts.inputs.sum() + parts.outputs.sum()) * casts
    if layer.name == BLOCK:
        backward = backward + practice.repeated_products * forward_products[:, None] + practice.repeated_rest * rest
    core = np.broadcast_to((attention + scores)[:, None], forward.shape)
    plain = sum(weight.numel for weight in layer.parameters if len(weight.shape) == 2) * (layer.name == BLOCK)
    share = plain / max(sum(weight.numel for weight in layer.parameters if len(weight.shape) >= 2), 1)
    weights = np.broadcast_to((share * (not frozen) * (backward_products / 2.0 + held))[:, None], forward.shape)
    return forward, backward, core, weights, layer.derived_moved * each


def _launching(setting: Setting, layer: Layer, cut: Cut, sequence_parallel: Array) -> tuple[Array, Array]:
    """Seconds that the host needs to launch a layer's kernels and collectives, forward and backward (s)."""
    count = 1 + matrices(layer, cut).products.sum()
    if setting.on_host:
        kernels = count * constants.HOST_KERNELS_PER_MATRIX * host_launch(setting) + 0.0 * sequence_parallel
        return kernels, constants.BACKWARD * kernels
    kernels = count * constants.KERNELS_PER_MATRIX * constants.LAUNCH + 0.0 * sequence_parallel
    calls = constants.TENSOR_PAIRS * constants.COLLECTIVE_LAUNCH * float(cut.tp > 1 and layer.name == BLOCK)
    forward, backward = (kernels + calls * np.where(sequence_parallel, turns, 1.0) for turns in (2.0, 3.0))
    return setting.practice.launch * forward, setting.practice.launch * (backward + (constants.BACKWARD - 1.0) * kernels)


def host_launch(setting: Setting) -> float:
    """Seconds of a host that launches and computes for one operation: a rank that has part of a core takes as many times longer."""
    return setting.device.launch or constants.HOST_LAUNCH


def local_share(layer: Layer, size: int, tp: int, sequence_parallel: Array) -> Array:
    """Part of a layer's element-wise work that stays on one tensor rank (s), judged by what it keeps."""
    split = layer.saved_split * size + layer.fixed_split
    whole = layer.saved_whole * size + layer.fixed_whole
    total = split + whole
    if not total:
        split, whole, total = float(layer.name == HEAD), float(layer.name != HEAD), 1.0
    divided = sequence_parallel & (layer.name == BLOCK)
    return (split / tp + whole / np.where(divided, tp, 1)) / total


def _exchange(setting: Setting, layer: Layer, tensor: tuple[int, int], tokens: Array, sequence_parallel: Array) -> tuple[Array, Array]:
    """Collectives of the tensor ranks (how many, how far apart), forward and backward, (b, s). Sequence parallelism gathers and scatters where else sums are."""
    shape = (len(tokens), len(sequence_parallel))
    none = np.zeros(shape)
    tp, stride = tensor
    if tp == 1 or not any(parameter.split is not None for parameter in layer.parameters):
        return none, none
    ranks = group(setting.fabric, tp, stride)
    state = (tokens * (setting.job.model.hidden * setting.recipe.size))[:, None]
    total = np.where(sequence_parallel, 2.0 * ranks.gather(state), ranks.reduce(state))
    gather = np.where(sequence_parallel, ranks.gather(state), 0.0) * (not setting.practice.gathered)
    if layer.name == BLOCK:
        hidden = setting.practice.tensor_hidden
        seen = constants.TENSOR_PAIRS * (1.0 - hidden * (1.0 - constants.OVERLAP_SLOWDOWN))
        return seen * total, seen * (total + gather)
    if layer.name == EMBEDDING:
        return ranks.reduce(state) + none, gather + none
    if layer.name == HEAD:
        loss = constants.LOSS_SUMS * ranks.reduce((tokens * constants.LOSS_ELEMENT)[:, None])
        return loss + gather, ranks.reduce(state) + none
    return total, total
