"""Gives process groups of traced_mesh.py streams of their own in race_detector.py, as torch's ProcessGroupNCCL does.

What torch 2.8 and later do (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, pytorch#150398):

- A collective with `async_op=True` makes the stream of its group wait for the current stream, and runs in the stream of
  its group. The `Work` references its tensors until `wait`, which makes the current stream, not the host, wait.
- A collective with `async_op=False` runs in the current stream.
- `batch_isend_irecv` is one launch in the stream of its group. The allocator knows that this stream uses its tensors
  (record_stream). Tests do not rely on that: tensors of messages too are safe only until their last reference is gone.
- After a `Work` that nobody has waited for, a watchdog releases the tensors when the kernel is complete. That is no
  guarantee (`TORCH_NCCL_BLOCKING_WAIT=1` has no watchdog), so it is not played."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from race_detector import Actor, RaceDetector, join
from traced_mesh import Complete, TracedGroup

Tensors = Sequence[torch.Tensor]

USES: dict[str, Callable[..., tuple[Tensors, Tensors]]] = {
    "allreduce": lambda tensors, options=None: (tensors, tensors),
    "broadcast": lambda tensors, options=None: (tensors, tensors),
    "allgather": lambda out, tensors, options=None: (tensors, out[0]),
    "gather": lambda out, tensors, options=None: (tensors, out[0] if out else ()),
    "reduce_scatter": lambda out, full, options=None: (full[0], out),
    "alltoall_base": lambda out, full, *rest: ([full], [out]),
    **dict.fromkeys(
        ("all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base"),
        lambda out, tensor, options=None: ([tensor], [out]),
    ),
    "send": lambda tensors, *rest: (tensors, ()),
    "recv": lambda tensors, *rest: ((), tensors),
}
"""The tensors that each method of a process group reads and writes, by its arguments."""


class StreamWork(dist.Work):
    """A launch in the stream of a group. `completes`: whether `is_completed` finds it complete before somebody waits.
    This orders the host alone."""

    def __init__(self, detector: RaceDetector, stream: Actor, tensors: Tensors, completes: bool) -> None:
        super().__init__()
        self.detector, self.end, self.tensors = detector, dict(stream.clock), tensors
        self.completes = completes

    def wait(self, timeout: Any = None) -> bool:
        if self.detector.order("wait", self.detector.current, self.end):
            self.tensors = ()
        return True

    def is_completed(self) -> bool:
        if self.completes:
            join(self.detector.host.clock, self.end)
        return self.completes


class GroupStreams:
    """The streams of the groups of one rank, and the messages of the batch that is being started."""

    def __init__(self, detector: RaceDetector, completes: bool) -> None:
        self.detector, self.completes = detector, completes
        self.by_group: dict[dist.ProcessGroup, Actor] = {}
        self.batch: list[tuple[TracedGroup, Tensors, Tensors]] | None = None

    def stream(self, group: dist.ProcessGroup) -> Actor:
        if group not in self.by_group:
            self.by_group[group] = stream = Actor(f"group {len(self.by_group)}")
            self.detector.streams.append(stream)
        return self.by_group[group]

    def launch(self, name: str, group: dist.ProcessGroup, reads: Tensors, writes: Tensors) -> dist.Work:
        for each in (*reads, *writes):
            self.detector.memory(each)  # that a launch is the first to see belongs to the current stream
        stream = self.stream(group)
        join(stream.clock, self.detector.current.clock)
        self.detector.run(name, reads, writes, False, stream)
        return StreamWork(self.detector, stream, [*reads, *writes], self.completes)

    def call(self, name: str, group: TracedGroup, arguments: Sequence[Any], options: Any) -> dist.Work:
        reads, writes = USES[name](*arguments)
        if self.batch is not None:
            self.batch.append((group, reads, writes))
            return Complete()
        if options is None or options.asyncOp:
            return self.launch(name, group, reads, writes)
        self.detector.run(name, reads, writes, False)
        return Complete()

    def method(self, name: str) -> Callable[..., dist.Work]:
        original = getattr(TracedGroup, name)

        def call(group: TracedGroup, *arguments: Any) -> dist.Work:
            with self.detector.silent():
                original(group, *arguments)
            options = next((each for each in arguments if hasattr(each, "asyncOp")), None)
            return self.call(name, group, arguments, options)

        return call

    def start_together(self, start: Callable[..., Any], operations: list[dist.P2POp]) -> list[dist.Work]:
        self.batch = []
        try:
            start(operations)
            started = self.batch
        finally:
            self.batch = None
        reads, writes = ([tensor for each in started for tensor in each[kind]] for kind in (1, 2))
        return [self.launch("messages", started[0][0], reads, writes)]


@contextmanager
def nccl_streams(detector: RaceDetector, completes: bool = False) -> Iterator[None]:
    """Inside the context, which is inside `traced_rank` and `detected_races`, groups have streams of their own."""
    streams, start = GroupStreams(detector, completes), dist.batch_isend_irecv
    with ExitStack() as stack:
        for name in USES:
            stack.enter_context(mock.patch.object(TracedGroup, name, streams.method(name)))
        stack.enter_context(
            mock.patch.object(dist, "batch_isend_irecv", lambda operations: streams.start_together(start, operations))
        )
        yield
