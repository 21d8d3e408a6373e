"""Finds the numbers by which a user-defined loss divides: the number of valid labels in a mean over labels, the sum of
a mask. The step invariants compare them between the micro-batches of a step (train/step/invariants.py).

A plan averages the losses of its micro-batches, each weighted by its rows. If a loss divides by a count that is not
proportional to the rows, this average is not the loss of one device. The count may be equal in all micro-batches for
many steps, until the first padded batch, so a check at the start cannot detect it.

The counts are read from the autograd graph, near the loss: the divisors of divisions and the factors of products that
are single numbers without a gradient, the total weight of a cross-entropy, and the number of elements of a mean over
all dimensions. Only nodes whose result is a single number are read. A custom autograd function, and a product with a
tensor of weights, have no such numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

MAX_NODES = 24
"""The number of nodes of the graph that are read, from the loss on."""
MEAN_REDUCTION = 1
"""torch's code for reduction='mean'."""
COUNT_TOLERANCE = 1e-6
"""Two counts are equal if they differ by at most this fraction."""


class LossDivisors(NamedTuple):
    """The divisors of the loss of one micro-batch with `rows` rows, by their place in the graph."""

    rows: int
    divisors: dict[str, Any]

    def counts(self) -> dict[str, float]:
        """Returns the divisors as numbers. On a GPU this waits for the forward."""
        return {place: float(value) for place, value in self.divisors.items()}


MicroBatchCounts = tuple[int, dict[str, float]]
"""The rows of a micro-batch, and the divisors of its loss by place."""


def find_divisors(loss: torch.Tensor, rows: int) -> LossDivisors:
    """Returns the divisors of `loss`, the loss of a micro-batch of `rows` rows. It does not synchronise with a GPU.

    >>> values, mask = torch.ones(4, requires_grad=True), torch.tensor([1.0, 1.0, 0.0, 1.0])
    >>> find_divisors((values.exp() * mask).sum() / mask.sum(), 4).counts()
    {'0 DivBackward0': 3.0}
    >>> find_divisors(values.exp().sum(), 4).counts()
    {}
    """
    nodes, seen, found = [loss.grad_fn], set[int](), dict[str, Any]()
    for at in range(MAX_NODES):
        if at >= len(nodes):
            break
        node: Any = nodes[at]
        if node is None or not node._input_metadata or node._input_metadata[0].shape:
            continue  # not a single number; saved tensors of the model's own nodes may have hooks (recompute)
        name = node.name()
        value = _divisor(node, name)
        if value is not None:
            found[f"{at} {name}"] = value
        for following, _ in getattr(node, "next_functions", ()):
            if following is not None and id(following) not in seen:
                seen.add(id(following))
                nodes.append(following)
    return LossDivisors(rows, found)


def _divisor(node: Any, name: str) -> Any:
    if name.startswith("NllLoss") and node._saved_reduction == MEAN_REDUCTION:
        return node._saved_total_weight
    if name == "MeanBackward0":
        return node._saved_self_sym_numel
    if name == "DivBackward0":
        return _single_number(node._saved_other)
    if name == "MulBackward0":
        factors = (_single_number(node._saved_other), _single_number(node._saved_self))
        return next((each for each in factors if each is not None), None)
    return None


def _single_number(saved: Any) -> torch.Tensor | None:
    """Returns `saved` if it is a tensor of one element that needs no gradient, otherwise None. It may be a number that
    torch has wrapped, which a dispatch mode cannot detach."""
    is_number = isinstance(saved, torch.Tensor) and saved.numel() == 1 and not saved.requires_grad
    return saved if is_number and not saved.is_complex() else None


def uneven_divisors(counts: Sequence[MicroBatchCounts]) -> tuple[float, float] | None:
    """Returns two divisors at the same place of the loss of two micro-batches, if those of all micro-batches are
    neither equal nor proportional to the rows. Micro-batches without rows do not count.

    >>> place = "0 DivBackward0"
    >>> [uneven_divisors([(2, {place: 8.0}), (rows, {place: count})]) for rows, count in ((2, 8), (1, 4), (2, 7))]
    [None, None, (8.0, 7)]
    """
    with_rows = [each for each in counts if each[0]]
    for place in dict.fromkeys(place for _, found in with_rows for place in found):
        values = [(rows, found[place]) for rows, found in with_rows if place in found]
        forms = [[value * rows**power for rows, value in values] for power in (0, -1, 1)]
        if not any(max(each) - min(each) <= COUNT_TOLERANCE * max(map(abs, each)) for each in forms):
            low, high = min(value for _, value in values), max(value for _, value in values)
            return (high, low) if high == high and low == low else None
    return None
