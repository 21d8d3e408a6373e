"""Pipeline orders as data: one file for each schedule, a play with given times, a check. No torch; one source of order
for cost and run.

Adding a schedule is one file with `order(rank, pp, virtual_stages, micro_batches)` and one line in `order.py`.
"""

from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.check import check_orders, stage_messages, stage_ranks
from meshwright.spec.schedules.schedule_registry import schedule_names, schedule_orders
from meshwright.spec.schedules.simulate import ActionSpan, ScheduleTimeline, max_in_flight, simulate_orders

__all__ = [
    "Action",
    "ActionKind",
    "ActionSpan",
    "ScheduleTimeline",
    "check_orders",
    "max_in_flight",
    "schedule_names",
    "schedule_orders",
    "simulate_orders",
    "stage_messages",
    "stage_ranks",
]
