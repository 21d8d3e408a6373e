"""Repeats the recorded optimizer on one device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.interop.recording.topology import RecordedTopology
from meshwright.interop.recording.trace_format import RecordedOptimizer

IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of torch's optimizers that do not change the result."""
SAME_RULE = {"DeepSpeedCPUAdam": "AdamW", "FusedAdam": "AdamW", "CPUAdam": "AdamW"}
"""Optimizers of other libraries with the rule of an optimizer of torch."""


class OptimizerReplay:
    """The optimizers of the recording, on the parameters of one device."""

    def __init__(self, topology: RecordedTopology, parameters: Mapping[str, nn.Parameter]) -> None:
        self.topology, self.parameters = topology, parameters
        self.optimizers: dict[str, torch.optim.Optimizer] = {}

    def step(self, step: int, totals: Mapping[str, torch.Tensor], scale: float, norm: float) -> bool:
        """Updates the parameters with the gradients `totals` * `scale`, clipped as recorded. `norm` is the norm of
        these gradients. Returns whether the update can be repeated: torch's own rules, from the first state on."""
        groups = recorded_groups(self.topology, step)
        kinds = {kind: optimizer_class(kind) for kind, _, _ in groups.values()}
        if not groups or None in kinds.values() or any(begun for _, _, begun in groups.values()):
            return False
        clip = next(
            (trace.header.steps[step].clip for trace in self.topology.traces if trace.header.steps[step].clip), None
        )
        factor = scale * clip_factor(clip, norm)
        for parameter in self.parameters.values():
            parameter.grad = None
        for name, total in totals.items():
            self.parameters[name].grad = total.to(self.parameters[name].dtype) * factor
        for name, (kind, options, _) in groups.items():
            rule = kinds[kind]
            assert rule is not None
            if name not in self.optimizers:
                own = {k: v for k, v in options.items() if k in inspect.signature(rule).parameters}
                self.optimizers[name] = rule([self.parameters[name]], **own)
            self.optimizers[name].param_groups[0].update(options)
            self.optimizers[name].step()
        return True


def clip_factor(clip: float | None, norm: float) -> float:
    """Returns the factor of torch's clipping of gradients of the norm `norm`."""
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))


def recorded_groups(topology: RecordedTopology, step: int) -> dict[str, tuple[str, dict[str, Any], bool]]:
    """Returns the optimizer class, the options and whether there were states before, by parameter."""
    found: dict[str, tuple[str, dict[str, Any], bool]] = {}
    for trace in topology.traces:
        for optimizer in trace.header.steps[step].optimizers:
            for name, options in named_options(optimizer):
                found.setdefault(topology.canonical.get(name, name), (optimizer.kind, options, optimizer.begun))
    return {name: each for name, each in found.items() if name in set(topology.canonical.values())}


def named_options(optimizer: RecordedOptimizer) -> list[tuple[str, dict[str, Any]]]:
    """Returns the options of each parameter of an optimizer."""
    return [
        (name, {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
                if key not in IMPLEMENTATION_OPTIONS})
        for options, names in zip(optimizer.groups, optimizer.names, strict=False)
        for name in names
    ]  # fmt: skip


def optimizer_class(kind: str) -> type[torch.optim.Optimizer] | None:
    """Returns the optimizer of torch with the rule of the recorded class, None if there is none."""
    name = kind.rpartition(".")[2]
    if not kind.startswith("torch.optim.") and name not in SAME_RULE:
        return None
    return getattr(torch.optim, SAME_RULE.get(name, name), None)
