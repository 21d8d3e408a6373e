"""When a proof runs (train/proof.py), and what follows from it: before the first update, before the second, and sparsely after it.

The decision is the same on every rank: what depends on time is decided by rank 0. A plan that differs from one device is refused by all ranks before
the update counts. `MESHWRIGHT_PROVE` (start, never or a number of steps) is the default where `parallelize` is given no `prove`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from meshwright.base.errors import InputError, PlanRefused
from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.parallel.objective import Batch, LossFunction, rows_of
from meshwright.spec.plan import Plan, Recompute
from meshwright.spec.proof import Proof, ProofMode, check_mode
from meshwright.train.contents import rows_of_proof
from meshwright.train.proof import Run
from meshwright.train.skeleton import fingerprints_of, skeleton_of

if TYPE_CHECKING:
    from meshwright.train.trainer import Share, Trainer

SETTING = "MESHWRIGHT_PROVE"
LATER = (1, 9, 99, 999)
"""Updates of this run after which a cheap proof is repeated: before steps 2, 10, 100 and 1000."""
CHEAP_SECONDS, CHEAP_PART, FIRST_STEPS = 5.0, 0.01, 1000
RATES = {"cpu": 3e10, "cuda": 2e14}
"""Operations a second that a device does in practice, for the estimate of a first proof alone."""


def proof_mode(given: ProofMode | None) -> ProofMode:
    """`given`, or the setting of the environment, or 'start'. Raises InputError."""
    if given is not None:
        return check_mode(given)
    said = os.environ.get(SETTING, "start")
    return check_mode(int(said) if said.isdecimal() else said)  # type: ignore[arg-type]


class Prover:
    """The schedule of proofs of one trainer. `say` is given lines for the user; `last` is the last proof."""

    def __init__(self, mode: ProofMode, model: nn.Module | None, loss: LossFunction | None, compute: str = "") -> None:
        """`model`: as the user has given it, which nothing has changed yet; `compute`: the type of computation."""
        self.mode, self.skeleton = mode, None if mode == "never" or model is None else skeleton_of(model, loss)
        self.fingerprints = (
            {} if self.skeleton is None or model is None or not _is_first() else fingerprints_of(model, getattr(torch, compute))
        )
        self.versions: list[int] = []
        """Of the weights when they were laid."""
        self.required = ""
        """Why the next update waits for a proof."""
        self.reason = ""
        """Why the last proof before an update ran."""
        self.last: Proof | None = None
        self.skipped = ""
        """Why the proof before the first update did not run."""
        self.say: Callable[[str], None] = lambda line: None
        self._updates = 0
        self._began = time.perf_counter()

    def before(self, trainer: Trainer, batch: Batch | Share) -> None:
        """Before an update on `batch`: a proof where one is due. Raises PlanRefused on every rank where the plan differs from one device."""
        reason = self._reason(trainer, batch)
        self._updates += 1
        if not reason:
            return
        preflight(trainer, batch)
        proof = self.prove(trainer, batch)
        self.reason, self.required = reason, ""
        if not proof.equal:
            raise PlanRefused(
                f"plan {proof.plan}: the proof run differs from one device: {proof.line}: use another plan (data parallelism alone changes least), "
                "or train without the proof with prove='never'"
            )

    def prove(self, trainer: Trainer, batch: Batch | Share) -> Proof:
        """A proof now. All ranks call it."""
        if self.skeleton is None:
            raise InputError("prove='never' has no copy of the model to compare with: call parallelize with prove='start'")
        if trainer.engine.outer is not None:
            raise InputError(
                "replicas that take local steps have no single device to compare with: the proof runs without local steps alone"
            )
        unchanged = trainer.steps == 0 and versions_of(trainer) == self.versions
        self.last = Run(trainer, self.skeleton, self.fingerprints if unchanged else None).prove(batch)
        self.fingerprints = {}  # proven once: what ranks do to weights later is another matter
        return self.last

    @property
    def proven(self) -> bool:
        return self.last is not None and self.last.equal

    # --- schedule -------------------------------------------------------------------------------------------------------------

    def _reason(self, trainer: Trainer, batch: Batch | Share) -> str:
        if self.mode == "never" or trainer.engine.outer is not None:
            return ""
        if self.required:
            return self.required
        if isinstance(self.mode, int) and self._updates and not trainer.steps % self.mode:
            return f"every {self.mode} steps"
        if self._updates == 0:
            self.skipped = self._why_not(trainer, batch)
            if self.skipped:
                self.say(self.skipped)
            return "" if self.skipped else "start"
        if self.last is None or self._updates not in LATER:
            return ""
        limit = CHEAP_SECONDS if self._updates == 1 else CHEAP_PART * (time.perf_counter() - self._began)
        return f"step {self._updates + 1}" if self._all(trainer, self.last.seconds <= limit) else ""

    def _all(self, trainer: Trainer, good: bool) -> bool:
        """Whether it is so on every rank."""
        others = torch.tensor([0.0 if good else 1.0], dtype=torch.float64, device=trainer.mesh.device)
        all_reduce(others, trainer.mesh.world).wait()
        return not float(others)

    def _why_not(self, trainer: Trainer, batch: Batch | Share) -> str:
        """Why no proof runs before the first update; '' where it does."""
        plan = trainer.plan
        whole = isinstance(batch, dict)
        rows = rows_of(batch) if isinstance(batch, dict) else sum(map(rows_of, batch.micro_batches)) * plan.dp
        count = rows // max(plan.rows_at_once, 1) if whole else len(batch.micro_batches)  # type: ignore[union-attr]
        if is_one_device(plan) and count <= 1 and not trainer.engine.recipe.products:
            return "one device with the batch as one micro-batch: nothing to prove"
        elements = sum(shape.numel() for shape in trainer.engine.shapes.values())
        example = batch if isinstance(batch, dict) else batch.micro_batches[0]
        places = max(
            (math.prod(value.shape[1:2]) for value in example.values() if isinstance(value, torch.Tensor) and value.ndim), default=1
        )
        proven = min(rows, rows_of_proof(plan))
        work = 2 * 8 * elements * proven * places  # two contents; forward, recompute and backward of rank 0
        step = 6 * elements * rows * places / plan.world
        seconds = work / RATES.get(trainer.mesh.device.type, RATES["cuda"])
        if not self._all(trainer, seconds <= CHEAP_SECONDS or work <= CHEAP_PART * FIRST_STEPS * step):
            return (
                f"the plan is not proven: a proof of {proven} rows would take about {seconds:.0f} s on rank 0, more than {CHEAP_PART:.0%} of the first "
                f"{FIRST_STEPS} steps; call trainer.prove(batch), or train with --prove"
            )
        return ""


def is_one_device(plan: Plan) -> bool:
    """Whether a plan is one device that computes as torch does."""
    return plan.world == 1 and plan.recompute == Recompute.none and not (plan.compile or plan.zero or plan.offload or plan.loss_chunks > 1)


def preflight(trainer: Trainer, batch: Batch | Share) -> None:
    """What is checked once before the first step says more precisely what is wrong: a proof comes behind it."""
    batches, _ = trainer._share(batch)
    trainer.engine.zero.end_broken()
    trainer.engine.preflight.check(trainer.engine, batches, True)


def versions_of(trainer: Trainer) -> list[int]:
    """How often the main weights of this rank were written to."""
    return [part._version for unit in trainer.engine.zero.units for part in unit.master.parts]


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
