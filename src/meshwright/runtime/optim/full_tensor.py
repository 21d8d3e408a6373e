"""Updates the parameters that an optimizer needs as full tensors, such as the matrices of Muon (Newton-Schulz) and the
tensors of Adafactor (row and column factors, norms of a tensor). updater.py calls `FullTensorStep` once per step.

[Note: owners] ZeRO 1 to 3 and tensor parallelism slice tensors. A tensor that tensor ranks split has one owner: one
tensor rank of one data-parallel shard. Any other tensor is owned by all tensor ranks of one data-parallel shard, which
update it identically. An owner need not store a slice of the tensor. The tensors are assigned in order of decreasing
size, each to the ranks that own the fewest elements so far. Every rank computes the same assignment. Once per step each
rank sends its slices of gradients and weights to the owners. An owner runs torch's optimizer on its full tensors, and
sends slices of the result back. Only the owners of a tensor store its optimizer states. If no tensor is sliced (ZeRO 0
without tensor parallelism), each rank updates its tensors in place and sends no messages. Data-parallel replicas of a
shard repeat the computation.

Sources: Rajbhandari et al., ZeRO, for states; Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982, section
2.3, for full matrices.

Guarantees: results equal those of one device, because the optimizer gets the full tensors and adds their elements in
the same order as on one device.
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
    """Describes a tensor of a flat parameter group. `offset`: index of its first element in the group's flat buffer.
    `shape`: global shape. `intervals[r]`: the [start, stop) index ranges along `dim` that tensor rank r stores. A
    tensor that tensor ranks do not split has at most one entry in `intervals`."""

    name: str
    offset: int
    shape: torch.Size
    dim: int
    intervals: tuple[tuple[IndexRange, ...], ...]

    @property
    def split(self) -> bool:
        """Whether the tensor is split over tensor ranks."""
        return len(self.intervals) > 1

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of the tensor's slice on tensor rank `rank`."""
        if not self.split:
            return tuple(self.shape)
        size = sum(stop - start for start, stop in self.intervals[rank])
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def numel(self, rank: int) -> int:
        """Returns the number of elements on tensor rank `rank`."""
        return torch.Size(self.local_shape(rank)).numel()


class OwnerRank(NamedTuple):
    """Identifies the owner of a tensor by the indices of its data-parallel shard and tensor rank. The tensor rank is 0
    if the tensor is not split over tensor ranks."""

    shard: int
    tensor: int


def assign_owners(parts: Sequence[TensorLayout], shards: int, ranks: int) -> dict[str, OwnerRank]:
    """Returns the owner of each tensor by name ([Note: owners]). `shards` is the number of data-parallel shards,
    `ranks` the number of tensor ranks. A tensor that is not split is owned by all tensor ranks of its owner's shard.

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
    """Updates the full tensors of one flat parameter group. `parameters` are the tensors of the group that this rank
    owns, in the form in which the optimizer gets them. They have storage only during their update."""

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
        """The tensors that are owned by ranks of this data-parallel shard. `gather` first assembles this tensor rank's
        slices of these tensors, and then exchanges slices with other tensor ranks."""
        self.owned = [
            part for part in self.local_layouts if not part.split or owners[part.name].tensor == self.tensor_rank
        ]
        self.row_counts = [[self._count(i, j) for j in range(self.shards)] for i in range(self.shards)]
        """Element (i, j) is the number of tensor elements that shard i sends to shard j."""
        self.split_row_counts = self._split_row_counts()
        kind = unit.optim_shard.flat.dtype
        self._placeholder = torch.zeros((), dtype=kind, device=unit.optim_shard.flat.device)
        self.parameters = [
            FullParam(self._placeholder.expand(part.shape), part.name, in_block[part.name]) for part in self.owned
        ]
        self.skipped: Collection[str] = ()
        """Names of the tensors that the next update skips, because they have no gradient."""

    def skip(self, names: Collection[str]) -> None:
        """Makes the next update skip the tensors `names`."""
        self.skipped = names

    def step(self, optimizer: torch.optim.Optimizer, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        """Updates `weights` in place with `gradients`. Both are this rank's shard of the group, one flat tensor
        each."""
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
        """Updates the tensors in place. Used if this rank stores the whole group."""
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
        """Creates optimizer states by a step with weights and gradients of zero, except for the `stateless` tensors.
        The caller then overwrites the states with those of a checkpoint."""
        for parameter in self.parameters:
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = None if parameter.path in stateless else torch.zeros_like(parameter.data)
        optimizer.step()
        for parameter in self.parameters:
            parameter.grad, parameter.data = None, self._placeholder.expand(parameter.shape)

    # --- exchange between data-parallel shards

    def gather(self, run: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns by name the full tensors that this rank owns, assembled from the shards of all ranks. `run` is this
        rank's shard, (elements, columns), with one column for each kind of value (weights, gradients). Each result has
        the shape of its tensor plus a last dimension of `columns`."""
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
        """Sends slices of the full tensors `whole` from their owners to all ranks. Writes the received slices into
        `run`, this rank's shard, (elements, columns). Reverses `gather`."""
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
        """Returns (index of the owner's shard, tensor) of each slice that this rank sends, in the order of sending."""
        return [(j, part) for j in range(self.shards) for part in self.layouts if self.owners[part.name].shard == j]

    def _overlap(self, i: int, part: TensorLayout) -> IndexRange:
        """Returns the range of the elements of `part` that shard `i` stores. Indices count from the start of this
        tensor rank's slice of `part`."""
        numel = part.numel(self.tensor_rank)
        first, last = (min(max(edge - part.offset, 0), numel) for edge in self.bounds[i : i + 2])
        return first, last

    def _range(self, part: TensorLayout) -> IndexRange:
        """Returns the range of the elements of `part` that this shard stores. Indices count from the start of the
        group's flat buffer."""
        first, last = self._overlap(self.shard, part)
        return part.offset + first, part.offset + last

    def _count(self, i: int, j: int) -> int:
        """Returns the number of elements that shard `i` sends to the owners in shard `j`."""
        overlaps = (self._overlap(i, part) for part in self.layouts if self.owners[part.name].shard == j)
        return sum(last - first for first, last in overlaps)

    # --- exchange between tensor ranks

    def _split_row_counts(self) -> list[list[int]]:
        """Returns the matrix whose element (i, j) is the number of elements that tensor rank i sends to tensor
        rank j."""
        ranks = range(1 if self.tensor_group is None else self.tensor_group.size)
        split = [part for part in self.local_layouts if part.split]
        return [
            [sum(part.numel(i) for part in split if self.owners[part.name].tensor == j) for j in ranks] for i in ranks
        ]

    def _split_parts(self) -> list[TensorLayout]:
        """Returns the tensors that are split over tensor ranks, sorted by the tensor rank of their owner."""
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
    """Returns the transpose of `rows`: the element counts of the exchange in the opposite direction."""
    return [list(column) for column in zip(*rows, strict=True)]


