"""Detects silent data corruption (SDC), such as flipped bits. It compares replicas of states and recomputes suspicious
gradients. The training loop and the trainer use it.

Replica check. Ranks that store replicas of states (main weights and optimizer states) exchange digests of their states.
Below ZeRO 3, ranks that store the same full weights also exchange digests of the weights. If digests differ, the digest
that more than half of the ranks have is taken as right. The other ranks receive the tensors from the first rank with
this digest. Without a majority, the run ends with an error. It can then be resumed from the last checkpoint, which was
saved while the replicas agreed. A state that only one rank stores cannot be checked.

`SdcRecompute`. A gradient is suspicious if it is not finite, or if its norm exceeds SUSPICIOUS_NORM_RATIO times the
median of recent norms. Before the update, a suspicious gradient is computed a second time from the same rows and random
states. The gradient of every step whose index is a multiple of `every` is also computed twice. On CPUs, and on
accelerators with `run.deterministic`, the computation is deterministic, so without corruption both gradients are
bit-identical. If they differ, the gradient is computed a third time, and the result that occurs twice is used.

Without `run.deterministic`, kernels of accelerators may add in another order each time, for example the backward of
FlashAttention-2, which adds atomically. Then two gradients count as equal if the norms of all shards differ by at most
RECOMPUTE_TOLERANCE.

In a step that is computed twice and compared bit by bit, every bit flip that changes the gradient is detected. In other
steps, a flip is detected only if it makes the gradient large. Errors that a device repeats in each computation are not
detected. Only one gradient is in memory at a time; of the earlier gradients of the step, only digests or norms are
stored.

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
"""`bit_sums` processes this number of elements at a time, which needs about 100 MiB of extra memory."""


class ReplicaRepair(NamedTuple):
    """A repair after step `step`: the values of `what` on `ranks` were wrong and have been replaced."""

    what: str
    ranks: tuple[int, ...]
    step: int

    @property
    def line(self) -> str:
        """Returns the line about the repair for the user."""
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
        """Returns a key that is unique over all process groups, and equal on the ranks of one group."""
        return Message("{what} of ranks {ranks}", what=self.what, ranks=", ".join(map(str, self.group.ranks)))


def compare_replicas(state: TrainState) -> list[ReplicaRepair]:
    """Compares the replicas of states and repairs wrong ones by majority. All ranks call it between two steps. Without
    a majority it raises ReplicaMismatch on all ranks."""
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
            unit.weights.all_gather().wait()  # an earlier all-gather may have spread the wrong weights of a shard
    return mended


def repair_replicas(state: TrainState, say: Callable[[str, int, int], None]) -> bool:
    """Compares and repairs replicas (`compare_replicas`). Calls `say` for each repair, with the line for the user, the
    step and the first repaired rank. Returns whether any replica was repaired."""
    found = compare_replicas(state)
    for each in found:
        say(each.line, each.step, each.ranks[0])
    return bool(found)


def _replicated_states(state: TrainState) -> Iterator[_ReplicatedState]:
    """Yields the states that other ranks also store. Main weights and optimizer states are replicated over replica
    groups, full weights over shard groups."""
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
    """Returns one hexadecimal digest of all tensors. Tensors in host memory are hashed. For a tensor on an accelerator,
    its two `bit_sums` are hashed, which the accelerator computes: a transfer of 16 GB to the host would take
    seconds."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor_bytes(tensor if backend_of(tensor.device).memory_is_host else bit_sums(tensor)))
    return digest.hexdigest()


