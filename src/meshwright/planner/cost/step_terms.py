"""Lists the terms of the step time that are added once per step and overlap with nothing. For each term, `STEP_TERMS`
names the field of `TimeBreakdown` that reports its seconds.

A new term is a function in this file and an entry of `STEP_TERMS`. The step time, plans over heterogeneous groups and
the estimate use all entries of this table. The simulation (planner/simulate/op_times.py) includes only the terms whose
functions it calls.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.planner.cost.cost_context import CostContext
from meshwright.planner.cost.dp_comm import dp_group_rates
from meshwright.planner.cost.links import collective_rates
from meshwright.planner.cost.plan_grid import Array, PlanGrid, broadcast_to_axis


def tied_vocab_seconds(setting: CostContext, box: PlanGrid) -> Array:
    """Returns the seconds per step in which the first and the last stage sum the gradients of a tied vocabulary (z). A
    frozen vocabulary has no gradients."""
    copies = [entry for entry in setting.entries if entry.copy and not all(each.frozen for each in entry.own)]
    if box.pp == 1 or not copies:
        return broadcast_to_axis(0.0, "")
    ends = collective_rates(setting.fabric, 2, box.strides["pp"] * box.pp // 2)
    size = sum(entry.aligned(box.cut) for entry in copies) * setting.recipe.size
    return broadcast_to_axis(ends.reduce(size * box.weight / box.holders), "z")


def loss_gather_seconds(setting: CostContext, box: PlanGrid) -> Array:
    """Returns the seconds per step in which the data ranks gather the outputs of all rows for a loss over the whole
    batch (z). Backward sends nothing (runtime/batch_loss.py)."""
    elements = setting.job.model.gathered
    if not elements or box.data == 1:
        return broadcast_to_axis(0.0, "")
    inner, outer = dp_group_rates(setting, box)
    size = elements * setting.job.workload.batch * setting.recipe.size
    groups = broadcast_to_axis([shards.replicas for shards in box.shards], "z")
    return np.asanyarray(inner.gather(size / groups) + outer.gather(size))


STEP_TERMS: tuple[tuple[str, Callable[[CostContext, PlanGrid], Array]], ...] = (
    ("pipeline", tied_vocab_seconds),
    ("data", loss_gather_seconds),
)


def step_terms(setting: CostContext, box: PlanGrid) -> Array:
    """Returns the seconds of each term of STEP_TERMS, over (term, GRID_AXES)."""
    return np.stack(np.broadcast_arrays(*(seconds(setting, box) for _, seconds in STEP_TERMS)))
