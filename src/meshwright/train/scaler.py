"""Dynamic loss scaling for fp16: the loss is multiplied so that small gradients survive; an overflow halves the factor and skips the step.

Rule: start at 2^16, halve on overflow, double after 2,000 steps without one (Micikevicius et al., Mixed Precision Training, 2018).
All ranks see the same norm and so decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL = 2000


@dataclass
class LossScale:
    """The factor and the steps since it last changed. Without scaling the factor is 1 for ever."""

    dynamic: bool
    factor: float = 1.0
    good_steps: int = 0

    @classmethod
    def start(cls, dynamic: bool) -> LossScale:
        return cls(dynamic, 2.0**16 if dynamic else 1.0)

    def update(self, finite: bool) -> None:
        if not self.dynamic:
            return
        if not finite:
            self.factor, self.good_steps = max(self.factor / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps >= INTERVAL:
            self.factor, self.good_steps = self.factor * 2, 0