def bit_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Returns two int64 sums modulo 2^64 over the elements of `tensor`, whose bits are read as integers. The first sum
    adds the integers. The second sum first multiplies the integer at index i by 2 i + 1. One flipped bit changes the
    first sum. The second sum reveals two flips that cancel in the first.
    """
    words = tensor.detach().reshape(-1).view(INTEGER_DTYPE_BY_BYTES[tensor.element_size()])
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), CHUNK_ELEMENTS):
        part = words[first : first + CHUNK_ELEMENTS].to(torch.int64)
        odd = torch.arange(2 * first + 1, 2 * (first + len(part)) + 1, 2, device=tensor.device)
        found += torch.stack([part.sum(), (part * odd).sum()])
    return found


def _repair_tensors(state: _ReplicatedState, wrong: bool, source: bool) -> None:
    """Overwrites the tensors of wrong ranks with those of the source rank. All ranks of the group call it. `wrong`:
    whether this rank has wrong values. `source`: whether this rank is the source. The values are sent by an all-reduce,
    to which all other ranks contribute zeros."""
    for tensor in state.tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        bytes_ = flat.clone() if source else torch.zeros_like(flat)
        all_reduce(bytes_, state.group).wait()
        if wrong:
            flat.copy_(bytes_)


SUSPICIOUS_NORM_RATIO = 8.0
"""A gradient is suspicious if its norm exceeds the median of recent norms times this ratio."""

NORM_HISTORY_STEPS, MIN_NORM_HISTORY_STEPS = 32, 8
"""The median covers the last NORM_HISTORY_STEPS finite norms. It is used only if there are at least
MIN_NORM_HISTORY_STEPS norms."""

RECOMPUTE_TOLERANCE = 1e-2
"""Maximum relative difference of the norms of one shard in two computations, if kernels are not deterministic. The
order of additions changes a norm in bfloat16 by less. A flip of a high exponent bit changes it by more."""


class SdcRecompute:
    """Recomputes suspicious gradients on one rank. The norm is equal on all ranks, so all ranks make the same decision.
    `every`: the number of steps between unconditional recomputes; 0 means none. `say` receives a step and a line for
    the user."""

    def __init__(self, every: int, say: Callable[[int, str], None]) -> None:
        self.every, self.say = every, say
        self._usual: deque[float] = deque(maxlen=NORM_HISTORY_STEPS)
        self._off = False

    def settled(self, state: TrainState, compute: Callable[[], GradientSums]) -> GradientSums:
        """Runs `compute` (forward and backward of the step). Runs it a second time if the gradient is suspicious or due
        for a check, and a third time if the results differ. Returns the result that occurs twice, or the only result.
        The gradients of this result are in the flat buffers. If three computations differ, the last result is used and
        later gradients are not checked. If a step cannot be computed twice (`recompute_obstacle`), it is not checked.
        """
        if self._off or recompute_obstacle(state):
            return compute()
        random = _random_states(state)
        found = compute()
        step, norm = state.steps + 1, _gradient_norm(found, state)
        if self._asks(step, norm, state.scale.dynamic):
            tries: list[str | torch.Tensor] = [_gradient_fingerprint(state)]
            for _ in range(2):
                _restore_random_states(state, random)
                found = compute()
                tries.append(_gradient_fingerprint(state))
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
        """Returns whether the gradient of the step must be recomputed. `overflows`: whether the loss scale is dynamic.
        It may then overflow, so a gradient that is not finite is expected."""
        if not math.isfinite(norm):
            return not overflows
        return (self.every > 0 and step % self.every == 0) or (
            len(self._usual) >= MIN_NORM_HISTORY_STEPS and norm > SUSPICIOUS_NORM_RATIO * median(self._usual)
        )


def recompute_obstacle(state: TrainState) -> str:
    """Returns why the gradient of a step cannot be computed twice, or ''. The reason is some state that the first
    computation changes."""
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


def _gradient_fingerprint(state: TrainState) -> str | torch.Tensor:
    """Returns the digest of this rank's gradient, or the norms of its shards if kernels may add in another order each
    time."""
    shards = [unit.gradients.shard for unit in state.engine.zero.trainable]
    if backend_of(state.mesh.device).memory_is_host or torch.are_deterministic_algorithms_enabled():
        return tensors_digest(shards)
    return torch.stack([torch.linalg.vector_norm(shard, dtype=torch.float64) for shard in shards])


def _is_same(one: str | torch.Tensor, other: str | torch.Tensor) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return torch.allclose(one, other, rtol=RECOMPUTE_TOLERANCE, atol=0.0, equal_nan=True)


def _matches_earlier(tries: list[str | torch.Tensor], state: TrainState) -> bool:
    """Returns whether an earlier result equals the last result, on every rank. All ranks call it. `tries`: this rank's
    fingerprints."""
    same = [_is_same(tries[-1], earlier) for earlier in tries[:-1]]
    differs = torch.tensor([float(not each) for each in same], device=state.mesh.device)
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
