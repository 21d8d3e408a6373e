"""Out-of-memory errors in one line: the requested bytes, the bytes in use by kind, and the kind of memory that exceeds
its prediction the most.

A rank has no planner, and no memory to run one. The process that started the rank reports which plan would fit
(cli/replanning.py). If this report fails, the error still says that memory ran out.
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
from meshwright.spec.estimate import MemoryBreakdown
from meshwright.spec.plan import Plan

RESHARDED_ERRORS = ("its data is not allocated yet", "are out of bounds for storage of size 0")
"""Parts of torch's error messages about a tensor whose storage is empty."""
INPLACE_ERROR_PATTERN = r"modified by an inplace operation: \[\S+ (\[[\d, ]*\])\], which is (output \d+ of \w+)"
"""A pattern of torch's error message about a tensor that backward needs and that was overwritten in place."""
OOM_ERRORS = ("can't allocate memory", "out of memory")
"""Parts of the messages of OOM errors that have no exception type: torch's on a CPU, the driver's for pinned memory."""


class OutOfMemory(MeshwrightError):
    """An allocation of this rank has failed."""


class MemoryReport(NamedTuple):
    """The data of an OOM report. `resident`: bytes in use, by kind. `predicted`: the planner's estimate, if there is
    one."""

    rank: int
    plan: Plan
    device: torch.device
    resident: Callable[[], Mapping[str, float]] = dict
    predicted: MemoryBreakdown | None = None


@contextmanager
def explain_oom(holder: MemoryReport, doing: str) -> Iterator[None]:
    """Turns an OOM error inside the context into one line. It also explains two other errors: a read of a weight that
    ZeRO 3 has resharded, and an in-place change of a tensor that backward needs."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in OOM_ERRORS):
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
    """Returns the error line. `doing`: what the rank was doing; `error`: the original message."""
    try:
        return _memory_breakdown(holder, doing, error)
    except Exception:  # the report itself can run out of memory
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
    """Describes the kind of memory in `wanted` whose bytes exceed the prediction the most."""
    if (predicted := holder.predicted) is None:
        return Message(
            "ZeRO (z1 to z3), rc-full and off-optimizer need less memory, and `meshwright plan` finds a plan that fits"
        )
    # In host memory, the code and libraries of a process take space in addition to its allocations.
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
