"""Plays a schedule's actions over real ranks. One stage is the schedule [F0 B0 F1 B1 ...] of one rank: the same code runs every plan.

Messages (wire.py) carry hidden states forward and their gradients back. Receives are posted one action ahead in the order in which the
sender sends, so that a transfer runs while the action before it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.parallel.mesh import Mesh
from meshwright.parallel.wire import Message, SharedWire, Wire, wire_of
from meshwright.schedules import orders
from meshwright.schedules.action import Action, Kind
from meshwright.spec.plan import Schedule

Batch = dict[str, Any]


@dataclass
class Pipeline:
    """`forward(stage, micro-batch, received) -> hidden state, or the loss sum on the last stage`; `backward_done(stage)` after each B."""

    mesh: Mesh
    forward: Callable[[int, Batch, torch.Tensor | None], torch.Tensor]
    backward_done: Callable[[int], None]
    wire: Wire | SharedWire = field(init=False)

    def __post_init__(self) -> None:
        self.wire = wire_of(self.mesh)

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
