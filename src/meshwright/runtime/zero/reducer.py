"""Data parallelism and ZeRO over flat units: reductions in a fixed order while backward runs, one norm, one update, one
gather.

[Note: fixed order] Units of a stage are reduced strictly in backward order, whatever order autograd finishes them in,
so that every rank
starts the same collectives in the same order and sums are the same in every step and after every resume (torch's DDP
rebuilds its buckets
after the first step). ZeRO 0 and 1 reduce once a step, after the last micro-batch; ZeRO 2 and 3 after each, which is
what frees the memory.
An expert that no token of this rank chose gets no gradient: backward leaving its block counts it as zero, so that the
reduction begins before
the next block is gathered, on this rank as on the others, whatever the data ([Note: through] of gates.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import CollectiveWork, all_reduce
from meshwright.runtime.comm.group import CommGroup, quiesce_groups, shutdown_groups
from meshwright.runtime.optim.apply import (
    apply_offloaded_update,
    apply_update,
    check_skippable,
    prefetch_states,
    skip_params,
)
from meshwright.runtime.optim.param_groups import FullParam
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.shard.offloaded import OffloadedShard
from meshwright.runtime.shard.optimizer_shard import ShardParam
from meshwright.runtime.zero import exact_sum
from meshwright.runtime.zero.external_writes import ExternalWrites
from meshwright.runtime.zero.param_group import FlatParamGroup, param_shard_range
from meshwright.spec.schedules.action import Action, ActionKind

MAX_INFLIGHT_REDUCE = 2
"""Reductions under way at ZeRO 2 and 3; each holds a whole unit of gradients."""

NORM_UPCAST_ELEMENTS = 1 << 20
"""Low-precision gradients of which the norm makes a float32 copy at a time."""


@dataclass
class StageReducer:
    """Units of one virtual stage that one kind of action makes whole, in forward order, and how many of these it has
    seen this step."""

    units: list[FlatParamGroup]
    start: Callable[[FlatParamGroup], None]
    passes: int = 0
    pending: deque[FlatParamGroup] = field(default_factory=deque)
    ready: set[int] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    """Parameters that a gradient has come to in this step on this rank."""
    probe: Callable[[str, torch.Tensor], None] | None = None
    """Takes each gradient in place of the sums, in the passes of a check (runtime/preflight/numeric_probes.py)."""

    def divert_to_probe(self, name: str, gradient: torch.Tensor) -> bool:
        """Whether a check has taken the gradient: nothing is summed, sent or counted."""
        if self.probe is not None:
            self.probe(name, gradient)
        return self.probe is not None

    def mark_ready(self, unit: FlatParamGroup) -> None:
        """All gradients of the unit are there: it is reduced when those behind it are."""
        self.ready.add(id(unit))
        while self.pending and id(self.pending[0]) in self.ready:
            self.start(self.pending.popleft())

    def mark_unused(self, unit: FlatParamGroup) -> None:
        """No more gradients of the unit come in this pass: what got none counts as zero."""
        if self.probe is not None:
            if unit.hooked:
                unit.reshard()
        elif unit.mark_unused_ready(self.passes + 1):
            self.mark_ready(unit)


class TiedParamGroup(NamedTuple):
    """A unit whose layer several `stages` hold; the first one's `counts` in the norm, and is saved."""

    layer: str
    stages: tuple[int, ...]
    counted_in_norm: bool


