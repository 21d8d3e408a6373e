"""`--plan NAME|FILE|auto` and `--pin tp=2,pp=4`, and whether such a plan can run a job.

A pin is a field of `Plan`, or `dp` for all replicas; the letters of plan names (z, mb, sp, rc) stand for their fields. `schedule=FILE` reads
an order of actions from a table (schedules/table.py) and pins what it says of ranks and stages too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.base.codec import build, parse, read_text
from meshwright.base.errors import InputError, did_you_mean
from meshwright.base.files import path_named
from meshwright.schedules.table import read_orders, read_table, shape_of
from meshwright.spec.plan import Plan, Schedule, parse_plan
from meshwright.spec.rules import check_plan

LETTERS = {"z": "zero", "mb": "micro_batch", "sp": "sequence_parallel", "rc": "recompute", "off": "offload"}
PINNABLE = ("dp", *(name for name in Plan.model_fields if name != "version"))
AUTO = "auto"

__all__ = ["AUTO", "LETTERS", "PINNABLE", "check_plan", "parse_pins", "pins_of", "read_pins", "read_plan"]


def read_plan(text: str) -> Plan | None:
    """The plan that `text` names, or None for `auto`: the planner's.

    >>> read_plan("dp8.tp2.pp4.z1").world
    64
    """
    if text == AUTO:
        return None
    path = path_named(text)
    if path.suffix in (".json", ".yaml", ".yml") or path.is_file():
        return read_plan_file(path)
    return parse_plan(text)


def read_plan_file(path: Path) -> Plan:
    """A plan by itself, or inside an answer of `plan --json` or `estimate --json`."""
    data = parse(read_text(path, "plan"), str(path))
    if isinstance(data, dict) and isinstance(data.get("chosen"), dict):
        data = data["chosen"]
    if isinstance(data, dict) and isinstance(data.get("plan"), dict):
        data = data["plan"]
    return build(Plan, data, f"{path}: $")


def parse_pins(text: str) -> dict[str, Any]:
    """`tp=2,pp=4` as pins.

    >>> parse_pins("tp=2,z=1,sp=true")
    {'tp': 2, 'zero': 1, 'sequence_parallel': True}
    """
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):
        name, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise InputError(f"pin {part!r} is not name=value; write pins like 'tp=2,pp=4'")
        name = LETTERS.get(name.strip(), name.strip())
        if name in given:
            raise InputError(f"pins {text!r} fix {name!r} twice")
        given[name] = parse(value.strip(), f"pin {name}")
    return read_pins(given, "pins")


def read_pins(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`given` as pins, each a value that its field of `Plan` can have."""
    pins: dict[str, Any] = {}
    for written, value in given.items():
        name = LETTERS.get(written, written)
        if name not in PINNABLE:
            raise InputError(f"{where}: Plan has no field {written!r}{did_you_mean(written, (*PINNABLE, *LETTERS))}")
        path = path_named(value) if name == "schedule" and isinstance(value, str) and value not in list(Schedule) else None
        if path is not None and (path.is_file() or path.suffix or "/" in value):
            pins |= read_schedule(path)
        else:
            pins[name] = _value("dp_replicate" if name == "dp" else name, value, f"{where}.{written}")
    return pins


def read_schedule(path: Path) -> dict[str, Any]:
    """The order of actions in a file as pins. Raises InputError with the first action that is wrong and its place, before anything runs."""
    rows = read_table(read_text(path, "schedule"), str(path))
    stages, micro_batches = shape_of(rows)
    if stages % len(rows):
        raise InputError(f"{path}: {stages} stages on {len(rows)} pipeline ranks; every rank holds as many")
    try:
        read_orders(rows, stages, micro_batches)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return {"schedule": Schedule.actions, "actions": rows, "pp": len(rows), "virtual_stages": stages // len(rows)}


def _value(field: str, value: Any, where: str) -> Any:
    """`value` as the field of `Plan` has it, one word where it has several as well; rules between fields are the planner's to keep."""
    if isinstance(Plan.model_fields[field].default, tuple) and isinstance(value, str):
        value = [value]
    try:
        return getattr(Plan.model_validate({field: value}), field)
    except ValidationError as error:
        own = next((entry for entry in error.errors() if entry["loc"][:1] == (field,)), None)
    if own is not None:
        raise InputError(f"{where}: {own['msg'][:1].lower()}{own['msg'][1:]}, got {value!r}")
    return tuple(value) if isinstance(value, list) else value


def pins_of(plan: Plan) -> dict[str, Any]:
    """Every field of `plan` as a pin; not the bucket of one that says none, as names do."""
    left = {"dp"} if "bucket" in plan.model_fields_set else {"dp", "bucket"}
    return {name: getattr(plan, name) for name in PINNABLE if name not in left}
