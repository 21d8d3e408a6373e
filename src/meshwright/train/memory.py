"""Measured bytes, in the words of the estimate: parameters, gradients, optimizer, total (allocated at the peak of a step), resident.

CUDA's allocator keeps its own peak. On a CPU nothing does: there one step is watched by the profiler, whose memory events add up to the
bytes alive at each moment of the step (a watched step takes longer; its numbers are the same). What the step leaves behind is held by the
trainer and counted there, so: peak = held after the step - what the step added for good + the highest sum of its events. Memory that ranks
of one host share is not the allocator's: the trainer counts its flat buffers, and `passing` what is on its way to others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import psutil
import torch


@dataclass
class Watch:
    """Of one step on a CPU: the highest sum of allocated bytes beyond those at its begin, and the sum at its end."""

    peak: int = 0
    kept: int = 0


@contextmanager
def watching() -> Iterator[Watch]:
    """Fills the watch when the block ends."""
    watch = Watch()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield watch
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sums = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    watch.peak, watch.kept = max(sums, default=0), sums[-1] if sums else 0


def resident() -> float:
    """Bytes that the system gave this process."""
    return float(psutil.Process().memory_info().rss)


def cuda_memory(device: torch.device) -> dict[str, float]:
    """Peak since the last call, allocated and reserved."""
    peak = {"total": float(torch.cuda.max_memory_allocated(device)), "reserved": float(torch.cuda.max_memory_reserved(device))}
    torch.cuda.reset_peak_memory_stats(device)
    return peak
