"""Finds out how the ranks of a recording divide the batch, the modules and the parameters.

Ranks that record the first module of the model receive the data. Those with equal inputs form one replica, unless their
engine says that they are different replicas. Ranks that record only later modules are pipeline stages. They are
assigned to the replicas in the order of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from meshwright.interop.recording.layout import region_key
from meshwright.interop.recording.sequence import DividedSequences
from meshwright.interop.recording.trace_format import (
    RankTrace,
    RecordedMicroBatch,
    RecordedOutput,
    RecordedStep,
    TensorRegion,
)
from meshwright.interop.recording.tree import decode_tree


class Source(NamedTuple):
    """A micro-batch of a replica: the first rank of the replica and the index of the micro-batch."""

    rank: int
    micro: int


class OutputNeed(NamedTuple):
    """The form of a local output: its shape, its region if it is a DTensor, and the ranges of its last dimension if the
    weight of its module is sharded, and the rank if the sequence is divided over ranks."""

    shape: tuple[int, ...]
    region: TensorRegion | None = None
    features: tuple[tuple[int, int], ...] = ()
    part_of: int = -1


class RecordedTopology:
    """The roles of the ranks. `paths` are the modules of the full model, in order. `canonical` maps the names of
    parameters, with those of tied weights, to the name in the full model."""

    def __init__(self, traces: list[RankTrace], paths: Sequence[str], canonical: Mapping[str, str]) -> None:
        self.traces, self.canonical = traces, canonical
        self.positions = {path: at for at, path in enumerate(paths)}
        self.mask_forms: dict[tuple[int, Source, int], bool] = {}
        """Whether each dropout of several ranks has the full tensor on each rank, otherwise it has shards."""
        self.sequences = DividedSequences(traces)
        self._needs: dict[int, dict[tuple[str, int], set[OutputNeed]]] = {}

    def recorded(self, rank: int, step: int) -> RecordedStep:
        """Returns a step of a rank."""
        return self.traces[rank].header.steps[step]

    @cached_property
    def stages(self) -> list[list[int]]:
        """Returns the ranks of each pipeline stage, the first stage first."""
        found: dict[int, list[int]] = defaultdict(list)
        # a module without parameters of its own, such as a sequence of layers, may be in every stage
        owners = {name.rpartition(".")[0] for name in self.canonical}
        for rank, trace in enumerate(self.traces):
            paths = _output_paths(trace) & self.positions.keys()
            found[min((self.positions[path] for path in paths & owners or paths), default=0)].append(rank)
        return [found[position] for position in sorted(found)]

    @cached_property
    def divided(self) -> list[set[str]]:
        """Returns, for each rank, the modules of which other stages have a part. Their outputs are not those of the
        full model."""
        own = [set().union(*(_output_paths(self.traces[rank]) for rank in stage)) for stage in self.stages]
        outer = [_containers(paths) for paths in own]
        found: list[set[str]] = [set() for _ in self.traces]
        for at, stage in enumerate(self.stages):
            others = set().union(*(outer[:at] + outer[at + 1 :]))
            for rank in stage:
                found[rank] = own[at] & others
        return found

    @cached_property
    def replicas(self) -> list[list[int]]:
        """Returns the ranks of each replica, in the order of stages."""
        groups: dict[Any, list[int]] = {}
        for rank in self.stages[0]:
            header = self.traces[rank].header
            key = (header.replica, *(micro.key for step in header.steps for micro in step.micro_batches))
            groups.setdefault(key, []).append(rank)
        found = self._join_sequence_ranks(list(groups.values()))
        for stage in self.stages[1:]:
            size = max(1, len(stage) // len(found))
            for at, replica in enumerate(found):
                replica += stage[at * size : (at + 1) * size]
        return found

    def _join_sequence_ranks(self, groups: list[list[int]]) -> list[list[int]]:
        """Returns the groups, those joined whose ranks divide a sequence."""
        found: list[set[int]] = []
        for group in groups:
            joined = set(group).union(*(self.sequences.ranks(rank) for rank in group))
            for other in [each for each in found if each & joined]:
                found.remove(other)
                joined |= other
            found.append(joined)
        return sorted(sorted(each) for each in found)

    def arguments(self, step: int, source: Source) -> Any:
        """Returns the recorded arguments of the model for a micro-batch, of the full sequence."""

        def read(rank: int) -> Any:
            micro = self.recorded(rank, step).micro_batches[source.micro]
            return decode_tree(micro.inputs, self.traces[rank].tensor)

        return self.sequences.join(source.rank, read)

    def extra(self, step: int, source: Source) -> dict[str, Any]:
        """Returns the entries that the loop has added to a micro-batch, of the full sequence."""

        def read(rank: int) -> Any:
            tree = self.recorded(rank, step).micro_batches[source.micro].extra
            return {} if tree is None else decode_tree(tree, self.traces[rank].tensor)

        found: dict[str, Any] = {}
        for rank in self.chain(step, source):
            found |= self.sequences.join(rank, read)
        return found

    def sources(self, step: int) -> list[Source]:
        """Returns all micro-batches of a step."""
        return [
            Source(replica[0], micro)
            for replica in self.replicas
            for micro in range(len(self.recorded(replica[0], step).micro_batches))
        ]

    def chain(self, step: int, source: Source) -> list[int]:
        """Returns the ranks that compute a micro-batch."""
        replica = next(each for each in self.replicas if each[0] == source.rank)
        return [rank for rank in replica if source.micro < len(self.recorded(rank, step).micro_batches)]

    def source_of(self, rank: int, micro: int) -> Source | None:
        """Returns the micro-batch `micro` of the replica of a rank."""
        return next((Source(replica[0], micro) for replica in self.replicas if rank in replica), None)

    def peers(self, rank: int) -> list[int]:
        """Returns the ranks of the same stage and replica, which share the work of each micro-batch."""
        stage = next(stage for stage in self.stages if rank in stage)
        replica = next((replica for replica in self.replicas if rank in replica), [rank])
        return [each for each in stage if each in replica]

    def micro_batch(self, step: int, source: Source) -> RecordedMicroBatch:
        """Returns the recording of a micro-batch on the rank that has its data."""
        return self.recorded(source.rank, step).micro_batches[source.micro]

    def targets(self, step: int, source: Source) -> list[tuple[torch.Tensor, int, float]]:
        """Returns the recorded labels of a micro-batch: labels, ignored label and label smoothing of each loss."""
        for rank in reversed(self.chain(step, source)):
            losses = self.recorded(rank, step).micro_batches[source.micro].losses
            if losses:
                return [(self.traces[rank].tensor(each.target), each.ignored, each.smoothing) for each in losses]
        return []

    # --- forms of tensors -------------------------------------------------------------------------

    def need(self, rank: int, output: RecordedOutput) -> OutputNeed:
        """Returns the form of a recorded output."""
        if output.region is not None:
            return OutputNeed(output.shape, output.region)
        ranges = self._weights.get((rank, output.path))
        wide = sum(end - start for start, end in ranges) if ranges else 0
        features = ranges if ranges and output.shape[-1:] == (wide,) else ()
        return OutputNeed(output.shape, None, features, rank if rank in self.sequences.places else -1)

    @cached_property
    def _weights(self) -> dict[tuple[int, str], tuple[tuple[int, int], ...]]:
        """Returns, for each rank and module whose weight is sharded by rows, the ranges of rows."""
        return {
            (rank, piece.name.rpartition(".")[0]): piece.region.ranges[0]
            for rank, trace in enumerate(self.traces)
            if not trace.header.engine.startswith("FSDP")
            for piece in trace.header.pieces
            if piece.name.endswith(".weight") and piece.region.ranges and len(piece.region.shape) == 2
            if piece.region.ranges[0] != ((0, piece.region.shape[0]),)
        }

    def needs(self, step: int) -> dict[tuple[str, int], set[OutputNeed]]:
        """Returns the forms of the local outputs of each call of a module."""
        if step not in self._needs:
            found = self._needs[step] = defaultdict(set)
            for rank in range(len(self.traces)):
                for micro in self.recorded(rank, step).micro_batches:
                    for each in micro.outputs:
                        found[each.path, each.call].add(self.need(rank, each))
        return self._needs[step]

    def regions(self) -> dict[str, list[TensorRegion]]:
        """Returns the distinct regions of each parameter."""
        found: dict[str, dict[Any, TensorRegion]] = defaultdict(dict)
        for trace in self.traces:
            for at, piece in enumerate(trace.header.pieces):
                regions = [piece.region, *(step.region(at, piece) for step in trace.header.steps)]
                found[self.canonical[piece.name]] |= {region_key(region): region for region in regions}
        return {name: list(each.values()) for name, each in found.items()}

    # --- dropout ----------------------------------------------------------------------------------

    def dropout_masks(
        self, step: int, source: Source, number: int
    ) -> list[tuple[int, str, tuple[int, ...], torch.Tensor]]:
        """Returns the packed masks of dropout `number` of a micro-batch: rank, module, shape and bits of each rank."""
        chain = self.chain(step, source)
        for stage in self.stages:
            ranks = [rank for rank in stage if rank in chain]
            each = [(rank, self.recorded(rank, step).micro_batches[source.micro].dropouts) for rank in ranks]
            count = min((len(dropouts) for _, dropouts in each), default=0)
            if number < count:
                return [
                    (rank, found[number].path, found[number].shape, self.traces[rank].tensor(found[number].mask))
                    for rank, found in each
                ]
            number -= count
        return []

    def mask(self, step: int, source: Source, number: int, shape: Sequence[int]) -> torch.Tensor | None:
        """Returns the mask of a dropout for the full tensor of `shape`, None if the recorded masks do not fit."""
        found = self.dropout_masks(step, source, number)
        masks = [unpack_mask(bits, local) for _, _, local, bits in found]
        if not masks:
            return None
        whole = masks[0].numel() == torch.Size(shape).numel()
        if len(masks) > 1:
            self.mask_forms[step, source, number] = whole
        if whole:
            return masks[0].view(*shape)
        different = [
            dim for dim in range(len(shape)) if masks[0].ndim == len(shape) and masks[0].shape[dim] != shape[dim]
        ]
        if len(different) == 1 and sum(mask.shape[different[0]] for mask in masks) == shape[different[0]]:
            return self.sequences.sort([rank for rank, *_ in found], torch.cat(masks, different[0]), different[0])
        return None


def _output_paths(trace: RankTrace) -> set[str]:
    """Returns the modules whose outputs a rank has recorded, without the model itself."""
    return {each.path for micro in trace.header.steps[0].micro_batches for each in micro.outputs} - {""}


def _containers(paths: Collection[str]) -> set[str]:
    """Returns the modules that contain the modules `paths`."""
    return {path[:at] for path in paths for at, letter in enumerate(path) if letter == "."}


def unpack_mask(bits: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the mask of a dropout, one bool for each element, from its bits."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=torch.Size(shape).numel()).astype(bool)).view(shape)
