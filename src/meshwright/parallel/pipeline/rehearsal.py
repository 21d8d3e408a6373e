"""Before the first pass of a pipeline each stage runs once by itself, in the order of the stages, so that what cannot run is refused by all ranks alike.

Rule: forward alone, without gradients and without dropout, of this rank's first row (two could be taken for a pair); a stage is given noise above zero in the form of what the
stage before it said it would send. No rank waits for a message of one that has failed: all hear what each stage says, and the first that
fails is the line of every rank, before anything is trained. Costs one forward of one row and a small gather for each stage, once.

What a stage reads past the state that it is sent, such as the far end of a U-Net's connection, is not there: meanwhile all that stands in for other stages gives no
numbers, also where this rank holds two stages, and a stage that then gives none itself is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.anatomy.observed import observed
from meshwright.base.errors import InputError, PlanRefused
from meshwright.parallel.exchange.calls import gather_objects
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline.absent import Absent
from meshwright.parallel.pipeline.gates import Run

Form = tuple[tuple[int, ...], torch.dtype]
Forward = Callable[[int, dict[str, Any], tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def rehearse(model: nn.Module, mesh: Mesh, run: Run, forward: Forward, batch: dict[str, Any], loss: Any = None) -> None:
    """Raises PlanRefused on every rank with what the first stage that cannot run says. Every rank calls it; what `loss` holds is restored."""
    forms: list[Form] = []
    batch = {name: value[:1] if isinstance(value, torch.Tensor) and value.ndim else value for name, value in batch.items()}
    with observed(model, loss=loss), _all_tried(model, run):
        for stage in range(mesh.plan.stages):
            said: tuple[str, list[Form]] = ("", [])
            if mesh.plan.rank_of(stage) == mesh.place.pp:
                said = _tried(mesh, stage, partial(_pass, mesh, forward, stage, batch, forms))
            everyone = gather_objects(said)
            for line, _ in everyone:
                if line:
                    raise PlanRefused(line)
            forms = everyone[mesh.pipeline_rank(mesh.plan.rank_of(stage))][1]


@contextmanager
def _all_tried(model: nn.Module, run: Run) -> Iterator[None]:
    """What stands for modules forgets it by itself (observed.py)."""
    for module in model.modules():
        if isinstance(module, Absent):
            module.tried = True
    run.tried = True
    try:
        yield
    finally:
        run.tried = False


def _pass(mesh: Mesh, forward: Forward, stage: int, batch: dict[str, Any], forms: list[Form]) -> tuple[torch.Tensor, ...]:
    """What the stage gives of noise. Raises InputError where a later one gives no numbers."""
    output = forward(stage, batch, tuple(torch.rand(shape, dtype=dtype, device=mesh.device) for shape, dtype in forms))
    if stage and any(bool(tensor.isnan().any()) for tensor in output):
        raise InputError(
            f"plan {mesh.plan.name}: stage {stage} of this model reads what layers of an earlier stage make past the state that it is sent, such as the "
            "far end of a U-Net's connection: cut elsewhere with layers per stage, or use pp1"
        )
    return output


def _tried(mesh: Mesh, stage: int, run: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[str, list[Form]]:
    """What the stage could not do, or the form of what it gives. Want of memory and lost ranks are no property of the stage."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return "", [(tuple(tensor.shape), tensor.dtype) for tensor in run()]
    except (MemoryError, torch.OutOfMemoryError, ConnectionError):
        raise
    except InputError as error:
        return str(error), []
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
        line = f"plan {mesh.plan.name}: stage {stage} of this model does not run without the layers of the others ({reason}): use pp1"
        return line, []
