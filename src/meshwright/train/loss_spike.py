"""Spikes of the loss: seen within three steps, gone back from, and the batches that they came with left out, for good
and in writing.

Rule: a step is high when its loss is not finite, or exceeds the median m of the last WINDOW ordinary steps by more than
max(SPREAD x s, RISE x |m|), with s =
1.4826 x the median distance from m; or when its gradient was not finite, unless a loss scale is still being found.
IN_ROW high steps in a row
are a spike: one bad batch passes, weights that were hurt do not. The run goes back to the newest valid checkpoint on
disk from before the update
that led to the first high step, and goes on without the batches of that update and of the high steps. What is left out
is part of the state, so
it stays left out whatever happens later. A spike that comes back to the same checkpoint for the time MOST + 1 ends the
run. Where no checkpoint
is old enough it is said, and training goes on.

All ranks see the same losses and decide alike; nothing but the losses decides, so a run that dies on the way decides
the same again.
Source: Chowdhery et al., PaLM, 2022, section 5.1: going back about 100 steps and leaving out batches, which were
harmless at other times.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.spec.record import StepRecord

MEDIAN_WINDOW_STEPS = 32
MIN_SPREAD_RATIO, MIN_RELATIVE_RISE = 8.0, 0.2
SPIKE_STEPS = 3
MAX_ROLLBACKS = 3
"""Times that a run goes back to one checkpoint."""


class LossSpikeDetector:
    """Hears each step. Its state lies in `kept["guard"]`, which checkpoints and copies hold."""

    def __init__(self, kept: dict[str, Any], watches: bool, scaled: bool) -> None:
        """`watches`: high steps are looked for. `scaled`: gradients that are not finite are part of finding the loss
        scale."""
        self.kept, self.watches, self.scaled = kept, watches, scaled
        self.back: dict[int, int] = {}
        self.read({})

    def read(self, saved: dict[str, Any]) -> None:
        """The state that was saved with a step."""
        self._losses = deque[float](saved.get("losses", ()), maxlen=MEDIAN_WINDOW_STEPS)
        self._high = int(saved.get("high", 0))
        self.left_out: list[tuple[int, int]] = [(first, stop) for first, stop in saved.get("left_out", ())]
        """Batches that are not trained on, in the order of the data: [first, stop), no two of them touch."""
        self._write()

    def _write(self) -> None:
        if self.watches or self.left_out:
            self.kept["guard"] = {"losses": list(self._losses), "high": self._high, "left_out": self.left_out}

    @property
    def is_spike(self) -> bool:
        return self.watches and self._high >= SPIKE_STEPS

    def heed(self, record: StepRecord) -> None:
        """After each step."""
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
        """The last step that a spike seen after `step` has not touched: the one before the update that led to it."""
        return step - self._high - 1

    def forget(self) -> None:
        """There is nothing to go back to: what is high is ordinary from here on."""
        self._losses.clear()
        self._high = 0
        self._write()

    def goes_back(self, to: int, step: int, left_out: list[tuple[int, int]], batches: tuple[int, int]) -> str:
        """After the state of step `to` was read: `batches` are left out besides those that were at `step`. What a
        person is told.
        Raises MeshwrightError when it has been there too often."""
        self.back[to] = self.back.get(to, 0) + 1
        if self.back[to] > MAX_ROLLBACKS:
            raise MeshwrightError(
                f"the loss has risen again after step {to}, and {MAX_ROLLBACKS} times leaving out batches did not help: a smaller learning rate may; "
                "workload.spikes=keep trains on"
            )
        self._leave_out(left_out, batches)
        return f"step {step}: the loss has risen: back to the checkpoint of step {to}, without batches {batches[0]} to {batches[1] - 1}"

    def _leave_out(self, left_out: list[tuple[int, int]], batches: tuple[int, int]) -> None:
        merged: list[tuple[int, int]] = []
        for first, stop in sorted([*left_out, batches]):
            if merged and first <= merged[-1][1]:
                first, stop = merged[-1][0], max(stop, merged.pop()[1])
            merged.append((first, stop))
        self.left_out = merged
        self._write()
