"""Sends messages between pipeline ranks for runner.py: boundary tensors forward, and their gradients back.

`P2P` sends through a process group. If the receiver cannot know the shapes of a message yet, `P2P` sends a header with
them first. `ShmP2P` connects pipeline ranks of one host. A message and its shape stay in the sender's shared
memory until the receiver has copied them.

NCCL has no tags: the n-th send of rank a to rank b matches the n-th receive that b posts for a. So callers post
receives in the order of sending. The programs of spec/schedules/action.py state where ([Note: message order]).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.group import CommTimer
from meshwright.runtime.comm.shm.memory import PAGE_BYTES, SharedMemory, ShmSegment
from meshwright.runtime.comm.timers import WaitTimer
from meshwright.runtime.comm.topology import P2P_FIRST_FIELD
from meshwright.runtime.error_propagation import interruptible_wait
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.schedules.action import ActionKind

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEADER_LENGTH = 8
_MAX_TAGGED_MICRO_BATCHES = 4096
"""Maximum number of micro-batches for which messages of several tensors have separate tags."""


@dataclass(frozen=True)
class P2PKey:
    """Identifies a message to `stage`: a boundary tensor (F) from the previous stage, or a gradient (B) from the next
    stage."""

    kind: ActionKind
    stage: int
    micro_batch: int
    part: int = 0
    """The index of the tensor, if several tensors cross the stage boundary."""

    def parts(self, count: int) -> list[P2PKey]:
        """Returns the keys of the `count` tensors of the message."""
        return [replace(self, part=part) for part in range(count)]

    def tag(self, stages: int) -> int:
        """Returns a number that identifies the message among all messages of a step. `stages`: the number of stages."""
        return ((self.part * _MAX_TAGGED_MICRO_BATCHES + self.micro_batch) * stages + self.stage) * 2 + (
            self.kind == ActionKind.B
        )


@dataclass
class P2P:
    """Sends and receives between pipeline ranks through the process group of the pipeline. `shapes` maps (kind, stage,
    part, shape key) of received messages to their shape and dtype. Messages of the same kind, stage and part with equal
    shape keys have equal shapes. `sent_shapes` are those keys of sent messages for which the receiver knows the shape.
    `sending` are the sends in progress, and `posted` the receives in progress.

    The tensors of a message are one batch: NCCL transfers them in one kernel. All messages of a rank use one
    communicator, and so one stream, in the common order of [Note: message order]."""

    mesh: ParallelContext
    shapes: dict[tuple[ActionKind, int, int, Any], tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    sent_shapes: set[tuple[ActionKind, int, int, Any]] = field(default_factory=set)
    sending: deque[tuple[list[dist.Work], Sequence[torch.Tensor]]] = field(default_factory=deque)
    posted: dict[P2PKey, tuple[list[dist.Work], list[torch.Tensor]]] = field(default_factory=dict)
    meter: CommTimer = field(default_factory=CommTimer)
    """Measures the time of waits for messages, and counts the sent bytes without headers."""

    @property
    def _group(self) -> dist.ProcessGroup | None:
        group = self.mesh.group("pp")
        return group.process_group if group is not None else None

    def _start(self, operation: Any, tensors: Sequence[torch.Tensor], pp: int) -> list[dist.Work]:
        """Starts to send all `tensors` to pipeline rank `pp`, or to receive them from it."""
        rank, group = self.mesh.pipeline_rank(pp), self._group
        return dist.batch_isend_irecv([dist.P2POp(operation, tensor, rank, group) for tensor in tensors])

    def send(self, tensors: Sequence[torch.Tensor], message: P2PKey, to: int, key: Any) -> None:
        """Sends `tensors`, the parts of `message`, to pipeline rank `to` without blocking. `key` is the shape key. If
        the receiver does not know the shapes for `key`, a header with these shapes is sent first."""
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        batches: list[Sequence[torch.Tensor]] = [tensors]
        shape_keys = [(part.kind, part.stage, part.part, key) for part in message.parts(len(tensors))]
        unknown = [each for each in zip(shape_keys, tensors, strict=True) if each[0] not in self.sent_shapes]
        if unknown:
            self.sent_shapes.update(each for each, _ in unknown)
            header = torch.zeros(len(unknown), _HEADER_LENGTH, dtype=torch.int64)
            for row, (_, tensor) in zip(header, unknown, strict=True):
                row[: tensor.ndim + 2] = torch.tensor([_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape])
            batches.insert(0, [header.to(self.mesh.device)])
        self.meter.sent += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        while self.sending and all(work.is_completed() for work in self.sending[0][0]):
            self.sending.popleft()
        with interruptible_wait(self._group):
            for batch in batches:
                self.sending.append((self._start(dist.isend, batch, to), batch))

    def post(self, message: P2PKey, count: int, source: int, key: Any) -> None:
        """Starts to receive `message` of `count` tensors from pipeline rank `source`. Must be called in the order of
        sending. `key` is the shape key. Waits for the header of a message whose shapes are unknown."""
        shape_keys = [(part.kind, part.stage, part.part, key) for part in message.parts(count)]
        unknown = [each for each in shape_keys if each not in self.shapes]
        if unknown:
            header = torch.zeros(len(unknown), _HEADER_LENGTH, dtype=torch.int64, device=self.mesh.device)
            with self.meter.wait_timer, interruptible_wait(self._group):
                for work in self._start(dist.irecv, [header], source):
                    work.wait()
                rows = header.tolist()
            for each, (code, ndim, *sizes) in zip(unknown, rows, strict=True):
                self.shapes[each] = (torch.Size(sizes[:ndim]), _DTYPES[code])
        found = [self.shapes[each] for each in shape_keys]
        tensors = [torch.empty(shape, dtype=dtype, device=self.mesh.device) for shape, dtype in found]
        self.posted[message] = (self._start(dist.irecv, tensors, source), tensors)

    def receive(self, message: P2PKey, count: int, source: int) -> Sequence[torch.Tensor]:
        """Waits for `message` of `count` tensors from pipeline rank `source`, for which `post` was called, and returns
        its tensors."""
        works, tensors = self.posted.pop(message)
        with self.meter.wait_timer, interruptible_wait(self._group):
            for work in works:
                work.wait()
        return tensors

    def flush(self) -> None:
        """Waits until all sends are complete."""
        while self.sending:
            for work in self.sending.popleft()[0]:
                with interruptible_wait(self._group):
                    work.wait()


RING_SLOTS = 128
"""Maximum number of sent messages in one direction that the receiver has not copied yet."""

_POSTED_FIELD, _TAG_FIELD, _SEGMENT_FIELD, _FILE_FIELD, _DTYPE_FIELD, _NDIM_FIELD, _SHAPE_FIELD = range(7)
_SLOT_FIELDS = 16
_TAKEN_OFFSET = P2P_FIRST_FIELD + 2 * RING_SLOTS * _SLOT_FIELDS


class ShmP2P:
    """Sends messages through shared memory.

    [Note: ring] Each rank has 64-bit fields in shared memory, which only this rank writes and all ranks read. Messages
    in a direction (to the next or to the previous rank) are numbered. Message n uses slot n % RING_SLOTS of the
    sender's fields. After the receiver has copied the message, the receiver writes n to its own field for this slot.
    Then the sender may reuse the memory of the message. Before message n is sent, message n - RING_SLOTS must have been
    copied.
    """

    def __init__(self, mesh: ParallelContext, host: SharedMemory) -> None:
        self.mesh, self.host = mesh, host
        self.meter = CommTimer()
        self._num_sent = [0, 0]
        self._num_received = [0, 0]
        self._received: dict[int, tuple[int, torch.Tensor]] = {}
        self._out: list[deque[tuple[int, int, ShmSegment]]] = [deque(), deque()]
        self._free: list[ShmSegment] = []

    def send(self, tensors: Sequence[torch.Tensor], message: P2PKey, to: int, key: Any) -> None:
        """Writes `tensors` and their shapes to shared memory, from which pipeline rank `to` copies both. `key` is not
        used."""
        for tensor, part in zip(tensors, message.parts(len(tensors)), strict=True):
            self._send(tensor, part, to)

    def _send(self, tensor: torch.Tensor, message: P2PKey, to: int) -> None:
        rank, way = self.mesh.pipeline_rank(to), self._way(message.kind, self.mesh.coords.pp, to)
        number = self._num_sent[way] = self._num_sent[way] + 1
        if number > RING_SLOTS:
            self.host.wait_for_field(rank, self._taken(way, number), number - RING_SLOTS)
        self._reclaim(way)
        tensor = tensor.detach()
        segment = self._segment(tensor.numel() * tensor.element_size())
        segment.bytes[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._out[way].append((rank, number, segment))
        words, at = self.host.fields[self.host.rank], self._place(way, number)
        words[at + _TAG_FIELD], words[at + _SEGMENT_FIELD], words[at + _FILE_FIELD] = (
            message.tag(self.mesh.plan.stages),
            segment.number,
            segment.fd,
        )
        words[at + _DTYPE_FIELD], words[at + _NDIM_FIELD] = _DTYPES.index(tensor.dtype), tensor.ndim
        for dim, size in enumerate(tensor.shape):
            words[at + _SHAPE_FIELD + dim] = size
        self.host.set_field(at + _POSTED_FIELD, number)

    def post(self, message: P2PKey, count: int, source: int, key: Any) -> None:
        """Does nothing, because a message can be read once it is sent."""

    def receive(self, message: P2PKey, count: int, source: int) -> Sequence[torch.Tensor]:
        """Waits for `message` of `count` tensors and returns copies of them."""
        return [self._receive(part, source) for part in message.parts(count)]

    def _receive(self, message: P2PKey, source: int) -> torch.Tensor:
        rank, tag = self.mesh.pipeline_rank(source), message.tag(self.mesh.plan.stages)
        way = self._way(message.kind, source, self.mesh.coords.pp)
        with self.meter.wait_timer:
            while tag not in self._received:
                self._receive_next(rank, way)
            number, sent = self._received.pop(tag)
            tensor = sent.clone()
            self.host.set_field(self._taken(way, number), number)
        return tensor

    def flush(self) -> None:
        """Does nothing, because a sent message stays in memory until the receiver has copied it."""

    def _way(self, kind: ActionKind, sender: int, receiver: int) -> int:
        """Returns the direction of a message: 0 to the next pipeline rank, 1 to the previous rank. With two ranks the
        next rank is also the previous rank, so the direction is 0 for F and 1 for B messages."""
        pp = self.mesh.plan.pp
        return int(kind == ActionKind.B) if pp == 2 else int((receiver - sender) % pp != 1)

    def _receive_next(self, rank: int, way: int) -> None:
        """Waits for the next message from global rank `rank` in direction `way`, and records by its tag where the
        message is stored."""
        number = self._num_received[way] = self._num_received[way] + 1
        at = self._place(way, number)
        self.host.wait_for_field(rank, at + _POSTED_FIELD, number)
        _, tag, segment, file, code, ndim, *shape = self.host.fields[rank][at : at + _SLOT_FIELDS]
        shape, dtype = shape[:ndim], _DTYPES[code]
        memory = self.host.map_segment(rank, segment, file)
        self._received[tag] = number, memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def _reclaim(self, way: int) -> None:
        out = self._out[way]
        while out and self.host.fields[out[0][0]][self._taken(way, out[0][1])] == out[0][1]:
            segment = out.popleft()[2]
            self._free.append(segment)

    def _segment(self, size: int) -> ShmSegment:
        """Returns the smallest free segment with at least `size` bytes, or a new segment. The size of a new segment is
        rounded up, so that messages of slightly different lengths can reuse it."""
        fitting = [segment for segment in self._free if segment.size >= size]
        if not fitting:
            step = max(PAGE_BYTES, 1 << size.bit_length() - 4)
            return self.host.segment(-(-size // step) * step)
        taken = min(fitting, key=lambda segment: segment.size)
        self._free.remove(taken)
        return taken

    def _place(self, way: int, number: int) -> int:
        return P2P_FIRST_FIELD + (way * RING_SLOTS + number % RING_SLOTS) * _SLOT_FIELDS

    def _taken(self, way: int, number: int) -> int:
        return _TAKEN_OFFSET + way * RING_SLOTS + number % RING_SLOTS


def make_p2p(mesh: ParallelContext) -> P2P | ShmP2P:
    """Returns the object that sends and receives this rank's pipeline messages."""
    if mesh.shared_memory is not None and mesh.topology.shares_memory(mesh.grid.along(mesh.rank, "pp")):
        return ShmP2P(mesh, mesh.shared_memory)
    wire = P2P(mesh, meter=CommTimer(WaitTimer.of(mesh.device)))
    if (group := mesh.group("pp")) is not None and not backend_of(mesh.device).memory_is_host:
        # torch creates the communicator of a group in the first call, which all ranks of the group must make.
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=group.process_group)
    return wire
