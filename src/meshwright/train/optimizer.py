"""Builds the torch optimizer of a workload and computes the learning rate of each step. The training loop, trials and
verification use it.

The optimizer receives flat slices of parameters, or full tensors if its update rule needs them
(runtime/optim/rule_probe.py). By default weight decay applies only to matrices; the workload may extend it to all
parameters. AdamW, Adam and SGD use torch's fused kernels, which on a CPU take a quarter of the time of torch's for-loop
implementation.

With `muon`, torch's Muon updates the matrices of blocks. AdamW updates embeddings, heads, vectors and stacked experts.
By default, Muon's updates are scaled to the RMS of AdamW's updates, so that one `lr` suits both. The factor is 0.2
times the square root of the matrix's larger side (option `match_rms_adamw` of torch). If `matrix_lr` is set, the
updates are scaled as in Jordan et al. (option `original` of torch).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.spec.plan import Plan
from meshwright.spec.precision import Recipe
from meshwright.spec.workload import OptimizerConfig, Workload
from meshwright.spec.workload_constraints import diloco_violations, exact_sum_violations
from meshwright.train.model import load_user_function


def precision_recipe(workload: Workload, plan: Plan) -> Recipe:
    """Returns the precision recipe of `workload`. Raises InputError if `plan` does not fit an exact workload (which
    fixes the micro-batches) or a DiLoCo workload."""
    for fault in chain(exact_sum_violations(plan, workload.exact), diloco_violations(plan, workload.local)):
        raise InputError(Message("plan {plan}: {message}", plan=plan.name, message=fault.message))
    return workload.recipe


def optimizer_factory(rule: OptimizerConfig) -> Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]:
    """Returns a function that builds the optimizer of `rule` from an iterable of parameters. If `rule` names a user's
    function, this function is returned. The trainer later sets the learning rate of every step and keeps the ratios
    between the rates of parameter groups."""
    if rule.live:
        return load_user_function(rule.name, "optimizer")

    def make(given: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        parameters: Any = list(given)
        if rule.weight_decay and rule.decay == "matrices":
            matrices, vectors = (
                [each for each in parameters if getattr(each, "is_matrix", each.ndim > 1) is kind]
                for kind in (True, False)
            )
            parameters = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        if rule.name == "muon":
            return _muon_factory(rule, parameters)
        if rule.name == "adafactor":
            return torch.optim.Adafactor(parameters, rule.lr, weight_decay=rule.weight_decay)
        if rule.name == "adamw":
            return torch.optim.AdamW(parameters, rule.lr, rule.betas, rule.eps, rule.weight_decay, fused=True)
        if rule.name == "adam":
            return torch.optim.Adam(parameters, rule.lr, rule.betas, rule.eps, rule.weight_decay, fused=True)
        momentum = rule.momentum if rule.name == "sgd-momentum" else 0.0
        return torch.optim.SGD(parameters, rule.lr, momentum, weight_decay=rule.weight_decay, fused=True)

    return make


def _muon_factory(rule: OptimizerConfig, groups: list[Any]) -> torch.optim.Optimizer:
    matrices: list[Any] = []
    others = []
    for group in groups if groups and isinstance(groups[0], dict) else [{"params": groups}]:
        chosen = [each.ndim == 2 and getattr(each, "in_block", False) for each in group["params"]]
        matrices += [each for each, is_chosen in zip(group["params"], chosen, strict=True) if is_chosen]
        others.append(
            {
                **group,
                "params": [each for each, is_chosen in zip(group["params"], chosen, strict=True) if not is_chosen],
            }
        )
    adjust = "match_rms_adamw" if rule.matrix_lr is None else "original"
    return CombinedOptimizer(
        [
            torch.optim.AdamW(others, rule.lr, rule.betas, rule.eps, rule.weight_decay, fused=True),
            torch.optim.Muon(
                [{"params": matrices}], rule.matrix_lr or rule.lr, rule.weight_decay, rule.momentum, adjust_lr_fn=adjust
            ),
        ],
        rule.lr,
    )


class CombinedOptimizer(torch.optim.Optimizer):
    """Combines optimizers over disjoint parameters into one optimizer, which has all parameter groups and states. `lr`:
    the default learning rate."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], lr: float) -> None:
        super().__init__([group for each in optimizers for group in each.param_groups], {"lr": lr})
        self.optimizers = optimizers
        for each in optimizers:
            each.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Runs a step of every optimizer. `closure` is ignored."""
        for each in self.optimizers:
            each.step()


def learning_rate(rule: OptimizerConfig, step: int, steps: int) -> float:
    """Returns the learning rate of the step with index `step` (from 0) in a run of `steps` steps.

    The rate rises linearly over `warmup` steps, but at most over half of the run. Then it follows the schedule down to
    `final_lr` times `lr` at the last step. A constant schedule stays at `lr`. Source of warmup-stable-decay: Hu et al.,
    MiniCPM, arXiv 2404.06395.

    >>> rule = OptimizerConfig(lr=1.0, warmup=2, final_lr=0.1)
    >>> [round(learning_rate(rule, step, 5), 3) for step in range(5)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    >>> [round(learning_rate(rule.but(schedule="linear"), step, 6), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]
    >>> stable = rule.but(schedule="warmup-stable-decay", cooldown=0.3)
    >>> [round(learning_rate(stable, step, 10), 3) for step in range(10)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.4, 0.1]
    """
    warmup = min(rule.warmup, steps // 2)
    if step < warmup:
        return rule.lr * (step + 1) / warmup
    if rule.schedule == "constant":
        return rule.lr
    first = warmup  # the index of the last step at the full rate
    if rule.schedule == "warmup-stable-decay":
        first = max(warmup, steps - 1 - round(rule.cooldown * steps))
    done = min(max(step - first, 0) / max(1, steps - 1 - first), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if rule.schedule == "cosine" else 1 - done
    return rule.lr * (rule.final_lr + (1 - rule.final_lr) * left)
