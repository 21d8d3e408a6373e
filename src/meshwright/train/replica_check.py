"""Replica check: ranks compare the digests of replicated states. A replica with a flipped bit is outvoted by the
majority and repaired in place.

Rule: ranks that store replicas of the same states exchange one digest each. At ZeRO 1 and 2, ranks with the same full
weights also exchange digests of these. If digests differ, the digest of more than half of the ranks is taken as right.
The other ranks receive the tensors from the first rank with this digest. Without a majority the run ends. It resumes
from the last checkpoint that was saved while the replicas agreed. States without a replica (ZeRO shards of a single
replica) cannot be compared.

Source on the damage of silent corruption: Dixit et al., Silent Data Corruptions at Scale, 2021.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import xxhash

from meshwright.checkpoint.safetensors_writer import tensor_bytes
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.comm.group import CommGroup
from meshwright.train.step.invariants import ReplicaMismatch
from meshwright.train.step.state import TrainState
from meshwright.train.trainer_checkpoint import rank_exchange

INTEGER_DTYPE_BY_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_ELEMENTS = 1 << 22
"""The number of elements that a device processes at a time. Processing them takes about 100 MiB of extra memory."""


class ReplicaRepair(NamedTuple):
    """A repair: the replica of `what` on the `ranks` was wrong and has been replaced."""

    what: str
    ranks: tuple[int, ...]
    step: int

    @property
    def line(self) -> str:
        """Returns the line for the user."""
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return Message(
            "step {step}: the {what} differed: {who} held wrong ones and has right ones now",
            step=self.step,
            what=self.what,
            who=who,
        )


class _ReplicatedState(NamedTuple):
    what: str
    group: CommGroup
    tensors: list[torch.Tensor]

    @property
    def key(self) -> str:
        """Returns a key of the states that is unique over all ranks."""
        return Message("{what} of ranks {ranks}", what=self.what, ranks=", ".join(map(str, self.group.ranks)))


def compare_replicas(state: TrainState) -> list[ReplicaRepair]:
    """Compares the replicas between two steps and repairs them by majority. Every rank calls it. If there is no
    majority, it raises ReplicaMismatch on all ranks."""
    state.engine.zero.quiesce()
    stored = list(_replicated_states(state))
    ranks = rank_exchange(state.mesh)
    answers = [
        json.loads(text)
        for text in ranks.all_gather(json.dumps({each.key: tensors_digest(each.tensors) for each in stored}))
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
                Message(
                    "the {key} differ after step {steps} and there is no majority to say which is right: a bit has "
                    "flipped; the same command goes on from the last checkpoint",
                    key=key,
                    steps=state.steps,
                )
            )
        mended.append(ReplicaRepair(key, wrong, state.steps))
        mine = next((each for each in stored if each.key == key), None)
        if mine is not None:
            source = next(rank for rank, digest in by_rank.items() if digest == right)
            _repair_tensors(mine, state.mesh.rank in wrong, state.mesh.rank == source)
    if mended:
        for unit in state.engine.zero.units:
            unit.copy_to_params()
            unit.weights.all_gather().wait()  # a wrong shard may already have reached other ranks by an all-gather
    return mended


def repair_replicas(state: TrainState, say: Callable[[str, int, int], None]) -> bool:
    """Compares the replicas and reports each repair to `say` (line, step, rank). Returns whether it repaired any."""
    found = compare_replicas(state)
    for each in found:
        say(each.line, each.step, each.ranks[0])
    return bool(found)


def _replicated_states(state: TrainState) -> Iterator[_ReplicatedState]:
    """Yields the states that other ranks also store: main weights and optimizer states (replica groups), and full
    weights (shard groups)."""
    units = state.engine.zero.units
    for sharing in {id(unit.placement): unit.placement for unit in units}.values():
        own = [unit for unit in units if unit.placement is sharing]
        if sharing.replicate_group is not None:
            saved = [(unit.optim_shard.parts, *unit.optim_shard.state_parts(state.optimizer).values()) for unit in own]
            states = [tensor for kinds in saved for parts in kinds for tensor in parts]
            yield _ReplicatedState("states", sharing.replicate_group, states)
        if sharing.shard_group is not None and state.plan.zero < 3:
            yield _ReplicatedState("weights", sharing.shard_group, [unit.weights.full for unit in own])


def tensors_digest(tensors: list[torch.Tensor]) -> str:
    """Returns one hexadecimal digest of all tensors. It covers the bytes of a tensor in host memory. For a tensor on an
    accelerator, it covers the two `bit_sums`, which the accelerator computes; a transfer of 16 GB to the host would
    take seconds."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor_bytes(tensor if backend_of(tensor.device).memory_is_host else bit_sums(tensor)))
    return digest.hexdigest()


def bit_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Returns two int64 sums modulo 2^64, which do not depend on the order of summation. The first sum adds the bits of
    each element as an integer. The second sum multiplies each integer by an odd number that depends on its position.
    One flipped bit changes the first sum. If several flips cancel in the first sum, the second sum changes.
    """
    words = tensor.detach().reshape(-1).view(INTEGER_DTYPE_BY_BYTES[tensor.element_size()])
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), CHUNK_ELEMENTS):
        part = words[first : first + CHUNK_ELEMENTS].to(torch.int64)
        odd = torch.arange(2 * first + 1, 2 * (first + len(part)) + 1, 2, device=tensor.device)
        found += torch.stack([part.sum(), (part * odd).sum()])
    return found


def _repair_tensors(state: _ReplicatedState, wrong: bool, source: bool) -> None:
    """Overwrites the tensors of the wrong ranks with those of the source rank, by an all-reduce to which all other
    ranks contribute zeros. Every rank of the group calls it."""
    for tensor in state.tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        bytes_ = flat.clone() if source else torch.zeros_like(flat)
        all_reduce(bytes_, state.group).wait()
        if wrong:
            flat.copy_(bytes_)
