"""Runs a training step up to the update: splits the batch, runs forward and backward of all micro-batches, and reduces
the gradients. The trainer and proof runs (proof/) use it.

Guarantees: the loss and the gradient equal those of one device on the global batch, up to the order of floating-point
sums. The loss is the sum over all valid labels of the global batch, divided by their number. It does not depend on how
the labels are distributed over the ranks. If the user passes a loss function (a mean over rows), the loss is instead
the mean over all rows of the global batch.
"""

from __future__ import annotations

import torch

from meshwright.core.errors import InputError
from meshwright.core.ipc import RankPhase
from meshwright.core.messages import Message
from meshwright.runtime.batch_loss import check_undivided
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.expert_parallel.token_dispatcher import count_pairs_by_expert, expert_loads, summarize_loads
from meshwright.runtime.loss import Batch, num_rows
from meshwright.runtime.preflight.user_writes import is_single_device_step
from meshwright.spec.record import MoeStats
from meshwright.train.step.inputs import (
    LocalBatch,
    check_batch_across_ranks,
    check_batch_names,
    check_batch_rows,
    check_batch_type,
    check_nested_tensors,
    count_replica_labels,
    count_tokens,
    move_batch,
    pad_batch,
    split_micro_batches,
)
from meshwright.train.step.invariants import StepInvariants
from meshwright.train.step.row_counts import RowCounts
from meshwright.train.step.state import TrainState

GradientSums = tuple[float, int, list[float]]
"""The mean loss, the number of valid labels, and the squared norm of the gradient, which still has the loss scale as a
factor. With DiLoCo there is a squared norm for each replica, otherwise one in total."""


