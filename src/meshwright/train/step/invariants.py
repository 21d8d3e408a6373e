"""Checks invariants, conditions that hold in every correct step, before the update of each step (passes.py). The
all-reduce of loss and gradient norm also adds up the values of the invariants, so these need no extra message.

| invariant | what is compared | what is detected |
|---|---|---|
| labels | valid labels of all replicas, with the divisor of the loss | a wrong count, a lost or duplicated row |
| passes | forward passes of all stages on all ranks, with micro-batches times stages | a lost micro-batch |
| weights | checksums of the weights on ranks that store equal weights | a drifting replica, a flipped bit |
| gradients | checksums of the reduced gradients on ranks that store equal ones | a scaled shard, a partial reduction |
| divisors | the numbers by which the user's loss divides in all micro-batches | a mean over unequal numbers of labels |
| code paths | the paths that micro-batches take in one step | rows that depend on each other through a branch |
| loss | the loss is finite if the gradient is finite | a loss that is not a number |
| loss of tensor ranks | the losses that the ranks of a tensor group compute | a loss that reads a sharded activation |

Checksums add the bits of elements as integers. If n ranks store equal tensors, the checksum of the first rank is
multiplied by n - 1 and the checksums of the other ranks by -1. Equal checksums then cancel, so one all-reduce can add
the checksums of all tensors. The gradient norm of a step counts each element on one rank of each replica
(runtime/zero/reducer.py). The checksums cover all ranks, so they are an independent check. Tensors that only one rank
stores are not checked.

If `window_count` estimates that reading all elements takes at most MAX_STEP_FRACTION of a step, the checksums cover all
elements. Otherwise each step reads one window of each parameter group, in rotation. A flipped bit is then detected when
its window is read. The weights are those that forward and backward of the step have used. For the cost see
bench/results/sentinel.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from meshwright.core.errors import MeshwrightError, PlanRefused
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of
from meshwright.runtime.batch_loss import comparison_rows
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.loss import Batch, ZeroWeightBatch
from meshwright.runtime.loss_divisors import uneven_divisors
from meshwright.runtime.preflight.row_batches import repeat_rows
from meshwright.runtime.preflight.step_checks import CHECKED_STEPS
from meshwright.spec.record import ProofResult
from meshwright.train.step.guards import Outside, SizeRanges, StepGuards
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.step.path_mixtures import PathMixtures
from meshwright.train.step.state import TrainState

MAX_STEP_FRACTION = 5e-4
"""The checksums may take at most this fraction of a step's time."""
SMALL_MODEL_PARAMETERS = 1 << 20
"""If a model has at most this number of parameters, each step reads all elements, which takes less than a
millisecond."""
MIN_WINDOW_ELEMENTS, MAX_WINDOWS = 1 << 16, 16
"""A window of a parameter group has at least this number of elements. A group has at most this number of windows."""
INTEGER_DTYPE_BY_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ResultT = TypeVar("ResultT")
NOT_APPLIED = "the step is not applied; go on from a checkpoint of an earlier step"
LOSS_TOLERANCE, LOSS_TOLERANCE_FP64 = 1e-5, 1e-11
"""The largest relative difference between the losses of tensor ranks. They compute the loss from equal inputs."""
CHECKSUM_MODULUS = 2**31 - 1
"""The modulus of checksums. With this modulus, float64 can add the checksums of 1,000 parameter groups on 2,000 ranks
exactly."""


class InvariantViolated(MeshwrightError):
    """Raised if a step invariant is violated. The update of the step must not run."""


class ReplicaMismatch(MeshwrightError):
    """Raised if the replicas of a state differ and no value has a majority."""


class StepProver(Protocol):
    """An object that runs proofs: `ProofSchedule` (train/proof/proof_schedule.py)."""

    @property
    def sizes(self) -> SizeRanges:
        """Returns the sizes of batches for which a proof has passed."""

    @property
    def last(self) -> ProofResult | None:
        """Returns the last proof, or None."""

    def during(self, state: TrainState, batch: Batch | LocalBatch, reason: str) -> None:
        """Runs a proof after the backward of a step and before its update. Raises PlanRefused if the plan differs from
        one device."""


