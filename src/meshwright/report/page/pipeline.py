"""The pipeline of a plan as a chart: when each action begins and ends. Orders and their play are those of `schedules`, seconds those of the cost model.

Of a long step the first micro-batches are played, enough to fill the pipeline; of many ranks the first and the last are shown. What follows the
passes (sums of gradients, the update) is not in the chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.cost.box import box_of
from meshwright.cost.collectives import send
from meshwright.cost.memory import message
from meshwright.cost.price import Passes, Pricer
from meshwright.cost.stages import Kind, held
from meshwright.cost.unlike import pricers
from meshwright.schedules.order import orders
from meshwright.schedules.timing import Playback, Span, play
from meshwright.spec.plan import Plan, Schedule
from meshwright.spec.rules import micro_batches_of

UNITS = 10_000
"""Of the whole chart: starts and ends are whole numbers of these."""
ACTIONS = 1280
"""That one chart shows at most."""
RANKS = 8
KINDS = "FBW"


def played(pricer: Pricer, plan: Plan, micro_batches: int) -> Playback:
    """The first `micro_batches` of a step of `plan`, each virtual stage with the seconds of its own layers."""
    setting = pricer.setting
    box = box_of(plan, setting.job.workload.batch, setting.job.model.blocks)
    table = held(setting.entries, box.orders[0])
    stages = [Kind(plan.rank_of(at), 1, row[None], ((tuple(row.tolist()), 1),)) for at, row in enumerate(table)]
    groups = plan.placement or (0,) * plan.pp
    on = pricers(setting.job, sorted(set(groups)), plan.world) if plan.placement else {0: pricer}
    passes = {group: each.passes(box, each.alone(box, stages)) for group, each in on.items()}
    own = [groups[plan.rank_of(stage)] for stage in range(len(stages))]
    forward, backward, weights = (
        np.array([np.broadcast_to(passes[group][part], (len(stages), 1, 1, 1, 1, 1, 1))[at].item() for at, group in enumerate(own)])
        for part in map(Passes._fields.index, ("forward", "backward", "weights"))
    )
    weights = np.where([plan.separates(stage) for stage in range(plan.stages)], weights, 0.0)
    tokens = np.array([plan.micro_batch * setting.job.workload.sequence / plan.cp])
    passed = send(setting.fabric, message(setting, box, tokens), plan.pp, box.strides["pp"]).item() if plan.pp > 1 else 0.0
    order = orders(plan.schedule, plan.pp, plan.virtual_stages, micro_batches, plan.actions)
    return play(order, forward.tolist(), (backward - weights).tolist(), passed, weights.tolist())


def chart(pricer: Pricer, plan: Plan) -> dict[str, Any]:
    """What is drawn: of how many micro-batches, seconds, and a row for each rank shown."""
    whole = plan.micro_batches(pricer.setting.job.workload.batch)
    count = min(whole, first(plan))
    shown = ranks_shown(plan.pp, ACTIONS // (2 * plan.virtual_stages * count))
    found = played(pricer, plan, count)
    scale = UNITS / found.makespan
    rows = [row(found.spans[rank], scale) for rank in shown]
    return {"of": whole, "count": count, "turns": plan.virtual_stages, "seconds": found.makespan, "ranks": shown, "rows": rows}


def row(spans: Sequence[Span], scale: float) -> list[int]:
    """Kind, turn, micro-batch, idle units before it and units that it takes, of one action after the other."""
    found, now = [], 0
    own = sorted({span.action.stage for span in spans})
    for (kind, stage, micro_batch), start, end in spans:
        begins, ends = round(start * scale), round(end * scale)
        found += [KINDS.index(kind), own.index(stage), micro_batch, begins - now, ends - begins]
        now = ends
    return found


def first(plan: Plan) -> int:
    """Micro-batches that fill the pipeline and empty it again; rounds stay whole."""
    if plan.schedule == Schedule.interleaved:
        return plan.pp
    if plan.schedule == Schedule.actions:
        return micro_batches_of(plan.actions)
    fill = max(2 * plan.pp, 8)
    return fill if plan.schedule == Schedule.dualpipev else min(fill, 24)  # which is an order of no fewer than twice its ranks


def ranks_shown(pp: int, most: int) -> Sequence[int]:
    """All ranks, or the first and the last ones.

    >>> ranks_shown(4, 9), ranks_shown(16, 4), ranks_shown(16, 0)
    ([0, 1, 2, 3], [0, 1, 14, 15], [0])
    """
    most = max(min(most, RANKS), 1)
    return list(range(pp)) if pp <= most else [*range(-(-most // 2)), *range(pp - most // 2, pp)]
