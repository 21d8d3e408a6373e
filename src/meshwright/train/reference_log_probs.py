"""Computes the log-probabilities of the reference model that DPO reads, once before the first step, and gives them to
the loader. The training loop calls `add_reference`.

The reference is the model at the first step: with LoRA the base without adapters, whose B is 0, otherwise the weights
with which the run starts. So no second model is in memory, and a step runs no second forward. The plan of the run
computes the values, for the pairs that the steps and the validation read, and rank 0 writes them to
RUN/reference_log_probs.json. A run that resumes reads this file, since its weights are no longer those of the
reference.

Guarantees: a resumed run has bit-identical values, also under another plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.core.errors import InputError
from meshwright.core.ipc import Heartbeat, RankPhase
from meshwright.core.messages import Message
from meshwright.core.storage import read_text, replace_file
from meshwright.data.loader import BatchLoader, TensorBatch
from meshwright.data.sampler import sample_rows
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.preference_loss import REFERENCE_ENTRIES
from meshwright.spec.job import LaunchSpec
from meshwright.train.trainer import Trainer

REFERENCE_FILE = "reference_log_probs.json"
VALIDATION_BATCH_ROWS = 64

Rows = NDArray[np.int64]


def add_reference(trainer: Trainer, loader: BatchLoader, launch: LaunchSpec, begins: bool, pulse: Heartbeat) -> None:
    """Adds the log-probabilities of the reference to the batches of `loader`, if the job trains with DPO. All ranks
    call it, after the weights were restored.

    `begins`: whether the weights are those of the reference. Otherwise the file of the run folder has the values.

    Raises:
        InputError: the run resumes, and the file does not exist or belongs to other data.
    """
    if launch.workload.preference is None or launch.workload.preference.loss != "dpo":
        return
    path, dataset, work = Path(launch.run.folder) / REFERENCE_FILE, loader.dataset, launch.workload
    first, size = trainer.mesh.rank == 0, dataset.rows
    needed = work.steps * work.batch
    training = np.arange(size) if needed >= size else np.unique(sample_rows(work.seed, 0, needed, size))
    parts = {"training": training, "validation": loader.evaluated_rows(VALIDATION_BATCH_ROWS)}
    tables = {
        name: torch.full((count, 2), torch.nan, dtype=torch.float64)
        for name, count in (("training", size), ("validation", dataset.validation_rows))
    }
    if begins:
        for name, rows in parts.items():
            read = (lambda rows: dataset.training(rows, rows, work.seed)) if name == "training" else dataset.validation
            tables[name][rows] = _log_probs(trainer, read, rows, work.batch, pulse)
        if first:
            written = {name: tables[name][rows].tolist() for name, rows in parts.items()}
            replace_file(path, json.dumps({"data": dataset.digest, **written}))
        gather_objects(None)  # a barrier: no rank makes a step that cannot be resumed
    else:
        found = _read(path, dataset.digest) if first else None
        known = gather_objects(None if found is None else [len(found[name]) for name in parts])[0]
        if known != [len(rows) for rows in parts.values()]:
            raise InputError(
                Message(
                    "{path} with the reference of dpo is missing or belongs to other data or steps: restore the file, "
                    "or choose another --run",
                    path=path,
                )
            )
        for name, rows in parts.items():
            values = torch.zeros(len(rows), 2, dtype=torch.float64, device=trainer.mesh.device)
            if found is not None:
                values += torch.tensor(found[name], dtype=torch.float64).view(-1, 2).to(values)
            all_reduce(values, trainer.mesh.world).wait()
            tables[name][rows] = values.cpu()
    for at, entry in enumerate(REFERENCE_ENTRIES):
        loader.row_values[entry] = tables["training"][:, at], tables["validation"][:, at]


def _log_probs(
    trainer: Trainer, read: Callable[[Rows], TensorBatch], rows: Rows, batch: int, pulse: Heartbeat
) -> torch.Tensor:
    """Returns the log-probabilities of `rows`, (rows, 2), in batches of `batch` rows."""
    found = [torch.empty(0, 2, dtype=torch.float64)]
    for first in range(0, len(rows), batch):
        pulse.at(RankPhase.evaluate)
        values = trainer.reference_log_probs(read(rows[first : first + batch]))
        found.append(torch.stack([values[name] for name in REFERENCE_ENTRIES], 1))
    return torch.cat(found)


def _read(path: Path, digest: str) -> dict[str, list[list[float]]] | None:
    """Returns the values of the file, or None if there is none for the data `digest`."""
    try:
        found = json.loads(read_text(path) or "{}")
    except ValueError:
        return None
    return found if found.get("data") == digest else None
