"""Describes another training system by tables, and translates settings (settings.py) to its keys and back.

A `Key` maps one setting to one key of the system. The same row serves both directions, so that a round trip holds by
construction. `values` maps our values to those of the system; `ABSENT` means that the key is left out. Several keys may
belong to one setting: together they determine it, and they contradict each other if no value has all of them.

A `PlanSpaceLimit` is a set of plans: the product of the values that each field may have. A system can run the union of
its limits. The export, the import and the search for a system read the same limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.settings import INTEGER_SETTINGS, TEXT_SETTINGS, Settings
from meshwright.spec.plan import Plan

ABSENT = object()
"""The value of a key that is left out."""
ANY = object()
"""In a limit: every value of the field."""
FLAG: Mapping[Any, Any] = {True: True, False: ABSENT}
"""An option without a value."""


class OneOf(tuple[Any, ...]):
    """Values of a key with equal meaning: the first is written, all are read. ABSENT may be among them."""

    def __new__(cls, *values: Any) -> OneOf:
        """Returns the values as a tuple."""
        return super().__new__(cls, values)


def written(value: Any) -> Any:
    """Returns the value that an export writes."""
    return value[0] if isinstance(value, OneOf) else value


def readings(value: Any) -> tuple[Any, ...]:
    """Returns the values of another system that an import reads as `value`: the alternatives of a OneOf, or `value`."""
    return value if isinstance(value, OneOf) else (value,)


IDLE_FIELDS = {
    "zero": ("dp_replicate",),
    "tp": ("sequence_parallel",),
    "cp": ("context", "ulysses"),
    "pp": ("schedule", "virtual_stages", "layers_per_stage"),
}
"""Fields of a plan that have no effect at ZeRO 0, or if the degree is 1."""


class Key(NamedTuple):
    """One key of a system for the setting `setting`.

    `values` maps our values to theirs; without it the values are equal. `default` is the value of the system if the key
    is absent; None means that the key then says nothing. `always` writes the key even with its default. `also` are
    other spellings of the key, which are read. `write` and `read` convert a value in a way that `values` cannot:
    `write` returns ABSENT to leave the key out, `read` returns the settings that the value determines.
    """

    name: str
    setting: str
    values: Mapping[Any, Any] | None = None
    default: Any = None
    always: bool = False
    also: tuple[str, ...] = ()
    write: Callable[[Settings], Any] | None = None
    read: Callable[[Any, Mapping[str, Any]], Settings] | None = None


def read_nothing(value: Any, keys: Mapping[str, Any]) -> Settings:
    """Reads no setting from a key, because `System.adjust` reads it together with others, or because it has none."""
    return {}


def write_only(name: str, setting: str, write: Callable[[Settings], Any], also: tuple[str, ...] = ()) -> Key:
    """Returns a key that an export writes, and that an import does not read by itself (`read_nothing`)."""
    return Key(name, setting, write=write, read=read_nothing, also=also)


def read_only(
    name: str,
    setting: str,
    read: Callable[[Any, Mapping[str, Any]], Settings] | None = None,
    values: Mapping[Any, Any] | None = None,
    also: tuple[str, ...] = (),
) -> Key:
    """Returns a key that an import reads and an export never writes."""
    return Key(name, setting, values, write=lambda settings: ABSENT, read=read, also=also)


def remark(settings: Settings, text: Message) -> None:
    """Adds a line to what an import reports as not carried over."""
    settings["remarks"] = [*settings.get("remarks", []), text]


def remark_value(settings: Settings, key: str, value: Any, remedy: Message | None = None) -> None:
    """Reports a value of a known key that is not carried over, with `remedy` if there is one."""
    line = Message("{key}={value}: no equivalent of this value", key=key, value=value)
    if remedy is not None:
        line = Message("{key}={value}: no equivalent of this value; {remedy}", key=key, value=value, remedy=remedy)
    remark(settings, line)


class PlanSpaceLimit(NamedTuple):
    """The plans of one mode of a system. `fields` are the allowed values by field of `Plan`; a field that is not named
    must have its default. `why` names the mode. `rule` returns why a plan of the mode is refused, '' if it is not."""

    why: str
    fields: Mapping[str, Any]
    rule: Callable[[Plan], str] = lambda plan: ""

    def allowed(self, name: str) -> Any:
        """Returns the allowed values of a field, or ANY."""
        return self.fields.get(name, (Plan.model_fields[name].default,))

    def violations(self, plan: Plan) -> list[str]:
        """Returns the fields of a plan with values that are not allowed. Fields that have no effect are left out, such
        as the schedule without a pipeline."""
        idle = {"version", "bucket"}
        for degree, fields in IDLE_FIELDS.items():
            idle |= set(fields) if getattr(plan, degree) <= (degree != "zero") else set()
        return [
            name
            for name in Plan.model_fields
            if name not in idle and (allowed := self.allowed(name)) is not ANY and getattr(plan, name) not in allowed
        ]


class NumericsNote(NamedTuple):
    """A difference of the numerics of a system. `source` is the file of the public repository `repository`, or of that
    of the system."""

    text: Message
    source: str
    repository: str = ""


class System(NamedTuple):
    """Another training system.

    `keys` is the table of its keys. `limits` are the plans that it runs. `write` returns the files of an export from
    the keys and the settings. `framework` is the name of its profile in the planner (planner/validation/frameworks.py).
    `version` is the version whose keys are read and written. `workload` are the values of workload settings that it
    has; other settings have every value. `renamed` are keys of older versions, with the keys that replace them.
    `open_arguments`: whether scripts of the user may add options to the command line. `defaults` are the values of
    settings that no key states, beyond the defaults of the keys.
    """

    name: str
    title: str
    repository: str
    version: str
    keys: tuple[Key, ...]
    limits: tuple[PlanSpaceLimit, ...]
    write: Callable[[Mapping[str, Any], Settings], dict[str, str]]
    framework: str
    needs_sizes: bool = False
    workload: Mapping[str, tuple[Any, ...]] = {}
    numerics: tuple[NumericsNote, ...] = ()
    renamed: Mapping[str, str] = {}
    open_arguments: bool = False
    defaults: Mapping[str, Any] = {}
    adjust: Callable[[Settings, Mapping[str, Any]], None] = lambda settings, keys: None

    @property
    def own_keys(self) -> frozenset[str]:
        """Returns the keys of the table, with their other spellings."""
        return frozenset(name for key in self.keys for name in (key.name, *key.also))

    @property
    def optional_keys(self) -> frozenset[str]:
        """Returns the keys that an export writes and that may be left out with the same meaning for the plan."""
        return frozenset(
            key.name
            for key in self.keys
            for value in (key.values or {}).values()
            if isinstance(value, OneOf) and value[0] is not ABSENT and any(each is ABSENT for each in value)
        )

    def limit_of(self, plan: Plan) -> PlanSpaceLimit:
        """Returns the limit from which a plan differs in the fewest fields."""
        return min(self.limits, key=lambda limit: (len(limit.violations(plan)), bool(limit.rule(plan))))


def encode(system: System, settings: Settings) -> dict[str, Any]:
    """Returns the keys of `system` with which it has `settings`. A key with its default is left out, unless the table
    says otherwise."""
    found: dict[str, Any] = {}
    for key in system.keys:
        if key.write is not None:
            value = key.write(settings)
        elif settings.get(key.setting) is None:
            continue
        else:
            ours = settings[key.setting]
            value = ours if key.values is None else written(key.values.get(ours, ABSENT))
        if value is not ABSENT and (key.always or key.default is None or value != key.default):
            found[key.name] = value
    return found


class DecodedKeys(NamedTuple):
    """The settings that the keys of a system determine. `unknown_values` are the keys with a value that the table does
    not have."""

    settings: Settings
    unknown_values: tuple[str, ...]


def decode(system: System, keys: Mapping[str, Any], given: Mapping[str, Any]) -> DecodedKeys:
    """Returns the settings that `keys` determine in `system`. `given` are settings that are known already, such as the
    number of devices of a launch command.

    Keys that are present determine the settings first. Absent keys choose among the values that remain possible.

    Raises: InputError if keys contradict each other.
    """
    settings: Settings = dict(given)
    candidates: dict[str, tuple[list[Any], str]] = {}
    absent: list[tuple[str, list[Any]]] = []
    unknown: list[str] = []
    for key in system.keys:
        name = next((name for name in (key.name, *key.also) if name in keys and keys[name] not in ("auto", None)), None)
        if name is not None and isinstance(keys[name], str) and "$" in keys[name]:
            unknown.append(name)
        elif key.read is not None:
            settings |= key.read(keys[name], keys) if name is not None else {}
        elif name is None:
            absent.append((key.setting, _candidates(key, ABSENT)))
        elif not (values := _candidates(key, keys[name])):
            unknown.append(name)
        else:
            before, other = candidates.get(key.setting, (values, name))
            if not (after := [value for value in before if value in values]):
                raise InputError(
                    Message(
                        "{first} and {second} contradict each other in {system}: no {setting} has both values",
                        first=_shown(other, keys),
                        second=_shown(name, keys),
                        system=system.title,
                        setting=key.setting,
                    )
                )
            candidates[key.setting] = after, name
    for setting, values in absent:
        before, name = candidates.get(setting, (values, ""))
        candidates[setting] = [value for value in before if value in values] or before, name
    settings |= {name: values[0] for name, (values, _) in candidates.items() if values and name not in settings}
    system.adjust(settings, keys)
    return DecodedKeys({**system.defaults, **settings}, tuple(unknown))


def _candidates(key: Key, value: Any) -> list[Any]:
    """Returns our values that a value of a key may stand for. For an absent key, an empty list means that it says
    nothing."""
    if value is ABSENT and key.default is not None:
        value = key.default
    if key.values is None:
        number = isinstance(value, int) or (isinstance(value, float) and key.setting not in INTEGER_SETTINGS)
        usable = number or key.setting in TEXT_SETTINGS
        return [value] if value is not ABSENT and usable else []
    return [
        ours
        for ours, theirs in key.values.items()
        if any(each is value or _equal(each, value) for each in readings(theirs))
    ]


def _equal(theirs: Any, value: Any) -> bool:
    if theirs is ABSENT or value is ABSENT:
        return False
    if isinstance(theirs, str) and isinstance(value, str):
        return theirs.lower() == value.lower()
    return bool(theirs == value) and isinstance(theirs, bool) == isinstance(value, bool)


def _shown(name: str, keys: Mapping[str, Any]) -> str:
    """Returns a key with its value, as a message names it."""
    return name if keys[name] is True else f"{name}={keys[name]}"
