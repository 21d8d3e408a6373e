"""Defines the state of a run on one rank: engine, optimizer, completed steps and samples, and loss scale. The trainer
derives from it.

Dynamic loss scaling for fp16: the loss is multiplied by a factor, so that small gradients do not become zero. The
factor starts at 2^16. If a gradient overflows, the update is skipped and the factor is halved, but not below 1. After
GROWTH_INTERVAL_STEPS steps without an overflow, the factor is doubled (Micikevicius et al., Mixed Precision Training,
2018). The gradient norm is equal on all ranks, so all ranks make the same decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.core.ipc import RankPhase
from meshwright.runtime.engine import Engine
from meshwright.spec.plan import with_default_micro_batch
from meshwright.spec.record import RunState

GROWTH_INTERVAL_STEPS = 2000


@dataclass
class LossScale:
    """The loss scale `factor`, and the number of steps since its last change. If it is not `dynamic`, the factor is
    always 1."""

    dynamic: bool
    factor: float = 1.0
    good_steps: int = 0

    @classmethod
    def start(cls, dynamic: bool) -> LossScale:
        """Returns the loss scale at the beginning of a run."""
        return cls(dynamic, 2.0**16 if dynamic else 1.0)

    def update(self, finite: bool) -> None:
        """Updates the scale after a step. `finite`: whether the gradient was finite."""
        if not self.dynamic:
            return
        if not finite:
            self.factor, self.good_steps = max(self.factor / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps >= GROWTH_INTERVAL_STEPS:
            self.factor, self.good_steps = self.factor * 2, 0


class TrainState:
    """The engine and the optimizer of one rank, and its progress: completed steps, samples and loss scale. Only the
    trainer changes the progress. The training loop may replace the callbacks `on_phase` and `mend`."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, seed: int) -> None:
        self.engine, self.optimizer, self.seed = engine, optimizer, seed
        self.mesh, self.plan = engine.mesh, engine.mesh.plan
        self.scale = LossScale.start(engine.recipe.loss_scaling)
        self.steps = self.samples = 0
        self.on_phase: Callable[[RankPhase], None] = lambda phase: None
        """The trainer calls it when a phase begins: backward, reduce, agree or update, and around a proof also prove
        and data. The phase `agree` ends when all ranks have begun it."""
        self.mend: Callable[[], bool] = lambda: False
        """Repairs replicas that differ from the majority (silent_corruption.py). Returns whether any was repaired."""

    def set_micro_batch(self, rows: int) -> None:
        """Sets the size of the micro-batches for a global batch of `rows` rows (`with_default_micro_batch`). All ranks
        call it between steps."""
        self.plan = with_default_micro_batch(self.plan, rows)
        self.mesh = self.engine.executor.set_plan(self.plan)

    @property
    def run_state(self) -> RunState:
        """Returns the run state that a checkpoint stores."""
        return RunState(
            step=self.steps,
            samples=self.samples,
            seed=self.seed,
            plan=self.plan.name,
            loss_scale=self.scale.factor,
            good_steps=self.scale.good_steps,
        )
