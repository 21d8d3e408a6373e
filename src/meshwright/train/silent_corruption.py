"""Detects silent data corruption: compares replicas of states, and computes suspicious gradients once more.

Replica check: ranks compare the digests of replicated states. A replica with a flipped bit is outvoted by the majority
and repaired in place.

Rule: ranks that store replicas of the same states exchange one digest each. At ZeRO 1 and 2, ranks with the same full
weights also exchange digests of these. If digests differ, the digest of more than half of the ranks is taken as right.
The other ranks receive the tensors from the first rank with this digest. Without a majority the run ends. It resumes
from the last checkpoint that was saved while the replicas agreed. States without a replica (ZeRO shards of a single
replica) cannot be compared.

Source on the damage of silent corruption: Dixit et al., Silent Data Corruptions at Scale, 2021.

`SdcRecompute` computes a suspicious gradient once more before the update uses it.

Rule: a gradient is suspicious if it is not finite, or if its norm exceeds SUSPICIOUS_NORM_RATIO times the median of
recent norms. A step with a suspicious gradient computes the gradient again, with the same rows and random states. A
step whose index is a multiple of `every` also does this. The computation is deterministic, so without corruption the
two gradients are equal bit for bit, and the update follows. If they differ, the gradient is computed a third time, and
the result that occurs twice is used.

In a step that is computed twice, every bit flip that changes the gradient is detected. In other steps, only flips that
make the gradient large are detected. Errors that a device repeats each time are not detected. Memory contains one
gradient at a time, and digests of the earlier gradients of the step.

Sources: Dixit et al., Silent Data Corruptions at Scale, 2021. On recomputing suspicious gradients: He et al.,
Understanding and Mitigating Hardware Failures in Deep Learning Training Systems, ISCA 2023. In that study, most lasting
errors appear as large gradients or states.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch
import xxhash

from meshwright.checkpoint.safetensors_writer import tensor_bytes
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.comm.group import CommGroup
from meshwright.train.step.invariants import ReplicaMismatch
from meshwright.train.step.passes import GradientSums
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
            "step {step}: the {what} differed: {who} had wrong values, which are now repaired",
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
                    "the {key} differ after step {steps} and no majority shows which are right: a bit has flipped; "
                    "the same command goes on from the last checkpoint",
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


SUSPICIOUS_NORM_RATIO = 8.0
"""A gradient is suspicious if its norm exceeds the median of recent norms times this ratio."""

NORM_HISTORY_STEPS, MIN_NORM_HISTORY_STEPS = 32, 8
"""The number of norms in the median, and the smallest number of norms for which the median is used."""


class SdcRecompute:
    """Recomputes suspicious gradients on one rank. All ranks see the same norm and make the same decision. `every`: the
    number of steps between unconditional recomputes; 0 means none. `say` receives the step and a line for the user."""

    def __init__(self, every: int, say: Callable[[int, str], None]) -> None:
        self.every, self.say = every, say
        self._usual: deque[float] = deque(maxlen=NORM_HISTORY_STEPS)
        self._off = False

    def settled(self, state: TrainState, compute: Callable[[], GradientSums]) -> GradientSums:
        """Returns the verified result of `compute`, the step's passes. The verified gradients are in the flat
        buffers."""
        if self._off or recompute_obstacle(state):
            return compute()
        random = _random_states(state)
        found = compute()
        step, norm = state.steps + 1, _gradient_norm(found, state)
        if self._asks(step, norm, state.scale.dynamic):
            tries = [_gradient_digest(state)]
            for _ in range(2):
                _restore_random_states(state, random)
                found = compute()
                tries.append(_gradient_digest(state))
                if _matches_earlier(tries, state):
                    break
            else:
                self._off = True
                self.say(
                    step,
                    Message(
                        "step {step}: three computations of the gradient gave three results: gradients are no longer "
                        "compared",
                        step=step,
                    ),
                )
            if len(tries) == 3 and not self._off:
                line = Message("step {step}: a second computation of the gradient gave another result", step=step)
                self.say(
                    step,
                    Message(
                        "{line} (norm {norm:.3g}, then {gradient_norm:.3g}): a bit had flipped; the step uses the "
                        "result that two computations gave",
                        line=line,
                        norm=norm,
                        gradient_norm=_gradient_norm(found, state),
                    ),
                )
            norm = _gradient_norm(found, state)
        if math.isfinite(norm):
            self._usual.append(norm)
        return found

    def _asks(self, step: int, norm: float, overflows: bool) -> bool:
        """Returns whether the step is recomputed. `overflows`: whether the loss scale may overflow. Gradients that are
        not finite are then expected, and all ranks skip such steps."""
        if not math.isfinite(norm):
            return not overflows
        return (self.every > 0 and step % self.every == 0) or (
            len(self._usual) >= MIN_NORM_HISTORY_STEPS and norm > SUSPICIOUS_NORM_RATIO * median(self._usual)
        )


def recompute_obstacle(state: TrainState) -> str:
    """Returns why gradients cannot be computed twice (the first pass changes some state), or '' where they can."""
    engine = state.engine
    if engine.statistics:
        return Message("{statistics} is a norm with batch statistics", statistics=engine.statistics)
    if engine.preflight.once.names:
        return Message("each pass changes the buffer {names}", names=min(engine.preflight.once.names))
    if engine.mesh.state_swapper is not None:
        return Message("the plan offloads states")
    if any(way is not None for unit in engine.zero.trainable for way in unit.compressors):
        return Message("gradients are compressed")
    return ""


def _gradient_norm(found: GradientSums, state: TrainState) -> float:
    return math.sqrt(sum(found[2])) / state.scale.factor


def _gradient_digest(state: TrainState) -> str:
    return tensors_digest([unit.gradients.shard for unit in state.engine.zero.trainable])


def _matches_earlier(tries: list[str], state: TrainState) -> bool:
    """Returns whether the last result equals the same earlier result on every rank. All ranks call it."""
    differs = torch.tensor([float(tries[-1] != earlier) for earlier in tries[:-1]], device=state.mesh.device)
    all_reduce(differs, state.mesh.world).wait()
    return bool((differs == 0).any())


def _random_states(state: TrainState) -> list[torch.Tensor]:
    device = state.mesh.device
    own = backend_of(device).rng_state(device)
    return [torch.get_rng_state(), *([] if own is None else [own])]


def _restore_random_states(state: TrainState, saved: list[torch.Tensor]) -> None:
    torch.set_rng_state(saved[0])
    for own in saved[1:]:
        backend_of(state.mesh.device).set_rng_state(own, state.mesh.device)
