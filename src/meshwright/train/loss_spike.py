"""Loss spikes: detection within three steps, rollback, and permanent exclusion of the batches that may have caused
them.

Rule: a step is high in either of two cases:
- Its loss is not finite, or exceeds the median m of the last MEDIAN_WINDOW_STEPS ordinary steps by more than
  max(MIN_SPREAD_RATIO * s, MIN_RELATIVE_RISE * |m|). Here s = 1.4826 times the median distance from m.
- Its gradient is not finite, unless a dynamic loss scale may still overflow.

SPIKE_STEPS high steps in a row are a spike. A bad batch alone makes one high step, so it is not a spike. If the weights
are damaged, the loss stays high. After a spike the run rolls back to the newest valid checkpoint on disk that was saved
before the update that led to the first high step. Then it continues without the batches of this update and of the high
steps. The excluded batches are part of the saved state, so they stay excluded. If the run rolls back to the same
checkpoint more than MAX_ROLLBACKS times, it ends. If no checkpoint is old enough, training continues with a note.

All ranks see the same losses and make the same decision. Since only the losses decide, a run that dies before it rolls
back makes the same decision after its restart. Source: Chowdhery et al., PaLM, 2022, section 5.1. The authors roll back
about 100 steps and skip batches. The skipped batches caused no spike when they were used at another point of the
training.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.core.messages import Message
from meshwright.spec.record import StepRecord

MEDIAN_WINDOW_STEPS = 32
MIN_SPREAD_RATIO, MIN_RELATIVE_RISE = 8.0, 0.2
SPIKE_STEPS = 3
MAX_ROLLBACKS = 3
"""The largest number of rollbacks to the same checkpoint."""


class LossSpikeDetector:
    """Observes the loss of each step. Its state is `state["guard"]`, a part of every checkpoint."""

    def __init__(self, state: dict[str, Any], watches: bool, scaled: bool) -> None:
        """`watches`: whether spikes are detected. `scaled`: whether the loss scale is dynamic. A dynamic loss scale
        overflows at times, so gradients that are not finite are then expected."""
        self.state, self.watches, self.scaled = state, watches, scaled
        self.back: dict[int, int] = {}
        self.read({})

    def read(self, saved: dict[str, Any]) -> None:
        """Restores the detector's state that was saved with a step."""
        self._losses = deque[float](saved.get("losses", ()), maxlen=MEDIAN_WINDOW_STEPS)
        self._high = int(saved.get("high", 0))
        self.left_out: list[tuple[int, int]] = [(first, stop) for first, stop in saved.get("left_out", ())]
        """Excluded batches, in the order of the data, as disjoint ranges [first, stop) that do not touch."""
        self._write()

    def _write(self) -> None:
        if self.watches or self.left_out:
            self.state["guard"] = {"losses": list(self._losses), "high": self._high, "left_out": self.left_out}

    @property
    def is_spike(self) -> bool:
        """Returns whether the last SPIKE_STEPS steps were all high."""
        return self.watches and self._high >= SPIKE_STEPS

    def heed(self, record: StepRecord) -> None:
        """Updates the state with the record of a step. Called after each step."""
        if not self.watches:
            return
        if self._is_high(record):
            self._high += 1
        else:
            self._high = 0
            self._losses.append(record.loss)
        self._write()

    def _is_high(self, record: StepRecord) -> bool:
        if not math.isfinite(record.loss) or (record.skipped and not self.scaled):
            return True
        if len(self._losses) < MEDIAN_WINDOW_STEPS:
            return False
        middle = median(self._losses)
        spread = 1.4826 * median(abs(loss - middle) for loss in self._losses)
        return record.loss - middle > max(MIN_SPREAD_RATIO * spread, MIN_RELATIVE_RISE * abs(middle))

    def before(self, step: int) -> int:
        """Returns the last step before the update that led to the spike detected after `step`."""
        return step - self._high - 1

    def forget(self) -> None:
        """Accepts the current level of the loss as ordinary. Called where no checkpoint is old enough."""
        self._losses.clear()
        self._high = 0
        self._write()

    def goes_back(self, to: int, step: int, left_out: list[tuple[int, int]], batches: tuple[int, int]) -> str:
        """Excludes batches after a rollback from `step` to step `to`. `batches` is the range [first, stop) of the
        batches to exclude. `left_out` are the ranges that were already excluded at `step`. Returns the line for the
        user. Raises MeshwrightError after more than MAX_ROLLBACKS rollbacks to the same step."""
        self.back[to] = self.back.get(to, 0) + 1
        if self.back[to] > MAX_ROLLBACKS:
            raise MeshwrightError(
                Message(
                    "the loss has risen again after step {to}, although batches were left out {max_rollbacks} times: "
                    "use a smaller learning rate, or workload.spikes=keep to train on",
                    to=to,
                    max_rollbacks=MAX_ROLLBACKS,
                )
            )
        self._leave_out(left_out, batches)
        return Message(
            "step {step}: the loss has risen: the run goes back to the checkpoint of step {to} and leaves out "
            "batches {batches} to {batches_2}",
            step=step,
            to=to,
            batches=batches[0],
            batches_2=batches[1] - 1,
        )

    def _leave_out(self, left_out: list[tuple[int, int]], batches: tuple[int, int]) -> None:
        merged: list[tuple[int, int]] = []
        for first, stop in sorted([*left_out, batches]):
            if merged and first <= merged[-1][1]:
                first, stop = merged[-1][0], max(stop, merged.pop()[1])
            merged.append((first, stop))
        self.left_out = merged
        self._write()
