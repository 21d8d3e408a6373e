"""Detection of silent data corruption: a suspicious gradient is recomputed before the update uses it.

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

import math
from collections import deque
from collections.abc import Callable
from statistics import median

import torch

from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.train.replica_check import tensors_digest
from meshwright.train.step.passes import GradientSums
from meshwright.train.step.state import TrainState

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
                        "step {step}: the gradient came out differently three times: gradients are not compared any "
                        "more",
                        step=step,
                    ),
                )
            if len(tries) == 3 and not self._off:
                line = Message("step {step}: the gradient came out differently when it was computed again", step=step)
                self.say(
                    step,
                    Message(
                        "{line} (norm {norm:.3g}, then {gradient_norm:.3g}): a bit had flipped; the step is made with "
                        "what came out twice",
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
        return Message("{statistics} has statistics over the batch", statistics=engine.statistics)
    if engine.preflight.once.names:
        return Message("each pass moves the buffer {names}", names=min(engine.preflight.once.names))
    if engine.mesh.state_swapper is not None:
        return Message("the plan keeps states elsewhere")
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