def retry_after_repair(state: TrainState, compute: Callable[[], ResultT]) -> ResultT:
    """Returns `compute()`. If this raises InvariantViolated and replicas could be repaired by majority, restores the
    random states and returns a second `compute()`."""
    device = state.mesh.device
    backend = backend_of(device)
    host, own = torch.get_rng_state(), backend.rng_state(device)
    try:
        return compute()
    except InvariantViolated as drift:
        try:
            is_mended = state.mend()
        except ReplicaMismatch:
            raise drift from None  # the message of `drift` is more specific: step, ranks and their values
        if not is_mended:
            raise
        torch.set_rng_state(host)
        if own is not None:
            backend.set_rng_state(own, device)
        return compute()


class StepInvariants:
    """Checks the invariants on one rank. All ranks reach the same result. `prover` runs a proof if a step differs from
    the conditions of earlier checks (guards.py)."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, prover: StepProver) -> None:
        self.guards, self.prover = StepGuards(optimizer), prover
        self._mine, self._loss = torch.zeros(2, 2), torch.zeros(())
        self._outside, self._mixtures = Outside(), PathMixtures()
        self._elements = sum(shape.numel() for shape in engine.shapes.values())
        self.guards.untrained(engine)
        self.guards.check_hooks(engine)

    def sums(self, state: TrainState, batches: Sequence[Batch], labels: int, loss: torch.Tensor) -> torch.Tensor:
        """Returns this rank's values for the all-reduce, float64 of shape (n,). In order: valid labels, surplus forward
        passes, checksums of weights and gradients, difference of the losses of tensor ranks, three flags, and checksums
        of code paths.

        It is called when the gradients of the step are reduced. `batches`: this rank's micro-batches. `labels`: the
        number of valid labels in the global batch. `loss`: the summed loss of this rank, float64 scalar on the device.
        """
        engine, plan = state.engine, state.plan
        same = plan.pp * plan.tp * plan.cp
        counted = (
            math.nan if _has_weightless_batch(batches) else sum(map(engine.objective.count_on_device, batches)) / same
        )
        stages = len(plan.stages_of(state.mesh.coords.pp))
        surplus = engine.run.passes - engine.preflight.began - len(batches) * stages
        self._outside = self.guards.outside(engine, batches, self.prover.sizes)
        written = engine.zero.external_writes.is_due(engine.preflight.steps in CHECKED_STEPS)
        paths = self._mixtures.sums(state, batches)
        flags = (bool(self._outside.trained), self._outside.is_any or self._mixtures.is_new, written)
        found = torch.tensor([0, surplus, 0, 0, 0, *flags, *paths], dtype=torch.float64)
        found = found.to(state.mesh.device)
        found[0] = counted
        self._loss = loss.detach()
        if plan.tp > 1:
            found[4] = self._loss * _cancelling_factor(plan.tp, state.mesh.coords.tp)
        self._mine = _replica_checksums(state, labels, self._elements)
        found[2:4] = self._mine[:, 0]
        return found

    def check(
        self,
        state: TrainState,
        sums: Sequence[float],
        made: tuple[float, float, int],
        batches: Sequence[Batch],
        given: Batch | LocalBatch,
    ) -> None:
        """Checks `sums`, the results of the method `sums` added over all ranks. `made`: loss, squared gradient norm and
        number of labels of the step. `given`: the batch that the user passed. On all ranks it raises InvariantViolated
        if an invariant is violated, and PlanRefused if a check or proof of a changed step fails."""
        loss, norm, tokens = made
        labels, passes, weights, gradients, losses, trained, changed, written, *paths = sums
        if written:
            state.engine.zero.external_writes.apply(state.engine)
        step, end = f"step {state.steps + 1}", NOT_APPLIED
        if labels == labels and state.engine.outer is None and round(labels) != tokens:
            raise InvariantViolated(
                Message(
                    "{step}: the passes of the replicas had {labels:.0f} valid labels, but the loss is divided by "
                    "{tokens}: {end}, and check the code that counts the labels",
                    step=step,
                    labels=labels,
                    tokens=tokens,
                    end=end,
                )
            )
        if passes:
            raise InvariantViolated(
                Message(
                    "{step}: all ranks together ran {passes:.0f} passes {what} than micro-batches ({ranks}): {end}",
                    step=step,
                    ranks=self._ranks(state, "passes"),
                    passes=abs(passes),
                    what=Message("fewer") if passes < 0 else Message("more"),
                    end=end,
                )
            )
        for what, off in (("weights", weights), ("gradients", gradients)):
            if off:
                raise InvariantViolated(
                    Message(
                        "{step}: {what} that must be equal on several ranks differ: {ranks}: {end}, and test these "
                        "devices",
                        step=step,
                        what=what,
                        ranks=self._ranks(state, what),
                        end=end,
                    )
                )
        self._check_loss(state, losses, loss, norm)
        self._mixtures.check(state, batches, paths, bool(trained or changed))
        if trained or changed:
            self._check_outside(state, batches, given)
        elif state.engine.preflight.checked == state.engine.preflight.steps:
            self.guards.accept(state.engine, batches)

    def _check_loss(self, state: TrainState, difference: float, loss: float, norm: float) -> None:
        """Checks that the loss is finite if the gradient is, and compares the losses of the ranks of each tensor group.
        `difference`: their sum over all ranks, each with its cancelling factor. `loss`: the summed loss of the step.
        `norm`: the squared gradient norm."""
        plan, tp = state.plan, state.mesh.tp
        if math.isfinite(norm) and not math.isfinite(loss):
            step = f"step {state.steps + 1}"
            raise InvariantViolated(
                Message(
                    "{step}: the loss is {loss}, but the gradient is finite: {end}",
                    step=step,
                    loss=loss,
                    end=NOT_APPLIED,
                )
            )
        tolerance = LOSS_TOLERANCE_FP64 if state.engine.recipe.compute == "float64" else LOSS_TOLERANCE
        if tp is None or not abs(difference) > tolerance * tp.size * abs(loss):
            return
        found: dict[tuple[int, ...], list[float]] = {}
        for ranks, value in gather_objects((tuple(tp.ranks), float(self._loss))):
            found.setdefault(ranks, []).append(value)
        ranks, losses = max(found.items(), key=lambda each: max(each[1]) - min(each[1]))
        if max(losses) - min(losses) <= tolerance * max(map(abs, losses)):
            return  # the losses of the replicas almost cancel, so that rounding is large relative to their sum
        raise PlanRefused(
            Message(
                "plan {plan}: in step {step} the loss is {one:.10g} on rank {first} and {other:.10g} on rank "
                "{second}, but the losses of these ranks must be identical: the loss reads an activation that {split} "
                "shards, such as one that a hook or an attribute of a block stores; return the activation from the "
                "forward, or use {other_plan}",
                plan=plan.name,
                step=state.steps + 1,
                one=min(losses),
                first=ranks[losses.index(min(losses))],
                other=max(losses),
                second=ranks[losses.index(max(losses))],
                split="sp" if plan.sequence_parallel else "tp",
                other_plan=Message("tp without sp") if plan.sequence_parallel else "tp1",
            )
        )

    def _check_outside(self, state: TrainState, batches: Sequence[Batch], given: Batch | LocalBatch) -> None:
        """Runs the preflight checks for a step that differs from the checked conditions on some rank. If an earlier
        proof has passed, it also runs a proof. Raises PlanRefused on all ranks if one of them fails."""
        engine, plan, step = state.engine, state.plan, state.steps + 1
        everyone = gather_objects((state.mesh.replica, self._outside))
        said = [outside for _, outside in everyone]
        if name := next((each.trained for each in said if each.trained), ""):
            raise PlanRefused(
                Message(
                    "plan {plan}: {name} is trained since step {step}, but it was frozen when the optimizer was "
                    "created, which has no state for it: let it require gradients before parallelize, or go on from "
                    "a checkpoint",
                    plan=plan.name,
                    name=name,
                    step=step,
                )
            )
        self._compare_divisors(state, said)
        at = next((outside.at for replica, outside in everyone if replica == state.mesh.replica and outside.at >= 0), 0)
        if any(each.unchecked for each in said):
            engine.preflight.again(engine, [batches[at], *batches[:at], *batches[at + 1 :]])
        last = self.prover.last
        reasons = (
            [each.asks_for_proof(last.step == state.steps) for each in said] if last is not None and last.equal else []
        )
        if reason := next(filter(None, reasons), ""):
            self.prover.during(state, self._shown_batch(state, batches, given, said), reason)
        if any(each.code for each in said) and (
            place := next(filter(None, gather_objects(engine.preflight.paths.unrepeated())), "")
        ):
            raise PlanRefused(
                Message(
                    "plan {plan}: in step {step} the values selected a code path that no check could repeat "
                    "({place}), so it is not known whether rows depend on each other there: use one device, or "
                    "branches that do not depend on values",
                    plan=plan.name,
                    step=step,
                    place=place,
                )
            )
        self.guards.accept(engine, batches)

    def _compare_divisors(self, state: TrainState, said: Sequence[Outside]) -> None:
        """Compares the numbers by which the user's loss divides in all micro-batches of all ranks
        (runtime/loss_divisors.py)."""
        counts = [each for outside in said for each in outside.counts]
        uneven = uneven_divisors(counts)
        if uneven is not None:
            raise PlanRefused(
                Message(
                    "plan {plan}: in step {step} the loss divides by {one:.10g} in one micro-batch and by {other:.10g} "
                    "in another, so it is a mean over labels or tokens, which is not the mean of its micro-batches: "
                    "leave loss= out if the model returns logits and the labels to ignore are -100, return a mean "
                    "over rows, or use dp1 with the batch as one micro-batch",
                    plan=state.plan.name,
                    step=state.steps + 1,
                    one=uneven[0],
                    other=uneven[1],
                )
            )
        self.guards.accept_counts(counts)

    def _shown_batch(
        self, state: TrainState, batches: Sequence[Batch], given: Batch | LocalBatch, said: Sequence[Outside]
    ) -> Batch | LocalBatch:
        """Returns the batch for a proof. Usually this is `given`. If a single micro-batch of a rank differs from the
        checked conditions, the result is this micro-batch, with its rows repeated to the number of rows of a proof.
        `said`: how the step of each rank differs."""
        rank = next((rank for rank, each in enumerate(said) if each.at >= 0), None)
        if rank is None or (isinstance(given, dict) and not any(each.code for each in said)):
            return given
        mine = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in batches[said[rank].at].items()
        }
        shown = gather_objects(mine if state.mesh.rank == rank else None)[rank]
        assert shown is not None
        return repeat_rows(shown, comparison_rows(state.plan, state.engine.batch_loss))

    def _ranks(self, state: TrainState, what: str) -> str:
        """Returns a text with the compared values of the first eight ranks. `what`: "weights", "gradients" or
        "passes"."""
        at = 0 if what == "weights" else 1
        if what == "passes":
            off = state.engine.run.passes - state.engine.preflight.began
            found = gather_objects(float(off))
        else:
            found = gather_objects(float(self._mine[at, 1]))
        shown = ", ".join(f"rank {rank} has {value:.0f}" for rank, value in enumerate(found[:8]))
        return shown if len(found) <= 8 else f"{shown}, ..."


def _has_weightless_batch(batches: Sequence[Batch]) -> bool:
    return any(isinstance(batch, ZeroWeightBatch) for batch in batches)


def window_count(elements: int, tokens: float, width: int, device: str) -> int:
    """Returns the number of windows into which a parameter group is divided; a step reads one window. The estimate of
    the step time assumes 6 FLOPs per parameter and token.

    `elements`: the number of parameters of the model. `tokens`: the number of tokens that a rank processes in a step.
    `width`: the bytes of a weight plus those of its gradient.

    >>> (
    ...     window_count(1 << 20, 100, 8, "cpu"),  # SMALL_MODEL_PARAMETERS
    ...     window_count(1 << 30, 100, 8, "cpu"),  # MAX_WINDOWS
    ...     window_count(1 << 30, 8000, 8, "cpu"),  # reading is cheap: many tokens per step
    ...     window_count(1 << 30, 30000, 6, "cuda"),
    ... )
    (1, 16, 1, 7)
    """
    by_cost = math.ceil(width * backend_of(device).nominal_flops_per_byte / (6 * max(tokens, 1) * MAX_STEP_FRACTION))
    return max(min(by_cost, -(-elements // SMALL_MODEL_PARAMETERS), MAX_WINDOWS), 1)


def _replica_checksums(state: TrainState, labels: int, elements: int) -> torch.Tensor:
    """Returns this rank's checksums, float64 of shape (2, 2) on the device: a row for the weights and a row for the
    reduced gradients. Each row has two values: the sum of the checksums times their cancelling factors, and the plain
    sum of the checksums.

    All checksums are weighted in one matrix product, since many small operations would cost more than reading the
    windows. `labels`: the number of valid labels in the global batch. `elements`: the number of the model's parameters.
    """
    plan, engine, step = state.plan, state.engine, state.steps
    tokens, device = labels / (plan.dp * plan.cp), state.mesh.device
    parts: dict[int, int] = {}
    sums: list[torch.Tensor] = []
    factors: list[list[float]] = []
    for unit in engine.zero.units:
        sharing = unit.placement
        similarity = sharing.shards * sharing.replicas
        width = unit.weights.full.element_size() + unit.gradients.shard.element_size()
        if width not in parts:
            parts[width] = window_count(elements, tokens, width, device.type)
        if plan.zero < 3 and similarity > 1:
            sums.append(_window_checksum(unit.weights.full, step, parts[width]))
            factors.append([_cancelling_factor(similarity, sharing.shard + sharing.replica), 1.0, 0.0, 0.0])
        if not unit.frozen and unit.gradients.host is None and sharing.replicas > 1:
            sums.append(_window_checksum(unit.gradients.shard, step, parts[width]))
            factors.append([0.0, 0.0, _cancelling_factor(sharing.replicas, sharing.replica), 1.0])
    if not sums:
        return torch.zeros(2, 2, dtype=torch.float64, device=device)
    values = torch.stack(sums).remainder(CHECKSUM_MODULUS).double()
    return (values @ torch.tensor(factors, dtype=torch.float64, device=values.device)).view(2, 2)


def _cancelling_factor(replicas: int, index: int) -> float:
    """Returns the factor of a rank's checksum. `index`: the index of the rank among the `replicas` ranks that store
    equal tensors. The factors of these ranks add up to zero."""
    return replicas - 1.0 if index == 0 else -1.0


def _window_checksum(tensor: torch.Tensor, step: int, parts: int) -> torch.Tensor:
    """Returns the checksum (int64, modulo 2^64) of the window of `tensor` that is read in `step`. `parts`: the number
    of windows. A window of whole 64-bit words is added up by words, otherwise by elements."""
    size = max(MIN_WINDOW_ELEMENTS, -(-tensor.numel() // (8 * parts)) * 8)
    first = step % max(-(-tensor.numel() // size), 1) * size
    window, width = tensor[first : first + size], tensor.element_size()
    is_whole = not (window.numel() * width % 8 or window.storage_offset() * width % 8)
    return window.view(INTEGER_DTYPE_BY_BYTES[8 if is_whole else width]).sum(dtype=torch.int64)
