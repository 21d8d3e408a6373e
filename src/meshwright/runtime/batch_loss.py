"""Computes a loss over the rows of the whole batch, such as a contrastive loss (CLIP): `parallelize(gather="batch")`.

Each data-parallel rank runs the model on its own rows. Then all ranks exchange the outputs, and each of them computes
the loss of all rows. So the loss and its gradient with respect to the outputs are equal on all ranks, and backward
sends nothing: a rank takes the gradient of its own rows. Other parameters that the loss reads, such as a temperature,
get the mean of the ranks' gradients.

A rank needs all its rows in one micro-batch, because the outputs of all rows must exist at the same time. The rows of
the model itself must not depend on each other. The checks of the first steps compare them by `compare_rows`, which
replaces the loss by a sum over rows (preflight/batch_separability.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.runtime.comm.async_collectives import all_gather
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.loss import Batch, LossFunction, loss_weight, num_rows
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.constraints import check_batch_size
from meshwright.spec.plan import Plan
from meshwright.spec.precision import Recipe

GATHER_BATCH = "batch"
"""The only value of the option `gather`."""


def check_gather(gather: str | None, loss: LossFunction | None, plan: Plan, recipe: Recipe) -> None:
    """Checks the option `gather` of `parallelize`.

    Raises:
        InputError: The value is unknown, there is no loss function, the plan divides the rows of a replica, or
            replicas do not synchronise in every step (DiLoCo).
    """
    if gather is None:
        return
    if gather != GATHER_BATCH:
        hint = did_you_mean(gather, [GATHER_BATCH])
        raise InputError(
            Message(
                "gather={gather!r} is unknown: give gather='batch', or leave it out{hint}", gather=gather, hint=hint
            )
        )
    if loss is None:
        raise InputError(
            Message("gather='batch' gives a loss function the outputs of all rows: give loss=function(output, batch)")
        )
    if plan.pp > 1 or plan.shares or recipe.local is not None:
        raise InputError(
            Message(
                "plan {plan}: with gather='batch' the loss needs all rows at once, so a replica has one micro-batch: "
                "use dp{world} with z1, z2 or z3, without pp, ga and DiLoCo",
                plan=plan.name,
                world=plan.world,
            )
        )


def check_undivided(plan: Plan, micro_batches: int) -> None:
    """Checks that a replica has one micro-batch.

    Raises:
        InputError: It has several `micro_batches`.
    """
    if micro_batches > 1:
        raise InputError(
            Message(
                "plan {plan}: with gather='batch' the loss needs all rows at once, but this batch has {micro_batches} "
                "micro-batches per replica: use mb{rows}, or a plan name without mb",
                plan=plan.name,
                micro_batches=micro_batches,
                rows=plan.micro_batch * micro_batches,
            )
        )


def comparison_rows(plan: Plan, batch_loss: BatchLoss | None) -> int:
    """Returns the number of rows of the batch in a comparison with one device."""
    return check_batch_size(plan) if batch_loss is None else plan.rows_per_round


class BatchLoss:
    """The loss function of a rank: calls the user's `loss` with the outputs and the batch of all replicas. All
    data-parallel ranks call it together."""

    def __init__(self, loss: LossFunction, context: ParallelContext) -> None:
        self.loss, self.replica = loss, context.replica
        self._groups = [group for name in ("shards", "copies") if (group := context.group(name)) is not None]
        """Together they order the replicas: the index of a replica is copy x shards + shard."""
        self._device, self._compares = context.device, False

    def __call__(self, output: Any, batch: Batch) -> torch.Tensor:
        """Returns the loss of the rows of all replicas.

        Raises:
            InputError: No tensor of `output` has the rows as its first dimension.
        """
        own = num_rows(batch)
        if self._compares:
            return _sum_by_rows(output, own)
        counts = [own]
        if self._groups:
            counts = self._gather(torch.tensor([loss_weight(batch)], device=self._device)).tolist()
        found: list[torch.Tensor] = []

        def whole(value: Any) -> Any:
            if not _has_rows(value, own):
                return value
            found.append(value)
            return _GatherRows.apply(value, self, counts) if self._groups else value

        outputs = tree_map(whole, output)
        if not found:
            raise InputError(
                Message(
                    "gather='batch': the model returns {type} without a tensor of {rows} rows: return the embeddings, "
                    "with one row for each row of the batch",
                    type=type(output).__name__,
                    rows=own,
                )
            )
        everything: Any = _WholeBatch(batch, whole)
        return _Opaque.apply(self.loss(outputs, everything))

    @contextmanager
    def compare_rows(self) -> Iterator[None]:
        """Inside this context, the loss is a mean over this rank's rows of a function of their outputs. So it shows
        whether the rows of the model depend on each other."""
        before, self._compares = self._compares, True
        try:
            yield
        finally:
            self._compares = before

    def gather_rows(self, value: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Returns the rows of all replicas, in order of the replicas. `value`: (rows, ...). `counts`: the number of
        rows of each replica, of which some may have fewer at the end of an epoch."""
        most = max(counts)
        own = value[: counts[self.replica]]
        padded = F.pad(own, [0, 0] * (own.ndim - 1) + [0, most - len(own)])
        full = self._gather(padded.contiguous())
        if min(counts) == most:
            return full
        return torch.cat([rows[:count] for rows, count in zip(full.split(most), counts, strict=True)])

    def _gather(self, value: torch.Tensor) -> torch.Tensor:
        for group in self._groups:
            value = _all_gather(value, group)
        return value


