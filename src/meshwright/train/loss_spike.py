"""Detects loss spikes and excludes the batches that may have caused them. `recovery.py` uses it to roll back.

A step is called high in either of two cases:
- Its loss is not finite, or exceeds m by more than max(MIN_SPREAD_RATIO * s, MIN_RELATIVE_RISE * |m|). Here m is the
  median loss of the last MEDIAN_WINDOW_STEPS steps that were not high. Over these steps, s is 1.4826 times the median
  of |loss - m|. Until there are MEDIAN_WINDOW_STEPS such steps, a finite loss is not high.
- Its gradient is not finite and the loss scale is not dynamic. (A dynamic loss scale overflows at times.)

SPIKE_STEPS high steps in a row are a spike. A bad batch makes only one step high, while damaged weights keep the loss
high. After a spike, the run rolls back to the newest valid checkpoint on disk that was saved before the update that
preceded the first high step. Training then continues without the batch of this update and the batches of the high
steps. Checkpoints contain the list of excluded batches, so that these stay excluded. The run ends if it has to roll
back to the same checkpoint more than MAX_ROLLBACKS times. If no checkpoint is old enough, training continues with a
note to the user.

The decision depends only on the losses and on skipped updates. Both are equal on all ranks, so all ranks make the same
decision. A run that died before its rollback makes the same decision again after its restart.

Source: Chowdhery et al., PaLM, 2022, section 5.1. The authors roll back about 100 steps and skip batches. The skipped
batches caused no spike when the model was trained on them from another checkpoint.
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
"""The maximum number of rollbacks to the same checkpoint."""


class LossSpikeDetector:
    """Detects loss spikes from the records of steps. It stores its state in `state["guard"]`, which every checkpoint
    contains."""

    def __init__(self, state: dict[str, Any], watches: bool, scaled: bool) -> None:
        """`watches`: whether spikes are detected. `scaled`: whether the loss scale is dynamic, so that gradients which
        are not finite are expected."""
        self.state, self.watches, self.scaled = state, watches, scaled
        self.back: dict[int, int] = {}
        self.read({})

    def read(self, saved: dict[str, Any]) -> None:
        """Restores the detector from `saved`, the value of `state["guard"]` in a checkpoint. An empty `saved` resets
        it."""
        self._losses = deque[float](saved.get("losses", ()), maxlen=MEDIAN_WINDOW_STEPS)
        self._high = int(saved.get("high", 0))
        self.left_out: list[tuple[int, int]] = [(first, stop) for first, stop in saved.get("left_out", ())]
        """The excluded batches, as sorted ranges [first, stop) of batch indices. Adjacent ranges are merged."""
        self._write()

    def _write(self) -> None:
        if self.watches or self.left_out:
            self.state["guard"] = {"losses": list(self._losses), "high": self._high, "left_out": self.left_out}

    @property
    def is_spike(self) -> bool:
        """Returns whether the last SPIKE_STEPS steps were all high."""
        return self.watches and self._high >= SPIKE_STEPS

    def heed(self, record: StepRecord) -> None:
        """Updates the state with the record of a step. The training loop calls it after each step."""
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
        """Returns the newest step whose checkpoint is unaffected by the spike that was detected after `step`: the step
        before the update that preceded the first high step."""
        return step - self._high - 1

    def forget(self) -> None:
        """Discards the losses so far, so that the current loss no longer counts as high. `recovery.py` calls it if no
        checkpoint is old enough."""
        self._losses.clear()
        self._high = 0
        self._write()

    def goes_back(self, to: int, step: int, left_out: list[tuple[int, int]], batches: tuple[int, int]) -> str:
        """Excludes `batches`, a range [first, stop), after a rollback from `step` to the checkpoint of step `to`.
        Returns a line for the user.

        `left_out`: the ranges that were already excluded at `step`; the checkpoint may lack some of them. Raises
        MeshwrightError after more than MAX_ROLLBACKS rollbacks to one checkpoint.
        """
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
