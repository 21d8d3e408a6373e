"""Before the first pass of a pipeline each stage runs once by itself, in the order of the stages, so that what cannot run is refused by all ranks alike.

Rule: forward alone, without gradients and without dropout, of this rank's first micro-batch; a stage is given zeros in the form of what the
stage before it said it would send. No rank waits for a message of one that has failed: all hear what each stage says, and the first that
fails is the line of every rank, before anything is trained. Costs one forward of one micro-batch and a small gather for each stage, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.anatomy.observed import observed
from meshwright.base.errors import InputError
from meshwright.parallel.mesh import Mesh

Form = tuple[tuple[int, ...], torch.dtype]
Forward = Callable[[int, dict[str, Any], tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def rehearse(model: nn.Module, mesh: Mesh, forward: Forward, batch: dict[str, Any]) -> None:
    """Nothing, or InputError on every rank with what the first stage that cannot run says. Every rank calls it."""
    forms: list[Form] = []
    with observed(model):
        for stage in range(mesh.plan.stages):
            said: tuple[str, list[Form]] = ("", [])
            if mesh.plan.rank_of(stage) == mesh.place.pp:
                received = tuple(torch.zeros(shape, dtype=dtype, device=mesh.device) for shape, dtype in forms)
                said = _tried(mesh, stage, lambda stage=stage, received=received: forward(stage, batch, received))  # type: ignore[misc]
            everyone: list[tuple[str, list[Form]]] = [said]
            if dist.is_initialized():
                everyone = [said] * dist.get_world_size()
                dist.all_gather_object(everyone, said)
            for line, _ in everyone:
                if line:
                    raise InputError(line)
            forms = everyone[mesh.pipeline_rank(mesh.plan.rank_of(stage))][1]


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
