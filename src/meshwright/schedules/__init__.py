"""Pipeline orders as data: one file for each schedule, a play with given times, a check. No torch; one source of order for cost and run.

Adding a schedule is one file with `order(rank, pp, virtual_stages, micro_batches)` and one line in `order.py`.
"""

from meshwright.schedules.action import Action, Kind
from meshwright.schedules.check import check, messages, owners
from meshwright.schedules.order import names, orders
from meshwright.schedules.timing import Playback, Span, in_flight, play

__all__ = ["Action", "Kind", "Playback", "Span", "check", "in_flight", "messages", "names", "orders", "owners", "play"]
