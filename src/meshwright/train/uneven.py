"""The last batch of an epoch, which may have any number of rows: filled up to whole micro-batches of all replicas by rows without a valid label.

Promise: loss and gradients are those of one device on the rows that were given: what is added counts in no sum and no number of labels. A loss of
the user's own is a mean over rows and knows no invalid ones: its micro-batches have as many rows as there are, each counts by its rows, and one
that is left without rows passes the first row with weight zero. Where rows act on each other (statistics over a batch, a balance loss) nothing is
added and the batch is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.models.output import IGNORED
from meshwright.parallel.objective import Batch, Weightless, rows_of
from meshwright.spec.plan import Plan, Schedule


def whole_rows(plan: Plan, rows: int) -> int:
    """As many rows as whole micro-batches of all replicas have, `rows` among them.

    >>> from meshwright.spec.plan import parse_plan
    >>> whole_rows(parse_plan("dp2.mb2"), 7), whole_rows(parse_plan("dp2.z1.ga3-1"), 3), whole_rows(parse_plan("pp2.interleaved2"), 3)
    (8, 4, 4)
    """
    if plan.shares:
        return plan.rows_shared_out
    counts = plan.pp if plan.schedule == Schedule.interleaved else 1
    least = 2 * plan.pp if plan.schedule == Schedule.dualpipev else 1
    each = plan.rows_at_once
    micro_batches = max(-(-rows // each), least)
    return each * (-(-micro_batches // counts) * counts)


def filled(batch: Batch, plan: Plan) -> Batch:
    """`batch` with as many rows as the plan needs: its first one again, without valid labels."""
    rows = rows_of(batch)
    lacking = whole_rows(plan, rows) - rows
    if lacking <= 0:
        return batch

    def longer(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        more = value[:1].expand(lacking, *value.shape[1:])
        return torch.cat([value, torch.full_like(more, IGNORED) if name == "labels" else more])

    return {name: longer(name, value) for name, value in batch.items()}


def divided(batch: Batch, plan: Plan, replica: int, is_odd: bool) -> list[Batch]:
    """The micro-batches of `replica`. Where the batch `is_odd`, of as many rows as it has for them, and a `Weightless` one where it has none."""
    rows = rows_of(batch)

    def part(first: int, size: int) -> Batch:
        return {
            name: value[first : first + size] if isinstance(value, torch.Tensor) and value.ndim else value for name, value in batch.items()
        }

    ranges = plan.ranges(whole_rows(plan, rows) if is_odd else rows, replica)
    return [part(first, min(size, rows - first)) if first < rows else Weightless(part(0, 1)) for first, size in ranges]
