"""Likely causes of a difference, as a name for programs and a sentence for users."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from meshwright.core.messages import Message
from meshwright.interop.recording.digest import DIRECTIONS, Digest, scale_of

FIT_TOLERANCE = 0.02
"""A hypothesis explains a difference if at most this fraction of the difference remains."""
MIN_MASK_BYTES = 8
"""Masks of at most this number of bytes may be equal by chance and are not compared."""


class Cause(NamedTuple):
    """A likely cause."""

    name: str
    why: Message


UNKNOWN = Cause("unknown", Message("no known cause explains it; this is the first value that differs"))
LOSS = Cause(
    "loss", Message("all module outputs are equal, so the loss is computed in another way, or from other labels")
)


def rank_list(ranks: list[int]) -> str:
    """Returns ranks as text."""
    return ", ".join(str(rank) for rank in ranks)


def unequal_weights(name: str, first_name: str, first: int, rank: int) -> Cause:
    """Returns the cause for first weights that differ between two ranks."""
    if name != first_name:
        return Cause(
            "tied weight",
            Message(
                "{name} is tied to {other} of rank {first}, but the two copies differ on rank {rank}",
                name=name,
                other=first_name,
                first=first,
                rank=rank,
            ),
        )
    return Cause(
        "unequal replicas",
        Message(
            "ranks {first} and {rank} begin with different weights: broadcast them before the first step",
            first=first,
            rank=rank,
        ),
    )


def equal_shards(name: str, first: int, rank: int) -> Cause:
    """Returns the cause for equal values that two ranks store as different shards."""
    return Cause(
        "wrong shard",
        Message(
            "ranks {first} and {rank} store the same values as different shards of {name}",
            first=first,
            rank=rank,
            name=name,
        ),
    )


def unequal_inputs(names: list[str], first: int, rank: int) -> Cause:
    """Returns the cause for arguments of the model that differ between two ranks."""
    return Cause(
        "unequal inputs",
        Message(
            "only one of the ranks {first} and {rank} passes {names} to the model",
            first=first,
            rank=rank,
            names=", ".join(names),
        ),
    )


def unequal_micro_batches(first: int, expected: int, rank: int, found: int) -> Cause:
    """Returns the cause for a rank with a different number of micro-batches."""
    return Cause(
        "skipped micro-batch",
        Message(
            "rank {rank} runs {found:count micro-batch} and rank {first} {expected}",
            rank=rank,
            found=found,
            first=first,
            expected=expected,
        ),
    )


def dropout_masks(whole: bool, first: int, rank: int) -> Cause:
    """Returns the cause for dropout masks of two ranks that differ although their tensors are equal (`whole`), or that
    are equal although the ranks store different shards."""
    if whole:
        return Cause(
            "unequal dropout masks",
            Message(
                "ranks {first} and {rank} drop different elements of the same tensor: seed them equally here",
                first=first,
                rank=rank,
            ),
        )
    return Cause(
        "equal dropout masks",
        Message(
            "ranks {first} and {rank} drop the same elements of different shards: seed them differently here",
            first=first,
            rank=rank,
        ),
    )


def partial_output(path: str, ranks: list[int], bias: int | None) -> Cause:
    """Returns the cause for partial sums of a row-parallel layer that were not added up, or that contain the bias once
    for each rank."""
    if bias:
        return Cause(
            "doubled bias",
            Message(
                "the bias of {path} is added {times} times, once on each of the ranks {ranks}",
                path=path,
                times=bias + 1,
                ranks=rank_list(ranks),
            ),
        )
    return Cause(
        "missing all-reduce",
        Message(
            "the outputs of {path} on the ranks {ranks} are partial sums that nothing adds up: all-reduce them",
            path=path,
            ranks=rank_list(ranks),
        ),
    )


def bias_count(total: Digest, truth: Digest, bias: Digest | None, ranks: int) -> int | None:
    """Returns how many times too often the bias is in `total`, None if this does not explain the difference."""
    if bias is None or not float(bias[-1]):
        return None
    factor, rest = scale_of(total - truth, bias)
    return (
        round(factor)
        if rest < FIT_TOLERANCE and abs(factor - round(factor)) < FIT_TOLERANCE and abs(round(factor)) < ranks
        else None
    )


def explain_output(found: Digest, truth: Digest | None, bias: Digest | None) -> Cause:
    """Returns the likely cause of a wrong output."""
    if truth is None:
        return UNKNOWN
    if bias is not None and float(bias[-1]):
        factor, rest = scale_of(found - truth, bias)
        if rest < FIT_TOLERANCE:
            if factor < 0:
                return Cause("missing bias", Message("the bias is left out, or only a part of it is added"))
            return Cause("doubled bias", Message("the bias is added {times} times", times=f"{factor + 1:.3g}"))
    factor, rest = scale_of(found, truth)
    if rest < FIT_TOLERANCE / 10:
        return Cause("scaled output", Message("it is {factor} times the output of one device", factor=f"{factor:.4g}"))
    return UNKNOWN


def wrong_slice(rank: int, other: int) -> Cause:
    """Returns the cause for a rank that has computed the slice of another rank."""
    return Cause("wrong shard", Message("rank {rank} computes the slice of rank {other}", rank=rank, other=other))


def stale_weight(name: str, owners: list[int] | None) -> Cause:
    """Returns the cause for an output that is computed with weights from before the last update: of the shards of the
    ranks `owners`, or of all (None)."""
    if owners is None:
        return Cause("stale weight", Message("it is computed with {name} from before the last update", name=name))
    return Cause(
        "stale weight",
        Message(
            "it is computed with {name} of which the part of the ranks {ranks} misses the last update",
            name=name,
            ranks=rank_list(owners),
        ),
    )


def label_count(found: int, expected: int) -> Cause:
    """Returns the cause for a loss with a different number of labels."""
    return Cause(
        "label count",
        Message(
            "the loss counts {found:count label} and one device {expected}: padding, the ignored label or the shift "
            "differs",
            found=found,
            expected=expected,
        ),
    )


def wrong_clipping(limit: float, factor: float, expected: float, norm: float) -> Cause:
    """Returns the cause for gradients that were clipped with a different norm."""
    return Cause(
        "wrong clip norm",
        Message(
            "clipping to {limit} multiplies the gradients by {factor}, but their norm is {norm}, which gives "
            "{expected}: the norm does not "
            "cover all ranks and parameters once",
            limit=f"{limit:g}",
            factor=f"{factor:.4g}",
            norm=f"{norm:.4g}",
            expected=f"{expected:.4g}",
        ),
    )


def unequal_options(key: str, first: int, known: Any, rank: int, found: Any) -> Cause:
    """Returns the cause for an optimizer option that differs between two ranks."""
    return Cause(
        "unequal options",
        Message(
            "{key} is {known} on rank {first} and {found} on rank {rank}",
            key=key,
            known=str(known),
            first=first,
            found=str(found),
            rank=rank,
        ),
    )


def unequal_update(first: int, rank: int) -> Cause:
    """Returns the cause for weights of replicas that differ after the step."""
    return Cause(
        "unequal replicas",
        Message("the weights of the ranks {first} and {rank} differ after the step", first=first, rank=rank),
    )


def stale_tied_weight(name: str, tied: list[str]) -> Cause:
    """Returns the cause for a tied weight of which one copy has a different update."""
    return Cause(
        "stale tied weight",
        Message(
            "{name} is tied to {others}: only one of the copies gets the full update", name=name, others=", ".join(tied)
        ),
    )


def label_shift(targets: torch.Tensor, labels: torch.Tensor) -> Cause:
    """Returns the cause of a wrong loss: the shift between the labels of the batch and those of the loss, if it is
    known."""
    flat = targets.reshape(-1)
    for shift in range(4):
        if labels.ndim == 2 and torch.equal(flat, labels[:, shift:].reshape(-1)):
            return Cause(
                "label shift",
                Message("its labels are those of the batch shifted by {shift}: compare the shifts", shift=shift),
            )
    return LOSS


def explain_update(name: str, tied: list[str], rank: int, change: Digest, truth: Digest) -> Cause:
    """Returns the likely cause of a wrong update of `name`, which is tied to the names `tied` on other ranks."""
    if tied:
        return stale_tied_weight(name, tied)
    if float(change[:DIRECTIONS].norm()) < FIT_TOLERANCE * float(truth[:DIRECTIONS].norm()):
        return Cause("no update", Message("rank {rank} does not update it", rank=rank))
    factor, rest = scale_of(change, truth)
    if rest < 0.1:
        return scaled_update(factor)
    return Cause(
        "unknown",
        Message("the gradients are equal, so the optimizer differs, or something else writes to the weight"),
    )


def scaled_update(factor: float) -> Cause:
    """Returns the cause for an update of a different size."""
    return Cause(
        "scaled update",
        Message(
            "it changes by {factor} times the update of one device: compare the learning rates", factor=f"{factor:.3g}"
        ),
    )
