"""Copies of the same state on several ranks, compared by digest: a bit that flipped in one of them is found, voted out,
and mended in place.

Rule: ranks that hold the same states (and at ZeRO 1 and 2 the same whole weights) tell each other one digest each.
Where they differ the most
frequent one is right, if more than half have it; the others take the tensors from its first holder, byte for byte.
Without a majority
nobody can say which is right: the run ends, and the last checkpoint that was saved while they agreed is what to go on
from. What is held
once (the shards of ZeRO with one replica) has nothing to be compared with.
Source: the loss of silent data corruption in Dixit et al., Silent Data Corruptions at Scale, 2021, for the reason.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import xxhash

from meshwright.checkpoint.safetensors_writer import tensor_bytes
from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.comm.group import CommGroup
from meshwright.train.step_invariants import ReplicaMismatch
from meshwright.train.trainer import Trainer
from meshwright.train.trainer_state import rank_exchange

INTEGER_DTYPE_BY_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_ELEMENTS = 1 << 22
"""Elements that are looked at in one go on a device: a hundred MiB beside them."""


class ReplicaRepair(NamedTuple):
    """`ranks` held a wrong copy of `what` and have a right one now."""

    what: str
    ranks: tuple[int, ...]
    step: int

    @property
    def line(self) -> str:
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return f"step {self.step}: the {self.what} differed: {who} held wrong ones and has right ones now"


class _ReplicatedState(NamedTuple):
    what: str
    group: CommGroup
    tensors: list[torch.Tensor]

    @property
    def key(self) -> str:
        return f"{self.what} of ranks {', '.join(map(str, self.group.ranks))}"


def compare_replicas(trainer: Trainer) -> list[ReplicaRepair]:
    """Between two steps, on every rank. Raises Diverged on all of them."""
    trainer.engine.zero.quiesce()
    held = list(_replicated_states(trainer))
    ranks = rank_exchange(trainer.mesh)
    answers = [
        json.loads(text)
        for text in ranks.all_gather(json.dumps({each.key: tensors_digest(each.tensors) for each in held}))
    ]
    votes: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, answer in enumerate(answers):
        for key, digest in answer.items():
            votes[key][rank] = digest
    mended = []
    for key, by_rank in sorted(votes.items()):
        (right, count), *_ = Counter(by_rank.values()).most_common(1)
        wrong = tuple(rank for rank, digest in by_rank.items() if digest != right)
        if not wrong:
            continue
        if 2 * count <= len(by_rank):
            raise ReplicaMismatch(
                f"the {key} differ after step {trainer.steps} and there is no majority to say which is right: "
                "a bit has flipped; the same command goes on from the last checkpoint"
            )
        mended.append(ReplicaRepair(key, wrong, trainer.steps))
        mine = next((each for each in held if each.key == key), None)
        if mine is not None:
            source = next(rank for rank, digest in by_rank.items() if digest == right)
            _repair_tensors(mine, trainer.mesh.rank in wrong, trainer.mesh.rank == source)
    if mended:
        for unit in trainer.engine.zero.units:
            unit.copy_to_params()
            unit.all_gather_params().wait()  # others hold what was gathered from a wrong one
    return mended


def repair_replicas(trainer: Trainer, say: Callable[[str, int, int], None]) -> bool:
    """Compare, `say` what was mended (line, step, rank), and return whether anything was."""
    found = compare_replicas(trainer)
    for each in found:
        say(each.line, each.step, each.ranks[0])
    return bool(found)


def _replicated_states(trainer: Trainer) -> Iterator[_ReplicatedState]:
    """What this rank has alike with others: masters and states by who holds the same, and whole weights that shards
    were gathered into."""
    units = trainer.engine.zero.units
    for sharing in {id(unit.placement): unit.placement for unit in units}.values():
        own = [unit for unit in units if unit.placement is sharing]
        if sharing.replicate_group is not None:
            kept = [(unit.optim_shard.parts, *unit.optim_shard.state_parts(trainer.optimizer).values()) for unit in own]
            states = [tensor for kinds in kept for parts in kinds for tensor in parts]
            yield _ReplicatedState("states", sharing.replicate_group, states)
        if sharing.shard_group is not None and trainer.plan.zero < 3:
            yield _ReplicatedState("weights", sharing.shard_group, [unit.weights for unit in own])


def tensors_digest(tensors: list[torch.Tensor]) -> str:
    """Of all their bytes; of what lies on a device two sums for each, made there: bringing 16 GB to the host takes
    seconds."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor_bytes(tensor if backend_of(tensor.device).memory_is_host else bit_sums(tensor)))
    return digest.hexdigest()


def bit_sums(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of its elements' bits, and that of each times an odd number of its place: whole numbers modulo 2^64, the
    same in any order.
    A bit that flips changes the first; others, unless as much is added here as taken away there, and then the
    second."""
    words = tensor.detach().reshape(-1).view(INTEGER_DTYPE_BY_BYTES[tensor.element_size()])
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), CHUNK_ELEMENTS):
        part = words[first : first + CHUNK_ELEMENTS].to(torch.int64)
        odd = torch.arange(2 * first + 1, 2 * (first + len(part)) + 1, 2, device=tensor.device)
        found += torch.stack([part.sum(), (part * odd).sum()])
    return found


def _repair_tensors(held: _ReplicatedState, wrong: bool, source: bool) -> None:
    """Every rank of the group takes part; the bytes of all but the source count as zero."""
    for tensor in held.tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        bytes_ = flat.clone() if source else torch.zeros_like(flat)
        all_reduce(bytes_, held.group).wait()
        if wrong:
            flat.copy_(bytes_)
