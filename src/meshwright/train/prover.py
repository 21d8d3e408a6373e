"""When a proof runs (train/proof.py), and what follows from it: before the first update, before the second, and sparsely after it.

The decision is the same on every rank: what depends on time is decided by rank 0. A plan that differs from one device is refused by all ranks before
the update counts. `MESHWRIGHT_PROVE` (auto, start, never or a number of steps) is the default where `parallelize` is given no `prove`, and `auto`
without it.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from meshwright.anatomy.skeleton import skeleton_of
from meshwright.base.errors import InputError, PlanRefused
from meshwright.base.pulse import Phase
from meshwright.base.units import show_seconds
from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.parallel.exchange.group import shrink
from meshwright.parallel.exchange.heap import give_back
from meshwright.parallel.fingerprint import fingerprints_of
from meshwright.parallel.objective import Batch, LossFunction, rows_of
from meshwright.spec.plan import Plan, Recompute
from meshwright.spec.proof import CHEAP_PART, CHEAP_SECONDS, FIRST_STEPS, Proof, ProofMode, ProofPrice, check_mode, is_cheap
from meshwright.spec.rules import proof_rows
from meshwright.train.plain_values import Plain, changes_of, follow, plain_of
from meshwright.train.proof import NothingProven, Run

if TYPE_CHECKING:
    from meshwright.train.trainer import Share, Trainer

SETTING = "MESHWRIGHT_PROVE"
LATER = (1, 9, 99, 999)
"""Updates of this run after which a cheap proof is repeated: before steps 2, 10, 100 and 1000."""
ANNOUNCED = 10.0
"""Seconds of a proof by the estimate beyond which it is announced before it runs."""
RATES = {"cpu": 3e10, "cuda": 2e14}
"""Operations a second that a device does in practice, for the estimate of a first proof alone."""


def proof_mode(given: ProofMode | None) -> ProofMode:
    """Return `given`, or the setting of the environment, or 'auto'. Raises InputError."""
    if given is not None:
        return check_mode(given)
    said = os.environ.get(SETTING, "auto")
    return check_mode(int(said) if said.isdecimal() else said)  # type: ignore[arg-type]


READS = "the loss reads parameters beside the output, and the copy of the model that a proof compares with has others"
"""Why a plan is not proven whose data ranks hold all parameters."""


class Prover:
    """The schedule of proofs of one trainer; `last` is the last proof.

    Who runs the trainer may set `say`, which gets lines for the user, `record`, which gets every proof, and `predicted`, the
    planner's estimate. Every rank calls them alike.
    """

    def __init__(self, mode: ProofMode, model: nn.Module | None, loss: LossFunction | None, compute: str = "") -> None:
        """`model`: as the user has given it, which nothing has changed yet; `compute`: the type of computation."""
        self.mode = mode
        try:
            self.skeleton = None if mode == "never" or model is None else skeleton_of(model, loss)
        except InputError as error:
            raise InputError(f"no proof run: {error}, or train without it with prove='never'") from None
        self.fingerprints = (
            {} if self.skeleton is None or model is None or not _is_first() else fingerprints_of(model, getattr(torch, compute))
        )
        self.versions: list[int] = []
        """Of the weights when they were laid."""
        self.plain: Plain = {}
        """Plain values of the model's modules that the skeleton knows."""
        self.required = ""
        """Why the next update waits for a proof."""
        self.reason = ""
        """Why the last proof before an update ran."""
        self.last: Proof | None = None
        self.skipped = ""
        """Why the proof before the first update did not run."""
        self.say: Callable[[str], None] = lambda line: None
        self.record: Callable[[Proof], None] = lambda proof: None
        self.predicted = ProofPrice()
        self._updates = 0
        self._seconds = 0.0
        """Of the last proof before an update; 0 where there was none."""
        self._began = time.perf_counter()

    def before(self, trainer: Trainer, batch: Batch | Share) -> None:
        """Before an update on `batch`: a proof where one is due. Raises PlanRefused on every rank where the plan differs from one device."""
        reason = self._reason(trainer, batch)
        self._updates += 1
        if not reason:
            return
        when = f"again ({reason})" if self.required else reason
        if self.predicted.seconds > ANNOUNCED:
            self.say(f"proving the plan {when}, for about {show_seconds(self.predicted.seconds)}")
        trainer.on_phase(Phase.prove)
        try:
            self._prove_or_refuse(trainer, batch, reason, when)
        finally:
            trainer.on_phase(Phase.data)

    def _prove_or_refuse(self, trainer: Trainer, batch: Batch | Share, reason: str, when: str) -> None:
        preflight(trainer, batch)
        if trainer.engine.objective.unreadable.is_used:
            self.required = ""
            self.skipped = f"the plan is not proven: {READS}"
            self.say(self.skipped)
            return
        try:
            proof = self.prove(trainer, batch)
            if not proof.equal and trainer.mend():  # a copy of the weights had drifted: the plan is not to blame
                proof = self.prove(trainer, batch)
        except NothingProven as nothing:
            self.required = reason  # a step that one device skips is no fault of the plan
            self.say(f"{nothing}; the next update is proven instead")
            return
        shown = self.reason != reason and reason not in map(_before, LATER)
        self.reason, self.required = reason, ""
        self._seconds = proof.seconds
        self.record(proof)
        if proof.equal and shown:
            self.say(_passed(proof, when, self.predicted.seconds))
        if not proof.equal:
            raise PlanRefused(
                f"plan {proof.plan}: the proof run differs from one device: {proof.line}: use another plan (data parallelism alone changes least), "
                "or train without the proof with prove='never'"
            )

    def prove(self, trainer: Trainer, batch: Batch | Share) -> Proof:
        """A proof now. All ranks call it."""
        if self.skeleton is None:
            raise InputError("prove='never' has no copy of the model to compare with: call parallelize with prove='auto'")
        if trainer.engine.outer is not None:
            raise InputError(
                "replicas that take local steps have no single device to compare with: the proof runs without local steps alone"
            )
        if trainer.engine.objective.unreadable.is_used:
            raise InputError(f"no proof: {READS}")
        trainer.engine.zero.written.settle(trainer.engine)
        now = plain_of(trainer.engine.model, trainer.engine.objective.loss)
        follow(self.skeleton.model, self.skeleton.loss, changes_of(self.plain, now))
        self.plain = now
        unchanged = trainer.steps == 0 and versions_of(trainer) == self.versions
        self.last = Run(trainer, self.skeleton, self.fingerprints if unchanged else None).prove(batch, self.predicted.length)
        self.fingerprints = {}  # proven once: what ranks do to weights later is another matter
        gc.collect()  # one device's side refers to itself, and holds weights and gradients until somebody looks
        shrink([trainer.mesh.world])
        give_back()
        return self.last

    def resume(self, seconds: float, updates: int) -> None:
        """Count a proof that an earlier process of this run has made under the same plan, in `seconds`, as the one before the first update."""
        self._seconds, self._updates = seconds, max(updates, 1)

    @property
    def proven(self) -> bool:
        return self.last is not None and self.last.equal

    # --- schedule -------------------------------------------------------------------------------------------------------------

    def _reason(self, trainer: Trainer, batch: Batch | Share) -> str:
        if self.mode == "never":
            return ""
        if trainer.engine.outer is not None:
            if not self.skipped:
                self.skipped = (
                    f"plan {trainer.plan.name} is not proven: replicas that take local steps have no single device to compare with"
                )
                self.say(self.skipped)
            return ""
        if self.required:
            return self.required
        if isinstance(self.mode, int) and self._updates and not trainer.steps % self.mode:
            return f"every {self.mode} steps"
        if self._updates == 0:
            self.skipped = self._why_not(trainer, batch)
            if self.skipped:
                self.say(self.skipped)
            return "" if self.skipped else _before(0)
        if not self._seconds or self._updates not in LATER:
            return ""
        limit = CHEAP_SECONDS if self._updates == 1 else CHEAP_PART * (time.perf_counter() - self._began)
        return _before(self._updates) if self._all(trainer, self._seconds <= limit) else ""

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
        if self.mode != "auto":
            return ""
        if self.predicted.seconds:
            return self._too_dear(self.predicted.seconds, self.predicted.step, trainer)
        elements = sum(shape.numel() for shape in trainer.engine.shapes.values())
        example = batch if isinstance(batch, dict) else batch.micro_batches[0]
        places = max(
            (math.prod(value.shape[1:2]) for value in example.values() if isinstance(value, torch.Tensor) and value.ndim), default=1
        )
        proven = min(rows, proof_rows(plan))
        work = 2 * 8 * elements * proven * places  # two contents; forward, recompute and backward of rank 0
        step = 6 * elements * rows * places / plan.world
        rate = RATES.get(trainer.mesh.device.type, RATES["cuda"])
        return self._too_dear(work / rate, step / rate, trainer)

    def _too_dear(self, seconds: float, step: float, trainer: Trainer) -> str:
        """Why a proof of `seconds` is left out by 'auto'; '' where it is not."""
        if self._all(trainer, is_cheap(seconds, step)):
            return ""
        return (
            f"the plan is not proven on these ranks: a proof would take about {show_seconds(seconds)}, more than {CHEAP_PART:.0%} of the first "
            f"{FIRST_STEPS:,} steps; --prove runs it all the same (prove='start' in Python), `meshwright verify` proves a small model of this kind"
        )


def _before(updates: int) -> str:
    return f"before step {updates + 1}"


def _passed(proof: Proof, when: str, predicted: float) -> str:
    """A proof that has found the plan equal, in one line."""
    said = f", {show_seconds(predicted)} predicted" if predicted else ""
    more = "".join(f"; {note}" for note in proof.notes)
    return (
        f"proven equal to one device {when}: loss {proof.loss:.1e}, gradients {proof.gradient:.1e}, {proof.parameters} parameters, "
        f"{proof.rows} rows in {len(proof.contents)} batches ({show_seconds(proof.seconds)}{said}){more}"
    )


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