def _exchange_shards(
    parts: Sequence[torch.Tensor],
    rows: Sequence[Sequence[int]],
    group: CommGroup | None,
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sends the slices `parts`, which are in order of the receiving rank. Returns the slices that all ranks send to
    this rank, concatenated in order of the sending rank. `rows[i][j]` is the number of elements that rank i sends to
    rank j. If `parts` is empty, `like` defines dtype and device of the result."""
    if parts:
        sent = torch.cat(list(parts))
    else:
        assert like is not None, "a rank that sends nothing needs the dtype of the received slices"
        sent = like.new_empty(0, 1)
    return sent if group is None else exchange_rows(sent, rows, group)


class FullTensorNeeds(NamedTuple):
    """`names`: the parameters that an optimizer needs as full tensors. `in_block` maps every trained parameter to
    whether it is in a block. `groups` maps it to the index of its optimizer group."""

    names: frozenset[str]
    in_block: Mapping[str, bool]
    groups: Mapping[str, int]

    @classmethod
    def from_groups(cls, groups: ParamGroups, rule: UpdateRule) -> FullTensorNeeds:
        """Returns the parameters of `groups` that the update rule `rule` needs as full tensors."""
        whole = frozenset(
            name for name, shape in groups.shapes.items() if rule.needs_full(shape, groups.in_block[name])
        )
        return cls(whole, groups.in_block, groups.group_of)


NO_FULL_TENSORS = FullTensorNeeds(frozenset(), {}, {})


def make_full_tensor_steps(
    trained: Sequence[FlatParamGroup], shards: ShardTable, needs: FullTensorNeeds
) -> dict[int, FullTensorStep]:
    """Returns a `FullTensorStep` for each flat parameter group in `trained` whose tensors the optimizer needs in full.
    The keys are the `id` of the group. The optimizer needs either all tensors of a flat group in full, or none."""
    steps: dict[int, FullTensorStep] = {}
    parts: dict[int, list[tuple[FlatParamGroup, list[TensorLayout]]]] = {}
    for unit in trained:
        if needs.names & unit.parameters.keys():
            assert needs.names >= unit.parameters.keys(), "only some tensors of a flat group are needed in full"
            parts.setdefault(id(unit.placement), []).append(
                (unit, [_tensor_layout(shards.params[name], unit, name) for name in unit.layout.offsets])
            )
    for layouts in parts.values():
        sharing = layouts[0][0].placement
        ranks = 1 if sharing.tensor_group is None else sharing.tensor_group.size
        # Tensors are counted by name, because a rank with the first and the last stage has two replicas of a tied
        # weight.
        copies: dict[str, TensorLayout] = {part.name: part for _, each in layouts for part in each}
        owners = assign_owners(list(copies.values()), sharing.shards, ranks)
        for unit, each in layouts:
            steps[id(unit)] = FullTensorStep(unit, each, owners, needs.in_block)
    return steps


def _tensor_layout(spec: ShardSpec, unit: FlatParamGroup, name: str) -> TensorLayout:
    split = spec.tp_split
    intervals = () if split is None else tuple(spec.intervals(rank) for rank in range(spec.tp_ranks))
    return TensorLayout(name, unit.layout.offsets[name], spec.global_shape, split.dim if split else 0, intervals)
