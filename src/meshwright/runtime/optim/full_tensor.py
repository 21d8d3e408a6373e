"""Full-tensor updates, for rules that need whole tensors: Newton-Schulz of a matrix, row and column factors, norms of a
tensor.

[Note: owners] Among the ranks that store slices of a tensor, exactly one is its owner. ZeRO 1 to 3 and tensor
parallelism create such slices, so the owner is a pair of a data-parallel shard and a tensor rank. Tensors are assigned
in order of decreasing size, each to the rank with the least load. Every rank computes the same assignment. Once per
step each rank sends its slices of gradients and weights to the owners. An owner runs torch's own optimizer on the full
tensors, and sends slices of the result back. Only the owner stores optimizer states. If no tensor is sliced (ZeRO 0
without tensor parallelism), each rank updates its tensors in place and sends no messages. Replicas repeat the
computation.

Sources: Rajbhandari et al., ZeRO, for states; Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982, section
2.3, for full matrices.

Guarantees: results equal those of one device. The optimizer gets the same full tensors as there, and sums have the same
order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from meshwright.runtime.comm.async_collectives import exchange_rows
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.optim.param_groups import FullParam, ParamGroups
from meshwright.runtime.optim.rule_probe import UpdateRule
from meshwright.runtime.shard.shard_table import ShardSpec, ShardTable
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.spec.layout import shard_bounds

IndexRange = tuple[int, int]


class TensorLayout(NamedTuple):
    """A tensor of a parameter group. `intervals`: the index ranges that each tensor rank stores along `dim`; one entry
    if the tensor is not split."""

    name: str
    offset: int
    shape: torch.Size
    dim: int
    intervals: tuple[tuple[IndexRange, ...], ...]

    @property
    def split(self) -> bool:
        """Whether tensor ranks split the tensor."""
        return len(self.intervals) > 1

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape on tensor rank `rank`."""
        if not self.split:
            return tuple(self.shape)
        size = sum(stop - start for start, stop in self.intervals[rank])
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def numel(self, rank: int) -> int:
        """Returns the elements on tensor rank `rank`."""
        return torch.Size(self.local_shape(rank)).numel()


class OwnerRank(NamedTuple):
    """The owner of a tensor: its data-parallel shard and its tensor rank (0 if tensor ranks do not split the
    tensor)."""

    shard: int
    tensor: int


def assign_owners(parts: Sequence[TensorLayout], shards: int, ranks: int) -> dict[str, OwnerRank]:
    """Assigns an owner to each tensor; see [Note: owners]. `ranks`: the number of tensor ranks. A tensor that is not
    split adds to the load of all of them.

    >>> parts = [TensorLayout(name, 0, torch.Size([size]), 0, ()) for name, size in (("a", 4), ("b", 9), ("c", 4))]
    >>> assign_owners(parts, 2, 1)
    {'b': OwnerRank(shard=0, tensor=0), 'a': OwnerRank(shard=1, tensor=0), 'c': OwnerRank(shard=1, tensor=0)}
    """
    load = [[0] * ranks for _ in range(shards)]
    found: dict[str, OwnerRank] = {}
    for part in sorted(parts, key=lambda part: -part.shape.numel()):
        if part.split:
            shard, tensor = min(
                ((s, t) for s in range(shards) for t in range(ranks)), key=lambda place: load[place[0]][place[1]]
            )
            load[shard][tensor] += part.shape.numel()
        else:
            shard, tensor = min(range(shards), key=lambda s: max(load[s])), 0
            load[shard] = [each + part.shape.numel() for each in load[shard]]
        found[part.name] = OwnerRank(shard, tensor)
    return found


