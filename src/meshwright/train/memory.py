"""Measures the memory of a rank in bytes, by category: parameters, gradients, optimizer, activations, buffers, total
(allocated at the memory peak of a step) and resident (RSS). The training loop uses it for step records.

CUDA's allocator records the peak of its allocations, and the operating system records the peak of a process. Neither
records what the memory is used for. Therefore, torch's profiler traces one step. This step is slower but computes the
same values. The sum of the profiler's memory events up to a point in time is the change of allocated bytes since the
step began. The trainer knows the bytes of the states that remain after the step. Then

    peak = bytes after the step - bytes that the step has added permanently + the highest sum of events in the step

The allocator does not know memory that the ranks of one host share. The trainer counts the flat buffers in this shared
memory, and `Trainer.passing` counts the staging buffers.

Categories: an allocation by an operation of forward or backward counts as activations until it is freed. All other
allocations (gathered weights, temporary tensors of the update) count as buffers. The module at the memory peak is the
innermost module whose forward or backward runs at that time. Autograd gives each backward operation the sequence number
of its forward operation, which identifies the module. Operations outside of all modules belong to the loss.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn
from torch.autograd.profiler import record_function

from meshwright.core import storage
from meshwright.core.background_thread import BackgroundCall
from meshwright.runtime.backend import backend_of
from meshwright.spec.record import AllocationEvent, MemoryTimeline, StepRecord

if TYPE_CHECKING:
    from meshwright.train.memory_checkpointer import MemoryCheckpointer
    from meshwright.train.trainer import Trainer

MAX_TIMELINE_POINTS = 240
"""The maximum number of points in a timeline. A step is divided into this number of intervals of equal length, and each
point is the highest byte count of an interval."""
TIMELINE_SECONDS = 1.0
"""A rank waits at most this time until its timeline is on the disk."""

MIN_RELATIVE_CHANGE = 0.01
"""The recorder writes a new row only if some category has changed by more than this fraction."""
MODULE_LABEL, BACKWARD_LABEL = "module ", "autograd::engine::evaluate_function"


@dataclass
class StepMemoryTrace:
    """The memory trace of one step. `peak` and `remaining`: the highest number of bytes allocated on `device` and the
    number at the end, both relative to the start of the step. `place`: the module at the peak. `moments`: the timeline,
    `highest`: the point of the peak."""

    device: str = "cpu"
    peak: int = 0
    remaining: int = 0
    seconds: float = 0.0
    place: str = ""
    moments: list[AllocationEvent] = field(default_factory=list)
    highest: AllocationEvent = field(default_factory=lambda: AllocationEvent(at=0, activations=0, buffers=0))

    def timeline(self, trainer: Trainer) -> MemoryTimeline:
        """Returns the memory timeline of the traced step, which must be the last step of `trainer`."""
        stored = trainer.resident_memory()
        # With an accelerator, staging buffers are in host memory and not among the traced allocations.
        left = self.remaining - (trainer.passing if backend_of(self.device).memory_is_host else 0)
        stored["passing"] = float(max(-left, 0))
        # Only the first step creates optimizer states. If `left` is positive after a later step, another thread has
        # freed these bytes, which the profiler does not record.
        if left > 0 and trainer.steps == 1:
            stored["optimizer"] = max(stored["optimizer"] - left, 0.0)
        return MemoryTimeline(
            rank=trainer.mesh.rank, step=trainer.steps, seconds=self.seconds, resident=stored,
            moments=tuple(self.moments), peak=self.highest, place=self.place
        )  # fmt: skip

    def keep(self, trainer: Trainer, folder: Path, disk: BackgroundCall[None]) -> dict[str, float]:
        """Writes the timeline to memory/rank-N.json in the run folder, by `disk`. Returns the bytes at the peak in the
        categories total, activations and buffers."""
        found = self.timeline(trainer)
        path = folder / "memory" / f"rank-{found.rank}.json"

        def write() -> None:
            storage.make_folder(path.parent)
            storage.replace_file(path, found.to_json() + "\n")

        disk.attempt(write, time.monotonic() + TIMELINE_SECONDS)  # a disk that fails must not end the run
        return {
            "total": found.total,
            "activations": found.peak.activations,
            "buffers": found.peak.buffers + found.resident["passing"],
        }


@contextmanager
def trace_memory(model: nn.Module | None = None, device: str = "cpu") -> Iterator[StepMemoryTrace]:
    """A context that traces the memory of `device`. It yields a trace, which is filled when the context ends. With
    `model`, the trace names the module at the peak."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints lines when it starts and ends
    watch, handles = StepMemoryTrace(device), []
    for name, module in model.named_modules() if model is not None else ():
        if getattr(module, "_compiled_call_impl", None) is None:
            handles += _label_forward(module, f"{MODULE_LABEL}{name or 'the model itself'}")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            yield watch
    finally:
        for handle in handles:
            handle.remove()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    _fill_trace(watch, profile.profiler.kineto_results.experimental_event_tree())


def _label_forward(module: nn.Module, name: str) -> list[Any]:
    """Adds hooks that record each forward call of `module` as a range `name` in the profile. Returns their handles."""
    ranges: list[record_function] = []

    def begin(module: nn.Module, given: Any) -> None:
        """Opens the range."""
        ranges.append(record_function(name))
        ranges[-1].__enter__()

    def end(module: nn.Module, given: Any, output: Any) -> None:
        """Closes the range."""
        if ranges:
            ranges.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]


@dataclass
class _AllocationChange:
    """A change of the allocated bytes at time `at` (ns). `size` is negative for a release. `within`: whether an
    operation of forward or backward made the change. `place`: the module of this operation."""

    at: int
    address: int
    size: int
    within: bool
    place: str


