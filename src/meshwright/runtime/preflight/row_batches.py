"""Makes the batches of rows that the checks of preflight run: joined, repeated, rolled, in halves and in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.runtime.loss import IGNORE_INDEX, Batch, num_rows


def joint_rows(batches: Sequence[Batch]) -> Batch:
    """Returns the rows for the comparison of one pass with two: the rows of the first micro-batch. If it has only one
    row, adds the row of the second micro-batch, unless the shapes of the two rows differ. If there is no second
    micro-batch, returns two rolled copies of the one row (`repeat_first_row_rolled`)."""
    first = batches[0]
    if num_rows(first) == 1 and len(batches) == 1:
        return repeat_first_row_rolled(first, 2)
    second = next(
        (each for each in batches[1:2] if num_rows(first) == 1 and _tensor_shapes(each) == _tensor_shapes(first)), None
    )
    if second is None:
        return dict(first)
    return join_rows(first, second)


MIN_SHORTENED_LENGTH = 1024
"""Rows with fewer positions are not shortened: their activations are small."""


def shorten_rows(batches: Sequence[Batch], divisor: int = 1) -> Sequence[Batch]:
    """Returns `batches` with so few positions that a check, which runs up to one row more than the first micro-batch
    has, needs no more memory for activations than this micro-batch. `divisor` divides the positions further: checks run
    compiled blocks without compilation, which needs more memory. The positions are dimension 1 of the token ids and
    of all other tensors of equal size. The new length has a large power of 2 in common with the length, so that context
    and tensor ranks can divide it. Returns `batches` unchanged if they have three rows or more, few positions, or no
    token ids.

    >>> [value.shape for value in shorten_rows([{"input_ids": torch.zeros(1, 3072, dtype=torch.long)}])[0].values()]
    [torch.Size([1, 1536])]
    """
    rows = num_rows(batches[0])
    lengths = {
        value.shape[1]
        for value in batches[0].values()
        if isinstance(value, torch.Tensor) and value.ndim == 2 and value.dtype == torch.int64
    }
    length = lengths.pop() if len(lengths) == 1 else 0
    if rows > 2 or length < MIN_SHORTENED_LENGTH:
        return batches
    short = length * rows // (rows + 1) // divisor
    common = min(length & -length, 1 << (short // 8).bit_length())
    short -= short % common

    def cut(value: Any) -> Any:
        return value[:, :short] if isinstance(value, torch.Tensor) and value.shape[1:2] == (length,) else value

    return [{name: cut(value) for name, value in batch.items()} for batch in batches]


def repeat_first_row_rolled(batch: Batch, count: int) -> Batch:
    """Returns `count` copies of the first row of `batch`. Copy i is rolled by i positions along the sequence, so that
    all copies differ."""

    def rolled(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        return torch.cat([value[:1].roll(at, 1) if value.ndim > 1 else value[:1] for at in range(count)])

    return {name: rolled(value) for name, value in batch.items()}


def repeat_first_row(batch: Batch) -> Batch:
    """Returns a batch of two copies of the first row of `batch`."""
    return {
        name: torch.cat([value[:1], value[:1]]) if isinstance(value, torch.Tensor) and value.ndim else value
        for name, value in batch.items()
    }


def mask_first_row_labels(batch: Batch) -> Batch:
    """Returns `batch`. If its labels are (rows, positions) and some of them are IGNORE_INDEX, sets all labels of the
    first row to IGNORE_INDEX except its last valid one. Then a mean over labels differs from a mean over rows."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or not bool((labels == IGNORE_INDEX).any()):
        return batch
    labels = labels.clone()
    labels[0, (labels[0] != IGNORE_INDEX).nonzero().flatten()[:-1]] = IGNORE_INDEX
    return {**batch, "labels": labels}


def repeat_rows(batch: Batch, rows: int) -> Batch:
    """Returns `rows` rows, which are repetitions of the rows of `batch`."""
    return {
        name: value.repeat(-(-rows // len(value)), *[1] * (value.ndim - 1))[:rows]
        if isinstance(value, torch.Tensor) and value.ndim
        else value
        for name, value in batch.items()
    }


def equal_tokens(batch: Batch, index: int) -> Batch:
    """Returns `batch` with equal tokens at all positions of all rows. Every token id is replaced by the id at `index`
    of the flattened ids. In a batch without token ids, such as one of images, every element of the floating-point
    tensors is replaced by their largest magnitude, which is negative if `index` is odd."""
    has_ids = any(is_token_ids(name, value) for name, value in batch.items())

    def equal(name: str, value: Any) -> Any:
        if is_token_ids(name, value):
            return torch.full_like(value, int(value.flatten()[min(index, value.numel() - 1)]))
        if has_ids or not (isinstance(value, torch.Tensor) and value.ndim > 1 and value.is_floating_point()):
            return value
        largest = float(value.abs().max()) if value.numel() else 0.0
        return torch.full_like(value, -largest if index % 2 else largest)

    return {name: equal(name, value) for name, value in batch.items()}


def is_token_ids(name: str, value: Any) -> bool:
    """Returns whether the entry `name` of a batch is token ids, (rows, positions)."""
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 2
        and value.dtype == torch.int64
        and name.endswith("input_ids")
    )


def _tensor_shapes(batch: Batch) -> list[Any]:
    return [(name, value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)]


def split_in_half(whole: Batch) -> list[Batch]:
    """Splits a batch into two halves. Returns a batch of one row twice, so that all ranks run the same number of
    passes."""
    half = num_rows(whole) // 2
    if not half:
        return [whole, whole]
    return [
        {
            name: value[rows] if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in whole.items()
        }
        for rows in (slice(half), slice(half, None))
    ]


def join_rows(first: Batch, second: Batch) -> Batch:
    """Returns the rows of `first`, then those of `second`."""
    return {
        name: torch.cat([value, second[name]]) if isinstance(value, torch.Tensor) and value.ndim else value
        for name, value in first.items()
    }


def join_and_split(batches: Sequence[Batch], rows: int) -> list[Batch]:
    """Returns a batch of at least `rows` rows, which are those of `batches`, repeated, and this batch in parts of as
    many rows as the first micro-batch has."""
    each = num_rows(batches[0])
    same = [batch for batch in batches if _tensor_shapes(batch) == _tensor_shapes(batches[0])]
    joined = {
        name: torch.cat([batch[name] for batch in same]) if isinstance(value, torch.Tensor) and value.ndim else value
        for name, value in batches[0].items()
    }
    whole = repeat_rows(joined, -(-rows // each) * each)
    parts = [
        {
            name: value[first : first + each] if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in whole.items()
        }
        for first in range(0, num_rows(whole), each)
    ]
    return [whole, *parts]
