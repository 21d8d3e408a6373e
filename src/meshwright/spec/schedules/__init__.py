"""Defines the pipeline schedules that the planner's cost formulas and the runtime use. Each schedule is one subclass of
`Schedule` in its own file. The package also simulates and checks orders of actions.

To add a schedule, add a file; no other file lists the schedules.
"""

from meshwright.spec.schedules.action import (
    Action,
    ActionKind,
    ActionSpan,
    ScheduleTimeline,
    check_orders,
    max_in_flight,
    rank_programs,
    simulate_orders,
    stage_ranks,
)
from meshwright.spec.schedules.schedule import schedule_names, schedule_orders

__all__ = [
    "Action",
    "ActionKind",
    "ActionSpan",
    "ScheduleTimeline",
    "check_orders",
    "max_in_flight",
    "rank_programs",
    "schedule_names",
    "schedule_orders",
    "simulate_orders",
    "stage_ranks",
]
