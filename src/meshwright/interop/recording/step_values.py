"""The recorded and the repeated values of one step."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from meshwright.interop.recording import causes
from meshwright.interop.recording.digest import Digest, distance
from meshwright.interop.recording.findings import Finding, StepComparison
from meshwright.interop.recording.layout import region_key
from meshwright.interop.recording.reference import OneDevice, StepReference
from meshwright.interop.recording.tolerance import Floors
from meshwright.interop.recording.topology import Source

DRIFT_FACTOR = 4.0
MAX_DRIFT = 1e-3
"""Outputs and gradients of a step may differ by DRIFT_FACTOR times the relative difference of the weights before it, of
which at most MAX_DRIFT counts. Adam turns gradients that consist of rounding errors into full steps of few elements, so
that two correct runs differ by more than the rounding of one."""


class StepValues:
    """Step `step` of a recording. `truth` is one device in float64, `other` in the precision of the recording. `device`
    has computed `truth`."""

    def __init__(
        self, device: OneDevice, step: int, truth: StepReference, other: StepReference, floors: Floors
    ) -> None:
        self.device, self.topology = device, device.topology
        self.step, self.truth, self.other, self.floors = step, truth, other, floors
        labels, values = self._recorded_losses()
        self.compared = StepComparison(
            step + 1, truth.loss, values, round(truth.labels), labels, len(truth.losses), norm=truth.norm
        )

    @cached_property
    def drift(self) -> dict[str, float]:
        """Returns, for each parameter, the relative difference of the recorded weights before this step from those of
        one device, at most MAX_DRIFT."""
        found: dict[str, float] = defaultdict(float)
        for trace in self.topology.traces if self.step else ():
            for piece, row in zip(trace.header.pieces, trace.header.steps[self.step - 1].after, strict=True):
                name = self.topology.canonical[piece.name]
                truth = self.truth.before[name, region_key(piece.region)]
                if row >= 0 and float(truth[-1]):
                    off = distance(trace.digests[row], truth) / float(truth[-1])
                    found[name] = max(found[name], min(off, MAX_DRIFT))
        return found

    def digest(self, rank: int, row: int) -> Digest:
        """Returns a recorded digest."""
        return self.topology.traces[rank].digests[row]

    def finding(
        self, kind: str, module: str, ranks: list[int], size: tuple[float, float], cause: causes.Cause
    ) -> Finding:
        """Returns a finding of this step. `size` is the amount and the limit."""
        return Finding(self.step + 1, kind, module, ranks, *size, cause.name, cause.why)

    def _recorded_losses(self) -> tuple[int | None, float | None]:
        """Returns the number of labels and the mean loss of the recorded calls of cross entropy, None if unknown."""
        labels = total = 0.0
        for source in self.truth.losses:
            found = self.recorded_loss(source)
            if found is None:
                return None, None
            total += found[0] * found[1]
            labels += found[1]
        return round(labels), total / labels if labels else 0.0

    def recorded_loss(self, source: Source) -> tuple[float, float, int] | None:
        """Returns the mean loss, the number of labels and the rank of the one cross entropy of a micro-batch."""
        for rank in reversed(self.topology.chain(self.step, source)):
            found = [
                (self.topology.traces[part].values, loss)
                for part in self.topology.sequences.ranks(rank)
                for loss in self.topology.recorded(part, self.step).micro_batches[source.micro].losses
            ]
            if found:
                labels = sum(values[each.labels] for values, each in found)
                sums = sum(
                    values[each.value] * (values[each.labels] if each.reduction == "mean" else 1)
                    for values, each in found
                    if values[each.labels]
                )
                return sums / labels if labels else 0.0, labels, rank
        return None
