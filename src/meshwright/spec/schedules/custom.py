"""Defines the custom schedule: the plan itself lists the actions of every pipeline rank (`Plan.actions`).

All properties of the schedule are computed from the list: the stages that split their backward, the form of the stages
(loop or V), the number of micro-batches, activations and idle time.

>>> CustomSchedule(("0F0 0F1 0B0 0B1",)).ordered_micro_batches
2

`parse_table` parses orders of actions from text with one row for each pipeline rank.

Two forms are accepted. The first is a table of comma-separated values, as torch.distributed.pipelining writes it. An
empty cell is a wait, B is a whole backward, I the gradient of the input, and W the gradients of the weights. The second
is JSON with a list of rows. Each row is a list of actions, or one string of actions as in `Plan.actions`. If a stage
has I or W, each B whose micro-batch has no W on this stage becomes B and W. `parse_orders` checks that each
action of each stage and micro-batch occurs once, and that there is no deadlock. It also checks that stages are assigned
to ranks in a loop or in a V.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.spec.schedules.action import (
    Action,
    ActionKind,
    check_orders,
    parse_action,
    simulate_orders,
    stage_ranks,
)
from meshwright.spec.schedules.schedule import InFlight, Schedule

_ACTION_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def parse_table(text: str, where: str) -> tuple[str, ...]:
    """Converts `text`, the contents of the file `where`, to the form of `Plan.actions`.

    Raises: InputError if the text has no actions or an invalid action.

    >>> parse_table("0F0,,0B0\\n1F0,1B0,\\n", "here")
    ('0F0 0B0', '1F0 1B0')
    >>> parse_table("0F0,0I0,0W0,0F1,0B1", "here")
    ('0F0 0B0 0W0 0F1 0B1 0W1',)
    """
    rows = (
        _rows_from_json(text, where)
        if text.lstrip()[:1] in ("[", "{")
        else [re.split(r"[,\s]+", line) for line in text.splitlines() if line.strip()]
    )
    table = [
        [_parse_cell(cell, f"{where}, pipeline rank {rank}") for cell in row if cell.strip()]
        for rank, row in enumerate(rows)
    ]
    if not any(table):
        raise InputError(
            Message(
                "{where}: no actions found; write a row for each pipeline rank, such as '0F0,0F1,0B0,0B1'", where=where
            )
        )
    split = {stage for row in table for stage, kind, _ in row if kind in "IW"}
    with_w = {(stage, count) for row in table for stage, kind, count in row if kind == "W"}
    return tuple(
        " ".join(
            word for cell in row for word in _format_action(cell, cell[0] in split and (cell[0], cell[2]) not in with_w)
        )
        for row in table
    )


def parse_orders(rows: Sequence[str], stages: int, micro_batches: int) -> list[list[Action]]:
    """Parses the rows of `Plan.actions`.

    Raises: InputError with the first wrong action and its position.
    """
    table = [
        [
            Action(ActionKind(kind), stage, count)
            for stage, kind, count in (_parse_cell(word, f"pipeline rank {rank}") for word in row.split())
        ]
        for rank, row in enumerate(rows)
    ]
    check_orders(table, stages, micro_batches)
    pp = len(table)
    owner = stage_ranks(table)
    places = [
        {stage: place(stage) for stage in owner}
        for place in (lambda stage: stage % pp, lambda stage: min(stage, 2 * pp - 1 - stage))
    ]
    if owner not in places:
        stage = next(
            stage
            for stage in owner
            if all(owner[stage] != place[stage] for place in places) or owner[stage] != places[0][stage]
        )
        raise InputError(
            Message(
                "stage {stage} is on pipeline rank {owner}; assign stages to ranks in a loop (this one to rank "
                "{places}), or in a V (this one to rank {folded})",
                stage=stage,
                owner=owner[stage],
                places=places[0][stage],
                folded=places[1][stage],
            )
        )
    return table


def table_shape(rows: Sequence[str]) -> tuple[int, int]:
    """Returns the number of stages and the number of micro-batches that occur in `rows`, which have the form of
    `Plan.actions`."""
    cells = [_parse_cell(word, f"pipeline rank {rank}") for rank, row in enumerate(rows) for word in row.split()]
    return 1 + max(stage for stage, _, _ in cells), 1 + max(count for _, _, count in cells)


def _rows_from_json(text: str, where: str) -> list[list[str]]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            Message("{where}: line {lineno}: {msg}", where=where, lineno=error.lineno, msg=error.msg)
        ) from None
    data = data.get("actions") if isinstance(data, dict) else data
    if not isinstance(data, list) or not all(isinstance(row, str | list) for row in data):
        raise InputError(
            Message(
                "{where}: a schedule is a list of rows, one for each pipeline rank, such as ['0F0 0B0', '1F0 1B0']",
                where=where,
            )
        )
    return [row.split() if isinstance(row, str) else [str(cell) for cell in row] for row in data]


def _parse_cell(text: str, where: str) -> tuple[int, str, int]:
    match = _ACTION_CELL.fullmatch(text.strip())
    if match is None:
        raise InputError(
            Message(
                "{where}: action {text!r} must be a stage, then F, B, I or W, then a micro-batch; example: '2F5'",
                where=where,
                text=text.strip(),
            )
        )
    return int(match[1]), match[2], int(match[3])


def _format_action(cell: tuple[int, str, int], whole: bool) -> tuple[str, ...]:
    """Returns the texts of an action with the letters F, B and W. If `whole` is set, a backward becomes the two actions
    B and W."""
    stage, kind, count = cell
    if kind == "B" and whole:
        return (f"{stage}B{count}", f"{stage}W{count}")
    return (f"{stage}{'B' if kind == 'I' else kind}{count}",)


CUSTOM_SCHEDULE = "actions"
CUSTOM_NAME_PREFIX = "csv-"
"""The prefix of the schedule's part in the name of a plan. A digest of the actions follows the prefix."""