class GradReducer:
    """All flat units of this rank. `partial` names parameters whose gradients are partial sums over the tensor
    ranks."""

    trainable: list[FlatParamGroup]
    """The units that are not frozen: all that is reduced, counted in the norm and updated."""

    def __init__(
        self,
        mesh: ParallelContext,
        stages: dict[int, list[FlatParamGroup]],
        partial: set[str],
        tied: dict[int, TiedParamGroup],
        ties: Mapping[tuple[int, ...], CommGroup | None],
        param_names: tuple[str, ...] = (),
        disconnected: frozenset[str] = frozenset(),
    ) -> None:
        """`ties`: the pipeline ranks that hold a copy each of what stages share, by these stages."""
        self.mesh, self.tied_groups = mesh, ties
        self.stages: dict[tuple[int, ActionKind], StageReducer] = {}
        for number, held in stages.items():
            for kind, late in ((ActionKind.B, False), (ActionKind.W, True)):
                self.stages[number, kind] = StageReducer(
                    [unit for unit in held if not unit.frozen and (unit.wgrad_queue is not None) == late], self._start
                )
        self.units = [unit for units in stages.values() for unit in units]
        self.trainable = [unit for unit in self.units if not unit.frozen]
        self.tied = [(unit, found) for unit in self.units if (found := tied.get(id(unit))) is not None]
        self._partial: dict[CommGroup, list[torch.Tensor]] = {}
        for unit in self.trainable:
            if unit.placement.tensor_group is not None and (runs := _partial_grads(unit, partial)):
                self._partial.setdefault(unit.placement.tensor_group, []).extend(runs)
        self._pending: deque[tuple[FlatParamGroup, CollectiveWork]] = deque()
        self.param_names = param_names
        """All trained parameters of the model, in its order."""
        self.unused = param_names
        """Of them those that no gradient came to on any rank in the last backward pass of all ranks: the update skips
        them, as torch skips a parameter whose
        gradient is None."""
        self.stateless: frozenset[str] = frozenset()
        """Of them those that every update so far has skipped, so that the optimizer has no states of them."""
        self._local_names = frozenset(name for unit in self.trainable for name in unit.parameters)
        self.disconnected = disconnected
        """Parameters that the outputs were not seen to come from with a gradient: zeros that another stage sends back
        are none that came."""
        self._updated = False
        self.external_writes = ExternalWrites(self.units)
        for stage in self.stages.values():
            for unit in stage.units:
                unit.reducer = stage

    # --- while backward runs
    # --------------------------------------------------------------------------------------------------

    def begin_step(self, passes: int) -> None:
        """Before the first of `passes` backward passes of each stage."""
        self.quiesce()
        for stage in self.stages.values():
            stage.passes, stage.received = 0, set()
            self._reset_stage(stage)
            for unit in stage.units:
                unit.begin_step(passes)

    def abort_step(self) -> None:
        """Nothing is left of a pass that ended in an error, on all ranks alike, and that a script has caught (a batch
        that cannot be read)."""
        while self._pending:
            self._pending.popleft()[1].wait()
        self.reshard_all()

    def _reset_stage(self, stage: StageReducer) -> None:
        stage.pending = deque(reversed(stage.units))
        stage.ready.clear()

    def _start(self, unit: FlatParamGroup) -> None:
        if self.mesh.state_swapper is not None:
            prefetch_states(self.mesh.state_swapper, self.trainable)
        if unit.zero_stage >= 2:
            while len(self._pending) >= MAX_INFLIGHT_REDUCE:
                self._pending.popleft()[1].wait()
        self._pending.append((unit, unit.reduce()))
        if unit.hooked:
            unit.reshard()

    def end_backward(self, action: Action) -> None:
        """A backward action is over: B of units whose weights wait for no W, or W. Parameters that took no part count
        as zero."""
        late = self.stages[action.stage, ActionKind.W].units
        for unit in reversed(late):
            assert unit.wgrad_queue is not None
            if action.kind is ActionKind.W:
                unit.wgrad_queue.run(action.micro_batch)
                continue
            unit.wgrad_queue.seal(action.micro_batch)
            if unit.hooked:
                unit.reshard()
        stage = self.stages[action.stage, action.kind]
        for unit in reversed(stage.units):
            stage.mark_unused(unit)
        if stage.probe is not None:
            return
        stage.passes += 1
        if self.mesh.plan.zero >= 2:
            assert not stage.pending, "a unit was not reduced"
            self._reset_stage(stage)

    def quiesce(self) -> None:
        """Before flat buffers are written: no other rank reads them any more (ranks of one host read where a tensor
        lies)."""
        sharing = {id(unit.placement): unit.placement for unit in self.units}.values()
        quiesce_groups(
            (
                *(group for each in sharing for group in (each.shard_group, each.replicate_group)),
                *self.tied_groups.values(),
            )
        )
        for once in {id(unit.shard_group): unit.shared for unit in self.units if unit.shared is not None}.values():
            once.barrier().wait()

    def shutdown(self) -> None:
        """This rank is through: when this returns it may end."""
        shutdown_groups(tuple(self.mesh.groups.values()))

    # --- between backward and update
    # ------------------------------------------------------------------------------------------

    def finish_gradients(self) -> None:
        """Every gradient is the sum over all ranks that read data, all tensor ranks' parts, and both ends of a tie."""
        across: list[CollectiveWork] = []
        while self._pending:
            unit, pending = self._pending.popleft()
            pending.wait()
            if unit.zero_stage == 1:  # its sum over the replicas goes on beside those of the units behind it
                across.append(unit.reduce_over_replicas())
        across += [unit.reduce_over_replicas() for unit in self.trainable if unit.zero_stage != 1]
        for pending in across:
            pending.wait()
        self.quiesce()
        for unit in self.trainable:
            if unit.host_grads is not None:
                unit.host_grads.wait()
        for group, runs in self._partial.items():
            joined = torch.cat(runs).to(self.mesh.device)
            all_reduce(joined, group).wait()
            for run, total in zip(runs, joined.split([run.numel() for run in runs]), strict=True):
                run.copy_(total)
        self._sum_over_stages()
        for unit in self.trainable:
            if unit.exact is not None:
                unit.grad_shard = unit.exact.dequantize(unit.grad_shard)

    def _sum_over_stages(self) -> None:
        """Of what several stages hold every copy gets the sum of all."""
        copies: dict[tuple[tuple[int, ...], str], list[FlatParamGroup]] = {}
        for unit, tied in self.tied:
            if not unit.frozen:
                copies.setdefault((tied.stages, tied.layer), []).append(unit)
        for stages, layer in sorted(copies):  # the same order on all ranks
            first, *others = [unit.grad_shard for unit in copies[stages, layer]]
            total = first.to(self.mesh.device)  # the sums of some wait on the host
            for gradients in others:
                total = total + gradients.to(self.mesh.device)
            all_reduce(total, self.tied_groups[stages]).wait()
            for gradients in (first, *others):
                gradients.copy_(total)

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared gradient norm (float64 scalar): summed over all ranks it is the whole, each
        element once."""
        exact_sums = [unit.exact for unit in self.trainable if unit.exact is not None]
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
        """Runs of gradients that this rank counts in the norm, and how many tensor ranks count the same."""
        uncounted = {id(unit) for unit, tied in self.tied if not tied.counted_in_norm}
        for unit in self.trainable:
            if id(unit) in uncounted:
                continue
            length, copies, copy = unit.grad_shard.numel(), unit.placement.replicas, unit.placement.replica
            first, last = (
                length * copy // copies,
                length * (copy + 1) // copies,
            )  # copies are the same: each sums its part
            alike = 1 if unit.placement.tensor_group is None else unit.placement.tensor_group.size
            border = min(max(unit.layout.split_end - unit.shard_range.start, first), last)
            for run, holders in ((slice(first, border), 1), (slice(border, last), alike)):
                gradients = unit.grad_shard[run]
                if gradients.numel():
                    yield gradients, holders

    # --- update
    # ---------------------------------------------------------------------------------------------------------------

    def optimizer_params(self) -> list[ShardParam | FullParam]:
        """What the optimizer is given: flat runs, and of units that it needs whole the tensors that this rank
        updates."""
        given: list[ShardParam | FullParam] = []
        for unit in self.trainable:
            given += (
                unit.optim_shard.params
                if unit.optim_shard.full_tensor_step is None
                else unit.optim_shard.full_tensor_step.parameters
            )
        return given or [ShardParam(torch.zeros(0), False)]

    def seen_grads(self) -> torch.Tensor:
        """Of each of `unreached` whether a gradient came to it on this rank in this step, and whether none came to
        another parameter that this rank
        trains: ranks sum it."""
        here = self._received_names()
        another = not (
            here >= self._local_names
            or here >= self._local_names.intersection(self.param_names).difference(self.unused)
        )
        return torch.tensor(
            [*(name in here for name in self.unused), another], dtype=torch.float64, device=self.mesh.device
        )

    def sync_unused(self, came: Sequence[float]) -> None:
        """`came`, summed over all ranks, which all call this. Where some rank had no gradient of a parameter that was
        reached in the step before, ranks
        sum once more: as a rule another rank had one."""
        *came, another = came
        missing = {name for name, ranks in zip(self.unused, came, strict=True) if not ranks}
        if another:
            here, others = self._received_names(), [name for name in self.param_names if name not in self.unused]
            sums = torch.tensor([name in here for name in others], dtype=torch.float64, device=self.mesh.device)
            all_reduce(sums, self.mesh.world).wait()
            missing |= {name for name, ranks in zip(others, sums.tolist(), strict=True) if not ranks}
        self.unused = tuple(name for name in self.param_names if name in missing)

    def _received_names(self) -> set[str]:
        """Parameters that a gradient came to in this step on this rank."""
        here = {name for stage in self.stages.values() for name in stage.received}
        for unit in self.trainable if self.disconnected else ():
            here -= {
                name
                for name in self.disconnected & unit.layout.offsets.keys()
                if not unit.grad_shard[param_shard_range(unit, name)].any()
            }
        return here

    def update(self, optimizer: torch.optim.Optimizer, scale: float, step: int = 0) -> None:
        """Gradients times `scale` through the optimizer (update/step.py)."""
        self.quiesce()
        skipped = frozenset(self.unused)
        check_skippable(optimizer, skipped)
        for unit in self.trainable:
            skip_params(unit, skipped, self.stateless, optimizer)
        if self.mesh.state_swapper is not None and any(
            isinstance(unit.optim_shard, OffloadedShard) for unit in self.trainable
        ):
            apply_offloaded_update(self.mesh.state_swapper, self.trainable, optimizer, scale)
        else:
            apply_update(self.trainable, optimizer, scale, step, not self._updated)
        self._updated, self.stateless = True, self.stateless & skipped
        for pending in [unit.all_gather_params() for unit in self.trainable]:
            pending.wait()
        if self.mesh.plan.zero in (
            1,
            2,
        ):  # the user's code may write to weights now, whose shards other ranks may still be reading
            self.quiesce()

    def reshard_all(self) -> None:
        for unit in self.units:
            unit.reshard()


def norm_tile_elements(gradients: torch.Tensor) -> int:
    """Elements that go into one norm: an accelerator widens them as it reads them.

    >>> norm_tile_elements(torch.empty(1 << 22, dtype=torch.bfloat16)) == NORM_UPCAST_ELEMENTS, norm_tile_elements(torch.empty(1 << 22, dtype=torch.bfloat16, device="meta")) == 1 << 22
    (True, True)
    """
    widens = gradients.itemsize < 4 and backend_of(gradients.device).memory_is_host
    return NORM_UPCAST_ELEMENTS if widens else max(gradients.numel(), 1)


def _partial_grads(unit: FlatParamGroup, partial: set[str]) -> list[torch.Tensor]:
    """Where this rank's own gradients of `unit` hold partial parameters, as views."""
    runs = [unit.grad_shard[param_shard_range(unit, name)] for name in unit.layout.offsets if name in partial]
    return [run for run in runs if run.numel()]
