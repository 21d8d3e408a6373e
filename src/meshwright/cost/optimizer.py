"""The optimizer's part of memory and time: bytes of its states, bytes that come and go while it runs, seconds of its matrix products.

    states     beside each weight as many as the rule has, in the type that the recipe says or a byte and a share of a scale (8 bits);
               rules whose states have other shapes (Muon's matrices, Adafactor's factors): their mean over the model
    passing    a gradient in the type that the update computes in, where it is kept in another; states as well, and weights, where those are
               kept in fewer bytes: of a window on a host, of a unit on an accelerator, or where whole tensors are updated
    products   Muon: five rounds of 4 m^2 n + 2 m^3 FLOPs for a matrix of m x n, m <= n, on one of the ranks that share it

Whole tensors lie with one rank each (parallel/update/whole.py), so that the fullest rank holds somewhat more than the mean.
Sources: Jordan et al., Muon, 2024; Shazeer and Stern, Adafactor, arXiv 1804.04235; Dettmers et al., 8-bit Optimizers, arXiv 2110.02861.
"""

from __future__ import annotations

from meshwright.cost.products import sustained
from meshwright.cost.setting import Setting

COMPUTED = 4
"""Bytes of the type in which an update of low precision is computed."""

SLOTS = 3
"""Of gradients and weights on their way in memory that the ranks of a host share, which is kept."""

COPIES = 8
"""Of gradients and weights: what is sent, what came, put together, and as the rule is given them."""

ROUNDS = 5
"""Newton-Schulz iterations."""

UNLIKE = ("muon", "adafactor")
"""Rules whose states have not the shape of the weights alone."""


def state_bytes(setting: Setting) -> float:
    """Of all states beside one weight."""
    rule, size = setting.job.workload.optimizer, setting.recipe.state_size
    if rule.name not in UNLIKE:
        return float(rule.states * rule.state_bytes(size))
    counted = [
        (entry.layer.repeat * each.numel, rule.elements(each.shape, entry.is_block))
        for entry in setting.entries
        if not entry.copy
        for each in entry.own
        if not each.frozen
    ]
    return size * sum(count * elements for count, elements in counted) / max(sum(count for count, _ in counted), 1)


def passing(setting: Setting) -> float:
    """Bytes beside one weight of what is being updated."""
    recipe, rule = setting.recipe, setting.job.workload.optimizer
    lower = recipe.size < COMPUTED
    gradient = COMPUTED if lower != (recipe.reduced > 0) else 0  # low, and not held in float32; or float32 with gradients held low
    widened = rule.states * COMPUTED if recipe.rounds or rule.state else 0
    return gradient + widened + (COMPUTED if recipe.rounds else 0)


def by_windows(setting: Setting) -> bool:
    """Whether an update goes a few runs at a time where not all of it is kept in its type."""
    return setting.on_host and not whole(setting)


def gathered(setting: Setting) -> float:
    """Bytes beside one weight of a rank's shard of the unit that is being updated, where whole tensors come from other ranks and go back."""
    return COPIES * setting.recipe.state_size * whole(setting)


def kept_on_the_way(setting: Setting) -> float:
    """The same that ranks which share memory keep there all the time."""
    return SLOTS * setting.recipe.state_size * whole(setting) if setting.shares_memory else 0.0


def whole(setting: Setting) -> float:
    """The part of the weights that the rule needs as whole tensors."""
    if setting.job.workload.optimizer.name != "muon":
        return float(setting.job.workload.optimizer.name in UNLIKE)
    held = [(entry.layer.repeat * each.numel, entry.is_block and len(each.shape) == 2) for entry in setting.entries for each in entry.own]
    return sum(count for count, is_matrix in held if is_matrix) / max(sum(count for count, _ in held), 1)


def products(setting: Setting) -> float:
    """Seconds for each weight that a rank holds of Muon's matrix products; 0 of other rules."""
    if setting.job.workload.optimizer.name != "muon":
        return 0.0
    flops, count = 0.0, 0
    for entry in setting.entries:
        for each in () if entry.copy else entry.own:
            count += entry.layer.repeat * each.numel
            if entry.is_block and len(each.shape) == 2 and not each.frozen:
                small, large = sorted(each.shape)
                flops += entry.layer.repeat * ROUNDS * (4.0 * small**2 * large + 2.0 * small**3)
    rate = "bf16" if setting.device.peak.get("bf16") else setting.recipe.rate
    return flops / max(count, 1) / sustained(setting, rate)
