"""Most bytes allocated during the second step of a fresh trainer, counted by torch's own profiler from the first tensor
on, without the batch, which is the caller's."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.runtime.loss import Batch
from meshwright.train.trainer import Trainer


def of_second_step(made: Callable[[], tuple[Trainer, Batch]]) -> tuple[float, dict[str, int]]:
    """Also the bytes of states that the trainer holds."""
    torch.set_num_threads(1)
    gc.collect()  # what earlier tests left must not be freed, and counted, in the middle of this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.manual_seed(0)
        trainer, batch = made()
        trainer.step(batch)
        with record_function("second step"):
            trainer.step(batch)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    began = next(event.start_ns() for event in events if event.name() == "second step")
    allocated = highest = 0
    for event in events:
        if event.name() == "[memory]":
            allocated += event.nbytes()
            highest = max(highest, allocated) if event.start_ns() >= began else 0
    given = sum(value.nbytes for value in batch.values())
    return float(highest - given), trainer.bytes()
