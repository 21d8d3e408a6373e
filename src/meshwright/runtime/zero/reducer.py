"""Reduces the gradients of flat parameter groups in a fixed order while backward runs. The engine and the updater use
`GradReducer`.

[Note: fixed order] The groups of a stage are reduced strictly in backward order, even if autograd completes their
gradients in a different order. So every rank starts the same collectives in the same order, and sums are identical in
every step and after every resume. (torch's DDP rebuilds its buckets after the first step.) ZeRO 0 and 1 reduce once per
step, in the backward of the last micro-batch. ZeRO 2 and 3 reduce in the backward of each micro-batch, which frees the
full gradients. An expert without tokens on this rank gets no gradient. When backward leaves the block of the expert,
the missing gradient counts as zero. So on every rank the reduction of this block starts before the weights of the next
block in backward order are gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import CollectiveWork, all_reduce
from meshwright.runtime.comm.group import CommGroup, quiesce_groups, shutdown_groups
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.zero import exact_sum
from meshwright.runtime.zero.external_writes import ExternalWrites
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.spec.layout import MAX_INFLIGHT_REDUCE
from meshwright.spec.schedules.action import Action, ActionKind

NORM_UPCAST_ELEMENTS = 1 << 20
"""Number of low-precision gradient elements that the norm converts to float32 at a time."""


GradientProbe = Callable[[str, torch.Tensor], None]


@dataclass
class StageReducer:
    """Reduces parameter groups of one virtual stage: either those whose gradients B actions complete, or those whose
    gradients W actions complete. `units` are the groups in forward order. `start` starts the reduction of a group.
    `passes` is the number of B (or W) actions that are complete in this step. `pending` are the groups whose reduction
    has not started, in backward order. `ready` contains the `id` of each group whose gradients are complete."""

    units: list[FlatParamGroup]
    start: Callable[[FlatParamGroup], None]
    passes: int = 0
    pending: deque[FlatParamGroup] = field(default_factory=deque)
    ready: set[int] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    """Names of the parameters that received a gradient on this rank in this step."""
    probe: GradientProbe | None = None
    """During a preflight check, the function that receives each gradient (preflight/numeric_probes.py). None outside of
    checks."""

    def reset(self) -> None:
        """Makes all groups pending."""
        self.pending = deque(reversed(self.units))
        self.ready.clear()

    def begin_step(self, passes: int) -> None:
        """Prepares for a step of `passes` backward passes."""
        self.passes, self.received = 0, set()
        self.reset()
        for unit in self.units:
            unit.gradients.begin_step(passes)

    def end_pass(self) -> None:
        """Counts a backward pass. For ZeRO 2 and 3, makes all groups pending again."""
        self.passes += 1
        if any(unit.layout.reduces_each_pass for unit in self.units):
            assert not self.pending, "a parameter group was not reduced"
            self.reset()

    @contextmanager
    def divert(self, probe: GradientProbe) -> Iterator[None]:
        """Inside the context, passes each gradient to `probe`. These gradients are not summed, sent or counted."""
        self.probe = probe
        try:
            yield
        finally:
            self.probe = None

    @contextmanager
    def record_separately(self) -> Iterator[None]:
        """Restores `received` on exit, so that gradients inside the context are not recorded."""
        before, self.received = self.received, set()
        try:
            yield
        finally:
            self.received = before

    def divert_to_probe(self, name: str, gradient: torch.Tensor) -> bool:
        """Passes the gradient to the probe if a probe is set. Returns whether a probe is set. If so, the caller must
        not sum, send or count the gradient."""
        if self.probe is not None:
            self.probe(name, gradient)
        return self.probe is not None

    def mark_ready(self, unit: FlatParamGroup) -> None:
        """Marks the gradients of `unit` as complete. The reduction of a group starts when the gradients of this group
        and of all groups after it in forward order are complete."""
        self.ready.add(id(unit))
        while self.pending and id(self.pending[0]) in self.ready:
            self.start(self.pending.popleft())

    def mark_unused(self, unit: FlatParamGroup) -> None:
        """Ends a backward pass for `unit`. A parameter without a gradient in this pass gets a gradient of zero."""
        if self.probe is not None:
            if unit.hooked:
                unit.weights.reshard()
        elif unit.gradients.mark_unused_ready(self.passes + 1):
            self.mark_ready(unit)


class TiedParamGroup(NamedTuple):
    """Describes a parameter group whose layer is replicated on several `stages`. `counted_in_norm`: whether this
    replica is the one on the first of these stages. Only this one is saved and counted in the gradient norm."""

    layer: str
    stages: tuple[int, ...]
    counted_in_norm: bool


class BeforeReduction(Protocol):
    """A function that `GradReducer` calls each time before it starts the reduction of a group."""

    def __call__(self) -> None: ...


class GradReducer:
    """Reduces the gradients of all flat parameter groups of this rank. `stages` maps (virtual stage, B or W) to the
    `StageReducer` of the groups whose gradients these actions complete."""

    trainable: list[FlatParamGroup]
    """The groups that are not frozen. Only these are reduced, counted in the norm and updated."""

    def __init__(
        self,
        mesh: ParallelContext,
        stages: dict[int, list[FlatParamGroup]],
        partial: set[str],
        tied: dict[int, TiedParamGroup],
        tied_groups: Mapping[tuple[int, ...], CommGroup | None],
        param_names: tuple[str, ...] = (),
        disconnected: frozenset[str] = frozenset(),
        before_reduction: BeforeReduction | None = None,
    ) -> None:
        """`stages` are the groups of each virtual stage. `partial` are the names of the parameters whose gradients must
        be summed over tensor ranks. `tied` maps the `id` of each replicated group to its description. `tied_groups`
        maps the stages with replicas of a weight to the process group of their ranks."""
        self.mesh, self.tied_groups, self._before_reduction = mesh, tied_groups, before_reduction
        self.stages: dict[tuple[int, ActionKind], StageReducer] = {}
        for number, stage_units in stages.items():
            for kind, is_deferred in ((ActionKind.B, False), (ActionKind.W, True)):
                self.stages[number, kind] = StageReducer(
                    [unit for unit in stage_units if not unit.frozen and (unit.wgrad_queue is not None) == is_deferred],
                    self._start,
                )
        self.units = [unit for units in stages.values() for unit in units]
        self.trainable = [unit for unit in self.units if not unit.frozen]
        self.tied = [(unit, tied_group) for unit in self.units if (tied_group := tied.get(id(unit))) is not None]
        self._partial: dict[CommGroup, list[torch.Tensor]] = {}
        for unit in self.trainable:
            if unit.placement.tensor_group is not None and (runs := _partial_grads(unit, partial)):
                self._partial.setdefault(unit.placement.tensor_group, []).extend(runs)
        self._pending: deque[tuple[FlatParamGroup, CollectiveWork]] = deque()
        self.param_names = param_names
        """Names of all trained parameters of the model, in the model's order."""
        self.unused = param_names
        """Names of the parameters without a gradient on any rank in the last step. The update skips these parameters,
        as torch skips parameters whose gradient is None."""
        self._local_names = frozenset(name for unit in self.trainable for name in unit.parameters)
        self.disconnected = disconnected
        """Names of the parameters on which the model's outputs do not depend. Such a parameter may get a gradient of
        zeros, because another stage has sent zeros. The parameter then counts as one without a gradient."""
        self.external_writes = ExternalWrites(self.units)
        for stage in self.stages.values():
            for unit in stage.units:
                unit.report_to(stage)

    # --- during backward

    def begin_step(self, passes: int) -> None:
        """Prepares for a step of `passes` backward passes of each stage."""
        self.quiesce(finish_gathers=False)
        for stage in self.stages.values():
            stage.begin_step(passes)

    def abort_step(self) -> None:
        """Cleans up after a step that raised an error on all ranks, because the user's script may catch the error and
        continue. Waits for pending reductions and frees full weights."""
        while self._pending:
            self._pending.popleft()[1].wait()
        self.reshard_all()

    def _start(self, unit: FlatParamGroup) -> None:
        if self._before_reduction is not None:
            self._before_reduction()
        if unit.layout.zero_stage >= 2:
            while len(self._pending) >= MAX_INFLIGHT_REDUCE:
                self._pending.popleft()[1].wait()
        self._pending.append((unit, unit.reduce()))
        if unit.hooked:
            unit.weights.reshard()

    def end_backward(self, action: Action) -> None:
        """Ends a B action, or computes the deferred weight gradients of a W action and ends it. B completes the pass of
        groups without deferred weight gradients, and W completes the pass of all other groups. A parameter without a
        gradient in the completed pass gets a gradient of zero."""
        deferred = self.stages[action.stage, ActionKind.W].units
        for unit in reversed(deferred):
            assert unit.wgrad_queue is not None
            if action.kind is ActionKind.W:
                unit.wgrad_queue.run(action.micro_batch)
                continue
            unit.wgrad_queue.seal(action.micro_batch)
            if unit.hooked:
                unit.weights.reshard()
        stage = self.stages[action.stage, action.kind]
        for unit in reversed(stage.units):
            stage.mark_unused(unit)
        if stage.probe is not None:
            return
        stage.end_pass()

    @contextmanager
    def divert_gradients(self, probe: GradientProbe) -> Iterator[None]:
        """Inside the context, passes each gradient to `probe`. These gradients are not summed, sent or counted."""
        with ExitStack() as stack:
            for stage in self.stages.values():
                stack.enter_context(stage.divert(probe))
            yield

    @contextmanager
    def isolate_pass(self) -> Iterator[None]:
        """Inside the context, gradients are sent uncompressed, and the records of parameters with and without a
        gradient (`received`, `unused`) start as in a first step. On exit, restores these records. The residuals of
        compression do not change."""
        unused, self.unused = self.unused, self.param_names
        try:
            with ExitStack() as stack:
                for stage in self.stages.values():
                    stack.enter_context(stage.record_separately())
                for unit in self.units:
                    stack.enter_context(unit.uncompressed())
                yield
        finally:
            self.unused = unused

    def finish_gathers(self, layers: Container[str] | None = None) -> None:
        """Waits for the all-gathers of the last update that no forward has waited for, or only for those of `layers`
        ([Note: flat layout] in spec/layout.py)."""
        for unit in self.trainable:
            if layers is None or any(name in layers for name in unit.layout.bucket.layers):
                unit.weights.finish_gather()

    def quiesce(self, finish_gathers: bool = True) -> None:
        """Waits until no other rank reads this rank's flat buffers, so that the caller may write to them: to all
        buffers, or to all but the weights if `finish_gathers` is False. Every rank must call this method. Weights that
        were gathered ahead of a block that did not run are freed: they would be stale after the write."""
        if finish_gathers:
            self.finish_gathers()
        for unit in self.units:
            unit.weights.cancel_prefetch()
        placements = {id(unit.placement): unit.placement for unit in self.units}.values()
        quiesce_groups(
            (
                *(group for each in placements for group in (each.shard_group, each.replicate_group)),
                *self.tied_groups.values(),
            )
        )
        for shared in {
            id(unit.layout.shard_group): unit.weights.shared for unit in self.units if unit.weights.shared is not None
        }.values():
            shared.barrier().wait()

    def shutdown(self) -> None:
        """Waits until no other rank still communicates with this rank, so that its process may end."""
        self.finish_gathers()
        shutdown_groups(tuple(self.mesh.groups.values()))

    # --- between backward and update
    # ------------------------------------------------------------------------------------------

    def finish_gradients(self) -> None:
        """Completes the gradients: waits for the reductions over data-parallel ranks, sums partial gradients over
        tensor ranks, and sums gradients of tied weights over their stages."""
        replica_sums: list[CollectiveWork] = []
        while self._pending:
            unit, pending = self._pending.popleft()
            pending.wait()
            if unit.layout.zero_stage == 1:  # the sum over replicas overlaps with the reductions of later groups
                replica_sums.append(unit.reduce_over_replicas())
        replica_sums += [unit.reduce_over_replicas() for unit in self.trainable if unit.layout.zero_stage != 1]
        for pending in replica_sums:
            pending.wait()
        self.quiesce()
        for unit in self.trainable:
            if unit.gradients.host is not None:
                unit.gradients.host.wait()
        for group, runs in self._partial.items():
            joined = torch.cat(runs).to(self.mesh.device)
            all_reduce(joined, group).wait()
            for run, total in zip(runs, joined.split([run.numel() for run in runs]), strict=True):
                run.copy_(total)
        self._sum_over_stages()
        for unit in self.trainable:
            unit.gradients.dequantize()

    def _sum_over_stages(self) -> None:
        """Sums the gradients of tied weights over the stages that replicate them."""
        replicas: dict[tuple[tuple[int, ...], str], list[FlatParamGroup]] = {}
        for unit, tied in self.tied:
            if not unit.frozen:
                replicas.setdefault((tied.stages, tied.layer), []).append(unit)
        for stages, layer in sorted(replicas):  # every rank must use the same order
            first, *others = [unit.gradients.shard for unit in replicas[stages, layer]]
            total = first.to(self.mesh.device)  # some gradients are offloaded to CPU
            for gradients in others:
                total = total + gradients.to(self.mesh.device)
            all_reduce(total, self.tied_groups[stages]).wait()
            for gradients in (first, *others):
                gradients.copy_(total)

    def squared_norm(self) -> torch.Tensor:
        """Returns this rank's contribution to the squared gradient norm (float64 scalar). The sum of the contributions
        of all ranks counts each element once. With exact sums, ranks communicate in this method, so all ranks must call
        it. In this case rank 0 returns the whole squared norm, and all other ranks return 0."""
        exact_sums = [unit.gradients.exact for unit in self.trainable if unit.gradients.exact is not None]
        if exact_sums:
            first = self.mesh.tp is None or self.mesh.tp.index == 0
            return exact_sum.square_norm(
                (run for run, holders in self._norm_slices() if holders == 1 or first), exact_sums, self.mesh.world
            )
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for gradients, holders in self._norm_slices():
            kind = torch.float64 if gradients.dtype == torch.float64 else torch.float32
            for piece in gradients.split(norm_tile_elements(gradients)):
                total += torch.linalg.vector_norm(piece, dtype=kind).double().square() / holders
        return total

    def _norm_slices(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yields the gradient slices that this rank counts in the norm. Also yields, with each slice, the number of
        tensor ranks that have the same slice (including this rank)."""
        uncounted = {id(unit) for unit, tied in self.tied if not tied.counted_in_norm}
        for unit in self.trainable:
            if id(unit) in uncounted:
                continue
            length, replicas, replica = unit.gradients.shard.numel(), unit.placement.replicas, unit.placement.replica
            # Replicas have equal gradients, so each replica counts only a part of the shard.
            first, last = (length * replica // replicas, length * (replica + 1) // replicas)
            tensor_ranks = 1 if unit.placement.tensor_group is None else unit.placement.tensor_group.size
            border = min(max(unit.layout.bucket.split_end - unit.shard_range.start, first), last)
            for run, holders in ((slice(first, border), 1), (slice(border, last), tensor_ranks)):
                gradients = unit.gradients.shard[run]
                if gradients.numel():
                    yield gradients, holders

    # --- parameters without a gradient
    # -----------------------------------------------------------------------------------------

    def seen_grads(self) -> torch.Tensor:
        """Returns a flat float64 tensor, which the caller sums over all ranks for `sync_unused`. It has one element for
        each parameter in `unused`: 1 if this rank has a gradient of the parameter in this step, otherwise 0. The last
        element is 1 if this rank trains a parameter that is not in `unused` and has no gradient, otherwise 0."""
        received = self._received_names()
        another = not (
            received >= self._local_names
            or received >= self._local_names.intersection(self.param_names).difference(self.unused)
        )
        return torch.tensor(
            [*(name in received for name in self.unused), another], dtype=torch.float64, device=self.mesh.device
        )

    def sync_unused(self, seen: Sequence[float]) -> None:
        """Updates `unused` from `seen`, the sum of `seen_grads` over all ranks. All ranks must call this method. If a
        rank lacks a gradient of a parameter that is not in `unused`, all ranks communicate once more to find out
        whether another rank has a gradient of this parameter."""
        *seen, any_missing = seen
        missing = {name for name, ranks in zip(self.unused, seen, strict=True) if not ranks}
        if any_missing:
            received, others = self._received_names(), [name for name in self.param_names if name not in self.unused]
            sums = torch.tensor([name in received for name in others], dtype=torch.float64, device=self.mesh.device)
            all_reduce(sums, self.mesh.world).wait()
            missing |= {name for name, ranks in zip(others, sums.tolist(), strict=True) if not ranks}
        self.unused = tuple(name for name in self.param_names if name in missing)

    def _received_names(self) -> set[str]:
        """Returns the names of the parameters with a gradient on this rank in this step."""
        received = {name for stage in self.stages.values() for name in stage.received}
        for unit in self.trainable if self.disconnected else ():
            received -= {
                name
                for name in self.disconnected & unit.layout.offsets.keys()
                if not unit.gradients.shard[unit.layout.shard_slice(name)].any()
            }
        return received

    def reshard_all(self) -> None:
        """Frees the full weights of all groups (ZeRO 3)."""
        for unit in self.units:
            unit.weights.reshard()


def norm_tile_elements(gradients: torch.Tensor) -> int:
    """Returns the number of elements for one call of the norm. On a CPU the norm copies low-precision gradients to
    float32, so it is computed in tiles. An accelerator converts elements while it reads them, so one call is enough.

    >>> norm_tile_elements(torch.empty(1 << 22, dtype=torch.bfloat16)) == NORM_UPCAST_ELEMENTS
    True
    >>> norm_tile_elements(torch.empty(1 << 22, dtype=torch.bfloat16, device="meta")) == 1 << 22
    True
    """
    widens = gradients.itemsize < 4 and backend_of(gradients.device).memory_is_host
    return NORM_UPCAST_ELEMENTS if widens else max(gradients.numel(), 1)


def _partial_grads(unit: FlatParamGroup, partial: set[str]) -> list[torch.Tensor]:
    """Returns views of this rank's gradients of those parameters of `unit` that are in `partial`. Skips parameters
    without elements in the shard."""
    runs = [unit.gradients.shard[unit.layout.shard_slice(name)] for name in unit.layout.offsets if name in partial]
    return [run for run in runs if run.numel()]
