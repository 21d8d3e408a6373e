"""Parses orders of actions from text with one row for each pipeline rank.

Two forms are accepted. The first is a table of comma-separated values, as torch.distributed.pipelining writes it. An
empty cell is a wait, B is a whole backward, I the gradient of the input, and W the gradients of the weights. The second
is JSON with a list of rows. Each row is a list of actions, or one string of actions as in `Plan.actions`. If a stage
has W, a B of a micro-batch without W becomes B and W. `parse_orders` checks that each action of each stage and
micro-batch occurs once, that each stage is on its rank, and that there is no deadlock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.check import check_orders, stage_ranks

_ACTION_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def parse_table(text: str, where: str) -> tuple[str, ...]:
    """Converts the text of a file to the form of `Plan.actions`.

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
            Message("{where}: no actions; a row for each pipeline rank, such as '0F0,0F1,0B0,0B1'", where=where)
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
                "stage {stage} is on pipeline rank {owner}; stages lie round after round (this one on rank {places}), "
                "or all of them as a V (this one on rank {folded})",
                stage=stage,
                owner=owner[stage],
                places=places[0][stage],
                folded=places[1][stage],
            )
        )
    return table


def table_shape(rows: Sequence[str]) -> tuple[int, int]:
    """Returns the number of stages and the number of micro-batches that occur in rows."""
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
                "{where}: action {text!r} is not stage, F, B, I or W, and micro-batch, such as '2F5'",
                where=where,
                text=text.strip(),
            )
        )
    return int(match[1]), match[2], int(match[3])


def _format_action(cell: tuple[int, str, int], whole: bool) -> tuple[str, ...]:
    """Returns the texts of an action with the letters F, B and W. A `whole` backward of a stage that has W becomes two
    actions."""
    stage, kind, count = cell
    if kind == "B" and whole:
        return (f"{stage}B{count}", f"{stage}W{count}")
    return (f"{stage}{'B' if kind == 'I' else kind}{count}",)