class CustomSchedule(Schedule):
    """A schedule whose order is a list of actions for each pipeline rank, such as '0F0 0F1 0B0 0B1'."""

    name = CUSTOM_SCHEDULE
    preference = 6
    listed = True
    any_stages_per_rank = True
    splits_backward = True

    @property
    def v_shape(self) -> bool:
        """Returns whether the stages form a V. They do if there are p > 1 pipeline ranks and the last rank runs stage
        p."""
        pp = len(self.actions)
        return pp > 1 and re.search(rf"(^|\s){pp}[FBW]", self.actions[-1]) is not None

    def splits_stage(self, stage: int) -> bool:
        """Returns whether the list has W of `stage`."""
        return any(re.search(rf"(^|\s){stage}W", line) for line in self.actions)

    @property
    def ordered_micro_batches(self) -> int:
        """Returns the number of micro-batches in the list."""
        return 1 + max(
            (int(re.sub(r".*[FBW]", "", action)) for line in self.actions for action in line.split()), default=-1
        )

    def orders(self, pp: int, virtual_stages: int, micro_batches: int) -> list[list[Action]]:
        """Returns the listed actions.

        Raises: InputError with the first wrong action.
        """
        return parse_orders(self.actions, pp * virtual_stages, micro_batches)

    def bubble(self, f: Any, b: Any, w: Any, virtual_stages: Any) -> Any:
        """Returns 0, because `idle_micro_batches` accounts for the whole bubble."""
        return 0.0

    def idle_micro_batches(self, virtual_stages: int) -> float:
        """Returns the idle time of a rank in a simulated step. The unit is the time of one micro-batch on a rank. The
        simulation assumes equal stages, and equal times of F, B and W.

        >>> CustomSchedule(("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")).idle_micro_batches(1)
        1.0
        """
        micro_batches, pp = self.ordered_micro_batches, len(self.actions)
        table = self.orders(pp, virtual_stages, micro_batches)
        split = {action.stage for row in table for action in row if action.kind is ActionKind.W}
        thirds = [1.0 / (3 * virtual_stages)] * (pp * virtual_stages)
        backward = [third if stage in split else 2 * third for stage, third in enumerate(thirds)]
        return round(simulate_orders(table, thirds, backward, 0.0, thirds).makespan, 9) - micro_batches

    def in_flight(self, rank: int, pp: int, virtual_stages: int, micro_batches: Any) -> list[InFlight]:
        """Returns the possible memory peaks of the rank, by its list of actions."""
        return listed_in_flight(self.actions[rank])

    def messages(self, pp: int, virtual_stages: int, micro_batches: Any) -> Any:
        """Returns 4 (p - 1) messages for a V of p ranks. Otherwise returns 2 (p * v - 1), with v stages on each
        rank."""
        return 4 * (pp - 1) if self.v_shape else 2 * (pp * virtual_stages - 1)

    def name_part(self, virtual_stages: int) -> str:
        """Returns the prefix and a digest of the actions."""
        return CUSTOM_NAME_PREFIX + hashlib.sha256("\n".join(self.actions).encode()).hexdigest()[:8]

    def parse_name_part(self, part: str) -> dict[str, Any] | None:
        """Returns None, because a name cannot list the actions."""
        return None


def listed_in_flight(line: str) -> list[InFlight]:
    """Returns the possible memory peaks of a rank's list, each just before a backward.

    >>> listed_in_flight("0F0 0F1 0B0 0W0 0B1 0W1")
    [InFlight(turn=0, alive=(2,), deferred=0)]
    """
    order = [parse_action(word) for word in line.split()]
    stages = sorted({action.stage for action in order})
    split = {action.stage for action in order if action.kind is ActionKind.W}
    alive = dict.fromkeys(stages, 0)
    moments: set[tuple[int, tuple[int, ...]]] = set()
    for kind, stage, _ in order:
        alive[stage] += kind is ActionKind.F
        if kind is ActionKind.B:
            moments.add((stages.index(stage), tuple(alive.values())))
        alive[stage] -= kind is (ActionKind.W if stage in split else ActionKind.B)
    return [InFlight(*moment) for moment in sorted(moments) if not any(_dominates(other, moment) for other in moments)]


def _dominates(one: tuple[int, tuple[int, ...]], other: tuple[int, tuple[int, ...]]) -> bool:
    return (
        one != other
        and one[0] == other[0]
        and all(mine >= theirs for mine, theirs in zip(one[1], other[1], strict=True))
    )
