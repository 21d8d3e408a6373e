"""Records the seconds of a plan's step as formulas of the rates of a cluster. The formulas are those of the cost model,
because the cost model itself is executed with symbols (symbolic.py)."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.cost.step import time_by_kind
from meshwright.planner.cost.symbolic import Operand, Program
from meshwright.spec.cluster import ClusterRates
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

RATES = tuple(ClusterRates.model_fields)
"""The inputs of the formulas."""


class StepFormulas:
    """Records the step times of plans of one job. Jobs with equal models may share a program: equal terms are recorded
    once."""

    def __init__(self, job: Job, program: Program) -> None:
        """`program` has the inputs RATES. The cluster of `job` has `Cluster.rates`."""
        assert job.cluster.rates is not None and program.names == RATES
        self.pricer = CostModel(job)
        network, link, efficiency = program.inputs().values()
        setting = self.pricer.setting
        near = setting.fabric.links[0]  # on one node it is also the outer link
        # `model_copy` does not validate: the new values are symbols.
        links = [
            each.model_copy(update={"bandwidth": link if each is near else network}) for each in setting.fabric.links
        ]
        self.pricer.setting = replace(
            setting,
            fabric=setting.fabric._replace(links=tuple(links)),
            device=setting.device.model_copy(update={"efficiency": efficiency}),
        )

    def record(self, plan: Plan) -> dict[str, Operand]:
        """Returns the fields of `TimeBreakdown` of a plan with equal ranks, as symbols or numbers."""
        job = self.pricer.setting.job
        box = grid_of_plan(plan, job.workload.batch, job.model.blocks)
        ranks = self.pricer.ranks(box)
        return time_by_kind(box, self.pricer.seconds(box, ranks, self.pricer.states(box, ranks)))
