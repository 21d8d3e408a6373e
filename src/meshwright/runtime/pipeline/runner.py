"""Runs the actions of a pipeline schedule on this rank. The engine uses `ScheduleRunner` for every plan, because a plan
with one stage has the schedule [F0 B0 F1 B1 ...].

An action is the forward (F), the backward (B) or the weight gradients (W) of a stage for one micro-batch. Messages
(p2p.py) contain the hidden states and other boundary tensors, and their gradients in backward. Two consecutive stages
on one rank (at the turning point of a V schedule) exchange tensors without a message. `rank_programs` of the schedule
states when a receive is posted. If the schedule has W actions, the parameter groups queue the inputs of the weight
gradients (runtime/weight_gradients.py), and the autograd graph is freed after B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.runtime.loss import Batch
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.pipeline.p2p import P2P, P2PKey, ShmP2P, make_p2p
from meshwright.runtime.weight_gradients import StepBackward
from meshwright.runtime.zero import exact_sum
from meshwright.spec.schedules.action import Action, ActionKind, Receive, rank_programs
from meshwright.spec.schedules.schedule import schedule_orders

StageTensors = tuple[torch.Tensor, ...]
"""The tensors that one stage sends to the next stage: the hidden state and all other boundary tensors
(block_wrapper.py)."""

BackwardRoots = tuple[torch.Tensor | GradientEdge | None, ...]
"""The tensors from which a backward starts: the loss, or the gradient edge of each sent tensor (None if the tensor
requires no gradient)."""


StageForward = Callable[[int, Batch, StageTensors], StageTensors]


@dataclass
class ScheduleRunner:
    """Runs a schedule.

    `forward(stage, batch, received)` returns the tensors for the next stage, or the sum of the losses on the last
    stage. `backward_done(action)` is called after each B and for each W. `parts(stage)` returns the number of tensors
    that `stage` receives. `exact`: whether losses are rounded so that their sum is exact (zero/exact_sum.py). `own`
    distinguishes the backward of the step from backward calls of other code.
    """

    mesh: ParallelContext
    forward: StageForward
    backward_done: Callable[[Action], None]
    parts: Callable[[int], int]
    exact: bool = False
    own: StepBackward = field(default_factory=StepBackward)
    labels: int = 0
    """Number of labels in the loss of the whole batch, by which the loss is divided."""
    wire: P2P | ShmP2P = field(init=False)
    one_by_one: bool = False
    """Whether each micro-batch runs forward and backward through all stages before the next micro-batch starts. Checks
    use this order under every schedule."""
    here: dict[tuple[ActionKind, int, int], StageTensors] = field(default_factory=dict)
    """Tensors that one stage of this rank has sent to another stage of this rank."""
    _programs: dict[tuple[int, bool, bool], Sequence[Action | Receive]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wire = make_p2p(self.mesh)

    def set_labels(self, labels: int) -> None:
        """Sets the number of labels that count in the loss of the next batch."""
        self.labels = labels

    @contextmanager
    def replace_forward(self, forward: StageForward) -> Iterator[None]:
        """Inside the context, runs stages with `forward` instead of `self.forward`, for example to observe passes."""
        before, self.forward = self.forward, forward
        try:
            yield
        finally:
            self.forward = before

    @contextmanager
    def run_one_by_one(self) -> Iterator[None]:
        """Inside the context, runs micro-batches one by one, and does not accumulate weight gradients in place."""
        self.one_by_one = True
        try:
            with self.own.pause():
                yield
        finally:
            self.one_by_one = False

    def run(self, batches: Sequence[Batch], scale: float | None) -> torch.Tensor:
        """Runs all micro-batches, with backward of `scale` x loss. If `scale` is None, runs only forward.

        Returns the sum of the losses of all micro-batches (float64 scalar) on a rank that runs the last stage, and 0 on
        all other ranks.
        """
        keys = [_shape_key(batch) for batch in batches]
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        alive: dict[tuple[int, int], tuple[StageTensors, BackwardRoots]] = {}
        for action in self._program(len(batches), scale is None):
            if isinstance(action, Receive):
                message = _outgoing_key(action.action)
                self.wire.post(message, self._count(message), action.sender, keys[message.micro_batch])
            elif action.kind is ActionKind.F:
                total += self._forward(action, batches, alive, scale)
            elif action.kind is ActionKind.B:
                self._backward(action, batches, alive, scale)
            else:
                self.backward_done(action)
        self.wire.flush()
        return total

    def _program(self, count: int, forward_only: bool) -> Sequence[Action | Receive]:
        """Returns the actions of this rank for `count` micro-batches, and the messages that it receives."""
        key = (count, forward_only, self.one_by_one)
        if key not in self._programs:
            plan = self.mesh.plan
            if forward_only:
                every = self._forwards(count)
            elif self.one_by_one:
                every = [
                    [action for each in range(count) for action in self._single_micro_batch(rank, each)]
                    for rank in range(plan.pp)
                ]
            else:
                every = schedule_orders(plan.schedule, plan.pp, plan.virtual_stages, count, plan.actions)
            self._programs[key] = rank_programs(every)[self.mesh.coords.pp]
        return self._programs[key]

    def _single_micro_batch(self, rank: int, micro_batch: int) -> list[Action]:
        """Returns the actions of pipeline rank `rank` for forward and backward of `micro_batch` alone."""
        plan, stages = self.mesh.plan, self.mesh.plan.stages_of(rank)
        forwards = [Action(ActionKind.F, stage, micro_batch) for stage in stages]
        kinds = [
            (stage, kind)
            for stage in reversed(stages)
            for kind in (ActionKind.B, ActionKind.W)
            if kind is ActionKind.B or plan.splits_backward(stage)
        ]
        return forwards + [Action(kind, stage, micro_batch) for stage, kind in kinds]

    def _forwards(self, count: int) -> list[list[Action]]:
        """Returns for each pipeline rank the forward actions of `count` micro-batches. A rank runs its first stage for
        the first `pp` micro-batches, then its next stage for the same micro-batches, and so on. Then it continues with
        the next `pp` micro-batches."""
        plan = self.mesh.plan
        return [
            [
                Action(ActionKind.F, stage, micro_batch)
                for first in range(0, count, plan.pp)
                for stage in plan.stages_of(rank)
                for micro_batch in range(first, min(first + plan.pp, count))
            ]
            for rank in range(plan.pp)
        ]

    # --- messages

    def _source(self, action: Action) -> tuple[P2PKey, int] | None:
        """Returns the message that `action` needs, and the pipeline rank that sends the message. Returns None if
        `action` needs no message."""
        plan = self.mesh.plan
        if action.kind is ActionKind.F and action.stage > 0:
            return P2PKey(ActionKind.F, action.stage, action.micro_batch), plan.stage_to_rank(action.stage - 1)
        if action.kind is ActionKind.B and action.stage < plan.stages - 1:
            return P2PKey(ActionKind.B, action.stage, action.micro_batch), plan.stage_to_rank(action.stage + 1)
        return None

    def _count(self, message: P2PKey) -> int:
        """Returns the number of tensors of `message`. A B message contains one gradient for each tensor of an F
        message."""
        return self.parts(message.stage + (message.kind is ActionKind.B))

    def _send(self, tensors: StageTensors, message: P2PKey, key: Any) -> None:
        to = self.mesh.plan.stage_to_rank(message.stage)
        if to == self.mesh.coords.pp:
            self.here[message.kind, message.stage, message.micro_batch] = tuple(tensor.detach() for tensor in tensors)
            return
        self.wire.send(tensors, message, to, key)

    def _receive(self, message: P2PKey, source: int) -> StageTensors:
        if source == self.mesh.coords.pp:
            return self.here.pop((message.kind, message.stage, message.micro_batch))
        return tuple(self.wire.receive(message, self._count(message), source))

    # --- actions

    def _forward(
        self, action: Action, batches: Sequence[Batch], alive: dict[Any, Any], scale: float | None
    ) -> torch.Tensor | float:
        stage, batch = action.stage, batches[action.micro_batch]
        key, source = _shape_key(batch), self._source(action)
        received = self._receive(*source) if source is not None else ()
        for tensor in received if scale is not None else ():
            tensor.requires_grad_()
        with torch.set_grad_enabled(scale is not None):
            output = self.forward(stage, batch, received)
        is_last = stage == self.mesh.plan.stages - 1
        if not is_last:
            self._send(output, P2PKey(ActionKind.F, stage + 1, action.micro_batch), key)
        if scale is not None:
            alive[stage, action.micro_batch] = (received, output if is_last else _backward_roots(output))
        if not is_last:
            return 0.0
        total = output[0].detach().double()
        return exact_sum.round_loss(total, self.labels) if self.exact else total

    def _backward(self, action: Action, batches: Sequence[Batch], alive: dict[Any, Any], scale: float | None) -> None:
        stage, key, source = action.stage, _shape_key(batches[action.micro_batch]), self._source(action)
        received, output = alive.pop((stage, action.micro_batch))
        gradients: Sequence[torch.Tensor | None] = (None,) if source is None else self._receive(*source)
        output = (output[0] * scale if output[0].requires_grad else None,) if source is None else output
        made = [pair for pair in zip(output, gradients, strict=True) if pair[0] is not None]
        if made:  # `made` is empty if no output needs a gradient, as on a first stage without training
            self.own.watch([end for end, _ in made])
            torch.autograd.backward([end for end, _ in made], [gradient for _, gradient in made])
        del output, made
        if received:
            back = tuple(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in received)
            self._send(back, P2PKey(ActionKind.B, stage - 1, action.micro_batch), key)
            del back
        self.backward_done(action)


def _outgoing_key(action: Action) -> P2PKey:
    """Returns the key of the message that `action` sends: its output to the next stage, or the gradient of its input to
    the previous stage."""
    return P2PKey(action.kind, action.stage + (1 if action.kind is ActionKind.F else -1), action.micro_batch)


def _backward_roots(output: StageTensors) -> BackwardRoots:
    """Returns the gradient edges of `output`. Backward needs only the edges, so the sent tensors can be freed before
    backward."""
    return tuple(get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in output)


def _shape_key(batch: Batch) -> tuple[Any, ...]:
    return tuple((name, tuple(value.shape)) for name, value in batch.items() if isinstance(value, torch.Tensor))
