"""Parameters that code beside the model's forward must not use: those that a loss reads where no rank holds them all, and those of before `parallelize`."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from meshwright.parallel.engine import Parallel
from meshwright.parallel.pipeline.absent import Absent
from meshwright.parallel.zero.closed import ClosedMeanwhile, Closing, read_by_loss, replaced


def during_loss(engine: Parallel) -> ClosedMeanwhile:
    """What a loss of the user's own runs in. Where ranks hold shards, or other stages hold parameters, every parameter is closed meanwhile: a penalty would
    be that of a part of them, counted by some ranks or by several. Data ranks hold all of them: a penalty counts once there, as a mean over rows, and it
    is noted that there is one."""
    plan, model = engine.mesh.plan, engine.model
    if engine.objective.loss is None:
        return ClosedMeanwhile({}, None)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        if isinstance(module, Absent):
            tensors |= {f"{path}.{name}": value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    whole = plan.tp == plan.stages == 1 and plan.zero < 3 and not (engine.experts and engine.experts.dealt)
    return ClosedMeanwhile(tensors, None if whole else read_by_loss(plan.name))


Originals = list[tuple[str, "weakref.ref[nn.Parameter]"]]


def originals(model: nn.Module) -> Originals:
    """The parameters of `model` by name, not held."""
    return [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]


def close_replaced(engine: Parallel, before: Originals) -> None:
    """Parameters that somebody took from the model before it was sharded, and that are no part of it any more, are closed for good."""
    present = {id(parameter) for unit in engine.zero.units for parameter in unit.parameters.values()}
    present |= {id(parameter) for parameter in engine.model.parameters()}
    gone = {name: parameter for name, there in before if (parameter := there()) is not None and id(parameter) not in present}
    Closing(gone, replaced(engine.mesh.plan.name)).close()