def _all_gather(value: torch.Tensor, group: CommGroup) -> torch.Tensor:
    full = value.new_empty(group.size * len(value), *value.shape[1:])
    all_gather(full.view(-1), value.view(-1), group).wait()
    return full


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows


class _GatherRows(torch.autograd.Function):
    """Gathers the rows of all replicas. Backward returns the gradient of this replica's rows. A rank's loss counts for
    its own rows (`LossHead.sum`), so the gradient is scaled from these to all rows."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, loss: BatchLoss, counts: list[int]) -> torch.Tensor:
        ctx.first, ctx.count, ctx.rows = sum(counts[: loss.replica]), counts[loss.replica], len(value)
        ctx.scale = sum(counts) / max(ctx.count, 1)
        return loss.gather_rows(value, counts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        own = gradient[ctx.first : ctx.first + ctx.count] * ctx.scale
        return F.pad(own, [0, 0] * (own.ndim - 1) + [0, ctx.rows - ctx.count]), None, None


class _Opaque(torch.autograd.Function):
    """The identity. It prevents a check: loss_divisors.py compares the numbers by which a loss divides with the number
    of rows of this rank, but here they count the rows of all ranks. The check does not read past a custom function."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _WholeBatch(Mapping[str, Any]):
    """The batch of all replicas. An entry is gathered when the loss reads it, so that images are not sent for a loss
    that reads only labels."""

    def __init__(self, own: Batch, whole: Callable[[Any], Any]) -> None:
        self._own, self._whole, self._read = own, whole, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            self._read[name] = self._whole(self._own[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def _sum_by_rows(output: Any, rows: int) -> torch.Tensor:
    """Returns the mean over rows of p + p^2, where p is a random projection of all outputs of the row. The square shows
    a dependence that cancels in a sum, such as that of a difference from the mean."""
    found: list[torch.Tensor] = []

    def add(value: Any) -> Any:
        if _has_rows(value, rows) and value.is_floating_point():
            flat = value.reshape(rows, -1)
            random = torch.Generator().manual_seed(len(found))
            factors = torch.randn(flat.shape[1], generator=random, dtype=torch.float64) / flat.shape[1] ** 0.5
            found.append(flat @ factors.to(flat))
        return value

    tree_map(add, output)
    if not found:
        return torch.zeros(())
    projected = torch.stack(found).sum(0)
    return (projected + projected.square()).mean()