class FullTensorStep:
    """The full tensors of one flat parameter group. `parameters` are those that this rank owns, without storage except
    during their update."""

    def __init__(
        self,
        unit: FlatParamGroup,
        parts: Sequence[TensorLayout],
        owners: dict[str, OwnerRank],
        in_block: Mapping[str, bool],
    ) -> None:
        sharing = unit.placement
        self.layouts, self.owners, self.shard_range = tuple(parts), owners, unit.shard_range
        self.shards, self.shard, self.shard_group = sharing.shards, sharing.shard, sharing.shard_group
        self.bounds = shard_bounds(unit.layout.numel, sharing.shards, sharing.weights)
        self.tensor_group = sharing.tensor_group
        self.tensor_rank = 0 if self.tensor_group is None else self.tensor_group.index
        self.local_layouts = [part for part in self.layouts if owners[part.name].shard == self.shard]
        """Tensors whose local part is sent to this rank."""
        self.owned = [
            part for part in self.local_layouts if not part.split or owners[part.name].tensor == self.tensor_rank
        ]
        self.row_counts = [[self._count(i, j) for j in range(self.shards)] for i in range(self.shards)]
        """Elements that shard i sends to owner j."""
        self.split_row_counts = self._split_row_counts()
        kind = unit.optim_shard.flat.dtype
        self._placeholder = torch.zeros((), dtype=kind, device=unit.optim_shard.flat.device)
        self.parameters = [
            FullParam(self._placeholder.expand(part.shape), part.name, in_block[part.name]) for part in self.owned
        ]
        self.skipped: Collection[str] = ()
        """Tensors without a gradient in the next update, which the optimizer skips."""

    def skip(self, names: Collection[str]) -> None:
        """Skips the tensors `names` in the next update."""
        self.skipped = names

    def step(self, optimizer: torch.optim.Optimizer, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        """Updates `weights`, this rank's shard of the group, with its `gradients`."""
        if self.shard_group is None and not any(part.split for part in self.layouts):
            self._step_in_place(optimizer, weights, gradients)
            return
        whole = self.gather(torch.stack([weights, gradients], dim=1))
        for part, parameter in zip(self.owned, self.parameters, strict=True):
            both = whole.pop(part.name)
            parameter.data = both[..., 0].contiguous()
            parameter.grad = None if part.name in self.skipped else both[..., 1].contiguous()
        optimizer.step()
        after = {
            part.name: parameter.data.unsqueeze(-1) for part, parameter in zip(self.owned, self.parameters, strict=True)
        }
        for parameter in self.parameters:
            parameter.grad, parameter.data = None, self._placeholder.expand(parameter.shape)
        self.scatter(after, weights.unsqueeze(1))

    def _step_in_place(self, optimizer: torch.optim.Optimizer, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        """Updates the tensors in place, if this rank stores all of the group."""
        for part, parameter in zip(self.owned, self.parameters, strict=True):
            taken = slice(part.offset, part.offset + part.shape.numel())
            parameter.data = weights[taken].view(part.shape)
            parameter.grad = None if part.name in self.skipped else gradients[taken].view(part.shape)
        optimizer.step()
        for part, parameter in zip(self.owned, self.parameters, strict=True):
            taken = slice(part.offset, part.offset + part.shape.numel())
            if parameter.data.data_ptr() != weights[taken].data_ptr():  # a rule may replace the weights by a new tensor
                weights[taken].view(part.shape).copy_(parameter.data)
            parameter.grad, parameter.data = None, self._placeholder.expand(parameter.shape)

    def make_states(self, optimizer: torch.optim.Optimizer, stateless: Collection[str]) -> None:
        """Creates optimizer states by a step on zeros, except for `stateless` tensors. Their values are arbitrary."""
        for parameter in self.parameters:
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = None if parameter.path in stateless else torch.zeros_like(parameter.data)
        optimizer.step()
        for parameter in self.parameters:
            parameter.grad, parameter.data = None, self._placeholder.expand(parameter.shape)

    # --- to the owners and back
    # -----------------------------------------------------------------------------------------------

    def gather(self, run: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the full tensors that this rank owns, assembled from `run` (elements of the shard, columns). The
        columns become their last dimension."""
        columns = run.shape[1]
        local = {part.name: run.new_empty(part.numel(self.tensor_rank), columns) for part in self.local_layouts}
        sent = [
            run[first - self.shard_range.start : last - self.shard_range.start]
            for _, part in self._outgoing()
            for first, last in [self._range(part)]
        ]
        received = _exchange_shards(sent, self.row_counts, self.shard_group)
        for i, part in ((i, part) for i in range(self.shards) for part in self.local_layouts):
            first, last = self._overlap(i, part)
            local[part.name][first:last] = received[: last - first]
            received = received[last - first :]
        return self._join_tensors(local)

    def scatter(self, whole: dict[str, torch.Tensor], run: torch.Tensor) -> None:
        """Sends parts of the owners' full tensors back into `run`, the reverse of `gather`."""
        local = self._split_tensors(whole)
        pieces = [
            local[part.name][slice(*self._overlap(i, part))] for i in range(self.shards) for part in self.local_layouts
        ]
        received = _exchange_shards(pieces, _transpose(self.row_counts), self.shard_group, like=self._placeholder)
        for _, part in self._outgoing():
            first, last = self._range(part)
            run[first - self.shard_range.start : last - self.shard_range.start] = received[: last - first]
            received = received[last - first :]

    def _outgoing(self) -> list[tuple[int, TensorLayout]]:
        """Returns the owning shard and the tensor of each slice, in the order in which this rank sends them."""
        return [(j, part) for j in range(self.shards) for part in self.layouts if self.owners[part.name].shard == j]

    def _overlap(self, i: int, part: TensorLayout) -> IndexRange:
        """Returns the range of a local tensor that shard `i` stores."""
        numel = part.numel(self.tensor_rank)
        first, last = (min(max(edge - part.offset, 0), numel) for edge in self.bounds[i : i + 2])
        return first, last

    def _range(self, part: TensorLayout) -> IndexRange:
        """Returns the range of the flat buffer that this shard stores of a tensor."""
        first, last = self._overlap(self.shard, part)
        return part.offset + first, part.offset + last

    def _count(self, i: int, j: int) -> int:
        """Returns the elements that shard `i` sends to owner `j`."""
        overlaps = (self._overlap(i, part) for part in self.layouts if self.owners[part.name].shard == j)
        return sum(last - first for first, last in overlaps)

    # --- over tensor ranks
    # ----------------------------------------------------------------------------------------------------

    def _split_row_counts(self) -> list[list[int]]:
        """Returns the elements that tensor rank i sends to owner j."""
        ranks = range(1 if self.tensor_group is None else self.tensor_group.size)
        split = [part for part in self.local_layouts if part.split]
        return [
            [sum(part.numel(i) for part in split if self.owners[part.name].tensor == j) for j in ranks] for i in ranks
        ]

    def _split_parts(self) -> list[TensorLayout]:
        """Returns the tensors that tensor ranks split, by owner."""
        return sorted(
            (part for part in self.local_layouts if part.split), key=lambda part: self.owners[part.name].tensor
        )

    def _join_tensors(self, local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        whole = {part.name: local[part.name].view(*part.shape, -1) for part in self.owned if not part.split}
        sent = [local[part.name] for part in self._split_parts()]
        if not sent:
            return whole
        columns = sent[0].shape[1]
        received = _exchange_shards(sent, self.split_row_counts, self.tensor_group)
        mine = [part for part in self.owned if part.split]
        whole |= {part.name: received.new_empty(*part.shape, columns) for part in mine}
        for i, part in ((i, part) for i in range(len(self.split_row_counts)) for part in mine):
            taken, received = received[: part.numel(i)].view(*part.local_shape(i), columns), received[part.numel(i) :]
            at = 0
            for start, stop in part.intervals[i]:
                whole[part.name].narrow(part.dim, start, stop - start).copy_(taken.narrow(part.dim, at, stop - start))
                at += stop - start
        return whole

    def _split_tensors(self, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        local = {part.name: whole[part.name].reshape(part.shape.numel(), -1) for part in self.owned if not part.split}
        if not any(part.split for part in self.local_layouts):
            return local
        mine = [part for part in self.owned if part.split]
        pieces = [
            torch.cat(
                [whole[part.name].narrow(part.dim, start, stop - start) for start, stop in part.intervals[i]],
                dim=part.dim,
            ).view(part.numel(i), -1)
            for i in range(len(self.split_row_counts))
            for part in mine
        ]
        received = _exchange_shards(
            pieces, _transpose(self.split_row_counts), self.tensor_group, like=self._placeholder
        )
        for part in self._split_parts():
            local[part.name], received = (
                received[: part.numel(self.tensor_rank)],
                received[part.numel(self.tensor_rank) :],
            )
        return local


def _transpose(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Transposes the counts, which gives those of the reverse exchange."""
    return [list(column) for column in zip(*rows, strict=True)]


def _exchange_shards(
    parts: Sequence[torch.Tensor],
    rows: Sequence[Sequence[int]],
    group: CommGroup | None,
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the slices that all ranks send to this rank, in order of rank. `like` gives the dtype if this rank sends
    no slices."""
    if parts:
        sent = torch.cat(list(parts))
    else:
        assert like is not None, "a rank without parts needs the dtype of what it receives"
        sent = like.new_empty(0, 1)
    return sent if group is None else exchange_rows(sent, rows, group)


class FullTensorNeeds(NamedTuple):
    """The parameters that an optimizer needs as full tensors: their names; which trained parameters are in blocks, and
    their optimizer groups."""

    names: frozenset[str]
    in_block: Mapping[str, bool]
    groups: Mapping[str, int]

    @classmethod
    def from_groups(cls, groups: ParamGroups, rule: UpdateRule) -> FullTensorNeeds:
        """Returns what `rule` needs of the parameters of `groups`."""
        whole = frozenset(
            name for name, shape in groups.shapes.items() if rule.needs_full(shape, groups.in_block[name])
        )
        return cls(whole, groups.in_block, groups.group_of)


NO_FULL_TENSORS = FullTensorNeeds(frozenset(), {}, {})


def make_full_tensor_steps(
    trained: Sequence[FlatParamGroup], shards: ShardTable, needs: FullTensorNeeds
) -> dict[int, FullTensorStep]:
    """Returns the full-tensor update of each group in `trained` whose tensors the optimizer needs whole, by the group's
    identity. Either all tensors of a group are needed whole, or none."""
    steps: dict[int, FullTensorStep] = {}
    parts: dict[int, list[tuple[FlatParamGroup, list[TensorLayout]]]] = {}
    for unit in trained:
        if needs.names & unit.parameters.keys():
            assert needs.names >= unit.parameters.keys(), "a unit holds tensors of both kinds"
            parts.setdefault(id(unit.placement), []).append(
                (unit, [_tensor_layout(shards.params[name], unit, name) for name in unit.layout.offsets])
            )
    for layouts in parts.values():
        sharing = layouts[0][0].placement
        ranks = 1 if sharing.tensor_group is None else sharing.tensor_group.size
        # A rank with the first and the last stage has two replicas of a tied weight.
        copies: dict[str, TensorLayout] = {part.name: part for _, each in layouts for part in each}
        owners = assign_owners(list(copies.values()), sharing.shards, ranks)
        for unit, each in layouts:
            steps[id(unit)] = FullTensorStep(unit, each, owners, needs.in_block)
    return steps


def _tensor_layout(spec: ShardSpec, unit: FlatParamGroup, name: str) -> TensorLayout:
    split = spec.tp_split
    intervals = () if split is None else tuple(spec.intervals(rank) for rank in range(spec.tp_ranks))
    return TensorLayout(name, unit.layout.offsets[name], spec.global_shape, split.dim if split else 0, intervals)
