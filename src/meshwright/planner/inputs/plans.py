"""Parses the options `--plan NAME|FILE|auto` and `--pin tp=2,pp=4`, for the commands and for job files (job.py).

A pin fixes a field of `Plan`, or `dp`, the total number of data replicas. The abbreviations of plan names in
PIN_ALIASES are allowed, such as `z` for `zero`. `schedule=FILE` reads an order of actions from a table
(spec/schedules/custom.py), and also pins the numbers of pipeline ranks and of stages to those of the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.core.codec import parse_text, read_text_file, validate_data, validation_reason
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.files import path_from_text
from meshwright.core.messages import Message
from meshwright.spec.constraints import validate_plan
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.schedules.custom import CUSTOM_SCHEDULE, parse_orders, parse_table, table_shape
from meshwright.spec.schedules.schedule import schedule_names

PIN_ALIASES = {"z": "zero", "mb": "micro_batch", "sp": "sequence_parallel", "rc": "recompute", "off": "offload"}
PINNABLE_FIELDS = ("dp", *(name for name in Plan.model_fields if name != "version"))
AUTO_PLAN = "auto"

__all__ = [
    "AUTO_PLAN",
    "PINNABLE_FIELDS",
    "PIN_ALIASES",
    "parse_pins",
    "pins_from_plan",
    "read_plan",
    "validate_pins",
    "validate_plan",
]


def read_plan(text: str, world: Callable[[], int] | None = None) -> Plan | None:
    """Returns the plan with the name `text` or in the file `text`. Returns None for `auto`: the planner chooses the
    plan. `world` returns the number of devices, for names without a data degree such as fsdp.

    Raises: InputError if `text` is neither a valid name nor a valid file.

    >>> read_plan("dp8.tp2.pp4.z1").world
    64
    """
    if text == AUTO_PLAN:
        return None
    path = path_from_text(text)
    if path.suffix in (".json", ".yaml", ".yml") or path.is_file():
        return read_plan_file(path)
    return parse_plan(text, world)


def read_plan_file(path: Path) -> Plan:
    """Reads a file that contains a plan, or the output of `plan --json` or `estimate --json`. A file leaves no
    micro-batch open: the default is one row."""
    data = parse_text(read_text_file(path, "plan"), str(path))
    if isinstance(data, dict) and isinstance(data.get("chosen"), dict):
        data = data["chosen"]
    if isinstance(data, dict) and isinstance(data.get("plan"), dict):
        data = data["plan"]
    plan = validate_data(Plan, data, f"{path}: $")
    return plan.model_copy(update={"micro_batch": plan.micro_batch})


def parse_pins(text: str) -> dict[str, Any]:
    """Parses pins such as `tp=2,pp=4`. Abbreviations are replaced by field names.

    Raises: InputError if a pin is not name=value, occurs twice, or is not valid.

    >>> parse_pins("tp=2,z=1,sp=true")
    {'tp': 2, 'zero': 1, 'sequence_parallel': True}
    """
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):
        name, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise InputError(Message("pin {part!r} is not name=value; write pins like 'tp=2,pp=4'", part=part))
        name = PIN_ALIASES.get(name.strip(), name.strip())
        if name in given:
            raise InputError(Message("pins {text!r} fix {name!r} twice", text=text, name=name))
        given[name] = parse_text(value.strip(), f"pin {name}")
    return validate_pins(given, "pins")


def validate_pins(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the pins `given` with abbreviations replaced and with values converted to the types of the fields of
    `Plan`. `where` is the location for error messages. Raises InputError if a name is not a field of `Plan` or a value
    is not allowed for its field."""
    pins: dict[str, Any] = {}
    for written, value in given.items():
        name = PIN_ALIASES.get(written, written)
        if name not in PINNABLE_FIELDS:
            raise InputError(
                Message(
                    "{where}: Plan has no field {written!r}{hint}",
                    where=where,
                    written=written,
                    hint=did_you_mean(written, (*PINNABLE_FIELDS, *PIN_ALIASES)),
                )
            )
        path = (
            path_from_text(value)
            if name == "schedule" and isinstance(value, str) and value not in schedule_names()
            else None
        )
        if path is not None and (path.is_file() or path.suffix or "/" in value):
            pins |= read_schedule_pins(path)
        else:
            pins[name] = _pin_value("dp_replicate" if name == "dp" else name, value, f"{where}.{written}")
    return pins


def read_schedule_pins(path: Path) -> dict[str, Any]:
    """Reads an order of actions from a file and returns the pins that it implies: the schedule, the actions, and the
    numbers of pipeline ranks and stages. Raises InputError if the file is not a valid order; the message names the
    first invalid action and its position."""
    rows = parse_table(read_text_file(path, "schedule"), str(path))
    stages, micro_batches = table_shape(rows)
    if stages % len(rows):
        raise InputError(
            Message(
                "{path}: {stages} stages on {count} pipeline ranks; every rank must hold the same number of stages",
                path=path,
                stages=stages,
                count=len(rows),
            )
        )
    try:
        parse_orders(rows, stages, micro_batches)
    except InputError as error:
        raise InputError(Message("{path}: {error}", path=path, error=error)) from None
    return {"schedule": CUSTOM_SCHEDULE, "actions": rows, "pp": len(rows), "virtual_stages": stages // len(rows)}


def _pin_value(field: str, value: Any, where: str) -> Any:
    """Converts `value` to the type of the field `field` of `Plan`. A field that is a list also accepts a single word.
    Rules that involve other fields are not checked."""
    if isinstance(Plan.model_fields[field].default, tuple) and isinstance(value, str):
        value = [value]
    try:
        return getattr(Plan.model_validate({field: value}), field)
    except ValidationError as error:
        own = next((entry for entry in error.errors() if entry["loc"][:1] == (field,)), None)
    if own is not None:
        raise InputError(
            Message("{where}: {reason}, got {value!r}", where=where, reason=validation_reason(own), value=value)
        )
    return tuple(value) if isinstance(value, list) else value


def pins_from_plan(plan: Plan) -> dict[str, Any]:
    """Returns every field of `plan` as a pin. The bucket size and the micro-batch are pins only if the plan sets
    them."""
    left = {"dp", *({"bucket", "micro_batch"} - plan.model_fields_set)}
    return {name: getattr(plan, name) for name in PINNABLE_FIELDS if name not in left}