def _fill_trace(watch: StepMemoryTrace, roots: Any) -> None:
    changes = sorted(_allocation_changes(roots, watch.device), key=lambda change: change.at)
    if not changes:
        return
    began, ended = min(root.start_time_ns for root in roots), max(root.end_time_ns for root in roots)
    watch.seconds = max(ended - began, 1) / 1e9
    made: dict[int, bool] = {}
    now = {True: 0, False: 0}
    peak, highest = (began, 0, 0), dict[int, tuple[int, int, int]]()
    for change in changes:
        within = made.pop(change.address, False) if change.size < 0 else change.within
        if change.size > 0:
            made[change.address] = within
        now[within] += change.size
        total = now[True] + now[False]
        # Buffers would be negative if the step frees memory that was allocated before the trace.
        seen = (change.at, now[True], max(now[False], 0))
        if total > watch.peak:
            watch.peak, peak, watch.place = total, seen, change.place
        part = int((change.at - began) * MAX_TIMELINE_POINTS / (ended - began + 1))
        before = highest.get(part)
        if before is None or before[1] + before[2] < total:
            highest[part] = seen
    watch.remaining = now[True] + now[False]
    watch.highest, *watch.moments = (
        AllocationEvent(at=(at - began) / 1e9, activations=activations, buffers=buffers)
        for at, activations, buffers in (peak, *(highest[part] for part in sorted(highest)))
    )


def _allocation_changes(roots: Any, device: str) -> Iterator[_AllocationChange]:
    """Yields the allocations and releases on `device` in the event trees `roots`. Trees are visited in the order of
    their start times. A forward operation, which determines the module, is therefore visited before its backward
    operation."""
    modules: dict[int, str] = {}
    waiting = [(root, "", "", False) for root in sorted(roots, key=lambda root: root.start_time_ns, reverse=True)]
    while waiting:
        event, module, place, within = waiting.pop()
        kind, details = event.typed
        name = event.name
        if kind == torch._C._profiler._EventType.Allocation:
            if details.device.type == device:
                yield _AllocationChange(event.start_time_ns, details.ptr, details.alloc_size, within, place)
            continue
        if name.startswith(MODULE_LABEL):
            module = name.removeprefix(MODULE_LABEL)
            place = f"forward of {module}"
        elif kind == torch._C._profiler._EventType.TorchOp and details.sequence_number >= 0:
            if name.startswith(BACKWARD_LABEL):
                place = f"backward of {modules.get(details.sequence_number, 'the loss')}"
            elif module:
                modules[details.sequence_number] = module
            elif not place:  # a differentiable operation outside of all modules belongs to the loss
                place = "forward of the loss"
        within = within or name.startswith(("aten::", BACKWARD_LABEL))
        waiting += [(child, module, place, within) for child in reversed(event.children)]


class MemoryRecorder:
    """Records the memory of one rank after each step, for the step record and for memory/rank-N.jsonl in the run folder
    (N: the rank). A step record has only the maximum of each category over all ranks, while every rank has its own
    file. A row is written to the file only after a change, so it is valid until the step of the next row."""

    def __init__(self, trainer: Trainer, folder: Path, process: float = 0.0) -> None:
        """`process`: the RSS before the model was built, that is, of Python and its libraries."""
        self.trainer, self.folder, self.process = trainer, folder, process
        self.device, hosts = trainer.mesh.device, [host for host in trainer.mesh.topology.shm_host_ids if host]
        self.is_rank_per_host = len(set(hosts)) == len(hosts)
        """Whether each rank runs on a different host. Only then does the RSS of a rank exclude memory of other ranks.
        """
        self._written: dict[str, float] = {}
        self._disk = BackgroundCall[None]("write memory")
        peak_resident_bytes()

    def of(
        self, record: StepRecord, watch: StepMemoryTrace | None, copies: MemoryCheckpointer | None = None
    ) -> dict[str, float]:
        """Returns this rank's bytes by category after the step of `record`, and its RSS. The bytes at the peak are
        included if the step was traced (`watch` is not None) or the device records its peak. If the device records no
        peak and each rank has its own host, the peak RSS is included as `reserved`. `copies`: the rank's in-memory
        checkpoints. On a CPU, they and the process itself are parts of the RSS."""
        found = {**record.memory, "resident": resident_bytes()}
        found |= watch.keep(self.trainer, self.folder, self._disk) if watch is not None else {}
        backend = backend_of(self.device)
        if backend.memory_is_host:
            found |= {"process": self.process, "copies": 0.0 if copies is None else float(copies.allocated)}
        if peak := backend.peak_memory(self.device):
            found |= peak
        elif self.is_rank_per_host:
            found["reserved"] = peak_resident_bytes()
        self._write(record.step, found)
        return found

    def _write(self, step: int, found: dict[str, float]) -> None:
        before = self._written
        if all(abs(size - before.get(kind, -1.0)) <= MIN_RELATIVE_CHANGE * size for kind, size in found.items()):
            return
        path = self.folder / "memory" / f"rank-{self.trainer.mesh.rank}.jsonl"
        row = json.dumps({"step": step, **found}, separators=(",", ":"))
        if self._disk.attempt(partial(storage.append_row, path, row)):  # a disk that fails must not end the run
            self._written = {**before, **found}


def resident_bytes() -> float:
    """Returns the resident set size (RSS) of this process in bytes."""
    return float(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> float:
    """Returns the peak RSS of this process since the last call, in bytes. If the system cannot reset the peak (Linux
    can), it returns the current RSS."""
    try:
        rows = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return 1024.0 * next(int(row.split()[1]) for row in rows if row.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resident_bytes()
