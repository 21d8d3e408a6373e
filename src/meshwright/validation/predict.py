"""A case through the cost model: predicted seconds of a step and bytes in the words of the source's meter.

| meter | what it is | predicted as |
|---|---|---|
| first, last | torch's peak of allocated bytes on that rank | that pipeline rank's total |
| fullest | the same on whichever rank has most | the largest total |
| reserved | torch's peak of reserved bytes, no context | the fullest rank's, without the driver |
| device | nvidia-smi: reserved, context and communication buffers | the fullest rank's, reserved and context |
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.base.errors import InputError
from meshwright.cost.box import box_of
from meshwright.cost.price import Pricer
from meshwright.cost.step import estimate_of
from meshwright.spec.estimate import Estimate
from meshwright.spec.plan import Plan
from meshwright.validation.cases import Case, Meter


class Prediction(NamedTuple):
    """Of one case. `memory` in the words of its meter; `fits`: whether the planner would have let it run."""

    case: Case
    plan: Plan
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.time.step

    @property
    def memory(self) -> float:
        stages, busiest = self.estimate.per_stage, self.estimate.memory
        context = self.case.job.cluster.groups[0].device.context
        match self.case.meter:
            case Meter.first:
                return stages[0].total
            case Meter.last:
                return stages[-1].total
            case Meter.reserved:
                return busiest.reserved - context
            case Meter.device:
                return busiest.reserved
        return busiest.total

    @property
    def fits(self) -> bool:
        return self.estimate.fits


def predict(case: Case) -> Prediction | str:
    """The fastest plan of `case` whose allocated bytes fit (where none do: the smallest), or why it cannot be priced."""
    pricer = Pricer(case.job, case.practice)
    found = []
    for plan in case.plans:
        try:
            found.append(Prediction(case, plan, estimate_of(pricer, box_of(plan, case.job.workload.batch, case.job.model.blocks))))
        except InputError as error:
            return str(error)[:90]
    device = case.job.cluster.groups[0].device
    fitting = [each for each in found if each.estimate.memory.total + device.context <= device.memory]
    return min(fitting, key=lambda each: each.seconds) if fitting else min(found, key=lambda each: each.estimate.memory.reserved)
