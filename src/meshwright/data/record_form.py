"""Finds the form of the records of a data source: text, instructions or preference pairs. Does not import torch, so
that a wrong source is refused before ranks start."""

from __future__ import annotations

from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message

PREFERENCE_FORMS = ("preference", "preference messages")
"""Forms of records with a chosen and a rejected answer (preferences.py), as text and as messages."""


def record_format(fields: dict[str, Any], field: str) -> str:
    """Returns the form of a record of instructions by its first field: 'messages', 'conversations' (ShareGPT),
    'instruction' (Alpaca), 'prompt', or one of PREFERENCE_FORMS. Returns '' for text in `field`.

    >>> record_format({"instruction": "Add.", "input": "", "output": "3"}, "text")
    'instruction'
    """
    if field not in fields and ("chosen" in fields or "rejected" in fields):
        return PREFERENCE_FORMS[isinstance(fields.get("chosen", fields.get("rejected")), list)]
    for name in ("messages", "conversations"):
        if isinstance(fields.get(name), list) and (field == name or field not in fields):
            return name
    if field not in fields and fields.keys() >= {"instruction", "output"}:
        return "instruction"
    return "prompt" if "prompt" in fields and "completion" in fields and field not in fields else ""


def form_of_records(fields: dict[str, Any], field: str, source: str, is_preference: bool) -> str:
    """Returns `record_format` of the first record. Raises InputError if the records are pairs and the job has no
    preference objective, or the reverse. `is_preference`: whether the job has one."""
    form = record_format(fields, field)
    if form in PREFERENCE_FORMS and not is_preference:
        raise InputError(
            Message(
                "data source {source}: its records are preference pairs: add --preference dpo or --preference orpo",
                source=source,
            )
        )
    if is_preference and form not in PREFERENCE_FORMS:
        raise InputError(
            Message(
                "data source {source}: preference training needs records with 'prompt', 'chosen' and 'rejected': name "
                "such data, or leave --preference out",
                source=source,
            )
        )
    return form
