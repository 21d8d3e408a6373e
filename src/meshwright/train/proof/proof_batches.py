"""Builds the batches of a proof (proof_run.py) from the training batch. The first batch has a few real rows with
unequal numbers of valid labels. The second batch has different values and a different row order. Its sequences have
half the length, rounded down to a length that the plan can divide. If the result is less than 8 tokens, the sequences
keep their full length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from meshwright.models.model_io import IGNORE_INDEX
from meshwright.runtime.batch_loss import comparison_rows
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.loss import Batch, num_rows
from meshwright.runtime.preflight.row_batches import is_token_ids
from meshwright.spec.constraints import half_sequence_length
from meshwright.train.step.guards import sizes_of
from meshwright.train.step.inputs import LocalBatch


@dataclass
class ProofBatch:
    """A global batch of a proof, identical on every rank. `title` describes it to the user. `optional`: whether the
    proof only adds a note, instead of raising an error, if one device cannot run the batch. `uncut`: the batch before
    its sequences were truncated to the maximum length of a proof, or None if they were not truncated."""

    title: str
    batch: Batch
    optional: bool = False
    uncut: Batch | None = None


def build_proof_batches(
    engine: Engine, batch: Batch | LocalBatch, own_loss: bool, longest: int = 0
) -> list[ProofBatch]:
    """Returns the batches of a proof, identical on every rank. All ranks call it. `batch`: the batch of the next step.
    `own_loss`: whether the user has passed a loss function; then the labels stay unchanged. `longest`: the maximum
    number of tokens per row, or 0 for no limit."""
    rows = comparison_rows(engine.mesh.plan, engine.batch_loss)
    whole = batch if isinstance(batch, dict) else _gather_batch(engine, batch.micro_batches)
    found = num_rows(whole)
    if found > rows:
        whole = _slice_rows(whole, slice(0, rows))
    length, title = sequence_length(whole), f"{num_rows(whole)} rows of the batch"
    uncut = whole if 0 < longest < length else None
    if 0 < longest < length:
        whole, length, title = (
            truncate_sequences(whole, length, longest),
            longest,
            f"{title}, the first {longest} tokens of each",
        )
    first = dict(whole) if own_loss else with_unequal_labels(whole)
    contents = [ProofBatch(title, first, uncut=uncut)]
    other = with_other_values(first, own_loss)
    short = half_sequence_length(engine.mesh.plan, length)
    if short:
        contents.append(ProofBatch(f"other values, {short} tokens", truncate_sequences(other, length, short), True))
    else:
        contents.append(ProofBatch("other values", other, True))
    return contents


def _gather_batch(engine: Engine, micro_batches: list[Batch]) -> Batch:
    """Concatenates the first micro-batches of every replica on every rank. Micro-batches whose sizes differ from those
    of the first one are left out. All ranks call it. `micro_batches`: the micro-batches of this rank's replica."""
    plan, place = engine.mesh.plan, engine.mesh.coords
    count = (
        plan.shares[engine.mesh.replica]
        if plan.shares
        else min(len(micro_batches), plan.schedule_rules.ordered_micro_batches or 2 * plan.pp)
    )
    mine = (engine.mesh.replica, micro_batches[:count]) if (place.pp, place.cp, place.tp) == (0, 0, 0) else None
    everyone = gather_objects(mine)
    parts = [
        part
        for _, parts in sorted((one for one in everyone if one is not None), key=lambda one: one[0])
        for part in parts
    ]
    parts = [part for part in parts if sizes_of(part) == sizes_of(parts[0])]
    return {
        name: torch.cat([part[name].cpu() for part in parts])
        if isinstance(value, torch.Tensor) and value.ndim
        else value
        for name, value in parts[0].items()
    }


def _slice_rows(batch: Batch, rows: slice) -> Batch:
    return {
        name: value[rows] if isinstance(value, torch.Tensor) and value.ndim else value for name, value in batch.items()
    }


def with_unequal_labels(batch: Batch) -> Batch:
    """Returns `batch` with some labels masked, so that rows have unequal numbers of valid labels. With these, a plan
    that averages the means of its rows or ranks computes a wrong loss. A sequence that has valid labels keeps at least
    one of them. Of class labels with shape (rows,), every third label is masked."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or not labels.ndim or labels.is_floating_point():
        return batch
    labels = labels.clone()
    if labels.ndim == 1:
        dropped = torch.arange(len(labels)) % 3 == 1
        labels[dropped.to(labels.device)] = IGNORE_INDEX
        return {**batch, "labels": labels} if bool((labels != IGNORE_INDEX).any()) else batch
    for row, values in enumerate(labels.view(len(labels), -1)):
        valid = (values != IGNORE_INDEX).nonzero().flatten()
        values[valid[: (row * 7 + 3) % max(len(valid) - 2, 1)]] = IGNORE_INDEX
    return {**batch, "labels": labels}


def with_other_values(batch: Batch, own_loss: bool) -> Batch:
    """Returns `batch` with reversed rows and permuted token ids. Labels (rows, positions) are permuted like token ids,
    unless `own_loss`; other integer labels keep their values. Floating-point tensors become random values with their
    mean and standard deviation, unless some values are not finite or at most half of them are distinct (masks)."""
    random = torch.Generator().manual_seed(1)
    ids = {name: value for name, value in batch.items() if is_token_ids(name, value)}
    seen = (
        torch.unique(torch.cat([value.flatten().cpu() for value in ids.values()]))
        if ids
        else torch.empty(0, dtype=torch.int64)
    )
    order = seen[torch.randperm(len(seen), generator=random)]

    def exchanged(value: torch.Tensor) -> torch.Tensor:
        at = torch.searchsorted(seen, value.cpu()).clamp_max(max(len(seen) - 1, 0))
        return torch.where(seen[at] == value.cpu(), order[at], value.cpu()).to(value.device)

    def other(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        value = value.flip(0)
        if name in ids or (name == "labels" and not own_loss and is_token_ids("input_ids", value) and len(seen)):
            return exchanged(value)
        if (
            value.is_floating_point()
            and value.numel() > 2
            and bool(value.isfinite().all())
            and len(torch.unique(value)) > value.numel() // 2
        ):
            drawn = torch.randn(value.shape, generator=random).to(value)
            return drawn * value.float().std().to(value) + value.float().mean().to(value)
        return value

    return {name: other(name, value) for name, value in batch.items()}


def sequence_length(batch: Batch) -> int:
    """Returns the sequence length of the batch, or 0 if its rows are not sequences."""
    for name in ("labels", "input_ids"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.ndim == 2 and not value.is_floating_point():
            return value.shape[1]
    return 0


def truncate_sequences(batch: Batch, length: int, short: int) -> Batch:
    """Returns `batch` with sequences of `length` truncated to `short`.

    In integer tensors and in masks (rows, heads, length, length), every dimension of size `length` except the first is
    truncated. In floating-point tensors of two or three dimensions (rows, positions, ...), only the second dimension is
    truncated.
    """

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        masks = value.ndim == 4 and value.shape[-2:] == (length, length)
        dims = range(1, value.ndim) if masks or not value.is_floating_point() else [1] if value.ndim in (2, 3) else []
        for dim in dims:
            value = value.narrow(dim, 0, short) if value.shape[dim] == length else value
        return value.contiguous()

    return {name: cut(value) for name, value in batch.items()}
