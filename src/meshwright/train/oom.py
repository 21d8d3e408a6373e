"""Explains out-of-memory (OOM) errors of a rank in one line: the requested bytes, the bytes in use by category, and the
category that exceeds its prediction the most. The trainer wraps all its calls in `explain_oom`.

A rank that is out of memory cannot run the planner. The process that started the rank reports which plan would fit
(cli/replanning.py). If the explanation itself fails, the error still says that memory ran out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import torch

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.messages import Message
from meshwright.core.units import show_bytes
from meshwright.runtime.backend import backend_of
from meshwright.runtime.error_propagation import is_out_of_memory
from meshwright.spec.estimate import MemoryBreakdown
from meshwright.spec.plan import Plan

RESHARDED_ERRORS = ("its data is not allocated yet", "are out of bounds for storage of size 0")
"""Substrings of torch's error messages about a tensor whose storage is empty."""
INPLACE_ERROR_PATTERN = r"modified by an inplace operation: \[\S+ (\[[\d, ]*\])\], which is (output \d+ of \w+)"
"""A pattern of torch's error message about an in-place change of a tensor that backward needs."""


class OutOfMemory(MeshwrightError):
    """Raised if an allocation of this rank has failed."""


class MemoryReport(NamedTuple):
    """The data of an OOM report. `resident`: returns the bytes in use by category. `predicted`: the planner's estimate
    for this rank, or None."""

    rank: int
    plan: Plan
    device: torch.device
    resident: Callable[[], Mapping[str, float]] = dict
    predicted: MemoryBreakdown | None = None


@contextmanager
def explain_oom(holder: MemoryReport, doing: str) -> Iterator[None]:
    """A context that turns OOM errors into OutOfMemory with one line. `doing` says in this line when the error
    occurred. Two other errors of torch become InputError: a read of a weight that ZeRO 3 has resharded, and an in-place
    change of a tensor that backward needs."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(oom_message(holder, doing, str(error))) from None
        if (overwritten := re.search(INPLACE_ERROR_PATTERN, str(error))) is not None:
            raise InputError(
                Message(
                    "plan {plan}: backward needs a tensor of shape {shape}, {output}, which the model's forward has "
                    "overwritten in place: use the out-of-place operation (x + y for x.add_(y)); "
                    "torch.autograd.set_detect_anomaly(True) shows the line",
                    plan=holder.plan.name,
                    shape=overwritten[1],
                    output=overwritten[2],
                )
            ) from None
        if holder.plan.zero == 3 and any(words in str(error) for words in RESHARDED_ERRORS):
            raise InputError(
                Message(
                    "plan {plan}: this model reads weights that ZeRO 3 has resharded, outside of the forward of the "
                    "module or block that holds them (for example in a custom backward): use z2 at most",
                    plan=holder.plan.name,
                )
            ) from None
        raise


def oom_message(holder: MemoryReport, doing: str, error: str) -> str:
    """Returns the line about an OOM error. `doing`: when the error occurred. `error`: torch's message."""
    try:
        return _memory_breakdown(holder, doing, error)
    except Exception:  # the explanation may run out of memory itself
        return Message(
            "rank {rank} is out of memory {doing}, and too little is left to report what uses it",
            rank=holder.rank,
            doing=doing,
        )


def _memory_breakdown(holder: MemoryReport, doing: str, error: str) -> str:
    requested = re.search(r"allocate (\d+) bytes|allocate ([\d.]+) ([KMGT]?)i?B", error)
    more = (
        0.0
        if requested is None
        else float(requested[1] or float(requested[2]) * 1024.0 ** " KMGT".index(requested[3] or " "))
    )
    stored = dict(holder.resident())
    rest = Message("activations and all else") if stored else Message("allocated memory")
    on_device = (
        allocated
        if (allocated := backend_of(holder.device).allocated_bytes(holder.device)) is not None
        else psutil.Process().memory_info().rss
    )
    stored[rest] = max(on_device - sum(stored.values()), 0.0)
    kinds = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in stored.items())
    excess = _largest_excess(holder, {**stored, rest: stored[rest] + more}, rest)
    if not more:
        return Message(
            "rank {rank} is out of memory {doing}: it requested more in addition to {kinds}; {excess}",
            rank=holder.rank,
            doing=doing,
            kinds=kinds,
            excess=excess,
        )
    return Message(
        "rank {rank} is out of memory {doing}: it requested {more} in addition to {kinds}; {excess}",
        rank=holder.rank,
        doing=doing,
        more=show_bytes(more),
        kinds=kinds,
        excess=excess,
    )


def _largest_excess(holder: MemoryReport, wanted: Mapping[str, float], rest: str) -> str:
    """Describes the category in `wanted` (bytes by category) that exceeds its prediction the most. `rest`: the category
    of all memory that has no other category. Without a prediction, returns a remedy."""
    if (predicted := holder.predicted) is None:
        return Message(
            "ZeRO (z1 to z3), rc-full and off-optimizer need less memory, and `meshwright plan` finds a plan that fits"
        )
    # The RSS of a process contains its code and libraries, in addition to its allocations.
    whole = predicted.reserved if backend_of(holder.device).memory_is_host else predicted.total
    said = {kind: float(getattr(predicted, kind)) for kind in wanted if kind != rest}
    said[rest] = whole - sum(said.values())
    most = max(wanted, key=lambda kind: wanted[kind] - said[kind])
    beyond = wanted[most] - said[most]
    if beyond <= 0:
        return Message(
            "no kind takes more memory than predicted ({whole} in total), but less than that is free here",
            whole=show_bytes(whole),
        )
    had, were = show_bytes(wanted[most]), show_bytes(max(said[most], 0.0))
    return Message(
        "that is {had} for {most}, {beyond} more than the predicted {were}",
        had=had,
        most=most,
        beyond=show_bytes(beyond),
        were=were,
    )
