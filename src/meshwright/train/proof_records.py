"""Proof runs of `meshwright train`: RUN/proofs.jsonl has each of them, the user reads the first, and a run that goes on does not repeat it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.base.appending import Lines
from meshwright.base.storage import failure, read_text
from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.spec.launch import Launch
from meshwright.spec.proof import Proof, ProofMode
from meshwright.train.trainer import Trainer

PROOFS = "proofs.jsonl"


def mode_of(launch: Launch) -> ProofMode | None:
    """`run.prove`, or None for the default, which the environment may change."""
    return None if launch.run.prove == "auto" else launch.run.prove


def follow_proofs(trainer: Trainer, launch: Launch, folder: Path, say: Callable[[str], None]) -> None:
    """Write the proofs of `trainer` to `folder` and tell the user. Called by every rank, after a checkpoint was loaded; only rank 0 reads and writes.

    Where the run goes on and an earlier process has proven this plan equal, the proof before the first update is not repeated: a recovery takes no
    longer for it.
    """
    prover, path, first = trainer.prover, folder / PROOFS, trainer.mesh.rank == 0
    earlier = _last_seconds(path, trainer.plan.name) if first and trainer.steps else 0.0
    shared = torch.tensor(earlier, dtype=torch.float64, device=trainer.mesh.device)
    all_reduce(shared, trainer.mesh.world).wait()
    prover.predicted, prover.say = launch.proof, say
    if float(shared):
        prover.resume(float(shared), trainer.steps)
    if first:
        prover.record = lambda proof: _append(path, proof, say)


def _append(path: Path, proof: Proof, say: Callable[[str], None]) -> None:
    lines = Lines(path)
    error = lines.append(json.dumps(proof.model_dump(), separators=(",", ":"))) or lines.close()
    if error is not None:
        say(f"a proof is not in {PROOFS}: {failure(error)}; training goes on")


def _last_seconds(path: Path, plan: str) -> float:
    """Seconds of the last proof that has found `plan` equal; 0 where there is none."""
    for line in reversed((read_text(path) or "").splitlines()):
        try:
            proof = Proof.model_validate_json(line)
        except ValueError:
            continue  # a kill has cut the line off
        if proof.plan == plan:
            return max(proof.seconds, 1e-3) if proof.equal else 0.0
    return 0.0