class StepPasses:
    """Runs forward and backward on one rank. `rows`, `loads`, `dropped` and `balance_loss` describe the last global
    batch. `balance_loss` is the mean load-balancing loss, or None if the model has none."""

    def __init__(self, invariants: StepInvariants | None = None, row_counts: RowCounts | None = None) -> None:
        """`invariants`: the checks of each step. Without them, as in a proof, no update may follow and no phases are
        reported. `row_counts`: the check of code that depends on the number of rows."""
        self.invariants, self._reports_phases = invariants, invariants is not None
        self._row_counts = row_counts
        self.rows = 0
        """The number of rows of the global batch."""
        self.tokens = 0
        """The number of tokens of the global batch (`count_tokens`)."""
        self.loads: list[list[float]] = []
        """The load of each expert, for each expert module: its number of (token, expert) pairs divided by the mean over
        the experts of the module."""
        self.dropped = 0.0
        """The fraction of (token, expert) pairs that were dropped."""
        self.balance_loss: float | None = None
        self._checked_names: set[frozenset[str]] = set()
        """The names of the batches that were checked."""

    def check_around(self, state: TrainState) -> None:
        """Raises InputError if the user's code has replaced the optimizer, added hooks or entered a torch mode that a
        step does not allow (guards.py)."""
        if self.invariants is not None:
            self.invariants.guards.check_around(state.engine, state.optimizer)

    def _begin(self, phase: RankPhase, state: TrainState) -> None:
        if self._reports_phases:
            state.on_phase(phase)

    def backward(self, state: TrainState, batch: Batch | LocalBatch) -> GradientSums:
        """Runs forward and backward of all micro-batches and reduces the gradients, which remain in the flat buffers.
        All ranks call it. Raises InvariantViolated or PlanRefused if a check fails (invariants.py)."""
        engine, plan, mesh = state.engine, state.plan, state.mesh
        self._begin(RankPhase.backward, state)
        self.check_around(state)
        batches, tokens = self.split(state, batch)
        if self._row_counts is not None:
            self._row_counts.check(state, batches, self.rows, whole=not isinstance(batch, LocalBatch))
        outer, every = engine.outer, tokens
        if outer is not None:
            tokens = count_replica_labels(engine, batches)
        if (balance := engine.balance) is not None:
            balance.begin_step(every / (sum(plan.shares) or plan.dp * len(batches)))
        total = engine.forward_backward(batches, state.scale.factor / max(tokens, 1))
        self._begin(RankPhase.reduce, state)
        engine.zero.finish_gradients()
        self._begin(RankPhase.agree, state)
        pairs = count_pairs_by_expert(engine.mixtures, engine.anatomy, mesh.device)
        balanced = torch.zeros_like(total) if balance is None else balance.total / plan.tp
        square = engine.zero.squared_norm()
        squares = square.view(1) if outer is None else outer.scatter_by_replica(square)
        if self.invariants is None:
            own_sums = torch.zeros(0, dtype=torch.float64, device=mesh.device)
        else:
            own_sums = self.invariants.sums(state, batches, every, total)
        sums = torch.cat([torch.stack([total / plan.tp, balanced]), squares, pairs, engine.zero.seen_grads(), own_sums])
        all_reduce(sums, mesh.world).wait()
        values = sums.tolist()  # the only place of a step where the host waits for the device
        losses = 2 + len(squares)
        loads = losses + len(pairs)
        unused = loads + 1 + len(engine.zero.unused)
        engine.zero.sync_unused(values[loads:unused])
        loss, balanced_by, *each = values[:losses]
        self.balance_loss = None if balance is None else balanced_by / max(every, 1)
        self.loads, self.dropped = expert_loads(torch.tensor(values[losses:loads], dtype=torch.float64), engine.anatomy)
        if self.invariants is not None:
            self.invariants.check(state, values[unused:], (loss, sum(each), every), batches, batch)
        return loss / max(every, 1), every, each

    def split(self, state: TrainState, batch: Batch | LocalBatch) -> tuple[list[Batch], int]:
        """Returns this replica's micro-batches on the device, and the number of valid labels in the global batch. All
        ranks call it. Raises InputError if the batch is invalid or differs between ranks (inputs.py), or if the weights
        are not loaded yet."""
        engine, plan, mesh, objective = state.engine, state.plan, state.mesh, state.engine.objective
        if engine.unfilled:
            name = min(engine.unfilled)
            raise InputError(
                Message(
                    "the model was built on the meta device and {name!r} has no values: call "
                    "trainer.load_weights(folder) first",
                    name=name,
                )
            )
        whole = not isinstance(batch, LocalBatch)
        given = batch.micro_batches if isinstance(batch, LocalBatch) else [check_batch_type(batch)]
        if whole or not self._checked_names:
            check_batch_across_ranks(given, mesh, whole=whole)
            for part in given:
                check_batch_rows(part, (sum(plan.shares) or plan.dp) if whole else 1)
                if (names := frozenset(part)) not in self._checked_names:
                    check_batch_names(part, objective)
                    self._checked_names.add(names)
        if isinstance(batch, LocalBatch):
            batches = batch.micro_batches
            tokens = batch.tokens
            of_all, here = plan.uneven_batch or plan.rows_per_round, mesh.replica
            own = plan.micro_batch_of(here) * (plan.shares[here] if plan.shares else 1)
            self.rows = round(sum(map(num_rows, batches)) * of_all / own)
            self.tokens = round(sum(map(count_tokens, batches)) * of_all / own)
            if tokens is None:
                valid = torch.tensor(float(sum(map(objective.count, batches))), dtype=torch.float64, device=mesh.device)
                all_reduce(valid, mesh.world).wait()
                tokens = round(float(valid) / (plan.pp * plan.tp * plan.cp))
        else:
            tokens = objective.count(batch)
            self.rows, self.tokens = num_rows(batch), count_tokens(batch)
            single = not engine.statistics and engine.balance is None
            if objective.loss is None and "labels" in batch and single:
                batch = pad_batch(batch, plan)
            batches = split_micro_batches(batch, plan, mesh.replica, is_odd=objective.loss is not None and single)
        if engine.batch_loss is not None:
            check_undivided(plan, len(batches))
        if not is_single_device_step(engine, len(batches)):
            for part in given:
                check_nested_tensors(part, plan)
        engine.pipeline.set_labels(tokens)
        kind, uncast = getattr(torch, engine.recipe.compute), getattr(objective.loss, "uncast_entries", ())
        return [move_batch(part, mesh.device, kind, uncast) for part in batches], tokens

    @property
    def expert_stats(self) -> MoeStats | None:
        """Returns the expert statistics of the last batch, or None if the model has no experts."""
        if not self.loads:
            return None
        return MoeStats(loads=summarize_loads(self.loads), dropped=self.dropped, balance_loss=self.balance_loss)
