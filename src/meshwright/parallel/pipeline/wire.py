"""Messages between pipeline ranks: hidden states forward, their gradients back, each with its shape.

`Wire` sends through process groups: the first message of a shape is preceded by its shape, receives are posted before they are needed
([Note: line]). `SharedWire` serves pipeline ranks of one host: a message lies in the sender's memory until the receiver has copied it, its shape beside it.

[Note: line] NCCL knows no tags: what a rank sends another goes to the receives in the order in which these are posted, whatever they are posted for.
A receiver takes messages in another order than they are sent now and then (it begins with two, or a gradient comes before a hidden state
that it needs first), so receives are posted in the order of sending, which the schedule says, up to the one that is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallel.exchange.calls import watched
from meshwright.parallel.exchange.clock import Clock
from meshwright.parallel.exchange.group import Meter
from meshwright.parallel.exchange.shared import PAGE, Host, Segment
from meshwright.parallel.mesh import WIRES, Mesh
from meshwright.schedules.action import Kind

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEADER = 8
_MOST = 4096
"""Micro-batches of a step whose messages of several tensors have tags of their own."""

Lines = dict[int, Iterable[tuple["Message", Any]]]
"""What comes from each pipeline rank, in the order in which it is sent, with the key of its shape."""


@dataclass(frozen=True)
class Message:
    """A hidden state (F) that stage `stage` awaits from the stage before, or a gradient (B) from the stage after."""

    kind: Kind
    stage: int
    micro_batch: int
    part: int = 0
    """Of a message of several tensors, which one."""

    def tag(self, stages: int) -> int:
        """Another number for each message of a step."""
        return ((self.part * _MOST + self.micro_batch) * stages + self.stage) * 2 + (self.kind == Kind.B)


@dataclass
class Wire:
    """Sends and receives between pipeline ranks, with the shapes learnt so far."""

    mesh: Mesh
    shapes: dict[tuple[Kind, int, int, Any], tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    sent_shapes: set[tuple[Kind, int, int, Any]] = field(default_factory=set)
    sending: deque[tuple[dist.Work | None, torch.Tensor]] = field(default_factory=deque)
    posted: dict[Message, tuple[dist.Work | None, torch.Tensor]] = field(default_factory=dict)
    lines: dict[int, deque[tuple[Message, Any]]] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    """What was sent but for shapes."""

    def _group(self, source: int, target: int) -> dist.ProcessGroup | None:
        return self.mesh.channels.get((source, target))

    def expect(self, lines: Lines) -> None:
        """All that will be received until the next call."""
        self.lines = {source: deque(line) for source, line in lines.items()}

    def send(self, tensor: torch.Tensor, message: Message, to: int, key: Any) -> None:
        rank, group = self.mesh.pipeline_rank(to), self._group(self.mesh.place.pp, to)
        tensor = tensor.detach().contiguous()
        shape_key = (message.kind, message.stage, message.part, key)
        if shape_key not in self.sent_shapes:
            self.sent_shapes.add(shape_key)
            header = torch.zeros(_HEADER, dtype=torch.int64)
            header[: tensor.ndim + 2] = torch.tensor([_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape])
            header = header.to(tensor.device)
            with watched(group):
                self.sending.append((dist.isend(header, rank, group=group), header))
        self.meter.sent += tensor.numel() * tensor.element_size()
        while self.sending and _is_sent(self.sending[0][0]):
            self.sending.popleft()
        with watched(group):
            self.sending.append((dist.isend(tensor, rank, group=group), tensor))

    def post(self, message: Message, source: int, *, wait_for_shape: bool = False) -> None:
        """Start receiving it and what is sent before it; without `wait_for_shape` as far as shapes are known."""
        line = self.lines[source]
        rank, group = self.mesh.pipeline_rank(source), self._group(source, self.mesh.place.pp)
        while message not in self.posted:
            following, key = line[0]
            shape_key = (following.kind, following.stage, following.part, key)
            if shape_key not in self.shapes:
                if not wait_for_shape:
                    return
                header = torch.zeros(_HEADER, dtype=torch.int64, device=self.mesh.device)
                dist.recv(header, rank, group=group)
                code, ndim, *sizes = header.tolist()
                self.shapes[shape_key] = (torch.Size(sizes[:ndim]), _DTYPES[code])
            shape, dtype = self.shapes[shape_key]
            tensor = torch.empty(shape, dtype=dtype, device=self.mesh.device)
            self.posted[following] = (dist.irecv(tensor, rank, group=group), tensor)
            line.popleft()

    def receive(self, message: Message, source: int) -> torch.Tensor:
        with self.meter.clock, watched(self._group(source, self.mesh.place.pp)):
            self.post(message, source, wait_for_shape=True)
            work, tensor = self.posted.pop(message)
            if work is not None:
                work.wait()
        return tensor

    def flush(self) -> None:
        while self.sending:
            work, _ = self.sending.popleft()
            if work is not None:
                with watched():
                    work.wait()


def _is_sent(work: dist.Work | None) -> bool:
    return work is None or work.is_completed()


RING = 128
"""Messages of one direction that a rank can have sent before the receiver takes the first."""

_POSTED, _TAG, _NUMBER, _FILE, _DTYPE, _NDIM, _SHAPE = range(7)
_SIZE = 16
_TAKEN = WIRES + 2 * RING * _SIZE


class SharedWire:
    """[Note: ring] Message n of a direction (to the next rank, to the one before) is announced in place n % RING of the sender's words; the receiver says n in its
    own word of that place once it has copied it, and the sender's memory is free again. Message n waits until n - RING is taken, no other.
    """

    def __init__(self, mesh: Mesh, host: Host) -> None:
        self.mesh, self.host = mesh, host
        self.meter = Meter()
        self._sent = [0, 0]
        self._heard = [0, 0]
        self._there: dict[int, tuple[int, torch.Tensor]] = {}
        self._out: list[deque[tuple[int, int, Segment]]] = [deque(), deque()]
        self._free: list[Segment] = []

    def send(self, tensor: torch.Tensor, message: Message, to: int, key: Any) -> None:
        rank, way = self.mesh.pipeline_rank(to), self._way(message.kind, self.mesh.place.pp, to)
        number = self._sent[way] = self._sent[way] + 1
        if number > RING:
            self.host.hear(rank, self._taken(way, number), number - RING)
        self._reclaim(way)
        tensor = tensor.detach()
        segment = self._segment(tensor.numel() * tensor.element_size())
        segment.bytes[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._out[way].append((rank, number, segment))
        words, at = self.host.words[self.host.rank], self._place(way, number)
        words[at + _TAG], words[at + _NUMBER], words[at + _FILE] = message.tag(self.mesh.plan.stages), segment.number, segment.file
        words[at + _DTYPE], words[at + _NDIM] = _DTYPES.index(tensor.dtype), tensor.ndim
        for dim, size in enumerate(tensor.shape):
            words[at + _SHAPE + dim] = size
        self.host.say(at + _POSTED, number)

    def expect(self, lines: Lines) -> None:
        """Nothing to do: each message has its tag."""

    def post(self, message: Message, source: int, *, wait_for_shape: bool = False) -> None:
        """Nothing to do: what is sent can be read."""

    def receive(self, message: Message, source: int) -> torch.Tensor:
        rank, tag = self.mesh.pipeline_rank(source), message.tag(self.mesh.plan.stages)
        way = self._way(message.kind, source, self.mesh.place.pp)
        with self.meter.clock:
            while tag not in self._there:
                self._hear(rank, way)
            number, sent = self._there.pop(tag)
            tensor = sent.clone()
            self.host.say(self._taken(way, number), number)
        return tensor

    def flush(self) -> None:
        """Nothing to do: what is sent stays where it is until it is taken."""

    def _way(self, kind: Kind, sender: int, receiver: int) -> int:
        """Towards the next pipeline rank (0) or the one before (1); of two ranks, which are both to each other, forward or back."""
        pp = self.mesh.plan.pp
        return int(kind == Kind.B) if pp == 2 else int((receiver - sender) % pp != 1)

    def _hear(self, rank: int, way: int) -> None:
        """The next message from `rank`, wanted now or later."""
        number = self._heard[way] = self._heard[way] + 1
        at = self._place(way, number)
        self.host.hear(rank, at + _POSTED, number)
        _, tag, segment, file, code, ndim, *shape = self.host.words[rank][at : at + _SIZE]
        shape, dtype = shape[:ndim], _DTYPES[code]
        memory = self.host.read(rank, segment, file)
        self._there[tag] = number, memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def _reclaim(self, way: int) -> None:
        out = self._out[way]
        while out and self.host.words[out[0][0]][self._taken(way, out[0][1])] == out[0][1]:
            segment = out.popleft()[2]
            self._free.append(segment)

    def _segment(self, size: int) -> Segment:
        """The tightest that is free, or a new one, a little longer than needed so that messages of many lengths share few."""
        fitting = [segment for segment in self._free if segment.size >= size]
        if not fitting:
            step = max(PAGE, 1 << size.bit_length() - 4)
            return self.host.segment(-(-size // step) * step)
        taken = min(fitting, key=lambda segment: segment.size)
        self._free.remove(taken)
        return taken

    def _place(self, way: int, number: int) -> int:
        return WIRES + (way * RING + number % RING) * _SIZE

    def _taken(self, way: int, number: int) -> int:
        return _TAKEN + way * RING + number % RING


def wire_of(mesh: Mesh) -> Wire | SharedWire:
    """What carries the messages of this rank's pipeline."""
    if mesh.host is not None and mesh.shares_memory(mesh.grid.along(mesh.rank, "pp")):
        return SharedWire(mesh, mesh.host)
    return Wire(mesh, meter=Meter(Clock.of(mesh.device)))
