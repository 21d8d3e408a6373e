"""Plays a schedule's actions over real ranks. One stage is the schedule [F0 B0 F1 B1 ...] of one rank: the same code runs every plan.

Messages carry hidden states forward and their gradients back. Receives are posted one action ahead in the order in which the sender sends,
so that a transfer runs while the action before it computes. The first message of a shape is preceded by its shape.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallel.mesh import Mesh
from meshwright.schedules import orders
from meshwright.schedules.action import Action, Kind
from meshwright.spec.plan import Schedule

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEADER = 8

Batch = dict[str, Any]


@dataclass
class Message:
    """A hidden state (F) that stage `stage` awaits from the stage before, or a gradient (B) from the stage after."""

    kind: Kind
    stage: int
    micro_batch: int


@dataclass
class Wire:
    """Sends and receives between pipeline ranks, with the shapes learnt so far."""

    mesh: Mesh
    shapes: dict[tuple[Kind, int, Any], tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    sent_shapes: set[tuple[Kind, int, Any]] = field(default_factory=set)
    sending: deque[tuple[dist.Work | None, torch.Tensor]] = field(default_factory=deque)
    posted: dict[tuple[Kind, int, int], tuple[dist.Work | None, torch.Tensor]] = field(default_factory=dict)
    exposed: float = 0.0

    def _group(self, source: int, target: int) -> dist.ProcessGroup | None:
        return self.mesh.channels.get((source, target))

    def _tag(self, message: Message, header: bool) -> int:
        return (((message.micro_batch * self.mesh.plan.stages + message.stage) * 2) + (message.kind == Kind.B)) * 2 + header

    def send(self, tensor: torch.Tensor, message: Message, to: int, key: Any) -> None:
        rank, group = self.mesh.pipeline_rank(to), self._group(self.mesh.place.pp, to)
        tensor = tensor.detach().contiguous()
        shape_key = (message.kind, message.stage, key)
        if shape_key not in self.sent_shapes:
            self.sent_shapes.add(shape_key)
            header = torch.zeros(_HEADER, dtype=torch.int64)
            header[: tensor.ndim + 2] = torch.tensor([_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape])
            header = header.to(tensor.device)
            self.sending.append((dist.isend(header, rank, group=group, tag=self._tag(message, True)), header))
        self.sending.append((dist.isend(tensor, rank, group=group, tag=self._tag(message, False)), tensor))

    def post(self, message: Message, source: int, key: Any, *, wait_for_shape: bool) -> None:
        """Start receiving; without `wait_for_shape` only when the shape is known."""
        name = (message.kind, message.stage, message.micro_batch)
        shape_key = (message.kind, message.stage, key)
        if name in self.posted or (shape_key not in self.shapes and not wait_for_shape):
            return
        rank, group = self.mesh.pipeline_rank(source), self._group(source, self.mesh.place.pp)
        if shape_key not in self.shapes:
            header = torch.zeros(_HEADER, dtype=torch.int64, device=self.mesh.device)
            dist.recv(header, rank, group=group, tag=self._tag(message, True))
            code, ndim, *sizes = header.tolist()
            self.shapes[shape_key] = (torch.Size(sizes[:ndim]), _DTYPES[code])
        shape, dtype = self.shapes[shape_key]
        tensor = torch.empty(shape, dtype=dtype, device=self.mesh.device)
        self.posted[name] = (dist.irecv(tensor, rank, group=group, tag=self._tag(message, False)), tensor)

    def receive(self, message: Message, source: int, key: Any) -> torch.Tensor:
        began = time.perf_counter()
        self.post(message, source, key, wait_for_shape=True)
        work, tensor = self.posted.pop((message.kind, message.stage, message.micro_batch))
        if work is not None:
            work.wait()
        self.exposed += time.perf_counter() - began
        return tensor

    def flush(self) -> None:
        while self.sending:
            work, _ = self.sending.popleft()
            if work is not None:
                work.wait()


@dataclass
class Pipeline:
    """`forward(stage, micro-batch, received) -> hidden state, or the loss sum on the last stage`; `backward_done(stage)` after each B."""

    mesh: Mesh
    forward: Callable[[int, Batch, torch.Tensor | None], torch.Tensor]
    backward_done: Callable[[int], None]
    wire: Wire = field(init=False)

    def __post_init__(self) -> None:
        self.wire = Wire(self.mesh)

    def run(self, batches: Sequence[Batch], scale: float | None) -> torch.Tensor:
        """Play all micro-batches; backward of `scale` x loss, or forward only when `scale` is None.

        Returns the sum of the losses of this rank's last-stage passes (float64 scalar, 0 on other ranks).
        """
        plan = self.mesh.plan
        if scale is None:
            order = [action for action in orders(Schedule.gpipe, plan.pp, 1, len(batches))[self.mesh.place.pp] if action.kind == Kind.F]
            if plan.virtual_stages > 1:
                rounds = range(plan.virtual_stages)
                order = [Action(Kind.F, lap * plan.pp + self.mesh.place.pp, k) for k in range(len(batches)) for lap in rounds]
        else:
            order = orders(plan.schedule, plan.pp, plan.virtual_stages, len(batches))[self.mesh.place.pp]
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        alive: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.wire.exposed = 0.0
        for position, action in enumerate(order):
            for ahead in order[position + 1 : position + 2]:
                self._post(ahead, batches)
            if action.kind == Kind.F:
                total += self._forward(action, batches, alive, scale)
            elif action.kind == Kind.B:
                self._backward(action, batches, alive, scale)
        self.wire.flush()
        return total

    def _source(self, action: Action) -> tuple[Message, int] | None:
        """The message that `action` awaits and the pipeline rank it comes from."""
        plan = self.mesh.plan
        if action.kind == Kind.F and action.stage > 0:
            return Message(Kind.F, action.stage, action.micro_batch), (action.stage - 1) % plan.pp
        if action.kind == Kind.B and action.stage < plan.stages - 1:
            return Message(Kind.B, action.stage, action.micro_batch), (action.stage + 1) % plan.pp
        return None

    def _post(self, action: Action, batches: Sequence[Batch]) -> None:
        source = self._source(action)
        if source is not None:
            self.wire.post(*source, _shape_key(batches[action.micro_batch]), wait_for_shape=False)

    def _forward(self, action: Action, batches: Sequence[Batch], alive: dict[Any, Any], scale: float | None) -> torch.Tensor | float:
        stage, batch = action.stage, batches[action.micro_batch]
        key, source = _shape_key(batch), self._source(action)
        received = self.wire.receive(*source, key) if source is not None else None
        if received is not None and scale is not None:
            received.requires_grad_()
        with torch.set_grad_enabled(scale is not None):
            output = self.forward(stage, batch, received)
        is_last = stage == self.mesh.plan.stages - 1
        if not is_last:
            message = Message(Kind.F, stage + 1, action.micro_batch)
            self.wire.send(output, message, (stage + 1) % self.mesh.plan.pp, key)
        if scale is not None:
            alive[stage, action.micro_batch] = (received, output)
        return output.detach().double() if is_last else 0.0

    def _backward(self, action: Action, batches: Sequence[Batch], alive: dict[Any, Any], scale: float | None) -> None:
        stage, key, source = action.stage, _shape_key(batches[action.micro_batch]), self._source(action)
        received, output = alive.pop((stage, action.micro_batch))
        if source is None:
            output = output * scale
            gradient = None
        else:
            gradient = self.wire.receive(*source, key)
        torch.autograd.backward(output, gradient)
        del output, gradient
        if received is not None:
            assert received.grad is not None
            self.wire.send(received.grad, Message(Kind.B, stage - 1, action.micro_batch), (stage - 1) % self.mesh.plan.pp, key)
        self.backward_done(stage)


def _shape_key(batch: Batch) -> tuple[Any, ...]:
    return tuple((name, tuple(value.shape)) for name, value in batch.items() if isinstance(value, torch.Tensor))
